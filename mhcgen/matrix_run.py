"""Checking the specs of a matrix: each is rendered, compiled and verified, in parallel.

A spec that fails ends at the stage where it does, and holds up none of the others.
"""

import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mhcgen import __version__
from mhcgen.build import BuildError, Package, Staging, write_files
from mhcgen.compilation import (
    CompiledKernel,
    CompileError,
    Job,
    Worker,
    jobs_of,
    started_worker,
)
from mhcgen.errors import MhcgenError
from mhcgen.manifest import read_manifest
from mhcgen.matrix import Candidate
from mhcgen.plan import Plan
from mhcgen.render import (
    TemplateError,
    Templates,
    render,
    resolved,
    spec_sha256,
)
from mhcgen.resources import RUNTIME, resource
from mhcgen.text_file import check_folder
from mhcgen.token_list import parse_tokens

REASON_LINES = 12


@dataclass(frozen=True)
class Checks:
    """What is done with each spec.

    Attributes:
        source: The matrix, as the user named it.
        archs: The architectures to compile and verify for; each spec's own if empty.
        compiled: Whether kernels are compiled.
        device: Where kernels are verified, cpu or cuda; None if they are not.
        tokens: Sizes of the calls to verify; the package's own choice if empty.
        calls: Calls of each size to verify; the package's own choice if None.
        out: The folder that keeps the packages; None if they are not kept.
    """

    source: Path
    archs: tuple[str, ...] = ()
    compiled: bool = False
    device: str | None = None
    tokens: str = ""
    calls: int | None = None
    out: Path | None = None

    def options(self, archs: Sequence[str], tokens: str) -> list[str]:
        """What `mhcgen verify` is told, too."""
        words = [word for arch in archs for word in ("--arch", arch)]
        words += ["--tokens", tokens] * bool(tokens)
        return words + ["--calls", str(self.calls)] * bool(self.calls)

    def command(self, name: str) -> str:
        """The command that repeats the checks of one spec."""
        words = ["mhcgen", "matrix", str(self.source), "--only", name]
        words += ["--compile"] * self.compiled
        words += ["--verify", str(self.device)] * bool(self.device)
        words += [] if self.out is None else ["--out", str(self.out)]
        return shlex.join(words + self.options(self.archs, self.tokens))

    def sizes(self, capacity: int) -> str:
        """The sizes of calls that a spec's capacity allows, it instead of larger ones.

        Raises:
            MhcgenError: One is no number of tokens.
        """
        sizes = parse_tokens(self.tokens) if self.tokens else []
        allowed = dict.fromkeys(min(m, capacity) for m in sizes)
        return ",".join(map(str, allowed))


@dataclass(frozen=True)
class Result:
    """What became of one spec.

    Attributes:
        candidate: The spec.
        clusters: Thread blocks of a cluster, by architecture.
        kernels: What was compiled.
        cases: Cases that were verified.
        stage: The stage that failed: render, compile or verify; None if none did.
        reason: Why it failed.
    """

    candidate: Candidate
    clusters: dict[str, int]
    kernels: tuple[CompiledKernel, ...] = ()
    cases: int = 0
    stage: str | None = None
    reason: str = ""

    @property
    def registers(self) -> int | None:
        """The most registers of a thread; None if nothing was compiled."""
        return max((kernel.registers for kernel in self.kernels), default=None)

    @property
    def spilled(self) -> int | None:
        """The most bytes that a thread spills; None if nothing was compiled."""
        return max((kernel.spilled for kernel in self.kernels), default=None)


class StageError(Exception):
    """A spec failed at a stage.

    Attributes:
        stage: The stage.
        reason: Why.
    """

    def __init__(self, stage: str, reason: str) -> None:
        """Takes the stage and the reason."""
        super().__init__(stage, reason)
        self.stage = stage
        self.reason = reason


