"""generated/glm53 on one GPU that plays its four ranks, against the reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mhcgen import reference

from .conftest import (
    CONSTANTS,
    FAULTS,
    assert_armed,
    assert_matches,
    assert_same_bits,
    call_all,
    shared_arguments,
    wrong,
)

H, HC, TP, TOP_K = 4096, 4, 4, 8


def inputs_for(m: int, seed: int, hard: Any = "plain") -> reference.Inputs:
    return reference.random_inputs(m, H, HC, TP, seed, "cuda", hard)


def joined(ranks: Any) -> None:
    for rank in ranks:
        rank.join()
    torch.cuda.synchronize()


def side_stream(rank: Any) -> Any:
    """Makes the stream of a rank's mixes current."""
    if rank._side is None:
        pytest.skip("needs a package whose mixes run on a side stream")
    return torch.cuda.stream(rank._side.stream)


# Every M to 64, and both sides of each step of the dispatch table beyond.
@pytest.mark.parametrize("m", [*range(1, 65), 75, 76, 120, 121, 180, 181, 255, 256])
def test_every_m(ranks: Any, m: int) -> None:
    inputs = inputs_for(m, seed=m)
    outputs = call_all(ranks, inputs)
    joined(ranks)
    assert_matches(outputs[0], inputs.boundary(CONSTANTS))
    assert_same_bits(outputs)


@pytest.mark.parametrize("hard", [v for v in reference.VARIANTS if v != "plain"])
@pytest.mark.parametrize("m", [1, 3, 17, 64])
def test_hard_inputs(ranks: Any, m: int, hard: Any) -> None:
    inputs = inputs_for(m, seed=100 + m, hard=hard)
    outputs = call_all(ranks, inputs)
    joined(ranks)
    assert_matches(outputs[0], inputs.boundary(CONSTANTS))
    assert_same_bits(outputs)


@pytest.mark.parametrize("m", [1, 16, 40])
def test_all_reduce_bits(ranks: Any, m: int) -> None:
    """With post 1 and comb 0 the new streams are the all-reduced rows themselves."""
    inputs = inputs_for(m, seed=m)
    inputs.post.fill_(1.0)
    inputs.comb.zero_()
    outputs = call_all(ranks, inputs)
    joined(ranks)
    y = reference.all_reduce(inputs.parts)
    expected = y.unsqueeze(1).expand(-1, HC, -1).contiguous()
    # 0 * residual adds +0.0 or -0.0, so the sign of a zero sum is free.
    assert reference.bits_equal(outputs[0].residual + 0.0, expected + 0.0)


def test_every_payload_bit_pattern(ranks: Any) -> None:
    """All 65536 BF16 patterns pass the mailbox; only -0.0 loses its sign."""
    patterns = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    x = patterns.view(torch.bfloat16).reshape(16, H)
    inputs = inputs_for(16, seed=1)
    parts = (x, *(torch.zeros_like(x) for _ in range(TP - 1)))
    for rank, part in zip(ranks, parts, strict=True):
        rank.publish(part)
    outputs = [rank.consume(*shared_arguments(inputs)) for rank in ranks]
    joined(ranks)
    y = reference.all_reduce(parts)
    expected = reference.post_mix(y, inputs.residual, inputs.post, inputs.comb)
    assert reference.bits_equal(outputs[0].residual, expected)


