"""Candidates of `mhcgen tune` on GPUs: rendered, compiled and timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mhcgen.architecture import ARCHITECTURES
from mhcgen.bench.contenders import Call, Inputs
from mhcgen.bench.machine import Machine, machine
from mhcgen.bench.packages import Loaded, load
from mhcgen.bench.timing import capture, interleaved, replay
from mhcgen.build import write_files
from mhcgen.console import progress
from mhcgen.errors import MhcgenError
from mhcgen.plan import Plan, clusters_at_once, make_plan
from mhcgen.render import render
from mhcgen.runtime.loader import CAPABILITIES
from mhcgen.spec import Spec
from mhcgen.tune import (
    Candidate,
    Tuned,
    candidates,
    choose,
    own_candidate,
    search,
    shapes,
    tokens_to_try,
    trials_at,
    wants_two_launches,
)

Value = TypeVar("Value")


def variant(plan: Plan, arch: str, wanted: Sequence[Candidate]) -> Plan:
    """A plan whose package has the boundary kernels of some candidates, and no more.

    Its dispatch table gives each group a row, in order. The M in it only say that a
    boundary publishes itself: its clusters run at once. Those of the last group may not
    at the capacity, for which it has a second row.

    Args:
        plan: The plan of the spec that is tuned.
        arch: The architecture.
        wanted: Candidates of one cluster size, all with fn in registers alone or none,
            by rising group.
    """
    cluster_size, blocks = wanted[0].cluster_size, wanted[0].blocks
    spec = plan.spec.model_dump(mode="json")
    spec["name"] = f"{plan.name}_cluster_{cluster_size}{'_split' * (blocks > 1)}"
    spec["moe"] = None
    wave = clusters_at_once(ARCHITECTURES[arch], cluster_size, blocks)
    last = plan.capacity - len(wanted) + 1
    rows: list[dict[str, Any]] = [
        {
            "max_tokens": min(last + i, wave * candidate.group),
            "group": candidate.group,
            "fn_octets": candidate.fn_octets(plan),
        }
        for i, candidate in enumerate(wanted)
    ]
    if rows[-1]["max_tokens"] < plan.capacity:
        rows.append(rows[-1] | {"max_tokens": plan.capacity})
    spec["targets"] = {arch: {"cluster_size": cluster_size, "token_groups": rows}}
    return make_plan(Spec.model_validate(spec))


class VariantTimer:
    """Times candidates; all ranks get the times of the first."""

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        arch: str,
        wanted: Sequence[Candidate],
        temporary: Path,
        advance: Callable[[str], None],
        publishing: bool = True,
    ) -> None:
        """Compiles a package a cluster size, and one more where fn may be split.

        Args:
            machine: The GPUs.
            plan: What is tuned.
            arch: The GPUs' architecture.
            wanted: All candidates that may be timed.
            temporary: A folder for the packages.
            advance: Called after each package, with its name.
            publishing: Whether boundaries may publish themselves.
        """
        self._machine = machine
        self._publishing = publishing
        self._packages: dict[tuple[int, int], Loaded] = {}
        for shape, same in groupby(sorted(wanted, key=_package), _package):
            variant_plan = variant(plan, arch, sorted(same))
            folder = temporary / variant_plan.name
            write_files(folder, render(variant_plan, formatting=False))
            package = load(machine, folder, "")
            self._packages[shape] = package
            advance(variant_plan.name)

    def __call__(
        self, m: int, wanted: Sequence[Candidate]
    ) -> Mapping[Candidate, float]:
        """Medians of publish and boundary at one M, replays interleaved."""
        any_package = next(iter(self._packages.values()))
        inputs = Inputs(self._machine, any_package, m)
        recordings = self._machine.together(
            f"captures, M={m}",
            lambda: {c: capture(self._call(c, inputs)) for c in wanted},
        )
        spreads = interleaved({c: partial(replay, r) for c, r in recordings.items()})
        del recordings
        gc.collect()
        return agreed({c: spread.median for c, spread in spreads.items()})

    def _call(self, candidate: Candidate, inputs: Inputs) -> Call:
        launcher = self._packages[_package(candidate)].launcher
        x, shared = inputs.x, inputs.shared
        outputs, mix = launcher.outputs(inputs.m), launcher.mix(inputs.m)
        sizes = launcher.sizes.items()
        (name,) = [name for name, size in sizes if size == candidate.group]
        whole = launcher.call_of(name, inputs.m)
        if whole is not None and self._publishing:
            rows = launcher.published(x)
            return partial(launcher.call, whole, rows, shared, outputs, mix)
        kernel = launcher.boundaries[name]

        def call() -> None:
            launcher.publish(x)
            launcher.boundary(kernel, shared, outputs, mix)

        return call


def _package(candidate: Candidate) -> tuple[int, int]:
    """Which package has a candidate's kernels."""
    return candidate.cluster_size, candidate.blocks


