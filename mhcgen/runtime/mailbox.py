"""The mailbox: symmetric memory [GENERATIONS, TP, CAPACITY, HIDDEN] and its state."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .dtypes import DTYPES

logger = logging.getLogger(__name__)

LOCAL = "local"  # the transport of one rank alone
SENTINEL_BITS = -0x8000  # -0.0, as a signed 16-bit integer
ALIGNMENT = 16

Result = TypeVar("Result")


@dataclass(frozen=True)
class Mailbox:
    """One rank's end of the all-reduce.

    Attributes:
        rank: This rank.
        transport: ``multicast`` or ``unicast``; ``local`` for one rank alone, whose
            buffer, addresses and state are empty.
        buffer: The local mailbox, [GENERATIONS, TP, CAPACITY, HIDDEN] activations.
        addresses: [1] or [TP] int64: where publish stores, one multicast address or one
            address a rank.
        state: [2] int32: the generation, and the arrivals of the launch under way, of
            blocks at a boundary, of clusters at an exit.
        keep_alive: What must live as long as the addresses are used.
    """

    rank: int
    transport: str
    buffer: torch.Tensor
    addresses: torch.Tensor
    state: torch.Tensor
    keep_alive: tuple[Any, ...] = ()


def mailbox_shape(constants: ModuleType) -> tuple[int, int, int, int]:
    """The shape of a package's mailbox."""
    return (
        constants.GENERATIONS,
        constants.TP,
        constants.CAPACITY,
        constants.HIDDEN,
    )


def arm(buffer: torch.Tensor) -> None:
    """Fills a mailbox with the sentinel."""
    buffer.view(torch.int16).fill_(SENTINEL_BITS)


def agree(
    group: dist.ProcessGroup, step: str, attempt: Callable[[], Result]
) -> list[Result]:
    """Runs a step on every rank and gathers the results: all succeed or all raise.

    A rank that raised before a collective would leave the others waiting in it.
    Collective over the group, in the same order as its other steps; processes outside
    of it take no part. No GPU does, so that a rank whose GPU is stuck can say so.

    Args:
        group: The ranks, with any backend.
        step: What is tried, for messages.
        attempt: Returns this rank's result, which must be picklable.

    Raises:
        RuntimeError: On every rank, if the step failed on any; each failure is named.
    """
    try:
        mine: tuple[Result | None, str | None] = (attempt(), None)
        cause = None
    except Exception as error:
        mine = (None, f"{type(error).__name__}: {error}")
        cause = error
    votes = gather(group, mine)
    failures = [
        f"rank {rank}: {failure}"
        for rank, (_, failure) in enumerate(votes)
        if failure is not None
    ]
    if failures:
        try:
            raise RuntimeError(f"{step} failed\n" + "\n".join(failures)) from cause
        finally:
            # The traceback holds this frame, and so the group: let go of both.
            del cause
    return [result for result, _ in votes]


def gather(group: dist.ProcessGroup, vote: object) -> list[Any]:
    """What each rank gives, in rank order, by way of CPUs: collective over the group.

    Where the group has GPUs only, by way of the store that it was made with. A second
    group for CPUs would not do: its making is collective over all processes, or takes
    its name from how many groups each process is in, which ranks may differ in.
    """
    size = dist.get_world_size(group)
    if "cpu:" in dist.get_backend_config(group):
        votes: list[Any] = [None] * size
        dist.all_gather_object(votes, vote, group=group)
        return votes
    store = distributed_c10d._get_process_group_store(group)
    rank = dist.get_rank(group)
    # Counted in the store by each rank: all vote equally often.
    turn = store.add(f"mhcgen/votes of rank {rank}", 1)
    # Bytes will do, whatever the signature says.
    store.set(f"mhcgen/vote {turn} of rank {rank}", pickle.dumps(vote))  # type: ignore[arg-type]
    return [
        pickle.loads(store.get(f"mhcgen/vote {turn} of rank {peer}"))
        for peer in range(size)
    ]


def choose_transport(
    requested: str, transports: Sequence[str], multicast_everywhere: bool
) -> tuple[str, str]:
    """The transport to use and why.

    Args:
        requested: ``auto``, ``multicast`` or ``unicast``.
        transports: Those that the package has kernels for.
        multicast_everywhere: Whether every rank has a multicast mapping.

    Raises:
        ValueError: The request is unknown, not in the package, or cannot be met.
    """
    if requested not in ("auto", "multicast", "unicast"):
        raise ValueError(
            f"transport is {requested!r}; it must be 'auto', 'multicast' or 'unicast'"
        )
    if requested not in ("auto", *transports):
        raise ValueError(
            f"transport is {requested!r}, and this package has kernels for "
            f"{', '.join(transports)} only: add it to parallel.transports of the spec"
        )
    if requested == "unicast":
        return requested, "as requested"
    if requested == "multicast":
        if not multicast_everywhere:
            raise ValueError(
                "transport is 'multicast', and the mailbox has no multicast mapping on "
                "every rank: use 'auto' or 'unicast'"
            )
        return requested, "as requested"
    if "multicast" in transports and multicast_everywhere:
        return "multicast", "every rank has a multicast mapping"
    if "unicast" in transports:
        missing = "is not built" if "multicast" not in transports else "has no mapping"
        return "unicast", f"multicast {missing}"
    raise ValueError(
        "this package has multicast kernels only, and the mailbox has no multicast "
        "mapping on every rank: add unicast to parallel.transports of the spec"
    )


