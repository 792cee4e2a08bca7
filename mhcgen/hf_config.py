"""Specs from the config.json of a Hugging Face model.

FIELDS is the table of what is read; nothing else here knows the keys of a config. They
are those that the model code of DeepSeek-V4 and GLM-5.3-Flash in transformers reads.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mhcgen.errors import (
    Loc,
    MhcgenError,
    PlanError,
    Position,
    Problem,
    SpecError,
    dotted,
    shortened,
)
from mhcgen.json_source import parse_json
from mhcgen.plan import make_plan
from mhcgen.render import yaml_inline
from mhcgen.spec import Capacity, Model, Precision, Spec
from mhcgen.spec_problems import problems_of
from mhcgen.yaml_source import Document, Node, Scalar, read_text

MODEL_TYPES = ("deepseek_v4", "glm5_next")
SECTION = "text_config"
"""Where a model of several modalities keeps the values of its language model."""

SCHEMA = "schema.json"
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"
HEADER = """\
# Made by mhcgen init from {source}; a comment says which key of it a value is from.
"""
DEFAULT = "default"


@dataclass(frozen=True)
class Words:
    """How a value of a config is said in a spec.

    Attributes:
        allowed: What a config may say.
        meaning: What that is in a spec; None if the config may not say it.
    """

    allowed: str
    meaning: Callable[[object], str | None]


DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def _dtype(value: object) -> str | None:
    return DTYPES.get(value) if isinstance(value, str) else None


def _shared_expert(value: object) -> str | None:
    if type(value) is not int or value < 0:
        return None
    return "optional" if value else "never"


@dataclass(frozen=True)
class Field:
    """A value of a spec, and where a config has it.

    Attributes:
        loc: The value in the spec: a section and a key.
        keys: The keys of a config that give it; the first that is there counts.
        default: What it is without such a key; None where one is needed.
        words: How the config's value is said in a spec; None if it is the same.
    """

    loc: tuple[str, str]
    keys: tuple[str, ...]
    default: Scalar = None
    words: Words | None = None


def _default(section: type[Capacity | Model | Precision], key: str) -> Any:
    return section.model_fields[key].default


FIELDS = (
    Field(("model", "hidden"), ("hidden_size",)),
    Field(("model", "hc"), ("hc_mult",)),
    Field(("model", "rms_eps"), ("rms_norm_eps",)),
    Field(("model", "hc_eps"), ("hc_eps",)),
    Field(("model", "norm_eps"), ("rms_norm_eps",)),
    Field(("model", "post_mult"), (), _default(Model, "post_mult")),
    Field(("model", "sinkhorn_iters"), ("hc_sinkhorn_iters",)),
    Field(("model", "pre_mix"), (), _default(Model, "pre_mix")),
    Field(("parallel", "tp"), ()),
    Field(("capacity", "max_tokens"), (), _default(Capacity, "max_tokens")),
    Field(("moe", "top_k"), ("num_experts_per_tok", "num_experts_per_token")),
    Field(
        ("moe", "shared_expert"),
        ("n_shared_experts", "num_shared_experts"),
        "never",
        Words("a whole number, 0 or more", _shared_expert),
    ),
    Field(
        ("precision", "activation"),
        ("dtype", "torch_dtype"),
        _default(Precision, "activation"),
        Words(" or ".join(DTYPES), _dtype),
    ),
    Field(("precision", "fn_weight"), (), _default(Precision, "fn_weight")),
)
MOE_KEYS = next(field.keys for field in FIELDS if field.loc == ("moe", "top_k"))
"""The keys without which a model has no experts."""

HC_KEYS = ("hc_mult", "hc_sinkhorn_iters", "hc_eps")
"""The keys that only models with manifold-constrained hyper-connections have."""


@dataclass(frozen=True)
class Value:
    """One value of the spec, and where it is from.

    Attributes:
        loc: The value in the spec.
        value: What the spec says.
        origin: A key of the config, an option of the command, or "default".
        node: The value in the config; None where it has none.
    """

    loc: tuple[str, str]
    value: object
    origin: str
    node: Node | None = None


@dataclass(frozen=True)
class ConfigSpec:
    """A spec that was made from a config.

    Attributes:
        source: The config, as the user named it.
        spec: The spec.
        values: Its values, in the order of the spec file.
        notes: What the user should know of how the config was read.
    """

    source: Path
    spec: Spec
    values: tuple[Value, ...]
    notes: tuple[str, ...]

    def text_in(self, folder: Path) -> str:
        """The spec file for a folder: YAML that says where each value is from."""
        lines = [f"name: {self.spec.name}"]
        section = ""
        for value in self.values:
            if value.loc[0] != section:
                section = value.loc[0]
                lines.append(f"{section}:")
            said = yaml_inline(value.value)
            lines.append(f"  {value.loc[1]}: {said}  # {value.origin}")
        schema = SCHEMA_LINE if os.path.isfile(folder / SCHEMA) else ""
        header = HEADER.format(source=shortened(self.source.name))
        return schema + header + "\n".join(lines) + "\n"


def read_config(
    path: Path, tp: int, name: str | None = None, pre_mix: str | None = None
) -> ConfigSpec:
    """Makes a spec of a config.json.

    Args:
        path: The config.
        tp: Tensor-parallel ranks.
        name: The spec's name; made of the model type and the ranks if None.
        pre_mix: Where the collapse takes its pre-mix from, which no config says;
            fresh if None.

    Raises:
        SpecError: The file is no config, has no hyper-connections, or says what no
            kernel can do; the error holds all that is wrong.
        MhcgenError: An option is wrong.
    """
    config = Config(path, parse_json(path, read_text(path, "config", "*.json")))
    config.check_keys()
    options = [Value(("parallel", "tp"), tp, "--tp")]
    if pre_mix is not None:
        options.append(Value(("model", "pre_mix"), pre_mix, "--pre-mix"))
    values = config.values({value.loc: value for value in options})
    if name is None:
        name = _name(config.model_type, tp)
    spec = _validated(config, name, values)
    return ConfigSpec(path, spec, values, tuple(_notes(config, values)))


@dataclass(frozen=True)
class Config:
    """A config.json.

    Attributes:
        path: The file.
        root: Its value.
    """

    path: Path
    root: Node

    @cached_property
    def sections(self) -> tuple[Loc, ...]:
        """Where values are looked for, the language model's section first."""
        node, present = self.root.nearest((SECTION,))
        nested = present and isinstance(node.value, dict)
        return ((SECTION,), ()) if nested else ((),)

    @property
    def model_type(self) -> str | None:
        """The model's type, if the config says it."""
        node, present = self.root.nearest(("model_type",))
        return node.value if present and isinstance(node.value, str) else None

    @property
    def shown_type(self) -> str:
        """The model's type, for a line of a message."""
        return shortened(self.model_type or "(none)")

    @property
    def is_known(self) -> bool:
        """Whether it is of a type whose keys are known."""
        return self.model_type in MODEL_TYPES

    def find(self, keys: Iterable[str]) -> tuple[Loc, Node] | None:
        """The first of some keys that has a value; null is none."""
        for section in self.sections:
            for key in keys:
                node, present = self.root.nearest((*section, key))
                if present and node.value is not None:
                    return (*section, key), node
        return None

    def check_keys(self) -> None:
        """Makes sure that all is there that a spec needs.

        Raises:
            SpecError: Something is not.
        """
        if not isinstance(self.root.value, dict):
            problem = Problem(
                (), "no config of a model", self.root.written, "an object"
            )
            raise SpecError(self.path, [(self.root.start, problem)])
        if not self.is_known and not any(self.find([key]) for key in HC_KEYS):
            kind = f"model type {self.shown_type}" if self.model_type else "the model"
            problem = Problem(
                (),
                f"{kind} has no manifold-constrained hyper-connections",
                hint=f"looked for {', '.join(HC_KEYS)} {self.places}",
            )
            raise SpecError(self.path, [(None, problem)])
        missing = [
            Problem((field.keys[0],), "missing", hint=f"looked for it {self.places}")
            for field in self._fields()
            if field.keys and field.default is None and not self.find(field.keys)
        ]
        if missing:
            distinct = dict.fromkeys(missing)
            raise SpecError(self.path, [(None, problem) for problem in distinct])

    @property
    def places(self) -> str:
        """Where values are looked for, in words."""
        return f"in {SECTION} and at the top" if self.sections[0] else "at the top"

    def values(self, options: Mapping[tuple[str, str], Value]) -> tuple[Value, ...]:
        """The values of the spec.

        Raises:
            SpecError: A value cannot be said in a spec.
        """
        values: list[Value] = []
        placed: list[tuple[Position | None, Problem]] = []
        for field in self._fields():
            found = self.find(field.keys)
            if field.loc in options:
                values.append(options[field.loc])
                continue
            if found is None:
                values.append(Value(field.loc, field.default, DEFAULT))
                continue
            loc, node = found
            if field.words is not None:
                meaning = field.words.meaning(node.data())
                if meaning is None:
                    problem = Problem(
                        loc,
                        "not one of the choices",
                        given=shortened(node.written),
                        allowed=field.words.allowed,
                    )
                    placed.append((node.start, problem))
                node = replace(node, value=meaning)
            values.append(Value(field.loc, node.data(), dotted(loc), node))
        if placed:
            raise SpecError(self.path, placed)
        return tuple(values)

    def _fields(self) -> list[Field]:
        """The fields that the spec is to have; those of moe where there are experts."""
        experts = self.find(MOE_KEYS) is not None
        return [field for field in FIELDS if experts or field.loc[0] != "moe"]


