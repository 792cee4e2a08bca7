"""The spec: every choice that makes a kernel package, its ranges and its rules.

A rule lives here and nowhere else. The JSON Schema is made from these models, and error
messages take what they say about legal values from that schema.
"""

import json
import keyword
import sys
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mhcgen.errors import Problem, dotted

Arch = Literal["sm_90a", "sm_100a", "sm_103a", "sm_120a"]
ARCHS: tuple[Arch, ...] = get_args(Arch)
DEFAULT_ARCHS: tuple[Arch, ...] = ("sm_90a", "sm_100a", "sm_103a")

TpSize = Literal[1, 2, 4, 8, 16]
TP_SIZES: tuple[TpSize, ...] = get_args(TpSize)

Transport = Literal["multicast", "unicast"]
WeightDtype = Literal["fp32", "bf16"]
NormWeight = Literal["plain", "plus_one", "none"]

RESERVED_NAMES = frozenset(
    # No module can have these names, or it would hide one that packages import.
    {*keyword.kwlist, *sys.stdlib_module_names, "mhcgen"}
    | {"cuda", "cutlass", "nvidia_cutlass_dsl", "torch", "tvm_ffi"}
    # Nor one that those import, at once or for some of what they do.
    | {"cupy", "cython_runtime", "filelock", "fsspec", "functorch", "jax", "jinja2"}
    | {"markupsafe", "ml_dtypes", "mpmath", "networkx", "numpy", "nvidia", "packaging"}
    | {"pkg_resources", "setuptools", "sympy", "torch_c_dlpack_ext", "torchgen"}
    | {"triton", "typing_extensions", "yaml"}
    # No file can have these names on Windows, where engines are checked out too.
    | {"con", "prn", "aux", "nul"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10)}
)

REFUSED = "refused"
"""The pydantic error type of our own rules; its context holds the problems."""

_FP32_NORMAL = 1.2e-38
"""Just above the smallest normal FP32: below, a reciprocal may be infinite."""

T = TypeVar("T")


def _refusal(*problems: Problem) -> PydanticCustomError:
    """The error of a rule of ours; each loc starts from the value validated."""
    text = "; ".join(
        ": ".join(filter(None, [dotted(problem.loc), problem.message]))
        for problem in problems
    )
    return PydanticCustomError(REFUSED, "{text}", {"text": text, "problems": problems})


def _exact_int(value: object) -> object:
    # A Literal compares with ==, so that alone it would take True for 1, and 2.0 for 2.
    if type(value) is not int:
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


def _distinct(items: tuple[T, ...]) -> tuple[T, ...]:
    repeats = [i for i, item in enumerate(items) if item in items[:i]]
    if repeats:
        raise _refusal(
            *(Problem((i,), "given before", hint="remove it") for i in repeats)
        )
    return items


def _null_as_empty(value: object) -> object:
    return {} if value is None else value


Epsilon = Annotated[float, Field(ge=_FP32_NORMAL, le=1e-2, allow_inf_nan=False)]
TokenCount = Annotated[int, Field(ge=1, le=1024)]
# Tuples, so that a spec is immutable; not strict, so that they are read from lists.
Choices = Annotated[
    tuple[T, ...],
    Field(strict=False, min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_distinct),
]


class Section(BaseModel):
    """What all parts of a spec share: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Model(Section):
    """The model's shape and constants."""

    hidden: Annotated[
        int,
        Field(
            ge=64,
            le=16384,
            multiple_of=8,
            description="Hidden size H, in whole fragments of 8 elements.",
        ),
    ]
    hc: Annotated[
        Literal[1, 2, 4, 8],
        BeforeValidator(_exact_int),
        Field(description="Residual streams (HC)."),
    ] = 4
    rms_eps: Annotated[
        Epsilon,
        Field(description="Added to the mean square of the streams, for the mixes."),
    ] = 1e-6
    hc_eps: Annotated[
        Epsilon,
        Field(description="Added to the pre-mix, and in the Sinkhorn passes."),
    ] = 1e-6
    norm_eps: Annotated[
        Epsilon,
        Field(description="Added to the mean square of the collapse, for its norm."),
    ] = 1e-6
    post_mult: Annotated[
        float,
        Field(
            ge=_FP32_NORMAL,
            le=16.0,
            allow_inf_nan=False,
            description="Factor of the post-mix.",
        ),
    ] = 2.0
    sinkhorn_iters: Annotated[
        int,
        Field(ge=1, le=100, description="Column passes over the residual mix."),
    ] = 20
    pre_mix: Annotated[
        Literal["fresh", "delayed"],
        Field(
            description="Where the collapse takes its pre-mix from: this boundary's "
            "mixes, or, carried, those of the boundary before."
        ),
    ] = "fresh"
    norm_weight: Annotated[
        NormWeight,
        Field(
            description="The weight of the norm: as given, as given plus one, or none."
        ),
    ] = "plain"


