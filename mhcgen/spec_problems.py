"""What is wrong with a file, in words: the validator's errors as problems.

What is legal at a place is read from the JSON Schema, so no range is repeated here.
"""

import contextlib
import difflib
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mhcgen.errors import Loc, Position, Problem, shortened
from mhcgen.spec import REFUSED, json_schema
from mhcgen.yaml_source import MAX_NUMBER, Document, Node, plain_value

Schema = dict[str, Any]

_MESSAGES = {
    "missing": "missing",
    "greater_than": "too small",
    "greater_than_equal": "too small",
    "less_than": "too large",
    "less_than_equal": "too large",
    "finite_number": "not a finite number",
    "too_short": "empty",
    "literal_error": "not one of the choices",
    "string_pattern_mismatch": "not of the right form",
    "int_type": "not a whole number",
    "bool_type": "not true or false",
    "float_type": "not a number",
    "string_type": "not text",
    "tuple_type": "not a list",
    "dict_type": "not a mapping",
    "model_type": "not a mapping",
}


def problems_of(
    error: ValidationError, document: Document, schema: Schema | None = None
) -> list[tuple[Position, Problem]]:
    """All that is wrong with a document, each with its position.

    Values that could not be read, and keys that do not exist, have one problem each:
    what else the validator says about them is left out.

    Args:
        error: What the validator says.
        document: The document.
        schema: The JSON Schema of what it should be; that of a spec if None.
    """
    words = _Words(schema or _spec_schema())
    placed = list(document.problems)
    settled = set(document.unread)
    for details in error.errors(include_url=False):
        loc = details["loc"]
        if details["type"] == "literal_error" and loc[-1] == "[key]":
            loc = loc[:-1]
            details["type"] = "extra_forbidden"
        if any(loc[:length] in settled for length in range(len(loc) + 1)):
            continue
        if details["type"] == "extra_forbidden":
            settled.add(loc)
            position = document.root.locate_key(loc)
            placed.append((position, words.unknown_key(loc, document.root)))
        else:
            placed += [
                (document.root.locate(problem.loc), problem)
                for problem in words.bad_value(details, document.root)
            ]
    return placed


@functools.cache
def _spec_schema() -> Schema:
    return json_schema()


class _Words:
    """What is wrong, and what is legal, by one JSON Schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def unknown_key(self, loc: Loc, root: Node) -> Problem:
        keys = list(self._at(loc[:-1])["properties"])
        key = str(loc[-1])
        close = difflib.get_close_matches(key.lower(), keys, 1)
        return Problem(
            loc,
            "an unknown key",
            given=shortened(key, 40) or '""',
            allowed=_choice(keys),
            hint=f"did you mean {close[0]}?" if close else None,
        )

    def bad_value(self, details: ErrorDetails, root: Node) -> Iterable[Problem]:
        loc = details["loc"]
        if details["type"] == REFUSED:
            for problem in details["ctx"]["problems"]:
                where = (*loc, *problem.loc)
                yield replace(problem, loc=where, given=_given(where, root))
            return
        schema = self._at(loc)
        node, present = root.nearest(loc)
        if details["type"] == "too_short" and node.value:
            return  # entries that are wrong themselves do not count for the validator
        message = _MESSAGES.get(details["type"], details["msg"])
        if details["type"] == "multiple_of":
            message = f"not a multiple of {schema['multipleOf']}"
        hint: str | None
        if not present:
            hint = "add it"
        elif node.value is None:
            message = "without a value"
            hint = "remove the key for its default" if "default" in schema else None
        else:
            hint = _nearest(node, schema)
        yield Problem(loc, message, _given(loc, root), self._allowed(schema), hint)

    def _at(self, loc: Loc) -> Schema:
        """The schema of a value, less the null that stands for its absence."""
        schema = self._schema
        for part in loc:
            schema = (
                schema["items"] if isinstance(part, int) else schema["properties"][part]
            )
            schema = self._followed(schema)
        return schema

    def _followed(self, schema: Schema) -> Schema:
        schema = schema.get("anyOf", [schema])[0]
        if "$ref" in schema:
            schema = self._schema["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _allowed(self, schema: Schema) -> str:
        """What is legal by a schema, in words."""
        if options := _choices(schema):
            return _choice(options)
        match schema["type"]:
            case "integer" | "number":
                return _range(schema)
            case "boolean":
                return "true or false"
            case "string":
                return f"text like {schema['pattern']}"
            case "array":
                items = self._followed(schema["items"])
                if _choices(items):
                    return f"a list of {self._allowed(items)}, each once"
                return f"a list, each entry {self._allowed(items)}"
            case _:
                return f"a mapping with keys of {', '.join(schema['properties'])}"


def _given(loc: Loc, root: Node) -> str | None:
    node, present = root.nearest(loc)
    return shortened(node.written) if present else None


def _choice(options: Iterable[object]) -> str:
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def _choices(schema: Schema) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _range(schema: Schema) -> str:
    noun = "a whole number" if schema["type"] == "integer" else "a number"
    if "multipleOf" in schema:
        noun = f"a multiple of {schema['multipleOf']}"
    if "exclusiveMinimum" in schema:
        low, high = schema["exclusiveMinimum"], schema["maximum"]
        return f"{noun} above {low:g}, up to {high:g}"
    return f"{noun} from {schema['minimum']} to {schema['maximum']}"


def _nearest(node: Node, schema: Schema) -> str | None:
    """A hint that names the legal values nearest to the one given, if any are."""
    value = node.value
    if isinstance(value, str):
        return _nearest_to_text(node, value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        values = _nearest_to_number(value, schema)
        if values:
            return f"nearest: {', '.join(f'{value:g}' for value in values)}"
    if schema.get("default") is not None and not _choices(schema):
        default, plain = schema["default"], schema["type"] in ("integer", "number")
        return f"such as {default:g}" if plain else None
    return None


def _nearest_to_text(node: Node, text: str, schema: Schema) -> str | None:
    if schema.get("type") in ("integer", "number"):
        return _as_number(node, text)
    if "pattern" in schema:
        name = re.sub("[^a-z0-9]+", "_", text.lower()).lstrip("_0123456789")[:48]
        name = name.rstrip("_")
        return f"nearest: {name}" if re.fullmatch(schema["pattern"], name) else None
    options = [option for option in _choices(schema) if isinstance(option, str)]
    if close := difflib.get_close_matches(text.lower(), options, 1):
        return f"did you mean {close[0]}?"
    return None


def _as_number(node: Node, text: str) -> str | None:
    """A hint for a number that is written as text."""
    if node.quoted:
        number = isinstance(plain_value(text[:MAX_NUMBER]), int | float)
        return "remove the quotes" if number else None
    with contextlib.suppress(ValueError):
        return f"in plain decimals: {int(text[:MAX_NUMBER], base=0)}"
    return None


def _nearest_to_number(value: int | float, schema: Schema) -> list[int | float]:
    """Up to two legal numbers, one from each side where there is one."""
    numbers = [option for option in _choices(schema) if isinstance(option, int)]
    if math.isnan(value):
        return []
    if numbers:
        below = [number for number in numbers if number <= value][-1:]
        above = [number for number in numbers if number >= value][:1]
        return sorted({*below, *above})
    if "maximum" not in schema:
        return []
    low, high = schema.get("minimum", -math.inf), schema["maximum"]
    if schema["type"] == "number":
        return [high] if value > high else []
    clamped = max(low, min(value, high))
    step = schema.get("multipleOf", 1)
    return sorted({math.floor(clamped / step) * step, math.ceil(clamped / step) * step})
