"""Matrices: what they may say, what they make, and how their specs are checked."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mhcgen import cli, matrix_run
from mhcgen.build import write_files
from mhcgen.compilation import CompiledKernel, CompileError, Job
from mhcgen.errors import MhcgenError, PlanError, Problem, SpecError
from mhcgen.matrix import (
    AXES,
    DEFAULTS,
    MAX_SPECS,
    Candidate,
    Expansion,
    expand,
    load_matrix,
    matrix_schema_text,
    sample,
)
from mhcgen.matrix_run import Checks, Compilers, check, why
from mhcgen.plan import Plan, TargetPlan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.spec import Section, Spec

SHIPPED = resource("specs") / "matrix" / "all.yaml"
SMALL = """\
base: {hidden: 512, capacity: 8, moe: {top_k: 2}, archs: [sm_90a]}
blocks:
  - name: ranks
    axes: {tp: [1, 2, 4]}
  - name: streams
    base: {tp: 2}
    axes:
      hc: [2, 4]
      cluster: [null, 2, 3]
    exclude:
      - {hc: [2], cluster: [2]}
"""

EXPERTS = {"shared_expert": "optional", "weight_dtypes": ["fp32", "bf16"]}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path, no_three: None) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def no_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan has clusters of three blocks, whatever the kernels can do."""
    make_plan = Candidate.plan

    def plan(self: Candidate) -> Plan:
        if self.values["cluster"] == 3:
            where = ("targets", "sm_90a", "cluster_size")
            raise PlanError([Problem(where, "3 blocks cannot share 64 fragments")])
        return make_plan(self)

    monkeypatch.setattr(Candidate, "plan", plan)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs mhcgen matrix in this process, in the folder of the file."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mhcgen", "matrix", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def shipped() -> Expansion:
    return expand(load_matrix(SHIPPED))


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in candidates]


# What a matrix may say


def test_schema_is_current() -> None:
    path = SHIPPED.with_name("schema.json")
    assert path.read_text() == matrix_schema_text()
    first = SHIPPED.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


