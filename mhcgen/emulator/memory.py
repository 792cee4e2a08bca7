"""Memory that knows what was allocated and what was written.

Global memory holds named allocations, each of one rank, with guard space between them.
A multicast window is an address range that stands for the same place in an allocation
of every rank. Shared memory is one piece a block. Every byte has a state beside it, so
that an access to what is not allocated, or that nothing has written, is a fault.
"""

import bisect
import contextlib
import enum
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import Fault, MemoryFaultError, UnwrittenError

GLOBAL_BASE = 0x7F00_0000_0000
WINDOW_BASE = 0x7FF0_0000_0000
WINDOW_STRIDE = 1 << 36
ALIGNMENT = 256
GUARD = 4096
MAP_NORESERVE = 0x4000  # Linux: memory that is never touched need not be there

_ALLOCATED = 1
_WRITTEN = 2
# Elements of 16 bytes have no integer type; the bits of these are only copied.
_ELEMENT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Arena:
    """Bytes, and the state of each."""

    def __init__(self, size: int) -> None:
        """Takes the number of bytes, a multiple of 16; none is allocated."""
        self.size = size
        self.data = _lazy_zeros(size)
        self.state = _lazy_zeros(size)
        self._data: dict[int, Array] = {
            width: self.data.view(t) for width, t in _ELEMENT.items()
        }
        self._state: dict[int, Array] = {
            width: self.state.view(t) for width, t in _ELEMENT.items()
        }

    def load(self, offsets: Array, width: int) -> Array:
        """The elements of ``width`` bytes at byte offsets, which must be aligned."""
        index = offsets >> offsets.dtype.type(width.bit_length() - 1)
        states = self._state[width].take(index)
        if np.count_nonzero(states.view(np.uint8) != _WRITTEN):
            self._fault(states, width)
        return np.asarray(self._data[width].take(index))

    def load_or(self, offsets: Array, unwritten: int) -> Array:
        """Words at byte offsets; a given one where some byte was never written."""
        states = self.state[offsets[:, np.newaxis] + np.arange(4)]
        words = self._data[4].take(offsets >> 2)
        return np.where((states == _WRITTEN).all(axis=1), words, np.uint32(unwritten))

    def store(self, offsets: Array, values: Array) -> None:
        """Writes elements at byte offsets, which must be aligned."""
        width = values.itemsize
        index = offsets >> offsets.dtype.type(width.bit_length() - 1)
        states = self._state[width].take(index)
        if np.count_nonzero(states.view(np.uint8)) != offsets.size * width:
            self._fault(states, width, stored=True)
        self._data[width][index] = values
        self._state[width][index] = _written(width)

    def close(self, offsets: Array, width: int) -> None:
        """Makes elements, which must be allocated, as if they were not."""
        index = offsets >> offsets.dtype.type(width.bit_length() - 1)
        states = self._state[width].take(index)
        if np.count_nonzero(states.view(np.uint8)) != offsets.size * width:
            self._fault(states, width, stored=True)
        self._state[width][index] = 0

    def fill(self, offsets: Array, values: Array) -> None:
        """Gives elements a value, whether they are allocated or not."""
        width = values.itemsize
        index = offsets >> offsets.dtype.type(width.bit_length() - 1)
        self._data[width][index] = values

    def open(self, offsets: Array, width: int) -> None:
        """Makes elements allocated, and written."""
        index = offsets >> offsets.dtype.type(width.bit_length() - 1)
        self._state[width][index] = _written(width)

    def _fault(self, states: Array, width: int, stored: bool = False) -> None:
        each = states.view(np.uint8).reshape(-1, width).min(axis=1)
        lane = int(np.flatnonzero(each < (_ALLOCATED if stored else _WRITTEN))[0])
        raise Fault(
            MemoryFaultError,
            "uninitialised" if each[lane] == _ALLOCATED else "unallocated",
            lane,
        )


