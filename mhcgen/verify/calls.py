"""The calls of a case, one after another, wherever the kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mhcgen.verify.cases import Case
from mhcgen.verify.compare import (
    Errors,
    Published,
    Returned,
    expected,
    expected_entry,
    expected_exit,
    normalized_errors,
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

    def entry(self, call: Call) -> Sequence[Returned]:
        """Enters the network with a call's hidden state.

        Returns:
            What each rank that is seen returned.
        """

    def consume_exit(self, call: Call) -> Sequence[Tensor]:
        """Takes what was published through the exit.

        Returns:
            What each rank that is seen returned, [M, H].
        """

    def whole_exit(self, call: Call) -> Sequence[Tensor]:
        """Makes an exit without a pause.

        Returns:
            What each rank that is seen returned, [M, H]; nothing, where the kernels
            would be those that have been run already.
        """

    def problems(self) -> Sequence[str]:
        """What is wrong with the mailboxes once nobody uses them."""


def run_calls(
    executor: Executor, subject: Subject, case: Case, outcome: Outcome
) -> None:
    """Makes the calls of a case, and compares all that they publish and return.

    With an entry, each has one before it, and with an exit, one behind it.
    """
    for index in range(len(case.tokens)):
        call = draw(subject, case, index)
        if subject.entry:
            result = expected_entry(subject, call)
            for returned in executor.entry(call):
                outcome.end("entry").include(returned_errors(returned, result))
        published = executor.publish(call)
        outcome.errors.include(published_errors(call, published))
        result = expected(subject, call, arrived_parts(call, published))
        for returned in [*executor.consume(call), *executor.whole(call)]:
            outcome.errors.include(returned_errors(returned, result))
        if call.routed is not None:
            plain = call.plain()
            result = expected(subject, plain, plain.parts())
            for returned in executor.whole(plain):
                outcome.errors.include(returned_errors(returned, result))
        if subject.exit_by is not None:
            run_exit(executor, subject, call, outcome.end("exit"))
    outcome.problems += executor.problems()


def run_exit(executor: Executor, subject: Subject, call: Call, errors: Errors) -> None:
    """Publishes what a call publishes, and leaves the network with it."""
    published = executor.publish(call)
    errors.include(published_errors(call, published))
    result = expected_exit(subject, call, arrived_parts(call, published))
    for rows in [*executor.consume_exit(call), *executor.whole_exit(call)]:
        errors.include(normalized_errors(rows, result))


def arrived_parts(call: Call, published: Published) -> list[Tensor]:
    """Each rank's rows, [M, H], that the reference should go on from.

    A sum of finalize may be the neighbour of the reference's.
    """
    return call.parts() if call.routed is None else list(published.first)
