"""The checks of a call's arguments, and what a call returns: no GPU is needed."""

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
arguments = importlib.import_module("mhcgen.runtime.arguments")

M, H, HC, MIX = 3, 64, 4, 24


def constants(**changed: Any) -> ModuleType:
    values: dict[str, Any] = {
        "HIDDEN": H,
        "HC": HC,
        "MIX": MIX,
        "CAPACITY": 8,
        "ACTIVATION": "bf16",
        "FN_WEIGHT": "bf16",
        "NORM_WEIGHT": "plain",
        "PRE_MIX": "fresh",
        "ENTRY": True,
        "EXIT": "mean",
        "STREAM_MEAN": False,
        "TOP_K": 2,
        "ROUTING_WEIGHTS": ("fp32",),
        "SHARED_EXPERT": (False, True),
    }
    assert changed.keys() <= values.keys()
    return cast(ModuleType, SimpleNamespace(**(values | changed)))


def checks(**changed: Any) -> Any:
    return arguments.Checks(constants(**changed), torch.device("cpu"))


def boundary_input(
    activation: Any = torch.bfloat16, fn: Any = torch.bfloat16, **changed: Any
) -> Any:
    values = {
        "residual": torch.zeros(M, HC, H, dtype=activation),
        "post": torch.zeros(M, HC, 1),
        "comb": torch.zeros(M, HC, HC),
        "fn": torch.zeros(MIX, HC * H, dtype=fn),
        "scale": torch.zeros(3),
        "base": torch.zeros(MIX),
        "norm_weight": torch.zeros(H, dtype=activation),
        "pre": None,
    }
    return arguments.BoundaryInput(**(values | changed))


def exit_input(**changed: Any) -> Any:
    values = {
        "residual": torch.zeros(M, HC, H).bfloat16(),
        "post": torch.zeros(M, HC, 1),
        "comb": torch.zeros(M, HC, HC),
        "norm_weight": torch.zeros(H).bfloat16(),
        "pre": None,
        "head_fn": None,
        "head_scale": None,
        "head_base": None,
    }
    return arguments.ExitInput(**(values | changed))


PRE = torch.zeros(M, HC)
HEAD = {
    "head_fn": torch.zeros(HC, HC * H).bfloat16(),
    "head_scale": torch.zeros(1),
    "head_base": torch.zeros(HC),
}


def test_types_follow_the_package() -> None:
    half, single = torch.float16, torch.float32
    checks().boundary(M, boundary_input())
    checks(ACTIVATION="fp16").boundary(M, boundary_input(half))
    checks(FN_WEIGHT="fp32").boundary(M, boundary_input(fn=single))
    with pytest.raises(TypeError, match=r"residual has dtype .*bfloat16; .*float16"):
        checks(ACTIVATION="fp16").boundary(M, boundary_input())
    with pytest.raises(TypeError, match=r"fn has dtype torch.bfloat16; .*float32"):
        checks(FN_WEIGHT="fp32").boundary(M, boundary_input())
    with pytest.raises(TypeError, match=r"x has dtype torch.bfloat16; .*float16"):
        checks(ACTIVATION="fp16").x(torch.zeros(M, H).bfloat16())
    routed = arguments.RoutedInput(
        torch.zeros(5, H).half(),
        torch.zeros(M, 2),
        torch.zeros(M, 2, dtype=torch.int32),
        torch.zeros(M, H).half(),
    )
    assert checks(ACTIVATION="fp16").routed(routed) == M
    with pytest.raises(TypeError, match="gemm2_permuted has dtype"):
        checks().routed(routed)
    shared = routed._replace(shared_output=torch.zeros(M, H))
    with pytest.raises(TypeError, match="shared_output has dtype"):
        checks(ACTIVATION="fp16").routed(shared)


