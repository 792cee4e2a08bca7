"""Legal specs: what they may say, how they are read, and where their values stand."""

import json
import keyword
import pickle
import random
import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from mhcgen.errors import PlanError, Problem, SpecError, dotted, shortened, visible
from mhcgen.spec import (
    ARCHS,
    DEFAULT_ARCHS,
    RESERVED_NAMES,
    TP_SIZES,
    Spec,
    schema_text,
)
from mhcgen.spec_file import SpecSource, load_spec
from mhcgen.yaml_source import plain_value

SPECS = Path(__file__).parent.parent / "specs"
FLAGSHIP = (SPECS / "glm53.yaml").read_text()
SMALLEST = "name: a\nmodel: {hidden: 64}\nparallel: {tp: 2}\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to write specs to."""
    return tmp_path_factory.mktemp("spec") / "spec.yaml"


def read(file: Path, text: str) -> SpecSource:
    """The spec that a text gives."""
    file.write_bytes(text.encode())
    return load_spec(file)


def test_the_flagship() -> None:
    spec = load_spec(SPECS / "glm53.yaml").spec
    assert (spec.name, spec.parallel.tp, spec.model.hidden) == ("glm53", 4, 4096)
    assert (spec.model.rms_eps, spec.model.hc_eps) == (1e-5, 1e-6)
    assert spec.model.norm_eps == 1e-5
    assert spec.parallel.transports == ("multicast", "unicast")
    assert spec.moe is not None
    assert (spec.moe.top_k, spec.moe.weight_dtypes) == (8, ("fp32", "bf16"))
    assert tuple(spec.targets) == DEFAULT_ARCHS


def test_the_two_rank_spec_differs_from_the_flagship_only_in_its_ranks() -> None:
    four, two = (
        load_spec(SPECS / name).spec.model_dump()
        for name in ("glm53.yaml", "glm53_tp2.yaml")
    )
    assert two.pop("name") == "glm53_tp2"
    assert two.pop("parallel") == {"tp": 2, "transports": ("unicast",)}
    del four["name"], four["parallel"], four["targets"], two["targets"]
    assert two == four


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_specs_name_the_schema_for_editors(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


def test_what_may_be_left_out(file: Path) -> None:
    spec = read(file, SMALLEST).spec
    assert spec.model_dump(mode="json") == {
        "name": "a",
        "model": {
            "hidden": 64,
            "hc": 4,
            "rms_eps": 1e-6,
            "hc_eps": 1e-6,
            "norm_eps": 1e-6,
            "post_mult": 2.0,
            "sinkhorn_iters": 20,
            "pre_mix": "fresh",
            "norm_weight": "plain",
        },
        "parallel": {"tp": 2, "transports": ["multicast", "unicast"]},
        "capacity": {"max_tokens": 256},
        "moe": None,
        "precision": {
            "activation": "bf16",
            "fn_weight": "bf16",
            "projection": "auto",
        },
        "batch_invariant": False,
        "mixes": "side_stream",
        "ends": {"entry": False, "exit": None},
        "outputs": {"stream_mean": False},
        "targets": {
            arch: {"cluster_size": None, "token_groups": None} for arch in DEFAULT_ARCHS
        },
    }


@pytest.mark.parametrize(
    "line",
    [
        "capacity:",
        "capacity: null",
        "capacity: {}",
        "precision:",
        "precision: ~",
        "ends:",
        "ends: {exit: null}",
        "outputs: {}",
        "moe: null",
        "targets:",
        "targets: {sm_103a: , sm_90a: , sm_100a: }",
        "targets:\n  sm_90a:\n  sm_100a: {}\n  sm_103a: {cluster_size: null}",
        "targets: {sm_90a: {token_groups: null}, sm_100a: ~, sm_103a: {}}",
    ],
)
def test_an_empty_section_is_as_good_as_none(file: Path, line: str) -> None:
    assert read(file, SMALLEST + line).spec == read(file, SMALLEST).spec


def test_an_empty_moe_mapping_asks_for_finalize(file: Path) -> None:
    assert read(file, SMALLEST + "moe:").spec == read(file, SMALLEST + "moe: {}").spec
    moe = read(file, SMALLEST + "moe: {}").spec.moe
    assert moe is not None
    assert moe.model_dump(mode="json") == {
        "top_k": 8,
        "shared_expert": "optional",
        "weight_dtypes": ["fp32", "bf16"],
    }


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1.e-5", 1e-5),
        ("+1E-05", 1e-5),
        (".01", 0.01),
        ("0.01", 0.01),
        ("1e-20", 1e-20),
        ("1.2e-38", 1.2e-38),
    ],
)
def test_epsilons_are_read_however_written(
    file: Path, written: str, value: float
) -> None:
    text = f"name: a\nmodel: {{hidden: 64, rms_eps: {written}}}\nparallel: {{tp: 2}}"
    assert read(file, text).spec.model.rms_eps == value


