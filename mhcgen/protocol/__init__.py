"""A model of the mailbox protocol, checked exhaustively over small instances.

``python -m mhcgen.protocol`` checks the protocol of the generated kernels and shows
that the same search finds each known-bad variant. docs/protocol.md describes the model.
"""

from mhcgen.protocol.instances import INSTANCES, LARGE_INSTANCES, VARIANTS, Variant
from mhcgen.protocol.model import Engine, Instance, Model, Protocol
from mhcgen.protocol.search import Report, Violation, explore

__all__ = [
    "INSTANCES",
    "LARGE_INSTANCES",
    "VARIANTS",
    "Engine",
    "Instance",
    "Model",
    "Protocol",
    "Report",
    "Variant",
    "Violation",
    "explore",
]
