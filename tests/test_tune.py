"""Tuning: what is tried, what wins, and how it gets into the spec; no GPU is needed."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mhcgen import cli
from mhcgen.architecture import ARCHITECTURES
from mhcgen.bench import variants
from mhcgen.bench.machine import Machine
from mhcgen.bench.variants import variant
from mhcgen.build import BuildError
from mhcgen.errors import MhcgenError
from mhcgen.plan import Plan, TargetPlan, legal_clusters, make_plan
from mhcgen.render import kernel_rows
from mhcgen.spec import Spec, Target
from mhcgen.spec_file import load_spec
from mhcgen.spec_writer import with_target
from mhcgen.text_file import write_whole
from mhcgen.tune import (
    Candidate,
    Choice,
    Row,
    Trial,
    Tuned,
    candidates,
    choose,
    own_candidate,
    search,
    shapes,
    tokens_to_try,
    trials_at,
)

ARCH = "sm_90a"
H200 = ARCHITECTURES[ARCH]


@pytest.fixture
def narrow(tmp_path: Path) -> Plan:
    """A plan that several cluster sizes serve."""
    path = tmp_path / "narrow.yaml"
    path.write_text(
        "name: narrow\nmodel: {hidden: 1024}\nparallel: {tp: 2}\n"
        "capacity: {max_tokens: 64}\n"
    )
    return make_plan(load_spec(path).spec)


@pytest.fixture
def known(glm53_plan: Plan) -> dict[int, TargetPlan]:
    """The shapes of hidden 4096, by cluster size."""
    return shapes(glm53_plan, H200)


@pytest.mark.parametrize(
    ("cluster", "group", "m", "expected"),
    [(8, 1, 15, 1), (8, 1, 16, 2), (8, 2, 30, 1), (8, 2, 31, 2), (16, 1, 7, 1)],
)
def test_waves(
    known: dict[int, TargetPlan], cluster: int, group: int, m: int, expected: int
) -> None:
    assert known[cluster].waves(m, group) == expected


@pytest.mark.parametrize(
    ("group", "m", "measured"),
    [
        (1, 1, 2.64),
        (1, 4, 2.73),
        (1, 8, 3.26),
        (2, 8, 3.23),
        (1, 15, 4.17),
        (2, 16, 3.65),
        (4, 16, 4.24),
        (3, 32, 4.64),
        (4, 48, 5.34),
        (5, 64, 5.99),
        (8, 64, 6.58),
        (7, 96, 6.96),
        (9, 128, 8.67),
        (16, 128, 11.6),
    ],
)
def test_the_model_is_near_what_was_measured(
    known: dict[int, TargetPlan], group: int, m: int, measured: float
) -> None:
    """TP 2 looped back on an H200: docs/measurements.md."""
    assert known[8].predicted(m, group) == pytest.approx(measured, rel=0.15)


def test_candidates_are_what_the_hardware_runs(narrow: Plan, glm53_plan: Plan) -> None:
    sizes = {c.cluster_size for c in candidates(narrow, H200)}
    assert sizes == {2, 4, 8, 16} <= set(legal_clusters(narrow, H200))
    wide = {c.cluster_size for c in candidates(glm53_plan, H200)}
    assert wide == {8, 16}
    for candidate in candidates(narrow, H200):
        target = Target(cluster_size=candidate.cluster_size)
        spec = narrow.spec.model_copy(update={"targets": {ARCH: target}})
        shape = make_plan(spec).target(ARCH)
        assert shape.shared_bytes(candidate.group) <= H200.shared_bytes


def test_the_ends_of_waves_are_tried(glm53_plan: Plan) -> None:
    groups = (1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 20, 24)
    # One or two blocks a multiprocessor, clusters of 16 and of eight.
    ends = {size * group for size in (7, 14, 15, 30) for group in groups}
    ends = {end for end in ends if end <= 256}
    assert tokens_to_try(glm53_plan, H200) == sorted({1, 2, 4, 8, *ends, 256})


def test_hopeless_candidates_are_not_tried(known: dict[int, TargetPlan]) -> None:
    wanted = [Candidate(8, group) for group in (1, 2, 3, 4, 8, 16)]
    own = Candidate(8, 16)
    trials = trials_at(45, known, wanted, own)
    # Group 3 takes one wave; 1 takes three; the plan's own is tried whatever it is.
    assert trials[0].candidate == Candidate(8, 3)
    assert Candidate(8, 1) not in [t.candidate for t in trials]
    assert trials[-1].candidate == own
    assert [t.predicted for t in trials] == sorted(t.predicted for t in trials)
    few = [t.candidate for t in trials_at(2, known, wanted, Candidate(8, 1))]
    assert few == [Candidate(8, 1), Candidate(8, 2)]


def test_every_cluster_size_keeps_its_best(known: dict[int, TargetPlan]) -> None:
    wanted = [Candidate(size, 1) for size in (8, 16)]
    trials = trials_at(64, known, wanted, wanted[0])
    assert {t.candidate.cluster_size for t in trials} == {8, 16}


def trial(m: int, cluster: int, group: int, measured: float | None) -> Trial:
    return Trial(m, Candidate(cluster, group), 1, 1.0, measured)


def test_the_budget_ends_the_search() -> None:
    planned = {m: [trial(m, 8, 1, None), trial(m, 8, 2, None)] for m in (1, 2, 4)}
    asked: list[int] = []
    left = [True, True, False]

    def timer(m: int, wanted: Sequence[Candidate]) -> Mapping[Candidate, float]:
        asked.append(m)
        return {candidate: float(candidate.group) for candidate in wanted}

    done = search(planned, timer, lambda: left.pop(0))
    assert asked == [1, 2]
    assert [t.measured for t in done] == [1.0, 2.0, 1.0, 2.0, None, None]


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(MhcgenError, match="--budget ran out"):
        choose([trial(1, 8, 1, None)], 64)


def test_the_table_has_a_row_for_each_change() -> None:
    trials = [
        *(trial(1, 8, 1, 5.0), trial(1, 8, 2, 6.0)),
        *(trial(8, 8, 1, 5.0), trial(8, 8, 2, 6.0)),
        *(trial(16, 8, 1, 9.0), trial(16, 8, 2, 6.5)),
        *(trial(32, 8, 1, 12.0), trial(32, 8, 2, 8.0)),
    ]
    choice = choose(trials, 64)
    assert choice.token_groups == (Row(8, 1), Row(64, 2))
    assert choice.times == {1: 5.0, 8: 5.0, 16: 6.5, 32: 8.0}


def test_ties_go_to_the_group_before_and_then_to_the_smaller() -> None:
    trials = [
        *(trial(1, 8, 1, 5.02), trial(1, 8, 2, 5.0)),
        *(trial(2, 8, 1, 5.0), trial(2, 8, 2, 4.0)),
        *(trial(4, 8, 1, 4.99), trial(4, 8, 2, 5.0)),
    ]
    choice = choose(trials, 4)
    assert choice.token_groups == (Row(1, 1), Row(4, 2))


def test_the_cluster_size_with_the_least_mean_wins() -> None:
    trials = [
        *(trial(1, 4, 1, 6.0), trial(1, 8, 1, 5.0)),
        *(trial(64, 4, 1, 8.0), trial(64, 8, 1, 12.0)),
    ]
    assert choose(trials, 64).cluster_size == 4
    # One that was not measured everywhere cannot win by what it lacks.
    assert choose(trials[:2] + trials[3:], 64).cluster_size == 8


def test_a_search_finds_the_best_of_a_device_it_does_not_know(narrow: Plan) -> None:
    """A fake device, unlike the model: cluster 2 is fastest, groups cost little."""

    def truth(candidate: Candidate, m: int) -> float:
        clusters = -(-m // candidate.group)
        turns = -(-clusters // 20)
        return turns * (
            3 + abs(candidate.cluster_size - 2) + 0.5 * min(candidate.group, m)
        )

    def timer(m: int, wanted: Sequence[Candidate]) -> Mapping[Candidate, float]:
        return {candidate: truth(candidate, m) for candidate in wanted}

    wanted = candidates(narrow, H200)
    known = shapes(narrow, H200)
    planned = {
        m: trials_at(m, known, wanted, own_candidate(narrow, ARCH, m))
        for m in tokens_to_try(narrow, H200)
    }
    choice = choose(search(planned, timer, lambda: True), narrow.capacity)
    assert choice.cluster_size == 2
    for m, time in choice.times.items():
        tried = [t.candidate for t in planned[m] if t.candidate.cluster_size == 2]
        best = min(truth(candidate, m) for candidate in tried)
        assert time <= 1.01 * best


def test_variants_have_the_candidates_kernels_and_no_others(narrow: Plan) -> None:
    """Each group's boundary publishes itself, too, in calls of one wave."""
    plan = variant(narrow, ARCH, [Candidate(4, group) for group in (1, 3, 16)])
    target = plan.target(ARCH)
    names = [row.name for row in kernel_rows(target)]
    both = ("multicast", "unicast")
    assert sorted(names) == sorted(
        [
            *(f"publish_{transport}" for transport in both),
            *(f"boundary_{group}" for group in (1, 3, 16)),
            *(f"boundary_{group}_{t}" for group in (1, 3, 16) for t in both),
            *(["mixes"] if not plan.tail else []),
        ]
    )
    rows = [(row.max_tokens, row.group, row.launches) for row in target.token_groups]
    assert rows == [(30, 1, 1), (63, 3, 1), (64, 16, 1)]
    assert target.cluster_size == 4


