"""The launches of a package's kernels, on arguments that were checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .arguments import (
    BoundaryInput,
    BoundaryOutput,
    EntryInput,
    ExitInput,
    RoutedInput,
    output_type,
)
from .dtypes import DTYPES
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
            (DTYPES[dtype], shared): compiled[
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
        self._entry = compiled.get("entry")
        self._exit = compiled.get("exit")
        self._output_type = output_type(constants)
        weight = ("norm_weight",) * (constants.NORM_WEIGHT != "none")
        pre = ("pre",) * (constants.PRE_MIX == "delayed")
        mean = ("stream_mean",) * constants.STREAM_MEAN
        streams = ("residual", "post", "comb")
        mix_weights = ("fn", "scale", "base")
        # A boundary with a delayed pre-mix does not need scale and base.
        collapse = ("fn", *pre) if pre else mix_weights
        exits = {
            "sigmoid": ("head_fn", "head_scale", "head_base"),
            "pre_mix": ("pre",),
        }
        self._boundary_inputs = (*streams, *collapse, *weight)
        self._entry_inputs = ("hidden", *mix_weights, *weight)
        self._exit_inputs = (*streams, *exits.get(constants.EXIT, ()), *weight)
        self._row_outputs = ("layer_input", *mean)
        self._mix_outputs = ("post", "comb", *pre)

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
        device, dtype = self.mailbox.buffer.device, DTYPES[c.ACTIVATION]
        fp32 = partial(torch.empty, device=device, dtype=torch.float32)
        activation = partial(torch.empty, device=device, dtype=dtype)
        more = {}
        if c.PRE_MIX == "delayed":
            more["pre"] = fp32((m, c.HC))
        if c.STREAM_MEAN:
            more["stream_mean"] = activation((m, c.HIDDEN))
        return self._output_type(
            residual=activation((m, c.HC, c.HIDDEN)),
            post=fp32((m, c.HC, 1)),
            comb=fp32((m, c.HC, c.HC)),
            layer_input=activation((m, c.HIDDEN)),
            **more,
        )

    def exit_output(self, m: int) -> torch.Tensor:
        """Memory for what the exit returns, [M, H] activations."""
        c, device = self.constants, self.mailbox.buffer.device
        return torch.empty((m, c.HIDDEN), dtype=DTYPES[c.ACTIVATION], device=device)

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
        kernel(
            *fields_of(inputs, self._boundary_inputs),
            *self._source(),
            outputs.residual,
            mix,
            *fields_of(outputs, self._row_outputs),
        )

    def _source(self) -> tuple[torch.Tensor | None, ...]:
        """Where published rows are: in the mailbox, or with the one rank itself."""
        if self._publish is not None:
            return self.mailbox.buffer, self.mailbox.state
        rows, self.rows = self.rows, None
        return (rows,)

    def entry(
        self, inputs: EntryInput, outputs: BoundaryOutput, mix: torch.Tensor
    ) -> None:
        """Expands a hidden state."""
        assert self._entry is not None
        self._entry(
            *fields_of(inputs, self._entry_inputs),
            outputs.residual,
            mix,
            *fields_of(outputs, self._row_outputs),
        )

    def exit(self, inputs: ExitInput, output: torch.Tensor) -> None:
        """Consumes what was published, and collapses the last streams."""
        assert self._exit is not None
        self._exit(*fields_of(inputs, self._exit_inputs), *self._source(), output)

    def mixes(
        self,
        mix: torch.Tensor,
        inputs: BoundaryInput | EntryInput,
        outputs: BoundaryOutput,
        stream: int,
    ) -> None:
        """Computes post, comb and a delayed pre on a stream, given as a handle.

        To make the stream current would cost more than the launch.
        """
        self._mixes(mix, inputs.scale, inputs.base, *self.mix_outputs(outputs), stream)

    def mix_outputs(self, outputs: BoundaryOutput) -> list[torch.Tensor]:
        """Those outputs that the mixes kernel writes."""
        return fields_of(outputs, self._mix_outputs)


def fields_of(values: NamedTuple, names: Sequence[str]) -> list[torch.Tensor]:
    """Some fields, in the order of their names."""
    return [getattr(values, name) for name in names]
