"""Packages whose kernels are compiled once, whichever test process comes first."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from filelock import FileLock

from mhcgen.build import write_files
from mhcgen.emulator.package import EmulatedPackage, compile_ptx, load_package
from mhcgen.plan import Plan, make_plan
from mhcgen.render import render
from mhcgen.spec_file import load_spec

Load = Callable[..., EmulatedPackage]


@pytest.fixture(scope="session")
def narrow_path() -> Path:
    return Path(__file__).parent / "narrow.yaml"


@pytest.fixture(scope="session")
def narrow_plan(narrow_path: Path) -> Plan:
    return make_plan(load_spec(narrow_path).spec)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this test session, which its processes share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def load(session_folder: Path) -> Load:
    """Gives the kernels of a plan for one architecture; all kernels, or those named."""
    root = session_folder / "emulated"
    loaded: dict[tuple[str, str], EmulatedPackage] = {}

    def load(plan: Plan, arch: str, names: Collection[str] = ()) -> EmulatedPackage:
        key = plan.name, arch
        if key in loaded:
            return loaded[key]
        place = root / plan.name / arch
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
