"""Loading a generated package onto a device."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .compiler import check_dsl, compile_package
from .host import FusedBoundary, warm_up
from .mailbox import agree, emulated, rendezvous

CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def load(
    path: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
    transport: str = "auto",
) -> FusedBoundary:
    """Loads the package in a folder: collective over the group.

    Args:
        path: The package's folder.
        group: The TP ranks in rank order; None is the default group.
        device: This rank's GPU; None is the current one.
        transport: ``auto``, ``multicast`` or ``unicast``; auto takes multicast where
            every rank has a multicast mapping.

    Raises:
        FileNotFoundError: The folder holds no package.
        ValueError: The group's size or the device's architecture is not what the
            package was built for.
        RuntimeError: On every rank, if loading failed on any.
    """
    return load_package(import_package(path), group, device, transport)


def load_emulated(
    path: str | Path, *, device: torch.device | str | int | None = None
) -> list[FusedBoundary]:
    """Loads all ranks of a package onto one device: see ``emulate_package``."""
    return emulate_package(import_package(path), device)


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
    name: str,
    group: dist.ProcessGroup | None,
    device: torch.device | str | int | None,
    transport: str,
) -> FusedBoundary:
    """Loads an importable package; see ``load``."""
    constants, kernels = package_modules(name)
    check_dsl()
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized: call init_process_group first, "
                "or pass a group"
            )
        group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size(group)
    if size != constants.TP:
        raise ValueError(
            f"the group has {size} ranks; {name} is built for {constants.TP}: build it "
            f"with parallel.tp {size}"
        )
    local: dict[str, Any] = {}

    def prepare() -> tuple[str, str]:
        local["device"] = resolve_device(device)
        local["arch"] = device_arch(constants, local["device"])
        return package_identity(constants), transport

    votes = agree(group, f"loading {name}", prepare)
    if len(set(votes)) > 1:
        raise ValueError(
            f"the ranks do not load the same package and transport: {votes}"
        )
    target, arch = local["device"], local["arch"]
    with torch.cuda.device(target):
        mailbox = rendezvous(constants, group, target, transport)

        def compile_all() -> None:
            local["compiled"] = compile_package(kernels, arch, mailbox.transport)

        agree(group, f"compilation of {name}", compile_all)
        boundary = FusedBoundary(constants, kernels, local["compiled"], arch, mailbox)
        warm_up([boundary])
        dist.barrier(group)
    return boundary


def emulate_package(
    name: str, device: torch.device | str | int | None
) -> list[FusedBoundary]:
    """Loads all ranks of a package onto one device, each with its own mailbox.

    Kernels of one rank wait for the publishes of the others, so launch the publishes of
    all ranks before the boundary of any: ``publish`` on each, then ``consume`` on each.
    For tests and measurements on one GPU.
    """
    constants, kernels = package_modules(name)
    target = resolve_device(device)
    arch = device_arch(constants, target)
    with torch.cuda.device(target):
        compiled = compile_package(kernels, arch, "unicast")
        ranks = [
            FusedBoundary(constants, kernels, compiled, arch, mailbox)
            for mailbox in emulated(constants, target)
        ]
        warm_up(ranks)
    return ranks


def package_modules(name: str) -> tuple[ModuleType, ModuleType]:
    """The ``constants`` and ``kernels`` modules of an imported package."""
    return (
        importlib.import_module(f"{name}.constants"),
        importlib.import_module(f"{name}.kernels"),
    )


def package_identity(constants: ModuleType) -> str:
    """What ranks must have in common: every constant of the package."""
    return repr(
        sorted((key, value) for key, value in vars(constants).items() if key.isupper())
    )


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """A CUDA device with its index; None is the current one.

    Raises:
        ValueError: It is no CUDA device.
        RuntimeError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available: the kernels run on GPUs only")
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    resolved = torch.device(device)
    if resolved.type != "cuda":
        raise ValueError(f"device is {device}; it must be a CUDA device")
    if resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
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
