"""Verifies on GPUs: one plays all ranks, or with torch.distributed.run each its own.

Each call is made twice: with a pause between publish and boundary, in which the
published rows are read from the mailboxes, and without one. Outputs are filled with NaN
beforehand, so that an element that no kernel writes shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mhcgen import reference
from mhcgen.compilation import CompileError
from mhcgen.errors import MhcgenError
from mhcgen.verify.calls import Executor, run_calls
from mhcgen.verify.cases import TORCHRUN, Case, Options, cases, check_choice
from mhcgen.verify.compare import Published, Returned
from mhcgen.verify.inputs import Call, RoutedRows
from mhcgen.verify.report import Outcome
from mhcgen.verify.subject import Subject
from mhcgen.verify.together import Alone, Together, started, world_size
from mhcgen.verify.watchdog import Report, Watchdog

if TYPE_CHECKING:
    from mhcgen.runtime import BoundaryOutput, FusedBoundary

LOADING_SECONDS = 300
STEP_SECONDS = 60


def verify(folder: Path, options: Options, report: Report) -> list[Outcome]:
    """Runs cases of the package in a folder on the GPUs that there are.

    Args:
        folder: The package.
        options: What was asked for.
        report: Shows what came out, where a kernel does not end.

    Returns:
        What became of each case: the same on all ranks.

    Raises:
        MhcgenError: The package or the options do not fit this machine.
        CompileError: The package does not compile or does not load; it says why.
    """
    subject = Subject.of_package(folder)
    check_options(subject, options)
    check_gpus(subject, options)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    arch = device_arch(subject, device)

    def cases_of(transport: str) -> list[Case]:
        return [*cases(subject, options, [arch], [transport], "cuda", world_size())]

    possible = [t for t in subject.transports if t != "multicast" or world_size() > 1]
    watchdog = Watchdog(cases_of([*options.transports, *possible][0])[0], report)
    with started(device) as together:
        try:
            with watchdog.over("loading", LOADING_SECONDS):
                loaded = load_ranks(folder, subject, options, together)
        except (RuntimeError, ValueError, ImportError) as error:
            raise CompileError(f"{subject.name} does not load: {error}") from error
        ranks = {
            transport: GpuRanks(each, together, watchdog)
            for transport, each in loaded.items()
        }
        wanted = [case for transport in ranks for case in cases_of(transport)]
        return run_all(ranks, subject, wanted, together, watchdog)


def run_all(
    ranks: Mapping[str, Executor],
    subject: Subject,
    wanted: Sequence[Case],
    together: Together,
    watchdog: Watchdog,
) -> list[Outcome]:
    """Runs cases by the ranks of their transport; none after one that broke off."""
    broken = False
    for case in wanted:
        outcome = Outcome(case)
        if broken:
            outcome.problems.append("not run: a case before it broke off")
            watchdog.outcomes.append(outcome)
            continue
        watchdog.case = case
        try:
            run_calls(ranks[case.transport], subject, case, outcome)
        except RuntimeError as error:
            # A launch, a kernel or another rank: the mailboxes are in disorder.
            outcome.problems.append(str(error))
            broken = True
        watchdog.outcomes.append(together.merged(outcome))
    return watchdog.outcomes


# --- what this process has to run on --------------------------------------------------


def check_options(subject: Subject, options: Options) -> None:
    """Refuses what makes no sense on a GPU.

    Raises:
        MhcgenError: What is wrong, and what to do.
    """
    if options.archs:
        raise MhcgenError(
            f"--arch {options.archs[0]}: with --device cuda the GPU decides the "
            "architecture; leave it out"
        )
    if options.stress:
        raise MhcgenError(
            f"--stress {options.stress}: only the emulator schedules by a seed; leave "
            "out --device cuda, or --stress"
        )
    options.sizes(subject)
    check_choice("--transport", options.transports, subject.transports)


def check_gpus(subject: Subject, options: Options) -> None:
    """Makes sure that there are the GPUs that the ranks need.

    Raises:
        MhcgenError: There are not, or too few processes were started.
    """
    if not torch.cuda.is_available():
        raise MhcgenError(
            f"--device cuda: torch {torch.__version__} finds no GPU; run this where "
            "there is one, or leave --device out for the emulator"
        )
    processes = world_size()
    if processes not in (1, subject.tp):
        raise MhcgenError(
            f"torch.distributed.run started {processes} processes, and {subject.name} "
            f"has {subject.tp} ranks: start {subject.tp}, or a single one, which then "
            "plays all ranks on one GPU"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if local > gpus:
        raise MhcgenError(
            f"torch.distributed.run started {local} processes on a machine of {gpus} "
            "GPUs, and each rank needs one of its own: start a single process, which "
            "plays all ranks on one GPU"
        )
    if processes == 1 and subject.tp > 1:
        check_one_gpu(subject, options)


def check_one_gpu(subject: Subject, options: Options) -> None:
    """Makes sure that one GPU can play all ranks: by unicast.

    Raises:
        MhcgenError: It cannot.
    """
    each = f"start a process a GPU with `{TORCHRUN} {subject.tp} -m mhcgen verify …`"
    if "multicast" in options.transports:
        raise MhcgenError(
            "--transport multicast: one GPU that plays all ranks has no multicast "
            f"address; leave it out, or {each}"
        )
    if "unicast" not in subject.transports:
        raise MhcgenError(
            f"{subject.name} has multicast kernels only, and one GPU that plays all "
            f"ranks has no multicast address: {each}, or add unicast to "
            "parallel.transports of the spec"
        )


def device_arch(subject: Subject, device: torch.device) -> str:
    """The architecture of a GPU, which the package must be built for.

    Raises:
        MhcgenError: It is not.
    """
    from mhcgen.runtime.loader import CAPABILITIES

    capability = torch.cuda.get_device_capability(device)
    arch = CAPABILITIES.get(capability)
    if arch is None or arch not in subject.archs:
        raise MhcgenError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and {subject.name} is built for "
            f"{', '.join(subject.archs)}: add the architecture to the targets of its "
            "spec"
        )
    return arch


def load_ranks(
    folder: Path, subject: Subject, options: Options, together: Together
) -> dict[str, list[FusedBoundary]]:
    """The ranks of this process, loaded once for each transport.

    Without a choice of transports, that is each that works here.
    """
    from mhcgen.runtime import load, load_emulated

    if isinstance(together, Alone):
        ranks = load_emulated(folder)
        return {ranks[0].transport: ranks}
    loaded = [load(folder, transport=each) for each in options.transports or ("auto",)]
    by_transport = {rank.transport: [rank] for rank in loaded}
    if not options.transports and "unicast" in subject.transports:
        by_transport.setdefault("unicast", [load(folder, transport="unicast")])
    return by_transport


# --- the ranks ------------------------------------------------------------------------


class GpuRanks:
    """The ranks that this process plays: all of a package, or its own.

    Attributes:
        ranks: The ranks.
        together: What they have in common with ranks in other processes.
        watchdog: Watches what they launch.
        mixes: What the boundaries or entries since the last step hand to the mixes, a
            rank each.
        generation: Where their mailboxes should be.
    """

    def __init__(
        self, ranks: Sequence[FusedBoundary], together: Together, watchdog: Watchdog
    ) -> None:
        """Takes ranks that are loaded, and poisons all they are going to return."""
        self.ranks = ranks
        self.together = together
        self.watchdog = watchdog
        self.mixes: list[Tensor | None] = []
        for rank in ranks:
            poison(rank, self.mixes)
        self.generation = generation_of(ranks[0])

    def publish(self, call: Call) -> Published:
        """Publishes on every rank."""

        def launch() -> None:
            for rank in self.ranks:
                launch_publish(rank, call)

        self._step("publish", launch)
        rows = [arrived(rank, call.m) for rank in self.ranks]
        return Published(self.together.first(rows[0]), rows)

    def consume(self, call: Call) -> list[Returned]:
        """Takes what was published through the boundary."""
        self._advance()
        return self._returned("boundary", lambda: self._boundaries(call))

    def whole(self, call: Call) -> list[Returned]:
        """Makes a call without a pause."""
        self._advance()
        return self._returned("whole call", lambda: self._whole_calls(call))

    def entry(self, call: Call) -> list[Returned]:
        """Enters the network with a call's hidden state."""

        def launch() -> list[BoundaryOutput]:
            return [
                rank.entry(on_device(rank, call.hidden), *weights_on_device(rank, call))
                for rank in self.ranks
            ]

        return self._returned("entry", launch)

    def consume_exit(self, call: Call) -> list[Tensor]:
        """Takes what was published through the exit."""
        return self._left("exit", lambda: self._exits(call))

    def whole_exit(self, call: Call) -> list[Tensor]:
        """Makes an exit without a pause."""
        return self._left("whole exit", lambda: self._whole_exits(call))

    def problems(self) -> list[str]:
        """What is wrong with the mailboxes once nobody uses them."""
        from mhcgen.runtime.mailbox import SENTINEL_BITS

        self._step("the end of a case", lambda: None)
        problems = []
        for rank in self.ranks:
            mailbox = rank._launcher.mailbox
            if not mailbox.state.numel():
                continue  # one rank alone has none
            left = int((mailbox.buffer.view(torch.int16) != SENTINEL_BITS).sum())
            if left:
                problems.append(
                    f"{left} elements of the mailbox of rank {rank.rank} are not armed "
                    "again"
                )
            generation, arrivals = mailbox.state.tolist()
            if generation != self.generation:
                problems.append(
                    f"rank {rank.rank} is at generation {generation}, and should be "
                    f"at {self.generation}"
                )
            if arrivals:
                problems.append(f"rank {rank.rank} has counted {arrivals} arrivals")
        return problems

    def _boundaries(self, call: Call) -> list[BoundaryOutput]:
        return [rank.consume(*shared_arguments(rank, call)) for rank in self.ranks]

    def _whole_calls(self, call: Call) -> list[BoundaryOutput]:
        if len(self.ranks) > 1:
            # On one GPU, no rank may wait for what is launched behind it.
            for rank in self.ranks:
                launch_publish(rank, call)
            return self._boundaries(call)
        (rank,) = self.ranks
        shared = shared_arguments(rank, call)
        if call.routed is None:
            return [rank(on_device(rank, call.inputs.parts[rank.rank]), *shared)]
        return [rank.finalize(*routed_on_device(rank, call), *shared)]

    def _exits(self, call: Call) -> list[Tensor]:
        return [
            rank.consume_exit(*streams_on_device(rank, call), **exit_named(rank, call))
            for rank in self.ranks
        ]

    def _whole_exits(self, call: Call) -> list[Tensor]:
        if len(self.ranks) > 1:
            for rank in self.ranks:
                launch_publish(rank, call)
            return self._exits(call)
        (rank,) = self.ranks
        streams, named = streams_on_device(rank, call), exit_named(rank, call)
        if call.routed is None:
            x = on_device(rank, call.inputs.parts[rank.rank])
            return [rank.exit(x, *streams, **named)]
        return [rank.exit_finalize(*routed_on_device(rank, call), *streams, **named)]

    def _left(self, name: str, launch: Callable[[], list[Tensor]]) -> list[Tensor]:
        self._advance()
        outputs: list[Tensor] = []
        self._step(name, lambda: outputs.extend(launch()))
        return [output.cpu() for output in outputs]

    def _advance(self) -> None:
        """A boundary or an exit is about to consume a generation."""
        generations = self.ranks[0]._launcher.mailbox.buffer.shape[0]
        # One rank alone has none.
        self.generation = (self.generation + 1) % max(1, generations)

    def _returned(
        self, name: str, launch: Callable[[], list[BoundaryOutput]]
    ) -> list[Returned]:
        outputs: list[BoundaryOutput] = []
        self.mixes.clear()
        self._step(name, lambda: outputs.extend(launch()))
        return [
            Returned(
                residual=output.residual.cpu(),
                layer_input=output.layer_input.cpu(),
                post=output.post.cpu(),
                comb=output.comb.cpu(),
                mix=None if mix is None else mix.cpu(),
                pre=on_host(output, "pre"),
                stream_mean=on_host(output, "stream_mean"),
            )
            for output, mix in zip(outputs, self.mixes, strict=True)
        ]

    def _step(self, name: str, launch: Callable[[], None]) -> None:
        """Launches something on every rank, and waits until it is done on all."""

        def attempt() -> None:
            launch()
            for rank in self.ranks:
                rank.join()
            torch.cuda.synchronize(self.ranks[0].device)

        with self.watchdog.over(name, STEP_SECONDS):
            self.together.step(name, attempt)


