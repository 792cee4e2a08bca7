"""The steps that kernels are made of, each on one thread's fragment.

1. y = «plan.act»(sum over the ranks of x), pairwise in FP32.
2. new[j] = «plan.act»(post[j]*y + sum_i comb[i,j]*residual[i]): the residual streams.
3. mix[k] = (fn[k] . new) * rsqrt(mean over all streams of new^2 + rms_eps).
#: if plan.delayed
4. The next pre[j] = sigmoid(mix[j]*scale[0] + base[j]) + hc_eps, in mixes.py.
#: else
4. pre[j] = sigmoid(mix[j]*scale[0] + base[j]) + hc_eps.
#: endif
#: if plan.norm_weight == "none"
5. c = «plan.act»(sum_j pre[j]*new[j]); layer_input = «plan.act»(rms_norm(c)).
#: elif plan.norm_weight == "plus_one"
5. c = «plan.act»(sum_j pre[j]*new[j]); layer_input = «plan.act»(rms_norm(c) * (norm_weight+1)).
#: else
5. c = «plan.act»(sum_j pre[j]*new[j]); layer_input = «plan.act»(rms_norm(c) * norm_weight).
#: endif
6. The next post = post_mult * sigmoid(mix*scale[1] + base), in mixes.py.
7. The next comb: softmax and Sinkhorn passes over mix*scale[2] + base, in mixes.py.

A fragment is 16 bytes of a row, 8 «plan.activation», held as four 32-bit words or as eight FP32.
Functions without a decorator run while the kernel is traced: their loops are unrolled.
"""

import cutlass
from cutlass import Float32, Uint32, cute

from . import ptx
from .constants import (
#: if plan.lane_map.butterflies
    BUTTERFLIES,
#: endif
#: if plan.projection == "tensor_cores"
    CHUNK_BYTES,
    CHUNKS,
#: if plan.fn_home == "global"
    FN_AHEAD,
#: endif
    FN_OCTETS,
    FN_ROW_BYTES,
#: if plan.fn_home == "shared" or plan.trips > 1
    FRAGMENT_BYTES,
#: endif
#: endif
#: if plan.tp > 1
    FRAGMENT_WORDS,
#: endif
#: if plan.projection == "tensor_cores" and plan.idle_lanes
    FRAGMENTS,
#: endif
    HC,
    HC_EPS,
    INVERSE_HIDDEN,
    INVERSE_ROW,
#: if plan.lane_map.merges
    MERGES,
#: endif
    NORM_EPS,
#: if plan.tp > 1
    POLLS,
#: endif
    RMS_EPS,
    ROW_BYTES,
#: if plan.tp > 1
    SLOT_BYTES,
#: endif
#: if plan.lane_map.splits
    SPLITS,
#: endif
#: if plan.projection == "tensor_cores"
    SQUARES,
    STASH_STREAM,
    TILES,
#: if plan.trips > 1
    TRIPS,
#: endif
#: endif
)

SENTINEL_PAIR = 0x80008000  # two «plan.activation» of -0.0
FLOAT_BYTES = 4
LOG2_E = 1.4426950408889634


def row_major(*shape):
    """A row-major layout."""
    strides = []
    stride = 1
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride *= extent
    return cute.make_layout(shape, stride=tuple(strides))


def unpack(words):
    """Widens «plan.activation» pairs to FP32, low half first: exact."""
    values = []
    for word in words:
#: if plan.activation == "FP16"
        values.extend(ptx.unpack_f16x2(word))
#: else
        values.append(ptx.as_float(word << 16))
        values.append(ptx.as_float(word & 0xFFFF0000))
#: endif
    return values


def pack(values):
    """Rounds FP32 values to nearest even into words of two «plan.activation»."""
    return [
        ptx.pack_«plan.pair_type»(values[index], values[index + 1])
        for index in range(0, len(values), 2)
    ]


def negative_zeros(word):
    """Bit 15 of each 16-bit half that holds -0.0, compared as integers.

    A half of ``word ^ SENTINEL_PAIR`` is zero there; no half borrows from another.
    """
    flipped = word ^ SENTINEL_PAIR
    nonzero = ((flipped & 0x7FFF7FFF) + 0x7FFF7FFF) | flipped
    return ~nonzero & SENTINEL_PAIR


