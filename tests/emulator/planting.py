"""Bugs planted in the source of a package, one at a time."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mhcgen.compilation import Worker, jobs_of
from mhcgen.emulator.package import EmulatedPackage, load_package
from mhcgen.plan import Plan
from mhcgen.render import Files, render

Plant = Callable[["Mutant", EmulatedPackage], EmulatedPackage]


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``file``, ``old`` becomes ``new``.

    What is ``moved`` away is gone from its place. Of the kernels of the file only
    ``kernels`` have the bug, to save time: each has to be compiled. To save more, it
    meets the adversary of ``seed`` first: one that catches it.
    """

    name: str
    kernels: tuple[str, ...]
    file: str
    old: str
    new: str
    moved: tuple[str, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def applied(self, plan: Plan) -> Files:
        """The files of a package that has the bug."""
        files = dict(rendered(plan))
        path = PurePosixPath(self.file)
        for old, new in [*((old, "") for old in self.moved), (self.old, self.new)]:
            count = files[path].count(old)
            assert count == 1, f"{count} places to change in {path}: change the mutant"
            files[path] = files[path].replace(old, new)
        return files


@functools.cache
def rendered(plan: Plan) -> Files:
    return render(plan)


def planted(
    mutant: Mutant, package: EmulatedPackage, compiler: Worker, place: Path
) -> EmulatedPackage:
    """A package whose kernels have a bug; ``place`` is an empty folder."""
    folder, ptx = place / package.plan.name, place / "ptx"
    ptx.mkdir()
    for path, text in mutant.applied(package.plan).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    jobs = {job.row.name: job for job in jobs_of(folder, [package.arch], ptx)}
    for name in mutant.kernels:
        compiler.run(jobs[name])
    changed = load_package(folder, package.arch, ptx)
    return dataclasses.replace(
        package,
        programs={**package.programs, **changed.programs},
        host={**package.host, **changed.host},
    )
