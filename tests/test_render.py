"""Rendering: the same bytes every time, valid, formatted, and nothing but the spec."""

import ast
import gc
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from ruff import find_ruff_bin

from mhcgen import __version__
from mhcgen.manifest import DSL_RANGE, MANIFEST, TVM_FFI_RANGE, read_manifest
from mhcgen.plan import Plan, make_plan
from mhcgen.render import (
    PTX,
    RESOLVED_SPEC,
    Files,
    TemplateError,
    Templates,
    formatted,
    jinja_environment,
    ptx_names,
    render,
    resolved,
    spec_sha256,
    spec_yaml,
)
from mhcgen.resources import RUNTIME, resource
from mhcgen.spec import Spec
from mhcgen.spec_file import load_spec

REPOSITORY = Path(__file__).parent.parent
TEMPLATES = Templates(resource("templates"), RUNTIME)
JINJA = {f"package/{p}": text for p, text in TEMPLATES.of_kind("package").items()}

SPECS = {
    "defaults": "name: defaults\nmodel: {hidden: 4096}\nparallel: {tp: 2}\n",
    "no_moe": (
        "name: no_moe\nmodel: {hidden: 2048, hc: 4, rms_eps: 1e-20, norm_eps: 1e-20}\n"
        "parallel: {tp: 8, transports: [unicast]}\ncapacity: {max_tokens: 7}\n"
    ),
    "moe": (
        "name: moe\nmodel: {hidden: 1024, hc: 2, post_mult: 1.25}\n"
        "parallel: {tp: 4, transports: [multicast]}\n"
        "moe: {top_k: 3, shared_expert: always, weight_dtypes: [bf16]}\n"
        "targets: {sm_100a: {cluster_size: 4}, sm_90a: }\n"
    ),
    "a" * 48: f"name: {'a' * 48}\nmodel: {{hidden: 4096}}\nparallel: {{tp: 4}}\n",
}


@pytest.fixture(scope="module")
def files(glm53_plan: Plan) -> Files:
    return render(glm53_plan)


@pytest.fixture(params=[*SPECS, "glm53", "glm53_tp2"])
def any_plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    if request.param not in SPECS:
        return plan_of(resource("specs") / f"{request.param}.yaml")
    path = tmp_path / "spec.yaml"
    path.write_text(SPECS[request.param])
    return plan_of(path)


def plan_of(path: Path) -> Plan:
    return make_plan(load_spec(path).spec)


def write(folder: Path, files: Files) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    return folder


def digest(files: Files) -> str:
    text = json.dumps([(str(path), text) for path, text in files.items()])
    return hashlib.sha256(text.encode()).hexdigest()


# What is rendered


def test_bytes_do_not_depend_on_the_process(
    files: Files, glm53_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "ruff.toml").write_text("line-length = 40\nindent-width = 2\n")
    code = (
        "import os, sys, json, pathlib; os.umask(0o077)\n"
        "sys.path.insert(0, sys.argv[1]); import test_render as t\n"
        "print(t.digest(t.render(t.plan_of(pathlib.Path(sys.argv[2])))))"
    )
    environments = [
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0"},
        {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "RUFF_LINE_LENGTH": "40"},
    ]
    for extra in environments:
        result = subprocess.run(
            [sys.executable, "-c", code, str(REPOSITORY / "tests"), str(glm53_path)],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
            | extra,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == digest(files)


@pytest.fixture
def switching_threads() -> Iterator[None]:
    """Each collection of garbage lets another thread go on."""

    def give_way(*_: object) -> None:
        time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(give_way)
    yield
    gc.callbacks.remove(give_way)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switching_threads")
def test_threads_may_parse_at_once() -> None:
    text = "ptx.one(a(b(c(ptx.two))))\n" * 1000
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(ptx_names, [PurePosixPath("a.py")] * 30, [text] * 30))
    assert all(names == {"one", "two"} for names in found)


def test_nothing_of_the_machine_is_rendered(files: Files) -> None:
    for text in files.values():
        for trace in (str(REPOSITORY), str(Path.home()) + "/", platform.node()):
            assert len(trace) < 3 or trace not in text


