"""What each GPU architecture offers: the only place where hardware numbers stand."""

from dataclasses import dataclass

WARP = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTERS_PER_MULTIPROCESSOR = 65536
PORTABLE_CLUSTER = 8


@dataclass(frozen=True)
class Architecture:
    """Limits of one compilation target.

    Attributes:
        name: The compiler's name, such as ``sm_90a``.
        products: Devices that run this code, for messages.
        shared_bytes: Shared memory that one thread block may use.
        multiprocessors: Multiprocessors of the usual device.
        cluster_8_capacity: Clusters of eight blocks, one block a multiprocessor, that
            run at once. GPCs are not all whole, so it is less than
            ``multiprocessors // 8``. The runtime does not rely on it: it only steers
            the choice of token groups.
        max_cluster: Blocks of the largest cluster; more than the portable ones need a
            function attribute, which the compiler always sets.
    """

    name: str
    products: str
    shared_bytes: int
    multiprocessors: int
    cluster_8_capacity: int
    max_cluster: int


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_90a", "H100, H200", 232448, 132, 15, 16),
        Architecture("sm_100a", "B200, GB200", 232448, 148, 16, 16),
        Architecture("sm_103a", "B300, GB300", 232448, 148, 16, 16),
        Architecture("sm_120a", "RTX PRO 6000, RTX 5090", 101376, 170, 20, 8),
    )
}
