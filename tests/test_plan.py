"""The plan: derived numbers, the maps that kernels rely on, and what is refused."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhcgen.architecture import ARCHITECTURES, MAX_THREADS_PER_BLOCK, WARP
from mhcgen.errors import PlanError
from mhcgen.plan import (
    FRAGMENT_BYTES,
    FRAGMENT_WORDS,
    OCTET,
    QUAD,
    Design,
    Plan,
    TargetPlan,
    boundary_registers,
    clusters_at_once,
    fragments_at_once,
    group_fault,
    make_plan,
    projection_registers,
    register_limit,
    shared_octets,
)
from mhcgen.spec import Spec


def spec_of(
    hidden: int = 4096,
    hc: int = 4,
    tp: int = 4,
    capacity: int = 256,
    fn_weight: str = "bf16",
    mixes: str = "side_stream",
    pre_mix: str = "fresh",
    arch: str = "sm_90a",
    **target: Any,
) -> Spec:
    return Spec.model_validate(
        {
            "name": "x",
            "model": {"hidden": hidden, "hc": hc, "pre_mix": pre_mix},
            "parallel": {"tp": tp},
            "capacity": {"max_tokens": capacity},
            "precision": {"fn_weight": fn_weight},
            "mixes": mixes,
            "targets": {arch: target},
        }
    )


def plan_of(**fields: Any) -> Plan:
    return make_plan(spec_of(**fields))


def test_flagship_numbers(glm53_plan: Plan) -> None:
    """The numbers of generated/glm53, worked out by hand."""
    plan = glm53_plan
    assert (plan.fragments, plan.mix, plan.sums) == (512, 24, 25)
    assert plan.mailbox.row_bytes == 8192
    assert plan.mailbox.slot_bytes == 256 * 8192
    assert plan.mailbox.total_bytes == 3 * 4 * 256 * 8192
    assert (plan.publish_threads, plan.publish_blocks) == (128, 4)
    assert (plan.token_bytes, plan.fn_row_bytes) == (32768, 32768)
    assert (plan.fn_octets, plan.tiles, plan.squares) == (3, 2, 24)
    lanes = plan.lane_map
    assert (lanes.lanes, lanes.words, lanes.streams) == (4, 1, 4)
    assert (lanes.word_lanes, lanes.merges) == (1, ())
    target = plan.target("sm_90a")
    assert (target.fragments_per_block, target.threads, target.warps) == (64, 256, 8)
    assert target.register_limit == 255
    # 25 sums and the squares of 8 blocks, 2 barriers, 8 warps' stash, 20 weights,
    # 8 warps' sums and squares.
    one = 25 * 8 * 4 + 8 * 4 + 16 + 8 * 704 + 20 * 4 + 8 * 36 * 4 + 8 * 4
    assert target.shared_bytes(1) == one
    # From three tokens on, a block computes 4 pre-mixes and the norm of each once.
    assert target.shared_bytes(3) == 3 * (one - 16) + 16 + 3 * 4 * 4 + 16


def test_what_a_design_adds_to_shared_memory() -> None:
    """Logits of the mixes in the tail; fn at home there; no norms where delayed."""
    side = plan_of().target("sm_90a")
    tail = plan_of(mixes="tail").target("sm_90a")
    assert tail.shared_bytes(5) == side.shared_bytes(5) + 5 * 24 * 4
    assert (tail.threads, tail.launched_threads) == (256, 288)
    assert (side.threads, side.launched_threads) == (256, 256)
    assert tail.register_limit == register_limit(288) == 168
    delayed = plan_of(pre_mix="delayed").target("sm_90a")
    # A sum of 8 blocks and 4 weights more; no squares of 8 blocks and 8 warps.
    assert delayed.shared_bytes(1) == side.shared_bytes(1) + 32 + 16 - 32 - 32
    shared = plan_of(hidden=7168, cluster_size=8).target("sm_90a")
    assert shared.fn_bytes() == 14 * WARP * 24 * FRAGMENT_BYTES
    without = 14 * 704 + 25 * 32 + 32 + 16 + 80 + 14 * 36 * 4 + 64
    assert shared.shared_bytes(1) == shared.fn_bytes() + without


@pytest.mark.parametrize("pre_mix", ["fresh", "delayed"])
@pytest.mark.parametrize("hc", [1, 2, 4, 8])
def test_every_sum_goes_to_those_that_need_it(hc: int, pre_mix: str) -> None:
    """All blocks take what steps 4 and 5 need; one takes the rest of the mixes."""
    plan = plan_of(hc=hc, pre_mix=pre_mix)
    assert plan.shared_sums + plan.own_sums == plan.sums
    shared = {*range(hc), plan.squares}
    if plan.delayed:
        shared = {plan.squares, plan.squares + 1}
    assert plan.shared_sums == len(shared)
    assert plan.own_sums == len(set(range(plan.mix)) - shared)
    assert plan.last_sum == max(shared)


@pytest.mark.parametrize(
    ("hc", "words", "word_lanes", "streams", "merges"),
    [(1, 4, 1, 1, ()), (2, 2, 1, 2, ()), (4, 1, 1, 4, ()), (8, 1, 2, 4, (1,))],
)
def test_words_and_streams_of_a_lane(
    hc: int, words: int, word_lanes: int, streams: int, merges: tuple[int, ...]
) -> None:
    lanes = plan_of(hc=hc).lane_map
    assert (lanes.lanes, lanes.words, lanes.streams) == (hc, words, streams)
    assert (lanes.word_lanes, lanes.merges) == (word_lanes, merges)


def test_dispatch_of_the_flagship(glm53_plan: Plan) -> None:
    target = glm53_plan.target("sm_90a")
    wanted = {1: 1, 8: 1, 9: 2, 18: 2, 19: 3, 40: 4, 64: 5, 76: 7, 106: 8, 121: 10}
    for tokens, group in (wanted | {131: 5, 150: 5, 210: 7, 211: 9, 256: 9}).items():
        row = target.token_group(tokens)
        assert (row.group, row.launches) == (group, 1)
        assert row.split == (tokens > 130)
        assert row.blocks == (2 if row.split else 1)
        boundary, mixes = target.launches(tokens)
        split = "_split" * row.split
        assert boundary.kernel == f"boundary_{group}{split}_multicast"
        assert boundary.grid == (8, -(-tokens // group), 1)
        assert boundary.block == target.threads
        assert mixes.grid == (-(-tokens // 32), 1, 1)
    with pytest.raises(ValueError, match="257 tokens exceed the capacity of 256"):
        target.token_group(257)


def test_what_exceeds_a_wave_takes_two_launches() -> None:
    target = plan_of(capacity=512).target("sm_90a")
    assert target.token_group(360) is not target.token_group(361)
    assert [target.token_group(tokens).launches for tokens in (360, 361)] == [1, 2]
    publish, boundary, _ = target.launches(361)
    assert publish.grid == (4, 361, 1)
    assert (boundary.kernel, boundary.grid) == ("boundary_24", (8, 16, 1))


def test_mixes_in_the_tail_have_no_launch() -> None:
    target = plan_of(mixes="tail").target("sm_90a")
    (boundary,) = target.launches(1)
    assert (boundary.kernel, boundary.block) == ("boundary_1_multicast", 256 + WARP)


def test_launches_that_a_spec_asks_for() -> None:
    """Two where one could be; one where it can; what is left open is picked."""
    groups = [
        {"max_tokens": 15, "group": 1, "launches": 2},
        {"max_tokens": 30, "group": 2, "launches": 1},
        {"max_tokens": 60, "group": 4},
        {"max_tokens": 256, "group": 16},
    ]
    target = plan_of(token_groups=groups).target("sm_90a")
    assert [row.launches for row in target.token_groups] == [2, 1, 1, 2]
    assert target.groups == (1, 2, 4, 16)
    assert [row.group for row in target.publishing] == [2, 4]
    assert [launch.kernel for launch in target.launches(15)][:2] == [
        "publish",
        "boundary_1",
    ]


@pytest.mark.parametrize(
    ("fields", "reason", "hint"),
    [
        (
            {},
            "16 clusters would have to run at once, and about 15 do",
            "or end the entry at 240 tokens",
        ),
        (
            {"cluster_size": 16},
            "16 clusters would have to run at once, and about 7 do",
            "or end the entry at 112 tokens",
        ),
        (
            {"tp": 1},
            "one rank has nothing to publish",
            None,
        ),
    ],
)
def test_one_launch_that_cannot_be(fields: Any, reason: str, hint: str | None) -> None:
    groups = [{"max_tokens": 256, "group": 16, "launches": 1}]
    with pytest.raises(PlanError) as caught:
        plan_of(token_groups=groups, **fields)
    (problem,) = caught.value.problems
    assert problem.loc == ("targets", "sm_90a", "token_groups", 0, "launches")
    assert (problem.given, problem.allowed) == ("1", "2")
    assert (problem.message, problem.hint) == (reason, hint)


@pytest.mark.parametrize(
    ("group", "senders", "most_peers"), [(1, 8, 1), (2, 4, 2), (3, 2, 4), (5, 1, 8)]
)
def test_eight_warps_share_out_who_sends_the_sums(
    group: int, senders: int, most_peers: int
) -> None:
    """Every token of a group has a warp, and every block of its eight is sent to."""
    target = plan_of(token_groups=[{"max_tokens": 256, "group": group}]).targets[0]
    (row,) = target.token_groups
    assert (target.warps, target.cluster_size) == (8, 8)
    assert (row.senders, row.most_peers) == (senders, most_peers)


def test_fragments_at_once() -> None:
    """As many as registers allow, and about as many in each turn."""
    plan = plan_of()
    taken = {group: fragments_at_once(plan, group, 255) for group in range(1, 17)}
    assert [taken[group] for group in range(1, 8)] == [1, 2, 3, 4, 5, 3, 4]
    for group, at_once in taken.items():
        turns = -(-group // at_once)
        assert turns == -(-group // 5)
        assert turns * at_once - group < turns  # none less is needed in each
    # Each takes the lane's words of all ranks, and their places.
    shape = plan_of(tp=16, hc=1)
    two = boundary_registers(shape, 2)
    assert two - boundary_registers(shape, 1) > 16 * 4
    assert fragments_at_once(shape, 8, two - 1) == 1
    assert fragments_at_once(shape, 8, two) == 2
    # With trips, a token has several fragments.
    trips = plan_of(hidden=16384)
    assert trips.trips == 2
    assert [fragments_at_once(trips, group, 255) for group in (1, 3)] == [2, 2]


def test_fn_may_be_split_so_that_two_blocks_share_a_multiprocessor() -> None:
    groups = [
        {"max_tokens": 15, "group": 1},
        {"max_tokens": 60, "group": 2, "fn_octets": 2},
        {"max_tokens": 90, "group": 3, "fn_octets": 0},
        {"max_tokens": 120, "group": 9},
        {"max_tokens": 256, "group": 9, "fn_octets": 2},
    ]
    plan = plan_of(token_groups=groups)
    target = plan.target("sm_90a")
    assert plan.splits_fn
    assert [row.fn_octets for row in target.token_groups] == [3, 2, 0, 3, 2]
    # Three tokens and all of fn are too much for two blocks.
    assert [row.blocks for row in target.token_groups] == [1, 2, 1, 1, 2]
    assert [row.launches for row in target.token_groups] == [1, 1, 2, 1, 1]
    kernels = ["1", "2_split", "3_split", "9", "9_split"]
    assert [row.kernel for row in target.forms] == kernels
    assert [row.kernel for row in target.publishing] == ["1", "2_split", "9", "9_split"]
    # Two blocks leave a thread 128 registers.
    assert target.may_spill == 0
    assert [target.may_spill_of(row) for row in target.forms] == [0, 64, 0, 0, 64]
    assert max(row.at_once for row in target.forms if row.blocks > 1) <= 4
    whole = 8 * WARP * 24 * FRAGMENT_BYTES
    assert [target.fn_bytes(held) for held in (3, 2, 0)] == [0, whole // 3, whole]
    for row in target.token_groups:
        rest = target.shared_bytes(row.group) + target.fn_bytes(row.fn_octets)
        assert row.shared_bytes == rest
    two = target.token_groups[1]
    assert 2 * (two.shared_bytes + 1024) <= 228 * 1024
    assert boundary_registers(plan, 1, 2) == boundary_registers(plan) - 8 * 4
    assert [shared_octets(target, group) for group in (1, 9, 30)] == [1, 1, None]
    assert not plan_of().splits_fn


@pytest.mark.parametrize(
    ("fields", "octets", "message"),
    [
        ({}, (4,), "fn has 3 octets of rows, of 24 rows"),
        ({}, (2, 1), "another row of groups of 1 splits fn otherwise"),
        ({"fn_weight": "fp32"}, (2,), "a projection by FMA keeps fn in one place"),
    ],
)
def test_fn_that_cannot_be_split_so(
    fields: dict[str, Any], octets: tuple[int, ...], message: str
) -> None:
    rows = [
        {"max_tokens": 8 * (i + 1), "group": 1, "fn_octets": number}
        for i, number in enumerate(octets)
    ]
    with pytest.raises(PlanError, match=message) as caught:
        plan_of(token_groups=rows, capacity=8 * len(octets), **fields)
    (problem,) = caught.value.problems
    place = ("targets", "sm_90a", "token_groups", len(octets) - 1, "fn_octets")
    assert problem.loc == place


def test_fn_that_registers_cannot_hold_is_not_split() -> None:
    rows = [{"max_tokens": 256, "group": 1, "fn_octets": 2}]
    with pytest.raises(PlanError, match=r"about 164 with fn") as caught:
        plan_of(hidden=7168, token_groups=rows, cluster_size=8)
    (problem,) = caught.value.problems
    assert problem.allowed == ", ".join(map(str, range(10, 17)))


def test_the_warp_of_the_mixes_has_a_lane_for_each_token() -> None:
    rows = [{"max_tokens": 64, "group": 33}]
    fields: dict[str, Any] = {"token_groups": rows, "cluster_size": 1, "hidden": 64}
    assert plan_of(capacity=64, **fields)
    with pytest.raises(PlanError, match="take more than one lane") as caught:
        plan_of(capacity=64, mixes="tail", **fields)
    (problem,) = caught.value.problems
    assert problem.allowed == "at most 32 at cluster size 1"


def test_spec_token_groups_are_taken_as_they_are() -> None:
    groups = [{"max_tokens": 10, "group": 2}, {"max_tokens": 256, "group": 7}]
    target = plan_of(token_groups=groups, cluster_size=4, hidden=2048).target("sm_90a")
    assert [(r.max_tokens, r.group) for r in target.token_groups] == [(10, 2), (256, 7)]
    assert target.cluster_size == 4
    assert target.threads == 2048 // 8 // 4 * 4


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        (
            {"hidden": 16384, "hc": 8, "cluster_size": 1},
            "cluster_size",
            "bytes of shared memory; sm_90a has 232448",
        ),
        (
            {"cluster_size": 16, "arch": "sm_120a"},
            "cluster_size",
            "sm_120a has clusters of at most 8 blocks",
        ),
        (
            {
                "hidden": 64,
                "hc": 8,
                "token_groups": [{"max_tokens": 256, "group": 57}],
            },
            "token_groups.0.group",
            "to project a group of 57 tokens takes about 384 registers a thread",
        ),
        (
            {"token_groups": [{"max_tokens": 256, "group": 64}]},
            "token_groups.0.group",
            "a group of 64 tokens needs 495888 bytes of shared memory",
        ),
    ],
)
def test_what_hardware_cannot_do_is_refused(fields: Any, key: str, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(**fields)
    (problem,) = caught.value.problems
    assert ".".join(map(str, problem.loc)).endswith(key)
    assert reason in problem.message
    assert problem.given


def test_nearest_legal_values_are_named() -> None:
    """A refusal names values that are then accepted."""
    with pytest.raises(PlanError) as caught:
        plan_of(token_groups=[{"max_tokens": 256, "group": 64}])
    allowed = caught.value.problems[0].allowed
    assert allowed == "at most 29 at cluster size 8"
    plan_of(token_groups=[{"max_tokens": 256, "group": 29}])
    with pytest.raises(PlanError):
        plan_of(token_groups=[{"max_tokens": 256, "group": 30}])
    with pytest.raises(PlanError) as caught:
        plan_of(hidden=16384, hc=8, cluster_size=1)
    allowed = caught.value.problems[0].allowed
    assert allowed == ", ".join(map(str, range(2, 17)))
    plan_of(hidden=16384, hc=8, cluster_size=2)


def test_offsets_stay_within_32_bits() -> None:
    """Capacities beyond today's range are refused before an offset overflows."""
    spec = spec_of(hidden=12288, tp=8, hc=2)
    capacity = spec.capacity.model_copy(update={"max_tokens": 3641})
    with pytest.raises(PlanError, match="32-bit offsets") as caught:
        make_plan(spec.model_copy(update={"capacity": capacity}))
    assert caught.value.problems[0].allowed.startswith("at most 3640 tokens")
    fits = spec.capacity.model_copy(update={"max_tokens": 3640})
    make_plan(spec.model_copy(update={"capacity": fits}))