def sanitize(words):
    """Replaces every -0.0 by +0.0, so that no element of a payload is the sentinel."""
    return [word ^ negative_zeros(word) for word in words]


#: if plan.tp > 1
def holds_sentinel(words):
    """Whether any element of a fragment is the sentinel."""
    found = Uint32(0)
    for word in words:
        found = found | negative_zeros(word)
    return found != 0


def publish_fragment(words, mailboxes, offset, multicast):
    """Stores a sanitized fragment at ``offset`` of every rank's mailbox."""
    payload = sanitize(words)
    for mailbox in mailboxes:
        if multicast:
            ptx.store_multicast_«plan.pair_type»(mailbox + offset, payload)
        else:
            ptx.store_fragment(mailbox + offset, payload)


#: if plan.publish_idle_lanes
@cute.jit
def publish_own(own, words, mailboxes, offset, multicast: cutlass.Constexpr):
    """Publishes a fragment, unless the thread is idle."""
    if own:
        publish_fragment(words, mailboxes, offset, multicast)


#: endif
def load_arrivals(slot, present):
    """Loads the fragments of this lane's ranks, arrived or not; zeros elsewhere."""
    return [
        ptx.load_volatile_if(present, slot + rank * SLOT_BYTES) for rank in range(POLLS)
    ]


@cute.jit
def poll(address, words):
    """Reloads a fragment until it has arrived whole, and returns its words."""
    word0, word1, word2, word3 = words
    while holds_sentinel((word0, word1, word2, word3)):
        word0, word1, word2, word3 = ptx.load_volatile(address)
    return word0, word1, word2, word3


def poll_ranks(slot, arrivals):
    """Waits for the fragments of this lane's ranks. Zeros are no sentinel."""
    return [
        poll(slot + rank * SLOT_BYTES, words) for rank, words in enumerate(arrivals)
    ]


def add_pairs(values):
    """Sums eight-element rows pairwise: ((v0+v1)+(v2+v3))+…"""
    while len(values) > 1:
        values = [
            [ptx.add(a, b) for a, b in zip(left, right, strict=True)]
            for left, right in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]


def sum_ranks(arrived):
    """Step 1: y = «plan.act»(sum of the ranks' rows), as FP32.

    ``arrived`` holds the fragments of the ranks that this lane polled, in rank order.
    The pairwise order over all ranks continues over the lanes.
    """
    partial = add_pairs([unpack(words) for words in arrived])
#: if plan.lane_map.butterflies
    for distance in BUTTERFLIES:
        partial = [
            ptx.add(value, cute.arch.shuffle_sync_bfly(value, distance))
            for value in partial
        ]
#: endif
    return unpack(pack(partial))
#: endif


def post_mix(y, post, comb, old):
    """Step 2: new = «plan.act»(post*y + sum_i comb[i]*old[i]), as words.

    The product post*y is rounded, then one fused multiply-add follows for each source
    stream, in order: this fixes every bit.
    """
    new = [ptx.mul(post, value) for value in y]
    for weight, words in zip(comb, old, strict=True):
        new = [
            ptx.fma(weight, value, total)
            for value, total in zip(unpack(words), new, strict=True)
        ]
    return pack(new)
#: if plan.idle_lanes


def zero_unless(own, words):
    """The words, or zeros where the lane is idle."""
    return [cutlass.select_(own, word, Uint32(0)) for word in words]
#: endif


#: if plan.exit_by
def load_old_streams(address):
    """Loads one fragment of each residual stream of a token."""
    return [ptx.load_l2(address + index * ROW_BYTES) for index in range(HC)]


def load_mix_weights(post, comb, token, stream):
    """Loads a stream's post-mix and its column of the residual mix of a token."""
    post_row = post[token, None, 0].iterator.toint()
    comb_row = comb[token, None, None].iterator.toint()
    return (
        ptx.load_float_l2(post_row + stream * FLOAT_BYTES),
        [
            ptx.load_float_l2(comb_row + (source * HC + stream) * FLOAT_BYTES)
            for source in range(HC)
        ],
    )


