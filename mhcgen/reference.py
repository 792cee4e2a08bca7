"""The boundary in float64: the truth that every kernel is measured against.

One short function per step of the numerics contract, each headed by its formula.
Steps 1 and 2 (the all-reduce and the post-mix) give the exact bits that a kernel has
to give. Everything after them is float64, with the contract's rounding points: the
collapse ``c`` is rounded to the activation dtype before the norm, the layer input after
it. The activation dtype, bf16 or fp16, is that of the tensors given; ``act`` rounds to
it, to nearest even.

The module needs torch alone, so that it runs beside a generated package on a machine
without mhcgen. Results are on the device of the arguments. Denormals must not be
flushed (torch's default; see ``torch.set_flush_denormal``).

The ends of the network have functions of their own: ``entry_boundary`` expands a hidden
state to the streams, ``exit_boundary`` collapses the last streams.

Shapes use M tokens, H hidden, HC streams, MIX = HC*(2+HC) mixes and TP ranks.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = [
    "MIX_TOLERANCE",
    "NAN_DISTANCE",
    "VARIANTS",
    "BoundaryResult",
    "Collapsed",
    "Constants",
    "ExitResult",
    "Head",
    "Inputs",
    "LayerInputCheck",
    "MixCheck",
    "Variant",
    "all_reduce",
    "bits_equal",
    "boundary",
    "check_layer_input",
    "check_mixes",
    "collapse",
    "entry_boundary",
    "exit_boundary",
    "finalize",
    "fma_f32",
    "head_mix",
    "max_abs_error",
    "mixes",
    "normalize",
    "normalized_distance",
    "post_mix",
    "post_weights",
    "pre_mix",
    "project",
    "random_inputs",
    "residual_mix",
    "round_to",
    "sanitize",
    "stream_mean",
    "ulp_distance",
]

MIX_TOLERANCE = 2e-5
"""Largest absolute error of a mix, for inputs at unit scale."""

NAN_DISTANCE = 1 << 16
"""Distance of a NaN from a number: more than any two 16-bit numbers are apart."""

_ACTIVATIONS = (torch.bfloat16, torch.float16)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Constants:
    """The model's constants, held as a kernel holds them: rounded to FP32.

    Attributes:
        rms_eps: added to the mean square of the streams (step 3).
        hc_eps: added to pre-mix, softmax and Sinkhorn sums (steps 4 and 7).
        norm_eps: added to the mean square of the collapse (step 5).
        post_mult: factor of the post-mix weights (step 6).
        sinkhorn_iters: column passes of the residual mix (step 7), at least 1.
        plus_one: whether the norm multiplies by norm_weight + 1, added in FP32.
    """

    rms_eps: float
    hc_eps: float
    norm_eps: float
    post_mult: float
    sinkhorn_iters: int
    plus_one: bool = False

    def __post_init__(self) -> None:
        """Round the four numbers to FP32."""
        if self.sinkhorn_iters < 1:
            raise ValueError(f"sinkhorn_iters is {self.sinkhorn_iters}, not 1 or more")
        for name in ("rms_eps", "hc_eps", "norm_eps", "post_mult"):
            (rounded,) = struct.unpack("f", struct.pack("f", getattr(self, name)))
            object.__setattr__(self, name, rounded)


@dataclass(frozen=True)
class Collapsed:
    """Collapsed and normalized streams.

    Attributes:
        c: the collapse before rounding, [M,H] float64 (step 5).
        c_rounded: the collapse, [M,H] activations (step 5).
        layer_input_exact: the norm before rounding, [M,H] float64 (step 5).
        layer_input: the norm, [M,H] activations (step 5): the input of the next
            sublayer, or, at the exit, of the head.
    """

    c: Tensor
    c_rounded: Tensor
    layer_input_exact: Tensor
    layer_input: Tensor


@dataclass(frozen=True)
class BoundaryResult(Collapsed):
    """What one boundary returns, and the values on the way there.

    Attributes:
        y: the all-reduced sublayer output, [M,H] activations, exact bits (step 1); at
            the entry the hidden state.
        residual: the new streams, [M,HC,H] activations, exact bits (step 2).
        mix: the mixes, [M,MIX] float64 (step 3).
        pre: the pre-mix of these mixes, [M,HC] float64 (step 4). The collapse uses it
            where the pre-mix is fresh; where it is delayed, that of the next boundary.
        post: the next post-mix weights, [M,HC,1] float64 (step 6).
        comb: the next residual mix, [M,HC,HC] float64, [source, target] (step 7).
        stream_mean: the mean of the new streams, [M,H] activations.
    """

    y: Tensor
    residual: Tensor
    mix: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor
    stream_mean: Tensor


@dataclass(frozen=True)
class ExitResult(Collapsed):
    """What the exit returns, as layer_input, and the values on the way there.

    Attributes:
        y: the all-reduced sublayer output, [M,H] activations, exact bits (step 1).
        residual: the last streams, [M,HC,H] activations, exact bits (step 2).
        pre: the weights of the collapse, [M,HC] float64.
    """

    y: Tensor
    residual: Tensor
    pre: Tensor


@dataclass(frozen=True)
class Head:
    """The weights of an exit by a sigmoid head.

    Attributes:
        fn: [HC,HC*H] bf16 or float32, its columns stream-major.
        scale: [1] float32.
        base: [HC] float32.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor


