"""What boundaries take and return, and the checks before anything is launched."""

from __future__ import annotations

import weakref
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .dtypes import DTYPES
from .mailbox import ALIGNMENT

NEGATED = torch.Tensor.is_neg
ADDRESS = torch.Tensor.data_ptr
# No offset in a storage is as large: at such an address there is memory.
BEYOND_OFFSETS = 1 << 40
NO_ROWS: Mapping[str, torch.Tensor | None] = {}
MOST_APART = 4096  # calls whose memory is known not to overlap


class BoundaryOutput(NamedTuple):
    """What a boundary returns.

    Attributes:
        residual: [M, HC, H] activations, the new residual streams.
        post: [M, HC, 1] FP32, the next boundary's post-mix.
        comb: [M, HC, HC] FP32, the next boundary's residual mix, [source, target].
        layer_input: [M, H] activations, the next sublayer's normalized input.

    Some packages return more, behind these: ``pre``, [M, HC] FP32, the next boundary's
    pre-mix, where it is delayed; then ``stream_mean``, [M, H] activations, the mean of
    the new streams.

    Where the package computes the mixes on a side stream, ``post``, ``comb`` and
    ``pre`` are written there: call ``join()`` before anything but the next boundary of
    the same object reads, writes or reuses them.
    """

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    layer_input: torch.Tensor


def output_type(constants: ModuleType) -> type[BoundaryOutput]:
    """BoundaryOutput with exactly the fields that a package returns."""
    more = ["pre"] * (constants.PRE_MIX == "delayed")
    more += ["stream_mean"] * constants.STREAM_MEAN
    if not more:
        return BoundaryOutput
    fields = (*BoundaryOutput._fields, *more)
    return namedtuple("BoundaryOutput", fields)  # type: ignore[return-value]


