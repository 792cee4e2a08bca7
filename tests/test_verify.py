"""Verification but for the execution: cases, comparison, report, and GPUs that are not.

tests/emulator and tests/hardware run kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mhcgen import cli, reference
from mhcgen.compilation import CompileError
from mhcgen.errors import MhcgenError
from mhcgen.plan import Plan
from mhcgen.runtime import BoundaryOutput
from mhcgen.runtime.mailbox import arm
from mhcgen.verify import on_cuda, together
from mhcgen.verify.calls import run_calls
from mhcgen.verify.cases import Case, Options, cases, default_tokens, first_partial
from mhcgen.verify.compare import Errors
from mhcgen.verify.inputs import draw
from mhcgen.verify.on_cpu import check_constants, kernels_of
from mhcgen.verify.on_cuda import GpuRanks, run_all
from mhcgen.verify.report import Outcome, rows_of, show
from mhcgen.verify.subject import Subject
from mhcgen.verify.together import Alone
from mhcgen.verify.watchdog import Watchdog

GENERATED = Path(__file__).parents[1] / "generated"
SMALL = Subject(
    name="small",
    tp=2,
    hidden=64,
    hc=4,
    capacity=8,
    transports=("multicast", "unicast"),
    token_groups={"sm_90a": ((2, 1), (8, 3))},
    top_k=2,
    weight_dtypes=("fp32", "bf16"),
    shared_expert=(False, True),
    constants=reference.Constants(1e-6, 1e-6, 1e-6, 2.0, 3),
)
CASE = Case("sm_90a", "unicast", (3,) * 7, seed=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# What is verified, and by which calls


@pytest.mark.parametrize("name", ["glm53", "glm53_tp2"])
def test_a_package_says_what_its_plan_says(name: str) -> None:
    check_constants(GENERATED / name)


def test_constants_that_are_not_those_of_the_spec(tmp_path: Path) -> None:
    folder = tmp_path / "glm53"
    shutil.copytree(GENERATED / "glm53", folder)
    text = (folder / "constants.py").read_text()
    (folder / "constants.py").write_text(
        text.replace("HC_EPS = 1e-06", "HC_EPS = 1e-5")
    )
    with pytest.raises(
        MhcgenError, match=r"constants is .*hc_eps=.*: run mhcgen build"
    ):
        check_constants(folder)


def test_cases(glm53_plan: Plan) -> None:
    glm53 = Subject.of_plan(glm53_plan)
    assert default_tokens(glm53, "sm_90a") == (1, 3, 9)
    assert first_partial(glm53, "sm_90a", 3) == 19
    assert default_tokens(SMALL, "sm_90a") == (1, 3, 4)
    drawn = [*cases(SMALL, Options(), ["sm_90a"], ["unicast"])]
    assert [case.tokens for case in drawn] == [(m,) * 7 for m in (1, 3, 4)]


def test_stress_cases_are_repeated_by_their_command() -> None:
    options = Options(seed=4, stress=3)
    stressed = [*cases(SMALL, options, ["sm_90a"], ["unicast"])]
    assert [case.seed for case in stressed] == [4, 5, 6]
    assert all(case.stress and len(case.tokens) == 6 for case in stressed)
    assert len({case.tokens for case in stressed}) > 1
    for case in stressed:
        sizes = ",".join(map(str, case.drawn_from))
        again = Options(tokens=sizes, calls=len(case.tokens), seed=case.seed, stress=1)
        assert [*cases(SMALL, again, ["sm_90a"], ["unicast"])] == [case]
    command = stressed[0].command(Path("x y.yaml"))
    assert command == (
        "mhcgen verify 'x y.yaml' --arch sm_90a --transport unicast --tokens 1,2,3,5 "
        "--calls 6 --seed 4 --stress 1"
    )


def test_the_command_of_a_case_on_gpus() -> None:
    case = dataclasses.replace(CASE, device="cuda")
    rest = "verify p --device cuda --transport unicast --tokens 3 --calls 7 --seed 1"
    assert case.command(Path("p")) == f"mhcgen {rest}"
    case = dataclasses.replace(case, processes=4)
    assert case.command(Path("p")) == (
        f"python -m torch.distributed.run --nproc-per-node 4 -m mhcgen {rest}"
    )


def test_calls_show_every_input_and_every_kernel() -> None:
    calls = [draw(SMALL, CASE, index) for index in range(7)]
    kinds = {
        None
        if call.routed is None
        else (call.routed[0].expert_weights.dtype, call.routed[0].shared_output is None)
        for call in calls
    }
    assert len(kinds) == 5
    assert any(torch.isnan(call.inputs.parts[-1]).any() for call in calls)
    for call in calls:
        if call.routed is not None:
            for rows in call.routed:
                absent = rows.expanded_idx_to_permuted_idx < 0
                assert torch.equal(torch.isnan(rows.expert_weights), absent)


def test_only_what_cases_launch_is_compiled() -> None:
    """A package has kernels for many token groups and for both transports."""
    folder = GENERATED / "glm53_tp2"
    wanted = [
        Case("sm_90a", "unicast", (1, 3), seed=0, stress=True),
        Case("sm_90a", "unicast", (18,), seed=0),
    ]
    shared = {f"finalize_{t}{s}" for t in ("fp32", "bf16") for s in ("", "_shared")}
    assert kernels_of(folder, wanted) == {
        "mixes",
        "publish_unicast",
        *(f"{name}_unicast" for name in shared),
        *(f"boundary_{g}_{name}_unicast" for g in (1, 2) for name in shared),
        *(f"boundary_{group}{name}" for group in (1, 2) for name in ("", "_unicast")),
    }
    both = [Case("sm_90a", each, (1,), seed=0) for each in ("unicast", "multicast")]
    names = kernels_of(GENERATED / "glm53", both)
    assert {"boundary_1_multicast", "boundary_1_unicast"} <= names


# Comparison


def test_limits() -> None:
    assert Errors().ok
    for wrong in (
        Errors(published=1),
        Errors(finalized_ulp=2),
        Errors(residual=1),
        Errors(layer_input_ulp=3),
        Errors(layer_input_share=0.01),
        Errors(mix=1e-4),
        Errors(post=float("inf")),
        Errors(comb=1e-4),
    ):
        assert not wrong.ok
    assert not Outcome(CASE, problems=["one"]).ok


class FakeLauncher:
    rows: torch.Tensor | None

    def __init__(self, buffer: torch.Tensor) -> None:
        self.mailbox = SimpleNamespace(
            buffer=buffer, state=torch.zeros(2, dtype=torch.int32)
        )

    def outputs(self, m: int) -> BoundaryOutput:
        hc, hidden = SMALL.hc, SMALL.hidden
        return BoundaryOutput(
            torch.zeros(m, hc, hidden, dtype=torch.bfloat16),
            torch.zeros(m, hc, 1),
            torch.zeros(m, hc, hc),
            torch.zeros(m, hidden, dtype=torch.bfloat16),
        )

    def mix(self, m: int) -> torch.Tensor:
        return torch.zeros(m, SMALL.hc * (2 + SMALL.hc))

    def entry_mix(self, m: int) -> torch.Tensor:
        return torch.zeros(m, SMALL.hc * (2 + SMALL.hc))

    def exit_output(self, m: int) -> torch.Tensor:
        return torch.zeros(m, SMALL.hidden, dtype=torch.bfloat16)


class FakeRank:
    """A rank that lets the reference compute, as FusedBoundary does with kernels."""

    def __init__(self, rank: int, ranks: list[FakeRank]) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cpu")
        shape = (3, SMALL.tp, SMALL.capacity, SMALL.hidden)
        buffer = torch.empty(shape, dtype=torch.bfloat16)
        arm(buffer)
        self._launcher = FakeLauncher(buffer)
        self.whole_calls = 0

    def publish(self, x: torch.Tensor) -> None:
        for other in self.ranks:
            box = other._launcher.mailbox
            generation = int(self._launcher.mailbox.state[0])
            box.buffer[generation, self.rank, : len(x)] = reference.sanitize(x)

    def publish_finalize(self, *routed: Any) -> None:
        self.publish(reference.finalize(*routed)[1])

    def taken(self, m: int) -> list[torch.Tensor]:
        """Every rank's rows, out of a mailbox that is armed again."""
        box = self._launcher.mailbox
        rows = box.buffer[int(box.state[0]), :, :m]
        parts = list(rows.clone())
        arm(rows)
        box.state[0] = (box.state[0] + 1) % 3
        return parts

    def consume(self, *shared: torch.Tensor) -> BoundaryOutput:
        m = len(shared[0])
        outputs, mix = self._launcher.outputs(m), self._launcher.mix(m)
        weights, pre = shared[:-1], shared[-1]
        result = reference.boundary(self.taken(m), *weights, SMALL.constants, pre)  # type: ignore[arg-type]
        return self.filled(outputs, mix, result)

    def filled(
        self,
        outputs: BoundaryOutput,
        mix: torch.Tensor,
        result: reference.BoundaryResult,
    ) -> BoundaryOutput:
        mix.copy_(result.mix)
        for name in BoundaryOutput._fields:
            getattr(outputs, name).copy_(getattr(result, name))
        return outputs

    def entry(self, hidden: torch.Tensor, *weights: torch.Tensor) -> BoundaryOutput:
        m = len(hidden)
        outputs, mix = self._launcher.outputs(m), self._launcher.entry_mix(m)
        result = reference.entry_boundary(hidden, *weights, SMALL.constants)
        return self.filled(outputs, mix, result)

    def consume_exit(
        self, residual: torch.Tensor, *rest: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor:
        m = len(residual)
        output = self._launcher.exit_output(m)
        head = reference.Head(named["head_fn"], named["head_scale"], named["head_base"])
        result = reference.exit_boundary(
            self.taken(m), residual, *rest, SMALL.constants, head
        )
        return output.copy_(result.layer_input)

    def exit(
        self, x: torch.Tensor, *streams: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor:
        self.whole_calls += 1
        for rank in self.ranks:
            rank.publish(x)
        return self.consume_exit(*streams, **named)

    def exit_finalize(
        self, *arguments: torch.Tensor, **named: torch.Tensor
    ) -> torch.Tensor:
        return self.exit(reference.finalize(*arguments[:4])[1], *arguments[4:], **named)

    def __call__(self, x: torch.Tensor, *shared: torch.Tensor) -> BoundaryOutput:
        self.whole_calls += 1
        for rank in self.ranks:
            rank.publish(x)
        return self.consume(*shared)

    def finalize(self, *arguments: torch.Tensor) -> BoundaryOutput:
        return self(reference.finalize(*arguments[:4])[1], *arguments[4:])

    def join(self) -> None:
        pass


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[FakeRank]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made: list[FakeRank] = []
    made += [FakeRank(rank, made) for rank in range(SMALL.tp)]
    return made


def watchdog(outcomes: list[Outcome] | None = None) -> Watchdog:
    return Watchdog(CASE, (outcomes if outcomes is not None else []).extend)


def verified(
    ranks: Sequence[Any], case: Case = CASE, subject: Subject = SMALL
) -> Outcome:
    executor = GpuRanks(ranks, Alone(), watchdog())
    (outcome,) = run_all({"unicast": executor}, subject, [case], Alone(), watchdog())
    return outcome


def test_what_is_right_passes(ranks: list[FakeRank]) -> None:
    outcome = verified(ranks)
    assert outcome.ok, (outcome.errors, outcome.problems)
    assert outcome.errors == Errors(
        mix=outcome.errors.mix, post=outcome.errors.post, comb=outcome.errors.comb
    )
    assert 0 < outcome.errors.mix < 1e-6


def test_every_rank_and_both_ways_of_a_call_are_compared(ranks: list[FakeRank]) -> None:
    executor = GpuRanks(ranks, Alone(), watchdog())  # type: ignore[arg-type]
    call = draw(SMALL, CASE, 4)
    assert len(executor.publish(call).each) == SMALL.tp
    assert len(executor.consume(call)) == SMALL.tp
    assert len(executor.whole(call)) == SMALL.tp
    assert executor.problems() == []


def changed(
    rank: FakeRank, method: str, change: Callable[[Any], None], nth: int = 1
) -> None:
    """Changes what a rank did in its nth call of a method."""
    original = getattr(rank, method)
    calls = 0

    def method_and_change(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        result = original(*arguments, **named)
        calls += 1
        if calls == nth:
            change(result)
        return result

    setattr(rank, method, method_and_change)


def flip(tensor: torch.Tensor) -> None:
    """Makes the last element one bit larger in the last place that matters."""
    if tensor.dtype == torch.bfloat16:
        tensor.view(torch.int16).view(-1)[-1] += 3
    else:
        tensor.view(-1)[-1] += 1e-3


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("residual", "residual"),
        ("layer_input", "layer_input_ulp"),
        ("post", "post"),
        ("comb", "comb"),
    ],
)
def test_a_wrong_output_is_found(
    ranks: list[FakeRank], name: str, error: str, nth: int
) -> None:
    changed(ranks[1], "consume", lambda outputs: flip(getattr(outputs, name)), nth)
    outcome = verified(ranks)
    assert not outcome.ok and not outcome.problems
    wrong = dataclasses.asdict(outcome.errors)
    assert wrong[error] > 0 and not Errors(**{error: wrong[error]}).ok


def test_a_wrong_mix_is_found(ranks: list[FakeRank]) -> None:
    executor = GpuRanks(ranks, Alone(), watchdog())  # type: ignore[arg-type]
    changed(ranks[0], "consume", lambda outputs: flip(executor.mixes[0]))
    outcome = Outcome(CASE)
    run_calls(executor, SMALL, CASE, outcome)
    assert not outcome.ok and outcome.errors.mix > 1e-4


@pytest.mark.parametrize("name", BoundaryOutput._fields)
def test_what_is_not_written_is_found(ranks: list[FakeRank], name: str) -> None:
    """Outputs are poisoned: memory that happens to be right does not pass."""
    executor = GpuRanks(ranks, Alone(), watchdog())  # type: ignore[arg-type]
    for rank in ranks:
        outputs = rank._launcher.outputs(2)
        assert all(torch.isnan(tensor).all() for tensor in outputs)
        assert torch.isnan(rank._launcher.mix(2)).all()
    assert len(executor.mixes) == SMALL.tp

    def unwritten(outputs: Any) -> None:
        getattr(outputs, name).view(-1)[0] = torch.nan

    changed(ranks[0], "consume", unwritten)
    outcome = Outcome(Case("sm_90a", "unicast", (3,), seed=1))
    run_calls(executor, SMALL, outcome.case, outcome)
    assert not outcome.errors.ok


def test_wrong_published_rows_are_found(ranks: list[FakeRank]) -> None:
    def spoil(_: None) -> None:
        box = ranks[0]._launcher.mailbox
        flip(box.buffer[int(box.state[0]), 1, 0])

    changed(ranks[1], "publish", spoil)
    outcome = verified(ranks, Case("sm_90a", "unicast", (1,), seed=0))
    assert outcome.errors.published == 1


def test_ranks_that_received_different_rows_are_found(ranks: list[FakeRank]) -> None:
    """Of a finalize, whose sums need not be the reference's bits."""
    case = Case("sm_90a", "unicast", (1,), seed=1)
    assert draw(SMALL, case, 0).routed is not None

    def spoil(_: None) -> None:
        box = ranks[1]._launcher.mailbox
        box.buffer[int(box.state[0]), 1, 0].view(torch.int16)[5] ^= 1

    changed(ranks[1], "publish_finalize", spoil)
    outcome = verified(ranks, case)
    assert outcome.errors.published == 1 and outcome.errors.finalized_ulp <= 1


def test_wrong_sums_are_found(ranks: list[FakeRank]) -> None:
    def spoil(_: None) -> None:
        for rank in ranks:
            box = rank._launcher.mailbox
            box.buffer[int(box.state[0]), 1, 0, 7] = 100.0

    changed(ranks[1], "publish_finalize", spoil)
    outcome = verified(ranks, Case("sm_90a", "unicast", (1,), seed=1))
    assert outcome.errors.finalized_ulp > 1


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda box: box.buffer[2, 1, 0, :3].fill_(1.0),
            "3 elements of the mailbox of rank 1 are not armed again",
        ),
        (lambda box: box.state[1].fill_(5), "rank 1 has counted 5 arrivals"),
        (
            lambda box: box.state[0].add_(2),
            "rank 1 is at generation 4, and should be at 2",
        ),
    ],
)
def test_mailboxes_in_disorder_are_found(
    ranks: list[FakeRank], spoil: Callable[[Any], None], problem: str
) -> None:
    changed(ranks[1], "consume", lambda _: spoil(ranks[1]._launcher.mailbox), nth=2)
    outcome = verified(ranks, Case("sm_90a", "unicast", (1,), seed=0))
    assert len(outcome.problems) == 1 and outcome.problems[0].startswith(problem)