@pytest.mark.parametrize(
    ("fields", "cluster", "warps", "design"),
    [
        ({}, 8, 8, Design(1, "registers")),
        ({"hidden": 64}, 1, 1, Design(1, "registers")),
        ({"hidden": 264}, 5, 1, Design(1, "registers")),
        ({"hidden": 5120}, 8, 10, Design(1, "registers")),
        ({"hidden": 7168, "tp": 16}, 8, 14, Design(1, "shared")),
        ({"hidden": 7168, "cluster_size": 7}, 7, 16, Design(1, "global")),
        ({"hidden": 7168, "arch": "sm_120a"}, 8, 14, Design(1, "global")),
        ({"hidden": 16384}, 8, 16, Design(2, "global")),
        ({"hidden": 16384, "hc": 8}, 8, 8, Design(8, "global")),
    ],
)
def test_what_the_plan_picks(
    fields: Any, cluster: int, warps: int, design: Design
) -> None:
    plan = plan_of(**fields)
    (target,) = plan.targets
    assert (target.cluster_size, target.warps, plan.design) == (cluster, warps, design)


def test_one_design_serves_all_targets() -> None:
    """Shared memory that only one target has is not counted on."""
    spec = spec_of(hidden=7168).model_dump()
    plan = make_plan(Spec.model_validate(spec))
    assert plan.fn_home == "shared"
    spec["targets"] = {"sm_90a": {}, "sm_120a": {}}
    plan = make_plan(Spec.model_validate(spec))
    assert plan.fn_home == "global"


