"""What a call published and returned, measured against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from mhcgen import reference
from mhcgen.verify.inputs import Call, RoutedRows
from mhcgen.verify.subject import Subject

FINALIZE_TOLERANCE = 1e-5
"""A sum near zero may be off by more than an ulp, and by this much."""

LAYER_INPUT_ULP = 2
LAYER_INPUT_SHARE = 1e-3
"""Elements of a layer input that may be off by two ulp; one may be in any case."""


@dataclass
class Errors:
    """The largest errors of some calls.

    Attributes:
        published: Elements in the mailboxes that are not what publish was given.
        finalized_ulp: Distance of published sums; 0 where they are close to zero.
        residual: Elements of the new streams whose bits are wrong.
        layer_input_ulp: Distance of layer inputs, or of what an exit returned, where c
            is no small rest.
        layer_input_share: Largest share of a call's elements more than an ulp off.
        mix: Absolute error of the mixes, at unit scale.
        post: Absolute error of post-mix weights.
        comb: Absolute error of residual mixes.
        pre: Absolute error of delayed pre-mixes.
        stream_mean_ulp: Distance of stream means where they are no small rest.
    """

    published: int = 0
    finalized_ulp: int = 0
    residual: int = 0
    layer_input_ulp: int = 0
    layer_input_share: float = 0.0
    mix: float = 0.0
    post: float = 0.0
    comb: float = 0.0
    pre: float = 0.0
    stream_mean_ulp: int = 0

    def include(self, other: Errors) -> None:
        """Takes the larger of each."""
        for each in fields(self):
            name = each.name
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def ok(self) -> bool:
        """Whether the contract allows them."""
        return (
            self.published == self.residual == 0
            and self.finalized_ulp <= 1
            and self.layer_input_ulp <= LAYER_INPUT_ULP
            and self.layer_input_share <= LAYER_INPUT_SHARE
            and self.stream_mean_ulp <= 1
            and max(self.mix, self.post, self.comb, self.pre) <= reference.MIX_TOLERANCE
        )


class Published(NamedTuple):
    """Rows in mailboxes, [TP, M, H], before anything consumes them.

    Attributes:
        first: Those in rank 0's.
        each: Those of every rank that this process sees.
    """

    first: Tensor
    each: Sequence[Tensor]


class Returned(NamedTuple):
    """What a boundary returned on one rank.

    ``mix`` is None where it is gone since, or was never in memory; ``pre`` and
    ``stream_mean`` where the package returns none.
    """

    residual: Tensor
    layer_input: Tensor
    post: Tensor
    comb: Tensor
    mix: Tensor | None = None
    pre: Tensor | None = None
    stream_mean: Tensor | None = None


def expected(
    subject: Subject,
    call: Call,
    parts: Sequence[Tensor],
    streams: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
) -> reference.BoundaryResult:
    """The reference's results of a call.

    Args:
        subject: The package.
        call: The call.
        parts: What each rank published, [M, H] a rank.
        streams: residual, post, comb and pre, where they are not those of the call.
    """
    residual, post, comb, pre = streams or call.streams
    return reference.boundary(
        parts,
        residual,
        post,
        comb,
        call.inputs.fn,
        call.inputs.scale,
        call.inputs.base,
        call.norm_weight,
        subject.constants,
        pre,
    )


def expected_entry(subject: Subject, call: Call) -> reference.BoundaryResult:
    """The reference's results of an entry with a call's hidden state."""
    inputs = call.inputs
    return reference.entry_boundary(
        call.hidden,
        inputs.fn,
        inputs.scale,
        inputs.base,
        call.norm_weight,
        subject.constants,
    )


def expected_exit(
    subject: Subject,
    call: Call,
    parts: Sequence[Tensor],
    streams: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
) -> reference.ExitResult:
    """The reference's results of an exit; the arguments are those of ``expected``."""
    residual, post, comb, pre = streams or call.streams
    weights: Tensor | reference.Head | None = None
    if call.exit_by == "pre_mix":
        weights = pre
    if call.exit_by == "sigmoid":
        weights = reference.Head(*call.exit_weights.values())
    return reference.exit_boundary(
        parts, residual, post, comb, call.norm_weight, subject.constants, weights
    )


def published_errors(call: Call, published: Published) -> Errors:
    """The errors of published rows; of finalize, all ranks must have the same bits."""
    errors = Errors()
    wanted = published.first
    if call.routed is None:
        wanted = torch.stack(call.parts())
    else:
        errors.finalized_ulp = max(
            finalize_distance(rows, arguments)
            for rows, arguments in zip(published.first, call.routed, strict=True)
        )
    errors.published = sum(wrong_bits(rows, wanted) for rows in published.each)
    return errors


def finalize_distance(rows: Tensor, arguments: RoutedRows) -> int:
    """The largest distance of published sums [M, H] in ulp, but for those near zero."""
    exact, rounded = reference.finalize(*arguments)
    distance = reference.ulp_distance(rows, rounded)
    close = (rows.double() - exact).abs() <= FINALIZE_TOLERANCE
    return int(distance.masked_fill(close, 0).max())


def returned_errors(returned: Returned, result: reference.BoundaryResult) -> Errors:
    """The errors of what one rank returned."""
    mixes = reference.check_mixes(returned.post, returned.comb, result)
    errors = normalized_errors(returned.layer_input, result)
    errors.residual = wrong_bits(returned.residual, result.residual)
    errors.post, errors.comb = mixes.worst_post, mixes.worst_comb
    if returned.mix is not None:
        errors.mix = reference.max_abs_error(returned.mix, result.mix)
    if returned.pre is not None:
        errors.pre = reference.max_abs_error(returned.pre, result.pre)
    if returned.stream_mean is not None:
        errors.stream_mean_ulp = mean_distance(returned.stream_mean, result)
    return errors


def normalized_errors(actual: Tensor, result: reference.Collapsed) -> Errors:
    """The errors of a layer input, or of what an exit returned on one rank, [M, H]."""
    check = reference.check_layer_input(actual, result)
    distance = reference.normalized_distance(actual, result)
    off = int((distance > 1).sum()) - 1
    return Errors(
        layer_input_ulp=check.worst_ulp,
        layer_input_share=max(0, off) / distance.numel(),
    )


def mean_distance(actual: Tensor, result: reference.BoundaryResult) -> int:
    """The largest distance of a stream mean, but where the streams cancel."""
    distance = reference.ulp_distance(actual, result.stream_mean)
    exact = result.residual.double()
    small = exact.mean(1).abs() <= 1e-3 * exact.abs().mean(1)
    either = distance == reference.NAN_DISTANCE
    return int(distance.masked_fill(small & ~either, 0).max())


def wrong_bits(actual: Tensor, wanted: Tensor) -> int:
    """16-bit elements whose bits differ, but for NaNs."""
    same = actual.view(torch.int16) == wanted.view(torch.int16)
    both_nan = torch.isnan(actual) & torch.isnan(wanted)
    return int((~(same | both_nan)).sum())
