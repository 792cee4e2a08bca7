"""What the host hands to kernels is what they are compiled for, in every package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mhcgen.build import write_files
from mhcgen.plan import Plan
from mhcgen.render import render
from mhcgen.runtime import loader, mailbox
from mhcgen.runtime.arguments import BoundaryInput, ExitInput
from mhcgen.runtime.dtypes import DTYPES
from mhcgen.runtime.host import FusedBoundary
from mhcgen.runtime.launcher import Launcher
from mhcgen.runtime.occupancy import kernel_of
from mhcgen.runtime.warm_up import warm_up_together, zeros_of
from tests.stand_ins import machine_in, mailbox_of, refuse
from tests.variants import FP16, FP32, MEANS, VARIANTS, variant

ROOM = 64
TAILS = (
    variant("tail_moe", mixes="tail", moe={"top_k": 2}),
    variant("tail_delayed", mixes="tail", pre_mix="delayed", outputs=MEANS),
    variant("tail_bare", mixes="tail", norm_weight="none", precision=FP16 | FP32),
    variant(
        "tail_ends",
        mixes="tail",
        pre_mix="delayed",
        ends={"entry": True, "exit": "pre_mix"},
    ),
    variant("tail_moe_of_one_rank", tp=1, mixes="tail", moe={"top_k": 2}),
)


class Checked:
    """A kernel that takes exactly what it was compiled for, and writes it down."""

    def __init__(self, name: str, kernel: Any, log: list[str]) -> None:
        self.name = name
        self.expected = kernel.arguments()
        self.log = log

    def __call__(self, *given: Any) -> None:
        assert len(given) == len(self.expected) - 1, self.name
        refuse(given, self.expected)
        self.log.append(self.name)


def inputs_of(launcher: Launcher, m: int) -> dict[str, torch.Tensor]:
    """Every argument by name, with ``m`` tokens in place of one."""
    return {
        name: tensor.expand(m, *tensor.shape[1:]).contiguous()
        if name in ("hidden", "residual", "post", "comb", "pre")
        else tensor
        for name, tensor in zeros_of(launcher).items()
    }


@pytest.mark.parametrize("plan", [*VARIANTS, *TAILS], ids=lambda plan: plan.name)
def test_kernels_are_given_what_they_are_compiled_for(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways to call a package launch its kernels with their own arguments."""
    folder = tmp_path / f"launches_{plan.name}"
    write_files(folder, render(plan, formatting=False))
    name = loader.import_package(folder)
    constants = importlib.import_module(f"{name}.constants")
    kernels = importlib.import_module(f"{name}.kernels")
    (arch,) = constants.TARGETS
    log: list[str] = []
    box = mailbox_of(constants)
    compiled = {
        name: Checked(name, kernel, log)
        for name, kernel in kernels.kernels(arch, (box.transport,)).items()
    }
    rows = constants.TARGETS[arch].token_groups
    room = {kernel_of(row): ROOM for row in rows if getattr(row, "launches", 2) == 1}
    launcher = Launcher(constants, kernels, compiled, arch, box, room)

    machine = machine_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: machine.stream(3)
    )
    warm_up_together([launcher])
    assert set(log) == set(compiled), "warm-up launches every kernel"

    fused = FusedBoundary(launcher)
    log.clear()
    for m in (1, constants.CAPACITY):
        given = inputs_of(launcher, m)
        if constants.NORM_WEIGHT == "none":
            given["norm_weight"] = None  # type: ignore[assignment]
        taken = {name: given[name] for name in BoundaryInput._fields}
        if constants.PRE_MIX == "fresh":
            del taken["pre"]
        output = fused(given["hidden"], **taken)
        assert output._fields == launcher.outputs(1)._fields
        fused.publish(given["hidden"])
        fused.consume(**taken)
        if plan.spec.moe is not None:
            top_k = constants.TOP_K
            weights = torch.zeros(m, top_k, dtype=DTYPES[constants.ROUTING_WEIGHTS[0]])
            index = torch.zeros(m, top_k, dtype=torch.int32)
            shared = given["hidden"] if True in constants.SHARED_EXPERT else None
            fused.finalize(given["hidden"], weights, index, shared, **taken)
        if constants.ENTRY:
            names = ("hidden", "fn", "scale", "base", "norm_weight")
            fused.entry(**{name: given[name] for name in names})
        if constants.EXIT is not None:
            left = {name: given[name] for name in ExitInput._fields}
            if constants.EXIT != "pre_mix":
                left["pre"] = None  # type: ignore[assignment]
            if constants.EXIT != "sigmoid":
                head = ("head_fn", "head_scale", "head_base")
                left |= dict.fromkeys(head)  # type: ignore[arg-type]
            fused.exit(given["hidden"], **left)
    fused.join()
    if fused._side is not None:
        fused._side.pending = None
    launched = set(log)
    mixes = {"mixes"} if constants.ENTRY else set()
    assert {f"boundary_{kernel_of(row)}" for row in rows} | mixes <= launched
    assert {f"boundary_{size}_{box.transport}" for size in room} <= launched
    assert box.transport == mailbox.LOCAL or fused.launches(1) == rows[0].launches
