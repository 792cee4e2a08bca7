"""Packages of many shapes: what is rendered, and that nothing spills."""

import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from ruff import find_ruff_bin

from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.plan import Plan, boundary_registers, projection_registers
from mhcgen.render import render
from tests.shapes import SHAPES, shape


def test_the_shapes_differ_in_every_way() -> None:
    """Each branch of the templates is taken and left by some shape."""
    branches: dict[str, Callable[[Plan], object]] = {
        "idle lanes": lambda plan: plan.idle_lanes,
        "idle lanes of a publish": lambda plan: plan.publish_idle_lanes,
        "one rank": lambda plan: plan.tp == 1,
        "ranks polled one after another": lambda plan: plan.lane_map.polls > 1,
        "several trips": lambda plan: plan.trips > 1,
        "prefetch": lambda plan: plan.prefetch,
        "fn in registers": lambda plan: plan.fn_home == "registers",
        "fn in shared memory": lambda plan: plan.fn_home == "shared",
        "fn in L2": lambda plan: plan.fn_home == "global",
        "more sums than lanes": lambda plan: plan.sum_rows > 32,
        "part of an octet": lambda plan: plan.mix % 8,
        "splits": lambda plan: plan.lane_map.splits,
        "merges": lambda plan: plan.lane_map.merges,
        "butterflies": lambda plan: plan.lane_map.butterflies,
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
        "_if(own": plan.idle_lanes,
        "zero_unless": plan.idle_lanes,
        "publish_own": plan.publish_idle_lanes and plan.tp > 1,
        "mailbox": plan.tp > 1,
        "load_rank": plan.tp == 1,
        "TRIPS": plan.trips > 1,
        "next_old": plan.prefetch,
        "load_projection": plan.fn_home == "registers",
        "copy_async": plan.fn_home == "shared",
        "stream_projection": plan.fn_home == "global",
        "SUM_ROWS": plan.sum_rows > 32,
        "SPLITS": bool(plan.lane_map.splits),
        "MERGES": bool(plan.lane_map.merges),
        "BUTTERFLIES": bool(plan.lane_map.butterflies),
    }
    for trace, is_there in traces.items():
        if trace == "mailbox" and plan.tp == 1:
            # A comment and docstrings say that there is none.
            assert "mailbox: cute.Tensor" not in text
            continue
        assert (trace in text) == is_there, trace
    assert (PurePosixPath("publish.py") in files) == (plan.tp > 1)
    assert (PurePosixPath("boundary.py") in files) == (plan.trips == 1)


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
