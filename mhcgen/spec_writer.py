"""Writing launch choices back into a spec file, all else in it left as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ruamel.yaml import YAML
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from mhcgen.spec import Target

TUNED = "# Tuned on "
COMMENT = re.compile(r"(?:^|\s)(#.*)$", re.MULTILINE)
STEP = "  "


def with_target(
    text: str, targets: Mapping[str, Target], arch: str, device: str
) -> str:
    """A spec's text with the choices of one architecture written out.

    Only the value of that architecture changes; comments in it are kept, above its
    choices, but for that of an earlier tuning. Where the spec has no block for the
    architecture, all targets are written.

    Args:
        text: A legal spec.
        targets: The choices of each architecture that the spec is for.
        arch: The architecture whose choices are new.
        device: What they were found on, for a comment.
    """
    root = YAML().compose(text)
    entry = _entry(root, "targets")
    if entry is not None:
        inner = _entry(entry[1], arch)
        if inner is not None and not _is_flow(entry[1]):
            lines = _choices(targets[arch], device, _column(inner[0]) + STEP)
            return _replaced(text, inner, lines, _column(inner[0]) + STEP)
        return _replaced(text, entry, [*_all(targets, arch, device)], STEP)
    lines = ["targets:", *_all(targets, arch, device)]
    return text.removesuffix("\n") + "\n" + "\n".join(lines) + "\n"


def _entry(mapping: Node, name: str) -> tuple[Node, Node] | None:
    """A key of a mapping and its value; None where there is none."""
    if not isinstance(mapping, MappingNode):
        return None
    return next((pair for pair in mapping.value if pair[0].value == name), None)


def _column(node: Node) -> str:
    return " " * int(node.start_mark.column)


def _all(targets: Mapping[str, Target], arch: str, device: str) -> Iterator[str]:
    for name, target in targets.items():
        if name == arch:
            yield f"{STEP}{name}:"
            yield from _choices(target, device, STEP * 2)
        elif target == Target():
            yield f"{STEP}{name}: {{}}"
        else:
            yield f"{STEP}{name}:"
            yield from _choices(target, None, STEP * 2)


def _choices(target: Target, device: str | None, indent: str) -> list[str]:
    """The lines of one architecture's value."""
    lines = [f"{TUNED}{device}."] if device else []
    if target.cluster_size is not None:
        lines.append(f"cluster_size: {target.cluster_size}")
    if target.token_groups is not None:
        lines.append("token_groups:")
        lines += [
            STEP
            + "- {"
            + ", ".join(
                f"{key}: {value}"
                for key, value in row.model_dump(exclude_none=True).items()
            )
            + "}"
            for row in target.token_groups
        ]
    return [indent + line for line in lines]


def _replaced(
    text: str, entry: tuple[Node, Node], lines: list[str], indent: str
) -> str:
    """The text with a key's value replaced by lines, and its comments above them."""
    key, value = entry
    start = key.end_mark.index
    # Where there is no value, the parser puts it wherever the next thing is.
    end = start if value.value == "" else _end(value)
    newline = text.find("\n", end)
    end = len(text) if newline < 0 else newline
    kept = [
        f"{indent}{comment}"
        for comment in COMMENT.findall(text[start:end])
        if not comment.startswith(TUNED)
    ]
    return text[:start] + ":\n" + "\n".join([*kept, *lines]) + text[end:]


def _is_flow(node: Node) -> bool:
    """Whether a value is written in braces or brackets."""
    return isinstance(node, CollectionNode) and bool(node.flow_style)


def _end(node: Node) -> int:
    """Where a value ends; the parser counts what follows a block as part of it."""
    if isinstance(node, CollectionNode) and not _is_flow(node):
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