def routed(m: int, seed: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Finalize arguments of each rank; absent experts point at NaN weights and rows."""
    generator = torch.Generator().manual_seed(seed)
    arguments = []
    for _ in range(TP):
        rows = 4 * m + 3
        gemm2 = torch.randn(rows, H, generator=generator).bfloat16()
        index = torch.randint(0, rows - 1, (m, TOP_K), generator=generator)
        absent = torch.rand(m, TOP_K, generator=generator) < 0.6
        weights = torch.rand(m, TOP_K, generator=generator).to(dtype)
        gemm2[-1] = float("nan")
        weights[absent] = float("nan")
        shared = torch.randn(m, H, generator=generator).bfloat16()
        index = torch.where(absent, -1, index).to(torch.int32)
        arguments.append(tuple(t.cuda() for t in (gemm2, weights, index, shared)))
    return arguments


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 64, 256])
def test_finalize(ranks: Any, m: int, dtype: torch.dtype, with_shared: bool) -> None:
    """The published contribution is within one ulp of the reference's rounding."""
    inputs = inputs_for(m, seed=m)
    arguments = routed(m, seed=m, dtype=dtype)
    if not with_shared:
        arguments = [(*rest, None) for *rest, _ in arguments]
    for rank, routed_arguments in zip(ranks, arguments, strict=True):
        rank.publish_finalize(*routed_arguments)
    torch.cuda.synchronize()
    # Rank 0's mailbox holds what every rank published.
    mailbox = ranks[0]._launcher.mailbox
    generation = int(mailbox.state[0])
    parts = tuple(mailbox.buffer[generation, rank, :m].clone() for rank in range(TP))
    for part, routed_arguments in zip(parts, arguments, strict=True):
        exact, rounded = reference.finalize(*routed_arguments)
        distance = reference.ulp_distance(part, rounded)
        close = (part.double() - exact).abs() <= 1e-5
        assert bool(((distance <= 1) | close).all())
    outputs = [rank.consume(*shared_arguments(inputs)) for rank in ranks]
    joined(ranks)
    expected = reference.boundary(parts, *shared_arguments(inputs), CONSTANTS)
    assert_matches(outputs[0], expected)
    assert_same_bits(outputs)


def test_finalize_without_any_expert_here(ranks: Any) -> None:
    """A rank that has none of the experts contributes zeros, whatever its rows hold."""
    inputs = inputs_for(5, seed=5)
    gemm2 = torch.full((1, H), float("nan"), dtype=torch.bfloat16, device="cuda")
    weights = torch.full((5, TOP_K), float("nan"), device="cuda")
    index = torch.full((5, TOP_K), -1, dtype=torch.int32, device="cuda")
    for rank in ranks:
        rank.publish_finalize(gemm2, weights, index, None)
    outputs = [rank.consume(*shared_arguments(inputs)) for rank in ranks]
    joined(ranks)
    zeros = tuple(torch.zeros_like(part) for part in inputs.parts)
    expected = reference.boundary(zeros, *shared_arguments(inputs), CONSTANTS)
    assert_matches(outputs[0], expected)


def test_changing_m(ranks: Any) -> None:
    """Calls of different M follow each other on one mailbox, without a sync between."""
    order = random.Random(3)
    ms = [order.choice([1, 2, 5, 15, 16, 31, 64, 100, 200, 256]) for _ in range(60)]
    cases = [inputs_for(m, seed=index) for index, m in enumerate(ms)]
    outputs = [call_all(ranks, inputs) for inputs in cases]
    joined(ranks)
    for inputs, output in zip(cases, outputs, strict=True):
        assert_matches(output[0], inputs.boundary(CONSTANTS))
        assert_same_bits(output)


def test_chain_of_boundaries(ranks: Any) -> None:
    """Each boundary takes the streams and mixes of the one before it, without joins."""
    inputs = inputs_for(9, seed=9)
    residual, post, comb = inputs.residual, inputs.post, inputs.comb
    weights = shared_arguments(inputs)[3:]
    produced = []
    for step in range(6):
        parts = inputs_for(9, seed=200 + step).parts
        for rank, part in zip(ranks, parts, strict=True):
            rank.publish(part)
        outputs = [rank.consume(residual, post, comb, *weights) for rank in ranks]
        produced.append((parts, residual, post, comb, outputs))
        # Rank 0's mixes feed every rank here, so all wait for its side stream.
        ranks[0].join()
        residual, post, comb, _ = outputs[0]
    joined(ranks)
    for parts, residual, post, comb, outputs in produced:
        expected = reference.boundary(parts, residual, post, comb, *weights, CONSTANTS)
        assert_matches(outputs[0], expected)
        assert_same_bits(outputs)


@pytest.mark.parametrize("calls", [1, 2, 3, 4, 5])
def test_graph_replays(ranks: Any, calls: int) -> None:
    """Graphs of any number of calls, replayed 200 times with new inputs in between."""
    ms = [1, 7, 33, 16, 64][:calls]
    cases = [inputs_for(m, seed=400 + m) for m in ms]
    joined(ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call_all(ranks, inputs) for inputs in cases]
        for rank in ranks:
            rank.join()
    for replay in range(200):
        if replay % 50 == 0:
            fresh = [inputs_for(m, seed=1000 * replay + m) for m in ms]
            for inputs, new in zip(cases, fresh, strict=True):
                pairs = zip(
                    (*inputs.parts, *shared_arguments(inputs)),
                    (*new.parts, *shared_arguments(new)),
                    strict=True,
                )
                for old_tensor, new_tensor in pairs:
                    old_tensor.copy_(new_tensor)
            expected = [inputs.boundary(CONSTANTS) for inputs in cases]
        for output in outputs:
            for tensor in output[0]:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for output, result in zip(outputs, expected, strict=True):
            assert reference.bits_equal(output[0].residual, result.residual)
            if replay % 50 == 0 or replay == 199:
                assert_matches(output[0], result)
                assert_same_bits(output)


def test_eager_calls_between_graph_replays(ranks: Any) -> None:
    """The generation lives on the device: eager calls and replays may alternate."""
    captured, eager = inputs_for(4, seed=1), inputs_for(20, seed=2)
    joined(ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = call_all(ranks, captured)
        for rank in ranks:
            rank.join()
    for _ in range(7):
        graph.replay()
        outside = call_all(ranks, eager)
        joined(ranks)
        assert_matches(in_graph[0], captured.boundary(CONSTANTS))
        assert_matches(outside[0], eager.boundary(CONSTANTS))


def test_pending_mixes_are_refused_in_a_capture(ranks: Any) -> None:
    """A capture cannot wait for eager work: the error says to join, and nothing ran."""
    inputs = inputs_for(2, seed=2)
    side_stream(ranks[0])  # skips where there is none
    call_all(ranks, inputs)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"call join\(\) before the capture"),
        torch.cuda.graph(graph),
    ):
        ranks[0].publish(inputs.parts[0])
    joined(ranks)
    assert_armed(ranks[0])


