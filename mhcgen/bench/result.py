"""What a run of the benchmark found, and its JSON."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mhcgen.bench.traffic import Count, Traffic
from mhcgen.errors import MhcgenError

DECIMALS = 3

Tokens = Annotated[int, Field(gt=0)]
Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # microseconds


@dataclass(frozen=True)
class Package:
    """Which package was measured.

    Attributes:
        name: Its name.
        spec_sha256: The hash of its spec.
        templates_sha256: The hash of the templates that it was rendered from.
        hidden: Elements of a row.
        hc: Residual streams.
        tp: Ranks.
        arch: The architecture of its kernels.
        transport: ``multicast`` or ``unicast``; ``local`` for one rank alone.
    """

    name: str
    spec_sha256: str
    templates_sha256: str
    hidden: Count
    hc: Count
    tp: Count
    arch: str
    transport: str


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
        packages: The packages.
        versions: The releases of what took part.
        traffic: Bytes of a boundary by M.
        host: Microseconds of the host's part of an eager call, by step.
        replays: Replays that each median is taken from.
        calls: Calls of a replay.
    """

    package: str
    device: str
    gpus: Count
    command: str
    microseconds: Annotated[Mapping[Tokens, Mapping[str, Time]], Field(min_length=1)]
    spread: Mapping[Tokens, Mapping[str, tuple[Time, Time]]] = field(
        default_factory=dict
    )
    notes: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[Package, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[Tokens, Traffic] = field(default_factory=dict)
    host: Mapping[str, Time] = field(default_factory=dict)
    replays: Count = 0
    calls: Count = 0

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


RESULT: TypeAdapter[Result] = TypeAdapter(Result)


def rounded(value: Any) -> Any:
    """The value with all its fractions cut to DECIMALS."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, DECIMALS) if isinstance(value, float) else value


def read_result(path: Path) -> Result:
    """Reads the JSON of a run.

    Raises:
        MhcgenError: The file cannot be read, or is none that the benchmark wrote.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(path)  # whoever opens a pipe waits for a writer
        return RESULT.validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise MhcgenError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MhcgenError(
            f"{path} is no result of mhcgen bench: give a spec, the folder of a "
            "package, or a JSON file that --json wrote"
        ) from error
