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
    x, shared = inputs.x, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    whole = timed([("call", lambda: boundary(x, *shared)), ("join", boundary.join)])
    checks, kernel = boundary._checks, launcher.call_kernel(inputs.m)
    second, side = launcher.boundary_kernel(inputs.m), boundary._side
    steps: list[Step] = [
        (
            "checks",
            (lambda: checks.call(x, shared))
            if kernel is None
            else (lambda: checks.plain((x,), shared)),
        ),
        ("outputs", lambda: (launcher.outputs(inputs.m), launcher.mix(inputs.m))),
    ]
    if kernel is None:
        steps += [
            ("publish", lambda: launcher.publish(x)),
            ("boundary", lambda: launcher.boundary(second, shared, outputs, mix)),
        ]
    else:
        steps.append(
            ("boundary", lambda: launcher.call(kernel, x, shared, outputs, mix))
        )
    if mix is not None:
        steps.append(("mixes", lambda: launcher.mixes(mix, shared, outputs, side)))
    return {WHOLE: sum(whole.values())} | whole | timed(steps)


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
