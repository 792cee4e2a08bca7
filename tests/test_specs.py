"""The specs that are shipped, and the packages that are checked in."""

from pathlib import Path, PurePosixPath

import pytest

from mhcgen.build import Package
from mhcgen.plan import make_plan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.spec_file import load_spec

SPECS = sorted(resource("specs").glob("*.yaml"))


@pytest.fixture(params=SPECS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


def test_shipped_specs_are_checked_in_as_packages(path: Path, repository: Path) -> None:
    """A name is that of its file, and generated/ holds what is rendered today."""
    plan = make_plan(load_spec(path).spec)
    assert plan.name == path.stem
    files = render(plan)
    assert PurePosixPath("finalize.py") in files
    package = Package(plan.name, files, repository / "generated")
    assert list(package.differences()) == []


def test_every_package_that_is_checked_in_has_a_spec(repository: Path) -> None:
    packages = {path.name for path in (repository / "generated").iterdir()}
    assert packages == {path.stem for path in SPECS}
