"""Breadth-first search over all orders of the events of a model.

Most orders differ in events that do not concern each other. In each state the search
follows one stubborn set: nothing outside of it, now or later, can matter to its events
before one of them happens. This keeps every last state; and since an event that sees
something wrong would be part of the way to one, it keeps every violation.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import groupby

from mhcgen.protocol.model import Model, bits, union
from mhcgen.protocol.steps import ReadGeneration

State = tuple[int, bytes]  # the events that have happened, as a mask, and memory


@dataclass(frozen=True)
class Violation:
    """What went wrong, and how.

    Attributes:
        message: One line.
        trace: Lines, in order: what happened that matters here, and what now waits.
    """

    message: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        """The message and the numbered trace."""
        steps = [f"  {number:2}. {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([*steps, f"  ==> {self.message}"])


@dataclass(frozen=True)
class Report:
    """What a search found.

    Attributes:
        states: States visited.
        ends: States in which nothing can happen any more.
        seconds: Wall-clock time.
        violation: The first violation, or None: there is none.
    """

    states: int
    ends: int
    seconds: float
    violation: Violation | None


@dataclass(frozen=True)
class Moment:
    """A state as masks.

    Attributes:
        happened: Events that have happened.
        enabled: Events that can happen.
        waiting: Polls to come whose row has not arrived now, and clusters without room.
    """

    happened: int
    enabled: int
    waiting: int


class Search:
    """The relations between the events of one model."""

    def __init__(self, model: Model) -> None:
        """Derives who conflicts with whom, and who may let another go on."""
        self.model = model
        self.steps = [event.step for event in model.events]
        self.requires = [event.requires for event in model.events]
        readers: dict[int, int] = {}
        writers: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for cell in (*step.reads, *step.writes):
                readers[cell] = readers.get(cell, 0) | 1 << index
            for cell in step.writes:
                writers[cell] = writers.get(cell, 0) | 1 << index
        self.conflicts = [
            union(writers.get(cell, 0) for cell in step.reads)
            | union(readers[cell] for cell in step.writes)
            for step in self.steps
        ]
        wakers = union(1 << index for index, s in enumerate(self.steps) if s.wakes)
        self.wakers = [
            union(writers.get(cell, 0) for cell in (*step.reads, *step.writes)) & wakers
            for step in self.steps
        ]
        self.everything = (1 << len(self.steps)) - 1

    def enabled(self, state: State) -> list[int]:
        """The events that can happen now."""
        happened, memory = state
        return [
            index
            for index in bits(self.everything & ~happened)
            if not self.requires[index] & ~happened and self.steps[index].ready(memory)
        ]

    def after(self, state: State, index: int) -> tuple[State, str | None]:
        """The state after an event, and what the event found wrong."""
        memory = bytearray(state[1])
        problem = self.steps[index].run(memory)
        return (state[0] | 1 << index, bytes(memory)), problem

    def stubborn(self, state: State, enabled: list[int]) -> list[int]:
        """The fewest enabled events found that need to be followed."""
        happened, memory = state
        now = Moment(
            happened,
            enabled=union(1 << index for index in enabled),
            waiting=union(
                1 << index
                for index in bits(self.everything & ~happened)
                if not self.steps[index].ready(memory)
            ),
        )
        best = enabled
        for seed in enabled:
            chosen = self._closure(now, seed) & now.enabled
            if chosen.bit_count() < len(best):
                best = list(bits(chosen))
            if len(best) == 1:
                break
        return best

    def _closure(self, now: Moment, seed: int) -> int:
        """A stubborn set that holds ``seed``.

        With an enabled event it holds all that conflict with it, and with another all
        of some events one of which must happen before.
        """
        inside = 1 << seed
        todo = [seed]
        later: list[int] = []
        while todo or later:
            if todo:
                index = todo.pop()
                if not now.enabled >> index & 1:
                    later.append(index)
                    continue
                added = self.conflicts[index]
            else:
                later = [
                    index for index in later if not self._is_held(now, index, inside)
                ]
                if not later:
                    break
                index = later.pop()
                missing = self.requires[index] & ~now.happened
                added = missing & -missing or self.wakers[index]
            added &= ~now.happened & ~inside
            inside |= added
            todo.extend(bits(added))
        return inside

    def _is_held(self, now: Moment, index: int, inside: int) -> bool:
        """Whether an event has to wait for one inside.

        It requires one, or it requires (or is) a poll that only stores can wake which
        are inside or require one; or a start of a cluster, that only others' ends can.
        """
        ahead = self.requires[index] & ~now.happened
        if ahead & inside:
            return True
        return any(
            all(
                inside >> store & 1 or self.requires[store] & ~now.happened & inside
                for store in bits(self.wakers[poll] & ~now.happened)
            )
            for poll in bits((ahead | 1 << index) & now.waiting)
        )


def explore(model: Model, reduce: bool = True) -> Report:
    """Visits the states of a model until one violates a property.

    Args:
        model: The model.
        reduce: Follow a stubborn set of events in each state, not all events.
    """
    begin = time.perf_counter()
    search = Search(model)
    first: State = (0, bytes(model.memory))
    cause: dict[State, tuple[State, int] | None] = {first: None}
    queue = deque([first])
    ends = 0
    violation = None
    while queue and violation is None:
        state = queue.popleft()
        enabled = search.enabled(state)
        if not enabled:
            ends += 1
            violation = _judge_end(search, state, cause)
            continue
        if reduce:
            enabled = search.stubborn(state, enabled)
        for index in enabled:
            following, problem = search.after(state, index)
            if following not in cause:
                cause[following] = (state, index)
                queue.append(following)
            if problem is not None:
                violation = _shortened(search, [*_path(cause, state), index], problem)
                break
    return Report(len(cause), ends, time.perf_counter() - begin, violation)


Cause = dict[State, tuple[State, int] | None]


def _path(cause: Cause, state: State) -> list[int]:
    """The events from the first state to ``state``."""
    path = []
    while (step := cause[state]) is not None:
        state, index = step
        path.append(index)
    return path[::-1]


def _judge_end(search: Search, state: State, cause: Cause) -> Violation | None:
    """Compares a last state with what it must be."""
    happened, memory = state
    model = search.model
    stuck = [
        index
        for index in bits(search.everything & ~happened)
        if not search.requires[index] & ~happened
    ]
    if stuck:
        cells = {cell for index in stuck for cell in _touched(search, index)}
        waits = [f"{line}: waits for ever" for line in _lines(model, stuck)]
        message = "deadlock"
    else:
        wrong = [
            expectation
            for expectation in model.expectations
            if memory[expectation.cell] != expectation.value
        ]
        if not wrong:
            return None
        cells = {wrong[0].cell}
        waits = []
        message = f"all calls are over, and {wrong[0].message}"
    story = [index for index in _path(cause, state) if cells & _touched(search, index)]
    return Violation(message, (*_lines(model, story), *waits))


def _shortened(search: Search, path: list[int], problem: str) -> Violation:
    """Leaves out of a path each event without which its last one is as wrong.

    Of what remains, the trace shows the last two calls, and before them what touches
    the same memory as the last event.
    """
    for index in reversed(path[:-1]):
        without = [other for other in path if other != index]
        path = _replay(search, without, problem) or path
    model = search.model
    cells = _touched(search, path[-1])
    last_call = model.events[path[-1]].call

    def late(index: int) -> bool:
        return model.events[index].call >= last_call - 1

    story = [
        index
        for index in path
        if index == path[-1]
        or cells & {*search.steps[index].writes}
        or (late(index) and not isinstance(search.steps[index], ReadGeneration))
    ]
    return Violation(problem, tuple(_lines(model, story)))


def _replay(search: Search, path: list[int], problem: str) -> list[int] | None:
    """The events of a path that can still happen, if the last still goes wrong."""
    state: State = (0, bytes(search.model.memory))
    taken = []
    for index in path:
        step = search.steps[index]
        if search.requires[index] & ~state[0] or not step.ready(state[1]):
            continue
        taken.append(index)
        state, found = search.after(state, index)
        if found is not None:
            return taken if found == problem else None
    return None


def _touched(search: Search, index: int) -> set[int]:
    """The cells of an event."""
    step = search.steps[index]
    return {*step.reads, *step.writes}


def _lines(model: Model, path: list[int]) -> list[str]:
    """Events in words: a line for each, or for several in a row at one place."""
    events = [model.events[index] for index in path]
    return [
        f"{place}: {'; '.join(event.text for event in there)}"
        for place, there in groupby(events, key=lambda event: event.place)
    ]
