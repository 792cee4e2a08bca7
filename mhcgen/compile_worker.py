"""The program that compiles kernels, one a request, in a process of its own.

It reads requests from standard input and answers on standard output, one JSON object a
line; what the compiler prints goes to standard error, which is a file. It imports
nothing of mhcgen, so that packages are seen to work without it.
"""

import importlib
import importlib.util
import json
import os
import re
import shutil
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

DUMP = Path("dump")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
MEMORY = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
ERROR_LINES = 12

# Of the attributes in a cubin's .nv.info: those wanted, and the form that has a size.
REGISTER_COUNT = 0x2F
FRAME_SIZE = 0x11
SIZED = 0x04


class UnkeptError(Exception):
    """A kernel compiles, and what is made of it cannot be kept."""


def main() -> None:
    """Answers requests until there are no more."""
    sys.path[:] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = compiled(json.loads(line))
        except UnkeptError as error:
            answer = {"unkept": str(error)}
        except Exception as error:
            answer = {"error": described(error)}
        print(json.dumps(answer), file=answers, flush=True)


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles one kernel, and tells what it uses."""
    folder, package = Path(request["folder"]), request["package"]
    arch, name = request["arch"], request["kernel"]
    try:
        imported(package, folder)
        kernels = importlib.import_module(f"{package}.kernels")
        table = kernels.kernels(arch)
        if set(table) != set(request["kernels"]):
            names = ", ".join(sorted(set(table) ^ set(request["kernels"])))
            raise LookupError(f"kernels.py and manifest.json disagree about {names}")
        compiler = importlib.import_module(f"{package}.runtime.compiler")
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and missing.split(".")[0] != package:
            raise  # an engine to install, not a package to remake
        return {"error": described(error), "place": place_of(error, folder)}
    start = time.perf_counter()
    code = compiler.compile_kernel(
        table[name], kernels.symbol(name), arch, emptied_dump()
    )
    seconds = time.perf_counter() - start
    artifacts = {suffix: artifact(suffix) for suffix in ("ptx", "cubin")}
    used = resources_of_cubin(artifacts["cubin"].read_bytes())
    if request["keep"]:
        for suffix, path in artifacts.items():
            kept = Path(request["keep"], f"{name}.{arch}.{suffix}")
            try:
                shutil.copyfile(path, kept)
            except OSError as error:
                raise UnkeptError(f"{kept}: {error.strerror}") from error
    if request["cache"]:
        cache = importlib.import_module(f"{package}.runtime.cache")
        keep(cache.Cache(Path(request["cache"]), kernels, arch), name, code)
    if used["spill_stores"] is None and reports_resources():
        # The compiler takes twice as long if it is to report, so that it is asked to
        # only where the cubin leaves a question.
        before = os.fstat(2).st_size
        options = f"{emptied_dump()} remarks{{ptx}}"
        compiler.compile_kernel(table[name], kernels.symbol(name), arch, options)
        used = resources(printed_since(before)) or used
    return used | {"seconds": round(seconds, 3)}


def keep(cache: Any, name: str, code: Any) -> None:
    """Makes sure that a cache has a kernel.

    Raises:
        UnkeptError: It has not; what the cache logged says why.
    """
    if cache.find(name) is None:  # which removes what is damaged
        before = os.fstat(2).st_size
        cache.keep(name, code)
        reason = (
            printed_since(before).strip() or f"{cache.folder} does not give it back"
        )
        if cache.find(name) is None:
            raise UnkeptError(reason)


def emptied_dump() -> str:
    """Empties the compiler's folder, and gives the options that make it leave files."""
    shutil.rmtree(DUMP, ignore_errors=True)
    DUMP.mkdir()
    return f"--keep-ptx --keep-cubin --dump-dir {DUMP}"


def reports_resources() -> bool:
    """Whether the compiler passes on what ptxas reports: from release 4.8 on."""
    numbers = metadata.version("nvidia-cutlass-dsl").split(".")
    return tuple(map(int, numbers[:2])) >= (4, 8)


