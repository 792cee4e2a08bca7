"""The projection by fused multiply-adds in FP32, for types that tensor cores mix not.

Each thread multiplies its fragment of its stream with the same eight columns of every
row of fn. Sums of a warp meet in shuffles, 32 at a time, of which lane k takes number
k; whatever they are of, the lanes are added in the same order.
"""

import cutlass
from cutlass import Float32, cute

#: if plan.grouped or plan.fn_home == "shared"
from . import ptx
#: endif
from .constants import (
#: if plan.fn_home == "shared"
#: if plan.trips > 1
    FN_BYTES,
    FN_FRAGMENT_BYTES,
#: endif
    FN_ROW_BYTES,
    FRAGMENT_BYTES,
#: elif plan.trips > 1
    FN_FRAGMENT_BYTES,
#: endif
#: if plan.trips > 1 and plan.idle_lanes
    FRAGMENTS,
#: endif
#: if plan.trips > 1
    HC,
#: endif
    MIX,
#: if plan.grouped
    ROW_OCTETS,
#: endif
    SQUARES,
#: if plan.grouped
    STASH_TOKEN,
#: endif
#: if plan.single
    SUM_TILES,
#: endif
#: if plan.trips > 1
    TRIPS,
#: endif
)
#: if plan.fn_home == "shared"
from .fn_rows import dot, widen
#: else
from .fn_rows import dot, load_row, widen
#: endif
#: if plan.grouped
from .steps import exchange_halves, sum_warp, unpack
#: else
from .steps import exchange_halves, unpack
#: endif
#: if plan.trips > 1


def taken_fragment(fragment, trip, threads):
    """A thread's fragment in a trip, given its first."""
