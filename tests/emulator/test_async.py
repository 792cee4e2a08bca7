"""Asynchronous stores, mbarriers, barriers of some warps, and copies in the background.

Each kind of mistake must be found: in order, or by an adversary of a few seeds.
"""

import numpy as np
import pytest

from mhcgen.emulator.errors import (
    BarrierError,
    DeadlockError,
    EmulatorError,
    MemoryFaultError,
    PtxError,
)
from mhcgen.emulator.machine import Geometry
from tests.emulator.tiny import FIRST_LINE, Tiny, program

SEEDS = [None, *range(8)]
PAIR = Geometry((2, 1, 1), 32, (2, 1, 1), 512)
ALONE = Geometry((1, 1, 1), 32, (1, 1, 1), 512)


def run(body: str, geometry: Geometry = PAIR, seed: int | None = None) -> Tiny:
    """Runs a kernel that reads 128 words, each its own index."""
    tiny = Tiny(seed=seed)
    source = tiny.input(np.arange(128, dtype=np.uint32))
    tiny.launch(program(body), source.address, geometry=geometry)
    tiny.world.run()
    return tiny


def fails(
    body: str, error: type[EmulatorError], reason: str, geometry: Geometry = ALONE
) -> EmulatorError:
    """Runs a kernel that must stop in order."""
    with pytest.raises(error, match=reason) as caught:
        run(body, geometry)
    return caught.value


def found(body: str, *reasons: str, geometry: Geometry = PAIR, seeds: int = 16) -> int:
    """In how many runs of an adversary a mistake is found, for one of some reasons."""
    count = 0
    for seed in range(seeds):
        try:
            run(body, geometry, seed)
        except EmulatorError as error:
            assert any(reason in str(error) for reason in reasons), str(error)
            count += 1
    return count


# The exchange: each block sends 32 words to its peer. An mbarrier is at byte 0 of
# shared memory, the words are from byte 64 on.

INIT = """\
mov.b32 %r3, shared;
mov.u32 %r2, %ctaid.x;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r3], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
READY:
bar.sync 0;
barrier.cluster.arrive.relaxed;
"""
MEET = "barrier.cluster.wait;\n"
SEND = """\
and.b32 %r4, %r2, 1; xor.b32 %r4, %r4, 1;
shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r3; add.s32 %r5, %r5, 64;
mad.lo.s32 %r6, %r2, 100, %r1;
mapa.shared::cluster.u32 %r7, %r5, %r4;
mapa.shared::cluster.u32 %r8, %r3, %r4;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7], %r6, [%r8];
"""
WAIT = """\
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra AGAIN;
"""
TAKE = """\
ld.shared.b32 %r9, [%r5];
shl.b32 %r8, %r2, 7; cvt.u64.u32 %d6, %r8; add.s64 %d6, %d6, %d4;
st.global.b32 [%d6], %r9;
"""
EXCHANGE = INIT + MEET + SEND + WAIT + TAKE


