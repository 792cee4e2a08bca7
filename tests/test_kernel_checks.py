"""What compiled kernels refuse by themselves, before they launch anything.

Calls in one launch leave the checks of types, shapes, strides, devices and alignment to
them. They are given memory of this host as if it were a GPU's: what nothing is wrong
with gets as far as the CUDA driver.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import tvm_ffi
from cutlass.cute.runtime import load_module

from mhcgen.build import write_files
from mhcgen.plan import make_plan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.runtime import loader
from mhcgen.runtime.compiler import compile_kernel
from mhcgen.runtime.side_stream import Handles
from mhcgen.spec_file import load_spec
from tests.stand_ins import TYPES

KERNELS = ("boundary_1_unicast", "boundary_1_finalize_bf16_shared_unicast")
PACKAGE = "kernel_checks"
TOKENS = 5
CUDA = 2  # DLPack's number of the device

Tensor = torch.Tensor


class Managed(ctypes.Structure):
    """The head of a DLPack tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


class OnGpu:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: Tensor, device: int) -> None:
        self._capsule = torch.utils.dlpack.to_dlpack(tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype = ctypes.c_void_p
        pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        managed = Managed.from_address(pointer(self._capsule, b"dltensor"))
        managed.device_type, managed.device = self._device = CUDA, device

    def __dlpack__(self, **options: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def on_gpu(tensor: Tensor, device: int = 0) -> Any:
    return tvm_ffi.from_dlpack(OnGpu(tensor, device))


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Callable[..., None], list[Any]]]:
    """Publishing boundaries, and what each takes: a tensor, a number or None."""
    folder = tmp_path_factory.mktemp("kernel_checks")
    plan = make_plan(load_spec(resource("specs") / "glm53.yaml").spec)
    (folder / PACKAGE).mkdir()
    write_files(folder / PACKAGE, render(plan, formatting=False))
    name = loader.import_package(folder / PACKAGE)
    kernels = importlib.import_module(f"{name}.kernels").kernels("sm_90a", ("unicast",))
    found = {}
    for name in KERNELS:
        kernel = kernels[name]
        code = folder / f"{name}.o"
        made = compile_kernel(kernel, name, "sm_90a")
        made.export_to_c(object_file_path=str(code), function_name=name)
        # Without a GPU, only what was kept can be called.
        function = getattr(load_module(str(code), enable_tvm_ffi=True), name)
        found[name] = function, [argument_of(each) for each in kernel.arguments()[:-1]]
    return found


def argument_of(stand_in: Any) -> Any:
    """An argument as a kernel takes it."""
    if stand_in is None:
        return None
    if not hasattr(stand_in, "shape"):
        return 0
    shape = [size if isinstance(size, int) else TOKENS for size in stand_in.shape]
    return torch.zeros(shape, dtype=getattr(torch, TYPES[stand_in.element_type]))


def refusal(
    function: Callable[..., None], arguments: Sequence[Any]
) -> tuple[type[Exception], str]:
    given = [on_gpu(each) if isinstance(each, Tensor) else each for each in arguments]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        function(*given)
    return caught.type, str(caught.value)


OF_THE_SAME_WIDTH = {
    torch.bfloat16: torch.float16,
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.int64: torch.float64,
}
WIDER = {2: torch.float32, 4: torch.float64, 8: torch.complex128}
FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "absent": lambda tensor: None,
    "a number": lambda tensor: 7,
    "dtype": lambda tensor: tensor.view(OF_THE_SAME_WIDTH[tensor.dtype]),
    "width": lambda tensor: tensor.to(WIDER[tensor.itemsize]),
    "wide": lambda tensor: torch.cat([tensor, tensor], dim=-1),
    "long": lambda tensor: torch.cat([tensor, tensor]),
    "rank": lambda tensor: tensor.unsqueeze(0),
    "strides": lambda tensor: torch.cat([tensor, tensor], dim=-1)[..., ::2],
    "alignment": lambda tensor: tensor.new_zeros(tensor.numel() + 1)[1:].view(
        tensor.shape
    ),
    "device": lambda tensor: on_gpu(tensor, 1),
    "no GPU": tvm_ffi.from_dlpack,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_refuses_every_fault(
    compiled: dict[str, Any], name: str, fault: str
) -> None:
    """Of each tensor, beside the rows of experts, which may be any number."""
    function, arguments = compiled[name]
    tensors = [
        place for place, each in enumerate(arguments) if isinstance(each, Tensor)
    ]
    assert len(tensors) >= 14
    for place in tensors:
        if fault == "long" and place == 1:
            assert arguments[0] is None, "gemm2_permuted"
            continue
        wrong = list(arguments)
        wrong[place] = FAULTS[fault](arguments[place])
        error, message = refusal(function, wrong)
        assert error in (TypeError, ValueError), (place, message)
        assert message.startswith(("Mismatched", "Misaligned")), (place, message)
        if fault in ("dtype", "width"):
            assert "expected dtype" in message, message


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU: it would launch"
)
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_of_a_longer_tensor_is_as_good_as_any(
    compiled: dict[str, Any], name: str
) -> None:
    """A token's stride is never used where it is the only one."""
    function, arguments = compiled[name]
    single = list(arguments)
    for place, each in enumerate(arguments):
        if isinstance(each, Tensor) and len(each) == TOKENS:
            single[place] = torch.cat([each, each], dim=1)[:1, : each.shape[1]]
            assert single[place].stride(0) != each.stride(0)
    error, message = refusal(function, single)
    assert error is RuntimeError and "Cuda" in message, message


def test_the_mixes_are_launched_between_their_events(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the boundary, beside the stream of the call, and before its next wait."""
    mixes = sys.modules[f"{PACKAGE}.mixes"]
    log: list[tuple[str, Any, Any]] = []

    def logged(name: str) -> Callable[[Any, Any], None]:
        real = getattr(mixes, name)

        def call(first: Any, second: Any) -> None:
            log.append((name, first, second))
            real(first, second)

        return call

    launched = mixes.Mixes()
    taken = list(inspect.signature(mixes.Mixes.__call__).parameters)[-4:]
    assert taken == ["boundary_done", "mixes_done", "side_stream", "stream"]
    assert Handles._fields == ("boundary_done", "mixes_done", "stream")
    for name in ("record", "wait"):
        monkeypatch.setattr(mixes, name, logged(name))
    compile_kernel(launched, "mixes", "sm_90a")
    (first, done, stream), (second, side, waited), (third, after, beside) = log
    assert (first, second, third) == ("record", "wait", "record")
    assert done is waited and after is not done
    assert beside is side and stream is not side
