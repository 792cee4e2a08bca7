"""The report of a matrix, as Markdown or as one page of HTML."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mhcgen import __version__, text_file
from mhcgen.errors import MhcgenError, dotted
from mhcgen.matrix import AXES, Candidate, Expansion
from mhcgen.matrix_run import Checks, Result
from mhcgen.resources import resource

FORMATS = {".md": "matrix.md.jinja", ".html": "matrix.html.jinja"}

Headers = tuple[str, ...]
Row = tuple[object, ...]


@dataclass(frozen=True)
class Report:
    """What a matrix made, and what became of it.

    Attributes:
        expansion: All its specs.
        checks: What was done with those that were picked.
        results: What became of each of them.
    """

    expansion: Expansion
    checks: Checks
    results: Sequence[Result]

    @property
    def version(self) -> str:
        """The release of mhcgen."""
        return __version__

    @cached_property
    def failures(self) -> list[Result]:
        """The specs that failed."""
        return [result for result in self.results if result.stage is not None]

    @property
    def stages(self) -> list[str]:
        """What every spec was to go through."""
        stages = ["plan", "render"] + ["compile"] * self.checks.compiled
        return stages + [f"verify on {self.checks.device}"] * bool(self.checks.device)

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        passed = len(self.results) - len(self.failures)
        if not self.results:
            return (
                f"no legal spec, {len(self.expansion.refused)} refused, "
                f"{self.expansion.excluded.total()} excluded: nothing was checked"
            )
        return (
            f"{len(self.expansion.legal)} legal specs, {len(self.expansion.refused)} "
            f"refused; {passed} of {len(self.results)} checked passed "
            f"({', '.join(self.stages)})"
        )

    block_headers: ClassVar[Headers] = (
        "block",
        "legal",
        "refused",
        "excluded",
        "repeated",
        "checked",
        "failed",
    )

    @property
    def blocks(self) -> list[Row]:
        """A row for each block, and one for all."""
        expansion = self.expansion
        columns: list[Counter[str]] = [
            Counter(candidate.block for candidate in expansion.legal),
            Counter(candidate.block for candidate, _ in expansion.refused),
            expansion.excluded,
            expansion.repeated,
            Counter(result.candidate.block for result in self.results),
            Counter(result.candidate.block for result in self.failures),
        ]
        rows: list[Row] = [
            (block, *(column[block] for column in columns))
            for block in expansion.blocks
        ]
        return [*rows, ("all", *(column.total() for column in columns))]

    reason_headers: ClassVar[Headers] = ("specs", "reason", "such as")

    @property
    def reasons(self) -> list[Row]:
        """A row for each reason that specs are refused for."""
        return [
            (len(refused), reason, refused[0][0].name)
            for reason, refused in self.expansion.reasons
        ]

    refused_headers: ClassVar[Headers] = ("spec", "block", "key", "reason")

    @property
    def refused(self) -> list[Row]:
        """A row for each spec that is refused."""
        return [
            (candidate.name, candidate.block, dotted(problem.loc), problem.message)
            for candidate, problem in self.expansion.refused
        ]

    value_headers: ClassVar[Headers] = (
        "axis",
        "value",
        "legal",
        "refused",
        "checked",
        "failed",
    )

    @property
    def values(self) -> list[Row]:
        """A row for each value of each axis that has several."""
        columns = [
            _traits(self.expansion.legal),
            _traits(candidate for candidate, _ in self.expansion.refused),
            _traits(result.candidate for result in self.results),
            _traits(result.candidate for result in self.failures),
        ]
        rows: list[Row] = []
        for axis in AXES:
            traits = sorted(
                {
                    trait
                    for column in columns
                    for trait in column
                    if trait[0] == axis.name
                },
                key=lambda trait: (len(trait[1]), trait[1]),
            )
            if len(traits) > 1:
                rows += [
                    (
                        axis.name,
                        trait[1].replace('"', ""),
                        *(column[trait] for column in columns),
                    )
                    for trait in traits
                ]
        return rows

    result_headers: ClassVar[Headers] = (
        "spec",
        "block",
        "clusters",
        "kernels",
        "registers",
        "spilled",
        "cases",
        "result",
    )

    @property
    def rows(self) -> list[Row]:
        """A row for each spec that was checked."""
        return [
            (
                result.candidate.name,
                result.candidate.block,
                ", ".join(map(str, sorted(set(result.clusters.values())))),
                len(result.kernels) or None,
                result.registers,
                result.spilled,
                result.cases or None,
                f"{result.stage} failed" if result.stage else "ok",
            )
            for result in self.results
        ]

    def text(self, path: Path) -> str:
        """The report in the format that a file's name has.

        Raises:
            MhcgenError: Its name has none.
        """
        environment = Environment(
            loader=FileSystemLoader(resource("templates") / "report"),
            undefined=StrictUndefined,
            autoescape=path.suffix == ".html",
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["cell"] = _cell
        template = environment.get_template(FORMATS[check_format(path)])
        return template.render(report=self)


def check_place(path: Path) -> None:
    """Makes sure that a report can be written, before hours are spent on it.

    Raises:
        MhcgenError: It cannot.
    """
    check_format(path)
    text_file.check_place("--report", path)


def check_format(path: Path) -> str:
    """The suffix of a report's file.

    Raises:
        MhcgenError: No report has it.
    """
    if path.suffix not in FORMATS:
        raise MhcgenError(f"--report {path}: name a file in {' or '.join(FORMATS)}")
    return path.suffix


def _traits(candidates: Iterable[Candidate]) -> Counter[tuple[str, str]]:
    return Counter(trait for candidate in candidates for trait in candidate.traits)


def _cell(value: object) -> str:
    """A value in a cell of a Markdown table."""
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
