#: if plan.tp > 1
"""Finalize: closes a MoE layer's routed top-k sum and publishes the result."""
#: else
"""Finalize: closes a MoE layer's routed top-k sum, for the boundary to take."""
#: endif

import cutlass
from cutlass import «plan.activation_type», Float32, Int32, Int64, cute

from . import ptx
from .constants import (
    FRAGMENT_BYTES,
#: if plan.publish_idle_lanes
    FRAGMENTS,
#: endif
#: if plan.tp > 1
    GENERATION_BYTES,
#: endif
    HIDDEN,
    PUBLISH_BLOCKS,
    PUBLISH_THREADS,
    ROW_BYTES,
#: if plan.tp > 1
    SLOT_BYTES,
#: endif
    TOP_K,
#: if plan.tp > 1
    TP,
#: endif
)
from .signature import current_stream, tensor
#: if plan.tp == 1
from .steps import pack, unpack
#: elif plan.publish_idle_lanes
from .steps import pack, publish_own, unpack
#: else
from .steps import pack, publish_fragment, unpack
#: endif


class Finalize:
    """One thread a fragment, one grid row a token, all routed rows in flight."""

#: if plan.tp > 1
    def __init__(self, weight_dtype, shared_expert, multicast):
        """Fixes the dtype of the routing weights, the shared expert, the transport."""
        self.weight_dtype = weight_dtype
        self.shared_expert = shared_expert
        self.multicast = multicast
        self.destinations = 1 if multicast else TP
#: else
    def __init__(self, weight_dtype, shared_expert):
        """Fixes the dtype of the routing weights and the shared expert."""
        self.weight_dtype = weight_dtype
        self.shared_expert = shared_expert
#: endif

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens, rows = cute.sym_int32(), cute.sym_int32()
        shared = (tensor(«plan.activation_type», tokens, HIDDEN),) if self.shared_expert else (None,)
        return (
            tensor(«plan.activation_type», rows, HIDDEN),
            tensor(self.weight_dtype, tokens, TOP_K),
            tensor(Int32, tokens, TOP_K),
            *shared,
#: if plan.tp > 1
            tensor(Int64, self.destinations),
            tensor(Int32, 2),
            Int32(0),
#: else
            tensor(«plan.activation_type», tokens, HIDDEN),
#: endif
            current_stream(),
        )

    @cute.jit
    def __call__(
        self,
        gemm2_permuted: cute.Tensor,  # [rows, HIDDEN] «plan.activation»
        expert_weights: cute.Tensor,  # [M, TOP_K] FP32 or BF16
        expanded_idx_to_permuted_idx: cute.Tensor,  # [M, TOP_K] -1: not on this rank
        shared_output: cute.Tensor | None,  # [M, HIDDEN] «plan.activation»
#: if plan.tp > 1
        mailboxes: cute.Tensor,  # [destinations] addresses of mailboxes
        state: cute.Tensor,  # [2] generation, arrivals
        rank: Int32,
#: else
        x: cute.Tensor,  # [M, HIDDEN] «plan.activation», out
#: endif
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            gemm2_permuted,
            expert_weights,
            expanded_idx_to_permuted_idx,
            shared_output,
#: if plan.tp > 1
            mailboxes,
            state,
            rank,
#: else
            x,
#: endif
        ).launch(
            grid=[PUBLISH_BLOCKS, expert_weights.shape[0], 1],
            block=[PUBLISH_THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        gemm2_permuted: cute.Tensor,
        expert_weights: cute.Tensor,
        expanded_idx_to_permuted_idx: cute.Tensor,
        shared_output: cute.Tensor | None,
#: if plan.tp > 1
        mailboxes: cute.Tensor,
        state: cute.Tensor,
        rank: Int32,
#: else
        x: cute.Tensor,
#: endif
    ):
#: if plan.tp > 1
        """Sums, rounds, sanitizes and sends one fragment."""
#: else
        """Sums, rounds and stores one fragment."""
#: endif
        block, token, _ = cute.arch.block_idx()
        fragment = block * PUBLISH_THREADS + cute.arch.thread_idx()[0]
#: if plan.publish_idle_lanes
        own = fragment < FRAGMENTS
        fragment = cutlass.min(fragment, FRAGMENTS - 1)
#: endif
        column = fragment * FRAGMENT_BYTES
#: if plan.tp > 1
        addresses = [mailboxes[index] for index in range(self.destinations)]

        # As in publish: the boundary relies on the order of these two.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        generation = ptx.load_int_relaxed(state.iterator.toint())
#: else

        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

#: endif
        indices = [expanded_idx_to_permuted_idx[token, k] for k in range(TOP_K)]
        present = [index >= 0 for index in indices]
        # The weight of an absent row is never used: it may be NaN.
        weights = [
            cutlass.select_(here, Float32(expert_weights[token, k]), Float32(0.0))
            for k, here in enumerate(present)
        ]
        routed = gemm2_permuted.iterator.toint() + Int64(column)
        rows = [
            ptx.load_fragment_if(here, routed + Int64(index) * ROW_BYTES)
            for index, here in zip(indices, present, strict=True)
        ]
        total = [Float32(0.0)] * 8
        for weight, row in zip(weights, rows, strict=True):
            total = [
                ptx.fma(weight, value, sum_)
                for value, sum_ in zip(unpack(row), total, strict=True)
            ]
        if cutlass.const_expr(self.shared_expert):
            shared = shared_output.iterator.toint() + Int64(token * ROW_BYTES + column)
            shared_row = unpack(ptx.load_fragment(shared))
            total = [ptx.add(a, b) for a, b in zip(total, shared_row, strict=True)]
#: if plan.tp == 1
        place = x.iterator.toint() + Int64(token * ROW_BYTES + column)
#: if plan.publish_idle_lanes
        ptx.store_fragment_if(own, place, pack(total))
#: else
        ptx.store_fragment(place, pack(total))
#: endif
#: else
        slot = generation * GENERATION_BYTES + rank * SLOT_BYTES + token * ROW_BYTES
#: if plan.publish_idle_lanes
        words = pack(total)
        publish_own(own, words, addresses, Int64(slot + column), self.multicast)
#: else
        publish_fragment(pack(total), addresses, Int64(slot + column), self.multicast)
#: endif
#: endif
