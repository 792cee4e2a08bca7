"""The parts of the runtime that need no GPU."""

import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mhcgen.build import write_files
from mhcgen.manifest import DSL_RANGE
from mhcgen.plan import Plan, make_plan
from mhcgen.render import render
from mhcgen.resources import resource
from mhcgen.spec_file import load_spec

torch = pytest.importorskip("torch")
mailbox = importlib.import_module("mhcgen.runtime.mailbox")
loader = importlib.import_module("mhcgen.runtime.loader")
compiler = importlib.import_module("mhcgen.runtime.compiler")
BOTH = ("multicast", "unicast")


@pytest.mark.parametrize(
    ("requested", "transports", "mapped", "chosen"),
    [
        ("auto", BOTH, True, "multicast"),
        ("auto", BOTH, False, "unicast"),
        ("auto", ("unicast",), True, "unicast"),
        ("auto", ("multicast",), True, "multicast"),
        ("unicast", BOTH, True, "unicast"),
        ("multicast", BOTH, True, "multicast"),
    ],
)
def test_transport(
    requested: str, transports: tuple[str, ...], mapped: bool, chosen: str
) -> None:
    transport, reason = mailbox.choose_transport(requested, transports, mapped)
    assert transport == chosen
    assert reason


@pytest.mark.parametrize(
    ("requested", "transports", "mapped", "message"),
    [
        ("nvls", BOTH, True, "transport is 'nvls'; it must be 'auto'"),
        ("multicast", BOTH, False, "no multicast mapping on every rank"),
        ("multicast", ("unicast",), True, "kernels for unicast only"),
        ("unicast", ("multicast",), True, "kernels for multicast only"),
        ("auto", ("multicast",), False, "add unicast to parallel.transports"),
    ],
)
def test_transport_that_cannot_be(
    requested: str, transports: tuple[str, ...], mapped: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mailbox.choose_transport(requested, transports, mapped)


def test_arming_fills_every_element_with_the_sentinel() -> None:
    buffer = torch.randn(3, 2, 4, 16).bfloat16()
    mailbox.arm(buffer)
    assert bool((buffer == 0).all())
    assert bool(torch.signbit(buffer).all())


@pytest.mark.parametrize(
    ("installed", "fits"), [("4.6.2", False), ("4.6.3", True), ("4.10.0", True)]
)
def test_old_compilers_are_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool
) -> None:
    monkeypatch.setattr(compiler.metadata, "version", lambda name: installed)
    if fits:
        compiler.check_dsl()
    else:
        with pytest.raises(ImportError, match=r"4\.6\.2 is too old .* install 4\.6\.3"):
            compiler.check_dsl()


def test_the_oldest_compiler_is_that_of_the_manifest() -> None:
    oldest = ".".join(map(str, compiler.OLDEST_DSL))
    assert DSL_RANGE.split(",")[0] == f">={oldest}"


def test_a_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no generated package"):
        loader.load_emulated(tmp_path)


def test_without_a_gpu_the_error_says_so(tmp_path: Path, glm53_plan: Plan) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    (tmp_path / "glm53").mkdir()
    write_files(tmp_path / "glm53", render(glm53_plan))
    with pytest.raises(RuntimeError, match="no CUDA device is available"):
        loader.load_emulated(tmp_path / "glm53")
    with pytest.raises(RuntimeError, match="init_process_group first"):
        loader.load(tmp_path / "glm53")


def test_a_name_that_another_module_has(tmp_path: Path, glm53_plan: Plan) -> None:
    """A package never silently becomes another one of the same name."""
    for parent in ("one", "two"):
        (tmp_path / parent / "twin").mkdir(parents=True)
        write_files(tmp_path / parent / "twin", render(glm53_plan))
    assert loader.import_package(tmp_path / "one" / "twin") == "twin"
    assert loader.import_package(tmp_path / "one" / "twin") == "twin"
    with pytest.raises(ImportError, match="already imported from"):
        loader.import_package(tmp_path / "two" / "twin")


