"""Calls into given memory: what is written, and what is refused before any launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mhcgen.runtime.arguments import MOST_APART, BoundaryOutput
from mhcgen.runtime.host import FusedBoundary
from tests.faults import faulty
from tests.stand_ins import Machine, machine_in
from tests.test_host import (
    FAULTS,
    FINALIZING,
    HC,
    NAMES,
    PUBLISHING,
    ROOM,
    ROUTED,
    H,
    arguments,
    entering,
    forget,
    fused_of,
    import_variant,
    launches,
    routed,
    same,
)

ENDS = {"entry": True, "exit": "mean"}
MORE: dict[str, Any] = {
    "model": {"hidden": H, "pre_mix": "delayed"},
    "outputs": {"stream_mean": True},
}
HALVES = ["one launch", "two launches"]
OUTPUTS = BoundaryOutput._fields


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("package")
    return import_variant(folder, "host_outputs", mixes="side_stream", ends=ENDS)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return machine_in(monkeypatch)


@pytest.fixture
def boundary(machine: Machine, modules: tuple[Any, Any]) -> Any:
    fused = fused_of(machine, modules, ROOM)
    yield fused
    forget(fused)


@pytest.fixture(scope="module")
def delayed_modules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("package")
    return import_variant(folder, "host_delayed", mixes="side_stream", **MORE)


@pytest.fixture
def delayed(machine: Machine, delayed_modules: tuple[Any, Any]) -> Any:
    """A package with a delayed pre-mix and stream means."""
    fused = fused_of(machine, delayed_modules, ROOM)
    yield fused
    forget(fused)


def without_x(m: int) -> dict[str, torch.Tensor]:
    given = arguments(m)
    del given["x"]
    return given


def leaving(m: int) -> dict[str, torch.Tensor]:
    """The arguments of an exit behind what it publishes."""
    given = arguments(m)
    return {name: given[name] for name in ("residual", "post", "comb", "norm_weight")}


@pytest.mark.parametrize("m", [3, 20], ids=HALVES)
def test_every_call_writes_what_it_is_given(
    machine: Machine, boundary: FusedBoundary, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And allocates nothing, neither the first time nor the next."""
    out = boundary.outputs(m)
    left = torch.empty(m, H, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "empty_like", None)
    closed = "boundary_1" if m == 3 else "boundary_4"
    for _ in range(2):
        assert boundary(**arguments(m), out=out) is out
        assert same(machine.given[PUBLISHING if m == 3 else closed][16:20], out)
        assert boundary.finalize(**routed(m), out=out) is out
        assert same(machine.given[FINALIZING if m == 3 else closed][16:20], out)
        boundary.publish(arguments(m)["x"])
        assert boundary.consume(**without_x(m), out=out) is out
        assert same(machine.given[closed][16:20], out)
        assert boundary.entry(**entering(m), out=out) is out
        assert same(machine.given["mixes"][3:5], [out.post, out.comb])
        x = arguments(m)["x"]
        assert boundary.exit(x, **leaving(m), out=left) is left
        parts = [routed(m)[name] for name in ROUTED]
        assert boundary.exit_finalize(*parts, **leaving(m), out=left) is left
        boundary.publish(x)
        assert boundary.consume_exit(**leaving(m), out=left) is left
        assert machine.given["exit"][-1] is left


@pytest.mark.parametrize("m", [3, 20], ids=HALVES)
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_each_output_is_named(
    machine: Machine, boundary: FusedBoundary, name: str, fault: str, m: int
) -> None:
    """Behind a call that took the rest of them, too."""
    out = boundary.outputs(m)
    given, closed = arguments(m), routed(m)
    boundary(**given, out=out)
    boundary.finalize(**closed, out=out)
    wrong = out._replace(**{name: faulty(fault, getattr(out, name), "meta")})
    error, message = FAULTS[fault]
    machine.done()
    with pytest.raises(error, match=rf"^out\.{name} {message}"):
        boundary(**given, out=wrong)
    with pytest.raises(error, match=rf"^out\.{name} {message}"):
        boundary.finalize(**closed, out=wrong)
    with pytest.raises(error, match=rf"^out\.{name} {message}"):
        boundary.entry(**entering(m), out=wrong)
    assert launches(machine.done()) == []
    boundary.publish(given.pop("x"))
    machine.done()
    with pytest.raises(error, match=rf"^out\.{name} {message}"):
        boundary.consume(**given, out=wrong)
    assert launches(machine.done()) == []
    boundary.consume(**given, out=out)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_what_an_exit_returns_is_named(
    machine: Machine, boundary: FusedBoundary, fault: str
) -> None:
    out = torch.empty(3, H, dtype=torch.bfloat16)
    error, message = FAULTS[fault]
    wrong = faulty(fault, out, "meta")
    with pytest.raises(error, match=f"^out {message}"):
        boundary.exit(arguments(3)["x"], **leaving(3), out=wrong)
    assert machine.done() == []


