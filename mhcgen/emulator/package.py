"""A package's kernels in the emulator: compiled, and launched as its host code does."""

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.machine import Geometry, Program
from mhcgen.emulator.memory import Allocation
from mhcgen.emulator.ptx import read_kernel
from mhcgen.emulator.scheduler import Stream, World
from mhcgen.emulator.sublayer import launch_copy
from mhcgen.plan import GENERATIONS, LOCAL, Launch, Plan, make_plan
from mhcgen.render import RESOLVED_SPEC
from mhcgen.spec_file import load_spec

BF16 = np.dtype(np.uint16)
"""BF16 is held as its bits."""

ACTIVATIONS = {"bf16": BF16, "fp16": np.dtype(np.float16)}

SENTINEL = 0x8000
TENSOR_BYTES = 128 << 20
"""Memory of a rank for the tensors of its calls."""

MODULES = (
    "boundary",
    "publish",
    "finalize",
    "mixes",
    "entry",
    "exit",
)


@dataclass(frozen=True)
class HostCode:
    """What the host code of a kernel says about its launches.

    Attributes:
        arguments: The names of the kernel's arguments, in order.
        dependent: Whether it is launched with programmatic dependent launch.
    """

    arguments: tuple[str, ...]
    dependent: bool


def host_code(source: str) -> HostCode:
    """Reads the arguments and launch attributes off a kernel's module."""
    tree = ast.parse(source)
    (kernel,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "kernel"
    )
    keywords = [
        keyword
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "launch"
        for keyword in node.keywords
    ]
    return HostCode(
        tuple(argument.arg for argument in kernel.args.args[1:]),
        any(k.arg == "use_pdl" and ast.literal_eval(k.value) for k in keywords),
    )


@dataclass(frozen=True)
class EmulatedPackage:
    """A package whose kernels can be executed.

    Attributes:
        plan: What it was made from.
        arch: The architecture of the kernels.
        programs: The kernels by name.
        host: The host code of each module.
    """

    plan: Plan
    arch: str
    programs: Mapping[str, Program]
    host: Mapping[str, HostCode]

    def of_kernel(self, name: str) -> HostCode:
        """The host code of a kernel."""
        return self.host[next(m for m in MODULES if name.startswith(m))]


def plan_of(folder: Path) -> Plan:
    """The plan that a package was made from."""
    return make_plan(load_spec(folder / RESOLVED_SPEC).spec)


def compile_ptx(
    folder: Path,
    archs: Collection[str],
    keep: Path,
    names: Collection[str] = (),
    processes: int | None = None,
) -> None:
    """Compiles a package's kernels and keeps their PTX.

    Args:
        folder: The package.
        archs: The architectures.
        keep: Where the PTX goes.
        names: The kernels; all, if empty.
        processes: Compilers at a time; one a core if None.
    """
    jobs = jobs_of(folder, archs, keep)
    compile_kernels(
        [job for job in jobs if not names or job.row.name in names], processes
    )


def load_package(folder: Path, arch: str, ptx: Path) -> EmulatedPackage:
    """Reads what `compile_ptx` kept for one architecture.

    Raises:
        PtxError: The emulator does not know all of it.
    """
    suffix = f".{arch}.ptx"
    programs = {
        path.name.removesuffix(suffix): Program.of(read_kernel(path))
        for path in sorted(ptx.glob(f"*{suffix}"))
    }
    host = {
        module: host_code((folder / f"{module}.py").read_text("utf-8"))
        for module in MODULES
        if any(name.startswith(module) for name in programs)
    }
    return EmulatedPackage(plan_of(folder), arch, programs, host)


@dataclass(frozen=True)
class Tensor:
    """A tensor of one shape in the memory of every rank."""

    world: World
    allocations: tuple[Allocation, ...]
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    def read(self, rank: int) -> Array:
        """The elements on a rank.

        Raises:
            UnwrittenError: Some were never written.
        """
        size = self.dtype.itemsize * int(np.prod(self.shape))
        content = self.world.memory.read(self.allocations[rank], size)
        return content.view(self.dtype).reshape(self.shape)

    def first(self, tokens: int) -> "Tensor":
        """The same memory, seen as fewer tokens."""
        return Tensor(
            self.world, self.allocations, self.dtype, (tokens, *self.shape[1:])
        )


