"""What is timed against what: one function a contender.

A contender takes the inputs of one M, and returns the call to be timed. One that cannot
run raises ``UnavailableError`` with the reason, which the report shows in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from mhcgen import reference
from mhcgen.bench import unfused
from mhcgen.bench.machine import Machine
from mhcgen.bench.packages import Loaded
from mhcgen.runtime.arguments import BoundaryInput, RoutedInput
from mhcgen.runtime.dtypes import DTYPES
from mhcgen.runtime.side_stream import SideStream

BOUNDARY = "boundary"
TWO_LAUNCHES = "two launches"
MIXES = "mixes"
WITH_MIXES = "with mixes"
BETWEEN = "between sublayers"
FINALIZE = "finalize"
NCCL = "nccl"
ONE_SHOT = "one-shot"
UNFUSED = "unfused"
FLOOR = "floor"
OPTIONAL = (BETWEEN, NCCL, ONE_SHOT, UNFUSED, FLOOR)

Call = Callable[[], object]


class UnavailableError(Exception):
    """A contender cannot run here."""


@dataclass(frozen=True)
class Contender:
    """One column.

    Attributes:
        column: Its name.
        what: What it does, in a line.
        call_for: Prepares the call of one M.
        required: Whether a failure ends the run; otherwise it becomes a note.
        less_for: Prepares what is timed as well, and subtracted; or None.
    """

    column: str
    what: str
    call_for: Callable[[Inputs], Call]
    required: bool = False
    less_for: Callable[[Inputs], Call] | None = None

    @property
    def follows_gemms(self) -> bool:
        """Whether it is timed between GEMMs, which are subtracted."""
        return self.less_for is not None

    def is_one_of(self, columns: Collection[str]) -> bool:
        """Whether it is named so, for whichever of the packages."""
        return any(f" {self.column}".endswith(f" {each}") for each in columns)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one M, the same for all contenders.

    Attributes:
        machine: The GPUs.
        package: The package that gives the shape.
        m: Tokens.
    """

    machine: Machine
    package: Loaded
    m: int

    @cached_property
    def random(self) -> reference.Inputs:
        """Tensors of one boundary, on this rank's GPU."""
        c = self.package.constants
        return reference.random_inputs(
            self.m,
            c.HIDDEN,
            c.HC,
            c.TP,
            self.m,
            str(self.machine.device),
            fn_dtype=DTYPES[c.FN_WEIGHT],
            dtype=DTYPES[c.ACTIVATION],
        )

    @property
    def x(self) -> torch.Tensor:
        """[M, H], this rank's partial rows."""
        return self.random.parts[self.machine.rank]

    @cached_property
    def shared(self) -> BoundaryInput:
        """What every boundary takes behind x."""
        c, r = self.package.constants, self.random
        weight = None if c.NORM_WEIGHT == "none" else r.norm_weight
        delayed = c.PRE_MIX == "delayed"
        pre = torch.rand(self.m, c.HC, device=r.residual.device) if delayed else None
        return BoundaryInput(
            r.residual, r.post, r.comb, r.fn, r.scale, r.base, weight, pre
        )

    @cached_property
    def routed(self) -> RoutedInput:
        """What finalize takes: every expert of every token is on this rank."""
        c = self.package.constants
        device = self.machine.device
        experts = self.m * c.TOP_K
        return RoutedInput(
            torch.randn(experts, c.HIDDEN, device=device).to(self.x.dtype),
            torch.rand(self.m, c.TOP_K, device=device),
            torch.randperm(experts, device=device).int().reshape(self.m, c.TOP_K),
            torch.randn(self.m, c.HIDDEN, device=device).to(self.x.dtype),
        )