#: endif
#: if plan.exit_by == "pre_mix"
def load_pre(pre, token, stream):
    """Loads the carried pre-mix of a stream of a token."""
    return ptx.load_float_l2(pre[token, None].iterator.toint() + stream * FLOAT_BYTES)


#: endif
#: if plan.projection == "tensor_cores"
#: if plan.fn_home == "registers"
#: if plan.idle_lanes
def load_projection(address, fragment):
    """Loads a lane's part of fn: for each octet of rows, a fragment of each chunk.

    Lane 4g+q serves row g of each octet, and fragment q of the four of a chunk.
    ``fragment`` is the first of them.
    """
    return [
        [
            ptx.load_constant_if(
                fragment + part * 4 < FRAGMENTS,
                address
                + (octet * 8 * FN_ROW_BYTES)
                + (stream * ROW_BYTES + part * CHUNK_BYTES),
            )
            for part, stream in CHUNKS
        ]
        for octet in range(FN_OCTETS)
    ]
#: else
def load_projection(address):
    """Loads a lane's part of fn: for each octet of rows, a fragment of each chunk.

    Lane 4g+q serves row g of each octet, and fragment q of the four of a chunk.
    """
    return [
        [
            ptx.load_constant(
                address
                + (octet * 8 * FN_ROW_BYTES)
                + (stream * ROW_BYTES + part * CHUNK_BYTES)
            )
            for part, stream in CHUNKS
        ]
        for octet in range(FN_OCTETS)
    ]
