"""Threads, warps, blocks, clusters and launches; and every way to go wrong."""

import numpy as np
import pytest

from mhcgen.emulator.errors import (
    BarrierError,
    DeadlockError,
    EmulatorError,
    ExecutionError,
    LaneError,
    MemoryFaultError,
)
from mhcgen.emulator.machine import Geometry
from mhcgen.emulator.memory import GlobalMemory
from mhcgen.emulator.scheduler import Stream
from tests.emulator.tiny import FIRST_LINE, Tiny, program, result

SEEDS = [None, *range(6)]


def fails(body: str, error: type[ExecutionError], reason: str) -> ExecutionError:
    """Runs a kernel whose last line must stop it, with an input of 32 words."""
    tiny = Tiny()
    source = tiny.input(np.arange(32, dtype=np.uint32))
    tiny.launch(program(body), source.address)
    with pytest.raises(error, match=reason) as caught:
        tiny.world.run()
    place = caught.value.place
    assert (place.kernel, place.rank, place.block) == ("tiny", 0, (0, 0, 0))
    assert place.line == FIRST_LINE + body.count("\n")
    assert place.text == body.split("\n")[-1].rstrip(";")
    assert f"line {place.line}: {place.text}" in str(caught.value)
    return caught.value


# Memory


def test_out_of_bounds() -> None:
    error = fails(
        "add.s64 %d6, %d5, 64;\nld.global.b32 %r2, [%d6];",
        MemoryFaultError,
        r"out of bounds: 4 bytes at byte 128 of in of rank 0 \(128 bytes\)",
    )
    assert error.place.thread == 16


def test_below_the_first_allocation() -> None:
    body = "ld.global.b32 %r2, [%d1+-4096];"
    fails(body, MemoryFaultError, "out of bounds: 4 bytes at address 0x")


def test_store_out_of_bounds() -> None:
    body = "st.global.b32 [%d4+1020], %r1;"
    assert fails(body, MemoryFaultError, "byte 1024 of out").place.thread == 1


def test_wild_address() -> None:
    fails("mov.b64 %d6, 4096;\nld.global.b32 %r2, [%d6];", MemoryFaultError, "0x1000")


def test_misaligned() -> None:
    body = "ld.global.v2.b32 {%r2, %r3}, [%d5];"
    error = fails(body, MemoryFaultError, "misaligned: address .* is no multiple of 8")
    assert error.place.thread == 1


def test_uninitialised_read() -> None:
    fails(
        "st.global.b32 [%d1], 7;\nld.global.b32 %r2, [%d4];",
        MemoryFaultError,
        "uninitialised read: 4 bytes at byte 4 of out .* nothing has written",
    )


def test_memory_larger_than_the_machine_has() -> None:
    """Mailboxes of 16 ranks take tens of gigabytes, of which a call touches little."""
    memory = GlobalMemory(1 << 40)
    memory.allocate("mailbox", (1 << 40) - (1 << 20), reserved=True)
    last = memory.allocate("x", 4)
    memory.write(last, np.array([7], np.uint32))
    assert memory.read(last, 4).view(np.uint32) == [7]


def test_freed_memory() -> None:
    tiny = Tiny()
    source = tiny.input(np.arange(32, dtype=np.uint32))
    tiny.world.memory.free(source)
    tiny.launch(program("ld.global.b32 %r2, [%d5];"), source.address)
    with pytest.raises(MemoryFaultError, match="reserved or freed"):
        tiny.world.run()


def test_shared_memory_faults() -> None:
    tiny = Tiny()
    for body, reason in [
        ("ld.shared.b32 %r2, [shared+64];", "out of bounds: 4 bytes at byte 64 of sh"),
        ("ld.shared.b32 %r2, [shared];", "uninitialised read: 4 bytes at byte 0 of sh"),
        ("ld.shared.b32 %r2, [shared+2];", "misaligned"),
        ("mov.b32 %r2, 0; st.shared.b32 [%r2], 1;", "out of bounds: 4 bytes at byte -"),
    ]:
        tiny.launch(program(body), geometry=Geometry((1, 1, 1), 32, shared_bytes=64))
        with pytest.raises(MemoryFaultError, match=reason):
            tiny.world.run()
        tiny = Tiny()


