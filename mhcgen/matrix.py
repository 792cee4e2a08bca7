"""Matrices: a short file that stands for many specs.

A matrix is a list of blocks. A block gives some axes several values each, and makes a
spec of every combination; what it does not name is as its base or the matrix's base
says, or as specs have it by default. AXES is the table of axes: each is one choice of a
spec, with the rules that it has there.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import Field, ValidationError, create_model

from mhcgen.errors import Loc, MhcgenError, PlanError, Problem, SpecError, dotted
from mhcgen.plan import Plan, make_plan
from mhcgen.spec import ARCHS, REFUSED, Arch, Choices, Section, Spec, Target
from mhcgen.spec_problems import problems_of
from mhcgen.yaml_source import parse, read_text

MAX_SPECS = 20_000
MAX_NAME = 48
HASH_DIGITS = 8
NAME_PATTERN = f"^[a-z][a-z0-9_]{{0,{MAX_NAME - 1}}}$"

Values = dict[str, Any]
"""The values of some axes, as plain data."""


@dataclass(frozen=True)
class Axis:
    """One choice of a spec that a matrix may vary.

    Attributes:
        name: Its name in a matrix.
        loc: Where a spec has it.
        label: What it adds to the name of a spec.
        annotation: The type of its values.
        default: The value that specs have without it; None where they need it.
        is_needed: Whether a spec needs it.
        description: What it is.
    """

    name: str
    loc: tuple[str, ...]
    label: Callable[[Any], str]
    annotation: Any
    default: Any
    is_needed: bool
    description: str


def _axis(name: str, loc: str, label: Callable[[Any], str]) -> Axis:
    """The axis of one field of a spec, with the rules of that field."""
    *sections, key = loc.split(".")
    model: type[Section] = Spec
    for section in sections:
        model = cast(type[Section], model.model_fields[section].annotation)
    info = model.model_fields[key]
    return Axis(
        name,
        tuple(loc.split(".")),
        label,
        info.rebuild_annotation(),
        None if info.is_required() else _plain(info.get_default()),
        info.is_required(),
        info.description or "",
    )


def _plain(value: Any) -> Any:
    """A value of a spec as its file would have it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _prefixed(prefix: str) -> Callable[[Any], str]:
    return lambda value: f"{prefix}{value}"


def _experts(moe: dict[str, Any] | None) -> str:
    if moe is None:
        return "nomoe"
    shared, dtypes = moe["shared_expert"], moe["weight_dtypes"]
    words = [f"k{moe['top_k']}"]
    words += [f"{shared}_shared"] * (shared != "optional")
    return "_".join(words + dtypes * (len(dtypes) == 1))


_CLUSTER = Target.model_fields["cluster_size"]
_TARGETS = Spec.model_fields["targets"].get_default(call_default_factory=True)

AXES: tuple[Axis, ...] = (
    _axis("hidden", "model.hidden", _prefixed("h")),
    _axis("hc", "model.hc", _prefixed("hc")),
    _axis("tp", "parallel.tp", _prefixed("tp")),
    Axis(
        "cluster",
        ("targets", "cluster_size"),
        _prefixed("c"),
        _CLUSTER.rebuild_annotation(),
        None,
        False,
        f"{_CLUSTER.description} For every architecture.",
    ),
    Axis(
        "archs",
        ("targets",),
        "_".join,
        Choices[Arch],
        list(_TARGETS),
        False,
        "The architectures to make kernels for.",
    ),
    _axis("capacity", "capacity.max_tokens", _prefixed("m")),
    _axis("activation", "precision.activation", str),
    _axis("fn_weight", "precision.fn_weight", _prefixed("fn_")),
    _axis("projection", "precision.projection", str),
    _axis("pre_mix", "model.pre_mix", str),
    _axis("norm_weight", "model.norm_weight", _prefixed("norm_")),
    _axis("batch_invariant", "batch_invariant", lambda value: "invariant"),
    _axis("mixes", "mixes", str),
    _axis("transports", "parallel.transports", "_".join),
    _axis("moe", "moe", _experts),
    _axis("entry", "ends.entry", lambda value: "entry"),
    _axis("exit", "ends.exit", _prefixed("exit_")),
    _axis("stream_mean", "outputs.stream_mean", lambda value: "mean"),
    _axis("rms_eps", "model.rms_eps", _prefixed("rms")),
    _axis("hc_eps", "model.hc_eps", _prefixed("hceps")),
    _axis("norm_eps", "model.norm_eps", _prefixed("eps")),
    _axis("post_mult", "model.post_mult", _prefixed("post")),
    _axis("sinkhorn_iters", "model.sinkhorn_iters", _prefixed("sinkhorn")),
)
DEFAULTS: Values = {axis.name: axis.default for axis in AXES if not axis.is_needed}


def _axes_model(name: str, doc: str, form: Callable[[Any], Any]) -> type[Section]:
    """A section with every axis; a key that is left out is not set."""
    fields: dict[str, Any] = {
        axis.name: (
            form(axis.annotation),
            Field(default=None, description=axis.description),
        )
        for axis in AXES
    }
    return create_model(name, __base__=Section, __doc__=doc, **fields)


