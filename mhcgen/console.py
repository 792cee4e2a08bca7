"""What the commands print: rich on a terminal, plain where it is piped."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

DIFF_LINES = 200
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def show_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Prints a table; numbers stand at the right of their columns."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [
        all(isinstance(row[index], int | float | None) for row in rows)
        for index in range(len(headers))
    ]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for header, is_right in zip(headers, right, strict=True):
            table.add_column(header, justify="right" if is_right else "left")
        for row in cells:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
        return
    lines = [list(headers), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        padded = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ]
        print("  " + "  ".join(padded).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def show_diff(lines: Iterator[str]) -> bool:
    """Prints the beginning of a diff; False if there was nothing to print."""
    shown = list(islice(lines, DIFF_LINES))
    more = sum(1 for _ in lines)
    if shown and sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line in shown:
            style = DIFF_STYLES.get(line[:1], "")
            console.print(Text(line, style), soft_wrap=True)
    else:
        for line in shown:
            print(line)
    if more:
        print(f"... and {more} more lines")
    return bool(shown)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Gives a function to call with the name of each thing done; shows a bar."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(name: str) -> None:
            bar.update(task, advance=1, description=f"{title} {name}")

        yield advance
