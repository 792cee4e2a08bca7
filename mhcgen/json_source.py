"""Reading JSON: plain values, and the line and column of each."""

import bisect
import json
from pathlib import Path

from mhcgen.errors import Position, Problem, SpecError, shortened
from mhcgen.yaml_source import Node, Scalar


def parse_json(path: Path, text: str) -> Node:
    """The value in the text of a JSON file; of a repeated key, the last counts.

    Raises:
        SpecError: The text is not JSON.
    """
    try:
        json.loads(text, parse_constant=_refuse_constant)
        return _Reader(text).node(0)[0]
    except json.JSONDecodeError as error:
        reason = "the file is empty" if not text.strip() else f"not JSON: {error.msg}"
        placed = (error.lineno, error.colno), Problem((), reason)
        raise SpecError(path, [placed]) from None
    except (RecursionError, ValueError) as error:
        what = "too many levels" if isinstance(error, RecursionError) else str(error)
        problem = Problem((), f"not JSON: {shortened(what)}")
        raise SpecError(path, [(None, problem)]) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class _Reader:
    """Makes nodes of text that is known to be JSON."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decoder = json.JSONDecoder()
        self._lines = [0, *(i + 1 for i, char in enumerate(text) if char == "\n")]

    def node(self, start: int, key: Position | None = None) -> tuple[Node, int]:
        """The value at or after an offset, and the offset behind it."""
        start = self._skipped(start)
        value: Scalar | list[Node] | dict[str, Node]
        match self._text[start]:
            case "{":
                value, end = self._members(start)
                written = f"an object of {len(value)} keys"
            case "[":
                value, end = self._items(start)
                written = f"a list of {len(value)}"
            case first:
                value, end = self._decoder.raw_decode(self._text, start)
                written = self._text[start:end]
                return Node(self._place(start), written, value, key, first == '"'), end
        return Node(self._place(start), written, value, key), end

    def _members(self, start: int) -> tuple[dict[str, Node], int]:
        members: dict[str, Node] = {}
        index = self._skipped(start + 1)
        while self._text[index] != "}":
            place = self._place(index)
            name, index = self._decoder.raw_decode(self._text, index)
            colon = self._skipped(index)
            members[name], index = self.node(colon + 1, place)
            index = self._next(index)
        return members, index + 1

    def _items(self, start: int) -> tuple[list[Node], int]:
        items: list[Node] = []
        index = self._skipped(start + 1)
        while self._text[index] != "]":
            item, index = self.node(index)
            items.append(item)
            index = self._next(index)
        return items, index + 1

    def _next(self, index: int) -> int:
        """The offset of what follows a value: the next one, or the closing bracket."""
        index = self._skipped(index)
        return self._skipped(index + 1) if self._text[index] == "," else index

    def _skipped(self, index: int) -> int:
        while self._text[index] in " \t\r\n":
            index += 1
        return index

    def _place(self, index: int) -> Position:
        line = bisect.bisect(self._lines, index)
        return line, index - self._lines[line - 1] + 1
