"""Stand-ins for what the host side of a package needs of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from mhcgen.runtime import mailbox


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

        return SimpleNamespace(record=record, wait=wait, query=query)

    def recorded_on(self, stream: Any) -> None:
        self.recorded += 1
        assert stream.cuda_stream == 99

    def kernel(self, name: str) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.log.append(name)
            self.given[name] = arguments

        return launch

    def done(self) -> list[str]:
        """What was done since the last time."""
        log, self.log[:] = list(self.log), []
        return log


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
        buffer=torch.empty(mailbox.mailbox_shape(constants), dtype=torch.bfloat16),
        addresses=torch.zeros(constants.TP, dtype=torch.int64),
        state=torch.zeros(2, dtype=torch.int32),
    )
