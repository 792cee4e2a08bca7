"""What a run found, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mhcgen.bench.result import Result
from mhcgen.console import show_table

BASE = "boundary"
RATIOS = {
    "/ nccl": (BASE, "nccl"),
    "/ two launches": (BASE, "two launches"),
    "/ floor": (BASE, "floor"),
    "finalize / boundary": ("finalize", BASE),
}

Row = tuple[object, ...]


def show(result: Result) -> None:
    """Prints the times, the ratios, the host's part and the notes."""
    ranks = f"{result.gpus} x {result.device}"
    for title, headers, rows in (
        (f"{result.package}, {ranks}: microseconds a call", *times(result)),
        ("Percentiles 10 to 90, microseconds", *spreads(result)),
        ("The boundary, against", *ratios(result)),
        ("An eager call on the host, microseconds", *host(result)),
    ):
        if rows:
            show_table(title, headers, rows)
            print()
    for column, note in result.notes.items():
        print(f"{column}: {note}")


def times(result: Result) -> tuple[list[str], list[Row]]:
    """The medians, a row an M."""
    rows: list[Row] = [
        (m, *(row.get(name) for name in result.columns))
        for m, row in result.microseconds.items()
    ]
    return ["M", *result.columns], rows


def spreads(result: Result) -> tuple[list[str], list[Row]]:
    """The outer percentiles, a row an M."""
    rows: list[Row] = [
        (m, *(_range(row.get(name)) for name in result.columns))
        for m, row in result.spread.items()
    ]
    return ["M", *result.columns], rows


def _range(pair: tuple[float, float] | None) -> str | None:
    return None if pair is None else f"{pair[0]:.2f}-{pair[1]:.2f}"


def ratios(result: Result) -> tuple[list[str], list[Row]]:
    """The boundary against what it is compared with, and its traffic, a row an M."""
    headers = [
        "M",
        *RATIOS,
        "floor's share %",
        "time(2M) / time(M)",
        "local MB",
        "link MB",
        "local GB/s",
        "link GB/s",
    ]
    return headers, [tuple(_ratio_row(result, m)) for m in result.microseconds]


def _ratio_row(result: Result, m: int) -> Iterator[object]:
    yield m
    for column, other in RATIOS.values():
        yield result.ratio(m, column, other)
    share = result.ratio(m, "floor", BASE)
    yield None if share is None else 100 * share
    time = result.microseconds[m].get(BASE)
    twice = result.microseconds.get(2 * m, {}).get(BASE)
    yield twice / time if time and twice else None
    moved = result.traffic.get(m)
    for kind in ("local", "link"):
        yield getattr(moved, kind) / 1e6 if moved else None
    for kind in ("local", "link"):
        yield getattr(moved, kind) / time / 1e3 if moved and time else None


def host(result: Result) -> tuple[list[str], list[Row]]:
    """The host's part of a call, a row a step."""
    return ["step", "us"], list(result.host.items())


def markdown(result: Result) -> list[str]:
    """The lines of the README's table: medians, and the boundary against NCCL."""
    ratio = "nccl" in result.columns
    headers = ["M", *result.columns, *(["boundary / nccl"] if ratio else [])]
    lines = [headers, ["---"] * len(headers)]
    for m, row in result.microseconds.items():
        cells = [_cell(row.get(name)) for name in result.columns]
        if ratio:
            cells.append(_cell(result.ratio(m, BASE, "nccl")))
        lines.append([str(m), *cells])
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
