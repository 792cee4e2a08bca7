#: if plan.delayed
"""Mixes: pre-mix, post-mix and Sinkhorn-normalized residual mix of the next boundary.
#: else
"""Mixes: the post-mix and the Sinkhorn-normalized residual mix of the next boundary.
#: endif

They feed only the next boundary, so this kernel runs on a side stream beside the next
sublayer.
"""

import cutlass
from cutlass import Float32, cute

from . import ptx
from .constants import HC, HC_EPS, MIX, POST_MULT, SINKHORN_ITERS
from .signature import given_stream, tensor
#: if plan.delayed
from .steps import LOG2_E, pre_mix, sigmoid
#: else
from .steps import LOG2_E, sigmoid
#: endif

THREADS = 32


def column_pass(rows):
    """Divides each column by its sum plus hc_eps."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*row_pass(columns), strict=True)]


def row_pass(rows):
    """Divides each row by its sum plus hc_eps."""
    scaled = []
    for row in rows:
        factor = ptx.reciprocal(sum(row[1:], row[0]) + Float32(HC_EPS))
        scaled.append([value * factor for value in row])
    return scaled


def softmax(row):
    """Softmax with the maximum subtracted."""
    largest = row[0]
    for value in row[1:]:
        largest = cute.arch.fmax(largest, value)
    powers = [ptx.exp2((value - largest) * Float32(LOG2_E)) for value in row]
    factor = ptx.reciprocal(sum(powers[1:], powers[0]))
    return [power * factor for power in powers]


class Mixes:
    """One thread a token, its matrix in registers."""

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens = cute.sym_int32()
        return (
            tensor(Float32, tokens, MIX),
            tensor(Float32, 3),
            tensor(Float32, MIX),
            tensor(Float32, tokens, HC, 1),
            tensor(Float32, tokens, HC, HC),
#: if plan.delayed
            tensor(Float32, tokens, HC),
#: endif
            given_stream(),
        )

    @cute.jit
    def __call__(
        self,
        mix: cute.Tensor,  # [M, MIX] FP32
        scale: cute.Tensor,  # [3] FP32
        base: cute.Tensor,  # [MIX] FP32
        post: cute.Tensor,  # [M, HC, 1] FP32, out
        comb: cute.Tensor,  # [M, HC, HC] FP32, out
#: if plan.delayed
        pre: cute.Tensor,  # [M, HC] FP32, out
#: endif
        stream,
    ):
        """Launches the kernel."""
        blocks = (mix.shape[0] + THREADS - 1) // THREADS
#: if plan.delayed
        self.kernel(mix, scale, base, post, comb, pre).launch(
#: else
        self.kernel(mix, scale, base, post, comb).launch(
#: endif
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mix: cute.Tensor,
        scale: cute.Tensor,
        base: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor,
#: if plan.delayed
        pre: cute.Tensor,
#: endif
    ):
#: if plan.delayed
        """Takes one token through steps 4, 6 and 7."""
#: else
        """Takes one token through steps 6 and 7."""
#: endif
        token = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if token < mix.shape[0]:
#: if plan.delayed
            # Step 4, for the next boundary.
            for stream in cutlass.range_constexpr(HC):
                pre[token, stream] = pre_mix(mix[token, stream], scale[0], base[stream])

#: endif
            # Step 6: post = post_mult * sigmoid(mix*scale + base).
            for stream in cutlass.range_constexpr(HC):
                logit = ptx.fma(mix[token, HC + stream], scale[1], base[HC + stream])
                post[token, stream, 0] = Float32(POST_MULT) * sigmoid(logit)

            # Step 7: row softmax plus hc_eps, then Sinkhorn passes: one over the
            # columns, and SINKHORN_ITERS - 1 times rows and columns.
            logits = [
                [
                    ptx.fma(mix[token, index], scale[2], base[index])
                    for index in range(first, first + HC)
                ]
                for first in range(2 * HC, MIX, HC)
            ]
            rows = [[v + Float32(HC_EPS) for v in softmax(row)] for row in logits]
            rows = column_pass(rows)
            for _ in cutlass.range(SINKHORN_ITERS - 1):
                rows = column_pass(row_pass(rows))
            for source in cutlass.range_constexpr(HC):
                for target in cutlass.range_constexpr(HC):
                    comb[token, source, target] = rows[source][target]