def _lazy_zeros(size: int) -> Array:
    """Zeroed bytes that cost nothing until they are touched, page by small page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, max(size, 1), flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8, size)


def _views(content: Array) -> dict[int, Array]:
    return {width: content.view(element) for width, element in _ELEMENT.items()}


def _written(width: int) -> Array:
    return np.full(width, _WRITTEN, np.uint8).view(_ELEMENT[width])


def check_alignment(addresses: Array, width: int) -> None:
    """Makes sure that every address is a multiple of the access's width."""
    wrong = addresses & addresses.dtype.type(width - 1)
    if np.count_nonzero(wrong):
        lane = int(np.flatnonzero(wrong)[0])
        raise Fault(
            MemoryFaultError,
            f"misaligned: address {int(addresses[lane]):#x} is no multiple of {width}",
            lane,
        )


@dataclass(frozen=True)
class Allocation:
    """A piece of global memory.

    Attributes:
        name: What it holds, for messages.
        rank: Whose memory it is in.
        address: Where it starts.
        size: Its bytes.
    """

    name: str
    rank: int
    address: int
    size: int

    @property
    def offset(self) -> int:
        """Where it starts in the arena."""
        return self.address - GLOBAL_BASE


@dataclass(frozen=True)
class Window:
    """A multicast address range.

    Attributes:
        address: Where it starts.
        targets: The allocation of each rank that a store goes to.
    """

    address: int
    targets: tuple[Allocation, ...]


