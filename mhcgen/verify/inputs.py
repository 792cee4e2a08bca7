"""The arguments of a call on every rank, and what each rank has to publish."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mhcgen import reference
from mhcgen.verify.cases import Case
from mhcgen.verify.subject import Subject

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class RoutedRows(NamedTuple):
    """The arguments of finalize on one rank."""

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor
    shared_output: Tensor | None


@dataclass(frozen=True)
class Call:
    """One call, on all ranks.

    Attributes:
        m: M.
        inputs: The arguments; without finalize, the ranks publish their parts.
        routed: Each rank's arguments of finalize; None where x is published.
        pre: [M, HC] FP32, where the pre-mix is delayed.
        norm_weight: [H], where the norm has one.
        exit_by: What the package's exit collapses the streams by; None without one.
        launches: 1 where the boundary should publish, if it can.
        leaves: Whether it is an exit.
    """

    m: int
    inputs: reference.Inputs
    routed: tuple[RoutedRows, ...] | None
    pre: Tensor | None
    norm_weight: Tensor | None
    exit_by: str | None = None
    launches: int = 2
    leaves: bool = False

    @property
    def streams(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the boundary before hands over: residual, post, comb and pre."""
        return self.inputs.residual, self.inputs.post, self.inputs.comb, self.pre

    @property
    def hidden(self) -> Tensor:
        """The hidden state that an entry takes, [M, H], the same on all ranks.

        The rows of the last rank, which are the hardest.
        """
        return self.inputs.parts[-1]

    @property
    def exit_weights(self) -> dict[str, Tensor]:
        """What the exit weighs the streams by, by the names of its arguments."""
        if self.exit_by == "pre_mix":
            return {"pre": self.inputs.pre}
        if self.exit_by != "sigmoid":
            return {}
        inputs, hc = self.inputs, self.inputs.residual.shape[1]
        return {
            "head_fn": inputs.fn[:hc],
            "head_scale": inputs.scale[:1],
            "head_base": inputs.base[:hc],
        }

    def whole(self) -> Call:
        """The same call by a boundary that publishes."""
        return replace(self, launches=1)

    def plain(self) -> Call:
        """The same call of x."""
        return replace(self, routed=None)

    def parts(self) -> list[Tensor]:
        """What each rank should publish, [M, H] a rank."""
        if self.routed is None:
            return [reference.sanitize(part) for part in self.inputs.parts]
        return [
            reference.sanitize(reference.finalize(*rows)[1]) for rows in self.routed
        ]


def draw(subject: Subject, case: Case, index: int) -> Call:
    """The arguments of one call of a case, the same ones each time.

    Absent experts have weights that are NaN, and so is a row that nobody asks for.
    Under stress, all routed sums are exact, whatever the order.
    """
    m = case.tokens[index]
    variants = reference.VARIANTS
    hard = variants[(index + case.seed * case.stress) % len(variants)]
    plain = plain_call(subject, m, 1000 * case.seed + index, hard)
    generator = torch.Generator().manual_seed(1000 * case.seed + index + 500)
    finalizes = itertools.product(subject.weight_dtypes, subject.shared_expert)
    kinds: list[tuple[str, bool] | None] = [None, *finalizes]
    turn = index + case.seed
    if case.stress:
        # Half of the calls take x, and two of three a boundary that publishes; of four,
        # one is an exit.
        kinds += [None] * (len(kinds) - 2)
        way, turn = torch.randint(0, 60, (2,), generator=generator).tolist()
        plain = plain.whole() if way % 3 else plain
        plain = replace(plain, leaves=subject.exit_by is not None and way % 4 == 0)
    kind = kinds[turn % len(kinds)]
    if kind is None:
        return plain
    routed = [
        _routed(subject, m, *kind, generator, case.stress) for _ in range(subject.tp)
    ]
    return replace(plain, routed=tuple(routed))


def plain_call(
    subject: Subject, m: int, seed: int, hard: reference.Variant = "plain"
) -> Call:
    """A call of x, with random inputs of a package's types."""
    inputs = reference.random_inputs(
        m,
        subject.hidden,
        subject.hc,
        subject.tp,
        seed,
        hard=hard,
        fn_dtype=DTYPES[subject.fn_weight],
        dtype=DTYPES[subject.activation],
    )
    return Call(
        m,
        inputs,
        routed=None,
        pre=inputs.pre if subject.pre_mix == "delayed" else None,
        norm_weight=None if subject.norm_weight == "none" else inputs.norm_weight,
        exit_by=subject.exit_by,
    )


def _routed(
    subject: Subject,
    m: int,
    dtype: str,
    shared: bool,
    generator: torch.Generator,
    exact: bool,
) -> RoutedRows:
    rows, hidden, top_k = 4 * m + 3, subject.hidden, subject.top_k
    activation = DTYPES[subject.activation]
    gemm2 = torch.randn(rows, hidden, generator=generator)
    weights = torch.rand(m, top_k, generator=generator)
    shared_row = torch.randn(m, hidden, generator=generator)
    if exact:
        gemm2, shared_row = gemm2.mul(2).round(), shared_row.mul(2).round()
        weights = weights.mul(4).round().div(2)
    gemm2[-1] = torch.nan
    absent = torch.rand(m, top_k, generator=generator) < 0.5
    chosen = torch.randint(0, rows - 1, (m, top_k), generator=generator)
    return RoutedRows(
        gemm2.to(activation),
        weights.masked_fill(absent, torch.nan).to(DTYPES[dtype]),
        torch.where(absent, -1, chosen).to(torch.int32),
        shared_row.to(activation) if shared else None,
    )
