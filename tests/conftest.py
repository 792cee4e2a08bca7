"""What tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mhcgen.resources import resource

if TYPE_CHECKING:
    from mhcgen.plan import Plan


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share, and no other run."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@pytest.fixture(scope="session")
def glm53_path() -> Path:
    return resource("specs") / "glm53.yaml"


@pytest.fixture(scope="session")
def glm53_plan(glm53_path: Path) -> Plan:
    # Only here: tests on GPUs need no library for specs.
    from mhcgen.plan import make_plan
    from mhcgen.spec_file import load_spec

    return make_plan(load_spec(glm53_path).spec)
