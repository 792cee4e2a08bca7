"""Bugs planted in the kernels of other types, outputs and ends: each must be caught."""

import functools

import pytest

from mhcgen import reference
from mhcgen.emulator.package import EmulatedPackage
from mhcgen.plan import Plan, make_plan
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import run
from tests.emulator.conftest import Load
from tests.emulator.planting import Mutant, Plant
from tests.variants import VARIANTS

BOUNDARY = ("boundary_3_unicast",)
MUTANTS = {
    "fma_in_registers": [
        Mutant(
            "lanes take each other's sums",
            BOUNDARY,
            "projection_fma.py",
            "(16, 8, 4, 2, 1)",
            "(8, 16, 4, 2, 1)",
        ),
        Mutant(
            "rows of an octet are reversed",
            BOUNDARY,
            "projection_fma.py",
            "octet * 8 + lane % 8",
            "octet * 8 + 7 - lane % 8",
        ),
        Mutant(
            "squares of all tokens go to the first",
            BOUNDARY,
            "projection_fma.py",
            "partials[index, SQUARES] = square",
            "partials[0, SQUARES] = square",
        ),
    ],
    "fp16_and_fp32": [
        Mutant(
            "half of each fragment of fn is read twice",
            BOUNDARY,
            "fn_rows.py",
            "ptx.load_constant(place + FRAGMENT_BYTES)",
            "ptx.load_constant(place)",
        ),
        Mutant(
            "of a lane's words, only the first is re-armed",
            BOUNDARY,
            "boundary.py",
            "[SENTINEL_PAIR] * LANE_WORDS",
            "[SENTINEL_PAIR]",
        ),
        Mutant(
            "of a lane's words, only the first is stored",
            BOUNDARY,
            "boundary.py",
            "normalize(c, rstds[index], share.norm_weight),",
            "normalize(c, rstds[index], share.norm_weight)[:1],",
        ),
    ],
    "fp16": [
        Mutant(
            "FP16 pairs are swapped",
            BOUNDARY,
            "ptx.py",
            "mov.b32 {low, high}, $2",
            "mov.b32 {high, low}, $2",
        ),
    ],
    "plus_one": [
        Mutant(
            "one is not added",
            BOUNDARY,
            "steps.py",
            "ptx.add(weight, Float32(1.0))",
            "weight",
        ),
        Mutant(
            "idle lanes store what they have",
            BOUNDARY,
            "boundary.py",
            "share.own if index == 0 else share.own & (index < call.count)",
            "True if index == 0 else index < call.count",
        ),
        Mutant(
            "idle lanes project the last fragment",
            BOUNDARY,
            "boundary.py",
            "[zero_unless(share.own, words) for words in new]",
            "new",
        ),
    ],
    "delayed": [
        Mutant(
            "the norm takes the squares of the streams",
            BOUNDARY,
            "boundary.py",
            "call.sums[token, NORM_SQUARES, None]",
            "call.sums[token, SQUARES, None]",
        ),
        Mutant(
            "all tokens take the first one's pre-mix",
            BOUNDARY,
            "boundary.py",
            "Int64(token * HC + number - HC - HC * HC)",
            "Int64(call.first * HC + number - HC - HC * HC)",
        ),
        Mutant(
            "the residual mix weighs the collapse",
            BOUNDARY,
            "boundary.py",
            "self.weights_of(weights, index, HC + 1)",
            "self.weights_of(weights, index, HC)",
        ),
        Mutant(
            "the last sum stays behind",
            BOUNDARY,
            "boundary.py",
            "number <= LAST_SUM",
            "number < LAST_SUM",
        ),
        Mutant(
            "the next pre-mix has the scale of post",
            ("mixes",),
            "mixes.py",
            "scale[min(number // HC, 2)]",
            "scale[min(max(number // HC, 1), 2)]",
        ),
        Mutant(
            "the mean is a sum",
            BOUNDARY,
            "boundary.py",
            "Float32(1.0 / HC)",
            "Float32(1.0)",
        ),
    ],
    "ends": [
        Mutant(
            "the exit leaves the generation",
            ("exit",),
            "exit.py",
            "(generation + 1) % GENERATIONS",
            "generation % GENERATIONS",
        ),
        Mutant(
            "the exit re-arms one rank",
            ("exit",),
            "exit.py",
            "for _, place in places:",
            "for _, place in places[:1]:",
        ),
        Mutant(
            "fragments have arrived once the first words have",
            ("exit",),
            "steps.py",
            "while holds_sentinel(words):",
            "while holds_sentinel(words[::count]):",
        ),
        Mutant(
            "the entry multiplies one stream's columns",
            ("entry",),
            "entry.py",
            "stream * FN_STREAM_BYTES",
            "0 * FN_STREAM_BYTES",
        ),
    ],
    "ends_by_head": [
        Mutant(
            "blocks of the ends do not meet",
            ("exit",),
            "ends.py",
            "    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n",
            "",
        ),
        Mutant(
            "the head has no scale",
            ("exit",),
            "exit.py",
            "head_scale[0]",
            "Float32(1.0)",
        ),
    ],
}


@functools.cache
def plan_of(name: str) -> Plan:
    """A variant whose mailboxes are written by unicast alone, without experts."""
    spec = next(plan.spec for plan in VARIANTS if plan.name == name)
    unicast = spec.parallel.model_copy(update={"transports": ("unicast",)})
    changes = {"name": f"planted_{name}", "parallel": unicast, "moe": None}
    return make_plan(spec.model_copy(update=changes))


def loaded(load: Load, name: str) -> EmulatedPackage:
    plan = plan_of(name)
    return load(plan, plan.targets[0].arch)


def is_right(package: EmulatedPackage) -> bool:
    """Whether all is well in calls whose last token group has two, or at the ends."""
    cases = [Case(package.arch, "unicast", (5,) * 3, seed=0)]
    if package.plan.ends:
        every = (3,) * len(reference.VARIANTS)
        cases = [Case(package.arch, "unicast", every, seed=1)]
        cases += [
            Case(package.arch, "unicast", (4, 1, 3), seed, stress=True)
            for seed in range(3)
        ]
    return all(run(package, case).ok for case in cases)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_original_is_right(load: Load, name: str) -> None:
    assert is_right(loaded(load, name))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [(name, mutant) for name, mutants in MUTANTS.items() for mutant in mutants],
    ids=str,
)
def test_mutant_is_caught(load: Load, plant: Plant, name: str, mutant: Mutant) -> None:
    assert not is_right(plant(mutant, loaded(load, name)))
