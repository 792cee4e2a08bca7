"""The host side of a package on tensors of the CPU: checks, launches, streams.

The kernels, the streams and the events are stand-ins that write down what is done.
"""

from __future__ import annotations

import gc
import importlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from mhcgen.bench import contenders
from mhcgen.bench import machine as gpus
from mhcgen.bench.contenders import Inputs
from mhcgen.bench.host_time import CALLS, ROUNDS, host_time
from mhcgen.bench.packages import Loaded
from mhcgen.build import write_files
from mhcgen.plan import Plan, make_plan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.runtime import loader, warm_up
from mhcgen.runtime.arguments import BoundaryInput, Checks
from mhcgen.runtime.host import FusedBoundary
from mhcgen.runtime.launcher import Launcher, like
from mhcgen.runtime.side_stream import capture_of
from mhcgen.runtime.warm_up import warm_up_together
from mhcgen.spec_file import load_spec
from mhcgen.verify.on_cuda import poison
from tests.faults import faulty
from tests.stand_ins import Machine, machine_in, mailbox_of

H, HC, MIX = 512, 4, 24
NAMES = ("x", "residual", "post", "comb", "fn", "scale", "base", "norm_weight")


ROOM = {1: 60, 2: 6}  # clusters that run at once, by token group
TOKEN_GROUPS = (
    {"max_tokens": 8, "group": 1},
    {"max_tokens": 16, "group": 2},
    {"max_tokens": 32, "group": 4, "launches": 2},
)


def import_variant(folder: Path, name: str, **changes: Any) -> tuple[Any, Any]:
    """The constants and the kernels of a narrow package."""
    source = load_spec(resource("specs") / "glm53.yaml").spec
    document = source.model_dump()
    document["name"] = name
    document["model"]["hidden"] = H
    document["capacity"]["max_tokens"] = 32
    target = {"cluster_size": 2, "token_groups": TOKEN_GROUPS}
    document["targets"] = {"sm_90a": target}
    for key, value in changes.items():
        document[key] = value
    plan: Plan = make_plan(type(source).model_validate(document))
    (folder / name).mkdir()
    write_files(folder / name, render(plan, formatting=False))
    name = loader.import_package(folder / name)
    return (
        importlib.import_module(f"{name}.constants"),
        importlib.import_module(f"{name}.kernels"),
    )


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A package whose mixes are computed on a side stream; it has an entry."""
    folder = tmp_path_factory.mktemp("package")
    ends = {"entry": True}
    return import_variant(folder, "host_test", mixes="side_stream", ends=ends)


@pytest.fixture(scope="module")
def tail_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A package whose boundaries compute the mixes themselves; it has an entry."""
    folder = tmp_path_factory.mktemp("package")
    return import_variant(folder, "host_tail", mixes="tail", ends={"entry": True})