# --- rounding ---------------------------------------------------------------------


def sanitize(x: Tensor) -> Tensor:
    """Replace every -0.0, the mailbox's sentinel, by +0.0; touch no other bit.

    Args:
        x: any shape, bf16 (or another 16-bit type).

    Returns:
        A new tensor of x's shape and dtype; NaN payloads and subnormals are kept.
    """
    bits = x.view(torch.int16)
    return bits.masked_fill(bits == -0x8000, 0).view(x.dtype)


def _to_odd(nearest: Tensor, error: Tensor) -> Tensor:
    """Turn a value rounded to nearest into the same value rounded to odd.

    An inexact value then lies at the neighbour with an odd last bit, which no later,
    coarser rounding can mistake for a tie or for an exact value.

    Args:
        nearest: the value, rounded to nearest; float32 or float64.
        error: a number with the sign of (exact value - nearest); zero when exact.

    Returns:
        The value rounded to odd, of nearest's shape and dtype.
    """
    bits = nearest.view(_BITS[nearest.element_size()])
    outward = (error < 0) == torch.signbit(nearest)
    neighbour = torch.where(outward, bits + 1, bits - 1)
    even_and_inexact = (bits & 1 == 0) & (error != 0) & torch.isfinite(nearest)
    return torch.where(even_and_inexact, neighbour, bits).view(nearest.dtype)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round once, to nearest even: float64 to bf16 or fp16.

    ``x.to(dtype)`` would round twice, to float32 on the way.

    Args:
        x: any shape, float64.
        dtype: bf16 or fp16; what is too large for it is infinite.

    Returns:
        A tensor of x's shape and that dtype.
    """
    nearest = x.float()
    return _to_odd(nearest, x - nearest.double()).to(dtype)


def fma_f32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*b + c with a single rounding to FP32, as ``fma.rn.f32`` gives it.

    The product of two FP32 values is exact in float64. The sum is rounded to odd
    there, with the error of the addition (Knuth's TwoSum), then to nearest in FP32.

    Args:
        a: float32.
        b: float32, of a shape that broadcasts with a's.
        c: float32, of a shape that broadcasts with theirs.

    Returns:
        A float32 tensor of the broadcast shape.
    """
    for name, operand in (("a", a), ("b", b), ("c", c)):
        _expect(name, operand, torch.float32)
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    return _to_odd(total, error).float()


def _expect(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} is {tensor.dtype}, not {allowed}")


# --- the boundary, step by step ---------------------------------------------------


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """Step 1, exact bits: y = act(((x0+x1) + (x2+x3)) + ...), summed in FP32.

    Neighbours are added in rank order until one sum is left; with a number of ranks
    that is no power of two, the last one of an odd level goes up as it is.

    Args:
        parts: the ranks' partial outputs, TP tensors [M,H] bf16 or fp16, as they are
            before publish (which sanitizes them).

    Returns:
        y, [M,H] of the same dtype.
    """
    _expect("the part of rank 0", parts[0], *_ACTIVATIONS)
    for rank, part in enumerate(parts):
        _expect(f"the part of rank {rank}", part, parts[0].dtype)
    sums = [sanitize(part).float() for part in parts]
    while len(sums) > 1:
        pairs = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0].to(parts[0].dtype)