WITH_ENDS = dataclasses.replace(SMALL, name="ends", entry=True, exit_by="sigmoid")


def test_the_ends_are_compared(
    ranks: list[FakeRank], capsys: pytest.CaptureFixture[str]
) -> None:
    """Between boundaries, of every kind of input, in rows of their own."""
    outcome = verified(ranks, subject=WITH_ENDS)
    assert outcome.ok, (outcome.ends, outcome.problems)
    assert 0 < outcome.ends["entry"].mix < 1e-6
    assert outcome.ends["entry"].published == 0 == outcome.ends["exit"].residual
    assert [row[3] for row in rows_of([outcome])] == ["boundary", "entry", "exit"]
    assert {row[-1] for row in rows_of([outcome])} == {"ok"}


@pytest.mark.parametrize(
    ("method", "name", "error", "nth"),
    [
        ("entry", "residual", "residual", 1),
        ("entry", "layer_input", "layer_input_ulp", 1),
        ("entry", "post", "post", 1),
        ("entry", "comb", "comb", 1),
        ("consume_exit", None, "layer_input_ulp", 1),
        ("consume_exit", None, "layer_input_ulp", 2),
    ],
)
def test_a_wrong_end_is_found(
    ranks: list[FakeRank],
    capsys: pytest.CaptureFixture[str],
    method: str,
    name: str | None,
    error: str,
    nth: int,
) -> None:
    """In its own row, whether with a pause before it or without."""

    def spoil(output: Any) -> None:
        flip(output if name is None else getattr(output, name))

    changed(ranks[1], method, spoil, nth)
    outcome = verified(ranks, subject=WITH_ENDS)
    assert not outcome.ok and outcome.errors.ok and not outcome.problems
    kernel = method.removeprefix("consume_")
    wrong = dataclasses.asdict(outcome.ends[kernel])
    assert wrong[error] > 0 and not Errors(**{error: wrong[error]}).ok
    failed = [row[3] for row in rows_of([outcome]) if row[-1] == "1 failed"]
    assert failed == [kernel]
    show([outcome], "ends", Path("p"))
    assert f"\n  {kernel}: published 0" in capsys.readouterr().out


