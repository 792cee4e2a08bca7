"""Timing: graphs of many calls, replayed in turn, so that drift meets all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

CALLS = 100  # a graph
REPLAYS = 21
WARM_UPS = 2

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements, and where the outer tenths begin."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Takes at least one measurement."""
        return cls(*(quantile(values, share) for share in (0.5, 0.1, 0.9)))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def interleaved(
    timers: Mapping[Name, Callable[[], float]],
    replays: int = REPLAYS,
    warm_ups: int = WARM_UPS,
) -> dict[Name, Spread]:
    """Runs all timers in turn, again and again, and sums up each one's times.

    Args:
        timers: What gives one time of each contender.
        replays: Times of each that count.
        warm_ups: Times of each, before those, that do not.
    """
    times: dict[Name, list[float]] = {name: [] for name in timers}
    for turn in range(warm_ups + replays):
        for name, timer in timers.items():
            time = timer()
            if turn >= warm_ups:
                times[name].append(time)
    return {name: Spread.of(values) for name, values in times.items()}


@dataclass(frozen=True)
class Recording:
    """A graph of calls, and what it needs.

    Attributes:
        graph: The graph.
        call: What was captured. It holds the tensors whose addresses the graph has:
            symmetric memory is unmapped when its tensor goes, and other memory is given
            to the next one who asks.
    """

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]


def capture(call: Callable[[], object]) -> Recording:
    """A graph of CALLS calls, after a few outside of it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    torch.cuda.synchronize()
    return Recording(graph, call)


def replay(recording: Recording) -> float:
    """Microseconds a call of one replay, begun together on all ranks."""
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    recording.graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1000 / CALLS


def difference(whole: Recording, part: Recording) -> float:
    """What a call of one takes beyond a call of the other, in microseconds."""
    return replay(whole) - replay(part)