class Compilers:
    """Compilers that stay between specs: starting one takes seconds."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        """Starts none yet; those that are will end with the stack."""
        self._stack = stack
        self._idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)

    def run(self, jobs: Sequence[Job]) -> list[CompiledKernel]:
        """Compiles some kernels, one after the other.

        Raises:
            CompileError: One does not compile.
        """
        worker = self._idle.get()
        try:
            worker = worker or self._stack.enter_context(started_worker())
            return [worker.run(job) for job in jobs]
        finally:
            dead = worker is not None and worker.process.poll() is not None
            self._idle.put(None if dead else worker)


def check(
    candidates: Sequence[Candidate],
    checks: Checks,
    processes: int,
    done: Callable[[str], None],
) -> list[Result]:
    """Checks specs, and returns what became of each, in their order.

    Args:
        candidates: Legal specs.
        checks: What to do with each.
        processes: Specs at a time.
        done: Called after each, with its name.
    """
    with ExitStack() as stack:
        compilers = Compilers(stack, processes)
        threads = ThreadPoolExecutor(processes)
        # Whoever interrupts waits neither for specs that have not begun nor for those
        # that are being verified.
        stack.callback(threads.shutdown)
        stack.callback(end_verifiers)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        futures = {
            threads.submit(check_one, candidate, checks, compilers): candidate
            for candidate in candidates
        }
        for future in as_completed(futures):
            future.result()
            done(futures[future].name)
        return [future.result() for future in futures]


def check_one(candidate: Candidate, checks: Checks, compilers: Compilers) -> Result:
    """Takes one spec through its stages, up to the first that fails."""
    plan = candidate.plan()
    clusters = {target.arch: target.cluster_size for target in plan.targets}
    kernels: list[CompiledKernel] = []
    cases = 0
    failure: tuple[str | None, str] = None, ""
    archs = [arch for arch in clusters if not checks.archs or arch in checks.archs]
    try:
        with package_of(plan, checks.out) as folder:
            if checks.compiled and archs:
                with stage("compile"):
                    jobs = jobs_of(folder, archs)
                    kernels = compilers.run(jobs)
                    check_spills(jobs, kernels)
            if checks.device and archs:
                with stage("verify"):
                    options = checks.options(archs, checks.sizes(plan.capacity))
                    cases = verified(folder, checks.device, options)
    except StageError as error:
        failure = (error.stage, error.reason)
    return Result(candidate, clusters, tuple(kernels), cases, *failure)


def check_spills(jobs: Sequence[Job], kernels: Sequence[CompiledKernel]) -> None:
    """Makes sure that no kernel spills more than its plan says.

    Raises:
        CompileError: Those that do.
    """
    broken = [
        f"{kernel.name} spills {kernel.spilled} bytes a thread for {kernel.arch}; its "
        f"plan allows {job.row.may_spill}"
        for job, kernel in zip(jobs, kernels, strict=True)
        if kernel.spilled > job.row.may_spill
    ]
    if broken:
        raise CompileError("\n".join(broken))


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Names the stage that errors come from, those of mhcgen itself among them."""
    try:
        yield
    except (TemplateError, BuildError, CompileError, MhcgenError) as error:
        raise StageError(name, str(error)) from error
    except Exception as error:
        raise StageError(name, f"{type(error).__name__}: {error}") from error


@contextmanager
def package_of(plan: Plan, out: Path | None) -> Iterator[Path]:
    """A package of a plan: in a folder that keeps it, or for the time of the context.

    Raises:
        StageError: It cannot be rendered.
    """
    with stage("render"):
        is_kept = out is not None and is_current(out / plan.name, plan)
    if out is not None and is_kept:
        yield out / plan.name
        return
    with tempfile.TemporaryDirectory(prefix="mhcgen-") as temporary:
        with stage("render"):
            files = render(plan)
            folder = Path(temporary, plan.name)
            if out is None:
                write_files(folder, files)
            else:
                folder = out / plan.name
                with Staging(Package(plan.name, files, out)) as staging:
                    staging.install()
        yield folder


def check_out(out: Path, picked: Sequence[Candidate]) -> None:
    """Makes sure that packages can be kept, before the first is checked.

    Raises:
        MhcgenError: They cannot, and are not all there.
    """
    try:
        check_folder("--out", out)
    except MhcgenError:
        kept = (is_current(out / each.name, each.plan()) for each in picked)
        if not (os.path.isdir(out) and all(kept)):
            raise


def is_current(folder: Path, plan: Plan) -> bool:
    """Whether a folder says that it is the package of a plan, made by this mhcgen.

    That is seen without the formatter, which machines with a GPU may lack.
    """
    manifest = read_manifest(folder)
    return manifest is not None and (
        manifest.version,
        manifest.spec_sha256,
        manifest.templates_sha256,
    ) == (
        __version__,
        spec_sha256(resolved(plan)),
        Templates(resource("templates"), RUNTIME).sha256,
    )


def verified(folder: Path, device: str, options: Sequence[str]) -> int:
    """Verifies a package in a process of its own; the number of cases.

    What a wrong kernel does to a device is then no other spec's concern.

    Raises:
        MhcgenError: An output is wrong, or the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="mhcgen-") as temporary:
        report = Path(temporary, "verified.json")
        words = [sys.executable, "-m", "mhcgen", "verify", str(folder)]
        words += ["--json", str(report), *options]
        words += ["--device", "cuda"] * (device == "cuda")
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
            verifiers.add(process)
            try:
                out, err = process.communicate()
            finally:
                verifiers.discard(process)
        if process.returncode:
            raise MhcgenError(why(out, err))
        return len(json.loads(report.read_text("utf-8"))["cases"])


verifiers: "set[subprocess.Popen[str]]" = set()
"""Those that run now."""


def end_verifiers() -> None:
    """Has those that run now clean up and end."""
    for process in [*verifiers]:
        process.terminate()


def why(out: str, err: str) -> str:
    """What a failed verification says, in a few lines."""
    _, failed, told = out.partition("FAILED: ")
    lines = (failed + told).splitlines() if failed else err.rstrip().splitlines()
    shown = lines[:REASON_LINES] if failed else lines[-REASON_LINES:]
    return "\n".join(shown) or "it failed without a word"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
