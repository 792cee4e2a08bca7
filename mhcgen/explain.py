"""Explaining a plan: every number with the sum that it comes from."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from mhcgen.architecture import (
    MAX_REGISTERS_PER_THREAD,
    PORTABLE_CLUSTER,
    REGISTERS_PER_MULTIPROCESSOR,
    WARP,
)
from mhcgen.console import show_table
from mhcgen.errors import MhcgenError
from mhcgen.plan import (
    FRAGMENT_BYTES,
    FRAGMENT_ELEMENTS,
    GENERATIONS,
    MANY_WORDS,
    MAY_SPILL,
    PUBLISH_THREADS,
    Plan,
    TargetPlan,
    TokenGroup,
    boundary_registers,
    launches_fault,
    projection_registers,
)
from mhcgen.render import kernel_rows

_FN_HOME = {
    "registers": "a thread's part of fn fits its registers",
    "shared": "a thread's part of fn fits its registers no more; the block's part fits "
    "shared memory beside some tokens",
    "global": "a block's part of fn fits nowhere: the projection reads it from L2",
}

_MIXES = {
    "tail": "mixes: a warp of each boundary computes them",
    "side_stream": "mixes: a launch of their own computes them, on a side stream",
}

_LAUNCHES = {
    1: "all clusters run at once: the boundary publishes itself",
    2: "from the spec: a launch before it publishes",
}

Value = int | bool | str | tuple[int, ...]


@dataclass(frozen=True)
class Fact:
    """One quantity of a plan.

    Attributes:
        key: Its name.
        value: How much it is.
        how: Where it comes from.
    """

    key: str
    value: Value
    how: str


@dataclass(frozen=True)
class Table:
    """Quantities that go together in rows."""

    key: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """One part of an explanation."""

    key: str
    title: str
    facts: list[Fact]
    tables: list[Table] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The values by their names."""
        facts = {fact.key: fact.value for fact in self.facts}
        return facts | {table.key: table.rows for table in self.tables}

    def show(self) -> None:
        """Prints the section."""
        show_table(
            self.title,
            ("quantity", "value", "derivation"),
            [(_words(fact.key), _text(fact.value), fact.how) for fact in self.facts],
        )
        for table in self.tables:
            if table.rows:
                show_table(
                    f"{self.title}: {_words(table.key)}",
                    [_words(key) for key in table.rows[0]],
                    [
                        [
                            _text(v) if isinstance(v, tuple | bool) else v
                            for v in row.values()
                        ]
                        for row in table.rows
                    ],
                )


def _words(key: str) -> str:
    return key.replace("_", " ")


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def explain(
    plan: Plan, archs: Collection[str] = (), tokens: int | None = None
) -> list[Section]:
    """Everything that follows from a spec.

    Args:
        plan: The plan to explain.
        archs: The architectures to explain; all if empty. The plan has each.
        tokens: A number of tokens whose launches are to be explained.

    Raises:
        MhcgenError: No call can have so many tokens.
    """
    if tokens is not None and not 0 <= tokens <= plan.capacity:
        raise MhcgenError(
            f"--tokens {tokens}: a call of {plan.name} has 0 to {plan.capacity} tokens "
            "(capacity.max_tokens)"
        )
    targets = [target for target in plan.targets if not archs or target.arch in archs]
    return [
        _shape(plan),
        _lanes(plan),
        _mailbox(plan),
        *(_target(target, tokens) for target in targets),
    ]


def as_json(plan: Plan, sections: list[Section]) -> dict[str, Any]:
    """An explanation as one JSON object."""
    return {"name": plan.name} | {
        section.key: section.as_json() for section in sections
    }


def show(sections: list[Section]) -> None:
    """Prints an explanation."""
    for index, section in enumerate(sections):
        if index:
            print()
        section.show()


def _shape(plan: Plan) -> Section:
    return Section(
        "shape",
        f"{plan.name}: shape",
        [
            Fact("hidden", plan.hidden, "model.hidden"),
            Fact("streams", plan.hc, "model.hc"),
            Fact("mixes", plan.mix, f"= {plan.hc} streams x (2 + {plan.hc} streams)"),
            Fact(
                "sums",
                plan.sums,
                f"= {plan.mix} mixes + {plan.sums - plan.mix} square "
                f"sum{'s' * plan.delayed}",
            ),
            Fact(
                "projection",
                plan.projection,
                "from the spec"
                if plan.spec.precision.projection != "auto"
                else f"picked: fn is {plan.fn_weight}, activations are "
                f"{plan.activation}",
            ),
            Fact(
                "fragments",
                plan.fragments,
                f"= {plan.hidden} elements / {FRAGMENT_ELEMENTS}, "
                f"{FRAGMENT_BYTES} bytes each",
            ),
            Fact(
                "shares",
                plan.shares,
                f"= {plan.fragments} fragments / {plan.fragments_per_warp} that a warp "
                "takes at once, rounded up",
            ),
            Fact("trips", plan.trips, "shares that a warp takes one after another"),
            Fact("fn_home", plan.fn_home, _FN_HOME[plan.fn_home]),
            Fact("mixes_placement", plan.spec.mixes, _MIXES[plan.spec.mixes]),
            Fact(
                "publish_threads",
                plan.publish_threads,
                f"at most {PUBLISH_THREADS}; {plan.fragments} fragments need "
                f"{plan.publish_blocks * plan.publish_threads - plan.fragments} idle",
            ),
            Fact(
                "publish_blocks",
                plan.publish_blocks,
                f"= {plan.fragments} fragments / {plan.publish_threads} threads, "
                "rounded up",
            ),
        ],
    )