@pytest.fixture(scope="module")
def alone_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A package for one rank."""
    folder = tmp_path_factory.mktemp("package")
    groups = ({"max_tokens": 32, "group": 1},)
    target = {"cluster_size": 2, "token_groups": groups}
    return import_variant(
        folder,
        "host_alone",
        mixes="tail",
        parallel={"tp": 1},
        targets={"sm_90a": target},
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return machine_in(monkeypatch)


def fused_of(
    machine: Machine, modules: tuple[Any, Any], room: dict[int, int]
) -> FusedBoundary:
    constants, kernels = modules
    box = mailbox_of(constants)
    compiled = {
        name: machine.kernel(name, kernel.arguments())
        for name, kernel in kernels.kernels("sm_90a", (box.transport,)).items()
    }
    launcher = Launcher(constants, kernels, compiled, "sm_90a", box, room)
    fused = FusedBoundary(launcher)
    machine.done()
    return fused


def forget(fused: FusedBoundary) -> None:
    """Nothing of it is on a GPU."""
    if fused._side is not None:
        fused._side.pending = None


@pytest.fixture
def boundary(machine: Machine, modules: tuple[Any, Any]) -> Iterator[FusedBoundary]:
    fused = fused_of(machine, modules, ROOM)
    yield fused
    forget(fused)


@pytest.fixture
def tail(machine: Machine, tail_modules: tuple[Any, Any]) -> FusedBoundary:
    return fused_of(machine, tail_modules, ROOM)


def arguments(m: int) -> dict[str, torch.Tensor]:
    bf16 = torch.bfloat16
    tensors = (
        torch.zeros(m, H, dtype=bf16),
        torch.zeros(m, HC, H, dtype=bf16),
        torch.zeros(m, HC, 1),
        torch.zeros(m, HC, HC),
        torch.zeros(MIX, HC * H, dtype=bf16),
        torch.zeros(3),
        torch.zeros(MIX),
        torch.zeros(H, dtype=bf16),
    )
    return dict(zip(NAMES, tensors, strict=True))


def entering(m: int) -> dict[str, torch.Tensor]:
    """The arguments of the entry."""
    given = arguments(m)
    weights = {name: given[name] for name in ("fn", "scale", "base", "norm_weight")}
    return {"hidden": given["x"], **weights}


def input_of(m: int) -> BoundaryInput:
    return BoundaryInput(*list(arguments(m).values())[1:], None)


def launches(log: list[str]) -> list[str]:
    return [line for line in log if "event" not in line]


# The boundaries of few tokens, in one launch.
PUBLISHING = "boundary_1_unicast"
FINALIZING = "boundary_1_finalize_fp32_shared_unicast"


ROUTED = (
    "gemm2_permuted",
    "expert_weights",
    "expanded_idx_to_permuted_idx",
    "shared_output",
)


def routed(m: int) -> dict[str, torch.Tensor]:
    """The arguments of finalize."""
    given = {
        "gemm2_permuted": torch.zeros(5, H, dtype=torch.bfloat16),
        "expert_weights": torch.zeros(m, 8),
        "expanded_idx_to_permuted_idx": torch.zeros(m, 8, dtype=torch.int32),
        "shared_output": torch.zeros(m, H, dtype=torch.bfloat16),
    }
    rest = arguments(m)
    del rest["x"]
    return given | rest


def test_a_call(machine: Machine, boundary: FusedBoundary) -> None:
    """One launch on the stream; mixes beside, between two events."""
    output = boundary(**arguments(3))
    done = machine.done()
    assert launches(done) == [PUBLISHING, "mixes"]
    fork, join = done[1:3], done[4:]
    assert [line.split(" event")[0] for line in fork] == ["record", "99 waits for"]
    assert len(join) == 1 and join[0].endswith("on 99")
    assert [tuple(tensor.shape) for tensor in output] == [
        (3, HC, H),
        (3, HC, 1),
        (3, HC, HC),
        (3, H),
    ]
    assert [tensor.dtype for tensor in output] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]
    assert all(tensor.is_contiguous() for tensor in output)
    storages = {tensor.untyped_storage().data_ptr() for tensor in output}
    assert len(storages) == 4, "outputs share memory"


def test_dispatch(
    machine: Machine, boundary: FusedBoundary, modules: tuple[Any, Any]
) -> None:
    """Each M gets the kernel of its row, in one launch where its clusters run at once.

    Of the second row's group, six clusters do: calls of up to twelve tokens.
    """
    constants, kernels = modules
    for tokens in range(1, constants.CAPACITY + 1):
        row = next(
            r
            for r in constants.TARGETS["sm_90a"].token_groups
            if tokens <= r.max_tokens
        )
        boundary(**arguments(tokens))
        expected = ["publish_unicast", kernels.boundary_name(row.size)]
        if tokens <= 12:
            expected = [kernels.boundary_name(row.size, "unicast")]
        assert launches(machine.done()) == [*expected, "mixes"]
        assert boundary.launches(tokens) == len(expected)
    assert boundary.launches(0) == 0
    for m in (-1, constants.CAPACITY + 1):
        with pytest.raises(ValueError, match=f"m is {m}; this package takes 0 to 32"):
            boundary.launches(m)


def test_a_row_that_names_two_launches_takes_two(
    machine: Machine, tmp_path: Path
) -> None:
    """Whatever runs at once, and whatever another row of its group takes."""
    rows = (
        {"max_tokens": 8, "group": 1},
        {"max_tokens": 32, "group": 1, "launches": 2},
    )
    target = {"cluster_size": 2, "token_groups": rows}
    modules = import_variant(
        tmp_path, "host_rows", mixes="tail", targets={"sm_90a": target}
    )
    fused = fused_of(machine, modules, {1: 60})
    assert [fused.launches(m) for m in (1, 8, 9, 32)] == [1, 1, 2, 2]
    for m, count in ((8, 1), (9, 2)):
        fused.finalize(**routed(m))
        assert len(machine.done()) == count


@pytest.mark.parametrize("room", [{}, {1: 0, 2: 0}])
def test_without_room_every_call_takes_two_launches(
    machine: Machine, modules: tuple[Any, Any], room: dict[int, int]
) -> None:
    fused = fused_of(machine, modules, room)
    fused(**arguments(1))
    forget(fused)
    assert launches(machine.done()) == ["publish_unicast", "boundary_1", "mixes"]
    assert {fused.launches(m) for m in range(1, 33)} == {2}


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (3, [FINALIZING]),
        (12, ["boundary_2_finalize_fp32_shared_unicast"]),
        (16, ["finalize_fp32_shared_unicast", "boundary_2"]),
        (20, ["finalize_fp32_shared_unicast", "boundary_4"]),
    ],
)
def test_finalize(
    machine: Machine, boundary: FusedBoundary, m: int, expected: list[str]
) -> None:
    """One launch where the row's boundaries close routed sums, and all run at once."""
    boundary.finalize(**routed(m))
    assert launches(machine.done()) == [*expected, "mixes"]


@pytest.mark.parametrize(("m", "size"), [(3, 1), (16, 2), (20, 4)])
def test_halves_are_launches_of_their_own(
    machine: Machine, boundary: FusedBoundary, m: int, size: int
) -> None:
    given = arguments(m)
    boundary.publish(given.pop("x"))
    boundary.consume(**given)
    assert launches(machine.done()) == ["publish_unicast", f"boundary_{size}", "mixes"]
    given = routed(m)
    boundary.publish_finalize(*[given.pop(name) for name in ROUTED])
    boundary.consume(**given)
    finalize = "finalize_fp32_shared_unicast"
    assert launches(machine.done()) == [finalize, f"boundary_{size}", "mixes"]


