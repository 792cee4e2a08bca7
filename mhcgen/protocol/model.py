"""The protocol as a set of events, each of which happens once.

Kernels are straight-line code, so what a program order, a barrier or a dependency
between kernels demands is the same in every run: the events that come first. Only polls
depend on memory, and starts of clusters where not all can run at once. A state is the
set of events that have happened, and memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from mhcgen.protocol.steps import (
    EMPTY,
    Arrive,
    Enter,
    Finish,
    Land,
    Leave,
    Poll,
    ReadGeneration,
    ReadInput,
    Rearm,
    Step,
    WriteInput,
)

NOBODY = -1  # no count of a block


class Engine(StrEnum):
    """The kernel between two boundaries.

    Attributes:
        NONE: There is none, and every call has its own x.
        ORDINARY: Overwrites x; launched without PDL.
        WAITS: Overwrites x; launched with PDL, it triggers at once and then waits.
        HASTY: Overwrites x; launched with PDL, it never waits.
        BYSTANDER: Touches nothing; launched with PDL, it never waits.
    """

    NONE = "none"
    ORDINARY = "ordinary"
    WAITS = "waits"
    HASTY = "hasty"
    BYSTANDER = "bystander"


@dataclass(frozen=True)
class Protocol:
    """The rules. The defaults are those of the generated kernels.

    Attributes:
        generations: Stages of the mailbox.
        publish_waits: Publish waits (``griddepcontrol.wait``) before it reads anything.
        publish_triggers_late: Publish triggers after its wait, not before.
        boundary_waits: A boundary that consumes waits just before it ends.
        publishing_boundary_waits: A boundary that publishes waits before it reads
            anything.
        boundary_publishes_late: It publishes after that wait, not before.
        lanes_meet: Lanes that share words meet between their reads and the re-arm.
        rearm_ahead: Generations from the consumed one to the one that is re-armed.
        rearm_in_time: Re-arming is done when the boundary completes, not only when the
            next boundary does.
        rearm_partial_group: A last group with fewer tokens is re-armed like others.
        sanitize: Publish replaces -0.0.
        last_advances: The last block to be counted advances the generation, not the
            first.
        advances_at_end: It does so when it ends, not when it is counted.
        counts_late: A block counts itself when it has polled all of its rows, not as
            soon as it has read the generation.
        warps_meet: The warps of a block meet before it counts itself.
        fixed_total: The first call's number of blocks is the total of every call.
        captured_calls: If not 0, the generation is a host scalar, captured in a graph
            of so many calls that is replayed.
    """

    generations: int = 3
    publish_waits: bool = True
    publish_triggers_late: bool = True
    boundary_waits: bool = True
    publishing_boundary_waits: bool = True
    boundary_publishes_late: bool = True
    lanes_meet: bool = True
    rearm_ahead: int = 0
    rearm_in_time: bool = True
    rearm_partial_group: bool = True
    sanitize: bool = True
    last_advances: bool = True
    advances_at_end: bool = True
    counts_late: bool = True
    warps_meet: bool = True
    fixed_total: bool = False
    captured_calls: int = 0

    def generation(self, call: int) -> int:
        """The generation of a call."""
        turn = call % self.captured_calls if self.captured_calls else call
        return turn % self.generations


@dataclass(frozen=True)
class Instance:
    """What is checked.

    Attributes:
        tokens: M of each call.
        ranks: TP.
        blocks: Blocks that split a row: of publish, and of a boundary's cluster.
        group: Tokens of a cluster.
        readers: Lanes that poll the same fragment of the same rank.
        engine: The kernel between two boundaries.
        joined: The mixes of each call are joined before the next publish.
        last_rank_tokens: M of each call on the last rank, if it differs.
        launches: Of each call: 1 where the boundary publishes, 2 where a launch before
            it does; if empty, always 2.
        room: Clusters that a device runs at once, in any order; if 0, all.
        in_order: With room, they start in the order of their numbers.
    """

    tokens: tuple[int, ...]
    ranks: int = 2
    blocks: int = 1
    group: int = 1
    readers: int = 1
    engine: Engine = Engine.NONE
    joined: bool = False
    last_rank_tokens: tuple[int, ...] = ()
    launches: tuple[int, ...] = ()
    room: int = 0
    in_order: bool = False

    def launches_of(self, call: int) -> int:
        """The launches of a call."""
        return self.launches[call] if self.launches else 2

    def tokens_of(self, rank: int) -> tuple[int, ...]:
        """M of each call on a rank."""
        if self.last_rank_tokens and rank == self.ranks - 1:
            return self.last_rank_tokens
        return self.tokens

    def __str__(self) -> str:
        """The ranks, M of each call, and what differs from the default."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        parts = [f"{ranks}, M {' '.join(map(str, self.tokens))}"]
        if self.last_rank_tokens:
            parts.append(f"on the last {' '.join(map(str, self.last_rank_tokens))}")
        if self.launches:
            parts.append(f"launches {' '.join(map(str, self.launches))}")
        if self.room:
            order = " in order" if self.in_order else ""
            parts.append(f"room for {self.room}{order}")
        if self.blocks > 1:
            parts.append(f"{self.blocks} blocks")
        if self.group > 1:
            parts.append(f"groups of {self.group}")
        if self.readers > 1:
            parts.append(f"{self.readers} lanes a slot")
        if self.engine != Engine.NONE:
            parts.append(f"{self.engine} engine kernel")
        if self.joined:
            parts.append("mixes joined")
        return ", ".join(parts)