def artifact(suffix: str) -> Path:
    """The one file with a suffix that the compiler left."""
    files = list(DUMP.rglob(f"*.{suffix}"))
    if len(files) != 1:
        raise LookupError(f"the compiler left {len(files)} {suffix} files, not one")
    return files[0]


def imported(name: str, folder: Path) -> None:
    """Imports a package from its folder, and its modules on demand.

    The folder's parent stays off sys.path: it may hold modules that hide others.
    """
    module = sys.modules.get(name)
    if not module or not is_from(module, folder):
        for known in [key for key in sys.modules if key.split(".")[0] == name]:
            del sys.modules[known]
        # The DSL reads the source of kernels again, so that it must be a file.
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} is no package")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.dont_write_bytecode = True
        spec.loader.exec_module(module)


def is_from(module: ModuleType, folder: Path) -> bool:
    """Whether a module is the package of a folder."""
    return getattr(module, "__path__", None) == [str(folder)]


def printed_since(offset: int) -> str:
    """What has been printed to standard error from an offset on, without colours."""
    sys.stdout.flush()
    sys.stderr.flush()
    printed = os.pread(2, os.fstat(2).st_size - offset, offset)
    return ANSI.sub("", printed.decode("utf-8", "replace"))


def resources(report: str) -> dict[str, int | None]:
    """The resources in a report of ptxas; the largest, where it has several kernels."""
    registers = [int(match[1]) for match in REGISTERS.finditer(report)]
    if not registers:
        return {}
    memory = [tuple(map(int, match.groups())) for match in MEMORY.finditer(report)]
    stack, stores, loads = map(max, zip(*memory or [(0, 0, 0)], strict=True))
    shared = [int(match[1]) for match in SHARED.finditer(report)]
    return {
        "registers": max(registers),
        "stack": stack,
        "spill_stores": stores,
        "spill_loads": loads,
        "static_shared": max(shared, default=0),
    }


def resources_of_cubin(data: bytes) -> dict[str, int | None]:
    """The resources that a cubin declares.

    It does not tell spills from other uses of the stack: they are unknown, None, unless
    there is no stack.
    """
    attributes: dict[int, list[int]] = {REGISTER_COUNT: [], FRAME_SIZE: [0]}
    shared = [0]
    for name, start, size in sections(data):
        if name.startswith(".nv.shared.") and ".reserved." not in name:
            shared.append(size)
        position = start if name == ".nv.info" else start + size
        while position < start + size:
            form, attribute, length = struct.unpack_from("<BBH", data, position)
            if attribute in attributes:
                (value,) = struct.unpack_from("<I", data, position + 8)
                attributes[attribute].append(value)
            position += 4 + (length if form == SIZED else 0)
    stack = max(attributes[FRAME_SIZE])
    return {
        "registers": max(attributes[REGISTER_COUNT]),
        "stack": stack,
        "spill_stores": None if stack else 0,
        "spill_loads": None if stack else 0,
        "static_shared": max(shared),
    }


def sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + index * entry)
        for index in range(count)
    ]
    for header in headers:
        start = headers[names][4] + header[0]
        yield data[start : data.index(b"\0", start)].decode(), header[4], header[5]


def place_of(error: BaseException, folder: Path) -> str:
    """The file of a package that an error at its import comes from."""
    if isinstance(error, SyntaxError | OSError) and error.filename:
        return str(error.filename)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file for file in files if Path(file).is_relative_to(folder)]
    return ours[-1] if ours else str(folder)


def described(error: BaseException) -> str:
    """The last lines of an error's text."""
    lines = ANSI.sub("", f"{type(error).__name__}: {error}").rstrip().splitlines()
    return "\n".join(line.rstrip() for line in lines[-ERROR_LINES:])


if __name__ == "__main__":
    main()