def _lanes(plan: Plan) -> Section:
    lanes = plan.lane_map
    rows = []
    for lane in range(lanes.lanes):
        word = lane // lanes.word_lanes * lanes.words
        stream = lane % lanes.word_lanes * lanes.streams
        rows.append(
            {
                "lane": lane,
                "words": _numbers(word, lanes.words),
                "mixes_streams": _numbers(stream, lanes.streams),
                "copies_stream": lane,
            }
        )
    return Section(
        "lane_map",
        f"{plan.name}: lane map of a fragment",
        [
            Fact("lanes", lanes.lanes, f"one for each of {plan.hc} streams"),
            Fact("words", lanes.words, "of a fragment's four, that a lane takes"),
            Fact("word_lanes", lanes.word_lanes, "lanes that share these words"),
            Fact("streams", lanes.streams, f"= {plan.hc} streams / {lanes.word_lanes}"),
            Fact("merges", lanes.merges, "shuffles that sum a collapse over them"),
        ],
        [Table("lane_table", rows)],
    )


def _numbers(first: int, count: int) -> str:
    return " ".join(str(first + index) for index in range(count))


def _mailbox(plan: Plan) -> Section:
    box = plan.mailbox
    if plan.tp == 1:
        return Section(
            "mailbox",
            f"{plan.name}: mailbox",
            [Fact("total_bytes", 0, "one rank sends nothing: there is no mailbox")],
        )
    return Section(
        "mailbox",
        f"{plan.name}: mailbox [generation, rank, token, element]",
        [
            Fact(
                "mailbox_shape",
                (GENERATIONS, box.tp, box.capacity, box.hidden),
                "generations, tp, capacity.max_tokens, hidden",
            ),
            Fact(
                "row_bytes",
                box.row_bytes,
                f"= {box.hidden} elements x {box.row_bytes // box.hidden} bytes",
            ),
            Fact(
                "slot_bytes", box.slot_bytes, f"= {box.capacity} rows x {box.row_bytes}"
            ),
            Fact(
                "generation_bytes",
                box.generation_bytes,
                f"= {box.tp} ranks x {box.slot_bytes}",
            ),
            Fact(
                "total_bytes",
                box.total_bytes,
                f"= {GENERATIONS} generations x {box.generation_bytes}",
            ),
        ],
    )


def _target(target: TargetPlan, tokens: int | None) -> Section:
    plan = target.plan
    tables = [
        Table("kernels", [asdict(row) for row in kernel_rows(target)]),
        Table("dispatch", _dispatch(target)),
    ]
    if tokens is not None:
        launches = target.launches(tokens) if tokens else ()
        tables.append(Table("launches", [asdict(launch) for launch in launches]))
    return Section(
        target.arch,
        f"{target.arch} ({target.architecture.products})",
        [
            Fact("cluster_size", target.cluster_size, target.cluster_reason),
            Fact(
                "warps",
                target.warps,
                f"= {plan.shares} shares / {target.cluster_size} blocks / {plan.trips} "
                f"trip{'s' * (plan.trips > 1)}, rounded up",
            ),
            Fact("threads", target.threads, f"= {target.warps} warps x {WARP}"),
            Fact(
                "launched_threads",
                target.launched_threads,
                f"= {target.threads} + {WARP} of the mixes"
                if plan.tail
                else "the same: the mixes have a launch of their own",
            ),
            Fact(
                "fragments_per_block",
                target.fragments_per_block,
                f"= {target.warps} warps x {plan.trips} trip{'s' * (plan.trips > 1)} x "
                f"{plan.fragments_per_warp} fragments",
            ),
            Fact(
                "idle_lanes",
                (target.cluster_size * target.fragments_per_block - plan.fragments)
                * plan.lane_map.lanes,
                f"= ({target.cluster_size} blocks x {target.fragments_per_block} - "
                f"{plan.fragments} fragments) x {plan.lane_map.lanes} lanes",
            ),
            Fact(
                "register_limit",
                target.register_limit,
                f"= {REGISTERS_PER_MULTIPROCESSOR} registers / "
                f"{target.launched_threads} threads, at most "
                f"{MAX_REGISTERS_PER_THREAD}",
            ),
            Fact(
                "boundary_registers",
                boundary_registers(plan),
                f"estimated, {_registers(plan)}",
            ),
            Fact(
                "projection_registers",
                max(
                    projection_registers(plan, row.group, row.fn_octets)
                    for row in target.token_groups
                ),
                f"estimated, for the projection of {target.groups[-1]} tokens",
            ),
            Fact("may_spill", target.may_spill, _may_spill(target)),
            Fact(
                "clusters_at_once",
                target.wave(),
                _wave(target),
            ),
            Fact("token_groups", target.groups, target.groups_reason),
            *(
                Fact(f"at_once_group_{row.kernel}", row.at_once, _at_once(target, row))
                for row in target.forms
            ),
            *(
                Fact(f"fn_octets_group_{row.kernel}", row.fn_octets, _octets(plan, row))
                for row in target.forms
                if plan.splits_fn
            ),
            Fact(
                "shared_limit",
                target.architecture.shared_bytes,
                "bytes that a block may use",
            ),
            *(
                Fact(
                    f"shared_bytes_group_{row.kernel}",
                    row.shared_bytes,
                    _shared(target, row),
                )
                for row in target.forms
            ),
        ],
        tables,
    )