def test_multimem_takes_a_multicast_address() -> None:
    body = "multimem.st.relaxed.sys.global.b32 [%d4], %r1;"
    fails(body, MemoryFaultError, "a multimem store to byte 0 of out")


@pytest.mark.parametrize(
    "body", ["st.global.b32 [%d4], 1;", "ld.global.b32 %r2, [%d4];"]
)
def test_a_multicast_address_takes_only_multimem(body: str) -> None:
    tiny = Tiny(ranks=2)
    window = tiny.world.memory.window(tiny.out)
    tiny.launch(program(body), target=window.address)
    with pytest.raises(MemoryFaultError, match="takes multimem stores only"):
        tiny.world.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_multimem_reaches_every_rank(seed: int | None) -> None:
    tiny = Tiny(ranks=3, seed=seed)
    window = tiny.world.memory.window(tiny.out)
    code = program("multimem.st.relaxed.sys.global.b32 [%d4], %r1;")
    tiny.launch(code, target=window.address)
    tiny.world.run()
    for rank in range(3):
        assert tiny.words(rank=rank).tolist() == [*range(32)]


def test_beyond_a_multicast_window() -> None:
    tiny = Tiny(ranks=2)
    window = tiny.world.memory.window(tiny.out)
    code = program("multimem.st.relaxed.sys.global.b32 [%d4+1000], %r1;")
    tiny.launch(code, target=window.address)
    with pytest.raises(MemoryFaultError, match="byte 1024 of a multicast window"):
        tiny.world.run()


def test_the_host_reads_only_what_was_written() -> None:
    with pytest.raises(
        EmulatorError, match=r"124 of 128 bytes of out .* never written"
    ):
        result("setp.ne.b32 %p1, %r1, 0;\n@%p1 ret;\nmov.b32 %r9, 1;")


# Threads and warps


def test_registers_must_be_written_before_they_are_read() -> None:
    fails("mov.b32 %r9, %r8;", ExecutionError, "a register is read before")


def test_divergence_and_reconvergence() -> None:
    """Lanes of a loop leave it at different times and meet behind it."""
    values = result(
        "mov.b32 %r9, 0;\n"
        "AGAIN:\n"
        "add.s32 %r9, %r9, 3;\n"
        "setp.le.u32 %p1, %r9, %r1;\n"
        "@%p1 bra AGAIN;\n"
        "shfl.sync.idx.b32 %r9, %r9, 31, 31, -1;"
    )
    assert values.tolist() == [33] * 32


def test_predicated_instructions_leave_other_lanes_alone() -> None:
    values = result(
        "mov.b32 %r9, 7;\nsetp.lt.u32 %p1, %r1, 4;\n@!%p1 add.s32 %r9, %r1, 100;"
    )
    assert values.tolist() == [7] * 4 + [lane + 100 for lane in range(4, 32)]


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "source"),
    [
        ("bfly", 4, 31, lambda lane: lane ^ 4),
        ("idx", 5, 31, lambda lane: 5),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane <= 28 else lane),
        ("idx", 1, 0x181F, lambda lane: lane & 24 | 1),
        ("down", 1, 0x181F, lambda lane: lane + 1 if lane % 8 < 7 else lane),
    ],
)
def test_shuffles(mode: str, by: int, clamp: int, source: object) -> None:
    assert callable(source)
    values = result(f"shfl.sync.{mode}.b32 %r9, %r1, {by}, {clamp}, -1;")
    assert values.tolist() == [source(lane) for lane in range(32)]


def test_shuffle_among_some_lanes() -> None:
    values = result(
        "mov.b32 %r9, 99;\n"
        "setp.lt.u32 %p1, %r1, 16;\n"
        "@%p1 bra FEW;\n"
        "bra.uni END;\n"
        "FEW:\n"
        "shfl.sync.bfly.b32 %r9, %r1, 8, 31, 0xFFFF;\n"
        "END:"
    )
    assert values.tolist() == [lane ^ 8 for lane in range(16)] + [99] * 16


