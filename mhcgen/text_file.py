"""Writing one text file, whole or not at all."""

import os
import tempfile
from pathlib import Path

from mhcgen.build import BuildError
from mhcgen.errors import MhcgenError


def write_whole(path: Path, text: str, overwrite: bool = True) -> None:
    """Writes a file in one step; where it is a link, the link stays.

    Args:
        path: The file.
        text: What it is to hold.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        BuildError: It cannot be written; what was there still is.
        MhcgenError: There is a file, and it may not be replaced.
    """
    target = Path(os.path.realpath(path))
    claimed = False
    try:
        if not overwrite:
            target.open("x").close()  # whoever comes second is refused
            claimed = True
        with tempfile.TemporaryDirectory(prefix=".mhcgen-", dir=target.parent) as name:
            whole = Path(name, target.name)
            whole.write_text(text, "utf-8", newline="\n")
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
