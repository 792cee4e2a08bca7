"""The reference, against hand-computed cases and a slow oracle in plain Python."""

import ast
import math
import struct
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mhcgen import reference
from mhcgen.reference import (
    NAN_DISTANCE,
    VARIANTS,
    BoundaryResult,
    Collapsed,
    Constants,
    Head,
    Inputs,
    all_reduce,
    bits_equal,
    boundary,
    check_layer_input,
    check_mixes,
    collapse,
    entry_boundary,
    exit_boundary,
    finalize,
    fma_f32,
    head_mix,
    max_abs_error,
    mixes,
    normalize,
    post_mix,
    post_weights,
    pre_mix,
    project,
    random_inputs,
    residual_mix,
    round_to,
    sanitize,
    stream_mean,
    ulp_distance,
)

GLM = Constants(
    rms_eps=1e-5, hc_eps=1e-6, norm_eps=1e-5, post_mult=2.0, sinkhorn_iters=20
)
F32_MAX = (2 - 2**-23) * 2.0**127
A = 27 * 2.0**-19  # A*A is 0.7 * 2^-28
FP32, BF16, FP16 = 24, 8, 11  # bits of precision
ACTIVATIONS = {torch.bfloat16: BF16, torch.float16: FP16}

# --- the oracle: one number at a time, exact rationals, its own rounding ----------


def nearest_even(value: Fraction, precision: int) -> float:
    """Round a rational once, to FP32, BF16 or FP16, by its bits of precision."""
    if value == 0:
        return 0.0
    top, bottom = abs(value).numerator, value.denominator
    exponent = top.bit_length() - bottom.bit_length()
    if Fraction(2) ** exponent > abs(value):
        exponent -= 1
    top_exponent = 15 if precision == FP16 else 127
    quantum = Fraction(2) ** (max(exponent, 1 - top_exponent) - (precision - 1))
    rounded = abs(round(value / quantum)) * quantum  # round() is half to even
    infinite = rounded >= 2 ** (top_exponent + 1)
    return math.copysign(math.inf if infinite else float(rounded), value)


def slow_fma(a: float, b: float, c: float, precision: int = FP32) -> float:
    """a*b + c of FP32 numbers, rounded once."""
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            return nearest_even(exact, precision)
    return a * b + c  # a zero with its sign, an infinity or NaN


def slow_all_reduce(xs: list[float], precision: int = BF16) -> float:
    """Recursive: the left half is the largest power of two below the count."""

    def tree(xs: list[float]) -> float:
        if len(xs) == 1:
            return xs[0]
        half = 1 << (len(xs) - 1).bit_length() - 1
        return slow_fma(tree(xs[:half]), 1.0, tree(xs[half:]))

    total = tree([x + 0.0 for x in xs])  # -0.0 + 0.0 is +0.0
    return slow_fma(total, 1.0, -0.0, precision)


