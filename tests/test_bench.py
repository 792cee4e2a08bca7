"""The benchmark's parts that need no GPU: statistics, results, tables, pictures."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mhcgen import cli, reference
from mhcgen.bench import plot, report, run, timing, unfused
from mhcgen.bench.contenders import Contender, Inputs, UnavailableError
from mhcgen.bench.machine import Machine
from mhcgen.bench.packages import distinct, package_folder
from mhcgen.bench.result import Package, Result, read_result
from mhcgen.bench.run import check_shape, described
from mhcgen.bench.timing import CALLS, Spread, capture, interleaved, quantile
from mhcgen.bench.traffic import Traffic, boundary_traffic
from mhcgen.errors import MhcgenError
from mhcgen.plan import Plan
from mhcgen.resources import resource

GLM53 = resource("specs") / "glm53.yaml"
SHAPE = SimpleNamespace(
    HIDDEN=4096,
    HC=4,
    MIX=24,
    TP=4,
    RMS_EPS=1e-5,
    HC_EPS=1e-6,
    NORM_EPS=1e-5,
    POST_MULT=2.0,
    SINKHORN_ITERS=20,
    FN_WEIGHT="bf16",
    NORM_WEIGHT="plain",
    PRE_MIX="fresh",
    STREAM_MEAN=False,
)


def constants(**changes: object) -> ModuleType:
    return SimpleNamespace(**{**vars(SHAPE), **changes})  # type: ignore[return-value]


RESULT = Result(
    package="glm53",
    device="NVIDIA H200",
    gpus=2,
    command="python -m mhcgen bench generated/glm53",
    microseconds={
        1: {"boundary": 4.0, "nccl": 5.0, "floor": 2.0},
        2: {"boundary": 5.0, "nccl": 5.0, "floor": 2.0},
        8: {"boundary": 6.0, "nccl": 6.5},
    },
    spread={1: {"boundary": (3.9, 4.25)}},
    notes={"floor": "M=8: does not fit", "one-shot": "needs a GPU for each rank"},
    packages=(
        Package(
            name="glm53",
            spec_sha256="5e",
            templates_sha256="7e",
            hidden=4096,
            hc=4,
            tp=2,
            arch="sm_90a",
            transport="unicast",
        ),
    ),
    versions={"torch": "2.11"},
    traffic={1: Traffic(4_000_000, 8_000)},
    host={"call": 14.5},
    replays=21,
    calls=100,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
@example([0.0, -16385.0], 0.9999999999999999)
def test_quantiles(values: list[float], share: float) -> None:
    expected, rounding = np.quantile(values, share), 1e-12 * max(map(abs, values))
    assert quantile(values, share) == pytest.approx(expected, abs=rounding)


def test_spread() -> None:
    assert Spread.of([float(v) for v in range(10, -1, -1)]) == Spread(5.0, 1.0, 9.0)


def test_a_recording_keeps_the_tensors_whose_addresses_its_graph_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("Stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = torch.zeros(1)
    watched = weakref.ref(tensor)
    recording = capture(partial(tensor.add_, 1))
    assert int(tensor) == 3 + CALLS
    del tensor
    assert watched() is not None
    del recording
    assert watched() is None


def test_replays_are_interleaved_and_the_first_do_not_count() -> None:
    order: list[str] = []

    def timer(name: str, times: list[float]) -> float:
        order.append(name)
        return times.pop(0)

    slow, fast = [1e6, 3.0, 5.0, 4.0], [1e6, 1.0, 1.0, 2.0]
    found = interleaved(
        {"slow": lambda: timer("slow", slow), "fast": lambda: timer("fast", fast)},
        replays=3,
        warm_ups=1,
    )
    assert order == ["slow", "fast"] * 4
    assert found["slow"] == Spread(4.0, 3.2, 4.8)
    assert found["fast"].median == 1.0


def test_a_result_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(RESULT.text())
    again = read_result(path)
    assert again.text() == RESULT.text()
    assert again.microseconds == RESULT.microseconds
    assert again.columns == ("boundary", "nccl", "floor")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no result of mhcgen bench"),
        ("[]", "is no result of mhcgen bench"),
        ('{"package": "x"}', "is no result of mhcgen bench"),
        ('{"microseconds": {"one": {}}}', "is no result of mhcgen bench"),
        ("[" * 100_000, "is no result of mhcgen bench"),
        *(
            (json.dumps(json.loads(RESULT.text()) | change), "is no result of")
            for change in (
                {"host": None},
                {"notes": None},
                {"notes": {"nccl": 1}},
                {"host": {"call": "x"}},
                {"gpus": "two"},
                {"microseconds": {}},
                {"microseconds": {"1": {"boundary": None}}},
                {"microseconds": {"1": {"boundary": 0}}},
                {"microseconds": {"1": {"boundary": float("nan")}}},
                {"spread": {"1": {"boundary": [1]}}},
                {"packages": [{"tp": 2}]},
                {"traffic": {"1": {"local": 2}}},
                {"traffic": {"1": {"local": -1, "link": 2}}},
                {"device": "\ud800"},
                {"versions": []},
            )
        ),
    ],
)
def test_what_is_no_result(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(MhcgenError, match=message):
        read_result(path)
    with pytest.raises(MhcgenError, match=r"cannot read .*missing"):
        read_result(tmp_path / "missing.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(MhcgenError, match="is no result of mhcgen bench"):
        read_result(tmp_path / "pipe.json")


def test_ratios() -> None:
    headers, rows = report.ratios(RESULT)
    table = [dict(zip(headers, row, strict=True)) for row in rows]
    assert table[0] == {
        "M": 1,
        "/ nccl": 0.8,
        "/ two launches": None,
        "/ floor": 2.0,
        "finalize / boundary": None,
        "floor's share %": 50.0,
        "time(2M) / time(M)": 1.25,
        "local MB": 4.0,
        "link MB": 0.008,
        "local GB/s": 1000.0,
        "link GB/s": 2.0,
    }
    # What was not measured is a gap, not a number.
    assert table[2]["/ floor"] is table[2]["local MB"] is None
    assert table[1]["time(2M) / time(M)"] is None


def test_the_report_shows_every_number_and_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.show(RESULT)
    out = capsys.readouterr().out
    assert "glm53, 2 x NVIDIA H200: microseconds a call" in out
    assert "3.90-4.25" in out
    assert "call  14.50" in out
    assert "floor: M=8: does not fit" in out
    assert "one-shot: needs a GPU for each rank" in out
    times = out.splitlines()[1:5]
    assert times[0].split() == ["M", "boundary", "nccl", "floor"]
    assert times[3].split() == ["8", "6.00", "6.50", "-"]


def test_traffic_by_hand() -> None:
    """TP 4, H 4096, HC 4, one token: rows of 8 KiB, streams of 32, fn 768 KiB."""
    kib = 1024
    row, streams, fn = 8 * kib, 32 * kib, 768 * kib
    mailbox = 4 * row * 3
    mixes = (4 + 16) * 4 + 24 * 4
    expected = row + mailbox + 2 * streams + row + mixes + fn + row
    unicast = boundary_traffic(constants(), "unicast", 1)
    assert unicast == Traffic(expected, 3 * row)
    assert boundary_traffic(constants(), "multicast", 1) == Traffic(expected, row)
    alone = boundary_traffic(constants(TP=1), "local", 1)
    assert alone == Traffic(expected - mailbox, 0)
    wide = boundary_traffic(
        constants(FN_WEIGHT="fp32", NORM_WEIGHT="none"), "unicast", 1
    )
    assert wide.local == expected + fn - row
    more = boundary_traffic(
        constants(PRE_MIX="delayed", STREAM_MEAN=True), "unicast", 1
    )
    assert more.local == expected + 4 * 4 + row
    two = boundary_traffic(constants(), "unicast", 2)
    assert two.local == 2 * expected - fn - row
    assert two.link == 6 * row


@pytest.mark.parametrize("fn_dtype", [torch.bfloat16, torch.float32])
def test_the_unfused_path_computes_a_boundary(fn_dtype: torch.dtype) -> None:
    inputs = reference.random_inputs(3, 512, 4, 4, 7)
    c = constants(HIDDEN=512)
    expected = inputs.boundary(
        reference.Constants(
            rms_eps=1e-5, hc_eps=1e-6, norm_eps=1e-5, post_mult=2.0, sinkhorn_iters=20
        )
    )
    new, post, comb, layer_input = unfused.boundary(
        c,
        reference.all_reduce(inputs.parts),
        inputs.residual,
        inputs.post,
        inputs.comb,
        inputs.fn.to(fn_dtype),
        inputs.scale,
        inputs.base,
        inputs.norm_weight,
    )
    torch.testing.assert_close(new, expected.residual, rtol=1e-2, atol=1e-2)
    tolerance = 1e-2 if fn_dtype is torch.bfloat16 else 1e-4
    for ours, theirs in ((post, expected.post), (comb, expected.comb)):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=tolerance, atol=tolerance
        )
    torch.testing.assert_close(
        layer_input.double(),
        expected.layer_input.double(),
        rtol=2e-2,
        atol=2e-2,
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_names_at_the_lines_ends_stand_apart(places: list[float]) -> None:
    moved = plot.spread_out(places, 0.05)
    for index, place in enumerate(places):
        for other, that in enumerate(places):
            if place < that:
                assert moved[index] < moved[other]
    ordered = sorted(moved)
    for low, high in itertools.pairwise(ordered):
        assert high - low >= 0.05 - 1e-9
    assert np.mean(moved) == pytest.approx(np.mean(places))


def test_what_is_apart_already_stays() -> None:
    assert plot.spread_out([0.9, 0.1, 0.5], 0.05) == [0.9, 0.1, 0.5]


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    plot.check_format(path)
    plot.write_plot(RESULT, path)
    data = path.read_bytes()
    plot.write_plot(RESULT, path)
    assert path.read_bytes() == data, "the same result gives another picture"
    if suffix == ".png":
        assert data.startswith(b"\x89PNG")
        return
    text = data.decode()
    for label in ("boundary  6.0", "nccl  6.5", "floor  2.0", "2 x NVIDIA H200"):
        assert label in text
    assert ">64<" not in text
    if suffix == ".html":
        assert "<td>6.50</td>" in text
        assert "one-shot: needs a GPU" in text
        # Self-contained: nothing is loaded from elsewhere.
        assert "src=" not in text
        assert "<link" not in text
        assert "<?xml" not in text


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> object:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mhcgen", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_a_finished_run_is_shown_without_a_gpu(tmp_path: Path, command: object) -> None:
    source = write(tmp_path / "result.json", RESULT.text())
    picture = tmp_path / "picture.html"
    code, out, err = command(source, "--plot", picture)  # type: ignore[operator]
    assert (code, err) == (0, "")
    assert "one-shot: needs a GPU for each rank" in out
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        (["."], "is no package made by mhcgen"),
        (["wide.yaml"], "wide.yaml:4:"),
        ([GLM53, "--tokens", "1,x"], "'x' is no number of tokens"),
        ([GLM53, "--tokens", "0"], "'0' is no number of tokens"),
        ([GLM53, "--without", "boundary"], "one of between sublayers, nccl, one-shot"),
        ([GLM53, "--plot", "a.pdf"], "must end in .png, .svg, .html"),
        ([GLM53, "--compare", "missing.yaml"], "missing.yaml: no such file"),
        (["result.json"], "cannot read result.json"),
        (["result.json", "--json", "x"], "--without need a new one"),
        (["result.json", "--tokens", "1"], "--without need a new one"),
        (["result.json", "--without", "nccl"], "--without need a new one"),
        ([GLM53, "--tokens", "9" * 5000], "is no number of tokens"),
        (["a" * 300], "File name too long"),
        ([GLM53, "--json", "."], "--json .: is a folder: name a file"),
        ([GLM53, "--plot", "none/a.svg"], "--plot none/a.svg: there is no folder none"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: object,
    arguments: list[object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "wide.yaml",
        "name: wide\nmodel: {hidden: 4096}\nparallel: {tp: 2}\n"
        "targets: {sm_90a: {token_groups: [{max_tokens: 256, group: 64}]}}\n",
    )
    code, out, err = command(*arguments)  # type: ignore[operator]
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_without_a_gpu(command: object, repository: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    code, out, err = command(repository / "generated" / "glm53")  # type: ignore[operator]
    assert (code, out) == (2, "")
    assert err == "mhcgen bench needs a GPU, and no CUDA device is available\n"


BARE = """
import sys
for name in ("mhcgen.spec", "ruamel", "ruff", "jinja2", "matplotlib", "filelock"):
    sys.modules[name] = None
