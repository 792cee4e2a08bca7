"""The GPUs of a run: one that plays all ranks, or one a process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

import torch
import torch.distributed as dist

from mhcgen import __version__
from mhcgen.errors import MhcgenError
from mhcgen.runtime.mailbox import agree

LIBRARIES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")

Value = TypeVar("Value")


@dataclass(frozen=True)
class Machine:
    """What a run has.

    Attributes:
        rank: This process.
        ranks: Processes, one a GPU.
        device: This process's GPU.
    """

    rank: int
    ranks: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reports."""
        return self.rank == 0

    def together(self, step: str, attempt: Callable[[], Value]) -> Value:
        """Tries something on all ranks: it succeeds on all or raises on all."""
        if self.ranks == 1:
            return attempt()
        results: list[Value] = []
        assert dist.group.WORLD is not None
        agree(dist.group.WORLD, step, lambda: results.append(attempt()))
        return results[0]

    def versions(self) -> dict[str, str]:
        """The releases of what takes part."""
        found = {"mhcgen": __version__, "torch": torch.__version__}
        found["cuda"] = str(torch.version.cuda)
        if self.ranks > 1:
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["nccl"] = ".".join(map(str, version))
        found["driver"] = driver_version()
        for name in LIBRARIES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found


def driver_version() -> str:
    """The release of the GPU driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown: nvidia-smi does not tell"
    return found.stdout.split()[0]


@contextmanager
def machine(what: str) -> Iterator[Machine]:
    """Joins the processes that torch.distributed.run started, if it did.

    Args:
        what: What needs the GPUs, for messages.

    Raises:
        MhcgenError: There is no GPU, or fewer than processes.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    if not gpus:
        raise MhcgenError(f"{what} needs a GPU, and no CUDA device is available")
    if local >= gpus:
        raise MhcgenError(
            f"{what} needs a GPU for each process, and process {local} of this machine "
            f"finds {gpus}: start torch.distributed.run with --nproc-per-node {gpus}"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    if ranks == 1:
        yield Machine(0, 1, device)
        return
    # NCCL guards graphs against collectives outside of them, which more than doubles a
    # small all-reduce's time. There are none here: time NCCL at its best.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    dist.init_process_group("nccl", device_id=device)
    yield Machine(dist.get_rank(), ranks, device)
    # Nobody leaves while others may still read its memory. After an error the group
    # stays as it is: to destroy it may wait for ever, and nobody would see the error.
    dist.barrier()
    dist.destroy_process_group()
