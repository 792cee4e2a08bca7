"""First launches: modules load then, which a graph capture would refuse."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .arguments import BoundaryInput, RoutedInput
from .launcher import Launcher


def warm_up_alone(launcher: Launcher) -> None:
    """Launches every kernel once without any other rank.

    Args:
        launcher: Kernels with a loopback mailbox, which this leaves in disorder.
    """
    for turn in range(len(publishes(launcher))):
        launch_publish(launcher, turn)
    stream = torch.cuda.current_stream()
    for turn in range(len(launcher.boundaries)):
        # +0.0 is no sentinel: everything has arrived.
        launcher.mailbox.buffer.zero_()
        launch_boundary(launcher, turn, stream)
    torch.cuda.synchronize()


def warm_up_together(launchers: Sequence[Launcher]) -> None:
    """Launches every kernel once in whole boundaries: collective over the ranks.

    A transport that does not work fails here instead of in service.

    Args:
        launchers: This process's rank, or all ranks where one device plays them.
    """
    turns = max(len(publishes(launchers[0])), len(launchers[0].boundaries))
    stream = torch.cuda.current_stream()
    for turn in range(turns):
        for launcher in launchers:
            launch_publish(launcher, turn)
        for launcher in launchers:
            launch_boundary(launcher, turn, stream)
    torch.cuda.synchronize()


def publishes(launcher: Launcher) -> list[tuple[torch.dtype, bool] | None]:
    """The variants of publish: None is the plain one, the others are finalizes."""
    return [None, *launcher.finalizes]


def launch_publish(launcher: Launcher, turn: int) -> None:
    """Launches publish variant ``turn``, round and round, on a token of zeros."""
    c = launcher.constants
    zeros = partial(torch.zeros, device=launcher.mailbox.buffer.device)
    row = zeros((1, c.HIDDEN), dtype=torch.bfloat16)
    variants = publishes(launcher)
    variant = variants[turn % len(variants)]
    if variant is None:
        launcher.publish(row)
        return
    dtype, shared = variant
    weights = zeros((1, c.TOP_K), dtype=dtype)
    absent = zeros((1, c.TOP_K), dtype=torch.int32) - 1
    launcher.finalize(RoutedInput(row, weights, absent, row if shared else None))


def launch_boundary(launcher: Launcher, turn: int, stream: torch.cuda.Stream) -> None:
    """Launches boundary ``turn``, round and round, and its mixes, on zeros."""
    c = launcher.constants
    zeros = partial(torch.zeros, device=launcher.mailbox.buffer.device)
    bf16, fp32 = torch.bfloat16, torch.float32
    inputs = BoundaryInput(
        residual=zeros((1, c.HC, c.HIDDEN), dtype=bf16),
        post=zeros((1, c.HC, 1), dtype=fp32),
        comb=zeros((1, c.HC, c.HC), dtype=fp32),
        fn=zeros((c.MIX, c.HC * c.HIDDEN), dtype=bf16),
        scale=zeros((3,), dtype=fp32),
        base=zeros((c.MIX,), dtype=fp32),
        norm_weight=zeros((c.HIDDEN,), dtype=bf16),
    )
    kernels = list(launcher.boundaries.values())
    outputs, mix = launcher.outputs(1), launcher.mix(1)
    launcher.boundary(kernels[turn % len(kernels)], inputs, outputs, mix)
    launcher.mixes(mix, inputs, outputs, stream.cuda_stream)