def test_every_value_of_a_spec_has_an_axis() -> None:
    """Whoever adds a field to specs adds it to the axes."""

    def leaves(model: type[Section], at: tuple[str, ...] = ()) -> Iterator[str]:
        for key, info in model.model_fields.items():
            annotation = info.annotation
            if isinstance(annotation, type) and issubclass(annotation, Section):
                yield from leaves(annotation, (*at, key))
            else:
                yield ".".join((*at, key))

    located = {".".join(axis.loc) for axis in AXES}
    assert set(leaves(Spec)) - {"name"} == located - {"targets.cluster_size"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tp: [1", "tps: [1", "4:12: blocks[0].axes.tps: an unknown key given tps;"),
        ("tp: [1", "tp: [3", "4:17: blocks[0].axes.tp[0]: not one of the choices"),
        ("[1, 2, 4]", "[1, 2, 1]", "4:23: blocks[0].axes.tp[2]: given before"),
        ("[1, 2, 4]", "[true]", "not a whole number given true; allowed: 1, 2, 4, 8"),
        ("[1, 2, 4]", "[]", "4:16: blocks[0].axes.tp: empty"),
        ("[1, 2, 4]", "4", "4:16: blocks[0].axes.tp: not a list given 4; allowed: a"),
        ("[1, 2, 4]", "null", "blocks[0].axes.tp: without a value"),
        ("hidden: 512", "hidden: 513", "1:16: base.hidden: not a multiple of 8 given"),
        ("hidden: 512, ", "", "3:5: blocks[0]: no hidden give hidden in axes, in base"),
        (
            "tp: [1, 2, 4]",
            "hc: [2, 4]",
            "3:5: blocks[0]: no tp give tp in axes, in base",
        ),
        ("top_k: 2", "top_k: 99", "base.moe.top_k: too large given 99; allowed:"),
        ("streams", "ranks", "blocks[1].name: given before given ranks"),
        ("streams", "Streams", "blocks[1].name: not of the right form given Streams;"),
        ("base: {tp: 2}", "base: {tp: 2, hc: 2}", "base.hc: an axis of this block"),
        ("{tp: [1, 2, 4]}", "{}", "4:11: blocks[0].axes: no axis allowed: hidden, hc,"),
        ("{hc: [2], cluster: [2]}", "{}", "exclude[0]: excludes everything name some"),
        (
            "{hc: [2], cluster: [2]}",
            "{hc: [8]}",
            "exclude[0].hc: excludes nothing: the block makes no spec with that given",
        ),
        ("blocks:", "block:", "2:1: block: an unknown key given block; allowed: base"),
        ("hc: [2, 4]", "hc: &x [2, 4]", "8:11: blocks[1].axes.hc: an anchor given &x"),
    ],
)
def test_wrong_matrix(old: str, new: str, expected: str, file: Path) -> None:
    file.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load_matrix(file)
    assert expected in " ".join(str(caught.value).split())


def test_too_many_specs(file: Path) -> None:
    sizes = ", ".join(str(8 * size) for size in range(8, 2048))
    axes = f"tp: [1, 2, 4, 8, 16]\n      hc: [1, 2, 4, 8]\n      hidden: [{sizes}]"
    file.write_text(
        SMALL.replace("    base: {tp: 2}\n", "").replace("hc: [2, 4]", axes)
    )
    with pytest.raises(SpecError, match=f"at most {MAX_SPECS}") as caught:
        load_matrix(file)
    text = " ".join(str(caught.value).split())
    assert "small.yaml:6:5: blocks[1].axes: with this block, the matrix makes" in text


def test_missing_file(file: Path) -> None:
    with pytest.raises(SpecError, match=r"did you mean small\.yaml"):
        load_matrix(file.with_name("smal.yaml"))


# What it makes


def test_expansion(file: Path) -> None:
    expansion = expand(load_matrix(file))
    assert names(expansion.legal) == [
        "h512_tp1_sm_90a_m8_k2",
        "h512_tp2_sm_90a_m8_k2",
        "h512_tp4_sm_90a_m8_k2",
        "h512_hc2_tp2_sm_90a_m8_k2",
        "h512_tp2_c2_sm_90a_m8_k2",
    ]
    assert names([candidate for candidate, _ in expansion.refused]) == [
        "h512_hc2_tp2_c3_sm_90a_m8_k2",
        "h512_tp2_c3_sm_90a_m8_k2",
    ]
    assert expansion.excluded == {"streams": 1}
    assert expansion.repeated == {"streams": 1}  # hc 4 at tp 2 is in the first block
    ((reason, refused),) = expansion.reasons
    assert reason.startswith("targets.*.cluster_size: N blocks cannot share N fragm")
    assert len(refused) == 2


def test_values_reach_the_spec(file: Path) -> None:
    last = expand(load_matrix(file)).legal[-1]
    spec = last.plan().spec
    assert (spec.model.hidden, spec.model.hc, spec.parallel.tp) == (512, 4, 2)
    assert spec.moe is not None and spec.moe.top_k == 2
    assert list(spec.targets) == ["sm_90a"]
    assert spec.targets["sm_90a"].cluster_size == 2
    assert spec.name == last.name


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_each_axis_reaches_the_spec(axis: object, file: Path) -> None:
    assert hasattr(axis, "name")
    others = {
        "hidden": 1024,
        "hc": 2,
        "tp": 8,
        "cluster": 1,
        "archs": ["sm_100a"],
        "capacity": 3,
        "activation": "fp16",
        "fn_weight": "fp32",
        "projection": "fma",
        "pre_mix": "delayed",
        "norm_weight": "none",
        "batch_invariant": True,
        "mixes": "tail",
        "transports": ["unicast"],
        "moe": None,
        "entry": True,
        "exit": "mean",
        "stream_mean": True,
        "rms_eps": 1e-20,
        "hc_eps": 1e-20,
        "norm_eps": 1e-20,
        "post_mult": 1.0,
        "sinkhorn_iters": 3,
    }
    usual = DEFAULTS | {"hidden": 512, "tp": 4, "moe": {"top_k": 8} | EXPERTS}
    one, other = (
        Candidate("b", usual | change)
        for change in ({}, {axis.name: others[axis.name]})
    )
    first, second = (Spec.model_validate(each.data) for each in (one, other))
    assert first.model_copy(update={"name": second.name}) != second
    assert first.name != second.name
    assert one.traits ^ other.traits == {
        (axis.name, json.dumps(values[axis.name]))
        for values in (one.values, other.values)
    }


def test_long_names_are_cut_and_stay_apart() -> None:
    usual = DEFAULTS | {"hidden": 16384, "tp": 16, "moe": {"top_k": 32} | EXPERTS}
    many = usual | {"activation": "fp16", "exit": "pre_mix", "pre_mix": "delayed"}
    many |= {"norm_weight": "plus_one", "rms_eps": 1e-20}
    one = Candidate("b", many | {"norm_eps": 1e-20})
    other = Candidate("b", many | {"norm_eps": 1e-5})
    for candidate in (one, other):
        assert re.fullmatch("[a-z][a-z0-9_]{47}", candidate.name)
    assert one.name != other.name


def test_shipped_matrix(shipped: Expansion) -> None:
    assert len(shipped.legal) >= 200
    assert len({candidate.name for candidate in shipped.legal}) == len(shipped.legal)
    varied = {axis for candidate in shipped.legal for axis, _ in candidate.traits}
    assert varied == {axis.name for axis in AXES}
    assert not [p for _, p in shipped.refused if "serves this yet" in p.message]


def test_specs_of_the_shipped_matrix_render(shipped: Expansion) -> None:
    picked = sample(shipped.legal, 12, 0)
    results = check(picked, Checks(SHIPPED), 1, lambda name: None)
    assert {result.stage for result in results} == {None}


def test_sample_shows_every_value(shipped: Expansion) -> None:
    picked = sample(shipped.legal, 60, 0)
    assert len(picked) == 60
    shown = set().union(*(candidate.traits for candidate in picked))
    assert shown == set().union(*(candidate.traits for candidate in shipped.legal))


def test_sample_is_drawn_by_its_seed(shipped: Expansion) -> None:
    assert sample(shipped.legal, 30, 7) == sample(shipped.legal, 30, 7)
    assert sample(shipped.legal, 30, 7) != sample(shipped.legal, 30, 8)
    assert len(sample(shipped.legal, 3, 7)) == 3
    assert sample(shipped.legal, 10**6, 7) == shipped.legal
    order = [shipped.legal.index(each) for each in sample(shipped.legal, 30, 7)]
    assert order == sorted(order)


def test_only(file: Path) -> None:
    matrix = load_matrix(file)
    wanted = ["h512_tp4_sm_90a_m8_k2", "h512_tp1_sm_90a_m8_k2"]
    expansion = expand(matrix, [*wanted, wanted[0]])
    assert names(expansion.legal) == wanted[::-1]
    assert expansion.refused == []
    with pytest.raises(MhcgenError, match="no such spec; did you mean h512_tp4_sm_"):
        expand(matrix, ["h512_tp5_sm_90a_m8_k2"])
    with pytest.raises(MhcgenError, match="refused\ntargets"):
        expand(matrix, ["h512_tp2_c3_sm_90a_m8_k2"])


# How its specs are checked


def results_of(file: Path, **checks: object) -> dict[str, tuple[str | None, str]]:
    legal = expand(load_matrix(file)).legal
    results = check(legal, Checks(file, **checks), 2, lambda name: None)  # type: ignore[arg-type]
    assert [result.candidate for result in results] == legal
    return {result.candidate.name: (result.stage, result.reason) for result in results}


def compiled(job: Job, stores: int = 0, loads: int = 0) -> CompiledKernel:
    """What the compiler says of a kernel that spills so much."""
    stack = max(stores, loads)
    name = job.row.name
    return CompiledKernel(job.package, name, job.arch, 64, stores, loads, stack, 0, 0.0)


def test_a_failure_holds_up_no_other_spec(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_all(self: Compilers, jobs: list[Job]) -> list[CompiledKernel]:
        if "tp4" in jobs[0].package:
            raise CompileError("boundary does not compile")
        return [compiled(job) for job in jobs]

    monkeypatch.setattr(Compilers, "run", compile_all)
    outcome = results_of(file, compiled=True)
    failed = outcome.pop("h512_tp4_sm_90a_m8_k2")
    assert failed == ("compile", "boundary does not compile")
    assert set(outcome.values()) == {(None, "")} and len(outcome) == 4


def test_a_fault_of_mhcgen_is_a_failure_of_the_spec(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: object) -> None:
        raise KeyError("lanes")

    monkeypatch.setattr(matrix_run, "render", fail)
    assert set(results_of(file).values()) == {("render", "KeyError: 'lanes'")}


def test_packages_are_kept_and_used_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    outcome = results_of(file, out=out)
    assert sorted(path.name for path in out.iterdir()) == sorted(outcome)
    monkeypatch.setattr(matrix_run, "render", lambda plan: 1 / 0)
    assert set(results_of(file, out=out).values()) == {(None, "")}
    # One that says it is of something else is rendered anew.
    others = ["version", "spec_sha256", "templates_sha256"]
    for name, key in zip(outcome, others, strict=False):
        manifest = out / name / "manifest.json"
        content = json.loads(manifest.read_text()) | {key: "other"}
        manifest.write_text(json.dumps(content))
    stages = [stage for stage, _ in results_of(file, out=out).values()]
    assert stages == ["render"] * 3 + [None] * 2


def test_only_the_architectures_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def compile_all(self: Compilers, jobs: list[Job]) -> list[CompiledKernel]:
        seen.extend(job.arch for job in jobs)
        return [compiled(job) for job in jobs]

    monkeypatch.setattr(Compilers, "run", compile_all)
    file.write_text(SMALL.replace("[sm_90a]", "[sm_90a, sm_100a]"))
    results_of(file, compiled=True, archs=("sm_100a",))
    assert set(seen) == {"sm_100a"}
    seen.clear()
    results_of(file, compiled=True, archs=("sm_103a",))
    assert seen == []


def test_verification_is_told_what_was_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []

    class Verifier:
        returncode = 0

        def __init__(self, words: list[str], **options: object) -> None:
            told.append(words)
            Path(words[words.index("--json") + 1]).write_text('{"cases": [1, 2]}')

        def communicate(self) -> tuple[str, str]:
            return "", ""

    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **kwargs: nullcontext(Verifier(*words))
    )
    monkeypatch.setattr(matrix_run, "render", render_nothing)
    legal = expand(load_matrix(file)).legal[:1]
    checks = Checks(file, device="cuda", tokens="1,3", calls=2)
    (result,) = check(legal, checks, 1, lambda name: None)
    assert (result.stage, result.cases) == (None, 2)
    assert told[0][1:4] == ["-m", "mhcgen", "verify"]
    assert told[0][7:] == (
        ["--arch", "sm_90a", "--tokens", "1,3", "--calls", "2", "--device", "cuda"]
    )
    # Its capacity is 8.
    checks = Checks(file, device="cpu", tokens="8, 9,64")
    check(legal, checks, 1, lambda name: None)
    assert told[1][7:] == ["--arch", "sm_90a", "--tokens", "8"]
    assert "--tokens '8, 9,64'" in checks.command("x")


def render_nothing(plan: object) -> dict[object, str]:
    return {}


def test_why_a_verification_failed() -> None:
    out = "table\n\nFAILED: mhcgen verify x\n  residual 3\n"
    assert why(out, "warning") == "FAILED: mhcgen verify x\n  residual 3"
    assert why("table", "one\ntwo\n") == "one\ntwo"
    assert why("", "\n".join(map(str, range(99)))).splitlines()[-1] == "98"
    assert len(why("FAILED: " + "x\n" * 99, "").splitlines()) == 12
    assert why("", "") == "it failed without a word"


def test_compile_and_verify(file: Path) -> None:
    """All stages, once, on kernels that are right and on one that is not."""
    legal = expand(load_matrix(file)).legal[1:2]
    checks = Checks(file, compiled=True, device="cpu", tokens="1", calls=2)
    (result,) = check(legal, checks, 1, lambda name: None)
    assert (result.stage, result.reason) == (None, "")
    assert result.cases == 2
    assert result.registers is not None and result.registers > 32
    assert result.spilled == 0


def test_a_spill_that_the_plan_does_not_allow(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spill(self: object, jobs: list[Job]) -> list[CompiledKernel]:
        return [compiled(job, 4, 8) for job in jobs]

    monkeypatch.setattr(Compilers, "run", spill)
    legal = expand(load_matrix(file)).legal[:1]
    checks = Checks(file, compiled=True)
    (result,) = check(legal, checks, 1, lambda name: None)
    assert (result.stage, result.spilled) == ("compile", 8)
    assert "boundary_1 spills 8 bytes a thread for sm_90a; its plan allows 0" in (
        result.reason
    )
    monkeypatch.setattr(TargetPlan, "may_spill", 8)
    (result,) = check(legal, checks, 1, lambda name: None)
    assert "mixes spills" in result.reason
    assert "boundary" not in result.reason


def test_a_compiler_serves_until_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SimpleNamespace] = []

    @contextmanager
    def start() -> Iterator[SimpleNamespace]:
        process = SimpleNamespace(poll=lambda: None)
        started.append(SimpleNamespace(process=process, run=lambda job: job))
        yield started[-1]

    def die(job: object) -> None:
        started[-1].process.poll = lambda: -9
        raise CompileError("the compiler died")

    monkeypatch.setattr(matrix_run, "started_worker", start)
    with ExitStack() as stack:
        compilers = Compilers(stack, 1)
        assert compilers.run([1, 2]) == [1, 2]  # type: ignore[list-item]
        assert compilers.run([3]) == [3]  # type: ignore[list-item]
        assert len(started) == 1
        started[0].run = die
        with pytest.raises(CompileError, match="died"):
            compilers.run([4])  # type: ignore[list-item]
        assert compilers.run([5]) == [5]  # type: ignore[list-item]
        assert len(started) == 2


def test_a_wrong_kernel_is_found(file: Path, tmp_path: Path) -> None:
    candidate = expand(load_matrix(file)).legal[1]
    folder = tmp_path / "out" / candidate.name
    write_files(folder, render(candidate.plan()))
    path = folder / "publish.py"
    text = path.read_text()
    path.write_text(text.replace("def ", "broken def ", 1))
    checks = Checks(file, compiled=True, out=folder.parent)
    (result,) = check([candidate], checks, 1, lambda name: None)
    assert result.stage == "compile"
    assert "SyntaxError" in result.reason


# The command


def test_summary(run: Run, file: Path) -> None:
    code, out, err = run("small.yaml", "--jobs", 2)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["ranks", "3", "0", "0", "0", "3", "0"] in lines
    assert ["all", "5", "2", "1", "1", "5", "0"] in lines
    last = out.splitlines()[-1]
    assert last == "5 legal specs, 2 refused; 5 of 5 checked passed (plan, render)"
    assert "  2      targets.*.cluster_size: N blocks cannot" in re.sub(
        " {3,}2 +", "  2      ", out
    )


def test_a_matrix_of_nothing_is_a_failure(run: Run, file: Path) -> None:
    """What checks no spec must not pass for what checked all."""
    file.write_text(
        "blocks:\n  - name: a\n    base: {exit: pre_mix}\n"
        "    axes: {hidden: [64, 128], tp: [2]}\n    exclude: [{hidden: [64]}]\n"
    )
    code, out, err = run("small.yaml")
    assert (code, err) == (1, "")
    last = out.splitlines()[-1]
    assert last == "no legal spec, 1 refused, 1 excluded: nothing was checked"
    assert "an exit by pre-mix takes the one" in out


def test_sample_and_only(run: Run, file: Path) -> None:
    assert "; 2 of 2 checked" in run("small.yaml", "--sample", 2)[1]
    one = run("small.yaml", "--only", "h512_tp1_sm_90a_m8_k2")[1]
    assert "; 1 of 1 checked" in one


def test_failures_say_how_to_repeat_them(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Compilers, jobs: list[Job]) -> None:
        raise CompileError("line <one>\nline | two")

    monkeypatch.setattr(Compilers, "run", fail)
    words = ["small.yaml", "--sample", 1, "--compile", "--verify", "cpu"]
    code, out, err = run(*words, "--arch", "sm_90a", "--report", "report.html")
    assert (code, err) == (1, "")
    name = re.search("FAILED: (h512.*): compile\n  line <one>\n  line", out)
    assert name is not None
    again = f"mhcgen matrix small.yaml --only {name[1]} --compile --verify cpu"
    assert f"  again: {again} --arch sm_90a\n" in out
    page = (tmp_path / "report.html").read_text()
    assert "line &lt;one&gt;" in page and again in page
    assert run(*words, "--report", "report.md")[0] == 1
    text = (tmp_path / "report.md").read_text()
    assert "line <one>\nline | two" in text and again in text


def test_a_failure_is_repeated_with_the_packages_that_it_came_of(
    run: Run, file: Path, tmp_path: Path
) -> None:
    name = "h512_tp1_sm_90a_m8_k2"
    (tmp_path / "kept" / name).mkdir(parents=True)
    (tmp_path / "kept" / name / "mine.txt").write_text("mine")
    words = ["matrix", "small.yaml", "--only", name, "--out", "kept"]
    code, out, err = run(*words[1:])
    assert (code, err) == (1, "")
    assert "mine.txt" in out
    assert f"  again: mhcgen {' '.join(words)}\n" in out


def test_reports(run: Run, file: Path, tmp_path: Path) -> None:
    assert run("small.yaml", "--report", "a.md")[0] == 0
    text = (tmp_path / "a.md").read_text()
    assert "| ranks | 3 | 0 | 0 | 0 | 3 | 0 |\n" in text
    assert "| tp | 2 | 3 | 2 | 3 | 0 |\n" in text
    assert "| h512_tp1_sm_90a_m8_k2 | ranks | 8 |  |  |  |  | ok |\n" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count(" |") for line in table.splitlines()}) == 1
    assert run("small.yaml", "--report", "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text()
    assert page.count("<table>") == page.count("</table>") == 5
    assert "<td>h512_hc2_tp2_c3_sm_90a_m8_k2</td>" in page  # refused, with its reason
    assert "3 blocks cannot share 64 fragments" in page
    for remote in ("http://", "https://", "<script", "<link"):
        assert remote not in page


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--report", "a.txt"], "--report a.txt: name a file in .md or .html"),
        (["--verify", "gpu"], "--verify gpu: choose one of cpu, cuda"),
        (["--arch", "sm_80"], "--arch sm_80: choose one of sm_90a, sm_100a, sm_103a"),
        (["--only", "x"], "--only x: the matrix has no such spec"),
        (["--sample", "0"], "Invalid value for '--sample'"),
        (["--out", "small.yaml"], "small.yaml: File exists; name a folder that can"),
        (["--report", "no/a.md"], "--report no/a.md: there is no folder no; make it"),
        (["--tokens", "1"], "--tokens: nothing is verified; add --verify cpu"),
        (["--calls", "2"], "--calls: nothing is verified"),
        (["--verify", "cpu", "--tokens", "9" * 5000], "--tokens 999"),
        (["--verify", "cpu", "--tokens", "1,x"], "'x' is no number of tokens"),
    ],
)
def test_wrong_usage(
    words: list[str], expected: str, run: Run, file: Path, tmp_path: Path
) -> None:
    code, out, err = run("small.yaml", *words)
    assert (code, out) == (2, "")
    assert expected in err
    assert list(tmp_path.iterdir()) == [file]


def test_wrong_matrix_is_shown(run: Run, file: Path) -> None:
    file.write_text(SMALL.replace("tp: [1", "tp: [3"))
    code, out, err = run("small.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("small.yaml:4:17: blocks[0].axes.tp[0]: ")


def test_schema_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mhcgen", "schema", "--matrix"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == matrix_schema_text()