@dataclass(frozen=True)
class Weights:
    """What a boundary takes that no kernel writes."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_weight: Tensor | None


@dataclass(frozen=True)
class Streams:
    """What one boundary hands to the next; ``pre`` where the pre-mix is delayed."""

    residual: Tensor
    post: Tensor
    comb: Tensor
    pre: Tensor | None = None

    def first(self, tokens: int) -> "Streams":
        """The same memory, seen as fewer tokens."""
        return Streams(*(each and each.first(tokens) for each in vars(self).values()))


@dataclass(frozen=True)
class Head:
    """The weights of an exit by a sigmoid head."""

    head_fn: Tensor
    head_scale: Tensor
    head_base: Tensor


@dataclass(frozen=True)
class Output:
    """What a boundary returns; ``stream_mean`` where the package has it.

    ``mix`` is what it hands to a mixes kernel, where there is one.
    """

    streams: Streams
    layer_input: Tensor
    mix: Tensor | None
    stream_mean: Tensor | None


@dataclass(frozen=True)
class Routed:
    """The arguments of finalize."""

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor
    shared_output: Tensor | None = None


class EmulatedRanks:
    """All ranks of a package, with a mailbox and two streams each.

    Calls only put launches into streams; ``run`` executes them.

    Attributes:
        package: The kernels.
        transport: How publish reaches the other ranks.
        world: The ranks' memory and launches.
    """

    def __init__(
        self,
        package: EmulatedPackage,
        transport: str,
        seed: int | None = None,
        resident_blocks: int | None = None,
        tensor_bytes: int = TENSOR_BYTES,
    ) -> None:
        """Sets up armed mailboxes.

        Args:
            package: The kernels.
            transport: ``multicast`` or ``unicast``; ``local`` for one rank alone.
            seed: What the adversarial scheduler draws from; None for order and speed.
            resident_blocks: Blocks that a rank's device can hold; None for all.
            tensor_bytes: Memory of a rank for tensors.
        """
        plan = package.plan
        self.package = package
        self.transport = transport
        self.activation = ACTIVATIONS[plan.spec.precision.activation]
        self.plan = plan
        self.target = plan.target(package.arch)
        self.world = World(
            plan.tp * (plan.mailbox.total_bytes + tensor_bytes),
            plan.tp,
            seed,
            resident_blocks,
        )
        self._main = [Stream(rank) for rank in range(plan.tp)]
        self._side = [Stream(rank) for rank in range(plan.tp)]
        self._armed = 0
        self._consumed = 0
        self._rows: Tensor | None = None
        self._mix = self._empty("mix", np.dtype("f4"), (plan.capacity, plan.mix))
        if transport != LOCAL:
            self._set_up_mailboxes(transport)

    def _set_up_mailboxes(self, transport: str) -> None:
        plan = self.plan
        shape = (GENERATIONS, plan.tp, plan.capacity, plan.hidden)
        self._mailbox = self._empty("mailbox", BF16, shape, reserved=True)
        self._state = self.tensor("state", np.zeros(2, np.int32))
        if transport == "multicast":
            addresses = [self.world.memory.window(self._mailbox.allocations).address]
        else:
            addresses = [each.address for each in self._mailbox.allocations]
        self._mailboxes = self.tensor("mailboxes", np.array(addresses, np.int64))

    # --- tensors --------------------------------------------------------------------

    def _empty(
        self,
        name: str,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        reserved: bool = False,
    ) -> Tensor:
        size = dtype.itemsize * int(np.prod(shape))
        allocations = [
            self.world.memory.allocate(name, size, rank, reserved)
            for rank in range(self.plan.tp)
        ]
        return Tensor(self.world, tuple(allocations), dtype, shape)

    def tensor(self, name: str, *values: Array) -> Tensor:
        """Uploads a tensor: one array for every rank, or one for each.

        BF16 is given as its bits.
        """
        each = values * self.plan.tp if len(values) == 1 else values
        tensor = self._empty(name, each[0].dtype, each[0].shape)
        for allocation, value in zip(tensor.allocations, each, strict=True):
            self.world.memory.write(allocation, value)
        return tensor

    def produced(self, name: str, *values: Array) -> Tensor:
        """As ``tensor``, but a kernel before the next publish writes it."""
        source = self.tensor(f"source of {name}", *values)
        target = self._empty(name, source.dtype, source.shape)
        launch_copy(self.world, self._main, source.allocations, target.allocations)
        return target

    def mailbox(self, rank: int, generation: int, tokens: int) -> Array:
        """The bits of every rank's first rows in one generation, [TP, tokens, H]."""
        box = self._mailbox.allocations[rank]
        shape = self._mailbox.shape
        part = slice(box.offset, box.offset + box.size)
        content = self.world.memory.arena.data[part].view(BF16).reshape(shape)
        return content[generation, :, :tokens].copy()

    def published(self, rank: int, tokens: int) -> Array:
        """What the next boundary of a rank takes: every rank's rows, [TP, tokens, H].

        One rank alone takes its rows as they are, -0.0 as +0.0.
        """
        if self._rows is None:
            rows = self.mailbox(rank, self.generation(rank), tokens)
            return rows.view(self.activation)
        bits = self._rows.read(rank).view(BF16)
        bits = np.where(bits == SENTINEL, BF16.type(0), bits)[np.newaxis]
        return bits.view(self.activation)

    def generation(self, rank: int) -> int:
        """The stage of the mailbox that the next boundary of a rank takes."""
        return int(self._state.read(rank)[0])

    def idle_problems(self) -> list[str]:
        """What is wrong with mailboxes that nobody uses: nothing, if all is well."""
        if self.transport == LOCAL:
            return []
        problems = []
        states = [self._state.read(rank).tolist() for rank in range(self.plan.tp)]
        wanted = self._consumed % GENERATIONS
        for rank, (generation, arrivals) in enumerate(states):
            if generation != wanted:
                problems.append(
                    f"rank {rank} is at generation {generation}, and should be at "
                    f"{wanted}"
                )
            if arrivals:
                problems.append(f"rank {rank} has counted {arrivals} arrivals")
            for stage in range(GENERATIONS):
                rows = self.mailbox(rank, stage, self._armed)
                left = int((rows != SENTINEL).sum())
                if left:
                    problems.append(
                        f"{left} elements of generation {stage} of rank {rank} are "
                        "not armed again"
                    )
        return problems

    def _arm(self, tokens: int) -> None:
        """Arms rows that no call has used yet: the others stay untouched memory."""
        plan = self.plan
        fresh = np.full((max(0, tokens - self._armed), plan.hidden), SENTINEL, BF16)
        for box in self._mailbox.allocations:
            for slot in range(GENERATIONS * plan.tp):
                row = slot * plan.capacity + self._armed
                self.world.memory.write(box, fresh, row * plan.mailbox.row_bytes)
        self._armed = max(self._armed, tokens)

    # --- launches -------------------------------------------------------------------

    def publish(self, x: Tensor) -> None:
        """Publishes each rank's partial rows; one rank alone keeps them."""
        if self.transport == LOCAL:
            self.join()
            self._rows = x
            return
        name = f"publish_{self.transport}"
        self._publish(name, x.shape[0], {"x": x})

    def publish_finalize(self, routed: Routed) -> None:
        """Publishes the sums of each rank's routed rows."""
        name = self._finalize_name(routed)
        self._publish(name, routed.expert_weights.shape[0], vars(routed))

    def _finalize_name(self, routed: Routed) -> str:
        dtype = "bf16" if routed.expert_weights.dtype == BF16 else "fp32"
        shared = "_shared" if routed.shared_output else ""
        return f"finalize_{dtype}{shared}_{self.transport}"

    def _publish(
        self, name: str, tokens: int, arguments: Mapping[str, Tensor | None]
    ) -> None:
        self.join()
        if self.transport == LOCAL:
            self._rows = self._empty("x", self.activation, (tokens, self.plan.hidden))
            own = {"x": self._rows}
        else:
            self._arm(tokens)
            own = {"mailboxes": self._mailboxes, "state": self._state}
        launch = self.target.publish_launch(tokens)
        self._launch(name, launch, self._main, {**arguments, **own})

    def consume(self, streams: Streams, weights: Weights) -> Output:
        """Takes what was published through the boundary."""
        launch = self.target.boundary_launch(streams.residual.shape[0])
        return self._boundary(launch, streams, weights, self._take_published())

    def publishes(self, tokens: int, routed: bool = False) -> bool:
        """Whether a boundary of ``tokens`` tokens can publish them itself.

        Args:
            tokens: M.
            routed: Whether they are sums that it would have to close.
        """
        row = self.target.token_group(tokens)
        alone = self.transport == LOCAL
        return not alone and (row.finalizes if routed else row.launches == 1)

    def call(self, x: Tensor | Routed, streams: Streams, weights: Weights) -> Output:
        """Takes rows, or sums of routed rows, through a boundary that publishes."""
        self.join()
        tokens = streams.residual.shape[0]
        self._arm(tokens)
        if isinstance(x, Routed):
            publishes, given = self._finalize_name(x), vars(x)
        else:
            publishes, given = self.transport, {"x": x}
        launch = self.target.boundary_launch(tokens, publishes)
        source = {**self._take_published(), **given, "mailboxes": self._mailboxes}
        return self._boundary(launch, streams, weights, source)

    def _boundary(
        self,
        launch: Launch,
        streams: Streams,
        weights: Weights,
        source: Mapping[str, Tensor | None],
    ) -> Output:
        outputs = self._outputs(streams.residual.shape[0], self.plan.tail)
        given = {**vars(streams), **vars(weights), **source}
        self._launch(launch.kernel, launch, self._main, given | outputs)
        return self._mixes(weights, outputs)

    def entry(self, hidden: Tensor, weights: Weights) -> Output:
        """Expands a hidden state, the same on all ranks."""
        self.join()
        outputs = self._outputs(hidden.shape[0])
        launch = self.target.plan.ends_launches(hidden.shape[0])["entry"]
        given = {"hidden": hidden, **vars(weights)}
        self._launch("entry", launch, self._main, given | outputs)
        return self._mixes(weights, outputs)

    def exit(
        self, streams: Streams, norm_weight: Tensor | None, head: Head | None
    ) -> Tensor:
        """Takes what was published through the exit; returns the normalized rows."""
        tokens = streams.residual.shape[0]
        output = self._empty("output", self.activation, (tokens, self.plan.hidden))
        launch = self.target.plan.ends_launches(tokens)["exit"]
        given = {
            **vars(streams),
            **(vars(head) if head else {}),
            "norm_weight": norm_weight,
            **self._take_published(),
            "output": output,
        }
        self._launch("exit", launch, self._main, given)
        return output

    def _take_published(self) -> dict[str, Tensor | None]:
        """Where a kernel that consumes a generation finds what was published."""
        self._consumed += 1
        if self._rows is None:
            mailbox, state = self._mailbox, self._state
            unused = dict.fromkeys(["x", "mailboxes", *Routed.__annotations__])
            return {**unused, "mailbox": mailbox, "state": state}
        return {"x": self._rows}

    def _outputs(self, tokens: int, tail: bool = False) -> dict[str, Tensor | None]:
        """Memory for what a boundary writes; with a tail, the next mixes, too."""
        plan, kind, f4 = self.plan, self.activation, np.dtype("f4")
        means = (tokens, plan.hidden) if plan.stream_mean else None
        pre = (tokens, plan.hc) if plan.delayed else None
        return {
            "new_residual": self._empty(
                "new_residual", kind, (tokens, plan.hc, plan.hidden)
            ),
            "new_post": self._empty("new_post", f4, (tokens, plan.hc, 1)),
            "new_comb": self._empty("new_comb", f4, (tokens, plan.hc, plan.hc)),
            "new_pre": self._empty("new_pre", f4, pre) if pre else None,
            "mix": None if tail else self._mix.first(tokens),
            "layer_input": self._empty("layer_input", kind, (tokens, plan.hidden)),
            "stream_mean": self._empty("stream_mean", kind, means) if means else None,
        }

    def _mixes(self, weights: Weights, outputs: Mapping[str, Tensor | None]) -> Output:
        """Launches the mixes on the side streams, unless a tail computes them."""
        residual, layer_input = outputs["new_residual"], outputs["layer_input"]
        post, comb = outputs["new_post"], outputs["new_comb"]
        pre, mix = outputs["new_pre"], outputs["mix"]
        assert residual and layer_input and post and comb
        if mix:
            for main, side in zip(self._main, self._side, strict=True):
                side.wait_for(main)
            launch = self.target.mixes_launch(mix.shape[0])
            given = {"mix": mix, "scale": weights.scale, "base": weights.base}
            written = {"post": post, "comb": comb, "pre": pre}
            self._launch("mixes", launch, self._side, {**given, **written})
        streams = Streams(residual, post, comb, pre)
        return Output(streams, layer_input, mix, outputs["stream_mean"])

    def join(self) -> None:
        """The main streams wait for the mixes."""
        for main, side in zip(self._main, self._side, strict=True):
            main.wait_for(side)

    def run(self) -> None:
        """Executes everything launched.

        Raises:
            EmulatorError: A kernel did what it must not, or nothing can go on.
        """
        self.world.run()

    def _launch(
        self,
        name: str,
        launch: Launch,
        streams: Sequence[Stream],
        arguments: Mapping[str, Tensor | None],
    ) -> None:
        program = self.package.programs[name]
        code = self.package.of_kernel(name)
        geometry = Geometry(
            launch.grid, launch.block, (launch.cluster, 1, 1), launch.shared_bytes
        )
        requests = [
            (stream, marshalled(program, code, {**arguments, "rank": rank}, rank))
            for rank, stream in enumerate(streams)
        ]
        self.world.launch(program, geometry, requests, code.dependent)


