"""Mbarriers, and the asynchronous stores that count their bytes there.

A store of `st.async` is on its way to a block of the cluster until it lands: then its
data is there, and its bytes are counted at the mbarrier beside it. Nobody may touch the
data before the phase is complete that counts them, and only a wait tells that it is. No
fence and no other barrier says anything about such a store.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import BarrierError, Fault, MemoryFaultError
from mhcgen.emulator.memory import SharedMemory, Use

LIMIT = (1 << 20) - 1
"""The largest number of arrivals, and of bytes, that an mbarrier counts."""

WIDTH = 8


@dataclass(eq=False)
class Mbarrier:
    """One mbarrier.

    Attributes:
        block: The block in whose shared memory it is.
        place: Its byte there.
        count: Arrivals of a phase.
        initialiser: The thread that initialised it.
        pending: Arrivals that the phase lacks.
        missing: Bytes that the phase lacks; below zero if they land before somebody
            expects them.
        phase: The number of phases that are complete.
        fed: The number of the phase that the last bytes were counted in, from 1 on.
        seen: The number of phases that a thread has waited for.
        fenced: Whether the initialiser has executed a fence since.
        published: The phase of the cluster's barrier that makes the initialisation
            known to the other blocks.
        landed: The places whose bytes were counted in the phase, and their width.
    """

    block: int
    place: int
    count: int
    initialiser: int
    pending: int
    missing: int = 0
    phase: int = 0
    fed: int = 0
    seen: int = 0
    fenced: bool = False
    published: int | None = None
    landed: list[tuple[Array, int]] = field(default_factory=list)

    def __str__(self) -> str:
        """Where it is."""
        return f"the mbarrier at byte {self.place} of shared memory"

    @property
    def lacks(self) -> str:
        """What the phase waits for."""
        return (
            f"phase {self.phase} lacks {self.pending} of {self.count} arrivals and "
            f"{self.missing} bytes"
        )

    def expect(self, size: int) -> None:
        """Takes bytes that the phase has to wait for besides; or that have landed."""
        self.missing += size
        if abs(self.missing) > LIMIT:
            raise Fault(
                BarrierError,
                f"{self} has to count {abs(self.missing)} bytes; it can count {LIMIT}",
            )

    def arrive(self) -> None:
        """Counts an arrival."""
        if self.pending == 0:
            raise Fault(
                BarrierError,
                f"an arrival too many at {self}, which takes {self.count} a phase",
            )
        self.pending -= 1

    def advance(self) -> bool:
        """Goes on to the next phase if this one is complete; whether it was."""
        if self.pending or self.missing > 0:
            return False
        if self.missing:
            raise Fault(
                BarrierError,
                f"{-self.missing} bytes more than {self} expects have landed",
            )
        self.phase += 1
        self.pending = self.count
        return True

    def stores_left(self, width: int) -> int:
        """How many stores may land before the phase is complete."""
        return LIMIT if self.pending else max(1, self.missing // width)


@dataclass
class _Sent:
    """What one instruction has sent: one element a thread."""

    pc: int
    threads: Array
    offsets: Array
    values: Array
    flags: Array

    def part(self, chosen: Array) -> "_Sent":
        return _Sent(
            self.pc,
            self.threads[chosen],
            self.offsets[chosen],
            self.values[chosen],
            self.flags[chosen],
        )


class LandingError(Exception):
    """A store that must not land, and who sent it."""

    def __init__(self, fault: Fault, threads: Array, pc: int) -> None:
        """Takes the fault, the threads that sent, and their instruction."""
        super().__init__(fault.reason)
        self.fault = fault
        self.threads = threads
        self.pc = pc


class Mbarriers:
    """The mbarriers of some blocks, and the stores on their way to them.

    Attributes:
        awaited: For each thread, the mbarrier that it found incomplete, or -1.
    """

    def __init__(
        self, shared: SharedMemory, threads: int, wake: Callable[[int], None]
    ) -> None:
        """Takes their memory, the number of threads, and who wakes a block's polls."""
        self.shared = shared
        self.awaited = np.full(threads, -1)
        self._wake = wake
        self._all: dict[int, Mbarrier] = {}
        self._unpublished: list[Mbarrier] = []
        self._sent: list[_Sent] = []

    @property
    def in_flight(self) -> bool:
        """Whether any store has not landed."""
        return bool(self._sent)

    def describe_awaited(self, thread: int) -> str | None:
        """What a thread waits for, if it is an mbarrier."""
        mbarrier = self._all.get(int(self.awaited[thread]))
        return f"waits for {mbarrier}: {mbarrier.lacks}" if mbarrier else None

    # --- the block's own threads ----------------------------------------------------

    def initialise(
        self, threads: Array, blocks: Array, addresses: Array, counts: Array
    ) -> None:
        """Makes mbarriers, one a thread."""
        offsets = self.shared.claim(blocks, addresses, WIDTH, Use.MBARRIER)
        each = zip(offsets.tolist(), counts.tolist(), strict=True)
        for lane, (offset, count) in enumerate(each):
            if offset in self._all:
                raise Fault(BarrierError, "two threads initialise one mbarrier", lane)
            if not 1 <= count <= LIMIT:
                raise Fault(
                    BarrierError,
                    f"an mbarrier of {count} arrivals, not 1 to 2^20-1",
                    lane,
                )
            place = int(addresses[lane]) - self.shared.base
            mbarrier = Mbarrier(
                int(blocks[lane]), place, count, int(threads[lane]), count
            )
            self._all[offset] = mbarrier
            self._unpublished.append(mbarrier)

    def arrive(self, blocks: Array, addresses: Array, expected: Array) -> None:
        """Expects bytes, then arrives, for each thread."""
        offsets = self.shared.offsets(blocks, addresses, WIDTH)
        each = zip(offsets.tolist(), expected.tolist(), strict=True)
        for lane, (offset, size) in enumerate(each):
            mbarrier = self._find(offset, lane)
            try:
                mbarrier.expect(size)
                mbarrier.arrive()
                self._advance(mbarrier)
            except Fault as fault:
                fault.lane = lane
                raise

    def passed(
        self, threads: Array, blocks: Array, addresses: Array, parities: Array
    ) -> Array:
        """Whether the phase of a parity, this one or the last, is complete."""
        offsets = self.shared.offsets(blocks, addresses, WIDTH)
        flags, first, which = np.unique(offsets, return_index=True, return_inverse=True)
        found = [
            self._find(flag, lane)
            for flag, lane in zip(flags.tolist(), first.tolist(), strict=True)
        ]
        if (parities > 1).any():
            lane = int(np.flatnonzero(np.broadcast_to(parities > 1, offsets.shape))[0])
            raise Fault(BarrierError, "a phase has the parity 0 or 1", lane)
        current = np.array([mbarrier.phase & 1 for mbarrier in found], np.uint32)
        complete = current[which] != parities
        for index in np.unique(which[complete]).tolist():
            found[index].seen = found[index].phase
        self.awaited[threads] = np.where(complete, -1, offsets)
        return np.asarray(complete)

    def fence(self, threads: Array) -> None:
        """Some threads make what they have initialised visible to the cluster."""
        for mbarrier in self._unpublished:
            mbarrier.fenced |= bool((threads == mbarrier.initialiser).any())

    def publish(self, threads: Array, arrivals: Array, releases: bool) -> None:
        """Threads arrive at the cluster's barrier, each at a phase of it."""
        left = []
        for mbarrier in self._unpublished:
            here = np.flatnonzero(threads == mbarrier.initialiser)
            if here.size and (releases or mbarrier.fenced):
                mbarrier.published = int(arrivals[here[0]])
            else:
                left.append(mbarrier)
        self._unpublished = left

    def check_exit(self, blocks: Array) -> None:
        """Makes sure that nothing is on its way to blocks that are over.

        The fault's lane is the place among the blocks.
        """
        coming = [sent.flags for sent in self._sent]
        for flag in np.unique(np.concatenate(coming)).tolist() if coming else ():
            at = np.flatnonzero(blocks == self._all[flag].block)
            if at.size:
                raise Fault(
                    MemoryFaultError,
                    "a block exits while asynchronous stores are on their way to it, "
                    f"at {self._all[flag]}",
                    int(at[0]),
                )
        for mbarrier in self._all.values():
            at = np.flatnonzero(blocks == mbarrier.block)
            if at.size and mbarrier.fed > mbarrier.seen:
                raise Fault(
                    MemoryFaultError,
                    f"a block exits without a wait for phase {mbarrier.fed - 1} of "
                    f"{mbarrier}, where asynchronous stores are counted",
                    int(at[0]),
                )

    # --- stores ---------------------------------------------------------------------

    def send(
        self,
        pc: int,
        threads: Array,
        blocks: Array,
        addresses: Array,
        values: Array,
        flags: Array,
        waits: Array,
    ) -> None:
        """Takes stores, one a thread, that have not landed.

        Args:
            pc: The instruction.
            threads: Who stores.
            blocks: The blocks that they store into.
            addresses: Where.
            values: What, one element each.
            flags: The addresses of the mbarriers in the same blocks.
            waits: How often each thread has waited at the cluster's barrier; below
                zero for one that stores into its own block.
        """
        places = self.shared.offsets(blocks, flags, WIDTH)
        every, first, which = np.unique(places, return_index=True, return_inverse=True)
        found = [
            self._find(flag, lane)
            for flag, lane in zip(every.tolist(), first.tolist(), strict=True)
        ]
        never = np.iinfo(np.int64).max
        known = [never if m.published is None else m.published for m in found]
        early = np.flatnonzero((waits >= 0) & (waits < np.array(known)[which]))
        if early.size:
            raise Fault(
                BarrierError,
                f"an asynchronous store at {found[int(which[early[0]])]} of another "
                "block, which is not known to be initialised: its thread has to fence "
                "and arrive at the cluster's barrier, and this one to wait there",
                int(early[0]),
            )
        offsets = self.shared.claim(blocks, addresses, values.itemsize, Use.STORES)
        self._sent.append(_Sent(pc, threads, offsets, values, places))

    def land_all(self) -> None:
        """Lands all stores in order.

        Raises:
            LandingError: One must not land.
        """
        sent, self._sent = self._sent, []
        for batch in sent:
            self._land(batch)

    def land_some(self, rng: np.random.Generator) -> None:
        """Lands a random part of the stores, in a random order.

        Raises:
            LandingError: One must not land.
        """
        sent, self._sent = self._sent, []
        for index in rng.permutation(len(sent)).tolist():
            batch = sent[index]
            order = rng.permutation(batch.threads.size)
            count = int(rng.integers(order.size + 1))
            if count < order.size:
                self._sent.append(batch.part(order[count:]))
            if count:
                self._land(batch.part(order[:count]))

    def _land(self, sent: _Sent) -> None:
        width = sent.values.itemsize
        self.shared.fill(sent.offsets, sent.values)
        for flag in np.unique(sent.flags).tolist():
            mbarrier = self._all[flag]
            rest = np.flatnonzero(sent.flags == flag)
            while rest.size:
                now, rest = np.split(rest, [mbarrier.stores_left(width)])
                mbarrier.landed.append((sent.offsets[now], width))
                mbarrier.fed = mbarrier.phase + 1
                try:
                    mbarrier.expect(-now.size * width)
                    self._advance(mbarrier)
                except Fault as fault:
                    raise LandingError(fault, sent.threads[now], sent.pc) from None

    def _advance(self, mbarrier: Mbarrier) -> None:
        if mbarrier.advance():
            for offsets, width in mbarrier.landed:
                self.shared.release(offsets, width)
            mbarrier.landed.clear()
            self._wake(mbarrier.block)

    def _find(self, offset: int, lane: int) -> Mbarrier:
        mbarrier = self._all.get(offset)
        if mbarrier is None:
            raise Fault(
                BarrierError,
                f"no mbarrier was initialised at byte "
                f"{offset % self.shared.stride} of shared memory",
                lane,
            )
        return mbarrier
