"""The stream beside that of the calls, on which the next mixes are computed."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Handles(NamedTuple):
    """What mixes are launched with, beside the stream of a call.

    Their host code records the first event on that stream, makes the side stream wait
    for it, and records the second behind the mixes: in native code, where each takes a
    fraction of torch's time.

    Attributes:
        boundary_done: An event.
        mixes_done: An event.
        stream: The stream of the mixes.
    """

    boundary_done: int
    mixes_done: int
    stream: int


class Turn(NamedTuple):
    """Where a call stands.

    Attributes:
        stream: Its stream.
        capture: The graph capture that it is part of; None outside of any.
    """

    stream: torch.cuda.Stream
    capture: int | None


@dataclass(slots=True)
class PendingMixes:
    """Mixes that the side stream may still be computing.

    Holding the tensors keeps the allocator from handing their memory to the stream of
    the call. ``record_stream`` on each would make every later allocation poll events.

    Attributes:
        turn: Where the call stood.
        tensors: What the mixes kernel reads and writes.
        joined: The stream that ``join()`` was last called on since.
    """

    turn: Turn
    tensors: tuple[torch.Tensor, ...]
    joined: torch.cuda.Stream | None = None


class SideStream:
    """The side stream of one object, and the mixes of its last call.

    All methods are called with the device current.

    Attributes:
        stream: The stream itself.
        handles: It and its events.
        pending: The mixes of the last call, if it is not known that they are complete.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes a stream on a device."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pending: PendingMixes | None = None
        self._device = device
        self._boundary_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._mixes_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for event in (self._boundary_done, self._mixes_done):
            event.record(self.stream)  # gives it a handle
        self.handles = Handles(
            self._boundary_done.cuda_event,
            self._mixes_done.cuda_event,
            self.stream.cuda_stream,
        )
        self._current: torch.cuda.Stream | None = None
        self._raw_current: int | None = None

    def on(self, stream: torch.cuda.Stream) -> SideStream:
        """The same events with another stream for the mixes."""
        other = copy(self)
        other.stream = stream
        other.handles = self.handles._replace(stream=stream.cuda_stream)
        return other

    def join(self) -> Turn:
        """Makes the current stream wait for pending mixes, which stay pending.

        Returns:
            Where the call that begins with this stands.

        Raises:
            RuntimeError: They were launched before the capture that is going on.
        """
        stream = self._current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        turn = Turn(stream, capture_of(stream) if capturing else None)
        if self.pending is not None:
            self._wait(self.pending, turn)
        return turn

    def hold(self, turn: Turn, tensors: tuple[torch.Tensor, ...]) -> None:
        """Holds what the next mixes use, and no longer what the last did.

        Args:
            turn: What ``join`` gave before.
            tensors: What the mixes read and write.
        """
        self._release(turn.stream)
        self.pending = PendingMixes(turn, tensors)

    def let_go(self) -> None:
        """Holds no longer what the last mixes use, once the stream waits for them."""
        if self.pending is not None:
            self._release(self._current_stream())

    def _release(self, stream: torch.cuda.Stream) -> None:
        """Lets go of pending mixes, given the current stream."""
        if self.pending is not None and self.pending.turn.stream is not stream:
            # Their memory goes back to a stream that may not have waited.
            self._record(self.pending)
        self.pending = None

    def _wait(self, pending: PendingMixes, turn: Turn) -> None:
        """Makes the current stream wait for pending mixes, if it does not yet."""
        joined, before = pending.joined, pending.turn.capture
        if turn.capture == before:
            if joined is not turn.stream:
                self._mixes_done.wait(turn.stream)
        elif before is not None and (joined is not None or turn.capture is None):
            # That capture is over: with a join in it, a replay is complete in itself;
            # without one, torch refused the graph.
            self.pending = None
            return
        elif joined is None:
            raise RuntimeError(
                "the mixes of a call before this graph capture are outstanding: call "
                "join() before the capture begins"
            )
        pending.joined = turn.stream

    def _record(self, pending: PendingMixes) -> None:
        """Tells the allocator that the side stream may still use the tensors."""
        for tensor in pending.tensors:
            tensor.record_stream(self.stream)

    def _current_stream(self) -> torch.cuda.Stream:
        """The current stream of the device; one object for as long as it stays.

        To make the object takes microseconds.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if self._current is None or handle != self._raw_current:
            self._current = torch.cuda.current_stream(self._device)
            self._raw_current = handle
        return self._current

    def __del__(self) -> None:
        """Keeps memory that the side stream may still use from being reused early."""
        pending = getattr(self, "pending", None)
        if pending is not None and pending.turn.capture is None:
            self._record(pending)


def capture_of(stream: torch.cuda.Stream) -> int:
    """The number of the capture that a stream is in.

    No other capture of the process has it. Where the driver does not tell, all captures
    have the same.
    """
    from cuda.bindings import driver

    # That of CUDA 12 without a version refuses streams with programmatic launches.
    query = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
    try:
        status, _, number, *_ = query(driver.CUstream(stream.cuda_stream))
    except RuntimeError:  # an old driver lacks it
        return 0
    return 0 if int(status) else int(number)
