"""The launches of a package's kernels, on arguments that were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from math import prod
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from tvm_ffi import from_dlpack

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
from .occupancy import Kernel, kernel_of
from .side_stream import SideStream

Fields = Callable[[Any], tuple[torch.Tensor, ...]]


class Shapes(NamedTuple):
    """Tensors of the shapes that a call of some M allocates; see ``like``.

    To make another one like them is quicker than to name shape, dtype and device.

    Attributes:
        outputs: Those of the outputs, in order.
        mix: That of what is handed to the mixes kernel.
    """

    outputs: tuple[torch.Tensor, ...]
    mix: torch.Tensor


def like(element: torch.Tensor, *shape: int) -> torch.Tensor:
    """A tensor of one element, of which ``empty_like`` makes contiguous ones."""
    # Strides of zero are handed on where they are as good as those of a dense tensor.
    return element.new_empty(shape) if prod(shape) < 2 else element.expand(shape)


def positional(compiled: Any) -> Any:
    """A compiled kernel without its layer of Python for keyword arguments."""
    unwrapped = getattr(compiled, "__tvm_ffi_object__", None)
    return compiled if unwrapped is None else unwrapped()


class Launcher:
    """One rank's compiled kernels and its mailbox.

    All launches go to the current stream, but those of the mixes beside it.

    Attributes:
        constants: The package's ``constants`` module.
        mailbox: This rank's end of the all-reduce.
        rows: The rows that the next boundary of one rank alone takes, [M, H].
        finalizes: The finalize kernels by routing dtype and shared expert.
        sizes: Tokens of a cluster of each boundary kernel, by what names it in the
            dispatch table.
        boundaries: The boundary kernels that consume what was published before, by
            the same.
        publishing: The boundary kernels that publish their own rows, likewise.
        room: How many clusters of these run at once.
    """

    def __init__(
        self,
        constants: ModuleType,
        kernels: ModuleType,
        compiled: Mapping[str, Any],
        arch: str,
        mailbox: Mailbox,
        room: Mapping[Kernel, int],
    ) -> None:
        """Picks the kernels of an architecture and of the mailbox's transport.

        Args:
            constants: The package's ``constants`` module.
            kernels: The package's ``kernels`` module.
            compiled: What ``compile_package`` gave.
            arch: The architecture that they were compiled for.
            mailbox: This rank's end of the all-reduce.
            room: How many clusters of each boundary that publishes its own rows run at
                once: a call with more takes two launches.
        """
        self.constants = constants
        self.rows: torch.Tensor | None = None
        # Their code is unloaded when they go.
        self._compiled = compiled
        compiled = {name: positional(kernel) for name, kernel in compiled.items()}
        transport, rows = mailbox.transport, constants.TARGETS[arch].token_groups
        self._publish = (
            None if transport == LOCAL else compiled[kernels.publish_name(transport)]
        )
        self.finalizes = {
            (DTYPES[dtype], shared): compiled[
                kernels.finalize_name(dtype, shared, transport)
            ]
            for dtype in getattr(constants, "ROUTING_WEIGHTS", ())
            for shared in constants.SHARED_EXPERT
        }
        self.sizes = {kernel_of(row): row.size for row in rows}
        self.boundaries = {
            kernel: compiled[kernels.boundary_name(kernel)] for kernel in self.sizes
        }
        self.room = room
        self.publishing = {
            kernel: compiled[kernels.boundary_name(kernel, transport)]
            for kernel, clusters in room.items()
            if clusters
        }
        # Kernels of packages that close routed sums inside name these arguments, too.
        closing = [kernel_of(row) for row in rows if getattr(row, "finalizes", False)]
        self._unrouted = (None,) * len(RoutedInput._fields) if closing else ()
        self.finalizing = {
            (kernel, DTYPES[dtype], shared): compiled[
                kernels.finalizing_name(kernel, dtype, shared, transport)
            ]
            for kernel in closing
            if room.get(kernel)
            for dtype in constants.ROUTING_WEIGHTS
            for shared in constants.SHARED_EXPERT
        }
        self._mixes = compiled.get("mixes")
        self._entry = compiled.get("entry")
        self._exit = compiled.get("exit")
        self._connect(mailbox)
        self._name_arguments()
        by_tokens = [
            next(row for row in rows if m <= row.max_tokens)
            for m in range(constants.CAPACITY + 1)
        ]
        self._kernels = [kernel_of(row) for row in by_tokens]
        self._boundary_by_tokens = [self.boundaries[each] for each in self._kernels]
        self._call_by_tokens = [
            self.call_of(kernel_of(row), m)
            if transport == LOCAL or row.launches == 1
            else None
            for m, row in enumerate(by_tokens)
        ]
        self._shapes: dict[int, Shapes] = {}
        device = mailbox.buffer.device
        activation = DTYPES[constants.ACTIVATION]
        self._activation = torch.empty((), dtype=activation, device=device)
        self._fp32 = torch.empty((), dtype=torch.float32, device=device)

    def _connect(self, mailbox: Mailbox) -> None:
        """Takes a mailbox, whose tensors are converted once, not at each launch."""
        self.mailbox = mailbox
        self._of_mailbox: tuple[Any, ...] = ()
        self._of_publish: tuple[Any, ...] = ()
        self._of_call: tuple[Any, ...] = ()
        self._of_boundary: tuple[Any, ...] = ()
        if mailbox.transport != LOCAL:
            addresses, state = (
                from_dlpack(mailbox.addresses),
                from_dlpack(mailbox.state),
            )
            self._of_mailbox = (from_dlpack(mailbox.buffer), state)
            self._of_publish = (addresses, state, mailbox.rank)
            self._of_call = (addresses, mailbox.rank)
            # It has no rows to publish, and nowhere to send them.
            self._of_boundary = (None, *self._unrouted, None, mailbox.rank)

    def _name_arguments(self) -> None:
        """Says which fields of inputs and outputs the kernels take, in order."""
        c = self.constants
        weight = ("norm_weight",) * (c.NORM_WEIGHT != "none")
        pre = ("pre",) * (c.PRE_MIX == "delayed")
        mean = ("stream_mean",) * c.STREAM_MEAN
        streams = ("residual", "post", "comb")
        mix_weights = ("fn", "scale", "base")
        exits = {
            "sigmoid": ("head_fn", "head_scale", "head_base"),
            "pre_mix": ("pre",),
        }
        self._output_type = output_type(c)
        self._boundary_inputs: Fields = attrgetter(
            *streams, *pre, *mix_weights, *weight
        )
        self._entry_inputs: Fields = attrgetter("hidden", *mix_weights, *weight)
        self._exit_inputs: Fields = attrgetter(
            *streams, *exits.get(c.EXIT, ()), *weight
        )
        self._row_outputs: Fields = attrgetter("residual", "layer_input", *mean)
        self._all_outputs: Fields = attrgetter(*streams, *pre, "layer_input", *mean)
        self._mix_outputs: Fields = attrgetter("post", "comb", *pre)

    def with_mailbox(self, mailbox: Mailbox) -> Launcher:
        """The same kernels with another mailbox of the same transport."""
        other = copy(self)
        other._connect(mailbox)
        return other

    def boundary_kernel(self, m: int) -> Any:
        """The kernel that consumes what was published, for ``m`` tokens."""
        return self._boundary_by_tokens[m]

    def call_kernel(self, m: int) -> Any:
        """The kernel that takes ``m`` tokens through a whole call, in one launch.

        None where a call takes two, for no tokens, and for more than the capacity.
        """
        return self._call_by_tokens[m] if m < len(self._call_by_tokens) else None

    def call_of(self, kernel: Kernel, m: int) -> Any:
        """As ``call_kernel``, with the kernel of some row of the dispatch table."""
        if self._publish is None:
            # One rank alone has nothing to publish.
            return self.boundaries[kernel] if m else None
        clusters = -(-m // self.sizes[kernel])
        fits = 0 < clusters <= self.room.get(kernel, 0)
        return self.publishing[kernel] if fits else None

    def finalize_kernel(self, m: int, routed: RoutedInput) -> Any:
        """The kernel that closes a routed sum and takes it through, in one launch.

        None where that takes two, for no tokens, and for more than the capacity.
        """
        if self.call_kernel(m) is None:
            return None
        shared = routed.shared_output is not None
        key = self._kernels[m], routed.expert_weights.dtype, shared
        return self.finalizing.get(key)

    def outputs(self, m: int) -> BoundaryOutput:
        """Memory for the outputs of ``m`` tokens."""
        return self._output_type._make(
            map(torch.empty_like, self._shapes_of(m).outputs)
        )

    def mix(self, m: int) -> torch.Tensor | None:
        """Memory for what a boundary of ``m`` tokens hands to the mixes kernel.

        [M, MIX] FP32; None where the boundary computes the next mixes itself.
        """
        return None if self.constants.MIXES == "tail" else self.entry_mix(m)

    def entry_mix(self, m: int) -> torch.Tensor:
        """Memory for what an entry of ``m`` tokens hands to the mixes kernel."""
        return torch.empty_like(self._shapes_of(m).mix)

    def exit_output(self, m: int) -> torch.Tensor:
        """Memory for what the exit returns, [M, H] activations."""
        return torch.empty_like(like(self._activation, m, self.constants.HIDDEN))

    def _shapes_of(self, m: int) -> Shapes:
        """The shapes of ``m`` tokens, which are remembered."""
        shapes = self._shapes.get(m)
        if shapes is None:
            c, activation, fp32 = self.constants, self._activation, self._fp32
            known = {
                "residual": like(activation, m, c.HC, c.HIDDEN),
                "post": like(fp32, m, c.HC, 1),
                "comb": like(fp32, m, c.HC, c.HC),
                "layer_input": like(activation, m, c.HIDDEN),
                "pre": like(fp32, m, c.HC),
                "stream_mean": like(activation, m, c.HIDDEN),
            }
            names = self._output_type._fields
            outputs = tuple(known[name] for name in names)
            shapes = self._shapes[m] = Shapes(outputs, like(fp32, m, c.MIX))
        return shapes

    def publish(self, x: torch.Tensor) -> None:
        """Publishes x; one rank alone only keeps it for the boundary."""
        if self._publish is None:
            self.rows = x
            return
        self._publish(x, *self._of_publish)

    def finalize(self, routed: RoutedInput) -> None:
        """Closes a routed sum and publishes it."""
        shared = routed.shared_output is not None
        kernel = self.finalizes[routed.expert_weights.dtype, shared]
        if self._publish is None:
            m = routed.expert_weights.shape[0]
            self.rows = routed.gemm2_permuted.new_empty((m, self.constants.HIDDEN))
            kernel(*routed, self.rows)
            return
        kernel(*routed, *self._of_publish)

    def call(
        self,
        kernel: Any,
        x: torch.Tensor,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
    ) -> None:
        """Publishes x and consumes what all ranks publish."""
        kernel(
            x,
            *self._unrouted,
            *self._of_call,
            *self._boundary_inputs(inputs),
            *self._of_mailbox,
            *self._written(outputs, mix),
        )

    def call_routed(
        self,
        kernel: Any,
        routed: RoutedInput,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
    ) -> None:
        """Closes and publishes a routed sum, and consumes what all ranks publish."""
        kernel(
            None,
            *routed,
            *self._of_call,
            *self._boundary_inputs(inputs),
            *self._of_mailbox,
            *self._written(outputs, mix),
        )

    def boundary(
        self,
        kernel: Any,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
    ) -> None:
        """Consumes what was published."""
        kernel(
            *(self._of_boundary or self._taken_rows()),
            *self._boundary_inputs(inputs),
            *self._of_mailbox,
            *self._written(outputs, mix),
        )

    def entry(
        self, inputs: EntryInput, outputs: BoundaryOutput, mix: torch.Tensor
    ) -> None:
        """Expands a hidden state."""
        assert self._entry is not None
        self._entry(*self._entry_inputs(inputs), *self._written(outputs, mix))

    def exit(self, inputs: ExitInput, output: torch.Tensor) -> None:
        """Consumes what was published, and collapses the last streams."""
        assert self._exit is not None
        source = self._of_mailbox or self._taken_rows()
        self._exit(*self._exit_inputs(inputs), *source, output)

    def _taken_rows(self) -> tuple[torch.Tensor | None]:
        """The rows of one rank alone, which it keeps no longer."""
        rows, self.rows = self.rows, None
        return (rows,)

    def _written(
        self, outputs: BoundaryOutput, mix: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """What a boundary or an entry writes, in order."""
        if mix is None:
            return self._all_outputs(outputs)
        residual, *rows = self._row_outputs(outputs)
        return (residual, mix, *rows)

    def mixes(
        self,
        mix: torch.Tensor,
        inputs: BoundaryInput | EntryInput,
        outputs: BoundaryOutput,
        side: SideStream | None,
    ) -> None:
        """Computes post, comb and a delayed pre from what a boundary or an entry gave.

        Args:
            mix: What it gave.
            inputs: What it took.
            outputs: What it returns.
            side: Where they are launched; on the current stream in packages without.
        """
        assert self._mixes is not None
        written = self._mix_outputs(outputs)
        where = () if side is None else side.handles
        self._mixes(mix, inputs.scale, inputs.base, *written, *where)

    def mix_outputs(self, outputs: BoundaryOutput) -> tuple[torch.Tensor, ...]:
        """Those outputs that the mixes kernel writes."""
        return self._mix_outputs(outputs)
