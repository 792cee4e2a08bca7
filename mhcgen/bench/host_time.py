"""The host's part of an eager call: what Python and the launches take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mhcgen.bench.contenders import Inputs

CALLS = 200
ROUNDS = 5
WHOLE = "call and join"

Step = tuple[str, Callable[[], object]]


def host_time(inputs: Inputs) -> dict[str, float]:
    """Microseconds of the host for one eager call, whole and step by step.

    The device may lag behind: with nothing between the calls it is the faster one.
    """
    boundary, launcher = inputs.package.boundary, inputs.package.launcher
    arguments = (inputs.x, *inputs.shared)
    checks, kernel = boundary._checks, launcher.boundary_kernel(inputs.m)
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    whole = timed(
        [
            ("call", lambda: boundary(*arguments)),
            ("join", boundary.join),
        ]
    )
    whole_kernel = launcher.call_kernel(inputs.m)
    launches: list[Step] = [
        ("publish", lambda: launcher.publish(inputs.x)),
        (
            "boundary",
            lambda: launcher.boundary(kernel, inputs.shared, outputs, mix),
        ),
    ]
    if whole_kernel is not None:
        launches = [
            (
                "boundary",
                lambda: launcher.call(
                    whole_kernel, inputs.x, inputs.shared, outputs, mix
                ),
            )
        ]
    steps = timed(
        [
            ("checks of x", lambda: checks.x(inputs.x)),
            ("other checks", lambda: checks.boundary(inputs.m, inputs.shared)),
            ("outputs", lambda: (launcher.outputs(inputs.m), launcher.mix(inputs.m))),
            *launches,
        ]
    )
    return {WHOLE: sum(whole.values())} | whole | steps


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
