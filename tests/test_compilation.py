"""Compilation: what workers report, with a stand-in for the compiler and with it."""

import json
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from mhcgen import compile_worker
from mhcgen.build import write_files
from mhcgen.compilation import (
    CompiledKernel,
    CompileError,
    compile_kernels,
    given_by_user,
    jobs_of,
)
from mhcgen.errors import MhcgenError
from mhcgen.manifest import MANIFEST, KernelRow, Manifest
from mhcgen.plan import Plan
from mhcgen.render import render

ARCHS = ("sm_90a", "sm_100a")
ROWS = (KernelRow("first", 1, 128, 0), KernelRow("second", 8, 256, 4096, 2))

# Leaves a cubin that declares its registers, a stack of 16 bytes for all kernels but
# `first`, and 1,024 bytes of shared memory; with remarks{ptx}, prints what the DSL
# prints, colours and all.
COMPILER = r"""
import os, re, struct, sys, time
from pathlib import Path

def compile_kernel(kernel, symbol, arch, options=""):
    assert symbol == "standin_" + kernel.__name__
    Path("left_in_the_current_folder").write_text("")
    assert not [key for key in os.environ if key.startswith("CUTE_DSL_")]
    kernel(arch)
    stack = 0 if kernel.__name__ == "first" else 16
    if "--keep-ptx --keep-cubin" in options:
        dump = Path(re.search(r"--dump-dir (\S+)", options)[1])
        (dump / "a_long_mangled_name.ptx").write_text(kernel.__name__)
        (dump / "a_long_mangled_name.cubin").write_bytes(cubin(registers(arch), stack))
    if "remarks{ptx}" not in options.split():
        return
    assert REPORTS and stack
    print("\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info : 0 bytes gmem")
    print("ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes "
          "spill loads")
    print(f"ptxas info    : Used {registers(arch)} registers, used 1 barriers, "
          "1024 bytes smem", file=sys.stderr)

def registers(arch):
    return int(arch[3:-1])

def cubin(registers, stack):
    info = b"".join(
        struct.pack("<BBHII", 4, attribute, 8, 0, value)
        for attribute, value in ((0x2F, registers), (0x11, stack))
    )
    names = b"\0.nv.info\0.nv.shared.kernel\0.nv.shared.reserved.0\0"
    contents = ((0, names), (1, info), (10, b""), (28, b""))
    sizes = (len(names), len(info), 1024, 4096)
    data, headers = b"\0" * 64, b""
    for (name, content), size in zip(contents, sizes):
        headers += struct.pack("<IIQQQQ", name, 0, 0, 0, len(data), size) + b"\0" * 24
        data += content
    header = bytearray(data[:64])
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, len(data))
    struct.pack_into("<HHH", header, 0x3A, 64, len(contents), 0)
    return bytes(header) + data[64:] + headers
"""
KERNELS = """\
def symbol(name):
    return f"standin_{name}"


def kernels(arch):
    return {f.__name__: f for f in (first, second)}


"""
FUNCTIONS = "def first(arch):\n    pass\n\n\ndef second(arch):\n    {}\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def stand_in(folder: Path, second: str = "pass", name: str = "standin") -> Path:
    sources = {
        "__init__.py": "",
        "kernels.py": KERNELS + FUNCTIONS.format(second),
        "runtime/__init__.py": "",
        "runtime/compiler.py": COMPILER.replace(
            "REPORTS", str(compile_worker.reports_resources())
        ),
    }
    files = {PurePosixPath(path): text for path, text in sources.items()}
    kernels = dict.fromkeys(ARCHS, ROWS)
    files[MANIFEST] = Manifest(name, "0", "0", "0", kernels, (*files,)).text()
    write_files(folder / name, files)
    return folder / name


def test_every_kernel_for_every_architecture(tmp_path: Path) -> None:
    seen: list[CompiledKernel] = []
    results = compile_kernels(jobs_of(stand_in(tmp_path)), done=seen.append)
    assert [(result.arch, result.name) for result in results] == [
        (arch, row.name) for arch in ARCHS for row in ROWS
    ]
    assert sorted(seen, key=str) == sorted(results, key=str)
    for result in results:
        assert result.package == "standin"
        assert result.registers == int(result.arch[3:-1])
        told = (4, 8) if compile_worker.reports_resources() else (None, None)
        known = (0, 0, 0) if result.name == "first" else (16, *told)
        assert (result.stack, result.spill_stores, result.spill_loads) == known
        assert result.shared_bytes == (4096 if result.name == "second" else 1024)
        assert 0 <= result.seconds < 5


def test_arch_narrows(tmp_path: Path) -> None:
    results = compile_kernels(jobs_of(stand_in(tmp_path), ["sm_100a"]))
    assert {result.arch for result in results} == {"sm_100a"}


def test_unknown_arch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MhcgenError, match=r"sm_103a.*standin is for sm_90a, sm_100a"):
        jobs_of(stand_in(tmp_path), ["sm_90a", "sm_103a"])


def test_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MhcgenError, match="no package made by mhcgen"):
        jobs_of(tmp_path)


def test_nothing_is_left_and_nothing_leaks_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_120a")
    monkeypatch.setenv("CUTE_DSL_KEEP_PTX", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    package = stand_in(tmp_path)
    before = sorted(package.rglob("*"))
    compile_kernels(jobs_of(package))
    assert list(Path.cwd().iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sorted(package.rglob("*")) == before


def test_modules_of_the_current_folder_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("colorsys.py").write_text("raise SystemExit('the wrong colorsys')")
    monkeypatch.syspath_prepend(Path.cwd())  # as with python -m
    package = stand_in(tmp_path)
    (tmp_path / "textwrap.py").write_text("raise SystemExit('the wrong textwrap')")
    (package / "__init__.py").write_text("import colorsys, textwrap")
    assert compile_kernels(jobs_of(package))


def test_keep(tmp_path: Path) -> None:
    keep = Path("deep/kept")
    compile_kernels(jobs_of(stand_in(tmp_path), keep=keep))
    names = {f"{row.name}.{arch}" for row in ROWS for arch in ARCHS}
    expected = {f"{name}.{suffix}" for name in names for suffix in ("ptx", "cubin")}
    assert {path.name for path in keep.iterdir()} == expected
    assert (keep / "second.sm_90a.ptx").read_text() == "second"
    used = compile_worker.resources_of_cubin(
        (keep / "second.sm_90a.cubin").read_bytes()
    )
    assert used["registers"] == 90


def test_two_packages_of_one_name(tmp_path: Path) -> None:
    good = jobs_of(stand_in(tmp_path / "good"))
    bad = jobs_of(stand_in(tmp_path / "bad", "raise ValueError('bad')"))
    assert len(compile_kernels([*good, bad[0], *good], processes=1)) == 9
    with pytest.raises(CompileError, match="ValueError: bad"):
        compile_kernels([*good, *bad], processes=1)


def test_package_may_be_renamed(tmp_path: Path) -> None:
    package = stand_in(tmp_path).rename(tmp_path / "not-an-identifier")
    assert compile_kernels(jobs_of(package))


def failure(tmp_path: Path, second: str) -> str:
    with pytest.raises(CompileError) as caught:
        compile_kernels(jobs_of(stand_in(tmp_path, second)))
    return str(caught.value)


def test_kernel_that_does_not_compile(tmp_path: Path) -> None:
    text = failure(tmp_path, 'raise ValueError("\\x1b[91mline\\n" * 50 + "the reason")')
    first, *rest = text.splitlines()
    assert first.startswith("standin: second does not compile for sm_")
    assert rest[-1] == "    the reason"
    assert len(rest) <= compile_worker.ERROR_LINES
    assert "\x1b" not in text


def test_compiler_that_crashes(tmp_path: Path) -> None:
    text = failure(tmp_path, "import os; print('last words', flush=True); os.abort()")
    assert text.startswith("standin: second does not compile for sm_")
    assert "the compiler died, status -6" in text
    assert "last words" in text


def test_compiler_that_leaves_nothing(tmp_path: Path) -> None:
    package = stand_in(tmp_path)
    (package / "runtime/compiler.py").write_text("def compile_kernel(*a, **k): pass")
    with pytest.raises(CompileError, match="the compiler left 0 ptx files"):
        compile_kernels(jobs_of(package))


def test_package_that_cannot_be_imported(tmp_path: Path) -> None:
    package = stand_in(tmp_path)
    (package / "kernels.py").write_text("import nothing_of_this_name")
    with pytest.raises(
        CompileError, match=r"ModuleNotFoundError.*nothing_of_this_name"
    ):
        compile_kernels(jobs_of(package))


def test_manifest_and_kernels_must_agree(tmp_path: Path) -> None:
    package = stand_in(tmp_path)
    text = (package / "kernels.py").read_text()
    (package / "kernels.py").write_text(text.replace("(first, second)", "(first,)"))
    with pytest.raises(CompileError, match="disagree about second"):
        compile_kernels(jobs_of(package))


def test_failure_ends_the_other_workers(tmp_path: Path) -> None:
    start = time.monotonic()
    code = "import time; time.sleep(60) if arch == 'sm_90a' else 1 / 0"
    text = failure(tmp_path, code)
    assert "sm_100a" in text and "ZeroDivisionError" in text
    assert time.monotonic() - start < 20


def test_workers_share_the_work(tmp_path: Path) -> None:
    package = stand_in(tmp_path, "print('PID', os.getpid())")
    note = tmp_path / "note"
    source = f"import os\n\n\n{KERNELS}" + FUNCTIONS.format("note()").replace(
        "    pass", "    note()"
    )
    source += textwrap.dedent(f"""

        def note():
            import time
            time.sleep(0.2)
            with open({str(note)!r}, "a") as stream:
                stream.write(f"{{os.getpid()}}\\n")
        """)
    (package / "kernels.py").write_text(source)
    compile_kernels(jobs_of(package), processes=2)
    workers = note.read_text().split()
    assert len(workers) >= 4  # kernels with a stack may be compiled twice
    assert len(set(workers)) == 2


def test_resources_are_the_largest_of_several_functions() -> None:
    report = (
        "8 bytes stack frame, 0 bytes spill stores, 16 bytes spill loads\n"
        "Used 32 registers, 128 bytes smem\n"
        "0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
        "Used 168 registers, used 1 barriers\n"
    )
    assert compile_worker.resources(report) == {
        "registers": 168,
        "stack": 8,
        "spill_stores": 4,
        "spill_loads": 16,
        "static_shared": 128,
    }


def test_real_kernel(
    glm53_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / glm53_plan.name
    write_files(folder, render(glm53_plan))
    jobs = jobs_of(folder, ["sm_103a"], keep=tmp_path / "kept")
    (job,) = [job for job in jobs if job.row.name == "mixes"]
    (result,) = compile_kernels([job])
    assert 16 <= result.registers <= 128
    assert result.spill_stores == result.spill_loads == 0
    assert ".target sm_103a" in (tmp_path / "kept/mixes.sm_103a.ptx").read_text()
    cubin = (tmp_path / "kept/mixes.sm_103a.cubin").read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert list(Path.cwd().iterdir()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    # What older compilers do not report, their cubin tells.
    assert compile_worker.resources_of_cubin(cubin) == {
        "registers": result.registers,
        "stack": result.stack,
        "spill_stores": 0,
        "spill_loads": 0,
        "static_shared": result.shared_bytes,
    }


@pytest.mark.parametrize(
    ("installed", "reports"), [("4.7.1", False), ("4.8.0", True), ("4.10.0", True)]
)
def test_compilers_that_report(
    monkeypatch: pytest.MonkeyPatch, installed: str, reports: bool
) -> None:
    monkeypatch.setattr(compile_worker.metadata, "version", lambda name: installed)
    assert compile_worker.reports_resources() is reports


def test_environment_of_this_process_is_untouched(tmp_path: Path) -> None:
    before = dict(os.environ)
    compile_kernels(jobs_of(stand_in(tmp_path)))
    assert dict(os.environ) == before


def test_a_folder_to_keep_things_in_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "keep").touch()
    for option in ("keep", "cache"):
        jobs = jobs_of(
            stand_in(tmp_path / f"for_{option}"), **{option: tmp_path / "keep"}
        )
        match = f"--{option} .*: File exists; name a folder"
        with pytest.raises(MhcgenError, match=match):
            compile_kernels(jobs)


CACHE = """
import logging

class Cache:
    def __init__(self, folder, kernels, arch):
        self.folder = folder / arch

    def find(self, name):
        return name if (self.folder / name).is_file() else None

    def keep(self, name, code):
        try:
            self.folder.mkdir(exist_ok=True)
            (self.folder / name).touch()
        except OSError as error:
            logging.getLogger(__name__).warning("it keeps nothing: %s", error)
"""


def test_what_the_cache_does_not_keep_is_told(tmp_path: Path) -> None:
    package, cache = stand_in(tmp_path), tmp_path / "cache"
    (package / "runtime" / "cache.py").write_text(CACHE)
    jobs = jobs_of(package, ["sm_90a"], cache=cache)
    compile_kernels(jobs)
    assert sorted(path.name for path in cache.glob("*/*")) == ["first", "second"]
    jobs = jobs_of(package, ["sm_100a"], cache=cache)
    (cache / "sm_100a").touch()
    with pytest.raises(CompileError, match="for sm_100a is not kept: it keeps nothing"):
        compile_kernels(jobs)


def test_what_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "kept" / "first.sm_90a.ptx").mkdir(parents=True)
    jobs = jobs_of(stand_in(tmp_path), keep=tmp_path / "kept")
    with pytest.raises(CompileError, match=r"is not kept: .*ptx: Is a directory"):
        compile_kernels(jobs)


# Damaged packages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "AttributeError: .*'kernels'"),
        ("def (", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from . import missing", "ImportError: cannot import name 'missing'"),
    ],
)
def test_a_damaged_package_is_its_givers_concern(
    text: str, reason: str, tmp_path: Path
) -> None:
    package = stand_in(tmp_path)
    (package / "kernels.py").write_text(text)
    line = f"^{package}(/kernels.py)?: {reason}[^\\n]*: run mhcgen build$"
    with pytest.raises(MhcgenError, match=line), given_by_user([package]):
        compile_kernels(jobs_of(package))
    with pytest.raises(CompileError, match="does not compile"), given_by_user([]):
        compile_kernels(jobs_of(package))


def test_a_missing_engine_is_no_damage(tmp_path: Path) -> None:
    package = stand_in(tmp_path)
    (package / "kernels.py").write_text("import no_such_engine")
    with pytest.raises(CompileError, match="No module"), given_by_user([package]):
        compile_kernels(jobs_of(package))


def renamed(content: dict[str, dict[str, object]], arch: str) -> None:
    content["kernels"] = {arch: content["kernels"]["sm_90a"]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.clear(), "is damaged, or of no package"),
        (lambda m: m.update(name=3), "is damaged"),
        (lambda m: m.update(name="../up"), "is damaged"),
        (lambda m: m.update(files=[1]), "is damaged"),
        (lambda m: m["kernels"]["sm_90a"][0].update(shared_bytes="x"), "is damaged"),
        (lambda m: m["kernels"]["sm_90a"][0].update(token_group=[]), "is damaged"),
        (lambda m: m["kernels"]["sm_90a"][0].update(name=None), "is damaged"),
        (lambda m: m.update(kernels={}), "has no kernels"),
        (lambda m: m["kernels"].update(sm_90a=[]), "has no kernels for sm_90a"),
        (lambda m: renamed(m, "sm_91"), "is for 'sm_91', which is none of sm_90a"),
    ],
)
def test_a_damaged_manifest_is_named(
    change: Callable[[dict[str, object]], object], reason: str, tmp_path: Path
) -> None:
    path = stand_in(tmp_path) / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(MhcgenError, match=f"{path} {reason}.*: run mhcgen build$"):
        jobs_of(path.parent)


@pytest.mark.parametrize("name", ["manifest.json", "kernels.py"])
def test_what_is_no_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = stand_in(tmp_path) / name
    path.unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to(path.name), os.mkdir):
        make(path)
        with pytest.raises(MhcgenError, match=f"{path} .*run mhcgen build"):
            jobs_of(path.parent)
        path.rmdir() if path.is_dir() else path.unlink()
