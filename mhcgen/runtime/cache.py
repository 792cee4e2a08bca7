"""Compiled kernels on disk, for processes that load the same package again.

A kernel takes about a second to compile, and milliseconds to read back. An entry is
found by all that its code depends on, so none is ever out of date; one that was damaged
is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

from cutlass.cute.runtime import load_module

FOLDER = "MHCGEN_CACHE"  # the environment's name of the folder; there is none without
CODE, CUBIN, ENTRY = "code.o", "code.cubin", "entry.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedKernel:
    """A kernel that an earlier process compiled.

    It has what is used of the compiler's own.

    Attributes:
        module: What was read; the code is unloaded when it goes.
        function: The TVM-FFI callable.
        kernel_info: The symbols of its launches.
        __cubin__: Its machine code, where that was kept.
    """

    module: Any
    function: Any
    kernel_info: tuple[str, ...]
    __cubin__: bytes | None

    def __tvm_ffi_object__(self) -> Any:
        """The callable itself."""
        return self.function


class Cache:
    """The compiled kernels of one package for one architecture.

    Attributes:
        folder: Where they are, one folder a kernel.
    """

    def __init__(self, folder: Path, kernels: ModuleType, arch: str) -> None:
        """Takes the folder of all caches, and the package's ``kernels`` module."""
        self.folder = folder / f"{arch}-{identity(kernels)}"
        self._symbol = kernels.symbol

    @classmethod
    def of_environment(cls, kernels: ModuleType, arch: str) -> Cache | None:
        """The cache that the environment names, if it names one."""
        folder = os.environ.get(FOLDER)
        return cls(Path(folder), kernels, arch) if folder else None

    def find(self, name: str) -> CachedKernel | None:
        """A kernel that was kept; None if it was not, or is damaged."""
        folder = self.folder / name
        if not os.path.lexists(folder):
            return None
        try:
            entry = json.loads((folder / ENTRY).read_text("utf-8"))
            contents = {file: (folder / file).read_bytes() for file in entry["sha256"]}
            for file, digest in entry["sha256"].items():
                if hashlib.sha256(contents[file]).hexdigest() != digest:
                    raise ValueError(f"{file} has changed")
            module = load_module(str(folder / CODE), enable_tvm_ffi=True)
            function = getattr(module, self._symbol(name))
            symbols, cubin = tuple(entry["symbols"]), contents.get(CUBIN)
            return CachedKernel(module, function, symbols, cubin)
        except Exception as error:
            # Entries appear whole: one that lacks a file is damaged as well.
            logger.warning("%s is compiled again: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None

    def keep(self, name: str, compiled: Any) -> None:
        """Keeps a kernel that the compiler gave; if that fails, it is logged."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            made = Path(mkdtemp(prefix=f".{name}-", dir=self.folder))
        except OSError as error:
            logger.warning("%s=%s keeps nothing: %s", FOLDER, self.folder.parent, error)
            return
        try:
            compiled.export_to_c(
                object_file_path=str(made / CODE), function_name=self._symbol(name)
            )
            if compiled.__cubin__:
                (made / CUBIN).write_bytes(compiled.__cubin__)
            digests = {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in made.iterdir()
            }
            entry = {"symbols": list(compiled.kernel_info), "sha256": digests}
            (made / ENTRY).write_text(json.dumps(entry), "utf-8")
            made.chmod(0o755)
            made.rename(self.folder / name)
        except Exception as error:
            # The kernel is there, whatever its exporter does.
            if not (self.folder / name / ENTRY).is_file():  # nobody was faster
                logger.warning("%s is not kept: %s", self.folder / name, error)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def identity(kernels: ModuleType) -> str:
    """The hash of all that machine code depends on, beside the architecture."""
    parts = (sources(kernels), *releases(), platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def sources(kernels: ModuleType) -> str:
    """The hash of a package's code."""
    package = Path(str(kernels.__file__)).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def releases() -> list[str]:
    """The releases that a package's machine code depends on."""
    names = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
    return [f"{name} {metadata.version(name)}" for name in names]