def test_a_variant_whose_last_group_takes_more_than_one_wave(narrow: Plan) -> None:
    wanted = [Candidate(4, 1), Candidate(4, 2)]
    rows = variant(narrow, ARCH, wanted).target(ARCH).token_groups
    found = [(row.max_tokens, row.group, row.launches) for row in rows]
    assert found == [(30, 1, 1), (60, 2, 1), (64, 2, 2)]


def test_two_blocks_are_a_candidate_where_fn_may_be_split(glm53_plan: Plan) -> None:
    split = [c for c in candidates(glm53_plan, H200) if c.blocks == 2]
    assert {c.cluster_size for c in split} == {8, 16}
    plan = variant(glm53_plan, ARCH, [c for c in split if c.cluster_size == 8])
    assert plan.splits_fn
    for row in plan.target(ARCH).token_groups:
        (known,) = [c for c in split if (c.cluster_size, c.group) == (8, row.group)]
        assert row.fn_octets == known.fn_octets(plan) == 3 - known.shared_octets
        assert row.blocks == 2
    shape = shapes(glm53_plan, H200)[8]
    assert shape.waves(60, 2, blocks=2) == 1
    # Two blocks take as long as one where each has its multiprocessor, and share one
    # beyond that.
    assert shape.predicted(30, 2, 2) == shape.predicted(30, 2)
    assert shape.predicted(60, 2, 2) > shape.predicted(60, 4)