@pytest.mark.parametrize("seed", SEEDS)
def test_exchange(seed: int | None) -> None:
    tiny = run(EXCHANGE, Geometry((4, 1, 1), 32, (2, 1, 1), 512), seed)
    sent = [100 * (block ^ 1) + lane for block in range(4) for lane in range(32)]
    assert tiny.words(128).tolist() == sent


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize(
    ("kind", "values", "size"),
    [
        ("f32", "%r6", 4),
        ("v2.u32", "{%r6, %r1}", 8),
        ("v4.b32", "{%r6, %r1, %r2, %r6}", 16),
        ("b64", "%d6", 8),
    ],
)
def test_elements(kind: str, values: str, size: int, seed: int | None) -> None:
    """Every width is counted in bytes; what is read is the first word."""
    shift = size.bit_length() - 1
    body = EXCHANGE.replace("128;\nREADY", f"{32 * size};\nREADY")
    body = body.replace("shl.b32 %r5, %r1, 2", f"shl.b32 %r5, %r1, {shift}")
    body = body.replace("bytes.b32 [%r7], %r6", f"bytes.{kind} [%r7], {values}")
    body = body.replace("mapa", "cvt.u64.u32 %d6, %r6; mapa", 1)
    tiny = run(body, Geometry((2, 1, 1), 32, (2, 1, 1), 1024), seed)
    sent = [100 * (block ^ 1) + lane for block in range(2) for lane in range(32)]
    assert tiny.words(64).tolist() == sent


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_follow_each_other(seed: int | None) -> None:
    """Each phase has its parity; the words of the second replace those of the first.

    Lanes may start to send again before the peer has read, so they meet in between.
    """
    arm = (
        "bar.warp.sync -1;\n@%p1 bra ARMED;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;\n"
        "ARMED:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    )
    second = SEND.replace("100", "200")
    wait = WAIT.replace("AGAIN", "MORE").replace("], 0;", "], 1;")
    tiny = run(INIT + MEET + SEND + WAIT + arm + second + wait + TAKE, seed=seed)
    sent = [200 * (block ^ 1) + lane for block in range(2) for lane in range(32)]
    assert tiny.words(64).tolist() == sent


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_may_land_before_they_are_expected(seed: int | None) -> None:
    """The count goes below zero; the arrival that is still missing keeps the phase."""
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;\n"
    late = (
        INIT.replace(expect, "")
        + MEET
        + SEND
        + f"@%p1 bra ARMED;\n{expect}ARMED:\n"
        + WAIT
        + TAKE
    )
    assert run(late, seed=seed).words(64)[32] == 0


def test_an_mbarrier_of_many_arrivals() -> None:
    body = (
        "mov.b32 %r3, shared;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra READY;\n"
        "mbarrier.init.shared::cta.b64 [%r3], 32;\nREADY:\nbar.sync 0;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r3], 1;\n"
        "mbarrier.arrive.shared::cta.b64 _, [%r3];\n"
        f"{WAIT}selp.b32 %r9, 1, 0, %p3;\nst.global.b32 [%d4], %r9;"
    )
    for seed in SEEDS:
        words = run(body, ALONE, seed).words().tolist()
        assert words[0] == 1, "the phase before the first counts as complete"
        if seed is None:
            assert words == [1] * 32


# Mistakes of the exchange


def test_no_wait() -> None:
    """In order, data has landed at once: the exit of the block tells."""
    body = INIT + MEET + SEND + TAKE
    fails(
        body,
        MemoryFaultError,
        "exits without a wait for phase 0 of the mbarrier at byte 0",
        PAIR,
    )
    reasons = ("unordered read", "uninitialised read", "exits with")
    assert found(body, *reasons, "exits while") == 16


def test_a_wait_for_the_other_phase() -> None:
    """A thread that comes early passes, and one that comes late waits for ever."""
    body = EXCHANGE.replace("[%r3], 0;", "[%r3], 1;")
    fails(body, DeadlockError, "phase 1 lacks 1 of 1 arrivals and 0 bytes", PAIR)
    early = ("unordered read", "uninitialised read", "exits")
    assert found(body, *early, "phase 1 lacks") == 16


def test_a_cluster_barrier_is_no_wait() -> None:
    """It lands ordinary stores, and says nothing of asynchronous ones."""
    meet = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    assert found(INIT + MEET + SEND + meet + TAKE, "unordered read", "exits") == 16


def test_a_read_before_the_phase_is_complete() -> None:
    """Half of the words have landed, and the phase waits for the others."""
    body = INIT + MEET + SEND.replace("st.async", "@%p3 st.async")
    body = body.replace("READY:\n", "READY:\nsetp.lt.u32 %p3, %r1, 16;\n")
    body += "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"
    body += "@!%p3 bra END;\nld.shared.b32 %r9, [%r5];\nEND:"
    reason = "unordered read: 4 bytes at byte 64 of shared memory, to which an asynchr"
    fails(body, MemoryFaultError, reason, PAIR)
    store = body.replace("ld.shared.b32 %r9, [%r5];", "st.shared.b32 [%r5], 1;")
    fails(store, MemoryFaultError, reason.replace("read", "store"), PAIR)


def test_two_stores_to_one_place() -> None:
    twice = SEND + SEND.split("\n")[-2] + "\n"
    body = EXCHANGE.replace(SEND, twice).replace("128;\nREADY", "256;\nREADY")
    reason = "unordered use: 4 bytes at byte 64 of shared memory"
    fails(body, MemoryFaultError, reason, PAIR)
    one = EXCHANGE.replace("[%r7], %r6", "[%r10], %r6")
    one = one.replace("mapa", "add.s32 %r10, %r3, 64; mapa", 1).replace(
        "mapa.shared::cluster.u32 %r8",
        "mapa.shared::cluster.u32 %r10, %r10, %r4; mapa.shared::cluster.u32 %r8",
    )
    fails(one, MemoryFaultError, reason, PAIR)


def test_data_and_mbarrier_in_different_blocks() -> None:
    body = EXCHANGE.replace("u32 %r8, %r3, %r4", "u32 %r8, %r3, %r2")
    fails(body, MemoryFaultError, "its mbarrier in different blocks", PAIR)


def test_a_peer_that_has_not_started_or_is_gone() -> None:
    early = EXCHANGE.replace("barrier.cluster.arrive.relaxed;\n", "")
    early = early.replace(MEET, "")
    assert found(early, "has not started", "no mbarrier", "not known", "exited") == 16
    body = INIT + MEET + "setp.eq.u32 %p3, %r2, 0;\n@%p3 ret;\n" + SEND
    assert found(body, "has exited", "exits while", "exits without") == 16


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("barrier.cluster.arrive.relaxed;\n", "barrier.cluster.arrive.relaxed;\n"),
        ("fence.mbarrier_init.release.cluster;\n", ""),
    ],
)
def test_an_mbarrier_that_the_peer_may_not_know_of(old: str, new: str) -> None:
    """A store before the wait at the cluster's barrier, and no fence before it."""
    assert old in EXCHANGE
    body = EXCHANGE.replace(old, new)
    if old == new:
        body = body.replace(MEET, "").replace(WAIT, WAIT + MEET)
    fails(body, BarrierError, "not known to be initialised", PAIR)
    assert found(body, "not known", "not started", "no mbarrier") == 16


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_that_releases_needs_no_fence(seed: int | None) -> None:
    body = EXCHANGE.replace("fence.mbarrier_init.release.cluster;\n", "")
    run(body.replace("arrive.relaxed", "arrive"), seed=seed)