def test_join_on_another_stream(ranks: Any) -> None:
    """Whoever joined, the next call waits for the mixes on its own stream."""
    other = torch.cuda.Stream()
    for seed in range(20):
        inputs = inputs_for(7, seed=900 + seed)
        following = inputs_for(7, seed=950 + seed)
        weights = shared_arguments(following)[3:]
        torch.cuda.synchronize()
        first = call_all(ranks, inputs)
        torch.cuda.synchronize()
        for rank, part in zip(ranks, inputs.parts, strict=True):
            rank.publish(part)
        with side_stream(ranks[0]):
            torch.cuda._sleep(500_000)
        first = [rank.consume(*shared_arguments(inputs)) for rank in ranks]
        with torch.cuda.stream(other):
            ranks[0].join()
        # Rank 0's mixes are late; all ranks' next boundaries read them.
        for rank, part in zip(ranks, following.parts, strict=True):
            rank.publish(part)
        state = (first[0].residual, first[0].post, first[0].comb)
        second = [rank.consume(*state, *weights) for rank in ranks]
        joined(ranks)
        expected = reference.boundary(following.parts, *state, *weights, CONSTANTS)
        assert_matches(second[0], expected)
        assert_same_bits(second)


def test_replay_beside_pending_eager_mixes(ranks: Any) -> None:
    """A replay without a join leaves the mixes of the eager call before it alone."""
    captured, eager = inputs_for(5, seed=31), inputs_for(5, seed=32)
    joined(ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = call_all(ranks, captured)
        for rank in ranks:
            rank.join()
    for _ in range(10):
        for rank, part in zip(ranks, eager.parts, strict=True):
            rank.publish(part)
        for rank in ranks:
            with side_stream(rank):
                torch.cuda._sleep(300_000)
        outside = [rank.consume(*shared_arguments(eager)) for rank in ranks]
        graph.replay()
        joined(ranks)
        assert_matches(outside[0], eager.boundary(CONSTANTS))
        assert_matches(in_graph[0], captured.boundary(CONSTANTS))


def test_capture_after_a_join(ranks: Any) -> None:
    """join() before a capture is enough, even if it is long ago."""
    inputs = inputs_for(3, seed=33)
    call_all(ranks, inputs)
    joined(ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call_all(ranks, inputs)
        for rank in ranks:
            rank.join()
    graph.replay()
    joined(ranks)
    assert_matches(outputs[0], inputs.boundary(CONSTANTS))


def test_a_capture_after_another(ranks: Any) -> None:
    """On streams of their own: the second does not wait for an event of the first."""
    inputs = inputs_for(3, seed=35)
    joined(ranks)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    outputs = []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            outputs.append(call_all(ranks, inputs))
            for rank in ranks:
                rank.join()
    for graph in graphs:
        graph.replay()
    joined(ranks)
    for made in outputs:
        assert_matches(made[0], inputs.boundary(CONSTANTS))


def test_rows_that_wait_to_be_consumed_stop_a_call(ranks: Any) -> None:
    """After a publish alone, only what consumes it is accepted."""
    inputs = inputs_for(4, seed=34)
    arguments = shared_arguments(inputs)
    for rank, part in zip(ranks, inputs.parts, strict=True):
        rank.publish(part)
    with pytest.raises(RuntimeError, match=r"call consume\(\) or consume_exit"):
        ranks[0](inputs.parts[0], *arguments)
    with pytest.raises(ValueError, match="3 tokens, and 4 were published"):
        ranks[0].consume(*(tensor[:3] for tensor in arguments[:3]), *arguments[3:])
    outputs = [rank.consume(*arguments) for rank in ranks]
    joined(ranks)
    assert_matches(outputs[0], inputs.boundary(CONSTANTS))
    with pytest.raises(ValueError, match="4 tokens, and 0 were published"):
        ranks[0].consume(*arguments)


def test_published_rows_are_held_until_they_are_read(ranks: Any) -> None:
    """Rows dropped right after the publish are not overwritten by the outputs."""
    for seed in range(20):
        inputs = inputs_for(64, seed=seed)
        for rank, part in zip(ranks, inputs.parts, strict=True):
            torch.cuda._sleep(100_000)
            rank.publish(part.clone())
        outputs = [rank.consume(*shared_arguments(inputs)) for rank in ranks]
        joined(ranks)
        assert_matches(outputs[0], inputs.boundary(CONSTANTS))


def test_no_tokens(ranks: Any) -> None:
    """M = 0 gives empty outputs and launches nothing."""
    before = [rank._launcher.mailbox.state.clone() for rank in ranks]
    inputs = inputs_for(1, seed=1)
    empty = [tensor[:0] for tensor in shared_arguments(inputs)[:3]]
    weights = shared_arguments(inputs)[3:]
    output = ranks[0](inputs.parts[0][:0], *empty, *weights)
    assert [tuple(tensor.shape) for tensor in output] == [
        (0, HC, H),
        (0, HC, 1),
        (0, HC, HC),
        (0, H),
    ]
    torch.cuda.synchronize()
    for rank, state in zip(ranks, before, strict=True):
        assert torch.equal(rank._launcher.mailbox.state, state)


NAMES = ("x", "residual", "post", "comb", "fn", "scale", "base", "norm_weight")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_arguments_launch_nothing(ranks: Any, name: str, fault: str) -> None:
    """Every fault is refused with its argument's name before the first launch."""
    inputs = inputs_for(3, seed=3)
    arguments = dict(
        zip(NAMES, (inputs.parts[0], *shared_arguments(inputs)), strict=True)
    )
    arguments[name], error = wrong(fault, arguments[name])
    before = ranks[0]._launcher.mailbox.state.clone()
    with pytest.raises(error, match=f"^{name} "):
        ranks[0](**arguments)
    torch.cuda.synchronize()
    assert torch.equal(ranks[0]._launcher.mailbox.state, before)
    assert_armed(ranks[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gemm2_permuted": "half"}, TypeError, "gemm2_permuted has dtype"),
        ({"gemm2_permuted": "odd and empty"}, ValueError, "gemm2_permuted is empty"),
        ({"expert_weights": "half"}, TypeError, "expert_weights has dtype"),
        ({"expert_weights": "wide"}, ValueError, "expert_weights has shape"),
        ({"expanded_idx_to_permuted_idx": "long"}, TypeError, "permuted_idx has dtype"),
        ({"expanded_idx_to_permuted_idx": "cpu"}, ValueError, "permuted_idx is on cpu"),
        ({"shared_output": "wide"}, ValueError, "shared_output has shape"),
        ({"shared_output": "half"}, TypeError, "shared_output has dtype"),
    ],
)
def test_wrong_finalize_arguments_launch_nothing(
    ranks: Any, change: dict[str, str], error: type[Exception], message: str
) -> None:
    inputs = inputs_for(3, seed=3)
    names = (
        "gemm2_permuted",
        "expert_weights",
        "expanded_idx_to_permuted_idx",
        "shared_output",
    )
    arguments: dict[str, Any] = dict(
        zip(names, routed(3, seed=3, dtype=torch.float32)[0], strict=True)
    )
    changes: dict[str, Any] = {
        "half": lambda t: t.half(),
        "long": lambda t: t.long(),
        "cpu": lambda t: t.cpu(),
        "wide": lambda t: torch.cat([t, t], dim=-1),
        "odd and empty": lambda t: torch.cat([t, t], dim=-1)[:0, : t.shape[1]],
    }
    for name, how in change.items():
        arguments[name] = changes[how](arguments[name])
    with pytest.raises(error, match=message):
        ranks[0].finalize(
            **arguments, **dict(zip(NAMES[1:], shared_arguments(inputs), strict=True))
        )
    torch.cuda.synchronize()
    assert_armed(ranks[0])


def test_too_many_tokens(ranks: Any) -> None:
    inputs = inputs_for(257, seed=1)
    with pytest.raises(ValueError, match=r"x has 257 tokens; .* 0 to 256"):
        ranks[0](inputs.parts[0], *shared_arguments(inputs))
    assert ranks[0].supports(256)
    assert ranks[0].supports(0)
    assert not ranks[0].supports(257)
    assert not ranks[0].supports(-1)
    assert_armed(ranks[0])


def test_parameters_that_require_gradients(ranks: Any) -> None:
    """Weights straight out of a module, which require gradients, are taken."""
    inputs = inputs_for(2, seed=2)
    weights = [
        torch.nn.Parameter(t) if t.is_floating_point() else t
        for t in shared_arguments(inputs)[3:]
    ]
    for rank, part in zip(ranks, inputs.parts, strict=True):
        rank.publish(part)
    outputs = [
        rank.consume(inputs.residual, inputs.post, inputs.comb, *weights)
        for rank in ranks
    ]
    joined(ranks)
    assert_matches(outputs[0], inputs.boundary(CONSTANTS))


def test_mixes_outlive_dropped_outputs(ranks: Any) -> None:
    """Memory of dropped outputs is not handed out while the side stream writes it."""
    inputs = inputs_for(64, seed=64)
    for _ in range(20):
        for rank, part in zip(ranks, inputs.parts, strict=True):
            rank.publish(part)
        for rank in ranks:
            with side_stream(rank):
                torch.cuda._sleep(300_000)
            rank.consume(*shared_arguments(inputs))
        bait = [
            torch.zeros(64, HC, size, device="cuda") for size in (1, HC) for _ in ranks
        ]
        torch.cuda.synchronize()
        assert all(bool((tensor == 0).all()) for tensor in bait)


def test_ranks_on_their_own_streams_with_delays(ranks: Any) -> None:
    """Ranks in any order, delayed at random, so that boundaries wait for publishes."""
    order = random.Random(11)
    streams = [torch.cuda.Stream() for _ in ranks]
    # Few tokens: the boundaries that wait must leave room for the publishes.
    cases = [inputs_for(order.choice([1, 2, 3]), seed=300 + i) for i in range(40)]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    results: list[list[Any]] = []
    for inputs in cases:
        for index in order.sample(range(TP), TP):
            with torch.cuda.stream(streams[index]):
                if order.random() < 0.5:
                    torch.cuda._sleep(order.randrange(1, 200_000))
                ranks[index].publish(inputs.parts[index])
        row: list[Any] = [None] * TP
        for index in order.sample(range(TP), TP):
            with torch.cuda.stream(streams[index]):
                if order.random() < 0.5:
                    torch.cuda._sleep(order.randrange(1, 200_000))
                row[index] = ranks[index].consume(*shared_arguments(inputs))
                ranks[index].join()
        results.append(row)
    torch.cuda.synchronize()
    for inputs, row in zip(cases, results, strict=True):
        assert_matches(row[0], inputs.boundary(CONSTANTS))
        assert_same_bits(row)