def test_what_the_ends_do_not_write_is_found(ranks: list[FakeRank]) -> None:
    """Their outputs are poisoned, too."""
    GpuRanks(ranks[:1], Alone(), watchdog())  # type: ignore[arg-type]
    launcher = ranks[0]._launcher
    for poisoned in (launcher.exit_output(2), launcher.entry_mix(2)):
        assert torch.isnan(poisoned).all()


def test_one_rank_a_process_makes_whole_exits(ranks: list[FakeRank]) -> None:
    executor = GpuRanks(ranks[:1], Alone(), watchdog())  # type: ignore[arg-type]
    for index, calls in enumerate((1, 2)):
        call = draw(WITH_ENDS, Case("sm_90a", "unicast", (2,) * 2, seed=0), index)
        assert (call.routed is None) == (index == 0)
        assert len(executor.whole_exit(call)) == 1
        assert ranks[0].whole_calls == calls
    assert executor.generation == 2


class LocalRank(FakeRank):
    """One rank alone, which has no mailbox: what it publishes, it keeps."""

    def __init__(self) -> None:
        super().__init__(0, [self])
        empty = torch.empty(0)
        self._launcher.mailbox = SimpleNamespace(buffer=empty, state=empty)
        self._launcher.rows = None

    def publish(self, x: torch.Tensor) -> None:
        self._launcher.rows = x

    def taken(self, m: int) -> list[torch.Tensor]:
        rows, self._launcher.rows = self._launcher.rows, None
        return [reference.sanitize(rows)]


