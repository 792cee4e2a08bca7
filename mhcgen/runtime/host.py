"""The host side of a package: one rank's boundaries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from .arguments import (
    BoundaryInput,
    BoundaryOutput,
    Checks,
    EntryInput,
    ExitInput,
    RoutedInput,
    rows_of,
)
from .launcher import Launcher
from .side_stream import SideStream, Turn

NOTHING = nullcontext()
# What a launch raises before it launches anything.
REFUSALS = (AttributeError, TypeError, ValueError)

Mix = TypeVar("Mix", torch.Tensor, torch.Tensor | None)


class Published(NamedTuple):
    """Rows that were published and not consumed yet, and what publish reads.

    Attributes:
        m: How many.
        tensors: What publish reads.
        alone: It was launched alone: ``consume`` or ``consume_exit`` is to follow.
    """

    m: int
    tensors: tuple[torch.Tensor | None, ...]
    alone: bool = False

    def named(self) -> dict[str, torch.Tensor | None]:
        """What publish reads, by the names of arguments."""
        names = ("x",) if len(self.tensors) == 1 else RoutedInput._fields
        return dict(zip(names, self.tensors, strict=True))


class FusedBoundary:
    """One rank's fused boundaries: all calls share one mailbox and one order.

    Every rank must make the same calls in the same order with the same M. Arguments are
    checked before the first launch, and a call that they stop has launched nothing.

    Kernels of others that run between two calls and are launched with programmatic
    dependent launch must wait for their predecessor (``griddepcontrol.wait``): what
    never waits may end before a boundary that it follows.

    Attributes:
        rank: This rank.
        device: Its GPU.
        transport: ``multicast`` or ``unicast``; ``local`` for one rank alone.
        capacity: The largest M.
    """

    def __init__(self, launcher: Launcher) -> None:
        """Takes kernels that were launched before; use the package's ``load``."""
        mailbox = launcher.mailbox
        self.rank = mailbox.rank
        self.device = mailbox.buffer.device
        self.transport = mailbox.transport
        self.capacity: int = launcher.constants.CAPACITY
        self._launcher = launcher
        self._checks = Checks(launcher.constants, self.device)
        self._side = (
            None if launcher.constants.MIXES == "tail" else SideStream(self.device)
        )
        self._published: Published | None = None

    def supports(self, m: int) -> bool:
        """Whether a call may have ``m`` tokens."""
        return 0 <= m <= self.capacity

    def launches(self, m: int) -> int:
        """Launches of a call of ``m`` tokens, mixes not counted.

        1 where the boundary publishes its own rows, which takes all of its clusters to
        run at once on this GPU; 2 where a publish comes first; 0 without tokens. A
        ``finalize`` takes one launch for few tokens alone.

        Raises:
            ValueError: A call cannot have ``m`` tokens.
        """
        self._check_supported(m)
        if m == 0:
            return 0
        return 2 if self._launcher.call_kernel(m) is None else 1

    def outputs(self, m: int) -> BoundaryOutput:
        """Memory for the outputs of ``m`` tokens, to be given to calls as ``out``.

        Mixes on the side stream write it as well, after the call: before it is reused
        for anything else, or goes to another stream, call ``join()``.

        Raises:
            TypeError: ``m`` is no int.
            ValueError: A call cannot have ``m`` tokens.
        """
        self._check_supported(m)
        return self._launcher.outputs(m)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor | None,
        pre: torch.Tensor | None = None,
        *,
        out: BoundaryOutput | None = None,
    ) -> BoundaryOutput:
        """All-reduces ``x`` and takes it through the boundary.

        Args:
            x: [M, H] activations, this rank's partial output of the sublayer.
            residual: [M, HC, H] activations.
            post: [M, HC, 1] FP32.
            comb: [M, HC, HC] FP32, [source, target].
            fn: [MIX, HC * H] BF16 or FP32, as the spec says; rows pre, post, comb;
                columns stream-major.
            scale: [3] FP32: pre, post, comb.
            base: [MIX] FP32.
            norm_weight: [H] activations; None where the norm has no weight.
            pre: [M, HC] FP32, the last boundary's ``pre`` where the pre-mix is delayed;
                None where it is fresh.
            out: Memory for the outputs, as ``outputs`` makes it: to give the same again
                is quicker than to allocate. Its ``residual``, ``post``, ``comb`` and
                ``pre`` may be those that the call takes; nothing else may overlap it.

        Returns:
            The outputs, ``out`` if it is given; empty where M is 0.

        Raises:
            TypeError: An argument is no tensor or has another dtype.
            ValueError: A shape, device, layout or alignment is not as above, M exceeds
                the capacity, ``out`` overlaps another argument, or an argument is given
                that the package does not take.
            RuntimeError: The mixes of a call outside of a graph capture are still
                outstanding inside of it; rows that ``publish`` sent were not consumed;
                or an earlier call broke off half-way.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight, pre)
        launcher, check = self._launcher, self._checks.call
        m = rows_of(x)
        kernel = launcher.call_kernel(m)
        if kernel is None or not self._checks.plain((x,), inputs, out):
            check(x, inputs, out)
        if kernel is None:
            publish = partial(launcher.publish, x)
            return self._run(Published(m, (x,)), publish, inputs, out)
        rows = launcher.published(x)
        return self._run_whole(m, kernel, rows, inputs, out, partial(check, x))

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
        norm_weight: torch.Tensor | None,
        pre: torch.Tensor | None = None,
        *,
        out: BoundaryOutput | None = None,
    ) -> BoundaryOutput:
        """Closes a MoE layer's routed sum and takes it through the boundary.

        Args:
            gemm2_permuted: [rows, H] activations, the experts' output rows on this
                rank.
            expert_weights: [M, top_k] FP32 or BF16.
            expanded_idx_to_permuted_idx: [M, top_k] int32: rows of
                ``gemm2_permuted``, or -1 where the expert is not on this rank. The
                indices are not checked against the number of rows.
            shared_output: [M, H] activations of the shared expert, or None.
            residual: As in a call; so are the rest, the result and the errors.
            post: As in a call.
            comb: As in a call.
            fn: As in a call.
            scale: As in a call.
            base: As in a call.
            norm_weight: As in a call.
            pre: As in a call.
            out: As in a call.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight, pre)
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        launcher, check = self._launcher, self._checks.finalize
        m = rows_of(expert_weights)
        kernel = launcher.finalize_kernel(m, routed)
        if kernel is None or not self._checks.plain_routed(routed, inputs, out):
            check(routed, inputs, out)
        if kernel is None:
            publish = partial(launcher.finalize, routed, launcher.closed_rows(m))
            return self._run(Published(m, routed), publish, inputs, out)
        rows = launcher.closed(routed)
        return self._run_whole(m, kernel, rows, inputs, out, partial(check, routed))

    def entry(
        self,
        hidden: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        out: BoundaryOutput | None = None,
    ) -> BoundaryOutput:
        """Enters the network: every stream is the hidden state, and mixes follow.

        Ranks need not meet here: each computes the same. There is no boundary before,
        so the collapse uses the entry's own pre-mix; a delayed one is returned as well,
        for the next boundary.

        Args:
            hidden: [M, H] activations, the same on all ranks.
            fn: As in a call; so are the rest, the result and the errors.
            scale: As in a call.
            base: As in a call.
            norm_weight: As in a call.
            out: As in a call; nothing may overlap it.
        """
        inputs = EntryInput(hidden, fn, scale, base, norm_weight)
        launcher = self._launcher
        m = self._checks.entry(inputs, out)
        outputs = self._outputs(m, out)
        if m:
            with self._on_device():
                turn = self._begin()
                mix = of_graph(turn, launcher.entry_mix(m))
                self._hold(turn, inputs, outputs, mix)
                launcher.entry(inputs, outputs, mix)
                launcher.mixes(mix, inputs, outputs, self._side)
        return outputs

    def exit(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        pre: torch.Tensor | None = None,
        head_fn: torch.Tensor | None = None,
        head_scale: torch.Tensor | None = None,
        head_base: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Leaves the network: all-reduces ``x``, and collapses the last streams.

        Args:
            x: As in a call; so are the rest and the errors, if not said otherwise.
            residual: As in a call.
            post: As in a call.
            comb: As in a call.
            norm_weight: As in a call: the weight of the final norm.
            pre: [M, HC] FP32, the last boundary's, for an exit by pre-mix; else None.
            head_fn: [HC, HC * H] of the dtype of ``fn``, for an exit by a sigmoid head;
                else None.
            head_scale: [1] FP32, likewise.
            head_base: [HC] FP32, likewise.
            out: Memory for the result, which no argument may overlap; or None.

        Returns:
            [M, H] activations: the collapsed streams, normalized; ``out`` if given.
        """
        inputs = ExitInput(
            residual, post, comb, norm_weight, pre, head_fn, head_scale, head_base
        )
        self._checks.has_exit()
        m = self._checks.x(x)
        self._checks.exit(m, inputs, out, {"x": x})
        publish = partial(self._launcher.publish, x)
        return self._run_exit(Published(m, (x,)), publish, inputs, out)

    def exit_finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        pre: torch.Tensor | None = None,
        head_fn: torch.Tensor | None = None,
        head_scale: torch.Tensor | None = None,
        head_base: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Closes the last MoE layer's routed sum and leaves the network.

        Args:
            gemm2_permuted: As in ``finalize``.
            expert_weights: As in ``finalize``.
            expanded_idx_to_permuted_idx: As in ``finalize``.
            shared_output: As in ``finalize``.
            residual: As in ``exit``; so are the rest, the result and the errors.
            post: As in ``exit``.
            comb: As in ``exit``.
            norm_weight: As in ``exit``.
            pre: As in ``exit``.
            head_fn: As in ``exit``.
            head_scale: As in ``exit``.
            head_base: As in ``exit``.
            out: As in ``exit``.
        """
        inputs = ExitInput(
            residual, post, comb, norm_weight, pre, head_fn, head_scale, head_base
        )
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        self._checks.has_exit()
        m = self._checks.routed(routed)
        self._checks.exit(m, inputs, out, routed._asdict())
        launcher = self._launcher
        finalize = partial(launcher.finalize, routed, launcher.closed_rows(m))
        return self._run_exit(Published(m, routed), finalize, inputs, out)

    def join(self) -> None:
        """Makes the current stream wait for the mixes of the last call.

        Call it before anything but the next boundary, a replayed graph included, reads,
        writes or reuses ``post``, ``comb`` or ``pre``, and before a graph capture
        begins or ends. After a capture that failed, call it once outside of any
        capture. Does nothing where boundaries compute the mixes themselves.

        Raises:
            RuntimeError: The mixes were launched before the capture that is going on.
        """
        side = self._side
        if side is not None and side.pending is not None:
            with self._on_device():
                side.join()

    def publish(self, x: torch.Tensor) -> None:
        """The first half of a call or an exit alone; the second must follow.

        That is ``consume`` or ``consume_exit``. Only for several ranks on one device,
        where all publish before any consumes. One rank alone launches nothing here: it
        keeps ``x``. The argument and the errors are those of a call.
        """
        m = self._checks.x(x)
        self._publish_alone(Published(m, (x,)), partial(self._launcher.publish, x))

    def publish_finalize(
        self,
        gemm2_permuted: torch.Tensor,
        expert_weights: torch.Tensor,
        expanded_idx_to_permuted_idx: torch.Tensor,
        shared_output: torch.Tensor | None,
    ) -> None:
        """The first half of ``finalize``, or of ``exit_finalize``, alone."""
        routed = RoutedInput(
            gemm2_permuted, expert_weights, expanded_idx_to_permuted_idx, shared_output
        )
        launcher, m = self._launcher, self._checks.routed(routed)
        finalize = partial(launcher.finalize, routed, launcher.closed_rows(m))
        self._publish_alone(Published(m, routed), finalize)

    def consume(
        self,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_weight: torch.Tensor | None,
        pre: torch.Tensor | None = None,
        *,
        out: BoundaryOutput | None = None,
    ) -> BoundaryOutput:
        """The second half of a call or of ``finalize``, with the M of the first.

        The arguments, the result and the errors are those of a call.
        """
        inputs = BoundaryInput(residual, post, comb, fn, scale, base, norm_weight, pre)
        m = rows_of(residual)
        self._checks.consume(m, inputs, out, self._published_rows())
        self._check_published(m)
        outputs = self._outputs(m, out)
        if m:
            with self._on_device():
                self._launch_boundary(self._await_mixes(), inputs, outputs)
        return outputs

    def consume_exit(
        self,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        norm_weight: torch.Tensor | None,
        *,
        pre: torch.Tensor | None = None,
        head_fn: torch.Tensor | None = None,
        head_scale: torch.Tensor | None = None,
        head_base: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The second half of an exit, with the M of the first.

        The arguments, the result and the errors are those of ``exit``.
        """
        inputs = ExitInput(
            residual, post, comb, norm_weight, pre, head_fn, head_scale, head_base
        )
        m = rows_of(residual)
        self._checks.exit(m, inputs, out, self._published_rows())
        self._check_published(m)
        output = self._launcher.exit_output(m) if out is None else out
        if m:
            with self._on_device():
                self._await_mixes()
                self._launch_exit(inputs, output)
        return output

    def _check_supported(self, m: int) -> None:
        """Makes sure that a call may have ``m`` tokens."""
        if not isinstance(m, int):
            raise TypeError(f"m is a {type(m).__name__}; it must be an int")
        if not self.supports(m):
            raise ValueError(f"m is {m}; this package takes 0 to {self.capacity}")

    def _check_unbroken(self) -> None:
        """Makes sure that no earlier call broke off."""
        if self._published is not None and not self._published.alone:
            raise RuntimeError(
                "an earlier call broke off half-way, and the ranks no longer agree: "
                "load the package again on all ranks"
            )

    def _published_rows(self) -> dict[str, torch.Tensor | None]:
        """What was published and is to be consumed, by name."""
        self._check_unbroken()
        return {} if self._published is None else self._published.named()

    def _check_published(self, m: int) -> None:
        """Makes sure that as many tokens were published as are to be consumed."""
        published = 0 if self._published is None else self._published.m
        if m != published:
            raise ValueError(
                f"residual has {m} tokens, and {published} were published before"
            )

    def _outputs(self, m: int, out: BoundaryOutput | None) -> BoundaryOutput:
        """What a call of ``m`` tokens writes: what is given, or new memory."""
        return self._launcher.outputs(m) if out is None else out

    def _run_whole(
        self,
        m: int,
        kernel: Any,
        rows: tuple[Any, ...],
        inputs: BoundaryInput,
        out: BoundaryOutput | None,
        check: Callable[[BoundaryInput, BoundaryOutput | None], int],
    ) -> BoundaryOutput:
        """Launches a call in one launch, which checks the arguments.

        Args:
            m: Tokens.
            kernel: The boundary.
            rows: What it publishes.
            inputs: The other arguments.
            out: The outputs, if they are given.
            check: Names what the launch found wrong with the arguments.
        """
        launcher, outputs = self._launcher, self._outputs(m, out)
        with self._on_device():
            turn = self._begin()
            mix = of_graph(turn, launcher.mix(m))
            try:
                launcher.call(kernel, rows, inputs, outputs, mix, self._side)
            except REFUSALS:
                name_fault(partial(check, inputs, out))
                raise
            except BaseException:
                # Nobody knows what of it was launched.
                self._published = Published(m, ())
                self._hold(turn, inputs, outputs, mix)
                raise
            self._hold(turn, inputs, outputs, mix)
        return outputs

    def _run(
        self,
        published: Published,
        launch: Callable[[], None],
        inputs: BoundaryInput,
        out: BoundaryOutput | None,
    ) -> BoundaryOutput:
        """Launches a checked call: memory is allocated before the publish."""
        outputs = self._outputs(published.m, out)
        if published.m:
            with self._on_device():
                turn = self._publish(published, launch)
                self._launch_boundary(turn, inputs, outputs)
        return outputs

    def _run_exit(
        self,
        published: Published,
        launch: Callable[[], None],
        inputs: ExitInput,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launches a checked exit: memory is allocated before the publish."""
        output = self._launcher.exit_output(published.m) if out is None else out
        if published.m:
            with self._on_device():
                self._publish(published, launch)
                self._launch_exit(inputs, output)
        return output

    def _launch_exit(self, inputs: ExitInput, output: torch.Tensor) -> None:
        """Launches an exit on the current stream."""
        self._launcher.exit(inputs, output)
        self._published = None
        if self._side is not None:
            self._side.let_go()

    def _publish_alone(self, published: Published, launch: Callable[[], None]) -> None:
        """Launches a checked publish without its boundary."""
        if published.m:
            with self._on_device():
                self._publish(published, launch)
            self._published = published._replace(alone=True)

    def _publish(self, published: Published, launch: Callable[[], None]) -> Turn | None:
        """Launches a publish, once the stream waits for the mixes of the last call."""
        turn = self._begin()
        self._published = published
        launch()
        return turn

    def _begin(self) -> Turn | None:
        """Makes the stream wait for the mixes of the last call, and says which it is.

        None without a side stream.
        """
        self._check_unbroken()
        if self._published is not None:
            raise RuntimeError(
                f"{self._published.m} tokens were published and wait to be "
                "consumed: call consume() or consume_exit() first"
            )
        return self._await_mixes()

    def _await_mixes(self) -> Turn | None:
        """Makes the stream wait for the mixes of the last call, if it does not yet."""
        return None if self._side is None else self._side.join()

    def _launch_boundary(
        self, turn: Turn | None, inputs: BoundaryInput, outputs: BoundaryOutput
    ) -> None:
        """Launches a boundary that consumes what was published, and its mixes."""
        launcher, m = self._launcher, inputs.residual.shape[0]
        kernel, mix = launcher.boundary_kernel(m), of_graph(turn, launcher.mix(m))
        self._hold(turn, inputs, outputs, mix)
        launcher.boundary(kernel, inputs, outputs, mix, self._side)
        self._published = None

    def _hold(
        self,
        turn: Turn | None,
        inputs: BoundaryInput | EntryInput,
        outputs: BoundaryOutput,
        mix: torch.Tensor | None,
    ) -> None:
        """Keeps what mixes use on a side stream."""
        if turn is not None and self._side is not None and mix is not None:
            written = self._launcher.mix_outputs(outputs)
            self._side.hold(turn, (mix, inputs.scale, inputs.base, *written))

    def _on_device(self) -> AbstractContextManager[Any]:
        """Makes the device current where it is not; that takes a while."""
        if torch.cuda.current_device() == self.device.index:
            return NOTHING
        return torch.cuda.device(self.device)


def of_graph(turn: Turn | None, mix: Mix) -> Mix:
    """The same memory; in a capture, other memory of the same size.

    A graph's replays do not wait for the mixes of eager calls, which may still read it.
    """
    captured = turn is not None and turn.capture is not None
    return torch.empty_like(mix) if captured and mix is not None else mix


def name_fault(check: Callable[[], object]) -> None:
    """Raises what a check finds wrong, in the place of what a launch found."""
    try:
        check()
    except (TypeError, ValueError) as error:
        raise error from None