def test_one_rank_publishes_nothing() -> None:
    plan = plan_of(tp=1)
    assert plan.transports == ("local",)
    names = [launch.kernel for launch in plan.target("sm_90a").launches(3)]
    assert names == ["boundary_1", "mixes"]
    assert {row.launches for row in plan.target("sm_90a").token_groups} == {2}
    assert plan.target("sm_90a").publishing == ()


def test_all_problems_at_once() -> None:
    spec = spec_of().model_dump()
    spec["targets"] = {
        "sm_90a": {"token_groups": [{"max_tokens": 256, "group": 64}]},
        "sm_120a": {"cluster_size": 9},
    }
    with pytest.raises(PlanError) as caught:
        make_plan(Spec.model_validate(spec))
    assert [problem.loc[1] for problem in caught.value.problems] == [
        "sm_90a",
        "sm_120a",
    ]


legal_specs = st.builds(
    spec_of,
    hidden=st.integers(8, 2048).map(lambda n: n * 8),
    hc=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    capacity=st.integers(1, 1024),
    arch=st.sampled_from(list(ARCHITECTURES)),
    mixes=st.sampled_from(["side_stream", "tail"]),
    pre_mix=st.sampled_from(["fresh", "delayed"]),
    cluster_size=st.sampled_from([None, *range(1, 17)]),
)