@pytest.mark.parametrize("m", [3, 20], ids=HALVES)
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (list, "list"),
        (tuple, "tuple"),
        (lambda out: out.residual, "Tensor"),
        (lambda out: (), "tuple"),
        (lambda out: out._asdict(), "dict"),
        (lambda out: 7, "int"),
    ],
)
def test_what_is_no_memory_for_outputs_is_refused(
    machine: Machine, boundary: FusedBoundary, wrong: Any, named: str, m: int
) -> None:
    out = wrong(boundary.outputs(m))
    told = rf"^out is a {named}; it must be what outputs\({m}\) returns: residual, post"
    for _ in range(2):
        with pytest.raises(TypeError, match=told):
            boundary(**arguments(m), out=out)
    assert machine.done() == []


def test_what_only_looks_like_outputs_is_refused(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """Where its attributes are others than its items, the attributes are written."""
    given, out = arguments(3), boundary.outputs(3)
    boundary(**given, out=out)
    machine.done()

    class Loose(list[torch.Tensor]):
        pass

    loose: Any = Loose(out)
    vars(loose).update(out._asdict(), layer_input=given["x"])
    with pytest.raises(TypeError, match=r"^out is a Loose; it must be what"):
        boundary(**given, out=loose)
    assert machine.done() == []


@pytest.mark.parametrize("m", [3, 20], ids=HALVES)
@pytest.mark.parametrize("name", ["pre", "stream_mean"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_what_some_packages_return(
    machine: Machine, delayed: FusedBoundary, name: str, fault: str, m: int
) -> None:
    given = arguments(m) | {"pre": torch.zeros(m, HC)}
    out = delayed.outputs(m)
    assert out._fields == (*OUTPUTS, "pre", "stream_mean")
    delayed(**given, out=out)
    in_place: Any = out._replace(**{"pre": given["pre"]})
    assert delayed(**given, out=in_place) is in_place
    machine.done()
    error, message = FAULTS[fault]
    wrong = out._replace(**{name: faulty(fault, getattr(out, name), "meta")})
    with pytest.raises(error, match=rf"^out\.{name} {message}"):
        delayed(**given, out=wrong)
    assert launches(machine.done()) == []


def test_outputs_of_another_package_are_refused(
    machine: Machine, boundary: FusedBoundary, tmp_path: Path
) -> None:
    """Those of another object of the same package are as good as its own."""
    more = {"stream_mean": True}
    modules = import_variant(tmp_path, "host_means", mixes="tail", outputs=more)
    other = fused_of(machine, modules, ROOM)
    given = arguments(3)
    with pytest.raises(TypeError, match=r"^out is a BoundaryOutput; it must be what"):
        boundary(**given, out=other.outputs(3))
    with pytest.raises(TypeError, match=r"layer_input, stream_mean$"):
        other(**given, out=boundary.outputs(3))
    out = other.outputs(3)
    assert fused_of(machine, modules, ROOM)(**given, out=out) is out


@pytest.mark.parametrize("m", [3, 20], ids=HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_an_output_in_the_place_of_an_input(
    machine: Machine, boundary: FusedBoundary, name: str, m: int
) -> None:
    """Streams and mixes may stay where they are; all else must lie apart."""
    given, out = arguments(m), boundary.outputs(m)
    boundary(**given, out=out)
    machine.done()
    if name in ("residual", "post", "comb"):
        in_place = out._replace(**{name: given[name]})
        assert boundary(**given, out=in_place) is in_place
        others = [each for each in OUTPUTS if each != name]
    else:
        others = list(OUTPUTS)
    machine.done()
    for other in others:
        tensor = getattr(out, other)
        memory = torch.empty(tensor.nbytes + given[name].nbytes, dtype=torch.uint8)
        size = given[name].nbytes
        moved = memory[:size].view(given[name].dtype).view(given[name].shape)
        start = size - 16 if size >= 32 else 0
        over = memory[start : start + tensor.nbytes]
        over = over.view(tensor.dtype).view(tensor.shape)
        with pytest.raises(ValueError, match=rf"^out\.{other} overlaps {name}: give"):
            boundary(**{**given, name: moved}, out=out._replace(**{other: over}))
    assert launches(machine.done()) == []


@pytest.mark.parametrize("name", ["hidden", "fn", "scale", "base", "norm_weight"])
def test_an_entry_takes_nothing_in_place(
    machine: Machine, boundary: FusedBoundary, name: str
) -> None:
    given, out = entering(3), boundary.outputs(3)
    size = max(out.residual.nbytes, given[name].nbytes)
    memory = torch.zeros(size, dtype=torch.uint8)
    moved = memory[: given[name].nbytes].view(given[name].dtype).view_as(given[name])
    over = memory[: out.residual.nbytes].view(torch.bfloat16).view_as(out.residual)
    with pytest.raises(ValueError, match=rf"^out\.residual overlaps {name}: give"):
        boundary.entry(**given | {name: moved}, out=out._replace(residual=over))
    assert machine.done() == []


@pytest.mark.parametrize("name", ["x", "residual", "post", "comb", "norm_weight"])
def test_an_exit_takes_nothing_in_place(
    machine: Machine, boundary: FusedBoundary, name: str
) -> None:
    given = {"x": arguments(3)["x"], **leaving(3)}
    size = max(3 * H * 2, given[name].nbytes)
    memory = torch.zeros(size, dtype=torch.uint8)
    moved = memory[: given[name].nbytes].view(given[name].dtype).view_as(given[name])
    out = memory[: 3 * H * 2].view(torch.bfloat16).view(3, H)
    with pytest.raises(ValueError, match=f"^out overlaps {name}: give"):
        boundary.exit(**given | {name: moved}, out=out)
    assert machine.done() == []


def test_memory_side_by_side_is_apart(
    machine: Machine, boundary: FusedBoundary
) -> None:
    memory = torch.zeros(9, H, dtype=torch.bfloat16)
    given, out = arguments(3), boundary.outputs(3)
    for x, rows in ((0, 3), (3, 0)):
        given["x"], layer_input = memory[x : x + 3], memory[rows : rows + 3]
        boundary(**given, out=out._replace(layer_input=layer_input))
    assert launches(machine.done()) == [PUBLISHING, "mixes"] * 2


def test_a_shift_is_not_in_place(machine: Machine, boundary: FusedBoundary) -> None:
    memory = torch.zeros(4, HC, H, dtype=torch.bfloat16)
    given, out = arguments(3), boundary.outputs(3)
    given["residual"] = memory[:3]
    with pytest.raises(ValueError, match=r"^out\.residual overlaps residual"):
        boundary(**given, out=out._replace(residual=memory[1:]))
    assert machine.done() == []


def test_outputs_that_overlap_each_other_are_refused(
    machine: Machine, boundary: FusedBoundary
) -> None:
    out = boundary.outputs(3)
    rows = out.residual.view(-1)[: 3 * H].view(3, H)
    with pytest.raises(ValueError, match=r"^out\.layer_input overlaps out\.residual"):
        boundary(**arguments(3), out=out._replace(layer_input=rows))
    assert machine.done() == []


def test_what_was_published_may_not_be_overlapped(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """One rank alone reads it in the second half, and ranks may send it until then."""
    given, out = arguments(3), boundary.outputs(3)
    x = given.pop("x")
    boundary.publish(x)
    with pytest.raises(ValueError, match=r"^out\.layer_input overlaps x"):
        boundary.consume(**given, out=out._replace(layer_input=x))
    boundary.consume(**given, out=out)
    closed = routed(5)
    rows = [closed.pop(name) for name in ROUTED]
    out = boundary.outputs(5)
    boundary.publish_finalize(*rows)
    machine.done()
    with pytest.raises(ValueError, match=r"^out\.layer_input overlaps gemm2_permuted"):
        boundary.consume(**closed, out=out._replace(layer_input=rows[0]))
    assert launches(machine.done()) == []
    boundary.consume(**closed, out=out)
    boundary.publish(x)
    with pytest.raises(ValueError, match=r"^out overlaps x"):
        boundary.consume_exit(**leaving(3), out=x)


def test_memory_that_was_apart_with_fewer_tokens_is_looked_at_again(
    machine: Machine, boundary: FusedBoundary
) -> None:
    """The addresses are the same; what follows them is not."""
    memory = torch.zeros(8, H, dtype=torch.bfloat16)
    for m, apart in ((4, True), (5, False)):
        given, out = arguments(m), boundary.outputs(m)
        given["x"] = memory[:m]
        out = out._replace(layer_input=memory[4 : 4 + m].clone())
        if apart:
            boundary(**given, out=out._replace(layer_input=memory[4 : 4 + m]))
    given, out = arguments(3), boundary.outputs(3)
    given["x"] = memory[:3]
    out = out._replace(layer_input=memory[4:7])
    boundary(**given, out=out)
    boundary(**given, out=out)
    assert len(boundary._checks._apart) == 2
    longer = routed(3) | {name: given[name] for name in NAMES[1:]}
    longer["gemm2_permuted"] = memory[:4]
    boundary.finalize(**longer, out=out)
    machine.done()
    with pytest.raises(ValueError, match=r"^out\.layer_input overlaps gemm2_permuted"):
        boundary.finalize(**{**longer, "gemm2_permuted": memory[:5]}, out=out)
    assert launches(machine.done()) == []


def test_what_was_looked_at_is_not_looked_at_again(
    machine: Machine, boundary: FusedBoundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, looked = boundary._checks, []
    outputs = checks.outputs

    def counted(*given: Any) -> None:
        looked.append(given[0])
        outputs(*given)

    monkeypatch.setattr(checks, "outputs", counted)
    given, closed, out = arguments(3), routed(3), boundary.outputs(3)
    for _ in range(3):
        boundary(**given, out=out)
        boundary.finalize(**closed, out=out)
    assert looked == [3, 3]
    for name in OUTPUTS:
        other = out._replace(**{name: torch.empty_like(getattr(out, name))})
        boundary(**given, out=other)
    for name in NAMES:
        boundary(**given | {name: given[name].clone()}, out=out)
    assert looked == [3] * (2 + len(OUTPUTS) + len(NAMES))


@pytest.mark.parametrize("change", ["type", "tokens"])
def test_routing_weights_that_reach_further_are_looked_at_again(
    machine: Machine, boundary: FusedBoundary, change: str
) -> None:
    """They begin where those of the call before did, and end inside of an output."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    short = torch.bfloat16 if change == "type" else torch.float32
    long = 2 if change == "type" else 3
    begin = 2 * 8 * short.itemsize
    whole, room = routed(3), boundary.outputs(3)

    def called(m: int, dtype: torch.dtype) -> None:
        given = {
            name: each[:m] if len(each) == 3 and name != "scale" else each
            for name, each in whole.items()
        }
        size = m * 8 * dtype.itemsize
        given["expert_weights"] = memory[:size].view(dtype).view(m, 8)
        out = boundary.outputs(m)._make(each[:m] for each in room)
        post = memory[begin : begin + m * HC * 4].view(torch.float32).view(m, HC, 1)
        boundary.finalize(**given, out=out._replace(post=post))

    called(2, short)
    called(2, short)
    machine.done()
    with pytest.raises(ValueError, match=r"^out\.post overlaps expert_weights: give"):
        called(long, torch.float32)
    assert launches(machine.done()) == []


@pytest.mark.parametrize("name", ["x", "residual", "out.layer_input"])
def test_a_storage_that_was_made_smaller_is_refused(
    machine: Machine, boundary: FusedBoundary, name: str
) -> None:
    given, out = arguments(20), boundary.outputs(20)
    short = out.layer_input if name.startswith("out") else given[name]
    short.untyped_storage().resize_(16)
    with pytest.raises(ValueError, match=f"^{name} reaches beyond its storage, .* 16 "):
        boundary(**given, out=out)
    assert machine.done() == []


def test_places_are_not_remembered_without_end(
    machine: Machine, boundary: FusedBoundary
) -> None:
    checks, given = boundary._checks, arguments(3)
    checks._apart.update((number,) for number in range(MOST_APART))
    boundary(**given, out=boundary.outputs(3))
    assert len(checks._apart) == 1


def test_memory_for_outputs(boundary: FusedBoundary) -> None:
    out = boundary.outputs(5)
    assert out._fields == OUTPUTS
    assert [len(each) for each in out] == [5] * 4
    assert boundary(**arguments(0), out=boundary.outputs(0)).residual.shape[0] == 0
    for wrong in (2.0, "3", None):
        with pytest.raises(TypeError, match=r"^m is a \w+; it must be an int"):
            boundary.outputs(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^m is a \w+; it must be an int"):
            boundary.launches(wrong)  # type: ignore[arg-type]
    for m in (-1, 33):
        with pytest.raises(ValueError, match=f"m is {m}; this package takes 0 to 32"):
            boundary.outputs(m)
