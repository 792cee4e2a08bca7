"""The bytes that a boundary must move, however it is written."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

BF16_BYTES = 2
FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes of one boundary on one rank.

    Attributes:
        local: Read and written in the rank's own memory, each value once.
        link: Sent to the other ranks.
    """

    local: int
    link: int


def boundary_traffic(constants: ModuleType, transport: str, m: int) -> Traffic:
    """The traffic of a boundary of ``m`` tokens, without its mixes kernel.

    Local: x is read, each rank's row stored, read and re-armed, the residual read and
    written, the layer input written, and fn read once for all tokens.
    """
    c = constants
    row = c.HIDDEN * BF16_BYTES
    streams = c.HC * row
    mixes = c.MIX * FP32_BYTES  # post and comb are read, pre, post and comb written
    read_mixes = (c.HC + c.HC * c.HC) * FP32_BYTES
    token = row + 3 * c.TP * row + 2 * streams + row + read_mixes + mixes
    weights = c.MIX * streams + row
    # One multicast store reaches every rank; unicast sends a copy to each other one.
    copies = min(c.TP - 1, 1) if transport == "multicast" else c.TP - 1
    return Traffic(m * token + weights, m * copies * row)
