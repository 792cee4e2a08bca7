"""A rough model of a boundary's time, which spares `mhcgen tune` hopeless candidates.

Its constants are what the README reports of an H200: a boundary takes over two
microseconds whatever it does, and each token that a multiprocessor takes adds most of
one. Clusters that do not run at once queue: a wave for each.
"""

from mhcgen.architecture import Architecture
from mhcgen.plan import clusters_at_once

FIXED = 2.3  # microseconds
PER_TOKEN = 0.85


def waves(
    architecture: Architecture, cluster_size: int, group: int, m: int, blocks: int = 1
) -> int:
    """How often the device fills with clusters for a call of ``m`` tokens.

    Args:
        architecture: The device's.
        cluster_size: Blocks of a cluster.
        group: Tokens of a cluster.
        m: Tokens of the call.
        blocks: Blocks that share a multiprocessor, where there are so many.
    """
    clusters = -(-m // group)
    return -(-clusters // clusters_at_once(architecture, cluster_size, blocks))


def predicted(
    architecture: Architecture, cluster_size: int, group: int, m: int, blocks: int = 1
) -> float:
    """Microseconds of a boundary, roughly; the arguments are those of ``waves``."""
    together = min(blocks, waves(architecture, cluster_size, group, m))
    wave = FIXED + PER_TOKEN * min(group, m) * together
    return waves(architecture, cluster_size, group, m, blocks) * wave
