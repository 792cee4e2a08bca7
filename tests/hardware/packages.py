"""Packages on one GPU: loaded, called, and compared with the reference.

Those of other shapes than generated/ come from
``python -m tests.hardware.build_packages FOLDER``; the variable MHCGEN_PACKAGES names
the folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mhcgen import reference

from .conftest import assert_same_bits

FOLDER = Path(os.environ.get("MHCGEN_PACKAGES", ""))
NAMES = (
    sorted(path.parent.name for path in FOLDER.glob("*/kernels.py"))
    if "MHCGEN_PACKAGES" in os.environ
    else []
)
NEEDS_PACKAGES = (
    "needs MHCGEN_PACKAGES, a folder that tests.hardware.build_packages filled"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Package:
    """A package's ranks on one GPU, and what the reference needs to know of it."""

    def __init__(self, folder: Path) -> None:
        self.ranks = self.load(folder)
        self.constants = c = importlib.import_module(f"{folder.name}.constants")
        self.reference = reference.Constants(
            c.RMS_EPS,
            c.HC_EPS,
            c.NORM_EPS,
            c.POST_MULT,
            c.SINKHORN_ITERS,
            c.NORM_WEIGHT == "plus_one",
        )
        self.delayed = c.PRE_MIX == "delayed"

    def load(self, folder: Path) -> Sequence[Any]:
        from mhcgen.runtime import load_emulated

        return load_emulated(folder, device=0)

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

    def shared(self, inputs: reference.Inputs) -> tuple[Any, ...]:
        """The arguments of a boundary behind the published one."""
        streams = (inputs.residual, inputs.post, inputs.comb)
        pre = inputs.pre if self.delayed else None
        return (*streams, *self.weights(inputs), pre)

    def call(self, inputs: reference.Inputs) -> list[Any]:
        """One boundary on every rank."""
        for rank, part in zip(self.ranks, inputs.parts, strict=True):
            rank.publish(part)
        outputs = [rank.consume(*self.shared(inputs)) for rank in self.ranks]
        self.join()
        return outputs

    def expected(self, inputs: reference.Inputs) -> reference.BoundaryResult:
        *arguments, pre = self.shared(inputs)
        return reference.boundary(inputs.parts, *arguments, self.reference, pre)

    def join(self) -> None:
        for rank in self.ranks:
            rank.join()
        torch.cuda.synchronize()

    def check(self, outputs: Sequence[Any], expected: reference.BoundaryResult) -> None:
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


class Looped(Package):
    """A package whose one rank plays all: it publishes to itself, in whole calls."""

    def load(self, folder: Path) -> Sequence[Any]:
        from mhcgen.runtime.loader import load_loopback

        return [load_loopback(folder, device=0)]

    @property
    def rank(self) -> Any:
        return self.ranks[0]

    def inputs(self, m: int, seed: int, hard: Any = "plain") -> reference.Inputs:
        """All ranks' rows are those of the last one, which has the hardest."""
        inputs = super().inputs(m, seed, hard)
        parts = (inputs.parts[-1],) * len(inputs.parts)
        return dataclasses.replace(inputs, parts=parts)

    def launch(self, inputs: reference.Inputs, out: Any = None) -> Any:
        """A whole call; its mixes may be under way still."""
        return self.rank(inputs.parts[0], *self.shared(inputs), out=out)

    def call(self, inputs: reference.Inputs) -> list[Any]:
        output = self.launch(inputs)
        self.join()
        return [output]

    def launch_finalize(self, inputs: reference.Inputs, out: Any = None) -> Any:
        """The same sum by finalize: each token has one expert here, of weight 1."""
        m, top_k = inputs.residual.shape[0], self.constants.TOP_K
        x = inputs.parts[0]
        index = torch.full((m, top_k), -1, dtype=torch.int32, device="cuda")
        index[:, -1] = torch.arange(m, device="cuda").flip(0)
        weights = torch.ones((m, top_k), device="cuda")
        routed = (x.flip(0), weights, index, None)
        return self.rank.finalize(*routed, *self.shared(inputs), out=out)

    def launch_halves(self, inputs: reference.Inputs, out: Any = None) -> Any:
        """The same sum by publish and consume."""
        self.rank.publish(inputs.parts[0])
        return self.rank.consume(*self.shared(inputs), out=out)
