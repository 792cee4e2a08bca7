"""The launches of a package's kernels, on arguments that were checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch
from tvm_ffi import from_dlpack

from .arguments import ROUTING_DTYPES, BoundaryInput, BoundaryOutput, RoutedInput
from .mailbox import Mailbox

empty = partial(torch.empty_like, memory_format=torch.contiguous_format)


def positional(compiled: Any) -> Any:
    """A compiled kernel without its layer of Python for keyword arguments."""
    unwrapped = getattr(compiled, "__tvm_ffi_object__", None)
    return compiled if unwrapped is None else unwrapped()


class Launcher:
    """One rank's compiled kernels and its mailbox.

    All launches but those of the mixes go to the current stream.

    Attributes:
        constants: The package's ``constants`` module.
        mailbox: This rank's end of the all-reduce.
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
        self._connect(mailbox)
        # Their code is unloaded when they go.
        self._compiled = compiled
        compiled = {name: positional(kernel) for name, kernel in compiled.items()}
        self._publish = compiled[kernels.publish_name(mailbox.transport)]
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
        self._by_tokens = [
            next(k for tokens, k in self.boundaries.items() if m <= tokens)
            for m in range(constants.CAPACITY + 1)
        ]
        self._shapes: dict[int, tuple[torch.Tensor, ...]] = {}
        device = mailbox.buffer.device
        self._bf16 = torch.empty((), dtype=torch.bfloat16, device=device)
        self._fp32 = torch.empty((), dtype=torch.float32, device=device)

    def _connect(self, mailbox: Mailbox) -> None:
        """Takes a mailbox, whose tensors are converted once, not at each launch."""
        self.mailbox = mailbox
        self._buffer = from_dlpack(mailbox.buffer)
        self._state = from_dlpack(mailbox.state)
        self._addresses = from_dlpack(mailbox.addresses)

    def with_mailbox(self, mailbox: Mailbox) -> Launcher:
        """The same kernels with another mailbox of the same transport."""
        other = copy(self)
        other._connect(mailbox)
        return other

    def boundary_kernel(self, m: int) -> Any:
        """The boundary kernel for a call of ``m`` tokens."""
        return self._by_tokens[m]

    def outputs(self, m: int) -> BoundaryOutput:
        """Memory for the outputs of ``m`` tokens."""
        residual, post, comb, layer_input, _ = self._shapes_of(m)
        return BoundaryOutput(
            empty(residual), empty(post), empty(comb), empty(layer_input)
        )

    def mix(self, m: int) -> torch.Tensor:
        """Memory for the mixes of ``m`` tokens, [M, MIX] FP32.

        A boundary writes them and the mixes kernel reads them.
        """
        return empty(self._shapes_of(m)[-1])

    def _shapes_of(self, m: int) -> tuple[torch.Tensor, ...]:
        """Tensors of the shapes of the outputs and the mixes, all of one element.

        To make another one like them is quicker than to name shape, dtype and device.
        """
        shapes = self._shapes.get(m)
        if shapes is None:
            c, bf16, fp32 = self.constants, self._bf16, self._fp32
            shapes = self._shapes[m] = (
                bf16.expand(m, c.HC, c.HIDDEN),
                fp32.expand(m, c.HC, 1),
                fp32.expand(m, c.HC, c.HC),
                bf16.expand(m, c.HIDDEN),
                fp32.expand(m, c.MIX),
            )
        return shapes

    def publish(self, x: torch.Tensor) -> None:
        """Publishes x."""
        self._publish(x, self._addresses, self._state, self.mailbox.rank)

    def finalize(self, routed: RoutedInput) -> None:
        """Closes a routed sum and publishes it."""
        shared = routed.shared_output is not None
        kernel = self.finalizes[routed.expert_weights.dtype, shared]
        kernel(*routed, self._addresses, self._state, self.mailbox.rank)

    def boundary(
        self,
        kernel: Any,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor,
    ) -> None:
        """Consumes what was published."""
        kernel(
            *inputs,
            self._buffer,
            self._state,
            outputs.residual,
            mix,
            outputs.layer_input,
        )

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
