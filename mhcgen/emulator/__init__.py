"""Executes the PTX of generated kernels on the CPU, for all ranks at once.

Modules, each resting on those before it:

- ``ptx`` parses; ``arithmetic`` knows the value of every operation; ``memory`` knows
  what is allocated and written; ``instructions`` compiles PTX to functions over arrays;
- ``mbarriers`` counts the asynchronous stores of a cluster;
- ``machine`` executes a kernel for many blocks, with divergence, warp operations,
  barriers, clusters and distributed shared memory;
- ``scheduler`` runs the launches of all ranks: streams, programmatic dependent launch,
  limited room, and under a seed an adversary;
- ``package`` launches the kernels of a package as its host code does.

Modelled: exact FP32 and BF16 arithmetic, independent progress of lanes, warps, blocks,
clusters and ranks, and stores that land late: those into another rank's memory or
through a multicast window in any order and in pieces of two bytes, until their kernel
is complete or a fence; those into a peer's shared memory, until the storing thread
arrives at the cluster barrier with release, or, if asynchronous, in any order until the
phase of their mbarrier is complete. A launch that waits for another one relies
on that one alone, never on what came before it.

Not modelled: time; late or reordered stores within one device's global memory, and
loads that see an older value than memory has; the rounding of tensor-core sums and of
approximate functions, whose results are closer to the exact ones than on hardware; a
read-only load of memory that is written meanwhile; the launch shapes in the host code,
which are taken from the plan.

An error names the kernel, the line of the PTX and its instruction, the rank, the block
and the thread. A deadlock lists who waits for what.
"""