@settings(max_examples=200, deadline=None)
@given(legal_specs)
def test_any_spec_is_planned_or_refused(spec: Spec) -> None:
    """A plan keeps every limit of the hardware; what has none says why.

    Only a cluster that the spec itself names is ever refused.
    """
    ((arch, asked),) = spec.targets.items()
    try:
        plan = make_plan(spec)
    except PlanError as error:
        assert asked.cluster_size is not None
        assert all(problem.message and problem.given for problem in error.problems)
        return
    target = plan.target(arch)
    assert target.cluster_size <= (asked.cluster_size or 8)
    assert target.threads <= MAX_THREADS_PER_BLOCK
    assert target.threads % WARP == 0
    served = target.fragments_per_block * target.cluster_size
    assert served >= plan.fragments
    assert plan.idle_lanes == (served > plan.fragments)
    if asked.cluster_size is None:
        assert served - plan.fragments < served // target.warps
    published = plan.publish_threads * plan.publish_blocks
    assert 0 <= published - plan.fragments < plan.publish_threads
    assert plan.publish_idle_lanes == (published > plan.fragments)
    launched = target.launched_threads
    assert launched == target.threads + WARP * (plan.spec.mixes == "tail")
    assert launched <= MAX_THREADS_PER_BLOCK
    assert register_limit(launched) * launched <= 65536
    assert boundary_registers(plan) <= target.register_limit
    assert projection_registers(plan, target.groups[-1]) <= target.register_limit
    limit = ARCHITECTURES[arch].shared_bytes
    assert all(target.shared_bytes(group) <= limit for group in target.groups)
    assert target.token_groups[-1].max_tokens == plan.capacity
    tokens = [row.max_tokens for row in target.token_groups]
    assert tokens == sorted(set(tokens))
    wave = clusters_at_once(target.architecture, target.cluster_size)
    for row in target.token_groups:
        clusters = -(-row.max_tokens // row.group)
        assert (row.launches == 1) == (clusters <= wave and plan.tp > 1)
        assert row.shared_bytes == target.shared_bytes(row.group)
        assert 1 <= row.at_once <= row.group * plan.trips
        needed = boundary_registers(plan, row.at_once)
        assert row.at_once == 1 or needed <= target.register_limit
        assert group_fault(target, row.group) is None
    for row, after in pairwise(target.token_groups):
        # A group's row ends where its one launch does, or where a larger one is faster.
        beyond = row.max_tokens + 1
        if after.group == row.group:
            assert -(-row.max_tokens // row.group) == wave
        else:
            assert after.group > row.group
            faster = target.predicted(beyond, after.group)
            assert faster < target.predicted(beyond, row.group)
    for m in range(1, plan.capacity + 1):
        boundary = target.boundary_launch(m)
        group = target.token_group(m).group
        assert (boundary.grid[1] - 1) * group < m <= boundary.grid[1] * group


PLANS = [
    plan_of(hidden=hidden, hc=hc, tp=tp)
    for hidden, hc in [(4096, 4), (2560, 4), (4096, 2), (264, 1), (2880, 8)]
    for tp in (1, 2, 4, 8, 16)
]


def words_of(plan: Plan, lane: int) -> list[int]:
    """The words of a fragment that one of its lanes takes."""
    lanes = plan.lane_map
    first = lane // lanes.word_lanes * lanes.words
    return [first + word for word in range(lanes.words)]


def streams_of(plan: Plan, lane: int) -> list[int]:
    """The streams that a lane computes these words of."""
    lanes = plan.lane_map
    first = lane % lanes.word_lanes * lanes.streams
    return [first + stream for stream in range(lanes.streams)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.hidden}-{p.hc}-{p.tp}")
def test_each_word_of_each_stream_is_computed_by_one_lane(plan: Plan) -> None:
    computed = Counter(
        (word, stream)
        for lane in range(plan.hc)
        for word in words_of(plan, lane)
        for stream in streams_of(plan, lane)
    )
    every = [(word, j) for word in range(FRAGMENT_WORDS) for j in range(plan.hc)]
    assert computed == Counter(every)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.hidden}-{p.hc}-{p.tp}")
def test_merges_add_a_word_of_each_stream_once(plan: Plan) -> None:
    """Followed symbolically; lanes that do not share words never meet."""
    lanes = plan.lane_map
    words = [words_of(plan, lane) for lane in range(lanes.lanes)]
    added = [Counter(streams_of(plan, lane)) for lane in range(lanes.lanes)]
    for distance in lanes.merges:
        for lane, own in enumerate(words):
            assert words[lane ^ distance] == own
        added = [mine + added[lane ^ distance] for lane, mine in enumerate(added)]
    assert all(streams == Counter(range(plan.hc)) for streams in added)


def stash_address(plan: Plan, stream: int, fragment: int) -> int:
    return stream * plan.stash_stream_bytes + fragment * FRAGMENT_BYTES


def test_the_lanes_of_a_fragment_are_of_one_warp() -> None:
    """They read each other's streams, and are idle together."""
    assert all(WARP % plan.lane_map.lanes == 0 for plan in PLANS)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.hidden}-{p.hc}-{p.tp}")
