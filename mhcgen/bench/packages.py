"""The packages of a run: found or rendered, and loaded onto the GPUs."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from mhcgen.bench.machine import Machine
from mhcgen.bench.result import Package
from mhcgen.compilation import require_manifest
from mhcgen.errors import MhcgenError, PlanError
from mhcgen.runtime import loader
from mhcgen.runtime.host import FusedBoundary
from mhcgen.runtime.launcher import Launcher


@dataclass(frozen=True)
class Loaded:
    """A package on this rank's GPU.

    Attributes:
        label: What its columns are called after; empty for the first package.
        module: Its importable name.
        boundary: Its host object.
        identity: Name, hashes, shape and transport, for the result.
    """

    label: str
    module: str
    boundary: FusedBoundary
    identity: Package

    @property
    def launcher(self) -> Launcher:
        """Its kernels and its mailbox."""
        return self.boundary._launcher

    @property
    def constants(self) -> ModuleType:
        """Its shape."""
        return self.launcher.constants

    def column(self, name: str) -> str:
        """A column's name, with the label where there is one."""
        return f"{self.label} {name}".lstrip()


def package_folder(source: Path, temporary: Path) -> Path:
    """The folder of a package, rendered there from a spec if it is none yet.

    Raises:
        MhcgenError: The source is neither a package nor a legal spec.
    """
    if not os.path.isdir(source):
        # Only here: whoever benchmarks a package needs neither pydantic nor jinja.
        from mhcgen.build import write_files
        from mhcgen.plan import make_plan
        from mhcgen.render import render
        from mhcgen.spec_file import load_spec

        spec = load_spec(source)
        try:
            plan = make_plan(spec.spec)
        except PlanError as error:
            raise error.in_file(spec) from error
        folder = temporary / plan.name
        write_files(folder, render(plan, formatting=False))
        return folder
    require_manifest(source)
    return source


def distinct(folders: list[Path], temporary: Path) -> list[Path]:
    """The folders, with a copy of each whose name another one has already.

    A package is imported under its folder's name.
    """
    names: set[str] = set()
    result: list[Path] = []
    for folder in folders:
        name = folder.resolve().name
        number = 2
        while name in names:
            name = f"{folder.resolve().name}_{number}"
            number += 1
        names.add(name)
        if name != folder.resolve().name:
            copy = temporary / f"copy_{len(result)}" / name
            shutil.copytree(folder, copy)
            folder = copy
        result.append(folder)
    return result


def load(machine: Machine, folder: Path, label: str) -> Loaded:
    """Loads a package on all ranks; one GPU plays all of them where it is alone.

    Raises:
        MhcgenError: The package is for another number of ranks or another device.
    """
    try:
        loading = loader.Loading.of(folder, machine.device)
    except (ValueError, ImportError, SyntaxError, AttributeError, OSError) as error:
        raise MhcgenError(f"{folder}: {error}") from error
    tp = loading.constants.TP
    if machine.ranks == 1:
        boundary = loader.load_loopback(folder, machine.device)
    elif machine.ranks == tp:
        boundary = loader.load(folder, device=machine.device)
    else:
        raise MhcgenError(
            f"{folder} is for {tp} ranks, and there are {machine.ranks} processes: "
            f"start torch.distributed.run with --nproc-per-node {tp}, or one process "
            "alone, which plays all ranks"
        )
    torch.cuda.synchronize()
    manifest = require_manifest(folder)
    identity = Package(
        name=manifest.name,
        spec_sha256=manifest.spec_sha256,
        templates_sha256=manifest.templates_sha256,
        hidden=loading.constants.HIDDEN,
        hc=loading.constants.HC,
        tp=tp,
        arch=loading.arch,
        transport=boundary.transport,
    )
    return Loaded(label, loading.name, boundary, identity)
