"""The arguments of a call on every rank, and what each rank has to publish."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mhcgen import reference
from mhcgen.verify.cases import Case
from mhcgen.verify.subject import Subject

ROUTING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
        routed: Each rank's arguments of finalize; None where publish publishes.
    """

    m: int
    inputs: reference.Inputs
    routed: tuple[RoutedRows, ...] | None

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
    inputs = reference.random_inputs(
        m, subject.hidden, subject.hc, subject.tp, 1000 * case.seed + index, hard=hard
    )
    kinds = [
        None,
        *itertools.product(subject.weight_dtypes, subject.shared_expert),
    ]
    kind = kinds[(index + case.seed) % len(kinds)]
    if kind is None:
        return Call(m, inputs, None)
    generator = torch.Generator().manual_seed(1000 * case.seed + index + 500)
    routed = [
        _routed(subject, m, *kind, generator, case.stress) for _ in range(subject.tp)
    ]
    return Call(m, inputs, tuple(routed))


def _routed(
    subject: Subject,
    m: int,
    dtype: str,
    shared: bool,
    generator: torch.Generator,
    exact: bool,
) -> RoutedRows:
    rows, hidden, top_k = 4 * m + 3, subject.hidden, subject.top_k
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
        gemm2.bfloat16(),
        weights.masked_fill(absent, torch.nan).to(ROUTING_DTYPES[dtype]),
        torch.where(absent, -1, chosen).to(torch.int32),
        shared_row.bfloat16() if shared else None,
    )
