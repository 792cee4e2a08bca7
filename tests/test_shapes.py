"""Packages of many shapes: what is rendered, and that nothing spills."""

import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from ruff import find_ruff_bin

from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.errors import PlanError
from mhcgen.plan import MAY_SPILL, Plan, boundary_registers, projection_registers
from mhcgen.render import kernel_rows, render
from tests.shapes import SHAPES, shape


def test_the_shapes_differ_in_every_way() -> None:
    """Each branch of the templates is taken and left by some shape."""
    branches: dict[str, Callable[[Plan], object]] = {
        "idle lanes": lambda plan: plan.idle_lanes,
        "idle lanes of a publish": lambda plan: plan.publish_idle_lanes,
        "one rank": lambda plan: plan.tp == 1,
        "more ranks than streams": lambda plan: plan.tp > plan.hc,
        "fewer ranks than streams": lambda plan: plan.tp < plan.hc,
        "several words of a lane": lambda plan: plan.lane_map.words > 1,
        "several trips": lambda plan: plan.trips > 1,
        "fn in registers": lambda plan: plan.fn_home == "registers",
        "fn in shared memory": lambda plan: plan.fn_home == "shared",
        "fn in L2": lambda plan: plan.fn_home == "global",
        "more sums than lanes": lambda plan: plan.last_sum >= 32,
        "several turns over the tokens of a group": lambda plan: any(
            row.at_once < row.group * plan.trips for row in plan.targets[0].token_groups
        ),
        "part of an octet": lambda plan: plan.mix % 8,
        "merges": lambda plan: plan.lane_map.merges,
        "clusters that are no power of two": lambda plan: (
            plan.targets[0].cluster_size & (plan.targets[0].cluster_size - 1)
        ),
        "clusters that are not portable": lambda plan: plan.targets[0].cluster_size > 8,
    }
    for branch, is_taken in branches.items():
        assert {bool(is_taken(plan)) for plan in SHAPES} == {True, False}, branch


@pytest.mark.parametrize("plan", SHAPES, ids=lambda plan: plan.name)
def test_rendered_code_is_clean(plan: Plan, tmp_path: Path) -> None:
    """No name is imported or made in vain, whatever the shape leaves out."""
    package = tmp_path / plan.name
    package.mkdir()
    write_files(package, render(plan))
    lint = [find_ruff_bin(), "check", "--isolated", "--no-cache", "--select=E,F,I"]
    run = subprocess.run([*lint, package], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("plan", SHAPES, ids=lambda plan: plan.name)
def test_what_a_shape_does_not_need_leaves_no_trace(plan: Plan) -> None:
    files = render(plan)
    text = "".join(
        content
        for path, content in files.items()
        if path.suffix == ".py" and path.parts[0] != "runtime"
    )
    traces = {
        "own=own": plan.idle_lanes,
        "zero_unless": plan.idle_lanes,
        "publish_own": plan.publish_idle_lanes and plan.tp > 1,
        "mailbox": plan.tp > 1,
        "poll(": plan.tp > 1,
        "load_volatile": plan.tp > 1,
        "publishes": plan.tp > 1,
        "TRIPS": plan.trips > 1,
        "load_projection": plan.fn_home == "registers",
        "copy_projection": plan.fn_home == "shared",
        "stream_projection": plan.fn_home == "global",
        "MERGES": bool(plan.lane_map.merges),
        "WORD_LANES": bool(plan.lane_map.merges),
    }
    for trace, is_there in traces.items():
        if trace == "mailbox" and plan.tp == 1:
            # A comment and docstrings say that there is none.
            assert "mailbox: cute.Tensor" not in text
            continue
        assert (trace in text) == is_there, trace
    assert (PurePosixPath("publish.py") in files) == (plan.tp > 1)
    assert PurePosixPath("boundary.py") in files


REAL = (
    shape("wide_shared", 7168, 4, 16),
    shape("wide_l2", 7680, 4, 4),
    shape("wide_trips", 12288, 4, 8),
    shape("wide_two_streams", 16384, 2, 16),
    shape("wide_eight_streams", 16384, 8, 4),
    shape("consumer", 5120, 4, 4, arch="sm_120a"),
)


@pytest.mark.parametrize("plan", REAL, ids=lambda plan: plan.name)
def test_nothing_spills(plan: Plan, tmp_path: Path) -> None:
    """The plan's estimates of registers are right where they decide."""
    package = tmp_path / plan.name
    package.mkdir()
    write_files(package, render(plan))
    jobs = [job for job in jobs_of(package) if "boundary" in job.row.name]
    (target,) = plan.targets
    assert boundary_registers(plan) <= target.register_limit
    assert projection_registers(plan, 3) <= target.register_limit
    for kernel in compile_kernels(jobs):
        assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (0, 0, 0)
        assert kernel.registers <= target.register_limit


FP32: dict[str, Any] = {"precision": {"fn_weight": "fp32"}}


def corner(
    name: str, hidden: int, hc: int, tp: int, group: int, **sections: Any
) -> Plan:
    """A shape with one token group only, for which registers are few."""
    groups = [{"max_tokens": group, "group": group}]
    return shape(name, hidden, hc, tp, groups=groups, moe=None, **sections)


CORNERS = (
    # With the kernel that spills on DSL 4.8.1.
    (corner("corner_l2", 7680, 4, 2, 16), "boundary_16"),
    (corner("corner_trips", 12288, 4, 8, 9), "boundary_9"),
    (corner("corner_eight_streams", 7680, 8, 2, 3), "boundary_3"),
    (corner("corner_many_polls", 16384, 2, 16, 9), "boundary_9_unicast"),
    (corner("corner_registers", 16384, 2, 8, 16), "boundary_16_unicast"),
    (corner("corner_fma", 5120, 4, 4, 1, **FP32), "boundary_1_unicast"),
    (corner("corner_wide_fma", 7168, 4, 4, 4, **FP32), "boundary_4"),
)


def test_what_may_spill_spills_no_more_than_the_plan_says(tmp_path: Path) -> None:
    """Where registers are few, the assembler overshoots."""
    jobs = []
    for plan, name in CORNERS:
        write_files(tmp_path / plan.name, render(plan))
        jobs += [job for job in jobs_of(tmp_path / plan.name) if job.row.name == name]
    assert len(jobs) == len(CORNERS)
    for job, kernel in zip(jobs, compile_kernels(jobs), strict=True):
        assert job.row.may_spill > 0
        assert kernel.spilled <= job.row.may_spill, kernel


def test_a_projection_by_fma_takes_few_tokens_where_registers_are_few() -> None:
    """Beyond four, each thread would spill a hundred bytes and more."""
    sections = FP32 | {"moe": None, "groups": [{"max_tokens": 8, "group": 8}]}
    with pytest.raises(PlanError, match="8 tokens takes about 132 registers"):
        shape("wide", 7168, 4, 4, **sections)
    assert shape("narrower", 5120, 4, 4, **sections).targets[0].groups == (8,)


def test_where_the_plan_promises_that_nothing_spills() -> None:
    promised = {plan.name: not plan.targets[0].may_spill for plan in (*SHAPES, *REAL)}
    assert promised["largest_cluster"] and promised["eight_streams"]
    broken = ("wide_l2", "wide_trips", "wide_two_streams", "wide_shared", "one_stream")
    assert not any(promised[name] for name in broken)
    plan = next(plan for plan in REAL if plan.name == "wide_l2")
    (target,) = plan.targets
    rows = {row.name: row.as_json().get("may_spill") for row in kernel_rows(target)}
    assert rows["boundary_3"] == MAY_SPILL and rows["publish_unicast"] is None