@pytest.mark.parametrize(
    ("changed", "given", "error", "message"),
    [
        ({}, {"norm_weight": None}, TypeError, "norm_weight is a NoneType"),
        ({"NORM_WEIGHT": "plus_one"}, {"norm_weight": None}, TypeError, "norm_weight"),
        (
            {"NORM_WEIGHT": "none"},
            {},
            ValueError,
            r"norm_weight is given, and this package takes none: pass None, or change "
            r"model\.norm_weight of its spec",
        ),
        ({}, {"pre": PRE}, ValueError, r"pre is given.*model\.pre_mix"),
        ({"PRE_MIX": "delayed"}, {}, TypeError, "pre is a NoneType"),
        ({"PRE_MIX": "delayed"}, {"pre": PRE[:, :1]}, ValueError, "pre has shape"),
        ({"PRE_MIX": "delayed"}, {"pre": PRE.half()}, TypeError, "pre has dtype"),
    ],
)
def test_what_a_boundary_takes(
    changed: dict[str, Any], given: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        checks(**changed).boundary(M, boundary_input(**given))


def test_a_boundary_takes_what_its_spec_says() -> None:
    checks(NORM_WEIGHT="none").boundary(M, boundary_input(norm_weight=None))
    checks(NORM_WEIGHT="plus_one").boundary(M, boundary_input())
    checks(PRE_MIX="delayed").boundary(M, boundary_input(pre=PRE))


@pytest.mark.parametrize(
    ("changed", "given", "error", "message"),
    [
        ({"EXIT": None}, {}, RuntimeError, r"no exit kernel: set ends\.exit"),
        ({}, {"pre": PRE}, ValueError, r"pre is given.*change ends\.exit"),
        ({"EXIT": "pre_mix"}, {}, TypeError, "pre is a NoneType"),
        ({}, HEAD, ValueError, r"head_fn is given.*change ends\.exit"),
        ({}, {"head_base": HEAD["head_base"]}, ValueError, "head_base is given"),
        ({"EXIT": "sigmoid"}, {}, TypeError, "head_fn is a NoneType"),
        (
            {"EXIT": "sigmoid"},
            HEAD | {"head_scale": torch.zeros(3)},
            ValueError,
            r"head_scale has shape \(3,\); it must be \(1,\)",
        ),
        (
            {"EXIT": "sigmoid", "FN_WEIGHT": "fp32"},
            HEAD,
            TypeError,
            r"head_fn has dtype torch.bfloat16; it must be torch.float32",
        ),
        ({}, {"norm_weight": None}, TypeError, "norm_weight is a NoneType"),
        ({}, {"post": torch.zeros(M, HC)}, ValueError, "post has shape"),
    ],
)
def test_what_an_exit_takes(
    changed: dict[str, Any], given: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        checks(**changed).exit(M, exit_input(**given))


def test_an_exit_takes_what_its_spec_says() -> None:
    checks().exit(M, exit_input())
    checks(EXIT="pre_mix").exit(M, exit_input(pre=PRE))
    checks(EXIT="sigmoid").exit(M, exit_input(**HEAD))
    checks(NORM_WEIGHT="none").exit(M, exit_input(norm_weight=None))


def entry_input(rows: int, **changed: Any) -> Any:
    whole = boundary_input()
    values = {name: getattr(whole, name) for name in arguments.EntryInput._fields[1:]}
    hidden = torch.zeros(rows, H).bfloat16()
    return arguments.EntryInput(**({"hidden": hidden} | values | changed))


def test_what_an_entry_takes() -> None:
    assert checks().entry(entry_input(M)) == M
    assert checks().entry(entry_input(0)) == 0
    wrong: list[tuple[Callable[[], object], type, str]] = [
        (
            lambda: checks(ENTRY=False).entry(entry_input(M)),
            RuntimeError,
            r"no entry kernel: set ends\.entry",
        ),
        (
            lambda: checks().entry(entry_input(9)),
            ValueError,
            "hidden has 9 tokens; this package takes 0 to 8",
        ),
        (
            lambda: checks().entry(entry_input(M, fn=None)),
            TypeError,
            "fn is a NoneType",
        ),
        (
            lambda: checks(NORM_WEIGHT="none").entry(entry_input(M)),
            ValueError,
            "norm_weight is given",
        ),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({}, ()),
        ({"PRE_MIX": "delayed"}, ("pre",)),
        ({"STREAM_MEAN": True}, ("stream_mean",)),
        ({"PRE_MIX": "delayed", "STREAM_MEAN": True}, ("pre", "stream_mean")),
    ],
)
def test_an_output_has_exactly_what_the_package_returns(
    changed: dict[str, Any], more: tuple[str, ...]
) -> None:
    fields = arguments.output_type(constants(**changed))._fields
    assert fields == ("residual", "post", "comb", "layer_input", *more)
