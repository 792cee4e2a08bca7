"""Reading YAML: plain values only, and the line and column of each.

A spec needs little of YAML 1.2: mappings with text keys, lists, and plain or quoted
scalars. Anchors, aliases, tags, merge keys and repeated keys are refused while the
parser reports its events, so that nothing is ever expanded or constructed.
"""

import codecs
import difflib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from mhcgen.errors import Loc, Position, Problem, SpecError, shortened, visible

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_VALUES = 4096
MAX_NUMBER = 64  # characters

_UNSAFE = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
_DIRECTIVE = re.compile("(?<![^\r\n\x85\u2028\u2029])%YAML[^\r\n]*")
_STANDARD_TAGS = "tag:yaml.org,2002:"
_SURROGATE = re.compile("[\ud800-\udfff]")

# The core schema of YAML 1.2, less its octal and hexadecimal numbers.
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True} | {
    "false": False,
    "False": False,
    "FALSE": False,
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Node:
    """One value of the file, where it stands, and how it is written there."""

    start: Position
    written: str
    value: "Scalar | list[Node] | dict[str, Node]"
    key: Position | None = None
    quoted: bool = False

    def data(self) -> object:
        """The plain value, without positions."""
        if isinstance(self.value, dict):
            return {key: node.data() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.data() for node in self.value]
        return self.value

    def nearest(self, loc: Loc) -> tuple["Node", bool]:
        """The value at `loc` or its nearest parent, and whether it is the value."""
        node = self
        for part in loc:
            child = node._child(part)
            if child is None:
                return node, False
            node = child
        return node, True

    def locate(self, loc: Loc) -> Position:
        """Where a value stands; where its nearest parent does, if it is absent.

        A value below the line of its key, as sections are, stands at its key.
        """
        node, _ = self.nearest(loc)
        if node.key is not None and node.key[0] != node.start[0]:
            return node.key
        return node.start

    def locate_key(self, loc: Loc) -> Position:
        """Where the key of a value stands."""
        node, _ = self.nearest(loc)
        return node.key or node.start

    def _child(self, part: str | int) -> "Node | None":
        if isinstance(self.value, dict) and isinstance(part, str):
            return self.value.get(part)
        if isinstance(self.value, list) and isinstance(part, int):
            return self.value[part] if 0 <= part < len(self.value) else None
        return None


@dataclass(frozen=True)
class Document:
    """The values of a file, and what it may not hold.

    Attributes:
        root: The value of the whole file.
        problems: What was refused, with its positions.
        unread: The ways to values that are not what the file means.
    """

    root: Node
    problems: list[tuple[Position, Problem]]
    unread: set[Loc]


def read_text(path: Path, kind: str = "spec", pattern: str = "*.yaml") -> str:
    """The text of a file.

    Args:
        path: The file.
        kind: What it should hold, for messages.
        pattern: The names that such files have.

    Raises:
        SpecError: It is no regular file, too large, or no UTF-8 text.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            found = _found_in(path, pattern)
            raise _unusable(
                path,
                f"{_kind(mode)}, not a file",
                hint=f"it holds {found}" if found else None,
            )
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unusable(path, "no such file", hint=_similar_to(path, pattern)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unusable(path, f"cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise _unusable(
            path,
            f"too large for a {kind}",
            allowed=f"at most {MAX_BYTES // 1024} KiB",
            hint="is this the right file?",
        )
    return _decoded(path, raw)


def parse(path: Path, text: str) -> Document:
    """The one document in the text of a file.

    Raises:
        SpecError: The text cannot be followed to its end.
    """
    builder = _Builder(text)
    try:
        root = builder.document()
    except _FatalError as stop:
        raise SpecError(path, [*builder.problems, stop.placed]) from None
    except (YAMLError, OverflowError, ValueError) as error:
        placed = builder.where(error), _syntax_problem(error)
        raise SpecError(path, [*builder.problems, placed]) from None
    return Document(root, builder.problems, builder.unread)


def plain_value(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


class _FatalError(Exception):
    """A problem that leaves no sense in reading on."""

    def __init__(self, position: Position, problem: Problem) -> None:
        super().__init__()
        self.placed = position, problem


class _Builder:
    """Makes nodes of the parser's events, and collects what they may not be."""

    def __init__(self, text: str) -> None:
        self.problems: list[tuple[Position, Problem]] = []
        self.unread: set[Loc] = set()
        self._text = text
        self._events: Iterator[Event] = iter(YAML(typ="rt", pure=True).parse(text))
        self._last: Position = 1, 1
        self._values = 0

    def document(self) -> Node:
        self._next()  # the start of the stream
        try:
            start = self._next()
        except AssertionError:  # of a version that the parser has never heard of
            raise _FatalError(*self._other_version()) from None
        if not isinstance(start, DocumentStartEvent):
            comments = "only comments" if self._text.strip() else "empty"
            raise _FatalError((1, 1), Problem((), f"the file is {comments}"))
        if start.version not in (None, (1, 2)):
            self.problems.append(self._other_version())
        root = self._node(self._next(), ())
        self._next()  # the end of the document
        second = self._next()
        if not isinstance(second, StreamEndEvent):
            raise _FatalError(
                _start(second),
                Problem((), "a second document", hint="one spec per file"),
            )
        return root

    def _other_version(self) -> tuple[Position, Problem]:
        directive = _DIRECTIVE.search(self._text)
        assert directive is not None
        problem = Problem(
            (),
            "a directive for another version of YAML",
            given=shortened(directive[0].strip()),
            allowed="YAML 1.2",
            hint="remove the line",
        )
        return _end_of(self._text[: directive.start()]), problem

    def where(self, error: Exception) -> Position:
        """The place that an error of the parser names, or the last one read."""
        mark = None
        if isinstance(error, MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
        return (mark.line + 1, mark.column + 1) if mark else self._last

    def _next(self) -> Event:
        event = next(self._events)
        self._last = _start(event)
        return event

    def _refuse(
        self, event: Event, loc: Loc, message: str, given: str, hint: str
    ) -> None:
        problem = Problem(loc, message, given=shortened(given), hint=hint)
        self.problems.append((_start(event), problem))

    def _written(self, first: Event, last: Event) -> str:
        return self._text[first.start_mark.index : last.end_mark.index].strip()

    def _node(self, event: Event, loc: Loc, key: Position | None = None) -> Node:
        self._values += 1
        for count, most, what in (
            (len(loc), MAX_DEPTH, "levels"),
            (self._values, MAX_VALUES, "values"),
        ):
            if count > most:
                problem = Problem((), f"too many {what}", allowed=f"at most {most}")
                raise _FatalError(_start(event), problem)
        if isinstance(event, AliasEvent):
            self.unread.add(loc)
            given, hint = f"*{event.anchor}", "write the value out"
            self._refuse(event, loc, "an alias", given, hint)
            return Node(_start(event), given, None, key)
        assert isinstance(event, ScalarEvent | CollectionStartEvent)
        if event.anchor is not None:
            hint = "write each value out"
            self._refuse(event, loc, "an anchor", f"&{event.anchor}", hint)
        if event.ctag is not None:
            self.unread.add(loc)
            tag = str(event.tag).replace(_STANDARD_TAGS, "!!")
            self._refuse(event, loc, "a tag", tag, "write the plain value")
        if isinstance(event, MappingStartEvent):
            return self._mapping(event, loc, key)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(event, loc, key)
        assert isinstance(event, ScalarEvent)
        return self._scalar(event, loc, key)

    def _mapping(
        self, start: MappingStartEvent, loc: Loc, key: Position | None
    ) -> Node:
        entries: dict[str, Node] = {}
        while not isinstance(event := self._next(), MappingEndEvent):
            at = (*loc, getattr(event, "value", "?"))
            name = self._key(event, at)
            entry = self._node(self._next(), at, _start(event))
            if name is not None and name in entries:
                first = entries[name].locate_key(())[0]
                hint = f"remove one; the first is on line {first}"
                self._refuse(event, at, "a repeated key", name, hint)
            elif name is not None:
                entries[name] = entry
        count = f"a mapping of {len(entries)} key{'s'[: len(entries) != 1]}"
        return Node(_start(start), self._collection(start, event, count), entries, key)

    def _key(self, event: Event, at: Loc) -> str | None:
        """The name that a key gives; None, with a problem noted, if it gives none."""
        key = self._node(event, at)
        if not isinstance(key.value, str):
            hint = "quote it, or remove it"
            self._refuse(event, at, "a key that is not text", key.written, hint)
            return None
        if key.value == "<<" and not key.quoted:
            self._refuse(event, at, "a merge key", "<<", "write the keys out")
            return None
        return key.value

    def _sequence(
        self, start: SequenceStartEvent, loc: Loc, key: Position | None
    ) -> Node:
        items: list[Node] = []
        while not isinstance(event := self._next(), SequenceEndEvent):
            items.append(self._node(event, (*loc, len(items))))
        written = self._collection(start, event, f"a list of {len(items)}")
        return Node(_start(start), written, items, key)

    def _collection(
        self, start: CollectionStartEvent, end: Event, otherwise: str
    ) -> str:
        return self._written(start, end) if start.flow_style else otherwise

    def _scalar(self, event: ScalarEvent, loc: Loc, key: Position | None) -> Node:
        written = self._written(event, event)
        if _SURROGATE.search(event.value):  # an escape can make one
            problem = Problem(
                loc,
                "half of a character",
                given=shortened(written),
                hint="write the character itself",
            )
            raise _FatalError(_start(event), problem)
        if event.style:
            return Node(_start(event), written, event.value, key, quoted=True)
        value: Scalar = event.value
        if len(event.value) <= MAX_NUMBER:
            value = plain_value(event.value)
        elif _FLOAT.fullmatch(event.value):
            self.unread.add(loc)
            problem = Problem(
                loc,
                "too long a number",
                given=shortened(written),
                allowed=f"at most {MAX_NUMBER} characters",
                hint="round it",
            )
            self.problems.append((_start(event), problem))
        return Node(_start(event), written or "nothing", value, key)


def _start(event: Event) -> Position:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _syntax_problem(error: Exception) -> Problem:
    """What the parser says, in one line."""
    if not isinstance(error, MarkedYAMLError):  # chr() or int() within the parser
        return Problem((), "not YAML: a character or version number too large")
    reason = shortened(", ".join(filter(None, [error.context, error.problem])), 120)
    hint = None
    if "'\\t'" in reason:
        hint = "indent with spaces, not tabs"
    elif error.context_mark is not None and error.context is not None:
        hint = f"it starts on line {error.context_mark.line + 1}"
    return Problem((), f"not YAML: {reason}", hint=hint)


def _unusable(
    path: Path, message: str, allowed: str | None = None, hint: str | None = None
) -> SpecError:
    return SpecError(path, [(None, Problem((), message, allowed=allowed, hint=hint))])


def _decoded(path: Path, raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        raise _unusable(path, "UTF-16 or UTF-32 text", hint="save it as UTF-8")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        problem = Problem(
            (),
            "not UTF-8 text",
            given=f"the byte 0x{raw[error.start]:02x}",
            hint="save it as UTF-8; is this the right file?",
        )
        raise SpecError(path, [(_end_of(before), problem)]) from None
    if unsafe := _UNSAFE.search(text):
        problem = Problem(
            (),
            "a control character",
            given=shortened(unsafe[0]),
            hint="remove it; is this the right file?",
        )
        raise SpecError(path, [(_end_of(text[: unsafe.start()]), problem)])
    return text


def _end_of(text: str) -> Position:
    """The position of what follows the text."""
    lines = re.split("\r\n|\r|\n", text)
    return len(lines), len(lines[-1]) + 1


def _kind(mode: int) -> str:
    kinds = [
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ]
    return next((name for test, name in kinds if test(mode)), "a device")


def _found_in(folder: Path, pattern: str) -> str | None:
    """The names of some files of a folder; None if it has none."""
    return ", ".join(_names_in(folder, pattern)[:3]) or None


def _similar_to(path: Path, pattern: str) -> str:
    """A hint for the name of a file that is not there."""
    if not os.path.isdir(path.parent):
        return f"there is no folder {shortened(str(path.parent))} either"
    close = difflib.get_close_matches(path.name, _names_in(path.parent, "*"), 3)
    if close:
        return f"did you mean {' or '.join(map(shortened, close))}?"
    here = path.parent == Path()
    folder = "the current folder" if here else visible(str(path.parent))
    return f"{folder} holds {_found_in(path.parent, pattern) or f'no {pattern}'}"


def _names_in(folder: Path, pattern: str) -> list[str]:
    try:
        return sorted(shortened(path.name) for path in folder.glob(pattern))
    except OSError:
        return []
