#: macro store_means()
#: if plan.lane_map.splits
            means = stream_means(new, stream)
#: else
            means = stream_means(new)
#: endif
#: if plan.stores_if
            if «plan.stores_if»:
                for word in cutlass.range_constexpr(LANE_WORDS):
                    mean_output[first + index, first_word + word] = means[word]
#: else
            for word in cutlass.range_constexpr(LANE_WORDS):
                mean_output[first + index, first_word + word] = means[word]
#: endif
#: endmacro
#: macro collapse_token()
#: if plan.trips > 1
            total_square = Float32(0.0)
            for trip in cutlass.range(TRIPS):
                place = own_stash + (trip * self.group + index) * STASH_TOKEN
                new = ptx.load_shared(place)
#: if plan.stream_mean
                fragment = first_fragment + trip * (self.threads // HC)
#: if plan.idle_lanes
                own = fragment < FRAGMENTS
                fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
#: if plan.lane_map.merges
                first_word = fragment * FRAGMENT_WORDS + stream // WORD_LANES
#: else
                first_word = fragment * FRAGMENT_WORDS + stream * LANE_WORDS
#: endif
«store_means().rstrip()|indent(4, true)»
#: endif
#: if plan.lane_map.splits
                c = collapse(pre_weight, new, stream)
#: else
                c = collapse(pre_weight, new)
#: endif
                spare = [Uint32(0)] * (FRAGMENT_WORDS - LANE_WORDS)
                ptx.store_shared(place, [*c, *spare])
                total_square = total_square + square_sum(c)
#: if plan.lane_map.merges
            total_square = cutlass.select_(counts, total_square, Float32(0.0))
#: endif
            square = sum_warp(total_square)
#: else
            new = ptx.load_shared(own_stash + index * STASH_TOKEN)
#: if plan.stream_mean
«store_means().rstrip()»
#: endif
#: if plan.lane_map.splits
            c = collapse(pre_weight, new, stream)
#: else
            c = collapse(pre_weight, new)
#: endif
            spare = [Uint32(0)] * (FRAGMENT_WORDS - LANE_WORDS)
            ptx.store_shared(own_stash + index * STASH_TOKEN, [*c, *spare])
#: if plan.lane_map.merges
            square = sum_warp(cutlass.select_(counts, square_sum(c), Float32(0.0)))
#: else
            square = sum_warp(square_sum(c))
#: endif
#: endif
#: endmacro
#: if plan.tp > 1
"""Grouped boundary: consumes the mailbox, several tokens a cluster of thread blocks.
#: else
"""Grouped boundary: takes the one rank's rows, several tokens a cluster of blocks.
#: endif

#: if plan.trips > 1
The blocks of a cluster split the row. A warp takes its share of each token in TRIPS
trips of 256 columns; then the cluster reduces all of its tokens at once.
#: elif plan.fn_home == "registers"
As the boundary, but a cluster takes its tokens one after another while fn stays in
registers, with the next token's rows in flight, and then reduces all of them at once.
#: elif plan.prefetch
As the boundary, but a cluster takes its tokens one after another, with the next token's
rows in flight, and then reduces all of them at once.
#: else
As the boundary, but a cluster takes its tokens one after another, and then reduces all
of them at once.
#: endif
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
    STASH_STREAM,
    STASH_TOKEN,
#: if plan.sum_rows > 32
    SUM_ROWS,
#: endif
    SUMS_STRIDE,
    TOKEN_BYTES,
#: if plan.trips > 1
    TRIPS,
#: endif
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
    project_group,
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


class GroupedBoundary:
    """A cluster takes ``group`` tokens; the last cluster may have fewer."""

    def __init__(self, target, group):
        """Takes the launch shape of one architecture and the token group."""
        self.group = group
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
            grid=[
                self.cluster_size,
                (residual.shape[0] + self.group - 1) // self.group,
                1,
            ],
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
        """Takes a group of tokens through steps 1 to 5."""
        cute.arch.griddepcontrol_launch_dependents()
        # A peer's shared memory may be written once the peer runs: the wait is below.
        cute.arch.cluster_arrive_relaxed()

        thread = cute.arch.thread_idx()[0]
        block, cluster, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
#: if plan.trips > 1
        stream = thread % HC
        first_fragment = block * self.fragments + thread // HC
#: else
        stream = thread % HC
        fragment = block * self.fragments + thread // HC
#: if plan.idle_lanes
        # Idle lanes stay beside the last fragment: they may load it.
        own = fragment < FRAGMENTS
        fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
        column = fragment * FRAGMENT_BYTES
#: endif
        first = cluster * self.group
        count = cutlass.min(residual.shape[0] - first, self.group)

        memory = SmemAllocator()
#: if plan.fn_home == "shared"
#: if plan.projection == "fma" and plan.trips > 1
        fn_stash = memory.allocate(self.threads * TRIPS * FN_BYTES, 16)
#: else
        fn_stash = memory.allocate(self.threads * FN_BYTES, 16)
#: endif
#: endif
        # Each thread keeps its new fragments here, and later its collapsed words.
#: if plan.trips > 1
        stash = memory.allocate(self.warps * TRIPS * self.group * STASH_TOKEN, 16)
#: else
        stash = memory.allocate(self.warps * self.group * STASH_TOKEN, 16)
#: endif
        partials = memory.allocate_tensor(
            Float32, row_major(self.warps, self.group, SUMS_STRIDE), 16
        )
        sums = memory.allocate_tensor(
#: if plan.sum_rows > 32
            Float32, row_major(self.group, SUM_ROWS, self.cluster_size), 16
#: else
            Float32, row_major(self.group, 32, self.cluster_size), 16
#: endif
        )
#: if not plan.delayed
        squares = memory.allocate_tensor(Float32, row_major(self.group, self.warps), 16)
        norms = memory.allocate_tensor(
            Float32, row_major(self.group, self.cluster_size), 16
        )
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
#: if plan.trips > 1
#: if plan.norm_weight != "none"
        norm_words = cute.recast_tensor(norm_weight, Uint32)
#: endif
#: if plan.lane_map.merges
        # Of the lanes that share a word, one stores it and counts its squares.
        counts = stream % WORD_LANES == 0
#: endif
#: else
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
#: endif

#: if plan.tp > 1
        # The publish before this kernel triggers after its own wait, so what earlier
        # kernels wrote is complete; the rows that publish sends announce themselves.
        generation = ptx.load_int_relaxed(state.iterator.toint())
#: else
        # From here on it loads what other kernels wrote, the last of them just now.
        cute.arch.griddepcontrol_wait()
#: endif
#: if plan.trips > 1
#: if plan.tp > 1
        first_rank = stream % SOURCES * POLLS
        slots = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES + first_rank * SLOT_BYTES
        )
