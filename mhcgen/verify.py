"""Verifies a package: every output of its kernels against the reference.

The kernels run in the emulator, for all ranks at once. A call publishes fresh inputs,
by publish or by one of the finalize kernels, and takes them through the boundary and
the mixes; each call of a case takes the next kind of input and the next kernel. With
stress, several calls are in flight at once and the adversarial scheduler runs them:
each takes the streams that the call before it returns.
"""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from mhcgen import reference
from mhcgen.compilation import jobs_of
from mhcgen.console import show_table
from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import EmulatorError, PtxError
from mhcgen.emulator.package import (
    BF16,
    EmulatedPackage,
    EmulatedRanks,
    Output,
    Routed,
    Streams,
    Tensor,
    Weights,
    compile_ptx,
    load_package,
)
from mhcgen.errors import MhcgenError
from mhcgen.plan import Plan, TargetPlan

CALLS = len(reference.VARIANTS)
STRESS_CALLS = 6
STRESS_TOKENS = (1, 2, 3, 5)
SHOWN_FAILURES = 5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FINALIZE_TOLERANCE = 1e-5
"""A sum near zero may be off by more than an ulp, and by this much."""

LAYER_INPUT_ULP = 2
LAYER_INPUT_SHARE = 1e-3
"""Elements of a layer input that may be off by two ulp; one may be in any case."""


@dataclass
class Errors:
    """The largest errors of some calls.

    Attributes:
        published: Elements in the mailboxes that are not what publish was given.
        finalized_ulp: Distance of published sums; 0 where they are close to zero.
        residual: Elements of the new streams whose bits are wrong.
        layer_input_ulp: Distance of layer inputs where c is no small rest.
        layer_input_share: Largest share of a call's elements more than an ulp off.
        mix: Absolute error of the mixes, at unit scale.
        post: Absolute error of post-mix weights.
        comb: Absolute error of residual mixes.
        pre: Absolute error of delayed pre-mixes.
        stream_mean_ulp: Distance of stream means where they are no small rest.
    """

    published: int = 0
    finalized_ulp: int = 0
    residual: int = 0
    layer_input_ulp: int = 0
    layer_input_share: float = 0.0
    mix: float = 0.0
    post: float = 0.0
    comb: float = 0.0
    pre: float = 0.0
    stream_mean_ulp: int = 0

    def include(self, other: Errors) -> None:
        """Takes the larger of each."""
        for each in fields(self):
            name = each.name
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def ok(self) -> bool:
        """Whether the contract allows them."""
        return (
            self.published == self.residual == 0
            and self.finalized_ulp <= 1
            and self.layer_input_ulp <= LAYER_INPUT_ULP
            and self.layer_input_share <= LAYER_INPUT_SHARE
            and self.stream_mean_ulp <= 1
            and max(self.mix, self.post, self.comb, self.pre) <= reference.MIX_TOLERANCE
        )


@dataclass(frozen=True)
class Case:
    """Some calls of a package.

    Attributes:
        arch: The architecture of the kernels.
        transport: How publish reaches the other ranks.
        tokens: The tokens of each call.
        seed: What the inputs are drawn from; the scheduler's seed under stress.
        stress: Whether the calls are in flight at once, under the adversary.
        drawn_from: The sizes that those of the calls were drawn from, under stress.
    """

    arch: str
    transport: str
    tokens: tuple[int, ...]
    seed: int
    stress: bool = False
    drawn_from: tuple[int, ...] = ()

    def command(self, source: Path) -> str:
        """The command that repeats the case."""
        sizes = ",".join(map(str, self.drawn_from or sorted(set(self.tokens))))
        words = ["mhcgen", "verify", str(source), "--arch", self.arch]
        words += ["--transport", self.transport, "--tokens", sizes]
        words += ["--calls", str(len(self.tokens)), "--seed", str(self.seed)]
        return shlex.join(words + ["--stress", "1"] * self.stress)


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        case: The case.
        errors: The largest errors of its calls.
        problems: What else was wrong.
    """

    case: Case
    errors: Errors = field(default_factory=Errors)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all was well."""
        return self.errors.ok and not self.problems

    def as_json(self) -> dict[str, object]:
        """The outcome as plain values."""
        return {
            **asdict(self.case),
            "errors": asdict(self.errors),
            "problems": self.problems,
            "ok": self.ok,
        }