@dataclass(frozen=True)
class Event:
    """Something that happens once.

    Attributes:
        place: Where: the rank, the call and the kernel.
        call: The call.
        text: What.
        requires: The events that come before it in every run, as a mask.
        step: What it does to memory.
    """

    place: str
    call: int
    text: str
    requires: int
    step: Step


@dataclass(frozen=True)
class Kernel:
    """A launched kernel: the events after which others may go on, as masks.

    Attributes:
        triggered: All blocks have triggered.
        complete: All blocks have exited, and their stores to this rank's memory are
            done. A store to a mailbox may still be on its way.
    """

    triggered: int = 0
    complete: int = 0


@dataclass(frozen=True)
class Timing:
    """What a boundary waits for, as masks.

    Attributes:
        start: Before it starts.
        ready: Before it reads what other kernels wrote.
        sends: Before it publishes; None if it does not.
        waited: Before a block ends.
    """

    start: int
    ready: int
    sends: int | None
    waited: int


@dataclass(frozen=True)
class Launch:
    """A boundary of a call.

    Attributes:
        call: The call.
        timing: What it waits for.
        total: Its blocks, as they are counted.
        residual: The cell that counts those that have ended.
    """

    call: int
    timing: Timing
    total: int
    residual: int


@dataclass(frozen=True)
class Cluster:
    """Masks of a cluster's events: its start, its blocks' ends and re-arms."""

    entered: int
    ended: int
    rearmed: int


@dataclass(frozen=True)
class Expectation:
    """What a cell must hold when all is over."""

    cell: int
    value: int
    message: str