#: endif
        warp_stash = stash.toint() + warp * (TRIPS * self.group * STASH_TOKEN)
        own_stash = warp_stash + stream * STASH_STREAM + lane // HC * FRAGMENT_BYTES
        for item in cutlass.range(count * TRIPS):
            index, trip = item // TRIPS, item % TRIPS
            token = first + index
            fragment = first_fragment + trip * (self.threads // HC)
#: if plan.idle_lanes
            own = fragment < FRAGMENTS
            fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
            column = fragment * FRAGMENT_BYTES
            token_bytes = Int64(token * TOKEN_BYTES + column)
#: if plan.tp > 1
            slot = slots + Int64(token * ROW_BYTES + column)
#: if plan.idle_lanes
            arrivals = load_arrivals(slot, own)
#: else
            arrivals = load_arrivals(slot)
#: endif
#: endif
            old = load_old_streams(residual.iterator.toint() + token_bytes)
            post_weight, comb_weights = load_mix_weights(post, comb, token, stream)
#: if plan.tp == 1
            y = load_rank(x.iterator.toint() + Int64(token * ROW_BYTES + column))
#: elif plan.idle_lanes
            y = receive(slot, arrivals, own)
#: else
            y = receive(slot, arrivals)
#: endif
            new = post_mix(y, post_weight, comb_weights, old)
            place = new_residual.iterator.toint() + token_bytes + stream * ROW_BYTES
#: if plan.idle_lanes
            new = zero_unless(own, new)
            ptx.store_fragment_if(own, place, new)
#: else
            ptx.store_fragment(place, new)
#: endif
            ptx.store_shared(own_stash + (trip * self.group + index) * STASH_TOKEN, new)
#: else
#: if plan.tp > 1
        first_rank = stream % SOURCES * POLLS
        slots = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES + first_rank * SLOT_BYTES + column
        )
#: else
        x_rows = x.iterator.toint() + column
#: endif
        old_streams = residual.iterator.toint() + column
        new_streams = new_residual.iterator.toint() + stream * ROW_BYTES + column

        warp_stash = stash.toint() + warp * (self.group * STASH_TOKEN)
        own_stash = warp_stash + stream * STASH_STREAM + lane // HC * FRAGMENT_BYTES
#: if plan.prefetch
#: if plan.tp == 1
        y = load_rank(x_rows + Int64(first * ROW_BYTES))
#: elif plan.idle_lanes
        arrivals = load_arrivals(slots + Int64(first * ROW_BYTES), own)
