#: if plan.exit_by == "mean"
"""Exit: closes the last boundary; the streams collapse to their mean.
#: elif plan.exit_by == "sigmoid"
"""Exit: closes the last boundary; a sigmoid head weighs the streams.
#: else
"""Exit: closes the last boundary; its pre-mix weighs the streams.
#: endif

#: if plan.tp > 1
It consumes the mailbox as a boundary does, but returns one row: the norm.
#: else
It takes the one rank's rows as a boundary does, but returns one row: the norm.
#: endif
"""

import cutlass
from cutlass import «plan.exit_types», cute

from . import ptx
from .constants import (
#: if plan.tp > 1
    CAPACITY,
#: endif
    ENDS_CLUSTER,
    ENDS_STRIDE,
    ENDS_THREADS,
    ENDS_TURNS,
#: if plan.exit_by == "sigmoid"
    FN_FRAGMENT_BYTES,
    FN_STREAM_BYTES,
#: endif
    FRAGMENT_BYTES,
#: if plan.tp > 1
    FRAGMENT_WORDS,
    GENERATION_BYTES,
    GENERATIONS,
#: endif
    HC,
    HIDDEN,
    ROW_BYTES,
#: if plan.tp > 1
    SLOT_BYTES,
#: endif
    TOKEN_BYTES,
#: if plan.tp > 1
    TP,
#: endif
)
from .ends import allocate_sums, sum_cluster, sum_of, turns_of
#: if plan.exit_by == "sigmoid"
from .fn_rows import dot, load_row, widen
#: endif
from .signature import SmemAllocator, current_stream, tensor
from .steps import (
#: if plan.tp > 1
    SENTINEL_PAIR,
    add_pairs,
#: endif
    load_mix_weights,
    load_old_streams,
#: if plan.exit_by == "pre_mix"
    load_pre,
#: endif
#: if plan.tp == 1
    load_rank,
#: endif
    normalize,
    pack,
#: if plan.tp > 1
    poll,
#: endif
    post_mix,
#: if plan.exit_by == "sigmoid"
    pre_mix,
    row_rstd,
#: endif
    square_sum,
    unpack,
)
#: if plan.tp > 1


def receive(slot):
    """Waits for a fragment of all ranks, sums them in rank order and re-arms it."""
    places = [slot + rank * SLOT_BYTES for rank in range(TP)]
    words = [ptx.load_volatile(place) for place in places]
    arrived = [poll(*each) for each in zip(places, words, strict=True)]
    for place in places:
        ptx.store_fragment(place, [SENTINEL_PAIR] * FRAGMENT_WORDS)
    return unpack(pack(add_pairs([unpack(words) for words in arrived])))
#: endif


def collapse(weights, streams):
    """Step 5, first half, in one thread: «plan.act»(sum_j weights[j]*streams[j])."""
    total = [Float32(0.0)] * 8
    for weight, words in zip(weights, streams, strict=True):
        total = [
            ptx.fma(weight, value, sum_)
            for value, sum_ in zip(unpack(words), total, strict=True)
        ]
    return pack(total)


