"""The emulator against silicon: the same PTX and inputs on both.

Where only exact instructions are involved the bits agree; tensor-core sums and the
approximate functions differ within bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="needs what the emulator takes plans from")

from mhcgen import reference
from mhcgen.emulator.package import (
    EmulatedPackage,
    EmulatedRanks,
    Output,
    Routed,
    Streams,
    Tensor,
    Weights,
    compile_ptx,
    load_package,
)
from mhcgen.verify.on_cpu import as_numpy, as_torch

from .conftest import (
    GENERATED,
    assert_armed,
    call_all,
    poison_outputs,
    shared_arguments,
)
from .test_one_gpu import HC, TP, H, joined, routed

FINALIZES = ("finalize_fp32_shared_unicast", "finalize_bf16_unicast")
KERNELS = (
    "publish_unicast",
    *FINALIZES,
    "boundary_1",
    "boundary_2",
    "boundary_1_unicast",
    "boundary_2_unicast",
    *(f"boundary_1_{name}" for name in FINALIZES),
    "mixes",
)
NAMES = ("residual", "post", "comb", "fn", "scale", "base", "norm_weight")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> EmulatedPackage:
    """The kernels that the device runs, for the emulator."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90a")
    ptx = tmp_path_factory.mktemp("ptx")
    compile_ptx(GENERATED / "glm53", ["sm_90a"], ptx, KERNELS)
    return load_package(GENERATED / "glm53", "sm_90a", ptx)


def emulated(
    package: EmulatedPackage, inputs: reference.Inputs
) -> tuple[EmulatedRanks, Streams, Weights]:
    ranks = EmulatedRanks(package, "unicast")
    tensors = [ranks.tensor(n, as_numpy(getattr(inputs, n))) for n in NAMES]
    return ranks, Streams(*tensors[:3]), Weights(*tensors[3:])


def largest(ours: Tensor, theirs: torch.Tensor) -> float:
    """The largest difference; NaN agrees with NaN."""
    a, b = as_torch(ours.read(0)).double(), theirs.cpu().double()
    return reference.max_abs_error(a.reshape(b.shape), b)


@pytest.mark.parametrize("hard", reference.VARIANTS)
@pytest.mark.parametrize("m", [1, 3, 17])
def test_boundary(ranks: Sequence[Any], package: Any, m: int, hard: Any) -> None:
    inputs = reference.random_inputs(m, H, HC, TP, 40 + m, "cpu", hard)
    on_gpu = reference.random_inputs(m, H, HC, TP, 40 + m, "cuda", hard)
    device = call_all(ranks, on_gpu)[0]
    joined(ranks)
    machine, streams, weights = emulated(package, inputs)
    machine.publish(machine.tensor("x", *map(as_numpy, inputs.parts)))
    output = machine.consume(streams, weights)
    machine.run()
    assert_agree(output, device)


def assert_agree(output: Output, device: Any) -> None:
    """The residual agrees to the bit, the rest within bounds."""
    residual = as_torch(output.streams.residual.read(0))
    assert reference.bits_equal(residual, device.residual.cpu())
    layer_input = as_torch(output.layer_input.read(0))
    distance = reference.ulp_distance(layer_input, device.layer_input.cpu())
    assert int(distance.max()) <= 2
    assert float((distance > 0).double().mean()) < 2e-3
    assert largest(output.streams.post, device.post) < 1e-5
    assert largest(output.streams.comb, device.comb) < 1e-5


@pytest.fixture(scope="module")
def looped() -> Any:
    """One rank that plays all: what it publishes goes to every slot of its mailbox."""
    from mhcgen.runtime.loader import load_loopback

    return load_loopback(GENERATED / "glm53", device=0)


@pytest.fixture
def rank(looped: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    poison_outputs(looped, monkeypatch)
    yield looped
    looped.join()
    torch.cuda.synchronize()
    assert_armed(looped)


@pytest.mark.parametrize("hard", reference.VARIANTS)
@pytest.mark.parametrize("m", [1, 3, 17])
def test_a_boundary_that_publishes(rank: Any, package: Any, m: int, hard: Any) -> None:
    """The rows of all ranks are those of the last, which has the hardest."""
    inputs = reference.random_inputs(m, H, HC, TP, 60 + m, "cpu", hard)
    on_gpu = reference.random_inputs(m, H, HC, TP, 60 + m, "cuda", hard)
    assert rank._launcher.call_kernel(m) is not None
    device = rank(on_gpu.parts[-1], *shared_arguments(on_gpu))
    joined([rank])
    machine, streams, weights = emulated(package, inputs)
    assert machine.publishes(m)
    x = machine.tensor("x", as_numpy(inputs.parts[-1]))
    output = machine.call(x, streams, weights)
    machine.run()
    assert_agree(output, device)


@pytest.mark.parametrize(
    ("dtype", "with_shared"), [(torch.float32, True), (torch.bfloat16, False)]
)
def test_a_boundary_that_finalizes(
    rank: Any, package: Any, dtype: torch.dtype, with_shared: bool
) -> None:
    (arguments, *_) = routed(1, seed=9, dtype=dtype)
    if not with_shared:
        arguments = (*arguments[:3], None)
    inputs = reference.random_inputs(1, H, HC, TP, 70)
    on_gpu = reference.random_inputs(1, H, HC, TP, 70, "cuda")
    device = rank.finalize(*arguments, *shared_arguments(on_gpu))
    joined([rank])
    machine, streams, weights = emulated(package, inputs)
    assert machine.publishes(1, routed=True)
    tensors = [
        None if each is None else machine.tensor(str(i), as_numpy(each.cpu()))
        for i, each in enumerate(arguments)
    ]
    output = machine.call(Routed(*tensors), streams, weights)
    machine.run()
    assert_agree(output, device)


@pytest.mark.parametrize(
    ("dtype", "with_shared"), [(torch.float32, True), (torch.bfloat16, False)]
)
@pytest.mark.parametrize("m", [1, 5])
def test_finalize_bits(
    ranks: Sequence[Any], package: Any, m: int, dtype: torch.dtype, with_shared: bool
) -> None:
    """Finalize uses exact instructions only: what it publishes agrees to the bit."""
    arguments = routed(m, seed=m, dtype=dtype)
    if not with_shared:
        arguments = [(*rest, None) for *rest, _ in arguments]
    for rank, one in zip(ranks, arguments, strict=True):
        rank.publish_finalize(*one)
    torch.cuda.synchronize()
    mailbox = ranks[0]._launcher.mailbox
    sent = mailbox.buffer[int(mailbox.state[0]), :, :m].cpu().clone()
    inputs = reference.random_inputs(m, H, HC, TP, 1, "cuda")
    for rank in ranks:
        rank.consume(*(getattr(inputs, name) for name in NAMES))
    joined(ranks)

    machine, _, _ = emulated(package, reference.random_inputs(m, H, HC, TP, 1))
    columns = list(zip(*arguments, strict=True))
    tensors = [
        None
        if column[0] is None
        else machine.tensor(str(i), *(as_numpy(t.cpu()) for t in column))
        for i, column in enumerate(columns)
    ]
    machine.publish_finalize(Routed(*tensors))
    machine.run()
    emulated_rows = np.stack(list(machine.mailbox(0, 0, m)))
    assert reference.bits_equal(as_torch(emulated_rows), sent)