def _list_of(annotation: Any) -> Any:
    return Choices[annotation]


if TYPE_CHECKING:
    Base: TypeAlias = Section
    Axes: TypeAlias = Section
    Rule: TypeAlias = Section
else:
    Base = _axes_model("Base", "Axes with one value each.", lambda value: value)
    Axes = _axes_model("Axes", "Axes with several values each.", _list_of)
    Rule = _axes_model(
        "Rule", "Specs that have one of the values on every axis named.", _list_of
    )


class Block(Section):
    """Every combination of the values of some axes."""

    name: Annotated[
        str, Field(pattern=NAME_PATTERN, description="Name of the block, in reports.")
    ]
    base: Annotated[
        Base, Field(description="Values of all its specs, over the matrix's base.")
    ] = Base()
    axes: Annotated[Axes, Field(description="The axes and their values.")]
    exclude: Annotated[
        tuple[Rule, ...],
        Field(strict=False, description="Combinations to leave out."),
    ] = ()


class Matrix(Section):
    """What mhcgen makes many specs from."""

    base: Annotated[Base, Field(description="Values of all specs.")] = Base()
    blocks: Annotated[
        tuple[Block, ...],
        Field(
            strict=False,
            min_length=1,
            description="The blocks; of equal specs the first one counts.",
        ),
    ]


def matrix_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a matrix."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **Matrix.model_json_schema()}


def matrix_schema_text() -> str:
    """The JSON Schema as specs/matrix/schema.json holds it."""
    return json.dumps(matrix_schema(), indent=2) + "\n"


def load_matrix(path: Path) -> Matrix:
    """Reads and validates a matrix.

    Raises:
        SpecError: The file is no legal matrix; the error holds all that is wrong.
    """
    document = parse(path, read_text(path, "matrix"))
    try:
        matrix = Matrix.model_validate(document.root.data())
    except ValidationError as error:
        placed = problems_of(error, document, matrix_schema())
        raise SpecError(path, placed) from None
    broken = [(document.root.locate(p.loc), p) for p in _broken_rules(matrix)]
    if document.problems or broken:
        raise SpecError(path, [*document.problems, *broken])
    return matrix


def _broken_rules(matrix: Matrix) -> Iterator[Problem]:
    """What no rule of a single value finds."""
    names = [block.name for block in matrix.blocks]
    total = 0
    for index, block in enumerate(matrix.blocks):
        at: Loc = ("blocks", index)
        if block.name in names[:index]:
            yield Problem((*at, "name"), "given before", given=block.name)
        axes, fixed = values_of(block.axes), values_of(block.base)
        if not axes:
            yield Problem(
                (*at, "axes"), "no axis", allowed=", ".join(a.name for a in AXES)
            )
        for name in axes.keys() & fixed.keys():
            yield Problem(
                (*at, "base", name), "an axis of this block", hint="remove it"
            )
        known = values_of(matrix.base) | fixed | axes
        for axis in AXES:
            if axis.is_needed and axis.name not in known:
                hint = f"give {axis.name} in axes, in base or in the matrix's base"
                yield Problem(at, f"no {axis.name}", hint=hint)
        made = {axis: [value] for axis, value in (DEFAULTS | known).items()} | axes
        for number, rule in enumerate(block.exclude):
            where = (*at, "exclude", number)
            if not values_of(rule):
                yield Problem(where, "excludes everything", hint="name some axes")
            for name, among in values_of(rule).items():
                if name in made and not any(value in made[name] for value in among):
                    yield Problem(
                        (*where, name),
                        "excludes nothing: the block makes no spec with that",
                        given=json.dumps(among),
                        allowed=json.dumps(made[name]),
                    )
        total += math.prod(map(len, axes.values()))
        if total > MAX_SPECS:
            yield Problem(
                (*at, "axes"),
                f"with this block, the matrix makes {total} specs",
                allowed=f"at most {MAX_SPECS}",
                hint="vary fewer axes together; give others a block of their own",
            )
            return


def values_of(section: Section) -> Values:
    """The axes that a section names, as plain data."""
    return {
        axis.name: _plain(getattr(section, axis.name))
        for axis in AXES
        if axis.name in section.model_fields_set
    }