#: if plan.idle_lanes
    return cutlass.min(fragment + trip * (threads // HC), FRAGMENTS - 1)
#: else
    return fragment + trip * (threads // HC)
#: endif
#: endif
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
        taken = taken_fragment(fragment, trip, threads)
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
    first = place + row * (2 * threads * FRAGMENT_BYTES)
    second = first + threads * FRAGMENT_BYTES
    return [*ptx.load_shared(first), *ptx.load_shared(second)]
#: else
    return ptx.load_shared(place + row * (threads * FRAGMENT_BYTES))
#: endif
#: endif


def sum_over_warp(sums, lane):
    """Sums 32 values over a warp; lane k gets number k."""
    for distance in (16, 8, 4, 2, 1):
        sums = exchange_halves(sums, distance, (lane & distance) != 0)
    return sums[0]
#: if plan.single


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
    sums = []
    for row in range(MIX):
#: if plan.fn_home == "registers"
        weights = rows[row]
#: elif plan.fn_home == "shared"
        weights = read_row(fn_place, row, threads)
#: else
        weights = load_row(fn_address, row)
#: endif
        sums.append(dot(widen(weights), values, Float32(0.0)))
    sums.append(dot(values, values, Float32(0.0)))
    sums += [Float32(0.0)] * (32 * SUM_TILES - len(sums))
    return [
        sum_over_warp(sums[first : first + 32], lane)
        for first in range(0, len(sums), 32)
    ]


@cute.jit
def store_sums(partials: cute.Tensor, sums, lane):
    """Stores a warp's sums of a token."""
    for tile in cutlass.range_constexpr(SUM_TILES):
        if tile * 32 + lane <= SQUARES:
            partials[tile * 32 + lane] = sums[tile]
#: endif
#: if plan.grouped


def add_octet(sums, weights, tokens):
    """Adds the products of an octet of rows with four tokens: [token][row]."""
    products = []
    for first, words in zip(range(0, 32, 8), tokens, strict=True):
        values = unpack(words)
        octet = sums[first : first + 8]
        products += [
            dot(widen(row), values, total)
            for row, total in zip(weights, octet, strict=False)
        ]
        products += octet[len(weights) :]
    return products


@cute.jit
#: if plan.trips > 1
#: if plan.fn_home == "shared"
def project_group(
    partials: cute.Tensor, fn_place, stash, trip_bytes, lane, count, threads
):
#: else
def project_group(
    partials: cute.Tensor, fn_stream, fragment, stash, trip_bytes, lane, count, threads
):
#: endif
#: elif plan.fn_home == "registers"
def project_group(partials: cute.Tensor, rows, stash, lane, count):
#: elif plan.fn_home == "shared"
def project_group(partials: cute.Tensor, fn_place, stash, lane, count, threads):
#: else
def project_group(partials: cute.Tensor, fn_address, stash, lane, count):
#: endif
    """Step 3 on a warp's columns of some tokens, stored: products, square sums.

    Eight rows of fn meet four tokens at a time: 32 sums.

    Args:
        partials: The warp's sums, [token, sum].
#: if plan.fn_home == "registers"
        rows: What ``load_projection`` gave.
#: elif plan.fn_home == "shared"
        fn_place: The thread's part of fn in shared memory.
#: elif plan.trips > 1
        fn_stream: The address of the thread's stream in fn.
        fragment: The thread's fragment in the first trip.
#: else
        fn_address: The thread's eight columns of the first row of fn.
#: endif
        stash: The thread's fragment of the first token.
#: if plan.trips > 1
        trip_bytes: From the fragment of one trip to that of the next in the stash.
#: endif
        lane: The lane.
        count: Tokens; some may be taken twice, to no effect.
#: if plan.trips > 1 or plan.fn_home == "shared"
        threads: Threads of the block.
#: endif
    """
#: if plan.trips > 1
    for octet in cutlass.range(ROW_OCTETS, unroll=1):
        for first in cutlass.range(0, count, 4, unroll=1):
            places = [
                stash + cutlass.min(first + index, count - 1) * STASH_TOKEN
                for index in range(4)
            ]
            sums = [Float32(0.0) for _ in range(32)]
            for trip in cutlass.range(TRIPS, unroll=1):
#: if plan.fn_home == "shared"
                fn_trip = fn_place + trip * (threads * FN_BYTES)
                weights = [
                    read_row(fn_trip, octet * 8 + row, threads)
                    for row in range(min(8, MIX))
                ]
#: else
                fn_trip = (
                    fn_stream
                    + taken_fragment(fragment, trip, threads) * FN_FRAGMENT_BYTES
                )
                weights = [
                    load_row(fn_trip, octet * 8 + row) for row in range(min(8, MIX))
                ]
#: endif
                tokens = [ptx.load_shared(place + trip * trip_bytes) for place in places]
                sums = add_octet(sums, weights, tokens)
#: else
#: if plan.fn_home == "registers"
    for octet in cutlass.range_constexpr(ROW_OCTETS):
        weights = rows[octet * 8 : octet * 8 + 8]
#: else
    for octet in cutlass.range(ROW_OCTETS, unroll=1):
        weights = [
#: if plan.fn_home == "shared"
            read_row(fn_place, octet * 8 + row, threads) for row in range(min(8, MIX))
#: else
            load_row(fn_address, octet * 8 + row) for row in range(min(8, MIX))
#: endif
        ]
#: endif
        for first in cutlass.range(0, count, 4, unroll=1):
            tokens = [
                ptx.load_shared(
                    stash + cutlass.min(first + index, count - 1) * STASH_TOKEN
                )
                for index in range(4)
            ]
            sums = add_octet([Float32(0.0)] * 32, weights, tokens)
#: endif
            total = sum_over_warp(sums, lane)
            token, number = first + lane // 8, octet * 8 + lane % 8
            if token < count and number < MIX:
                partials[token, number] = total
    for index in cutlass.range(count):
#: if plan.trips > 1
        square = Float32(0.0)
        for trip in cutlass.range(TRIPS):
            place = stash + index * STASH_TOKEN + trip * trip_bytes
            values = unpack(ptx.load_shared(place))
            square = dot(values, values, square)
#: else
        values = unpack(ptx.load_shared(stash + index * STASH_TOKEN))
        square = dot(values, values, Float32(0.0))
#: endif
        square = sum_warp(square)
        if lane == 0:
            partials[index, SQUARES] = square
#: endif
