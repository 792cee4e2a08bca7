"""First launches: modules load then, which a graph capture would refuse."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .arguments import BoundaryInput, EntryInput, ExitInput, RoutedInput
from .dtypes import DTYPES
from .launcher import Launcher
from .side_stream import SideStream

DEADLINE = 60.0  # seconds: the kernels take microseconds, and ranks come together
POLL = 1e-3  # seconds


class Steps:
    """What was launched on a stream, and how far its GPU has come with it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Takes the stream."""
        self._stream = stream
        self._done: list[tuple[str, torch.cuda.Event]] = []

    def launched(self, step: str) -> None:
        """Marks the end of a step on the stream, by its name for messages."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._done.append((step, event))

    def wait(self) -> None:
        """Waits for all steps.

        To synchronize would never return where another rank failed before its publish.

        Raises:
            RuntimeError: A step did not end within ``DEADLINE``.
        """
        end = time.monotonic() + DEADLINE
        for step, event in self._done:
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"{step} did not end within {DEADLINE:g} s: it waits for a "
                        "rank that failed or is gone, and cannot be stopped. This "
                        "process must exit, since its GPU is stuck"
                    )
                time.sleep(POLL)


def warm_up_alone(launcher: Launcher) -> None:
    """Launches every kernel once without any other rank.

    Args:
        launcher: Kernels with a loopback mailbox, which this leaves in disorder.
    """
    for turn in range(len(publishes(launcher))):
        launch_publish(launcher, turn)
    side = side_of(launcher)
    for turn in range(consumers(launcher)):
        # +0.0 is no sentinel: everything has arrived.
        launcher.mailbox.buffer.zero_()
        launch_consumer(launcher, turn, side)
    for kernel in launcher.publishing.values():
        launcher.mailbox.buffer.zero_()
        launch_call(launcher, kernel, None, side)
    for (_, *variant), kernel in launcher.finalizing.items():
        launcher.mailbox.buffer.zero_()
        launch_call(launcher, kernel, routed_zeros(launcher, *variant), side)
    launch_entry(launcher, side)
    launch_mixes(launcher, side)
    torch.cuda.synchronize()


def warm_up_together(launchers: Sequence[Launcher]) -> None:
    """Launches every kernel once in whole boundaries: collective over the ranks.

    A transport that does not work fails here instead of in service.

    Args:
        launchers: This process's rank, or all ranks where one device plays them; these
            have no boundaries that publish themselves.

    Raises:
        RuntimeError: A kernel did not end, since it waits for another rank: the process
            must exit.
    """
    try:
        launch_together(launchers)
    except BaseException:
        # Kernels may be waiting for a rank for ever, and to free what they use would
        # wait for them: it outlives even the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(launchers)))
        raise


def launch_together(launchers: Sequence[Launcher]) -> None:
    """Does what ``warm_up_together`` says."""
    turns = max(len(publishes(launchers[0])), consumers(launchers[0]))
    side = side_of(launchers[0])
    steps = Steps(torch.cuda.current_stream())
    for turn in range(turns):
        for launcher in launchers:
            launch_publish(launcher, turn)
        for launcher in launchers:
            launch_consumer(launcher, turn, side)
        steps.launched(consumer_name(launchers[0], turn))
    for launcher in launchers:
        for name, kernel in launcher.publishing.items():
            launch_call(launcher, kernel, None, side)
            steps.launched(f"the publishing boundary of token group {name}")
        for (name, *variant), kernel in launcher.finalizing.items():
            launch_call(launcher, kernel, routed_zeros(launcher, *variant), side)
            steps.launched(f"the finalizing boundary of token group {name}")
        launch_entry(launcher, side)
        launch_mixes(launcher, side)
    steps.launched("the entry and the mixes")
    steps.wait()


def side_of(launcher: Launcher) -> SideStream | None:
    """What the mixes kernel is given to be launched on the current stream."""
    if launcher.constants.MIXES == "tail":
        return None
    side = SideStream(launcher.mailbox.buffer.device)
    return side.on(torch.cuda.current_stream())


def publishes(launcher: Launcher) -> list[tuple[torch.dtype, bool] | None]:
    """The variants of publish: None is the plain one, the others are finalizes."""
    return [None, *launcher.finalizes]


def launch_publish(launcher: Launcher, turn: int) -> None:
    """Launches publish variant ``turn``, round and round, on a token of zeros."""
    variants = publishes(launcher)
    variant = variants[turn % len(variants)]
    if variant is None:
        launcher.publish(zeros_of(launcher)["hidden"])
    else:
        launcher.finalize(routed_zeros(launcher, *variant), launcher.closed_rows(1))


