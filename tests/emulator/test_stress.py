"""Several calls in flight under the adversary, and mutants that it must catch."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from mhcgen.emulator.machine import Program
from mhcgen.emulator.package import EmulatedPackage
from mhcgen.emulator.ptx import Instruction
from mhcgen.plan import Plan
from mhcgen.verify.on_cpu import run
from tests.emulator.conftest import ARCH, SEEDS, Load, stress_cases

AT_ONCE = 5


@pytest.mark.parametrize("transport", ["multicast", "unicast"])
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_seeds(load: Load, narrow_plan: Plan, transport: str, first: int) -> None:
    package = load(narrow_plan, ARCH)
    for case in stress_cases(narrow_plan, transport, first, AT_ONCE):
        assert len(case.tokens) == 6
        outcome = run(package, case)
        assert outcome.ok, (case, outcome.errors, outcome.problems)


Change = Callable[[Instruction], Instruction | None]


def opcode(old: str, new: str | None = None, nth: int | None = None) -> Change:
    """Deletes the instructions of an opcode, or gives them another one."""
    count = 0

    def change(instruction: Instruction) -> Instruction | None:
        nonlocal count
        if instruction.opcode != old:
            return instruction
        count += 1
        if nth is not None and count != nth:
            return instruction
        return new and dataclasses.replace(instruction, opcode=new)

    return change


def mutant(package: EmulatedPackage, kernels: str, change: Change) -> EmulatedPackage:
    """The package with changed instructions in some kernels."""
    programs = dict(package.programs)
    changed = 0
    for name, program in package.programs.items():
        if not re.fullmatch(kernels, name):
            continue
        kernel = program.kernel
        labels, instructions = dict(kernel.labels), []
        for place, instruction in enumerate(kernel.instructions):
            after = change(instruction)
            changed += after is not instruction
            if after is not None:
                instructions.append(after)
                continue
            for label, at in kernel.labels.items():
                labels[label] -= at > place
        altered = dataclasses.replace(kernel, labels=labels, instructions=instructions)
        programs[name] = Program.of(altered)
    assert changed
    return dataclasses.replace(package, programs=programs)


def unfenced(instruction: Instruction) -> Instruction | None:
    """Neither a fence nor an arrival tells the peers of the mbarriers."""
    if instruction.opcode == "fence.mbarrier_init.release.cluster":
        return None
    relax = opcode("barrier.cluster.arrive", "barrier.cluster.arrive.relaxed")
    return relax(instruction)


CONSUMES, PUBLISHES = "boundary_1", "boundary_1_unicast"
MUTANTS = {
    "no barrier before the block counts itself": (PUBLISHES, opcode("bar.sync", nth=2)),
    "no barrier before the block's sums": (PUBLISHES, opcode("bar.sync", nth=3)),
    "no barrier before the block's squares": (CONSUMES, opcode("bar.sync", nth=4)),
    "mbarriers that peers need not see": (PUBLISHES, unfenced),
    "no wait for the copies": (CONSUMES, opcode("cp.async.wait_all")),
    "rows taken before they arrive": (CONSUMES, opcode("setp.eq.b64", "setp.ge.u64")),
    # The stores before it are of the four streams of a token.
    "slots not armed again": (CONSUMES, opcode("st.global.b32", nth=5)),
    "minus zero not replaced": ("publish.*", opcode("xor.b32", "or.b32")),
    "minus zero not replaced in one launch": (PUBLISHES, opcode("xor.b32", "or.b32")),
    "no wait in one launch": (PUBLISHES, opcode("griddepcontrol.wait")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(load: Load, narrow_plan: Plan, name: str) -> None:
    kernels, change = MUTANTS[name]
    package = mutant(load(narrow_plan, ARCH), kernels, change)
    outcomes = (
        run(package, case) for case in stress_cases(narrow_plan, "unicast", 0, SEEDS)
    )
    assert any(not outcome.ok for outcome in outcomes)