def slow_post_mix(y: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    new = torch.empty_like(residual)
    for m, j, h in cells(new):
        acc = slow_fma(post[m, j, 0].item(), y[m, h].item(), -0.0)
        for i in range(residual.shape[1]):
            acc = slow_fma(comb[m, i, j].item(), residual[m, i, h].item(), acc)
        new[m, j, h] = slow_fma(acc, 1.0, -0.0, ACTIVATIONS[y.dtype])
    return new


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_sinkhorn(logits: list[list[float]], eps: float, iters: int):
    """logits[source][target]; the list of passes is written out."""
    n = len(logits)
    comb = [[math.exp(x) for x in row] for row in logits]
    comb = [[x / sum(row) + eps for x in row] for row in comb]
    for which in ["column"] + ["row", "column"] * (iters - 1):
        if which == "row":
            comb = [[x / (sum(row) + eps) for x in row] for row in comb]
        else:
            sums = [sum(comb[i][j] for i in range(n)) + eps for j in range(n)]
            comb = [[comb[i][j] / sums[j] for j in range(n)] for i in range(n)]
    return comb


def slow_token(
    new, fn, scale, base, norm_weight, k: Constants, precision=BF16, carried=None
):
    """Steps 3 to 7 for one token; new[j][h], all Python numbers."""
    hc, hidden = len(new), len(new[0])
    flat = [x for stream in new for x in stream]
    rstd = 1 / math.sqrt(math.fsum(x * x for x in flat) / (hc * hidden) + k.rms_eps)
    mix = [math.fsum(map(float.__mul__, row, flat)) * rstd for row in fn]
    s_pre, s_post, s_comb = scale
    pre = [sigmoid(mix[j] * s_pre + base[j]) + k.hc_eps for j in range(hc)]
    weights = carried or pre
    c = [math.fsum(weights[j] * new[j][h] for j in range(hc)) for h in range(hidden)]
    c_rounded = [nearest_even(Fraction(x), precision) for x in c]
    mean = math.fsum(x * x for x in c_rounded) / hidden
    layer_input = [
        x / math.sqrt(mean + k.norm_eps) * w
        for x, w in zip(c_rounded, norm_weight, strict=True)
    ]
    post = [
        k.post_mult * sigmoid(mix[hc + j] * s_post + base[hc + j]) for j in range(hc)
    ]
    logits = [
        [mix[o] * s_comb + base[o] for o in range(2 * hc + hc * i, 3 * hc + hc * i)]
        for i in range(hc)
    ]
    comb = slow_sinkhorn(logits, k.hc_eps, k.sinkhorn_iters)
    return mix, pre, c, c_rounded, layer_input, post, comb


# --- helpers ----------------------------------------------------------------------


def cells(x: Tensor):
    return torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist()


def f32(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def f64(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bf16(*values) -> Tensor:
    """Numbers that bf16 holds exactly."""
    x = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(x.bfloat16().double(), x)
    return x.bfloat16()


def bf16_bits(*patterns: int) -> Tensor:
    return (
        torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    )


def patterns(x: Tensor) -> list[int]:
    return [bits & 0xFFFF for bits in x.view(torch.int16).flatten().tolist()]


def f32_of_bits(bits: int) -> float:
    (x,) = struct.unpack("<f", struct.pack("<I", bits))
    return x


def wild_bf16(rng: torch.Generator, *shape: int) -> Tensor:
    """Any bit pattern, a third of them subnormal, zero, infinite or NaN."""
    bits = torch.randint(0, 1 << 16, shape, generator=rng)
    extreme = (bits & 0x807F) | torch.where(bits & 0x100 > 0, 0x7F80, 0)
    some = torch.rand(shape, generator=rng) < 0.33
    return torch.where(some, extreme, bits).to(torch.int16).view(torch.bfloat16)


def near_bf16(rng: torch.Generator, *shape: int) -> Tensor:
    """Numbers of close sizes, both signs, so that sums cancel and round."""
    x = torch.randn(shape, generator=rng)
    return torch.ldexp(x, torch.randint(-12, 13, shape, generator=rng)).bfloat16()


def cancelling_bf16(rng: torch.Generator, *shape: int) -> Tensor:
    """Numbers whose sum over the first dimension shows the order of the additions."""
    x = torch.randn(shape, generator=rng)
    x = torch.ldexp(x, torch.randint(-12, 13, shape, generator=rng))
    return (x - x.roll(1, 0)).bfloat16()


def moved(a: BoundaryResult, b: BoundaryResult) -> set[str]:
    names = [f.name for f in fields(BoundaryResult)]
    return {n for n in names if not bits_equal(getattr(a, n), getattr(b, n))}


def close(actual: Tensor, expected, tolerance: float = 1e-13) -> bool:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.dtype == torch.float64
    return max_abs_error(actual, expected) <= tolerance


# --- the module -------------------------------------------------------------------


def test_imports_nothing_but_torch():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"torch"}


def test_exports_every_public_name():
    tree = ast.parse(Path(reference.__file__).read_text())
    defined = {
        n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    assert {n for n in defined if n[0] != "_"} <= set(reference.__all__)
    assert all(hasattr(reference, name) for name in reference.__all__)


def test_constants_are_held_in_fp32():
    k = Constants(1e-5, 1e-6, 1e-20, 0.1, 3)
    assert k.rms_eps == f32(1e-5).item() != 1e-5
    assert k.hc_eps == f32(1e-6).item() != 1e-6
    assert k.norm_eps == f32(1e-20).item() != 0
    assert k.post_mult == f32(0.1).item() != 0.1
    assert k.sinkhorn_iters == 3
    with pytest.raises(ValueError, match="sinkhorn_iters is 0"):
        replace(k, sinkhorn_iters=0)


# --- rounding ---------------------------------------------------------------------


def test_sanitize_changes_minus_zero_alone():
    every = torch.arange(1 << 16)
    x = bf16_bits(*every.tolist())
    before = patterns(x)
    expected = every.tolist()
    expected[0x8000] = 0
    assert patterns(sanitize(x)) == expected
    assert patterns(x) == before


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        # In float64, 1 + 2^-23 + 2^-24*(1 - 2^-46) becomes a tie, which goes up.
        (1 + 2**-23, (1 - 2**-23) * 2**-24, 1 + 2**-23, 1 + 2**-23),
        # 1 + 2^-24*(1 + 2^-22 + 2^-46) needs 71 bits, and is above the tie.
        (1 + 2**-23, (1 + 2**-23) * 2**-24, 1.0, 1 + 2**-23),
        # 0.7 float64 ulp below the tie: there it is odd already, and has to stay.
        (1 + A, (1 - A) * 2**-24, 1 + 2**-23, 1 + 2**-23),
        # The product is a tie; an addend far below float64's ulp decides.
        (1 + 2**-12, 1 + 2**-12, 0.0, 1 + 2**-11),
        (1 + 2**-12, 1 + 2**-12, 2.0**-149, 1 + 2**-11 + 2**-23),
        (1 + 2**-12, 1 + 2**-12, -(2.0**-80), 1 + 2**-11),
        # The product alone is far below.
        (2.0**-149, 2.0**-149, 1.0, 1.0),
        # Subnormal results: half of the smallest is a tie, and goes to zero.
        (2.0**-75, 2.0**-75, 0.0, 0.0),
        (2.0**-75, 2.0**-75 * (1 + 2**-23), 0.0, 2.0**-149),
        (-(2.0**-75), 2.0**-75, 0.0, -0.0),
        (2.0**-75, 2.0**-75, 2.0**-149, 2.0**-148),
        # The largest number: half an ulp more is infinite, less is not.
        (2.0**100, 2.0**3, F32_MAX, math.inf),
        (2.0**100, F32_MAX * 2.0**-125, F32_MAX, F32_MAX),
        (2.0**127, 2.0, -math.inf, -math.inf),
        (2.0**127, 2.0**127, -(2.0**127), math.inf),
        (math.inf, 0.0, 1.0, math.nan),
        (math.inf, 1.0, -math.inf, math.nan),
        (0.0, -1.0, 0.0, 0.0),
        (0.0, -1.0, -0.0, -0.0),
        (1.0, 1.0, -1.0, 0.0),
    ],
)
def test_fma_by_hand(a, b, c, expected):
    assert bits_equal(fma_f32(f32(a), f32(b), f32(c)), f32(expected))
    if not math.isnan(expected):
        assert math.copysign(1, slow_fma(a, b, c)) == math.copysign(1, expected)
        assert slow_fma(a, b, c) == expected


def test_fma_differs_from_double_rounding():
    a, b, c = f32(1 + 2**-23), f32((1 - 2**-23) * 2**-24), f32(1 + 2**-23)
    assert (a.double() * b.double() + c.double()).float().item() == 1 + 2**-22
    assert fma_f32(a, b, c).item() == 1 + 2**-23


any_f32 = st.integers(0, 2**32 - 1).map(f32_of_bits)
few_bits = st.sampled_from([0, 1, 2, 3, 0x400000, 0x7FFFFE, 0x7FFFFF]) | st.integers(
    0, 2**23 - 1
)


@st.composite
def with_exponent(draw, low: int, high: int):
    sign, exponent = draw(st.integers(0, 1)), draw(st.integers(low, high)) + 127
    return f32_of_bits(sign << 31 | exponent << 23 | draw(few_bits))


@st.composite
def near_tie(draw):
    """A product of about half an ulp (or 1/8 to 2) of the addend, any sign."""
    off = draw(st.integers(0, 64)) * 2.0 ** -draw(st.integers(14, 23))
    a, b = draw(st.sampled_from([(1 + off, 1 - off), (1 + off, 1 + off)]))
    exponent, shift = draw(st.integers(-100, 127)), draw(st.integers(-2, 1))
    scale = draw(st.sampled_from([1.0, -1.0])) * 2.0 ** (exponent - 24 + shift)
    c = draw(with_exponent(exponent, exponent))
    return a, b * scale, c


@st.composite
def tied_product(draw):
    """A product with few bits below FP32's last, and a tiny addend or none."""
    bits = draw(st.integers(11, 13))
    a, b = (1 + draw(st.integers(0, 9)) * 2.0**-bits for _ in range(2))
    sign = draw(st.sampled_from([1.0, -1.0]))
    return a, sign * b, draw(with_exponent(-126, -25) | st.just(0.0))


@st.composite
def subnormal_sum(draw):
    a = draw(with_exponent(-80, -60))
    b = draw(with_exponent(-80, -60))
    return a, b, f32_of_bits(draw(st.integers(0, 1)) << 31 | draw(few_bits))


@st.composite
def cancelling(draw):
    """An addend within a few ulp of minus the product."""
    a, b = draw(with_exponent(-70, 60)), draw(with_exponent(-70, 60))
    c = nearest_even(-Fraction(a) * Fraction(b), FP32)
    (bits,) = struct.unpack("<I", struct.pack("<f", c))
    return a, b, f32_of_bits(max(bits + draw(st.integers(-3, 3)), 0))


@given(
    st.lists(
        st.tuples(any_f32, any_f32, any_f32)
        | near_tie()
        | tied_product()
        | subnormal_sum()
        | cancelling()
        | st.tuples(*[with_exponent(-3, 3)] * 3),
        min_size=20,
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_fma_is_the_exact_one(triples):
    a, b, c = (f32(*column) for column in zip(*triples, strict=True))
    expected = f32(*(slow_fma(*triple) for triple in triples))
    assert bits_equal(fma_f32(a, b, c), expected)


def test_fma_takes_fp32_alone():
    with pytest.raises(TypeError, match=r"b is torch\.float64, not torch\.float32"):
        fma_f32(f32(1.0), f64(1.0), f32(1.0))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1 + 2**-8, 1.0),  # a tie
        (1 + 2**-8 + 2**-40, 1 + 2**-7),  # a tie after rounding to FP32
        (1 + 3 * 2**-8 - 2**-40, 1 + 2**-7),
        (-(1 + 2**-8 + 2**-52), -(1 + 2**-7)),
        (2.0**-134, 0.0),
        (2.0**-134 * (1 + 2**-52), 2.0**-133),
        (-(2.0**-300), -0.0),
        ((2 - 2**-8) * 2.0**127, math.inf),
        ((2 - 2**-8 - 2**-50) * 2.0**127, (2 - 2**-7) * 2.0**127),
        (1e300, math.inf),
        (-math.inf, -math.inf),
        (math.nan, math.nan),
    ],
)
def test_round_to_bf16_by_hand(x, expected):
    assert bits_equal(round_to(f64(x), torch.bfloat16), bf16_or_nan(expected))


