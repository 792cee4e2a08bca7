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
from mhcgen.errors import MhcgenError
from mhcgen.plan import (
    TOKEN_GROUPS,
    Plan,
    TargetPlan,
    group_fault,
    legal_clusters,
    plan_target,
    shared_octets,
)
from mhcgen.spec import Target

PRUNE = 1.3  # times a cluster size's best prediction: what is slower is not tried
TIE = 0.01  # what is slower by less counts as equal; the smaller group is taken
FEW = (1, 2, 4, 8)


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to launch a boundary.

    Attributes:
        cluster_size: Thread blocks of a cluster.
        group: Tokens that a cluster takes together.
        shared_octets: Octets of fn's rows in shared memory that registers could hold:
            two blocks then share a multiprocessor.
    """

    cluster_size: int
    group: int
    shared_octets: int = 0

    @property
    def blocks(self) -> int:
        """Blocks that share a multiprocessor."""
        return 2 if self.shared_octets else 1

    def fn_octets(self, plan: Plan) -> int | None:
        """What a dispatch row of a spec says of fn; None for the plan's own choice."""
        if not self.shared_octets:
            return None
        return plan.held_octets() - self.shared_octets


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
    """A row of the dispatch table: how calls up to a size are launched.

    The plan says whether the boundary publishes itself, which is faster where it can.
    """

    max_tokens: int
    group: int
    shared_octets: int = 0

    def candidate(self, cluster_size: int) -> Candidate:
        """What the row takes, in a table of one cluster size."""
        return Candidate(cluster_size, self.group, self.shared_octets)


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
        size = self.choice.cluster_size
        launches = 2 if wants_two_launches(self.plan, self.arch) else None
        rows = [
            {
                "max_tokens": row.max_tokens,
                "group": row.group,
                "fn_octets": row.candidate(size).fn_octets(self.plan),
                "launches": launches,
            }
            for row in self.choice.token_groups
        ]
        tuned = {"cluster_size": size, "token_groups": rows}
        return dict(self.plan.spec.targets) | {self.arch: Target.model_validate(tuned)}

    def show(self) -> None:
        """Prints what was tried, and the choice against the spec's own."""
        show_table(
            f"{self.plan.name}, {self.device}: microseconds a boundary",
            ("M", "cluster", "group", "blocks", "waves", "predicted", "measured"),
            [
                (
                    trial.m,
                    trial.candidate.cluster_size,
                    trial.candidate.group,
                    trial.candidate.blocks,
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


def shapes(plan: Plan, architecture: Architecture) -> dict[int, TargetPlan]:
    """What the plan makes of each cluster size that is worth trying.

    Clusters that leave lanes idle are tried where there are no others.
    """
    legal = legal_clusters(plan, architecture)
    even = [size for size in legal if not plan.shares % size]
    return {
        size: plan_target(plan, architecture, Target(cluster_size=size))
        for size in even or legal
    }


def candidates(plan: Plan, architecture: Architecture) -> tuple[Candidate, ...]:
    """All candidates that the hardware can run, of the shapes worth trying."""
    found = []
    for cluster_size, shape in shapes(plan, architecture).items():
        for group in TOKEN_GROUPS:
            if group <= plan.capacity and group_fault(shape, group) is None:
                found.append(Candidate(cluster_size, group))
                moved = shared_octets(shape, group)
                if moved is not None:
                    found.append(Candidate(cluster_size, group, moved))
    return tuple(found)


def tokens_to_try(plan: Plan, architecture: Architecture) -> list[int]:
    """The M at which winners may change: few tokens, and the ends of single waves."""
    known = shapes(plan, architecture)
    ends = {
        known[candidate.cluster_size].wave(candidate.blocks) * candidate.group
        for candidate in candidates(plan, architecture)
    }
    sizes = {*FEW, *ends, plan.capacity}
    return sorted(m for m in sizes if m <= plan.capacity)


def wants_two_launches(plan: Plan, arch: str) -> bool:
    """Whether the spec keeps boundaries of an architecture from publishing themselves.

    It does so for a GPU that is shared: what is measured and written then is that form.
    """
    target = next(t for name, t in plan.spec.targets.items() if name == arch)
    return any(row.launches == 2 for row in target.token_groups or ())


def own_candidate(plan: Plan, arch: str, m: int) -> Candidate:
    """What a plan takes for a call of ``m`` tokens."""
    target = plan.target(arch)
    row = target.token_group(m)
    moved = plan.held_octets() - row.fn_octets
    return Candidate(target.cluster_size, row.group, moved)


def trials_at(
    m: int,
    known: Mapping[int, TargetPlan],
    wanted: Sequence[Candidate],
    own: Candidate,
) -> list[Trial]:
    """What is worth trying at one M, the most promising first.

    Each cluster size keeps what the model puts near its own best: the model orders
    groups better than it orders cluster sizes. The plan's own candidate is always
    tried.

    Args:
        m: Tokens of the call.
        known: The shape of each cluster size.
        wanted: What may be tried.
        own: The plan's own candidate.
    """
    trials = [
        Trial(
            m,
            candidate,
            known[candidate.cluster_size].waves(m, candidate.group, candidate.blocks),
            known[candidate.cluster_size].predicted(
                m, candidate.group, candidate.blocks
            ),
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
    own = [trial for trial in trials if trial.candidate.cluster_size == size]
    kept = [trial for trial in own if trial.measured is not None]
    rows: list[Row] = []
    times: dict[int, float] = {}
    one_wave = False
    for m in sorted({trial.m for trial in own}):
        found = {trial.candidate: trial for trial in kept if trial.m == m}
        if not found:
            continue
        tied = min(_time(trial) for trial in found.values()) * (1 + TIE)
        best = min(c for c, trial in found.items() if _time(trial) <= tied)
        before = rows[-1].candidate(size) if rows else best
        if before in found and _time(found[before]) <= tied:
            best = before
        times[m] = _time(found[best])
        # A row that ends within a wave takes one launch, which one that goes on loses.
        same_launches = one_wave == (found[best].waves == 1)
        if rows and best == before and same_launches:
            rows.pop()
        one_wave = found[best].waves == 1
        rows.append(Row(m, best.group, best.shared_octets))
    if rows:
        rows[-1] = rows[-1]._replace(max_tokens=capacity)
    return Choice(size, tuple(rows), times)


def _time(trial: Trial) -> float:
    """What a trial measured; it was tried."""
    assert trial.measured is not None
    return trial.measured
