"""Stand-ins for what the host side of a package needs of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from mhcgen.runtime import mailbox
from mhcgen.runtime.dtypes import DTYPES
from mhcgen.runtime.side_stream import Handles

TYPES = {
    BFloat16: "bfloat16",
    Float16: "float16",
    Float32: "float32",
    Int32: "int32",
    Int64: "int64",
}


class Machine:
    """Stand-ins for streams, events and kernels, and what was done, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.handle = 0
        self.capturing = False
        self.capture = 1  # the number of the capture
        self.stuck: str | None = None  # the kernel that never ends
        self.made = 0
        self.recorded = 0
        self.given: dict[str, tuple[Any, ...]] = {}
        self.events: dict[int, Any] = {}

    def stream(self, handle: int) -> Any:
        self.made += 1
        return SimpleNamespace(cuda_stream=handle)

    def event(self) -> Any:
        name = f"event {self.made}"
        self.made += 1

        behind: list[str] = []

        def record(stream: Any) -> None:
            behind[:] = self.log
            self.log.append(f"record {name} on {stream.cuda_stream}")

        def wait(stream: Any) -> None:
            self.log.append(f"{stream.cuda_stream} waits for {name}")

        def query() -> bool:
            return self.stuck not in behind

        handle = 1000 + len(self.events)
        self.events[handle] = SimpleNamespace(
            record=record, wait=wait, query=query, cuda_event=handle
        )
        return self.events[handle]

    def recorded_on(self, stream: Any) -> None:
        self.recorded += 1
        assert stream.cuda_stream == 99

    def kernel(self, name: str, takes: Sequence[Any] = ()) -> Callable[..., None]:
        """A kernel that refuses what it is not compiled for, if that is told."""

        def launch(*arguments: Any) -> None:
            if takes:
                refuse(arguments, takes)
            self.given[name] = arguments
            beside = [each for each in arguments[-3:] if isinstance(each, int)]
            if name != "mixes" or not beside:
                self.log.append(name)
            if len(beside) == len(Handles._fields) and any(beside):
                self._launch_mixes(*beside)

        return launch

    def _launch_mixes(self, before: int, after: int, stream: int) -> None:
        """What the host code of the mixes does: see templates/package/mixes.py."""
        side = SimpleNamespace(cuda_stream=stream)
        self.events[before].record(SimpleNamespace(cuda_stream=self.handle))
        self.events[before].wait(side)
        self.log.append("mixes")
        self.events[after].record(side)

    def done(self) -> list[str]:
        """What was done since the last time."""
        log, self.log[:] = list(self.log), []
        return log


def refuse(arguments: Sequence[Any], takes: Sequence[Any]) -> None:
    """Refuses what a compiled kernel would, as it does: before any launch.

    Args:
        arguments: What is given.
        takes: What the kernel says that it is compiled for, and its streams.
    """
    sizes: dict[int, int] = {}  # by the identity of the symbol
    for place, (argument, stand_in) in enumerate(zip(arguments, takes, strict=False)):
        where = f"argument #{place}"
        if stand_in is None or not hasattr(stand_in, "shape"):
            if not isinstance(argument, type(None) if stand_in is None else int):
                raise TypeError(f"Mismatched type on {where}")
            continue
        if not hasattr(argument, "data_ptr") and not hasattr(argument, "dtype"):
            raise TypeError(f"Mismatched type on {where}, expected Tensor")
        if not is_taken(argument.dtype, stand_in.element_type):
            raise ValueError(f"Mismatched dtype on {where}")
        if len(argument.shape) != len(stand_in.shape):
            raise ValueError(f"Mismatched ndim on {where}")
        for size, expected in zip(argument.shape, stand_in.shape, strict=True):
            known = expected
            if not isinstance(expected, int):
                known = sizes.setdefault(id(expected), size)
            if size != known:
                raise ValueError(f"Mismatched shape on {where}")
        if not isinstance(argument, torch.Tensor):
            continue  # converted once, not at each launch
        if argument.device.type != "cpu":
            raise ValueError(f"Mismatched device on {where}")
        if not argument.is_contiguous():
            raise ValueError(f"Mismatched strides on {where}")
        if argument.data_ptr() % 16:
            raise ValueError(f"Misaligned Tensor data on {where}")


def is_taken(given: Any, element_type: Any) -> bool:
    """Whether a compiled kernel takes a type, of torch or of TVM, for its own.

    Integers of one width are the same to it, signed or not.
    """
    return str(given).rpartition(".")[2].removeprefix("u") == TYPES[element_type]


def machine_in(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts a machine's stand-ins in the place of torch's streams and events."""
    machine = Machine()
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device: machine.stream(99))
    monkeypatch.setattr(cuda, "Event", machine.event)
    monkeypatch.setattr(cuda, "current_device", lambda: None)
    monkeypatch.setattr(
        cuda, "current_stream", lambda device=None: machine.stream(machine.handle)
    )
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: machine.capturing)
    for name in ("cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3"):
        monkeypatch.setattr(
            driver,
            name,
            lambda stream: (driver.CUresult(0), None, machine.capture, None),
            raising=False,
        )
    monkeypatch.setattr(
        torch._C,
        "_cuda_getCurrentRawStream",
        lambda index: machine.handle,
        raising=False,
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, side: machine.recorded_on(side)
    )
    return machine


def mailbox_of(constants: Any) -> mailbox.Mailbox:
    if constants.TP == 1:
        return mailbox.local(torch.device("cpu"))
    return mailbox.Mailbox(
        rank=0,
        transport="unicast",
        buffer=torch.empty(
            mailbox.mailbox_shape(constants), dtype=DTYPES[constants.ACTIVATION]
        ),
        addresses=torch.zeros(constants.TP, dtype=torch.int64),
        state=torch.zeros(2, dtype=torch.int32),
    )