def test_one_rank_alone(ranks: list[FakeRank]) -> None:
    """There is no mailbox to read, to arm or to advance."""
    alone = dataclasses.replace(WITH_ENDS, tp=1, transports=("local",))
    outcome = verified([LocalRank()], subject=alone)
    assert outcome.ok, (outcome.errors, outcome.ends, outcome.problems)
    wrong = LocalRank()
    changed(wrong, "publish", lambda _: flip(wrong._launcher.rows))
    assert verified([wrong], subject=alone).errors.finalized_ulp > 1


def test_one_rank_a_process_makes_whole_calls(ranks: list[FakeRank]) -> None:
    """As an engine does, and not a publish and a boundary apart."""
    executor = GpuRanks(ranks[:1], Alone(), watchdog())  # type: ignore[arg-type]
    call = next(c for i in range(7) if (c := draw(SMALL, CASE, i)).routed is None)
    executor.publish(call)
    assert len(executor.consume(call)) == 1
    assert ranks[0].whole_calls == 0
    assert len(executor.whole(call)) == 1
    assert ranks[0].whole_calls == 1


def test_nothing_runs_after_a_case_that_broke_off(ranks: list[FakeRank]) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    changed(ranks[0], "consume", fail, nth=3)
    wanted = [Case("sm_90a", "unicast", (1,), seed, device="cuda") for seed in range(3)]
    executor = GpuRanks(ranks, Alone(), watchdog())  # type: ignore[arg-type]
    outcomes = run_all({"unicast": executor}, SMALL, wanted, Alone(), watchdog())
    assert [outcome.problems for outcome in outcomes] == [
        [],
        ["an illegal memory access was encountered"],
        ["not run: a case before it broke off"],
    ]


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    bad = Outcome(dataclasses.replace(CASE, device="cuda"), Errors(residual=3), ["odd"])
    outcomes = [Outcome(CASE), bad]
    assert [row[-1] for row in rows_of(outcomes)] == ["1 failed"]
    show(outcomes, "small", Path("p"))
    out = capsys.readouterr().out
    assert "FAILED: mhcgen verify p --device cuda --transport unicast" in out
    assert "residual 3" in out and "  odd\n" in out
    assert json.loads(json.dumps(bad.as_json()))["device"] == "cuda"


