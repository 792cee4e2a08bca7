"""What came out: a table of errors, and for each failure how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mhcgen.console import show_table
from mhcgen.verify.cases import Case
from mhcgen.verify.compare import Errors

SHOWN_FAILURES = 5
HEADERS = (
    "arch",
    "transport",
    "tokens",
    "calls",
    "published",
    "finalize ulp",
    "residual",
    "input ulp",
    "beyond 1 ulp",
    "mix",
    "post",
    "comb",
    "result",
)


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        case: The case.
        errors: The largest errors of its calls.
        problems: What else was wrong.
    """

    case: Case
    errors: Errors = field(default_factory=Errors)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all was well."""
        return self.errors.ok and not self.problems

    def as_json(self) -> dict[str, object]:
        """The outcome as plain values."""
        return {
            **asdict(self.case),
            "errors": asdict(self.errors),
            "problems": self.problems,
            "ok": self.ok,
        }


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[object, ...]]:
    """The table of errors: a row for each case, or for all seeds of a transport."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        sizes = "changing" if case.stress else str(case.tokens[0])
        groups.setdefault((case.arch, case.transport, sizes), []).append(outcome)
    rows: list[tuple[object, ...]] = []
    for key, members in groups.items():
        errors = Errors()
        for outcome in members:
            errors.include(outcome.errors)
        failed = sum(not outcome.ok for outcome in members)
        sent = (errors.published, errors.finalized_ulp)
        stress = members[0].case.stress
        rows.append(
            (
                *key,
                sum(len(outcome.case.tokens) for outcome in members),
                *((None, None) if stress else sent),
                errors.residual,
                errors.layer_input_ulp,
                f"{errors.layer_input_share:.1e}",
                None if stress else f"{errors.mix:.1e}",
                f"{errors.post:.1e}",
                f"{errors.comb:.1e}",
                f"{failed} failed" if failed else "ok",
            )
        )
    return rows


def show(outcomes: Sequence[Outcome], name: str, source: Path) -> None:
    """Prints the table, and for each failure what happened and how to repeat it."""
    show_table(
        f"{name}: wrong elements (published, residual), bf16 ulp, absolute errors",
        HEADERS,
        rows_of(outcomes),
    )
    failures = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failures[:SHOWN_FAILURES]:
        print(f"\nFAILED: {outcome.case.command(source)}")
        if not outcome.errors.ok:
            wrong = ", ".join(f"{k} {v}" for k, v in asdict(outcome.errors).items())
            print(f"  {wrong}")
        for problem in outcome.problems:
            print("\n".join(f"  {line}" for line in problem.splitlines()))
    if len(failures) > SHOWN_FAILURES:
        print(f"\n... and {len(failures) - SHOWN_FAILURES} more failures")
