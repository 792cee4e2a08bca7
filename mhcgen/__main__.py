"""The command `mhcgen`, and `python -m mhcgen`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line; Ctrl-C ends it quietly from its first moment on."""
    try:
        from mhcgen import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
