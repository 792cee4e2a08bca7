"""Loading a generated package onto a device."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .cache import releases, sources
from .compiler import check_dsl, compile_package
from .host import FusedBoundary
from .launcher import Launcher
from .mailbox import LOCAL, Mailbox, agree, emulated, local, loopback, rendezvous
from .occupancy import Kernel, room_for_calls
from .warm_up import warm_up_alone, warm_up_together

CAPABILITIES = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}


def load(
    path: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    transport: str = "auto",
) -> FusedBoundary:
    """Loads the package in a folder: collective over the group.

    Processes outside of the group take no part. Ranks agree by way of their CPUs, and
    no group is made for it. A package for one rank needs no group, and loads without
    the other processes.

    Args:
        path: The package's folder.
        group: The TP ranks in rank order; None is the default group.
        device: This rank's GPU; None is the current one.
        transport: ``auto``, ``multicast`` or ``unicast``; auto takes multicast where
            every rank has a multicast mapping.

    Raises:
        ValueError: The ranks load different packages, or compile them by different
            releases.
        RuntimeError: On every rank, if loading failed on any; it names each failure.
    """
    return load_package(Path(path), group, device, transport)


def load_emulated(
    path: str | Path, *, device: torch.device | str | int | None = None
) -> list[FusedBoundary]:
    """Loads all ranks of a package onto one device: see ``emulate_package``."""
    return emulate_package(Path(path), device)


def import_package(path: str | Path) -> str:
    """Imports the package in a folder under its own name, which it returns."""
    folder = Path(path).resolve()
    if not (folder / "kernels.py").is_file():
        raise FileNotFoundError(
            f"{folder} holds no generated package: pass the folder that `mhcgen build` "
            "wrote"
        )
    known = sys.modules.get(folder.name)
    if known is None:
        sys.path.insert(0, str(folder.parent))
        try:
            known = importlib.import_module(folder.name)
        finally:
            sys.path.remove(str(folder.parent))
    if Path(known.__file__ or "").resolve().parent != folder:
        raise ImportError(
            f"a module named {folder.name} is already imported from {known.__file__}"
        )
    return folder.name


def load_package(
    package: str | Path,
    group: dist.ProcessGroup | None,
    device: torch.device | str | int | None,
    transport: str,
) -> FusedBoundary:
    """Loads a package, an importable name or a folder; see ``load``.

    Everything that can fail on one rank is voted on, so that no rank waits for another
    that gave up.
    """
    if is_for_one_rank(package):
        return load_alone(package, device, transport)
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: call init_process_group first, "
                "or pass a group"
            )
        group = dist.group.WORLD
    assert group is not None
    plan: list[Loading] = []

    def prepare() -> tuple[str, ...]:
        loading = Loading.of(package, device)
        constants = loading.constants
        size = dist.get_world_size(group)
        if size != constants.TP:
            raise ValueError(
                f"the group has {size} ranks; {loading.name} is built for "
                f"{constants.TP}: build it with parallel.tp {size}"
            )
        plan.append(loading)
        code = sources(loading.kernels)
        identity = package_identity(constants)
        return identity, code, *releases(), loading.arch, transport

    votes = agree(group, f"loading {package}", prepare)
    if len(set(votes)) > 1:
        raise ValueError(
            "the ranks do not load the same package, with the same releases, for the "
            f"same architecture and transport: {votes}"
        )
    loading = plan[0]
    with torch.cuda.device(loading.device):
        mailbox = rendezvous(loading.constants, group, loading.device, transport)
        compiled: dict[str, Any] = {}
        launchers: list[Launcher] = []

        def compile_all() -> dict[Kernel, int]:
            compiled.update(loading.compile(mailbox.transport))
            return loading.room(compiled, mailbox.transport)

        def launch_alone() -> None:
            launchers.append(loading.compiled_launcher(compiled, mailbox, room))
            if mailbox.transport == "unicast":
                # Multicast stores need an address that only the ranks together have.
                box = loopback(loading.constants, loading.device)
                warm_up_alone(launchers[0].with_mailbox(box))

        rooms = agree(group, f"compilation of {loading.name}", compile_all)
        # A rank that takes one launch gets on with one that takes two; with the same
        # number, all take the same time.
        room = {size: min(room[size] for room in rooms) for size in rooms[0]}
        agree(group, f"first launches of {loading.name}", launch_alone)
        agree(group, f"warm-up of {loading.name}", lambda: warm_up_together(launchers))
    return FusedBoundary(launchers[0])


def is_for_one_rank(package: str | Path) -> bool:
    """Whether a package is for TP 1; not where it fails, which is refused later."""
    try:
        name = import_package(package) if isinstance(package, Path) else package
        tp: int = importlib.import_module(f"{name}.constants").TP
    except (ImportError, OSError, AttributeError, SyntaxError):
        return False
    return tp == 1


def load_alone(
    package: str | Path, device: torch.device | str | int | None, transport: str
) -> FusedBoundary:
    """Loads a package for one rank: no other process takes part."""
    if transport != "auto":
        raise ValueError(
            f"transport is {transport!r}; the package is for one rank, which sends "
            "nothing: it must be 'auto'"
        )
    loading = Loading.of(package, device)
    with torch.cuda.device(loading.device):
        launcher = loading.launcher(local(loading.device))
        warm_up_together([launcher])
    return FusedBoundary(launcher)


def emulate_package(
    package: str | Path, device: torch.device | str | int | None
) -> list[FusedBoundary]:
    """Loads all ranks of a package onto one device, each with its own mailbox.

    Kernels of one rank wait for the publishes of the others, so launch the publishes of
    all ranks before the boundary of any: ``publish`` on each, then ``consume`` on each.
    Boundaries that publish themselves are left out: the ranks' would have to share the
    device, and wait for each other. For tests and measurements on one GPU.
    """
    loading = Loading.of(package, device)
    with torch.cuda.device(loading.device):
        boxes = emulated(loading.constants, loading.device)
        compiled = loading.compile(boxes[0].transport, publishing=False)
        first = loading.compiled_launcher(compiled, boxes[0], {})
        launchers = [first, *(first.with_mailbox(box) for box in boxes[1:])]
        warm_up_together(launchers)
    return [FusedBoundary(launcher) for launcher in launchers]


def load_loopback(
    package: str | Path, device: torch.device | str | int | None = None
) -> FusedBoundary:
    """Loads one rank that plays all: its rows are those of every rank.

    Calls sum ``x`` over the ranks as if each had passed it, with the traffic of all of
    them in this device's memory, in as many launches as in service. For tests and
    measurements on one GPU.
    """
    loading = Loading.of(package, device)
    with torch.cuda.device(loading.device):
        if loading.constants.TP == 1:
            box = local(loading.device)
        else:
            box = loopback(loading.constants, loading.device)
        launcher = loading.launcher(box)
        warm_up_together([launcher])
    return FusedBoundary(launcher)


@dataclass(frozen=True)
class Loading:
    """A package that is about to be loaded onto a device.

    Attributes:
        name: Its importable name.
        device: The GPU.
        arch: The GPU's architecture, which the package is built for.
        constants: Its ``constants`` module.
        kernels: Its ``kernels`` module.
    """

    name: str
    device: torch.device
    arch: str
    constants: ModuleType
    kernels: ModuleType

    @classmethod
    def of(
        cls, package: str | Path, device: torch.device | str | int | None
    ) -> Loading:
        """Imports a package and makes sure that the device can run it.

        Args:
            package: An importable name, or a folder.
            device: A GPU; None is the current one.
        """
        check_dsl()
        name = import_package(package) if isinstance(package, Path) else package
        resolved = resolve_device(device)
        constants = importlib.import_module(f"{name}.constants")
        arch = device_arch(constants, resolved)
        kernels = importlib.import_module(f"{name}.kernels")
        return cls(name, resolved, arch, constants, kernels)

    def launcher(self, mailbox: Mailbox) -> Launcher:
        """Compiles the kernels for a mailbox that no other process has a part in."""
        compiled = self.compile(mailbox.transport)
        room = self.room(compiled, mailbox.transport)
        return self.compiled_launcher(compiled, mailbox, room)

    def compile(self, transport: str, publishing: bool = True) -> dict[str, Any]:
        """Compiles the kernels of a transport; see ``compile_package``."""
        return compile_package(self.kernels, self.arch, transport, publishing)

    def room(self, compiled: dict[str, Any], transport: str) -> dict[Kernel, int]:
        """Clusters of whole calls that run at once; see ``room_for_calls``."""
        if transport == LOCAL:
            return {}
        return room_for_calls(
            self.constants, self.kernels, compiled, self.arch, transport
        )

    def compiled_launcher(
        self, compiled: dict[str, Any], mailbox: Mailbox, room: dict[Kernel, int]
    ) -> Launcher:
        """The launcher of compiled kernels; see its constructor."""
        return Launcher(
            self.constants, self.kernels, compiled, self.arch, mailbox, room
        )


def package_identity(constants: ModuleType) -> str:
    """Every constant of a package: what its ranks must have in common, beside code."""
    return repr(
        sorted((key, value) for key, value in vars(constants).items() if key.isupper())
    )


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A CUDA device with its index; None is the current one.

    Raises:
        ValueError: It is no CUDA device, or this machine has no such one.
        RuntimeError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available: the kernels run on GPUs only")
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    last = torch.cuda.device_count() - 1
    refusal = (
        f"device is {device!r}; it must be a CUDA device, 'cuda:0' to 'cuda:{last}', "
        "or its index, or None for the current one"
    )
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(refusal) from error
    if resolved.type != "cuda":
        raise ValueError(refusal)
    if resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    # What is given: torch keeps eight bits of it.
    if not 0 <= (device if isinstance(device, int) else resolved.index) <= last:
        raise ValueError(refusal)
    return resolved


def device_arch(constants: ModuleType, device: torch.device) -> str:
    """The architecture of a device, which the package must be built for.

    Raises:
        ValueError: The package has no kernels for the device.
    """
    capability = torch.cuda.get_device_capability(device)
    arch = CAPABILITIES.get(capability)
    if arch is None or arch not in constants.TARGETS:
        known = ", ".join(constants.TARGETS)
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; this package is built for {known}: add "
            "the architecture to the targets of its spec"
        )
    return arch
