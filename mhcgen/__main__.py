"""The command `mhcgen`, and `python -m mhcgen`."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> NoReturn:
    """Runs the command line; signals end it quietly from its first moment on."""
    try:
        # torch.distributed.run ends ranks that wait for one that has failed, and what
        # waits inside of a library would not hear of it.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                    signal.signal(number, _end)
        from mhcgen import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


def _end(number: int, frame: FrameType | None) -> None:
    """Has everything cleaned up, which a second signal must not break off."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
