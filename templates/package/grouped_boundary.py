"""Grouped boundary: consumes the mailbox, several tokens a cluster of thread blocks.

As the boundary, but a cluster takes its tokens one after another while fn stays in
registers, with the next token's rows in flight, and then reduces all of them at once.
"""

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from . import ptx
from .boundary import Boundary
from .constants import (
    FN_ROW_BYTES,
    FRAGMENT_BYTES,
    FRAGMENT_WORDS,
    FRAGMENTS_PER_WARP,
    GENERATION_BYTES,
    GENERATIONS,
    HC,
    LANE_WORDS,
    MIX,
    POLLS,
    ROW_BYTES,
    SLOT_BYTES,
    SOURCES,
    SQUARES,
    STASH_STREAM,
    STASH_TOKEN,
    SUMS_STRIDE,
    TOKEN_BYTES,
)
from .signature import SmemAllocator
from .steps import (
    collapse,
    load_arrivals,
    load_mix_weights,
    load_old_streams,
    load_projection,
    normalize,
    post_mix,
    pre_mix,
    project,
    receive,
    row_major,
    row_rstd,
    square_sum,
    store_sums,
    sum_row,
    sum_warp,
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
        """Stand-ins for the arguments of a launch: those of the boundary."""
        return Boundary.arguments(self)

    @cute.jit
    def __call__(
        self,
        residual: cute.Tensor,  # [M, HC, HIDDEN] BF16
        post: cute.Tensor,  # [M, HC, 1] FP32
        comb: cute.Tensor,  # [M, HC, HC] FP32, [source, target]
        fn: cute.Tensor,  # [MIX, HC * HIDDEN] BF16
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
        norm_weight: cute.Tensor,  # [HIDDEN] BF16
        mailbox: cute.Tensor,  # [GENERATIONS, TP, CAPACITY, HIDDEN] BF16
        state: cute.Tensor,  # [2] generation, arrivals
        new_residual: cute.Tensor,  # [M, HC, HIDDEN] BF16, out
        mix: cute.Tensor,  # [M, MIX] FP32, out
        layer_input: cute.Tensor,  # [M, HIDDEN] BF16, out
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            residual,
            post,
            comb,
            fn,
            scale,
            base,
            norm_weight,
            mailbox,
            state,
            new_residual,
            mix,
            layer_input,
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
        scale: cute.Tensor,
        base: cute.Tensor,
        norm_weight: cute.Tensor,
        mailbox: cute.Tensor,
        state: cute.Tensor,
        new_residual: cute.Tensor,
        mix: cute.Tensor,
        layer_input: cute.Tensor,
    ):
        """Takes a group of tokens through steps 1 to 5."""
        cute.arch.griddepcontrol_launch_dependents()
        # A peer's shared memory may be written once the peer runs: the wait is below.
        cute.arch.cluster_arrive_relaxed()

        thread = cute.arch.thread_idx()[0]
        block, cluster, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        stream = thread % HC
        fragment = block * self.fragments + thread // HC
        column = fragment * FRAGMENT_BYTES
        first = cluster * self.group
        count = cutlass.min(residual.shape[0] - first, self.group)

        memory = SmemAllocator()
        # Each thread keeps its new fragments here, and later its collapsed words.
        stash = memory.allocate(self.warps * self.group * STASH_TOKEN, 16)
        partials = memory.allocate_tensor(
            Float32, row_major(self.warps, self.group, SUMS_STRIDE), 16
        )
        sums = memory.allocate_tensor(
            Float32, row_major(self.group, 32, self.cluster_size), 16
        )
        squares = memory.allocate_tensor(Float32, row_major(self.group, self.warps), 16)
        norms = memory.allocate_tensor(
            Float32, row_major(self.group, self.cluster_size), 16
        )

        # Weights: no kernel writes them.
        warp_column = block * self.fragments + warp * FRAGMENTS_PER_WARP
        rows = load_projection(
            fn.iterator.toint()
            + lane // 4 * FN_ROW_BYTES
            + (warp_column + lane % 4) * FRAGMENT_BYTES
        )
        pre_scale = scale[0]
        pre_base = base[stream]
        first_word = fragment * FRAGMENT_WORDS + stream * LANE_WORDS
        norm_words = cute.recast_tensor(norm_weight, Uint32)
        norm_share = [norm_words[first_word + index] for index in range(LANE_WORDS)]

        # The publish before this kernel triggers after its own wait, so what earlier
        # kernels wrote is complete; the rows that publish sends announce themselves.
        generation = ptx.load_int_relaxed(state.iterator.toint())
        first_rank = stream % SOURCES * POLLS
        slots = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES + first_rank * SLOT_BYTES + column
        )
        old_streams = residual.iterator.toint() + column
        new_streams = new_residual.iterator.toint() + stream * ROW_BYTES + column

        warp_stash = stash.toint() + warp * (self.group * STASH_TOKEN)
        own_stash = warp_stash + stream * STASH_STREAM + lane // HC * FRAGMENT_BYTES
        arrivals = load_arrivals(slots + Int64(first * ROW_BYTES))
        old = load_old_streams(old_streams + Int64(first * TOKEN_BYTES))
        post_weight, comb_weights = load_mix_weights(post, comb, first, stream)
        for index in cutlass.range(count):
            token = first + index
            # The next token's loads are in flight while this one is projected. The last
            # turn loads its own token again, to no effect.
            following = first + cutlass.min(index + 1, count - 1)
            next_arrivals = load_arrivals(slots + Int64(following * ROW_BYTES))
            next_old = load_old_streams(old_streams + Int64(following * TOKEN_BYTES))
            next_post, next_comb = load_mix_weights(post, comb, following, stream)

            y = receive(slots + Int64(token * ROW_BYTES), arrivals)
            new = post_mix(y, post_weight, comb_weights, old)
            ptx.store_fragment(new_streams + Int64(token * TOKEN_BYTES), new)
            ptx.store_shared(own_stash + index * STASH_TOKEN, new)

            arrivals = next_arrivals
            old = next_old
            post_weight = next_post
            comb_weights = next_comb

        # First reduction: over the warp on tensor cores, over the block by lane k for
        # sum k, over the cluster by all its blocks alike. Lanes beyond the last token
        # repeat it, to no effect.
        cute.arch.sync_warp()
        lane_tokens = [
            cutlass.min(octet * 8 + lane // 4, count - 1)
            for octet in range((self.group + 7) // 8)
        ]
        chunk_stash = warp_stash + lane % 4 * FRAGMENT_BYTES
        token_sums = project(
            rows, [chunk_stash + token * STASH_TOKEN for token in lane_tokens]
        )
        store_sums(partials[warp, None, None], token_sums, lane, count)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        # Each warp serves one (token, peer) pair at a time.
        for pair in cutlass.range(warp, count * self.cluster_size, self.warps):
            index = pair // self.cluster_size
            if lane <= SQUARES:
                block_total = sum_row(partials[None, index, lane], self.warps)
                place = sums[index, lane, None].iterator.toint() + block * 4
                ptx.store_peer(place, pair % self.cluster_size, block_total)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        # Every block of this cluster has read the generation.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] - 1
        if block == 0 and thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)

        for index in cutlass.range(count):
            rstd = row_rstd(sum_row(sums[index, SQUARES, None], self.cluster_size))
            # The blocks of the cluster take turns to store the mixes.
            if block == index % self.cluster_size and thread < MIX:
                mix[first + index, thread] = (
                    sum_row(sums[index, thread, None], self.cluster_size) * rstd
                )
            mix_pre = sum_row(sums[index, stream, None], self.cluster_size) * rstd
            new = ptx.load_shared(own_stash + index * STASH_TOKEN)
            c = collapse(pre_mix(mix_pre, pre_scale, pre_base), new, stream)
            spare = [Uint32(0)] * (FRAGMENT_WORDS - LANE_WORDS)
            ptx.store_shared(own_stash + index * STASH_TOKEN, [*c, *spare])
            # Second reduction: the norm of the collapsed row.
            square = sum_warp(square_sum(c))
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

        output = cute.recast_tensor(layer_input, Uint32)
        for index in cutlass.range(count):
            c = ptx.load_shared(own_stash + index * STASH_TOKEN)[:LANE_WORDS]
            squares_sum = sum_row(norms[index, None], self.cluster_size)
            normalized = normalize(c, squares_sum, norm_share)
            for word in cutlass.range_constexpr(LANE_WORDS):
                output[first + index, first_word + word] = normalized[word]

        # A later kernel that waits for this one may rely on all before it.
        cute.arch.griddepcontrol_wait()
        if block == 0 and thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