def test_no_mbarrier() -> None:
    for line in [
        "mbarrier.arrive.shared::cta.b64 _, [shared+8];",
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [shared+8], 0;",
    ]:
        fails(line, BarrierError, "no mbarrier was initialised at byte 8 of shared")
    body = EXCHANGE.replace("mapa.shared::cluster.u32 %r8, %r3, %r4", "mov.b32 %r8, 0")
    body = body.replace("[%r8];", "[%r10];").replace(
        "mov.b32 %r8, 0;",
        "add.s32 %r8, %r3, 8; mapa.shared::cluster.u32 %r10, %r8, %r4;",
    )
    fails(body, BarrierError, "no mbarrier was initialised at byte 8", PAIR)


MAKE = "@%p0 bra END;\nmbarrier.init.shared::cta.b64 [shared], {};\n{}\nEND:"


@pytest.mark.parametrize(
    ("count", "then", "error", "reason"),
    [
        (0, "", BarrierError, "an mbarrier of 0 arrivals"),
        (
            1,
            "mbarrier.init.shared::cta.b64 [shared], 1;",
            MemoryFaultError,
            "unordered use: 8 bytes at byte 0 of shared memory, where an mbarrier is",
        ),
        (1, "st.shared.b32 [shared+4], 1;", MemoryFaultError, "unordered store: 4 by"),
        (1, "ld.shared.b64 %d7, [shared];", MemoryFaultError, "unordered read: 8 byt"),
        (
            1,
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [shared], 4;\n"
            "mbarrier.arrive.shared::cta.b64 _, [shared];",
            BarrierError,
            "an arrival too many at the mbarrier at byte 0 of shared memory",
        ),
        (
            1,
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [shared], 1048576;",
            BarrierError,
            "has to count 1048576 bytes; it can count 1048575",
        ),
        (
            1,
            "mbarrier.try_wait.parity.shared::cta.b64 %p1, [shared], 2;",
            BarrierError,
            "parity 0 or 1",
        ),
    ],
)
def test_misused_mbarriers(
    count: int, then: str, error: type[EmulatorError], reason: str
) -> None:
    first = "setp.ne.u32 %p0, %r1, 0;\n"
    fails(first + MAKE.format(count, then), error, reason)


