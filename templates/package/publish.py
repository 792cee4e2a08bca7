"""Publish: writes this rank's partial rows into every rank's mailbox."""

#: if plan.publish_idle_lanes
import cutlass
#: endif
from cutlass import «plan.activation_type», Int32, Int64, cute

from . import ptx
from .constants import (
    FRAGMENT_BYTES,
#: if plan.publish_idle_lanes
    FRAGMENTS,
#: endif
    GENERATION_BYTES,
    HIDDEN,
    PUBLISH_BLOCKS,
    PUBLISH_THREADS,
    ROW_BYTES,
    SLOT_BYTES,
    TP,
)
from .signature import current_stream, tensor
#: if plan.publish_idle_lanes
from .steps import publish_own
#: else
from .steps import publish_fragment
#: endif


class Publish:
    """One thread a fragment, one grid row a token."""

    def __init__(self, multicast):
        """Fixes the transport: one multicast store, or one store a peer."""
        self.multicast = multicast
        self.destinations = 1 if multicast else TP

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens = cute.sym_int32()
        return (
            tensor(«plan.activation_type», tokens, HIDDEN),
            tensor(Int64, self.destinations),
            tensor(Int32, 2),
            Int32(0),
            current_stream(),
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [M, HIDDEN] «plan.activation», this rank's partial rows
        mailboxes: cute.Tensor,  # [destinations] addresses of mailboxes
        state: cute.Tensor,  # [2] generation, arrivals
        rank: Int32,
        stream,
    ):
        """Launches the kernel."""
        self.kernel(x, mailboxes, state, rank).launch(
            grid=[PUBLISH_BLOCKS, x.shape[0], 1],
            block=[PUBLISH_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        mailboxes: cute.Tensor,
        state: cute.Tensor,
        rank: Int32,
    ):
        """Loads, sanitizes and sends one fragment."""
        block, token, _ = cute.arch.block_idx()
        fragment = block * PUBLISH_THREADS + cute.arch.thread_idx()[0]
#: if plan.publish_idle_lanes
        own = fragment < FRAGMENTS
        fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
        column = fragment * FRAGMENT_BYTES
        addresses = [mailboxes[index] for index in range(self.destinations)]

        # The boundary starts on this trigger and then reads what the kernels before
        # this one wrote. It must therefore come after the wait.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        generation = ptx.load_int_relaxed(state.iterator.toint())
        words = ptx.load_fragment(
            x.iterator.toint() + Int64(token * ROW_BYTES + column)
        )
        slot = generation * GENERATION_BYTES + rank * SLOT_BYTES + token * ROW_BYTES
#: if plan.publish_idle_lanes
        publish_own(own, words, addresses, Int64(slot + column), self.multicast)
#: else
        publish_fragment(words, addresses, Int64(slot + column), self.multicast)
#: endif