def split_trial(m: int, group: int, measured: float) -> Trial:
    return Trial(m, Candidate(8, group, 1), 1, 1.0, measured)


def test_a_group_may_keep_fn_in_both_ways() -> None:
    trials = [
        *(trial(1, 8, 1, 3.0), split_trial(1, 1, 3.2)),
        *(trial(16, 8, 2, 5.0), split_trial(16, 2, 4.0)),
        *(trial(30, 8, 2, 5.0), split_trial(30, 2, 5.5)),
        split_trial(60, 2, 9.0),
    ]
    choice = choose(trials, 64)
    assert choice.token_groups == (
        Row(1, 1),
        Row(16, 2, 1),
        Row(30, 2),
        Row(64, 2, 1),
    )
    assert choice.times == {1: 3.0, 16: 4.0, 30: 5.0, 60: 9.0}


def test_a_row_ends_with_the_wave() -> None:
    """Calls of one wave take one launch, if no larger ones share their row."""
    trials = [
        Trial(8, Candidate(8, 1), 1, 1.0, 3.0),
        Trial(15, Candidate(8, 1), 1, 1.0, 4.0),
        Trial(16, Candidate(8, 1), 2, 1.0, 6.0),
    ]
    assert choose(trials, 20).token_groups == (Row(15, 1), Row(20, 1))


SPEC = """\
# A model.
name: mine  # its name
model:
    hidden: 4096   # wide
parallel: {tp: 2}
capacity: {max_tokens: 64}
"""
TARGETS = (
    "",
    "targets:\n",
    "targets: ~  # all\n",
    "targets: {sm_90a: {cluster_size: 8}, sm_103a: {}}\n",
    "targets:\n  sm_90a:\n",
    "targets:\n  sm_90a: {}  # Hopper\n  # Blackwell\n  sm_100a: {}\n",
    "targets:\n    sm_90a:  # Hopper\n        # by hand\n"
    "        cluster_size: 8 # fits\n"
    "        token_groups:\n        - {max_tokens: 8, group: 1}\n"
    "        - max_tokens: 64  # the rest\n          group: 4\n\n"
    "    # Blackwell\n    sm_100a:\n        cluster_size: 8\n",
    "targets:\n  sm_90a: {cluster_size: 8}",
)
AFTER = "# The end.\noutputs:\n  stream_mean: false  # none\n"
NEW = Target.model_validate(
    {
        "cluster_size": 8,
        "token_groups": [
            {"max_tokens": 15, "group": 1},
            {"max_tokens": 64, "group": 5},
        ],
    }
)


def loaded(path: Path, text: str) -> Plan:
    path.write_text(text)
    return make_plan(load_spec(path).spec)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("after", ["", AFTER])
