"""Kernels of every type, output and end, executed and compared with the reference."""

import dataclasses

import numpy as np
import pytest

from mhcgen import reference
from mhcgen.emulator.package import EmulatedPackage, EmulatedRanks, Streams
from mhcgen.plan import GENERATIONS, Plan
from mhcgen.verify.cases import Case
from mhcgen.verify.inputs import plain_call
from mhcgen.verify.on_cpu import as_numpy, run, weights_of
from mhcgen.verify.subject import Subject
from tests.emulator.conftest import Load
from tests.emulator.network import Network
from tests.variants import VARIANTS

pytestmark = pytest.mark.long

ENDS = [plan for plan in VARIANTS if plan.ends]


@pytest.mark.parametrize("plan", VARIANTS, ids=lambda plan: plan.name)
def test_every_output(load: Load, plan: Plan) -> None:
    """One token, and a call whose last token group has two: every kind of input."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    calls = len(reference.VARIANTS)
    for transport, tokens in zip(plan.transports * 2, (1, 5), strict=False):
        outcome = run(package, Case(target.arch, transport, (tokens,) * calls, 3))
        assert outcome.ok, (outcome.errors, outcome.problems)


STRESSED = ("fp16", "fp32_in_l2", "delayed", "delayed_trips", "delayed_fp16")


@pytest.mark.parametrize(
    "plan", [p for p in VARIANTS if p.name in STRESSED], ids=lambda plan: plan.name
)
def test_calls_in_flight(load: Load, plan: Plan) -> None:
    """Each call takes the streams, and the pre-mix, of the call before it."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    for seed in range(3):
        case = Case(target.arch, "unicast", (5, 4, 1, 3), seed, stress=True)
        outcome = run(package, case)
        assert outcome.ok, (outcome.errors, outcome.problems)


def run_ends(package: EmulatedPackage, tokens: int) -> None:
    """Exits, and entries, with every kind of input; the mailbox is armed again."""
    plan = package.plan
    network = Network(package, EmulatedRanks(package, plan.transports[-1]))
    for seed, hard in enumerate(reference.VARIANTS):
        call = plain_call(Subject.of_plan(plan), tokens, seed, hard)
        checks = []
        if plan.exit_by:
            checks.append(network.exit(call))
        if plan.spec.ends.entry:
            checks.append(network.entry(call)[1])
        network.ranks.run()
        for check in checks:
            check()
    assert network.ranks.idle_problems() == []
    if plan.exit_by and plan.tp > 1:
        exits = len(reference.VARIANTS)
        assert network.ranks.generation(0) == exits % GENERATIONS


@pytest.mark.parametrize("plan", ENDS, ids=lambda plan: plan.name)
def test_the_ends(load: Load, plan: Plan) -> None:
    """One token and several."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    for tokens in (1, 3):
        run_ends(package, tokens)


def run_passes(package: EmulatedPackage) -> None:
    """Forward passes in flight at once: they share the mailbox, under the adversary."""
    plan = package.plan
    (target,) = plan.targets
    # Several blocks of an end, with more to do, take one seed; others three.
    wide = plan.ends_cluster > 1
    for seed, resident in enumerate((1,) if wide else (None, 1, 3)):
        clusters = resident and resident * max(target.cluster_size, plan.ends_cluster)
        ranks = EmulatedRanks(package, "unicast", seed, clusters)
        network = Network(package, ranks)
        checks = []
        for turn, tokens in enumerate((2, 1) if wide else (4, 1, 3)):
            call = plain_call(Subject.of_plan(plan), tokens, 10 * seed + turn)
            output, check = network.entry(call)
            checks.append(check)
            ranks.publish(ranks.tensor("x", *map(as_numpy, call.inputs.parts)))
            output = ranks.consume(output.streams, weights_of(ranks, call))
            checks.append(network.exit(call, output.streams))
        ranks.run()
        for check in checks:
            check()
        assert ranks.idle_problems() == []


@pytest.mark.parametrize(
    "plan", [p for p in ENDS if p.spec.ends.entry], ids=lambda plan: plan.name
)
def test_forward_passes_in_flight(load: Load, plan: Plan) -> None:
    """Entry, boundary and exit, one behind the other."""
    run_passes(load(plan, plan.targets[0].arch))


@pytest.mark.parametrize("name", ["plus_one", "fp32", "delayed", "fp16_means"])
def test_a_token_has_the_same_bits_wherever_it_is(load: Load, name: str) -> None:
    """Alone, in a group, first, last or between: the same on every rank, too."""
    plan = next(plan for plan in VARIANTS if plan.name == name)
    (target,) = plan.targets
    package = load(plan, target.arch)
    ranks = EmulatedRanks(package, "unicast")
    call = plain_call(Subject.of_plan(plan), 8, seed=9)
    pool, weights = call.inputs, weights_of(ranks, call)
    first: dict[str, np.ndarray] = {}
    kernels = set()
    for rows in ([0], [5, 0], [7, 0, 3], [0, 1, 2, 3], [6, 5, 4, 3, 2, 1, 0]):
        kernels.add(target.boundary_launch(len(rows)).kernel)
        each = {
            field.name: getattr(pool, field.name)[rows]
            for field in dataclasses.fields(Streams)
        }
        streams = Streams(
            *(ranks.tensor(name, as_numpy(tensor)) for name, tensor in each.items())
        )
        x = (as_numpy(part[rows]) for part in pool.parts)
        ranks.publish(ranks.tensor("x", *x))
        output = ranks.consume(streams, weights)
        ranks.run()
        place = rows.index(0)
        tensors = vars(output.streams) | {
            "layer_input": output.layer_input,
            "mix": output.mix,
            "stream_mean": output.stream_mean,
        }
        for name, tensor in tensors.items():
            for rank in range(plan.tp) if tensor else ():
                content = tensor.read(rank)[place]
                bits = content.view(f"u{content.itemsize}")
                assert np.array_equal(first.setdefault(name, bits), bits), (name, rows)
    assert len(kernels) == 2
