"""Kernels of every type, output and end, executed and compared with the reference."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mhcgen import reference
from mhcgen.emulator.package import EmulatedRanks, Streams
from mhcgen.plan import Plan
from mhcgen.verify.cases import Case
from mhcgen.verify.inputs import plain_call
from mhcgen.verify.on_cpu import as_numpy, run, weights_of
from mhcgen.verify.subject import Subject
from tests.emulator.conftest import Load
from tests.shapes import SHAPES
from tests.variants import VARIANTS

IN_CI = (
    "fp16_and_fp32",
    "plus_one",
    "delayed",
    "tail",
    "ends",
    "ends_by_pre_mix",
    "ends_of_one_rank",
)
"""With the shapes they show every value; `make long` runs the others, too."""


def params(plans: Iterable[Plan]) -> list[Any]:
    return [
        pytest.param(
            plan, id=plan.name, marks=() if plan.name in IN_CI else pytest.mark.long
        )
        for plan in plans
    ]


def test_ci_runs_every_value() -> None:
    plans = [*SHAPES, *(plan for plan in VARIANTS if plan.name in IN_CI)]
    specs = [plan.spec for plan in plans]
    precisions = [spec.precision for spec in specs]
    assert {plan.hc for plan in plans} == {1, 2, 4, 8}
    assert {plan.tp for plan in plans} == {1, 2, 4, 8, 16}
    assert {plan.targets[0].cluster_size for plan in plans} >= {1, 2, 5, 7, 16}
    assert {plan.fn_home for plan in plans} == {"registers", "shared", "global"}
    assert {plan.projection for plan in plans} == {"tensor_cores", "fma"}
    assert {precision.activation for precision in precisions} == {"bf16", "fp16"}
    assert {precision.fn_weight for precision in precisions} == {"bf16", "fp32"}
    assert {spec.model.pre_mix for spec in specs} == {"fresh", "delayed"}
    assert {plan.norm_weight for plan in plans} == {"plain", "plus_one", "none"}
    assert {spec.mixes for spec in specs} == {"side_stream", "tail"}
    assert {spec.ends.entry for spec in specs} == {False, True}
    assert {plan.exit_by for plan in plans} == {None, "mean", "sigmoid", "pre_mix"}
    assert {plan.stream_mean for plan in plans} == {False, True}
    assert {spec.batch_invariant for spec in specs} == {False, True}
    assert {transport for plan in plans for transport in plan.transports} == {
        "multicast",
        "unicast",
        "local",
    }


@pytest.mark.parametrize("plan", params(VARIANTS))
def test_every_output(load: Load, plan: Plan) -> None:
    """One token, and a call whose last token group has two: every kind of input.

    Between boundaries, entries and exits where there are some.
    """
    (target,) = plan.targets
    package = load(plan, target.arch)
    calls = len(reference.VARIANTS)
    for transport, tokens in zip(plan.transports * 2, (1, 5), strict=False):
        outcome = run(package, Case(target.arch, transport, (tokens,) * calls, 3))
        assert outcome.ok, (outcome.errors, outcome.ends, outcome.problems)
        assert set(outcome.ends) == ends_of(plan)


STRESSED = ("fp16", "fp32_in_l2", "delayed", "delayed_trips", "delayed_fp16")


def ends_of(plan: Plan) -> set[str]:
    ends = {"entry": plan.spec.ends.entry, "exit": plan.exit_by is not None}
    return {name for name, is_there in ends.items() if is_there}


@pytest.mark.parametrize(
    "plan", params(plan for plan in VARIANTS if plan.name in STRESSED or plan.ends)
)
def test_calls_in_flight(load: Load, plan: Plan) -> None:
    """Each call takes the streams, and the pre-mix, of the call or entry before it."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    outcomes = [
        run(package, Case(target.arch, plan.transports[-1], (5, 4, 1, 3), seed, True))
        for seed in range(3)
    ]
    for outcome in outcomes:
        assert outcome.ok, (outcome.errors, outcome.ends, outcome.problems)
    assert set().union(*(outcome.ends for outcome in outcomes)) == ends_of(plan)


@pytest.mark.parametrize(
    "plan", params(plan for plan in VARIANTS if plan.spec.batch_invariant)
)
def test_a_token_has_the_same_bits_wherever_it_is(load: Load, plan: Plan) -> None:
    """Alone, in a group, first, last or between: the same on every rank, too."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    ranks = EmulatedRanks(package, "unicast")
    call = plain_call(Subject.of_plan(plan), 8, seed=9)
    pool, weights = call.inputs, weights_of(ranks, call)
    first: dict[str, np.ndarray] = {}
    kernels = set()
    for rows in ([0], [5, 0], [7, 0, 3], [0, 1, 2, 3], [6, 5, 4, 3, 2, 1, 0]):
        kernels.add(target.boundary_launch(len(rows)).kernel)
        each = {
            field.name: getattr(pool, field.name)[rows]
            for field in dataclasses.fields(Streams)
        }
        streams = Streams(
            *(ranks.tensor(name, as_numpy(tensor)) for name, tensor in each.items())
        )
        x = (as_numpy(part[rows]) for part in pool.parts)
        ranks.publish(ranks.tensor("x", *x))
        output = ranks.consume(streams, weights)
        ranks.run()
        place = rows.index(0)
        tensors = vars(output.streams) | {
            "layer_input": output.layer_input,
            "mix": output.mix,
            "stream_mean": output.stream_mean,
        }
        for name, tensor in tensors.items():
            for rank in range(plan.tp) if tensor else ():
                content = tensor.read(rank)[place]
                bits = content.view(f"u{content.itemsize}")
                assert np.array_equal(first.setdefault(name, bits), bits), (name, rows)
    assert len(kernels) == 2
