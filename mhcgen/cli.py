"""The command line. Exit codes: 0 done, 1 failed or stale, 2 the user's mistake.

Specs, plans and templates are imported by the commands that need them: packages are
verified and benchmarked on machines that have torch, numpy, typer and rich alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mhcgen import __version__
from mhcgen.build import BuildError, Package, Staging, write_files
from mhcgen.compilation import (
    CompiledKernel,
    CompileError,
    Job,
    check_archs,
    compile_kernels,
    given_by_user,
    jobs_of,
    require_manifest,
)
from mhcgen.console import progress, show_diff, show_table
from mhcgen.errors import MhcgenError, PlanError
from mhcgen.text_file import check_place, write_whole
from mhcgen.token_list import parse_tokens

if TYPE_CHECKING:
    from mhcgen.matrix_report import Report
    from mhcgen.plan import Plan
    from mhcgen.verify.report import Outcome

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BENCH_TOKENS = "1,2,4,8,16,32,64"

Archs = Annotated[
    list[str] | None,
    typer.Option("--arch", metavar="ARCH", help="Only this architecture; repeatable."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Compiler processes; one a core by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"mhcgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and leave.",
        ),
    ] = False,
) -> None:
    """GPU kernels for models with manifold-constrained hyper-connections."""


@app.command()
def build(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC...")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder that holds packages.")
    ] = Path("generated"),
    arch: Archs = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Write packages without a compilation.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; show how packages differ, and exit with 1."
        ),
    ] = False,
    jobs: Jobs = None,
) -> None:
    """Make packages from specs, and compile every kernel.

    A package is replaced once all its kernels compile, and whole or not at all.
    """
    from mhcgen.render import render

    plans = load_plans(specs, arch or ())
    packages = [Package(plan.name, render(plan), out) for plan in plans]
    if check:
        if not all([check_package(package) for package in packages]):
            raise typer.Exit(1)
        return
    with ExitStack() as stack:
        stagings = [stack.enter_context(Staging(package)) for package in packages]
        compiled = []
        if not no_compile:
            kernels = [job for s in stagings for job in jobs_of(s.folder, arch or ())]
            compiled = compile_all(kernels, jobs)
        for staging in stagings:
            staging.install()
            report(staging, compiled)


def check_package(package: Package) -> bool:
    """Whether a package is up to date; shows the difference if it is not."""
    stale = show_diff(package.differences())
    state = "is stale: run mhcgen build" if stale else "up to date"
    print(f"{package.name}: {state}")
    return not stale


def report(staging: Staging, compiled: Iterable[CompiledKernel]) -> None:
    """Tells what was done for one package."""
    package = staging.package
    line = f"{package.name}: "
    if staging.is_fresh:
        line += "up to date"
    else:
        line += f"{len(package.files)} files written to {package.target}"
    mine = [kernel for kernel in compiled if kernel.package == package.name]
    if mine:
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in mine))
        line += f"; {len(mine)} kernels compile for {archs}"
    print(line)


@app.command("compile")
def compile_(
    sources: Annotated[list[Path], typer.Argument(metavar="SPEC_OR_PACKAGE...")],
    arch: Archs = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the PTX and cubin of each kernel here."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what loading the packages needs here, for MHCGEN_CACHE.",
        ),
    ] = None,
    json_: AsJson = False,
    jobs: Jobs = None,
) -> None:
    """Compile every kernel of specs or of packages, and show what each uses."""
    from mhcgen.render import render

    archs = arch or ()
    packages = [path for path in sources if os.path.isdir(path)]
    plans = load_plans([path for path in sources if path not in packages], archs)
    with (
        tempfile.TemporaryDirectory(prefix="mhcgen-") as folder,
        given_by_user(packages),
    ):
        made = [Path(folder, plan.name) for plan in plans]
        for path, plan in zip(made, plans, strict=True):
            write_files(path, render(plan))
        kernels: list[Job] = []
        names: list[str] = []
        for package in [*packages, *made]:
            names.append(require_manifest(package).name)
            kept = keep / names[-1] if keep and len(sources) > 1 else keep
            kernels += jobs_of(package, archs, kept, cache)
        twice = next((name for name in names if names.count(name) > 1), None)
        if keep and twice:
            raise MhcgenError(
                f"--keep {keep}: two of the packages are named {twice}: keep each in a "
                "folder of its own"
            )
        results = compile_all(kernels, jobs)
    if json_:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    show_table(
        "Resources: registers and bytes of a thread, shared bytes of a block",
        (
            "package",
            "kernel",
            "arch",
            "registers",
            "spill stores",
            "spill loads",
            "stack",
            "shared",
            "seconds",
        ),
        [tuple(asdict(result).values()) for result in results],
    )
    if any(result.spill_stores is None for result in results):
        print("-: not told by nvidia-cutlass-dsl before 4.8; the stack may hold spills")


def compile_all(jobs: Sequence[Job], processes: int | None) -> list[CompiledKernel]:
    """Compiles kernels and shows how far it is."""
    with progress("compiling", len(jobs)) as advance:
        return compile_kernels(
            jobs, processes, lambda kernel: advance(f"{kernel.name} {kernel.arch}")
        )


@app.command("explain")
def explain_(
    spec: Annotated[Path, typer.Argument(metavar="SPEC")],
    arch: Archs = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="M", help="Show the launches of a call of M tokens."),
    ] = None,
    json_: AsJson = False,
) -> None:
    """Show everything that follows from a spec, and where each number comes from."""
    from mhcgen.explain import as_json, explain, show

    (plan,) = load_plans([spec], arch or ())
    sections = explain(plan, arch or (), tokens)
    if json_:
        print(json.dumps(as_json(plan, sections), indent=2))
    else:
        show(sections)


@app.command("verify")
def verify_(
    source: Annotated[Path, typer.Argument(metavar="SPEC_OR_PACKAGE")],
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu, which is the emulator, or cuda.")
    ] = "cpu",
    arch: Archs = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(metavar="T", help="multicast or unicast; repeatable."),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="M,M,...", help="Sizes of calls, such as 1,3,64.")
    ] = "",
    calls: Annotated[
        int | None, typer.Option(min=1, help="Calls of each size, or of each seed.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    stress: Annotated[
        int,
        typer.Option(
            metavar="SEEDS", min=0, help="Run calls at random, once for each seed."
        ),
    ] = 0,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write JSON there.")
    ] = None,
) -> None:
    """Run every kernel, and compare every output with the reference.

    In the emulator, or with --device cuda on GPUs: one plays all ranks, unless
    torch.distributed.run starts a process for each.
    """
    from mhcgen.verify.cases import Options

    options = Options(arch or (), transport or (), tokens, calls, seed, stress)
    if device not in ("cpu", "cuda"):
        raise MhcgenError(
            f"--device {device!r}: kernels run on cpu, in the emulator, or on cuda"
        )
    if json_ is not None:
        check_place("--json", json_)
    with (
        tempfile.TemporaryDirectory(prefix="mhcgen-") as temporary,
        given_by_user([source]),
    ):
        folder = source
        if not os.path.isdir(source):
            from mhcgen.render import render

            (plan,) = load_plans([source], ())
            folder = Path(temporary, plan.name)
            write_files(folder, render(plan))
        manifest = require_manifest(folder)

        def tell(outcomes: Sequence[Outcome]) -> None:
            show_outcomes(outcomes, manifest.name, source, json_)

        if device == "cuda":
            from mhcgen.verify import on_cuda

            outcomes = on_cuda.verify(folder, options, tell)
        else:
            from mhcgen.verify import on_cpu

            cases = on_cpu.wanted_cases(folder, options)
            with progress("verifying", len(cases)) as advance:
                outcomes = on_cpu.verify(folder, cases, advance)
    tell(outcomes)
    if not all(outcome.ok for outcome in outcomes):
        raise typer.Exit(1)


def show_outcomes(
    outcomes: Sequence[Outcome], name: str, source: Path, json_: Path | None
) -> None:
    """Shows what became of cases and writes it as JSON; of several ranks, the first."""
    from mhcgen.verify import report, together

    if together.global_rank() > 0:
        return
    report.show(outcomes, name, source)
    if json_ is not None:
        content = [outcome.as_json() for outcome in outcomes]
        write_whole(json_, json.dumps({"name": name, "cases": content}) + "\n")


@app.command("bench")
def bench_(
    source: Annotated[Path, typer.Argument(metavar="SPEC_OR_PACKAGE")],
    tokens: Annotated[
        str,
        typer.Option(
            metavar="M,M,...", help=f"Sizes of calls; by default {BENCH_TOKENS}."
        ),
    ] = "",
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="SPEC_OR_PACKAGE", help="Time this one, too; repeatable."),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write JSON there.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Leave out nccl, one-shot, unfused, floor or 'between sublayers'; "
            "repeatable.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a picture: .png, .svg or .html."),
    ] = None,
) -> None:
    """Time packages on GPUs, beside NCCL, the unfused path and the floor.

    On one GPU, which plays all ranks, or on one a rank: python -m
    torch.distributed.run --nproc-per-node TP -m mhcgen bench ... The JSON of an earlier
    run in the place of a package is shown and drawn again, without a GPU.
    """
    from mhcgen.bench import plot as picture
    from mhcgen.bench import report as table
    from mhcgen.bench.result import read_result

    if plot is not None:
        picture.check_format(plot)
    for option, path in (("--json", json_), ("--plot", plot)):
        if path is not None:
            check_place(option, path)
    if source.suffix == ".json":
        if compare or json_ or tokens or without:
            raise MhcgenError(
                f"{source} is a finished run: --compare, --json, --tokens and "
                "--without need a new one"
            )
        result = read_result(source)
    else:
        from mhcgen.bench.run import PASSES, run

        sizes = parse_tokens(tokens or BENCH_TOKENS)
        with progress("timing", len(PASSES) * len(sizes)) as advance:
            measured = run([source, *(compare or ())], sizes, without or (), advance)
        if measured is None:
            return
        result = measured
    table.show(result)
    if json_ is not None:
        write_whole(json_, result.text())
    if plot is not None:
        picture.write_plot(result, plot)


@app.command("tune")
def tune_(
    spec: Annotated[Path, typer.Argument(metavar="SPEC")],
    write: Annotated[
        bool, typer.Option("--write", help="Write what won into the spec.")
    ] = False,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Stop measuring after this.")
    ] = 300,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="M,M,...", help="Sizes of calls; those where winners may change."
        ),
    ] = "",
) -> None:
    """Find the cluster size and the token groups that serve a spec best on this GPU.

    Starts like bench, on one GPU or on one a rank.
    """
    from mhcgen.bench.variants import tune
    from mhcgen.spec_file import load_spec
    from mhcgen.spec_writer import with_target

    plan = _load_plan(spec)
    text = load_spec(spec).text
    sizes = parse_tokens(tokens) if tokens else None
    if write:
        check_place("--write", spec)
    tuned = tune(plan, sizes, budget)
    if tuned is None:
        return
    tuned.show()
    if write:
        write_whole(spec, with_target(text, tuned.targets, tuned.arch, tuned.device))
        print(f"{spec}: tuned for {tuned.arch}; run mhcgen build")
    else:
        print("not written: give --write")


@app.command()
def init(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json")],
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.")],
    name: Annotated[
        str | None, typer.Option(help="The spec's name; the model type's by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The spec; by default NAME.yaml."),
    ] = None,
    pre_mix: Annotated[
        str | None, typer.Option(metavar="P", help="fresh (the default) or delayed.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the spec if it is there.")
    ] = False,
) -> None:
    """Write a spec from the config.json of a Hugging Face model."""
    from mhcgen.hf_config import read_config

    made = read_config(config, tp, name, pre_mix)
    path = Path(f"{made.spec.name}.yaml") if out is None else out
    check_place("--out", path)
    write_whole(path, made.text_in(path.parent), overwrite=force)
    show_table(
        f"{made.spec.name}: from {config}",
        ("field", "value", "from"),
        [(".".join(v.loc), str(v.value), v.origin) for v in made.values],
    )
    for note in made.notes:
        print(f"note: {note}")
    print(f"{made.spec.name}: written to {path}")


@app.command("matrix")
def matrix_(
    source: Annotated[Path, typer.Argument(metavar="MATRIX")],
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Check N specs that show every value."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="What a sample is drawn by.")] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Check only this spec; repeatable."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile every kernel.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option("--verify", metavar="DEVICE", help="Verify on cpu or cuda."),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="M,M,...", help="Sizes of the calls to verify.")
    ] = "",
    calls: Annotated[
        int | None, typer.Option(min=1, help="Calls of each size to verify.")
    ] = None,
    arch: Archs = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Specs at a time; one a core by default.")
    ] = None,
    report_: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a report: .md or .html."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the packages here.")
    ] = None,
) -> None:
    """Make every spec of a matrix, and check all of them or a sample."""
    from mhcgen import matrix, matrix_report, matrix_run
    from mhcgen.spec import ARCHS

    for option, given, known in (
        ("--verify", [device] if device else [], ("cpu", "cuda")),
        ("--arch", arch or [], ARCHS),
    ):
        for value in given:
            if value not in known:
                raise MhcgenError(f"{option} {value}: choose one of {', '.join(known)}")
    for option, is_given in (("--tokens", tokens), ("--calls", calls)):
        if is_given and device is None:
            raise MhcgenError(
                f"{option}: nothing is verified; add --verify cpu or cuda"
            )
    if report_ is not None:
        matrix_report.check_place(report_)
    checks = matrix_run.Checks(
        source, tuple(arch or ()), compiled, device, tokens, calls, out
    )
    checks.sizes(1)  # refuses what is no number at once
    expansion = matrix.expand(matrix.load_matrix(source), only or ())
    picked = expansion.legal
    if sample is not None:
        picked = matrix.sample(picked, sample, seed)
    if out is not None:
        matrix_run.check_out(out, picked)
    with progress("checking", len(picked)) as advance:
        results = matrix_run.check(picked, checks, jobs or matrix_run.cores(), advance)
    report = matrix_report.Report(expansion, checks, results)
    show_matrix(report)
    if report_ is not None:
        write_whole(report_, report.text(report_))
    if report.failures or not report.results:
        raise typer.Exit(1)


def show_matrix(report: Report) -> None:
    """Prints what became of a matrix."""
    show_table("Blocks", report.block_headers, report.blocks)
    if report.reasons:
        show_table("Refused by the plan", report.reason_headers, report.reasons)
    for result in report.failures:
        print(f"\nFAILED: {result.candidate.name}: {result.stage}")
        print(textwrap.indent(result.reason, "  "))
        print(f"  again: {report.checks.command(result.candidate.name)}")
    print(report.summary)


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here instead.")
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="The schema of matrices instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of specs, for editors."""
    if output is not None:
        check_place("--output", output)
    if matrix:
        from mhcgen.matrix import matrix_schema_text

        text = matrix_schema_text()
    else:
        from mhcgen.spec import schema_text

        text = schema_text()
    if output is None:
        print(text, end="")
        return
    write_whole(output, text)


