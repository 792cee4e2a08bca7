"""The projection by fused multiply-adds in FP32, for types that tensor cores mix not.

Each thread multiplies its fragment of its stream with the same eight columns of every
row of fn. The sums of a warp then meet in shuffles, from which lane k takes number k.
"""

import cutlass
from cutlass import Float32, cute

#: if plan.fn_home == "shared" or plan.trips > 1
from . import ptx
#: endif
from .constants import (
#: if plan.fn_home == "shared"
    FRAGMENT_BYTES,
#: endif
#: if plan.trips > 1
#: if plan.idle_lanes
    FRAGMENTS,
#: endif
    HC,
#: endif
#: if plan.trips > 1 and plan.fn_home == "shared"
    FN_BYTES,
#: endif
#: if plan.trips > 1
    FN_FRAGMENT_BYTES,
#: endif
#: if plan.fn_home == "shared"
    FN_ROW_BYTES,
#: endif
    MIX,
    SQUARES,
    SUM_TILES,
#: if plan.trips > 1
    TRIPS,
#: endif
)
#: if plan.fn_home == "shared"
from .fn_rows import dot, widen
#: else
from .fn_rows import dot, load_row, widen
#: endif
from .steps import exchange_halves, unpack


#: if plan.fn_home == "registers"


def load_projection(address):
    """Loads a thread's eight elements of every row of fn."""
    return [load_row(address, row) for row in range(MIX)]
#: elif plan.fn_home == "shared"
#: if plan.trips > 1


def copy_projection(place, address, fragment, threads):
    """Starts to copy a thread's part of fn to shared memory.

    Each thread reads only what it has copied: [trip][step][thread], 16 bytes each.
    ``address`` is that of the thread's stream, ``fragment`` that of its first trip.
    """
    for trip in range(TRIPS):
#: if plan.idle_lanes
        taken = cutlass.min(fragment + trip * (threads // HC), FRAGMENTS - 1)
#: else
        taken = fragment + trip * (threads // HC)
#: endif
        for index, offset in enumerate(row_offsets()):
            ptx.copy_async(
                place + trip * (threads * FN_BYTES) + index * (threads * FRAGMENT_BYTES),
                address + taken * FN_FRAGMENT_BYTES + offset,
            )
#: else


def copy_projection(place, address, threads):
    """Starts to copy a thread's part of fn to shared memory.

    Each thread reads only what it has copied: [step][thread], 16 bytes each.
    """
    for index, offset in enumerate(row_offsets()):
        ptx.copy_async(place + index * (threads * FRAGMENT_BYTES), address + offset)
#: endif


def row_offsets():
    """From a thread's first 16 bytes of fn to the others of its eight columns."""
#: if plan.fn_halves == 2
    return [
        row * FN_ROW_BYTES + half * FRAGMENT_BYTES
        for row in range(MIX)
        for half in range(2)
    ]
#: else
    return [row * FN_ROW_BYTES for row in range(MIX)]
#: endif


def read_row(place, row, threads):
    """Reads a thread's eight elements of a row of fn from shared memory."""
#: if plan.fn_halves == 2
    place = place + 2 * row * (threads * FRAGMENT_BYTES)
    second = place + threads * FRAGMENT_BYTES
    return [*ptx.load_shared(place), *ptx.load_shared(second)]
#: else
    return ptx.load_shared(place + row * (threads * FRAGMENT_BYTES))
#: endif
#: endif


def sum_over_warp(sums, lane):
    """Sums 32 values over a warp; lane k gets number k."""
    sums = [*sums, *[Float32(0.0)] * (32 - len(sums))]
    for distance in (16, 8, 4, 2, 1):
        sums = exchange_halves(sums, distance, (lane & distance) != 0)
    return sums[0]


def add_products(sums, first, read, values):
    """Adds a fragment's products with fn, from row ``first`` on, and its squares."""
    return [
        dot(widen(read(number)) if number < MIX else values, values, total)
        for number, total in enumerate(sums, first)
    ]
#: if plan.trips > 1


@cute.jit
#: if plan.fn_home == "shared"
def project(fn_place, place, trip_bytes, lane, threads):
#: else
def project(fn_stream, fragment, place, trip_bytes, lane, threads):
#: endif
    """Step 3 on a warp's columns of a token: its dot products and its square sum.

    Args:
#: if plan.fn_home == "shared"
        fn_place: The thread's part of fn in shared memory.
#: else
        fn_stream: The address of the thread's stream in fn.
        fragment: The thread's fragment in the first trip.
#: endif
        place: The thread's fragment of the token in the stash, in the first trip.
        trip_bytes: From the fragment of one trip to that of the next in the stash.
        lane: The lane.
        threads: Threads of the block.

    Returns:
        Number k of the sums in lane k, of each 32 sums.
    """
    tiles = []
    for first in cutlass.range_constexpr(0, SQUARES + 1, 32):
        sums = [Float32(0.0) for _ in range(min(32, SQUARES + 1 - first))]
        for trip in cutlass.range(TRIPS):
            values = unpack(ptx.load_shared(place + trip * trip_bytes))
#: if plan.fn_home == "shared"
            rows = fn_place + trip * (threads * FN_BYTES)
            sums = add_products(
                sums, first, lambda row: read_row(rows, row, threads), values
            )
#: else
#: if plan.idle_lanes
            taken = cutlass.min(fragment + trip * (threads // HC), FRAGMENTS - 1)
#: else
            taken = fragment + trip * (threads // HC)
#: endif
            rows = fn_stream + taken * FN_FRAGMENT_BYTES
            sums = add_products(sums, first, lambda row: load_row(rows, row), values)
#: endif
        tiles.append(sum_over_warp(sums, lane))
    return tiles
#: else


#: if plan.fn_home == "registers"
def project(rows, new, lane):
#: elif plan.fn_home == "shared"
def project(fn_place, new, lane, threads):
#: else
def project(fn_address, new, lane):
#: endif
    """Step 3 on a warp's 256 columns of a token: its dot products and its square sum.

    Args:
#: if plan.fn_home == "registers"
        rows: What ``load_projection`` gave.
#: elif plan.fn_home == "shared"
        fn_place: The thread's part of fn in shared memory.
#: else
        fn_address: The thread's eight columns of the first row of fn.
#: endif
        new: The thread's fragment of its stream.
        lane: The lane.
#: if plan.fn_home == "shared"
        threads: Threads of the block.
#: endif

    Returns:
        Number k of the sums in lane k, of each 32 sums.
    """
    values = unpack(new)
    tiles = []
    for first in range(0, SQUARES + 1, 32):
        sums = [Float32(0.0)] * min(32, SQUARES + 1 - first)
#: if plan.fn_home == "registers"
        sums = add_products(sums, first, lambda row: rows[row], values)
#: elif plan.fn_home == "shared"
        sums = add_products(
            sums, first, lambda row: read_row(fn_place, row, threads), values
        )
#: else
        sums = add_products(sums, first, lambda row: load_row(fn_address, row), values)
#: endif
        tiles.append(sum_over_warp(sums, lane))
    return tiles
#: endif


@cute.jit
def store_sums(partials: cute.Tensor, sums, lane):
    """Stores a warp's sums of a token."""
    for tile in cutlass.range_constexpr(SUM_TILES):
        if tile * 32 + lane <= SQUARES:
            partials[tile * 32 + lane] = sums[tile]
