"""What ranks have in common: all in one process, or a process each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mhcgen.verify.report import Outcome


def world_size() -> int:
    """The processes that torch.distributed.run started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank among them."""
    return int(os.environ.get("RANK", "0"))


class Together(Protocol):
    """What the ranks of a package have to agree on."""

    def step(self, name: str, attempt: Callable[[], None]) -> None:
        """Does something on every rank.

        Raises:
            RuntimeError: On every rank, if it failed on any.
        """

    def first(self, rows: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank."""

    def merged(self, outcome: Outcome) -> Outcome:
        """What became of a case on all ranks."""


class Alone:
    """One process that plays all ranks."""

    def step(self, name: str, attempt: Callable[[], None]) -> None:
        """Does something."""
        attempt()

    def first(self, rows: Tensor) -> Tensor:
        """The tensor itself."""
        return rows

    def merged(self, outcome: Outcome) -> Outcome:
        """The outcome itself."""
        return outcome


class Group:
    """A process a rank. What they tell each other does not touch their GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Takes a group for tensors on CPUs."""
        self.group = group

    def step(self, name: str, attempt: Callable[[], None]) -> None:
        """Does something on every rank, and waits for all."""
        from mhcgen.runtime.mailbox import agree

        agree(self.group, name, attempt)

    def first(self, rows: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank."""
        content = rows.contiguous().view(torch.uint8).clone()
        dist.broadcast(content, 0, group=self.group)
        return content.view(rows.dtype)

    def merged(self, outcome: Outcome) -> Outcome:
        """The largest errors of all ranks, and every problem once."""
        gathered: list[Outcome] = [outcome] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, outcome, group=self.group)
        merged = Outcome(outcome.case)
        for rank, one in enumerate(gathered):
            merged.errors.include(one.errors)
            for name, errors in one.ends.items():
                merged.end(name).include(errors)
            problems = list(one.problems)
            if not all(errors.ok for errors in one.by_kernel.values()):
                problems.append(f"rank {rank} has wrong elements, or too large errors")
            merged.problems += [p for p in problems if p not in merged.problems]
        return merged


@contextmanager
def started(device: torch.device) -> Iterator[Together]:
    """Starts the process group that torch.distributed.run asks for, if it does."""
    if world_size() == 1:
        yield Alone()
        return
    is_mine = not dist.is_initialized()
    if is_mine:
        dist.init_process_group("nccl", device_id=device)
    try:
        yield Group(dist.new_group(backend="gloo"))
    finally:
        if is_mine:
            dist.destroy_process_group()