class Parallel(Section):
    """The ranks, and how they reach each other."""

    tp: Annotated[
        TpSize,
        BeforeValidator(_exact_int),
        Field(description="Tensor-parallel ranks (TP)."),
    ]
    transports: Annotated[
        Choices[Transport],
        Field(
            description="Ways to write into the peers' mailboxes: one multicast store, "
            "or one unicast store per peer. Kernels are made for each."
        ),
    ] = ("multicast", "unicast")


class Capacity(Section):
    """The largest call."""

    max_tokens: Annotated[
        TokenCount,
        Field(description="Tokens that one call may have; the mailbox is as large."),
    ] = 256


class Moe(Section):
    """The MoE output that the finalize kernel sums and publishes."""

    top_k: Annotated[
        int, Field(ge=1, le=32, description="Routed experts per token.")
    ] = 8
    shared_expert: Annotated[
        Literal["optional", "always", "never"],
        Field(description="Whether calls of finalize give a shared expert's output."),
    ] = "optional"
    weight_dtypes: Annotated[
        Choices[WeightDtype],
        Field(description="Types of the routing weights. Kernels are made for each."),
    ] = ("fp32", "bf16")


class Precision(Section):
    """The types of the tensors."""

    activation: Annotated[
        Literal["bf16", "fp16"],
        Field(description="Type of the partial outputs, streams and layer input."),
    ] = "bf16"
    fn_weight: Annotated[
        Literal["bf16", "fp32"],
        Field(description="Type of fn, the projection to the mixes."),
    ] = "bf16"
    projection: Annotated[
        Literal["auto", "tensor_cores", "fma"],
        Field(
            description="How the streams are multiplied with fn; auto takes tensor "
            "cores where the types fit them."
        ),
    ] = "auto"


class Ends(Section):
    """The kernels of the network's ends."""

    entry: Annotated[
        bool,
        Field(
            description="Expand a hidden state to the streams, and take its mixes and "
            "layer input."
        ),
    ] = False
    exit: Annotated[
        Literal["mean", "sigmoid", "pre_mix"] | None,
        Field(
            description="Close the last boundary: collapse the streams by their mean, "
            "by a sigmoid head or by the last pre-mix, and normalize."
        ),
    ] = None


class Outputs(Section):
    """What a boundary returns beside its four outputs."""

    stream_mean: Annotated[
        bool,
        Field(description="The mean of the new streams, which draft models capture."),
    ] = False


class TokenGroup(Section):
    """How many tokens a cluster takes together, in calls up to a size."""

    max_tokens: Annotated[
        TokenCount, Field(description="The largest call that uses this token group.")
    ]
    group: Annotated[
        int, Field(ge=1, le=64, description="Tokens that one cluster takes together.")
    ]
    fn_octets: Annotated[
        Annotated[int, Field(ge=0, le=10)] | None,
        Field(
            description="Octets of fn's rows that threads keep in registers; the rest "
            "waits in shared memory. Fewer leave room for a second block a "
            "multiprocessor. Null keeps all of them there, where they fit."
        ),
    ] = None
    launches: Annotated[
        Annotated[Literal[1, 2], BeforeValidator(_exact_int)] | None,
        Field(
            description="1 where the boundary publishes itself, which takes all of its "
            "clusters to run at once; 2 where a launch before it publishes. Null lets "
            "the plan choose."
        ),
    ] = None

    @model_validator(mode="after")
    def _group_fits(self) -> "TokenGroup":
        if self.group > self.max_tokens:
            raise _refusal(
                Problem(
                    ("group",),
                    "more than its max_tokens",
                    allowed=f"a whole number from 1 to {self.max_tokens}",
                    hint=f"nearest: {self.max_tokens}",
                )
            )
        return self


def _rising(groups: tuple[TokenGroup, ...]) -> tuple[TokenGroup, ...]:
    problems = [
        Problem(
            (i, "max_tokens"),
            "not more than that of the entry before",
            allowed=f"more than {groups[i - 1].max_tokens}",
            hint="sort the entries by max_tokens",
        )
        for i in range(1, len(groups))
        if groups[i].max_tokens <= groups[i - 1].max_tokens
    ]
    if problems:
        raise _refusal(*problems)
    return groups


