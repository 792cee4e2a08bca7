"""Packages of every type, output and end: what is rendered, and that nothing spills."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from ruff import find_ruff_bin

from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.errors import PlanError
from mhcgen.plan import Plan, make_plan, shared_octets
from mhcgen.render import kernel_rows, render
from mhcgen.spec import Spec
from tests.shapes import SHAPES
from tests.variants import VARIANTS


def test_the_variants_differ_in_every_way() -> None:
    """Each branch of the templates is taken and left, fn by FMA from every home."""
    branches: dict[str, Callable[[Plan], object]] = {
        "FP16": lambda plan: plan.activation == "FP16",
        "FP32 rows of fn": lambda plan: plan.fn_halves == 2,
        "projection by FMA": lambda plan: plan.projection == "fma",
        "delayed pre-mix": lambda plan: plan.delayed,
        "stream means": lambda plan: plan.stream_mean,
        "entry": lambda plan: plan.spec.ends.entry,
        "mixes in the tail": lambda plan: plan.tail,
        "fn in two places": lambda plan: plan.splits_fn,
    }
    for branch, is_taken in branches.items():
        assert {bool(is_taken(plan)) for plan in VARIANTS} == {True, False}, branch
    assert {plan.norm_weight for plan in VARIANTS} == {"plain", "plus_one", "none"}
    assert {plan.exit_by for plan in VARIANTS} == {None, "mean", "sigmoid", "pre_mix"}
    by_fma = [plan for plan in VARIANTS if plan.projection == "fma"]
    assert {plan.fn_home for plan in by_fma} == {"registers", "shared", "global"}
    assert {plan.idle_lanes for plan in by_fma} == {True, False}
    assert {max(plan.targets[0].groups) > 1 for plan in by_fma} == {True, False}
    assert {plan.trips > 1 for plan in by_fma} == {True, False}
    assert {plan.trips > 1 for plan in VARIANTS if plan.delayed} == {True, False}
    assert {plan.trips > 1 for plan in VARIANTS if plan.stream_mean} == {True, False}
    assert {plan.delayed for plan in VARIANTS if plan.tail} == {True, False}
    assert {plan.spec.ends.entry for plan in VARIANTS if plan.tail} == {True, False}
    assert {plan.idle_lanes for plan in VARIANTS if plan.splits_fn} == {True, False}


@pytest.mark.parametrize("plan", VARIANTS, ids=lambda plan: plan.name)
def test_rendered_code_is_clean(plan: Plan, tmp_path: Path) -> None:
    """No name is imported or made in vain, whatever the variant leaves out."""
    package = tmp_path / plan.name
    package.mkdir()
    write_files(package, render(plan))
    lint = [find_ruff_bin(), "check", "--isolated", "--no-cache", "--select=E,F,I"]
    run = subprocess.run([*lint, package], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


CALLED_FROM_OUTSIDE = {
    "__call__",
    "__init__",
    "arguments",
    "kernels",
    "load",
    "load_emulated",
    "symbol",
}


@pytest.mark.parametrize("plan", (*VARIANTS, *SHAPES), ids=lambda plan: plan.name)
def test_every_function_is_used(plan: Plan) -> None:
    defined, used = set(), set(CALLED_FROM_OUTSIDE)
    for path, text in render(plan, formatting=False).items():
        if path.suffix == ".py" and path.parts[0] != "runtime":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Attribute):
                    used.add(node.attr)
                elif isinstance(node, ast.Name):
                    used.add(node.id)
    assert defined - used == set()


@pytest.mark.parametrize("plan", (*VARIANTS, SHAPES[0]), ids=lambda plan: plan.name)
def test_what_a_variant_does_not_need_leaves_no_trace(plan: Plan) -> None:
    files = render(plan)
    text = "".join(
        content
        for path, content in files.items()
        if path.suffix == ".py" and path.parts[0] != "runtime"
    )
    traces = {
        "(?<!B)Float16": plan.activation == "FP16",
        "(?<!b)f16x2": plan.activation == "FP16",
        "bf16x2": plan.activation == "BF16",
        r"ptx\.mma": plan.projection == "tensor_cores",
        "load_pre": plan.exit_by == "pre_mix",
        "pre: cute.Tensor": plan.delayed,
        "shared_pre_mixes": not plan.delayed,
        "mix_tokens": plan.tail,
        "store_mix\\b": not plan.tail,
        "the warp that computes the mixes": plan.tail,
        "given_stream": not plan.tail,
        "NORM_SQUARES": plan.delayed,
        "fn_octets": plan.splits_fn,
        "smem_carveout": plan.splits_fn,
        "stream_mean": plan.stream_mean,
        "norm_weight: cute.Tensor": plan.norm_weight != "none",
        r"norm_weight\+1": plan.norm_weight == "plus_one",
        "ENDS_": plan.ends,
        "head_": plan.exit_by == "sigmoid",
    }
    for trace, is_there in traces.items():
        assert bool(re.search(trace, text)) == is_there, trace
    emitted = {
        "projection_fma.py": plan.projection == "fma",
        "entry.py": plan.spec.ends.entry,
        "events.py": not plan.tail,
        "exit.py": plan.exit_by is not None,
        "ends.py": plan.ends,
    }
    for name, is_there in emitted.items():
        assert (PurePosixPath(name) in files) == is_there, name
    rows = {row.name for row in kernel_rows(plan.targets[0])}
    assert ("mixes" in rows) == (not plan.tail or plan.spec.ends.entry)
    assert ("entry" in rows) == plan.spec.ends.entry
    assert ("exit" in rows) == (plan.exit_by is not None)


def spec(**sections: Any) -> Spec:
    model = {"hidden": 512} | sections.pop("model", {})
    return Spec.model_validate(
        {"name": "a", "model": model, "parallel": {"tp": 2}} | sections
    )


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        (
            {"precision": {"activation": "fp16", "projection": "tensor_cores"}},
            "precision.projection",
            "tensor cores multiply BF16 with BF16, and activation is fp16",
        ),
        (
            {"precision": {"fn_weight": "fp32", "projection": "tensor_cores"}},
            "precision.projection",
            "tensor cores multiply BF16 with BF16, and fn_weight is fp32",
        ),
        (
            {"ends": {"exit": "pre_mix"}},
            "ends.exit",
            "an exit by pre-mix takes the one that the last boundary returned",
        ),
    ],
)
def test_what_cannot_be(sections: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(spec(**sections))
    (problem,) = raised.value.problems
    assert ".".join(map(str, problem.loc)) == key
    assert message in problem.message
    assert problem.allowed


@pytest.mark.parametrize(
    ("precision", "projection"),
    [
        ({}, "tensor_cores"),
        ({"projection": "tensor_cores"}, "tensor_cores"),
        ({"projection": "fma"}, "fma"),
        ({"activation": "fp16"}, "fma"),
        ({"fn_weight": "fp32"}, "fma"),
    ],
)
def test_the_projection_that_fits_the_types(
    precision: dict[str, str], projection: str
) -> None:
    assert make_plan(spec(precision=precision)).projection == projection


REAL: tuple[dict[str, Any], ...] = (
    {
        "name": "delayed_fp32",
        "model": {"hidden": 5120, "pre_mix": "delayed"},
        "precision": {"fn_weight": "fp32"},
        "ends": {"entry": True, "exit": "sigmoid"},
        "outputs": {"stream_mean": True},
    },
    {
        "name": "fp16_eight_streams",
        "model": {"hidden": 2048, "hc": 8, "norm_weight": "plus_one"},
        "precision": {"activation": "fp16", "fn_weight": "fp32"},
        "ends": {"entry": True, "exit": "sigmoid"},
    },
    {
        "name": "fp16",
        "model": {"hidden": 4096},
        "precision": {"activation": "fp16"},
        "ends": {"exit": "mean"},
    },
)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("data", REAL, ids=lambda data: data["name"])
def test_nothing_spills(data: dict[str, Any], arch: str, tmp_path: Path) -> None:
    """The plan's estimates of registers hold for every type and end.

    Or it says that a kernel may spill a few bytes.
    """
    groups = [{"max_tokens": 1, "group": 1}, {"max_tokens": 32, "group": 4}]
    targets = {arch: {"token_groups": groups}}
    capacity = {"max_tokens": 32}
    parallel = {"tp": 4, "transports": ["multicast"]}
    plan = make_plan(
        Spec.model_validate(
            {"parallel": parallel, "capacity": capacity, "targets": targets, **data}
        )
    )
    package = tmp_path / plan.name
    package.mkdir()
    write_files(package, render(plan))
    jobs = jobs_of(package)
    compiled = compile_kernels(jobs)
    assert {"entry", "exit"} & {kernel.name for kernel in compiled}
    for job, kernel in zip(jobs, compiled, strict=True):
        spills = (kernel.spill_stores, kernel.spill_loads, kernel.stack)
        assert None not in spills
        assert max(spill or 0 for spill in spills) <= job.row.may_spill, kernel


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("tp", [4, 8])
def test_two_blocks_fit_a_multiprocessor(tp: int, arch: str, tmp_path: Path) -> None:
    """With as little of fn in shared memory as the plan says, and without spills."""
    shape = make_plan(spec(model={"hidden": 4096}, parallel={"tp": tp})).target(arch)
    groups = (1, 2, 4, 7)
    moved = [shared_octets(shape, group) for group in groups]
    assert None not in moved
    rows = [
        {"max_tokens": 2 * group, "group": group, "fn_octets": 3 - (octets or 0)}
        for group, octets in zip(groups, moved, strict=True)
    ]
    plan = make_plan(
        spec(
            model={"hidden": 4096},
            parallel={"tp": tp, "transports": ["unicast"]},
            capacity={"max_tokens": 14},
            targets={arch: {"token_groups": rows}},
        )
    )
    (target,) = plan.targets
    assert {row.blocks for row in target.token_groups} == {2}
    package = tmp_path / plan.name
    package.mkdir()
    write_files(package, render(plan))
    for kernel in compile_kernels(jobs_of(package)):
        if kernel.name.startswith("boundary"):
            assert 2 * kernel.registers * target.launched_threads <= 65536, kernel
            assert 2 * (kernel.shared_bytes + 1024) <= 228 * 1024, kernel
        assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (0, 0, 0)
