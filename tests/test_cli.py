"""The command line: what it prints, its exit codes, and what it leaves alone."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from mhcgen import __version__, cli
from mhcgen import render as rendering
from mhcgen.manifest import read_manifest
from mhcgen.plan import Plan
from mhcgen.resources import resource

SPECS = resource("specs")
GLM53 = SPECS / "glm53.yaml"
TP2 = SPECS / "glm53_tp2.yaml"
WIDE = SPECS / "dsv41_flash_tp4.yaml"
COMMAND = [sys.executable, "-m", "mhcgen"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["mhcgen", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return run


def built(run: Run, *arguments: object) -> Result:
    return run("build", "--no-compile", *arguments)


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.yaml"
    path.write_text(GLM53.read_text().replace("hidden: 4096", "hidden: 4097"))
    return path


@pytest.fixture
def unplannable(tmp_path: Path) -> Path:
    path = tmp_path / "unplannable.yaml"
    path.write_text(
        GLM53.read_text()
        .replace("cluster_size: 8", "cluster_size: 16")
        .replace("sm_90a:", "sm_120a:")
    )
    return path


# Commands


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"mhcgen {__version__}\n", "")


def test_module_is_the_same_command() -> None:
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True)
    assert result.stdout == f"mhcgen {__version__}\n"


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for name in ("build", "compile", "explain", "schema"):
        assert re.search(rf"^  {name} ", result.out, re.MULTILINE)


def test_schema(run: Run, tmp_path: Path) -> None:
    expected = (SPECS / "schema.json").read_text()
    assert run("schema") == Result(0, expected, "")
    assert run("schema", "--output", tmp_path / "s.json") == Result(0, "", "")
    assert (tmp_path / "s.json").read_text() == expected
    result = run("schema", "--output", tmp_path / "none" / "s.json")
    assert result.code == 2
    assert "--output" in result.err and "none; make it, or name a file" in result.err


# build


def test_build(run: Run, tmp_path: Path) -> None:
    result = built(run, GLM53, TP2)
    assert result.code == 0
    assert re.fullmatch(
        r"glm53: \d+ files written to generated/glm53\n"
        r"glm53_tp2: \d+ files written to generated/glm53_tp2\n",
        result.out,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generated"]
    assert built(run, GLM53, TP2).out == "glm53: up to date\nglm53_tp2: up to date\n"


def test_out(run: Run, tmp_path: Path) -> None:
    assert built(run, GLM53, "--out", "a/b").code == 0
    assert read_manifest(tmp_path / "a/b/glm53") is not None


def test_arch_does_not_narrow_what_is_rendered(run: Run, tmp_path: Path) -> None:
    built(run, GLM53, "--out", "all")
    built(run, GLM53, "--out", "one", "--arch", "sm_90a")
    one = {p.relative_to(tmp_path / "one"): p for p in (tmp_path / "one").rglob("*.*")}
    for path, file in one.items():
        assert file.read_bytes() == (tmp_path / "all" / path).read_bytes()
    assert len(one) > 10


def test_check(run: Run, tmp_path: Path) -> None:
    missing = built(run, GLM53, "--check")
    assert missing.code == 1
    assert "glm53: is stale: run mhcgen build" in missing.out
    assert list(tmp_path.iterdir()) == []
    built(run, GLM53)
    assert built(run, GLM53, "--check") == Result(0, "glm53: up to date\n", "")
    (tmp_path / "generated/glm53/ptx.py").write_text("edited\n")
    stale = built(run, GLM53, TP2, "--check")
    assert stale.code == 1
    assert "--- generated/glm53/ptx.py\n+++ generated/glm53/ptx.py\n@@" in stale.out
    assert "\n-edited\n" in stale.out
    assert "--- /dev/null\n+++ generated/glm53_tp2/" in stale.out
    assert len(stale.out.splitlines()) < 420
    assert re.search(r"^\.\.\. and \d+ more lines$", stale.out, re.MULTILINE)
    assert (tmp_path / "generated/glm53/ptx.py").read_text() == "edited\n"
    assert sorted(p.name for p in (tmp_path / "generated").iterdir()) == ["glm53"]


def test_build_is_fast_and_imports_no_compiler(tmp_path: Path) -> None:
    before = getrusage(RUSAGE_CHILDREN)
    result = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            *COMMAND[1:],
            "build",
            "--no-compile",
            GLM53,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    after = getrusage(RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1.5  # of one core: another process may keep the machine busy
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "mhcgen.render" in imported
    assert not imported & {"torch", "cutlass", "tvm_ffi", "numpy"}


# Mistakes of the user


def test_wrong_spec(run: Run, wrong: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = built(run, GLM53, wrong)
    assert (result.code, result.out) == (2, "")
    line = wrong.read_text().splitlines().index("  hidden: 4097") + 1
    assert result.err.startswith(f"{wrong}:{line}:11: model.hidden: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_all_wrong_specs_are_reported(run: Run, wrong: Path, tmp_path: Path) -> None:
    result = built(run, wrong, tmp_path / "missing.yaml")
    assert result.code == 2
    assert "model.hidden" in result.err
    assert "missing.yaml" in result.err


def test_spec_without_a_plan(run: Run, unplannable: Path, tmp_path: Path) -> None:
    lines = unplannable.read_text().splitlines()
    line = lines.index("    cluster_size: 16", lines.index("  sm_120a:")) + 1
    for command in ("build", "compile", "explain"):
        result = run(command, unplannable)
        assert (result.code, result.out) == (2, "")
        assert f"unplannable.yaml:{line}:" in result.err
        assert "targets.sm_120a.cluster_size" in result.err
        assert "Traceback" not in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["unplannable.yaml"]


@pytest.mark.parametrize("command", ["build", "compile", "explain"])
def test_unknown_arch(command: str, run: Run, tmp_path: Path) -> None:
    result = run(command, GLM53, "--arch", "sm_80")
    assert result.code == 2
    assert "'sm_80'" in result.err
    assert "sm_90a, sm_100a, sm_103a" in result.err
    assert list(tmp_path.iterdir()) == []


def test_arch_that_one_of_the_specs_does_not_name(run: Run, tmp_path: Path) -> None:
    text = "name: small\nmodel: {hidden: 4096}\nparallel: {tp: 2}\n"
    (tmp_path / "small.yaml").write_text(text + "targets: {sm_90a: }\n")
    result = built(run, GLM53, tmp_path / "small.yaml", "--arch", "sm_100a")
    assert result.code == 2
    assert "small is for sm_90a;" in result.err


def test_two_specs_of_one_name(run: Run, tmp_path: Path) -> None:
    result = built(run, GLM53, GLM53)
    assert result.code == 2
    assert "both make a package named glm53" in result.err
    assert list(tmp_path.iterdir()) == []


def test_foreign_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "generated/glm53").mkdir(parents=True)
    (tmp_path / "generated/glm53/mine.txt").write_text("mine")
    result = built(run, GLM53)
    assert (result.code, result.out) == (2, "")
    assert "mine.txt" in result.err
    assert (tmp_path / "generated/glm53/mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [["build"], ["build", "--jobs", "0", GLM53], ["explain", GLM53, TP2], ["nothing"]],
)
def test_wrong_usage(arguments: list[object], run: Run) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Usage: mhcgen" in result.err


@pytest.mark.parametrize("tokens", [-1, 257])
def test_tokens_out_of_range(tokens: int, run: Run) -> None:
    result = run("explain", GLM53, "--tokens", tokens)
    assert result.code == 2
    assert f"--tokens {tokens}: a call of glm53 has 0 to 256 tokens" in result.err


def test_unwritable_place(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = built(run, GLM53, "--out", "file")
    assert result.code == 2
    assert result.err.startswith("--out file: ")
    assert result.err.endswith("; name a folder that can be written\n")


# explain


def test_explain_shows_derivations(run: Run, glm53_plan: Plan) -> None:
    target = glm53_plan.target("sm_90a")
    result = run("explain", GLM53, "--arch", "sm_90a", "--tokens", 33)
    assert result.code == 0
    lines = [re.sub(r"\s+", " ", line.strip()) for line in result.out.splitlines()]
    derivation = f"= {target.warps} warps x 32"
    assert f"threads {target.threads} {derivation}" in lines
    assert "total bytes 25165824 = 3 generations x 8388608" in lines
    # Lane 1 takes word 1, mixes all streams, and copies stream 1.
    assert "1 1 0 1 2 3 1" in lines
    launch = target.launches(33)[0]
    grid = ", ".join(map(str, launch.grid))
    assert (
        f"{launch.kernel} {grid} {launch.block} {launch.cluster} {launch.shared_bytes}"
        in lines
    )
    assert (
        "1 to 8 boundary_1_multicast, boundary_1_unicast 1 1 to 8 1 yes all clusters "
        "run at once: the boundary publishes itself" in lines
    )
    assert (
        "61 to 75 boundary_5_multicast, boundary_5_unicast 5 13 to 15 1 no all "
        "clusters run at once: the boundary publishes itself" in lines
    )
    assert (
        "211 to 256 boundary_9_split_multicast, boundary_9_split_unicast 9 24 to 29 1 "
        "no all clusters run at once: the boundary publishes itself" in lines
    )
    assert "sm_100a" not in result.out.replace("from sm_100 on", "")


def test_explained_sums_are_right(run: Run) -> None:
    """Whoever reads a derivation can redo it, and gets the same number."""
    redone = 0
    for spec in (GLM53, TP2, WIDE):
        for value, how in re.findall(r"  (\d+) += (.*)", run("explain", spec).out):
            formula = how.split(",")[0] if "min(" not in how else how
            up = "rounded up" in how
            formula = re.sub(r"\b[a-z]+\b(?!\()", "", formula.replace(" x ", " * "))
            result = eval(formula.replace("(,", "("))
            result = math.ceil(result) if up else math.floor(result)
            limit = re.search(r"at most (\d+)", how)
            assert int(value) == (min(result, int(limit[1])) if limit else result), how
            redone += 1
    assert redone > 30


def test_explain_json(run: Run, glm53_plan: Plan) -> None:
    data = json.loads(run("explain", GLM53, "--json", "--tokens", 1).out)
    assert list(data) == [
        "name",
        "shape",
        "lane_map",
        "mailbox",
        "sm_90a",
        "sm_100a",
        "sm_103a",
    ]
    assert data["mailbox"]["total_bytes"] == glm53_plan.mailbox.total_bytes
    target = glm53_plan.target("sm_90a")
    assert data["sm_90a"]["threads"] == target.threads
    assert [row["token_group"] for row in data["sm_90a"]["dispatch"]] == [
        row.group for row in target.token_groups
    ]
    assert [row["kernel"] for row in data["sm_90a"]["launches"]] == [
        launch.kernel for launch in target.launches(1)
    ]
    empty = json.loads(run("explain", GLM53, "--json", "--tokens", 0).out)
    assert empty["sm_90a"]["launches"] == []


# compile


def test_compile_says_what_the_compiler_does_not_tell(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = cli.CompiledKernel(
        "glm53", "boundary_1", "sm_90a", 168, None, None, 8, 7872, 0.5
    )
    monkeypatch.setattr(cli, "compile_all", lambda jobs, processes: [kernel])
    *_, row, note = run("compile", GLM53).out.splitlines()
    assert row.split()[3:] == ["168", "-", "-", "8", "7872", "0.50"]
    assert note.startswith("-: not told by nvidia-cutlass-dsl before 4.8")


def test_compile_of_a_package(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "name: small\nmodel: {hidden: 256}\nparallel: {tp: 2, transports: [unicast]}\n"
        "capacity: {max_tokens: 4}\ntargets: {sm_90a: , sm_100a: }\n"
    )
    assert run("build", "small.yaml", "--arch", "sm_90a").out.endswith(
        "; 4 kernels compile for sm_90a\n"
    )
    arguments = ["--arch", "sm_90a", "--keep", "kept"]
    package = run("compile", "generated/small", *arguments)
    assert package.code == 0
    _, header, *rows = package.out.splitlines()
    assert header.split()[:4] == ["package", "kernel", "arch", "registers"]
    assert [row.split()[1] for row in rows] == [
        "publish_unicast",
        "boundary_1",
        "boundary_1_unicast",
        "mixes",
    ]
    assert len({len(line) for line in [header, *rows]}) == 1
    assert (tmp_path / "kept/boundary_1.sm_90a.ptx").exists()
    spec = run("compile", "small.yaml", "--arch", "sm_90a", "--json")
    for row, text in zip(json.loads(spec.out), rows, strict=True):
        assert [str(value) for value in row.values()][:-1] == text.split()[:-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "generated",
        "kept",
        "small.yaml",
    ]


def test_package_that_does_not_compile_is_not_installed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(run, GLM53)
    before = {p: p.read_bytes() for p in (tmp_path / "generated").rglob("*.*")}
    render = rendering.render

    def broken(plan: Plan) -> dict[object, str]:
        files = render(plan)
        return {
            path: text + "1 / 0\n" if path.name == "kernels.py" else text
            for path, text in files.items()
        }

    monkeypatch.setattr(rendering, "render", broken)
    result = run("build", GLM53)
    assert (result.code, result.out) == (1, "")
    assert re.match(r"glm53: \w+ does not compile for sm_\w+:\n", result.err)
    assert "ZeroDivisionError" in result.err
    assert {p: p.read_bytes() for p in (tmp_path / "generated").rglob("*.*")} == before
    assert [p.name for p in (tmp_path / "generated").iterdir()] == ["glm53"]


def test_packages_of_one_name_are_not_kept_over_each_other(
    run: Run, tmp_path: Path
) -> None:
    built(run, GLM53, "--out", "a")
    built(run, GLM53, "--out", "b")
    for other in ("b/glm53", GLM53):
        result = run("compile", "a/glm53", other, "--keep", "kept")
        assert (result.code, result.out) == (2, "")
        assert "--keep kept: two of the packages are named glm53" in result.err
    assert not (tmp_path / "kept").exists()


# Damaged packages and places


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "AttributeError: .* no attribute 'TP'"),
        ("def (", "SyntaxError: .*"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (None, "missing"),
    ],
)
def test_verify_of_a_package_with_damaged_constants(
    text: str | None, reason: str, run: Run, tmp_path: Path
) -> None:
    built(run, GLM53)
    path = tmp_path / "generated/glm53/constants.py"
    path.unlink()
    if text is not None:
        path.write_text(text)
    result = run("verify", "generated/glm53")
    assert (result.code, result.out) == (2, "")
    place = "generated/glm53/constants.py"
    assert re.fullmatch(f"{place} .*{reason}.*: run mhcgen build\n", result.err)


def test_verify_of_a_package_for_other_architectures(run: Run, tmp_path: Path) -> None:
    built(run, GLM53)
    path = tmp_path / "generated/glm53/manifest.json"
    path.write_text(path.read_text().replace('"sm_90a": [', '"sm_120a": ['))
    result = run("verify", "generated/glm53")
    assert result.code == 2
    assert "--arch" not in result.err
    assert result.err.endswith("sm_120a, sm_100a, sm_103a: run mhcgen build\n")


def test_places_are_checked_before_the_work(run: Run) -> None:
    for arguments, expected in (
        (["verify", GLM53, "--json", "."], "--json .: is a folder: name a file\n"),
        (["schema", "--output", "."], "--output .: is a folder: name a file\n"),
        (["verify", GLM53, "--tokens", "9" * 5000], "--tokens 999"),
        (["verify", "a" * 300], "aaa"),
        (["compile", "a" * 300], "aaa"),
        (["build", GLM53, "--no-compile", "--out", "a" * 300], "--out aaa"),
        (["build", GLM53, "--check", "--out", "a" * 300], "cannot read aaa"),
    ):
        result = run(*arguments)
        assert (result.code, result.out) == (2, ""), arguments
        assert result.err.startswith(expected)


def test_output_that_cannot_be_written() -> None:
    command = " ".join([*COMMAND, "explain", str(GLM53)])
    for unbuffered in ("", "1"):
        for redirection, code, text in (
            ("> /dev/full", 1, "cannot write .*: No space left on device\n"),
            (">&-", 2, "standard output is closed: .*\n"),
            (">&- 2>&-", 2, ""),
        ):
            result = subprocess.run(
                f"{command} {redirection}",
                shell=True,
                capture_output=True,
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                text=True,
            )
            assert result.returncode == code
            assert re.fullmatch(text, result.stderr)


def test_temporary_files_that_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    result = run("compile", GLM53)
    assert (result.code, result.out) == (1, "")
    line = r"cannot write or read /.*/glm53/.*: No space left on device\n"
    assert re.fullmatch(line, result.err)


def test_a_folder_that_is_gone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = run("build", GLM53)
    assert (result.code, result.out) == (2, "")
    assert result.err == "the current folder has been deleted: change to another\n"


# Terminals, pipes and signals


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_interrupt(number: int, code: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "build", GLM53],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        text=True,
        # A shell may have had the tests ignore it, and processes inherit that.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        start_new_session=True,
    ) as process:
        # Workers have started when their logs are there.
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("mhcgen-*/log")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)
        for _ in range(2):  # whoever is in a hurry
            os.killpg(process.pid, number)  # as a terminal does
            time.sleep(0.01)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (code, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["generated"]
    assert list((tmp_path / "generated").iterdir()) == []


INTERRUPTED = """
import os, signal
from mhcgen import __main__, cli

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("cleaned up")

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.main = main
__main__.main()
"""


def test_a_second_interrupt_does_not_break_off_the_cleaning() -> None:
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (130, "cleaned up\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_broken_pipe(unbuffered: str) -> None:
    command = " ".join([*COMMAND, "explain", str(GLM53)])
    result = subprocess.run(
        f"{command} | true", shell=True, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    for arguments in (["--version"], ["explain", GLM53], ["build", "--check", GLM53]):
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run(
            [*COMMAND, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
        )
        os.close(writer)
        assert (result.returncode, result.stderr) == (1, "")


def test_narrow_encoding() -> None:
    result = subprocess.run(
        [*COMMAND, "build", "--check", "--out", "/nowhère", GLM53],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [["build", "--check", GLM53], ["explain", GLM53]])
def test_colours_on_a_terminal_only(
    arguments: list[object], run: Run, tmp_path: Path
) -> None:
    assert "\x1b" not in run(*arguments).out
    parent, child = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        stdout=child,
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        | {"TERM": "xterm"},
    ):
        os.close(child)
        seen = b""
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
    os.close(parent)
    assert b"\x1b[" in seen


# The wheel


def test_wheel_carries_templates_and_specs(repository: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=repository,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
    subprocess.run(
        [*pip, "--no-index", "--target", site, wheel], check=True, capture_output=True
    )
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("templates", "specs"):
        for path in (repository / folder).rglob("*"):
            name = path.relative_to(repository).as_posix()
            if path.is_file() and not re.search(r"/(\.|__pycache__)", name):
                assert f"mhcgen/{name}" in names
    assert not [name for name in names if re.search(r"/(\.|__pycache__)", name)]
    assert "mhcgen/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    spec = site / "mhcgen/specs/glm53.yaml"
    code = (
        "import mhcgen, sys; assert mhcgen.__file__.startswith(sys.argv.pop(1))\n"
        "from mhcgen.cli import main; main()"
    )
    arguments = [sys.executable, "-c", code, site, "build", "--no-compile", spec]
    environment = os.environ | {"PYTHONPATH": str(site)}
    outs = [tmp_path / "installed", tmp_path / "checkout"]
    subprocess.run([*arguments, "--out", outs[0]], cwd="/", env=environment, check=True)
    subprocess.run(
        [*COMMAND, "build", "--no-compile", GLM53, "--out", outs[1]], check=True
    )
    trees = [
        {p.relative_to(out): p.read_bytes() for p in out.rglob("*.*")} for out in outs
    ]
    assert trees[0] == trees[1]
    assert len(trees[0]) > 10
