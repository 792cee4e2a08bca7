"""Bugs planted in the kernels of other types, outputs and ends: each must be caught."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from mhcgen import reference
from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.emulator.package import EmulatedPackage, load_package
from mhcgen.render import render
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import run
from tests.emulator.conftest import Load
from tests.variants import VARIANTS

pytestmark = pytest.mark.mutants


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``file`` of a variant, ``old`` becomes ``new``."""

    name: str
    variant: str
    file: str
    old: str
    new: str
    kernels: tuple[str, ...] = ("boundary", "grouped_boundary_3")


ENDS = ("entry", "exit")
MUTANTS = (
    Mutant(
        "lanes take each other's sums",
        "fma_in_registers",
        "projection_fma.py",
        "(16, 8, 4, 2, 1)",
        "(8, 16, 4, 2, 1)",
    ),
    Mutant(
        "rows of an octet are reversed",
        "fma_in_registers",
        "projection_fma.py",
        "octet * 8 + lane % 8",
        "octet * 8 + 7 - lane % 8",
        ("grouped_boundary_3",),
    ),
    Mutant(
        "squares of all tokens go to the first",
        "fma_in_registers",
        "projection_fma.py",
        "partials[index, SQUARES] = square",
        "partials[0, SQUARES] = square",
        ("grouped_boundary_3",),
    ),
    Mutant(
        "half of each fragment of fn is read twice",
        "fp16_and_fp32",
        "fn_rows.py",
        "ptx.load_constant(place + FRAGMENT_BYTES)",
        "ptx.load_constant(place)",
    ),
    Mutant(
        "FP16 pairs are swapped",
        "fp16",
        "ptx.py",
        "mov.b32 {low, high}, $2",
        "mov.b32 {high, low}, $2",
    ),
    Mutant(
        "one is not added",
        "plus_one",
        "steps.py",
        "ptx.add(weight, Float32(1.0))",
        "weight",
    ),
    Mutant(
        "the norm takes the squares of the streams",
        "delayed",
        "boundary.py",
        "sum_row(sums[NORM_SQUARES, None]",
        "sum_row(sums[SQUARES, None]",
        ("boundary",),
    ),
    Mutant(
        "all tokens take the first one's pre-mix",
        "delayed",
        "grouped_boundary.py",
        "load_pre(pre, first + index, stream)",
        "load_pre(pre, first, stream)",
        ("grouped_boundary_3",),
    ),
    Mutant(
        "the last sum stays behind",
        "delayed",
        "boundary.py",
        "lane <= NORM_SQUARES",
        "lane <= SQUARES",
        ("boundary",),
    ),
    Mutant(
        "the next pre-mix has the scale of post",
        "delayed",
        "mixes.py",
        "scale[0]",
        "scale[1]",
        ("mixes",),
    ),
    Mutant(
        "the mean is a sum",
        "delayed",
        "steps.py",
        "Float32(1.0 / HC)",
        "Float32(1.0)",
    ),
    Mutant(
        "the exit leaves the generation",
        "ends",
        "exit.py",
        "(generation + 1) % GENERATIONS",
        "generation % GENERATIONS",
        ENDS,
    ),
    Mutant(
        "the exit re-arms one rank",
        "ends",
        "exit.py",
        "for place in places:",
        "for place in places[:1]:",
        ENDS,
    ),
    Mutant(
        "blocks of the ends do not meet",
        "ends_by_head",
        "ends.py",
        "    cute.arch.cluster_arrive()\n    cute.arch.cluster_wait()\n",
        "",
        ENDS,
    ),
    Mutant(
        "the entry multiplies one stream's columns",
        "ends",
        "entry.py",
        "stream * FN_STREAM_BYTES",
        "0 * FN_STREAM_BYTES",
        ENDS,
    ),
    Mutant(
        "the head has no scale",
        "ends_by_head",
        "exit.py",
        "head_scale[0]",
        "Float32(1.0)",
        ENDS,
    ),
)


def is_right(package: EmulatedPackage, kernels: tuple[str, ...]) -> bool:
    """Whether all is well in calls, or at the ends, of a few sizes."""
    calls: list[tuple[int, ...]] = [(1,) * 3, (5,) * 3]
    cases = [Case(package.arch, "unicast", m, 1) for m in calls]
    if kernels == ENDS:
        every = (3,) * len(reference.VARIANTS)
        cases = [Case(package.arch, "unicast", every, 1)]
        cases += [
            Case(package.arch, "unicast", (4, 1, 3), seed, stress=True)
            for seed in range(3)
        ]
    return all(run(package, case).ok for case in cases)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(load: Load, tmp_path: Path, mutant: Mutant) -> None:
    plan = next(plan for plan in VARIANTS if plan.name == mutant.variant)
    (target,) = plan.targets
    original = load(plan, target.arch)
    assert is_right(original, mutant.kernels)
    files = render(plan)
    path = PurePosixPath(mutant.file)
    assert mutant.old in files[path], "the kernels changed, so change it, too"
    files[path] = files[path].replace(mutant.old, mutant.new)
    folder = tmp_path / plan.name
    folder.mkdir()
    write_files(folder, files)
    jobs = jobs_of(folder, [target.arch], tmp_path / "ptx")
    compile_kernels([job for job in jobs if job.row.name in mutant.kernels])
    changed = load_package(folder, target.arch, tmp_path / "ptx")
    programs = {**original.programs, **changed.programs}
    host = {**original.host, **changed.host}
    package = EmulatedPackage(plan, target.arch, programs, host)
    assert not is_right(package, mutant.kernels)