def default_tokens(target: TargetPlan) -> tuple[int, ...]:
    """One token, three, and a call whose last token group is partial."""
    rows = [row for row in target.token_groups if row.group > 1]
    grouped = [first_partial(target, row.group) for row in rows[:1]]
    capacity = target.plan.capacity
    return tuple(sorted({min(m, capacity) for m in (1, 3, *grouped)}))


def first_partial(target: TargetPlan, group: int) -> int:
    """The smallest call of a token group that does not fill its last cluster."""
    first = 1
    for row in target.token_groups:
        if row.group == group:
            for tokens in range(first, row.max_tokens + 1):
                if tokens % group:
                    return tokens
        first = row.max_tokens + 1
    return target.plan.capacity


def cases(
    plan: Plan,
    archs: Sequence[str],
    transports: Sequence[str],
    tokens: Sequence[int],
    calls: int | None,
    seed: int,
    stress: int,
) -> Iterator[Case]:
    """The cases to run.

    Args:
        plan: The plan of the package.
        archs: The architectures.
        transports: The transports.
        tokens: The sizes of calls; sizes that suit the plan, if empty.
        calls: Calls of a case; a number that shows everything, if None.
        seed: The first seed.
        stress: The number of seeds to run under stress; 0 for no stress.
    """
    for arch, transport in itertools.product(archs, transports):
        if stress:
            sizes = tuple(tokens or (m for m in STRESS_TOKENS if m <= plan.capacity))
            for each in range(seed, seed + stress):
                rng = np.random.default_rng(each)
                drawn = rng.choice(sizes, calls or STRESS_CALLS)
                sized = tuple(drawn.tolist())
                yield Case(arch, transport, sized, each, True, sizes)
            continue
        for m in tokens or default_tokens(plan.target(arch)):
            yield Case(arch, transport, (m,) * (calls or CALLS), seed)