def test_writing_changes_the_choices_and_nothing_else(
    tmp_path: Path, targets: str, after: str
) -> None:
    path = tmp_path / "mine.yaml"
    text = SPEC + targets + ("\n" if not targets.endswith("\n") else "") * bool(after)
    text += after
    before = loaded(path, text).spec
    wanted = dict(before.targets) | {ARCH: NEW}
    tuned = with_target(text, wanted, ARCH, "a device, its releases")
    spec = loaded(path, tuned).spec
    assert spec == before.model_copy(update={"targets": wanted})
    assert tuned.startswith(SPEC)
    assert after in tuned
    assert tuned.count("# Tuned on a device, its releases.\n") == 1
    for line in text.splitlines():
        if "#" in line:
            assert line[line.index("#") :] in tuned
    again = with_target(tuned, wanted, ARCH, "another one")
    assert "a device, its releases" not in again
    assert again == tuned.replace("a device, its releases", "another one")


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "spec.yaml", tmp_path / "link.yaml"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new\n")
    assert path.read_text() == "new\n"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.yaml", "spec.yaml"]
    with pytest.raises(BuildError, match=r"cannot write .*missing"):
        write_whole(tmp_path / "missing" / "spec.yaml", "new\n")


def test_what_was_tried_is_shown(
    glm53_plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = (
        Trial(16, Candidate(8, 1), 2, 10.0, 9.2),
        Trial(16, Candidate(8, 2), 1, 6.2, 6.75),
        Trial(64, Candidate(8, 5), 1, 9.8, None),
    )
    choice = Choice(8, (Row(256, 2),), {16: 6.75})
    tuned = Tuned(glm53_plan, ARCH, "NVIDIA H200", trials, choice)
    tuned.show()
    out = capsys.readouterr().out
    assert "NVIDIA H200: microseconds a boundary" in out
    assert ["16", "8", "1", "1", "2", "10.00", "9.20"] in map(
        str.split, out.splitlines()
    )
    assert ["64", "8", "5", "1", "1", "9.80", "-"] in map(str.split, out.splitlines())
    assert "-: not tried, --budget ran out" in out
    # The plan takes group 2 at M 16: before and best are the same trial.
    assert ["16", "6.75", "6.75", "2"] in map(str.split, out.splitlines())
    assert set(tuned.targets) == set(glm53_plan.spec.targets)
    assert tuned.targets[ARCH].token_groups is not None


def test_two_launches_that_a_spec_asks_for_stay(glm53_plan: Plan) -> None:
    """On a GPU that is shared, one launch could wait for ever."""
    data = glm53_plan.spec.model_dump(mode="json")
    rows = data["targets"][ARCH]["token_groups"]
    for shared in (False, True):
        for row in rows:
            row["launches"] = 2 if shared else None
        plan = make_plan(Spec.model_validate(data))
        choice = Choice(8, (Row(60, 4), Row(256, 9, 1)), {16: 6.75})
        target = Tuned(plan, ARCH, "NVIDIA H200", (), choice).targets[ARCH]
        assert target.token_groups is not None
        launches = [row.launches for row in target.token_groups]
        assert launches == [2 if shared else None] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        (["bad.yaml"], "bad.yaml:1:"),
        (["good.yaml", "--tokens", "x"], "'x' is no number of tokens"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "bad.yaml").write_text("name: 1\n")
    (tmp_path / "good.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mhcgen", "tune", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_what_won(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a device that likes clusters of four, and whose groups all take the same."""

    @contextmanager
    def machine(what: str) -> Iterator[Machine]:
        yield Machine(0, 1, torch.device("cpu"))

    def timer(
        *arguments: object, publishing: bool
    ) -> Callable[[int, Sequence[Candidate]], Mapping[Candidate, float]]:
        assert publishing
        return lambda m, wanted: {
            candidate: 1.0 + (candidate.cluster_size != 4) for candidate in wanted
        }

    monkeypatch.setattr(variants, "machine", machine)
    monkeypatch.setattr(variants, "VariantTimer", timer)
    monkeypatch.setattr(variants, "device_arch", lambda plan, device: ARCH)
    monkeypatch.setattr(variants, "described_device", lambda: "a device")
    path = tmp_path / "mine.yaml"
    text = SPEC.replace("4096", "1024")
    path.write_text(text)
    for arguments, written in ([], False), (["--write"], True):
        monkeypatch.setattr(sys, "argv", ["mhcgen", "tune", str(path), *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 0
        assert ("not written" in capsys.readouterr().out) != written
        assert (path.read_text() != text) == written
    target = load_spec(path).spec.targets[ARCH]
    assert target.cluster_size == 4
    assert [row.max_tokens for row in target.token_groups or ()][-1] == 64
    assert path.read_text().startswith(text)


def test_without_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    path = tmp_path / "mine.yaml"
    path.write_text(SPEC)
    monkeypatch.setattr(sys, "argv", ["mhcgen", "tune", str(path), "--write"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "mhcgen tune needs a GPU" in capsys.readouterr().err
    assert path.read_text() == SPEC
