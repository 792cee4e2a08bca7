"""Packages of every type, output and end on one GPU, against the reference.

The packages come from ``python -m tests.hardware.build_packages FOLDER``; the variable
MHCGEN_PACKAGES names the folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mhcgen import reference

from .conftest import assert_armed, assert_same_bits, poison_outputs

FOLDER = os.environ.get("MHCGEN_PACKAGES")
NAMES = sorted(path.name for path in Path(FOLDER).iterdir()) if FOLDER else []
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

if not NAMES:
    pytest.skip(
        "needs MHCGEN_PACKAGES, a folder that tests.hardware.build_packages filled",
        allow_module_level=True,
    )


class Package:
    """A package's ranks on one GPU, and what the reference needs to know of it."""

    def __init__(self, name: str) -> None:
        from mhcgen.runtime import load_emulated

        self.ranks: Sequence[Any] = load_emulated(Path(FOLDER or "") / name, device=0)
        self.constants = c = importlib.import_module(f"{name}.constants")
        self.reference = reference.Constants(
            c.RMS_EPS,
            c.HC_EPS,
            c.NORM_EPS,
            c.POST_MULT,
            c.SINKHORN_ITERS,
            c.NORM_WEIGHT == "plus_one",
        )
        self.delayed = c.PRE_MIX == "delayed"

    def inputs(self, m: int, seed: int, hard: Any = "plain") -> reference.Inputs:
        c = self.constants
        types = {"fn_dtype": DTYPES[c.FN_WEIGHT], "dtype": DTYPES[c.ACTIVATION]}
        shape = (m, c.HIDDEN, c.HC, c.TP)
        return reference.random_inputs(*shape, seed, "cuda", hard, **types)

    def norm_weight(self, inputs: reference.Inputs) -> torch.Tensor | None:
        return None if self.constants.NORM_WEIGHT == "none" else inputs.norm_weight

    def weights(self, inputs: reference.Inputs) -> tuple[Any, ...]:
        mixes = (inputs.fn, inputs.scale, inputs.base)
        return (*mixes, self.norm_weight(inputs))

    def call(self, inputs: reference.Inputs) -> list[Any]:
        """One boundary on every rank."""
        for rank, part in zip(self.ranks, inputs.parts, strict=True):
            rank.publish(part)
        streams = (inputs.residual, inputs.post, inputs.comb)
        pre = inputs.pre if self.delayed else None
        outputs = [
            rank.consume(*streams, *self.weights(inputs), pre) for rank in self.ranks
        ]
        self.join()
        return outputs

    def expected(self, inputs: reference.Inputs) -> reference.BoundaryResult:
        streams = (inputs.residual, inputs.post, inputs.comb)
        pre = inputs.pre if self.delayed else None
        weights = self.weights(inputs)
        return reference.boundary(inputs.parts, *streams, *weights, self.reference, pre)

    def join(self) -> None:
        for rank in self.ranks:
            rank.join()
        torch.cuda.synchronize()

    def check(self, outputs: list[Any], expected: reference.BoundaryResult) -> None:
        """The first rank's output is within the contract, the others' the same."""
        first = outputs[0]
        assert reference.bits_equal(first.residual, expected.residual)
        layer_input = reference.check_layer_input(first.layer_input, expected)
        assert layer_input.ok, layer_input
        mixes = reference.check_mixes(first.post, first.comb, expected)
        assert mixes.ok, mixes
        assert hasattr(first, "pre") == self.delayed
        if self.delayed:
            off = reference.max_abs_error(first.pre, expected.pre)
            assert off <= reference.MIX_TOLERANCE
        assert hasattr(first, "stream_mean") == self.constants.STREAM_MEAN
        if self.constants.STREAM_MEAN:
            distance = reference.ulp_distance(first.stream_mean, expected.stream_mean)
            exact = expected.residual.double()
            counted = exact.mean(1).abs() > 1e-3 * exact.abs().mean(1)
            counted |= distance == reference.NAN_DISTANCE
            assert int((distance * counted).max()) <= 1
        assert_same_bits(outputs)


@pytest.fixture(scope="module")
def loaded_packages() -> dict[str, Package]:
    return {}