def test_shuffle_from_a_lane_outside_of_the_mask() -> None:
    fails(
        "setp.ge.u32 %p1, %r1, 16;\n@%p1 ret;\n"
        "shfl.sync.bfly.b32 %r9, %r1, 16, 31, 0xFFFF;",
        LaneError,
        "a value from lane 16, which does not take part",
    )


def test_shuffle_with_a_lane_that_has_exited() -> None:
    fails(
        "setp.eq.b32 %p1, %r1, 7;\n@%p1 ret;\nshfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;",
        LaneError,
        "lane 7 is named by the mask of a warp operation, and has exited",
    )


def test_shuffle_by_a_lane_that_the_mask_does_not_name() -> None:
    error = fails(
        "shfl.sync.bfly.b32 %r9, %r1, 1, 31, 0xFFFF;", LaneError, "does not name it"
    )
    assert error.place.thread == 16


def test_shuffle_with_a_lane_that_never_comes() -> None:
    tiny = Tiny()
    tiny.launch(
        program(
            "setp.eq.b32 %p1, %r1, 3;\n@%p1 bra OTHER;\n"
            "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;\n"
            "OTHER:\nbar.sync 0;"
        )
    )
    with pytest.raises(DeadlockError) as caught:
        tiny.world.run()
    assert "31 threads, the first of which waits for other lanes" in str(caught.value)
    assert "1 threads, the first of which waits at a barrier of its block" in str(
        caught.value
    )


def test_warp_barrier_waits_for_lanes_that_took_another_way() -> None:
    values = result(
        "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra FEW;\nmov.b32 %r9, 1;\nbra.uni MEET;\n"
        "FEW:\nmov.b32 %r9, 2;\nMEET:\nbar.warp.sync -1;"
    )
    assert values.tolist() == [2] * 5 + [1] * 27


def test_special_registers() -> None:
    tiny = Tiny()
    code = program(
        "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %nctaid.y;\n"
        "mov.u32 %r5, %cluster_ctarank; mov.u32 %r6, %ntid.x; mov.u32 %r7, %laneid;\n"
        "mad.lo.s32 %r8, %r3, 4, %r2; shl.b32 %r8, %r8, 3; add.s32 %r8, %r8, %r1;\n"
        "mul.wide.u32 %d6, %r8, 4; add.s64 %d6, %d1, %d6;\n"
        "mad.lo.s32 %r9, %r2, 10, %r3; mad.lo.s32 %r9, %r9, 10, %r4;\n"
        "mad.lo.s32 %r9, %r9, 10, %r5; mad.lo.s32 %r9, %r9, 10, %r6;\n"
        "mad.lo.s32 %r9, %r9, 10, %r7; st.global.b32 [%d6], %r9;"
    )
    tiny.launch(code, geometry=Geometry((4, 3, 1), 8, (2, 1, 1)))
    tiny.world.run()
    expected = [
        100000 * x + 10000 * y + 3000 + 100 * (x % 2) + 80 + thread
        for y in range(3)
        for x in range(4)
        for thread in range(8)
    ]
    assert tiny.words(96).tolist() == expected


# Blocks and clusters


@pytest.mark.parametrize("seed", SEEDS)
def test_block_barrier(seed: int | None) -> None:
    """Each thread reads what the thread of another warp wrote."""
    tiny = Tiny(seed=seed)
    code = program(
        "shl.b32 %r2, %r1, 2; mov.b32 %r3, shared; add.s32 %r2, %r2, %r3;\n"
        "st.shared.b32 [%r2], %r1;\nbar.sync 0;\n"
        "xor.b32 %r4, %r1, 64; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r3;\n"
        "ld.shared.b32 %r9, [%r4];\nst.global.b32 [%d4], %r9;"
    )
    tiny.launch(code, geometry=Geometry((1, 1, 1), 128, shared_bytes=512))
    tiny.world.run()
    assert tiny.words(128).tolist() == [thread ^ 64 for thread in range(128)]


