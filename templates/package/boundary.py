"""Boundary: consumes the mailbox, one token a cluster of thread blocks.

The blocks of a cluster split the row. Each thread holds one fragment of one residual
stream; the MIX projections and the norm are summed over the cluster through distributed
shared memory, once each.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from . import ptx
from .constants import (
    CAPACITY,
    FN_ROW_BYTES,
    FRAGMENT_BYTES,
    FRAGMENT_WORDS,
    FRAGMENTS_PER_WARP,
    GENERATION_BYTES,
    GENERATIONS,
    HC,
    HIDDEN,
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
    TP,
)
from .signature import SmemAllocator, current_stream, tensor
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
        tokens = cute.sym_int32()
        return (
            tensor(BFloat16, tokens, HC, HIDDEN),
            tensor(Float32, tokens, HC, 1),
            tensor(Float32, tokens, HC, HC),
            tensor(BFloat16, MIX, HC * HIDDEN),
            tensor(Float32, 3),
            tensor(Float32, MIX),
            tensor(BFloat16, HIDDEN),
            tensor(BFloat16, GENERATIONS, TP, CAPACITY, HIDDEN),
            tensor(Int32, 2),
            tensor(BFloat16, tokens, HC, HIDDEN),
            tensor(Float32, tokens, MIX),
            tensor(BFloat16, tokens, HIDDEN),
            current_stream(),
        )

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
        scale: cute.Tensor,
        base: cute.Tensor,
        norm_weight: cute.Tensor,
        mailbox: cute.Tensor,
        state: cute.Tensor,
        new_residual: cute.Tensor,
        mix: cute.Tensor,
        layer_input: cute.Tensor,
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
        column = fragment * FRAGMENT_BYTES

        memory = SmemAllocator()
        stash = memory.allocate(self.warps * STASH_TOKEN, 16)
        partials = memory.allocate_tensor(
            Float32, row_major(self.warps, 1, SUMS_STRIDE), 16
        )
        sums = memory.allocate_tensor(Float32, row_major(32, self.cluster_size), 16)
        squares = memory.allocate_tensor(Float32, row_major(self.warps), 16)
        norms = memory.allocate_tensor(Float32, row_major(self.cluster_size), 16)

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
        token_bytes = Int64(token * TOKEN_BYTES + column)
        old = load_old_streams(residual.iterator.toint() + token_bytes)
        post_weight, comb_weights = load_mix_weights(post, comb, token, stream)
        first_rank = stream % SOURCES * POLLS
        slot = mailbox.iterator.toint() + Int64(
            generation * GENERATION_BYTES
            + first_rank * SLOT_BYTES
            + token * ROW_BYTES
            + column
        )
        y = receive(slot, load_arrivals(slot))
        new = post_mix(y, post_weight, comb_weights, old)
        ptx.store_fragment(
            new_residual.iterator.toint() + token_bytes + stream * ROW_BYTES, new
        )

        # First reduction: over the warp on tensor cores, over the block by lane k for
        # sum k, over the cluster by all its blocks alike.
        warp_stash = stash.toint() + warp * STASH_TOKEN
        ptx.store_shared(
            warp_stash + stream * STASH_STREAM + lane // HC * FRAGMENT_BYTES, new
        )
        cute.arch.sync_warp()
        token_sums = project(rows, [warp_stash + lane % 4 * FRAGMENT_BYTES])
        store_sums(partials[warp, None, None], token_sums, lane, 1)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        place = sums[lane, None].iterator.toint() + block * 4
        for first_peer in cutlass.range_constexpr(0, self.cluster_size, self.warps):
            if first_peer + warp < self.cluster_size and lane <= SQUARES:
                block_total = sum_row(partials[None, 0, lane], self.warps)
                ptx.store_peer(place, first_peer + warp, block_total)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        # Every block of this cluster has read the generation.
        arrival = Uint32(0)
        last = cute.arch.grid_dim()[1] - 1
        if block == 0 and thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)

        rstd = row_rstd(sum_row(sums[SQUARES, None], self.cluster_size))
        if block == 0 and thread < MIX:
            mix[token, thread] = sum_row(sums[thread, None], self.cluster_size) * rstd
        mix_pre = sum_row(sums[stream, None], self.cluster_size) * rstd
        c = collapse(pre_mix(mix_pre, pre_scale, pre_base), new, stream)

        # Second reduction: the norm of the collapsed row.
        square = sum_warp(square_sum(c))
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

        output = cute.recast_tensor(layer_input, Uint32)
        normalized = normalize(c, sum_row(norms, self.cluster_size), norm_share)
        for index, word in enumerate(normalized):
            output[token, first_word + index] = word

        # A later kernel that waits for this one may rely on all before it.
        cute.arch.griddepcontrol_wait()
        if block == 0 and thread == 0 and arrival == last:
            state[0] = (generation + 1) % GENERATIONS