def test_resolved_spec_renders_the_identical_package(
    any_plan: Plan, tmp_path: Path
) -> None:
    rendered = render(any_plan)
    path = tmp_path / "resolved.yaml"
    path.write_text(rendered[RESOLVED_SPEC])
    source = load_spec(path)
    assert source.spec == resolved(any_plan)
    assert render(plan_of(path)) == rendered
    assert all(target.cluster_size for target in source.spec.targets.values())
    assert all(target.token_groups for target in source.spec.targets.values())


def test_result_is_clean_for_our_own_rules(any_plan: Plan, tmp_path: Path) -> None:
    folder = write(tmp_path / any_plan.name, render(any_plan))
    config = f"--config={REPOSITORY / 'pyproject.toml'}"
    for command in (["check", "--output-format=concise"], ["format", "--check"]):
        result = subprocess.run(
            [find_ruff_bin(), *command, "--no-cache", config, folder],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout


def test_headers(any_plan: Plan) -> None:
    rendered = render(any_plan)
    assert PurePosixPath("__init__.py") in rendered
    for path, text in rendered.items():
        if path != MANIFEST and path.suffix in (".py", ".yaml"):
            header = text.split("\n\n")[0] if path.suffix == ".py" else text
            first, *rest = header.splitlines()
            assert first == "# SPDX-License-Identifier: Apache-2.0"
            comment = "\n".join(rest)
            assert f"mhcgen {__version__}" in comment
            assert f'"{any_plan.name}"' in comment
            assert f"Spec {spec_sha256(resolved(any_plan))[:12]}, " in comment
            assert f"templates {TEMPLATES.sha256[:12]}." in comment
            assert "run `mhcgen build`" in comment
            assert all(len(line) <= 88 for line in rest)


def test_manifest(any_plan: Plan, tmp_path: Path) -> None:
    rendered = render(any_plan)
    manifest = read_manifest(write(tmp_path, rendered))
    assert manifest is not None
    assert list(manifest.files) == list(rendered)
    assert manifest.name == any_plan.name
    assert manifest.version == __version__
    assert manifest.spec_sha256 == spec_sha256(resolved(any_plan))
    assert manifest.templates_sha256 == TEMPLATES.sha256
    assert list(manifest.kernels) == [target.arch for target in any_plan.targets]
    for target in any_plan.targets:
        rows = {row.name: row for row in manifest.kernels[target.arch]}
        assert len(rows) == len(manifest.kernels[target.arch])
        for token_group in target.token_groups:
            row = rows[target.plan.boundary_name(token_group.kernel)]
            assert row.cluster == target.cluster_size
            assert row.threads == target.launched_threads
            assert row.shared_bytes == token_group.shared_bytes
            assert row.token_group == token_group.group
            for transport in any_plan.transports:
                name = any_plan.boundary_name(token_group.kernel, transport)
                publishing = [row.kernel for row in target.publishing]
                assert (name in rows) == (token_group.kernel in publishing)
        assert {f"publish_{t}" for t in any_plan.transports} < set(rows)
        assert any("finalize" in name for name in rows) == bool(any_plan.spec.moe)


def test_dsl_range_is_that_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"nvidia-cutlass-dsl{DSL_RANGE}" in project["dependencies"]
    assert f"apache-tvm-ffi{TVM_FFI_RANGE}" in project["dependencies"]


def test_finalize_is_emitted_for_moe_only(any_plan: Plan) -> None:
    finalize = PurePosixPath("finalize.py")
    rendered = render(any_plan)
    assert (finalize in rendered) == (any_plan.spec.moe is not None)
    assert ("import Finalize" in "".join(rendered.values())) == (finalize in rendered)


def test_runtime_is_copied_verbatim(files: Files) -> None:
    sources = sorted(RUNTIME.glob("*.py"))
    assert sources
    for source in sources:
        text = files[PurePosixPath("runtime", source.name)]
        assert text.split("\n\n", 1)[1] == source.read_text()


def test_every_module_is_imported_by_relative_imports(files: Files) -> None:
    own = {path.stem for path in files if path.suffix == ".py"} | {"mhcgen"}
    for path, text in files.items():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                else:
                    continue
                assert not own & {name.split(".")[0] for name in names}, path


# The YAML of the resolved spec


@settings(deadline=None)
@given(
    st.floats(1.2e-38, 1e-2),
    st.floats(1.2e-38, 16.0),
    st.sampled_from([1e-5, 1e-20, 1.5e-7, 1e-2, 1.2e-38, 0.01]),
)
def test_floats_read_back_equal(eps: float, mult: float, other: float) -> None:
    spec = Spec.model_validate(
        {
            "name": "floats",
            "model": {
                "hidden": 4096,
                "rms_eps": eps,
                "hc_eps": other,
                "post_mult": mult,
            },
            "parallel": {"tp": 4},
        }
    )
    text = spec_yaml(spec)
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load(text)
    assert Spec.model_validate(data) == spec
    # A reader of YAML 1.1 takes a number without a point for a string.
    assert not re.search(r": \d+e", text)


# PTX helpers


def test_ptx_holds_exactly_what_is_used(files: Files) -> None:
    used = {
        name
        for path, text in files.items()
        if path.suffix == ".py" and path != PTX
        for name in ptx_names(path, text)
    }
    defined = [
        node.name
        for node in ast.parse(files[PTX]).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert used <= set(defined)
    assert defined == sorted(set(defined))
    helpers = TEMPLATES.of_kind("ptx")
    for name in set(defined) - used:  # helpers of helpers
        users = [t for p, t in helpers.items() if p.stem in defined and p.stem != name]
        assert any(name in text for text in users)


def tree(folder: Path, sources: dict[str, str]) -> Templates:
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Templates(folder, folder / "runtime")


HELPERS = {
    "ptx/one.py": "from a import b, c\n\n\ndef one():\n    return b, c\n",
    "ptx/two.py": (
        "import m as n\nfrom a import c, d\n\nfrom .one import one\n\n\n"
        "@c\ndef two():  # why\n    return one(n, d)\n"
    ),
    "ptx/three.py": "def three():\n    pass\n",
}


def test_ptx_follows_helpers_of_helpers_and_merges_imports(tmp_path: Path) -> None:
    templates = tree(tmp_path, HELPERS)
    text = templates.ptx({PurePosixPath("k.py"): "x = ptx.two() + other.three()\n"})
    assert formatted({PTX: text})[PTX].split('"""', 2)[2] == (
        "\n\nimport m as n\nfrom a import b, c, d\n\n\n"
        "def one():\n    return b, c\n\n\n"
        "@c\ndef two():  # why\n    return one(n, d)\n"
    )


def test_unknown_ptx_helper_is_refused(tmp_path: Path) -> None:
    templates = tree(tmp_path, HELPERS)
    with pytest.raises(TemplateError, match=r"k\.py uses ptx\.four"):
        templates.ptx({PurePosixPath("k.py"): "ptx.four()\n"})


@pytest.mark.parametrize(
    "text",
    ["", "import a\n", "def other():\n    pass\n", "X = 1\n\n\ndef one():\n    pass\n"],
)
def test_malformed_ptx_helper_is_refused(text: str, tmp_path: Path) -> None:
    templates = tree(tmp_path, {"ptx/one.py": text})
    with pytest.raises(TemplateError, match=r"ptx/one\.py"):
        templates.ptx({})


# Templates


@pytest.mark.parametrize(
    "text",
    [
        "x = «plan.nothing»\n",
        "x = «plan.target»\n",
        "x = «plan.spec»\n",
        "x = «none»\n",
        "#: if plan.nothing\n#: endif\n",
        "#: for x in plan.nothing\n#: endfor\n",
        "#: for x in plan.name\n",
        "x = (\n",
    ],
)
def test_faulty_template_is_named(text: str, glm53_plan: Plan, tmp_path: Path) -> None:
    templates = tree(tmp_path, {"package/bad.py.jinja": text, "ptx/x.py": ""})
    with pytest.raises(TemplateError, match=r"bad\.py"):
        formatted(templates.rendered(glm53_plan))


def test_two_sources_of_one_file_are_refused(glm53_plan: Plan, tmp_path: Path) -> None:
    templates = tree(tmp_path, {"package/a.py": "", "package/a.py.jinja": ""})
    with pytest.raises(TemplateError, match=r"a\.py"):
        templates.rendered(glm53_plan)


def test_template_hash_covers_every_source_and_no_litter(tmp_path: Path) -> None:
    sources = {"package/a.py": "1", "package/b.md.jinja": "2", "ptx/c.py": "3"}
    sources["runtime/d.py"] = "4"
    hashes = {tree(tmp_path, sources).sha256}
    litter = {"ptx/__pycache__/c.pyc": "", "package/.ruff_cache/x": ""}
    assert tree(tmp_path, litter).sha256 in hashes
    for name in sources:
        hashes.add(tree(tmp_path, {name: "changed"}).sha256)
    assert len(hashes) == 1 + len(sources)


@pytest.mark.parametrize(
    "name", [str(p) for p in TEMPLATES.sources if p.suffix == ".py"]
)
def test_plain_templates_are_python(name: str) -> None:
    ast.parse(TEMPLATES.sources[PurePosixPath(name)])


ALLOWED = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.For,
    nodes.If,
    nodes.Name,
    nodes.Getattr,
    nodes.Const,
    nodes.Compare,
    nodes.Operand,
    nodes.Test,
    nodes.Not,
    nodes.And,
    nodes.Or,
)
MAX_NESTING = 3


def chooses_text(node: nodes.Node) -> bool:
    """Whether a node gives one of two texts that stand in the template."""
    return isinstance(node, nodes.CondExpr) and all(
        isinstance(text, nodes.Const) and isinstance(text.value, str)
        for text in (node.expr1, node.expr2)
    )


def faults(template: str) -> list[str]:
    """What a template does beyond reading attributes, looping and testing.

    Within a line it may choose between two texts.
    """
    found = []

    def walk(node: nodes.Node, depth: int) -> None:
        if not isinstance(node, ALLOWED) and not chooses_text(node):
            found.append(f"line {node.lineno}: {type(node).__name__}")
        if isinstance(node, nodes.For | nodes.If):
            depth += 1
            if depth > MAX_NESTING:
                found.append(f"line {node.lineno}: nesting")
        branches = node.elif_ if isinstance(node, nodes.If) else []
        for child in node.iter_child_nodes():
            walk(child, depth - 1 if child in branches else depth)

    walk(jinja_environment({}).parse(template), 0)
    return found


@pytest.mark.parametrize("name", JINJA)
def test_templates_only_place_things(name: str) -> None:
    assert faults(JINJA[name]) == []


@pytest.mark.parametrize(
    "template",
    [
        "x = «plan.hidden + 1»\n",
        "x = «plan.hidden * 2»\n",
        "x = «plan.hidden // 2»\n",
        "x = « -plan.hidden»\n",
        "x = «plan.name ~ 'x'»\n",
        "x = «plan.target('sm_90a')»\n",
        "x = «plan.name | upper»\n",
        "x = «plan.targets[0]»\n",
        "x = «[plan.hidden]»\n",
        "#: set x = plan.hidden\n",
        "#: macro f(x)\n#: endmacro\n",
        "#: include 'other'\n",
        "#: for a in plan.b | list\n#: endfor\n",
        "#: if plan.f()\n#: endif\n",
        "x = «1 if plan.spec.moe else 2»\n",
        "x = «'a' if plan.f() else 'b'»\n",
        "x = «'a' if plan.a + 1 else 'b'»\n",
        "x = «'a' if plan.a»\n",
        "x = «'a' if plan.a else plan.b»\n",
        "#: for a in b\n#: for c in a\n#: if c\n#: if a\n"
        "#: endif\n#: endif\n#: endfor\n#: endfor\n",
        "«% filter upper %»x«% endfilter %»\n",
    ],
)
def test_template_lint_refuses(template: str) -> None:
    assert faults(template) != []


def test_template_lint_accepts() -> None:
    template = (
        "#: for a in plan.rows\n#: if a.x is none and not a.y == 2\n«a.z»\n"
        "#: elif loop.last\n#: elif a.w\n#: else\n#: endif\n#: endfor\n«# note #»"
        "f(x«', y' if plan.a and not plan.b else ''»)\n"
    )
    assert faults(template) == []