#: endif
#: else
def projection_steps(threads):
    """Where a lane's fragments of fn are, in the order of the projection.

    Lane 4g+q serves row g of each octet, and fragment q of the four of a chunk.

    Returns:
        For each, how far it is from the lane's first fragment in fragments of a stream,
        and in bytes.
    """
    return [
#: if plan.trips > 1
        (
            trip * (threads // HC) + part * 4,
            trip * (threads // HC) * FRAGMENT_BYTES
            + octet * 8 * FN_ROW_BYTES
            + (stream * ROW_BYTES + part * CHUNK_BYTES),
        )
        for trip in range(TRIPS)
#: else
        (
            part * 4,
            octet * 8 * FN_ROW_BYTES + (stream * ROW_BYTES + part * CHUNK_BYTES),
        )
#: endif
        for part, stream in CHUNKS
        for octet in range(FN_OCTETS)
    ]
#: if plan.fn_home == "shared"


#: if plan.idle_lanes
def copy_projection(place, address, fragment, threads):
    """Starts to copy a lane's part of fn to shared memory; zeros beyond the row.

    Each thread reads only what it has copied: [step][thread], 16 bytes each.
    """
    for index, (further, offset) in enumerate(projection_steps(threads)):
        ptx.copy_async_if(
            fragment + further < FRAGMENTS,
            place + index * (threads * FRAGMENT_BYTES),
            address + offset,
        )
#: else
def copy_projection(place, address, threads):
    """Starts to copy a lane's part of fn to shared memory.

    Each thread reads only what it has copied: [step][thread], 16 bytes each.
    """
    for index, (_, offset) in enumerate(projection_steps(threads)):
        ptx.copy_async(place + index * (threads * FRAGMENT_BYTES), address + offset)
#: endif


def read_projection(place, threads):
    """Gives what ``copy_projection`` copied, in the order of the projection."""
    ptx.wait_copies()
    for index in range(len(projection_steps(threads))):
        yield ptx.load_shared(place + index * (threads * FRAGMENT_BYTES))
#: else


#: if plan.idle_lanes
def stream_projection(address, fragment, threads):
    """Gives a lane's part of fn from L2, some octets ahead; zeros beyond the row."""
    ahead = []
    for further, offset in projection_steps(threads):
        own = fragment + further < FRAGMENTS
        ahead.append(ptx.load_constant_if(own, address + offset))
#: else
def stream_projection(address, threads):
    """Gives a lane's part of fn from L2, some octets ahead of their turn."""
    ahead = []
    for _, offset in projection_steps(threads):
        ahead.append(ptx.load_constant(address + offset))
#: endif
        if len(ahead) > FN_AHEAD:
            yield ahead.pop(0)
    yield from ahead
#: endif
#: endif


def load_chunk(address, part, stream):
    """Loads a lane's fragment of a chunk from the stash of a token."""
    return ptx.load_shared(address + (stream * STASH_STREAM + part * CHUNK_BYTES))


#: if plan.trips > 1
def project(rows, tokens, trip_bytes):
    """Step 3 on a warp's columns: MIX dot products with fn, and the square sums.
#: else
def project(rows, tokens):
    """Step 3 on a warp's 256 columns: MIX dot products with fn, and the square sums.
#: endif

    The rows of fn, and below them the tokens themselves, are the rows of ``a``; the
    tokens are the columns of ``b``. The products of the tokens hold the square sums on
    their diagonal.

    Args:
#: if plan.fn_home == "registers"
        rows: What ``load_projection`` gave.
#: elif plan.fn_home == "shared"
        rows: What ``read_projection`` gives.
#: else
        rows: What ``stream_projection`` gives.
#: endif
        tokens: For each octet of tokens, the address of the lane's token in the stash.
#: if plan.trips > 1
        trip_bytes: From the tokens of one trip to those of the next in the stash.
#: endif

    Returns:
        For each octet of tokens, and for each octet of rows, the sums of row g with the
        tokens 2q and 2q+1.
    """
    zero = Float32(0.0)
    totals = [[(zero,) * 4 for _ in range(TILES)] for _ in tokens]
#: if plan.trips > 1
    chunks = [(trip, *chunk) for trip in range(TRIPS) for chunk in CHUNKS]
    for trip, part, stream in chunks:
        octets = [next(rows) for _ in range(FN_OCTETS)]
        for octet, address in enumerate(tokens):
            token = load_chunk(address + trip * trip_bytes, part, stream)
#: elif plan.fn_home == "registers"
    for index, (part, stream) in enumerate(CHUNKS):
        for octet, address in enumerate(tokens):
            token = load_chunk(address, part, stream)
#: else
    for part, stream in CHUNKS:
        octets = [next(rows) for _ in range(FN_OCTETS)]
        for octet, address in enumerate(tokens):
            token = load_chunk(address, part, stream)
#: endif
#: if plan.fn_home == "registers"
#: if plan.fn_octets % 2
            row_octets = [row[index] for row in rows] + [token]
#: else
            row_octets = [row[index] for row in rows] + [token, token]
#: endif
#: elif plan.fn_octets % 2
            row_octets = [*octets, token]
#: else
            row_octets = [*octets, token, token]
#: endif
            for first in (0, 2):
                b = (token[first], token[first + 1])
                for tile in range(TILES):
                    low, high = row_octets[2 * tile : 2 * tile + 2]
                    a = (low[first], high[first], low[first + 1], high[first + 1])
                    totals[octet][tile] = ptx.mma(a, b, totals[octet][tile])
    return [
        [tile[half : half + 2] for tile in tiles for half in (0, 2)] for tiles in totals
    ]


@cute.jit
def store_sums(partials: cute.Tensor, sums, lane, count):
    """Stores a warp's sums [tokens, sums] of the tokens below ``count``."""
    row = lane // 4
    for octet in cutlass.range_constexpr(len(sums)):
        for column in cutlass.range_constexpr(2):
            token = lane % 4 * 2 + column
            if octet * 8 + token < count:
                for index in cutlass.range_constexpr(FN_OCTETS):
                    value = sums[octet][index][column]
                    partials[octet * 8 + token, index * 8 + row] = value
                if token == row:
                    value = sums[octet][FN_OCTETS][column]
                    partials[octet * 8 + token, SQUARES] = value


#: endif
#: if plan.lane_map.splits or plan.projection == "fma"
def exchange_halves(values, distance, upper):
    """Sums over lanes ``distance`` apart, each of which keeps half of the values."""
    half = len(values) // 2
    kept = []
    for low, high in zip(values[:half], values[half:], strict=True):
        mine = cutlass.select_(upper, high, low)
        sent = cutlass.select_(upper, low, high)
        kept.append(mine + cute.arch.shuffle_sync_bfly(sent, distance))
    return kept


#: endif
def sum_warp(value):
    """Sums one value over a warp, for every lane."""
    for distance in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


def sum_row(row, count):
    """Sums ``count`` consecutive FP32 of shared memory."""
    total = row[0]
    for index in range(1, count):
        total = total + row[index]
    return total


def sum_peers(row, count):
    """Sums ``count`` consecutive FP32, one of each block of the cluster, pairwise."""
    if count % 4:
        values = [row[index] for index in range(count)]
    else:
        address = row.iterator.toint()
        values = []
        for start in range(0, count, 4):
            values += ptx.load_floats_shared(address + start * FLOAT_BYTES)
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [a + b for a, b in pairs] + values[len(values) & ~1 :]
    return values[0]


@cute.jit
def wait_for_sums(barrier):
    """Waits until all that was announced at a barrier has come."""
    while not ptx.is_open(barrier):
        pass


def square_sum(words):
    """Sums the squares of a few «plan.activation» in FP32."""
    total = None
    for value in unpack(words):
        total = value * value if total is None else ptx.fma(value, value, total)
    return total


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return ptx.reciprocal(Float32(1.0) + ptx.exp2(x * Float32(-LOG2_E)))


def row_rstd(squares):
    """Step 3: rstd = rsqrt(ss / (HC*H) + rms_eps), over all streams of a token."""
    return ptx.rsqrt(ptx.fma(squares, Float32(INVERSE_ROW), Float32(RMS_EPS)))


def pre_mix(mix, scale, base):
    """Step 4: pre = sigmoid(mix*scale + base) + hc_eps."""
    return sigmoid(ptx.fma(mix, scale, base)) + Float32(HC_EPS)


#: if plan.lane_map.splits
def collapse(pre, new, stream):
#: else
def collapse(pre, new):
#: endif
    """Step 5, first half: c = «plan.act»(sum_j pre[j]*new[j]), as words.

#: if plan.lane_map.merges
    Each lane brings its stream and ends with its share of the eight columns, the same
    in WORD_LANES neighbours.
#: elif plan.lane_map.splits
    Each lane brings its stream and ends with its share of the eight columns.
#: else
    Each lane has the one stream, and all eight columns.
#: endif
    """
    columns = [pre * value for value in unpack(new)]
#: if plan.lane_map.splits
    for distance in SPLITS:
        columns = exchange_halves(columns, distance, (stream & distance) != 0)
#: endif
#: if plan.lane_map.merges
    for distance in MERGES:
        columns = [
            value + cute.arch.shuffle_sync_bfly(value, distance) for value in columns
        ]
#: endif
    return pack(columns)


#: if plan.stream_mean
#: if plan.lane_map.splits
def stream_means(new, stream):
    """The mean of the streams, as words, shared out as the collapse is."""
    return collapse(Float32(1.0 / HC), new, stream)
#: else
def stream_means(new):
    """The mean of the one stream, as words."""
    return collapse(Float32(1.0), new)
#: endif


#: endif
#: if plan.norm_weight == "none"
def normalize(c, squares):
    """Step 5, second half: «plan.act»(c * rsqrt(mean(c^2) + norm_eps))."""
    rstd = ptx.rsqrt(ptx.fma(squares, Float32(INVERSE_HIDDEN), Float32(NORM_EPS)))
    return pack([value * rstd for value in unpack(c)])
#: else
def normalize(c, squares, norm_weight):
#: if plan.norm_weight == "plus_one"
    """Step 5, second half: «plan.act»(c * rsqrt(mean(c^2) + norm_eps) * (norm_weight+1))."""
#: else
    """Step 5, second half: «plan.act»(c * rsqrt(mean(c^2) + norm_eps) * norm_weight)."""
#: endif
    rstd = ptx.rsqrt(ptx.fma(squares, Float32(INVERSE_HIDDEN), Float32(NORM_EPS)))
    return pack(
        [
#: if plan.norm_weight == "plus_one"
            value * rstd * ptx.add(weight, Float32(1.0))
#: else
            value * rstd * weight
#: endif
            for value, weight in zip(unpack(c), unpack(norm_weight), strict=True)
        ]
    )
#: endif