def test_what_the_kernels_are_given(machine: Machine, boundary: FusedBoundary) -> None:
    """Rows to publish and where to, in a whole call; nothing of it to consume only."""
    given = arguments(3)
    output = boundary(**given)
    x, *unrouted, addresses, rank = machine.given[PUBLISHING][:7]
    assert x is given["x"]
    assert unrouted == [None] * 4
    assert (tuple(addresses.shape), rank) == ((4,), 0)
    rest = machine.given[PUBLISHING][7:]
    assert same(rest[:7], [given[name] for name in NAMES[1:]])
    assert [tuple(each.shape) for each in rest[7:9]] == [(3, 4, 32, H), (2,)]
    *written, mix, before, after, stream = rest[9:]
    assert same(written, output)
    assert mix.shape == (3, MIX)
    assert (before, after, stream) == boundary._side.handles
    boundary._launcher.call(
        boundary._launcher.call_kernel(3),
        boundary._launcher.published(given["x"]),
        BoundaryInput(*list(given.values())[1:]),
        output,
        mix,
    )
    assert machine.given[PUBLISHING][-3:] == (0, 0, 0)
    boundary.publish(given["x"])
    boundary.consume(**{name: given[name] for name in NAMES[1:]})
    assert machine.given["boundary_1"][:7] == (None,) * 6 + (0,)
    assert len(machine.given["boundary_1"]) == len(machine.given[PUBLISHING])
    closed = routed(3)
    boundary.finalize(**closed)
    assert machine.given[FINALIZING][0] is None
    assert same(machine.given[FINALIZING][1:5], [closed[name] for name in ROUTED])
    assert len(machine.given[FINALIZING]) == len(machine.given[PUBLISHING])


def same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Whether they are the same objects."""
    return [id(each) for each in these] == [id(each) for each in those]


def test_a_tail_needs_no_side_stream(machine: Machine, tail: FusedBoundary) -> None:
    """One launch, no event, no memory for mixes; join has nothing to wait for."""
    made = machine.made
    given = arguments(3)
    output = tail(**given)
    tail.join()
    assert machine.done() == [PUBLISHING]
    assert machine.made == made == 0
    *_, residual, post, comb, layer_input = machine.given[PUBLISHING]
    assert same([residual, post, comb, layer_input], output)
    tail.finalize(**routed(3))
    tail(**arguments(20))
    assert machine.done() == [
        FINALIZING,
        *("publish_unicast", "boundary_4"),
    ]


def test_an_entry_of_a_tail_launches_its_mixes_behind_it(
    machine: Machine, tail: FusedBoundary
) -> None:
    given = arguments(3)
    names = ("fn", "scale", "base", "norm_weight")
    output = tail.entry(given["x"], **{name: given[name] for name in names})
    assert machine.done() == ["entry", "mixes"]
    mix, *_, post, comb = machine.given["mixes"]
    assert mix is machine.given["entry"][6]
    assert same([post, comb], [output.post, output.comb])


def test_shapes_are_made_once(
    boundary: FusedBoundary, tail: FusedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To expand a tensor takes microseconds."""
    allocations = [
        boundary._launcher.outputs,
        boundary._launcher.mix,
        tail._launcher.entry_mix,
    ]
    for allocate in allocations:
        allocate(3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "expand", None)
        again = [allocate(3) for allocate in allocations]
    for mix in again[1:]:
        assert isinstance(mix, torch.Tensor)
        assert (mix.shape, mix.dtype) == ((3, MIX), torch.float32)
        assert mix.is_contiguous()


def test_one_rank_alone(machine: Machine, alone_modules: tuple[Any, Any]) -> None:
    """Its boundary takes x itself; behind finalize, the rows that finalize wrote."""
    alone = fused_of(machine, alone_modules, {})
    given = arguments(3)
    alone(**given)
    assert machine.done() == ["boundary_1"]
    assert machine.given["boundary_1"][0] is given["x"]
    assert len(machine.given["boundary_1"]) == 1 + 7 + 4
    assert (alone.launches(0), alone.launches(32)) == (0, 1)
    alone.finalize(**routed(3))
    assert machine.done() == ["finalize_fp32_shared_local", "boundary_1"]
    assert (
        machine.given["boundary_1"][0] is machine.given["finalize_fp32_shared_local"][4]
    )


def test_a_warm_up_launches_every_kernel(
    machine: Machine, boundary: FusedBoundary
) -> None:
    launcher = boundary._launcher
    warm_up_together([launcher])
    done = launches(machine.done())
    assert set(done) == set(launcher._compiled)
    # Each boundary launches mixes of its own, which its module holds.
    boundaries = sum(name.startswith("boundary") for name in done)
    assert done.count("mixes") == boundaries + 1


STUCK = {
    "boundary_2": "the boundary of token group 2",
    "boundary_2_unicast": "the publishing boundary of token group 2",
    "boundary_1_finalize_fp32_unicast": "the finalizing boundary of token group 1",
}


