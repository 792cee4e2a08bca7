"""Kernels of every type, output and end, executed and compared with the reference."""

import dataclasses

import numpy as np
import pytest
import torch

from mhcgen import reference
from mhcgen.emulator.package import EmulatedPackage, EmulatedRanks, Head, Streams
from mhcgen.plan import Plan
from mhcgen.verify import (
    Case,
    as_numpy,
    as_torch,
    constants_of,
    inputs_of,
    norm_weight_of,
    run,
    uploaded_weights,
    wrong_bits,
)
from tests.emulator.conftest import Load
from tests.variants import VARIANTS

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


class Network:
    """Entries, boundaries and exits of a package, each checked against the reference.

    Attributes:
        ranks: The emulated ranks.
    """

    def __init__(self, package: EmulatedPackage, ranks: EmulatedRanks) -> None:
        self.ranks = ranks
        self.plan = package.plan
        self.constants = constants_of(self.plan)

    def uploaded(self, tensor: torch.Tensor):  # type: ignore[no-untyped-def]
        return self.ranks.tensor("given", as_numpy(tensor))

    def streams(self, inputs: reference.Inputs) -> Streams:
        names = ["residual", "post", "comb", "pre"]
        return Streams(*(self.uploaded(getattr(inputs, name)) for name in names))

    def entry(self, inputs: reference.Inputs):  # type: ignore[no-untyped-def]
        """Launches an entry; the second result checks it once it has run."""
        plan, hidden = self.plan, inputs.parts[0]
        weights = uploaded_weights(self.ranks, inputs)
        output = self.ranks.entry(self.uploaded(hidden), weights)
        expected = reference.entry_boundary(
            hidden,
            inputs.fn,
            inputs.scale,
            inputs.base,
            norm_weight_of(plan, inputs),
            self.constants,
        )

        def check() -> None:
            for rank in range(plan.tp):
                streams = output.streams
                residual = as_torch(streams.residual.read(rank))
                assert wrong_bits(residual, expected.residual) == 0
                layer_input = as_torch(output.layer_input.read(rank))
                close = reference.check_layer_input(layer_input, expected)
                assert close.worst_ulp <= 2, close
                post, comb = streams.post.read(rank), streams.comb.read(rank)
                mixes = reference.check_mixes(as_torch(post), as_torch(comb), expected)
                assert mixes.ok, mixes
                if plan.delayed:
                    assert streams.pre is not None
                    pre = as_torch(streams.pre.read(rank))
                    off = reference.max_abs_error(pre, expected.pre)
                    assert off <= reference.MIX_TOLERANCE
                if plan.stream_mean:
                    assert output.stream_mean is not None
                    means = as_torch(output.stream_mean.read(rank))
                    assert wrong_bits(means, hidden) == 0

        return output, check

    def exit(self, inputs: reference.Inputs, streams: Streams | None = None):  # type: ignore[no-untyped-def]
        """Launches an exit; the result checks it once it has run."""
        plan, hc = self.plan, self.plan.hc
        weight = norm_weight_of(plan, inputs)
        rows = (inputs.fn[:hc], inputs.scale[:1], inputs.base[:hc])
        by_head = plan.exit_by == "sigmoid"
        head = Head(*map(self.uploaded, rows)) if by_head else None
        self.ranks.publish(self.ranks.tensor("x", *map(as_numpy, inputs.parts)))
        given = streams or self.streams(inputs)
        output = self.ranks.exit(
            given, None if weight is None else self.uploaded(weight), head
        )

        def check() -> None:
            for rank in range(plan.tp):
                residual, post, comb, *pre = (
                    as_torch(each.read(rank)) for each in vars(given).values() if each
                )
                weights = {
                    "mean": None,
                    "sigmoid": reference.Head(*rows),
                    "pre_mix": pre[0] if pre else None,
                }[plan.exit_by or ""]
                expected = reference.exit_boundary(
                    inputs.parts, residual, post, comb, weight, self.constants, weights
                )
                close = reference.check_layer_input(
                    as_torch(output.read(rank)), expected
                )
                assert close.worst_ulp <= 2, close

        return check


@pytest.mark.parametrize("plan", ENDS, ids=lambda plan: plan.name)
def test_the_ends(load: Load, plan: Plan) -> None:
    """Every kind of input, one token and several; the mailbox is armed again."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    for tokens in (1, 3):
        network = Network(package, EmulatedRanks(package, plan.transports[0]))
        for seed, hard in enumerate(reference.VARIANTS):
            inputs = inputs_of(plan, tokens, seed, hard)
            checks = [network.exit(inputs)]
            if plan.spec.ends.entry:
                checks.append(network.entry(inputs)[1])
            network.ranks.run()
            for check in checks:
                check()
        assert network.ranks.idle_problems() == []


@pytest.mark.parametrize(
    "plan", [p for p in ENDS if p.spec.ends.entry], ids=lambda plan: plan.name
)
def test_forward_passes_in_flight(load: Load, plan: Plan) -> None:
    """Entry, boundary and exit share the mailbox, under an adversarial scheduler."""
    (target,) = plan.targets
    package = load(plan, target.arch)
    for seed, resident in enumerate((None, 1, 3)):
        clusters = resident and resident * max(target.cluster_size, plan.ends_cluster)
        ranks = EmulatedRanks(package, "unicast", seed, clusters)
        network = Network(package, ranks)
        checks = []
        for turn, tokens in enumerate((4, 1, 3)):
            inputs = inputs_of(plan, tokens, 10 * seed + turn)
            output, check = network.entry(inputs)
            checks.append(check)
            ranks.publish(ranks.tensor("x", *map(as_numpy, inputs.parts)))
            output = ranks.consume(output.streams, uploaded_weights(ranks, inputs))
            checks.append(network.exit(inputs, output.streams))
        ranks.run()
        for check in checks:
            check()
        assert ranks.idle_problems() == []


@pytest.mark.parametrize("name", ["plus_one", "fp32", "delayed", "fp16_means"])
def test_a_token_has_the_same_bits_wherever_it_is(load: Load, name: str) -> None:
    """Alone, in a group, first, last or between: the same on every rank, too."""
    plan = next(plan for plan in VARIANTS if plan.name == name)
    (target,) = plan.targets
    package = load(plan, target.arch)
    ranks = EmulatedRanks(package, "unicast")
    pool = inputs_of(plan, 8, seed=9)
    weights = uploaded_weights(ranks, pool)
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
