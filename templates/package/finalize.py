"""Finalize: closes a MoE layer's routed top-k sum and publishes the result."""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from . import ptx
from .constants import (
    FRAGMENT_BYTES,
    GENERATION_BYTES,
    HIDDEN,
    PUBLISH_BLOCKS,
    PUBLISH_THREADS,
    ROW_BYTES,
    SLOT_BYTES,
    TOP_K,
    TP,
)
from .signature import current_stream, tensor
from .steps import pack, publish_fragment, unpack


class Finalize:
    """One thread a fragment, one grid row a token, all routed rows in flight."""

    def __init__(self, weight_dtype, shared_expert, multicast):
        """Fixes the dtype of the routing weights, the shared expert, the transport."""
        self.weight_dtype = weight_dtype
        self.shared_expert = shared_expert
        self.multicast = multicast
        self.destinations = 1 if multicast else TP

    def arguments(self):
        """Stand-ins for the arguments of a launch, in order."""
        tokens, rows = cute.sym_int32(), cute.sym_int32()
        shared = (tensor(BFloat16, tokens, HIDDEN),) if self.shared_expert else (None,)
        return (
            tensor(BFloat16, rows, HIDDEN),
            tensor(self.weight_dtype, tokens, TOP_K),
            tensor(Int32, tokens, TOP_K),
            *shared,
            tensor(Int64, self.destinations),
            tensor(Int32, 2),
            Int32(0),
            current_stream(),
        )

    @cute.jit
    def __call__(
        self,
        gemm2_permuted: cute.Tensor,  # [rows, HIDDEN] BF16
        expert_weights: cute.Tensor,  # [M, TOP_K] FP32 or BF16
        expanded_idx_to_permuted_idx: cute.Tensor,  # [M, TOP_K] -1: not on this rank
        shared_output: cute.Tensor | None,  # [M, HIDDEN] BF16
        mailboxes: cute.Tensor,  # [destinations] addresses of mailboxes
        state: cute.Tensor,  # [2] generation, arrivals
        rank: Int32,
        stream,
    ):
        """Launches the kernel."""
        self.kernel(
            gemm2_permuted,
            expert_weights,
            expanded_idx_to_permuted_idx,
            shared_output,
            mailboxes,
            state,
            rank,
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
        mailboxes: cute.Tensor,
        state: cute.Tensor,
        rank: Int32,
    ):
        """Sums, rounds, sanitizes and sends one fragment."""
        block, token, _ = cute.arch.block_idx()
        fragment = block * PUBLISH_THREADS + cute.arch.thread_idx()[0]
        column = fragment * FRAGMENT_BYTES
        addresses = [mailboxes[index] for index in range(self.destinations)]

        # As in publish: the boundary relies on the order of these two.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        generation = ptx.load_int_relaxed(state.iterator.toint())
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
        slot = generation * GENERATION_BYTES + rank * SLOT_BYTES + token * ROW_BYTES
        publish_fragment(pack(total), addresses, Int64(slot + column), self.multicast)
