"""The host's part of an eager call: what Python and the launches take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mhcgen.bench.contenders import Inputs
from mhcgen.runtime.arguments import BoundaryOutput

CALLS = 200
ROUNDS = 5
WHOLE = "call"
GIVEN = "call, outputs given"

Step = tuple[str, Callable[[], object]]


def host_time(inputs: Inputs) -> dict[str, float]:
    """Microseconds of the host for one eager call, whole and step by step.

    Whole calls follow each other as in a model: each waits for the mixes of the last.
    The device may lag behind: with nothing between the calls it is the faster one.
    """
    boundary, launcher = inputs.package.boundary, inputs.package.launcher
    x, shared = inputs.x, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    times = {
        **timed([(WHOLE, lambda: boundary(x, *shared))]),
        **timed([(GIVEN, lambda: boundary(x, *shared, out=outputs))]),
        **timed(steps_of(inputs, outputs, mix)),
    }
    boundary.join()
    return times


def steps_of(
    inputs: Inputs, outputs: BoundaryOutput, mix: torch.Tensor | None
) -> list[Step]:
    """What a call does, in order."""
    boundary, launcher = inputs.package.boundary, inputs.package.launcher
    x, shared = inputs.x, inputs.shared
    checks, side, m = boundary._checks, boundary._side, inputs.m
    allocate: Step = ("outputs", lambda: launcher.outputs(m))
    kernel, second = launcher.call_kernel(m), launcher.boundary_kernel(m)
    if kernel is None:
        return [
            ("checks", lambda: checks.call(x, shared)),
            allocate,
            ("publish", lambda: launcher.publish(x)),
            (
                "boundary",
                lambda: launcher.boundary(second, shared, outputs, mix, side),
            ),
        ]
    rows = launcher.published(x)
    return [
        ("checks", lambda: checks.plain((x,), shared, None)),
        ("checks, outputs given", lambda: checks.plain((x,), shared, outputs)),
        allocate,
        (
            "boundary",
            lambda: launcher.call(kernel, rows, shared, outputs, mix, side),
        ),
    ]


def timed(steps: Sequence[Step]) -> dict[str, float]:
    """Runs steps one after the other, again and again; microseconds of each."""
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        totals = [0.0] * len(steps)
        torch.cuda.synchronize()
        for _ in range(CALLS):
            for index, (_, step) in enumerate(steps):
                begin = time.perf_counter()
                step()
                totals[index] += time.perf_counter() - begin
        rounds.append([total / CALLS * 1e6 for total in totals])
    torch.cuda.synchronize()
    medians = map(statistics.median, zip(*rounds, strict=True))
    return {name: value for (name, _), value in zip(steps, medians, strict=True)}