def check_choice(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Makes sure that a package has what is asked for.

    Raises:
        MhcgenError: It has not.
    """
    for value in given:
        if value not in known:
            raise MhcgenError(
                f"{option} {value!r}: the package has {', '.join(known)}; choose one "
                "of these"
            )


def sizes_of(plan: Plan, text: str) -> list[int]:
    """The sizes of calls in a list such as ``1,3,64``.

    Raises:
        MhcgenError: One is no number, or no call can have so many tokens.
    """
    sizes = []
    for word in filter(None, text.split(",")):
        if not word.strip().isdecimal() or not 1 <= int(word) <= plan.capacity:
            raise MhcgenError(
                f"--tokens {word}: a call of {plan.name} has 1 to {plan.capacity} "
                "tokens (capacity.max_tokens)"
            )
        sizes.append(int(word))
    return sizes


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
        names = kernels_of(folder, {case.transport for case in wanted})
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
            advance(f"{case.arch} {case.transport}")
        return outcomes


def kernels_of(folder: Path, transports: Collection[str]) -> set[str]:
    """The kernels that some transports need."""
    return {
        job.row.name
        for job in jobs_of(folder)
        if not job.row.name.startswith(("publish", "finalize"))
        or job.row.name.endswith(tuple(transports))
    }


def run(package: EmulatedPackage, case: Case) -> Outcome:
    """Runs a case; what goes wrong is in the outcome."""
    outcome = Outcome(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        run_case(package, case, outcome)
    except EmulatorError as error:
        outcome.problems.append(str(error))
    finally:
        torch.set_num_threads(threads)
    return outcome


HEADERS = (
    "arch",
    "transport",
    "tokens",
    "calls",
    "published",
    "finalize ulp",
    "residual",
    "input ulp",
    "beyond 1 ulp",
    "mix",
    "post",
    "comb",
    "result",
)


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[object, ...]]:
    """The table of errors: a row for each case, or for all seeds of a transport."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        sizes = "changing" if case.stress else str(case.tokens[0])
        groups.setdefault((case.arch, case.transport, sizes), []).append(outcome)
    rows: list[tuple[object, ...]] = []
    for key, members in groups.items():
        errors = Errors()
        for outcome in members:
            errors.include(outcome.errors)
        failed = sum(not outcome.ok for outcome in members)
        sent = (errors.published, errors.finalized_ulp)
        stress = members[0].case.stress
        rows.append(
            (
                *key,
                sum(len(outcome.case.tokens) for outcome in members),
                *((None, None) if stress else sent),
                errors.residual,
                errors.layer_input_ulp,
                f"{errors.layer_input_share:.1e}",
                None if stress else f"{errors.mix:.1e}",
                f"{errors.post:.1e}",
                f"{errors.comb:.1e}",
                f"{failed} failed" if failed else "ok",
            )
        )
    return rows


def show(outcomes: Sequence[Outcome], name: str, source: Path) -> None:
    """Prints the table, and for each failure what happened and how to repeat it."""
    show_table(
        f"{name}: wrong elements (published, residual), bf16 ulp, absolute errors",
        HEADERS,
        rows_of(outcomes),
    )
    failures = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failures[:SHOWN_FAILURES]:
        print(f"\nFAILED: {outcome.case.command(source)}")
        if not outcome.errors.ok:
            wrong = ", ".join(f"{k} {v}" for k, v in asdict(outcome.errors).items())
            print(f"  {wrong}")
        for problem in outcome.problems:
            print("\n".join(f"  {line}" for line in problem.splitlines()))
    if len(failures) > SHOWN_FAILURES:
        print(f"\n... and {len(failures) - SHOWN_FAILURES} more failures")


def constants_of(plan: Plan) -> reference.Constants:
    """The model's constants."""
    model = plan.spec.model
    return reference.Constants(
        model.rms_eps,
        model.hc_eps,
        model.norm_eps,
        model.post_mult,
        model.sinkhorn_iters,
        model.norm_weight == "plus_one",
    )


def norm_weight_of(plan: Plan, inputs: reference.Inputs) -> torch.Tensor | None:
    """The weight of the norm, or None where it has none."""
    return None if plan.norm_weight == "none" else inputs.norm_weight


def inputs_of(
    plan: Plan, m: int, seed: int, hard: reference.Variant = "plain"
) -> reference.Inputs:
    """Random inputs of a package's types."""
    precision = plan.spec.precision
    return reference.random_inputs(
        m,
        plan.hidden,
        plan.hc,
        plan.tp,
        seed,
        hard=hard,
        fn_dtype=DTYPES[precision.fn_weight],
        dtype=DTYPES[precision.activation],
    )


def run_case(package: EmulatedPackage, case: Case, outcome: Outcome) -> None:
    """Runs the calls of a case and compares what they return."""
    resident = None
    if case.stress:
        # Room for all blocks, for one cluster after another, or for three.
        clusters = (None, 1, 3)[case.seed % 3]
        size = package.plan.target(case.arch).cluster_size
        resident = clusters and clusters * size
    ranks = EmulatedRanks(
        package,
        case.transport,
        seed=case.seed if case.stress else None,
        resident_blocks=resident,
        tensor_bytes=tensor_bytes(package.plan, case.tokens),
    )
    calls = _Calls(ranks, case)
    for index in range(len(case.tokens)):
        call = calls.launch(index)
        if not case.stress:
            outcome.errors.include(call.compare(ranks))
    if case.stress:
        ranks.run()
        for call in calls.done:
            outcome.errors.include(call.compare(ranks))
    outcome.problems += ranks.idle_problems()


def tensor_bytes(plan: Plan, tokens: Sequence[int]) -> int:
    """Memory enough for the tensors of some calls on one rank."""
    row = 2 * plan.hidden
    top_k = plan.spec.moe.top_k if plan.spec.moe else 0
    each = row * (5 * plan.hc + 16 + 2 * top_k)
    weights = plan.mix * plan.fn_row_bytes + row
    overhead = 64 << 14  # guards and rounding of each tensor
    return sum(m * each + weights + 4 * row + overhead for m in tokens) + (4 << 20)


@dataclass
class _Call:
    """One call: what it was given and what it returned."""

    plan: Plan
    inputs: reference.Inputs
    streams: Streams
    output: Output
    parts: list[torch.Tensor] | None
    errors: Errors
    _results: dict[bytes, reference.BoundaryResult] = field(default_factory=dict)

    def compare(self, ranks: EmulatedRanks) -> Errors:
        """The errors of what every rank returned."""
        errors = self.errors
        for rank in range(self.plan.tp):
            result = self.expected(rank)
            actual = as_torch(self.output.streams.residual.read(rank))
            errors.residual += wrong_bits(actual, result.residual)
            layer_input = as_torch(self.output.layer_input.read(rank))
            check = reference.check_layer_input(layer_input, result)
            distance = reference.ulp_distance(layer_input, result.layer_input)
            off = int((distance > 1).sum()) - 1
            errors.layer_input_ulp = max(errors.layer_input_ulp, check.worst_ulp)
            errors.layer_input_share = max(
                errors.layer_input_share, off / distance.numel()
            )
            check_mixes = reference.check_mixes(
                as_torch(self.output.streams.post.read(rank)),
                as_torch(self.output.streams.comb.read(rank)),
                result,
            )
            errors.post = max(errors.post, check_mixes.worst_post)
            errors.comb = max(errors.comb, check_mixes.worst_comb)
            pre, means = self.output.streams.pre, self.output.stream_mean
            if pre is not None:
                actual = as_torch(pre.read(rank))
                off_by = reference.max_abs_error(actual, result.pre)
                errors.pre = max(errors.pre, off_by)
            if means is not None:
                mean_off = mean_distance(as_torch(means.read(rank)), result)
                errors.stream_mean_ulp = max(errors.stream_mean_ulp, mean_off)
        return errors

    def expected(self, rank: int) -> reference.BoundaryResult:
        """The reference's results for the streams that this rank was given."""
        streams = self.streams
        residual = streams.residual.read(rank)
        post, comb = streams.post.read(rank), streams.comb.read(rank)
        pre = streams.pre.read(rank) if streams.pre else None
        # The ranks' streams are the same, unless something is wrong.
        key = residual.tobytes() + post.tobytes() + comb.tobytes()
        key += b"" if pre is None else pre.tobytes()
        if key not in self._results:
            inputs = self.inputs
            self._results[key] = reference.boundary(
                self.parts or inputs.parts,
                as_torch(residual),
                as_torch(post),
                as_torch(comb),
                inputs.fn,
                inputs.scale,
                inputs.base,
                norm_weight_of(self.plan, inputs),
                constants_of(self.plan),
                None if pre is None else as_torch(pre),
            )
        return self._results[key]


class _Calls:
    """Launches the calls of a case."""

    def __init__(self, ranks: EmulatedRanks, case: Case) -> None:
        self.ranks = ranks
        self.case = case
        self.plan = ranks.plan
        self.done: list[_Call] = []
        moe = self.plan.spec.moe
        dtypes = moe.weight_dtypes if moe else ()
        self.kinds: list[tuple[str, bool] | None] = [
            None,
            *itertools.product(dtypes, self.plan.shared_expert),
        ]

    def launch(self, index: int) -> _Call:
        """Puts a call into the streams; runs it, too, unless under stress."""
        case, plan, ranks = self.case, self.plan, self.ranks
        m = case.tokens[index]
        variants = reference.VARIANTS
        hard = variants[(index + case.seed * case.stress) % len(variants)]
        inputs = inputs_of(plan, m, 1000 * case.seed + index, hard)
        kind = self.kinds[(index + case.seed) % len(self.kinds)]
        errors, parts = Errors(), None
        streams = self._streams(m, inputs)
        if kind is None:
            ranks.publish(self._input("x", *map(as_numpy, inputs.parts)))
        else:
            parts = self._finalize(m, index, *kind)
        if not case.stress:
            ranks.run()
            sent = self._sent(m)
            if kind is None:
                wanted = [reference.sanitize(part) for part in inputs.parts]
                errors.published = self._differing(m, wanted)
            else:
                assert parts is not None
                errors.finalized_ulp = self._distance(sent)
                errors.published = self._differing(m, sent)
                parts = sent
        weights = uploaded_weights(ranks, inputs)
        output = ranks.consume(streams, weights)
        call = _Call(plan, inputs, streams, output, parts, errors)
        self.done.append(call)
        if not case.stress:
            ranks.run()
            for rank in range(plan.tp):
                result = call.expected(rank)
                actual = as_torch(output.mix.read(rank))
                errors.mix = max(
                    errors.mix, reference.max_abs_error(actual, result.mix)
                )
        return call

    def _streams(self, m: int, inputs: reference.Inputs) -> Streams:
        """Those of the call before under stress, where it has enough tokens."""
        if self.case.stress and self.done:
            before = self.done[-1].output.streams
            if before.residual.shape[0] >= m:
                return before.first(m)
        names = ["residual", "post", "comb", *["pre"] * self.plan.delayed]
        return Streams(
            *(self._input(name, as_numpy(getattr(inputs, name))) for name in names)
        )

    def _input(self, name: str, *values: Array) -> Tensor:
        """An input that the kernel before the publish writes, under stress."""
        ranks = self.ranks
        make = ranks.produced if self.case.stress else ranks.tensor
        return make(name, *values)

    def _finalize(
        self, m: int, index: int, dtype: str, shared: bool
    ) -> list[torch.Tensor]:
        """Launches a finalize of random rows; returns what it should publish.

        Absent experts have weights that are NaN, and so is a row that nobody asks for.
        Under stress, all sums are exact, whatever the order.
        """
        plan, ranks, case = self.plan, self.ranks, self.case
        moe = plan.spec.moe
        assert moe is not None
        generator = torch.Generator().manual_seed(1000 * case.seed + index + 500)
        activation = DTYPES[plan.spec.precision.activation]
        rows = 4 * m + 3
        self.routed = []
        for _ in range(plan.tp):
            gemm2 = torch.randn(rows, plan.hidden, generator=generator)
            weights = torch.rand(m, moe.top_k, generator=generator)
            shared_row = torch.randn(m, plan.hidden, generator=generator)
            if case.stress:
                gemm2, shared_row = gemm2.mul(2).round(), shared_row.mul(2).round()
                weights = weights.mul(4).round().div(2)
            gemm2[-1] = torch.nan
            absent = torch.rand(m, moe.top_k, generator=generator) < 0.5
            chosen = torch.randint(0, rows - 1, (m, moe.top_k), generator=generator)
            self.routed.append(
                (
                    gemm2.to(activation),
                    weights.masked_fill(absent, torch.nan).to(
                        torch.bfloat16 if dtype == "bf16" else torch.float32
                    ),
                    torch.where(absent, -1, chosen).to(torch.int32),
                    shared_row.to(activation) if shared else None,
                )
            )
        names = [each.name for each in fields(Routed)]
        tensors: list[Tensor | None] = []
        for name, column in zip(names, zip(*self.routed, strict=True), strict=True):
            given = [as_numpy(value) for value in column if value is not None]
            # Routing is older than the rows that the experts make of it.
            make = self._input if name == "gemm2_permuted" else ranks.tensor
            tensors.append(make(name, *given) if given else None)
        gemm2_tensor, weights_tensor, index_tensor, shared_tensor = tensors
        assert gemm2_tensor and weights_tensor and index_tensor
        ranks.publish_finalize(
            Routed(gemm2_tensor, weights_tensor, index_tensor, shared_tensor)
        )
        return [
            reference.sanitize(reference.finalize(*arguments)[1])
            for arguments in self.routed
        ]

    def _sent(self, m: int) -> list[torch.Tensor]:
        """What every rank has published, as rank 0 sees it."""
        rows = self.ranks.published(0, m)
        return list(as_torch(rows).unbind())

    def _differing(self, m: int, wanted: Sequence[torch.Tensor]) -> int:
        """Elements of all mailboxes that are not the wanted ones."""
        return sum(
            wrong_bits(as_torch(row), part)
            for rank in range(self.plan.tp)
            for row, part in zip(self.ranks.published(rank, m), wanted, strict=True)
        )

    def _distance(self, sent: Sequence[torch.Tensor]) -> int:
        """The largest distance of published sums, but for those near zero."""
        worst = 0
        for part, arguments in zip(sent, self.routed, strict=True):
            exact, rounded = reference.finalize(*arguments)
            distance = reference.ulp_distance(part, rounded)
            close = (part.double() - exact).abs() <= FINALIZE_TOLERANCE
            worst = max(worst, int(distance.masked_fill(close, 0).max()))
        return worst


def uploaded_weights(ranks: EmulatedRanks, inputs: reference.Inputs) -> Weights:
    """The weights of some inputs, on every rank."""
    fn, scale, base = (
        ranks.tensor(name, as_numpy(getattr(inputs, name)))
        for name in ("fn", "scale", "base")
    )
    weight = norm_weight_of(ranks.plan, inputs)
    uploaded = None if weight is None else ranks.tensor("norm_weight", as_numpy(weight))
    return Weights(fn, scale, base, uploaded)


def mean_distance(actual: torch.Tensor, result: reference.BoundaryResult) -> int:
    """The largest distance of a stream mean, but where the streams cancel."""
    distance = reference.ulp_distance(actual, result.stream_mean)
    exact = result.residual.double()
    small = exact.mean(1).abs() <= 1e-3 * exact.abs().mean(1)
    either = distance == reference.NAN_DISTANCE
    return int(distance.masked_fill(small & ~either, 0).max())


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


def wrong_bits(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """BF16 elements whose bits differ, but for NaNs."""
    same = actual.view(torch.int16) == expected.view(torch.int16)
    both_nan = torch.isnan(actual) & torch.isnan(expected)
    return int((~(same | both_nan)).sum())
