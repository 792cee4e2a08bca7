"""What the hardware tests share: loaded packages, poisoned outputs, checked mailboxes.

Run on one GPU with ``pytest tests/hardware``. The tests that need two joined GPUs run
with ``python -m torch.distributed.run --nproc-per-node 2 -m pytest tests/hardware``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mhcgen import reference
from mhcgen.runtime import mailbox as mailboxes
from tests.faults import faulty

GENERATED = Path(__file__).parents[2] / "generated"
CONSTANTS = reference.Constants(
    rms_eps=1e-5, hc_eps=1e-6, norm_eps=1e-5, post_mult=2.0, sinkhorn_iters=20
)
# Streams that share a hardware queue wait for each other, and a rank that waits for one
# behind it in the queue waits for ever: give each stream its own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine or this launch cannot run, and says what it needs."""
    gpus = torch.cuda.device_count()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.get_closest_marker("two_gpus"):
            if gpus < 2 or RANKS != 2:
                item.add_marker(
                    pytest.mark.skip(
                        "needs two GPUs and torch.distributed.run --nproc-per-node 2"
                    )
                )
        elif gpus == 0:
            item.add_marker(
                pytest.mark.skip("needs a GPU that generated/ is built for")
            )
        elif RANKS > 1:
            item.add_marker(pytest.mark.skip("needs a single process"))


@pytest.fixture(scope="session")
def loaded() -> Sequence[Any]:
    """All four ranks of generated/glm53 on one GPU, each with its own mailbox."""
    from mhcgen.runtime import load_emulated

    return load_emulated(GENERATED / "glm53", device=0)


@pytest.fixture
def ranks(loaded: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The emulated ranks: outputs come poisoned, and mailboxes must end re-armed."""
    for rank in loaded:
        poison_outputs(rank, monkeypatch)
    yield loaded
    for rank in loaded:
        rank.join()
    torch.cuda.synchronize()
    for rank in loaded:
        assert_armed(rank)


def poison_outputs(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every output tensor start as NaN, so that what is not written shows.

    What a boundary hands to the mixes starts so once: calls share that memory, and the
    inputs of each are new.
    """
    launcher = rank._launcher
    outputs: Callable[[int], Any] = launcher.outputs
    launcher._mix.fill_(float("nan"))

    def poisoned_outputs(m: int) -> Any:
        tensors = outputs(m)
        for tensor in tensors:
            tensor.fill_(float("nan"))
        return tensors

    monkeypatch.setattr(launcher, "outputs", poisoned_outputs)


def assert_armed(rank: Any) -> None:
    """Every element of the mailbox is the sentinel, and no cluster is being counted."""
    bits = rank._launcher.mailbox.buffer.view(torch.int16)
    assert int((bits != mailboxes.SENTINEL_BITS).sum()) == 0
    generation, arrivals = rank._launcher.mailbox.state.tolist()
    assert generation in (0, 1, 2)
    assert arrivals == 0


def shared_arguments(inputs: reference.Inputs) -> tuple[torch.Tensor, ...]:
    """The arguments of a boundary behind the published one."""
    return (
        inputs.residual,
        inputs.post,
        inputs.comb,
        inputs.fn,
        inputs.scale,
        inputs.base,
        inputs.norm_weight,
    )


def call_all(ranks: Sequence[Any], inputs: reference.Inputs) -> list[Any]:
    """One boundary on every emulated rank."""
    for rank, part in zip(ranks, inputs.parts, strict=True):
        rank.publish(part)
    return [rank.consume(*shared_arguments(inputs)) for rank in ranks]


def assert_matches(output: Any, expected: reference.BoundaryResult) -> None:
    """The output is within the contract: exact residual bits, bounded rest."""
    assert reference.bits_equal(output.residual, expected.residual)
    layer_input = reference.check_layer_input(output.layer_input, expected)
    assert layer_input.ok, layer_input
    mixes = reference.check_mixes(output.post, output.comb, expected)
    assert mixes.ok, mixes


def assert_same_bits(outputs: Sequence[Any]) -> None:
    """All ranks hold the same bits, NaN being NaN."""
    for other in outputs[1:]:
        for mine, theirs in zip(outputs[0], other, strict=True):
            assert reference.bits_equal(mine, theirs)


FAULTS = (
    "type",
    "dtype",
    "shape",
    "rank",
    "device",
    "strides",
    "alignment",
    "negated",
    "freed",
    "freed with others",
)


def wrong(fault: str, tensor: torch.Tensor) -> tuple[Any, type[Exception]]:
    """An argument with one fault, and the exception that must name it."""
    error = TypeError if fault in ("type", "dtype") else ValueError
    return faulty(fault, tensor, "cpu"), error
