"""The exact value of every arithmetic operation, on arrays of one element a thread.

Floating results are rounded once, to nearest even. A NaN result is the one that NVIDIA
hardware gives: 0x7fffffff in FP32 and 0x7fff in BF16. Subnormals are kept; ``flushed``
is for the operations that ask for ``.ftz``.

The approximations (reciprocal, reciprocal square root, power of two) are computed in
float64 and rounded to FP32: within the error that PTX documents for them, and closer
to the exact value than hardware is. Tensor-core products are exact, but hardware does
not document how it rounds their sums: here they are summed in float64 and rounded once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

F32_NAN = np.uint32(0x7FFFFFFF)
BF16_NAN = F16_NAN = np.uint32(0x7FFF)
_SMALLEST_NORMAL = 2.0**-126
# What float64 has below FP32's last bit, and the value of it that lies at a tie.
_BELOW_F32 = np.int64((1 << 29) - 1)
_TIE = np.int64(1 << 28)


# --- FP32 ---------------------------------------------------------------------------


def canonical(x: Array) -> Array:
    """FP32 with every NaN replaced by the one that hardware gives; changes ``x``."""
    nan = x != x
    if np.count_nonzero(nan):  # quicker than any() on short arrays
        x.view(np.uint32)[nan] = F32_NAN
    return x


def flushed(x: Array) -> Array:
    """FP32 with subnormals replaced by zeros of their sign."""
    return np.where(np.abs(x) < np.float32(_SMALLEST_NORMAL), np.copysign(0, x), x)


def add(a: Array, b: Array) -> Array:
    """a + b in FP32."""
    return canonical(np.add(a, b))


def subtract(a: Array, b: Array) -> Array:
    """a - b in FP32."""
    return canonical(np.subtract(a, b))


def multiply(a: Array, b: Array) -> Array:
    """a * b in FP32."""
    return canonical(np.multiply(a, b))


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in FP32 with one rounding.

    The product is exact in float64. The sum there is rounded, and FP32 rounds it again:
    that differs from one rounding only where the first one ends at a tie of FP32, or
    where FP32 has fewer bits than usual.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    doubtful = (total.view(np.int64) & _BELOW_F32) == _TIE
    doubtful |= np.abs(total) < _SMALLEST_NORMAL
    if np.count_nonzero(doubtful):
        addend = np.broadcast_to(addend, total.shape)
        product = np.broadcast_to(product, total.shape)
        total[doubtful] = _rounded_to_odd(
            total[doubtful], product[doubtful], addend[doubtful]
        )
    return canonical(total.astype(np.float32))


def _rounded_to_odd(total: Array, product: Array, addend: Array) -> Array:
    """The float64 sum, rounded so that a later rounding sees on which side it is.

    An inexact sum is given an odd last bit: it is then no tie and not exact. The
    rounding error is Knuth's.
    """
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(np.int64)
    outward = (error < 0) == np.signbit(total)
    neighbour = np.where(outward, bits + 1, bits - 1)
    change = (bits & 1 == 0) & (error != 0) & np.isfinite(total)
    return np.where(change, neighbour, bits).view(np.float64)


def minimum(a: Array, b: Array) -> Array:
    """The smaller in FP32: the other one beside a NaN, and -0.0 before +0.0."""
    return _extreme((a < b) | np.isnan(b), a, b, np.bitwise_or)


def maximum(a: Array, b: Array) -> Array:
    """The larger in FP32: the other one beside a NaN, and +0.0 before -0.0."""
    return _extreme((a > b) | np.isnan(b), a, b, np.bitwise_and)


def _extreme(first: Array, a: Array, b: Array, of_zeros: np.ufunc) -> Array:
    """``a`` where ``first``, else ``b``; of two zeros, their bits combined."""
    result = np.where(first, a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        bits = of_zeros(a.view(np.uint32), b.view(np.uint32))
        result = np.where(zeros, bits.view(np.float32), result)
    return canonical(result)


def negate(a: Array) -> Array:
    """-a in FP32."""
    return canonical(np.negative(a))


def absolute(a: Array) -> Array:
    """|a| in FP32."""
    return canonical(np.abs(a))


def reciprocal(x: Array) -> Array:
    """1 / x, within 1 ulp as PTX documents ``rcp.approx``; 1 / ±0 is ±infinity."""
    return canonical((1.0 / x.astype(np.float64)).astype(np.float32))


def reciprocal_root(x: Array) -> Array:
    """1 / sqrt(x), as ``rsqrt.approx``; of -0.0 it is -infinity, below zero a NaN."""
    return canonical((1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32))


def root(x: Array) -> Array:
    """sqrt(x), as ``sqrt.approx`` and ``sqrt.rn``."""
    return canonical(np.sqrt(x))


def power_of_two(x: Array) -> Array:
    """2 ** x, as ``ex2.approx``."""
    return canonical(np.exp2(x.astype(np.float64)).astype(np.float32))


def logarithm(x: Array) -> Array:
    """log2(x), as ``lg2.approx``."""
    return canonical(np.log2(x.astype(np.float64)).astype(np.float32))


# --- BF16 ---------------------------------------------------------------------------


def from_bf16(bits: Array) -> Array:
    """BF16 bits to FP32: exact; a NaN keeps its payload."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """FP32 to BF16 bits in the low half of a word, to nearest even."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    nan = x != x
    if np.count_nonzero(nan):
        rounded = np.where(nan, BF16_NAN, rounded)
    return rounded