def test_a_whole_number_will_do_where_a_float_is_meant(file: Path) -> None:
    text = SMALLEST.replace("hidden: 64", "hidden: 64, post_mult: 2")
    post_mult = read(file, text).spec.model.post_mult
    assert (post_mult, type(post_mult)) == (2.0, float)


@pytest.mark.parametrize(
    ("key", "legal", "wrong"),
    [
        ("hidden", (64, 72, 16384), (63, 56, 68, 16385, 16392)),
        ("hc", (1, 2, 4, 8), (0, 3, 5, 16)),
        ("rms_eps", (1.2e-38, 1e-20, 1e-2), (0.0, 1.1e-38, 0.0101)),
        ("hc_eps", (1.2e-38, 1e-20, 1e-2), (0.0, 1.1e-38, 0.0101)),
        ("norm_eps", (1.2e-38, 1e-20, 1e-2), (0.0, 1.1e-38, 0.0101)),
        ("post_mult", (1e-6, 16), (0.0, -1.0, 16.1)),
        ("sinkhorn_iters", (1, 100), (0, 101)),
    ],
)
def test_ranges_of_the_model(
    key: str, legal: tuple[float, ...], wrong: tuple[float, ...]
) -> None:
    def with_value(value: float) -> Spec:
        model = {"hidden": 64} | {key: value}
        return Spec.model_validate({"name": "a", "model": model, "parallel": {"tp": 2}})

    for value in legal:
        assert getattr(with_value(value).model, key) == value
    for value in (*wrong, True, str(legal[0]), None):
        with pytest.raises(ValidationError):
            with_value(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "key", "legal", "wrong"),
    [
        ("parallel", "tp", (1, 2, 4, 8, 16), (0, 3, 32, 2.0)),
        ("capacity", "max_tokens", (1, 1024), (0, 1025, 1.0)),
        ("moe", "top_k", (1, 32), (0, 33, True)),
        ("targets.sm_90a", "cluster_size", (1, 16, None), (0, 17, 8.0)),
    ],
)
def test_ranges_elsewhere(
    section: str, key: str, legal: tuple[object, ...], wrong: tuple[object, ...]
) -> None:
    def with_value(value: object) -> None:
        data = {"name": "a", "model": {"hidden": 64}, "parallel": {"tp": 2}}
        inner: dict[str, object] = {key: value}
        for part in reversed(section.split(".")):
            inner = {part: inner}
        Spec.model_validate(data | inner)

    for value in legal:
        with_value(value)
    for value in wrong:
        with pytest.raises(ValidationError):
            with_value(value)


def test_groups_up_to_the_largest(file: Path) -> None:
    groups = "[{max_tokens: 64, group: 64}, {max_tokens: 256, group: 1}]"
    text = SMALLEST + f"targets: {{sm_90a: {{token_groups: {groups}}}}}"
    target = read(file, text).spec.targets["sm_90a"]
    assert target.token_groups is not None
    assert [entry.group for entry in target.token_groups] == [64, 1]


def test_a_spec_does_not_change_and_equal_specs_hash_alike(file: Path) -> None:
    spec, again = read(file, SMALLEST).spec, read(file, SMALLEST + "ends:").spec
    assert hash(spec) == hash(again)
    assert hash(spec) != hash(read(file, SMALLEST.replace("64", "72")).spec)
    with pytest.raises(ValidationError):
        spec.name = "b"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        spec.model.hidden = 72  # type: ignore[misc]


