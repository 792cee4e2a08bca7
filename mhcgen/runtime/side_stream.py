"""The stream beside that of the calls, on which the next mixes are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


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


class SideStream:
    """The side stream of one object, and the mixes of its last call.

    All methods are called with the device current.

    Attributes:
        stream: The stream itself.
        pending: The mixes of the last call, if it is not known that they are complete.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes a stream on a device."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pending: PendingMixes | None = None
        self._device = device
        self._boundary_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._mixes_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._current: torch.cuda.Stream | None = None

    def launch(
        self, mixes: Callable[[int], None], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Launches mixes behind what the current stream does now.

        Args:
            mixes: Launches them on a stream, given as a handle.
            tensors: What they read and write.
        """
        stream = self._current_stream()
        self._boundary_done.record(stream)
        self._boundary_done.wait(self.stream)
        captured = torch.cuda.is_current_stream_capturing()
        self.pending = PendingMixes(captured, stream, tensors)
        mixes(self.stream.cuda_stream)
        self._mixes_done.record(self.stream)

    def begin(self) -> None:
        """Makes the current stream wait for pending mixes, and lets go of them.

        Raises:
            RuntimeError: They were launched before the capture that is going on.
        """
        if self.pending is None:
            return
        stream = self._current_stream()
        self._wait(stream)
        if self.pending is not None and self.pending.stream is not stream:
            # Their memory goes back to a stream that may not have waited.
            self._record(self.pending)
        self.pending = None

    def join(self) -> None:
        """Makes the current stream wait for pending mixes, which stay pending.

        Raises:
            RuntimeError: They were launched before the capture that is going on.
        """
        if self.pending is None:
            return
        stream = self._current_stream()
        self._wait(stream)
        if self.pending is not None:
            self.pending.joined = stream

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Makes the current stream wait for pending mixes, if it does not yet."""
        pending = self.pending
        assert pending is not None
        captured = torch.cuda.is_current_stream_capturing()
        if captured == pending.captured:
            if pending.joined is not stream:
                self._mixes_done.wait(stream)
        elif pending.captured:
            # The capture is over: with a join in it, a replay is complete in itself;
            # without one, torch refused the graph.
            self.pending = None
        elif pending.joined is None:
            raise RuntimeError(
                "the mixes of a call before this graph capture are outstanding: call "
                "join() before the capture begins"
            )

    def _record(self, pending: PendingMixes) -> None:
        """Tells the allocator that the side stream may still use the tensors."""
        for tensor in pending.tensors:
            tensor.record_stream(self.stream)

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream of the device; one object for as long as it stays.

        To make the object takes microseconds.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._current
        if stream is None or stream.cuda_stream != handle:
            stream = self._current = torch.cuda.current_stream(self._device)
        return stream

    def __del__(self) -> None:
        """Keeps memory that the side stream may still use from being reused early."""
        pending = getattr(self, "pending", None)
        if pending is not None and not pending.captured:
            self._record(pending)
