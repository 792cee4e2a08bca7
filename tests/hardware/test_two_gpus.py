"""generated/glm53_tp2 on two GPUs joined by NVLink, one process each."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mhcgen import reference
from mhcgen.runtime import load

from .conftest import (
    CONSTANTS,
    GENERATED,
    assert_armed,
    assert_matches,
    poison_outputs,
    shared_arguments,
)

pytestmark = pytest.mark.two_gpus

H, HC, TP, TOP_K = 4096, 4, 2, 8
PACKAGE = GENERATED / "glm53_tp2"


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def loaded(group: Any) -> Any:
    return load(PACKAGE, group=group)


@pytest.fixture
def boundary(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    poison_outputs(loaded, monkeypatch)
    yield loaded
    loaded.join()
    torch.cuda.synchronize()
    # A peer may still publish into this mailbox until it is here, too.
    dist.barrier()
    torch.cuda.synchronize()
    assert_armed(loaded)


def inputs_for(m: int, seed: int, hard: Any = "plain") -> reference.Inputs:
    """The same inputs on both ranks."""
    return reference.random_inputs(m, H, HC, TP, seed, "cuda", hard)


def call(boundary: Any, inputs: reference.Inputs) -> Any:
    return boundary(inputs.parts[boundary.rank], *shared_arguments(inputs))


def maybe_delay(order: random.Random) -> None:
    """Delays this rank's stream by up to about 150 µs, half of the time."""
    if order.random() < 0.5:
        torch.cuda._sleep(order.randrange(1, 300_000))


def test_transport_is_readable(boundary: Any) -> None:
    assert boundary.transport == "unicast"
    assert boundary.rank == dist.get_rank()
    assert boundary.device == torch.device("cuda", torch.cuda.current_device())


def test_the_launches_are_those_of_the_plan(boundary: Any) -> None:
    """Both ranks take as many, and on whole H200s those of the dispatch table."""
    mine = [boundary.launches(m) for m in range(1, boundary.capacity + 1)]
    both: list[Any] = [None] * TP
    dist.all_gather_object(both, mine)
    assert both == [mine] * TP
    if torch.cuda.get_device_properties().multi_processor_count == 132:
        rows = boundary._launcher.constants.TARGETS["sm_90a"].token_groups
        planned = [
            next(row.launches for row in rows if m <= row.max_tokens)
            for m in range(1, boundary.capacity + 1)
        ]
        assert mine == planned


@pytest.mark.parametrize("m", [*range(1, 65), 128, 256])
def test_every_m(boundary: Any, m: int) -> None:
    inputs = inputs_for(m, seed=m)
    output = call(boundary, inputs)
    boundary.join()
    assert_matches(output, inputs.boundary(CONSTANTS))


