"""Verifies in the emulator: all ranks on a CPU, one call after another or at once.

Under stress, several calls are in flight and the adversarial scheduler runs them: each
takes the streams that the call before it returns.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from mhcgen.compilation import check_archs, jobs_of
from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import EmulatorError, PtxError
from mhcgen.emulator.package import (
    BF16,
    EmulatedPackage,
    EmulatedRanks,
    Head,
    Output,
    Routed,
    Streams,
    Tensor,
    Weights,
    compile_ptx,
    load_package,
    plan_of,
)
from mhcgen.errors import MhcgenError
from mhcgen.plan import LOCAL
from mhcgen.spec import Transport
from mhcgen.verify.calls import run_calls
from mhcgen.verify.cases import Case, Options, cases, check_choice
from mhcgen.verify.compare import (
    Published,
    Returned,
    expected,
    expected_entry,
    expected_exit,
    normalized_errors,
    returned_errors,
)
from mhcgen.verify.inputs import Call, draw
from mhcgen.verify.report import Outcome
from mhcgen.verify.subject import Subject

Result = TypeVar("Result")
TRANSPORTS = (*get_args(Transport), LOCAL)


def wanted_cases(folder: Path, options: Options) -> list[Case]:
    """The cases of the package in a folder.

    Raises:
        MhcgenError: The package has not what is asked for, or breaks its spec.
    """
    check_constants(folder)
    subject = Subject.of_package(folder)
    check_archs(subject.name, options.archs, subject.archs)
    check_choice("--transport", options.transports, subject.transports)
    archs = options.archs or subject.archs
    transports = options.transports or subject.transports
    return [*cases(subject, options, archs, transports)]


def verify(
    folder: Path, wanted: Sequence[Case], advance: Callable[[str], None]
) -> list[Outcome]:
    """Runs cases of the package in a folder.

    Args:
        folder: The package.
        wanted: The cases.
        advance: Called after each, with its name.

    Raises:
        CompileError: A kernel does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="mhcgen-") as kept:
        archs = list(dict.fromkeys(case.arch for case in wanted))
        names = kernels_of(folder, wanted)
        compile_ptx(folder, archs, Path(kept), names)
        packages = {}
        outcomes = []
        for case in wanted:
            try:
                if case.arch not in packages:
                    packages[case.arch] = load_package(folder, case.arch, Path(kept))
                outcomes.append(run(packages[case.arch], case))
            except PtxError as error:
                outcomes.append(Outcome(case, problems=[str(error)]))
            # A case's memories lie in cycles. They are few objects, so the collector is
            # in no hurry, but large ones.
            gc.collect()
            advance(f"{case.arch} {case.transport}")
        return outcomes


def check_constants(folder: Path) -> None:
    """Makes sure that the constants of a package are those of its spec.

    Raises:
        MhcgenError: They are not.
    """
    differing = Subject.of_package(folder).differences(Subject.of_plan(plan_of(folder)))
    if differing:
        raise MhcgenError(
            f"{folder}/constants.py disagrees with spec.yaml beside it: "
            f"{'; '.join(differing)}: run mhcgen build"
        )


def kernels_of(folder: Path, wanted: Sequence[Case]) -> set[str]:
    """The kernels that cases launch: those of their transports and token groups."""
    table = Subject.of_package(folder).token_groups
    groups = {
        next(group for most, group in table[case.arch] if m <= most)
        for case in wanted
        for m in case.tokens
    }
    transports = {case.transport for case in wanted}
    return {
        row.name
        for row in (job.row for job in jobs_of(folder))
        if (row.token_group is None or row.token_group in groups)
        and row.name.endswith(tuple(transports)) == row.name.endswith(TRANSPORTS)
    }