class Target(Section):
    """Launch choices for one architecture; the plan makes those left out."""

    cluster_size: Annotated[
        Annotated[int, Field(ge=1, le=16)] | None,
        Field(description="Thread blocks in a cluster; null lets the plan choose."),
    ] = None
    token_groups: Annotated[
        Annotated[
            tuple[TokenGroup, ...],
            Field(strict=False, min_length=1),
            AfterValidator(_rising),
        ]
        | None,
        Field(
            description="Token groups by the size of the call: max_tokens rises, up to "
            "capacity.max_tokens. Null lets the plan choose."
        ),
    ] = None


def _default_targets() -> dict[Arch, Target]:
    return {arch: Target() for arch in DEFAULT_ARCHS}


def _null_as_default_targets(value: object) -> object:
    return _default_targets() if value is None else value


def _in_order(targets: dict[Arch, Target]) -> dict[Arch, Target]:
    return {arch: targets[arch] for arch in ARCHS if arch in targets}


def _schema_by_arch(schema: dict[str, Any]) -> None:
    """Name each architecture, so that editors offer them; allow null for all."""
    target = schema.pop("additionalProperties")
    del schema["propertyNames"]
    schema["properties"] = {arch: target for arch in ARCHS}
    schema["additionalProperties"] = False
    schema["type"] = ["object", "null"]


class Spec(Section):
    """What mhcgen makes a kernel package from."""

    name: Annotated[
        str,
        Field(
            pattern="^[a-z][a-z0-9_]{0,47}$",
            description="Name of the package: a Python identifier in lower case.",
        ),
    ]
    model: Model
    parallel: Parallel
    capacity: Annotated[
        Capacity,
        BeforeValidator(_null_as_empty, json_schema_input_type=Capacity | None),
        Field(description="The largest call; the defaults if left out."),
    ] = Capacity()
    moe: Annotated[
        Moe | None,
        Field(description="The MoE output; without it there is no finalize kernel."),
    ] = None
    precision: Annotated[
        Precision,
        BeforeValidator(_null_as_empty, json_schema_input_type=Precision | None),
        Field(description="The types of the tensors; BF16 if left out."),
    ] = Precision()
    batch_invariant: Annotated[
        bool,
        Field(
            description="A token's bits are not to depend on M, on its place in the "
            "call or on its token group. They do not in any package: all token groups "
            "of a target add in one order."
        ),
    ] = False
    mixes: Annotated[
        Literal["side_stream", "tail"],
        Field(
            description="Where the next mixes are computed: by a warp of the boundary "
            "itself, or by a launch of its own on a side stream."
        ),
    ] = "side_stream"
    ends: Annotated[
        Ends,
        BeforeValidator(_null_as_empty, json_schema_input_type=Ends | None),
        Field(description="Kernels of the network's ends; none if left out."),
    ] = Ends()
    outputs: Annotated[
        Outputs,
        BeforeValidator(_null_as_empty, json_schema_input_type=Outputs | None),
        Field(description="Auxiliary outputs; none if left out."),
    ] = Outputs()
    targets: Annotated[
        dict[
            Arch,
            Annotated[
                Target,
                BeforeValidator(_null_as_empty, json_schema_input_type=Target | None),
            ],
        ],
        Field(
            min_length=1,
            description="The architectures to make kernels for; sm_90a, sm_100a and "
            "sm_103a if left out.",
            json_schema_extra=_schema_by_arch,
        ),
        BeforeValidator(_null_as_default_targets),
        AfterValidator(_in_order),
    ] = Field(default_factory=_default_targets)

    def __hash__(self) -> int:
        """Equal specs hash alike, so that plans can be cached by spec."""
        return hash(self.model_dump_json())

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in RESERVED_NAMES:
            raise _refusal(
                Problem(
                    (),
                    "a reserved word",
                    allowed="any name but those of Python's keywords, modules that "
                    "packages import, and devices",
                    hint=f"nearest: {name}_mhc",
                )
            )
        return name

    @field_validator("targets")
    @classmethod
    def _groups_reach_capacity(
        cls, targets: dict[Arch, Target], info: ValidationInfo
    ) -> dict[Arch, Target]:
        capacity = info.data.get("capacity")
        if capacity is None:  # refused itself
            return targets
        problems = [
            Problem(
                (arch, "token_groups", len(target.token_groups) - 1, "max_tokens"),
                "the last entry does not end at capacity.max_tokens",
                allowed=str(capacity.max_tokens),
            )
            for arch, target in targets.items()
            if target.token_groups
            and target.token_groups[-1].max_tokens != capacity.max_tokens
        ]
        if problems:
            raise _refusal(*problems)
        return targets


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a spec."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **Spec.model_json_schema()}


def schema_text() -> str:
    """The JSON Schema as specs/schema.json holds it."""
    return json.dumps(json_schema(), indent=2) + "\n"
