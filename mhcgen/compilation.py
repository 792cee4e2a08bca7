"""Compilation: every kernel of a package, by worker processes, without a GPU."""

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhcgen import compile_worker
from mhcgen.architecture import ARCHITECTURES
from mhcgen.errors import MhcgenError, shortened
from mhcgen.manifest import MANIFEST, KernelRow, Manifest, read_manifest
from mhcgen.text_file import check_folder

LOG_LINES = 12


class CompileError(Exception):
    """A kernel does not compile, or cannot be kept: exit code 1."""


class DamagedError(CompileError):
    """A package cannot be imported.

    Attributes:
        folder: Its folder.
        line: Which file it is that cannot, and why, in a line.
    """

    def __init__(self, text: str, folder: Path, line: str) -> None:
        """Takes what to say of a package that mhcgen made just now, and the rest."""
        super().__init__(text)
        self.folder = folder
        self.line = line


@dataclass(frozen=True)
class CompiledKernel:
    """What one kernel uses, and how long it took to compile.

    Attributes:
        package: The package's name.
        name: The kernel's name.
        arch: The architecture it was compiled for.
        registers: Registers of a thread.
        spill_stores: Bytes that a thread spills; None if the compiler does not tell.
        spill_loads: Bytes that a thread loads back; None if the compiler does not tell.
        stack: Bytes of a thread's stack frame.
        shared_bytes: Shared memory of a block: static as compiled, dynamic as planned.
        seconds: Time that the compiler took.
    """

    package: str
    name: str
    arch: str
    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack: int
    shared_bytes: int
    seconds: float

    @property
    def spilled(self) -> int:
        """Bytes that a thread stores or loads back; 0 if the compiler does not tell."""
        return max(self.spill_stores or 0, self.spill_loads or 0)


@dataclass(frozen=True)
class Job:
    """One kernel to compile for one architecture."""

    package: str
    folder: Path
    arch: str
    row: KernelRow
    kernels: tuple[str, ...]
    keep: Path | None
    cache: Path | None

    def request(self) -> str:
        """The job as one line for a worker."""
        content = {
            "package": self.package,
            "folder": str(self.folder),
            "arch": self.arch,
            "kernel": self.row.name,
            "kernels": self.kernels,
            "keep": None if self.keep is None else str(self.keep),
            "cache": None if self.cache is None else str(self.cache),
        }
        return json.dumps(content) + "\n"

    def result(self, answer: dict[str, Any]) -> CompiledKernel:
        """What a worker answered.

        Raises:
            CompileError: The worker could not compile or keep the kernel.
        """
        if "unkept" in answer:
            raise CompileError(
                f"{self.package}: {self.row.name} for {self.arch} is not kept: "
                f"{answer['unkept']}"
            )
        if "place" in answer:
            line = f"{answer['place']}: {shortened(answer['error'], 200)}"
            text = str(self.failure(answer["error"]))
            raise DamagedError(text, self.folder, line)
        if "error" in answer:
            raise self.failure(answer["error"])
        shared = answer.pop("static_shared")
        return CompiledKernel(
            package=self.package,
            name=self.row.name,
            arch=self.arch,
            shared_bytes=max(shared, self.row.shared_bytes),
            **answer,
        )

    def failure(self, reason: str) -> CompileError:
        """The error that this kernel does not compile."""
        return CompileError(
            f"{self.package}: {self.row.name} does not compile for {self.arch}:\n"
            + "\n".join(f"    {line}" for line in reason.splitlines())
        )


def jobs_of(
    folder: Path,
    archs: Collection[str] = (),
    keep: Path | None = None,
    cache: Path | None = None,
) -> list[Job]:
    """The compilations of a package: each kernel for each architecture.

    Args:
        folder: The package's folder.
        archs: The architectures to compile for; all of the package's, if empty.
        keep: A folder for the PTX and the cubin of each kernel.
        cache: A folder for what loading the package finds there: MHCGEN_CACHE.

    Raises:
        MhcgenError: The folder is no package, or not for one of the architectures.
    """
    manifest = require_manifest(folder)
    check_archs(manifest.name, archs, manifest.kernels)
    return [
        Job(
            manifest.name,
            folder.resolve(),
            arch,
            row,
            tuple(row.name for row in rows),
            None if keep is None else keep.resolve(),
            None if cache is None else cache.resolve(),
        )
        for arch, rows in manifest.kernels.items()
        if not archs or arch in archs
        for row in rows
    ]


