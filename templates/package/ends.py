"""What the kernels at the ends of the network share.

A cluster takes a token. Its threads take whole fragments of the row, all streams of
them, in turns: they run once a forward pass, so they are simple rather than fast.
"""

import cutlass
from cutlass import Float32, cute

from . import ptx
from .constants import ENDS_CLUSTER, ENDS_STRIDE, ENDS_THREADS, ENDS_WARPS, FRAGMENTS
from .steps import row_major, sum_row, sum_warp


def turns_of(first):
    """How many fragments a thread takes whose first is ``first``."""
    return (FRAGMENTS - first + ENDS_STRIDE - 1) // ENDS_STRIDE


def allocate_sums(memory, count):
    """Shared memory for ``sum_cluster``: the warps' sums, and then the blocks'."""
    return (
        memory.allocate_tensor(Float32, row_major(count, ENDS_WARPS), 16),
        memory.allocate_tensor(Float32, row_major(count, ENDS_CLUSTER), 16),
    )


@cute.jit
def sum_cluster(values, partials: cute.Tensor, sums: cute.Tensor):
    """Sums each of some values over the cluster; ``sums`` then holds the blocks' sums.

    Every block of the cluster must have started.
    """
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
    for index in cutlass.range_constexpr(len(values)):
        total = sum_warp(values[index])
        if lane == 0:
            partials[index, warp] = total
    cute.arch.sync_threads()
    pairs = len(values) * ENDS_CLUSTER
    for pair in cutlass.range(thread, pairs, ENDS_THREADS):
        index = pair // ENDS_CLUSTER
        total = sum_row(partials[index, None], ENDS_WARPS)
        place = sums[index, None].iterator.toint() + block * 4
        ptx.store_peer(place, pair % ENDS_CLUSTER, total)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def sum_of(sums, index):
    """A sum over the cluster."""
    return sum_row(sums[index, None], ENDS_CLUSTER)
