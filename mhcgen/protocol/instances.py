"""What is checked: instances for our protocol, and variants with their verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from mhcgen.protocol.model import Engine, Instance, Protocol

INSTANCES = (
    Instance((2, 1, 2, 1, 2), ranks=1, blocks=2, readers=2),
    Instance((1, 2, 1, 2, 1)),
    Instance((2, 2, 1, 1, 2)),
    Instance((1, 2, 1, 2), blocks=2, group=2),
    Instance((2, 1, 1, 1, 2), group=2),
    Instance((2, 1, 1, 1), readers=2),
    Instance((1, 2, 1, 2), engine=Engine.WAITS),
    Instance((1, 2, 1, 2), engine=Engine.ORDINARY),
    Instance((1, 2, 1, 2), joined=True),
    Instance((1, 2, 1, 2), engine=Engine.BYSTANDER, joined=True),
    Instance((2, 1, 2), room=1),
    Instance((1, 1, 1, 1, 1), ranks=3),
    Instance((1, 2, 1, 2, 1), ranks=3, group=2),
    Instance((1, 2, 1, 1), ranks=3),
    Instance((2, 1, 2, 1, 2), ranks=1, blocks=2, readers=2, launches=(1, 1, 2, 2, 1)),
    Instance((1, 2, 1, 2, 1), launches=(1, 1, 1, 1, 1)),
    Instance((2, 2, 1, 1, 2), launches=(2, 1, 1, 2, 1)),
    Instance((2, 1, 1, 2), launches=(1, 2, 1, 2), blocks=2, group=2),
    Instance((1, 1, 1), launches=(1, 2, 1), blocks=2),
    Instance((2, 1, 1, 1), launches=(1, 1, 2, 1), readers=2),
    Instance((1, 2, 1, 2), launches=(1, 1, 2, 1), engine=Engine.WAITS),
    Instance((1, 2, 1, 2), launches=(1, 2, 1, 1), engine=Engine.ORDINARY),
    Instance((1, 2, 1, 2), launches=(2, 1, 1, 2), joined=True),
    Instance((1, 2, 1), launches=(1, 1, 1), engine=Engine.BYSTANDER, joined=True),
    Instance((2, 1, 2), launches=(1, 2, 1), room=2),
    Instance((2, 1, 2), launches=(1, 1, 1), room=1, in_order=True),
    Instance((1, 1, 1, 1, 1), ranks=3, launches=(1, 2, 1, 1, 2)),
    Instance((1, 2, 1, 2, 1), ranks=3, group=2, launches=(1, 1, 2, 1, 1)),
    Instance((1, 2, 1), ranks=3, launches=(2, 1, 1)),
)
LARGE_INSTANCES = (
    *(Instance(tokens) for tokens in product((1, 2), repeat=5)),
    Instance((2, 1, 2, 1, 2), blocks=2),
    Instance((2, 1, 2, 1, 2), readers=2),
    Instance((1, 2, 2, 1, 2), engine=Engine.WAITS),
    Instance((1, 2, 2, 1, 2), engine=Engine.ORDINARY),
    Instance((2, 1, 2, 1, 2), blocks=2, readers=2, engine=Engine.WAITS),
    Instance((1, 2, 1, 2, 1), ranks=3),
    Instance((2, 1, 1, 1, 2), ranks=3),
    Instance((1, 2, 1, 2, 1), ranks=3, engine=Engine.WAITS),
    Instance((1, 2, 1, 2, 1), ranks=3, blocks=2, readers=2, group=2),
    Instance((2, 2, 2, 2, 2), ranks=3),
    *(Instance(m, launches=(1, 1, 1, 1, 1)) for m in product((1, 2), repeat=5)),
    *(Instance((1, 2, 1, 2, 1), launches=way) for way in product((1, 2), repeat=5)),
    Instance((2, 1, 2), blocks=2, launches=(1, 2, 1)),
    Instance((2, 1, 2, 1, 2), readers=2, launches=(1, 2, 1, 1, 2)),
    Instance((1, 2, 2, 1, 2), engine=Engine.WAITS, launches=(1, 1, 2, 1, 1)),
    Instance((1, 2, 1), ranks=3, launches=(1, 1, 1)),
    Instance((2, 1, 1, 2), ranks=3, launches=(1, 2, 1, 2)),
    Instance((2, 2, 2, 2), room=2, launches=(1, 2, 1, 1)),
)


@dataclass(frozen=True)
class Variant:
    """The protocol with other rules, or used in another way.

    Attributes:
        name: Its name.
        question: What it stands for, in a line.
        protocol: The rules.
        instances: Where it is tried.
        safe: Whether it holds in all of them; otherwise it fails in each.
    """

    name: str
    question: str
    protocol: Protocol
    instances: tuple[Instance, ...]
    safe: bool = False


OURS = Protocol()
VARIANTS = (
    Variant(
        "clear-next",
        "clears the generation that is about to be written, not the consumed one",
        Protocol(rearm_ahead=1),
        (Instance((1, 1, 1)),),
    ),
    Variant(
        "rearm-before-read",
        "re-arms a slot while another lane has yet to read it",
        Protocol(lanes_meet=False),
        (Instance((1,), readers=2),),
    ),
    Variant(
        "early-publish",
        "publish does not wait",
        Protocol(publish_waits=False),
        (Instance((1, 1)),),
    ),
    Variant(
        "early-publish-two-generations",
        "publish does not wait, and the host counts two generations",
        Protocol(generations=2, publish_waits=False, captured_calls=5),
        (Instance((1, 1, 1)),),
    ),
    Variant(
        "early-publish-three-generations",
        "publish does not wait, and the host counts three generations",
        Protocol(publish_waits=False, captured_calls=5),
        (Instance((1, 1, 1, 1)),),
    ),
    Variant(
        "early-trigger",
        "publish triggers before its wait",
        Protocol(publish_triggers_late=False),
        (Instance((1, 1)),),
    ),
    Variant(
        "first-advances",
        "the generation advances before every block has read it",
        Protocol(last_advances=False),
        (Instance((2,)), Instance((2,), launches=(1,))),
    ),
    Variant(
        "count-before-barrier",
        "a block counts itself before all of its warps have read the generation",
        Protocol(warps_meet=False),
        (Instance((2,)), Instance((2,), launches=(1,))),
    ),
    Variant(
        "advance-at-once",
        "the last block to be counted advances the generation at once",
        Protocol(advances_at_end=False),
        (Instance((1,)), Instance((2, 1), launches=(1, 2))),
    ),
    Variant(
        "advance-at-once-in-one-launch",
        "the same, where every boundary publishes",
        Protocol(advances_at_end=False),
        tuple(i for i in INSTANCES if set(i.launches) == {1}),
        safe=True,
    ),
    Variant(
        "boundary-does-not-wait",
        "a boundary that publishes does not wait",
        Protocol(publishing_boundary_waits=False),
        (Instance((1, 1), launches=(2, 1)), Instance((1, 1), launches=(1, 1))),
    ),
    Variant(
        "boundary-publishes-before-its-wait",
        "a boundary publishes before its wait",
        Protocol(boundary_publishes_late=False),
        (Instance((1, 1), launches=(2, 1)), Instance((1, 1), launches=(1, 1))),
    ),
    Variant(
        "boundary-publishes-before-its-wait-three-generations",
        "the same, and the host counts three generations",
        Protocol(boundary_publishes_late=False, captured_calls=5),
        (Instance((1, 1, 1, 1), launches=(1, 1, 1, 1)),),
    ),
    Variant(
        "no-room",
        "a boundary publishes, and not all of its clusters can run at once",
        OURS,
        (
            Instance((2,), launches=(1,), room=1),
            Instance((2, 2), launches=(2, 1), room=1),
        ),
    ),
    Variant(
        "captured-generation",
        "the generation is a host scalar, captured in a graph of one call",
        Protocol(captured_calls=1),
        (Instance((1, 1)),),
    ),
    Variant(
        "captured-generation-4",
        "the same, with a graph of four calls: it ends in the generation it began with",
        Protocol(captured_calls=4),
        (Instance((1, 1, 1, 1, 1)),),
    ),
    Variant(
        "no-sanitize",
        "a payload holds -0.0, the sentinel",
        Protocol(sanitize=False),
        (Instance((1,)),),
    ),
    Variant(
        "fixed-total",
        "arrivals are counted by the first call's total",
        Protocol(fixed_total=True),
        (Instance((1, 2)), Instance((2, 1, 1))),
    ),
    Variant(
        "partial-group-not-rearmed",
        "a last group with fewer tokens is not re-armed",
        Protocol(rearm_partial_group=False),
        (Instance((1, 1, 1, 1), group=2), Instance((1,), group=2)),
    ),
    Variant(
        "different-m",
        "ranks pass different M",
        OURS,
        (
            Instance((2, 1), last_rank_tokens=(1, 1)),
            Instance((1, 1), last_rank_tokens=(2, 1)),
        ),
    ),
    Variant(
        "one-generation",
        "one generation, with our waits",
        Protocol(generations=1),
        (Instance((1, 1)),),
    ),
    Variant(
        "two-generations",
        "two generations, with our waits",
        Protocol(generations=2),
        INSTANCES,
        safe=True,
    ),
    Variant(
        "no-final-wait",
        "a boundary that consumes does not wait before it ends",
        Protocol(boundary_waits=False),
        (Instance((2, 1)), Instance((2,), blocks=2)),
    ),
    Variant(
        "late-rearm-two-generations",
        "re-arming is done a call later only, two generations",
        Protocol(generations=2, rearm_in_time=False),
        (Instance((1, 1, 1)),),
    ),
    Variant(
        "late-rearm",
        "re-arming is done a call later only, three generations",
        Protocol(rearm_in_time=False),
        (Instance((1, 1, 1, 1, 1)), Instance((1, 2, 1, 2))),
        safe=True,
    ),
    Variant(
        "hasty-engine",
        "an engine kernel with PDL overwrites x without a wait",
        OURS,
        (
            Instance((1, 1), engine=Engine.HASTY),
            Instance((1, 1), engine=Engine.HASTY, joined=True),
        ),
    ),
    Variant(
        "bystander-engine",
        "an engine kernel with PDL never waits, and the mixes are not joined",
        OURS,
        (Instance((1, 1), engine=Engine.BYSTANDER),),
    ),
)