class Exit:
    """A cluster a token, a thread a fragment at a time."""

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens = cute.sym_int32()
        return (
            tensor(«plan.activation_type», tokens, HC, HIDDEN),
            tensor(Float32, tokens, HC, 1),
            tensor(Float32, tokens, HC, HC),
#: if plan.exit_by == "sigmoid"
            tensor(«plan.fn_type», HC, HC * HIDDEN),
            tensor(Float32, 1),
            tensor(Float32, HC),
#: elif plan.exit_by == "pre_mix"
            tensor(Float32, tokens, HC),
#: endif
#: if plan.norm_weight != "none"
            tensor(«plan.activation_type», HIDDEN),
#: endif
#: if plan.tp > 1
            tensor(«plan.activation_type», GENERATIONS, TP, CAPACITY, HIDDEN),
            tensor(Int32, 2),
#: else
            tensor(«plan.activation_type», tokens, HIDDEN),
#: endif
            tensor(«plan.activation_type», tokens, HIDDEN),
            current_stream(),
        )

    @cute.jit
    def __call__(
        self,
        residual: cute.Tensor,  # [M, HC, HIDDEN] «plan.activation»
        post: cute.Tensor,  # [M, HC, 1] FP32
        comb: cute.Tensor,  # [M, HC, HC] FP32, [source, target]
#: if plan.exit_by == "sigmoid"
        head_fn: cute.Tensor,  # [HC, HC * HIDDEN] «plan.fn_weight»
        head_scale: cute.Tensor,  # [1] FP32
        head_base: cute.Tensor,  # [HC] FP32
#: elif plan.exit_by == "pre_mix"
        pre: cute.Tensor,  # [M, HC] FP32
#: endif
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,  # [HIDDEN] «plan.activation»
#: endif
#: if plan.tp > 1
        mailbox: cute.Tensor,  # [GENERATIONS, TP, CAPACITY, HIDDEN] «plan.activation»
        state: cute.Tensor,  # [2] generation, arrivals
#: else
        x: cute.Tensor,  # [M, HIDDEN] «plan.activation»
#: endif
        output: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            residual,
            post,
            comb,
#: if plan.exit_by == "sigmoid"
            head_fn,
            head_scale,
            head_base,
#: elif plan.exit_by == "pre_mix"
            pre,
#: endif
#: if plan.norm_weight != "none"
            norm_weight,
#: endif
#: if plan.tp > 1
            mailbox,
            state,
#: else
            x,
#: endif
            output,
        ).launch(
            grid=[ENDS_CLUSTER, residual.shape[0], 1],
            block=[ENDS_THREADS, 1, 1],
            cluster=[ENDS_CLUSTER, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        residual: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
#: if plan.exit_by == "sigmoid"
        head_fn: cute.Tensor,
        head_scale: cute.Tensor,
        head_base: cute.Tensor,
#: elif plan.exit_by == "pre_mix"
        pre: cute.Tensor,
#: endif
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,
#: endif
#: if plan.tp > 1
        mailbox: cute.Tensor,
        state: cute.Tensor,
#: else
        x: cute.Tensor,
#: endif
        output: cute.Tensor,
    ):
        """Takes one token through steps 1, 2 and 5."""
        # A peer's shared memory may be written once the peer runs: the wait is below.
        cute.arch.cluster_arrive_relaxed()
        thread = cute.arch.thread_idx()[0]
        block, token, _ = cute.arch.block_idx()
        first = block * ENDS_THREADS + thread
        turns = turns_of(first)
        memory = SmemAllocator()
#: if plan.exit_by == "sigmoid"
        # Each thread keeps its new streams here, and later its collapsed fragments.
        stash = memory.allocate(HC * ENDS_TURNS * ENDS_THREADS * FRAGMENT_BYTES, 16)
        partials, sums = allocate_sums(memory, HC + 1)
#: else
        # Each thread keeps its collapsed fragments here.
        stash = memory.allocate(ENDS_TURNS * ENDS_THREADS * FRAGMENT_BYTES, 16)
#: endif
        square_partials, squares = allocate_sums(memory, 1)
        own_stash = stash.toint() + thread * FRAGMENT_BYTES
        turn_bytes = ENDS_THREADS * FRAGMENT_BYTES

        mix_weights = [load_mix_weights(post, comb, token, j) for j in range(HC)]
#: if plan.exit_by == "mean"
        weights = [Float32(1.0 / HC)] * HC
#: elif plan.exit_by == "pre_mix"
        weights = [load_pre(pre, token, j) for j in range(HC)]
#: endif
        old_streams = residual.iterator.toint() + Int64(token * TOKEN_BYTES)
#: if plan.tp > 1
        generation = ptx.load_int_relaxed(state.iterator.toint())
        slots = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES + token * ROW_BYTES
        )
#: else
        x_row = x.iterator.toint() + Int64(token * ROW_BYTES)
#: endif
#: if plan.exit_by == "sigmoid"
        totals = [Float32(0.0) for _ in range(HC + 1)]
#: else
        square = Float32(0.0)
#: endif
        for turn in cutlass.range(turns):
            fragment = first + turn * ENDS_STRIDE
            column = fragment * FRAGMENT_BYTES
            old = load_old_streams(old_streams + column)
#: if plan.tp > 1
            y = receive(slots + column)
#: else
            y = load_rank(x_row + column)
#: endif
            new = [post_mix(y, *each, old) for each in mix_weights]
#: if plan.exit_by == "sigmoid"
            for j in cutlass.range_constexpr(HC):
                ptx.store_shared(
                    own_stash + (j * ENDS_TURNS + turn) * turn_bytes, new[j]
                )
            for j in cutlass.range(HC, unroll=1):
                place = own_stash + (j * ENDS_TURNS + turn) * turn_bytes
                values = unpack(ptx.load_shared(place))
                rows = head_fn.iterator.toint() + (
                    j * FN_STREAM_BYTES + fragment * FN_FRAGMENT_BYTES
                )
                totals = [
                    dot(widen(load_row(rows, k)) if k < HC else values, values, total)
                    for k, total in enumerate(totals)
                ]
        cute.arch.cluster_wait()
        sum_cluster(totals, partials, sums)

        rstd = row_rstd(sum_of(sums, HC))
        weights = [
            pre_mix(sum_of(sums, k) * rstd, head_scale[0], head_base[k])
            for k in range(HC)
        ]
        square = Float32(0.0)
        for turn in cutlass.range(turns):
            new = [
                ptx.load_shared(own_stash + (j * ENDS_TURNS + turn) * turn_bytes)
                for j in range(HC)
            ]
            c = collapse(weights, new)
            ptx.store_shared(own_stash + turn * turn_bytes, c)
            square = square + square_sum(c)
#: else
            c = collapse(weights, new)
            ptx.store_shared(own_stash + turn * turn_bytes, c)
            square = square + square_sum(c)
        cute.arch.cluster_wait()
#: endif
        sum_cluster([square], square_partials, squares)
#: if plan.tp > 1

        # Every block of this cluster has read the generation.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] - 1
        if block == 0 and thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)
#: endif

        row = output.iterator.toint() + Int64(token * ROW_BYTES)
        for turn in cutlass.range(turns):
            column = (first + turn * ENDS_STRIDE) * FRAGMENT_BYTES
            c = ptx.load_shared(own_stash + turn * turn_bytes)
#: if plan.norm_weight == "none"
            normalized = normalize(c, sum_of(squares, 0))
#: else
            norm_share = ptx.load_constant(norm_weight.iterator.toint() + column)
            normalized = normalize(c, sum_of(squares, 0), norm_share)
#: endif
            ptx.store_fragment(row + column, normalized)
#: if plan.tp > 1
        if block == 0 and thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
#: endif