sys.argv = ["mhcgen", "bench", sys.argv[1]]
from mhcgen.cli import main
main()
"""


def test_a_package_needs_no_library_for_specs(repository: Path) -> None:
    """GPU machines have torch, the DSL, typer and rich, and maybe no more.

    Some releases of typer bring pydantic, so the module that uses it is left out here.
    """
    done = subprocess.run(
        [sys.executable, "-c", BARE, "generated/glm53"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Error" not in done.stderr
    if not torch.cuda.is_available():
        assert "needs a GPU" in done.stderr
        assert done.returncode == 2


def test_a_spec_is_rendered_without_the_formatter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ruff", None)
    folder = package_folder(GLM53, tmp_path)
    assert folder == tmp_path / "glm53"
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")


def test_packages_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = []
    for parent in "abc":
        folders.append(tmp_path / parent / "twin")
        folders[-1].mkdir(parents=True)
        write(folders[-1] / "which.txt", parent)
    found = distinct(folders, tmp_path / "temporary")
    assert [path.name for path in found] == ["twin", "twin_2", "twin_3"]
    assert [(path / "which.txt").read_text() for path in found] == ["a", "b", "c"]


def test_packages_of_other_shapes_are_refused() -> None:
    def package(name: str, **changes: object) -> object:
        return SimpleNamespace(
            identity=SimpleNamespace(name=name), constants=constants(**changes)
        )

    first, other = package("one"), package("two", HIDDEN=2048)
    check_shape(first, first)  # type: ignore[arg-type]
    with pytest.raises(MhcgenError, match="--compare two: its HIDDEN is 2048"):
        check_shape(first, other)  # type: ignore[arg-type]


def measured(
    monkeypatch: pytest.MonkeyPatch, columns: list[Contender]
) -> Result | None:
    """A run without a GPU; a graph takes a microsecond for each letter of its name."""
    monkeypatch.setattr(run, "contenders", lambda machine, packages: columns)
    monkeypatch.setattr(run, "capture", lambda call: call)
    for module in (run, timing):
        monkeypatch.setattr(module, "replay", lambda graph: float(len(graph())))
    monkeypatch.setattr(run, "host_time", lambda inputs: {"call": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    package = SimpleNamespace(
        constants=constants(),
        boundary=SimpleNamespace(capacity=8, transport="unicast"),
        identity=RESULT.packages[0],
    )
    gpu = Machine(0, 1, torch.device("cpu"))
    return run.measure(gpu, [package], [1, 2], ("nccl",), lambda name: None)  # type: ignore[list-item]


def contender(column: str, fault: Exception | None = None, **rest: Any) -> Contender:
    def call_for(inputs: Inputs) -> Callable[[], object]:
        if fault is not None and inputs.m == 2:
            raise fault
        return lambda: column

    return Contender(column, f"what {column} is", call_for, **rest)


def test_a_column_that_cannot_run_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(
        monkeypatch,
        [
            contender("boundary", required=True),
            contender("nccl"),
            contender("floor", UnavailableError("too many blocks")),
            contender("unfused", RuntimeError("no\ncompiler")),
            contender("beyond", less_for=lambda inputs: lambda: "." * inputs.m),
        ],
    )
    assert result is not None
    assert result.microseconds == {
        1: {"boundary": 8.0, "floor": 5.0, "unfused": 7.0, "beyond": 5.0},
        2: {"boundary": 8.0, "beyond": 4.0},
    }
    assert result.spread[1]["floor"] == (5.0, 5.0)
    assert result.notes == {
        "boundary": "what boundary is",
        "nccl": "left out by --without",
        "floor": "M=2: too many blocks",
        "unfused": "M=2: RuntimeError: no compiler",
        "beyond": "what beyond is",
    }
    assert result.traffic[2].link == 6 * 8192
    assert {"torch", "cuda", "driver", "mhcgen"} <= set(result.versions)
    assert read_back(result) == result.text()


def test_what_follows_gemms_is_timed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every M: they leave a process slower than they found it."""
    order: list[tuple[str, int]] = []

    def noting(column: str, **rest: Any) -> Contender:
        def call_for(inputs: Inputs) -> Callable[[], object]:
            order.append((column, inputs.m))
            return lambda: column

        return Contender(column, "", call_for, **rest)

    result = measured(
        monkeypatch,
        [
            noting("boundary"),
            noting("between", less_for=lambda inputs: lambda: "."),
            noting("floor"),
        ],
    )
    assert result is not None
    assert result.columns == ("boundary", "floor", "between")
    alone = [(column, m) for m in (1, 2) for column in ("boundary", "floor")]
    assert order == [*alone, ("between", 1), ("between", 2)]


