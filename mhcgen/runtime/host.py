"""The host side of a package: one rank's boundaries, and their side stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from .arguments import BoundaryInput, BoundaryOutput, Checks, RoutedInput, rows_of
from .launcher import Launcher

NOTHING = nullcontext()


@dataclass(slots=True)
class PendingMixes:
    """Mixes that the side stream may still be computing.

    Holding the tensors keeps the allocator from handing their memory to the stream of
    the call. ``record_stream`` on each would make every later allocation poll events.

    Attributes:
        captured: The call was captured in a graph.
        stream: The stream of the call.
        tensors: What the mixes kernel reads and writes.
        joined: The stream that ``join()`` was last called on since.
    """

    captured: bool
    stream: torch.cuda.Stream
    tensors: tuple[torch.Tensor, ...]
    joined: torch.cuda.Stream | None = None


class Published(NamedTuple):
    """Rows that were published and not consumed yet, and what publish reads."""

    m: int
    tensors: tuple[torch.Tensor | None, ...]


class FusedBoundary:
    """One rank's fused boundaries: all calls share one mailbox and one order.

    Every rank must make the same calls in the same order with the same M. Arguments are
    checked before the first launch, and a call that they stop has launched nothing.

    Kernels of others that run between two calls and are launched with programmatic
    dependent launch must wait for their predecessor (``griddepcontrol.wait``): what
    never waits may end before a boundary that it follows.

    Attributes:
        rank: This rank.
        device: Its GPU.
        transport: ``multicast`` or ``unicast``.
        capacity: The largest M.
    """

    def __init__(self, launcher: Launcher) -> None:
        """Takes kernels that were launched before; use the package's ``load``."""
        mailbox = launcher.mailbox
        self.rank = mailbox.rank
        self.device = mailbox.buffer.device
        self.transport = mailbox.transport
        self.capacity: int = launcher.constants.CAPACITY
        self._launcher = launcher
        self._checks = Checks(launcher.constants, self.device)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._boundary_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._mixes_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream: torch.cuda.Stream | None = None
        self._pending: PendingMixes | None = None
        self._published: Published | None = None

    def supports(self, m: int) -> bool:
        """Whether a call may have ``m`` tokens."""
        return 0 <= m <= self.capacity

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """All-reduces ``x`` and takes it through the boundary.

        Args:
            x: [M, H] BF16, this rank's partial output of the sublayer.
            residual: [M, HC, H] BF16.
            post: [M, HC, 1] FP32.
            comb: [M, HC, HC] FP32, [source, target].
            fn: [MIX, HC * H] BF16, rows pre, post, comb; columns stream-major.
            scale: [3] FP32: pre, post, comb.
            base: [MIX] FP32.
            norm_weight: [H] BF16.

        Returns:
            The outputs; empty where M is 0.

        Raises:
            TypeError: An argument is no tensor or has another dtype.
            ValueError: A shape, device, layout or alignment is not as above, or M
                exceeds the capacity.
            RuntimeError: The mixes of a call outside of a graph capture are still
                outstanding inside of it; or an earlier call broke off half-way.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        m = self._checks.x(x)
        self._checks.boundary(m, inputs)
        return self._run(Published(m, (x,)), partial(self._launcher.publish, x), inputs)

    def finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """Closes a MoE layer's routed sum and takes it through the boundary.

        Args:
            gemm2_permuted: [rows, H] BF16, the experts' output rows on this rank.
            expert_weights: [M, top_k] FP32 or BF16.
            expanded_idx_to_permuted_idx: [M, top_k] int32: rows of
                ``gemm2_permuted``, or -1 where the expert is not on this rank. The
                indices are not checked against the number of rows.
            shared_output: [M, H] BF16 of the shared expert, or None.
            residual: As in a call; so are the rest, the result and the errors.
            post: As in a call.
            comb: As in a call.
            fn: As in a call.
            scale: As in a call.
            base: As in a call.
            norm_weight: As in a call.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        m = self._checks.routed(routed)
        self._checks.boundary(m, inputs)
        return self._run(
            Published(m, routed), partial(self._launcher.finalize, routed), inputs
        )

    def join(self) -> None:
        """Makes the current stream wait for the mixes of the last call.

        Call it before anything but the next boundary reads ``post`` or ``comb``, and
        before a graph capture begins or ends. After a capture that failed, call it once
        outside of any capture.

        Raises:
            RuntimeError: The mixes were launched before the capture that is going on.
        """
        if self._pending is None:
            return
        with self._on_device():
            stream = self._current_stream()
            self._wait_for_mixes(stream, torch.cuda.is_current_stream_capturing())
        if self._pending is not None:
            self._pending.joined = stream

    def publish(self, x: torch.Tensor) -> None:
        """The first half of a call alone; ``consume`` must follow.

        Only for several ranks on one device, where all publish before any consumes. The
        argument and the errors are those of a call.
        """
        m = self._checks.x(x)
        self._publish_alone(Published(m, (x,)), partial(self._launcher.publish, x))

    def publish_finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
    ) -> None:
        """The first half of ``finalize`` alone; ``consume`` must follow."""
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        m = self._checks.routed(routed)
        self._publish_alone(
            Published(m, routed), partial(self._launcher.finalize, routed)
        )

    def consume(
        self,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """The second half of a call or of ``finalize``, with the M of the first.

        The arguments, the result and the errors are those of a call.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        m = rows_of(residual)
        self._checks.boundary(m, inputs)
        published = 0 if self._published is None else self._published.m
        if m != published:
            raise ValueError(
                f"residual has {m} tokens, and {published} were published before"
            )
        outputs, mix = self._launcher.outputs(m), self._launcher.mix(m)
        if m:
            with self._on_device():
                stream = self._current_stream()
                captured = torch.cuda.is_current_stream_capturing()
                self._launch_boundary(inputs, outputs, mix, stream, captured)
        return outputs

    def _run(
        self,
        published: Published,
        launch: Callable[[], None],
        inputs: BoundaryInput,
    ) -> BoundaryOutput:
        """Launches a checked call: memory is allocated before the publish."""
        outputs = self._launcher.outputs(published.m)
        mix = self._launcher.mix(published.m)
        if published.m:
            with self._on_device():
                stream = self._current_stream()
                captured = torch.cuda.is_current_stream_capturing()
                self._publish(published, launch, stream, captured)
                self._launch_boundary(inputs, outputs, mix, stream, captured)
        return outputs

    def _publish_alone(self, published: Published, launch: Callable[[], None]) -> None:
        """Launches a checked publish without its boundary."""
        if published.m:
            with self._on_device():
                stream = self._current_stream()
                captured = torch.cuda.is_current_stream_capturing()
                self._publish(published, launch, stream, captured)

    def _publish(
        self,
        published: Published,
        launch: Callable[[], None],
        stream: torch.cuda.Stream,
        captured: bool,
    ) -> None:
        """Launches a publish, once the stream waits for the mixes of the last call."""
        if self._published is not None:
            raise RuntimeError(
                "an earlier call broke off between its publish and its boundary, and "
                "the ranks no longer agree: load the package again on all ranks"
            )
        self._wait_for_mixes(stream, captured)
        self._release(stream)
        self._published = published
        launch()

    def _launch_boundary(
        self,
        inputs: BoundaryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor,
        stream: torch.cuda.Stream,
        captured: bool,
    ) -> None:
        """Launches a boundary on the stream, and its mixes on the side stream."""
        kernel = self._launcher.boundary_kernel(mix.shape[0])
        self._launcher.boundary(kernel, inputs, outputs, mix)
        self._published = None
        self._boundary_done.record(stream)
        self._boundary_done.wait(self._side)
        self._pending = PendingMixes(
            captured,
            stream,
            (mix, inputs.scale, inputs.base, outputs.post, outputs.comb),
        )
        self._launcher.mixes(mix, inputs, outputs, self._side.cuda_stream)
        self._mixes_done.record(self._side)

    def _wait_for_mixes(self, stream: torch.cuda.Stream, captured: bool) -> None:
        """Makes the current stream wait for pending mixes, if it does not yet."""
        pending = self._pending
        if pending is None:
            return
        if captured == pending.captured:
            if pending.joined is not stream:
                self._mixes_done.wait(stream)
        elif pending.captured:
            # The capture is over: with a join in it, a replay is complete in itself;
            # without one, torch refused the graph.
            self._pending = None
        elif pending.joined is None:
            raise RuntimeError(
                "the mixes of a call before this graph capture are outstanding: call "
                "join() before the capture begins"
            )

    def _release(self, stream: torch.cuda.Stream) -> None:
        """Lets go of pending mixes, for which the stream has waited."""
        pending = self._pending
        if pending is not None and pending.stream is not stream:
            # Their memory goes back to a stream that may not have waited.
            self._record_side_stream(pending)
        self._pending = None

    def _record_side_stream(self, pending: PendingMixes) -> None:
        """Tells the allocator that the side stream may still use the tensors."""
        for tensor in pending.tensors:
            tensor.record_stream(self._side)

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream of the device; one object for as long as it stays.

        To make the object takes microseconds.
        """
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self._stream
        if stream is None or stream.cuda_stream != handle:
            stream = self._stream = torch.cuda.current_stream(self.device)
        return stream

    def _on_device(self) -> AbstractContextManager[Any]:
        """Makes the device current where it is not; that takes a while."""
        if torch.cuda.current_device() == self.device.index:
            return NOTHING
        return torch.cuda.device(self.device)

    def __del__(self) -> None:
        """Keeps memory that the side stream may still use from being reused early."""
        pending = getattr(self, "_pending", None)
        if pending is not None and not pending.captured:
            self._record_side_stream(pending)
