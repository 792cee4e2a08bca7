"""What came out: a table of errors, and for each failure how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    "kernel",
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
        errors: The largest errors of its boundaries.
        problems: What else was wrong.
        ends: The largest errors of the entries and of the exits, by ``entry`` and
            ``exit``, where the package has them.
    """

    case: Case
    errors: Errors = field(default_factory=Errors)
    problems: list[str] = field(default_factory=list)
    ends: dict[str, Errors] = field(default_factory=dict)

    def end(self, name: str) -> Errors:
        """The errors of an ``entry`` or ``exit``, to be added to."""
        return self.ends.setdefault(name, Errors())

    @property
    def by_kernel(self) -> dict[str, Errors]:
        """The errors of the boundaries and of the ends."""
        return {"boundary": self.errors, **self.ends}

    @property
    def ok(self) -> bool:
        """Whether all was well."""
        return all(e.ok for e in self.by_kernel.values()) and not self.problems

    def as_json(self) -> dict[str, object]:
        """The outcome as plain values."""
        return {
            **asdict(self.case),
            "errors": asdict(self.errors),
            "ends": {name: asdict(errors) for name, errors in self.ends.items()},
            "problems": self.problems,
            "ok": self.ok,
        }


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[object, ...]]:
    """The table of errors: a row for each case, or for all seeds of a transport.

    With an entry and an exit, each has a row of its own. What a kernel does not return,
    or is gone under stress, has no errors.
    """
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        sizes = "changing" if case.stress else str(case.tokens[0])
        groups.setdefault((case.arch, case.transport, sizes), []).append(outcome)
    rows: list[tuple[object, ...]] = []
    for key, members in groups.items():
        kernels: dict[str, list[Errors]] = {}
        for outcome in members:
            for kernel, errors in outcome.by_kernel.items():
                kernels.setdefault(kernel, []).append(errors)
        calls = sum(len(outcome.case.tokens) for outcome in members)
        rows += [
            (*key, kernel, calls, *_cells(kernel, each, members))
            for kernel, each in kernels.items()
        ]
    return rows


def _cells(
    kernel: str, each: Sequence[Errors], members: Sequence[Outcome]
) -> Iterator[object]:
    """The largest errors of one kernel, and how many cases failed there."""
    errors = Errors()
    for one in each:
        errors.include(one)
    stress = members[0].case.stress
    sends, mixes = kernel != "entry" and not stress, kernel != "exit"
    yield errors.published if sends else None
    yield errors.finalized_ulp if sends else None
    yield errors.residual if mixes else None
    yield errors.layer_input_ulp
    yield f"{errors.layer_input_share:.1e}"
    yield f"{errors.mix:.1e}" if mixes and not stress else None
    yield f"{errors.post:.1e}" if mixes else None
    yield f"{errors.comb:.1e}" if mixes else None
    failed = sum(not one.ok for one in each)
    if kernel == "boundary":
        # A problem is of a whole case, and stands in its first row.
        failed = sum(bool(m.problems) or not m.errors.ok for m in members)
    yield f"{failed} failed" if failed else "ok"


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
        for kernel, errors in outcome.by_kernel.items():
            if not errors.ok:
                wrong = ", ".join(f"{k} {v}" for k, v in asdict(errors).items())
                print(f"  {kernel}: {wrong}")
        for problem in outcome.problems:
            print("\n".join(f"  {line}" for line in problem.splitlines()))
    if len(failures) > SHOWN_FAILURES:
        print(f"\n... and {len(failures) - SHOWN_FAILURES} more failures")
