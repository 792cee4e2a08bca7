"""Entry: expands a hidden state to the streams, and takes their mixes.

All streams are the hidden state. There is no boundary before, so the collapse uses the
pre-mix of these mixes.
"""

import cutlass
from cutlass import «plan.tensor_types», Int64, cute

from . import ptx
from .constants import (
    ENDS_CLUSTER,
    ENDS_STRIDE,
    ENDS_THREADS,
    FN_FRAGMENT_BYTES,
    FN_STREAM_BYTES,
    FRAGMENT_BYTES,
    FRAGMENTS,
    HC,
    HIDDEN,
    MIX,
    ROW_BYTES,
    TOKEN_BYTES,
)
from .ends import allocate_sums, sum_cluster, sum_of
from .fn_rows import dot, load_row, widen
from .signature import SmemAllocator, current_stream, tensor
from .steps import normalize, pack, pre_mix, row_rstd, square_sum, unpack


class Entry:
    """A cluster a token, a thread a fragment at a time."""

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens = cute.sym_int32()
        return (
            tensor(«plan.activation_type», tokens, HIDDEN),
            tensor(«plan.fn_type», MIX, HC * HIDDEN),
            tensor(Float32, 3),
            tensor(Float32, MIX),
#: if plan.norm_weight != "none"
            tensor(«plan.activation_type», HIDDEN),
#: endif
            tensor(«plan.activation_type», tokens, HC, HIDDEN),
            tensor(Float32, tokens, MIX),
            tensor(«plan.activation_type», tokens, HIDDEN),
#: if plan.stream_mean
            tensor(«plan.activation_type», tokens, HIDDEN),
#: endif
            current_stream(),
        )

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,  # [M, HIDDEN] «plan.activation»
        fn: cute.Tensor,  # [MIX, HC * HIDDEN] «plan.fn_weight»
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,  # [HIDDEN] «plan.activation»
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
            hidden,
            fn,
            scale,
            base,
#: if plan.norm_weight != "none"
            norm_weight,
#: endif
            new_residual,
            mix,
            layer_input,
#: if plan.stream_mean
            stream_mean,
#: endif
        ).launch(
            grid=[ENDS_CLUSTER, hidden.shape[0], 1],
            block=[ENDS_THREADS, 1, 1],
            cluster=[ENDS_CLUSTER, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        hidden: cute.Tensor,
        fn: cute.Tensor,
        scale: cute.Tensor,
        base: cute.Tensor,
#: if plan.norm_weight != "none"
        norm_weight: cute.Tensor,
#: endif
        new_residual: cute.Tensor,
        mix: cute.Tensor,
        layer_input: cute.Tensor,
#: if plan.stream_mean
        stream_mean: cute.Tensor,
#: endif
    ):
        """Takes one token through steps 3 to 5."""
        # A peer's shared memory may be written once the peer runs: the wait is below.
        cute.arch.cluster_arrive_relaxed()
        thread = cute.arch.thread_idx()[0]
        block, token, _ = cute.arch.block_idx()
        first = block * ENDS_THREADS + thread
        memory = SmemAllocator()
        partials, sums = allocate_sums(memory, MIX + 1)
        square_partials, squares = allocate_sums(memory, 1)

        row = hidden.iterator.toint() + Int64(token * ROW_BYTES)
        streams = new_residual.iterator.toint() + Int64(token * TOKEN_BYTES)
        fn_address = fn.iterator.toint()
        totals = [Float32(0.0) for _ in range(MIX + 1)]
        for fragment in cutlass.range(first, FRAGMENTS, ENDS_STRIDE):
            column = fragment * FRAGMENT_BYTES
            words = ptx.load_fragment(row + column)
            values = unpack(words)
            for stream in cutlass.range(HC):
                ptx.store_fragment(streams + stream * ROW_BYTES + column, words)
                rows = (
                    fn_address + stream * FN_STREAM_BYTES + fragment * FN_FRAGMENT_BYTES
                )
                totals = [
                    dot(widen(load_row(rows, k)) if k < MIX else values, values, total)
                    for k, total in enumerate(totals)
                ]
        cute.arch.cluster_wait()
        sum_cluster(totals, partials, sums)

        rstd = row_rstd(sum_of(sums, MIX))
        if block == 0 and thread < MIX:
            mix[token, thread] = sum_of(sums, thread) * rstd
        # All streams are alike: their weights add up.
        weight = Float32(0.0)
        for k in cutlass.range_constexpr(HC):
            weight = weight + pre_mix(sum_of(sums, k) * rstd, scale[0], base[k])

        square = Float32(0.0)
        for fragment in cutlass.range(first, FRAGMENTS, ENDS_STRIDE):
            words = ptx.load_fragment(row + fragment * FRAGMENT_BYTES)
            square = square + square_sum(pack([weight * v for v in unpack(words)]))
        sum_cluster([square], square_partials, squares)

        output = layer_input.iterator.toint() + Int64(token * ROW_BYTES)
#: if plan.stream_mean
        means = stream_mean.iterator.toint() + Int64(token * ROW_BYTES)
#: endif
        for fragment in cutlass.range(first, FRAGMENTS, ENDS_STRIDE):
            column = fragment * FRAGMENT_BYTES
            words = ptx.load_fragment(row + column)
            c = pack([weight * value for value in unpack(words)])
#: if plan.norm_weight == "none"
            normalized = normalize(c, sum_of(squares, 0))
#: else
            norm_share = ptx.load_constant(norm_weight.iterator.toint() + column)
            normalized = normalize(c, sum_of(squares, 0), norm_share)
#: endif
            ptx.store_fragment(output + column, normalized)
#: if plan.stream_mean
            ptx.store_fragment(means + column, words)
#: endif
