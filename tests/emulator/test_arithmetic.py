"""Every arithmetic operation against an oracle of another kind."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mhcgen.emulator import arithmetic
from tests.emulator.tiny import result

# The machine runs with these off, too.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

Array = NDArray[Any]
SPECIAL = np.frombuffer(
    bytes.fromhex(
        "00000000 80000000 00000001 80000001 007FFFFF 00800000 3F800000 BF800000"
        "3F800001 7F7FFFFF FF7FFFFF 7F800000 FF800000 7FC00000 7F800001 FFFFFFFF"
        "33800000 4B000000"
    ),
    ">u4",
)
SPECIAL = SPECIAL.astype(np.uint32).view(np.float32)


def rounded(value: Fraction) -> int:
    """The bits of a number, rounded to FP32 to nearest even: by the definition."""
    if value == 0:
        return 0
    sign = 0x80000000 if value < 0 else 0
    value = abs(value)
    exponent = -126
    while value >= Fraction(2) ** (exponent + 1) and exponent < 128:
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    count = round(value / unit)  # Python rounds halves to even
    if count * unit >= Fraction(2) ** 128:
        return sign | 0x7F800000
    biased = (exponent + 126) << 23
    return sign | (biased + count)


def floats(seed: int, count: int) -> Array:
    """Random bits, and numbers whose sums and products come near ties."""
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    narrow = rng.integers(0, 1 << 12, count).astype(np.uint32) << np.uint32(11)
    exponent = rng.integers(110, 145, count).astype(np.uint32) << np.uint32(23)
    near = np.where(rng.random(count) < 0.5, narrow | exponent, exponent)
    return np.where(rng.random(count) < 0.3, wild, near).view(np.float32)


def same(actual: Array, expected: Array) -> bool:
    """Bits are equal; every NaN is the canonical one."""
    nan = np.isnan(expected)
    bits = np.where(nan, np.uint32(0x7FFFFFFF), expected.view(np.uint32))
    return bool(np.array_equal(actual.view(np.uint32), bits))


def all_of(count: int) -> list[Array]:
    """Every combination of special values."""
    columns = zip(*itertools.product(SPECIAL, repeat=count), strict=True)
    return [np.array(column, np.float32) for column in columns]


def test_sums_and_products_of_special_values() -> None:
    a, b = all_of(2)
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    assert same(arithmetic.add(a, b), (ta + tb).numpy())
    assert same(arithmetic.subtract(a, b), (ta - tb).numpy())
    assert same(arithmetic.multiply(a, b), (ta * tb).numpy())


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    bits = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        value = Fraction(x) * Fraction(y) + Fraction(z)
        bits.append(rounded(value))
    return np.array(bits, np.uint32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32))
def test_fma_rounds_once(seed: int) -> None:
    a, b, c = (floats(seed + i, 64) for i in range(3))
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    # The sign of a zero sum is not what is tested here.
    actual = arithmetic.fma(a, b, c).view(np.uint32)
    actual = np.where(actual == 0x80000000, 0, actual)
    expected = exact_fma(a, b, c)
    expected = np.where(expected == 0x80000000, 0, expected)
    assert np.array_equal(actual, expected)


def test_fma_where_a_second_rounding_would_show() -> None:
    """1 + 2**-24 is a tie; the tiny rest decides, and float64 cannot hold it."""
    a = np.array([1, 1, 1 + 2**-23, 2**-75], np.float32)
    b = np.array([2**-24, 2**-24, 2**-24, 2**-75], np.float32)
    c = np.array([1, 1, 1, 2**-149], np.float32)
    assert np.array_equal(arithmetic.fma(a, b, c).view(np.uint32), exact_fma(a, b, c))
    small = np.float32(2.0**-40)
    exact = Fraction(1 + 2**-12) ** 2 + Fraction(2) ** -24
    x = np.array([1 + 2**-12], np.float32)
    total = arithmetic.fma(x, x, np.array([2.0**-24], np.float32))
    assert total.view(np.uint32)[0] == rounded(exact)
    assert small > 0


def test_fma_of_special_values() -> None:
    a, b, c = all_of(3)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) * b + c
    special = ~np.isfinite(expected) & ~(
        np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    )
    actual = arithmetic.fma(a, b, c)
    assert same(actual[special], expected[special].astype(np.float32))
    zero = expected == 0
    assert same(actual[zero], expected[zero].astype(np.float32))


def test_minimum_and_maximum() -> None:
    a, b = all_of(2)
    least, largest = arithmetic.minimum(a, b), arithmetic.maximum(a, b)
    for x, y, low, high in zip(a, b, least, largest, strict=True):
        numbers = [v for v in (x, y) if not np.isnan(v)]
        if not numbers:
            assert low.view(np.uint32) == high.view(np.uint32) == 0x7FFFFFFF
            continue
        # -0.0 is less than +0.0 here.
        ordered = sorted(numbers, key=lambda v: (v, not np.signbit(v)))
        assert low.view(np.uint32) == ordered[0].view(np.uint32)
        assert high.view(np.uint32) == ordered[-1].view(np.uint32)


def test_bf16_to_nearest_even() -> None:
    x = np.concatenate([SPECIAL, floats(1, 1 << 16)])
    expected = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    expected = np.where(np.isnan(x), np.uint16(0x7FFF), expected)
    assert np.array_equal(arithmetic.to_bf16(x), expected)
    packed = arithmetic.pack_bf16x2(x, x[::-1])
    assert np.array_equal(packed >> 16, expected)
    assert np.array_equal(packed & 0xFFFF, expected[::-1])


def test_every_bf16_is_exact_in_fp32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(
        arithmetic.from_bf16(bits).view(np.uint32), wide.view(np.uint32)
    )


def test_fp16_to_nearest_even() -> None:
    """Subnormals, halves of the smallest one, and what is too large."""
    x = np.concatenate([SPECIAL, floats(1, 1 << 16)])
    rng = np.random.default_rng(2)
    near = np.ldexp(
        rng.integers(0, 1 << 13, 1 << 14) / 2, rng.integers(-26, 6, 1 << 14)
    )
    x = np.concatenate([x, near.astype(np.float32), -near.astype(np.float32)])
    expected = torch.from_numpy(x).half().view(torch.int16).numpy().view(np.uint16)
    expected = np.where(np.isnan(x), np.uint16(0x7FFF), expected)
    assert {0x0001, 0x7BFF, 0x7C00, 0x8001, 0xFC00} <= {*expected.tolist()}
    assert np.array_equal(arithmetic.to_f16(x), expected)
    packed = arithmetic.pack_f16x2(x, x[::-1])
    assert np.array_equal(packed >> 16, expected)
    assert np.array_equal(packed & 0xFFFF, expected[::-1])


def test_every_fp16_is_exact_in_fp32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = torch.from_numpy(bits.view(np.int16)).view(torch.float16).float().numpy()
    actual = arithmetic.from_f16(bits)
    nan = np.isnan(wide)
    assert np.array_equal(actual[~nan].view(np.uint32), wide[~nan].view(np.uint32))
    assert np.all(actual[nan].view(np.uint32) == 0x7FFFFFFF)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (arithmetic.reciprocal, lambda x: 1 / x),
        (arithmetic.reciprocal_root, lambda x: 1 / np.sqrt(x)),
        (arithmetic.power_of_two, np.exp2),
        (arithmetic.logarithm, np.log2),
    ],
)
def test_approximations_are_within_an_ulp(function: Any, exact: Any) -> None:
    x = np.abs(floats(7, 4096))
    x = x[np.isfinite(x) & (x > 1e-30) & (x < 100)]
    expected = exact(x.astype(np.longdouble))
    error = np.abs(function(x).astype(np.longdouble) - expected)
    assert bool((error <= np.spacing(np.abs(expected).astype(np.float32))).all())


def test_approximations_of_special_values() -> None:
    inf = np.inf
    x = np.array([0.0, -0.0, inf, -inf, np.nan, -1.0], np.float32)
    expected = {
        arithmetic.reciprocal: [inf, -inf, 0.0, -0.0, np.nan, -1.0],
        arithmetic.reciprocal_root: [inf, -inf, 0.0, np.nan, np.nan, np.nan],
        arithmetic.power_of_two: [1.0, 1.0, inf, 0.0, np.nan, 0.5],
        arithmetic.logarithm: [-inf, -inf, inf, np.nan, np.nan, np.nan],
    }
    for function, values in expected.items():
        assert same(function(x), np.array(values, np.float32)), function
    subnormal = np.array([2.0**-149], np.float32)
    assert arithmetic.reciprocal(subnormal)[0] == inf
    assert arithmetic.reciprocal_root(np.array([2.0**-148], np.float32))[0] == 2.0**74


def test_flushing_keeps_the_sign() -> None:
    x = np.array([2.0**-127, -(2.0**-149), 2.0**-126, 0.0], np.float32)
    flushed = arithmetic.flushed(x)
    assert flushed.tolist() == [0.0, 0.0, 2.0**-126, 0.0]
    assert np.signbit(flushed).tolist() == [False, True, False, False]


def test_tensor_core_tile() -> None:
    """Small integers, so that every order of the sum gives the same bits."""
    rng = np.random.default_rng(3)
    warps = 3
    a = rng.integers(-8, 9, (warps, 16, 16)).astype(np.float32)
    b = rng.integers(-8, 9, (warps, 16, 8)).astype(np.float32)
    c = rng.integers(-99, 99, (warps, 16, 8)).astype(np.float32)
    words_a = np.empty((4, warps, 32), np.uint32)
    words_b = np.empty((2, warps, 32), np.uint32)
    tile = np.empty((4, warps, 32), np.float32)
    for lane in range(32):
        g, q = divmod(lane, 4)
        for index, (row, column) in enumerate(
            [(g, 2 * q), (g + 8, 2 * q), (g, 2 * q + 8), (g + 8, 2 * q + 8)]
        ):
            pair = a[:, row, column : column + 2]
            words_a[index, :, lane] = arithmetic.pack_bf16x2(pair[:, 1], pair[:, 0])
        for index, row in enumerate([2 * q, 2 * q + 8]):
            pair = b[:, row : row + 2, g]
            words_b[index, :, lane] = arithmetic.pack_bf16x2(pair[:, 1], pair[:, 0])
        for index, row in enumerate([g, g + 8]):
            for half in range(2):
                tile[2 * index + half, :, lane] = c[:, row, 2 * q + half]
    actual = arithmetic.matrix_multiply_add(
        words_a.reshape(4, -1), words_b.reshape(2, -1), tile.reshape(4, -1)
    ).reshape(4, warps, 32)
    expected = a @ b + c
    for lane in range(32):
        g, q = divmod(lane, 4)
        for index, row in enumerate([g, g, g + 8, g + 8]):
            column = 2 * q + index % 2
            assert np.array_equal(actual[index, :, lane], expected[:, row, column])


def test_shifts_clamp() -> None:
    a = np.array([0x80000001] * 5, np.uint32)
    by = np.array([0, 1, 31, 32, 0xFFFFFFFF], np.uint32)
    left = [0x80000001, 2, 0x80000000, 0, 0]
    assert arithmetic.shift_left(a, by).tolist() == left
    assert arithmetic.shift_right(a, by).tolist() == [0x80000001, 0x40000000, 1, 0, 0]
    signed = arithmetic.shift_right(a.view(np.int32), by)
    assert signed.tolist() == [-0x7FFFFFFF, -0x40000000, -1, -1, -1]


@settings(max_examples=50, deadline=None)
@given(*[st.integers(0, 2**32 - 1)] * 3, st.integers(0, 255))
def test_bitwise_table_and_bytes(a: int, b: int, c: int, table: int) -> None:
    words = [np.array([value], np.uint32) for value in (a, b, c)]
    expected = 0
    for bit in range(32):
        index = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        expected |= (table >> index & 1) << bit
    assert arithmetic.look_up(*words, table)[0] == expected
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picked = []
    for place in range(4):
        pick = c >> 4 * place & 15
        byte = pool[pick & 7]
        picked.append((255 if byte & 128 else 0) if pick & 8 else byte)
    assert arithmetic.permute(*words)[0] == int.from_bytes(picked, "little")


INTEGER_CASES = [
    ("add.s32 %r9, %r2, %r3;", lambda a, b: a + b),
    ("sub.s32 %r9, %r2, %r3;", lambda a, b: a - b),
    ("neg.s32 %r9, %r2;", lambda a, b: -a),
    ("not.b32 %r9, %r2;", lambda a, b: ~a),
    ("and.b32 %r9, %r2, %r3;", lambda a, b: a & b),
    ("or.b32 %r9, %r2, -65536;", lambda a, b: a | -65536),
    ("xor.b32 %r9, %r2, %r3;", lambda a, b: a ^ b),
    ("min.s32 %r9, %r2, %r3;", min),
    ("max.s32 %r9, %r2, %r3;", max),
    ("min.u32 %r9, %r2, %r3;", lambda a, b: min(a % 2**32, b % 2**32)),
    ("mul.lo.s32 %r9, %r2, %r3;", lambda a, b: a * b),
    ("mul.hi.s32 %r9, %r2, %r3;", lambda a, b: a * b >> 32),
    ("mul.hi.u32 %r9, %r2, %r3;", lambda a, b: (a % 2**32) * (b % 2**32) >> 32),
    ("mad.lo.s32 %r9, %r2, %r3, %r2;", lambda a, b: a * b + a),
    (
        "mul.wide.s32 %d9, %r2, %r3; mov.b64 {%r8, %r9}, %d9;",
        lambda a, b: a * b >> 32,
    ),
    (
        "cvt.s64.s32 %d9, %r2; mov.b64 {%r8, %r9}, %d9;",
        lambda a, b: a >> 31,
    ),
    ("cvt.u64.u32 %d9, %r2; mov.b64 {%r8, %r9}, %d9;", lambda a, b: 0),
    ("cvt.u16.u32 %h1, %r2; cvt.u32.u16 %r9, %h1;", lambda a, b: a & 0xFFFF),
    (
        "mov.b32 {%h1, %h2}, %r2; mov.b32 %r9, {%h2, %h1};",
        lambda a, b: (a & 0xFFFF) << 16 | (a >> 16 & 0xFFFF),
    ),
    ("shr.s32 %r9, %r2, 3;", lambda a, b: a >> 3),
    ("shl.b32 %r9, %r2, 33;", lambda a, b: 0),
    ("setp.lt.s32 %p1, %r2, %r3; selp.b32 %r9, 1, 0, %p1;", lambda a, b: a < b),
    (
        "setp.lt.u32 %p1, %r2, %r3; selp.b32 %r9, 1, 0, %p1;",
        lambda a, b: a % 2**32 < b % 2**32,
    ),
    (
        "setp.gt.s32 %p2, %r2, 0; setp.ne.and.b32 %p1, %r2, %r3, %p2; "
        "selp.b32 %r9, 1, 0, %p1;",
        lambda a, b: a != b and a > 0,
    ),
]


@pytest.mark.parametrize(("code", "oracle"), INTEGER_CASES)
def test_integer_instructions(code: str, oracle: Any) -> None:
    rng = np.random.default_rng(11)
    edges = [0, 1, -1, 2**31 - 1, -(2**31), 65536, -65536, 3]
    a = np.array([*edges, *rng.integers(-(2**31), 2**31, 24)], np.int32)
    b = np.array([*reversed(edges), *rng.integers(-(2**31), 2**31, 24)], np.int32)
    expected = [
        int(oracle(x, y)) % 2**32 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert result(code, a, b).tolist() == expected


FLOAT_CASES = [
    ("add.rn.f32 %r9, %r2, %r3;", lambda a, b: a + b),
    ("sub.f32 %r9, %r2, %r3;", lambda a, b: a - b),
    ("mul.f32 %r9, %r2, 0fBFB8AA3B;", lambda a, b: a * np.float32(-1.4426950408889634)),
    ("fma.rn.f32 %r9, %r2, %r3, %r2;", lambda a, b: arithmetic.fma(a, b, a)),
    (
        "mul.ftz.f32 %r9, %r2, %r3;",
        lambda a, b: arithmetic.flushed(arithmetic.flushed(a) * arithmetic.flushed(b)),
    ),
    (
        "mov.b64 %d8, {%r2, %r3}; mov.b64 %d9, {%r3, %r3}; "
        "fma.rn.f32x2 %d8, %d8, %d9, %d9; mov.b64 {%r9, %r8}, %d8;",
        lambda a, b: arithmetic.fma(a, b, b),
    ),
    (
        "mov.b64 %d8, {%r2, %r3}; add.rn.f32x2 %d8, %d8, %d8; mov.b64 {%r8, %r9}, %d8;",
        lambda a, b: b + b,
    ),
    (
        "cvt.rn.bf16.f32 %h1, %r2; cvt.f32.bf16 %r9, %h1;",
        lambda a, b: torch.from_numpy(a).bfloat16().float().numpy(),
    ),
    (
        "cvt.rn.f16x2.f32 %r8, %r3, %r2; mov.b32 {%h1, %h2}, %r8; "
        "cvt.f32.f16 %r9, %h1;",
        lambda a, b: torch.from_numpy(a).half().float().numpy(),
    ),
    (
        "cvt.rn.bf16.f32 %h1, %r2; fma.rn.f32.bf16 %r9, %h1, %h1, %r3;",
        lambda a, b: arithmetic.fma(
            *[torch.from_numpy(a).bfloat16().float().numpy()] * 2, b
        ),
    ),
    (
        "setp.ltu.f32 %p1, %r2, %r3; selp.f32 %r9, %r2, %r3, %p1;",
        lambda a, b: np.where(~(a >= b), a, b),
    ),
]


@pytest.mark.parametrize(("code", "oracle"), FLOAT_CASES)
def test_float_instructions(code: str, oracle: Any) -> None:
    a = np.concatenate([SPECIAL[:16], floats(5, 16)])
    b = np.concatenate([floats(6, 16), SPECIAL[:16]])
    expected = np.asarray(oracle(a, b), np.float32)
    actual = result(code, a, b)
    nan = np.isnan(expected)
    assert np.array_equal(actual[~nan], expected.view(np.uint32)[~nan])
    assert bool(np.isnan(actual.view(np.float32)[nan]).all())


def test_comparisons_with_nan() -> None:
    nan = np.full(32, np.nan, np.float32)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "num"):
        code = f"setp.{name}.f32 %p1, %r2, %r2; selp.b32 %r9, 1, 0, %p1;"
        assert not result(code, nan).any(), name
    for name in ("equ", "neu", "ltu", "leu", "gtu", "geu", "nan"):
        code = f"setp.{name}.f32 %p1, %r2, %r2; selp.b32 %r9, 1, 0, %p1;"
        assert result(code, nan).all(), name
