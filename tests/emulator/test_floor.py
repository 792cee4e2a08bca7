"""The floor kernel of the benchmark, executed for all ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mhcgen import reference
from mhcgen.bench import floor
from mhcgen.bench.contenders import UnavailableError, floor_of
from mhcgen.build import write_files
from mhcgen.emulator.machine import Geometry, Program
from mhcgen.emulator.package import (
    EmulatedPackage,
    EmulatedRanks,
    host_code,
    marshalled,
)
from mhcgen.emulator.ptx import read_kernel
from mhcgen.plan import Plan, make_plan
from mhcgen.render import render
from mhcgen.runtime.compiler import compile_kernel
from mhcgen.runtime.loader import import_package
from mhcgen.spec import Spec
from mhcgen.verify.on_cpu import as_numpy, as_torch

ARCH = "sm_90a"


@pytest.fixture(scope="module", params=["unicast", "multicast"])
def floored(
    request: Any, narrow_plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EmulatedPackage, str]:
    """A package of the floor kernel alone, and its transport."""
    folder = tmp_path_factory.mktemp("floor") / f"narrow_{request.param}"
    folder.mkdir()
    write_files(folder, render(narrow_plan, formatting=False))
    name = import_package(folder)
    kernel = floor.Floor(name, request.param == "multicast")
    dump = tmp_path_factory.mktemp("ptx")
    compile_kernel(kernel, "floor", ARCH, f"--keep-ptx --dump-dir {dump}")
    (ptx,) = dump.glob("*.ptx")
    code = host_code(Path(floor.__file__).read_text())
    package = EmulatedPackage(
        narrow_plan, ARCH, {"floor": Program.of(read_kernel(ptx))}, {"floor": code}
    )
    return package, request.param


def test_rows_that_leave_threads_idle_have_none(
    narrow_plan: Plan, tmp_path: Path
) -> None:
    """It would go on beyond them."""
    data = narrow_plan.spec.model_dump(mode="json")
    data |= {"name": "narrowest", "targets": {ARCH: {}}}
    data["model"]["hidden"] = 72
    folder = tmp_path / "narrowest"
    folder.mkdir()
    write_files(folder, render(make_plan(Spec.model_validate(data)), formatting=False))
    mailbox = SimpleNamespace(transport="unicast")
    package: Any = SimpleNamespace(
        module=import_package(folder), launcher=SimpleNamespace(mailbox=mailbox)
    )
    inputs: Any = SimpleNamespace(m=1)
    with pytest.raises(UnavailableError, match="only for rows that all threads have"):
        floor_of(package)(inputs)


@pytest.mark.parametrize("seed", range(3))
def test_it_sums_and_leaves_the_mailbox_armed(
    floored: tuple[EmulatedPackage, str], seed: int
) -> None:
    """Calls of changing M in flight together, under the adversarial scheduler."""
    package, transport = floored
    ranks, plan = EmulatedRanks(package, transport, seed), package.plan
    program, code = package.programs["floor"], package.host["floor"]
    sums = []
    for call, m in enumerate((1, 3, 8, 2)):
        parts = reference.random_inputs(m, plan.hidden, plan.hc, plan.tp, call).parts
        x = ranks.tensor("x", *map(as_numpy, parts))
        y = ranks.tensor("y", np.zeros((m, plan.hidden), np.uint16))
        ranks._arm(m)
        arguments = {
            **ranks._take_published(),
            "x": x,
            "mailboxes": ranks._mailboxes,
            "y": y,
        }
        geometry = Geometry(
            (plan.publish_blocks, m, 1), plan.publish_threads, (1, 1, 1), 0
        )
        requests = [
            (stream, marshalled(program, code, {**arguments, "rank": rank}, rank))
            for rank, stream in enumerate(ranks._main)
        ]
        ranks.world.launch(program, geometry, requests, code.dependent)
        sums.append((y, reference.all_reduce(parts)))
    ranks.run()
    for y, expected in sums:
        for rank in range(plan.tp):
            assert reference.bits_equal(as_torch(y.read(rank)), expected)
    assert ranks.idle_problems() == []
    assert ranks.generation(0) == 4 % 3
