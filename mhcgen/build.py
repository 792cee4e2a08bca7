"""Building: from rendered files to a package folder, whole or not at all.

A package is written beside its target and then swapped with it in one step, so that a
build that dies at any moment leaves the package that was there.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING

from mhcgen.errors import MhcgenError, visible
from mhcgen.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from mhcgen.render import Files

AT_FDCWD = -100
RENAME_EXCHANGE = 2
# What no other place would help against.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
# What only another place helps against.
NO_PLACE = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP}
# What a kernel or a file system answers that cannot exchange two folders.
NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}
MAX_NAMES = 8


class BuildError(Exception):
    """A package could not be written, and what was there still is: exit code 1."""


class ForeignFilesError(MhcgenError):
    """The target folder holds files that mhcgen did not write, and would delete."""


@dataclass(frozen=True)
class Package:
    """A rendered package and the place where it belongs.

    Attributes:
        name: The package's name, which its folder has, too.
        files: The text of each file by its path in the folder.
        out: The folder that holds packages.
    """

    name: str
    files: Files
    out: Path

    @property
    def target(self) -> Path:
        """The package's folder."""
        return self.out / self.name

    def differences(self) -> Iterator[str]:
        """The lines of a unified diff from the target to the package; none if fresh.

        Raises:
            BuildError: The target cannot be read.
            ForeignFilesError: It holds what is no regular file.
        """
        with _as_build_error("read", self.target):
            paths = [*_files_in(self.target)]
        if not all(os.path.isfile(self.target / path) for path in paths):
            _refuse_foreign(self.target)
        with _as_build_error("read", self.target):
            present = {path: (self.target / path).read_bytes() for path in paths}
        wanted = {path: text.encode() for path, text in self.files.items()}
        for path in sorted({*present, *wanted}):
            if present.get(path) != wanted.get(path):
                yield from _diff(
                    self.target / path, present.get(path), wanted.get(path)
                )

    def is_fresh(self) -> bool:
        """Whether the target is this package already.

        Raises:
            BuildError: The target cannot be read.
            ForeignFilesError: It holds what is no regular file.
        """
        return not any(True for _ in self.differences())


def write_files(folder: Path, files: Files) -> None:
    """Writes the files of a package into a new folder, down to the disk.

    Raises:
        OSError: A file cannot be written; the error names it.
    """
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("xb") as stream:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            error.filename = str(file)
            raise


def _diff(path: Path, old: bytes | None, new: bytes | None) -> Iterator[str]:
    def lines(content: bytes | None) -> list[str]:
        return (content or b"").decode("utf-8", "backslashreplace").split("\n")

    def label(content: bytes | None) -> str:
        return "/dev/null" if content is None else str(path)

    yield from map(
        visible,
        difflib.unified_diff(
            lines(old), lines(new), label(old), label(new), lineterm=""
        ),
    )


