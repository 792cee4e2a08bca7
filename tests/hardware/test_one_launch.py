"""Boundaries that publish their own rows, on one GPU that plays all ranks by itself.

Its rank stores its rows into the slots of all ranks in its own mailbox, so that a call
has the launches, the traffic and the polls of service. generated/glm53 is tested
always, more packages with MHCGEN_PACKAGES.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mhcgen import reference
from mhcgen.runtime.arguments import BoundaryInput

from .conftest import (
    FAULTS,
    GENERATED,
    assert_armed,
    assert_same_bits,
    poison_outputs,
    wrong,
)
from .packages import FOLDER, NAMES, Looped

ARGUMENTS = ("x", *BoundaryInput._fields)
FOLDERS = {"glm53": GENERATED / "glm53"} | {name: FOLDER / name for name in NAMES}


@pytest.fixture(scope="module")
def loaded_packages() -> dict[str, Looped]:
    return {}


@pytest.fixture(params=FOLDERS)
def package(
    request: pytest.FixtureRequest,
    loaded_packages: dict[str, Looped],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Looped]:
    """A package; outputs come poisoned, and mailboxes must end re-armed."""
    name = request.param
    if name not in loaded_packages:
        loaded_packages[name] = Looped(FOLDERS[name])
    chosen = loaded_packages[name]
    poison_outputs(chosen.rank, monkeypatch)
    yield chosen
    chosen.join()
    assert_armed(chosen.rank)


def rows_of(package: Looped) -> Any:
    capability = torch.cuda.get_device_capability()
    arch = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}[capability]
    return package.constants.TARGETS[arch].token_groups


def test_every_m(package: Looped) -> None:
    """To 64, and both sides of each step of the dispatch table, to the capacity."""
    capacity = package.constants.CAPACITY
    steps = {row.max_tokens + after for row in rows_of(package) for after in (0, 1)}
    for m in sorted({*range(1, 65), *steps}):
        if m <= capacity:
            inputs = package.inputs(m, seed=m)
            package.check(package.call(inputs), package.expected(inputs))


def test_an_h200_runs_what_the_plan_says_in_one_launch(package: Looped) -> None:
    if torch.cuda.get_device_properties().multi_processor_count != 132:
        pytest.skip("needs an H100 or H200 with all of its 132 multiprocessors")
    first = 1
    for row in rows_of(package):
        found = {package.rank.launches(m) for m in range(first, row.max_tokens + 1)}
        assert found == {row.launches}, row
        first = row.max_tokens + 1


@pytest.mark.parametrize("hard", [v for v in reference.VARIANTS if v != "plain"])
def test_hard_inputs(package: Looped, hard: Any) -> None:
    for m in (1, 3, 17, 64):
        inputs = package.inputs(m, seed=100 + m, hard=hard)
        package.check(package.call(inputs), package.expected(inputs))


def ways(package: Looped) -> list[Callable[..., Any]]:
    """Every way to sum rows and take them through a boundary."""
    found = [package.launch, package.launch_halves]
    if False in getattr(package.constants, "SHARED_EXPERT", ()):
        found.append(package.launch_finalize)
    return found


def test_calls_of_all_kinds_follow_each_other(package: Looped) -> None:
    """One launch, two, finalize, of changing M, without a sync between."""
    order = random.Random(8)
    steps = [row.max_tokens for row in rows_of(package)]
    cases = []
    for seed in range(80):
        m = order.choice([1, 2, 5, 15, 16, 31, 64, *steps])
        inputs = package.inputs(m, seed)
        cases.append((inputs, order.choice(ways(package))(inputs)))
    package.join()
    for inputs, output in cases:
        package.check([output], package.expected(inputs))


def test_a_chain_of_boundaries(package: Looped) -> None:
    """Each call takes the streams and mixes of the one before it, without joins."""
    chain = []
    inputs = package.inputs(9, seed=9)
    for step in range(12):
        output = ways(package)[step % len(ways(package))](inputs)
        chain.append((inputs, output))
        inputs = after(package.inputs(9, seed=200 + step), output, inputs)
    package.join()
    for inputs, output in chain:
        package.check([output], package.expected(inputs))


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_graph_replays(package: Looped, calls: int) -> None:
    """Graphs of any number of calls, with eager calls of other M between replays."""
    cases = [package.inputs(m, seed=400 + m) for m in [1, 7, 33, 16, 64][:calls]]
    eager = package.inputs(3, seed=77)
    expected = [package.expected(inputs) for inputs in cases]
    expected_eager = package.expected(eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [
            ways(package)[index % len(ways(package)) if calls > 2 else 0](inputs)
            for index, inputs in enumerate(cases)
        ]
        package.rank.join()
    for replay in range(100):
        for output in outputs:
            for tensor in output:
                tensor.fill_(float("nan"))
        graph.replay()
        outside = package.launch(eager) if replay % 7 == 0 else None
        package.join()
        for output, result in zip(outputs, expected, strict=True):
            assert reference.bits_equal(output.residual, result.residual)
        if outside is not None:
            package.check([outside], expected_eager)
    for output, result in zip(outputs, expected, strict=True):
        package.check([output], result)


def places(package: Looped) -> list[int]:
    """Some M of each way to launch, and of groups that tokens do and do not fill."""
    steps = [row.max_tokens for row in rows_of(package)]
    return sorted({1, 3, 9, 17, 33, 64, *steps, package.constants.CAPACITY})


def test_given_outputs(package: Looped) -> None:
    """The same memory, call after call of new inputs."""
    for m in places(package):
        out = package.rank.outputs(m)
        for turn, way in enumerate(ways(package)):
            inputs = package.inputs(m, seed=500 * turn + m)
            for tensor in out:
                tensor.fill_(float("nan"))
            assert way(inputs, out) is out
            package.join()
            package.check([out], package.expected(inputs))


def test_streams_and_mixes_in_place(package: Looped) -> None:
    """Each call writes over the streams and mixes that it takes, without joins."""
    for m in places(package):
        inputs = package.inputs(m, seed=m)
        chain = []
        for step in range(6):
            way = ways(package)[step % len(ways(package))]
            output = way(inputs)
            chain.append((inputs, output))
            inputs = after(package.inputs(m, seed=600 + step), output, inputs)
        package.join()
        first = package.inputs(m, seed=m)
        names = [name for name in output._fields if hasattr(first, name)]
        in_place = {name: getattr(first, name) for name in names}
        out = package.rank.outputs(m)._replace(**in_place)
        assert {"residual", "post", "comb"} <= set(names)
        for step, (taken, expected) in enumerate(chain):
            way = ways(package)[step % len(ways(package))]
            way(dataclasses.replace(taken, **in_place), out)
            package.join()
            assert_same_bits([out, expected])


def after(
    fresh: reference.Inputs, output: Any, before: reference.Inputs
) -> reference.Inputs:
    """Inputs with the streams and mixes of the boundary before."""
    pre = getattr(output, "pre", before.pre)
    streams = (output.residual, output.post, output.comb)
    weights = (before.fn, before.scale, before.base, before.norm_weight)
    return reference.Inputs(fresh.parts, *streams, *weights, pre)


def test_calls_of_changing_streams(package: Looped) -> None:
    """They follow each other; the mixes of each, only the next call waits for."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    sizes = [64, 1, 33, 64, 64, 16] * 5
    cases = [package.inputs(m, seed) for seed, m in enumerate(sizes)]
    torch.cuda.synchronize()
    outputs = []
    for index, inputs in enumerate(cases):
        stream = streams[index % len(streams)]
        stream.wait_stream(streams[index % len(streams) - 1])
        with torch.cuda.stream(stream):
            outputs.append(package.launch(inputs))
    package.join()
    for inputs, output in zip(cases, outputs, strict=True):
        package.check([output], package.expected(inputs))


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_arguments_launch_nothing(package: Looped, fault: str) -> None:
    """The launch refuses them: the mailbox is as it was, and the next call is right."""
    inputs = package.inputs(3, seed=3)
    before = package.rank._launcher.mailbox.state.clone()
    arguments = [inputs.parts[0], *package.shared(inputs)]
    for place, (name, argument) in enumerate(zip(ARGUMENTS, arguments, strict=False)):
        if argument is None:
            continue
        refused = [*arguments]
        refused[place], error = wrong(fault, argument)
        with pytest.raises(error, match=f"^{name} "):
            package.rank(*refused)
    torch.cuda.synchronize()
    assert torch.equal(package.rank._launcher.mailbox.state, before)
    package.check(package.call(inputs), package.expected(inputs))


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_outputs_launch_nothing(package: Looped, fault: str) -> None:
    """Not the boundary either where only the mixes would write them."""
    inputs = package.inputs(3, seed=3)
    before = package.rank._launcher.mailbox.state.clone()
    out = package.rank.outputs(3)
    package.launch(inputs, out)
    package.launch(inputs, out)
    package.launch(inputs, out)
    package.join()
    for name in out._fields:
        refused, error = wrong(fault, getattr(out, name))
        with pytest.raises(error, match=f"^out.{name} "):
            package.launch(inputs, out._replace(**{name: refused}))
    torch.cuda.synchronize()
    assert torch.equal(package.rank._launcher.mailbox.state, before)
    package.check([package.launch(inputs, out)], package.expected(inputs))


def test_one_token_of_a_longer_tensor(package: Looped) -> None:
    """Its strides are those of the longer one, and do not matter."""
    inputs = package.inputs(1, seed=4)
    x, *rest = inputs.parts[0], *package.shared(inputs)
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    assert wide.stride() != x.stride()
    output = package.rank(wide, *rest)
    package.join()
    package.check([output], package.expected(inputs))
