"""The launches of a package's kernels, on arguments that were checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .arguments import ROUTING_DTYPES, BoundaryInput, BoundaryOutput, RoutedInput
from .mailbox import LOCAL, Mailbox


class Launcher:
    """One rank's compiled kernels and its mailbox.

    All launches but those of the mixes go to the current stream.

    Attributes:
        constants: The package's ``constants`` module.
        mailbox: This rank's end of the all-reduce.
        rows: The rows that the next boundary of one rank alone takes, [M, H].
        finalizes: The finalize kernels by routing dtype and shared expert.
        boundaries: The boundary kernels by the largest M that they serve, rising.
    """

    def __init__(
        self,
        constants: ModuleType,
        kernels: ModuleType,
        compiled: Mapping[str, Any],
        arch: str,
        mailbox: Mailbox,
    ) -> None:
        """Picks the kernels of an architecture and of the mailbox's transport.

        Args:
            constants: The package's ``constants`` module.
            kernels: The package's ``kernels`` module.
            compiled: What ``compile_package`` gave.
            arch: The architecture that they were compiled for.
            mailbox: This rank's end of the all-reduce.
        """
        self.constants = constants
        self.mailbox = mailbox
        self.rows: torch.Tensor | None = None
        self._publish = (
            None
            if mailbox.transport == LOCAL
            else compiled[kernels.publish_name(mailbox.transport)]
        )
        self.finalizes = {
            (ROUTING_DTYPES[dtype], shared): compiled[
                kernels.finalize_name(dtype, shared, mailbox.transport)
            ]
            for dtype in getattr(constants, "ROUTING_WEIGHTS", ())
            for shared in constants.SHARED_EXPERT
        }
        self.boundaries = {
            row.max_tokens: compiled[kernels.boundary_name(row.size)]
            for row in constants.TARGETS[arch].token_groups
        }
        self._mixes = compiled["mixes"]

    def with_mailbox(self, mailbox: Mailbox) -> Launcher:
        """The same kernels with another mailbox of the same transport."""
        other = copy(self)
        other.mailbox = mailbox
        return other

    def boundary_kernel(self, m: int) -> Any:
        """The boundary kernel for a call of ``m`` tokens."""
        return next(k for tokens, k in self.boundaries.items() if m <= tokens)

    def outputs(self, m: int) -> BoundaryOutput:
        """Memory for the outputs of ``m`` tokens."""
        c = self.constants
        empty = partial(torch.empty, device=self.mailbox.buffer.device)
        return BoundaryOutput(
            residual=empty((m, c.HC, c.HIDDEN), dtype=torch.bfloat16),
            post=empty((m, c.HC, 1), dtype=torch.float32),
            comb=empty((m, c.HC, c.HC), dtype=torch.float32),
            layer_input=empty((m, c.HIDDEN), dtype=torch.bfloat16),
        )

    def mix(self, m: int) -> torch.Tensor:
        """Memory for the mixes of ``m`` tokens, [M, MIX] FP32.

        A boundary writes them and the mixes kernel reads them.
        """
        device = self.mailbox.buffer.device
        return torch.empty((m, self.constants.MIX), dtype=torch.float32, device=device)

    def publish(self, x: torch.Tensor) -> None:
        """Publishes x; one rank alone only keeps it for the boundary."""
        if self._publish is None:
            self.rows = x
            return
        mailbox = self.mailbox
        self._publish(x, mailbox.addresses, mailbox.state, mailbox.rank)

    def finalize(self, routed: RoutedInput) -> None:
        """Closes a routed sum and publishes it."""
        mailbox = self.mailbox
        shared = routed.shared_output is not None
        kernel = self.finalizes[routed.expert_weights.dtype, shared]
        if self._publish is None:
            m = routed.expert_weights.shape[0]
            self.rows = routed.gemm2_permuted.new_empty((m, self.constants.HIDDEN))
            kernel(*routed, self.rows)
            return
        kernel(*routed, mailbox.addresses, mailbox.state, mailbox.rank)

    def boundary(
        self,
        kernel: Any,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor,
    ) -> None:
        """Consumes what was published."""
        source: tuple[torch.Tensor | None, ...]
        if self._publish is None:
            source, self.rows = (self.rows,), None
        else:
            source = (self.mailbox.buffer, self.mailbox.state)
        kernel(*inputs, *source, outputs.residual, mix, outputs.layer_input)

    def mixes(
        self,
        mix: torch.Tensor,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        stream: int,
    ) -> None:
        """Computes post and comb on a stream, given as a handle.

        To make the stream current would cost more than the launch.
        """
        self._mixes(mix, inputs.scale, inputs.base, outputs.post, outputs.comb, stream)
