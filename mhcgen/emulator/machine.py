"""Executes one kernel for many blocks at once.

A machine holds the registers of all threads of some clusters, one array a register. It
takes the threads with the lowest instruction, executes straight on until a branch, a
barrier or the place where other threads wait, and looks again: lanes that went
different ways meet again where they would on hardware, at the latest. Which threads may
run, and for how long, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import (
    BarrierError,
    EmulatorError,
    ExecutionError,
    Fault,
    LaneError,
    MemoryFaultError,
    Place,
)
from mhcgen.emulator.instructions import (
    BARRIERS,
    FULL_MASK,
    WARP,
    Kind,
    Operation,
    compile_kernel,
)
from mhcgen.emulator.mbarriers import LandingError, Mbarriers
from mhcgen.emulator.memory import GlobalMemory, SharedMemory, Use
from mhcgen.emulator.ptx import SHARED_BASE, Kernel

Shape = tuple[int, int, int]

NEVER = 1 << 30
RUNAWAY = 4_000_000
COPY_BYTES = 16
CLUSTER_SPACE = 24
"""Bits of an address within a block in the shared memory of its cluster."""

MEETINGS = frozenset(Kind) - {Kind.COMPUTE, Kind.WARP, Kind.BRANCH, Kind.EXIT}

# What a thread is doing.
UNSTARTED, READY, POLLING, AT_WARP, AT_BARRIER, AT_CLUSTER, AT_GRID, EXITED = range(8)
WAITS_FOR = {
    UNSTARTED: "has not started",
    POLLING: "polls memory that does not change",
    AT_WARP: "waits for other lanes of its warp",
    AT_BARRIER: "waits at a barrier of its block",
    AT_CLUSTER: "waits at a barrier of its cluster",
    AT_GRID: "waits for the kernel before it",
}


@dataclass(frozen=True)
class Program:
    """A kernel, ready to be executed."""

    kernel: Kernel
    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, kernel: Kernel) -> Program:
        """Compiles a kernel.

        Raises:
            PtxError: It has an instruction that the emulator does not know.
        """
        return cls(kernel, tuple(compile_kernel(kernel)))

    @cached_property
    def meetings(self) -> Sequence[int]:
        """The operations by which threads wait for others, or tell them to go on."""
        return [
            place
            for place, operation in enumerate(self.operations)
            if operation.polls or operation.kind in MEETINGS
        ]


@dataclass(frozen=True)
class Geometry:
    """The shape of a launch.

    Attributes:
        grid: Blocks.
        block: Threads of a block, in one dimension.
        cluster: Blocks of a cluster.
        shared_bytes: Dynamic shared memory of a block.
    """

    grid: Shape
    block: int
    cluster: Shape = (1, 1, 1)
    shared_bytes: int = 0

    @property
    def clusters(self) -> int:
        """Clusters of the grid."""
        counts = [g // c for g, c in zip(self.grid, self.cluster, strict=True)]
        return counts[0] * counts[1] * counts[2]

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


class Grid(Protocol):
    """A launch, as a machine sees it."""

    rank: int
    parameters: bytes

    @property
    def may_pass_wait(self) -> bool:
        """Whether ``griddepcontrol.wait`` is over."""

    def block_triggered(self, blocks: int) -> None:
        """Some blocks have let dependents start, or have exited."""

    def block_exited(self, blocks: int) -> None:
        """Some blocks have exited."""


class Delays(Protocol):
    """Stores on their way, where they do not land at once."""

    def store(self, grid: Grid, addresses: Array, values: Array) -> None:
        """Takes stores of a launch, into the memory of other ranks."""

    def fence(self, grid: Grid) -> None:
        """Lands what a launch has stored."""


@dataclass(frozen=True)
class Starved:
    """Threads that do not run as long as any others can.

    Attributes:
        threads: Which.
        since: The instruction that they still get to.
    """

    threads: Array
    since: int

    def fed(self, pc: Array) -> Array:
        """The threads that may run, given the instruction of each."""
        return ~self.threads | (pc < self.since)


class Machine:
    """Some clusters of launches of one kernel, all of one geometry.

    Attributes:
        grids: The launches.
        status: What each thread is doing.
        pc: The instruction of each thread.
        executed: Operations executed so far.
        mbarriers: The mbarriers of the blocks.
        copies: Copies to shared memory that no thread has waited for.
    """

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        grids: Sequence[Grid],
        clusters: Sequence[tuple[int, int]],
        memory: GlobalMemory,
        delays: Delays | None = None,
    ) -> None:
        """Starts no block yet.

        Args:
            program: The kernel.
            geometry: The shape of each launch.
            grids: The launches.
            clusters: For each cluster, the place of its launch, and its number there.
            memory: The global memory of all ranks.
            delays: Takes stores into other ranks' memory; None lets them land at once.
        """
        self.program = program
        self.geometry = geometry
        self.grids = grids
        self.memory = memory
        self.delays = delays
        self.executed = 0
        self._polls = False  # whether any thread may be polling
        self._polled_version = -1
        self._idle = True  # no thread is ready; where it is false, some may be

        self.cluster_blocks = geometry.cluster_blocks
        self.padded = -(-geometry.block // WARP) * WARP
        self.cluster_threads = self.cluster_blocks * self.padded
        self.clusters = len(clusters)
        self.blocks = self.clusters * self.cluster_blocks
        self.threads = self.blocks * self.padded
        self.grid_of_cluster = np.array([grid for grid, _ in clusters])
        self.cluster_number = np.array([number for _, number in clusters])

        thread = np.arange(self.threads)
        self.block_of = thread // self.padded
        self.grid_of = self.grid_of_cluster[thread // self.cluster_threads]
        self.pc = np.zeros(self.threads, np.int32)
        self.status = np.full(self.threads, UNSTARTED, np.uint8)
        self.status[thread % self.padded >= geometry.block] = EXITED
        self.exists = self.status != EXITED
        self.live = np.full(self.blocks, geometry.block)
        self.arrivals = np.zeros(self.threads, np.int32)
        self.waits = np.zeros(self.threads, np.int32)
        self.waiting = np.zeros((BARRIERS, self.blocks), np.int64)
        self.barrier_size = np.zeros((BARRIERS, self.blocks), np.int64)
        self.barrier_of = np.zeros(self.threads, np.uint8)
        self.started = np.zeros(self.blocks, bool)
        self.triggered = np.zeros(self.blocks, bool)
        self.registers: list[Array | None] = [None] * len(program.kernel.registers)
        self.specials: dict[str, Array] = {}
        self.parameters = np.array(
            [np.frombuffer(grid.parameters, np.uint8) for grid in grids]
        ).reshape(len(grids), -1)
        self.shared = SharedMemory(
            self.blocks,
            SHARED_BASE,
            program.kernel.static_shared + geometry.shared_bytes,
        )
        self.in_flight: list[tuple[Array, Array, Array, Array]] = []
        self.copies: list[_Copies] = []
        self.mbarriers = Mbarriers(self.shared, self.threads, self._wake_block)

    @property
    def done(self) -> bool:
        """Whether every thread has exited."""
        return not self.live.any()

    @property
    def is_ready(self) -> bool:
        """Whether any thread can go on."""
        if not self._idle:
            self._idle = not (self.status == READY).any()
        return not self._idle

    @property
    def is_stale(self) -> bool:
        """Whether threads poll, and memory has changed since."""
        return self._polls and self._polled_version != self.memory.version

    def start(self, blocks: Array) -> None:
        """Lets some blocks run."""
        self.started[blocks] = True
        now = self.started[self.block_of] & (self.status == UNSTARTED)
        self.status[now] = READY
        self._idle = False

    def wake_polls(self) -> bool:
        """Lets threads that poll look at memory again; whether there were any."""
        polling = self.status == POLLING
        self.status[polling] = READY
        self._polls = False
        self._idle = False
        return bool(polling.any())

    def _wake_block(self, block: int) -> None:
        """Lets those threads of a block look again that poll an mbarrier."""
        polling = (self.status == POLLING) & (self.block_of == block)
        self.status[polling] = READY
        self._idle = False

    def pass_grid_wait(self) -> None:
        """Lets threads go on whose launch need not wait any more."""
        waiting = self.status == AT_GRID
        if waiting.any():
            may_pass = np.array([grid.may_pass_wait for grid in self.grids])
            self._go_on(waiting & may_pass[self.grid_of])

    def _go_on(self, threads: Array) -> None:
        """Lets threads that waited continue behind their instruction."""
        self.status[threads] = READY
        self.pc[threads] += 1
        self._idle = False

    def run(
        self,
        allowed: Array | None = None,
        budget: int = NEVER,
        starved: Starved | None = None,
    ) -> int:
        """Executes until nothing allowed is ready or the budget is used up.

        Args:
            allowed: Which threads may run; None for all.
            budget: The largest number of operations.
            starved: Which of them do not, from some instruction on.

        Returns:
            The operations executed.

        Raises:
            EmulatorError: A thread did what it must not.
        """
        executed = 0
        budget = min(budget, RUNAWAY - self.executed)
        with np.errstate(all="ignore"):
            while executed < budget:
                ready = self.status == READY
                if allowed is not None:
                    ready &= allowed
                if starved is not None:
                    ready &= starved.fed(self.pc)
                threads = np.flatnonzero(ready)
                if not threads.size:
                    break
                at = self.pc[threads]
                lowest = int(at.min())
                others = at != lowest
                meeting = NEVER
                if starved is not None and lowest < starved.since:
                    meeting = starved.since
                if others.any():
                    meeting = min(meeting, int(at[others].min()))
                    threads = threads[~others]
                executed += self._run(threads, lowest, meeting, budget - executed)
        self.executed += executed
        if self.executed >= RUNAWAY:
            raise EmulatorError(
                f"{self.program.kernel.label} runs away: {self.executed} operations"
            )
        return executed

    def _run(self, threads: Array, pc: int, meeting: int, budget: int) -> int:
        """Executes threads that are all at ``pc``, at most up to ``meeting``."""
        frame = ThreadFrame(self, threads)
        operations = self.program.operations
        executed = 0
        try:
            while executed < budget and pc != meeting:
                operation = operations[pc]
                executed += 1
                holds = None
                if operation.guard >= 0:
                    holds = frame.read(operation.guard) ^ operation.negated
                    if holds.all():
                        holds = None
                    elif not holds.any():
                        pc += 1
                        continue
                if operation.kind is Kind.COMPUTE:
                    assert operation.run is not None
                    operation.run(frame if holds is None else frame.part(holds))
                    frame.active = threads
                    pc += 1
                elif operation.kind is Kind.BRANCH:
                    alone = holds is None and meeting == NEVER
                    if alone and not operation.polls:
                        pc = operation.target
                        continue
                    self._branch(threads, operation, pc, holds)
                    frame.flush()
                    return executed
                elif holds is not None:
                    # The others go on; this instruction is then met without them.
                    self.pc[threads] = np.where(holds, pc, pc + 1)
                    frame.flush()
                    return executed
                elif _HANDLERS[operation.kind](self, frame, operation, pc):
                    pc += 1
                else:
                    return executed
        except Fault as fault:
            raise self.located(fault, frame.active, pc) from None
        frame.flush()
        self.pc[threads] = pc
        return executed

    def _branch(
        self, threads: Array, operation: Operation, pc: int, holds: Array | None
    ) -> None:
        taken = threads if holds is None else threads[holds]
        self.pc[threads] = pc + 1
        self.pc[taken] = operation.target
        if operation.polls:
            self.status[taken] = POLLING
            self._polls = True
            self._polled_version = self.memory.version

    def waits_for(self, thread: int) -> str:
        """What a thread that cannot go on waits for."""
        status = int(self.status[thread])
        if status == AT_BARRIER:
            number, block = int(self.barrier_of[thread]), int(self.block_of[thread])
            needed = self.barrier_size[number, block] or self.live[block]
            return (
                f"{WAITS_FOR[status]}, number {number}, where "
                f"{self.waiting[number, block]} of {needed} threads are"
            )
        if status == POLLING and (awaited := self.mbarriers.describe_awaited(thread)):
            return awaited
        return WAITS_FOR[status]

    def located(self, fault: Fault, threads: Array, pc: int) -> ExecutionError:
        """The error for a fault of one of some threads."""
        lane = min(fault.lane, threads.size - 1)
        return fault.error(fault.reason, self.place(int(threads[lane]), pc))

    def place(self, thread: int, pc: int | None = None) -> Place:
        """Where a thread is."""
        at = int(self.pc[thread]) if pc is None else pc
        instruction = self.program.operations[at].instruction
        kernel = self.program.kernel
        block = tuple(
            int(self.special(f"%ctaid.{axis}")[thread]) for axis in ("x", "y", "z")
        )
        return Place(
            kernel.label,
            instruction.line,
            instruction.text.replace(kernel.name, kernel.label),
            self.grids[int(self.grid_of[thread])].rank,
            (block[0], block[1], block[2]),
            int(thread % self.padded),
        )

    def special(self, name: str) -> Array:
        """A special register of all threads."""
        if name not in self.specials:
            self.specials[name] = self._special(name)
        return self.specials[name]

    def _special(self, name: str) -> Array:
        thread = np.arange(self.threads)
        base, _, axis = name.partition(".")
        index = "xyz".index(axis) if axis else 0
        block = thread % self.padded
        grid, cluster = self.geometry.grid, self.geometry.cluster
        in_cluster = self.block_of % self.cluster_blocks
        number = self.cluster_number[thread // self.cluster_threads]
        counts = (
            grid[0] // cluster[0],
            grid[1] // cluster[1],
            grid[2] // cluster[2],
        )
        values: dict[str, Callable[[], Array | int]] = {
            "%tid": lambda: block if index == 0 else 0,
            "%ntid": lambda: self.geometry.block if index == 0 else 1,
            "%laneid": lambda: block % WARP,
            "%warpid": lambda: block // WARP,
            "%nctaid": lambda: grid[index],
            "%ctaid": lambda: (
                _coordinate(number, counts, index) * cluster[index]
                + _coordinate(in_cluster, cluster, index)
            ),
            "%clusterid": lambda: _coordinate(number, counts, index),
            "%nclusterid": lambda: counts[index],
            "%cluster_ctaid": lambda: _coordinate(in_cluster, cluster, index),
            "%cluster_nctaid": lambda: cluster[index],
            "%cluster_ctarank": lambda: in_cluster,
            "%cluster_nctarank": lambda: self.cluster_blocks,
        }
        if base not in values:
            raise Fault(ExecutionError, f"the special register {name} is not known")
        return np.broadcast_to(np.asarray(values[base](), np.uint32), self.threads)

    # --- what only the machine can execute: each tells whether the threads go on ----

    def _warp(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        assert operation.run is not None
        if frame.whole and operation.mask is None:
            operation.run(frame)
            return True
        return self._gathered(frame, operation, pc)

    def _gathered(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        """A warp operation that has to wait until all lanes of its mask are there."""
        threads = frame.threads
        masks = np.full(threads.size, FULL_MASK, np.uint32)
        if operation.mask is not None:
            masks = np.broadcast_to(operation.mask(frame), threads.shape)
        own = masks >> (threads % WARP).astype(np.uint32) & np.uint32(1)
        if not own.all():
            raise Fault(
                LaneError,
                "a lane executes a warp operation whose mask does not name it",
                int(np.flatnonzero(own == 0)[0]),
            )
        frame.flush()
        self.pc[threads] = pc
        self.status[threads] = AT_WARP
        warps, first = np.unique(threads // WARP, return_index=True)
        lanes = warps[:, None] * WARP + np.arange(WARP)
        named = masks[first, None] >> np.arange(WARP, dtype=np.uint32) & np.uint32(1)
        needed = named.astype(bool) & self.exists[lanes]
        gone = needed & (self.status[lanes] == EXITED)
        is_barrier = operation.instruction.opcode == "bar.warp.sync"
        if is_barrier:
            needed &= ~gone
        elif gone.any():
            warp, lane = np.argwhere(gone)[0]
            raise Fault(
                LaneError,
                f"lane {int(lane)} is named by the mask of a warp operation, and has "
                "exited",
                int(first[warp]),
            )
        here = (self.status[lanes] == AT_WARP) & (self.pc[lanes] == pc)
        complete = (here | ~needed).all(axis=1)
        together = lanes[complete][needed[complete]]
        if together.size:
            gathered = ThreadFrame(self, together)
            frame.active = together
            assert operation.run is not None
            operation.run(gathered)
            gathered.flush()
            self.status[together] = READY
            self.pc[together] = pc + 1
        return False

    def _block_barrier(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        waiting = self.waiting[operation.number]
        counts = np.bincount(self.block_of[frame.threads], minlength=self.blocks)
        needed = operation.threads or self.live
        if not waiting.any() and np.array_equal(counts, np.where(counts, needed, 0)):
            return True
        self._join_barrier(frame, operation, counts)
        frame.flush()
        self.pc[frame.threads] = pc
        self.status[frame.threads] = AT_BARRIER
        self.barrier_of[frame.threads] = operation.number
        self._release_barriers()
        return False

    def _block_arrive(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        counts = np.bincount(self.block_of[frame.threads], minlength=self.blocks)
        self._join_barrier(frame, operation, counts)
        self._release_barriers()
        return True

    def _join_barrier(
        self, frame: ThreadFrame, operation: Operation, counts: Array
    ) -> None:
        """Counts threads at a barrier that all its threads have not come to yet."""
        number, threads = operation.number, operation.threads
        waiting, size = self.waiting[number], self.barrier_size[number]
        wrong = (counts > 0) & (waiting > 0) & (size != threads)
        reason = "whose other threads name another number of them"
        if threads and not wrong.any():
            wrong = (counts > 0) & (waiting + counts > threads)
            reason = f"of {threads} threads, where more than these arrive"
        if wrong.any():
            raise Fault(
                BarrierError,
                f"a thread is at barrier {number} {reason}",
                int(np.flatnonzero(wrong[self.block_of[frame.threads]])[0]),
            )
        size[counts > 0] = threads
        waiting += counts

    def _release_barriers(self) -> None:
        for number, waiting in enumerate(self.waiting):
            if not waiting.any():
                continue
            size = self.barrier_size[number]
            complete = (waiting > 0) & (waiting == np.where(size, size, self.live))
            if complete.any():
                here = (self.status == AT_BARRIER) & (self.barrier_of == number)
                self._go_on(complete[self.block_of] & here)
                waiting[complete] = 0

    def _cluster_arrive(
        self, frame: ThreadFrame, operation: Operation, pc: int
    ) -> bool:
        threads = frame.threads
        ahead = self.arrivals[threads] != self.waits[threads]
        if ahead.any():
            raise Fault(
                BarrierError,
                "a thread arrives at the cluster barrier twice without a wait",
                int(np.flatnonzero(ahead)[0]),
            )
        if operation.releases and self.in_flight:
            self.land_shared(np.isin(np.arange(self.threads), threads))
        self.arrivals[threads] += 1
        self.mbarriers.publish(threads, self.arrivals[threads], operation.releases)
        self._release_clusters()
        return True

    def _release_clusters(self) -> None:
        waiting = self.status == AT_CLUSTER
        if waiting.any():
            complete = waiting & (self._arrived() > self.waits)
            self._go_on(complete)
            self.waits[complete] += 1

    def _arrived(self) -> Array:
        """For each thread, the barrier phase that its whole cluster has arrived at."""
        arrivals = np.where(self.status == EXITED, NEVER, self.arrivals)
        lowest = arrivals.reshape(self.clusters, -1).min(axis=1)
        return np.repeat(lowest, self.cluster_threads)

    def _cluster_wait(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        threads = frame.threads
        behind = self.arrivals[threads] <= self.waits[threads]
        if behind.any():
            raise Fault(
                BarrierError,
                "a thread waits at the cluster barrier without having arrived",
                int(np.flatnonzero(behind)[0]),
            )
        may_pass = self._arrived()[threads] > self.waits[threads]
        self.waits[threads[may_pass]] += 1
        return self._split(frame, may_pass, AT_CLUSTER, pc)

    def _split(self, frame: ThreadFrame, may_pass: Array, waits: int, pc: int) -> bool:
        """Some threads pass, the others wait."""
        if may_pass.all():
            return True
        frame.flush()
        self.pc[frame.threads] = np.where(may_pass, pc + 1, pc)
        self.status[frame.threads[~may_pass]] = waits
        return False

    def _grid_wait(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        may_pass = np.array([grid.may_pass_wait for grid in self.grids])
        return self._split(frame, may_pass[self.grid_of[frame.threads]], AT_GRID, pc)

    def _grid_trigger(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        self._trigger(np.unique(self.block_of[frame.threads]))
        return True

    def _trigger(self, blocks: Array) -> None:
        new = blocks[~self.triggered[blocks]]
        self.triggered[new] = True
        for index, count in self._by_grid(new):
            self.grids[index].block_triggered(count)

    def _by_grid(self, blocks: Array) -> list[tuple[int, int]]:
        grids = self.grid_of_cluster[blocks // self.cluster_blocks]
        index, counts = np.unique(grids, return_counts=True)
        return list(zip(index.tolist(), counts.tolist(), strict=True))

    def _exit(self, frame: ThreadFrame, operation: Operation, pc: int) -> bool:
        threads = frame.threads
        frame.flush()
        self.pc[threads] = pc
        self.status[threads] = EXITED
        counts = np.bincount(self.block_of[threads], minlength=self.blocks)
        self.live -= counts
        over = np.flatnonzero((counts > 0) & (self.live == 0))
        self._check_exit(threads, over)
        self._release_barriers()
        self._release_clusters()
        if over.size:
            if self.in_flight:
                ended = np.zeros(self.blocks, bool)
                ended[over] = True
                self.land_shared(ended[self.block_of])
            self._trigger(over)
            for index, count in self._by_grid(over):
                self.grids[index].block_exited(count)
        return False

    def _check_exit(self, threads: Array, over: Array) -> None:
        try:
            self.mbarriers.check_exit(over)
        except Fault as fault:
            block = over[fault.lane]
            fault.lane = int(np.flatnonzero(self.block_of[threads] == block)[0])
            raise

    # --- distributed shared memory --------------------------------------------------

    def _targets(self, threads: Array, addresses: Array) -> tuple[Array, Array]:
        """The blocks that addresses in the cluster are in, and the addresses there."""
        own = self.block_of[threads]
        block = (addresses >> np.uint32(CLUSTER_SPACE)).astype(np.int64)
        target = np.where(block == 0, own, own - own % self.cluster_blocks + block - 1)
        return target, addresses & np.uint32((1 << CLUSTER_SPACE) - 1)

    def store_cluster(self, threads: Array, addresses: Array, values: Array) -> None:
        """Stores into shared memory of any block of the cluster."""
        target, places = self._targets(threads, addresses)
        remote = target != self.block_of[threads]
        self._check_running(target)
        if self.delays is None or not remote.any():
            self.shared.store(target, places, values)
            return
        here = ~remote
        if here.any():
            self.shared.store(target[here], places[here], values[here])
        self.in_flight.append(
            (threads[remote], target[remote], places[remote], values[remote])
        )

    def land_shared(self, of_threads: Array) -> None:
        """Lands stores into other blocks that some threads have sent."""
        left = []
        for threads, target, places, values in self.in_flight:
            now = of_threads[threads]
            if now.any():
                try:
                    self._check_running(target[now])
                    self.shared.store(target[now], places[now], values[now])
                except Fault as fault:
                    raise self.located(
                        fault, threads[now], int(self.pc[threads[now][0]])
                    ) from None
            if not now.all():
                rest = ~now
                left.append((threads[rest], target[rest], places[rest], values[rest]))
        self.in_flight = left

    # --- asynchronous stores --------------------------------------------------------

    def store_async(
        self, threads: Array, addresses: Array, values: Array, flags: Array, pc: int
    ) -> None:
        """Sends stores into the cluster; their mbarriers tell when they have landed."""
        target, places = self._targets(threads, addresses)
        flag_target, flag_places = self._targets(threads, flags)
        apart = np.flatnonzero(target != flag_target)
        if apart.size:
            raise Fault(
                MemoryFaultError,
                "an asynchronous store with its data and its mbarrier in different "
                "blocks",
                int(apart[0]),
            )
        self._check_running(target)
        waits = np.where(target == self.block_of[threads], -1, self.waits[threads])
        self.mbarriers.send(pc, threads, target, places, values, flag_places, waits)
        if self.delays is None:
            self.land_stores()

    def land_stores(self, rng: np.random.Generator | None = None) -> None:
        """Lands asynchronous stores: all, or a random part of them."""
        try:
            if rng is None:
                self.mbarriers.land_all()
            else:
                self.mbarriers.land_some(rng)
        except LandingError as error:
            raise self.located(error.fault, error.threads, error.pc) from None

    # --- asynchronous copies --------------------------------------------------------

    def start_copies(
        self, threads: Array, places: Array, addresses: Array, reads: Array
    ) -> None:
        """Takes what threads copy to shared memory; nobody sees it before they wait."""
        blocks = self.block_of[threads]
        offsets = self.shared.claim(blocks, places, COPY_BYTES, Use.COPIES)
        copies = _Copies(threads, offsets, addresses, reads)
        copies.read(self.memory, reads)
        self.copies.append(copies)

    def read_copies(self, of_threads: Array) -> None:
        """Reads once more what some threads copy: they have not waited for it yet."""
        for copies in self.copies:
            copies.read(self.memory, copies.reads & of_threads[copies.threads])

    def land_copies(self, waiting: Array) -> None:
        """Lands what the waiting threads have copied."""
        left = []
        for copies in self.copies:
            now = np.isin(copies.threads, waiting)
            self.shared.fill(copies.offsets[now], copies.values[now])
            self.shared.release(copies.offsets[now], COPY_BYTES)
            if not now.all():
                left.append(copies.part(~now))
        self.copies = left

    def _check_running(self, blocks: Array) -> None:
        wrong = ~self.started[blocks] | (self.live[blocks] == 0)
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            state = "has exited" if self.started[blocks[lane]] else "has not started"
            raise Fault(
                MemoryFaultError,
                f"a store into the shared memory of block "
                f"{int(blocks[lane]) % self.cluster_blocks} of the cluster, which "
                f"{state}",
                lane,
            )


class _Copies:
    """Copies of global to shared memory, one element a thread.

    Attributes:
        threads: Who copies.
        offsets: The places in shared memory.
        addresses: The addresses in global memory.
        reads: Which of them are read; the other elements are zeros.
        values: What was read.
    """

    def __init__(
        self, threads: Array, offsets: Array, addresses: Array, reads: Array
    ) -> None:
        """Takes copies of zeros, until `read`."""
        self.threads = threads
        self.offsets = offsets
        self.addresses = addresses
        self.reads = reads
        self.values = np.zeros(threads.size, np.complex128)

    def read(self, memory: GlobalMemory, now: Array) -> None:
        """Reads some of the elements."""
        if now.any():
            self.values[now] = memory.load(self.addresses[now], COPY_BYTES)

    def part(self, chosen: Array) -> _Copies:
        """Some of the copies."""
        part = _Copies(
            self.threads[chosen],
            self.offsets[chosen],
            self.addresses[chosen],
            self.reads[chosen],
        )
        part.values = self.values[chosen]
        return part


def _coordinate(number: Array, shape: Shape, axis: int) -> Array:
    before = (1, shape[0], shape[0] * shape[1])[axis]
    return number // before % shape[axis]


_HANDLERS: dict[Kind, Callable[[Machine, ThreadFrame, Operation, int], bool]] = {
    Kind.WARP: Machine._warp,
    Kind.EXIT: Machine._exit,
    Kind.BLOCK_BARRIER: Machine._block_barrier,
    Kind.BLOCK_ARRIVE: Machine._block_arrive,
    Kind.CLUSTER_ARRIVE: Machine._cluster_arrive,
    Kind.CLUSTER_WAIT: Machine._cluster_wait,
    Kind.GRID_WAIT: Machine._grid_wait,
    Kind.GRID_TRIGGER: Machine._grid_trigger,
}


class ThreadFrame:
    """The registers of some threads while they execute together.

    Values are taken from the machine when they are first read, and given back by
    ``flush``. Where the threads are all threads, nothing is copied.
    """

    def __init__(self, machine: Machine, threads: Array) -> None:
        """Takes threads in rising order."""
        self.machine = machine
        self.threads = threads
        self.active = threads  # those that a fault is one of
        self._all = threads.size == machine.threads
        self._values: dict[int, Array] = {}
        self._changed: set[int] = set()
        self._whole: bool | None = None

    @property
    def whole(self) -> bool:
        """Whether the threads are whole warps."""
        if self._whole is None:
            threads = self.threads
            self._whole = threads.size % WARP == 0 and bool(
                np.all(threads[::WARP] % WARP == 0)
                and np.all(threads[WARP - 1 :: WARP] - threads[::WARP] == WARP - 1)
            )
        return self._whole

    def read(self, slot: int) -> Array:
        """A register of the threads; never to be changed in place."""
        value = self._values.get(slot)
        if value is None:
            stored = self.machine.registers[slot]
            if stored is None:
                raise Fault(ExecutionError, "a register is read before it is written")
            value = stored if self._all else stored[self.threads]
            self._values[slot] = value
        return value

    def write(self, slot: int, value: Array) -> None:
        """Sets a register to an array that nobody else holds, or to one number."""
        if value.ndim == 0:
            value = np.full(self.threads.size, value)
        self._values[slot] = value
        self._changed.add(slot)

    def flush(self) -> None:
        """Gives the registers back to the machine."""
        registers = self.machine.registers
        for slot in self._changed:
            value = self._values[slot]
            if self._all:
                registers[slot] = value
                continue
            stored = registers[slot]
            if stored is None:
                stored = registers[slot] = np.zeros(self.machine.threads, value.dtype)
            stored[self.threads] = value
        self._values.clear()
        self._changed.clear()

    def part(self, chosen: Array) -> PartialFrame:
        """Those of the threads where an array is true."""
        self.active = self.threads[chosen]
        return PartialFrame(self, chosen)

    def special(self, name: str) -> Array:
        """A special register."""
        return self.machine.special(name)[self.threads]

    def parameter(self, offset: int, width: int) -> Array:
        """Elements of the parameters of each thread's launch."""
        machine = self.machine
        raw = machine.parameters[:, offset : offset + width]
        element = np.dtype(np.complex128) if width == 16 else np.dtype(f"u{width}")
        values = np.ascontiguousarray(raw).view(element).ravel()
        return np.asarray(values[machine.grid_of[self.threads]])

    def load_global(self, addresses: Array, width: int) -> Array:
        """Elements of global memory."""
        return self.machine.memory.load(addresses, width)

    def store_global(self, addresses: Array, values: Array) -> None:
        """Stores into global memory; into another rank's, perhaps later."""
        machine = self.machine
        memory, delays = machine.memory, machine.delays
        if delays is None or addresses.size != self.threads.size:
            memory.store(addresses, values)
            return
        memory.check_store(addresses, values.itemsize)
        grids = machine.grid_of[self.threads]
        ranks = np.array([grid.rank for grid in machine.grids])[grids]
        remote = memory.owners(addresses) != ranks
        if remote.any():
            self._delay(grids[remote], addresses[remote], values[remote])
            addresses, values = addresses[~remote], values[~remote]
        if addresses.size:
            memory.store(addresses, values)

    def store_multicast(self, addresses: Array, values: Array) -> None:
        """Stores into global memory of all ranks, perhaps later."""
        machine = self.machine
        for places in machine.memory.multicast(addresses, values.itemsize):
            if machine.delays is None:
                machine.memory.store(places, values)
            else:
                machine.memory.check_store(places, values.itemsize)
                self._delay(machine.grid_of[self.threads], places, values)

    def _delay(self, grids: Array, addresses: Array, values: Array) -> None:
        delays = self.machine.delays
        assert delays is not None
        for index in np.unique(grids):
            mine = grids == index
            delays.store(self.machine.grids[index], addresses[mine], values[mine])

    def load_shared(self, addresses: Array, width: int) -> Array:
        """Elements of the block's shared memory."""
        machine = self.machine
        return machine.shared.load(machine.block_of[self.threads], addresses, width)

    def store_shared(self, addresses: Array, values: Array) -> None:
        """Stores into shared memory of the cluster."""
        self.machine.store_cluster(self.threads, addresses, values)

    def store_async(
        self, addresses: Array, values: Array, flags: Array, pc: int
    ) -> None:
        """Starts to store into shared memory of the cluster."""
        self.machine.store_async(self.threads, addresses, values, flags, pc)

    def init_mbarrier(self, addresses: Array, counts: Array) -> None:
        """Makes mbarriers in the block's shared memory."""
        machine = self.machine
        blocks = machine.block_of[self.threads]
        machine.mbarriers.initialise(self.threads, blocks, addresses, counts)

    def arrive_mbarrier(self, addresses: Array, expected: Array) -> None:
        """Arrives at mbarriers of the block, and lets them expect bytes."""
        machine = self.machine
        blocks = machine.block_of[self.threads]
        machine.mbarriers.arrive(blocks, addresses, expected)

    def passed_mbarrier(self, addresses: Array, parities: Array) -> Array:
        """Whether the phase of a parity is complete at mbarriers of the block."""
        machine = self.machine
        blocks = machine.block_of[self.threads]
        return machine.mbarriers.passed(self.threads, blocks, addresses, parities)

    def fence_mbarriers(self) -> None:
        """Makes initialised mbarriers visible to the cluster."""
        self.machine.mbarriers.fence(self.threads)

    def copy_shared(self, places: Array, addresses: Array, reads: Array) -> None:
        """Starts to copy elements to the block's shared memory, or zeros."""
        self.machine.start_copies(self.threads, places, addresses, reads)

    def wait_copies(self) -> None:
        """Waits for the copies that the threads have started."""
        self.machine.land_copies(self.threads)

    def map_shared(self, addresses: Array, blocks: Array) -> Array:
        """Shared addresses in other blocks of the cluster."""
        machine = self.machine
        blocks = np.broadcast_to(blocks, self.threads.shape)
        beyond = blocks >= machine.cluster_blocks
        if beyond.any():
            lane = int(np.flatnonzero(beyond)[0])
            raise Fault(
                MemoryFaultError,
                f"mapa names block {int(blocks[lane])} of a cluster of "
                f"{machine.cluster_blocks}",
                lane,
            )
        space = (blocks.astype(np.uint32) + np.uint32(1)) << np.uint32(CLUSTER_SPACE)
        return np.asarray(addresses | space)

    def fence(self) -> None:
        """Makes earlier stores visible before later ones."""
        machine = self.machine
        if machine.delays is not None:
            for index in np.unique(machine.grid_of[self.threads]):
                machine.delays.fence(machine.grids[index])


class PartialFrame(ThreadFrame):
    """Some threads of a frame, for one instruction under a predicate."""

    def __init__(self, frame: ThreadFrame, chosen: Array) -> None:
        """Takes the frame and which of its threads."""
        super().__init__(frame.machine, frame.threads[chosen])
        self._frame = frame
        self._chosen = chosen
        self._all = False

    def read(self, slot: int) -> Array:
        """A register of the threads."""
        return self._frame.read(slot)[self._chosen]

    def write(self, slot: int, value: Array) -> None:
        """Sets a register of the threads, and leaves those of the others."""
        try:
            merged = self._frame.read(slot).copy()
        except Fault:
            merged = np.zeros(self._frame.threads.size, value.dtype)
        merged[self._chosen] = value
        self._frame.write(slot, merged)