def test_more_bytes_than_expected() -> None:
    """The last store that lands is half too long for the phase, or comes after it."""
    body = EXCHANGE.replace("], 128;", "], 126;")
    error = fails(body, BarrierError, "2 bytes more than the mbarrier at byte 0", PAIR)
    assert isinstance(error, BarrierError)
    assert error.place.text.startswith("st.async")
    assert found(body, "2 bytes more") == 16
    late = EXCHANGE.replace("], 128;", "], 124;")
    fails(late, MemoryFaultError, "unordered read: 4 bytes at byte 188 of", PAIR)
    assert found(late, "exits", "unordered read") == 16
    unread = late.replace(TAKE, "")
    fails(unread, MemoryFaultError, "exits without a wait for phase 1", PAIR)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_that_is_never_complete(seed: int | None) -> None:
    with pytest.raises(DeadlockError) as caught:
        run(EXCHANGE.replace("], 128;", "], 132;"), seed=seed)
    assert (
        "threads, the first of which waits for the mbarrier at byte 0 of shared "
        "memory: phase 0 lacks 0 of 1 arrivals and 4 bytes" in str(caught.value)
    )
    arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;\n"
    with pytest.raises(DeadlockError, match="lacks 1 of 1 arrivals and -128 bytes"):
        run(EXCHANGE.replace(arrive, ""), seed=seed)