def run_ranks(tmp_path: Path, main: str, *arguments: str) -> str:
    """What processes that run ``main(rank, file of a store, *arguments)`` print."""
    script = tmp_path / "ranks.py"
    start = """
        if __name__ == "__main__":
            count, *arguments = sys.argv[1:]
            mp.spawn(main, tuple(arguments), nprocs=int(count))
    """
    script.write_text(IMPORTS + main + textwrap.dedent(start))
    count = re.findall(r"^RANKS = (\d)$", main, re.MULTILINE)[0]
    run = subprocess.run(
        [sys.executable, str(script), count, str(tmp_path / "store"), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout


IMPORTS = """
import datetime
import os
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _symmetric_memory
from mhcgen.runtime.mailbox import agree, rendezvous


def start(rank, file):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )


def print_line(*words):
    # In one piece, so that the processes' lines do not mix.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

AGREE = """
RANKS = 4


def main(process, file):
    start(process, file)
    # Ranks are in more groups than others are, and the last process in none of theirs.
    for one in range(2):
        dist.new_group([one])
    for backend in ("gloo", "cuda:gloo"):
        group = dist.new_group([0, 1, 2], backend=backend)
        if process < 3:
            vote(backend, dist.get_rank(group), group)
    dist.destroy_process_group()


def vote(backend, rank, group):
    def say(*words):
        print_line(backend, rank, *words)
    say(agree(group, "counting", lambda: rank * 10))
    def fail():
        if rank == 1:
            raise MemoryError("no room")
        return rank
    try:
        agree(group, "allocation", fail)
    except RuntimeError as error:
        say(str(error).replace("\\n", " | "), type(error.__cause__))
    # The group still works: nobody was left waiting.
    say(agree(group, "after", lambda: "ok"))
"""


def test_a_failure_on_one_rank_reaches_all(tmp_path: Path) -> None:
    """Also where the group has GPUs only, of which there are none here."""
    lines = run_ranks(tmp_path, AGREE).splitlines()
    for backend in ("gloo", "cuda:gloo"):
        for rank in range(3):
            who = f"{backend} {rank} "
            mine = [line.removeprefix(who) for line in lines if line.startswith(who)]
            cause = "MemoryError" if rank == 1 else "NoneType"
            assert mine == [
                "[0, 10, 20]",
                f"allocation failed | rank 1: MemoryError: no room <class '{cause}'>",
                "['ok', 'ok', 'ok']",
            ]


LOAD = """
from mhcgen.runtime import cache, load

RANKS = 2


def main(rank, file, *folders):
    start(rank, file)
    folder = Path(folders[rank])
    attempt(rank, "missing", folder / ("missing" * rank), None)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_capability = lambda device: (9, 0)
    attempt(rank, "device", folder, f"cuda:{2 * rank}")
    attempt(rank, "type", folder, 0.5 if rank else "cuda:0")
    version = cache.metadata.version
    if rank:
        cache.metadata.version = lambda name: version(name) + ".other"
    attempt(rank, "release", folder, "cuda:0")
    cache.metadata.version = version
    if rank:
        with (folder / "mixes.py").open("a") as file:
            file.write("# changed")
    attempt(rank, "sources", folder, "cuda:0")
    dist.destroy_process_group()


def attempt(rank, fault, folder, device):
    try:
        load(folder, device=device)
    except (RuntimeError, ValueError) as error:
        line = str(error).replace("\\n", " | ")
        print_line(rank, fault, type(error).__name__, line)
"""


def test_loading_fails_on_all_ranks_at_once(tmp_path: Path) -> None:
    """Whatever is wrong on one of them, it does not leave the other waiting."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    plan = make_plan(load_spec(resource("specs") / "glm53_tp2.yaml").spec)
    folders = [tmp_path / str(rank) / "glm53_tp2" for rank in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
        write_files(folder, render(plan, formatting=False))
    lines = run_ranks(tmp_path, LOAD, *map(str, folders)).splitlines()
    different = "ValueError the ranks do not load the same package"
    for rank in range(2):
        missing, device, kind, release, sources = [
            line.removeprefix(f"{rank} ")
            for line in lines
            if line.startswith(f"{rank} ")
        ]
        assert missing.startswith("missing RuntimeError loading")
        assert "rank 0: RuntimeError: no CUDA device is available" in missing
        assert "rank 1: FileNotFoundError" in missing
        assert device.startswith("device RuntimeError loading")
        assert device.endswith(
            "glm53_tp2 failed | rank 1: ValueError: device is 'cuda:2'; it must be a "
            "CUDA device, 'cuda:0' to 'cuda:1', or its index, or None for the current "
            "one"
        )
        assert "rank 1: ValueError: device is 0.5; it must be" in kind
        assert release.startswith(f"release {different}, ")
        assert sources.startswith(f"sources {different}, ")


@pytest.mark.parametrize(
    "device",
    ["cuda:2", "cuda:9", "cpu", "cuda:-1", "gpu", 2, -1, 300, 2**70, 1.5, True],
)
def test_devices_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: object
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    allowed = r"a CUDA device, 'cuda:0' to 'cuda:1', or its index, or None"
    message = rf"^device is {re.escape(repr(device))}; it must be {allowed}"
    with pytest.raises(ValueError, match=message):
        loader.resolve_device(device)


def test_devices_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    second = torch.device("cuda", 1)
    for device in (None, "cuda", "cuda:1", second):
        assert loader.resolve_device(device) == second
    assert loader.resolve_device("cuda:0") == torch.device("cuda", 0)


MEET = """
RANKS = 2
SHAPE = {"GENERATIONS": 3, "TP": 2, "CAPACITY": 2, "HIDDEN": 64}


def main(rank, file):
    start(rank, file)
    torch.cuda.synchronize = lambda device: None
    _symmetric_memory.empty = torch.empty

    def meet(buffer, group):
        dist.barrier(group)
        if rank == 1:
            raise OSError("no handle")
        return SimpleNamespace(
            multicast_ptr=0, get_remote_tensor=lambda *wanted: buffer
        )

    _symmetric_memory.rendezvous = meet
    constants = SimpleNamespace(**SHAPE, ACTIVATION="bf16", TRANSPORTS=("unicast",))
    try:
        rendezvous(constants, dist.group.WORLD, torch.device("cpu"), "auto")
    except Exception as error:
        print_line(rank, type(error).__name__, str(error).replace("\\n", " | "))
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_rendezvous_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    errors = run_ranks(tmp_path, MEET).splitlines()
    assert sorted(errors) == [
        f"{rank} RuntimeError mapping of the peers' mailboxes failed | "
        "rank 1: OSError: no handle"
        for rank in range(2)
    ]


def test_the_runtime_of_a_package_is_this_one(glm53_plan: Plan) -> None:
    """Below its header, each runtime file is emitted as it is."""
    files = render(glm53_plan)
    source = Path(mailbox.__file__).parent
    for path in sorted(source.glob("*.py")):
        name = path.stem
        text = next(t for p, t in files.items() if str(p) == f"runtime/{name}.py")
        assert text.endswith(source.joinpath(f"{name}.py").read_text())
        assert re.match(r"# SPDX-License-Identifier: Apache-2.0\n", text)
