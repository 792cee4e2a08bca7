"""Entries, boundaries and exits of an emulated package, with what they should give."""

from collections.abc import Callable

import torch

from mhcgen import reference
from mhcgen.emulator.package import (
    EmulatedPackage,
    EmulatedRanks,
    Head,
    Output,
    Streams,
    Tensor,
)
from mhcgen.verify import (
    as_numpy,
    as_torch,
    constants_of,
    norm_weight_of,
    uploaded_weights,
    wrong_bits,
)

Check = Callable[[], None]


class Network:
    """Entries, boundaries and exits of a package, each checked against the reference.

    Attributes:
        ranks: The emulated ranks.
    """

    def __init__(self, package: EmulatedPackage, ranks: EmulatedRanks) -> None:
        self.ranks = ranks
        self.plan = package.plan
        self.constants = constants_of(self.plan)

    def uploaded(self, tensor: torch.Tensor) -> Tensor:
        return self.ranks.tensor("given", as_numpy(tensor))

    def streams(self, inputs: reference.Inputs) -> Streams:
        names = ["residual", "post", "comb", "pre"]
        return Streams(*(self.uploaded(getattr(inputs, name)) for name in names))

    def entry(self, inputs: reference.Inputs) -> tuple[Output, Check]:
        """Launches an entry; the second result checks it once it has run."""
        plan, hidden = self.plan, inputs.parts[0]
        weights = uploaded_weights(self.ranks, inputs)
        output = self.ranks.entry(self.uploaded(hidden), weights)
        expected = reference.entry_boundary(
            hidden,
            inputs.fn,
            inputs.scale,
            inputs.base,
            norm_weight_of(plan, inputs),
            self.constants,
        )

        def check() -> None:
            for rank in range(plan.tp):
                streams = output.streams
                residual = as_torch(streams.residual.read(rank))
                assert wrong_bits(residual, expected.residual) == 0
                layer_input = as_torch(output.layer_input.read(rank))
                close = reference.check_layer_input(layer_input, expected)
                assert close.worst_ulp <= 2, close
                post, comb = streams.post.read(rank), streams.comb.read(rank)
                mixes = reference.check_mixes(as_torch(post), as_torch(comb), expected)
                assert mixes.ok, mixes
                if plan.delayed:
                    assert streams.pre is not None
                    pre = as_torch(streams.pre.read(rank))
                    off = reference.max_abs_error(pre, expected.pre)
                    assert off <= reference.MIX_TOLERANCE
                if plan.stream_mean:
                    assert output.stream_mean is not None
                    means = as_torch(output.stream_mean.read(rank))
                    assert wrong_bits(means, hidden) == 0

        return output, check

    def exit(self, inputs: reference.Inputs, streams: Streams | None = None) -> Check:
        """Launches an exit; the result checks it once it has run."""
        plan, hc = self.plan, self.plan.hc
        weight = norm_weight_of(plan, inputs)
        rows = (inputs.fn[:hc], inputs.scale[:1], inputs.base[:hc])
        by_head = plan.exit_by == "sigmoid"
        head = Head(*map(self.uploaded, rows)) if by_head else None
        self.ranks.publish(self.ranks.tensor("x", *map(as_numpy, inputs.parts)))
        given = streams or self.streams(inputs)
        output = self.ranks.exit(
            given, None if weight is None else self.uploaded(weight), head
        )

        def check() -> None:
            for rank in range(plan.tp):
                residual, post, comb, *pre = (
                    as_torch(each.read(rank)) for each in vars(given).values() if each
                )
                weights = {
                    "mean": None,
                    "sigmoid": reference.Head(*rows),
                    "pre_mix": pre[0] if pre else None,
                }[plan.exit_by or ""]
                expected = reference.exit_boundary(
                    inputs.parts, residual, post, comb, weight, self.constants, weights
                )
                close = reference.check_layer_input(
                    as_torch(output.read(rank)), expected
                )
                assert close.worst_ulp <= 2, close

        return check
