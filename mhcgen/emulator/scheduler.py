"""Many launches of many ranks: streams, dependent launches, and time that goes astray.

A launch starts when its predecessor in the stream is complete or, with programmatic
dependent launch, as soon as every block of the predecessor has triggered or exited; its
``griddepcontrol.wait`` then holds until the predecessor is complete. A launch is
complete once all its blocks have exited and all that it stored has landed. That says
nothing of what came before it: a predecessor that never waited may be complete while
its own predecessor still runs.

Without a seed everything happens in order and at once, which is fast. With a seed, the
scheduler is an adversary within these rules: it lets random warps and lanes run for
random slices, starts blocks one by one, holds ranks back, leaves some warps or blocks
behind until nothing else can go on, and lets stores into other ranks' memory land late,
out of order and in pieces. The same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import DeadlockError
from mhcgen.emulator.instructions import WARP
from mhcgen.emulator.machine import (
    NEVER,
    READY,
    WAITS_FOR,
    Geometry,
    Grid,
    Machine,
    Program,
    Starved,
)
from mhcgen.emulator.memory import GlobalMemory

MACHINE_THREADS = 8192
"""Threads that are executed together: their registers should fit the cache."""

PIECE = 2
"""Bytes that land together, at least: no element of a row is torn."""

REPORTED = 12


@dataclass(eq=False)
class Launch:
    """One kernel launch of one rank.

    Attributes:
        program: The kernel.
        rank: The rank.
        parameters: The bytes of its parameters.
        blocks: Blocks of its grid.
        predecessor: The launch before it in its stream.
        dependent: Whether it may start before its predecessor is complete.
        after: Launches of other streams that must be complete before it starts.
        world: Where it runs.
        triggered: Blocks that have let dependents start, or have exited.
        exited: Blocks that have exited.
        complete: Whether it is over, and everything it stored is visible.
    """

    program: Program
    rank: int
    parameters: bytes
    blocks: int
    predecessor: Launch | None
    dependent: bool
    after: tuple[Launch, ...]
    world: World
    triggered: int = 0
    exited: int = 0
    complete: bool = False

    @property
    def may_start(self) -> bool:
        """Whether its blocks may run."""
        before = self.predecessor
        if not all(launch.complete for launch in self.after):
            return False
        if before is None or before.complete:
            return True
        return self.dependent and before.triggered == before.blocks

    @property
    def may_pass_wait(self) -> bool:
        """Whether ``griddepcontrol.wait`` is over."""
        return (
            not self.dependent or self.predecessor is None or self.predecessor.complete
        )

    def block_triggered(self, blocks: int) -> None:
        """Some blocks have let dependents start, or have exited."""
        self.triggered += blocks
        self.world.epoch += 1

    def block_exited(self, blocks: int) -> None:
        """Some blocks have exited, and made room for others."""
        self.exited += blocks
        self.world.resident[self.rank] -= blocks
        self.world.epoch += 1
        if self.exited == self.blocks:
            self.world.ending.append(self)

    def __str__(self) -> str:
        """The kernel and the rank."""
        return f"{self.program.kernel.label} of rank {self.rank}"


@dataclass(eq=False)
class Stream:
    """A rank's launches in order.

    Attributes:
        rank: The rank.
        last: The launch that was put there last.
        after: What the next launch has to wait for besides.
    """

    rank: int
    last: Launch | None = None
    after: tuple[Launch, ...] = ()

    def wait_for(self, other: Stream) -> None:
        """The next launch waits for what the other stream holds by now."""
        waits = other.after if other.last is None else (other.last, *other.after)
        self.after += waits


@dataclass
class _Batch:
    """Stores of one launch on their way, in the order in which they will land."""

    launch: Grid
    places: Array
    values: Array
    landed: int = 0

    @property
    def left(self) -> int:
        return self.places.size - self.landed


class Outbox:
    """Stores into other ranks' memory that have not landed yet."""

    def __init__(self, memory: GlobalMemory, rng: np.random.Generator) -> None:
        """Takes the memory and the source of its whims."""
        self.memory = memory
        self.rng = rng
        self.batches: list[_Batch] = []
        self._data = memory.arena.data.view(np.uint16)
        self._state = memory.arena.state.view(np.uint16)

    def store(self, grid: Grid, addresses: Array, values: Array) -> None:
        """Takes stores: each is torn into pieces, and all are shuffled."""
        pieces: Array = values.view(np.uint16).reshape(values.size, -1)
        first = self.memory.offsets(addresses) // PIECE
        places = first[:, None] + np.arange(pieces.shape[1])
        # Two stores of one launch to one place stay in order.
        for batch in [b for b in self.batches if b.launch is grid]:
            if np.isin(places, batch.places[batch.landed :]).any():
                self._land(batch, batch.left)
        if self.rng.random() < 0.5:
            order = self.rng.permutation(places.size)
            places, pieces = places.ravel()[order], pieces.ravel()[order]
        else:
            order = self.rng.permutation(len(places))
            places, pieces = places[order].ravel(), pieces[order].ravel()
        self.batches.append(_Batch(grid, places, pieces))
        self._tidy()

    def fence(self, grid: Grid) -> None:
        """Lands what a launch has stored."""
        for batch in self.batches:
            if batch.launch is grid:
                self._land(batch, batch.left)
        self._tidy()

    def land_some(self) -> None:
        """Lands a random part of some batches."""
        for batch in self.batches:
            if self.rng.random() < 0.5:
                self._land(batch, int(self.rng.integers(batch.left) + 1))
        self._tidy()

    def owes(self, grid: Grid) -> bool:
        """Whether anything of a launch has not landed."""
        return any(batch.launch is grid for batch in self.batches)

    def _land(self, batch: _Batch, count: int) -> None:
        part = slice(batch.landed, batch.landed + count)
        self._data[batch.places[part]] = batch.values[part]
        self._state[batch.places[part]] = 0x0202
        batch.landed += count
        self.memory.version += 1

    def _tidy(self) -> None:
        self.batches = [batch for batch in self.batches if batch.left]