def load_plans(paths: Iterable[Path], archs: Sequence[str]) -> list[Plan]:
    """The plans of specs, all of them or none.

    Raises:
        MhcgenError: What is wrong with each spec that is wrong, or with two together.
    """
    plans: dict[str, Plan] = {}
    origins: dict[str, Path] = {}
    errors = []
    for path in paths:
        try:
            plan = _load_plan(path)
            check_archs(plan.name, archs, [target.arch for target in plan.targets])
        except MhcgenError as error:
            errors.append(str(error))
            continue
        if plan.name in plans:
            errors.append(
                f"{origins[plan.name]} and {path} both make a package named "
                f"{plan.name}: give each spec a name of its own"
            )
        plans[plan.name] = plan
        origins[plan.name] = path
    if errors:
        raise MhcgenError("\n".join(errors))
    return list(plans.values())


def _load_plan(path: Path) -> Plan:
    from mhcgen.plan import make_plan
    from mhcgen.spec_file import load_spec

    source = load_spec(path)
    try:
        return make_plan(source.spec)
    except PlanError as error:
        raise error.in_file(source) from error


def main() -> NoReturn:
    """Runs the command line."""
    if sys.stderr is None:  # closed, as standard output may be
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _check_surroundings()
        try:
            app(prog_name="mhcgen")
        finally:
            sys.stdout.flush()
    except MhcgenError as error:
        _fail(error, 2)
    except (BuildError, CompileError) as error:
        _fail(error, 1)
    except BrokenPipeError:
        _give_up_output()  # whoever read it has left
        sys.exit(1)
    except OSError as error:
        _give_up_output()  # all of it that could be written has been
        place = error.filename or "the output or a temporary file"
        _fail(f"cannot write or read {place}: {error.strerror or error}", 1)
    sys.exit(0)


def _check_surroundings() -> None:
    """Refuses what no command can work with.

    Raises:
        MhcgenError: The current folder or standard output is not there.
    """
    if sys.stdout is None:
        raise MhcgenError("standard output is closed: lead it to a file or /dev/null")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise MhcgenError(
            "the current folder has been deleted: change to another"
        ) from error


def _give_up_output() -> None:
    """Keeps the interpreter from flushing again what cannot be written."""
    with suppress(OSError):  # of an output that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(error, file=sys.stderr)
    sys.exit(code)