def poison(rank: FusedBoundary, mixes: list[Tensor | None]) -> None:
    """Fills all outputs of a rank with NaN from now on, and keeps its mixes."""
    launcher = rank._launcher
    outputs, mix, entry_mix = launcher.outputs, launcher.mix, launcher.entry_mix
    exit_output = launcher.exit_output

    def poisoned_outputs(m: int) -> BoundaryOutput:
        made = outputs(m)
        for tensor in made:
            tensor.fill_(torch.nan)
        return made

    def kept(made: Tensor | None) -> Tensor | None:
        # Of its own: calls share what they are handed.
        mixes.append(None if made is None else torch.full_like(made, torch.nan))
        return mixes[-1]

    vars(launcher).update(
        outputs=poisoned_outputs,
        mix=lambda m: kept(mix(m)),
        entry_mix=lambda m: kept(entry_mix(m)),
        exit_output=lambda m: exit_output(m).fill_(torch.nan),
    )


def generation_of(rank: FusedBoundary) -> int:
    """The generation of the mailbox that the next call of a rank uses.

    0 for one rank alone, which has no mailbox.
    """
    state = rank._launcher.mailbox.state
    return int(state[0]) if state.numel() else 0


def arrived(rank: FusedBoundary, m: int) -> Tensor:
    """What the next boundary of a rank takes: every rank's rows, [TP, M, H].

    One rank alone takes its own, -0.0 as +0.0.
    """
    launcher = rank._launcher
    if launcher.mailbox.state.numel():
        return launcher.mailbox.buffer[generation_of(rank), :, :m].cpu()
    assert launcher.rows is not None
    return reference.sanitize(launcher.rows.cpu())[None]