class GlobalMemory:
    """The global memory of all ranks, in one address space."""

    def __init__(self, capacity: int) -> None:
        """Takes the bytes that all allocations need together."""
        self.arena = Arena(-(-capacity // ALIGNMENT) * ALIGNMENT)
        self.allocations: list[Allocation] = []
        self.windows: list[Window] = []
        self.version = 0
        self._starts: list[int] = []
        self._owners = np.empty(0, np.int64)
        self._next = GUARD

    def allocate(
        self, name: str, size: int, rank: int = 0, reserved: bool = False
    ) -> Allocation:
        """Allocates memory that holds nothing yet.

        Args:
            name: What it is to hold, for messages.
            size: Its bytes.
            rank: Whose it is.
            reserved: Whether kernels may touch only what the host has written before.

        Raises:
            MemoryError: The capacity does not suffice.
        """
        start = self._next
        if start + size + GUARD > self.arena.size:
            raise MemoryError(
                f"{name} needs {size} bytes; {self.arena.size - start} of the "
                "emulated memory are left"
            )
        self._next = -(-(start + size + GUARD) // ALIGNMENT) * ALIGNMENT
        allocation = Allocation(name, rank, GLOBAL_BASE + start, size)
        self.allocations.append(allocation)
        self._starts.append(start)
        self._owners = np.append(self._owners, rank)
        if not reserved:
            self.arena.state[start : start + size] = _ALLOCATED
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Gives memory back: later accesses are faults."""
        start = allocation.offset
        self.arena.state[start : start + allocation.size] = 0

    def window(self, targets: Sequence[Allocation]) -> Window:
        """Maps a multicast window to one allocation of each rank."""
        address = WINDOW_BASE + WINDOW_STRIDE * len(self.windows)
        self.windows.append(Window(address, tuple(targets)))
        return self.windows[-1]

    def write(self, allocation: Allocation, values: Array, offset: int = 0) -> None:
        """Writes from the host."""
        start = allocation.offset + offset
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if offset < 0 or offset + content.size > allocation.size:
            raise IndexError(f"{content.size} bytes do not fit {allocation}")
        self.arena.data[start : start + content.size] = content
        self.arena.state[start : start + content.size] = _WRITTEN

    def read(self, allocation: Allocation, size: int) -> Array:
        """Reads the first bytes of an allocation from the host.

        Raises:
            UnwrittenError: Some were never written.
        """
        part = slice(allocation.offset, allocation.offset + size)
        missing = np.flatnonzero(self.arena.state[part] != _WRITTEN)
        if missing.size:
            raise UnwrittenError(
                f"{missing.size} of {size} bytes of {allocation.name} of "
                f"rank {allocation.rank} were never written, from byte {missing[0]} on"
            )
        return self.arena.data[part].copy()

    def load(self, addresses: Array, width: int) -> Array:
        """What a kernel loads: one element of ``width`` bytes an address."""
        check_alignment(addresses, width)
        try:
            return self.arena.load(self.offsets(addresses), width)
        except Fault as fault:
            raise self._explained(fault, addresses, width) from None

    def store(self, addresses: Array, values: Array) -> None:
        """What a kernel stores: one element an address."""
        check_alignment(addresses, values.itemsize)
        try:
            self.arena.store(self.offsets(addresses), values)
        except Fault as fault:
            raise self._explained(fault, addresses, values.itemsize) from None
        self.version += 1

    def check_store(self, addresses: Array, width: int) -> None:
        """Faults as a store would, without one."""
        check_alignment(addresses, width)
        states = self.arena.state.take(self.offsets(addresses))
        if not states.all():
            fault = Fault(
                MemoryFaultError, "unallocated", int(np.flatnonzero(states == 0)[0])
            )
            raise self._explained(fault, addresses, width)

    def owners(self, addresses: Array) -> Array:
        """The rank whose memory each address is in."""
        index = np.searchsorted(self._starts, self.offsets(addresses), "right") - 1
        return np.asarray(self._owners[index])

    def multicast(self, addresses: Array, width: int) -> list[Array]:
        """The addresses that a multicast store goes to, one array a rank."""
        check_alignment(addresses, width)
        first = int(addresses[0])
        for window in self.windows:
            size = min(target.size for target in window.targets)
            if window.address <= first < window.address + WINDOW_STRIDE:
                offsets = addresses - np.uint64(window.address)
                outside = offsets > np.uint64(size - width)
                if outside.any():
                    lane = int(np.flatnonzero(outside)[0])
                    raise Fault(
                        MemoryFaultError,
                        f"out of bounds: byte {int(offsets[lane])} of a multicast "
                        f"window of {size}",
                        lane,
                    )
                return [offsets + np.uint64(t.address) for t in window.targets]
        raise Fault(
            MemoryFaultError,
            f"a multimem store to {self.describe(first)}: it takes ordinary accesses, "
            "and multimem stores need a multicast address",
        )

    def offsets(self, addresses: Array) -> Array:
        """Places in the arena, all inside of it."""
        offsets = addresses - np.uint64(GLOBAL_BASE)
        if offsets.max() >= self.arena.size:
            outside = offsets >= self.arena.size
            fault = Fault(
                MemoryFaultError, "unallocated", int(np.flatnonzero(outside)[0])
            )
            raise self._explained(fault, addresses, 1)
        return offsets.view(np.int64)

    def _explained(self, fault: Fault, addresses: Array, width: int) -> Fault:
        if fault.reason not in ("unallocated", "uninitialised"):
            return fault
        address = int(addresses[fault.lane])
        if address >= WINDOW_BASE:
            reason = (
                f"an ordinary access of multicast address {address:#x}: it takes "
                "multimem stores only"
            )
        elif fault.reason == "uninitialised":
            reason = (
                f"uninitialised read: {width} bytes at {self.describe(address)}, "
                "which nothing has written"
            )
        elif self._is_inside(address, width):
            reason = (
                f"out of bounds: {width} bytes at {self.describe(address)}, which are "
                "reserved or freed"
            )
        else:
            reason = f"out of bounds: {width} bytes at {self.describe(address)}"
        return Fault(fault.error, reason, fault.lane)

    def _before(self, address: int) -> Allocation | None:
        """The last allocation that starts at an address or before."""
        place = bisect.bisect_right(self._starts, address - GLOBAL_BASE) - 1
        return self.allocations[place] if place >= 0 else None

    def _is_inside(self, address: int, width: int) -> bool:
        near = self._before(address)
        return near is not None and address + width <= near.address + near.size

    def describe(self, address: int) -> str:
        """An address by its allocation."""
        near = self._before(address)
        if near is None:
            return f"address {address:#x}"
        return (
            f"byte {address - near.address} of {near.name} of rank {near.rank} "
            f"({near.size} bytes)"
        )


class Use(enum.IntEnum):
    """What shared memory is used for while ordinary accesses have to keep away."""

    COPIES = 1
    STORES = 2
    MBARRIER = 3


_USES = {
    Use.COPIES: "to which a copy is on its way that its thread has not waited for",
    Use.STORES: "to which an asynchronous store is on its way, in an mbarrier's phase "
    "that is not complete",
    Use.MBARRIER: "where an mbarrier is",
}


class SharedMemory:
    """The shared memory of some blocks, all of one size."""

    def __init__(self, blocks: int, base: int, size: int) -> None:
        """Takes the number of blocks, the first address and the bytes of each."""
        self.base = base
        self.size = size
        self.stride = -(-max(size, 1) // 16) * 16
        self.arena = Arena(blocks * self.stride)
        self.arena.state.reshape(blocks, -1)[:, :size] = _ALLOCATED
        self._uses = _lazy_zeros(self.arena.size)

    def load(self, blocks: Array, addresses: Array, width: int) -> Array:
        """Loads one element of ``width`` bytes an address."""
        offsets = self.offsets(blocks, addresses, width)
        try:
            return self.arena.load(offsets, width)
        except Fault as fault:
            if width == 16:
                with contextlib.suppress(Fault):
                    return self._three_of_four(offsets)
            raise self._explained(fault, offsets, width, "read") from None

    def _three_of_four(self, offsets: Array) -> Array:
        """Elements whose fourth word may be unwritten, and is then a NaN.

        The compiler widens a load of three words to four, the last of which it drops.
        """
        words = np.empty((offsets.size, 4), np.uint32)
        for index in range(3):
            words[:, index] = self.arena.load(offsets + 4 * index, 4)
        words[:, 3] = self.arena.load_or(offsets + 12, 0xFFFFFFFF)
        return np.asarray(words.view(_ELEMENT[16]).ravel())

    def store(self, blocks: Array, addresses: Array, values: Array) -> None:
        """Stores one element an address."""
        offsets = self.offsets(blocks, addresses, values.itemsize)
        try:
            self.arena.store(offsets, values)
        except Fault as fault:
            raise self._explained(fault, offsets, values.itemsize, "store") from None

    def claim(self, blocks: Array, addresses: Array, width: int, use: Use) -> Array:
        """Makes every access of some elements a fault, until they are released.

        Returns:
            The elements' places, for `fill` and `release`.
        """
        offsets = self.offsets(blocks, addresses, width)
        try:
            every, first = np.unique(offsets, return_index=True)
            if every.size != offsets.size:
                again = np.ones(offsets.size, bool)
                again[first] = False
                raise Fault(MemoryFaultError, "taken", int(np.flatnonzero(again)[0]))
            self.arena.close(offsets, width)
        except Fault as fault:
            raise self._explained(fault, offsets, width, "use", use) from None
        self._mark(offsets, width, use)
        return offsets

    def fill(self, offsets: Array, values: Array) -> None:
        """Writes claimed elements, which stay claimed."""
        self.arena.fill(offsets, values)

    def release(self, offsets: Array, width: int) -> None:
        """Lets ordinary accesses see claimed elements."""
        self.arena.open(offsets, width)
        self._mark(offsets, width, 0)

    def _mark(self, offsets: Array, width: int, use: int) -> None:
        index = offsets // width
        marks: Array = np.full(width, use, np.uint8).view(_ELEMENT[width])
        self._uses.view(_ELEMENT[width])[index] = marks

    def _explained(
        self, fault: Fault, offsets: Array, width: int, access: str, also: int = 0
    ) -> Fault:
        """The fault of an access inside of the memory; an access by two faults too."""
        first = int(offsets[fault.lane])
        place = f"{width} bytes at byte {first % self.stride} of shared memory"
        use = int(self._uses[first : first + width].max()) or also
        if use:
            reason = f"unordered {access}: {place}, {_USES[Use(use)]}"
        else:
            reason = f"uninitialised read: {place}, which nothing has written"
        return Fault(fault.error, reason, fault.lane)

    def offsets(self, blocks: Array, addresses: Array, width: int) -> Array:
        """The places of elements in the memory of all blocks."""
        check_alignment(addresses, width)
        offsets = addresses.astype(np.int64) - self.base
        if offsets.min() < 0 or offsets.max() > self.size - width:
            wrong = (offsets < 0) | (offsets > self.size - width)
            lane = int(np.flatnonzero(wrong)[0])
            raise Fault(
                MemoryFaultError,
                f"out of bounds: {width} bytes at byte {int(offsets[lane])} of "
                f"shared memory ({self.size} bytes)",
                lane,
            )
        return np.asarray(blocks * self.stride + offsets)