def test_chunks_cover_a_warp_once(plan: Plan) -> None:
    """What lanes store to the stash is what chunks load, each fragment once."""
    stored = {
        stash_address(plan, lane % plan.hc, lane // plan.hc): lane
        for lane in range(WARP)
    }
    assert len(stored) == WARP
    loaded = Counter(
        chunk.stream * plan.stash_stream_bytes
        + chunk.part * plan.chunk_bytes
        + quad * FRAGMENT_BYTES
        for chunk in plan.chunks
        for quad in range(QUAD)
    )
    assert loaded == Counter(stored.keys())
    assert max(stored) + FRAGMENT_BYTES <= plan.stash_token_bytes


def conflicts(addresses: list[int], width: int) -> int:
    """The most distinct words that one bank must serve for one access of a warp.

    Accesses are served for as many lanes at a time as take 128 bytes.
    """
    lanes = 128 // width
    worst = 0
    for first in range(0, len(addresses), lanes):
        banks: dict[int, set[int]] = {}
        for address in addresses[first : first + lanes]:
            for word in range(address // 4, (address + width) // 4):
                banks.setdefault(word % 32, set()).add(word)
        worst = max(worst, *(len(words) for words in banks.values()))
    return worst


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.hidden}-{p.hc}-{p.tp}")
def test_shared_memory_has_no_bank_conflicts(plan: Plan) -> None:
    stores = [
        stash_address(plan, lane % plan.hc, lane // plan.hc) for lane in range(WARP)
    ]
    assert conflicts(stores, 16) == 1
    for chunk in plan.chunks:
        loads = [
            lane // QUAD * plan.stash_token_bytes
            + stash_address(plan, chunk.stream, QUAD * chunk.part + lane % QUAD)
            for lane in range(WARP)
        ]
        assert conflicts(loads, 16) == 1
    # A lane reads its words of each old stream, and stores those that it computes.
    words = [words_of(plan, lane % plan.hc)[0] * 4 for lane in range(WARP)]
    for stream in range(plan.hc):
        old = [
            stash_address(plan, stream, lane // plan.hc) + words[lane]
            for lane in range(WARP)
        ]
        assert conflicts(old, 4 * plan.lane_map.words) == 1
    for place in range(plan.lane_map.streams):
        new = [
            stash_address(
                plan, streams_of(plan, lane % plan.hc)[place], lane // plan.hc
            )
            + words[lane]
            for lane in range(WARP)
        ]
        assert conflicts(new, 4 * plan.lane_map.words) == 1
    # Each thread reads what it copied of fn, 16 bytes beside its neighbour's.
    assert conflicts([lane * FRAGMENT_BYTES for lane in range(WARP)], 16) == 1
    sums = [
        (lane % QUAD * 2 * plan.sums_stride + lane // QUAD) * 4 for lane in range(WARP)
    ]
    assert conflicts(sums, 4) == 1


def test_sums_fit_their_stride() -> None:
    for plan in PLANS:
        assert plan.squares == plan.fn_octets * OCTET >= plan.mix
        assert plan.squares <= plan.last_sum < plan.sums_stride
        assert 2 * plan.tiles >= plan.fn_octets + 1


def test_target_of_an_architecture_that_the_spec_lacks() -> None:
    with pytest.raises(KeyError):
        plan_of().target("sm_100a")


def test_reasons_are_told() -> None:
    def target(**fields: Any) -> TargetPlan:
        return plan_of(**fields).target("sm_90a")

    assert "picked" in target().cluster_reason
    assert "from the spec" in target(cluster_size=8).cluster_reason
    assert "should be the fastest" in target().groups_reason
    groups = [{"max_tokens": 256, "group": 2}]
    assert "from the spec" in target(token_groups=groups).groups_reason
