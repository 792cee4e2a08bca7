"""Packages whose kernels are compiled once, whichever test process comes first."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from mhcgen.build import write_files
from mhcgen.compilation import Worker, started_worker
from mhcgen.emulator.package import EmulatedPackage, compile_ptx, load_package
from mhcgen.plan import Plan, make_plan
from mhcgen.render import render, resolved, spec_sha256
from mhcgen.spec_file import load_spec
from mhcgen.verify.cases import Case, Options, cases
from mhcgen.verify.subject import Subject
from tests.emulator.planting import Mutant, Plant, planted

Load = Callable[..., EmulatedPackage]
ARCH = "sm_90a"
SEEDS = 25
"""Seeds of each transport that the kernels pass, and that no protocol mutant passes."""


def stress_cases(plan: Plan, transport: str, first: int, count: int) -> list[Case]:
    options = Options(seed=first, stress=count)
    return [*cases(Subject.of_plan(plan), options, [ARCH], [transport])]


@pytest.fixture(scope="session")
def narrow_path() -> Path:
    return Path(__file__).parent / "narrow.yaml"


@pytest.fixture(scope="session")
def narrow_plan(narrow_path: Path) -> Plan:
    return make_plan(load_spec(narrow_path).spec)


@pytest.fixture(scope="session")
def load(shared_folder: Path) -> Load:
    """Gives the kernels of a plan for one architecture; all kernels, or those named."""
    root = shared_folder / "emulated"
    loaded: dict[str, EmulatedPackage] = {}

    def load(plan: Plan, arch: str, names: Collection[str] = ()) -> EmulatedPackage:
        # Packages of one name may differ.
        wanted = " ".join([spec_sha256(resolved(plan)), *sorted(names)])
        key = f"{plan.name}-{arch}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
        if key in loaded:
            return loaded[key]
        place = root / key
        place.mkdir(parents=True, exist_ok=True)
        package, ptx = place / plan.name, place / "ptx"
        with FileLock(f"{place}.lock"):
            if not ptx.exists():
                package.mkdir()
                write_files(package, render(plan))
                compile_ptx(package, [arch], place / "half", names)
                (place / "half").rename(ptx)
        loaded[key] = load_package(package, arch, ptx)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def compiler() -> Iterator[Worker]:
    """A process that compiles kernels of one test after another."""
    with started_worker() as worker:
        yield worker


@pytest.fixture
def plant(compiler: Worker, tmp_path: Path) -> Plant:
    """Plants a bug in kernels of a package."""

    def plant(mutant: Mutant, package: EmulatedPackage) -> EmulatedPackage:
        return planted(mutant, package, compiler, tmp_path)

    return plant