def pack_bf16x2(high: Array, low: Array) -> Array:
    """Two FP32 to a word of two BF16."""
    return (to_bf16(high) << np.uint32(16)) | to_bf16(low)


# --- FP16 ---------------------------------------------------------------------------


def from_f16(bits: Array) -> Array:
    """FP16 bits to FP32: exact, subnormals too."""
    return canonical(bits.astype(np.uint16).view(np.float16).astype(np.float32))


def to_f16(x: Array) -> Array:
    """FP32 to FP16 bits in the low half of a word, to nearest even or to infinity."""
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(x), F16_NAN, rounded)


def pack_f16x2(high: Array, low: Array) -> Array:
    """Two FP32 to a word of two FP16."""
    return (to_f16(high) << np.uint32(16)) | to_f16(low)


# --- tensor cores -------------------------------------------------------------------


def matrix_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """The tensor-core tile m16n8k16 of BF16 with FP32 sums, for whole warps.

    Args:
        a: [4, 32·W] words. Lane 4g+q holds rows g, g+8, g, g+8; columns 2q, 2q, 2q+8,
            2q+8 and the one after each.
        b: [2, 32·W] words: column g; rows 2q, 2q+8 and the one after each.
        c: [4, 32·W] FP32: rows g, g, g+8, g+8; columns 2q, 2q+1, 2q, 2q+1.

    Returns:
        The sums, as ``c``.
    """
    # [half of k, half of m, W, g, q, pair] -> [W, half of m, g, half of k, q, pair]
    left = _halves(a).reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    right = _halves(b).reshape(2, -1, 8, 4, 2).transpose(1, 2, 0, 3, 4)
    product = np.matmul(
        left.reshape(-1, 16, 16), right.reshape(-1, 8, 16).transpose(0, 2, 1)
    )
    tile = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).astype(np.float64)
    total = (product.reshape(tile.shape) + tile).astype(np.float32)
    return canonical(
        np.ascontiguousarray(total.transpose(1, 4, 0, 2, 3).reshape(4, -1))
    )


def _halves(words: Array) -> Array:
    """Words to their two BF16 in float64, the low half first, along a last axis."""
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return from_bf16(pairs).astype(np.float64)


# --- integers -----------------------------------------------------------------------


def multiply_wide(a: Array, b: Array) -> Array:
    """The whole product, in integers of twice the width."""
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return np.asarray(np.multiply(a, b, dtype=wide))


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = 8 * a.dtype.itemsize
    if bits == 64:
        exact = a.astype(object) * b.astype(object)
        return np.array([value >> 64 for value in exact.flat], dtype=a.dtype)
    return np.asarray(multiply_wide(a, b) >> bits).astype(a.dtype)


def shift_left(a: Array, by: Array) -> Array:
    """a << by; nothing is left of ``a`` where ``by`` is its width or more."""
    last = 8 * a.dtype.itemsize - 1
    shifted = a << np.minimum(by, last).astype(a.dtype)
    return _unless(by > last, shifted)


def shift_right(a: Array, by: Array) -> Array:
    """a >> by; only the sign is left where ``by`` is the width of ``a`` or more."""
    last = 8 * a.dtype.itemsize - 1
    shifted = a >> np.minimum(by, last).astype(a.dtype)
    return _unless(by > last, shifted) if a.dtype.kind == "u" else shifted


def _unless(beyond: Array, shifted: Array) -> Array:
    """Zero where all bits are shifted out."""
    return np.where(beyond, shifted.dtype.type(0), shifted) if beyond.any() else shifted


def look_up(a: Array, b: Array, c: Array, table: int) -> Array:
    """Each bit is the table's bit at the number that the bits of a, b and c make."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            term = np.full_like(a, np.iinfo(a.dtype).max)
            for bit, operand in ((4, a), (2, b), (1, c)):
                term = term & (operand if index & bit else ~operand)
            result |= term
    return result


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes picked from the eight of b:a; bit 3 of a pick spreads its sign."""
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for place in range(4):
        pick = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (source >> (8 * (pick & np.uint32(7))).astype(np.uint64)) & np.uint64(
            255
        )
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(pick & np.uint32(8), sign, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result