def contenders(machine: Machine, packages: list[Loaded]) -> list[Contender]:
    """All columns of a run: those of the packages, and what they are compared with.

    Those between GEMMs come last, for others are not to run behind a GEMM: once one has
    run in a process, each launch that waits for a whole kernel takes 0.2 µs longer.
    """
    found = []
    for package in packages:
        found += package_contenders(package)
    first = packages[0]
    alone = "" if machine.ranks > 1 else "; one GPU: without the all-reduce"
    found += [
        Contender(NCCL, "NCCL's all-reduce of x alone", nccl),
        Contender(
            ONE_SHOT,
            "torch's symmetric-memory one-shot all-reduce of x alone",
            one_shot,
        ),
        Contender(
            UNFUSED,
            f"NCCL's all-reduce, then steps 2 to 7 by torch.compile{alone}",
            unfused_of(first),
        ),
        Contender(FLOOR, "publish, poll, sum and store in one launch", floor_of(first)),
    ]
    return sorted(found, key=lambda each: each.follows_gemms)


def package_contenders(package: Loaded) -> list[Contender]:
    """The columns of one package."""
    found = [
        Contender(
            package.column(BOUNDARY),
            "publish and boundary, the critical path between two sublayers",
            partial(critical_path, package),
            required=True,
        )
    ]
    if package.constants.TP > 1:
        found.append(
            Contender(
                package.column(TWO_LAUNCHES),
                "the same boundary behind a publish of its own launch",
                partial(two_launches, package),
                required=True,
            )
        )
    if package.constants.MIXES == "side_stream":
        found += [
            Contender(
                package.column(MIXES),
                "the mixes kernel alone, back to back",
                partial(mixes, package),
                required=True,
            ),
            Contender(
                package.column(WITH_MIXES),
                "whole calls back to back, with nothing between them to hide the mixes",
                partial(with_mixes, package),
                required=True,
            ),
        ]
    found.append(
        Contender(
            package.column(BETWEEN),
            "what a whole call with its mixes adds to a sublayer of two GEMMs",
            partial(between_sublayers, package),
            required=True,
            less_for=partial(sublayer, package),
        )
    )
    if hasattr(package.constants, "TOP_K"):
        found.append(
            Contender(
                package.column(FINALIZE),
                "as boundary, with the MoE finalize of all top_k experts",
                partial(finalize, package),
                required=True,
            )
        )
    return found


def critical_path(package: Loaded, inputs: Inputs) -> Call:
    """Publish and boundary, in one launch or in two; no mixes kernel."""
    launcher = package.launcher
    x, shared = inputs.x, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    whole = launcher.call_kernel(inputs.m)
    if whole is not None:
        rows = launcher.published(x)
        return partial(launcher.call, whole, rows, shared, outputs, mix)
    return two_launches(package, inputs)


def two_launches(package: Loaded, inputs: Inputs) -> Call:
    """Publish and boundary, in two launches; no mixes kernel."""
    launcher = package.launcher
    x, shared = inputs.x, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    kernel = launcher.boundary_kernel(inputs.m)

    def call() -> None:
        launcher.publish(x)
        launcher.boundary(kernel, shared, outputs, mix)

    return call


def mixes(package: Loaded, inputs: Inputs) -> Call:
    """The mixes kernel, on the current stream."""
    launcher, shared = package.launcher, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    assert mix is not None
    mix.normal_()
    side = SideStream(mix.device)

    def call() -> None:
        stream = torch.cuda.current_stream(mix.device)
        launcher.mixes(mix, shared, outputs, side.on(stream))

    return call


def with_mixes(package: Loaded, inputs: Inputs) -> Call:
    """A whole call of the host object, and its join."""
    boundary = package.boundary
    arguments = (inputs.x, *inputs.shared)

    def call() -> None:
        boundary(*arguments)
        boundary.join()

    return call


def between_sublayers(package: Loaded, inputs: Inputs) -> Call:
    """A whole call, and the sublayer that hides its mixes, as in a model."""
    boundary, shared = package.boundary, inputs.shared
    out = boundary.outputs(inputs.m)
    x = inputs.x.clone()
    gemms = two_gemms(out.layer_input, x)

    def call() -> None:
        boundary(x, *shared, out=out)
        gemms()
        boundary.join()

    return call


def sublayer(package: Loaded, inputs: Inputs) -> Call:
    """The sublayer of ``between_sublayers`` alone."""
    return two_gemms(inputs.x.clone(), inputs.x.clone())


