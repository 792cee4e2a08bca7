"""Tuning: which cluster size and which token groups serve a spec best on a device.

What is tried, in which order and what wins is decided here, from times that somebody
else measures: `mhcgen/bench/variants.py` does, on GPUs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mhcgen.architecture import Architecture
from mhcgen.console import show_table
from mhcgen.cost import predicted, waves
from mhcgen.errors import MhcgenError
from mhcgen.plan import (
    TOKEN_GROUPS,
    Plan,
    clusters_at_once,
    group_fault,
    legal_clusters,
    plan_target,
)
from mhcgen.spec import Target

PRUNE = 1.5  # times a cluster size's best prediction: what is slower is not tried
TIE = 0.01  # what is slower by less counts as equal; the smaller group is taken
FEW = (1, 2, 4, 8)


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to launch a boundary.

    Attributes:
        cluster_size: Thread blocks of a cluster.
        group: Tokens that a cluster takes together.
    """

    cluster_size: int
    group: int


@dataclass(frozen=True)
class Trial:
    """One candidate at one M.

    Attributes:
        m: Tokens of the call.
        candidate: What was tried.
        waves: How often the device fills, by the model.
        predicted: Microseconds by the model.
        measured: Microseconds; None where the time was up before.
    """

    m: int
    candidate: Candidate
    waves: int
    predicted: float
    measured: float | None = None


class Row(NamedTuple):
    """A row of the dispatch table: the token group of calls up to a size.

    The plan says whether the boundary publishes itself, which is faster where it can.
    """

    max_tokens: int
    group: int


@dataclass(frozen=True)
class Choice:
    """What won.

    Attributes:
        cluster_size: Thread blocks of a cluster.
        token_groups: The dispatch table, up to the capacity.
        times: Microseconds of each M that was measured, with this table.
    """

    cluster_size: int
    token_groups: tuple[Row, ...]
    times: Mapping[int, float]


@dataclass(frozen=True)
class Tuned:
    """What a run found.

    Attributes:
        plan: The plan of the spec as it was.
        arch: The architecture that was tuned.
        device: The device and the releases that the times belong to.
        trials: All that was tried.
        choice: What won.
    """

    plan: Plan
    arch: str
    device: str
    trials: tuple[Trial, ...]
    choice: Choice

    @property
    def targets(self) -> dict[str, Target]:
        """The targets of the tuned spec."""
        rows = [row._asdict() for row in self.choice.token_groups]
        tuned = {"cluster_size": self.choice.cluster_size, "token_groups": rows}
        return dict(self.plan.spec.targets) | {self.arch: Target.model_validate(tuned)}

    def show(self) -> None:
        """Prints what was tried, and the choice against the spec's own."""
        show_table(
            f"{self.plan.name}, {self.device}: microseconds a boundary",
            ("M", "cluster", "group", "waves", "predicted", "measured"),
            [
                (
                    trial.m,
                    trial.candidate.cluster_size,
                    trial.candidate.group,
                    trial.waves,
                    trial.predicted,
                    trial.measured,
                )
                for trial in self.trials
            ],
        )
        if any(trial.measured is None for trial in self.trials):
            print("-: not tried, --budget ran out")
        print()
        show_table(
            f"{self.arch}: the spec's choice and the best, clusters of "
            f"{self.choice.cluster_size}",
            ("M", "before", "best", "group"),
            [
                (m, self._before(m), time, self._group(m))
                for m, time in self.choice.times.items()
            ],
        )

    def _group(self, m: int) -> int:
        rows = self.choice.token_groups
        return next(row.group for row in rows if m <= row.max_tokens)

    def _before(self, m: int) -> float | None:
        own = own_candidate(self.plan, self.arch, m)
        return next(
            (t.measured for t in self.trials if (t.m, t.candidate) == (m, own)), None
        )


Timer = Callable[[int, Sequence[Candidate]], Mapping[Candidate, float]]
"""Measures candidates at one M: microseconds of each."""


def candidates(plan: Plan, architecture: Architecture) -> tuple[Candidate, ...]:
    """All candidates that the hardware can run, but for uneven clusters.

    Clusters that leave lanes idle are tried where there are no others.
    """
    legal = legal_clusters(plan, architecture)
    found = []
    for cluster_size in [size for size in legal if not plan.shares % size] or legal:
        shape = plan_target(plan, architecture, Target(cluster_size=cluster_size))
        found += [
            Candidate(cluster_size, group)
            for group in TOKEN_GROUPS
            if group <= plan.capacity and group_fault(shape, group) is None
        ]
    return tuple(found)