@pytest.mark.parametrize(
    "line",
    [
        "st.async.shared::cluster.b32 [%r7], %r6, [%r8];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b16 [%r7], %r6, [%r8];",
        "mbarrier.arrive.shared::cta.b64 %d6, [%r3];",
        "mbarrier.inval.shared::cta.b64 [%r3];",
        "mbarrier.init.shared::cluster.b64 [%r3], 1;",
        "mbarrier.try_wait.shared::cta.b64 %p1, [%r3], %d6;",
        "bar.sync 1, 40;",
        "bar.sync 16;",
        "bar.sync %r1;",
        "bar.arrive 1;",
    ],
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(PtxError, match="unknown instruction") as caught:
        program(line)
    assert caught.value.line == FIRST_LINE


# Barriers of some warps

# Warps 0 and 1 exchange words; warp 2 does something else.
SOME = """mov.b32 %r3, shared; shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, %r3;
barrier.cluster.arrive;
setp.ge.u32 %p1, %r1, 64;
@%p1 bra OTHER;
st.shared.b32 [%r2], %r1;
bar.sync 1, 64;
xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r3;
ld.shared.b32 %r9, [%r4];
bar.arrive 2, 96;
barrier.cluster.wait;
bra.uni END;
OTHER:
barrier.cluster.wait;
bar.sync 2, 96;
ld.shared.b32 %r9, [%r2+-128];
END:
st.global.b32 [%d4], %r9;"""
THREE = Geometry((1, 1, 1), 96, (1, 1, 1), 512)


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_of_some_warps(seed: int | None) -> None:
    words = run(SOME, THREE, seed).words(96).tolist()
    assert words == [thread ^ 32 for thread in range(64)] + [*range(32, 64)]


@pytest.mark.parametrize("line", ["bar.sync 1, 64;\n", "bar.sync 2, 96;\n"])
def test_a_missing_barrier_of_some_warps_is_found(line: str) -> None:
    body = SOME.replace(line, "").replace("barrier.cluster.wait;\n", "")
    assert found(body, "uninitialised read", geometry=THREE, seeds=30) >= 3


def test_barriers_with_the_wrong_number_of_threads() -> None:
    body = SOME.replace("bar.sync 1, 64", "bar.sync 1, 96")
    reason = "at a barrier of its block, number 1, where 64 of 96 threads are"
    fails(body, DeadlockError, reason, THREE)
    body = SOME.replace("bar.sync 1, 64", "bar.sync 1, 32")
    fails(body, BarrierError, "barrier 1 of 32 threads, where more", THREE)
    body = SOME.replace("bar.arrive 2, 96", "bar.arrive 2, 128")
    fails(body, BarrierError, "at barrier 2 whose other threads name another", THREE)
    body = SOME.replace("bar.arrive 2, 96;\n", "")
    reason = "at a barrier of its block, number 2, where 32 of 96 threads are"
    fails(body, DeadlockError, reason, THREE)


# Copies in the background

COPY = """mov.b32 %r3, shared; shl.b32 %r2, %r1, 4; add.s32 %r2, %r2, %r3;
mul.wide.u32 %d6, %r1, 16; add.s64 %d6, %d6, %d2;
cp.async.cg.shared.global [%r2], [%d6], 16;
cp.async.wait_all;
bar.sync 0;
ld.shared.b32 %r9, [%r2];
st.global.b32 [%d4], %r9;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_copies(seed: int | None) -> None:
    assert run(COPY, ALONE, seed).words().tolist() == [*range(0, 128, 4)]


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("ld.shared.b32 %r9, [%r2+4];", "unordered read: 4 bytes at byte 4 of shared"),
        ("st.shared.b32 [%r2+4], 1;", "unordered store: 4 bytes at byte 4 of shared"),
        ("cp.async.cg.shared.global [%r2], [%d6], 16;", "unordered use: 16 bytes"),
    ],
)
def test_nobody_touches_what_a_copy_is_on_its_way_to(before: str, reason: str) -> None:
    """Not even where something was written before."""
    head, _, tail = COPY.partition("cp.async.cg")
    body = f"{head}st.shared.b32 [%r2+4], 7;\ncp.async.cg{tail}"
    body = body.replace("cp.async.wait_all;", f"{before}\ncp.async.wait_all;")
    fails(body, MemoryFaultError, reason)


def test_others_need_a_barrier_after_the_wait() -> None:
    """Each thread takes what one of another warp has copied."""
    geometry = Geometry((1, 1, 1), 128, (1, 1, 1), 2048)
    other = "xor.b32 %r4, %r1, 64; shl.b32 %r4, %r4, 4; add.s32 %r4, %r4, %r3;\n"
    body = COPY.replace("ld.shared.b32 %r9, [%r2]", f"{other}ld.shared.b32 %r9, [%r4]")
    body = body.replace("mul.wide.u32 %d6, %r1, 16", "mul.wide.u32 %d6, %r1, 0")
    assert run(body, geometry).words(128).tolist() == [0] * 128
    meet, wait = "bar.sync 0;\n", "cp.async.wait_all;\n"
    early = body.replace(wait, "")
    fails(early, MemoryFaultError, "unordered read", geometry)
    reasons = ("unordered read", "uninitialised read")
    idle = "add.s32 %r7, %r1, 1;\n" * 12
    for instead in (wait, meet + idle + wait):
        wrong = body.replace(wait + meet, instead)
        assert found(wrong, *reasons, geometry=geometry, seeds=60) >= 3


def test_a_copy_reads_its_source_at_any_time_until_the_wait() -> None:
    """Words that are overwritten meanwhile: the old ones, or the new ones."""
    store = "st.global.v4.b32 [%d6], {{{0}, {0}, {0}, {0}}};\n"
    head, copy, tail = COPY.replace("%d6, %d2", "%d6, %d1").partition("cp.async.cg")
    last = store.format("%r8") + "cp.async.wait_all"
    body = f"{head}{store.format('%r3')}mov.b32 %r8, 7;\n{copy}{tail}"
    body = body.replace("cp.async.wait_all", last)
    body = body.replace("st.global.b32 [%d4]", "st.global.b32 [%d4+512]")
    (address,) = {*run(body, ALONE).words(160)[128:].tolist()}
    seen: set[int] = set()
    for seed in range(100):
        seen |= {*run(body, ALONE, seed).words(160)[128:].tolist()}
    assert seen == {address, 7}


# Room


def swap(seed: int | None, room: int) -> bool:
    """Each block waits for the same block of the other rank; whether all get on."""
    body = (
        "mov.u32 %r2, %ctaid.x; mul.wide.u32 %d6, %r2, 4;\n"
        "add.s64 %d7, %d1, %d6; add.s64 %d8, %d2, %d6;\n"
        "setp.ne.u32 %p1, %r1, 0;\n@%p1 ret;\nst.global.b32 [%d8], 1;\n"
        "AGAIN:\nld.volatile.global.b32 %r3, [%d7];\nsetp.eq.b32 %p2, %r3, 0;\n"
        "@%p2 bra AGAIN;"
    )
    tiny = Tiny(ranks=2, seed=seed, resident_blocks=room)
    for box in tiny.out:
        tiny.world.memory.write(box, np.zeros(256, np.uint32))
    out = [box.address for box in tiny.out]
    requests = [
        (stream, np.array([out[rank], out[1 - rank]], np.uint64).tobytes())
        for rank, stream in enumerate(tiny.streams)
    ]
    tiny.world.launch(program(body), Geometry((256, 1, 1), 96), requests)
    try:
        tiny.world.run()
    except DeadlockError as error:
        assert "wait for room" in str(error)
        return False
    return tiny.words(256).tolist() == [1] * 256


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_wait_for_each_other_with_room_for_all(seed: int | None) -> None:
    assert swap(seed, 256)


def test_ranks_that_wait_for_each_other_without_room() -> None:
    """In order, blocks start in order, and get on; hardware does not promise that."""
    assert swap(None, 2)
    assert [swap(seed, 2) for seed in range(8)].count(False) >= 3