def two_gemms(rows: torch.Tensor, result: torch.Tensor) -> Call:
    """Takes rows through two square weights, as a sublayer does.

    Args:
        rows: [M, H] activations.
        result: [M, H] activations, written.
    """
    hidden = rows.shape[1]
    shape = (2, hidden, hidden)
    weights = torch.randn(shape, dtype=rows.dtype, device=rows.device) / hidden**0.5
    between = torch.empty_like(rows)

    def call() -> None:
        torch.mm(rows, weights[0], out=between)
        torch.mm(between, weights[1], out=result)

    return call


def finalize(package: Loaded, inputs: Inputs) -> Call:
    """Finalize and boundary, in one launch or in two; no mixes kernel."""
    launcher = package.launcher
    routed, shared = inputs.routed, inputs.shared
    outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
    whole = launcher.finalize_kernel(inputs.m, routed)
    if whole is not None:
        rows = launcher.closed(routed)
        return partial(launcher.call, whole, rows, shared, outputs, mix)
    kernel, closed = launcher.boundary_kernel(inputs.m), launcher.closed_rows(inputs.m)

    def call() -> None:
        launcher.finalize(routed, closed)
        launcher.boundary(kernel, shared, outputs, mix)

    return call


def needs_ranks(inputs: Inputs) -> None:
    """Refuses what needs more than one GPU."""
    if inputs.machine.ranks == 1:
        raise UnavailableError("needs a GPU for each rank")


def nccl(inputs: Inputs) -> Call:
    """NCCL's all-reduce of x."""
    needs_ranks(inputs)
    return partial(dist.all_reduce, inputs.x.clone())


def one_shot(inputs: Inputs) -> Call:
    """torch's one-shot all-reduce, of an x that is in symmetric memory already."""
    needs_ranks(inputs)
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    x = symmetric_memory.empty(
        inputs.x.shape, dtype=inputs.x.dtype, device=inputs.machine.device
    )
    symmetric_memory.rendezvous(x, group)
    x.copy_(inputs.x)
    reduce = torch.ops.symm_mem.one_shot_all_reduce
    return partial(reduce, x, "sum", group.group_name)


def unfused_of(package: Loaded) -> Callable[[Inputs], Call]:
    """The rest of a boundary by torch.compile, behind NCCL's all-reduce."""
    compiled = torch.compile(partial(unfused.boundary, package.constants))

    def path(inputs: Inputs) -> Call:
        c = package.constants
        if (c.PRE_MIX, c.NORM_WEIGHT) != ("fresh", "plain"):
            raise UnavailableError(
                "the unfused path has fresh pre-mixes and a plain norm alone, and the "
                f"package has {c.PRE_MIX} and {c.NORM_WEIGHT}"
            )
        y, shared = inputs.x.clone(), inputs.shared[:-1]  # all but a carried pre-mix

        def after_all_reduce() -> object:
            dist.all_reduce(y)
            return compiled(y, *shared)

        alone = partial(compiled, y, *shared)
        return after_all_reduce if inputs.machine.ranks > 1 else alone

    return path


def floor_of(package: Loaded) -> Callable[[Inputs], Call]:
    """The floor of a package: its kernel is compiled once, for the first M."""
    compiled: list[Any] = []

    def floor(inputs: Inputs) -> Call:
        from mhcgen.bench.floor import BLOCKS_PER_MULTIPROCESSOR, Floor
        from mhcgen.runtime.compiler import compile_kernel

        box = package.launcher.mailbox
        kernel = Floor(package.module, box.transport == "multicast")
        if kernel.has_idle_threads:
            raise UnavailableError("only for rows that all threads have a fragment of")
        device = torch.cuda.get_device_properties(inputs.machine.device)
        room = BLOCKS_PER_MULTIPROCESSOR * device.multi_processor_count
        if kernel.blocks(inputs.m) > room:
            raise UnavailableError(
                f"{kernel.blocks(inputs.m)} blocks, and surely {room} run at once"
            )
        if not compiled:
            name = f"mhcgen_{package.identity.name}_floor"
            compiled.append(compile_kernel(kernel, name, package.identity.arch))
        x, y = inputs.x, torch.empty_like(inputs.x)
        return partial(
            compiled[0], x, box.addresses, box.buffer, box.state, y, box.rank
        )

    return floor
