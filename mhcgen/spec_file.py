"""Spec files: from a path to a valid spec, or to every reason why not."""

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from mhcgen.errors import Loc, Position, SpecError
from mhcgen.spec import Spec
from mhcgen.spec_problems import problems_of
from mhcgen.yaml_source import Node, parse, read_text


@dataclass(frozen=True)
class SpecSource:
    """A spec, and the file that it was read from.

    Attributes:
        path: The file, as the user named it.
        text: All of its text.
        spec: What it says.
    """

    path: Path
    text: str
    spec: Spec
    _root: Node = field(repr=False)

    def locate(self, loc: Loc) -> Position:
        """The line and column of a value, or of its nearest parent in the file."""
        return self._root.locate(loc)


def load_spec(path: Path) -> SpecSource:
    """Reads and validates a spec.

    Raises:
        SpecError: The file is no legal spec; the error holds all that is wrong.
    """
    text = read_text(path)
    document = parse(path, text)
    data = document.root.data()
    moe, is_there = document.root.nearest(("moe",))
    if is_there and moe.written == "nothing" and isinstance(data, dict):
        data["moe"] = {}  # as of any section; null, written out, is no experts
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        raise SpecError(path, problems_of(error, document)) from None
    if document.problems:
        raise SpecError(path, document.problems)
    return SpecSource(path, text, spec, document.root)