def rendezvous(
    constants: ModuleType,
    group: dist.ProcessGroup,
    device: torch.device,
    transport: str,
) -> Mailbox:
    """Allocates the mailbox in symmetric memory and meets the other ranks: collective.

    Args:
        constants: The package's ``constants`` module.
        group: The TP ranks, in rank order.
        device: This rank's GPU.
        transport: ``auto``, ``multicast`` or ``unicast``.

    Raises:
        RuntimeError: On every rank, if any rank failed.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    shape, dtype = mailbox_shape(constants), DTYPES[constants.ACTIVATION]
    rank = dist.get_rank(group)
    allocated: list[torch.Tensor] = []

    def allocate() -> None:
        buffer = symmetric_memory.empty(shape, dtype=dtype, device=device)
        # Symmetric memory comes with anything in it.
        arm(buffer)
        torch.cuda.synchronize(device)
        allocated.append(buffer)

    agree(group, "allocation of the mailbox", allocate)
    buffer = allocated[0]

    def map_peers() -> int:
        # In this step: the others learn of a rank that fails here once it has met them.
        handle = symmetric_memory.rendezvous(buffer, group)
        peers = [
            buffer if peer == rank else remote_tensor(handle, peer, buffer)
            for peer in range(constants.TP)
        ]
        multicast = int(handle.multicast_ptr or 0)
        for address in (*(peer.data_ptr() for peer in peers), multicast):
            if address % ALIGNMENT:
                raise RuntimeError(
                    f"mailbox address {address:#x} is no multiple of {ALIGNMENT}"
                )
        handles.append(handle)
        local.extend(peers)
        return multicast

    handles: list[Any] = []
    local: list[torch.Tensor] = []
    multicast_addresses = agree(group, "mapping of the peers' mailboxes", map_peers)

    def connect() -> str:
        chosen, reason = choose_transport(
            transport, constants.TRANSPORTS, all(multicast_addresses)
        )
        logger.info("rank %d: %s transport (%s)", rank, chosen, reason)
        multicast = chosen == "multicast"
        addresses = (
            [multicast_addresses[rank]]
            if multicast
            else [peer.data_ptr() for peer in local]
        )
        mailboxes.append(
            Mailbox(
                rank=rank,
                transport=chosen,
                buffer=buffer,
                addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
                state=torch.zeros(2, dtype=torch.int32, device=device),
                keep_alive=(*handles, local),
            )
        )
        torch.cuda.synchronize(device)
        return chosen

    mailboxes: list[Mailbox] = []
    # Every mailbox is armed and synchronized before this vote is over, and so before
    # anybody publishes.
    agree(group, "choice of the transport", connect)
    return mailboxes[0]


def remote_tensor(handle: Any, peer: int, local: torch.Tensor) -> torch.Tensor:
    """A peer's mailbox as a tensor here; its address includes the handle's offset."""
    remote: torch.Tensor = handle.get_remote_tensor(peer, local.shape, local.dtype)
    return remote


def local(device: torch.device) -> Mailbox:
    """What one rank alone has in place of a mailbox."""
    empty = torch.empty(0, device=device)
    return Mailbox(rank=0, transport=LOCAL, buffer=empty, addresses=empty, state=empty)


def emulated(constants: ModuleType, device: torch.device) -> list[Mailbox]:
    """The mailboxes of all ranks on one device, with unicast between them."""
    if constants.TP == 1:
        return [local(device)]
    shape, dtype = mailbox_shape(constants), DTYPES[constants.ACTIVATION]
    buffers = [
        torch.empty(shape, dtype=dtype, device=device) for _ in range(constants.TP)
    ]
    for buffer in buffers:
        arm(buffer)
    addresses = torch.tensor(
        [buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device
    )
    torch.cuda.synchronize(device)
    return [
        Mailbox(
            rank=rank,
            transport="unicast",
            buffer=buffer,
            addresses=addresses,
            state=torch.zeros(2, dtype=torch.int32, device=device),
            keep_alive=tuple(buffers),
        )
        for rank, buffer in enumerate(buffers)
    ]


def loopback(constants: ModuleType, device: torch.device) -> Mailbox:
    """A mailbox whose one rank plays all: it stores its rows into every rank's slots.

    One process then runs whole boundaries, with the traffic of all ranks in its own
    memory. For measurements.
    """
    shape, dtype = mailbox_shape(constants), DTYPES[constants.ACTIVATION]
    buffer = torch.empty(shape, dtype=dtype, device=device)
    arm(buffer)
    slot_bytes = constants.CAPACITY * constants.HIDDEN * buffer.element_size()
    addresses = [buffer.data_ptr() + slot_bytes * rank for rank in range(constants.TP)]
    torch.cuda.synchronize(device)
    return Mailbox(
        rank=0,
        transport="unicast",
        buffer=buffer,
        addresses=torch.tensor(addresses, dtype=torch.int64, device=device),
        state=torch.zeros(2, dtype=torch.int32, device=device),
    )