def test_a_missing_block_barrier_is_found() -> None:
    found = 0
    for seed in range(100):
        tiny = Tiny(seed=seed)
        code = program(
            "shl.b32 %r2, %r1, 2; mov.b32 %r3, shared; add.s32 %r2, %r2, %r3;\n"
            "st.shared.b32 [%r2], %r1;\n"
            "xor.b32 %r4, %r1, 64; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r3;\n"
            "ld.shared.b32 %r9, [%r4];"
        )
        tiny.launch(code, geometry=Geometry((1, 1, 1), 128, shared_bytes=512))
        try:
            tiny.world.run()
        except MemoryFaultError as error:
            assert "uninitialised read" in error.reason
            found += 1
    assert found >= 5


def test_block_barrier_without_those_that_exited() -> None:
    tiny = Tiny()
    code = program(
        "setp.ge.u32 %p1, %r1, 32;\n@%p1 ret;\nbar.sync 0;\nst.global.b32 [%d4], 5;"
    )
    tiny.launch(code, geometry=Geometry((1, 1, 1), 96))
    tiny.world.run()
    assert tiny.words().tolist() == [5] * 32


PEERS = """\
mov.b32 %r3, shared;
mov.u32 %r2, %ctaid.x;
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
and.b32 %r4, %r2, 1; xor.b32 %r4, %r4, 1;
shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r3;
mad.lo.s32 %r6, %r2, 100, %r1;
mapa.shared::cluster.u32 %r7, %r5, %r4;
st.shared::cluster.b32 [%r7], %r6;
barrier.cluster.arrive;
barrier.cluster.wait;
ld.shared.b32 %r9, [%r5];
shl.b32 %r8, %r2, 7; cvt.u64.u32 %d6, %r8; add.s64 %d6, %d6, %d4;
st.global.b32 [%d6], %r9;"""


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster_exchange(seed: int | None) -> None:
    tiny = Tiny(seed=seed)
    geometry = Geometry((4, 1, 1), 32, (2, 1, 1), 128)
    tiny.launch(program(PEERS), geometry=geometry)
    tiny.world.run()
    expected = [100 * (block ^ 1) + lane for block in range(4) for lane in range(32)]
    assert tiny.words(128).tolist() == expected


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;\n", "", "not started"),
        (
            "barrier.cluster.arrive;\nbarrier.cluster.wait;\n",
            "",
            "uninitialised|exited",
        ),
        ("arrive;", "arrive.relaxed;", "uninitialised"),
    ],
)
def test_cluster_mistakes_are_found(old: str, new: str, reason: str) -> None:
    """A store before the peer runs, no barrier behind it, and one that releases not."""
    found = 0
    assert old in PEERS
    for seed in range(12):
        tiny = Tiny(seed=seed)
        geometry = Geometry((2, 1, 1), 32, (2, 1, 1), 128)
        tiny.launch(program(PEERS.replace(old, new)), geometry=geometry)
        try:
            tiny.world.run()
        except MemoryFaultError as error:
            if reason in error.reason or any(
                part in error.reason for part in reason.split("|")
            ):
                found += 1
    assert found >= 3


def test_cluster_barrier_out_of_turn() -> None:
    fails("barrier.cluster.wait;", BarrierError, "without having arrived")
    fails(
        "barrier.cluster.arrive;\nbarrier.cluster.arrive;",
        BarrierError,
        "arrives .* twice",
    )


def test_mapa_beyond_the_cluster() -> None:
    body = "mapa.shared::cluster.u32 %r9, %r1, 1;"
    fails(body, MemoryFaultError, "block 1 of a cluster of 1")


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_count_every_thread_once(seed: int | None) -> None:
    tiny = Tiny(seed=seed)
    tiny.world.memory.write(tiny.out[0], np.zeros(256, np.uint32))
    code = program(
        "atom.relaxed.gpu.global.inc.u32 %r9, [%d1+1020], 4;\n"
        "atom.global.add.u32 %r8, [%d1+1016], 3;\n"
        "red.global.max.u32 [%d1+1012], %r1;"
    )
    tiny.launch(code, geometry=Geometry((2, 1, 1), 32))
    tiny.world.run()
    assert tiny.words(256)[-3:].tolist() == [31, 3 * 64, 64 % 5]


