"""The model of the mailbox protocol: ours holds, known-bad variants fail."""

import subprocess
import sys

import pytest

from mhcgen.protocol import (
    INSTANCES,
    VARIANTS,
    Engine,
    Instance,
    Model,
    Protocol,
    Variant,
    explore,
)
from mhcgen.protocol.search import Search, State

MESSAGES = {
    "clear-next": "clears the row of call 1, which nobody has read",
    "rearm-before-read": "deadlock",
    "early-publish": "reads generation 0, not 1",
    "early-publish-two-generations": "overwrites the row of call 0, which nobody",
    "early-publish-three-generations": "overwrites the row of call 0, which nobody",
    "early-trigger": "reads generation 0, not 1",
    "first-advances": "reads generation 1, not 0",
    "count-before-barrier": "reads generation 1, not 0",
    "early-count-advances-at-once": "reads generation",
    "early-count-and-no-final-wait": "reads generation",
    "boundary-does-not-wait": "reads generation 0, not 1",
    "boundary-publishes-before-its-wait": "reads generation 0, not 1",
    "boundary-publishes-before-its-wait-three-generations": "overwrites the row of",
    "no-room": "deadlock",
    "captured-generation": "overwrites the row of call 0, which nobody",
    "captured-generation-4": "overwrites the row of call 3, which nobody",
    "no-sanitize": "deadlock",
    "fixed-total": "reads generation",
    "partial-group-not-rearmed": "re-armed",
    "different-m": "deadlock",
    "one-generation": "overwrites the row of call 0, which nobody",
    "late-rearm-two-generations": "overwrites the row of call 0, which nobody",
    "hasty-engine": "reads",
    "bystander-engine": "reads generation 0, not 1",
}
LONGEST_TRACE = 24


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_our_protocol_holds(instance: Instance) -> None:
    report = explore(Model(Protocol(), instance))
    assert report.violation is None, str(report.violation)
    assert report.ends == 1


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant(variant: Variant) -> None:
    for instance in variant.instances:
        violation = explore(Model(variant.protocol, instance)).violation
        assert (violation is None) == variant.safe, f"{instance}\n{violation}"
        if violation is not None:
            assert MESSAGES[variant.name] in violation.message
            assert len(violation.trace) <= LONGEST_TRACE


def test_a_trace_ends_with_what_goes_wrong() -> None:
    model = Model(Protocol(publish_triggers_late=False), Instance((1, 1)))
    violation = explore(model).violation
    assert str(violation) == (
        "   1. rank 0, call 1, boundary, token 0, lane 0: reads the generation\n"
        "  ==> reads generation 0, not 1"
    )


def test_a_deadlock_names_the_polls_that_wait() -> None:
    violation = explore(Model(Protocol(sanitize=False), Instance((1,)))).violation
    assert violation is not None
    assert violation.trace[-1] == (
        "rank 1, call 0, boundary, token 0, lane 0: reads rank 0's row: waits for ever"
    )


def test_clusters_that_wait_for_room_are_named() -> None:
    """Each rank runs another cluster, and each waits for the other's."""
    instance = Instance((2,), launches=(1,), room=1)
    violation = explore(Model(Protocol(), instance)).violation
    assert violation is not None and violation.message == "deadlock"
    starts = [line for line in violation.trace if "cluster" in line]
    assert starts == [
        "rank 0, call 0, boundary, cluster 0: starts",
        "rank 1, call 0, boundary, cluster 1: starts",
        "rank 0, call 0, boundary, cluster 1: starts: waits for ever",
        "rank 1, call 0, boundary, cluster 0: starts: waits for ever",
    ]
    in_order = Instance((2,), launches=(1,), room=1, in_order=True)
    assert explore(Model(Protocol(), in_order)).violation is None


def outcomes(
    model: Model, reduce: bool
) -> tuple[int, set[State], set[tuple[int, str | None]]]:
    """States, last states and problems of a whole search, past every problem."""
    search = Search(model)
    first: State = (0, bytes(model.memory))
    seen, todo = {first}, [first]
    ends, problems = set(), set()
    while todo:
        state = todo.pop()
        enabled = search.enabled(state)
        if not enabled:
            ends.add(state)
            continue
        for index in search.stubborn(state, enabled) if reduce else enabled:
            following, problem = search.after(state, index)
            if problem is not None:
                problems.add((index, problem))
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return len(seen), ends, problems


@pytest.mark.parametrize(
    ("protocol", "instance"),
    [
        (Protocol(), Instance((1, 1, 1))),
        (Protocol(rearm_ahead=1), Instance((1, 1))),
        (Protocol(generations=1), Instance((1, 1))),
        (Protocol(generations=1, rearm_in_time=False), Instance((1, 1), ranks=1)),
        (Protocol(publish_waits=False), Instance((1, 1), ranks=1)),
        (Protocol(publish_triggers_late=False), Instance((1, 2, 1), ranks=1)),
        (Protocol(last_advances=False), Instance((2,), ranks=1, blocks=2)),
        (Protocol(fixed_total=True), Instance((1, 2, 1), ranks=1)),
        (Protocol(lanes_meet=False), Instance((1, 1), ranks=1, readers=2)),
        (Protocol(), Instance((1, 1, 1), ranks=1, engine=Engine.HASTY)),
        (Protocol(boundary_waits=False), Instance((1, 1), engine=Engine.WAITS)),
        (Protocol(), Instance((2,), launches=(1,), room=1)),
        (Protocol(), Instance((2, 1), ranks=1, launches=(1, 1), room=1)),
        (Protocol(), Instance((1, 2, 1), ranks=1, launches=(1, 2, 1))),
        (Protocol(counts_late=False), Instance((2, 1), ranks=1, launches=(1, 2))),
        (
            Protocol(counts_late=False, advances_at_end=False),
            Instance((2,), ranks=1, blocks=2),
        ),
        (
            Protocol(boundary_publishes_late=False),
            Instance((1, 1), ranks=1, launches=(1, 1)),
        ),
    ],
)
def test_the_reduction_loses_nothing(protocol: Protocol, instance: Instance) -> None:
    model = Model(protocol, instance)
    states, *found = outcomes(model, reduce=True)
    all_states, *all_found = outcomes(model, reduce=False)
    assert found == all_found
    assert states < all_states


def test_the_command_checks_one_variant() -> None:
    command = [sys.executable, "-m", "mhcgen.protocol", "--variant", "no-sanitize"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 ranks, M 1" in result.stdout
    assert "==> deadlock" in result.stdout
