"""The calls of a case, one after another, wherever the kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mhcgen.verify.cases import Case
from mhcgen.verify.compare import (
    Published,
    Returned,
    expected,
    published_errors,
    returned_errors,
)
from mhcgen.verify.inputs import Call, draw
from mhcgen.verify.report import Outcome
from mhcgen.verify.subject import Subject


class Executor(Protocol):
    """The ranks of a package, or those of them that this process sees."""

    def publish(self, call: Call) -> Published:
        """Publishes on every rank, and waits until all has arrived."""

    def consume(self, call: Call) -> Sequence[Returned]:
        """Takes what was published through the boundary and the mixes.

        Returns:
            What each rank that is seen returned.
        """

    def whole(self, call: Call) -> Sequence[Returned]:
        """Makes a call without a pause, by a boundary that publishes if it can be.

        Returns:
            What each rank that is seen returned; nothing, where the kernels would be
            those that have been run already.
        """

    def problems(self) -> Sequence[str]:
        """What is wrong with the mailboxes once nobody uses them."""


def run_calls(
    executor: Executor, subject: Subject, case: Case, outcome: Outcome
) -> None:
    """Makes the calls of a case, and compares all that they publish and return."""
    for index in range(len(case.tokens)):
        call = draw(subject, case, index)
        published = executor.publish(call)
        outcome.errors.include(published_errors(call, published))
        # A sum of finalize may be the neighbour of the reference's: go on from there.
        parts = call.parts() if call.routed is None else list(published.first)
        result = expected(subject, call, parts)
        for returned in [*executor.consume(call), *executor.whole(call)]:
            outcome.errors.include(returned_errors(returned, result))
        if call.routed is not None:
            plain = call.plain()
            result = expected(subject, plain, plain.parts())
            for returned in executor.whole(plain):
                outcome.errors.include(returned_errors(returned, result))
    outcome.problems += executor.problems()
