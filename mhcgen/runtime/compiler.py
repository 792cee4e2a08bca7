"""Compilation of a package's kernels."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from cutlass import cute

from .cache import Cache
from .occupancy import MIXES

OLDEST_DSL = (4, 6, 3)


def check_dsl() -> None:
    """Refuses a CuTe DSL that is too old for this package.

    Raises:
        ImportError: The installed release, the needed one and what to do.
    """
    installed = metadata.version("nvidia-cutlass-dsl")
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    if numbers < OLDEST_DSL:
        needed = ".".join(map(str, OLDEST_DSL))
        raise ImportError(
            f"nvidia-cutlass-dsl {installed} is too old for this package: install "
            f"{needed} or newer"
        )


def compile_kernel(kernel: Any, name: str, arch: str, options: str = "") -> Any:
    """Compiles one kernel object for an architecture; no GPU is needed.

    Args:
        kernel: An object of the package's ``kernels`` table.
        name: What profilers are to show; for mixes that it launches besides, this and
            ``_mixes``.
        arch: The compiler's name of the architecture, such as ``sm_90a``.
        options: More options for ``cute.compile``.

    Returns:
        A TVM-FFI callable that takes torch tensors and integers, and launches on the
        stream that is current in torch.
    """
    type(kernel).kernel.set_name_prefix(name)
    if hasattr(kernel, "mixes"):
        type(kernel.mixes).kernel.set_name_prefix(f"{name}{MIXES}")
    return cute.compile(
        kernel,
        *kernel.arguments(),
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}",
    )


def compile_package(
    kernels: ModuleType, arch: str, transport: str, publishing: bool = True
) -> dict[str, Any]:
    """Compiles every kernel that one transport of a package needs.

    Kernels that an earlier process kept are read instead: see ``cache``.

    Args:
        kernels: The package's ``kernels`` module.
        arch: The compiler's name of the architecture.
        transport: ``multicast`` or ``unicast``; ``local`` for one rank alone.
        publishing: Whether to compile the boundaries that publish their own rows. They
            keep their machine code, for ``clusters_at_once``.

    Returns:
        The compiled callables by kernel name.
    """
    compiled = {}
    cache = Cache.of_environment(kernels, arch)
    with TemporaryDirectory(prefix="mhcgen-") as folder:
        # The compiler leaves files in the current folder if it is not told otherwise.
        keep = f"--keep-cubin --dump-dir {shlex.quote(folder)}"
        for name, kernel in kernels.kernels(arch, (transport,)).items():
            publishes = getattr(kernel, "publishes", None) is not None
            if publishes and not publishing:
                continue
            known = cache.find(name) if cache else None
            if known is None:
                options = keep if publishes else ""
                known = compile_kernel(kernel, kernels.symbol(name), arch, options)
                if cache:
                    cache.keep(name, known)
            compiled[name] = known
    return compiled