def test_a_column_of_every_package_is_left_out() -> None:
    for column in ("between sublayers", "glm53_2 between sublayers", "other nccl"):
        assert contender(column).is_one_of(("between sublayers", "nccl"))
    for column in ("boundary", "glm53_2 boundary", "not-nccl", "sublayers"):
        assert not contender(column).is_one_of(("between sublayers", "nccl"))


def read_back(result: Result) -> str:
    """The text of what the text says."""
    content = json.loads(result.text())
    return Result(**content).text()


def test_a_package_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = RuntimeError("illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        measured(monkeypatch, [contender("boundary", fault, required=True)])


def test_failures_become_short_notes() -> None:
    note = described(RuntimeError("line\n  one " + "x" * 500))
    assert note.startswith("RuntimeError: line one xxx")
    assert len(note) <= 160


def test_results_in_the_repository_are_readable(repository: Path) -> None:
    paths = sorted((repository / "benchmarks" / "results").glob("*.json"))
    assert paths
    for path in paths:
        assert "boundary" in read_result(path).columns
        json.loads(read_result(path).text())


def test_the_tables_of_the_readme_are_those_of_the_results(repository: Path) -> None:
    subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": "."},
        check=True,
        timeout=60,
    )
    text = (repository / "README.md").read_text()
    assert text.count("[JSON](benchmarks/results/") == 3


def test_the_columns_name_what_a_plan_has(glm53_plan: Plan) -> None:
    """The traffic of a plan is that of its package's constants."""
    assert glm53_plan.mix == SHAPE.MIX
    assert glm53_plan.mailbox.row_bytes == 2 * SHAPE.HIDDEN
