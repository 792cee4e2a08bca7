#: if plan.delayed
"""Mixes: pre-mix, post-mix and Sinkhorn-normalized residual mix of the next boundary.
#: else
"""Mixes: the post-mix and the Sinkhorn-normalized residual mix of the next boundary.
#: endif

#: if plan.tail
They feed only the next boundary, so one warp of a boundary computes them beside the
norm.
#: else
They feed only the next boundary, so this kernel runs on a side stream beside the next
sublayer.
#: endif
"""

import cutlass
from cutlass import Float32, cute

from . import ptx
from .constants import HC, HC_EPS, MIX, POST_MULT, SINKHORN_ITERS
from .signature import given_stream, tensor
from .steps import LOG2_E, sigmoid

THREADS = 32


def softmax(row):
    """Softmax with the maximum subtracted, plus hc_eps."""
    largest = row[0]
    for value in row[1:]:
        largest = cute.arch.fmax(largest, value)
    powers = [ptx.exp2((value - largest) * Float32(LOG2_E)) for value in row]
    factor = ptx.reciprocal(sum(powers[1:], powers[0]))
    return [ptx.fma(power, factor, Float32(HC_EPS)) for power in powers]


def scale_rows(rows, columns, inverse):
    """One Sinkhorn pass over the rows of a matrix diag(1/inverse) rows diag(columns).

    It divides each row by its sum plus hc_eps, which makes the row's scale
    1 / (rows . columns + hc_eps * inverse).

    Returns:
        The inverse scales of the rows, and the scales.
    """
    totals = []
    for row, before in zip(rows, inverse, strict=True):
        # Two chains take half of the time of one.
        sums = [Float32(HC_EPS) * before, Float32(0.0)]
        for place, (value, column) in enumerate(zip(row, columns, strict=True)):
            sums[place % 2] = ptx.fma(value, column, sums[place % 2])
        totals.append(ptx.add(*sums))
    return totals, [ptx.reciprocal_normal(total) for total in totals]


@cute.jit
#: if plan.delayed
def store_mixes(logits, post: cute.Tensor, comb: cute.Tensor, pre: cute.Tensor):
    """Steps 4, 6 and 7 of one token, from its MIX logits."""
    # Step 4: pre = sigmoid(mix*scale + base) + hc_eps, for the next boundary.
    for stream in cutlass.range_constexpr(HC):
        pre[stream] = sigmoid(logits[stream]) + Float32(HC_EPS)

#: else
def store_mixes(logits, post: cute.Tensor, comb: cute.Tensor):
    """Steps 6 and 7 of one token, from its MIX logits; the first HC are not used."""
#: endif
    # Step 6: post = post_mult * sigmoid(mix*scale + base).
    for stream in cutlass.range_constexpr(HC):
        post[stream] = Float32(POST_MULT) * sigmoid(logits[HC + stream])

    # Step 7: row softmax plus hc_eps, then Sinkhorn passes: one over the columns, and
    # SINKHORN_ITERS - 1 times rows and columns. The passes only change the scales of
    # rows and columns; they are kept as their inverses.
    rows = [
        softmax([logits[first + target] for target in range(HC)])
        for first in range(2 * HC, MIX, HC)
    ]
    columns = [list(column) for column in zip(*rows, strict=True)]
    ones = [Float32(1.0)] * HC
    row_scales, inverse_rows = ones, ones
    inverse_columns, column_scales = scale_rows(columns, ones, ones)
    for _ in cutlass.range(SINKHORN_ITERS - 1):
        inverse_rows, row_scales = scale_rows(rows, column_scales, inverse_rows)
        inverse_columns, column_scales = scale_rows(
            columns, row_scales, inverse_columns
        )
    for source in cutlass.range_constexpr(HC):
        for target in cutlass.range_constexpr(HC):
            scale = row_scales[source] * column_scales[target]
            comb[source, target] = rows[source][target] * scale
#: if not plan.tail


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
            logits = [
                ptx.fma(mix[token, number], scale[min(number // HC, 2)], base[number])
                for number in range(MIX)
            ]
            store_mixes(
                logits,
                post[token, None, 0],
                comb[token, None, None],
#: if plan.delayed
                pre[token, None],
#: endif
            )
#: endif
