"""The bytes that a boundary must move, however it is written."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Annotated

from pydantic import Field

ACTIVATION_BYTES = 2
FP32_BYTES = 4

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one boundary on one rank.

    Attributes:
        local: Read and written in the rank's own memory, each value once.
        link: Sent to the other ranks.
    """

    local: Count
    link: Count


def boundary_traffic(constants: ModuleType, transport: str, m: int) -> Traffic:
    """The traffic of a boundary of ``m`` tokens, without its mixes kernel.

    Local: x is read, with several ranks each one's row stored, read and re-armed, the
    residual read and written, the layer input and the stream mean written, and fn read
    once for all tokens.
    """
    c = constants
    row = c.HIDDEN * ACTIVATION_BYTES
    streams = c.HC * row
    mailbox = 3 * c.TP * row if c.TP > 1 else 0
    mixes = c.MIX * FP32_BYTES  # post and comb are read, pre, post and comb written
    read_mixes = (c.HC + c.HC * c.HC) * FP32_BYTES
    if c.PRE_MIX == "delayed":
        read_mixes += c.HC * FP32_BYTES
    rows = 2 + c.STREAM_MEAN
    token = rows * row + mailbox + 2 * streams + read_mixes + mixes
    fn_bytes = FP32_BYTES if c.FN_WEIGHT == "fp32" else ACTIVATION_BYTES
    weights = c.MIX * c.HC * c.HIDDEN * fn_bytes + row * (c.NORM_WEIGHT != "none")
    # One multicast store reaches every rank; unicast sends a copy to each other one.
    copies = min(c.TP - 1, 1) if transport == "multicast" else c.TP - 1
    return Traffic(m * token + weights, m * copies * row)