@pytest.mark.parametrize("hard", [v for v in reference.VARIANTS if v != "plain"])
@pytest.mark.parametrize("m", [1, 17, 64])
def test_hard_inputs(boundary: Any, m: int, hard: Any) -> None:
    inputs = inputs_for(m, seed=m, hard=hard)
    output = call(boundary, inputs)
    boundary.join()
    assert_matches(output, inputs.boundary(CONSTANTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("m", [1, 8, 50])
def test_finalize(boundary: Any, m: int, dtype: torch.dtype, with_shared: bool) -> None:
    inputs = inputs_for(m, seed=m)
    parts = []
    routed: list[Any] = []
    for rank in range(TP):
        generator = torch.Generator().manual_seed(10 * m + rank)
        gemm2 = torch.randn(3 * m, H, generator=generator).bfloat16()
        weights = torch.rand(m, TOP_K, generator=generator).to(dtype)
        index = torch.randint(-1, 3 * m, (m, TOP_K), generator=generator).int()
        shared = torch.randn(m, H, generator=generator).bfloat16()
        tensors = [t.cuda() for t in (gemm2, weights, index, shared)]
        if not with_shared:
            tensors[3] = None  # type: ignore[call-overload]
        routed.append(tensors)
        parts.append(reference.finalize(*tensors)[1])
    output = boundary.finalize(*routed[boundary.rank], *shared_arguments(inputs))
    boundary.join()
    expected = reference.boundary(parts, *shared_arguments(inputs), CONSTANTS)
    # The published sums may differ from the reference by one rounding, so the streams
    # are compared with a tolerance; the one-GPU tests compare the sums themselves.
    error = (output.residual.double() - expected.residual.double()).abs()
    assert float(error.max()) <= 0.13
    assert float((error > 0.02).double().mean()) < 1e-3


def test_delays_on_one_rank(boundary: Any) -> None:
    """Changing M, no syncs, and each rank in turn far behind or ahead of the other."""
    schedule = random.Random(5)
    mine = random.Random(100 + boundary.rank)
    cases = []
    for index in range(150):
        m = schedule.choice([1, 2, 3, 8, 15, 16, 33, 64])
        slow_rank = schedule.randrange(TP)
        inputs = inputs_for(m, seed=500 + index % 40)
        if slow_rank == boundary.rank:
            maybe_delay(mine)
        cases.append((inputs, call(boundary, inputs)))
    boundary.join()
    for inputs, output in cases:
        assert_matches(output, inputs.boundary(CONSTANTS))


def one_expert(x: torch.Tensor) -> tuple[Any, ...]:
    """What finalize sums to exactly ``x``: one expert a token, of weight 1."""
    m = x.shape[0]
    index = torch.full((m, TOP_K), -1, dtype=torch.int32, device="cuda")
    index[:, -1] = torch.arange(m, device="cuda").flip(0)
    return x.flip(0), torch.ones((m, TOP_K), device="cuda"), index, None


def call_in_any_way(boundary: Any, inputs: reference.Inputs, way: str) -> Any:
    x, shared = inputs.parts[boundary.rank], shared_arguments(inputs)
    if way == "finalize":
        return boundary.finalize(*one_expert(x), *shared)
    if way == "halves":
        boundary.publish(x)
        return boundary.consume(*shared)
    return boundary(x, *shared)


def test_calls_of_all_kinds_alternate(boundary: Any) -> None:
    """One launch, finalize and halves in turn, M changing, each rank delayed."""
    schedule = random.Random(6)
    mine = random.Random(200 + boundary.rank)
    cases = []
    for index in range(200):
        m = schedule.choice([1, 2, 3, 8, 15, 16, 33, 64, 200, 256])
        way = schedule.choice(["call", "finalize", "halves"])
        inputs = inputs_for(m, seed=800 + index % 40)
        maybe_delay(mine)
        cases.append((inputs, call_in_any_way(boundary, inputs, way)))
    boundary.join()
    for inputs, output in cases:
        assert_matches(output, inputs.boundary(CONSTANTS))


def test_graphs_of_calls_of_all_kinds(boundary: Any) -> None:
    ways = ["call", "finalize", "call", "halves", "call"]
    cases = [inputs_for(m, seed=900 + m) for m in [1, 9, 33, 16, 64]]
    expected = [inputs.boundary(CONSTANTS) for inputs in cases]
    order = random.Random(boundary.rank)
    graph = torch.cuda.CUDAGraph()
    boundary.join()
    with torch.cuda.graph(graph):
        outputs = [
            call_in_any_way(boundary, inputs, way)
            for inputs, way in zip(cases, ways, strict=True)
        ]
        boundary.join()
    for _ in range(50):
        maybe_delay(order)
        graph.replay()
    for output, result in zip(outputs, expected, strict=True):
        assert_matches(output, result)


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_graph_replays_with_delays(boundary: Any, calls: int) -> None:
    """Graphs of any number of calls, replayed 200 times, one rank delayed at random."""
    order = random.Random(boundary.rank)
    cases = [inputs_for(m, seed=600 + m) for m in [1, 9, 33, 16, 64][:calls]]
    expected = [inputs.boundary(CONSTANTS) for inputs in cases]
    graph = torch.cuda.CUDAGraph()
    boundary.join()
    with torch.cuda.graph(graph):
        outputs = [call(boundary, inputs) for inputs in cases]
        boundary.join()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(200):
        for output in outputs:
            output.residual.fill_(float("nan"))
        maybe_delay(order)
        graph.replay()
        for output, result in zip(outputs, expected, strict=True):
            wrong += (output.residual != result.residual).sum()
        if replay in (0, 199):
            for output, result in zip(outputs, expected, strict=True):
                assert_matches(output, result)
    assert int(wrong) == 0


def test_soak(boundary: Any) -> None:
    """5,000 boundaries in graphs, every result bit compared on the device."""
    cases = [inputs_for(m, seed=700 + m) for m in [1, 4, 16, 31, 64]]
    expected = [inputs.boundary(CONSTANTS).residual for inputs in cases]
    graph = torch.cuda.CUDAGraph()
    boundary.join()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        for inputs, residual in zip(cases, expected, strict=True):
            output = call(boundary, inputs)
            boundary.join()
            wrong += (output.residual != residual).sum()
    for _ in range(1000):
        graph.replay()
    assert int(wrong) == 0


def test_failures_before_the_collective_reach_every_rank(group: Any) -> None:
    """A rank that cannot load makes all ranks raise, and none waits."""
    transport = "multicast" if dist.get_rank() == 0 else "auto"
    with pytest.raises((ValueError, RuntimeError), match="transport"):
        load(PACKAGE, group=group, transport=transport)
    with pytest.raises(RuntimeError, match="kernels for unicast only"):
        load(PACKAGE, group=group, transport="multicast")
    with pytest.raises(RuntimeError, match="rank 1: ValueError: device is cpu"):
        load(PACKAGE, group=group, device="cpu" if dist.get_rank() else None)


def test_wrong_group_size(group: Any) -> None:
    with pytest.raises(RuntimeError, match="has 2 ranks; glm53 is built for 4"):
        load(GENERATED / "glm53", group=group)


def test_two_objects_have_mailboxes_of_their_own(
    loaded: Any, group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        second = load(PACKAGE, group=group, transport="unicast")
    assert "unicast transport (as requested)" in caplog.text
    inputs = inputs_for(6, seed=6)
    outputs = [call(boundary, inputs) for boundary in (loaded, second, loaded)]
    for boundary in (loaded, second):
        boundary.join()
    for output in outputs:
        assert_matches(output, inputs.boundary(CONSTANTS))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    assert_armed(second)