def _validated(config: Config, name: str, values: Sequence[Value]) -> Spec:
    """The spec of some values, which a plan can be made for.

    Raises:
        SpecError: The config says what is not legal.
        MhcgenError: An option does.
    """
    sections: dict[str, dict[str, Node]] = {}
    for value in values:
        section, key = value.loc
        node = value.node or _unplaced(value.value)
        sections.setdefault(section, {})[key] = node
    members = {key: _unplaced(dict(nodes)) for key, nodes in sections.items()}
    root = _unplaced({"name": _unplaced(name), **members})
    try:
        spec = Spec.model_validate(root.data())
        make_plan(spec)
    except ValidationError as error:
        placed = problems_of(error, Document(root, [], set()))
        problems = [problem for _, problem in placed]
    except PlanError as error:
        problems = list(error.problems)
    else:
        return spec
    raise _refused(config, problems, values)


def _unplaced(value: Any) -> Node:
    """A value that does not stand in the config."""
    return Node((1, 1), str(value), value)


def _refused(
    config: Config, problems: Iterable[Problem], values: Iterable[Value]
) -> MhcgenError:
    """The error of some problems, each at the key or the option that caused it."""
    by_loc: dict[Loc, Value] = {value.loc: value for value in values}
    by_loc["name",] = Value(("name", ""), None, "--name")
    errors: list[MhcgenError] = []
    placed: list[tuple[Position | None, Problem]] = []
    for problem in problems:
        value = by_loc.get(problem.loc)
        if value is None or value.origin == DEFAULT:
            placed.append((None, problem))
        elif value.node is None:
            option = Path(value.origin)
            errors.append(SpecError(option, [(None, replace(problem, loc=()))]))
        else:
            loc = tuple(value.origin.split("."))
            placed.append((value.node.start, replace(problem, loc=loc)))
    if placed:  # a key that gives two values is told of once
        errors.insert(0, SpecError(config.path, list(dict.fromkeys(placed))))
    return MhcgenError("\n".join(map(str, errors)))


def _name(model_type: str | None, tp: int) -> str:
    """The name for a spec that is given none, such as deepseek_v4_tp4."""
    word = re.sub("[^a-z0-9]+", "_", (model_type or "").lower()).lstrip("_0123456789")
    return f"{word[:40].rstrip('_') or 'model'}_tp{tp}"


def _notes(config: Config, values: Iterable[Value]) -> Iterator[str]:
    """What the user should know of how a config was read."""
    if config.is_known:
        return
    yield (
        f"model type {config.shown_type} is not one of "
        f"{', '.join(MODEL_TYPES)}: its keys are read as theirs"
    )
    for value in values:
        if value.loc == ("model", "pre_mix") and value.origin == DEFAULT:
            yield (
                "a config does not say where the collapse takes its pre-mix from: for "
                "a delayed one, as in DeepSeek-V4.1, give --pre-mix delayed"
            )