def test_what_does_not_end_is_reported() -> None:
    ended = threading.Event()
    told: list[Outcome] = []
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    dog = Watchdog(CASE, told.extend, end)
    dog.outcomes.append(Outcome(CASE))
    with dog.over("boundary", 0.01):
        assert ended.wait(60)
    assert codes == [1]
    assert [outcome.ok for outcome in told] == [True, False]
    assert told[1].problems[0].startswith("boundary did not end within 0.01 s")
    with dog.over("boundary", 60):
        pass
    assert codes == [1]


# What this machine has


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two H100s, as far as torch is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mhcgen", "verify", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "finds no GPU; run this where there is one, or leave --device out"),
        (["--arch", "sm_90a"], "--arch sm_90a: with --device cuda the GPU decides"),
        (["--stress", "2"], "--stress 2: only the emulator schedules by a seed"),
        (["--tokens", "257"], "--tokens 257: a call of glm53 has 1 to 256 tokens"),
        (["--transport", "pigeon"], "--transport 'pigeon': the package has multicast"),
        (["--device", "gpu"], "--device 'gpu': kernels run on cpu, in the emulator"),
    ],
)
def test_refusals_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    package = GENERATED / "glm53"
    code, out, err = run(monkeypatch, capsys, package, "--device", "cuda", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "words", "reason"),
    [
        (
            {},
            ["--transport", "multicast"],
            "one GPU that plays all ranks has no multic",
        ),
        (
            {"WORLD_SIZE": "2"},
            [],
            "started 2 processes, and glm53 has 4 ranks: start 4",
        ),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            [],
            "started 4 processes on a machine of 2 GPUs",
        ),
    ],
)
def test_refusals_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: None,
    environment: dict[str, str],
    words: list[str],
    reason: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    package = GENERATED / "glm53"
    code, out, err = run(monkeypatch, capsys, package, "--device", "cuda", *words)
    assert (code, out) == (2, "") and reason in err and err.count("\n") == 1


