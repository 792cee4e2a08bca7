"""Mixes: the post-mix and the Sinkhorn-normalized residual mix of the next boundary.

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
    """
    result = []
    for row, before in zip(rows, inverse, strict=True):
        total = Float32(HC_EPS) * before
        for value, column in zip(row, columns, strict=True):
            total = ptx.fma(value, column, total)
        result.append(total)
    return result


@cute.jit
def store_mixes(logits, post: cute.Tensor, comb: cute.Tensor):
    """Steps 6 and 7 of one token, from its MIX logits; the first HC are not used."""
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
    row_scales = [Float32(1.0)] * HC
    inverse_rows = [Float32(1.0)] * HC
    inverse_columns = scale_rows(columns, row_scales, [Float32(1.0)] * HC)
    column_scales = [ptx.reciprocal(value) for value in inverse_columns]
    for _ in cutlass.range(SINKHORN_ITERS - 1):
        inverse_rows = scale_rows(rows, column_scales, inverse_rows)
        row_scales = [ptx.reciprocal(value) for value in inverse_rows]
        inverse_columns = scale_rows(columns, row_scales, inverse_columns)
        column_scales = [ptx.reciprocal(value) for value in inverse_columns]
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
        stream,
    ):
        """Launches the kernel."""
        blocks = (mix.shape[0] + THREADS - 1) // THREADS
        self.kernel(mix, scale, base, post, comb).launch(
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
    ):
        """Takes one token through steps 6 and 7."""
        token = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if token < mix.shape[0]:
            logits = [Float32(0.0)] * HC + [
                ptx.fma(mix[token, number], scale[1 + number // (2 * HC)], base[number])
                for number in range(HC, MIX)
            ]
            store_mixes(logits, post[token, None, 0], comb[token, None, None])
#: endif