def post_mix(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Step 2, exact bits: new[j] = act(post[j]*y + sum_i comb[i,j]*residual[i]).

    In FP32: the rounded product post[j]*y, then one fused multiply-add per i, in order.

    Args:
        y: [M,H] bf16 or fp16.
        residual: [M,HC,H] of the same dtype.
        post: [M,HC,1] float32.
        comb: [M,HC,HC] float32, [source, target].

    Returns:
        The new streams, [M,HC,H] of the same dtype.
    """
    _expect("y", y, *_ACTIVATIONS)
    _expect("residual", residual, y.dtype)
    _expect("post", post, torch.float32)
    new = post * y.float().unsqueeze(1)
    for source in range(residual.shape[1]):
        weight = comb[:, source, :, None]
        new = fma_f32(weight, residual[:, source, None, :].float(), new)
    return new.to(y.dtype)


def stream_mean(new: Tensor) -> Tensor:
    """The mean of the streams: act(sum_j new[j] / HC).

    Args:
        new: [M,HC,H] bf16 or fp16, the rounded streams.

    Returns:
        The mean, [M,H] of the same dtype.
    """
    return round_to(new.double().mean(1), new.dtype)


def project(new: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Step 3, the sums: dot[k] = sum fn[k]*new and ss = sum new*new, over HC*H.

    Args:
        new: [M,HC,H] bf16 or fp16, the rounded streams.
        fn: [MIX,HC*H] bf16 or float32, its columns stream-major.

    Returns:
        dot, [M,MIX] float64, and ss, [M] float64.
    """
    flat = new.double().flatten(1)
    return flat @ fn.double().T, flat.square().sum(1)


def mixes(
    dot: Tensor, ss: Tensor, hc: int, hidden: int, constants: Constants
) -> Tensor:
    """Step 3, the mixes: mix[k] = dot[k] * rsqrt(ss/(HC*H) + rms_eps).

    Args:
        dot: [M,MIX] float64.
        ss: [M] float64.
        hc: HC.
        hidden: H.
        constants: rms_eps is used.

    Returns:
        mix, [M,MIX] float64.
    """
    rstd = torch.rsqrt(ss / (hc * hidden) + constants.rms_eps)
    return dot * rstd.unsqueeze(1)


def _logits(mix: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mix[k]*scale[group] + base[k], split into pre, post (HC) and comb (HC*HC)."""
    hc = math.isqrt(mix.shape[1] + 1) - 1  # MIX + 1 = (HC + 1)**2
    sizes = [hc, hc, hc * hc]
    mixes_of, bases_of = torch.split(mix, sizes, 1), torch.split(base.double(), sizes)
    groups = zip(mixes_of, scale.double(), bases_of, strict=True)
    pre, post, comb = (m * s + b for m, s, b in groups)
    return pre, post, comb


def pre_mix(mix: Tensor, scale: Tensor, base: Tensor, constants: Constants) -> Tensor:
    """Step 4: pre[j] = sigmoid(mix[j]*scale[0] + base[j]) + hc_eps.

    Args:
        mix: [M,MIX] float64.
        scale: [3] float32.
        base: [MIX] float32.
        constants: hc_eps is used.

    Returns:
        pre, [M,HC] float64.
    """
    logits, _, _ = _logits(mix, scale, base)
    return torch.sigmoid(logits) + constants.hc_eps


def collapse(pre: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Step 5, the collapse: c = act(sum_j pre[j]*new[j]).

    Args:
        pre: [M,HC] float64 or float32.
        new: [M,HC,H] bf16 or fp16.

    Returns:
        c before rounding, [M,H] float64, and rounded, [M,H] of new's dtype.
    """
    c = (pre.double().unsqueeze(2) * new.double()).sum(1)
    return c, round_to(c, new.dtype)


def normalize(
    c: Tensor, norm_weight: Tensor | None, norm_eps: float, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Step 5, the norm: act(c * rsqrt(mean(c*c) + norm_eps) * norm_weight).

    Args:
        c: [M,H] bf16 or fp16, the rounded collapse.
        norm_weight: [H], any floating dtype; None for a norm without a weight.
        norm_eps: a number.
        plus_one: whether the weight is norm_weight + 1, added in FP32.

    Returns:
        The layer input before rounding, [M,H] float64, and rounded, [M,H] of c's dtype.
    """
    wide = c.double()
    layer_input = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + norm_eps)
    if norm_weight is not None:
        weight = norm_weight.float() + 1 if plus_one else norm_weight
        layer_input = layer_input * weight.double()
    return layer_input, round_to(layer_input, c.dtype)


def head_mix(new: Tensor, head: Head, constants: Constants) -> Tensor:
    """A sigmoid head: pre[j] = sigmoid(dot[j]*rstd*scale + base[j]) + hc_eps.

    With dot[j] = sum head.fn[j]*new, and the rstd of step 3.

    Args:
        new: [M,HC,H] bf16 or fp16, the last streams.
        head: the head's weights.
        constants: rms_eps and hc_eps are used.

    Returns:
        pre, [M,HC] float64.
    """
    dot, ss = project(new, head.fn)
    mix = mixes(dot, ss, new.shape[1], new.shape[2], constants)
    logits = mix * head.scale.double() + head.base.double()
    return torch.sigmoid(logits) + constants.hc_eps


def post_weights(
    mix: Tensor, scale: Tensor, base: Tensor, constants: Constants
) -> Tensor:
    """Step 6: post'[j] = post_mult * sigmoid(mix[HC+j]*scale[1] + base[HC+j]).

    Args:
        mix: [M,MIX] float64.
        scale: [3] float32.
        base: [MIX] float32.
        constants: post_mult is used; there is no epsilon.

    Returns:
        post', [M,HC,1] float64.
    """
    _, logits, _ = _logits(mix, scale, base)
    return (constants.post_mult * torch.sigmoid(logits)).unsqueeze(2)


def residual_mix(
    mix: Tensor, scale: Tensor, base: Tensor, constants: Constants
) -> Tensor:
    """Step 7: comb' = Sinkhorn of L[i,j], L = mix*scale[2] + base from 2*HC on.

    Row softmax plus hc_eps and a column pass, then sinkhorn_iters-1 times a row pass
    and a column pass. A pass divides by (sum + hc_eps).

    Args:
        mix: [M,MIX] float64.
        scale: [3] float32.
        base: [MIX] float32.
        constants: hc_eps and sinkhorn_iters are used.

    Returns:
        comb', [M,HC,HC] float64, [source, target].
    """
    _, _, logits = _logits(mix, scale, base)
    hc = math.isqrt(logits.shape[1])
    comb = torch.softmax(logits.reshape(-1, hc, hc), 2) + constants.hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + constants.hc_eps)
    for _ in range(constants.sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + constants.hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + constants.hc_eps)
    return comb


def boundary(
    parts: Sequence[Tensor],
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: Constants,
    pre: Tensor | None = None,
) -> BoundaryResult:
    """The whole boundary, steps 1 to 7.

    Args:
        parts: the ranks' partial outputs, TP tensors [M,H] bf16 or fp16.
        residual: [M,HC,H] of the same dtype.
        post: [M,HC,1] float32.
        comb: [M,HC,HC] float32, [source, target].
        fn: [MIX,HC*H] bf16 or float32.
        scale: [3] float32.
        base: [MIX] float32.
        norm_weight: [H], any floating dtype; None for a norm without a weight.
        constants: the model's constants.
        pre: [M,HC] float32, the pre-mix that the boundary before returned; None where
            the pre-mix is fresh: then this boundary's own is used.

    Returns:
        All results and intermediate values.
    """
    y = all_reduce(parts)
    new = post_mix(y, residual, post, comb)
    return _mixed(y, new, fn, scale, base, norm_weight, constants, pre)


def entry_boundary(
    hidden: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: Constants,
) -> BoundaryResult:
    """The entry: every stream is the hidden state; then steps 3 to 7.

    There is no boundary before, so the collapse uses the pre-mix of the entry's own
    mixes also where the pre-mix is delayed; the boundary after then takes the same one.

    Args:
        hidden: [M,H] bf16 or fp16, the embeddings.
        fn: [MIX,HC*H] bf16 or float32.
        scale: [3] float32.
        base: [MIX] float32.
        norm_weight: [H], any floating dtype; None for a norm without a weight.
        constants: the model's constants.

    Returns:
        All results and intermediate values; y is the hidden state.
    """
    _expect("hidden", hidden, *_ACTIVATIONS)
    hc = math.isqrt(fn.shape[0] + 1) - 1  # MIX + 1 = (HC + 1)**2
    streams = hidden.unsqueeze(1).repeat(1, hc, 1)
    return _mixed(hidden, streams, fn, scale, base, norm_weight, constants, None)


def _mixed(
    y: Tensor,
    new: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None,
    constants: Constants,
    carried: Tensor | None,
) -> BoundaryResult:
    """Steps 3 to 7 over the streams."""
    dot, ss = project(new, fn)
    mix = mixes(dot, ss, new.shape[1], new.shape[2], constants)
    pre = pre_mix(mix, scale, base, constants)
    c, c_rounded = collapse(pre if carried is None else carried, new)
    exact, layer_input = normalize(
        c_rounded, norm_weight, constants.norm_eps, constants.plus_one
    )
    return BoundaryResult(
        y=y,
        residual=new,
        mix=mix,
        pre=pre,
        c=c,
        c_rounded=c_rounded,
        layer_input_exact=exact,
        layer_input=layer_input,
        post=post_weights(mix, scale, base, constants),
        comb=residual_mix(mix, scale, base, constants),
        stream_mean=stream_mean(new),
    )


def exit_boundary(
    parts: Sequence[Tensor],
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    norm_weight: Tensor | None,
    constants: Constants,
    weights: Tensor | Head | None = None,
) -> ExitResult:
    """The exit: steps 1 and 2, then the collapse of the last streams and the norm.

    Args:
        parts: the ranks' partial outputs, TP tensors [M,H] bf16 or fp16.
        residual: [M,HC,H] of the same dtype.
        post: [M,HC,1] float32.
        comb: [M,HC,HC] float32, [source, target].
        norm_weight: [H], any floating dtype; None for a norm without a weight.
        constants: the model's constants.
        weights: what the collapse weighs the streams by: the last carried pre-mix,
            [M,HC] float32; a sigmoid head; or None for the mean.

    Returns:
        All results and intermediate values.
    """
    y = all_reduce(parts)
    new = post_mix(y, residual, post, comb)
    if isinstance(weights, Head):
        pre = head_mix(new, weights, constants)
    elif weights is None:
        pre = new.new_full(new.shape[:2], 1 / new.shape[1], dtype=torch.float64)
    else:
        pre = weights.double()
    c, c_rounded = collapse(pre, new)
    exact, layer_input = normalize(
        c_rounded, norm_weight, constants.norm_eps, constants.plus_one
    )
    return ExitResult(
        y=y,
        residual=new,
        pre=pre,
        c=c,
        c_rounded=c_rounded,
        layer_input_exact=exact,
        layer_input=layer_input,
    )


def finalize(
    gemm2_permuted: Tensor,
    expert_weights: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    shared_output: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The routed top-k sum: act(sum_k weight[k]*row(idx[k]) + shared row).

    An index of -1 means "not on this rank": no row is read, nothing is multiplied.

    Args:
        gemm2_permuted: [rows,H] bf16 or fp16.
        expert_weights: [M,top_k] float32 or bf16.
        expanded_idx_to_permuted_idx: [M,top_k] int32, -1 or a row.
        shared_output: [M,H] of the rows' dtype, or None without a shared expert.

    Returns:
        The contribution before rounding, [M,H] float64, and rounded, [M,H] of the rows'
        dtype.
    """
    rows, hidden = gemm2_permuted.shape
    tokens, top_k = expanded_idx_to_permuted_idx.shape
    idx = expanded_idx_to_permuted_idx.long()
    if bool(((idx < -1) | (idx >= rows)).any()):
        raise ValueError(f"an index is neither -1 nor one of {rows} rows")
    if shared_output is None:
        total = gemm2_permuted.new_zeros(tokens, hidden, dtype=torch.float64)
    else:
        total = shared_output.to(torch.float64, copy=True)
    for k in range(top_k):
        (here,) = torch.nonzero(idx[:, k] >= 0, as_tuple=True)
        weight = expert_weights[here, k, None].double()
        total[here] += weight * gemm2_permuted[idx[here, k]].double()
    return total, round_to(total, gemm2_permuted.dtype)


# --- comparisons ------------------------------------------------------------------


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many numbers of their dtype lie between a and b, counting one end.

    Args:
        a: bf16 or fp16.
        b: of the same dtype and of a shape that broadcasts with a's.

    Returns:
        An int32 tensor of the broadcast shape: 0 for +0 and -0 and for two NaNs, 1 for
        neighbours (the largest number and infinity too), NAN_DISTANCE where only one
        is NaN.
    """
    _expect("a", a, *_ACTIVATIONS)
    _expect("b", b, a.dtype)
    distance = (_on_line(a) - _on_line(b)).abs()
    nan_a, nan_b = torch.isnan(a), torch.isnan(b)
    distance = distance.masked_fill(nan_a & nan_b, 0)
    return distance.masked_fill(nan_a ^ nan_b, NAN_DISTANCE)


def _on_line(x: Tensor) -> Tensor:
    """16-bit floats as int32, in order, neighbours 1 apart, zeros at 0."""
    bits = x.view(torch.int16).int()
    magnitude = bits & 0x7FFF
    return torch.where(bits < 0, -magnitude, magnitude)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same, except that any NaN equals any NaN.

    Args:
        a: a floating tensor.
        b: a tensor of the same shape and dtype.

    Returns:
        True or False; +0.0 and -0.0 differ.
    """
    _expect("b", b, a.dtype)
    if a.shape != b.shape:
        raise ValueError(f"b has shape {tuple(b.shape)}, not {tuple(a.shape)}")
    bits = _BITS[a.element_size()]
    same = (a.view(bits) == b.view(bits)) | (torch.isnan(a) & torch.isnan(b))
    return bool(same.all())


def max_abs_error(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, in float64.

    Args:
        actual: a floating tensor.
        expected: a floating tensor of the same shape.

    Returns:
        A number: 0 without elements, and for equal infinities or NaNs; infinite where
        only one is NaN.
    """
    if actual.shape != expected.shape:
        raise ValueError(
            f"actual has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return 0.0
    a, b = actual.double(), expected.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    error = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(error.masked_fill(same, 0).max())


@dataclass(frozen=True)
class LayerInputCheck:
    """How close a layer input is to the reference.

    Attributes:
        worst_ulp: the largest `normalized_distance` where |c| > 1e-3 of its row's rms;
            NAN_DISTANCE where, anywhere, only one of the two is NaN.
        within_1_ulp: the share of all elements that are at most 1 ulp off.
        ok: whether worst_ulp <= 2 and within_1_ulp >= 0.999.
    """

    worst_ulp: int
    within_1_ulp: float
    ok: bool


def normalized_distance(actual: Tensor, result: Collapsed) -> Tensor:
    """`ulp_distance` of a layer input, less what one step of a subnormal c is worth.

    Normalization makes normal numbers of a row of subnormal ones, whose neighbours are
    many ulp apart then: where c lies between two of them, either is right.

    Args:
        actual: [M,H] activations.
        result: the reference for the same inputs.

    Returns:
        [M,H] int32.
    """
    distance = ulp_distance(actual, result.layer_input)
    limits = torch.finfo(actual.dtype)
    magnitude = result.c.abs()
    step = limits.smallest_normal * limits.eps
    # A relative change of eps is one ulp, or two.
    ulps = (2 * step / limits.eps / magnitude).ceil().clamp(max=NAN_DISTANCE - 1)
    subnormal = (magnitude > 0) & (magnitude < limits.smallest_normal)
    worth = ulps.masked_fill(~subnormal, 0).int()
    near = (distance - worth).clamp(min=0)
    return torch.where(distance == NAN_DISTANCE, distance, near)


def check_layer_input(actual: Tensor, result: Collapsed) -> LayerInputCheck:
    """Compare a kernel's layer input, or what its exit returns, with the reference's.

    The contract promises this for "plain" inputs at a useful size (the share of 0.999
    means nothing for a few hundred elements).

    Args:
        actual: [M,H] activations.
        result: the reference for the same inputs.

    Returns:
        The distances and the verdict.
    """
    if actual.shape != result.layer_input.shape:
        raise ValueError(
            f"actual has shape {tuple(actual.shape)}, "
            f"not {tuple(result.layer_input.shape)}"
        )
    distance = normalized_distance(actual, result)
    if distance.numel() == 0:
        return LayerInputCheck(worst_ulp=0, within_1_ulp=1.0, ok=True)
    rms = result.c.square().mean(1, keepdim=True).sqrt()
    counted = (result.c.abs() > 1e-3 * rms) | (distance == NAN_DISTANCE)
    worst = int(distance.masked_fill(~counted, 0).max())
    share = float((distance <= 1).double().mean())
    return LayerInputCheck(worst, share, ok=worst <= 2 and share >= 0.999)


@dataclass(frozen=True)
class MixCheck:
    """How close post-mix weights and residual mix are to the reference.

    Attributes:
        worst_post: the largest absolute error of post'.
        worst_comb: the largest absolute error of comb'.
        ok: whether both are at most MIX_TOLERANCE.
    """

    worst_post: float
    worst_comb: float
    ok: bool


def check_mixes(post: Tensor, comb: Tensor, result: BoundaryResult) -> MixCheck:
    """Compare a kernel's next post-mix weights and residual mix with the reference's.

    The contract promises this for "plain" inputs, which are at unit scale.

    Args:
        post: post', [M,HC,1] float32.
        comb: comb', [M,HC,HC] float32.
        result: the reference for the same inputs.

    Returns:
        The errors and the verdict.
    """
    worst_post = max_abs_error(post, result.post)
    worst_comb = max_abs_error(comb, result.comb)
    ok = max(worst_post, worst_comb) <= MIX_TOLERANCE
    return MixCheck(worst_post, worst_comb, ok)


# --- inputs -----------------------------------------------------------------------

Variant = Literal["plain", "negative_zero", "subnormal", "nan", "inf", "zero", "cancel"]
"""What is special about random inputs; random_inputs describes each."""

VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one boundary, for all ranks.

    Attributes:
        parts: the ranks' partial outputs, TP tensors [M,H] bf16 or fp16.
        residual: [M,HC,H] of the same dtype.
        post: [M,HC,1] float32, between 0 and 2.
        comb: [M,HC,HC] float32, positive, nearly doubly stochastic.
        fn: [MIX,HC*H], such that the mixes are at unit scale.
        scale: [3] float32, near 1.
        base: [MIX] float32, small.
        norm_weight: [H] of the same dtype, near 1.
        pre: [M,HC] float32, between 0 and 1: for a delayed pre-mix.
    """

    parts: tuple[Tensor, ...]
    residual: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor
    pre: Tensor

    def boundary(self, constants: Constants) -> BoundaryResult:
        """The reference's results for these inputs, with a fresh pre-mix."""
        return boundary(
            self.parts,
            self.residual,
            self.post,
            self.comb,
            self.fn,
            self.scale,
            self.base,
            self.norm_weight,
            constants,
        )


def random_inputs(
    m: int,
    hidden: int,
    hc: int,
    tp: int,
    seed: int,
    device: torch.device | str = "cpu",
    hard: Variant = "plain",
    fn_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Fresh inputs at unit scale, the same on every device for the same seed.

    The bits of y and of the residual hold for every variant. check_layer_input and
    check_mixes are promised for "plain" alone; a sound FP32 kernel passes them on
    every variant too (NaNs must be where the reference has them), unless it flushes
    subnormals.

    - "plain": unit scale throughout.
    - "negative_zero": half of each rank's elements are -0.0; in the last token, all.
    - "subnormal": half of the elements of parts and residual, and all of the last
      token's, are subnormals of the dtype, of both signs.
    - "nan": in every other token, from the first on, all of the last rank's elements
      are NaN, with payloads and of both signs.
    - "inf": in every other token, from the first on, one element in 16 of each rank
      is infinite, of either sign (so some sums are NaN). In fp16 half of these are
      the largest number instead, and their sums overflow.
    - "zero": every other token, from the first on, is zero in parts and residual.
    - "cancel": parts of very different sizes whose sum is a small rest of them, so
      that the order of the summation shows.

    Args:
        m: M.
        hidden: H.
        hc: HC.
        tp: TP.
        seed: of the random numbers.
        device: where the tensors go.
        hard: the variant.
        fn_dtype: bf16 or float32.
        dtype: of the activations, bf16 or fp16.

    Returns:
        The inputs of all ranks.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    mix = hc * (2 + hc)
    comb = normal(m, hc, hc).exp()
    for _ in range(8):
        comb = comb / comb.sum(2, keepdim=True)
        comb = comb / comb.sum(1, keepdim=True)
    parts = (normal(tp, m, hidden) / math.sqrt(tp)).to(dtype)
    residual = normal(m, hc, hidden).to(dtype)
    post = 2 * torch.sigmoid(normal(m, hc, 1))
    fn = (normal(mix, hc * hidden) / math.sqrt(hc * hidden)).to(fn_dtype)
    scale = 1 + 0.1 * normal(3)
    base = 0.1 * normal(mix)
    norm_weight = (1 + 0.1 * normal(hidden)).to(dtype)
    parts, residual = _harden(hard, parts, residual, rng)
    pre = torch.sigmoid(normal(m, hc))
    return Inputs(
        parts=tuple(part.to(device) for part in parts.unbind()),
        residual=residual.to(device),
        post=post.to(device),
        comb=comb.to(device),
        fn=fn.to(device),
        scale=scale.to(device),
        base=base.to(device),
        norm_weight=norm_weight.to(device),
        pre=pre.to(device),
    )


def _harden(
    hard: Variant, parts: Tensor, residual: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Give parts [TP,M,H] and residual [M,HC,H], both activations, what is asked."""
    dtype = parts.dtype
    # The bits of the smallest normal number, and of infinity.
    normal, infinity = {torch.bfloat16: (0x80, 0x7F80), torch.float16: (0x400, 0x7C00)}[
        dtype
    ]

    def chosen(like: Tensor, share: float) -> Tensor:
        return torch.rand(like.shape, generator=rng) < share

    def with_random_bits(x: Tensor, low: int, high: int) -> Tensor:
        """Values of both signs whose other 15 bits are in low..high-1."""
        bits = torch.randint(low, high, x.shape, generator=rng)
        signs = torch.randint(0, 2, x.shape, generator=rng) * -0x8000
        return (bits + signs).to(torch.int16).view(dtype)

    match hard:
        case "plain":
            pass
        case "negative_zero":
            where = chosen(parts, 0.5)
            where[:, -1:] = True
            parts = parts.masked_fill(where, -0.0)
        case "subnormal":
            where = chosen(parts, 0.5)
            where[:, -1:] = True
            parts = torch.where(where, with_random_bits(parts, 1, normal), parts)
            where = chosen(residual, 0.5)
            where[-1:] = True
            tiny = with_random_bits(residual, 1, normal)
            residual = torch.where(where, tiny, residual)
        case "nan":
            parts[-1, ::2] = with_random_bits(parts[-1, ::2], infinity + 1, 0x8000)
        case "inf":
            some = parts[:, ::2]
            # The largest BF16 number is too much for sums in FP32.
            lowest = infinity - (dtype == torch.float16)
            huge = with_random_bits(some, lowest, infinity + 1)
            parts[:, ::2] = torch.where(chosen(some, 1 / 16), huge, some)
        case "zero":
            parts[:, ::2] = 0
            residual[::2] = 0
        case "cancel":
            exponent = torch.randint(-16, 9, parts.shape, generator=rng)
            wide = torch.ldexp(torch.randn(parts.shape, generator=rng), exponent)
            parts = (wide - wide.roll(1, 0)).to(dtype)
        case _:
            raise ValueError(f"hard is {hard!r}, not one of {', '.join(VARIANTS)}")
    return parts, residual
