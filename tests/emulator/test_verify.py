"""The command that compares kernels with the reference, in the emulator."""

import dataclasses
import json
import sys
from pathlib import Path, PurePosixPath

import pytest

from mhcgen import cli, reference
from mhcgen.build import write_files
from mhcgen.emulator.package import EmulatedPackage, compile_ptx, load_package
from mhcgen.plan import Plan
from mhcgen.render import render, spec_yaml
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import run
from tests.emulator.conftest import Load
from tests.variants import variant


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mhcgen", "verify", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def compiled_already(
    monkeypatch: pytest.MonkeyPatch, load: Load, narrow_plan: Plan
) -> EmulatedPackage:
    """The command takes kernels that are compiled, instead of compiling them."""
    package = load(narrow_plan, "sm_90a")
    monkeypatch.setattr("mhcgen.verify.on_cpu.compile_ptx", lambda *arguments: None)
    monkeypatch.setattr("mhcgen.verify.on_cpu.load_package", lambda *arguments: package)
    return package


def test_verify(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiled_already: EmulatedPackage,
    narrow_path: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "out.json"
    words = [narrow_path, "--tokens", "1,4", "--json", file]
    code, out, err = command(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("narrow: wrong elements")
    assert len(lines) == 2 + 4  # two sizes by two transports
    assert all(line.endswith(" ok") for line in lines[2:])
    content = json.loads(file.read_text())
    assert content["name"] == "narrow" and len(content["cases"]) == 4
    assert content["cases"][0]["tokens"] == [1] * len(reference.VARIANTS)
    assert all(case["ok"] for case in content["cases"])


def test_a_failure_tells_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiled_already: EmulatedPackage,
    narrow_path: Path,
) -> None:
    monkeypatch.setattr(reference, "MIX_TOLERANCE", 0.0)
    words = [narrow_path, "--transport", "unicast", "--tokens", "3", "--calls", "2"]
    code, out, _ = command(monkeypatch, capsys, *words, "--seed", "5")
    assert code == 1
    assert "1 failed" in out
    again = f"mhcgen verify {narrow_path} --arch sm_90a --transport unicast"
    assert f"FAILED: {again} --tokens 3 --calls 2 --seed 5\n" in out


def test_what_stops_a_kernel_is_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiled_already: EmulatedPackage,
    narrow_path: Path,
) -> None:
    kernel = compiled_already.programs["publish_unicast"]
    programs = {**compiled_already.programs, "mixes": kernel}
    package = EmulatedPackage(
        compiled_already.plan,
        "sm_90a",
        programs,
        {**compiled_already.host, "boundary": compiled_already.host["mixes"]},
    )
    monkeypatch.setattr("mhcgen.verify.on_cpu.load_package", lambda *arguments: package)
    with pytest.raises(ValueError, match="parameters, and its source names"):
        run(package, Case("sm_90a", "unicast", (1,), 0))


# --- the ends -------------------------------------------------------------------------


ENDS = variant(
    "ends_in_brief",
    hidden=72,
    hc=2,
    cluster_size=1,
    groups=[{"max_tokens": 8, "group": 1}],
    ends={"entry": True, "exit": "sigmoid"},
)
ONCE = Case("sm_90a", "unicast", (3,), seed=0)


def test_the_ends_are_verified(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: Load,
    tmp_path: Path,
) -> None:
    """The whole command: rows of their own, in the table and in JSON."""
    package = load(ENDS, "sm_90a")
    monkeypatch.setattr("mhcgen.verify.on_cpu.compile_ptx", lambda *arguments: None)
    monkeypatch.setattr("mhcgen.verify.on_cpu.load_package", lambda *arguments: package)
    spec, file = tmp_path / "spec.yaml", tmp_path / "out.json"
    spec.write_text(spec_yaml(ENDS.spec))
    code, out, err = command(monkeypatch, capsys, spec, "--tokens", "3", "--json", file)
    assert (code, err) == (0, "")
    kernels = [line.split()[3] for line in out.splitlines()[2:]]
    assert kernels == ["boundary", "entry", "exit"] * 2
    assert all(line.endswith(" ok") for line in out.splitlines()[2:])
    for case in json.loads(file.read_text())["cases"]:
        assert case["ends"]["entry"]["mix"] > 0
        assert set(case["ends"]) == {"entry", "exit"}


@pytest.mark.parametrize(("step", "kernel"), [("head_mix", "exit"), ("mixes", "entry")])
def test_another_reference_of_an_end(
    monkeypatch: pytest.MonkeyPatch, load: Load, step: str, kernel: str
) -> None:
    """Kernels are compared with the reference's values, and not with each other's."""
    right = getattr(reference, step)
    monkeypatch.setattr(reference, step, lambda *given: right(*given) + 1)
    outcome = run(load(ENDS, "sm_90a"), ONCE)
    assert not outcome.ok and not outcome.problems
    assert not outcome.ends[kernel].ok
    assert outcome.errors.ok == (kernel == "exit")


def test_broken_ends_are_found(load: Load, tmp_path: Path) -> None:
    """Each in its own row; test_variant_mutants.py plants more."""
    right, files = load(ENDS, "sm_90a"), render(ENDS)
    for kernel, old, new in (
        ("entry", "stream * FN_STREAM_BYTES", "0 * FN_STREAM_BYTES"),
        ("exit", "head_scale[0]", "Float32(1.0)"),
    ):
        path = PurePosixPath(f"{kernel}.py")
        assert old in files[path], "the kernels changed, so change this, too"
        files[path] = files[path].replace(old, new)
    folder, ptx = tmp_path / ENDS.name, tmp_path / "ptx"
    write_files(folder, files)
    compile_ptx(folder, ["sm_90a"], ptx, ["entry", "exit"], processes=1)
    broken = load_package(folder, "sm_90a", ptx)
    programs = {**right.programs, **broken.programs}
    outcome = run(dataclasses.replace(right, programs=programs), ONCE)
    assert outcome.errors.ok and not outcome.problems
    assert not outcome.ends["entry"].ok and not outcome.ends["exit"].ok


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--transport", "pigeon"], "--transport 'pigeon': the package has multicast"),
        (["--tokens", "1,x"], "'x' is no number of tokens"),
        (["--tokens", "9"], "--tokens 9"),
        (["--arch", "sm_80"], "--arch 'sm_80'"),
        (["--seed", "-1"], "Invalid value"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    narrow_path: Path,
    words: list[str],
    reason: str,
) -> None:
    code, _, err = command(monkeypatch, capsys, narrow_path, *words)
    assert code == 2
    assert reason in err


def test_a_folder_that_is_no_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = command(monkeypatch, capsys, tmp_path)
    assert code == 2 and "is no package made by mhcgen" in err
