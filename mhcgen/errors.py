"""The mistakes of a user, and how they are shown: where, what, and what is legal."""

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_LINES = 24
MAX_COLUMNS = 100
MAX_DIGITS = 9

Loc = tuple[str | int, ...]
"""The way to a value in a spec: keys, and positions in lists."""

Position = tuple[int, int]
"""A line and a column, both counted from 1."""


class MhcgenError(Exception):
    """A mistake of the user's: shown without a traceback, exit code 2."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one value of a spec.

    Attributes:
        loc: The way to the value, such as ("targets", "sm_90a", "cluster_size").
        message: What is wrong with it.
        given: The value as it was written.
        allowed: What is legal there.
        hint: What to do about it, such as the nearest legal values.
    """

    loc: Loc
    message: str
    given: str | None = None
    allowed: str | None = None
    hint: str | None = None


class Locator(Protocol):
    """A spec file that knows where its values stand."""

    @property
    def path(self) -> Path:
        """The file, as the user named it."""

    def locate(self, loc: Loc) -> Position:
        """The line and column of a value, or of its nearest parent."""


class SpecError(MhcgenError):
    """A spec file that cannot be used, with every reason found.

    Attributes:
        path: The file, as the user named it.
        problems: What is wrong, in the order of the file.
        positions: Where each problem is; None where it is the file itself.
    """

    def __init__(
        self, path: Path, placed: Sequence[tuple[Position | None, Problem]]
    ) -> None:
        """Takes each problem with its position, in any order."""
        super().__init__(path, placed)
        ordered = sorted(placed, key=lambda item: item[0] or (0, 0))
        self.path = path
        self.positions = tuple(position for position, _ in ordered)
        self.problems = tuple(problem for _, problem in ordered)

    def __str__(self) -> str:
        """The complete text for the terminal."""
        path = shortened(str(self.path), 2 * MAX_COLUMNS)
        return _one_screen(
            [
                _block(":".join([path, *map(str, position or ())]), problem)
                for position, problem in zip(self.positions, self.problems, strict=True)
            ]
        )


class PlanError(MhcgenError):
    """A legal spec that no plan can be made for.

    Attributes:
        problems: What stands in the way.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Takes the problems; their positions come with `in_file`."""
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """The problems without positions."""
        return _one_screen([_block(None, problem) for problem in self.problems])

    def in_file(self, source: Locator) -> SpecError:
        """The same problems, placed in the file that the spec came from."""
        return SpecError(
            source.path, [(source.locate(p.loc), p) for p in self.problems]
        )


def dotted(loc: Loc) -> str:
    """The way to a value as one word: targets.sm_90a.token_groups[0].group."""
    word = ""
    for part in loc:
        if isinstance(part, int):
            word += f"[{part}]"
        elif part.isidentifier() and len(part) <= 40:
            word += f".{part}"
        else:
            word += f'."{shortened(part, 40)}"'
    return word.removeprefix(".")


def visible(text: str) -> str:
    """The text with every character escaped that is not one plain column wide."""
    return "".join(
        char
        if char.isprintable()
        and not unicodedata.combining(char)
        and unicodedata.east_asian_width(char) not in ("W", "F")
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def shortened(text: str, limit: int = 60) -> str:
    """The text made visible, cut to at most `limit` columns."""
    # Escapes only lengthen, so what is past the limit already need not be escaped.
    seen = visible(text[: limit + 1])
    return seen if len(seen) <= limit else seen[: limit - 3] + "..."


def count(word: str) -> int:
    """The number that a word is; 0 if it is none, or longer than any could be."""
    return int(word) if word.isdecimal() and len(word) <= MAX_DIGITS else 0


def _block(place: str | None, problem: Problem) -> list[str]:
    """The lines that show one problem."""
    head = ": ".join(filter(None, [place, dotted(problem.loc), problem.message]))
    details = [
        f"given {problem.given}" if problem.given is not None else None,
        f"allowed: {problem.allowed}" if problem.allowed is not None else None,
        problem.hint,
    ]
    return _wrapped(head, "") + _wrapped("; ".join(filter(None, details)), " " * 4)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        visible(text),
        MAX_COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * 4,
        break_on_hyphens=False,
    )


def _one_screen(blocks: Sequence[list[str]]) -> str:
    """As many whole blocks as fit one screen, and how many more there are."""
    lines: list[str] = []
    for index, block in enumerate(blocks):
        left = len(blocks) - index
        room = MAX_LINES - len(lines) - (1 if left > 1 else 0)
        if lines and len(block) > room:
            lines.append(f"... and {left} more problem{'s' if left > 1 else ''}")
            break
        lines += block[:room]
    return "\n".join(lines)