def bf16_or_nan(x: float) -> Tensor:
    return bf16(x) if not math.isnan(x) else torch.tensor([x]).bfloat16()


@st.composite
def near_bf16_tie(draw):
    bits = draw(st.integers(0, 0x7F7F))
    low, high = f32_of_bits(bits << 16), f32_of_bits((bits << 16) + (1 << 16))
    middle = float((Fraction(low) + (Fraction(high) if bits < 0x7F7F else 2**128)) / 2)
    off = draw(st.sampled_from([0.0, 2.0**-52, -(2.0**-52), 2.0**-30, -(2.0**-30)]))
    return middle * (1 + off) * draw(st.sampled_from([1.0, -1.0]))


@st.composite
def near_fp16_tie(draw):
    units = draw(st.integers(0, 2**11))  # of the smallest subnormal, and of 2^4 and 2^5
    off = draw(st.sampled_from([0.0, 2.0**-52, -(2.0**-52), 2.0**-30, -(2.0**-30)]))
    middle = (units + 0.5) * draw(st.sampled_from([2.0**-24, 2.0**4, 2.0**5]))
    return middle * (1 + off) * draw(st.sampled_from([1.0, -1.0]))


@given(
    st.lists(st.floats() | near_bf16_tie() | near_fp16_tie(), min_size=10, max_size=40)
)
@settings(max_examples=150, deadline=None)
def test_round_to_rounds_once(xs):
    for dtype, precision in ACTIVATIONS.items():
        expected = [
            nearest_even(Fraction(x), precision) if math.isfinite(x) and x else x
            for x in xs
        ]
        assert bits_equal(round_to(f64(*xs), dtype), f64(*expected).to(dtype))


# --- steps 1 and 2: bits ----------------------------------------------------------


def test_all_reduce_is_pairwise():
    # Sequential gives 0; pairing 0 with 2 and 1 with 3 gives 2.
    xs = [bf16([x]) for x in (1.0, 2.0**24, 1.0, -(2.0**24))]
    assert all_reduce(xs).tolist() == [[1.0]]
    # One more rank is added last.
    assert all_reduce([*xs, bf16([1.0])]).tolist() == [[2.0]]


def test_all_reduce_sums_in_fp32_and_rounds_once():
    xs = [bf16([x]) for x in (1.0, 2.0**-8, 2.0**-16, 0.0)]
    assert all_reduce(xs).tolist() == [[1 + 2**-7]]
    assert all_reduce(xs[:2]).tolist() == [[1.0]]


def test_all_reduce_of_minus_zeros_is_plus_zero():
    assert patterns(all_reduce([bf16([-0.0])] * 4)) == [0]
    assert patterns(all_reduce([bf16([-0.0])])) == [0]


def test_all_reduce_keeps_subnormals():
    parts = [bf16_bits(0x0001, 0x8001, 0x0040), bf16_bits(0x0002, 0x8003, 0x0040)]
    assert patterns(all_reduce(parts)) == [0x0003, 0x8004, 0x0080]


def test_all_reduce_of_fp16_overflows_keeps_subnormals_and_drops_the_sentinel():
    x = torch.tensor([[40000.0, 2.0**-24, -0.0, 65504.0]]).half()
    y = all_reduce([x, torch.tensor([[40000.0, 2.0**-23, -0.0, 8.0]]).half()])
    assert y.dtype == torch.float16
    assert y.tolist() == [[math.inf, 3 * 2.0**-24, 0.0, 65504.0]]
    assert patterns(y)[2] == 0
    assert patterns(sanitize(x))[2] == 0


def test_all_reduce_takes_bf16_alone():
    with pytest.raises(TypeError, match="part of rank 1 is"):
        all_reduce([bf16([1.0]), f32([1.0])])


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("make", [wild_bf16, near_bf16, cancelling_bf16])
def test_all_reduce_is_the_exact_one(tp, make):
    rng = torch.Generator().manual_seed(tp)
    parts = make(rng, tp, 3, 64)
    expected = [slow_all_reduce(xs) for xs in parts.flatten(1).T.tolist()]
    actual = all_reduce(list(parts))
    assert actual.shape == (3, 64)
    assert bits_equal(actual.flatten(), f64(*expected).bfloat16())


def test_comb_is_source_then_target():
    y, residual = bf16([0.0]), bf16([[3.0], [5.0]])
    post, comb = f32([[0.0], [0.0]]), f32([[0.0, 1.0], [0.0, 0.0]])
    assert post_mix(y, residual, post, comb).tolist() == [[[0.0], [3.0]]]


def test_post_mix_weights_y_per_stream():
    y, residual = bf16([7.0]), bf16([[0.0], [0.0]])
    post, comb = f32([[1.0], [2.0]]), torch.ones(1, 2, 2)
    assert post_mix(y, residual, post, comb).tolist() == [[[7.0], [14.0]]]


def test_post_mix_adds_in_stream_order():
    # 1 + 2^24 loses the 1, then -2^24: zero. Any other order keeps it.
    y, residual = bf16([1.0]), bf16([[2.0**24], [-(2.0**24)]])
    new = post_mix(y, residual, torch.ones(1, 2, 1), torch.ones(1, 2, 2))
    assert new.tolist() == [[[0.0], [0.0]]]


def test_post_mix_fuses_each_stream():
    y, residual = bf16([-(1 + 2**-7)]), bf16([[1 + 2**-7]])
    new = post_mix(y, residual, f32([[1.0]]), f32([[1 + 2**-23]]))
    assert new.item() == 2**-23 + 2**-30  # 2^-23 if the product were rounded


def test_post_mix_rounds_the_first_product():
    y, residual = bf16([1 + 2**-7]), bf16([[1 + 2**-7]])
    new = post_mix(y, residual, f32([[1 + 2**-23]]), f32([[-1.0]]))
    assert new.item() == 2**-23  # 2^-23 + 2^-30 if it were not


@pytest.mark.parametrize("hc", [1, 2, 4])
@pytest.mark.parametrize("make", [wild_bf16, near_bf16])
def test_post_mix_is_the_exact_one(hc, make):
    rng = torch.Generator().manual_seed(hc)
    y, residual = make(rng, 3, 24), make(rng, 3, hc, 24)
    post, comb = (
        torch.randn(3, hc, 1, generator=rng),
        torch.randn(3, hc, hc, generator=rng),
    )
    if make is wild_bf16:  # large and tiny weights too
        post = torch.ldexp(post, torch.tensor([100, 0, -130])[:, None, None])
        comb = torch.ldexp(comb, torch.tensor([120, 0, -120])[:, None, None])
    actual = post_mix(y, residual, post, comb)
    assert bits_equal(actual, slow_post_mix(y, residual, post, comb))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_post_mix_of_cancelling_streams(seed):
    """Streams that cancel to the last bits of the products."""
    rng = torch.Generator().manual_seed(seed)
    y, residual = near_bf16(rng, 1, 4), near_bf16(rng, 1, 2, 4)
    comb = 1 + torch.randint(-3, 4, (1, 2, 2), generator=rng) * 2.0**-23
    residual[0, 1] = -residual[0, 0]
    post = torch.randn(1, 2, 1, generator=rng)
    actual = post_mix(y, residual, post, comb)
    assert bits_equal(actual, slow_post_mix(y, residual, post, comb))


