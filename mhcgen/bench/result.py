"""What a run of the benchmark found, and its JSON."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mhcgen.errors import MhcgenError

DECIMALS = 3
# A mapping by its keys, str standing for those that have no name; a list by its item.
NAMED = {str: str}
SHAPES: dict[str, Any] = {
    "package": str,
    "device": str,
    "gpus": int,
    "command": str,
    "microseconds": {str: {str: float}},
    "spread": {str: {str: (float, float)}},
    "notes": NAMED,
    "packages": [
        {"name": str, "hidden": int, "hc": int, "tp": int, "transport": str, **NAMED}
    ],
    "versions": NAMED,
    "traffic": {str: {"local": int, "link": int}},
    "host": {str: float},
    "replays": int,
    "calls": int,
}


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        package: The name of the package that the others are compared with.
        device: The name of the GPU.
        gpus: GPUs that took part, one a rank; 1 where one plays all ranks.
        command: What was run.
        microseconds: Medians of a call, by M and column.
        spread: The 10th and the 90th percentile, by M and column.
        notes: Why a column is missing, or what else to know about it, by column.
        packages: Name, hashes, shape and transport of each package.
        versions: The releases of what took part.
        traffic: Bytes of a boundary, local and over the link, by M.
        host: Microseconds of the host's part of an eager call, by step.
        replays: Replays that each median is taken from.
        calls: Calls of a replay.
    """

    package: str
    device: str
    gpus: int
    command: str
    microseconds: Mapping[int, Mapping[str, float]]
    spread: Mapping[int, Mapping[str, tuple[float, float]]] = field(
        default_factory=dict
    )
    notes: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    host: Mapping[str, float] = field(default_factory=dict)
    replays: int = 0
    calls: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that were measured, in order."""
        return tuple(
            dict.fromkeys(name for row in self.microseconds.values() for name in row)
        )

    def ratio(self, m: int, above: str, below: str) -> float | None:
        """One column's median over another's; None where either is missing."""
        row = self.microseconds[m]
        return row[above] / row[below] if above in row and below in row else None

    def text(self) -> str:
        """The result as JSON."""
        return json.dumps(rounded(asdict(self)), indent=2) + "\n"


def rounded(value: Any) -> Any:
    """The value with all its fractions cut to DECIMALS."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, DECIMALS) if isinstance(value, float) else value


def check(content: Any, shape: Any) -> None:
    """Compares a value with a shape, of which SHAPES has some.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: It is of another shape.
    """
    if isinstance(shape, dict):
        for key in [each for each in shape if each is not str]:
            check(content[key], shape[key])
        for key in content.keys() - shape.keys():
            check(key, str)
            check(content[key], shape[str])
    elif isinstance(shape, list):
        for item in content:
            check(item, shape[0])
    elif isinstance(shape, tuple):
        for item, each in zip(content, shape, strict=True):
            check(item, each)
    elif shape is str:
        content.encode()  # half of a character cannot be drawn
    elif type(content) not in (int, shape) or not 0 <= content < math.inf:
        raise ValueError(content)


def read_result(path: Path) -> Result:
    """Reads the JSON of a run.

    Raises:
        MhcgenError: The file cannot be read, or is none that the benchmark wrote.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(path)  # whoever opens a pipe waits for a writer
        content = json.loads(path.read_text("utf-8"))
        known = {key: content[key] for key in SHAPES if key in content}
        for key, value in known.items():
            check(value, SHAPES[key])
        for key in ("microseconds", "spread", "traffic"):
            known[key] = {int(m): row for m, row in content.get(key, {}).items()}
        result = Result(**known)
        times = [time for row in result.microseconds.values() for time in row.values()]
        if min(*times, *result.microseconds) <= 0:
            raise ValueError("no time at all")
        return result
    except OSError as error:
        raise MhcgenError(f"cannot read {path}: {error.strerror}") from error
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as error:
        raise MhcgenError(
            f"{path} is no result of mhcgen bench: give a spec, the folder of a "
            "package, or a JSON file that --json wrote"
        ) from error
