"""The generated kernels, executed for all ranks and compared with the reference."""

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mhcgen import reference
from mhcgen.build import write_files
from mhcgen.emulator.errors import DeadlockError, MemoryFaultError
from mhcgen.emulator.package import (
    EmulatedPackage,
    EmulatedRanks,
    HostCode,
    Routed,
    Streams,
    Tensor,
    Weights,
    compile_ptx,
    host_code,
    load_package,
    marshalled,
)
from mhcgen.plan import Plan, make_plan
from mhcgen.render import kernel_rows, render
from mhcgen.resources import resource
from mhcgen.spec_file import load_spec
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import as_numpy, as_torch, kernels_of, run
from mhcgen.verify.subject import Subject
from tests.emulator.conftest import Load

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
TRANSPORTS = ("multicast", "unicast")
SPECS = ("glm53", "glm53_tp2", "glm53_tp8")
GROUPED = 17
"""Tokens of a call of two a cluster, the last of which has one, on every target."""


def plan_named(name: str) -> Plan:
    """A plan of specs/; the flagship on eight ranks besides."""
    path = resource("specs") / f"{name.removesuffix('_tp8')}.yaml"
    spec = load_spec(path).spec
    if name.endswith("_tp8"):
        parallel = spec.parallel.model_copy(update={"tp": 8})
        spec = spec.model_copy(update={"name": name, "parallel": parallel})
    return make_plan(spec)