@dataclass(frozen=True)
class Candidate:
    """One spec of a matrix, legal or not.

    Attributes:
        block: The block that it is of.
        values: The value of every axis.
    """

    block: str
    values: Values

    @cached_property
    def name(self) -> str:
        """A name made of the values that are not the defaults of specs."""
        words = [
            axis.label(self.values[axis.name])
            for axis in AXES
            if axis.is_needed or self.values[axis.name] != axis.default
        ]
        name = "_".join(words).translate({ord("."): "p", ord("-"): "m"})
        if len(name) <= MAX_NAME:
            return name
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:HASH_DIGITS]
        return f"{name[: MAX_NAME - HASH_DIGITS - 1]}_{digest}"

    @cached_property
    def key(self) -> str:
        """Text that only equal candidates share."""
        return json.dumps(self.values, sort_keys=True)

    @cached_property
    def traits(self) -> frozenset[tuple[str, str]]:
        """Each axis with its value, as text."""
        return frozenset((axis, json.dumps(v)) for axis, v in self.values.items())

    @property
    def data(self) -> dict[str, Any]:
        """The spec, as its file would have it."""
        data: dict[str, Any] = {"name": self.name}
        for axis in AXES:
            *sections, key = axis.loc
            if axis.loc[0] != "targets":
                section = data
                for part in sections:
                    section = section.setdefault(part, {})
                section[key] = self.values[axis.name]
        data["targets"] = {
            arch: {"cluster_size": self.values["cluster"]}
            for arch in self.values["archs"]
        }
        return data

    def plan(self) -> Plan:
        """The plan of the spec.

        Raises:
            PlanError: It is not legal.
        """
        try:
            spec = Spec.model_validate(self.data)
        except ValidationError as error:
            raise PlanError(list(_rules_of(error))) from None
        return make_plan(spec)


def _rules_of(error: ValidationError) -> Iterator[Problem]:
    """The rules that a spec of legal values breaks."""
    for details in error.errors(include_url=False):
        if details["type"] != REFUSED:
            yield Problem(details["loc"], details["msg"])
            continue
        for problem in details["ctx"]["problems"]:
            yield replace(problem, loc=(*details["loc"], *problem.loc))


@dataclass
class Expansion:
    """What a matrix makes.

    Attributes:
        blocks: The names of the blocks.
        legal: The distinct specs that a plan can be made for.
        refused: Each other one, with the first reason.
        excluded: Combinations that a rule leaves out, by block.
        repeated: Combinations that an earlier one equals, by block.
    """

    blocks: tuple[str, ...]
    legal: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Candidate, Problem]] = field(default_factory=list)
    excluded: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)

    @property
    def reasons(self) -> list[tuple[str, list[tuple[Candidate, Problem]]]]:
        """The refused specs by reason, the most frequent first."""
        groups: dict[str, list[tuple[Candidate, Problem]]] = {}
        for candidate, problem in self.refused:
            groups.setdefault(reason_of(problem), []).append((candidate, problem))
        return sorted(groups.items(), key=lambda item: -len(item[1]))


def reason_of(problem: Problem) -> str:
    """A problem without what differs from spec to spec: its numbers."""
    key = dotted(problem.loc)
    for arch in ARCHS:
        key = key.replace(arch, "*")
    message = re.sub(r"\b[0-9]+\b", "N", problem.message)
    return f"{key}: {message}"


def expand(matrix: Matrix, only: Collection[str] = ()) -> Expansion:
    """Makes the specs of a matrix, and plans each.

    Args:
        matrix: The matrix.
        only: The names of the specs to make; all if empty.

    Raises:
        MhcgenError: The matrix has no spec of a name, or the plan refuses it.
    """
    expansion = Expansion(tuple(block.name for block in matrix.blocks))
    seen: dict[str, Candidate] = {}
    for block in matrix.blocks:
        rules = [values_of(rule) for rule in block.exclude]
        for candidate in _combinations(matrix, block):
            if any(_matches(candidate.values, rule) for rule in rules):
                expansion.excluded[block.name] += 1
            elif candidate.key in seen:
                expansion.repeated[block.name] += 1
            else:
                seen[candidate.key] = candidate
    by_name = {candidate.name: candidate for candidate in seen.values()}
    for name in only:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise MhcgenError(f"--only {name}: the matrix has no such spec{hint}")
    for name, candidate in by_name.items():
        if not only or name in only:
            try:
                candidate.plan()
            except PlanError as error:
                if only:
                    raise MhcgenError(f"--only {name}: refused\n{error}") from None
                expansion.refused.append((candidate, error.problems[0]))
            else:
                expansion.legal.append(candidate)
    return expansion


def _combinations(matrix: Matrix, block: Block) -> Iterator[Candidate]:
    """Every combination of a block's values, in order."""
    fixed = DEFAULTS | values_of(matrix.base) | values_of(block.base)
    axes = values_of(block.axes)
    for combination in itertools.product(*axes.values()):
        yield Candidate(block.name, fixed | dict(zip(axes, combination, strict=True)))


def _matches(values: Values, rule: Values) -> bool:
    return all(values[axis] in among for axis, among in rule.items())


def sample(candidates: Sequence[Candidate], count: int, seed: int) -> list[Candidate]:
    """Some of the candidates, in their order, the same ones for the same seed.

    Those come first that show the most values that none before them shows, so that
    every value of every axis is there if so few can show them all.
    """
    left = list(candidates)
    random.Random(seed).shuffle(left)
    unseen = set().union(*(candidate.traits for candidate in left))
    picked: set[str] = set()
    while left and unseen and len(picked) < count:
        best = max(left, key=lambda candidate: len(candidate.traits & unseen))
        left.remove(best)
        unseen -= best.traits
        picked.add(best.key)
    picked.update(c.key for c in left[: max(0, count - len(picked))])
    return [candidate for candidate in candidates if candidate.key in picked]