@dataclass
class Model:
    """The events of one instance under one protocol.

    Attributes:
        protocol: The rules.
        instance: What runs under them.
        events: All events; those that an event requires have lower numbers.
        memory: The first memory.
        expectations: What the last memory must hold.
    """

    protocol: Protocol
    instance: Instance
    events: list[Event] = field(default_factory=list)
    memory: bytearray = field(default_factory=bytearray)
    expectations: list[Expectation] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Lays out memory and launches the calls of every rank."""
        self._mailbox: dict[tuple[int, int, int, int, int], int] = {}
        for rank in range(self.instance.ranks):
            self._run_rank(rank)

    def _cell(self, value: int, last: int | None, message: str = "") -> int:
        """A new cell, and what it must hold at last (None: anything)."""
        self.memory.append(value)
        cell = len(self.memory) - 1
        if last is not None:
            self.expectations.append(Expectation(cell, last, message))
        return cell

    def _slot(self, owner: int, generation: int, rank: int, token: int, b: int) -> int:
        """The cell of a fragment in the mailbox of ``owner``."""
        key = (owner, generation, rank, token, b)
        if key not in self._mailbox:
            name = f"generation {generation}, rank {rank}, token {token}"
            self._mailbox[key] = self._cell(
                EMPTY, EMPTY, f"rank {owner}'s slot of {name} is not re-armed"
            )
        return self._mailbox[key]

    def _add(self, place: str, call: int, text: str, requires: int, step: Step) -> int:
        """Adds an event and returns its mask."""
        for index in bits(requires):
            requires |= self.events[index].requires
        self.events.append(Event(place, call, text, requires, step))
        return 1 << (len(self.events) - 1)

    def _run_rank(self, rank: int) -> None:
        """Launches the calls of a rank, one kernel after another on its stream."""
        calls = self.instance.tokens_of(rank)
        last = self.protocol.generation(len(calls))
        on_device = not self.protocol.captured_calls
        state = RankState(
            rank,
            generation=self._cell(
                0, last if on_device else None, f"rank {rank}'s generation is wrong"
            ),
            arrivals=self._cell(0, 0, f"rank {rank}'s count of arrivals is wrong"),
            x=self._cell(0, None),
            running=self._cell(0, 0, f"rank {rank} has clusters that run"),
        )
        before = Kernel()
        mixed = 0
        for call, m in enumerate(calls):
            if self.instance.launches_of(call) == 1:
                before = self._publishing_boundary(state, call, calls, before, mixed)
            else:
                publish = self._publish(state, call, m, before, mixed)
                before = self._consuming_boundary(state, call, calls, publish)
            if self.instance.joined:
                mixed = before.complete
            if self.instance.engine != Engine.NONE:
                before = self._engine(state, call, before)

    def _publish(
        self, state: RankState, call: int, m: int, before: Kernel, mixed: int
    ) -> Kernel:
        """Publish: a block for each token and part of the row.

        Args:
            state: The rank's.
            call: The call.
            m: Its tokens.
            before: The kernel before this one.
            mixed: What must be complete before this kernel starts, PDL or not.
        """
        rules, rank = self.protocol, state.rank
        start = before.triggered | mixed
        waited = start | before.complete
        ready = waited if rules.publish_waits else start
        own_x = self.instance.engine in (Engine.NONE, Engine.BYSTANDER)
        get = Step() if own_x else ReadInput(state.x, call)
        done = before.complete if rules.publish_waits else 0
        for token, block in product(range(m), range(self.instance.blocks)):
            place = f"rank {rank}, call {call}, publish, {self._part(token, block)}"
            known = self._read_generation(place, state, call, ready)
            sent = self._add(place, call, "reads x and sends the row", known, get)
            done |= sent
            for owner in range(self.instance.ranks):
                self._land(rank, place, call, token, block, owner, sent)
        late = rules.publish_waits and rules.publish_triggers_late
        return Kernel(triggered=waited if late else start, complete=done)

    def _consuming_boundary(
        self, state: RankState, call: int, calls: tuple[int, ...], publish: Kernel
    ) -> Kernel:
        """A boundary behind a publish: it reads at once, and waits before it ends."""
        waited = publish.complete if self.protocol.boundary_waits else 0
        start = publish.triggered
        return self._boundary(state, call, calls, Timing(start, start, None, waited))

    def _publishing_boundary(
        self,
        state: RankState,
        call: int,
        calls: tuple[int, ...],
        before: Kernel,
        mixed: int,
    ) -> Kernel:
        """A boundary that publishes: it waits, publishes and goes on."""
        rules = self.protocol
        start = before.triggered | mixed
        done = before.complete if rules.publishing_boundary_waits else 0
        sends = start | done if rules.boundary_publishes_late else start
        return self._boundary(
            state, call, calls, Timing(start, start | done, sends, done)
        )

    def _boundary(
        self, state: RankState, call: int, calls: tuple[int, ...], timing: Timing
    ) -> Kernel:
        """A boundary: a cluster for each group of tokens."""
        rules, group = self.protocol, self.instance.group
        m, blocks = calls[call], self.instance.blocks
        counted = calls[0] if rules.fixed_total else m
        written = -(-m // group) * blocks
        residual = self._cell(0, written, f"rank {state.rank} lacks outputs")
        launch = Launch(call, timing, -(-counted // group) * blocks, residual)
        triggered, ended, rearmed = timing.start, timing.waited, 0
        entered = 0
        for first in range(0, m, group):
            tokens = range(first, min(first + group, m))
            cluster = self._cluster(state, launch, tokens, entered)
            entered = cluster.entered
            triggered |= entered
            ended |= cluster.ended
            rearmed |= cluster.rearmed
        if rules.rearm_in_time:
            ended |= rearmed
        else:
            ended |= state.rearming
            state.rearming = rearmed
        state.residual, state.blocks = residual, written
        return Kernel(triggered=triggered, complete=ended)

    def _cluster(
        self, state: RankState, launch: Launch, tokens: range, before: int
    ) -> Cluster:
        """The blocks of a cluster; ``before`` is the start of the one before."""
        rules, call = self.protocol, launch.call
        number = tokens[0] // self.instance.group
        place = f"rank {state.rank}, call {call}, boundary, cluster {number}"
        entered = launch.timing.start
        if self.instance.room:
            entered |= before if self.instance.in_order else 0
            enter = Enter(state.running, self.instance.room)
            entered = self._add(place, call, "starts", entered, enter)
        counts, turns, polled, rearmed = [], [], 0, 0
        for block in range(self.instance.blocks):
            lanes = [
                (token, *self._lanes(state, launch, token, block, entered))
                for token in tokens
            ]
            met = [
                event
                for _, knows, polls in lanes
                for event in (polls if rules.counts_late else knows)
            ]
            turns.append(self._cell(0, None))
            counts.append(
                self._add(
                    f"{place}, block {block}",
                    call,
                    "counts itself",
                    union(met) if rules.warps_meet else met[0],
                    self._arrive(state, launch, turns[-1]),
                )
            )
            for token, _, polls in lanes:
                polled |= union(polls)
                if len(tokens) == self.instance.group or rules.rearm_partial_group:
                    rearmed |= self._rearm(state.rank, call, token, block, polls)
        ended = 0
        for block, (count, turn) in enumerate(zip(counts, turns, strict=True)):
            ended |= self._add(
                f"{place}, block {block}",
                call,
                "ends, and advances the generation if that falls to it",
                # A block waits for the sums of its cluster, and so for all its polls.
                count | polled | launch.timing.waited,
                Finish(
                    turn,
                    state.generation,
                    rules.generation(call + 1),
                    launch.residual,
                ),
            )
        if self.instance.room:
            gone = Leave(state.running)
            self._add(place, call, "is gone", ended | rearmed, gone)
        return Cluster(entered, ended, rearmed)

    def _arrive(self, state: RankState, launch: Launch, turn: int) -> Arrive:
        """How a block counts itself."""
        rules, last = self.protocol, launch.total - 1
        if rules.advances_at_end:
            chosen = last if rules.last_advances else 0
            return Arrive(state.arrivals, turn, last, chosen)
        following = rules.generation(launch.call + 1)
        return Arrive(state.arrivals, turn, last, NOBODY, (state.generation, following))

    def _lanes(
        self,
        state: RankState,
        launch: Launch,
        token: int,
        block: int,
        entered: int,
    ) -> tuple[list[int], list[int]]:
        """The lanes of a fragment: each reads the generation, sends and polls.

        Returns:
            The events by which each knows the generation, and the polls.
        """
        rules, ranks = self.protocol, self.instance.ranks
        call, timing = launch.call, launch.timing
        generation = rules.generation(call)
        knows, polls = [], []
        for lane in range(ranks * self.instance.readers):
            place = self._lane(state.rank, call, token, block, lane)
            ready = entered | timing.ready
            if timing.sends is not None and lane < ranks:
                early = entered | timing.sends
                residual = state.residual if rules.boundary_publishes_late else None
                known = self._read_generation(place, state, call, early, residual)
                knows.append(known)
                known |= self._send(state, place, call, token, block, lane, known)
                known |= ready
            else:
                known = self._read_generation(place, state, call, ready, state.residual)
                knows.append(known)
            source = lane % ranks
            poll = Poll(self._slot(state.rank, generation, source, token, block), call)
            polls.append(
                self._add(place, call, f"reads rank {source}'s row", known, poll)
            )
        return knows, polls

    def _send(
        self,
        state: RankState,
        place: str,
        call: int,
        token: int,
        block: int,
        owner: int,
        known: int,
    ) -> int:
        """A lane of a boundary sends its fragment to one rank."""
        own_x = self.instance.engine in (Engine.NONE, Engine.BYSTANDER)
        get = Step() if own_x else ReadInput(state.x, call)
        text = f"reads x and sends the row to rank {owner}"
        sent = self._add(place, call, text, known, get)
        self._land(state.rank, place, call, token, block, owner, sent)
        return sent

    def _land(
        self,
        rank: int,
        place: str,
        call: int,
        token: int,
        block: int,
        owner: int,
        sent: int,
    ) -> None:
        """A row that was sent lands in the mailbox of a rank, at any time."""
        zero = not self.protocol.sanitize and (rank, call, token, block) == (0, 0, 0, 0)
        generation = self.protocol.generation(call)
        slot = self._slot(owner, generation, rank, token, block)
        text = f"the row lands in rank {owner}'s mailbox"
        if zero:
            text += ", and holds -0.0"
        self._add(place, call, text, sent, Land(slot, call, zero))

    def _rearm(
        self, rank: int, call: int, token: int, block: int, polls: list[int]
    ) -> int:
        """Each lane re-arms what it read, and others that share the words do, too."""
        rules = self.protocol
        cleared = (rules.generation(call) + rules.rearm_ahead) % rules.generations
        rearmed = 0
        for lane, own in enumerate(polls):
            source = lane % self.instance.ranks
            place = self._lane(rank, call, token, block, lane)
            slot = self._slot(rank, cleared, source, token, block)
            text = f"re-arms rank {source}'s slot of generation {cleared}"
            required = union(polls) if rules.lanes_meet else own
            rearmed |= self._add(place, call, text, required, Rearm(slot, call))
        return rearmed

    def _engine(self, state: RankState, call: int, before: Kernel) -> Kernel:
        """The kernel between two boundaries."""
        kind = self.instance.engine
        place = f"rank {state.rank}, after call {call}, engine kernel"
        if kind == Engine.BYSTANDER:
            done = self._add(place, call, "runs", before.triggered, Step())
            return Kernel(before.triggered, done)
        ready = before.triggered if kind == Engine.HASTY else before.complete
        text = f"overwrites x with that of call {call + 1}"
        done = self._add(place, call, text, ready, WriteInput(state.x, call + 1))
        if kind == Engine.HASTY:
            return Kernel(before.triggered, done)
        done |= before.complete
        return Kernel(done if kind == Engine.ORDINARY else before.triggered, done)

    def _read_generation(
        self,
        place: str,
        state: RankState,
        call: int,
        ready: int,
        residual: int | None = None,
    ) -> int:
        """A block or lane reads the generation, unless the host passes it."""
        if self.protocol.captured_calls:
            return ready
        generation = self.protocol.generation(call)
        read = ReadGeneration(state.generation, generation, residual, state.blocks)
        return self._add(place, call, "reads the generation", ready, read)

    def _part(self, token: int, block: int) -> str:
        """The name of a part of a token's row."""
        whole = self.instance.blocks == 1
        return f"token {token}" if whole else f"token {token}, block {block}"

    def _lane(self, rank: int, call: int, token: int, block: int, lane: int) -> str:
        """The name of a lane of a boundary."""
        part = self._part(token, block)
        return f"rank {rank}, call {call}, boundary, {part}, lane {lane}"


@dataclass
class RankState:
    """What a rank's launches carry along.

    Attributes:
        rank: The rank.
        generation: The cell of the generation.
        arrivals: The cell of the count of arrivals.
        x: The cell of x.
        running: The cell that counts the clusters that run.
        residual: The cell that counts the blocks of the last boundary that have ended.
        blocks: How many it has.
        rearming: Re-arms of the last boundary that the next one completes.
    """

    rank: int
    generation: int
    arrivals: int
    x: int
    running: int
    residual: int | None = None
    blocks: int = 0
    rearming: int = 0


def bits(mask: int) -> Iterable[int]:
    """The indices of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """The union of masks."""
    total = 0
    for mask in masks:
        total |= mask
    return total
