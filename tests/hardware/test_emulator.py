"""The emulator against silicon: the same PTX and inputs on both.

Where only exact instructions are involved the bits agree; tensor-core sums and the
approximate functions differ within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mhcgen import reference
from mhcgen.emulator.package import (
    EmulatedPackage,
    EmulatedRanks,
    Routed,
    Streams,
    Tensor,
    Weights,
    compile_ptx,
    load_package,
)
from mhcgen.verify import as_numpy, as_torch

from .conftest import GENERATED, call_all
from .test_one_gpu import HC, TP, H, joined, routed

KERNELS = (
    "publish_unicast",
    "finalize_fp32_shared_unicast",
    "finalize_bf16_unicast",
    "boundary",
    "grouped_boundary_2",
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
    machine.join()
    machine.run()
    residual = as_torch(output.streams.residual.read(0))
    assert reference.bits_equal(residual, device.residual.cpu())
    layer_input = as_torch(output.layer_input.read(0))
    distance = reference.ulp_distance(layer_input, device.layer_input.cpu())
    assert int(distance.max()) <= 2
    assert float((distance > 0).double().mean()) < 2e-3
    assert largest(output.streams.post, device.post) < 1e-5
    assert largest(output.streams.comb, device.comb) < 1e-5


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
