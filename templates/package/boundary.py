#: if plan.tp > 1
"""Boundary: consumes the mailbox, one token a cluster of thread blocks.
#: else
"""Boundary: takes the one rank's rows, one token a cluster of thread blocks.
#: endif

The blocks of a cluster split the row. Each thread holds one fragment of one residual
stream; the MIX projections and the norm are summed over the cluster through distributed
shared memory, once each.
"""

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from . import ptx
from .constants import (
#: if plan.fn_home == "shared"
    FN_BYTES,
#: endif
#: if plan.projection == "tensor_cores"
    FN_ROW_BYTES,
#: else
#: if plan.trips == 1
    FN_FRAGMENT_BYTES,
#: endif
    FN_STREAM_BYTES,
#: endif
    FRAGMENT_BYTES,
    FRAGMENT_WORDS,
#: if plan.idle_lanes
    FRAGMENTS,
#: endif
#: if plan.projection == "tensor_cores"
    FRAGMENTS_PER_WARP,
#: endif
#: if plan.tp > 1
    GENERATION_BYTES,
    GENERATIONS,
#: endif
    HC,
    LANE_WORDS,
    MIX,
#: if plan.delayed
    NORM_SQUARES,
#: endif
#: if plan.tp > 1
    POLLS,
#: endif
    ROW_BYTES,
#: if plan.tp > 1
    SLOT_BYTES,
    SOURCES,
#: endif
    SQUARES,
#: if plan.projection == "tensor_cores"
    STASH_STREAM,
    STASH_TOKEN,
#: endif
#: if plan.sum_rows > 32
    SUM_ROWS,
#: endif
    SUMS_STRIDE,
    TOKEN_BYTES,
#: if plan.lane_map.merges
    WORD_LANES,
#: endif
)
#: if plan.projection == "fma"
from .projection_fma import (
#: if plan.fn_home == "registers"
    load_projection,
#: elif plan.fn_home == "shared"
    copy_projection,
#: endif
    project,
    store_sums,
)
#: endif
from .signature import SmemAllocator, boundary_arguments
from .steps import (
    collapse,
#: if plan.projection == "tensor_cores" and plan.fn_home == "shared"
    copy_projection,
#: endif
#: if plan.tp > 1
    load_arrivals,
#: endif
    load_mix_weights,
    load_old_streams,
#: if plan.delayed
    load_pre,
#: endif
#: if plan.projection == "tensor_cores" and plan.fn_home == "registers"
    load_projection,
#: endif
#: if plan.tp == 1
    load_rank,
#: endif
    normalize,
    post_mix,
#: if not plan.delayed
    pre_mix,
#: endif
#: if plan.projection == "tensor_cores"
    project,
#: if plan.fn_home == "shared"
    read_projection,
#: endif
#: endif
#: if plan.tp > 1
    receive,
#: endif
    row_major,
    row_rstd,
    square_sum,
#: if plan.projection == "tensor_cores"
    store_sums,
#: endif
#: if plan.stream_mean
    stream_means,
#: endif
#: if plan.projection == "tensor_cores" and plan.fn_home == "global"
    stream_projection,
#: endif
    sum_row,
    sum_warp,
#: if plan.idle_lanes
    zero_unless,
#: endif
)


class Boundary:
    """A cluster a token; a warp reduces the sums of a block, lane k number k."""

    def __init__(self, target):
        """Takes the launch shape of one architecture."""
        self.cluster_size = target.cluster_size
        self.fragments = target.fragments
        self.threads = target.threads
        self.warps = target.warps

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        return boundary_arguments()

    @cute.jit
    def __call__(
        self,
        residual: cute.Tensor,  # [M, HC, HIDDEN] «plan.activation»
        post: cute.Tensor,  # [M, HC, 1] FP32
        comb: cute.Tensor,  # [M, HC, HC] FP32, [source, target]
        fn: cute.Tensor,  # [MIX, HC * HIDDEN] «plan.fn_weight»
#: if plan.delayed
        pre: cute.Tensor,  # [M, HC] FP32
#: else
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
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
        new_residual: cute.Tensor,  # [M, HC, HIDDEN] «plan.activation», out
        mix: cute.Tensor,  # [M, MIX] FP32, out
        layer_input: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
#: if plan.stream_mean
        stream_mean: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
#: endif
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            residual,
            post,
            comb,
            fn,
#: if plan.delayed
            pre,
#: else
            scale,
            base,
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
            new_residual,
            mix,
            layer_input,
#: if plan.stream_mean
            stream_mean,
#: endif
        ).launch(
            grid=[self.cluster_size, residual.shape[0], 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster_size, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        residual: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
        fn: cute.Tensor,
#: if plan.delayed
        pre: cute.Tensor,
#: else
        scale: cute.Tensor,
        base: cute.Tensor,
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
        new_residual: cute.Tensor,
        mix: cute.Tensor,
        layer_input: cute.Tensor,
#: if plan.stream_mean
        stream_mean: cute.Tensor,
#: endif
    ):
        """Takes one token through steps 1 to 5."""
        cute.arch.griddepcontrol_launch_dependents()
        # A peer's shared memory may be written once the peer runs: the wait is below.
        cute.arch.cluster_arrive_relaxed()

        thread = cute.arch.thread_idx()[0]
        block, token, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        stream = thread % HC
        fragment = block * self.fragments + thread // HC
#: if plan.idle_lanes
        # Idle lanes stay beside the last fragment: they may load it.
        own = fragment < FRAGMENTS
        fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
        column = fragment * FRAGMENT_BYTES

        memory = SmemAllocator()
#: if plan.fn_home == "shared"
        fn_stash = memory.allocate(self.threads * FN_BYTES, 16)
#: endif
#: if plan.projection == "tensor_cores"
        stash = memory.allocate(self.warps * STASH_TOKEN, 16)
#: endif
        partials = memory.allocate_tensor(
            Float32, row_major(self.warps, 1, SUMS_STRIDE), 16
        )
#: if plan.sum_rows > 32
        sums = memory.allocate_tensor(
            Float32, row_major(SUM_ROWS, self.cluster_size), 16
        )
#: else
        sums = memory.allocate_tensor(Float32, row_major(32, self.cluster_size), 16)
#: endif
#: if not plan.delayed
        squares = memory.allocate_tensor(Float32, row_major(self.warps), 16)
        norms = memory.allocate_tensor(Float32, row_major(self.cluster_size), 16)
#: endif

        # Weights: no kernel writes them.
#: if plan.projection == "fma"
#: if plan.fn_home == "shared"
        fn_place = fn_stash.toint() + thread * FRAGMENT_BYTES
#: endif
#: if plan.trips > 1
        fn_stream = fn.iterator.toint() + stream * FN_STREAM_BYTES
#: if plan.fn_home == "shared"
        copy_projection(fn_place, fn_stream, first_fragment, self.threads)
#: endif
#: else
        fn_address = (
            fn.iterator.toint()
            + stream * FN_STREAM_BYTES
            + fragment * FN_FRAGMENT_BYTES
        )
#: if plan.fn_home == "registers"
        rows = load_projection(fn_address)
#: elif plan.fn_home == "shared"
        copy_projection(fn_place, fn_address, self.threads)
#: endif
#: endif
#: else
        warp_column = block * self.fragments + warp * FRAGMENTS_PER_WARP
#: if plan.fn_home == "shared"
        fn_place = fn_stash.toint() + thread * FRAGMENT_BYTES
        copy_projection(
            fn_place,
#: elif plan.fn_home == "registers"
        rows = load_projection(
#: endif
#: if plan.fn_home == "global"
        fn_address = (
#: endif
            fn.iterator.toint()
#: if plan.mix % 8
            + cutlass.min(lane // 4, MIX - 1) * FN_ROW_BYTES
#: else
            + lane // 4 * FN_ROW_BYTES
#: endif
#: if plan.fn_home == "global" or (plan.fn_home == "registers" and not plan.idle_lanes)
            + (warp_column + lane % 4) * FRAGMENT_BYTES
#: else
            + (warp_column + lane % 4) * FRAGMENT_BYTES,
#: if plan.idle_lanes
            warp_column + lane % 4,
#: endif
#: if plan.fn_home == "shared"
            self.threads,
#: endif
#: endif
        )
#: endif
#: if not plan.delayed
        pre_scale = scale[0]
        pre_base = base[stream]
#: endif
#: if plan.lane_map.merges
        first_word = fragment * FRAGMENT_WORDS + stream // WORD_LANES
#: else
        first_word = fragment * FRAGMENT_WORDS + stream * LANE_WORDS
#: endif
#: if plan.norm_weight != "none"
        norm_words = cute.recast_tensor(norm_weight, Uint32)
        norm_share = [norm_words[first_word + index] for index in range(LANE_WORDS)]
#: endif
#: if plan.lane_map.merges
        # Of the lanes that share a word, one stores it and counts its squares.
        counts = stream % WORD_LANES == 0
#: endif

#: if plan.tp > 1
        # The publish before this kernel triggers after its own wait, so what earlier
        # kernels wrote is complete; the rows that publish sends announce themselves.
        generation = ptx.load_int_relaxed(state.iterator.toint())
#: else
        # From here on it loads what other kernels wrote, the last of them just now.
        cute.arch.griddepcontrol_wait()
#: endif
        token_bytes = Int64(token * TOKEN_BYTES + column)
        old = load_old_streams(residual.iterator.toint() + token_bytes)
        post_weight, comb_weights = load_mix_weights(post, comb, token, stream)
#: if plan.delayed
        pre_weight = load_pre(pre, token, stream)
#: endif
#: if plan.tp > 1
        first_rank = stream % SOURCES * POLLS
        slot = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES
            + first_rank * SLOT_BYTES
            + token * ROW_BYTES
            + column
        )
#: if plan.idle_lanes
        y = receive(slot, load_arrivals(slot, own), own)
#: else
        y = receive(slot, load_arrivals(slot))
#: endif
#: else
        y = load_rank(x.iterator.toint() + Int64(token * ROW_BYTES + column))
#: endif
        new = post_mix(y, post_weight, comb_weights, old)
#: if plan.idle_lanes
        new = zero_unless(own, new)
        ptx.store_fragment_if(
            own, new_residual.iterator.toint() + token_bytes + stream * ROW_BYTES, new
        )
#: else
        ptx.store_fragment(
            new_residual.iterator.toint() + token_bytes + stream * ROW_BYTES, new
        )
#: endif

#: if plan.delayed
        # The carried pre-mix needs no sum: the collapse and its squares come first.
#: if plan.lane_map.splits
        c = collapse(pre_weight, new, stream)
#: else
        c = collapse(pre_weight, new)
#: endif
#: if plan.lane_map.merges
        square = sum_warp(cutlass.select_(counts, square_sum(c), Float32(0.0)))
#: else
        square = sum_warp(square_sum(c))
#: endif
        if lane == 0:
            partials[warp, 0, NORM_SQUARES] = square

        # The reduction: over the warp «plan.projection_means», over the block by lane k for
        # sum k, over the cluster by all its blocks alike.
#: else
        # First reduction: over the warp «plan.projection_means», over the block by lane k for
        # sum k, over the cluster by all its blocks alike.
#: endif
#: if plan.projection == "fma"
#: if plan.fn_home == "registers"
        token_sums = project(rows, new, lane)
#: elif plan.fn_home == "shared"
        ptx.wait_copies()
        token_sums = project(fn_place, new, lane, self.threads)
#: else
        token_sums = project(fn_address, new, lane)
#: endif
        store_sums(partials[warp, 0, None], token_sums, lane)
#: else
        warp_stash = stash.toint() + warp * STASH_TOKEN
        ptx.store_shared(
            warp_stash + stream * STASH_STREAM + lane // HC * FRAGMENT_BYTES, new
        )
        cute.arch.sync_warp()
#: if plan.fn_home == "shared"
        rows = read_projection(fn_place, self.threads)
#: elif plan.fn_home == "global"
#: if plan.idle_lanes
        rows = stream_projection(fn_address, warp_column + lane % 4, self.threads)
#: else
        rows = stream_projection(fn_address, self.threads)
#: endif
#: endif
        token_sums = project(rows, [warp_stash + lane % 4 * FRAGMENT_BYTES])
        store_sums(partials[warp, None, None], token_sums, lane, 1)
#: endif
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
#: if plan.sum_rows > 32
        for first_peer in cutlass.range_constexpr(0, self.cluster_size, self.warps):
            for first_sum in cutlass.range_constexpr(0, SUM_ROWS, 32):
                number = first_sum + lane
                if first_peer + warp < self.cluster_size and number <= «plan.last_sum_name»:
                    block_total = sum_row(partials[None, 0, number], self.warps)
                    place = sums[number, None].iterator.toint() + block * 4
                    ptx.store_peer(place, first_peer + warp, block_total)
#: else
        place = sums[lane, None].iterator.toint() + block * 4
        for first_peer in cutlass.range_constexpr(0, self.cluster_size, self.warps):
            if first_peer + warp < self.cluster_size and lane <= «plan.last_sum_name»:
                block_total = sum_row(partials[None, 0, lane], self.warps)
                ptx.store_peer(place, first_peer + warp, block_total)
#: endif
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

#: if plan.tp > 1
        # Every block of this cluster has read the generation.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] - 1
        if block == 0 and thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)

#: endif
        rstd = row_rstd(sum_row(sums[SQUARES, None], self.cluster_size))
#: if plan.sum_rows > 32
        for first_mix in cutlass.range_constexpr(0, MIX, self.threads):
            number = first_mix + thread
            if block == 0 and number < MIX:
                total = sum_row(sums[number, None], self.cluster_size)
                mix[token, number] = total * rstd
#: else
        if block == 0 and thread < MIX:
            mix[token, thread] = sum_row(sums[thread, None], self.cluster_size) * rstd
#: endif
#: if plan.delayed
        norm_square = sum_row(sums[NORM_SQUARES, None], self.cluster_size)

#: else
        mix_pre = sum_row(sums[stream, None], self.cluster_size) * rstd
#: if plan.lane_map.splits
        c = collapse(pre_mix(mix_pre, pre_scale, pre_base), new, stream)
#: else
        c = collapse(pre_mix(mix_pre, pre_scale, pre_base), new)
#: endif

        # Second reduction: the norm of the collapsed row.
#: if plan.lane_map.merges
        square = sum_warp(cutlass.select_(counts, square_sum(c), Float32(0.0)))
#: else
        square = sum_warp(square_sum(c))
#: endif
        if lane == 0:
            squares[warp] = square
        cute.arch.sync_threads()
        place = norms.iterator.toint() + block * 4
        for first_peer in cutlass.range_constexpr(0, self.cluster_size, self.threads):
            if first_peer + thread < self.cluster_size:
                block_square = sum_row(squares, self.warps)
                ptx.store_peer(place, first_peer + thread, block_square)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        norm_square = sum_row(norms, self.cluster_size)
#: endif
        output = cute.recast_tensor(layer_input, Uint32)
#: if plan.norm_weight == "none"
        normalized = normalize(c, norm_square)
#: else
        normalized = normalize(c, norm_square, norm_share)
#: endif
#: if plan.stream_mean
        mean_output = cute.recast_tensor(stream_mean, Uint32)
#: if plan.lane_map.splits
        means = stream_means(new, stream)
#: else
        means = stream_means(new)
#: endif
#: endif
#: if plan.stores_if
        if «plan.stores_if»:
            for index in cutlass.range_constexpr(LANE_WORDS):
                output[token, first_word + index] = normalized[index]
#: if plan.stream_mean
                mean_output[token, first_word + index] = means[index]
#: endif
#: else
        for index, word in enumerate(normalized):
            output[token, first_word + index] = word
#: if plan.stream_mean
        for index, word in enumerate(means):
            mean_output[token, first_word + index] = word
#: endif
#: endif
#: if plan.tp > 1

        # A later kernel that waits for this one may rely on all before it.
        cute.arch.griddepcontrol_wait()
        if block == 0 and thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
#: endif