def some_kernels(plan: Plan) -> list[str]:
    """All kernels but most grouped boundaries, which are much alike."""
    rows = kernel_rows(plan.targets[0])
    return [row.name for row in rows if row.token_group in (None, 1, 2)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_every_output(load: Load, name: str, arch: str) -> None:
    plan = plan_named(name)
    package = load(plan, arch, some_kernels(plan))
    for transport in plan.transports:
        for tokens in [(1, 3, 3, 3, 3, 3, 3), (GROUPED,)]:
            case = Case(arch, transport, tokens, seed=len(tokens) + plan.tp)
            outcome = run(package, case)
            assert outcome.ok, (outcome.errors, outcome.problems)


def test_what_the_compiler_emits_for_sm_120a(tmp_path: Path, narrow_plan: Plan) -> None:
    """The kernels of sm_90a, compiled for a target that specs need not know."""
    folder, ptx = tmp_path / narrow_plan.name, tmp_path / "ptx"
    files = {
        path: text.replace("sm_90a", "sm_120a") if path.suffix != ".yaml" else text
        for path, text in render(narrow_plan).items()
    }
    write_files(folder, files)
    cases = [Case("sm_120a", "unicast", (m,) * 7, seed=m) for m in (1, 5)]
    compile_ptx(folder, ["sm_120a"], ptx, kernels_of(folder, cases))
    package = load_package(folder, "sm_120a", ptx)
    as_sm_90a = dataclasses.replace(package, arch="sm_90a")
    for case in cases:
        outcome = run(as_sm_90a, dataclasses.replace(case, arch="sm_90a"))
        assert outcome.ok, (outcome.errors, outcome.problems)


def prepared(
    package: EmulatedPackage, tokens: int, seed: int | None = None
) -> tuple[EmulatedRanks, reference.Inputs, Streams, Weights]:
    """Ranks that have published, and what the boundary takes."""
    plan = package.plan
    inputs = reference.random_inputs(tokens, plan.hidden, plan.hc, plan.tp, seed=7)
    ranks = EmulatedRanks(package, "unicast", seed)

    def uploaded(*names: str) -> list[Tensor]:
        return [ranks.tensor(n, as_numpy(getattr(inputs, n))) for n in names]

    streams = Streams(*uploaded("residual", "post", "comb"))
    weights = Weights(*uploaded("fn", "scale", "base", "norm_weight"))
    ranks.publish(ranks.tensor("x", *map(as_numpy, inputs.parts)))
    return ranks, inputs, streams, weights


def test_a_boundary_takes_half_a_second_at_most(load: Load) -> None:
    """One rank, three tokens, hidden 4096: CPU time of the second run."""
    plan = plan_named("glm53")
    package = load(plan, "sm_90a", some_kernels(plan))
    for _ in range(2):
        ranks, inputs, streams, weights = prepared(package, 3)
        ranks.run()
        start = time.process_time()
        output = ranks.consume(streams, weights)
        ranks.run()
        seconds = (time.process_time() - start) / plan.tp
    assert seconds < 0.5
    expected = inputs.boundary(Subject.of_plan(plan).constants)
    residual = as_torch(output.streams.residual.read(0))
    assert reference.bits_equal(residual, expected.residual)


def test_every_payload_passes_but_minus_zero(load: Load, narrow_plan: Plan) -> None:
    ranks = EmulatedRanks(load(narrow_plan, "sm_90a"), "multicast")
    patterns = np.arange(1 << 16).astype(np.uint16).reshape(-1, 8, narrow_plan.hidden)
    for rows in patterns[[0, 7, 8, 15]]:
        ranks = EmulatedRanks(load(narrow_plan, "sm_90a"), "multicast")
        ranks.publish(ranks.tensor("x", rows))
        ranks.run()
        sent = reference.sanitize(as_torch(rows))
        for rank in range(narrow_plan.tp):
            for slot in ranks.mailbox(rank, 0, 8):
                assert np.array_equal(slot, as_numpy(sent))


def test_a_boundary_without_a_publish_hangs(load: Load, narrow_plan: Plan) -> None:
    """The report names who polls, where."""
    package = load(narrow_plan, "sm_90a")
    ranks, _, streams, weights = prepared(package, 2)
    ranks.run()
    ranks.consume(streams, weights)
    ranks.run()
    ranks.consume(streams, weights)
    with pytest.raises(DeadlockError, match="polls memory that does not change") as e:
        ranks.run()
    assert "in mhcgen_narrow_boundary_1, rank 0, block (0, 0, 0)" in str(e.value)


def test_rows_beyond_the_call_are_out_of_bounds(load: Load, narrow_plan: Plan) -> None:
    """A boundary that is told of more tokens than there are is stopped."""
    package = load(narrow_plan, "sm_90a")
    ranks, _, streams, weights = prepared(package, 1)
    ranks.run()
    ranks.consume(streams.first(2), weights)
    with pytest.raises(MemoryFaultError, match=r"out of bounds: .* of \w+ of rank"):
        ranks.run()


def test_absent_experts_are_never_read(load: Load, narrow_plan: Plan) -> None:
    """Finalize without any expert here reads no row: there is none to read."""
    package = load(narrow_plan, "sm_90a")
    ranks = EmulatedRanks(package, "unicast")
    nothing = np.zeros((0, narrow_plan.hidden), np.uint16)
    ranks.publish_finalize(
        Routed(
            ranks.tensor("gemm2_permuted", nothing),
            ranks.tensor("expert_weights", np.full((2, 2), np.nan, np.float32)),
            ranks.tensor("expanded_idx", np.full((2, 2), -1, np.int32)),
            None,
        )
    )
    ranks.run()
    assert not ranks.mailbox(0, 0, 2).any()


def test_host_code(load: Load, narrow_plan: Plan) -> None:
    package = load(narrow_plan, "sm_90a")
    assert package.of_kernel("publish_unicast") == HostCode(
        ("x", "mailboxes", "state", "rank"), True
    )
    assert not package.of_kernel("mixes").dependent
    boundaries = [package.of_kernel(f"boundary_3{s}") for s in ("", "_unicast")]
    assert boundaries[0] is boundaries[1] and boundaries[0].arguments[0] == "x"
    with pytest.raises(ValueError, match=r"not enough values"):
        host_code("def other(): pass")


def test_parameters_must_be_those_of_the_source(load: Load, narrow_plan: Plan) -> None:
    package = load(narrow_plan, "sm_90a")
    program = package.programs["publish_unicast"]
    with pytest.raises(ValueError, match="has 4 parameters, and its source names rank"):
        marshalled(program, HostCode(("rank",), True), {"rank": 0}, 0)
    with pytest.raises(ValueError, match=r"parameter a .* has 16 bytes, not 4"):
        values = {"a": 1, "b": 2, "c": 3, "d": 4}
        marshalled(program, HostCode(tuple(values), True), values, 0)


def test_bf16_bits_are_kept_on_the_way() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    assert np.array_equal(as_numpy(as_torch(bits)), bits)
    assert as_torch(np.zeros(1, np.float32)).dtype == torch.float32