@pytest.fixture(params=NAMES)
def package(
    request: pytest.FixtureRequest,
    loaded_packages: dict[str, Package],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Package]:
    """A package; outputs come poisoned, and mailboxes must end re-armed."""
    name = request.param
    if name not in loaded_packages:
        loaded_packages[name] = Package(name)
    chosen = loaded_packages[name]
    for rank in chosen.ranks:
        poison_outputs(rank, monkeypatch)
    yield chosen
    chosen.join()
    for rank in chosen.ranks:
        assert_armed(rank)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 16, 17, 40, 64, 256])
def test_every_output(package: Package, m: int) -> None:
    inputs = package.inputs(m, seed=m)
    package.check(package.call(inputs), package.expected(inputs))


@pytest.mark.parametrize("hard", [v for v in reference.VARIANTS if v != "plain"])
@pytest.mark.parametrize("m", [1, 17])
def test_hard_inputs(package: Package, m: int, hard: Any) -> None:
    inputs = package.inputs(m, seed=100 + m, hard=hard)
    package.check(package.call(inputs), package.expected(inputs))


def test_a_token_has_the_same_bits_wherever_it_is(package: Package) -> None:
    """Alone, first, last, between, and in every token group."""
    pool = package.inputs(256, seed=7)
    groups = package.constants.TARGETS["sm_90a"].token_groups
    sizes = {1, 3, 17, 40, *(row.max_tokens for row in groups)}
    first: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for m in sorted(sizes):
        for place in sorted({0, m // 2, m - 1}):
            rows = 1 + torch.randperm(255, generator=generator)[:m].cuda()
            if m == 256:
                rows = torch.cat([rows, rows[:1]])
            rows[place] = 0
            inputs = reference.Inputs(
                tuple(part[rows] for part in pool.parts),
                pool.residual[rows],
                pool.post[rows],
                pool.comb[rows],
                pool.fn,
                pool.scale,
                pool.base,
                pool.norm_weight,
                pool.pre[rows],
            )
            outputs = package.call(inputs)
            assert_same_bits(outputs)
            mine = [tensor[place] for tensor in outputs[0]]
            first = first or mine
            for before, now in zip(first, mine, strict=True):
                assert reference.bits_equal(before, now), (m, place)


@pytest.mark.parametrize("m", [1, 3, 17, 256])
@pytest.mark.parametrize("hard", reference.VARIANTS)
def test_entry(package: Package, m: int, hard: Any) -> None:
    if not package.constants.ENTRY:
        pytest.skip("needs a package with an entry")
    inputs = package.inputs(m, seed=m, hard=hard)
    hidden, weights = inputs.parts[0], package.weights(inputs)
    outputs = [rank.entry(hidden, *weights) for rank in package.ranks]
    package.join()
    expected = reference.entry_boundary(hidden, *weights, package.reference)
    package.check(outputs, expected)


@pytest.mark.parametrize("m", [1, 3, 17, 256])
@pytest.mark.parametrize("hard", reference.VARIANTS)
def test_exit(package: Package, m: int, hard: Any) -> None:
    by = package.constants.EXIT
    if by is None:
        pytest.skip("needs a package with an exit")
    inputs = package.inputs(m, seed=m, hard=hard)
    weight, hc = package.norm_weight(inputs), package.constants.HC
    head = reference.Head(
        inputs.fn[:hc].contiguous(), inputs.scale[:1], inputs.base[:hc].clone()
    )
    named: dict[str, Any] = {
        "mean": {},
        "pre_mix": {"pre": inputs.pre},
        "sigmoid": {
            "head_fn": head.fn,
            "head_scale": head.scale,
            "head_base": head.base,
        },
    }[by]
    weights = {"mean": None, "pre_mix": inputs.pre, "sigmoid": head}[by]
    streams = (inputs.residual, inputs.post, inputs.comb)
    for rank, part in zip(package.ranks, inputs.parts, strict=True):
        rank.publish(part)
    outputs = [rank.consume_exit(*streams, weight, **named) for rank in package.ranks]
    torch.cuda.synchronize()
    expected = reference.exit_boundary(
        inputs.parts, *streams, weight, package.reference, weights
    )
    check = reference.check_layer_input(outputs[0], expected)
    assert check.ok, check
    for other in outputs[1:]:
        assert reference.bits_equal(outputs[0], other)


def test_no_tokens(package: Package) -> None:
    inputs = package.inputs(0, seed=0)
    for output in package.call(inputs):
        assert output.layer_input.shape == (0, package.constants.HIDDEN)
    if package.constants.ENTRY:
        hidden = inputs.parts[0]
        entered = package.ranks[0].entry(hidden, *package.weights(inputs))
        assert entered.residual.shape[0] == 0