@pytest.mark.parametrize("kernel", STUCK)
def test_a_warm_up_gives_up_on_a_rank_that_does_not_come(
    machine: Machine,
    modules: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
) -> None:
    """What the kernel uses is never freed: that would wait for it."""
    monkeypatch.setattr(warm_up, "DEADLINE", 0.01)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("waits"))
    launcher = fused_of(machine, modules, ROOM)._launcher
    machine.stuck = kernel
    message = rf"^{STUCK[kernel]} did not end within 0\.01 s.* must exit"
    with pytest.raises(RuntimeError, match=message):
        warm_up_together([launcher])
    alive = weakref.ref(launcher)
    del launcher
    gc.collect()
    assert alive() is not None


def test_rows_that_wait_to_be_consumed_stop_a_call(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """One launch or two, or another publish: the mailbox holds the rows of a call."""
    given = arguments(3)
    x = given.pop("x")
    boundary.publish(x)
    machine.done()
    wrong: list[Callable[[], object]] = [
        lambda: boundary(**arguments(3)),
        lambda: boundary(**arguments(20)),
        lambda: boundary.publish(x),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError, match=r"^3 tokens .* call consume\(\)"):
            call()
    assert machine.done() == []
    boundary.consume(**given)
    assert launches(machine.done()) == ["boundary_1", "mixes"]
    boundary.publish(x)


def test_a_call_that_broke_off_stops_the_next(
    machine: Machine, boundary: FusedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its launches, or in a publish alone: the ranks no longer agree."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no launch")

    for method, call in (
        ("boundary", lambda: boundary(**arguments(20))),
        ("publish", lambda: boundary.publish(arguments(3)["x"])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(boundary._launcher, method, fail)
            with pytest.raises(RuntimeError, match="no launch"):
                call()
        with pytest.raises(RuntimeError, match="an earlier call broke off"):
            call()
        boundary._published = None


def test_a_launch_that_refuses_leaves_the_object_usable(
    machine: Machine, boundary: FusedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the checks find nothing wrong with: nothing of it is under way."""

    def refuse(*arguments: object) -> None:
        raise TypeError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(boundary._launcher, "call", refuse)
        with pytest.raises(TypeError, match="no launch"):
            boundary(**arguments(3))
    assert machine.done() == []
    boundary(**arguments(3))
    assert launches(machine.done()) == [PUBLISHING, "mixes"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_launch_that_breaks_off_stops_the_next_call(
    machine: Machine,
    boundary: FusedBoundary,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """Its boundary may be under way, and its mixes, whose memory is kept."""
    launcher = boundary._launcher
    launch, given = launcher.call, []

    def launch_and_fail(*arguments: Any) -> None:
        launch(*arguments)
        given.append(arguments[3])
        raise error("broken")

    monkeypatch.setattr(launcher, "call", launch_and_fail)
    with pytest.raises(error, match="broken"):
        boundary(**arguments(3))
    assert launches(machine.done()) == [PUBLISHING, "mixes"]
    assert boundary._side is not None and boundary._side.pending is not None
    kept = boundary._side.pending.tensors
    assert any(tensor is given[0].comb for tensor in kept)
    rest = arguments(3)
    x = rest.pop("x")
    for call in (
        lambda: boundary(x, **rest),
        lambda: boundary.publish(x),
        lambda: boundary.consume(**rest),
    ):
        with pytest.raises(RuntimeError, match="an earlier call broke off half-way"):
            call()
    assert machine.done() == []
    boundary.join()
    assert waits(machine.done(), 0) == 1


@pytest.mark.parametrize("kernel", [PUBLISHING, "boundary_4", "entry"])
def test_graphs_hand_their_mixes_other_memory_than_calls(
    machine: Machine, boundary: FusedBoundary, kernel: str
) -> None:
    """Replays do not wait for the mixes of calls, which may still read theirs."""
    given = arguments(20 if kernel == "boundary_4" else 3)

    def handed() -> torch.Tensor:
        if kernel == "entry":
            boundary.entry(**entering(3))
        else:
            boundary(**given)
        shape = (len(given["x"]), MIX)
        (mix,) = [
            each
            for each in machine.given[kernel]
            if isinstance(each, torch.Tensor) and each.shape == shape
        ]
        return mix

    before = handed()
    assert handed().data_ptr() == before.data_ptr()
    boundary.join()
    machine.capturing = True
    first, second = handed(), handed()
    assert len({each.data_ptr() for each in (before, first, second)}) == 3
    boundary.join()
    machine.capturing = False
    assert handed().data_ptr() == before.data_ptr()


def test_a_default_dtype_changes_nothing(
    machine: Machine, modules: tuple[Any, Any]
) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        fused = fused_of(machine, modules, ROOM)
        warm_up_together([fused._launcher])
    finally:
        torch.set_default_dtype(torch.float32)
    fused(**arguments(3))
    forget(fused)


def test_launchers_of_several_mailboxes_share_no_memory(
    machine: Machine, boundary: FusedBoundary
) -> None:
    launcher = boundary._launcher
    other = launcher.with_mailbox(mailbox_of(launcher.constants))
    for own in (launcher.mix(3), launcher.entry_mix(3)):
        for its in (other.mix(3), other.entry_mix(3)):
            assert own is not None and its is not None
            assert own.data_ptr() != its.data_ptr()


def test_what_is_dropped_is_kept_from_reuse_until_its_mixes_are_done(
    machine: Machine, modules: tuple[Any, Any]
) -> None:
    fused = fused_of(machine, modules, ROOM)
    fused(**arguments(3))
    del fused
    gc.collect()
    assert machine.recorded >= len(("scale", "base", "post", "comb"))


def test_a_closed_sum_that_has_no_memory_leaves_one_rank_usable(
    machine: Machine, alone_modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = fused_of(machine, alone_modules, {})

    def fail(m: int) -> None:
        raise torch.OutOfMemoryError

    for call in (
        lambda: fused.finalize(**routed(3)),
        lambda: fused.publish_finalize(*[routed(3)[name] for name in ROUTED]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(fused._launcher, "closed_rows", fail)
            with pytest.raises(torch.OutOfMemoryError):
                call()
        assert machine.done() == []
    fused.finalize(**routed(3))
    assert machine.done() == ["finalize_fp32_shared_local", "boundary_1"]


@pytest.mark.parametrize("size", [3, 20], ids=["one launch", "two launches"])
def test_verification_poisons_what_kernels_write(
    machine: Machine, boundary: FusedBoundary, size: int
) -> None:
    """All that the real launcher hands out, and it keeps what mixes are made of."""
    kept: list[torch.Tensor | None] = []
    poison(boundary, kept)
    output = boundary(**arguments(size))
    assert all(bool(each.isnan().all()) for each in output)
    (mix,) = kept
    assert mix is not None and bool(mix.isnan().all())
    given = machine.given[PUBLISHING if size == 3 else "boundary_4"]
    assert any(each is mix for each in given)


def test_verification_keeps_no_mixes_of_a_tail(
    machine: Machine, tail: FusedBoundary
) -> None:
    kept: list[torch.Tensor | None] = []
    poison(tail, kept)
    output = tail(**arguments(3))
    assert kept == [None]
    assert all(bool(each.isnan().all()) for each in output)


def waits(log: list[str], stream: int) -> int:
    return sum(line.startswith(f"{stream} waits") for line in log)


def test_the_next_call_waits_for_the_mixes(
    machine: Machine, boundary: FusedBoundary
) -> None:
    given = arguments(2)
    for call in (
        lambda: boundary(**given),
        lambda: boundary(**arguments(20)),
        lambda: boundary.entry(**entering(2)),
    ):
        call()
        machine.done()
        boundary(**given)
        done = machine.done()
        assert done[0].startswith("0 waits")
        assert done[1] == PUBLISHING


def test_a_stream_that_has_joined_does_not_wait_again(
    machine: Machine, boundary: FusedBoundary
) -> None:
    boundary(**arguments(2))
    machine.done()
    boundary.join()
    boundary.join()
    assert waits(machine.done(), 0) == 1
    boundary(**arguments(2))
    assert waits(machine.done(), 0) == 0


def test_each_half_waits_for_the_mixes_on_its_own_stream(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """Both read what those wrote, or overwrite what those read."""
    boundary(**arguments(2))
    machine.done()
    given = arguments(2)
    boundary.publish(given.pop("x"))
    assert waits(machine.done(), 0) == 1
    machine.handle = 5
    boundary.consume(**given)
    assert waits(machine.done(), 5) == 1
    boundary.publish(arguments(2)["x"])
    boundary.consume(**given)
    assert waits(machine.done(), 5) == 1


@pytest.fixture(scope="module")
def exit_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A package with an exit."""
    folder = tmp_path_factory.mktemp("package")
    return import_variant(folder, "host_exit", ends={"exit": "mean"})


@pytest.fixture
def exiting(machine: Machine, exit_modules: tuple[Any, Any]) -> Iterator[FusedBoundary]:
    fused = fused_of(machine, exit_modules, ROOM)
    yield fused
    forget(fused)


def leave(m: int) -> dict[str, torch.Tensor]:
    """The arguments of an exit."""
    names = ("x", "residual", "post", "comb", "norm_weight")
    return {name: arguments(m)[name] for name in names}


def test_an_exit_waits_for_the_mixes_and_lets_go_of_them(
    machine: Machine, exiting: FusedBoundary
) -> None:
    """In halves, each on its own stream; what is refused lets go of nothing."""
    exiting(**arguments(2))
    machine.done()
    given = leave(2)
    exiting.publish(given.pop("x"))
    assert waits(machine.done(), 0) == 1
    machine.handle = 5
    with pytest.raises(ValueError, match=r"^post has shape"):
        exiting.consume_exit(**given | {"post": arguments(3)["post"]})
    exiting.consume_exit(**given)
    assert waits(machine.done(), 5) == 1
    assert machine.recorded == 5
    exiting.join()
    assert machine.done() == []


def test_captures_without_a_number_end_with_their_exit(
    machine: Machine, exiting: FusedBoundary
) -> None:
    """The next one must not wait for an event of this one, and cannot tell it apart."""
    machine.capturing, machine.capture = True, 0
    exiting(**arguments(2))
    exiting.exit(**leave(2))
    machine.done()
    machine.handle = 7
    exiting(**arguments(2))
    assert waits(machine.done(), 7) == 0


def test_another_streams_join_does_not_count(
    machine: Machine, boundary: FusedBoundary
) -> None:
    boundary(**arguments(2))
    machine.handle = 5
    boundary.join()
    machine.handle = 0
    machine.done()
    boundary(**arguments(2))
    assert waits(machine.done(), 0) == 1


def test_a_capture_refuses_pending_mixes_and_takes_joined_ones(
    machine: Machine, boundary: FusedBoundary
) -> None:
    boundary(**arguments(2))
    machine.done()
    machine.capturing = True
    with pytest.raises(RuntimeError, match=r"call join\(\) before the capture"):
        boundary(**arguments(2))
    assert machine.done() == []
    machine.capturing = False
    boundary.join()
    machine.done()
    machine.capturing, machine.handle = True, 5
    boundary(**arguments(2))
    boundary.join()
    done = machine.done()
    assert launches(done) == [PUBLISHING, "mixes"]
    # The eager mixes are not waited for in the capture, its own ones are.
    assert [line.startswith("5 waits") for line in done].index(True) == len(done) - 1


def test_a_capture_refuses_what_another_did_not_join(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """Its event is of a capture that is over, or of one beside: nobody can wait."""
    machine.capturing = True
    for handle in (0, 5):
        machine.capture, machine.handle = 1, 0
        boundary(**arguments(2))
        machine.done()
        machine.capture, machine.handle = 2, handle
        for call in (lambda: boundary(**arguments(2)), boundary.join):
            with pytest.raises(RuntimeError, match=r"call join\(\) before the capture"):
                call()
        assert machine.done() == []
        machine.capturing = False
        boundary.join()
        assert machine.done() == []
        machine.capturing = True


def test_a_capture_takes_what_another_joined(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """A replay of that one is complete in itself: there is nothing to wait for."""
    machine.capturing = True
    boundary(**arguments(2))
    boundary.join()
    machine.done()
    machine.capture, machine.handle = 2, 5
    boundary(**arguments(2))
    done = machine.done()
    assert launches(done) == [PUBLISHING, "mixes"]
    assert waits(done, 5) == 0
    boundary.join()
    assert waits(machine.done(), 5) == 1
    assert machine.recorded == 0


def test_streams_of_one_capture_wait_for_each_other(
    machine: Machine, boundary: FusedBoundary
) -> None:
    machine.capturing = True
    boundary(**arguments(2))
    machine.done()
    machine.handle = 5
    boundary(**arguments(2))
    assert waits(machine.done(), 5) == 1


def test_what_the_driver_says_of_a_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word of it, all captures are the same."""
    stream = machine.stream(5)
    machine.capture = 7
    assert capture_of(stream) == 7

    def lossy(stream: Any) -> tuple[Any, ...]:
        return (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None, None)

    def missing(stream: Any) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuStreamGetCaptureInfo_v3" not found')

    for query in (lossy, missing):
        name = "cuStreamGetCaptureInfo_v3"
        monkeypatch.setattr(driver, name, query, raising=False)
        assert capture_of(stream) == 0


def test_the_stream_is_looked_up_once(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """To make the object of the current stream takes microseconds."""
    boundary(**arguments(1))
    made = machine.made
    for _ in range(5):
        boundary(**arguments(1))
        boundary.join()
    assert machine.made == made
    machine.handle = 5
    boundary(**arguments(1))
    assert machine.made == made + 1


def test_memory_that_goes_back_to_another_stream_is_recorded(
    machine: Machine, boundary: FusedBoundary
) -> None:
    boundary(**arguments(1))
    boundary(**arguments(1))
    assert machine.recorded == 0
    machine.handle = 5
    boundary(**arguments(1))
    assert machine.recorded == 5


def test_no_tokens(machine: Machine, boundary: FusedBoundary) -> None:
    output = boundary(**arguments(0))
    assert machine.done() == []
    assert [len(tensor) for tensor in output] == [0] * 4


@pytest.mark.parametrize(
    "shape", [(3, 4, 32), (1, 4, 1), (3, 1, 1), (1, 1, 1), (0, 4, 32), (0, 1, 1), (1,)]
)
def test_what_is_allocated_is_contiguous(shape: tuple[int, ...]) -> None:
    """To the letter: kernels check strides that torch does not ask for."""
    made = torch.empty_like(like(torch.empty(()), *shape))
    assert made.stride() == torch.empty(shape).stride()


FAULTS = {
    "type": (TypeError, "is a list"),
    "dtype": (TypeError, "has dtype torch.float64"),
    "shape": (ValueError, "has shape"),
    "device": (ValueError, "is on meta"),
    "strides": (ValueError, "has strides"),
    "negated": (ValueError, "is a negated view"),
    "a class": (TypeError, "is a _TensorMeta"),
    "freed": (ValueError, "has no memory"),
    "freed with others": (ValueError, "has no memory"),
    "alignment": (ValueError, "starts at 0x"),
}


@pytest.mark.parametrize("m", [3, 20], ids=["one launch", "two launches"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_nothing_is_launched(
    machine: Machine, boundary: FusedBoundary, name: str, fault: str, m: int
) -> None:
    """The mixes of the call before stay pending: another stream can join them."""
    given: dict[str, Any] = arguments(m)
    boundary(**given)
    machine.done()
    given[name] = faulty(fault, given[name], "meta")
    error, message = FAULTS[fault]
    with pytest.raises(error, match=f"^{name} {message}") as caught:
        boundary(**given)
    told = "".join(traceback.format_exception(caught.value))
    assert "Mismatched" not in told and "Misaligned" not in told
    assert launches(machine.done()) == []
    machine.handle = 5
    boundary.join()
    assert waits(machine.done(), 5) == 1


def test_arguments_that_no_kernel_takes_are_refused(
    machine: Machine, boundary: FusedBoundary, tmp_path: Path
) -> None:
    """A launch does not see them: it is not given them."""
    given: dict[str, Any] = arguments(3)
    with pytest.raises(ValueError, match=r"^pre is given"):
        boundary(**given, pre=torch.zeros(3, HC))
    model = load_spec(resource("specs") / "glm53.yaml").spec.model.model_dump()
    model |= {"hidden": H, "norm_weight": "none"}
    modules = import_variant(tmp_path, "host_weightless", mixes="tail", model=model)
    weightless = fused_of(machine, modules, ROOM)
    with pytest.raises(ValueError, match=r"^norm_weight is given"):
        weightless(**given)
    assert machine.done() == []


@pytest.mark.parametrize("m", [3, 20], ids=["one launch", "two launches"])
def test_indices_without_a_sign_are_refused(
    machine: Machine, boundary: FusedBoundary, m: int
) -> None:
    """To a compiled kernel they are as good as those with one."""
    given = routed(m)
    name = "expanded_idx_to_permuted_idx"
    given[name] = given[name].view(torch.uint32)
    with pytest.raises(TypeError, match=rf"^{name} has dtype torch\.uint32"):
        boundary.finalize(**given)
    assert machine.done() == []


@pytest.mark.parametrize("m", [3, 20], ids=["one launch", "two launches"])
def test_a_known_weight_that_is_negated_in_place_is_refused(
    machine: Machine, boundary: FusedBoundary, m: int
) -> None:
    given = arguments(20)
    boundary(**given)  # in two launches: its weights are known
    machine.done()
    given |= {name: arguments(m)[name] for name in NAMES[:4]}
    given["fn"].data = torch._neg_view(given["fn"].data)
    with pytest.raises(ValueError, match=r"^fn is a negated view"):
        boundary(**given)
    assert launches(machine.done()) == []


@pytest.mark.parametrize("m", [3, 20], ids=["one launch", "two launches"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ROUTED)
def test_each_fault_of_a_routed_sum_is_named(
    machine: Machine, boundary: FusedBoundary, name: str, fault: str, m: int
) -> None:
    given: dict[str, Any] = routed(m)
    given[name] = faulty(fault, given[name], "meta")
    error, message = FAULTS[fault]
    with pytest.raises(error, match=f"^{name} {message}"):
        boundary.finalize(**given)
    assert machine.done() == []


def test_a_known_weight_is_not_checked_again(
    modules: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(modules[0], torch.device("cpu"))
    inputs = input_of(3)
    checks.boundary(3, inputs)
    checked: list[str] = []
    monkeypatch.setattr(
        checks, "_tensor", lambda name, tensor, dtype, shape: checked.append(name)
    )
    checks.boundary(3, inputs)
    assert checked == ["residual", "post", "comb"]


def test_a_known_weight_whose_memory_moved_is_checked_again(
    modules: tuple[Any, Any],
) -> None:
    checks = Checks(modules[0], torch.device("cpu"))
    inputs = input_of(3)
    checks.boundary(3, inputs)
    inputs.fn.data = inputs.fn.data.float()
    with pytest.raises(TypeError, match=r"^fn has dtype torch\.float32"):
        checks.boundary(3, inputs)
    inputs.base.untyped_storage().resize_(0)
    with pytest.raises((TypeError, ValueError)):
        checks.boundary(3, inputs)


IN_PLACE: dict[str, tuple[Callable[[BoundaryInput], object], type, str]] = {
    "transposed": (lambda given: given.fn.t_(), ValueError, r"fn has shape"),
    "cut": (
        lambda given: setattr(given.base, "data", given.base.data[: MIX // 2]),
        ValueError,
        rf"base has shape \({MIX // 2},\)",
    ),
    "other type": (
        lambda given: setattr(given.fn, "data", given.fn.data.view(torch.float16)),
        TypeError,
        r"fn has dtype torch\.float16",
    ),
    "other strides": (
        lambda given: given.fn.as_strided_((MIX, HC * H), (1, MIX)),
        ValueError,
        r"fn has strides \(1, 24\)",
    ),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_known_weight_that_changed_in_place_is_checked_again(
    modules: tuple[Any, Any], change: str
) -> None:
    """The same object at the same address, of which the kernels would read more."""
    checks = Checks(modules[0], torch.device("cpu"))
    inputs = input_of(3)
    checks.boundary(3, inputs)
    make, error, message = IN_PLACE[change]
    addresses = [inputs.fn.data_ptr(), inputs.base.data_ptr()]
    make(inputs)
    assert [inputs.fn.data_ptr(), inputs.base.data_ptr()] == addresses
    with pytest.raises(error, match=f"^{message}"):
        checks.boundary(3, inputs)


def test_one_weight_in_the_place_of_another(modules: tuple[Any, Any]) -> None:
    """A tensor is known by the argument that it was checked for."""
    checks = Checks(modules[0], torch.device("cpu"))
    inputs = input_of(3)
    checks.boundary(3, inputs)
    with pytest.raises(ValueError, match=r"^scale has shape"):
        checks.boundary(3, inputs._replace(scale=inputs.base))


def test_weights_that_are_gone_are_forgotten(modules: tuple[Any, Any]) -> None:
    checks = Checks(modules[0], torch.device("cpu"))
    for _ in range(3):
        inputs = input_of(1)
        checks.boundary(1, inputs)
    assert len(checks._known) == 1
    moved = inputs._replace(base=torch.zeros(MIX))
    checks.boundary(1, moved)
    assert len(checks._known) == 2
    del moved
    gc.collect()
    assert len(checks._known) == 1
    del inputs
    gc.collect()
    assert checks._known == {}


def test_kernels_are_called_without_the_layer_for_keywords(
    machine: Machine, modules: tuple[Any, Any], boundary: FusedBoundary
) -> None:
    """The compiler's wrapper is unwrapped where it can be, and kept alive."""

    class Wrapper:
        def __init__(self, name: str) -> None:
            self.name = name

        def __tvm_ffi_object__(self) -> Any:
            return machine.kernel(f"bare {self.name}")

    constants, kernels = modules
    compiled = {n: Wrapper(n) for n in kernels.kernels("sm_90a", ("unicast",))}
    box = boundary._launcher.mailbox
    fused = FusedBoundary(Launcher(constants, kernels, compiled, "sm_90a", box, ROOM))
    fused(**arguments(1))
    fused(**arguments(20))
    forget(fused)
    assert launches(machine.done()) == [
        f"bare {PUBLISHING}",
        "mixes",
        "bare publish_unicast",
        "bare boundary_4",
        "mixes",
    ]
    assert fused._launcher._compiled is compiled


@pytest.fixture
def inputs(
    boundary: FusedBoundary, monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> Inputs:
    """What the benchmark times, on the CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    package = Loaded("", "host_test", boundary, {"name": "host_test"})
    return Inputs(gpus.Machine(0, 1, torch.device("cpu")), package, 3)


def test_the_benchmark_times_what_it_says(machine: Machine, inputs: Inputs) -> None:
    package = inputs.package
    columns = {each.column: each for each in contenders.package_contenders(package)}
    expected = {
        "boundary": [PUBLISHING],
        "two launches": ["publish_unicast", "boundary_1"],
        "mixes": ["mixes"],
        "with mixes": [PUBLISHING, "mixes"],
        "between sublayers": [PUBLISHING, "mixes"],
        "finalize": [FINALIZING],
    }
    assert list(columns) == list(expected)
    every = contenders.contenders(inputs.machine, [package])
    assert [each.column for each in every if each.follows_gemms] == [every[-1].column]
    for column, kernels in expected.items():
        columns[column].call_for(inputs)()
        done = machine.done()
        assert launches(done) == kernels
        if "mixes" in kernels and PUBLISHING in kernels:
            assert done[-1].startswith("0 waits")


def test_a_boundary_is_timed_between_sublayers(
    machine: Machine, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what the sublayer gives, and gives what that takes: in turn."""
    products: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mm(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert weight.shape == (H, H)
        machine.log.append("gemm")
        products.append((rows, out))

    monkeypatch.setattr(torch, "mm", mm)
    found = contenders.package_contenders(inputs.package)
    (column,) = [each for each in found if each.less_for is not None]
    assert column.less_for is not None
    column.less_for(inputs)()
    assert machine.done() == ["gemm", "gemm"]
    call = column.call_for(inputs)
    for _ in range(2):
        products.clear()
        call()
        done = machine.done()
        own = {PUBLISHING, "mixes", "gemm"}
        assert [each for each in done if each in own] == [
            *(PUBLISHING, "mixes"),
            *("gemm", "gemm"),
        ]
        assert done[-1].startswith("0 waits")
        (first, between), (second, x) = products
        given = machine.given[PUBLISHING]
        assert first is given[19] and second is between
        assert any(each is x for each in given)


def test_what_needs_more_gpus_says_so(inputs: Inputs) -> None:
    for contender in (contenders.nccl, contenders.one_shot):
        with pytest.raises(contenders.UnavailableError, match="a GPU for each rank"):
            contender(inputs)


def test_the_hosts_time_is_told_by_steps(
    machine: Machine, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundary, calls = inputs.package.boundary, []
    launch = type(boundary).__call__

    def counted(self: FusedBoundary, *args: Any, **rest: Any) -> Any:
        calls.append(rest)
        return launch(self, *args, **rest)

    monkeypatch.setattr(type(boundary), "__call__", counted)
    times = host_time(inputs)
    steps = ["checks", "checks, outputs given", "outputs", "boundary"]
    assert list(times) == ["call", "call, outputs given", *steps]
    assert min(times.values()) > 0
    runs = CALLS * ROUNDS
    assert [bool(each) for each in calls] == [False] * runs + [True] * runs
    assert machine.done()[-1].startswith("0 waits")