class _Temper:
    """What one seed's adversary likes: seeds differ in more than their dice.

    Attributes:
        rng: Where all its choices come from.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self._reach = rng.choice([3, 6, 10, 13])
        self._scopes = np.cumsum(rng.dirichlet([1, 1, 1, 1, 0.3]))
        self._landing = rng.choice([0.02, 0.2, 0.6])
        self._starting = rng.choice([0.05, 0.5, 1.0])
        self._holding = rng.choice([0.0, 0.02, 0.2])
        self._late = bool(rng.random() < 0.7)
        self._starving = rng.choice([0.0, 0.0005] if self._late else [0.0, 0.01])
        self._overtaking = rng.choice([0.0, 0.5, 0.95])

    def lands(self) -> bool:
        """Whether some stores land now."""
        return bool(self.rng.random() < self._landing)

    def starts(self, count: int) -> Array:
        """Which of some blocks or clusters start now."""
        return np.asarray(self.rng.random(count) < self._starting)

    def changes_mind(self) -> bool:
        """Whether other ranks are held back from now on."""
        return bool(self.rng.random() < self._holding)

    def held_back(self, ranks: int) -> set[int]:
        """The ranks that do not advance for a while."""
        count = self.rng.integers(ranks)
        return {*self.rng.permutation(ranks)[:count].tolist()}

    def starves_from_the_start(self) -> bool:
        """Whether some threads of every machine starve from early on."""
        return self._late

    def starves_others(self) -> bool:
        """Whether other threads of a machine starve from now on."""
        return bool(self.rng.random() < self._starving)

    def starved(self, machine: Machine) -> Starved:
        """Who starves: a few blocks or warps, mostly once they have met others."""
        rng = self.rng
        by_block = rng.random() < 0.25
        total = machine.blocks if by_block else machine.threads // WARP
        some = np.zeros(total, bool)
        some[rng.integers(total, size=rng.integers(1, 3))] = True
        threads = some[machine.block_of] if by_block else np.repeat(some, WARP)
        places = machine.program.meetings
        if not places or rng.random() < 0.2:
            places = range(len(machine.program.operations))
        return Starved(threads, places[int(rng.integers(len(places)))] + 1)

    def pick(self, count: int) -> int:
        """Which of some machines runs: any, or the one launched last."""
        if self.rng.random() < self._overtaking:
            return count - 1
        return int(self.rng.integers(count))

    def budget(self) -> int:
        """How many operations a slice takes at most."""
        return int(2 ** self.rng.uniform(0, self._reach))

    def threads(self, machine: Machine) -> Array:
        """Which threads of a machine run in a slice."""
        rng = self.rng
        share = (0.1, 0.5, 0.9)[rng.integers(3)]
        match np.searchsorted(self._scopes, rng.random(), "right"):
            case 0:
                return np.ones(machine.threads, bool)
            case 1:
                chosen = rng.integers(len(machine.grids))
                return np.asarray(machine.grid_of == chosen)
            case 2:
                blocks = rng.random(machine.blocks) < share
                return np.asarray(blocks[machine.block_of])
            case 3:
                return np.repeat(rng.random(machine.threads // WARP) < share, WARP)
            case _:
                return np.asarray(rng.random(machine.threads) < share)


@dataclass(eq=False)
class _Crew:
    """A machine, which of its clusters and blocks have still to start, who starves."""

    machine: Machine
    launches: Sequence[Launch]
    clusters: Array
    refused: int = -1
    blocks: Array = field(default_factory=lambda: np.empty(0, np.int64))
    starved: Starved | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether any thread can go on that does not starve."""
        machine, starved = self.machine, self.starved
        if starved is None or not machine.is_ready:
            return machine.is_ready
        return bool(((machine.status == READY) & starved.fed(machine.pc)).any())