class Staging:
    """A package on its way to its target: a context from writing to installing.

    Other builds of the same package wait while it is open. On leaving it, installed or
    not, nothing but the package remains.

    Attributes:
        package: What is built.
        folder: Where the package stands whole, ready to be compiled: beside its target
            until it is installed, or the target itself where that is fresh.
    """

    def __init__(self, package: Package) -> None:
        """Touches nothing yet."""
        self.package = package
        self.folder = package.target
        self._stack = contextlib.ExitStack()
        self._temporary: Path | None = None

    @cached_property
    def _target(self) -> Path:
        """The folder to swap; where the target is a link, the link stays."""
        return Path(os.path.realpath(self.package.target))

    @property
    def is_fresh(self) -> bool:
        """Whether there was nothing to write."""
        return self._temporary is None

    def __enter__(self) -> Staging:
        """Writes the package beside its target.

        Raises:
            BuildError: The package cannot be written.
            MhcgenError: No package can be written there.
            ForeignFilesError: The target is not ours to replace.
        """
        with self._stack:
            with self._as_place_error():
                if self._is_settled():
                    return self
                self._target.parent.mkdir(parents=True, exist_ok=True)
                self._stack.enter_context(_locked(self._beside(".lock")))
            with _as_build_error("write", self.package.target):
                for leftover in self._beside_all("-*"):
                    _recover(leftover, self._target)
            _refuse_foreign(self.package.target)
            if not self.package.is_fresh():
                with _as_build_error("write", self.package.target):
                    self._write()
            self._stack = self._stack.pop_all()
        return self

    @contextlib.contextmanager
    def _as_place_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            text = f"{self.package.out}: {error.strerror}{place}"
            if error.errno in NO_ROOM:
                raise BuildError(f"cannot write {text}") from error
            raise MhcgenError(
                f"--out {text}; name a folder that can be written"
            ) from error

    def _is_settled(self) -> bool:
        """Whether there is nothing to do, not even after a build that died."""
        # Another build may be swapping the files that are looked at.
        with contextlib.suppress(BuildError, MhcgenError):
            return not self._beside_all("*") and self.package.is_fresh()
        return False

    def _beside(self, suffix: str) -> Path:
        """A path of this package's builds, beside the target."""
        return self._target.with_name(f".{self._target.name}.mhcgen{suffix}")

    def _beside_all(self, pattern: str) -> list[Path]:
        """What builds of this package have left beside the target."""
        name = glob.escape(self._beside("").name)
        return sorted(self._target.parent.glob(name + pattern))

    def _write(self) -> None:
        prefix = self._beside("-").name
        self._stack.callback(self._clear)
        self._temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=self._target.parent))
        self.folder = self._temporary / "new" / self.package.name
        write_files(self.folder, self.package.files)

    def _clear(self) -> None:
        """Removes what this build has left beside the target, which is locked."""
        for leftover in self._beside_all("-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def install(self) -> None:
        """Puts the package in its place, in one step where the system can.

        Raises:
            BuildError: It could not be done; the target is as it was.
            ForeignFilesError: The target is not ours to replace.
        """
        if self._temporary is None:
            return
        _refuse_foreign(self.package.target)  # again: compiling takes its time
        with _as_build_error("write", self.package.target):
            if not self._target.exists():
                self.folder.rename(self._target)
            elif not _exchanged(self.folder, self._target):
                _replace(self.folder, self._target, self._temporary / "old")
        self.folder = self.package.target

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Removes what is temporary."""
        self._stack.close()


@contextlib.contextmanager
def _as_build_error(action: str, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        text = f"cannot {action} {target}: {error.strerror or error}{place}"
        if error.errno in NO_PLACE:
            raise MhcgenError(f"{text}; name another place with --out") from error
        raise BuildError(text) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which exists only as long as somebody holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        except FileNotFoundError:
            pass
        os.close(lock)  # its holder removed it while this process waited
    try:
        yield
    finally:
        path.unlink()
        os.close(lock)


def _recover(leftover: Path, target: Path) -> None:
    """Removes the remains of a build that died, and undoes a half-done replacement."""
    if not os.path.lexists(target) and (leftover / "old").is_dir():
        (leftover / "old").rename(target)
    shutil.rmtree(leftover)


def _exchanged(one: Path, other: Path) -> bool:
    """Swaps two folders in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in NO_EXCHANGE:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _replace(new: Path, target: Path, old: Path) -> None:
    """Puts one folder in the place of another, in two steps that can be undone."""
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise


def _files_in(folder: Path) -> Iterator[PurePosixPath]:
    """The files of a folder, without caches of compiled modules; links are files."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*links, *names]:
            yield PurePosixPath(Path(parent, name).relative_to(folder).as_posix())


def _refuse_foreign(target: Path) -> None:
    """Makes sure that replacing the target loses nothing that mhcgen did not write."""
    remedy = "move them away, or choose another place with --out"
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ForeignFilesError(
            f"{target} is no folder: move it away, or choose another place with --out"
        )
    with _as_build_error("read", target):
        present = sorted(_files_in(target))
        manifest = read_manifest(target)
    ours = manifest.files if manifest else ()
    foreign = [
        path
        for path in present
        if path not in ours or not os.path.isfile(target / path)
    ]
    if foreign and manifest is None:
        raise ForeignFilesError(
            f"{target} is no package made by mhcgen (no {MANIFEST} says so), and holds "
            f"{_listed(foreign)}: {remedy}"
        )
    if foreign:
        raise ForeignFilesError(
            f"{target} holds what mhcgen did not write: {_listed(foreign)}: {remedy}"
        )


def _listed(paths: Iterable[PurePosixPath]) -> str:
    names = [visible(str(path)) for path in paths]
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