def require_manifest(folder: Path) -> Manifest:
    """The manifest of a package.

    Raises:
        MhcgenError: The folder is no package, or a damaged one.
    """
    place = folder / MANIFEST
    try:
        manifest = read_manifest(folder)
    except OSError as error:
        raise MhcgenError(
            f"{place} cannot be read: {error.strerror}: make it readable, or run "
            "mhcgen build"
        ) from error
    if manifest is None and not os.path.lexists(place):
        raise MhcgenError(
            f"{folder} is no package made by mhcgen: it has no {MANIFEST} that says so"
        )
    if manifest is None:
        raise MhcgenError(
            f"{place} is damaged, or of no package made by mhcgen: run mhcgen build"
        )
    for arch, rows in (manifest.kernels or {"any architecture": ()}).items():
        if not rows:
            raise MhcgenError(f"{place} has no kernels for {arch}: run mhcgen build")
        if arch not in ARCHITECTURES:
            raise MhcgenError(
                f"{place} is for {shortened(arch)!r}, which is none of "
                f"{', '.join(ARCHITECTURES)}: run mhcgen build"
            )
    for path in manifest.files:
        if path.suffix == ".py" and not os.path.isfile(folder / path):
            raise MhcgenError(
                f"{folder / path} is missing, or no regular file: run mhcgen build"
            )
    return manifest


@contextmanager
def given_by_user(folders: Collection[Path]) -> Iterator[None]:
    """Tells users of packages that they gave, and that cannot be imported.

    Raises:
        MhcgenError: One cannot.
    """
    try:
        yield
    except DamagedError as error:
        if error.folder in [folder.resolve() for folder in folders]:
            raise MhcgenError(f"{error.line}: run mhcgen build") from error
        raise


def check_archs(name: str, archs: Collection[str], known: Collection[str]) -> None:
    """Makes sure that a package is for all the architectures asked for.

    Raises:
        MhcgenError: It is not for one of them.
    """
    for arch in archs:
        if arch not in known:
            raise MhcgenError(
                f"--arch {arch!r}: {name} is for {', '.join(known)}; choose one of "
                "these, or add a target to the spec"
            )


def compile_kernels(
    jobs: Sequence[Job],
    processes: int | None = None,
    done: Callable[[CompiledKernel], None] = lambda kernel: None,
) -> list[CompiledKernel]:
    """Compiles kernels, and returns what they use in the order of the jobs.

    Args:
        jobs: What to compile, from `jobs_of`.
        processes: Worker processes; one a core if None.
        done: Called after each kernel, in the order in which they are done.

    Raises:
        CompileError: A kernel does not compile, or cannot be kept; the others are given
            up.
        MhcgenError: A folder to keep things in cannot be written.
    """
    wanted = {("--keep", job.keep) for job in jobs}
    wanted |= {("--cache", job.cache) for job in jobs}
    for option, folder in wanted:
        if folder is not None:
            check_folder(option, folder)
    count = min(processes or len(os.sched_getaffinity(0)), len(jobs))
    if not count:
        return []
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def run(job: Job) -> CompiledKernel:
        worker = idle.get()
        try:
            return worker.run(job)
        finally:
            idle.put(worker)

    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        workers = []
        try:
            for _ in range(count):
                workers.append(stack.enter_context(started_worker()))
                idle.put(workers[-1])
            futures = [threads.submit(run, job) for job in jobs]
            for future in as_completed(futures):
                done(future.result())
        except BaseException:
            # The jobs that are left all fail at once, for want of a worker.
            for worker in workers:
                worker.process.kill()
            raise
    return [future.result() for future in futures]


@dataclass(frozen=True)
class Worker:
    """A process that compiles, one kernel at a time.

    Attributes:
        process: The process.
        log: What the compiler prints.
    """

    process: "subprocess.Popen[str]"
    log: Path

    def run(self, job: Job) -> CompiledKernel:
        """Has a kernel compiled.

        Raises:
            CompileError: It does not compile, or the compiler crashed.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(job.request())
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            tail = self.log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
            status = self.process.wait()
            raise job.failure("\n".join([f"the compiler died, status {status}", *tail]))
        return job.result(json.loads(answer))


@contextmanager
def started_worker() -> Iterator[Worker]:
    """Starts a worker in a folder of its own, and ends it together with the context."""
    with tempfile.TemporaryDirectory(prefix="mhcgen-") as folder:
        log = Path(folder, "log")
        # The current folder is left out: it may hold modules that hide others.
        path = [os.path.abspath(entry) for entry in sys.path]
        path = [entry for entry in path if entry != os.getcwd()]
        with log.open("a+b") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", compile_worker.__file__, json.dumps(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                encoding="utf-8",
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,  # Ctrl-C is for the parent, which ends them
            )
        try:
            yield Worker(process, log)
        finally:
            process.kill()
            process.communicate()


def _environment(folder: str) -> dict[str, str]:
    """The environment of a worker, whose temporary files all go to its folder."""
    # CUTE_DSL_ARCH would overrule the architecture of every kernel, and others make
    # the compiler write files.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    return kept | {"TMPDIR": folder}