def marshalled(
    program: Program,
    code: HostCode,
    arguments: Mapping[str, Tensor | int | None],
    rank: int,
) -> bytes:
    """The parameters of a launch, as the compiled host code lays them out.

    A tensor is its pointer, and behind it the number of tokens where that is not fixed;
    a None leaves no trace.

    Raises:
        ValueError: The kernel's parameters are not those of the arguments.
    """
    values = [(name, arguments[name]) for name in code.arguments]
    given = [(name, value) for name, value in values if value is not None]
    parameters = program.kernel.parameters
    if len(given) != len(parameters):
        raise ValueError(
            f"{program.kernel.label} has {len(parameters)} parameters, and its source "
            f"names {', '.join(name for name, _ in given)}"
        )
    content = bytearray()
    for parameter, (name, value) in zip(parameters, given, strict=True):
        content += bytes(parameter.offset - len(content))
        sizes: tuple[int, ...] = (8, 16)
        if isinstance(value, int):
            sizes, words = (4,), [np.int32(value).tobytes()]
        else:
            pointer = np.int64(value.allocations[rank].address)
            words = [pointer.tobytes(), np.int64(value.shape[0]).tobytes()]
        if parameter.size not in sizes:
            raise ValueError(
                f"parameter {name} of {program.kernel.label} has {parameter.size} "
                f"bytes, not {' or '.join(map(str, sizes))}"
            )
        content += b"".join(words)[: parameter.size]
    return bytes(content)
