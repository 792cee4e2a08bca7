"""Reading JSON: plain values, and the line and column of each."""

import bisect
import json
from pathlib import Path

from mhcgen.errors import Position, Problem, SpecError, shortened
from mhcgen.yaml_source import MAX_NUMBER, Node, Scalar


def parse_json(path: Path, text: str) -> Node:
    """The value in the text of a JSON file.

    Raises:
        SpecError: The text is not JSON, or repeats a key.
    """
    try:
        # Constants and long numbers pass here: the reader says where they stand.
        json.loads(text, parse_constant=str, parse_int=str)
        return _Reader(path, text).node(0)[0]
    except json.JSONDecodeError as error:
        reason = "the file is empty" if not text.strip() else f"not JSON: {error.msg}"
        placed = (error.lineno, error.colno), Problem((), reason)
        raise SpecError(path, [placed]) from None
    except RecursionError:
        problem = Problem((), "not JSON: too many levels")
        raise SpecError(path, [(None, problem)]) from None


class _Reader:
    """Makes nodes of text that is known to be JSON."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text
        self._decoder = json.JSONDecoder(parse_constant=str, parse_int=str)
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
                if first != '"' and isinstance(value, str):
                    value = self._whole(start, written)
                return Node(self._place(start), written, value, key, first == '"'), end
        return Node(self._place(start), written, value, key), end

    def _whole(self, start: int, written: str) -> int:
        """A whole number.

        Raises:
            SpecError: It is NaN or infinite, or too long.
        """
        if written.lstrip("-")[0] in "NI":
            problem = Problem((), f"not JSON: {written} is no JSON number")
        elif len(written) > MAX_NUMBER:
            problem = Problem(
                (),
                f"a number of {len(written)} characters",
                given=shortened(written),
                allowed=f"at most {MAX_NUMBER} characters",
            )
        else:
            return int(written)
        raise SpecError(self._path, [(self._place(start), problem)])

    def _members(self, start: int) -> tuple[dict[str, Node], int]:
        members: dict[str, Node] = {}
        index = self._skipped(start + 1)
        while self._text[index] != "}":
            place = self._place(index)
            name, index = self._decoder.raw_decode(self._text, index)
            if name in members:
                line = members[name].locate_key(())[0]
                hint = f"remove one; the first is on line {line}"
                problem = Problem((name,), "a repeated key", hint=hint)
                raise SpecError(self._path, [(place, problem)])
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