def output_tensors(
    constants: ModuleType, m: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of what a package returns for ``m`` tokens, by name, in order."""
    c, activation, fp32 = constants, DTYPES[constants.ACTIVATION], torch.float32
    known = {
        "residual": (activation, (m, c.HC, c.HIDDEN)),
        "post": (fp32, (m, c.HC, 1)),
        "comb": (fp32, (m, c.HC, c.HC)),
        "layer_input": (activation, (m, c.HIDDEN)),
        "pre": (fp32, (m, c.HC)),
        "stream_mean": (activation, (m, c.HIDDEN)),
    }
    return {name: known[name] for name in output_type(constants)._fields}


class BoundaryInput(NamedTuple):
    """The arguments that every boundary takes, whatever was published before it."""

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor | None
    pre: torch.Tensor | None = None


class EntryInput(NamedTuple):
    """The arguments of the entry."""

    hidden: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor | None


class ExitInput(NamedTuple):
    """The arguments that every exit takes, whatever was published before it."""

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    norm_weight: torch.Tensor | None
    pre: torch.Tensor | None
    head_fn: torch.Tensor | None
    head_scale: torch.Tensor | None
    head_base: torch.Tensor | None


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
        self._activation = DTYPES[constants.ACTIVATION]
        self._fn_weight = DTYPES[constants.FN_WEIGHT]
        self._delayed = constants.PRE_MIX == "delayed"
        self._weighted_norm = constants.NORM_WEIGHT != "none"
        norm_weight = ("norm_weight",) * self._weighted_norm
        self._weights_of = attrgetter("fn", "scale", "base", *norm_weight)
        pre = ("pre",) * self._delayed
        self._taken_of = attrgetter(
            *("residual", "post", "comb", "fn", "scale", "base"), *norm_weight, *pre
        )
        self._outputs = output_type(constants)._fields
        self._outputs_of = attrgetter(*self._outputs)
        self._apart: set[tuple[int, ...]] = set()
        # A model's boundaries take the same weights each time: those that were checked.
        self._known: dict[tuple[object, ...], list[weakref.ref[object]]] = {}

    def plain(
        self,
        rows: tuple[torch.Tensor, ...],
        inputs: BoundaryInput,
        out: BoundaryOutput | None,
    ) -> bool:
        """Whether a boundary's launch would refuse whatever else is wrong with a call.

        Compiled kernels check types, shapes, strides, devices and alignment before they
        launch, in a fraction of the time. They see neither what they are not given nor
        a view that is yet to be negated, nor memory that is gone or overlaps.

        Args:
            rows: What the call publishes, or closes and publishes.
            inputs: The other arguments.
            out: The outputs, if they are given.
        """
        if inputs.pre is not None and not self._delayed:
            return False
        if inputs.norm_weight is not None and not self._weighted_norm:
            return False
        try:
            tensors = (*rows, *self._taken_of(inputs))
            if out is not None:
                tensors += self._outputs_of(out)
            if any(map(NEGATED, tensors)):
                return False
            addresses = map(ADDRESS, tensors)
            if out is not None:
                return memory_of(addresses, rows) in self._apart
            return min(addresses) >= BEYOND_OFFSETS or not any(map(is_freed, tensors))
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return False

    def plain_routed(
        self, routed: RoutedInput, inputs: BoundaryInput, out: BoundaryOutput | None
    ) -> bool:
        """As ``plain``, of the arguments of finalize.

        To a compiled kernel, integers of one width are the same, signed or not.
        """
        index = routed.expanded_idx_to_permuted_idx
        signed = getattr(index, "dtype", None) is torch.int32
        return signed and self.plain(given_of(routed), inputs, out)

    def call(
        self, x: torch.Tensor, inputs: BoundaryInput, out: BoundaryOutput | None = None
    ) -> int:
        """Checks the arguments of a call and returns M."""
        m = self.x(x)
        self.boundary(m, inputs)
        if out is not None:
            self.outputs(m, out, {"x": x, **inputs._asdict()})
            self._remember_apart((x,), inputs, out)
        return m

    def finalize(
        self,
        routed: RoutedInput,
        inputs: BoundaryInput,
        out: BoundaryOutput | None = None,
    ) -> int:
        """Checks the arguments of finalize and returns M."""
        m = self.routed(routed)
        self.boundary(m, inputs)
        if out is not None:
            self.outputs(m, out, {**routed._asdict(), **inputs._asdict()})
            self._remember_apart(given_of(routed), inputs, out)
        return m

    def outputs(
        self, m: int, out: BoundaryOutput, given: Mapping[str, torch.Tensor | None]
    ) -> None:
        """Checks memory for outputs, and that nothing else overlaps it.

        The next residual streams, mixes and pre-mix may take the place of the last: who
        writes of them has read what it overwrites, and others need it no more.

        Args:
            m: Tokens.
            out: The outputs.
            given: All other arguments by name, checked before.
        """
        if getattr(out, "_fields", None) != self._outputs:
            raise TypeError(
                f"out is a {type(out).__name__}; it must be what outputs({m}) returns: "
                f"{', '.join(self._outputs)}"
            )
        written = {f"out.{name}": each for name, each in out._asdict().items()}
        expected = output_tensors(self._constants, m).values()
        for (name, tensor), (dtype, shape) in zip(
            written.items(), expected, strict=True
        ):
            self._tensor(name, tensor, dtype, shape)
        check_apart(written, given)

    def x(self, x: torch.Tensor) -> int:
        """Checks x and returns M."""
        m = rows_of(x)
        self._capacity("x", m)
        self._tensor("x", x, self._activation, (m, self._constants.HIDDEN))
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
        dtypes = [DTYPES[name] for name in c.ROUTING_WEIGHTS]
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
            self._activation,
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
                "shared_output", routed.shared_output, self._activation, (m, c.HIDDEN)
            )
        return m

    def boundary(self, m: int, inputs: BoundaryInput) -> None:
        """Checks the arguments that a call and finalize share."""
        self._streams(m, inputs)
        self._weights(inputs)
        self._pre(m, inputs.pre, self._delayed, "model.pre_mix")

    def consume(
        self,
        m: int,
        inputs: BoundaryInput,
        out: BoundaryOutput | None,
        rows: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Checks the arguments of the second half of a call.

        Args:
            m: Tokens.
            inputs: The arguments.
            out: The outputs, if they are given.
            rows: What the first half published, by name.
        """
        self.boundary(m, inputs)
        if out is not None:
            self.outputs(m, out, {**rows, **inputs._asdict()})

    def entry(self, inputs: EntryInput, out: BoundaryOutput | None = None) -> int:
        """Checks the arguments of the entry and returns M."""
        c = self._constants
        if not c.ENTRY:
            raise RuntimeError(
                "this package has no entry kernel: set ends.entry in its spec"
            )
        m = rows_of(inputs.hidden)
        self._capacity("hidden", m)
        self._tensor("hidden", inputs.hidden, self._activation, (m, c.HIDDEN))
        self._weights(inputs)
        if out is not None:
            self.outputs(m, out, inputs._asdict())
        return m

    def exit(
        self,
        m: int,
        inputs: ExitInput,
        out: torch.Tensor | None = None,
        rows: Mapping[str, torch.Tensor | None] = NO_ROWS,
    ) -> None:
        """Checks the arguments that all exits share.

        Args:
            m: Tokens.
            inputs: The arguments.
            out: The output, if it is given.
            rows: What is published, or closed and published, by name.
        """
        c = self._constants
        self.has_exit()
        self._streams(m, inputs)
        self._norm_weight(inputs.norm_weight)
        self._pre(m, inputs.pre, c.EXIT == "pre_mix", "ends.exit")
        head = {
            "head_fn": (self._fn_weight, (c.HC, c.HC * c.HIDDEN)),
            "head_scale": (torch.float32, (1,)),
            "head_base": (torch.float32, (c.HC,)),
        }
        for name, (dtype, shape) in head.items():
            tensor = getattr(inputs, name)
            if self._wanted(name, tensor, c.EXIT == "sigmoid", "ends.exit"):
                self._tensor(name, tensor, dtype, shape)
        if out is not None:
            self._tensor("out", out, self._activation, (m, c.HIDDEN))
            check_apart({"out": out}, {**rows, **inputs._asdict()})

    def has_exit(self) -> None:
        """Makes sure that the package has an exit kernel."""
        if self._constants.EXIT is None:
            raise RuntimeError(
                "this package has no exit kernel: set ends.exit in its spec"
            )

    def _streams(self, m: int, inputs: BoundaryInput | ExitInput) -> None:
        c = self._constants
        check, fp32 = self._tensor, torch.float32
        check("residual", inputs.residual, self._activation, (m, c.HC, c.HIDDEN))
        check("post", inputs.post, fp32, (m, c.HC, 1))
        check("comb", inputs.comb, fp32, (m, c.HC, c.HC))

    def _weights(self, inputs: BoundaryInput | EntryInput) -> None:
        """Checks the weights, if they are not known."""
        weights = self._weights_of(inputs)
        known = identity(weights)
        if known not in self._known:
            c = self._constants
            check, fp32 = self._tensor, torch.float32
            check("fn", inputs.fn, self._fn_weight, (c.MIX, c.HC * c.HIDDEN))
            check("scale", inputs.scale, fp32, (3,))
            check("base", inputs.base, fp32, (c.MIX,))
            self._norm_weight(inputs.norm_weight)
            self._remember(known, weights)
        elif not self._weighted_norm:
            self._norm_weight(inputs.norm_weight)

    def _norm_weight(self, norm_weight: torch.Tensor | None) -> None:
        wanted = self._weighted_norm
        if self._wanted("norm_weight", norm_weight, wanted, "model.norm_weight"):
            shape = (self._constants.HIDDEN,)
            self._tensor("norm_weight", norm_weight, self._activation, shape)

    def _pre(self, m: int, pre: torch.Tensor | None, wanted: bool, key: str) -> None:
        if self._wanted("pre", pre, wanted, key):
            self._tensor("pre", pre, torch.float32, (m, self._constants.HC))

    def _wanted(self, name: str, tensor: Any, wanted: bool, key: str) -> bool:
        """Whether a package takes an argument, which must be None if it does not."""
        if not wanted and tensor is not None:
            raise ValueError(
                f"{name} is given, and this package takes none: pass None, or change "
                f"{key} of its spec"
            )
        return wanted

    def _capacity(self, name: str, m: int) -> None:
        capacity = self._constants.CAPACITY
        if m > capacity:
            raise ValueError(
                f"{name} has {m} tokens; this package takes 0 to {capacity}: split the "
                "call, or raise capacity.max_tokens of the spec"
            )

    def _remember(self, known: tuple[object, ...], weights: Iterable[object]) -> None:
        """Remembers weights that were checked, for as long as all of them live."""

        def forget(_: object) -> None:
            self._known.pop(known, None)

        # Once one is gone, another tensor may have its id.
        self._known[known] = [weakref.ref(weight, forget) for weight in weights]

    def _remember_apart(
        self, rows: Sequence[torch.Tensor], inputs: BoundaryInput, out: BoundaryOutput
    ) -> None:
        """Remembers where the tensors of a call lie, whose outputs overlap nothing.

        None of them is freed: they were checked.
        """
        if len(self._apart) == MOST_APART:
            self._apart.clear()
        tensors = (*rows, *self._taken_of(inputs), *self._outputs_of(out))
        self._apart.add(memory_of(map(ADDRESS, tensors), rows))

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
            and not is_freed(tensor)
            and is_within_storage(tensor)
            and not tensor.data_ptr() % ALIGNMENT
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
        if is_freed(tensor):
            raise ValueError(f"{name} has no memory: its storage was freed")
        if not is_within_storage(tensor):
            raise ValueError(
                f"{name} reaches beyond its storage, which has "
                f"{tensor.untyped_storage().nbytes()} bytes: it was resized"
            )
        if address % ALIGNMENT:
            raise ValueError(
                f"{name} starts at {address:#x}; it must start at a multiple of "
                f"{ALIGNMENT} bytes: pass {name}.clone()"
            )


def given_of(routed: RoutedInput) -> tuple[torch.Tensor, ...]:
    """The arguments of finalize alone, without a shared expert that is absent."""
    return tuple(each for each in routed if each is not None)


def memory_of(
    addresses: Iterable[int], rows: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """What tells where all tensors of a call lie.

    Args:
        addresses: Where each begins.
        rows: Those of them that are published, or closed and published. A launch takes
            others of as many tokens alone, each of the one type.
    """
    return (*addresses, *[each.nbytes for each in rows])


def check_apart(
    written: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor | None]
) -> None:
    """Makes sure that outputs overlap neither each other nor what is read.

    Args:
        written: The outputs by name.
        given: The inputs by name. ``out.residual`` may be in the place of ``residual``,
            and so on.

    Raises:
        ValueError: The names of two tensors that overlap.
    """
    others = {name: extent(each) for name, each in given.items() if each is not None}
    for name, tensor in written.items():
        begin, end = extent(tensor)
        for other, (low, high) in others.items():
            in_place = name == f"out.{other}" and (low, high) == (begin, end)
            if begin < high and low < end and not in_place:
                raise ValueError(f"{name} overlaps {other}: give it memory of its own")
        others[name] = begin, end


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a contiguous tensor begins and ends in memory."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def identity(tensors: Sequence[Any]) -> tuple[object, ...]:
    """Which tensors these are, and what can change in place; empty if one is none.

    Of the strides, whether they are contiguous: what is known was, and to ask for them
    takes twice as long.
    """
    try:
        return (
            *map(id, tensors),
            *[
                (t.data_ptr(), t.dtype, t.shape, t.is_contiguous(), t.is_neg())
                for t in tensors
            ],
        )
    except (AttributeError, TypeError):
        return ()


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage has no memory: its address is its offset there."""
    return tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize


def is_within_storage(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor ends where its storage does, or before."""
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    return end <= tensor.untyped_storage().nbytes()


def rows_of(tensor: object) -> int:
    """Rows of a tensor; 0 for what is none, which a later check refuses."""
    if isinstance(tensor, torch.Tensor) and tensor.dim():
        return tensor.shape[0]
    return 0