def tokens_to_try(plan: Plan, architecture: Architecture) -> list[int]:
    """The M at which winners may change: few tokens, and the ends of single waves."""
    ends = {
        clusters_at_once(architecture, candidate.cluster_size) * candidate.group
        for candidate in candidates(plan, architecture)
    }
    sizes = {*FEW, *ends, plan.capacity}
    return sorted(m for m in sizes if m <= plan.capacity)


def own_candidate(plan: Plan, arch: str, m: int) -> Candidate:
    """What a plan takes for a call of ``m`` tokens."""
    target = plan.target(arch)
    return Candidate(target.cluster_size, target.token_group(m).group)


def trials_at(
    m: int, architecture: Architecture, wanted: Sequence[Candidate], own: Candidate
) -> list[Trial]:
    """What is worth trying at one M, the most promising first.

    Each cluster size keeps what the model puts near its own best: the model orders
    groups better than it orders cluster sizes. The plan's own candidate is always
    tried.
    """
    trials = [
        Trial(
            m,
            candidate,
            waves(architecture, candidate.cluster_size, candidate.group, m),
            predicted(architecture, candidate.cluster_size, candidate.group, m),
        )
        for candidate in sorted({*wanted, own})
        # A group beyond the call leaves the rest of its cluster's work empty.
        if candidate.group <= m or candidate == own
    ]
    best: dict[int, float] = {}
    for trial in trials:
        size = trial.candidate.cluster_size
        best[size] = min(best.get(size, math.inf), trial.predicted)
    kept = [
        trial
        for trial in trials
        if trial.predicted <= PRUNE * best[trial.candidate.cluster_size]
        or trial.candidate == own
    ]
    return sorted(kept, key=lambda trial: (trial.predicted, trial.candidate))


def search(
    trials: Mapping[int, Sequence[Trial]],
    timer: Timer,
    has_time: Callable[[], bool],
    advance: Callable[[str], None] = lambda name: None,
) -> list[Trial]:
    """Measures trials M by M, until all are done or the time is up.

    Args:
        trials: What to try, by M.
        timer: Measures.
        has_time: Asked before each M.
        advance: Called after each M, with its name.
    """
    done: list[Trial] = []
    for m, planned in trials.items():
        times: Mapping[Candidate, float] = {}
        if has_time():
            times = timer(m, [trial.candidate for trial in planned])
        done += [
            Trial(m, t.candidate, t.waves, t.predicted, times.get(t.candidate))
            for t in planned
        ]
        advance(f"M={m}")
    return done


def choose(trials: Sequence[Trial], capacity: int) -> Choice:
    """The cluster size with the least geometric mean of times, and its groups.

    Raises:
        MhcgenError: Nothing was measured.
    """
    choices = [
        _with_cluster(size, trials, capacity)
        for size in sorted({trial.candidate.cluster_size for trial in trials})
    ]
    measured = [choice for choice in choices if choice.times]
    if not measured:
        raise MhcgenError("--budget ran out before anything was measured: give more")
    most = max(len(choice.times) for choice in measured)
    complete = [choice for choice in measured if len(choice.times) == most]
    return min(complete, key=lambda choice: _mean(choice.times.values()))


def _mean(times: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, times)))


def _with_cluster(size: int, trials: Sequence[Trial], capacity: int) -> Choice:
    """The best table of one cluster size: at each M its best group, or a tied one."""
    rows: list[Row] = []
    times: dict[int, float] = {}
    for m in sorted({trial.m for trial in trials}):
        found = {
            trial.candidate.group: trial.measured
            for trial in trials
            if trial.m == m
            and trial.candidate.cluster_size == size
            and trial.measured is not None
        }
        if not found:
            continue
        tied = min(found.values()) * (1 + TIE)
        group = min(group for group, time in found.items() if time <= tied)
        if rows and found.get(rows[-1].group, math.inf) <= tied:
            group = rows[-1].group
        times[m] = found[group]
        if rows and rows[-1].group == group:
            rows.pop()
        rows.append(Row(m, group))
    if rows:
        rows[-1] = Row(capacity, rows[-1].group)
    return Choice(size, tuple(rows), times)
