"""Kernels that are kept on disk between processes."""

from __future__ import annotations

import importlib
import logging
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.plan import make_plan
from mhcgen.render import render
from mhcgen.runtime import cache, compiler, loader
from mhcgen.runtime.launcher import positional
from mhcgen.spec import Spec

ARCH = "sm_90a"
SPEC = {
    "name": "cached",
    "model": {"hidden": 256},
    "parallel": {"tp": 2},
    "capacity": {"max_tokens": 2},
    "targets": {
        ARCH: {"cluster_size": 1, "token_groups": [{"max_tokens": 2, "group": 1}]}
    },
}
PUBLISHING = "boundary_1_unicast"
NAMES = {"publish_unicast", "boundary_1", PUBLISHING, "mixes"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("package") / "cached"
    write_files(folder, render(make_plan(Spec.model_validate(SPEC)), formatting=False))
    return importlib.import_module(f"{loader.import_package(folder)}.kernels")


@pytest.fixture(scope="module")
def filled(kernels: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a process has filled."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.FOLDER, str(folder))
        assert compiler.compile_package(kernels, ARCH, "unicast").keys() == NAMES
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which the environment names."""
    copy = tmp_path / "cache"
    shutil.copytree(filled, copy)
    monkeypatch.setenv(cache.FOLDER, str(copy))
    return copy


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The symbols of the kernels that are compiled."""
    seen = []
    real = compiler.compile_kernel

    def compile_kernel(kernel: Any, name: str, *rest: str) -> Any:
        seen.append(name)
        return real(kernel, name, *rest)

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return seen


def refusal(kernel: Any) -> str:
    """What a kernel says to a wrong argument: its whole signature."""
    with pytest.raises(TypeError) as caught:
        positional(kernel)(1)
    return str(caught.value)


@pytest.mark.usefixtures("folder")
def test_what_was_compiled_is_read(kernels: ModuleType, compiled: list[str]) -> None:
    found = compiler.compile_package(kernels, ARCH, "unicast")
    assert found.keys() == NAMES
    assert compiled == []
    for symbol in found[PUBLISHING].kernel_info:
        assert symbol.encode() in found[PUBLISHING].__cubin__
    assert found["boundary_1"].__cubin__ is None
    for name, kernel in found.items():
        taken = len(kernels.kernels(ARCH)[name].arguments()) - 1  # torch's stream
        assert f"Expects {taken} parameters" in refusal(kernel), name


def test_without_the_variable_nothing_is_kept(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, ""):
        monkeypatch.delenv(cache.FOLDER, raising=False)
        if value is not None:
            monkeypatch.setenv(cache.FOLDER, value)
        assert cache.Cache.of_environment(kernels, ARCH) is None


@pytest.mark.parametrize("file", [cache.CODE, cache.CUBIN, cache.ENTRY])
def test_what_is_damaged_is_compiled_again(
    kernels: ModuleType,
    folder: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    file: str,
) -> None:
    (path,) = folder.glob(f"*/{PUBLISHING}/{file}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        found = compiler.compile_package(kernels, ARCH, "unicast")
    assert compiled == [kernels.symbol(PUBLISHING)]
    assert f"{PUBLISHING} is compiled again" in caplog.text
    assert not isinstance(found[PUBLISHING], cache.CachedKernel)
    found = compiler.compile_package(kernels, ARCH, "unicast")
    assert len(compiled) == 1, "it was kept again"
    assert "Expects" in refusal(found[PUBLISHING])


@pytest.mark.parametrize("file", [cache.CODE, cache.CUBIN, cache.ENTRY])
def test_an_entry_that_lacks_a_file_is_compiled_again(
    kernels: ModuleType,
    folder: Path,
    compiled: list[str],
    caplog: pytest.LogCaptureFixture,
    file: str,
) -> None:
    """Someone cleaned up half of it: it is not as if nothing had been kept."""
    (path,) = folder.glob(f"*/{PUBLISHING}/{file}")
    path.unlink()
    with caplog.at_level(logging.WARNING):
        compiler.compile_package(kernels, ARCH, "unicast")
    assert compiled == [kernels.symbol(PUBLISHING)]
    assert f"{PUBLISHING} is compiled again" in caplog.text
    assert path.is_file(), "it was kept again"


@pytest.mark.usefixtures("compiled")
def test_what_was_never_kept_is_compiled_in_silence(
    kernels: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = folder.glob("*/mixes")
    shutil.rmtree(entry)
    with caplog.at_level(logging.WARNING):
        compiler.compile_package(kernels, ARCH, "unicast")
    assert caplog.text == ""
    assert entry.is_dir()


def test_an_exporter_that_fails_is_no_error(
    kernels: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it raises: the kernel is there, and is only not kept."""

    def export_to_c(**options: str) -> None:
        raise RuntimeError("no object")

    found = cache.Cache(tmp_path, kernels, ARCH)
    with caplog.at_level(logging.WARNING):
        found.keep("mixes", SimpleNamespace(export_to_c=export_to_c))
    assert "mixes is not kept: no object" in caplog.text
    assert list(found.folder.iterdir()) == []


def test_other_code_is_another_entry(
    kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cached"
    shutil.copytree(Path(str(kernels.__file__)).parent, package)
    copy = ModuleType("copy")
    copy.__file__ = str(package / "kernels.py")
    same = cache.identity(copy)
    assert same == cache.identity(kernels)
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "steps.pyc").write_bytes(b"new")
    assert cache.identity(copy) == same
    seen = {same}
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        path.write_text(source + "\n")
        seen.add(cache.identity(copy))
        path.write_text(source)
    assert len(seen) == 1 + len(list(package.rglob("*.py")))
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        with monkeypatch.context() as patch:
            real = cache.metadata.version
            patch.setattr(
                cache.metadata,
                "version",
                lambda asked, n=name, r=real: "0" if asked == n else r(asked),
            )
            assert cache.identity(copy) not in seen


def test_a_folder_that_cannot_be_written_is_no_error(
    kernels: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        found = compiler.compile_package(kernels, ARCH, "unicast", publishing=False)
    assert found.keys() == NAMES - {PUBLISHING}
    assert "keeps nothing" in caplog.text
    assert (tmp_path / "file").read_text() == ""


def test_whoever_is_slower_leaves_the_entry_alone(
    kernels: ModuleType, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = cache.Cache(folder, kernels, ARCH)
    own = compiler.compile_kernel(
        kernels.kernels(ARCH)["mixes"], kernels.symbol("mixes"), ARCH
    )
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    with caplog.at_level(logging.WARNING):
        found.keep("mixes", own)
    assert caplog.text == ""
    files = sorted(path.stat().st_mtime_ns for path in folder.rglob("*.*"))
    assert set(files) <= set(before)
    assert {path.name for path in found.folder.iterdir()} == NAMES


def test_kernels_compiled_elsewhere_are_found(
    kernels: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[str],
) -> None:
    """`mhcgen compile --cache` needs no GPU of the architecture."""
    package = Path(str(kernels.__file__)).parent
    jobs = jobs_of(package, cache=tmp_path / "new" / "cache")
    compile_kernels([job for job in jobs if job.row.name in NAMES])
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "new" / "cache"))
    found = compiler.compile_package(kernels, ARCH, "unicast")
    assert compiled == []
    assert found[PUBLISHING].__cubin__.startswith(b"\x7fELF")
