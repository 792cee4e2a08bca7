"""What boundaries take and return, and the checks before anything is launched."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .mailbox import ALIGNMENT

ROUTING_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BoundaryOutput(NamedTuple):
    """What a boundary returns.

    Attributes:
        residual: [M, HC, H] BF16, the new residual streams.
        post: [M, HC, 1] FP32, the next boundary's post-mix.
        comb: [M, HC, HC] FP32, the next boundary's residual mix, [source, target].
        layer_input: [M, H] BF16, the next sublayer's normalized input.

    ``post`` and ``comb`` are written on a side stream: call ``join()`` before anything
    but the next boundary of the same object reads them.
    """

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    layer_input: torch.Tensor


class BoundaryInput(NamedTuple):
    """The arguments that every boundary takes, whatever was published before it."""

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor


class RoutedInput(NamedTuple):
    """The arguments of finalize alone."""

    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    shared_output: torch.Tensor | None


class Checks:
    """The checks of a package's arguments, for one device.

    Each raises TypeError where an argument is no tensor or has another dtype, and
    ValueError where its shape, device, layout or alignment does not fit.
    """

    def __init__(self, constants: ModuleType, device: torch.device) -> None:
        """Takes the package's ``constants`` module and the rank's GPU."""
        self._constants = constants
        self._device = device
        # A model's boundaries take the same weights each time: those that were checked.
        self._known: dict[tuple[int, ...], list[weakref.ref[object]]] = {}

    def x(self, x: torch.Tensor) -> int:
        """Checks x and returns M."""
        m = rows_of(x)
        self._capacity("x", m)
        self._tensor("x", x, torch.bfloat16, (m, self._constants.HIDDEN))
        return m

    def routed(self, routed: RoutedInput) -> int:
        """Checks the arguments of finalize alone and returns M."""
        c = self._constants
        if not hasattr(c, "TOP_K"):
            raise RuntimeError(
                "this package has no finalize kernels: add a moe section to its spec"
            )
        weights = routed.expert_weights
        m = rows_of(weights)
        self._capacity("expert_weights", m)
        dtypes = [ROUTING_DTYPES[name] for name in c.ROUTING_WEIGHTS]
        dtype = getattr(weights, "dtype", None)
        if isinstance(weights, torch.Tensor) and dtype not in dtypes:
            allowed = " or ".join(map(str, dtypes))
            raise TypeError(f"expert_weights has dtype {dtype}; it must be {allowed}")
        self._tensor("expert_weights", weights, dtype, (m, c.TOP_K))
        self._tensor(
            "expanded_idx_to_permuted_idx",
            routed.expanded_idx_to_permuted_idx,
            torch.int32,
            (m, c.TOP_K),
        )
        self._tensor(
            "gemm2_permuted",
            routed.gemm2_permuted,
            torch.bfloat16,
            (rows_of(routed.gemm2_permuted), c.HIDDEN),
        )
        shared = routed.shared_output is not None
        if shared not in c.SHARED_EXPERT:
            raise ValueError(
                f"shared_output is {'given' if shared else 'None'}, and this package "
                f"is built {'without' if shared else 'with'} a shared expert: see "
                "moe.shared_expert of its spec"
            )
        if routed.shared_output is not None:
            self._tensor(
                "shared_output", routed.shared_output, torch.bfloat16, (m, c.HIDDEN)
            )
        return m

    def boundary(self, m: int, inputs: BoundaryInput) -> None:
        """Checks the arguments that a call and finalize share."""
        c = self._constants
        check = self._tensor
        bf16, fp32 = torch.bfloat16, torch.float32
        check("residual", inputs.residual, bf16, (m, c.HC, c.HIDDEN))
        check("post", inputs.post, fp32, (m, c.HC, 1))
        check("comb", inputs.comb, fp32, (m, c.HC, c.HC))
        weights = (inputs.fn, inputs.scale, inputs.base, inputs.norm_weight)
        known = identity(*weights)
        if known not in self._known:
            check("fn", inputs.fn, bf16, (c.MIX, c.HC * c.HIDDEN))
            check("scale", inputs.scale, fp32, (3,))
            check("base", inputs.base, fp32, (c.MIX,))
            check("norm_weight", inputs.norm_weight, bf16, (c.HIDDEN,))
            self._remember(known, weights)

    def _capacity(self, name: str, m: int) -> None:
        capacity = self._constants.CAPACITY
        if m > capacity:
            raise ValueError(
                f"{name} has {m} tokens; this package takes 0 to {capacity}: split the "
                "call, or raise capacity.max_tokens of the spec"
            )

    def _remember(self, known: tuple[int, ...], weights: Iterable[object]) -> None:
        """Remembers weights that were checked, for as long as all of them live."""

        def forget(_: object) -> None:
            self._known.pop(known, None)

        # Once one is gone, another tensor may have its id.
        self._known[known] = [weakref.ref(weight, forget) for weight in weights]

    def _tensor(
        self, name: str, tensor: Any, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> None:
        # The quick way, for what is as it should be and not empty.
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.device == self._device
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and (address := tensor.data_ptr())
            and not address % ALIGNMENT
        ):
            return
        self._refuse(name, tensor, dtype, shape)

    def _refuse(
        self, name: str, tensor: Any, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> None:
        """Raises the first fault of a tensor; returns if it is empty and has none."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor"
            )
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be {shape}"
            )
        if tensor.device != self._device:
            raise ValueError(
                f"{name} is on {tensor.device}; it must be on {self._device}"
            )
        address = tensor.data_ptr()
        if not tensor.numel():
            # Empty tensors are contiguous whatever their strides; the kernels' own
            # check is stricter, and comes too late.
            if tensor.stride() != torch.empty(shape, device="meta").stride():
                raise ValueError(
                    f"{name} is empty with strides {tensor.stride()}: pass "
                    f"{name}.clone(memory_format=torch.contiguous_format)"
                )
            return
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}; it must be contiguous: pass "
                f"{name}.contiguous()"
            )
        if tensor.is_neg():
            raise ValueError(
                f"{name} is a negated view, not yet computed: pass {name}.resolve_neg()"
            )
        if address == 0:
            raise ValueError(f"{name} has no memory: its storage was freed")
        if address % ALIGNMENT:
            raise ValueError(
                f"{name} starts at {address:#x}; it must start at a multiple of "
                f"{ALIGNMENT} bytes: pass {name}.clone()"
            )


def identity(a: Any, b: Any, c: Any, d: Any) -> tuple[int, ...]:
    """Which tensors these are, and where their memory is; empty if one is none."""
    try:
        ids = id(a), id(b), id(c), id(d)
        return (*ids, a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr())
    except AttributeError:
        return ()


def rows_of(tensor: object) -> int:
    """Rows of a tensor; 0 for what is none, which a later check refuses."""
    if isinstance(tensor, torch.Tensor) and tensor.dim():
        return tensor.shape[0]
    return 0