def routed_zeros(
    launcher: Launcher, dtype: torch.dtype, shared_expert: bool
) -> RoutedInput:
    """A token without experts, for a variant of finalize."""
    c = launcher.constants
    zeros = partial(torch.zeros, device=launcher.mailbox.buffer.device)
    row = zeros((1, c.HIDDEN), dtype=DTYPES[c.ACTIVATION])
    weights = zeros((1, c.TOP_K), dtype=dtype)
    absent = zeros((1, c.TOP_K), dtype=torch.int32) - 1
    return RoutedInput(row, weights, absent, row if shared_expert else None)


def consumers(launcher: Launcher) -> int:
    """Kernels that consume the mailbox: the boundaries, and the exit where there is."""
    return len(launcher.boundaries) + (launcher.constants.EXIT is not None)


def consumer_name(launcher: Launcher, turn: int) -> str:
    """What messages call consumer ``turn``, round and round."""
    groups = [f"the boundary of token group {name}" for name in launcher.boundaries]
    return [*groups, "the exit"][turn % consumers(launcher)]


def launch_consumer(launcher: Launcher, turn: int, side: SideStream | None) -> None:
    """Launches consumer ``turn``, round and round, and a boundary's mixes, on zeros."""
    kernels = list(launcher.boundaries.values())
    turn %= consumers(launcher)
    given = zeros_of(launcher)
    if turn == len(kernels):
        inputs = ExitInput(**{name: given[name] for name in ExitInput._fields})
        launcher.exit(inputs, launcher.exit_output(1))
        return
    outputs, mix = launcher.outputs(1), launcher.mix(1)
    boundary = BoundaryInput(**{name: given[name] for name in BoundaryInput._fields})
    launcher.boundary(kernels[turn], boundary, outputs, mix, side)


def launch_call(
    launcher: Launcher,
    kernel: Any,
    routed: RoutedInput | None,
    side: SideStream | None,
) -> None:
    """Launches a boundary that publishes its own rows, and its mixes, on zeros.

    Args:
        launcher: Kernels with a mailbox.
        kernel: The boundary.
        routed: The sum that it closes itself, if it does.
        side: What the mixes are launched with.
    """
    given = zeros_of(launcher)
    x = given["hidden"]
    rows = launcher.published(x) if routed is None else launcher.closed(routed)
    outputs, mix = launcher.outputs(1), launcher.mix(1)
    boundary = BoundaryInput(**{name: given[name] for name in BoundaryInput._fields})
    launcher.call(kernel, rows, boundary, outputs, mix, side)


def launch_mixes(launcher: Launcher, side: SideStream | None) -> None:
    """Launches the mixes alone on zeros, if they have a kernel."""
    if launcher.has_mixes:
        given = zeros_of(launcher)
        inputs = EntryInput(**{name: given[name] for name in EntryInput._fields})
        mix = launcher.entry_mix(1).zero_()
        launcher.mixes(mix, inputs, launcher.outputs(1), side)


def launch_entry(launcher: Launcher, side: SideStream | None) -> None:
    """Launches the entry on zeros, if there is one."""
    if not launcher.constants.ENTRY:
        return
    given = zeros_of(launcher)
    inputs = EntryInput(**{name: given[name] for name in EntryInput._fields})
    launcher.entry(inputs, launcher.outputs(1), launcher.entry_mix(1))


def zeros_of(launcher: Launcher) -> dict[str, torch.Tensor]:
    """Every argument of the boundaries and the ends by name, one token of zeros."""
    c = launcher.constants
    activation, fn_weight = DTYPES[c.ACTIVATION], DTYPES[c.FN_WEIGHT]
    fp32 = torch.float32
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "hidden": ((1, c.HIDDEN), activation),
        "residual": ((1, c.HC, c.HIDDEN), activation),
        "post": ((1, c.HC, 1), fp32),
        "comb": ((1, c.HC, c.HC), fp32),
        "fn": ((c.MIX, c.HC * c.HIDDEN), fn_weight),
        "scale": ((3,), fp32),
        "base": ((c.MIX,), fp32),
        "norm_weight": ((c.HIDDEN,), activation),
        "pre": ((1, c.HC), fp32),
        "head_fn": ((c.HC, c.HC * c.HIDDEN), fn_weight),
        "head_scale": ((1,), fp32),
        "head_base": ((c.HC,), fp32),
    }
    device = launcher.mailbox.buffer.device
    return {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }
