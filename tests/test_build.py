"""Building: a package is there whole, old or new, whatever happens meanwhile."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from mhcgen import build
from mhcgen.build import BuildError, ForeignFilesError, Package, Staging
from mhcgen.errors import MhcgenError
from mhcgen.manifest import MANIFEST, Manifest
from mhcgen.resources import resource as folder_of

NAME = "pkg"


def package(out: Path, version: str, extra: tuple[str, ...] = ()) -> Package:
    """A package of one version: every file of it names the version."""
    names = ["__init__.py", "kernels.py", "runtime/__init__.py", "spec.yaml", *extra]
    paths = tuple(map(PurePosixPath, names))
    files = {path: f"version {version} of {path}\n" for path in paths}
    manifest = Manifest(NAME, version, "0", "0", {}, (*paths, MANIFEST))
    return Package(NAME, files | {MANIFEST: manifest.text()}, out)


OLD_ONLY = ("removed/old.py",)
NEW_ONLY = ("added/new.py",)


def old(out: Path) -> Package:
    return package(out, "old", OLD_ONLY)


def new(out: Path) -> Package:
    return package(out, "new", NEW_ONLY)


def install(wanted: Package) -> bool:
    """Builds without a compilation; whether there was anything to write."""
    with Staging(wanted) as staging:
        staging.install()
        return not staging.is_fresh


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def is_exactly(wanted: Package) -> bool:
    expected = {str(path): text.encode() for path, text in wanted.files.items()}
    return contents(wanted.target) == expected


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# The usual ways


def test_first_build(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert install(new(out))
    assert is_exactly(new(out))
    assert names_in(out) == [NAME]


def test_replacement_removes_what_is_no_longer_made(tmp_path: Path) -> None:
    install(old(tmp_path))
    assert install(new(tmp_path))
    assert is_exactly(new(tmp_path))
    assert names_in(tmp_path) == [NAME]


def test_hand_edits_of_generated_files_are_replaced(tmp_path: Path) -> None:
    install(new(tmp_path))
    (tmp_path / NAME / "kernels.py").write_text("edited")
    assert install(new(tmp_path))
    assert is_exactly(new(tmp_path))


def test_fresh_package_is_not_touched(tmp_path: Path) -> None:
    install(new(tmp_path))
    cache = tmp_path / NAME / "__pycache__"
    cache.mkdir()
    (cache / "kernels.pyc").write_text("")

    def state() -> list[tuple[str, int, int]]:
        paths = [tmp_path, *sorted(tmp_path.rglob("*"))]
        stats = [(str(path), path.stat()) for path in paths]
        return [(path, info.st_mtime_ns, info.st_ino) for path, info in stats]

    before = state()
    assert not install(new(tmp_path))
    assert state() == before


def test_cache_folders_do_not_survive_a_replacement(tmp_path: Path) -> None:
    install(old(tmp_path))
    (tmp_path / NAME / "runtime" / "__pycache__").mkdir()
    (tmp_path / NAME / "runtime" / "__pycache__" / "a.pyc").write_text("")
    install(new(tmp_path))
    assert is_exactly(new(tmp_path))


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        install(new(tmp_path))
    finally:
        os.umask(before)
    for path in [tmp_path / NAME, *(tmp_path / NAME).rglob("*")]:
        mode = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == mode & ~umask, path


def test_package_is_whole_before_it_is_installed(tmp_path: Path) -> None:
    install(old(tmp_path))
    with Staging(new(tmp_path)) as staging:
        assert contents(staging.folder).keys() == set(map(str, new(tmp_path).files))
        assert staging.folder.name == NAME
        assert is_exactly(old(tmp_path))
    assert is_exactly(old(tmp_path))
    assert names_in(tmp_path) == [NAME]


def test_failure_before_installation_changes_nothing(tmp_path: Path) -> None:
    install(old(tmp_path))
    with pytest.raises(KeyboardInterrupt), Staging(new(tmp_path)):
        raise KeyboardInterrupt
    assert is_exactly(old(tmp_path))
    assert names_in(tmp_path) == [NAME]


# What is not ours


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    install(old(tmp_path))
    (tmp_path / NAME / "notes.txt").write_text("mine")
    (tmp_path / NAME / "runtime" / "link").symlink_to("/")
    before = contents(tmp_path / NAME)
    with pytest.raises(ForeignFilesError, match=r"notes\.txt, runtime/link: .*--out"):
        install(new(tmp_path))
    assert contents(tmp_path / NAME) == before
    assert names_in(tmp_path) == [NAME]


def test_foreign_file_that_came_during_the_compilation(tmp_path: Path) -> None:
    install(old(tmp_path))
    with pytest.raises(ForeignFilesError), Staging(new(tmp_path)) as staging:
        (tmp_path / NAME / "notes.txt").write_text("mine")
        staging.install()
    assert (tmp_path / NAME / "notes.txt").read_text() == "mine"
    assert names_in(tmp_path) == [NAME]


@pytest.mark.parametrize("name", ["extra", "kernels.py", "manifest.json"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to("/"),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["pipe", "dangling", "folder", "device"],
)
def test_what_is_no_file_is_foreign(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """Whoever opens a pipe waits for ever, and whoever reads a device reads as long."""
    install(old(tmp_path))
    path = tmp_path / NAME / name
    path.unlink(missing_ok=True)
    make(path)
    for attempt in (install, Package.is_fresh):
        with pytest.raises(ForeignFilesError, match=name):
            attempt(old(tmp_path))
    assert os.path.lexists(path)
    assert names_in(tmp_path) == [NAME]


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        "",
        "{}",
        "[]",
        "null",
        '{"generator": "other"}',
        '{"generator": "mhcgen"}',
        package(Path(), "1", ("thesis.tex",))
        .files[MANIFEST]
        .replace("mhcgen", "other"),
        "[" * 100_000,
        "\0",
    ],
)
def test_other_folder_is_refused(manifest: str | None, tmp_path: Path) -> None:
    target = tmp_path / NAME
    target.mkdir()
    (target / "thesis.tex").write_text("years")
    if manifest is not None:
        (target / MANIFEST).write_text(manifest)
    before = contents(target)
    with pytest.raises(ForeignFilesError, match=r"no package made by mhcgen.*thesis"):
        install(new(tmp_path))
    assert contents(target) == before


def test_many_foreign_files_are_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    for index in range(500):
        (tmp_path / NAME / f"file{index:03}\x1b[31m").write_text("")
    with pytest.raises(ForeignFilesError, match="and 492 more") as caught:
        install(new(tmp_path))
    assert "\x1b" not in str(caught.value)


def test_file_in_the_place_of_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("mine")
    with pytest.raises(ForeignFilesError, match="is no folder"):
        install(new(tmp_path))
    assert (tmp_path / NAME).read_text() == "mine"


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert install(new(tmp_path))
    assert is_exactly(new(tmp_path))


# Links


def test_linked_out_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    out = tmp_path / "out"
    out.symlink_to("real")
    install(old(out))
    install(new(out))
    assert out.is_symlink()
    assert is_exactly(new(tmp_path / "real"))
    assert names_in(tmp_path / "real") == [NAME]


def test_linked_package_folder(tmp_path: Path) -> None:
    real = tmp_path / "engine" / "vendored"
    real.parent.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    install(old(tmp_path))
    (tmp_path / NAME).rename(real)
    (out / NAME).symlink_to(real)
    install(new(out))
    assert (out / NAME).is_symlink()
    assert is_exactly(new(out))
    assert names_in(real.parent) == ["vendored"]
    assert names_in(out) == [NAME]


@pytest.mark.parametrize("link", ["nowhere", NAME])
def test_dangling_link_is_refused(link: str, tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to(link)
    with pytest.raises((ForeignFilesError, BuildError)):
        install(new(tmp_path))
    assert os.readlink(tmp_path / NAME) == link


# What goes wrong


def in_child(work: Callable[[], object]) -> int:
    """Runs something in a forked process; its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        monkeypatch.setattr(build, "_exchanged", lambda one, other: False)
    return str(request.param)


def test_kill_at_every_step(swap: str, tmp_path: Path) -> None:
    """Python reports each step that touches files: die at the first, the second, …"""
    states = set()
    for step in range(1, 10_000):
        out = tmp_path / str(step)
        install(old(out))

        def build_and_die(step: int = step, out: Path = out) -> None:
            left = step

            def count(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            install(new(out))

        status = in_child(build_and_die)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        if not (out / NAME).exists():
            assert swap == "two renames"
            with Staging(new(out)):
                assert is_exactly(old(out))
            states.add("recovered")
        assert is_exactly(old(out)) != is_exactly(new(out))
        states.add("old" if is_exactly(old(out)) else "new")
        install(new(out))
        assert is_exactly(new(out))
        assert names_in(out) == [NAME]
    assert step > 40
    recovered = {"recovered"} if swap == "two renames" else set()
    assert states == {"old", "new"} | recovered


def test_kill_at_random_times(tmp_path: Path) -> None:
    """The whole command, on a real package, with two specs that take turns."""
    command = [
        sys.executable,
        "-m",
        "mhcgen",
        "build",
        "--no-compile",
        "--out",
        tmp_path,
    ]
    text = (folder_of("specs") / "glm53.yaml").read_text()
    specs = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    specs[0].write_text(text)
    specs[1].write_text(text.replace("sinkhorn_iters: 20", "sinkhorn_iters: 9"))
    target = tmp_path / "glm53"
    whole = []
    start = time.monotonic()
    for spec in specs:
        subprocess.run([*command, spec], check=True, capture_output=True)
        whole.append(contents(target))
    duration = (time.monotonic() - start) / 2
    assert whole[0] != whole[1]
    chance = random.Random(0)
    for turn in range(12):
        with subprocess.Popen([*command, specs[turn % 2]], stdout=-3) as process:
            # Mostly towards the end, where the files are written.
            time.sleep(duration * chance.uniform(0.5, 1.0))
            process.kill()
        assert contents(target) in whole
    subprocess.run([*command, specs[0]], check=True, capture_output=True)
    assert contents(target) == whole[0]
    assert names_in(tmp_path) == ["a.yaml", "b.yaml", "glm53"]


def test_full_disk(tmp_path: Path) -> None:
    install(old(tmp_path))
    big = new(tmp_path)
    big.files[PurePosixPath("added/new.py")] = "x" * 100_000

    def build_without_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(BuildError, match=r"cannot write .*pkg: File too large"):
            install(big)

    assert in_child(build_without_room) == 0
    assert is_exactly(old(tmp_path))
    assert names_in(tmp_path) == [NAME]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    install(old(tmp_path))
    tmp_path.chmod(0o555)
    try:
        assert not install(old(tmp_path))
        with pytest.raises(MhcgenError, match=r"--out .*Permission denied"):
            install(new(tmp_path))
        assert is_exactly(old(tmp_path))
    finally:
        tmp_path.chmod(0o755)


def test_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MhcgenError, match=r"--out .*Not a directory.*; name a folder"):
        install(new(tmp_path / "file" / "out"))
    assert (tmp_path / "file").read_text() == "mine"


