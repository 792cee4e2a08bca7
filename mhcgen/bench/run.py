"""One run: every contender at every M, and what came out."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mhcgen.bench.contenders import (
    OPTIONAL,
    Contender,
    Inputs,
    UnavailableError,
    contenders,
)
from mhcgen.bench.host_time import host_time
from mhcgen.bench.machine import Machine, machine
from mhcgen.bench.packages import Loaded, distinct, load, package_folder
from mhcgen.bench.result import Result
from mhcgen.bench.timing import (
    CALLS,
    REPLAYS,
    Spread,
    capture,
    difference,
    interleaved,
    replay,
)
from mhcgen.bench.traffic import boundary_traffic
from mhcgen.errors import MhcgenError, shortened

NOTE_LENGTH = 160
HOST_TOKENS = 8
PASSES = (False, True)  # what follows GEMMs is timed once all else is


def run(
    sources: Sequence[Path],
    tokens: Sequence[int],
    without: Collection[str],
    advance: Callable[[str], None],
) -> Result | None:
    """Times packages and what they are compared with.

    Args:
        sources: Specs or packages; the others are compared with the first.
        tokens: The M to time; those beyond the capacity are refused.
        without: Columns to leave out, of the optional ones.
        advance: Called after each M of each of PASSES, with its name.

    Returns:
        The result; None on all ranks but the first.

    Raises:
        MhcgenError: A column is unknown, there is no GPU, a source is wrong or for
            other ranks, or an M exceeds a capacity.
    """
    for column in without:
        if column not in OPTIONAL:
            raise MhcgenError(
                f"--without {column}: it must be one of {', '.join(OPTIONAL)}"
            )
    with TemporaryDirectory(prefix="mhcgen-") as name:
        folders = distinct(
            [package_folder(source, Path(name)) for source in sources], Path(name)
        )
        with machine("mhcgen bench") as gpus:
            packages = [
                load(gpus, folder, folder.name if index else "")
                for index, folder in enumerate(folders)
            ]
            for package in packages:
                check_shape(packages[0], package)
                check_tokens(tokens, package)
            return measure(gpus, packages, tokens, without, advance)


def check_shape(first: Loaded, other: Loaded) -> None:
    """Refuses a comparison of packages that do not take the same inputs."""
    for name in ("HIDDEN", "HC", "TP"):
        ours, theirs = (getattr(each.constants, name) for each in (first, other))
        if ours != theirs:
            raise MhcgenError(
                f"--compare {other.identity.name}: its {name} is {theirs}, and that "
                f"of {first.identity.name} is {ours}; compare packages of one shape"
            )


def check_tokens(tokens: Sequence[int], package: Loaded) -> None:
    """Refuses calls that a package does not serve."""
    capacity = package.boundary.capacity
    for m in tokens:
        if not 1 <= m <= capacity:
            raise MhcgenError(
                f"--tokens {m}: a call of {package.identity.name} has 1 to "
                f"{capacity} tokens (capacity.max_tokens)"
            )


def measure(
    gpus: Machine,
    packages: list[Loaded],
    tokens: Sequence[int],
    without: Collection[str],
    advance: Callable[[str], None],
) -> Result | None:
    """Times everything, M by M."""
    first = packages[0]
    spreads: dict[int, dict[str, Spread]] = {m: {} for m in tokens}
    known = contenders(gpus, packages)
    wanted = [each for each in known if not each.is_one_of(without)]
    notes = {
        each.column: "left out by --without" for each in known if each not in wanted
    }
    passes = [
        [each for each in wanted if each.follows_gemms == after] for after in PASSES
    ]
    for columns, m in product(passes, tokens):
        spreads[m] |= times_of(gpus, columns, Inputs(gpus, first, m), notes)
        # Recordings keep their memory, which in symmetric memory is scarce.
        gc.collect()
        advance(f"M={m}")
    host = host_time(Inputs(gpus, first, min(HOST_TOKENS, first.boundary.capacity)))
    if not gpus.is_first:
        return None
    return Result(
        package=first.identity.name,
        device=torch.cuda.get_device_name(),
        gpus=gpus.ranks,
        command=command(gpus),
        microseconds={
            m: {name: spread.median for name, spread in row.items()}
            for m, row in spreads.items()
        },
        spread={
            m: {name: (spread.p10, spread.p90) for name, spread in row.items()}
            for m, row in spreads.items()
        },
        notes={each.column: each.what for each in known} | notes,
        packages=tuple(package.identity for package in packages),
        versions=gpus.versions(),
        traffic={
            m: boundary_traffic(first.constants, first.boundary.transport, m)
            for m in tokens
        },
        host=host,
        replays=REPLAYS,
        calls=CALLS,
    )


def times_of(
    gpus: Machine,
    columns: Sequence[Contender],
    inputs: Inputs,
    notes: dict[str, str],
) -> dict[str, Spread]:
    """The times of contenders at one M, interleaved; a note where one cannot run."""
    timers = {}
    for contender in columns:
        timer = timer_of(gpus, contender, inputs, notes)
        if timer is not None:
            timers[contender.column] = timer
    return interleaved(timers)


def timer_of(
    gpus: Machine, contender: Contender, inputs: Inputs, notes: dict[str, str]
) -> Callable[[], float] | None:
    """What times a contender at one M; None, with a note why, where it cannot run."""

    def attempt() -> Callable[[], float]:
        recording = capture(contender.call_for(inputs))
        if contender.less_for is None:
            return partial(replay, recording)
        return partial(difference, recording, capture(contender.less_for(inputs)))

    try:
        return gpus.together(f"{contender.column}, M={inputs.m}", attempt)
    except Exception as error:
        if contender.required:
            raise
        # What all ranks raise names each failure; its cause is this rank's own.
        notes[contender.column] = f"M={inputs.m}: {described(error.__cause__ or error)}"
    return None


def described(error: BaseException) -> str:
    """An error in a line."""
    kind = "" if isinstance(error, UnavailableError) else f"{type(error).__name__}: "
    return shortened(" ".join(f"{kind}{error}".split()), NOTE_LENGTH)


def command(gpus: Machine) -> str:
    """What was run, as it would be typed."""
    launcher = ""
    if gpus.ranks > 1:
        launcher = f"torch.distributed.run --nproc-per-node {gpus.ranks} -m "
    return f"python -m {launcher}mhcgen {shlex.join(sys.argv[1:])}"
