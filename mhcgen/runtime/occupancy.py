"""How many clusters of a kernel run at once on a device, by the driver's word.

A boundary that publishes its own rows needs all of them to run at once: a cluster that
polls would otherwise keep the place of one that has yet to publish, on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

ALL_SHARED = 100  # percent of the memory that L1 and shared memory divide
PORTABLE_CLUSTER = 8  # blocks of a cluster that every device takes
MIXES = "_mixes"  # ends the names of mixes that a boundary launches beside itself

Kernel = int | str  # what rows of the dispatch table name their kernels by

logger = logging.getLogger(__name__)


def kernel_of(row: Any) -> Kernel:
    """What a row of a package's dispatch table names its boundary kernels by.

    That is its size, where no other row may give as many tokens to a cluster otherwise.
    """
    kernel: Kernel = getattr(row, "kernel", row.size)
    return kernel


def room_for_calls(
    constants: ModuleType,
    kernels: ModuleType,
    compiled: Mapping[str, Any],
    arch: str,
    transport: str,
) -> dict[Kernel, int]:
    """Clusters that run at once of each boundary that publishes its own rows.

    Calls that need more take two launches, which is logged with the numbers.

    Args:
        constants: The package's ``constants`` module.
        kernels: The package's ``kernels`` module.
        compiled: What ``compile_package`` gave.
        arch: The architecture that they were compiled for.
        transport: ``multicast`` or ``unicast``.

    Returns:
        The clusters by kernel; 0 where the compiler or the driver do not say.
    """
    target = constants.TARGETS[arch]
    room: dict[Kernel, int] = {}
    for row in target.token_groups:
        if row.launches != 1:
            continue
        kernel = kernel_of(row)
        name = kernels.boundary_name(kernel, transport)
        # With those of the same shape that close routed sums.
        closing = kernels.boundary_name(kernel, "finalize_")
        same = [each for each in compiled if each == name or each.startswith(closing)]
        if kernel not in room:
            try:
                room[kernel] = min(
                    clusters_at_once(
                        compiled[each],
                        target.cluster_size,
                        target.launched_threads,
                        row.shared_bytes,
                        getattr(row, "blocks", 1),
                    )
                    for each in same
                )
            except Exception as error:
                logger.warning(
                    "%s: nobody says how many of its clusters run at once (%s: %s), so "
                    "its calls take two launches",
                    name,
                    type(error).__name__,
                    error,
                )
                room[kernel] = 0
        served = min(row.max_tokens, room[kernel] * row.size)
        logger.log(
            logging.INFO if served == row.max_tokens else logging.WARNING,
            "%s: %d clusters of %d blocks run at once, calls of up to %d tokens need "
            "%d: one launch up to %d tokens",
            name,
            room[kernel],
            target.cluster_size,
            row.max_tokens,
            -(-row.max_tokens // row.size),
            served,
        )
    return room


def clusters_at_once(
    compiled: Any, cluster_size: int, threads: int, shared_bytes: int, blocks: int = 1
) -> int:
    """How many clusters of a kernel run at once on the current device.

    Args:
        compiled: A kernel that kept its machine code; what it launches beside itself
            does not count.
        cluster_size: Blocks of a cluster.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        blocks: Blocks that are to share a multiprocessor.

    Raises:
        RuntimeError: The driver refused a question.
    """
    from cuda.bindings import driver

    (symbol,) = (each for each in compiled.kernel_info if not is_beside(each))
    code = compiled.__cubin__
    if not code:
        raise RuntimeError("the compiler kept no machine code")
    library = answer(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    try:
        kernel = answer(driver.cuLibraryGetKernel(library, symbol.encode()))
        function = answer(driver.cuKernelGetFunction(kernel))
        attributes = driver.CUfunction_attribute
        largest = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        answer(driver.cuFuncSetAttribute(function, largest, shared_bytes))
        if blocks > 1:
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            answer(driver.cuFuncSetAttribute(function, carveout, ALL_SHARED))
        if cluster_size > PORTABLE_CLUSTER:
            allowed = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            answer(driver.cuFuncSetAttribute(function, allowed, 1))
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = cluster.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = cluster_size, 1, 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = cluster_size, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = threads, 1, 1
        launch.sharedMemBytes = shared_bytes
        launch.attrs, launch.numAttrs = [cluster], 1
        return int(answer(driver.cuOccupancyMaxActiveClusters(function, launch)))
    finally:
        driver.cuLibraryUnload(library)


def is_beside(symbol: str) -> bool:
    """Whether a symbol is that of mixes which a boundary launches beside itself."""
    return symbol.partition("_kernel_cutlass")[0].endswith(MIXES)


def answer(result: tuple[Any, ...]) -> Any:
    """What a call of the driver returned.

    Raises:
        RuntimeError: It returned an error.
    """
    status, *values = result
    if int(status):
        raise RuntimeError(f"the driver answers {status.name}")
    return values[0] if values else None
