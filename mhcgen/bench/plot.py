"""A run as a picture: microseconds over M, a line a column, each named at its end."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhcgen.bench.report import markdown
from mhcgen.bench.result import Result
from mhcgen.errors import MhcgenError
from mhcgen.text_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
STRONG = "#0b6e4f"  # this package's boundary
COLOURS = ("#c8553d", "#28587b", "#8a5a99", "#b08900", "#d1495b", "#7a6f5d", "#3f88c5")
GREY = "#8a8a8a"
INK = "#222222"
TICKS = [
    step * scale for scale in (0.1, 1, 10, 100, 1000) for step in (1, 1.5, 2, 3, 5, 7)
]
LABEL_GAP = 0.045  # of the height, between the names at the lines' ends
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }}
footer {{ color: #666; font-size: 13px; margin-top: 1rem }}
</style>
{svg}
{table}
<footer>{footer}</footer>
</html>
"""


def check_format(path: Path) -> None:
    """Refuses a file that no picture is written to, before anything is measured.

    Raises:
        MhcgenError: The suffix is unknown, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise MhcgenError(f"--plot {path}: the file must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MhcgenError(
            "--plot needs matplotlib: pip install 'mhcgen[bench]'; or write --json "
            "here, and run mhcgen bench FILE.json --plot where it is installed"
        ) from error


def write_plot(result: Result, path: Path) -> None:
    """Draws a result into a file, whose suffix says what kind.

    Raises:
        BuildError: The file cannot be written.
    """
    kind = path.suffix.removeprefix(".")
    data = drawn(result, "svg" if kind == "html" else kind)
    if kind == "html":
        data = page(result, data.decode()).encode()
    write_whole(path, data)


def drawn(result: Result, kind: str) -> bytes:
    """The picture as PNG or SVG, the same bytes for the same result."""
    import matplotlib

    settings: dict[str, Any] = {
        "font.family": "DejaVu Sans",
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "mhcgen",
    }
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context(settings):
        buffer = io.BytesIO()
        figure(result).savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def figure(result: Result) -> Figure:
    """The figure: both axes logarithmic, so that equal factors are equal distances."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    picture = Figure(figsize=(9, 5.4))
    axes = picture.add_axes((0.07, 0.11, 0.74, 0.73))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    tokens = list(result.microseconds)
    ends = []
    for index, column in enumerate(result.columns):
        times = {
            m: row[column] for m, row in result.microseconds.items() if column in row
        }
        colour = colour_of(column, index)
        ours = column == "boundary"
        axes.plot(
            list(times),
            list(times.values()),
            color=colour,
            linewidth=2.8 if ours else 1.6,
            linestyle="--" if column == "floor" else "-",
            marker="o",
            markersize=5 if ours else 3.5,
            zorder=3 if ours else 2,
        )
        bands = {m: row[column] for m, row in result.spread.items() if column in row}
        if bands:
            low, high = zip(*bands.values(), strict=True)
            axes.fill_between(
                list(bands), low, high, color=colour, alpha=0.15, linewidth=0
            )
        ends.append((list(times.values())[-1], column, colour))
    axes.set_xticks(tokens, [str(m) for m in tokens])
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in TICKS if bottom <= tick <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.set_xlabel("tokens in the call (M)", color=INK)
    name_ends(axes, ends, tokens[-1])
    x = 0.07
    picture.text(x, 0.935, title(result), size=14, weight="bold", color=INK)
    picture.text(x, 0.885, subtitle(result), size=9.5, color="#666666")
    return picture


def name_ends(axes: Any, ends: Sequence[tuple[float, str, str]], last: int) -> None:
    """Writes each line's name beside its end, apart from its neighbours'."""
    heights = [
        axes.transAxes.inverted().transform(axes.transData.transform((last, value)))[1]
        for value, _, _ in ends
    ]
    for place, (value, column, colour) in zip(
        spread_out(heights, LABEL_GAP), ends, strict=True
    ):
        axes.annotate(
            f"{column}  {value:.1f}",
            (1.015, place),
            xycoords="axes fraction",
            color=colour,
            va="center",
            size=10,
            weight="bold" if column == "boundary" else "normal",
            annotation_clip=False,
        )


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Moves places apart until all neighbours are a gap apart, about where they were.

    Runs of places that are too close are spaced evenly about their common middle.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    runs: list[tuple[list[int], float]] = []
    for index in order:
        members, middle = [index], places[index]
        while (
            runs and _top(runs[-1], gap) + gap > middle - (len(members) - 1) * gap / 2
        ):
            before, _ = runs.pop()
            members = before + members
            middle = sum(places[member] for member in members) / len(members)
        runs.append((members, middle))
    moved = [0.0] * len(places)
    for members, middle in runs:
        for rank, member in enumerate(members):
            moved[member] = middle + (rank - (len(members) - 1) / 2) * gap
    return moved


def _top(run: tuple[list[int], float], gap: float) -> float:
    members, middle = run
    return middle + (len(members) - 1) * gap / 2


def colour_of(column: str, index: int) -> str:
    """A column's colour; the package's boundary and the floor have their own."""
    own = {"boundary": STRONG, "floor": GREY}
    return own.get(column, COLOURS[index % len(COLOURS)])


def title(result: Result) -> str:
    """The first line above the picture."""
    return f"{result.package}: microseconds a boundary"


def subtitle(result: Result) -> str:
    """The second line: where, how and with what it was measured."""
    words = [f"{result.gpus} x {result.device}"]
    for package in result.packages[:1]:
        words.append(f"TP {package.tp}, {package.transport}")
        words.append(f"hidden {package.hidden}, HC {package.hc}")
    words.append("CUDA graphs, medians")
    words += ["bands: 10th to 90th percentile"] if result.spread else []
    return "; ".join(words)


def page(result: Result, svg: str) -> str:
    """The picture and its table as a page that needs no other file."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in markdown(result)
    ]
    header, _, *rows = cells
    lines = ["<table>", _row(header, "th"), *(_row(row, "td") for row in rows)]
    versions = ", ".join(f"{name} {v}" for name, v in result.versions.items())
    notes = "".join(
        f"<br>{html.escape(column)}: {html.escape(note)}"
        for column, note in result.notes.items()
    )
    return PAGE.format(
        title=html.escape(title(result)),
        svg=svg[svg.index("<svg") :],
        table="\n".join([*lines, "</table>"]),
        footer=f"{html.escape(versions)}<br><code>{html.escape(result.command)}</code>"
        + notes,
    )


def _row(cells: Sequence[str], tag: str) -> str:
    inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"
