"""`mhcgen verify --device cuda`: generated packages pass, and broken copies do not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mhcgen import cli, reference
from mhcgen.verify.subject import Subject

from .conftest import GENERATED
from .packages import FOLDER, NAMES

TOKENS = (1, 3, 17, 64)


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mhcgen", "verify", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def cases_in(file: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def test_one_gpu_plays_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    sizes = ",".join(map(str, TOKENS))
    words = ["--device", "cuda", "--tokens", sizes, "--json", file]
    code = run(monkeypatch, GENERATED / "glm53", *words)
    out = capsys.readouterr().out
    assert code == 0, out
    assert [line.split()[2] for line in out.splitlines()[2:]] == [*map(str, TOKENS)]
    cases = cases_in(file)
    assert [case["tokens"] for case in cases] == [
        [m] * len(reference.VARIANTS) for m in TOKENS
    ]
    # FP32 sums are never the float64 ones: errors of exactly zero were not measured.
    assert all(case["ok"] and case["errors"]["mix"] > 0 for case in cases)
    assert all(case["errors"]["comb"] > 0 for case in cases)


@pytest.mark.parametrize("name", NAMES)
def test_packages_of_every_kind(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    """Those that other tests compare by hand, with their entries and exits."""
    file = tmp_path / "out.json"
    words = ["--device", "cuda", "--tokens", "1,17", "--json", file]
    code = run(monkeypatch, FOLDER / name, *words)
    assert code == 0, capsys.readouterr().out
    subject = Subject.of_package(FOLDER / name)
    ends = ["entry"] * subject.entry + ["exit"] * (subject.exit_by is not None)
    for case in cases_in(file):
        assert set(case["ends"]) == set(ends)
        assert all(case["ends"][end]["layer_input_ulp"] <= 2 for end in ends)


BROKEN = [
    # Broken where the kernels still end: what hangs would end this process.
    (
        "steps.py",
        "zip(comb, old, strict=True)",
        "zip(comb[::-1], old, strict=True)",
        "residual",
    ),
    ("mixes.py", "Float32(POST_MULT) * sigmoid", "sigmoid", "post"),
    ("steps.py", "payload = sanitize(words)", "payload = [w ^ w for w in words]", ""),
]


@pytest.mark.parametrize(("file", "old", "new", "error"), BROKEN)
def test_broken_kernels_fail(
    tmp_path: Path, file: str, old: str, new: str, error: str
) -> None:
    """In a process each, for a package is imported once."""
    package = tmp_path / "glm53"
    shutil.copytree(GENERATED / "glm53", package)
    text = (package / file).read_text()
    assert old in text, "the kernels changed, so change this, too"
    (package / file).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "mhcgen", "verify", str(package)]
    command += ["--device", "cuda", "--tokens", "2", "--calls", "2", "--seed", "4"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        cwd=GENERATED.parent,
        timeout=240,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert (
        f"FAILED: mhcgen verify {package} --device cuda --transport unicast --tokens 2 "
        "--calls 2 --seed 4\n"
    ) in result.stdout
    (case,) = cases_in(tmp_path / "out.json")
    assert case["errors"][error or "published"] > 0


@pytest.mark.two_gpus
def test_each_rank_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "out.json"
    words = ["--device", "cuda", "--tokens", "1,17", "--json", file]
    code = run(monkeypatch, GENERATED / "glm53_tp2", *words)
    out = capsys.readouterr().out
    assert code == 0, out
    is_first = os.environ["RANK"] == "0"
    assert file.exists() == bool(out) == is_first
    if is_first:
        cases = cases_in(file)
        assert {case["processes"] for case in cases} == {2}
        assert all(case["errors"]["mix"] > 0 for case in cases)
