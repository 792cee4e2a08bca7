"""What tests share."""

import os
from pathlib import Path

import pytest

from mhcgen.plan import Plan, make_plan
from mhcgen.resources import resource
from mhcgen.spec_file import load_spec


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
    return make_plan(load_spec(glm53_path).spec)
