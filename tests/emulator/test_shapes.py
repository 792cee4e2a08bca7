"""Kernels of many shapes, executed for all ranks and compared with the reference."""

import pytest

from mhcgen.plan import Plan
from mhcgen.verify import Case, run
from tests.emulator.conftest import Load
from tests.shapes import SHAPES


@pytest.mark.parametrize("plan", SHAPES, ids=lambda plan: plan.name)
def test_every_output(load: Load, plan: Plan) -> None:
    """One token, and a call whose last token group has one."""
    (target,) = plan.targets
    (transport,) = plan.transports
    package = load(plan, target.arch)
    for tokens in [(1, 1, 1), (4, 4)]:
        outcome = run(package, Case(target.arch, transport, tokens, seed=plan.tp))
        assert outcome.ok, (outcome.errors, outcome.problems)


STRESSED = ("idle_lanes", "one_rank", "odd_cluster", "fn_in_shared")


@pytest.mark.parametrize(
    "plan", [p for p in SHAPES if p.name in STRESSED], ids=lambda plan: plan.name
)
def test_calls_in_flight(load: Load, plan: Plan) -> None:
    """Idle lanes neither wait nor re-arm, however threads and stores are delayed."""
    (target,) = plan.targets
    (transport,) = plan.transports
    package = load(plan, target.arch)
    for seed in range(2):
        case = Case(target.arch, transport, (1, 4, 2, 3), seed, stress=True)
        outcome = run(package, case)
        assert outcome.ok, (outcome.errors, outcome.problems)
