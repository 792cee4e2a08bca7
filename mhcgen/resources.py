"""Where the templates and the specs are, in a checkout and in an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
RUNTIME = PACKAGE / "runtime"


def resource(name: str) -> Path:
    """The folder ``templates`` or ``specs``: a wheel holds them inside the package."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name