IMPORTED = """
import sys
import cutlass.cute.runtime, torch.distributed._symmetric_memory, tvm_ffi
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_no_package_hides_a_module_that_packages_import(file: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTED], capture_output=True, text=True
    )
    names = {name for name in found.stdout.split() if re.match("[a-z]", name)}
    assert {"torch", "cuda", "numpy"} <= names
    assert names <= RESERVED_NAMES
    for name in ("tvm_ffi", "ml_dtypes", "triton"):
        text = SMALLEST.replace("name: a\n", f"name: {name}\n")
        with pytest.raises(SpecError, match=r":1:7: name: a reserved word"):
            read(file, text)


def test_targets_have_one_order(file: Path) -> None:
    spec = read(file, SMALLEST + "targets: {sm_103a: , sm_90a: }").spec
    assert list(spec.targets) == ["sm_90a", "sm_103a"]


def test_reserved_names() -> None:
    assert {"lambda", "json", "torch", "com1", "aux"} <= RESERVED_NAMES
    assert not {"glm53", "glm53_tp2", "match", "com10"} & RESERVED_NAMES


# The schema


def test_the_checked_in_schema_is_current() -> None:
    assert (SPECS / "schema.json").read_text() == schema_text()


def test_the_schema_says_what_the_models_refuse() -> None:
    schema = json.loads(schema_text())
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["name", "model", "parallel"]
    hidden = schema["$defs"]["Model"]["properties"]["hidden"]
    assert (hidden["minimum"], hidden["maximum"]) == (64, 16384)
    assert hidden["multipleOf"] == 8
    parallel = schema["$defs"]["Parallel"]["properties"]
    assert tuple(parallel["tp"]["enum"]) == TP_SIZES
    assert parallel["transports"]["uniqueItems"] is True
    assert tuple(schema["properties"]["targets"]["properties"]) == ARCHS
    for section in ("capacity", "moe", "precision"):
        assert {"type": "null"} in schema["properties"][section]["anyOf"]
    for section in ("model", "parallel"):
        assert set(schema["properties"][section]) == {"$ref"}


def test_every_part_of_the_schema_is_closed_and_described() -> None:
    schema = json.loads(schema_text())
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        assert part["description"]
        for field in part["properties"].values():
            if "$ref" not in field:
                assert field["description"]


# Positions


@pytest.mark.parametrize(
    ("loc", "position"),
    [
        ((), (3, 1)),
        (("name",), (3, 7)),
        (("model",), (4, 1)),
        (("model", "hidden"), (5, 11)),
        (("model", "absent"), (4, 1)),
        (("model", "hidden", "deeper", 3), (5, 11)),
        (("parallel", "transports"), (9, 3)),
        (("parallel", "transports", 1), (11, 7)),
        (("parallel", "transports", 2), (9, 3)),
        (("parallel", "transports", -1), (9, 3)),
        (("targets", "sm_90a", "cluster_size"), (13, 26)),
        (("targets", "sm_90a", "token_groups", 0, "group"), (13, 11)),
        (("targets", "sm_100a"), (14, 3)),
        (("targets", "sm_103a"), (12, 1)),
        (("moe", "top_k"), (3, 1)),
        ((0,), (3, 1)),
    ],
)
def test_positions(file: Path, loc: tuple[str | int, ...], position: object) -> None:
    text = (
        "# one\r\n\r\nname: glm53\r\nmodel:\r\n  hidden: 4096\r\n  hc: 4 # streams\r\n"
        "parallel:\r\n  tp: 4\r\n  transports:\r\n    - unicast\r\n    - multicast\r\n"
        "targets:\r\n  sm_90a: {cluster_size: 8}\r\n  sm_100a:\r\n"
    )
    source = read(file, "\ufeff" + text)
    assert source.locate(loc) == position
    assert source.text == text


# Errors


def test_problems_of_a_plan_are_placed_in_the_file(file: Path) -> None:
    source = read(file, SMALLEST + "targets: {sm_90a: {cluster_size: 16}}\n")
    error = PlanError(
        [
            Problem(("targets", "sm_90a", "cluster_size"), "too wide", "16", "1 to 8"),
            Problem(("capacity", "max_tokens"), "too much", hint="ask for less"),
        ]
    )
    assert str(error) == (
        "targets.sm_90a.cluster_size: too wide\n    given 16; allowed: 1 to 8\n"
        "capacity.max_tokens: too much\n    ask for less"
    )
    placed = error.in_file(SpecSource(Path("s.yaml"), "", source.spec, source._root))
    assert str(placed) == (
        "s.yaml:1:1: capacity.max_tokens: too much\n    ask for less\n"
        "s.yaml:4:34: targets.sm_90a.cluster_size: too wide\n"
        "    given 16; allowed: 1 to 8"
    )


def test_errors_cross_process_borders() -> None:
    problem = Problem(("name",), "bad")
    plan = pickle.loads(pickle.dumps(PlanError([problem])))
    assert plan.problems == (problem,)
    spec = pickle.loads(pickle.dumps(SpecError(Path("a"), [((1, 2), problem)])))
    assert str(spec) == "a:1:2: name: bad"


@pytest.mark.parametrize("count", [1, 11, 12, 13, 24, 25, 26])
def test_a_screen_is_filled_and_not_overfilled(count: int) -> None:
    two_lines = Problem((), "bad", given="x")
    lines = str(PlanError([two_lines] * count)).splitlines()
    assert len(lines) == (2 * count if count <= 12 else 23)
    if count > 12:
        assert lines[-1] == f"... and {count - 11} more problems"


def test_one_endless_problem_is_cut() -> None:
    second = Problem(("b",), "bad", hint="mend it")
    error = PlanError([Problem(("a",), "word " * 5000), second])
    lines = str(error).splitlines()
    assert len(lines) == 24
    assert lines[-1] == "... and 1 more problem"


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(10, 80))
def test_shown_text_is_plain_and_short(text: str, limit: int) -> None:
    assert visible(text).isprintable()
    assert len(shortened(text, limit)) <= limit
    printable = re.fullmatch(r"[\x20-\x7e]*", text)
    assert not printable or visible(text) == text


def test_visible_and_dotted() -> None:
    assert visible("a\x1b[1m\u202e\u4e2d\ud800é") == "a\\x1b[1m\\u202e\\u4e2d\\ud800é"
    assert visible("e\u0301") == "e\\u0301"
    assert dotted(("a", "b", 0, "c d", "")) == 'a.b[0]."c d".""'


# Properties

LEGAL_NAME = st.from_regex(r"[a-z][a-z0-9_]{0,47}", fullmatch=True).filter(
    lambda name: name not in RESERVED_NAMES and not keyword.iskeyword(name)
)
EPSILON = st.floats(1.2e-38, 1e-2)


def distinct(*choices: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(choices), min_size=1, unique=True)


@st.composite
def token_groups(draw: st.DrawFn, capacity: int) -> list[dict[str, int]]:
    """Token groups that end at a capacity."""
    sizes = draw(st.sets(st.integers(1, capacity), max_size=4)) | {capacity}
    return [
        {"max_tokens": size, "group": draw(st.integers(1, min(size, 64)))}
        for size in sorted(sizes)
    ]


@st.composite
def legal_specs(draw: st.DrawFn) -> dict[str, object]:
    """Everything that a spec may say."""
    capacity = draw(st.integers(1, 256))
    optional = st.fixed_dictionaries
    target = optional(
        {},
        optional={
            "cluster_size": st.none() | st.integers(1, 16),
            "token_groups": st.none() | token_groups(capacity),
        },
    )
    model = optional(
        {"hidden": st.integers(8, 2048).map(lambda fragments: 8 * fragments)},
        optional={
            "hc": st.sampled_from([1, 2, 4, 8]),
            "rms_eps": EPSILON,
            "hc_eps": EPSILON,
            "norm_eps": EPSILON,
            "post_mult": st.integers(1, 16) | st.floats(1.2e-38, 16.0),
            "sinkhorn_iters": st.integers(1, 100),
        },
    )
    parallel = optional(
        {"tp": st.sampled_from(TP_SIZES)},
        optional={"transports": distinct("multicast", "unicast")},
    )
    moe = optional(
        {},
        optional={
            "top_k": st.integers(1, 32),
            "shared_expert": st.sampled_from(["optional", "always", "never"]),
            "weight_dtypes": distinct("fp32", "bf16"),
        },
    )
    precision = optional(
        {},
        optional={
            "activation": st.just("bf16"),
            "fn_weight": st.sampled_from(["bf16", "fp32"]),
        },
    )
    return {
        "capacity": {"max_tokens": capacity},
        **draw(
            optional(
                {"name": LEGAL_NAME, "model": model, "parallel": parallel},
                optional={
                    "moe": st.none() | moe,
                    "precision": st.none() | precision,
                    "targets": st.dictionaries(
                        st.sampled_from(ARCHS), st.none() | target, min_size=1
                    ),
                },
            )
        ),
    }


def as_yaml(data: object) -> str:
    stream = StringIO()
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.dump(data, stream)
    return stream.getvalue()


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(legal_specs())
def test_legal_specs_survive_yaml_and_json(file: Path, data: dict[str, object]) -> None:
    spec = Spec.model_validate(
        {key: data[key] for key in Spec.model_fields if key in data}
    )
    assert read(file, as_yaml(data)).spec == spec
    assert read(file, json.dumps(data)).spec == spec
    canonical = spec.model_dump(mode="json")
    assert read(file, as_yaml(canonical)).spec == spec
    assert Spec.model_validate(canonical).model_dump_json() == spec.model_dump_json()
    assert Spec.model_validate_json(spec.model_dump_json()) == spec


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-.eE_xonaifNtrul~", max_size=12))
def test_plain_values_are_numbers_or_the_text_itself(text: str) -> None:
    value = plain_value(text)
    if isinstance(value, str):
        assert value == text
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            assert repr(value) == repr(type(value)(text.replace(".i", "i")))
        except ValueError:
            assert text.endswith((".nan", ".NaN", ".NAN"))


NASTY = (
    "",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    ".nan",
    "9" * 5000,
    "0x10",
    "[]",
    "{}",
    "{a: b}",
    "[[[[[[[[[[[[[[[[[[[[[[",
    "&a",
    "*a",
    "!!python/object:os.system",
    "<<",
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    "'",
    '"',
    "|",
    ">-\n",
    "? ",
    "---",
    "...",
    "\t",
    "\x1b[31m",
    "\0",
    "\ufeff",
    "\u2028",
    "\x85",
    "\U0001f600",
    "%YAML 1.1",
    "@",
    "`",
    "# ",
    ": ",
    "- ",
    ", ",
)


@st.composite
def mangled_flagships(draw: st.DrawFn) -> bytes:
    """The flagship's text after a few accidents."""
    text = FLAGSHIP.encode()
    chance = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 4))):
        match chance.randrange(5):
            case 0:
                at = chance.randrange(len(text))
                text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
            case 1:
                lines = text.splitlines(keepends=True)
                del lines[chance.randrange(len(lines))]
                text = b"".join(lines) or b"x"
            case 2:
                values = list(re.finditer(rb"(?<=: ).+|\w+(?=:)", text))
                value = chance.choice(values) if values else None
                nasty = chance.choice(NASTY).encode()
                if value:
                    text = text[: value.start()] + nasty + text[value.end() :]
            case 3:
                at = chance.randrange(len(text))
                text = text[:at] + chance.choice(NASTY).encode() + text[at:]
            case 4:
                start, end = sorted(chance.randrange(len(text)) for _ in range(2))
                text = text[:end] + text[start:]
    return text


@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(mangled_flagships())
def test_a_mangled_spec_is_legal_or_refused_on_one_screen(
    file: Path, content: bytes
) -> None:
    file.write_bytes(content)
    started = time.process_time()
    try:
        spec = load_spec(file).spec
    except SpecError as error:
        lines = str(error).splitlines()
        assert error.problems
        assert 1 <= len(lines) <= 24
        assert all(len(line) <= 100 and line.isprintable() for line in lines)
    else:
        assert Spec.model_validate(spec.model_dump()) == spec
    assert time.process_time() - started < 5