# Launches


STORE = "st.global.b32 [%d4], %r1;"
POLL = (
    "AGAIN:\nld.volatile.global.b32 %r2, [%d1+128];\nsetp.eq.b32 %p1, %r2, 0;\n"
    "@%p1 bra AGAIN;\nst.global.b32 [%d4], %r2;"
)


def test_poll_without_a_writer_is_a_deadlock() -> None:
    tiny = Tiny()
    tiny.world.memory.write(tiny.out[0], np.zeros(256, np.uint32))
    tiny.launch(program(POLL))
    with pytest.raises(DeadlockError) as caught:
        tiny.world.run()
    text = str(caught.value)
    assert "32 threads, the first of which polls memory that does not change" in text
    assert (
        f"in tiny, rank 0, block (0, 0, 0), thread 0\n  line {FIRST_LINE + 1}" in text
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_poll_sees_a_store_of_another_rank(seed: int | None) -> None:
    tiny = Tiny(ranks=2, seed=seed)
    tiny.world.memory.write(tiny.out[0], np.zeros(256, np.uint32))
    tiny.launch(program(POLL))
    code = program("setp.eq.b32 %p1, %r1, 0;\n@%p1 st.global.b32 [%d1+128], 9;")
    tiny.launch(code, target=tiny.out[0].address, stream=tiny.streams[1])
    tiny.world.run()
    assert tiny.words().tolist() == [9] * 32


def test_a_bounded_poll_is_no_deadlock() -> None:
    tiny = Tiny()
    tiny.world.memory.write(tiny.out[0], np.zeros(256, np.uint32))
    body = (
        "mov.b32 %r3, 0;\nAGAIN:\nld.volatile.global.b32 %r2, [%d1];\n"
        "add.s32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 5;\n@%p1 bra AGAIN;\n"
        "st.global.b32 [%d4], %r3;"
    )
    tiny.launch(program(body))
    tiny.world.run()
    assert tiny.words().tolist() == [5] * 32


def test_barrier_that_some_never_reach_is_a_deadlock() -> None:
    tiny = Tiny()
    code = program(
        "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra A;\nbar.sync 0;\nA:\nbar.sync 1;"
    )
    tiny.launch(code, geometry=Geometry((1, 1, 1), 64))
    with pytest.raises(DeadlockError, match="barrier of its block"):
        tiny.world.run()


def test_launch_that_has_no_room_is_a_deadlock() -> None:
    """The polling kernel holds the device; the one that would write does not fit."""
    tiny = Tiny(resident_blocks=1)
    tiny.world.memory.write(tiny.out[0], np.zeros(256, np.uint32))
    tiny.launch(program(POLL))
    tiny.launch(program("st.global.b32 [%d1+128], 9;"), stream=Stream(0))
    with pytest.raises(DeadlockError, match="1 clusters wait for room"):
        tiny.world.run()
    with pytest.raises(ValueError, match="does not fit a device that holds 1"):
        tiny.launch(program(STORE), geometry=Geometry((2, 1, 1), 32, (2, 1, 1)))


SLOW = (
    "{trigger}mov.b32 %r9, 0;\nAGAIN:\nadd.s32 %r9, %r9, 1;\n"
    "setp.lt.u32 %p1, %r9, 40;\n@%p1 bra AGAIN;\nst.global.b32 [%d4], %r9;"
)
TRIGGER = "griddepcontrol.launch_dependents;\n"
READ = "{wait}ld.global.b32 %r9, [%d4];\nst.global.b32 [%d4+128], %r9;"
WAIT = "griddepcontrol.wait;\n"


def chained(first: str, second: str, seed: int, dependent: bool) -> str:
    tiny = Tiny(seed=seed)
    tiny.launch(program(first))
    tiny.launch(program(second), dependent=dependent)
    try:
        tiny.world.run()
    except MemoryFaultError as error:
        return error.reason.split(":")[0]
    return str(set(tiny.words(64)[32:].tolist()))


def test_stream_order_and_dependent_launches() -> None:
    """Only a dependent launch without a wait can read too early."""
    slow, fast_trigger = SLOW.format(trigger=""), SLOW.format(trigger=TRIGGER)
    reads, waits = READ.format(wait=""), READ.format(wait=WAIT)
    for seed in range(8):
        assert chained(slow, reads, seed, dependent=False) == "{40}"
        assert chained(slow, reads, seed, dependent=True) == "{40}"
        assert chained(fast_trigger, waits, seed, dependent=True) == "{40}"
        assert chained(fast_trigger, reads, seed, dependent=False) == "{40}"
    early = [chained(fast_trigger, reads, seed, dependent=True) for seed in range(30)]
    assert early.count("uninitialised read") >= 5


def test_completion_is_not_transitive() -> None:
    """The third launch waits for the second, which never waited for the first."""
    early = 0
    for seed in range(30):
        tiny = Tiny(seed=seed)
        tiny.launch(program(SLOW.format(trigger=TRIGGER)))
        tiny.launch(program("griddepcontrol.launch_dependents;"), dependent=True)
        tiny.launch(program(READ.format(wait=WAIT)), dependent=True)
        try:
            tiny.world.run()
        except MemoryFaultError as error:
            early += "uninitialised" in error.reason
    assert early >= 3


def test_events_between_streams() -> None:
    for seed in range(6):
        tiny = Tiny(seed=seed)
        side = Stream(0)
        tiny.launch(program(SLOW.format(trigger="")))
        side.wait_for(tiny.streams[0])
        tiny.launch(program(READ.format(wait="")), stream=side)
        tiny.world.run()
        assert set(tiny.words(64)[32:].tolist()) == {40}


def test_remote_stores_land_before_completion_and_in_pieces() -> None:
    """A reader behind the writer sees all; one beside it may see a torn store."""
    torn = 0
    store = "mov.b32 %r9, 0xAAAABBBB;\nst.global.b32 [%d4], %r9;"
    for seed in range(20):
        tiny = Tiny(ranks=2, seed=seed)
        tiny.world.memory.write(tiny.out[1], np.zeros(256, np.uint32))
        tiny.launch(program(store), target=tiny.out[1].address)
        tiny.launch(
            program("ld.global.b32 %r9, [%d4];\nst.global.b32 [%d4], %r9;"),
            target=tiny.out[1].address,
        )
        beside = program(
            "ld.volatile.global.b32 %r9, [%d4];\nst.global.b32 [%d4+128], %r9;"
        )
        tiny.launch(beside, stream=tiny.streams[1])
        tiny.world.run()
        words = tiny.words(64, rank=1)
        assert set(words[:32].tolist()) == {0xAAAABBBB}
        torn += bool({0xAAAA0000, 0xBBBB} & {*words[32:].tolist()})
    assert torn >= 1


def test_a_seed_gives_one_run() -> None:
    outcomes = [
        chained(SLOW.format(trigger=TRIGGER), READ.format(wait=""), 3, True)
        for _ in range(3)
    ]
    assert len({*outcomes}) == 1


def test_an_endless_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhcgen.emulator.machine.RUNAWAY", 1000)
    tiny = Tiny()
    tiny.launch(program("AGAIN:\nadd.s32 %r1, %r1, 1;\nbra.uni AGAIN;"))
    with pytest.raises(EmulatorError, match="runs away"):
        tiny.world.run()


def test_a_launch_must_have_the_threads_that_the_kernel_requires() -> None:
    tiny = Tiny()
    code = program(STORE)
    code.kernel.threads = (64, 1, 1)
    with pytest.raises(ValueError, match="made for blocks of 64 threads, not 32"):
        tiny.launch(code)