#: else
        arrivals = load_arrivals(slots + Int64(first * ROW_BYTES))
#: endif
        old = load_old_streams(old_streams + Int64(first * TOKEN_BYTES))
        post_weight, comb_weights = load_mix_weights(post, comb, first, stream)
#: endif
        for index in cutlass.range(count):
            token = first + index
#: if plan.prefetch
            # The next token's loads are in flight while this one is projected. The last
            # turn loads its own token again, to no effect.
            following = first + cutlass.min(index + 1, count - 1)
#: if plan.tp == 1
            next_y = load_rank(x_rows + Int64(following * ROW_BYTES))
#: elif plan.idle_lanes
            next_arrivals = load_arrivals(slots + Int64(following * ROW_BYTES), own)
#: else
            next_arrivals = load_arrivals(slots + Int64(following * ROW_BYTES))
#: endif
            next_old = load_old_streams(old_streams + Int64(following * TOKEN_BYTES))
            next_post, next_comb = load_mix_weights(post, comb, following, stream)

#: else
#: if plan.tp == 1
            y = load_rank(x_rows + Int64(token * ROW_BYTES))
#: elif plan.idle_lanes
            arrivals = load_arrivals(slots + Int64(token * ROW_BYTES), own)
#: else
            arrivals = load_arrivals(slots + Int64(token * ROW_BYTES))
#: endif
            old = load_old_streams(old_streams + Int64(token * TOKEN_BYTES))
            post_weight, comb_weights = load_mix_weights(post, comb, token, stream)
#: endif
#: if plan.tp > 1
#: if plan.idle_lanes
            y = receive(slots + Int64(token * ROW_BYTES), arrivals, own)
#: else
            y = receive(slots + Int64(token * ROW_BYTES), arrivals)
#: endif
#: endif
            new = post_mix(y, post_weight, comb_weights, old)
#: if plan.idle_lanes
            new = zero_unless(own, new)
            ptx.store_fragment_if(own, new_streams + Int64(token * TOKEN_BYTES), new)
#: else
            ptx.store_fragment(new_streams + Int64(token * TOKEN_BYTES), new)
#: endif
            ptx.store_shared(own_stash + index * STASH_TOKEN, new)
#: if plan.prefetch

#: if plan.tp == 1
            y = next_y
#: else
            arrivals = next_arrivals
#: endif
            old = next_old
            post_weight = next_post
            comb_weights = next_comb
#: endif
#: endif

#: if plan.stream_mean and plan.delayed
        mean_output = cute.recast_tensor(stream_mean, Uint32)
#: endif
        # «plan.first_reduction»: over the warp «plan.projection_means», over the block by
        # lane k for sum k, over the cluster by all its blocks alike.
#: if plan.projection == "fma"
#: if plan.fn_home == "shared"
        ptx.wait_copies()
#: endif
        project_group(
            partials[warp, None, None],
#: if plan.trips > 1
#: if plan.fn_home == "shared"
            fn_place,
#: else
            fn_stream,
            first_fragment,
#: endif
#: elif plan.fn_home == "registers"
            rows,
#: elif plan.fn_home == "shared"
            fn_place,
#: else
            fn_address,
#: endif
            own_stash,
#: if plan.trips > 1
            self.group * STASH_TOKEN,
#: endif
            lane,
            count,
#: if plan.trips > 1 or plan.fn_home == "shared"
            self.threads,
#: endif
        )
