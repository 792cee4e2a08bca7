"""How many clusters run at once: what the driver is asked, and what follows."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from mhcgen.build import write_files
from mhcgen.plan import make_plan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.runtime import loader, occupancy
from mhcgen.runtime.compiler import compile_package
from mhcgen.runtime.occupancy import clusters_at_once, room_for_calls
from mhcgen.spec_file import load_spec

ROWS = (
    SimpleNamespace(max_tokens=15, size=1, shared_bytes=1000, launches=1),
    SimpleNamespace(max_tokens=30, size=2, shared_bytes=2000, launches=1, blocks=2),
    SimpleNamespace(max_tokens=64, size=8, shared_bytes=8000, launches=2),
)
KERNELS: Any = SimpleNamespace(boundary_name=lambda size, by: f"boundary_{size}_{by}")


def constants() -> Any:
    target = SimpleNamespace(
        cluster_size=8, threads=256, launched_threads=288, token_groups=ROWS
    )
    return SimpleNamespace(TARGETS={"sm_90a": target})


def room(monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any]) -> Any:
    """The room by what is answered for each size of shared memory."""
    asked = []

    def ask(
        compiled: str, cluster: int, threads: int, shared_bytes: int, blocks: int
    ) -> int:
        asked.append((compiled, cluster, threads, shared_bytes, blocks))
        answer = answers[shared_bytes]
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    monkeypatch.setattr(occupancy, "clusters_at_once", ask)
    compiled = {"boundary_1_unicast": "one", "boundary_2_unicast": "two"}
    found = room_for_calls(constants(), KERNELS, compiled, "sm_90a", "unicast")
    return found, asked


def test_the_room_of_each_publishing_boundary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found, asked = room(monkeypatch, {1000: 15, 2000: 13})
    assert found == {1: 15, 2: 13}
    assert asked == [("one", 8, 288, 1000, 1), ("two", 8, 288, 2000, 2)]
    enough, few = caplog.records
    assert enough.levelname == "INFO"
    assert "boundary_1_unicast: 15 clusters of 8 blocks run at once" in enough.message
    assert few.levelname == "WARNING"
    assert few.message == (
        "boundary_2_unicast: 13 clusters of 8 blocks run at once, calls of up to 30 "
        "tokens need 15: one launch up to 26 tokens"
    )


def test_without_an_answer_calls_take_two_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {1000: AttributeError("no __cubin__"), 2000: 15}
    found, _ = room(monkeypatch, answers)
    assert found == {1: 0, 2: 15}
    assert "boundary_1_unicast: nobody says how many of its clusters" in caplog.text
    assert "(AttributeError: no __cubin__)" in caplog.text


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a driver that answers everything is asked."""
    log: list[tuple[Any, ...]] = []

    def answers(name: str, value: Any) -> None:
        def call(*arguments: Any) -> tuple[Any, ...]:
            log.append((name, *arguments))
            done = driver.CUresult.CUDA_SUCCESS
            return (done,) if value is None else (done, value)

        monkeypatch.setattr(driver, name, call)

    answers("cuLibraryLoadData", "library")
    answers("cuLibraryGetKernel", "kernel")
    answers("cuKernelGetFunction", "function")
    answers("cuFuncSetAttribute", None)
    answers("cuOccupancyMaxActiveClusters", 13)
    answers("cuLibraryUnload", None)
    return log


COMPILED = SimpleNamespace(kernel_info={"mhcgen_x": {}}, __cubin__=b"code")


def test_what_the_driver_is_asked(asked: list[tuple[Any, ...]]) -> None:
    assert clusters_at_once(COMPILED, 8, 288, 5000) == 13
    names = [name for name, *_ in asked]
    assert names == [
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuFuncSetAttribute",
        "cuOccupancyMaxActiveClusters",
        "cuLibraryUnload",
    ]
    assert asked[0][1] == b"code"
    assert asked[1][1:] == ("library", b"mhcgen_x")
    dynamic = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    assert asked[3][1:] == (
        "function",
        getattr(driver.CUfunction_attribute, dynamic),
        5000,
    )
    launch = asked[4][2]
    assert (launch.blockDimX, launch.blockDimY, launch.blockDimZ) == (288, 1, 1)
    assert (launch.gridDimX, launch.gridDimY, launch.gridDimZ) == (8, 1, 1)
    assert launch.sharedMemBytes == 5000
    (attribute,) = launch.attrs
    assert launch.numAttrs == 1
    assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    cluster = attribute.value.clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (8, 1, 1)


def test_large_clusters_must_be_allowed(asked: list[tuple[Any, ...]]) -> None:
    clusters_at_once(COMPILED, 16, 128, 5000)
    attributes = [call[2:] for call in asked if call[0] == "cuFuncSetAttribute"]
    name = "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"
    assert (getattr(driver.CUfunction_attribute, name), 1) in attributes


def test_two_blocks_share_all_of_the_memory(asked: list[tuple[Any, ...]]) -> None:
    clusters_at_once(COMPILED, 8, 256, 5000, 2)
    attributes = [call[2:] for call in asked if call[0] == "cuFuncSetAttribute"]
    name = "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"
    assert (getattr(driver.CUfunction_attribute, name), 100) in attributes


def test_a_refused_question_is_an_error(
    asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    monkeypatch.setattr(driver, "cuOccupancyMaxActiveClusters", lambda *_: refusal)
    with pytest.raises(RuntimeError, match="answers CUDA_ERROR_INVALID_VALUE"):
        clusters_at_once(COMPILED, 8, 256, 5000)
    assert asked[-1] == ("cuLibraryUnload", "library")


def test_publishing_boundaries_keep_their_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler hands it over, and leaves nothing in the current folder."""
    source = load_spec(resource("specs") / "glm53.yaml").spec
    document = source.model_dump()
    document["name"] = "kept"
    document["model"]["hidden"] = 512
    document["moe"] = None
    document["targets"] = {"sm_90a": {"cluster_size": 2}}
    document["capacity"]["max_tokens"] = 2
    folder = tmp_path / "kept"
    write_files(folder, render(make_plan(type(source).model_validate(document))))
    name = loader.import_package(folder)
    kernels = importlib.import_module(f"{name}.kernels")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    compiled = compile_package(kernels, "sm_90a", "unicast")
    assert list(Path().iterdir()) == []
    publishing = compiled["boundary_1_unicast"]
    symbol, beside = publishing.kernel_info
    assert symbol.startswith("mhcgen_kept_boundary_1_unicast_kernel")
    assert beside.startswith("mhcgen_kept_boundary_1_unicast_mixes_kernel")
    assert publishing.__cubin__.startswith(b"\x7fELF")
    assert symbol.encode() in publishing.__cubin__
    assert not compiled["boundary_1"].__cubin__
    rest = compile_package(kernels, "sm_90a", "unicast", publishing=False)
    assert rest.keys() == compiled.keys() - {"boundary_1_unicast"}
    if torch.cuda.is_available():
        assert clusters_at_once(publishing, 2, 128, 5000) > 0