def test_failing_swap_leaves_the_old_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_exchanged", lambda one, other: False)
    install(old(tmp_path))
    with Staging(new(tmp_path)) as staging:
        original = Path.rename

        def rename(path: Path, target: Path) -> Path:
            if path == staging.folder:
                raise OSError(28, "No space left on device")
            return original(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(BuildError, match="No space left"):
            staging.install()
    assert is_exactly(old(tmp_path))
    assert names_in(tmp_path) == [NAME]


def test_exchange_is_one_step_here(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    if not build._exchanged(tmp_path / "a", tmp_path / "b"):
        pytest.skip("needs a file system that can exchange two folders")
    assert (tmp_path / "a" / "file").read_text() == "b"
    assert (tmp_path / "b" / "file").read_text() == "a"
    with pytest.raises(OSError, match="No such file"):
        build._exchanged(tmp_path / "a", tmp_path / "c")


# Builds at the same time


def test_concurrent_builds_wait_for_each_other(tmp_path: Path) -> None:
    def build_often(first: Package, second: Package) -> None:
        for _ in range(15):
            for wanted in (first, second):
                with Staging(wanted) as staging:
                    folder = contents(staging.folder)
                    assert {str(path) for path in wanted.files} == set(folder)
                    staging.install()

    pair = old(tmp_path), new(tmp_path)
    children = []
    for order in (pair, pair[::-1], pair, pair[::-1]):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                build_often(*order)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    while children:
        # Until all are done, the package is there, and it is one or the other.
        manifest = tmp_path / NAME / MANIFEST
        if manifest.exists():
            assert json.loads(manifest.read_text())["version"] in ("old", "new")
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert status == 0
            children.remove(done)
    assert is_exactly(old(tmp_path)) != is_exactly(new(tmp_path))
    assert names_in(tmp_path) == [NAME]


def test_lock_excludes_and_leaves_nothing(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    log = tmp_path / "log"
    log.touch()

    def hold() -> None:
        for _ in range(100):
            with build._locked(lock):
                size = log.stat().st_size
                with log.open("a") as stream:
                    stream.write("x")
                assert log.stat().st_size == size + 1

    children = [os.fork() for _ in range(1)]
    if children[0] == 0:
        status = 1
        try:
            hold()
            status = 0
        finally:
            os._exit(status)
    hold()
    assert os.waitpid(children[0], 0)[1] == 0
    assert log.stat().st_size == 200
    assert not lock.exists()


# Differences


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Package]:
    wanted = new(tmp_path)
    install(wanted)
    assert list(wanted.differences()) == []
    yield wanted


def test_difference_of_a_stale_file(fresh: Package) -> None:
    path = fresh.target / "kernels.py"
    path.write_text("edited\n")
    assert list(fresh.differences()) == [
        f"--- {path}",
        f"+++ {path}",
        "@@ -1,2 +1,2 @@",
        "-edited",
        "+version new of kernels.py",
        " ",
    ]


def test_difference_of_an_extra_file(fresh: Package) -> None:
    path = fresh.target / "extra.py"
    path.write_text("extra\x1b\n")
    lines = list(fresh.differences())
    assert lines[:2] == [f"--- {path}", "+++ /dev/null"]
    assert "-extra\\x1b" in lines


def test_difference_of_a_missing_file(fresh: Package) -> None:
    (fresh.target / "kernels.py").unlink()
    lines = list(fresh.differences())
    assert lines[0] == "--- /dev/null"
    assert "+version new of kernels.py" in lines


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.rstrip(b"\n"),
        lambda data: data + b"\n",
        lambda data: data + b"\xff",
        lambda data: b"",
    ],
)
def test_every_byte_makes_a_difference(
    change: Callable[[bytes], bytes], fresh: Package
) -> None:
    path = fresh.target / "kernels.py"
    path.write_bytes(change(path.read_bytes()))
    assert list(fresh.differences())
    assert not fresh.is_fresh()
    assert install(fresh)
    assert fresh.is_fresh()


def test_difference_of_a_missing_package(tmp_path: Path) -> None:
    assert "--- /dev/null" in list(new(tmp_path).differences())
