"""A rough model of a boundary's time, which spares `mhcgen tune` hopeless candidates.

Its constants are what docs/measurements.md reports of an H200: a boundary with its
publish takes about four microseconds whatever it does, and each token that a cluster
takes adds more than one. Clusters that do not run at once queue: a wave for each.
"""

from mhcgen.architecture import Architecture
from mhcgen.plan import clusters_at_once

FIXED = 3.8  # microseconds
PER_TOKEN = 1.2


def waves(architecture: Architecture, cluster_size: int, group: int, m: int) -> int:
    """How often the device fills with clusters for a call of ``m`` tokens."""
    clusters = -(-m // group)
    return -(-clusters // clusters_at_once(architecture, cluster_size))


def predicted(
    architecture: Architecture, cluster_size: int, group: int, m: int
) -> float:
    """Microseconds of a boundary of ``m`` tokens, roughly."""
    wave = FIXED + PER_TOKEN * min(group, m)
    return waves(architecture, cluster_size, group, m) * wave
