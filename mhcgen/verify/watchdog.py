"""Ends a process whose GPU does not come to an end, with a report."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mhcgen.verify.cases import Case
from mhcgen.verify.report import Outcome
from mhcgen.verify.together import global_rank

LATER_SECONDS = 10
"""Ranks that do not report give up later than rank 0, which does."""

Report = Callable[[Sequence[Outcome]], None]


class Watchdog:
    """Ends the process if something takes too long: a kernel cannot be stopped.

    Attributes:
        case: The case that is running.
        outcomes: What became of the cases so far.
    """

    def __init__(
        self, case: Case, report: Report, end: Callable[[int], None] = os._exit
    ) -> None:
        """Takes the first case, what shows outcomes, and what ends the process."""
        self.case = case
        self.outcomes: list[Outcome] = []
        self._report = report
        self._end = end

    @contextmanager
    def over(self, what: str, seconds: float) -> Iterator[None]:
        """Gives what is done in its context so many seconds."""
        seconds += LATER_SECONDS * bool(global_rank())
        timer = threading.Timer(seconds, self._give_up, (what, seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, what: str, seconds: float) -> None:
        problem = (
            f"{what} did not end within {seconds:g} s: a kernel waits for ever, or a "
            "rank is gone"
        )
        try:
            self._report([*self.outcomes, Outcome(self.case, problems=[problem])])
            sys.stdout.flush()
        finally:
            self._end(1)
