"""The floor: one launch that publishes, polls, sums and stores, and nothing else.

No boundary over a mailbox is faster than the all-reduce inside of it. The kernel is
made of a generated package's own steps and helpers, so it has the package's shape,
transport and protocol.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cutlass import Int32, Int64, Uint32, cute

# The launch spins, so all of its blocks must run at once. Each has up to 128 threads of
# up to 128 registers: this many fit a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 4


class Floor:
    """One thread a fragment: it stores to every rank, then takes from every rank."""

    def __init__(self, package: str, multicast: bool) -> None:
        """Takes the importable name of a package, and its mailbox's transport."""
        self.constants = import_module(f"{package}.constants")
        self.publish = import_module(f"{package}.publish").Publish(multicast)
        self.signature = import_module(f"{package}.signature")
        self.steps = import_module(f"{package}.steps")
        self.ptx = import_module(f"{package}.ptx")
        self.multicast = multicast
        self.destinations = self.publish.destinations

    @property
    def has_idle_threads(self) -> bool:
        """Whether some threads would have no fragment: then the kernel does not fit."""
        c = self.constants
        return bool(c.PUBLISH_BLOCKS * c.PUBLISH_THREADS > c.FRAGMENTS)

    def blocks(self, m: int) -> int:
        """Blocks of a launch for ``m`` tokens."""
        return int(self.constants.PUBLISH_BLOCKS * m)

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of a launch, in order."""
        c = self.constants
        x, mailboxes, state, rank, stream = self.publish.arguments()
        shape = (c.GENERATIONS, c.TP, c.CAPACITY, c.HIDDEN)
        mailbox = self.signature.tensor(x.element_type, *shape)
        return (x, mailboxes, mailbox, state, x, rank, stream)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [M, HIDDEN], this rank's partial rows
        mailboxes: cute.Tensor,  # [destinations] addresses of mailboxes
        mailbox: cute.Tensor,  # [GENERATIONS, TP, CAPACITY, HIDDEN], this rank's
        state: cute.Tensor,  # [2] generation, arrivals
        y: cute.Tensor,  # [M, HIDDEN], out: step 1
        rank: Int32,
        stream: Any,
    ) -> None:
        """Launches the kernel."""
        self.kernel(x, mailboxes, mailbox, state, y, rank).launch(
            grid=[self.constants.PUBLISH_BLOCKS, x.shape[0], 1],
            block=[self.constants.PUBLISH_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        mailboxes: cute.Tensor,
        mailbox: cute.Tensor,
        state: cute.Tensor,
        y: cute.Tensor,
        rank: Int32,
    ) -> None:
        """Takes one fragment through step 1."""
        cute.arch.griddepcontrol_launch_dependents()
        block, token, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        column = (
            block * self.constants.PUBLISH_THREADS + thread
        ) * self.constants.FRAGMENT_BYTES
        row = Int64(token * self.constants.ROW_BYTES + column)
        addresses = [mailboxes[index] for index in range(self.destinations)]

        # The launch before this one is complete: all slots of the next generation are
        # armed, and x is written.
        cute.arch.griddepcontrol_wait()
        generation = self.ptx.load_int_relaxed(state.iterator.toint())
        stage = generation * self.constants.GENERATION_BYTES
        words = self.ptx.load_fragment(x.iterator.toint() + row)
        offset = Int64(stage + rank * self.constants.SLOT_BYTES) + row
        self.steps.publish_fragment(words, addresses, offset, self.multicast)

        slots = [
            mailbox.iterator.toint()
            + Int64(stage + peer * self.constants.SLOT_BYTES)
            + row
            for peer in range(self.constants.TP)
        ]
        count = self.constants.FRAGMENT_WORDS
        places = [(True, slot) for slot in slots]
        arrived = self.steps.poll(places, self.steps.load_rows(places, count), count)
        total = self.steps.sum_ranks(arrived, count)
        self.ptx.store_fragment(y.iterator.toint() + row, self.steps.pack(total))
        for slot in slots:
            self.ptx.store_fragment(slot, [self.steps.SENTINEL_PAIR] * count)

        # The last block to arrive advances the generation: all have read it.
        cute.arch.sync_threads()
        if thread == 0:
            blocks, tokens, _ = cute.arch.grid_dim()
            last = Uint32(blocks * tokens - 1)
            if self.ptx.count_arrival(state.iterator.toint() + 4, last) == last:
                state[0] = (generation + 1) % self.constants.GENERATIONS
