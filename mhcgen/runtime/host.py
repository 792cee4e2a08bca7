"""The host side of a package: checks arguments, launches, and keeps the side stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .mailbox import ALIGNMENT, Mailbox

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


class PendingMixes(NamedTuple):
    """Mixes that the side stream may still be computing.

    Holding the tensors keeps the allocator from handing their memory to the main
    stream. ``record_stream`` would make every later allocation poll events.
    """

    captured: bool
    tensors: tuple[torch.Tensor, ...]


class FusedBoundary:
    """One rank's fused boundaries: all calls share one mailbox and one order.

    Every rank must make the same calls in the same order with the same M. Arguments are
    checked before the first launch, and a call that raises has launched nothing.

    Attributes:
        rank: This rank.
        device: Its GPU.
        transport: ``multicast`` or ``unicast``.
        capacity: The largest M.
    """

    def __init__(
        self,
        constants: ModuleType,
        kernels: ModuleType,
        compiled: Mapping[str, Any],
        arch: str,
        mailbox: Mailbox,
    ) -> None:
        """Joins compiled kernels and a mailbox; use the package's ``load``."""
        self.rank = mailbox.rank
        self.device = mailbox.buffer.device
        self.transport = mailbox.transport
        self.capacity: int = constants.CAPACITY
        self._constants = constants
        self._mailbox = mailbox
        self._publish = compiled[kernels.publish_name(mailbox.transport)]
        self._finalize = {
            (ROUTING_DTYPES[dtype], shared): compiled[
                kernels.finalize_name(dtype, shared, mailbox.transport)
            ]
            for dtype in getattr(constants, "ROUTING_WEIGHTS", ())
            for shared in constants.SHARED_EXPERT
        }
        self._boundaries = {
            row.max_tokens: compiled[kernels.boundary_name(row.size)]
            for row in constants.TARGETS[arch].token_groups
        }
        self._mixes = compiled["mixes"]
        # Each boundary joins the mixes before it, so one buffer serves every call.
        self._mix = torch.empty(
            (constants.CAPACITY, constants.MIX),
            dtype=torch.float32,
            device=self.device,
        )
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._boundary_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._mixes_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pending: PendingMixes | None = None

    def supports(self, m: int) -> bool:
        """Whether a call may have ``m`` tokens."""
        return 0 <= m <= self.capacity

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """All-reduces ``x`` and takes it through the boundary.

        Args:
            x: [M, H] BF16, this rank's partial output of the sublayer.
            residual: [M, HC, H] BF16.
            post: [M, HC, 1] FP32.
            comb: [M, HC, HC] FP32, [source, target].
            fn: [MIX, HC * H] BF16, rows pre, post, comb; columns stream-major.
            scale: [3] FP32: pre, post, comb.
            base: [MIX] FP32.
            norm_weight: [H] BF16.

        Returns:
            The outputs; empty where M is 0.

        Raises:
            TypeError: An argument is no tensor or has another dtype.
            ValueError: A shape, device, layout or alignment is not as above, or M
                exceeds the capacity.
            RuntimeError: The mixes of a call outside of a graph capture are still
                outstanding inside of it.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        m = self._check_x(x)
        self._check_boundary(m, inputs)
        return self._run(m, partial(self._launch_publish, x), inputs)

    def finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """Closes a MoE layer's routed sum and takes it through the boundary.

        Args:
            gemm2_permuted: [rows, H] BF16, the experts' output rows on this rank.
            expert_weights: [M, top_k] FP32 or BF16.
            expanded_idx_to_permuted_idx: [M, top_k] int32: rows of
                ``gemm2_permuted``, or -1 where the expert is not on this rank. The
                indices are not checked against the number of rows.
            shared_output: [M, H] BF16 of the shared expert, or None.
            residual: As in a call; so are the rest, the result and the errors.
            post: As in a call.
            comb: As in a call.
            fn: As in a call.
            scale: As in a call.
            base: As in a call.
            norm_weight: As in a call.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        m = self._check_routed(routed)
        self._check_boundary(m, inputs)
        return self._run(m, partial(self._launch_finalize, routed), inputs)

    def join(self) -> None:
        """Makes the current stream wait for the mixes of the last call.

        Call it before anything but the next boundary reads ``post`` or ``comb``, and
        before a graph capture begins or ends.

        Raises:
            RuntimeError: The mixes were launched before the capture that is going on.
        """
        pending = self._pending
        if pending is None:
            return
        with self._on_device():
            captured = torch.cuda.is_current_stream_capturing()
            if captured and not pending.captured:
                raise RuntimeError(
                    "the mixes of a call before this graph capture are outstanding: "
                    "call join() before the capture begins"
                )
            self._pending = None
            # Otherwise a capture ended without a join: torch refused its graph, and
            # nothing is running.
            if captured == pending.captured:
                torch.cuda.current_stream().wait_event(self._mixes_done)

    def publish(self, x: torch.Tensor) -> None:
        """The first half of a call alone; ``consume`` must follow.

        Only for several ranks on one device, where all publish before any consumes. The
        argument and the errors are those of a call.
        """
        if self._check_x(x):
            with self._on_device():
                self.join()
                self._launch_publish(x)

    def publish_finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
    ) -> None:
        """The first half of ``finalize`` alone; ``consume`` must follow."""
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        if self._check_routed(routed):
            with self._on_device():
                self.join()
                self._launch_finalize(routed)

    def consume(
        self,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor,
    ) -> BoundaryOutput:
        """The second half of a call or of ``finalize``; M is that of ``residual``.

        The arguments, the result and the errors are those of a call, but an error after
        a publish leaves the mailbox unusable.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight)
        m = rows_of(residual)
        self._check_capacity("residual", m)
        self._check_boundary(m, inputs)
        outputs = self._outputs(m)
        if m:
            with self._on_device():
                self._launch_boundary(self._boundary(m), inputs, outputs)
        return outputs

    def _run(
        self, m: int, launch_publish: Callable[[], None], inputs: BoundaryInput
    ) -> BoundaryOutput:
        """Launches a checked call: what can fail comes before the publish."""
        if m == 0:
            return self._outputs(0)
        with self._on_device():
            self.join()
            outputs = self._outputs(m)
            launch_publish()
            self._launch_boundary(self._boundary(m), inputs, outputs)
        return outputs

    def _on_device(self) -> AbstractContextManager[Any]:
        """Makes the device current where it is not; that takes a while."""
        if torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _outputs(self, m: int) -> BoundaryOutput:
        c = self._constants
        empty = partial(torch.empty, device=self.device)
        return BoundaryOutput(
            residual=empty((m, c.HC, c.HIDDEN), dtype=torch.bfloat16),
            post=empty((m, c.HC, 1), dtype=torch.float32),
            comb=empty((m, c.HC, c.HC), dtype=torch.float32),
            layer_input=empty((m, c.HIDDEN), dtype=torch.bfloat16),
        )

    def _boundary(self, m: int) -> Any:
        """The boundary kernel for a call of ``m`` tokens."""
        return next(
            kernel for tokens, kernel in self._boundaries.items() if m <= tokens
        )

    def _launch_publish(self, x: torch.Tensor) -> None:
        mailbox = self._mailbox
        self._publish(x, mailbox.addresses, mailbox.state, mailbox.rank)

    def _launch_finalize(self, routed: RoutedInput) -> None:
        mailbox = self._mailbox
        shared = routed.shared_output is not None
        kernel = self._finalize[routed.expert_weights.dtype, shared]
        kernel(*routed, mailbox.addresses, mailbox.state, mailbox.rank)

    def _launch_boundary(
        self, kernel: Any, inputs: BoundaryInput, outputs: BoundaryOutput
    ) -> None:
        """Launches a boundary, and its mixes on the side stream."""
        mix = self._mix[: outputs.residual.shape[0]]
        kernel(
            *inputs,
            self._mailbox.buffer,
            self._mailbox.state,
            outputs.residual,
            mix,
            outputs.layer_input,
        )
        self._boundary_done.record(torch.cuda.current_stream())
        self._side.wait_event(self._boundary_done)
        # The stream is an argument: to make it current would cost more than the launch.
        self._mixes(
            mix,
            inputs.scale,
            inputs.base,
            outputs.post,
            outputs.comb,
            self._side.cuda_stream,
        )
        self._mixes_done.record(self._side)
        self._pending = PendingMixes(
            torch.cuda.is_current_stream_capturing(),
            (inputs.scale, inputs.base, outputs.post, outputs.comb),
        )

    def _warm_publish(self, turn: int) -> None:
        """Launches publish kernel number ``turn``, round and round, with zeros."""
        c = self._constants
        zeros = partial(torch.zeros, device=self.device)
        row = zeros((1, c.HIDDEN), dtype=torch.bfloat16)
        self.join()
        variants = [None, *self._finalize]
        variant = variants[turn % len(variants)]
        if variant is None:
            self._launch_publish(row)
            return
        dtype, shared = variant
        weights = zeros((1, c.TOP_K), dtype=dtype)
        absent = zeros((1, c.TOP_K), dtype=torch.int32) - 1
        self._launch_finalize(
            RoutedInput(row, weights, absent, row if shared else None)
        )

    def _warm_boundary(self, turn: int) -> None:
        """Launches boundary kernel number ``turn``, round and round, with zeros."""
        c = self._constants
        zeros = partial(torch.zeros, device=self.device)
        bf16, fp32 = torch.bfloat16, torch.float32
        inputs = BoundaryInput(
            residual=zeros((1, c.HC, c.HIDDEN), dtype=bf16),
            post=zeros((1, c.HC, 1), dtype=fp32),
            comb=zeros((1, c.HC, c.HC), dtype=fp32),
            fn=zeros((c.MIX, c.HC * c.HIDDEN), dtype=bf16),
            scale=zeros((3,), dtype=fp32),
            base=zeros((c.MIX,), dtype=fp32),
            norm_weight=zeros((c.HIDDEN,), dtype=bf16),
        )
        kernels = list(self._boundaries.values())
        self._launch_boundary(kernels[turn % len(kernels)], inputs, self._outputs(1))

    def _check_x(self, x: torch.Tensor) -> int:
        """Checks x and returns M."""
        m = rows_of(x)
        self._check_capacity("x", m)
        self._check_tensor("x", x, torch.bfloat16, (m, self._constants.HIDDEN))
        return m

    def _check_routed(self, routed: RoutedInput) -> int:
        """Checks the arguments of finalize alone and returns M."""
        c = self._constants
        if not self._finalize:
            raise RuntimeError(
                "this package has no finalize kernels: add a moe section to its spec"
            )
        weights = routed.expert_weights
        m = rows_of(weights)
        self._check_capacity("expert_weights", m)
        dtype = getattr(weights, "dtype", None)
        dtypes = [ROUTING_DTYPES[name] for name in c.ROUTING_WEIGHTS]
        if isinstance(weights, torch.Tensor) and dtype not in dtypes:
            allowed = " or ".join(map(str, dtypes))
            raise TypeError(f"expert_weights has dtype {dtype}; it must be {allowed}")
        self._check_tensor("expert_weights", weights, dtype, (m, c.TOP_K))
        self._check_tensor(
            "expanded_idx_to_permuted_idx",
            routed.expanded_idx_to_permuted_idx,
            torch.int32,
            (m, c.TOP_K),
        )
        self._check_tensor(
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
            self._check_tensor(
                "shared_output", routed.shared_output, torch.bfloat16, (m, c.HIDDEN)
            )
        return m

    def _check_boundary(self, m: int, inputs: BoundaryInput) -> None:
        """Checks the arguments that a call and finalize share."""
        c = self._constants
        check = self._check_tensor
        bf16, fp32 = torch.bfloat16, torch.float32
        check("residual", inputs.residual, bf16, (m, c.HC, c.HIDDEN))
        check("post", inputs.post, fp32, (m, c.HC, 1))
        check("comb", inputs.comb, fp32, (m, c.HC, c.HC))
        check("fn", inputs.fn, bf16, (c.MIX, c.HC * c.HIDDEN))
        check("scale", inputs.scale, fp32, (3,))
        check("base", inputs.base, fp32, (c.MIX,))
        check("norm_weight", inputs.norm_weight, bf16, (c.HIDDEN,))

    def _check_capacity(self, name: str, m: int) -> None:
        if not self.supports(m):
            raise ValueError(
                f"{name} has {m} tokens; this package takes 0 to {self.capacity}: "
                "split the call, or raise capacity.max_tokens of the spec"
            )

    def _check_tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype | None,
        shape: tuple[int, ...],
    ) -> None:
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
        if tensor.device != self.device:
            raise ValueError(
                f"{name} is on {tensor.device}; it must be on {self.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}; it must be contiguous: pass "
                f"{name}.contiguous()"
            )
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} starts at {tensor.data_ptr():#x}; it must start at a multiple "
                f"of {ALIGNMENT} bytes: pass {name}.clone()"
            )


def rows_of(tensor: object) -> int:
    """Rows of a tensor; 0 for what is none, which a later check refuses."""
    if isinstance(tensor, torch.Tensor) and tensor.dim():
        return tensor.shape[0]
    return 0


def warm_up(ranks: list[FusedBoundary]) -> None:
    """Launches every kernel once with a token of zeros: collective over the ranks.

    Modules load on their first launch, which a graph capture would refuse; and a
    transport that does not work fails here instead of in service.

    Args:
        ranks: This process's rank, or all ranks where one device plays them.
    """
    turns = max(len(ranks[0]._finalize) + 1, len(ranks[0]._boundaries))
    for turn in range(turns):
        for rank in ranks:
            rank._warm_publish(turn)
        for rank in ranks:
            rank._warm_boundary(turn)
    for rank in ranks:
        rank.join()
        torch.cuda.synchronize(rank.device)