#: else
        # Lanes beyond the last token repeat it, to no effect.
        cute.arch.sync_warp()
        lane_tokens = [
            cutlass.min(octet * 8 + lane // 4, count - 1)
            for octet in range((self.group + 7) // 8)
        ]
        chunk_stash = warp_stash + lane % 4 * FRAGMENT_BYTES
#: if plan.fn_home == "shared"
        rows = read_projection(fn_place, self.threads)
#: elif plan.fn_home == "global"
#: if plan.idle_lanes
        rows = stream_projection(fn_address, warp_column + lane % 4, self.threads)
#: else
        rows = stream_projection(fn_address, self.threads)
#: endif
#: endif
        token_sums = project(
#: if plan.trips > 1
            rows,
            [chunk_stash + token * STASH_TOKEN for token in lane_tokens],
            self.group * STASH_TOKEN,
#: else
            rows, [chunk_stash + token * STASH_TOKEN for token in lane_tokens]
#: endif
        )
        store_sums(partials[warp, None, None], token_sums, lane, count)
#: endif
#: if plan.delayed
        # The carried pre-mix needs no sum: the collapse joins this reduction with the
        # squares for its norm. It takes the place of the new fragments.
#: if plan.projection == "tensor_cores"
        cute.arch.sync_warp()
#: endif
        for index in cutlass.range(count):
            pre_weight = load_pre(pre, first + index, stream)
«collapse_token().rstrip()»
            if lane == 0:
                partials[warp, index, NORM_SQUARES] = square
#: endif
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        # Each warp serves one (token, peer) pair at a time.
        for pair in cutlass.range(warp, count * self.cluster_size, self.warps):
            index = pair // self.cluster_size
#: if plan.sum_rows > 32
            for first_sum in cutlass.range_constexpr(0, SUM_ROWS, 32):
                number = first_sum + lane
                if number <= «plan.last_sum_name»:
                    block_total = sum_row(partials[None, index, number], self.warps)
                    place = sums[index, number, None].iterator.toint() + block * 4
                    ptx.store_peer(place, pair % self.cluster_size, block_total)
#: else
            if lane <= «plan.last_sum_name»:
                block_total = sum_row(partials[None, index, lane], self.warps)
                place = sums[index, lane, None].iterator.toint() + block * 4
                ptx.store_peer(place, pair % self.cluster_size, block_total)
#: endif
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

#: if plan.stream_mean and not plan.delayed
        mean_output = cute.recast_tensor(stream_mean, Uint32)
#: endif
#: if plan.tp > 1
        # Every block of this cluster has read the generation.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] - 1
        if block == 0 and thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)

#: endif
        for index in cutlass.range(count):
            rstd = row_rstd(sum_row(sums[index, SQUARES, None], self.cluster_size))
            # The blocks of the cluster take turns to store the mixes.
#: if plan.sum_rows > 32
            for first_mix in cutlass.range_constexpr(0, MIX, self.threads):
                number = first_mix + thread
                if block == index % self.cluster_size and number < MIX:
                    total = sum_row(sums[index, number, None], self.cluster_size)
                    mix[first + index, number] = total * rstd
#: else
            if block == index % self.cluster_size and thread < MIX:
                mix[first + index, thread] = (
                    sum_row(sums[index, thread, None], self.cluster_size) * rstd
                )
#: endif
#: if not plan.delayed
            mix_pre = sum_row(sums[index, stream, None], self.cluster_size) * rstd
            pre_weight = pre_mix(mix_pre, pre_scale, pre_base)
«collapse_token().rstrip()»
            # Second reduction: the norm of the collapsed row.
            if lane == 0:
                squares[index, warp] = square
        cute.arch.sync_threads()
        for pair in cutlass.range(thread, count * self.cluster_size, self.threads):
            index = pair // self.cluster_size
            place = norms[index, None].iterator.toint() + block * 4
            block_square = sum_row(squares[index, None], self.warps)
            ptx.store_peer(place, pair % self.cluster_size, block_square)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
#: endif

        output = cute.recast_tensor(layer_input, Uint32)
#: if plan.trips > 1
        for item in cutlass.range(count * TRIPS):
            index, trip = item // TRIPS, item % TRIPS
            fragment = first_fragment + trip * (self.threads // HC)
#: if plan.idle_lanes
            own = fragment < FRAGMENTS
            fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
#: if plan.lane_map.merges
            first_word = fragment * FRAGMENT_WORDS + stream // WORD_LANES
#: else
            first_word = fragment * FRAGMENT_WORDS + stream * LANE_WORDS
#: endif
#: if plan.norm_weight != "none"
            norm_share = [norm_words[first_word + word] for word in range(LANE_WORDS)]
#: endif
            place = own_stash + (trip * self.group + index) * STASH_TOKEN
            c = ptx.load_shared(place)[:LANE_WORDS]
#: else
        for index in cutlass.range(count):
            c = ptx.load_shared(own_stash + index * STASH_TOKEN)[:LANE_WORDS]
#: endif
#: if plan.delayed
            norm_square = sum_row(sums[index, NORM_SQUARES, None], self.cluster_size)
#: else
            norm_square = sum_row(norms[index, None], self.cluster_size)
#: endif
#: if plan.norm_weight == "none"
            normalized = normalize(c, norm_square)
#: else
            normalized = normalize(c, norm_square, norm_share)
#: endif
#: if plan.stores_if
            if «plan.stores_if»:
                for word in cutlass.range_constexpr(LANE_WORDS):
                    output[first + index, first_word + word] = normalized[word]
#: else
            for word in cutlass.range_constexpr(LANE_WORDS):
                output[first + index, first_word + word] = normalized[word]
#: endif
#: if plan.tp > 1

        # A later kernel that waits for this one may rely on all before it.
        cute.arch.griddepcontrol_wait()
        if block == 0 and thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
#: endif