def _wave(target: TargetPlan) -> str:
    size = target.cluster_size
    if size <= PORTABLE_CLUSTER:
        capacity = target.architecture.cluster_8_capacity
        return (
            f"= {capacity} portable clusters x {PORTABLE_CLUSTER} blocks / {size}, "
            "rounded down"
        )
    each = target.architecture.max_cluster // size
    return (
        f"= {target.wave() // each} groups of multiprocessors x {each}, the clusters "
        "that fit one"
    )


def _registers(plan: Plan) -> str:
    fn = f"{plan.fn_fragments} fragments of fn and " * (plan.fn_home == "registers")
    return f"for {fn}{plan.arrived_words} arrived words of one token"


def _may_spill(target: TargetPlan) -> str:
    if not target.may_spill:
        if any(row.blocks > 1 for row in target.token_groups):
            return f"bytes of a thread; {MAY_SPILL} where two blocks share registers"
        return "bytes of a thread: no kernel spills"
    if target.plan.fn_home == "global":
        return "bytes of a boundary's thread: fn is loaded as far ahead as it can be"
    if target.plan.arrived_words >= MANY_WORDS:
        return "bytes of a boundary's thread: a lane has many words to poll"
    return f"bytes of a boundary's thread: {target.register_limit} registers are few"


def _at_once(target: TargetPlan, row: TokenGroup) -> str:
    plan = target.plan
    fragments = row.group * plan.trips
    turns = -(-fragments // row.at_once)
    return (
        f"= {fragments} fragment{'s' * (fragments > 1)} of a thread / {turns} "
        f"turn{'s' * (turns > 1)}, rounded up: takes about "
        f"{boundary_registers(plan, row.at_once, row.fn_octets)} registers"
    )


def _octets(plan: Plan, row: TokenGroup) -> str:
    rest = plan.fn_octets - row.fn_octets
    blocks = f"{row.blocks} block{'s' * (row.blocks > 1)} a multiprocessor"
    return f"octets of fn's rows in registers, {rest} in shared memory; {blocks}"


def _shared(target: TargetPlan, row: TokenGroup) -> str:
    fn_bytes = target.fn_bytes(row.fn_octets)
    fn = f"{fn_bytes} of fn + " if fn_bytes else ""
    each, rest = divmod(row.shared_bytes - fn_bytes, row.group)
    padding = f" + {rest} of alignment" if rest else ""
    return f"= {fn}{row.group} token{'s' * (row.group > 1)} x {each} bytes{padding}"


def _boundaries(plan: Plan, row: TokenGroup) -> list[str]:
    """The boundary kernels of a dispatch row, one a transport if it publishes."""
    if row.launches == 1:
        return [plan.boundary_name(row.kernel, name) for name in plan.transports]
    return [plan.boundary_name(row.kernel)]


def _dispatch(target: TargetPlan) -> list[dict[str, Any]]:
    rows = []
    first = 1
    for row in target.token_groups:
        rows.append(
            {
                "tokens": f"{first} to {row.max_tokens}",
                "kernels": ", ".join(_boundaries(target.plan, row)),
                "token_group": row.group,
                "clusters": f"{-(-first // row.group)} to "
                f"{-(-row.max_tokens // row.group)}",
                "launches": row.launches,
                **({"finalizes": row.finalizes} if target.plan.spec.moe else {}),
                "reason": launches_fault(target, row.max_tokens, row.group, row.blocks)
                or _LAUNCHES[row.launches],
            }
        )
        first = row.max_tokens + 1
    return rows