class Budget:
    """Time that may be spent, by the clock of the first rank."""

    def __init__(self, seconds: float) -> None:
        """Starts the clock."""
        self._end = time.monotonic() + seconds

    def __call__(self) -> bool:
        """Whether any is left: the same answer on all ranks."""
        return agreed(time.monotonic() < self._end)


def agreed(value: Value) -> Value:
    """The first rank's value, on all ranks."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def tune(plan: Plan, tokens: Sequence[int] | None, budget: float) -> Tuned | None:
    """Tunes a plan for the device of this machine.

    Args:
        plan: What to tune.
        tokens: The M to try; None for those at which winners may change.
        budget: Seconds that measuring may take, compilation included.

    Returns:
        What was found; None on all ranks but the first.

    Raises:
        MhcgenError: There is no GPU that the spec is for, an M exceeds the capacity, or
            the budget ran out before anything was measured.
    """
    with machine("mhcgen tune") as gpus, TemporaryDirectory(prefix="mhcgen-") as name:
        has_time = Budget(budget)
        arch = device_arch(plan, gpus.device)
        architecture = ARCHITECTURES[arch]
        sizes = tokens or tokens_to_try(plan, architecture)
        for m in sizes:
            if m > plan.capacity:
                raise MhcgenError(
                    f"--tokens {m}: a call of {plan.name} has 1 to {plan.capacity} "
                    "tokens (capacity.max_tokens)"
                )
        wanted = candidates(plan, architecture)
        own = plan.target(arch)
        known = {own.cluster_size: own} | shapes(plan, architecture)
        planned = {
            m: trials_at(m, known, wanted, own_candidate(plan, arch, m)) for m in sizes
        }
        used = {trial.candidate for trials in planned.values() for trial in trials}
        packages = {_package(candidate) for candidate in used}
        steps = len(packages) + len(planned) if gpus.is_first else 0
        with progress("tuning", steps) as advance:
            timer = VariantTimer(
                gpus,
                plan,
                arch,
                sorted(used),
                Path(name),
                advance,
                publishing=not wants_two_launches(plan, arch),
            )
            trials = search(planned, timer, has_time, advance)
        choice = choose(trials, plan.capacity)
        if not gpus.is_first:
            return None
        return Tuned(plan, arch, described_device(), tuple(trials), choice)


def device_arch(plan: Plan, device: torch.device) -> str:
    """The architecture of a device, which the spec must be for."""
    arch = CAPABILITIES.get(torch.cuda.get_device_capability(device))
    known = [target.arch for target in plan.targets]
    if arch not in known:
        raise MhcgenError(
            f"{torch.cuda.get_device_name(device)} needs {arch or 'no known target'}, "
            f"and {plan.name} is for {', '.join(known)}: add a target to the spec"
        )
    return str(arch)


def described_device() -> str:
    """The device and the releases that times belong to."""
    return (
        f"{torch.cuda.get_device_name()}, nvidia-cutlass-dsl "
        f"{metadata.version('nvidia-cutlass-dsl')}, CUDA {torch.version.cuda}"
    )