def test_a_package_with_multicast_only(gpus: None) -> None:
    only = dataclasses.replace(SMALL, transports=("multicast",))
    with pytest.raises(MhcgenError, match="small has multicast kernels only"):
        on_cuda.check_gpus(only, Options())


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_another_architecture(
    monkeypatch: pytest.MonkeyPatch, gpus: None, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(
        MhcgenError, match="and small is built for sm_90a: add the arch"
    ):
        on_cuda.device_arch(SMALL, torch.device("cuda", 0))


def test_on_gpus_that_the_reference_plays(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    gpus: None,
    ranks: list[FakeRank],
) -> None:
    """The whole command but for the kernels: table, JSON, exit code, how to repeat."""
    monkeypatch.setattr(on_cuda.Subject, "of_package", lambda folder: SMALL)
    monkeypatch.setattr(
        on_cuda, "load_ranks", lambda folder, subject, options, t: {"unicast": ranks}
    )
    package, file = GENERATED / "glm53", tmp_path / "out.json"
    words = [package, "--device", "cuda", "--json", file]
    code, out, err = run(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    assert [line.split()[2] for line in out.splitlines()[2:]] == ["1", "3", "4"]
    content = json.loads(file.read_text())
    assert content["name"] == "glm53"
    assert {case["device"] for case in content["cases"]} == {"cuda"}

    changed(ranks[1], "consume", lambda outputs: flip(outputs.residual))
    code, out, _ = run(monkeypatch, capsys, *words, "--tokens", "3", "--calls", "2")
    assert code == 1
    assert (
        f"FAILED: mhcgen verify {package} --device cuda --transport unicast --tokens 3 "
        "--calls 2 --seed 0\n"
    ) in out


def test_a_package_that_does_not_load(
    monkeypatch: pytest.MonkeyPatch, gpus: None
) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(on_cuda, "load_ranks", broken)
    with pytest.raises(CompileError, match="glm53 does not load: no such kernel"):
        on_cuda.verify(GENERATED / "glm53", Options(), lambda outcomes: None)


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ruff", "pydantic", "ruamel", "filelock"):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            # Some releases of typer need pydantic themselves.
            if frame.f_globals["__name__"].split(".")[0] == "mhcgen":
                raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Blocker())
sys.argv = ["mhcgen", "verify", sys.argv[1], "--device", "cuda"]
from mhcgen import cli
from mhcgen.verify import on_cuda
from mhcgen import runtime

on_cuda.check_gpus = lambda subject, options: print(subject.name)
on_cuda.torch.cuda.set_device = lambda device: sys.exit(7)
cli.main()
"""


def test_a_package_needs_no_spec_library_on_a_gpu_machine() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(GENERATED / "glm53")],
        capture_output=True,
        text=True,
        cwd=GENERATED.parent,
    )
    assert (result.returncode, result.stdout) == (7, "glm53\n"), result.stderr


GROUP = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mhcgen.verify.cases import Case
from mhcgen.verify.compare import Errors
from mhcgen.verify.report import Outcome
from mhcgen.verify.together import Group


def main(rank, file):
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    group = Group(dist.group.WORLD)
    rows = torch.full((2, 3), rank + 1.0).bfloat16()
    words = [rank, group.first(rows).sum().item(), rows.sum().item()]

    def fail():
        if rank:
            raise ValueError("no")
    try:
        group.step("publish", fail)
    except RuntimeError as error:
        words.append(str(error).splitlines())
    outcome = Outcome(Case("sm_90a", "unicast", (1,), 0), problems=["both"])
    outcome.errors.residual = rank
    outcome.end("exit").layer_input_ulp = 1 + rank
    merged = group.merged(outcome)
    words += [merged.errors.residual, merged.problems]
    words.append(merged.end("exit").layer_input_ulp)
    os.write(1, f"{words}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""


def test_ranks_in_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(textwrap.dedent(GROUP))
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(GENERATED.parent)},
    )
    failed = ["publish failed", "rank 1: ValueError: no"]
    problems = ["both", "rank 1 has wrong elements, or too large errors"]
    assert sorted(result.stdout.splitlines()) == [
        str([0, 6.0, 6.0, failed, 1, problems, 2]),
        str([1, 6.0, 12.0, failed, 1, problems, 2]),
    ]


def test_only_the_first_rank_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert together.global_rank() == 1
    cli.show_outcomes([Outcome(CASE)], "small", Path("p"), Path("/nowhere/file"))
    assert capsys.readouterr().out == ""