class World:
    """All ranks, their memory and their launches.

    Attributes:
        memory: The global memory of all ranks.
        resident: Blocks of each rank that hold a place on its device.
        epoch: Grows with everything that may let a launch start.
        ending: Launches whose blocks have all exited.
    """

    def __init__(
        self,
        capacity: int,
        ranks: int,
        seed: int | None = None,
        resident_blocks: int | None = None,
    ) -> None:
        """Starts empty.

        Args:
            capacity: Bytes of memory of all ranks together.
            ranks: The number of ranks.
            seed: What the adversarial scheduler draws from; None for order and speed.
            resident_blocks: Blocks that a rank's device can hold; None for all.
        """
        self.memory = GlobalMemory(capacity)
        self.resident = [0] * ranks
        self.epoch = 0
        self.ending: list[Launch] = []
        self.room = NEVER if resident_blocks is None else resident_blocks
        self._launches: list[Launch] = []
        self._crews: list[_Crew] = []
        self._temper = None if seed is None else _Temper(seed)
        self._outbox: Outbox | None = None
        if self._temper:
            self._outbox = Outbox(self.memory, self._temper.rng)
        self._held_back: set[int] = set()

    def launch(
        self,
        program: Program,
        geometry: Geometry,
        requests: Sequence[tuple[Stream, bytes]],
        dependent: bool = False,
    ) -> None:
        """Puts a launch of one shape into some ranks' streams.

        Args:
            program: The kernel.
            geometry: Its shape, the same for all.
            requests: The stream and the parameters of each launch.
            dependent: Whether it has the attribute of programmatic dependent launch.

        Raises:
            ValueError: The shape does not fit the kernel or the device.
        """
        required = program.kernel.threads
        if required is not None and required[0] != geometry.block:
            raise ValueError(
                f"{program.kernel.label} is made for blocks of {required[0]} threads, "
                f"not {geometry.block}"
            )
        if geometry.cluster_blocks > self.room:
            raise ValueError(
                f"a cluster of {geometry.cluster_blocks} blocks does not fit a device "
                f"that holds {self.room}"
            )
        launches = []
        for stream, parameters in requests:
            blocks = geometry.clusters * geometry.cluster_blocks
            launch = Launch(
                program,
                stream.rank,
                parameters,
                blocks,
                stream.last,
                dependent,
                stream.after,
                self,
            )
            stream.last, stream.after = launch, ()
            launches.append(launch)
        self._launches += launches
        every = [
            (index, number)
            for index in range(len(launches))
            for number in range(geometry.clusters)
        ]
        threads = geometry.cluster_blocks * geometry.block
        count = max(1, MACHINE_THREADS // threads)
        for first in range(0, len(every), count):
            part = every[first : first + count]
            machine = Machine(
                program, geometry, launches, part, self.memory, self._outbox
            )
            crew = _Crew(machine, launches, np.arange(len(part)))
            if self._temper and self._temper.starves_from_the_start():
                crew.starved = self._temper.starved(machine)
            self._crews.append(crew)

    def run(self) -> None:
        """Runs until every launch is complete.

        Raises:
            EmulatorError: A kernel did what it must not, or nothing can go on.
        """
        while self._launches:
            moved = self._whim() if self._temper else self._turn()
            moved |= self._settle()
            if not moved and not self._wake() and not self._feed():
                self._check_deadlock()

    # --- in order -------------------------------------------------------------------

    def _turn(self) -> bool:
        """Everything that can start starts, and runs as far as it gets."""
        moved = False
        for crew in self._crews:
            self._admit(crew, np.ones(crew.clusters.size, bool))
        for crew in list(self._crews):
            if crew.blocks.size:
                crew.machine.start(crew.blocks)
                crew.blocks = crew.blocks[:0]
                moved = True
            moved |= crew.machine.run() > 0
            moved |= self._settle()
        return moved

    def _admit(self, crew: _Crew, wanted: Array) -> bool:
        """Gives the wanted clusters a place, as far as there is one.

        Returns:
            Whether there was a place for any cluster, wanted or not.
        """
        size = crew.machine.cluster_blocks
        grids = crew.machine.grid_of_cluster[crew.clusters]
        admitted = np.zeros(crew.clusters.size, bool)
        possible = False
        for index, launch in enumerate(crew.launches):
            places = (self.room - self.resident[launch.rank]) // size
            if places < 1 or not launch.may_start:
                continue
            mine = grids == index
            possible |= bool(mine.any())
            now = np.flatnonzero(wanted & mine)[:places]
            admitted[now] = True
            self.resident[launch.rank] += size * now.size
        if admitted.any():
            first = crew.clusters[admitted] * size
            blocks = (first[:, None] + np.arange(size)).ravel()
            crew.blocks = np.concatenate([crew.blocks, blocks])
            crew.clusters = crew.clusters[~admitted]
        return possible

    def _settle(self) -> bool:
        """Completes launches, and lets those go on that waited for them."""
        over = [launch for launch in self.ending if not self._owes(launch)]
        if not over:
            return False
        for launch in over:
            launch.complete = True
        self.epoch += 1
        self.ending = [launch for launch in self.ending if not launch.complete]
        self._launches = [each for each in self._launches if not each.complete]
        self._crews = [crew for crew in self._crews if not crew.machine.done]
        for crew in self._crews:
            crew.machine.pass_grid_wait()
        return True

    def _owes(self, launch: Launch) -> bool:
        return self._outbox is not None and self._outbox.owes(launch)

    def _wake(self) -> bool:
        """Lets polls look again if memory has changed since."""
        woken = False
        for crew in self._crews:
            if crew.machine.is_stale:
                woken |= crew.machine.wake_polls()
        return woken

    def _feed(self) -> bool:
        """Lets those go on that starve, as nobody else can."""
        hungry = [c for c in self._crews if c.starved and c.machine.is_ready]
        for crew in hungry:
            crew.starved = None
        return bool(hungry)

    # --- at random ------------------------------------------------------------------

    def _whim(self) -> bool:
        """One random step of something."""
        temper, outbox = self._temper, self._outbox
        assert temper and outbox
        moved = bool(outbox.batches)
        if temper.lands():
            outbox.land_some()
        if temper.changes_mind():
            self._held_back = temper.held_back(len(self.resident))
        candidates = []
        for crew in self._crews:
            if crew.blocks.size or (crew.clusters.size and crew.refused != self.epoch):
                moved |= self._start_some(crew, temper)
            machine = crew.machine
            if machine.mbarriers.in_flight:
                moved = True
                if temper.lands():
                    machine.land_stores(temper.rng)
            if machine.is_stale and temper.rng.random() < 0.3:
                machine.wake_polls()
            if crew.can_go_on:
                candidates.append(crew)
        if not candidates:
            self._held_back = set()
            return moved
        crew = candidates[temper.pick(len(candidates))]
        machine = crew.machine
        if temper.starves_others():
            crew.starved = temper.starved(machine)
        allowed = temper.threads(machine)
        for index, grid in enumerate(machine.grids):
            if grid.rank in self._held_back:
                allowed = allowed & (machine.grid_of != index)
        if not machine.run(allowed, temper.budget(), crew.starved):
            self._held_back = set()
        if machine.in_flight and temper.lands():
            machine.land_shared(temper.threads(machine))
        if machine.copies and temper.lands():
            machine.read_copies(temper.threads(machine))
        return True

    def _start_some(self, crew: _Crew, temper: _Temper) -> bool:
        """Admits some clusters, and starts some blocks of those admitted."""
        moved = False
        if crew.clusters.size and crew.refused != self.epoch:
            epoch = self.epoch
            moved = self._admit(crew, temper.starts(crew.clusters.size))
            crew.refused = -1 if moved else epoch
        if crew.blocks.size:
            now = temper.starts(crew.blocks.size)
            crew.machine.start(crew.blocks[now])
            crew.blocks = crew.blocks[~now]
            moved = True
        return moved

    # --- deadlock -------------------------------------------------------------------

    def _check_deadlock(self) -> None:
        """Stops unless polls that look again at the same memory still get on.

        Raises:
            DeadlockError: Nothing can go on; the error says who waits for what.
        """
        polling = [crew.machine for crew in self._crews if crew.machine.wake_polls()]
        moved = False
        for machine in polling:
            before = [None if r is None else r.copy() for r in machine.registers]
            machine.run()
            after = machine.registers
            moved |= not all(
                b is None or np.array_equal(a, b)
                for a, b in zip(after, before, strict=True)
                if a is not None
            )
            moved |= machine.is_ready
        if not moved and not self._settle():
            raise DeadlockError("\n".join(self._report()))

    def _report(self) -> Iterator[str]:
        yield "deadlock: nothing can go on"
        lines = [line for crew in self._crews for line in self._waits(crew)]
        for launch in self._launches:
            if launch.exited == launch.blocks:
                lines.append(f"{launch} has exited, and its stores have not landed")
        yield from lines[:REPORTED]
        if len(lines) > REPORTED:
            yield f"... and {len(lines) - REPORTED} more"

    def _waits(self, crew: _Crew) -> Iterator[str]:
        machine = crew.machine
        for index, launch in enumerate(crew.launches):
            here = machine.grid_of_cluster[crew.clusters] == index
            if here.any():
                reason = "its predecessor" if not launch.may_start else "room"
                yield f"{launch}: {int(here.sum())} clusters wait for {reason}"
        for status in WAITS_FOR:
            waiting = (machine.status == status) & machine.started[machine.block_of]
            spots = np.unique(
                np.stack([machine.grid_of, machine.pc], axis=1)[waiting], axis=0
            )
            for grid, pc in spots.tolist():
                same = waiting & (machine.grid_of == grid) & (machine.pc == pc)
                threads = np.flatnonzero(same)
                yield (
                    f"{threads.size} threads, the first of which "
                    f"{machine.waits_for(int(threads[0]))}\n"
                    f"{machine.place(int(threads[0]))}"
                )