def launch_publish(rank: FusedBoundary, call: Call) -> None:
    """Launches the publish or the finalize of a rank."""
    if call.routed is None:
        rank.publish(on_device(rank, call.inputs.parts[rank.rank]))
    else:
        rank.publish_finalize(*routed_on_device(rank, call))


def on_device(rank: FusedBoundary, tensor: Tensor) -> Tensor:
    """A tensor on the GPU of a rank."""
    return tensor.to(rank.device)


def on_device_or_none(
    rank: FusedBoundary, tensors: Sequence[Tensor | None]
) -> list[Any]:
    """Tensors on the GPU of a rank; None stays None."""
    return [None if each is None else on_device(rank, each) for each in tensors]


def on_host(output: BoundaryOutput, name: str) -> Tensor | None:
    """What a boundary returned by a name that not every package has."""
    tensor: Tensor | None = getattr(output, name, None)
    return None if tensor is None else tensor.cpu()


def shared_arguments(rank: FusedBoundary, call: Call) -> list[Any]:
    """The arguments of a boundary behind those that are published."""
    *streams, pre = call.streams
    return [
        *on_device_or_none(rank, streams),
        *weights_on_device(rank, call),
        *on_device_or_none(rank, [pre]),
    ]


def weights_on_device(rank: FusedBoundary, call: Call) -> list[Any]:
    """The weights of a boundary, or of an entry."""
    inputs = call.inputs
    weights = [inputs.fn, inputs.scale, inputs.base, call.norm_weight]
    return on_device_or_none(rank, weights)


def streams_on_device(rank: FusedBoundary, call: Call) -> list[Any]:
    """The arguments of an exit behind those that are published, but for named ones."""
    return on_device_or_none(rank, [*call.streams[:3], call.norm_weight])


def exit_named(rank: FusedBoundary, call: Call) -> dict[str, Tensor]:
    """The arguments of an exit that are given by name."""
    return {name: on_device(rank, each) for name, each in call.exit_weights.items()}


def routed_on_device(rank: FusedBoundary, call: Call) -> RoutedRows:
    """The arguments of finalize on a rank."""
    assert call.routed is not None
    rows = call.routed[rank.rank]
    shared = rows.shared_output
    return RoutedRows(
        on_device(rank, rows.gemm2_permuted),
        on_device(rank, rows.expert_weights),
        on_device(rank, rows.expanded_idx_to_permuted_idx),
        None if shared is None else on_device(rank, shared),
    )
