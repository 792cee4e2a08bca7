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
    output_tensors,
    output_type,
)
from .dtypes import DTYPES
from .mailbox import LOCAL, Mailbox
from .occupancy import Kernel, kernel_of
from .side_stream import Handles, SideStream

Fields = Callable[[Any], tuple[torch.Tensor, ...]]


class Memory(NamedTuple):
    """What calls of some M need memory for.

    Attributes:
        outputs: Tensors of the shapes of the outputs, in order; see ``like``. To make
            another one like them is quicker than to name shape, dtype and device.
        mix: [M, MIX] FP32, what a boundary hands to the mixes kernel: the same memory
            for all calls, since each waits for the mixes of the last. None where a
            boundary computes the mixes itself.
    """

    outputs: tuple[torch.Tensor, ...]
    mix: torch.Tensor | None


NO_MIXES = Handles(0, 0, 0)


def handles_of(side: SideStream | None) -> Handles:
    """What tells a boundary where to launch its mixes; None launches none."""
    return NO_MIXES if side is None else side.handles


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

    All launches go to the current stream, but those of the mixes beside it. Where these
    go to a side stream, a boundary launches its own, in the same native call.

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
        has_mixes: Whether there is a kernel of mixes alone.
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
        self.has_mixes = self._mixes is not None
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
        device = mailbox.buffer.device
        activation = DTYPES[constants.ACTIVATION]
        self._activation = torch.empty((), dtype=activation, device=device)
        self._fp32 = torch.empty((), dtype=torch.float32, device=device)

    def _connect(self, mailbox: Mailbox) -> None:
        """Takes a mailbox, whose tensors are converted once, not at each launch."""
        self.mailbox = mailbox
        c, device = self.constants, mailbox.buffer.device
        # Of one call at a time: each waits for the mixes of the last.
        most = c.CAPACITY if self.has_mixes else 0
        self._mix = torch.empty((most, c.MIX), dtype=torch.float32, device=device)
        self._memory: dict[int, Memory] = {}
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
        self._entry_outputs: Fields = attrgetter("residual", "layer_input", *mean)
        self._outputs: Fields = attrgetter(*streams, *pre, "layer_input", *mean)
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
        shapes = self._memory_of(m).outputs
        return self._output_type._make(map(torch.empty_like, shapes))

    def mix(self, m: int) -> torch.Tensor | None:
        """Memory for what a boundary of ``m`` tokens hands to the mixes kernel.

        [M, MIX] FP32, the same in all calls; None where the boundary computes the next
        mixes itself.
        """
        return self._memory_of(m).mix

    def entry_mix(self, m: int) -> torch.Tensor:
        """Memory for what an entry of ``m`` tokens hands to the mixes kernel."""
        return self._mix[:m]

    def exit_output(self, m: int) -> torch.Tensor:
        """Memory for what the exit returns, [M, H] activations."""
        return self._new_rows(m)

    def _new_rows(self, m: int) -> torch.Tensor:
        return torch.empty_like(like(self._activation, m, self.constants.HIDDEN))

    def _memory_of(self, m: int) -> Memory:
        """What ``m`` tokens need memory for, which is remembered."""
        memory = self._memory.get(m)
        if memory is None:
            c = self.constants
            elements = {each.dtype: each for each in (self._activation, self._fp32)}
            outputs = tuple(
                like(elements[dtype], *shape)
                for dtype, shape in output_tensors(c, m).values()
            )
            mix = None if c.MIXES == "tail" else self._mix[:m]
            memory = self._memory[m] = Memory(outputs, mix)
        return memory

    def publish(self, x: torch.Tensor) -> None:
        """Publishes x; one rank alone only keeps it for the boundary."""
        if self._publish is None:
            self.rows = x
            return
        self._publish(x, *self._of_publish)

    def closed_rows(self, m: int) -> torch.Tensor | None:
        """Memory for closed sums, which one rank alone keeps; others publish theirs."""
        return self._new_rows(m) if self._publish is None else None

    def finalize(self, routed: RoutedInput, rows: torch.Tensor | None) -> None:
        """Closes a routed sum and publishes it.

        Args:
            routed: The sum.
            rows: What ``closed_rows`` gave.
        """
        shared = routed.shared_output is not None
        kernel = self.finalizes[routed.expert_weights.dtype, shared]
        if rows is not None:
            kernel(*routed, rows)
            self.rows = rows
            return
        kernel(*routed, *self._of_publish)

    def call(
        self,
        kernel: Any,
        rows: tuple[Any, ...],
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
        side: SideStream | None = None,
    ) -> None:
        """Publishes rows and consumes what all ranks publish.

        Args:
            kernel: What ``call_kernel`` or ``finalize_kernel`` gave.
            rows: What ``published`` or ``closed`` makes of the rows.
            inputs: The other arguments.
            outputs: What is written.
            mix: What is written for the mixes kernel; None where there is none.
            side: Where that is launched; None launches it not.
        """
        kernel(
            *rows,
            *self._boundary_inputs(inputs),
            *self._of_mailbox,
            *self._outputs(outputs),
            *(() if mix is None else (mix, *handles_of(side))),
        )

    def published(self, x: torch.Tensor) -> tuple[Any, ...]:
        """What ``call`` takes of x."""
        return (x, *self._unrouted, *self._of_call)

    def closed(self, routed: RoutedInput) -> tuple[Any, ...]:
        """What ``call`` takes of a routed sum, which it closes."""
        return (None, *routed, *self._of_call)

    def boundary(
        self,
        kernel: Any,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
        side: SideStream | None = None,
    ) -> None:
        """Consumes what was published; see ``call``."""
        rows = self._of_boundary or self._taken_rows()
        self.call(kernel, rows, inputs, outputs, mix, side)

    def entry(
        self, inputs: EntryInput, outputs: BoundaryOutput, mix: torch.Tensor
    ) -> None:
        """Expands a hidden state; its mixes are to be launched behind it."""
        assert self._entry is not None
        residual, *rows = self._entry_outputs(outputs)
        self._entry(*self._entry_inputs(inputs), residual, mix, *rows)

    def exit(self, inputs: ExitInput, output: torch.Tensor) -> None:
        """Consumes what was published, and collapses the last streams."""
        assert self._exit is not None
        source = self._of_mailbox or self._taken_rows()
        self._exit(*self._exit_inputs(inputs), *source, output)

    def _taken_rows(self) -> tuple[torch.Tensor | None]:
        """The rows of one rank alone, which it keeps no longer."""
        rows, self.rows = self.rows, None
        return (rows,)

    def mixes(
        self,
        mix: torch.Tensor,
        inputs: BoundaryInput | EntryInput,
        outputs: BoundaryOutput,
        side: SideStream | None,
    ) -> None:
        """Computes post, comb and a delayed pre from what an entry gave.

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