def run(package: EmulatedPackage, case: Case) -> Outcome:
    """Runs a case; what goes wrong is in the outcome."""
    outcome = Outcome(case)
    subject = Subject.of_plan(package.plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        if case.stress:
            run_stress(package, subject, case, outcome)
        else:
            size = tensor_bytes(subject, case.tokens)
            ranks = EmulatedRanks(package, case.transport, tensor_bytes=size)
            run_calls(Emulator(ranks), subject, case, outcome)
    except EmulatorError as error:
        outcome.problems.append(str(error))
    finally:
        torch.set_num_threads(threads)
    return outcome


def tensor_bytes(subject: Subject, tokens: Sequence[int]) -> int:
    """Memory enough for the tensors of some calls on one rank."""
    row = 2 * subject.hidden
    ends = subject.entry or subject.exit_by is not None
    each = row * (9 * subject.hc + 32 + 2 * subject.top_k) * (1 + ends)
    uploads = 4 + ends  # of fn: for each boundary and end
    fn = subject.hc * (2 + subject.hc) * subject.hc * 2 * row
    weights = uploads * (fn + row)
    overhead = 64 << 14  # guards and rounding of each tensor
    return sum(m * each + weights + 4 * row + overhead for m in tokens) + (4 << 20)


# --- one call after another -----------------------------------------------------------


class Emulator:
    """All ranks of a package, in the emulator."""

    def __init__(self, ranks: EmulatedRanks) -> None:
        """Takes the ranks."""
        self.ranks = ranks

    def publish(self, call: Call) -> Published:
        """Publishes on every rank."""
        ranks = self.ranks
        launch_publish(ranks, sent_by(ranks, call, ranks.tensor))
        ranks.run()
        rows = [
            as_torch(ranks.published(rank, call.m)) for rank in range(ranks.plan.tp)
        ]
        return Published(rows[0], rows)

    def consume(self, call: Call) -> list[Returned]:
        """Takes what was published through the boundary and the mixes."""
        ranks = self.ranks
        output = ranks.consume(streams_of(call, ranks.tensor), weights_of(ranks, call))
        return self._returned(output)

    def whole(self, call: Call) -> list[Returned]:
        """Makes a call by a boundary that publishes, where there is one."""
        ranks = self.ranks
        if not ranks.publishes(call.m, call.routed is not None):
            return []
        x = sent_by(ranks, call, ranks.tensor)
        output = ranks.call(x, streams_of(call, ranks.tensor), weights_of(ranks, call))
        return self._returned(output)

    def _returned(self, output: Output) -> list[Returned]:
        ranks = self.ranks
        ranks.run()
        return [
            returned(output, rank)._replace(mix=read(output.mix, rank))
            for rank in range(ranks.plan.tp)
        ]

    def entry(self, call: Call) -> list[Returned]:
        """Enters the network with a call's hidden state."""
        ranks = self.ranks
        hidden = ranks.tensor("hidden", as_numpy(call.hidden))
        return self._returned(ranks.entry(hidden, weights_of(ranks, call)))

    def consume_exit(self, call: Call) -> list[torch.Tensor]:
        """Takes what was published through the exit."""
        ranks = self.ranks
        output = launch_exit(ranks, call, streams_of(call, ranks.tensor))
        ranks.run()
        return [as_torch(output.read(rank)) for rank in range(ranks.plan.tp)]

    def whole_exit(self, call: Call) -> list[torch.Tensor]:
        """Nothing: an exit is the same two launches with a pause and without."""
        return []

    def problems(self) -> list[str]:
        """What is wrong with the mailboxes once nobody uses them."""
        return self.ranks.idle_problems()


Upload = Callable[..., Tensor]


def streams_of(call: Call, make: Upload) -> Streams:
    """The streams of a call, the same on every rank."""
    residual, post, comb, pre = call.streams
    return Streams(
        make("residual", as_numpy(residual)),
        make("post", as_numpy(post)),
        make("comb", as_numpy(comb)),
        None if pre is None else make("pre", as_numpy(pre)),
    )


def weights_of(ranks: EmulatedRanks, call: Call) -> Weights:
    """The weights of a call, the same on every rank."""
    inputs, weight = call.inputs, call.norm_weight
    return Weights(
        ranks.tensor("fn", as_numpy(inputs.fn)),
        ranks.tensor("scale", as_numpy(inputs.scale)),
        ranks.tensor("base", as_numpy(inputs.base)),
        None if weight is None else ranks.tensor("norm_weight", as_numpy(weight)),
    )


def sent_by(ranks: EmulatedRanks, call: Call, make: Upload) -> Tensor | Routed:
    """What the ranks send in a call: their rows, or the routed rows that they sum.

    Args:
        ranks: The ranks.
        call: The call.
        make: Uploads what the kernel before makes; routing is older.
    """
    if call.routed is None:
        return make("x", *map(as_numpy, call.inputs.parts))
    first = call.routed[0]
    makes = {name: ranks.tensor for name in first._fields} | {"gemm2_permuted": make}
    return Routed(
        **{
            name: makes[name](
                name, *(as_numpy(getattr(rows, name)) for rows in call.routed)
            )
            for name in first._fields
            if getattr(first, name) is not None
        }
    )


def launch_publish(ranks: EmulatedRanks, x: Tensor | Routed) -> None:
    """Launches the publish or the finalize of what the ranks send."""
    if isinstance(x, Routed):
        ranks.publish_finalize(x)
    else:
        ranks.publish(x)


def launch_exit(ranks: EmulatedRanks, call: Call, streams: Streams) -> Tensor:
    """Launches the exit of what was published; returns its normalized rows."""
    weight, by_head = call.norm_weight, call.exit_by == "sigmoid"
    named = {
        name: ranks.tensor(name, as_numpy(each))
        for name, each in call.exit_weights.items()
    }
    return ranks.exit(
        streams,
        None if weight is None else ranks.tensor("norm_weight", as_numpy(weight)),
        Head(**named) if by_head else None,
    )


def returned(output: Output, rank: int) -> Returned:
    """What a boundary returned on a rank, but for its mixes."""
    streams = output.streams
    return Returned(
        residual=as_torch(streams.residual.read(rank)),
        layer_input=as_torch(output.layer_input.read(rank)),
        post=as_torch(streams.post.read(rank)),
        comb=as_torch(streams.comb.read(rank)),
        pre=read(streams.pre, rank),
        stream_mean=read(output.stream_mean, rank),
    )


def read(tensor: Tensor | None, rank: int) -> torch.Tensor | None:
    """What a tensor holds on a rank, if there is one."""
    return None if tensor is None else as_torch(tensor.read(rank))


# --- stress ---------------------------------------------------------------------------


def run_stress(
    package: EmulatedPackage, subject: Subject, case: Case, outcome: Outcome
) -> None:
    """Launches all calls of a case, and lets the adversary run them."""
    # Room for all blocks, for one cluster after another, or for three; but for all
    # clusters of a boundary that publishes.
    plan, target = package.plan, package.plan.target(case.arch)
    clusters, size = (None, 1, 3)[case.seed % 3], target.cluster_size
    size = max(size, plan.ends_cluster) if plan.ends else size
    calls = [draw(subject, case, index) for index in range(len(case.tokens))]
    whole = [call.m for call in calls if call.launches == 1]
    at_once = [target.boundary_launch(m).grid[1] for m in whole]
    clusters = clusters and max(clusters, *at_once, 1)
    ranks = EmulatedRanks(
        package,
        case.transport,
        seed=case.seed,
        resident_blocks=clusters and clusters * size,
        tensor_bytes=tensor_bytes(subject, case.tokens),
    )
    flights: list[_Flight] = []
    for call in calls:
        before = flights[-1].output if flights else None
        streams = None if before is None else before.streams
        flights.append(_Flight.start(ranks, call, streams))
    ranks.run()
    for flight in flights:
        for rank in range(subject.tp):
            flight.compare(subject, rank, outcome)
    outcome.problems += ranks.idle_problems()


@dataclass
class _Flight:
    """A call in flight: what it was given and what it returns.

    Its mixes are gone when all is over: the next call has overwritten them.

    Attributes:
        call: The call.
        streams: The streams that it takes.
        entered: What an entry before it returned, if it has one.
        output: What its boundary returns; None of an exit.
        left: What its exit returns; None of a boundary.
    """

    call: Call
    streams: Streams
    entered: Output | None
    output: Output | None = None
    left: Tensor | None = None
    _results: dict[bytes, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, ranks: EmulatedRanks, call: Call, before: Streams | None) -> _Flight:
        """Launches a call, with the streams of the one before if it has enough tokens.

        Otherwise they come from an entry, or from a kernel that stands for one.
        """
        weights, entered = weights_of(ranks, call), None
        if before is not None and before.residual.shape[0] >= call.m:
            streams = before.first(call.m)
        elif ranks.plan.spec.ends.entry:
            hidden = ranks.produced("hidden", as_numpy(call.hidden))
            entered = ranks.entry(hidden, weights)
            streams = entered.streams
        else:
            streams = streams_of(call, ranks.produced)
        flight = cls(call, streams, entered)
        x = sent_by(ranks, call, ranks.produced)
        routed = call.routed is not None
        whole = call.launches == 1 and ranks.publishes(call.m, routed)
        if whole and not call.leaves:
            flight.output = ranks.call(x, streams, weights)
            return flight
        launch_publish(ranks, x)
        if call.leaves:
            flight.left = launch_exit(ranks, call, streams)
        else:
            flight.output = ranks.consume(streams, weights)
        return flight

    def compare(self, subject: Subject, rank: int, outcome: Outcome) -> None:
        """Compares what one rank returned with the reference, from what it was given.

        The ranks' streams are the same, unless something is wrong.
        """
        if self.entered is not None:
            result = self._once(b"entry", lambda: expected_entry(subject, self.call))
            errors = returned_errors(returned(self.entered, rank), result)
            outcome.end("entry").include(errors)
        streams = self.streams
        given = (
            as_torch(streams.residual.read(rank)),
            as_torch(streams.post.read(rank)),
            as_torch(streams.comb.read(rank)),
            read(streams.pre, rank),
        )
        key = b"".join(as_numpy(each).tobytes() for each in given if each is not None)
        call = self.call
        if self.left is not None:
            left = self._once(
                key, lambda: expected_exit(subject, call, call.parts(), given)
            )
            rows = as_torch(self.left.read(rank))
            outcome.end("exit").include(normalized_errors(rows, left))
        if self.output is not None:
            result = self._once(
                key, lambda: expected(subject, call, call.parts(), given)
            )
            errors = returned_errors(returned(self.output, rank), result)
            outcome.errors.include(errors)

    def _once(self, key: bytes, compute: Callable[[], Result]) -> Result:
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result


# --- BF16 -----------------------------------------------------------------------------


def as_numpy(tensor: torch.Tensor) -> Array:
    """A tensor as an array; BF16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BF16)
    return tensor.contiguous().numpy()


def as_torch(array: Array) -> torch.Tensor:
    """An array as a tensor; 16-bit integers are BF16."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
