"""The benchmark on one GPU: the floor is right, and a run has every column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhcgen import reference
from mhcgen.bench import contenders
from mhcgen.bench.contenders import Inputs
from mhcgen.bench.machine import Machine
from mhcgen.bench.packages import Loaded, load
from mhcgen.bench.run import run
from mhcgen.bench.timing import capture
from mhcgen.resources import resource

from .conftest import GENERATED, assert_armed


@pytest.fixture(scope="module")
def gpu() -> Machine:
    return Machine(0, 1, torch.device("cuda", 0))


@pytest.fixture(scope="module")
def package(gpu: Machine) -> Loaded:
    return load(gpu, GENERATED / "glm53", "")


@pytest.mark.parametrize("m", [1, 7, 64])
def test_the_floor_is_an_all_reduce(gpu: Machine, package: Loaded, m: int) -> None:
    """Looped back, all ranks' rows are this one's; calls and graphs leave it armed."""
    inputs = Inputs(gpu, package, m)
    call: Any = contenders.floor_of(package)(inputs)
    y = call.args[4]
    expected = reference.all_reduce([inputs.x] * package.constants.TP)
    for _ in range(4):
        y.fill_(float("nan"))
        call()
        assert reference.bits_equal(y, expected)
    graph = capture(call).graph
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert reference.bits_equal(y, expected)
    assert_armed(package.boundary)


def test_a_floor_that_does_not_fit_says_so(gpu: Machine, package: Loaded) -> None:
    with pytest.raises(contenders.UnavailableError, match="run at once"):
        contenders.floor_of(package)(Inputs(gpu, package, 256))


def test_tuning_measures_and_chooses() -> None:
    for library in ("pydantic", "ruamel.yaml", "jinja2"):
        pytest.importorskip(library, reason="needs what renders specs")
    from mhcgen.bench.variants import tune
    from mhcgen.plan import make_plan
    from mhcgen.spec_file import load_spec

    plan = make_plan(load_spec(resource("specs") / "glm53.yaml").spec)
    tuned = tune(plan, [1, 16], 300)
    assert tuned is not None
    assert all(trial.measured for trial in tuned.trials)
    assert set(tuned.choice.times) == {1, 16}
    spec = plan.spec.model_copy(update={"targets": tuned.targets})
    rows = make_plan(spec).target(tuned.arch).token_groups
    chosen = [(row.max_tokens, row.group, 3 - row.fn_octets) for row in rows]
    assert chosen == list(tuned.choice.token_groups)


def test_a_run_has_every_column_or_says_why() -> None:
    result = run(
        [GENERATED / "glm53", GENERATED / "glm53"], [1, 2], (), lambda name: None
    )
    assert result is not None
    beside = {"mixes", "with mixes", "between sublayers"}
    own = {"boundary", "two launches", *beside, "finalize"}
    expected = {*own, *(f"glm53_2 {name}" for name in own), "nccl", "one-shot"}
    assert set(result.notes) == expected | {"unfused", "floor"}
    assert own | {f"glm53_2 {name}" for name in own} | {"floor"} <= set(result.columns)
    for column in {"nccl", "one-shot"}:
        assert result.notes[column] == "M=2: needs a GPU for each rank"
    if "unfused" not in result.columns:
        pytest.fail(result.notes["unfused"])
    for m in (1, 2):
        for column, (low, high) in result.spread[m].items():
            assert 0 < low <= result.microseconds[m][column] <= high
    assert result.host["call"] > 0
    assert result.versions["nvidia-cutlass-dsl"]