def test_post_mix_takes_the_contracts_types():
    y, residual, post, comb = bf16([1.0]), bf16([[1.0]]), f32([[1.0]]), f32([[1.0]])
    for wrong in (
        (y.float(), residual, post, comb),
        (y, residual.float(), post, comb),
        (y, residual, post.double(), comb),
        (y, residual, post, comb.double()),
    ):
        with pytest.raises(TypeError):
            post_mix(*wrong)


# --- steps 3 to 7 -----------------------------------------------------------------


def test_columns_of_fn_are_stream_major():
    new = bf16([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    dot, ss = project(new, torch.eye(6)[[1, 3]])
    assert dot.tolist() == [[2.0, 4.0]]
    assert ss.tolist() == [91.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_project_is_float64(dtype):
    new = bf16([[1 + 2**-7, 2.0**12]])
    fn = torch.tensor([[2.0**-30, 1.0]], dtype=dtype)
    dot, ss = project(new, fn)
    assert dot.item() == 2**12 + 2**-30 * (1 + 2**-7)
    assert ss.item() == 2**24 + (1 + 2**-7) ** 2
    assert dot.dtype == ss.dtype == torch.float64


def test_mixes_divide_by_all_streams():
    k = replace(GLM, rms_eps=3.0)
    mix = mixes(f64([8.0, 2.0]), f64(8.0), 2, 4, k)
    assert mix.tolist() == [[4.0, 1.0]]  # ss/(2*4) + 3 = 4


def test_pre_mix_at_zero():
    pre = pre_mix(torch.zeros(1, 8).double(), f32(1, 1, 1), torch.zeros(8), GLM)
    assert pre.tolist() == [[0.5 + GLM.hc_eps] * 2]


def test_post_weights_at_zero_have_no_epsilon():
    post = post_weights(torch.zeros(1, 8).double(), f32(1, 1, 1), torch.zeros(8), GLM)
    assert post.tolist() == [[[1.0], [1.0]]]


def test_groups_of_mix_scale_and_base():
    mix = torch.arange(1.0, 9.0).double()[None] / 8
    scale, base = f32(2.0, 3.0, 5.0), torch.arange(8.0) / 16
    value = [
        mix[0, k].item() * s + k / 16 for k, s in enumerate([2, 2, 3, 3, *[5] * 4])
    ]
    k = replace(GLM, hc_eps=0.25, post_mult=4.0, sinkhorn_iters=1)
    assert close(pre_mix(mix, scale, base, k), [[sigmoid(v) + 0.25 for v in value[:2]]])
    post = [[[4 * sigmoid(v)] for v in value[2:4]]]
    assert close(post_weights(mix, scale, base, k), post)
    logits = [value[4:6], value[6:8]]
    comb = [slow_sinkhorn(logits, 0.25, 1)]
    assert close(residual_mix(mix, scale, base, k), comb)


@pytest.mark.parametrize("k", range(24))
def test_each_base_moves_its_own_output(k):
    inputs = random_inputs(1, 16, 4, 2, seed=3)
    base = inputs.base.clone()
    base[k] += 1
    before, after = inputs.boundary(GLM), replace(inputs, base=base).boundary(GLM)
    group = "pre" if k < 4 else "post" if k < 8 else "comb"
    follow = {"c", "c_rounded", "layer_input", "layer_input_exact"}
    assert moved(before, after) == ({"pre"} | follow if group == "pre" else {group})
    if group != "comb":
        change = (getattr(after, group) - getattr(before, group)).flatten()
        assert torch.nonzero(change).flatten().tolist() == [k % 4]


def test_collapse_by_hand():
    c, rounded = collapse(f64([0.5, 2.0**-10]), bf16([[2.0, 4.0], [8.0, 1.0]]))
    assert c.tolist() == [[1 + 2**-7, 2 + 2**-10]]
    assert rounded.tolist() == [[1 + 2**-7, 2.0]]


def test_collapse_rounds_once():
    c, rounded = collapse(f64([1.0, 2.0**-40]), bf16([[1 + 2**-7], [1.0]]))
    assert rounded.item() == 1 + 2**-7
    c, rounded = collapse(f64([1 + 2**-8, 2.0**-40]), bf16([[1.0], [1.0]]))
    assert c.item() == 1 + 2**-8 + 2**-40
    assert rounded.item() == 1 + 2**-7


def test_normalize_by_hand():
    exact, rounded = normalize(bf16([3.0, 4.0]), bf16(1.0, 2.0), 12.5)
    assert close(exact, [[0.6, 1.6]])
    assert rounded.tolist() == [[nearest_even(Fraction(x), BF16) for x in (0.6, 1.6)]]


def test_normalize_rounds_once():
    _, rounded = normalize(bf16([1.0]), f64(1 + 2**-8 + 2**-40), 0.0)
    assert rounded.item() == 1 + 2**-7


def test_normalize_has_a_plain_gamma():
    exact, _ = normalize(bf16([3.0, 4.0]), bf16(0.0, 0.0), 12.5)
    assert exact.tolist() == [[0.0, 0.0]]


def test_normalize_plus_one_adds_in_fp32():
    c = bf16([3.0, 4.0])
    exact, _ = normalize(c, bf16(0.5, -0.5), 12.5, plus_one=True)
    assert close(exact, [[0.6 * 1.5, 0.8 * 0.5]])
    # 1 + 2^-40 is 1 in FP32.
    exact, _ = normalize(c, f32(2.0**-40, 2.0**-20), 12.5, plus_one=True)
    plain, _ = normalize(c, None, 12.5)
    assert exact[0, 0] == plain[0, 0] and exact[0, 1] > plain[0, 1]


def test_normalize_without_a_weight():
    exact, rounded = normalize(bf16([3.0, 4.0]).half(), None, 12.5)
    assert close(exact, [[0.6, 0.8]])
    assert rounded.tolist() == [[nearest_even(Fraction(x), FP16) for x in (0.6, 0.8)]]


def test_constants_say_whether_one_is_added():
    inputs = random_inputs(2, 64, 4, 4, seed=1)
    after = inputs.boundary(replace(GLM, plus_one=True))
    assert moved(inputs.boundary(GLM), after) == {"layer_input_exact", "layer_input"}


def test_one_sinkhorn_iteration_is_softmax_and_a_column_pass():
    k = replace(GLM, hc_eps=2**-4, sinkhorn_iters=1)
    mix = f64([0.0] * 4 + [math.log(3), 0.0, 0.0, math.log(7)])
    comb = residual_mix(mix, f32(1, 1, 1), torch.zeros(8), k)
    # softmax + 1/16: rows (13/16, 5/16) and (3/16, 15/16); plus 1/16: columns 17/16
    # and 21/16.
    assert close(comb, [[[13 / 17, 5 / 21], [3 / 17, 15 / 21]]])


@pytest.mark.parametrize("iters", [1, 2, 3, 20])
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_sinkhorn_passes(hc, iters):
    k = replace(GLM, hc_eps=0.125, sinkhorn_iters=iters)
    mix = torch.randn(
        2, hc * (2 + hc), generator=torch.Generator().manual_seed(iters)
    ).double()
    mix *= 3
    logits = mix[:, 2 * hc :].reshape(2, hc, hc).tolist()
    comb = residual_mix(mix, f32(1, 1, 1), torch.zeros(mix.shape[1]), k)
    assert close(comb, [slow_sinkhorn(token, 0.125, iters) for token in logits])


def test_softmax_subtracts_the_maximum():
    mix = f64([0.0] * 4 + [1e4, 0.0, 0.0, 1e4])
    comb = residual_mix(mix, f32(1, 1, 1), torch.zeros(8), GLM)
    assert close(comb, [[[1.0, 0.0], [0.0, 1.0]]], 1e-5)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (
            "rms_eps",
            0.5,
            "mix pre c c_rounded layer_input_exact layer_input post comb",
        ),
        ("hc_eps", 0.25, "pre c c_rounded layer_input_exact layer_input comb"),
        ("norm_eps", 0.5, "layer_input_exact layer_input"),
        ("post_mult", 1.0, "post"),
        ("sinkhorn_iters", 2, "comb"),
    ],
)
def test_each_constant_moves_only_what_it_should(field, value, expected):
    inputs = random_inputs(2, 64, 4, 4, seed=1)
    before = inputs.boundary(GLM)
    after = inputs.boundary(replace(GLM, **{field: value}))
    assert moved(before, after) == set(expected.split())


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("fn_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("hc", "tp"), [(1, 2), (2, 4), (4, 8)])
def test_boundary_is_the_slow_one(hc, tp, fn_dtype, dtype):
    k = Constants(0.25, 0.0625, 0.125, 1.5, 3)  # each shows
    inputs = random_inputs(3, 16, hc, tp, seed=hc, fn_dtype=fn_dtype, dtype=dtype)
    assert inputs.fn.dtype == fn_dtype and inputs.residual.dtype == dtype
    precision = ACTIVATIONS[dtype]
    given = [getattr(inputs, f.name) for f in fields(Inputs) if f.name != "pre"]
    result = boundary(*given, k)
    assert moved(result, inputs.boundary(k)) == set()
    columns = torch.stack(inputs.parts, -1)
    y = [[slow_all_reduce(xs, precision) for xs in token] for token in columns.tolist()]
    assert bits_equal(result.y, torch.tensor(y, dtype=dtype))
    new = slow_post_mix(result.y, inputs.residual, inputs.post, inputs.comb)
    assert bits_equal(result.residual, new)
    weights = (inputs.fn, inputs.scale, inputs.base, inputs.norm_weight)
    weights = [w.tolist() for w in weights]
    for m in range(3):
        slow = slow_token(new[m].tolist(), *weights, k, precision)
        mix, pre, c, c_rounded, layer_input, post, comb = slow
        assert close(result.mix[m], mix)
        assert close(result.pre[m], pre)
        assert close(result.c[m], c)
        assert result.c_rounded[m].tolist() == c_rounded
        assert close(result.layer_input_exact[m], layer_input)
        rounded = [nearest_even(Fraction(x), precision) for x in layer_input]
        assert result.layer_input[m].tolist() == rounded
        assert close(result.post[m, :, 0], post)
        assert close(result.comb[m], comb)


def test_a_delayed_pre_mix_weighs_the_collapse_and_nothing_else():
    k = Constants(0.25, 0.0625, 0.125, 1.5, 3)
    inputs = random_inputs(3, 16, 4, 4, seed=1)
    fresh = inputs.boundary(k)
    given = [getattr(inputs, f.name) for f in fields(Inputs) if f.name != "pre"]
    delayed = boundary(*given, k, inputs.pre)
    collapsed = {"c", "c_rounded", "layer_input_exact", "layer_input"}
    assert moved(fresh, delayed) == collapsed
    weights = (inputs.fn, inputs.scale, inputs.base, inputs.norm_weight)
    weights = [w.tolist() for w in weights]
    for m in range(3):
        new, carried = delayed.residual[m].tolist(), inputs.pre[m].tolist()
        _, _, c, _, layer_input, _, _ = slow_token(new, *weights, k, BF16, carried)
        assert close(delayed.c[m], c)
        assert close(delayed.layer_input_exact[m], layer_input)
    # The pre-mix that a boundary returns is what a fresh one would have used.
    again = boundary(*given, k, delayed.pre)
    assert moved(fresh, again) == set()


def test_stream_mean_rounds_once():
    assert stream_mean(bf16([[1.0, 3.0], [2.0, -3.0]])).tolist() == [[1.5, 0.0]]
    # In FP32 2^-30 is lost, and 1 + 2^-8 then is a tie, which goes down.
    new = bf16([[2.0], [2.0 + 2**-6], [2.0**-28], [0.0]])
    assert stream_mean(new).item() == 1 + 2**-7
    assert stream_mean(new.half()).item() == nearest_even(Fraction(1 + 2**-8), FP16)
    wide = torch.full((1, 4, 1), 65504.0).half()
    assert stream_mean(wide).item() == 65504.0


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_entry_is_a_boundary_over_equal_streams(hc, dtype):
    k = Constants(0.25, 0.0625, 0.125, 1.5, 3)
    inputs = random_inputs(3, 16, hc, 1, seed=hc, dtype=dtype)
    hidden = inputs.parts[0]
    weights = (inputs.fn, inputs.scale, inputs.base, inputs.norm_weight)
    result = entry_boundary(hidden, *weights, k)
    assert bits_equal(result.residual, hidden[:, None].expand(3, hc, 16).contiguous())
    ones, zeros = torch.ones(3, hc, 1), torch.zeros(3, hc, hc)
    boundary_of_it = boundary([hidden], result.residual, ones, zeros, *weights, k)
    assert moved(result, boundary_of_it) <= {"y"}  # -0.0 does not pass the mailbox
    with pytest.raises(TypeError, match=r"hidden is torch\.float32"):
        entry_boundary(hidden.float(), *weights, k)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_exit_is_the_slow_one(dtype):
    k = Constants(0.25, 0.0625, 0.125, 1.5, 3)
    inputs = random_inputs(3, 16, 4, 4, seed=3, dtype=dtype, fn_dtype=torch.float32)
    head = Head(inputs.fn[:4], inputs.scale[:1], inputs.base[:4])
    streams = (inputs.parts, inputs.residual, inputs.post, inputs.comb)
    whole = inputs.boundary(k)
    precision = ACTIVATIONS[dtype]

    def check(weights, expected: list[list[float]]) -> None:
        result = exit_boundary(*streams, inputs.norm_weight, k, weights)
        assert bits_equal(result.y, whole.y)
        assert bits_equal(result.residual, whole.residual)
        weights_of = (inputs.fn, inputs.scale, inputs.base, inputs.norm_weight)
        for m, pre in enumerate(expected):
            assert close(result.pre[m], pre)
            slow = slow_token(
                whole.residual[m].tolist(),
                *(w.tolist() for w in weights_of),
                k,
                precision,
                pre,
            )
            assert close(result.c[m], slow[2])
            assert result.c_rounded[m].tolist() == slow[3]
            assert close(result.layer_input_exact[m], slow[4])
            rounded = [nearest_even(Fraction(x), precision) for x in slow[4]]
            assert result.layer_input[m].tolist() == rounded

    check(None, [[0.25] * 4] * 3)
    check(inputs.pre, inputs.pre.tolist())
    # The head is the pre-mix of a boundary with the same rows.
    check(head, whole.pre.tolist())
    other = replace(head, scale=head.scale + 1)
    assert not torch.equal(head_mix(whole.residual, other, k), whole.pre)


def test_boundary_of_no_tokens():
    result = random_inputs(0, 64, 4, 4, seed=0).boundary(GLM)
    assert result.residual.shape == (0, 4, 64)
    assert result.layer_input.shape == (0, 64)
    assert (result.post.shape, result.comb.shape) == ((0, 4, 1), (0, 4, 4))


# --- finalize ---------------------------------------------------------------------


def slow_finalize(rows, weights, idx, shared):
    out = []
    for m in range(len(idx)):
        for h in range(len(rows[0])):
            total = Fraction(0 if shared is None else shared[m][h])
            for w, row in zip(weights[m], idx[m], strict=True):
                if row != -1:
                    total += Fraction(w) * Fraction(rows[row][h])
            out.append(total)
    return out


@pytest.mark.parametrize("with_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_finalize_is_the_slow_one(top_k, dtype, with_shared):
    rng = torch.Generator().manual_seed(top_k)
    rows = torch.randn(9, 8, generator=rng).bfloat16()
    weights = torch.rand(4, top_k, generator=rng).to(dtype)
    idx = torch.randint(-1, 9, (4, top_k), generator=rng, dtype=torch.int32)
    shared = torch.randn(4, 8, generator=rng).bfloat16() if with_shared else None
    kept = None if shared is None else shared.clone()
    exact, rounded = finalize(rows, weights, idx, shared)
    slow = slow_finalize(
        rows.tolist(),
        weights.tolist(),
        idx.tolist(),
        None if shared is None else shared.tolist(),
    )
    assert exact.shape == rounded.shape == (4, 8)
    assert close(exact.flatten(), [float(x) for x in slow])
    assert rounded.flatten().tolist() == [nearest_even(x, BF16) for x in slow]
    assert shared is None or bits_equal(shared, kept)


def test_finalize_rounds_once():
    idx = torch.tensor([[0, 0]], dtype=torch.int32)
    exact, rounded = finalize(bf16([1.0]), f32([1 + 2**-8, 2.0**-40]), idx)
    assert exact.item() == 1 + 2**-8 + 2**-40
    assert rounded.item() == 1 + 2**-7


def test_finalize_never_touches_absent_rows():
    rows = torch.tensor([[math.nan] * 2, [2.0, 3.0], [math.inf] * 2]).bfloat16()
    weights = f32([0.5, math.nan, 2.0], [math.inf, math.nan, 0.0])
    idx = torch.tensor([[1, -1, 1], [-1, -1, -1]], dtype=torch.int32)
    exact, rounded = finalize(rows, weights, idx)
    assert exact.tolist() == rounded.tolist() == [[5.0, 7.5], [0.0, 0.0]]
    shared = bf16([1.0, 1.0], [2.0, 4.0])
    exact, _ = finalize(rows, weights, idx, shared)
    assert exact.tolist() == [[6.0, 8.5], [2.0, 4.0]]


def test_finalize_passes_nan_of_present_rows_on():
    rows = torch.tensor([[math.nan, 1.0]]).bfloat16()
    exact, _ = finalize(rows, f32([0.0]), torch.tensor([[0]], dtype=torch.int32))
    assert math.isnan(exact[0, 0]) and exact[0, 1] == 0


@pytest.mark.parametrize("wrong", [-2, 3])
def test_finalize_refuses_wrong_indices(wrong):
    idx = torch.tensor([[wrong]], dtype=torch.int32)
    with pytest.raises(ValueError, match="neither -1 nor one of 3 rows"):
        finalize(torch.zeros(3, 2).bfloat16(), f32([1.0]), idx)


def test_finalize_without_tokens_or_rows():
    idx = torch.empty(0, 2, dtype=torch.int32)
    exact, _ = finalize(torch.zeros(0, 8).bfloat16(), torch.empty(0, 2), idx)
    assert exact.shape == (0, 8)
    idx = torch.full((1, 2), -1, dtype=torch.int32)
    exact, _ = finalize(torch.zeros(0, 8).bfloat16(), torch.ones(1, 2), idx)
    assert exact.tolist() == [[0.0] * 8]


# --- comparisons ------------------------------------------------------------------

NAN, OTHER_NAN, MINUS_NAN, INF, MAX = 0x7FC0, 0x7F81, 0xFFC1, 0x7F80, 0x7F7F


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (0x0000, 0x8000, 0),
        (0x0001, 0x8001, 2),
        (0x0000, 0x8001, 1),
        (0x3F80, 0x3F81, 1),
        (0x3F80, 0x3F7F, 1),
        (0xBF80, 0xBF83, 3),
        (0x3F80, 0xBF80, 2 * 0x3F80),
        (MAX, INF, 1),
        (INF, 0xFF80, 2 * 0x7F80),
        (INF, INF, 0),
        (NAN, NAN, 0),
        (OTHER_NAN, MINUS_NAN, 0),
        (NAN, INF, NAN_DISTANCE),
        (0x0000, MINUS_NAN, NAN_DISTANCE),
    ],
)
def test_ulp_distance(a, b, expected):
    assert ulp_distance(bf16_bits(a), bf16_bits(b)).tolist() == [expected]
    assert ulp_distance(bf16_bits(b), bf16_bits(a)).tolist() == [expected]
    assert 2 * INF < NAN_DISTANCE


def test_bits_equal():
    assert bits_equal(bf16_bits(NAN, 0x8000), bf16_bits(MINUS_NAN, 0x8000))
    assert not bits_equal(bf16_bits(0x0000), bf16_bits(0x8000))
    assert not bits_equal(bf16_bits(NAN), bf16_bits(INF))
    assert not bits_equal(f64(1.0, 1.0), f64(1.0, 1 + 2**-52))
    assert not bits_equal(f32(2.0**-149), f32(0.0))
    with pytest.raises(ValueError, match="shape"):
        bits_equal(f32(1.0), f32(1.0, 1.0))
    with pytest.raises(TypeError, match="float64"):
        bits_equal(f32(1.0), f64(1.0))


def test_max_abs_error():
    nan, inf = math.nan, math.inf
    assert max_abs_error(f32(1.0, 2.0), f64(1.5, 2.25)) == 0.5
    assert max_abs_error(f32(nan, inf, -inf), f64(nan, inf, -inf)) == 0
    assert max_abs_error(f32(nan), f64(1.0)) == inf
    assert max_abs_error(f32(1.0), f64(nan)) == inf
    assert max_abs_error(f32(inf), f64(-inf)) == inf
    assert max_abs_error(f32(1.0), f64(inf)) == inf
    assert max_abs_error(torch.empty(0), torch.empty(0)) == 0
    with pytest.raises(ValueError, match="shape"):
        max_abs_error(f32(1.0), f32(1.0, 1.0))


def off_by(x: Tensor, ulp: int) -> Tensor:
    return (x.view(torch.int16) + ulp).view(torch.bfloat16)


@pytest.fixture(scope="module")
def plain() -> BoundaryResult:
    return random_inputs(4, 1024, 4, 4, seed=5).boundary(GLM)


def pick(result: BoundaryResult, count: int, small: bool) -> list[tuple[int, int]]:
    """The elements next to the limit of 1e-3 of the row's rms, below or above it."""
    share = result.c.abs() / result.c.square().mean(1, keepdim=True).sqrt()
    order = share.flatten().argsort(descending=small)
    found = [divmod(k, share.shape[1]) for k in order.tolist()]
    found = [at for at in found if (share[at] <= 1e-3) == small][:count]
    assert len(found) == count and all(5e-4 < share[at] < 5e-3 for at in found)
    return found


def spoiled(result: BoundaryResult, count: int, ulp: int, small=False) -> Tensor:
    """The layer input with so many elements off."""
    actual = result.layer_input.clone()
    for at in pick(result, count, small):
        actual[at] = off_by(actual[at], ulp)
    return actual


def test_check_layer_input(plain):
    n = 4 * 1024
    check = check_layer_input(plain.layer_input, plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (0, 1.0, True)
    check = check_layer_input(off_by(plain.layer_input, 1), plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (1, 1.0, True)
    check = check_layer_input(spoiled(plain, 4, 2), plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (2, 1 - 4 / n, True)
    check = check_layer_input(spoiled(plain, 5, 2), plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (2, 1 - 5 / n, False)
    check = check_layer_input(spoiled(plain, 1, 3), plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (3, 1 - 1 / n, False)
    check = check_layer_input(spoiled(plain, 1, 9, small=True), plain)
    assert (check.worst_ulp, check.within_1_ulp, check.ok) == (0, 1 - 1 / n, True)


def test_check_layer_input_measures_each_row_by_its_own_rms(plain):
    # A second row a million times as large must not hide the first.
    c = torch.stack([plain.c[0], plain.c[1] * 1e6])
    result = replace(plain, c=c, layer_input=plain.layer_input[:2])
    actual = result.layer_input.clone()
    column = int(c[0].abs().argmax())
    actual[0, column] = off_by(actual[0, column], 3)
    assert check_layer_input(actual, result).worst_ulp == 3


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        # Of 2 ** -133, the steps of a subnormal BF16; of 2 ** -24, those of FP16.
        (torch.bfloat16, (21.5, 100.0, -120.0, 64.0)),
        (torch.float16, (21.5, 900.0, -1000.0, 512.0)),
    ],
)
def test_a_step_of_a_subnormal_collapse_is_no_error(dtype, row):
    limits = torch.finfo(dtype)
    step = limits.smallest_normal * limits.eps

    def collapsed(shift: float) -> Collapsed:
        c = torch.tensor([[row[0] + shift, *row[1:]]], dtype=torch.float64) * step
        rounded = round_to(c, dtype)
        rms = torch.tensor([row], dtype=torch.float64).square().mean().sqrt() * step
        exact = rounded.double() / rms
        return Collapsed(c, rounded, exact, round_to(exact, dtype))

    result, other = collapsed(-0.01), collapsed(0.01)
    assert ulp_distance(other.layer_input, result.layer_input).max() > 2
    assert check_layer_input(other.layer_input, result).worst_ulp == 0
    for shift in (-2.7, 2.7):
        wrong = collapsed(shift).layer_input
        assert check_layer_input(wrong, result).worst_ulp > 2


def test_zeros_that_are_exact_have_no_step(plain):
    zero = torch.zeros(1, 4, dtype=torch.float64)
    result = Collapsed(zero, zero.bfloat16(), zero, zero.bfloat16())
    assert check_layer_input(zero.bfloat16(), result).ok
    wrong = torch.full((1, 4), 1e-3, dtype=torch.bfloat16)
    assert not check_layer_input(wrong, result).ok


def test_check_layer_input_refuses_nan_anywhere(plain):
    actual = plain.layer_input.clone()
    actual[pick(plain, 1, small=True)[0]] = math.nan
    check = check_layer_input(actual, plain)
    assert check.worst_ulp == NAN_DISTANCE and not check.ok


def test_check_layer_input_of_no_tokens_and_of_wrong_shapes(plain):
    empty = random_inputs(0, 64, 4, 4, seed=0).boundary(GLM)
    assert check_layer_input(empty.layer_input, empty).ok
    with pytest.raises(ValueError, match="shape"):
        check_layer_input(plain.layer_input[:1], plain)


def test_check_mixes(plain):
    post, comb = plain.post.float(), plain.comb.float()
    assert check_mixes(post, comb, plain).ok
    off = post.clone()
    off[1, 2, 0] += 1.9e-5
    check = check_mixes(off, comb, plain)
    assert check.ok and 1.8e-5 < check.worst_post < 2e-5 and check.worst_comb < 1e-7
    off[1, 2, 0] += 2e-6
    assert not check_mixes(off, comb, plain).ok
    off = comb.clone()
    off[3, 0, 1] -= 2.1e-5
    check = check_mixes(post, off, plain)
    assert not check.ok and check.worst_comb > 2e-5 and check.worst_post < 1e-6


# --- random inputs ----------------------------------------------------------------


def fp32_boundary(inputs: Inputs, k: Constants) -> BoundaryResult:
    """A sound kernel's arithmetic: FP32 all through, after the exact steps."""
    y = all_reduce(inputs.parts)
    new = post_mix(y, inputs.residual, inputs.post, inputs.comb)
    _, hc, hidden = new.shape
    flat = new.float().flatten(1)
    rstd = torch.rsqrt(flat.square().sum(1) / (hc * hidden) + k.rms_eps)
    mix = flat @ inputs.fn.float().T * rstd[:, None]
    args = (mix, inputs.scale, inputs.base, k)
    pre = pre_mix(*args).float()
    c = (pre[:, :, None] * new.float()).sum(1)
    c_rounded = c.to(new.dtype).float()
    norm = torch.rsqrt(c_rounded.square().mean(1, keepdim=True) + k.norm_eps)
    layer_input = c_rounded * norm * inputs.norm_weight.float()
    return BoundaryResult(
        y=y,
        residual=new,
        mix=mix,
        pre=pre,
        c=c,
        c_rounded=c.to(new.dtype),
        layer_input_exact=layer_input,
        layer_input=layer_input.to(new.dtype),
        post=post_weights(*args).float(),
        comb=residual_mix(*args).float(),
        stream_mean=new.float().mean(1).to(new.dtype),
    )


@pytest.mark.parametrize("hard", VARIANTS)
@pytest.mark.parametrize("k", [GLM, Constants(1e-20, 1e-6, 1e-20, 2.0, 20)])
@pytest.mark.parametrize("dtype", ACTIVATIONS)
def test_a_sound_fp32_kernel_passes(hard, k, dtype):
    inputs = random_inputs(9, 2048, 4, 4, seed=7, hard=hard, dtype=dtype)
    result, actual = inputs.boundary(k), fp32_boundary(inputs, k)
    assert check_mixes(actual.post, actual.comb, result).ok
    assert check_layer_input(actual.layer_input, result).ok
    assert ulp_distance(actual.stream_mean, result.stream_mean).max() <= 1


def test_unsound_kernels_fail():
    inputs = random_inputs(9, 2048, 4, 4, seed=7)
    result = inputs.boundary(GLM)
    swapped = fp32_boundary(replace(inputs, comb=inputs.comb.mT), GLM)
    assert not bits_equal(swapped.residual, result.residual)
    assert not check_layer_input(swapped.layer_input, result).ok
    coarse = replace(GLM, rms_eps=GLM.rms_eps * 50, norm_eps=0.02)
    off = fp32_boundary(inputs, coarse)
    assert not check_mixes(off.post, off.comb, result).ok
    assert not check_layer_input(off.layer_input, result).ok


def test_random_inputs_have_the_contracts_shapes_and_sizes():
    x = random_inputs(64, 512, 4, 8, seed=0)
    assert [(p.shape, p.dtype) for p in x.parts] == [((64, 512), torch.bfloat16)] * 8
    for name, shape, dtype in (
        ("residual", (64, 4, 512), torch.bfloat16),
        ("post", (64, 4, 1), torch.float32),
        ("comb", (64, 4, 4), torch.float32),
        ("fn", (24, 2048), torch.bfloat16),
        ("scale", (3,), torch.float32),
        ("base", (24,), torch.float32),
        ("norm_weight", (512,), torch.bfloat16),
    ):
        tensor = getattr(x, name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
        assert tensor.is_contiguous(), name
    assert all(p.is_contiguous() for p in x.parts)
    assert 0 < x.post.min() < 0.5 and 1.5 < x.post.max() < 2
    assert x.comb.min() > 0
    assert close(x.comb.sum(1).double(), torch.ones(64, 4), 1e-5)
    assert close(x.comb.sum(2).double(), torch.ones(64, 4), 0.05)
    assert x.scale.unique().numel() == 3 and x.base.unique().numel() == 24
    result = x.boundary(GLM)
    assert 0.9 < result.y.float().std() < 1.1
    assert 0.9 < result.mix.std() < 1.1


def test_random_inputs_follow_the_seed():
    def bits(seed: int) -> list[Tensor]:
        x = random_inputs(2, 64, 2, 2, seed=seed)
        others = [getattr(x, f.name) for f in fields(x) if f.name != "parts"]
        return [*x.parts, *others]

    for a, b, c in zip(bits(1), bits(1), bits(2), strict=True):
        assert bits_equal(a, b)
        assert not bits_equal(a, c)
    with pytest.raises(ValueError, match="not one of plain, negative_zero"):
        random_inputs(1, 64, 4, 4, seed=0, hard="other")


@pytest.mark.parametrize("m", [0, 1, 4])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("hard", VARIANTS)
def test_every_variant_has_every_size(hard, tp, m):
    result = random_inputs(m, 64, 4, tp, seed=0, hard=hard).boundary(GLM)
    assert result.layer_input.shape == (m, 64)


def hard_parts(hard) -> tuple[Tensor, Tensor]:
    x = random_inputs(5, 512, 4, 4, seed=2, hard=hard)
    return torch.stack(x.parts), x.residual


def test_negative_zero_variant():
    parts, _ = hard_parts("negative_zero")
    sentinel = parts.view(torch.int16) == -0x8000
    assert sentinel[:, -1].all()
    assert 0.45 < sentinel[:, :-1].float().mean() < 0.55


def test_subnormal_variant():
    for x in hard_parts("subnormal"):
        x = x.transpose(0, 1) if x.shape[0] == 4 else x  # tokens first
        bits = x.view(torch.int16).int()
        subnormal = ((bits & 0x7F80) == 0) & ((bits & 0x7F) != 0)
        assert subnormal[-1].all()
        assert 0.45 < subnormal[:-1].float().mean() < 0.55
        assert 0.4 < (bits[subnormal] < 0).float().mean() < 0.6
    y = all_reduce(list(hard_parts("subnormal")[0]))[-1].float()
    assert ((y != 0) & (y.abs() < 2.0**-126)).any()


def test_nan_variant():
    parts, residual = hard_parts("nan")
    assert parts[-1, ::2].isnan().all()
    assert not parts[:-1].isnan().any() and not parts[-1, 1::2].isnan().any()
    assert not residual.isnan().any()
    assert len(set(patterns(parts[-1, ::2]))) > 200
    assert (parts[-1, ::2].view(torch.int16) < 0).any()
    result = random_inputs(5, 512, 4, 4, seed=2, hard="nan").boundary(GLM)
    for x in (result.layer_input, result.residual, result.post, result.comb):
        assert x[::2].isnan().all() and not x[1::2].isnan().any()


def test_inf_variant():
    parts, residual = hard_parts("inf")
    assert 0.04 < parts[:, ::2].isinf().float().mean() < 0.08
    assert (parts == math.inf).any() and (parts == -math.inf).any()
    assert parts[:, 1::2].isfinite().all() and residual.isfinite().all()
    assert all_reduce(list(parts)).isnan().any()


def test_zero_variant():
    parts, residual = hard_parts("zero")
    assert not parts[:, ::2].any() and not residual[::2].any()
    assert parts[:, 1::2].any() and residual[1::2].any()
    result = random_inputs(5, 512, 4, 4, seed=2, hard="zero").boundary(GLM)
    assert not result.layer_input[::2].any() and result.comb.isfinite().all()


def test_variants_in_fp16():
    def bits(hard) -> Tensor:
        x = random_inputs(5, 512, 4, 4, seed=2, hard=hard, dtype=torch.float16)
        return torch.stack(x.parts).view(torch.int16).int() & 0x7FFF

    subnormal = bits("subnormal")[:, -1]
    assert ((subnormal > 0) & (subnormal < 0x400)).all() and (subnormal > 0x300).any()
    assert (bits("nan")[-1, ::2] > 0x7C00).all()
    assert not (bits("nan")[:-1] > 0x7C00).any()
    huge = bits("inf")[:, ::2]
    for pattern in (0x7BFF, 0x7C00):  # the largest number, and infinity
        assert 0.02 < (huge == pattern).float().mean() < 0.045
    assert (huge <= 0x7C00).all()


def test_cancel_variant_shows_the_order():
    parts, _ = hard_parts("cancel")
    y = all_reduce(list(parts))
    assert 0 < y.double().abs().mean() < 0.02 * parts.double().abs().mean()
    sequential = ((parts[0].float() + parts[1]) + parts[2]) + parts[3]
    other_pairs = (parts[0].float() + parts[2]) + (parts[1].float() + parts[3])
    for other in (sequential, other_pairs):
        assert not bits_equal(y, other.bfloat16())


# --- on a GPU ---------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hard", VARIANTS)
def test_cuda_agrees(hard):
    on_cpu = random_inputs(9, 512, 4, 4, seed=11, hard=hard)
    on_gpu = random_inputs(9, 512, 4, 4, seed=11, hard=hard, device="cuda")
    assert all(map(bits_equal, on_cpu.parts, (p.cpu() for p in on_gpu.parts)))
    expected, actual = on_cpu.boundary(GLM), on_gpu.boundary(GLM)
    for name in ("y", "residual"):
        assert getattr(actual, name).is_cuda
        assert bits_equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    for name in ("mix", "pre", "c", "layer_input_exact", "post", "comb"):
        here, there = getattr(expected, name), getattr(actual, name).cpu()
        assert max_abs_error(there, here) < 1e-12, name
    assert check_layer_input(actual.layer_input, actual).worst_ulp == 0
    assert check_mixes(actual.post, actual.comb, actual).ok


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_rounds_alike():
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 1 << 20), generator=rng)
    a, b, c = bits.to(torch.int32).view(torch.float32)
    b = torch.where(torch.rand(b.shape, generator=rng) < 0.5, -c / a, b)
    assert bits_equal(fma_f32(a.cuda(), b.cuda(), c.cuda()).cpu(), fma_f32(a, b, c))
    wide = torch.randint(-(2**63), 2**63 - 1, (1 << 20,), generator=rng)
    for x in (wide.view(torch.float64), a.double() * 2.0**-30, a.double() / 3):
        for dtype in ACTIVATIONS:
            assert bits_equal(round_to(x.cuda(), dtype).cpu(), round_to(x, dtype))
