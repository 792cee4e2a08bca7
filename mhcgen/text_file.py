"""Places to write to: checked at once, and files written whole or not at all."""

import os
import shutil
import tempfile
from pathlib import Path

from mhcgen.build import BuildError
from mhcgen.errors import MhcgenError


def write_whole(path: Path, content: str | bytes, overwrite: bool = True) -> None:
    """Writes a file in one step; where it is a link, the link stays.

    Args:
        path: The file.
        content: What it is to hold.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        BuildError: It cannot be written; what was there still is.
        MhcgenError: There is a file, and it may not be replaced.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    claimed = False
    try:
        if not overwrite:
            target.open("x").close()  # whoever comes second is refused
            claimed = True
        elif _is_special(path):
            path.write_bytes(data)
            return
        with tempfile.TemporaryDirectory(prefix=".mhcgen-", dir=target.parent) as name:
            whole = Path(name, target.name)
            whole.write_bytes(data)
            if target.exists():
                shutil.copymode(target, whole)
            whole.replace(target)
            claimed = False
    except FileExistsError:
        raise MhcgenError(
            f"{path} is there already: replace it with --force, or name another file "
            "with --out"
        ) from None
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if claimed:
            target.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device, which a file must not replace."""
    return path.exists() and not path.is_file()


def check_place(option: str, path: Path) -> None:
    """Makes sure that a file can be written, before the work for it begins.

    Raises:
        MhcgenError: It cannot.
    """
    target = Path(os.path.realpath(path))
    problem = None
    try:
        if path.is_dir():
            problem = "is a folder: name a file"
        elif _is_special(path):
            if not os.access(path, os.W_OK):
                problem = "cannot be written: name another file"
        elif not target.parent.exists():
            problem = (
                f"there is no folder {path.parent}; make it, or name a file elsewhere"
            )
        else:
            with tempfile.TemporaryDirectory(
                prefix=".mhcgen-", dir=target.parent
            ) as name:
                Path(name, target.name).touch()
    except OSError as error:
        problem = f"{error.strerror}: name a file that can be written"
    if problem is not None:
        raise MhcgenError(f"{option} {path}: {problem}")


def check_folder(option: str, folder: Path) -> None:
    """Makes a folder, and makes sure that files can be written there.

    Raises:
        MhcgenError: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise MhcgenError(
            f"{option} {folder}: {error.strerror}; name a folder that can be written"
        ) from error
