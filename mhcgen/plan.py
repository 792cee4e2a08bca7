"""Everything that follows from a spec: sizes, launch shapes and the M → kernel table.

All arithmetic on shapes happens here, before anything is rendered. Templates only place
these numbers, and what hardware cannot do is refused here, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mhcgen.architecture import (
    ARCHITECTURES,
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    PORTABLE_CLUSTER,
    REGISTERS_PER_MULTIPROCESSOR,
    WARP,
    Architecture,
)
from mhcgen.errors import PlanError, Problem
from mhcgen.spec import Spec, Target

FRAGMENT_BYTES = 16
FRAGMENT_ELEMENTS = 8  # 16 bytes of a two-byte activation
FRAGMENT_WORDS = 4
QUAD = 4  # lanes of a tensor-core row
OCTET = 8  # rows or tokens of half a tensor-core tile
BANK_BYTES = 128  # one word in each bank of shared memory
GENERATIONS = 3
PUBLISH_THREADS = 128
TOKEN_GROUPS = (1, 2, 3, 4, 5, 8, 12, 16)  # what the plan picks from
MIXES_THREADS = 32
INT32_MAX = 2**31 - 1
SHARED_EXPERT = {"optional": (False, True), "always": (True,), "never": (False,)}
# Registers of a boundary thread beyond those that hold fn and tokens' inputs, for
# addresses, sums and what is in work. Measured as 50 to 58 on DSL 4.8.1.
WORKING_REGISTERS = 58


@dataclass(frozen=True)
class TokenGroup:
    """One row of a dispatch table: calls of up to ``max_tokens`` tokens.

    Attributes:
        max_tokens: The largest M that this row serves.
        group: Tokens that one cluster takes together.
    """

    max_tokens: int
    group: int

    @property
    def kernel(self) -> str:
        """The kernel that serves this row."""
        return boundary_name(self.group)


@dataclass(frozen=True)
class Launch:
    """The launch shape of one kernel for one M."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    cluster: int
    shared_bytes: int


@dataclass(frozen=True)
class LaneMap:
    """Which rank and which stream a lane serves; a fragment has ``lanes`` lanes.

    Lane ``l`` polls the ranks ``(l % sources) * polls … + polls - 1`` and then owns
    stream ``l``. The partial sums of the sources meet by butterfly shuffles.

    Attributes:
        lanes: Lanes of one fragment, one a stream.
        sources: Lanes that poll distinct ranks.
        polls: Ranks that each of these lanes polls.
        butterflies: Lane distances of the shuffles that sum the sources, in order.
        splits: Lane distances of the shuffles that spread the eight columns of a
            collapsed fragment over its lanes, in order.
    """

    lanes: int
    sources: int
    polls: int
    butterflies: tuple[int, ...]
    splits: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Four fragments of one stream: what a quad of lanes multiplies at once.

    Attributes:
        part: Which four of the warp's fragments.
        stream: The residual stream.
    """

    part: int
    stream: int


@dataclass(frozen=True)
class MailboxPlan:
    """The symmetric buffer [generations, tp, capacity, hidden] of activations."""

    tp: int
    capacity: int
    hidden: int

    @property
    def row_bytes(self) -> int:
        """Bytes from one token's row to the next."""
        return self.hidden * 2

    @property
    def slot_bytes(self) -> int:
        """Bytes from one rank's rows to the next rank's."""
        return self.capacity * self.row_bytes

    @property
    def generation_bytes(self) -> int:
        """Bytes from one generation to the next."""
        return self.tp * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole buffer, on every rank."""
        return GENERATIONS * self.generation_bytes


@dataclass(frozen=True)
class TargetPlan:
    """One architecture's share of a plan.

    Attributes:
        architecture: The hardware.
        cluster_size: Thread blocks of a boundary cluster; they split the hidden size.
        cluster_reason: Why this cluster size.
        token_groups: The dispatch table, by rising ``max_tokens``.
        groups_reason: Why these token groups.
    """

    plan: Plan
    architecture: Architecture
    cluster_size: int
    cluster_reason: str
    token_groups: tuple[TokenGroup, ...]
    groups_reason: str

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture."""
        return self.architecture.name

    @property
    def fragments_per_block(self) -> int:
        """Fragments of a row that one block owns."""
        return self.plan.fragments // self.cluster_size

    @property
    def threads(self) -> int:
        """Threads of a boundary block."""
        return self.fragments_per_block * self.plan.lane_map.lanes

    @property
    def warps(self) -> int:
        """Warps of a boundary block."""
        return self.threads // WARP

    @property
    def register_limit(self) -> int:
        """Registers that a boundary thread may use with one block a multiprocessor."""
        return register_limit(self.threads)

    def shared_bytes(self, group: int) -> int:
        """Shared memory of one boundary block that takes ``group`` tokens."""
        stages = (
            self.warps * group * self.plan.stash_token_bytes,
            self.warps * group * self.plan.sums_stride * 4,  # partial sums
            group * WARP * self.cluster_size * 4,  # sums of the cluster's blocks
            group * self.warps * 4,  # squares of the warps
            group * self.cluster_size * 4,  # squares of the blocks
        )
        return sum(aligned(stage, FRAGMENT_BYTES) for stage in stages)

    @property
    def groups(self) -> tuple[int, ...]:
        """The distinct token groups, rising."""
        return tuple(sorted({row.group for row in self.token_groups}))

    def token_group(self, tokens: int) -> TokenGroup:
        """The dispatch row for a call of ``tokens`` tokens (1 to the capacity)."""
        for row in self.token_groups:
            if tokens <= row.max_tokens:
                return row
        raise ValueError(f"{tokens} tokens exceed the capacity of {self.plan.capacity}")

    def launches(self, tokens: int) -> tuple[Launch, ...]:
        """The launches of one boundary call, in order: publish, boundary, mixes."""
        group = self.token_group(tokens).group
        clusters = -(-tokens // group)
        plan = self.plan
        return (
            Launch(
                "publish", (plan.publish_blocks, tokens, 1), plan.publish_threads, 1, 0
            ),
            Launch(
                boundary_name(group),
                (self.cluster_size, clusters, 1),
                self.threads,
                self.cluster_size,
                self.shared_bytes(group),
            ),
            Launch("mixes", (-(-tokens // MIXES_THREADS), 1, 1), MIXES_THREADS, 1, 0),
        )


@dataclass(frozen=True)
class Plan:
    """A spec with everything that follows from it."""

    spec: Spec

    @property
    def name(self) -> str:
        """The package's name."""
        return self.spec.name

    @property
    def hidden(self) -> int:
        """Hidden size H."""
        return self.spec.model.hidden

    @property
    def hc(self) -> int:
        """Residual streams HC."""
        return self.spec.model.hc

    @property
    def mix(self) -> int:
        """Mixes of a token: HC pre, HC post, HC x HC comb."""
        return self.hc * (2 + self.hc)

    @property
    def sums(self) -> int:
        """Values of the first reduction: the mixes and the square sum."""
        return self.mix + 1

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.spec.parallel.tp

    @property
    def capacity(self) -> int:
        """The largest M."""
        return self.spec.capacity.max_tokens

    @property
    def fragments(self) -> int:
        """Fragments of one row."""
        return self.hidden // FRAGMENT_ELEMENTS

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that the package's publish kernels are built for."""
        return tuple(self.spec.parallel.transports)

    @property
    def shared_expert(self) -> tuple[bool, ...]:
        """Whether finalize kernels are built without and with a shared expert."""
        if self.spec.moe is None:
            return ()
        return SHARED_EXPERT[self.spec.moe.shared_expert]

    @property
    def publish_threads(self) -> int:
        """Threads of a publish block, one a fragment: they divide the row evenly."""
        return max(
            threads
            for threads in range(1, PUBLISH_THREADS + 1)
            if self.fragments % threads == 0
        )

    @property
    def publish_blocks(self) -> int:
        """Publish blocks a row."""
        return self.fragments // self.publish_threads

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's residual streams."""
        return self.hc * self.mailbox.row_bytes

    @property
    def fn_row_bytes(self) -> int:
        """Bytes of one row of fn."""
        return self.hc * self.mailbox.row_bytes

    @property
    def fragments_per_warp(self) -> int:
        """Fragments of each stream that a warp holds."""
        return WARP // self.hc

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: four fragments of one stream, one a lane of a quad."""
        return QUAD * FRAGMENT_BYTES

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of a warp's columns, in the order of the projection."""
        return tuple(
            Chunk(part, stream)
            for part in range(self.fragments_per_warp // QUAD)
            for stream in range(self.hc)
        )

    @property
    def fn_octets(self) -> int:
        """Octets of fn rows."""
        return self.mix // OCTET

    @property
    def tiles(self) -> int:
        """Tensor-core tiles of two octets: the rows of fn, then the tokens."""
        return (self.fn_octets + 1) // 2

    @property
    def squares(self) -> int:
        """Place of the square sum behind the octets of mixes."""
        return self.fn_octets * OCTET

    @property
    def sums_stride(self) -> int:
        """Words from one token's sums to the next's in shared memory.

        Lanes store octets of two neighbouring tokens at once: a stride of 4 modulo 16
        keeps the four pairs of a warp in different banks.
        """
        return (self.squares + 1 + 11) // 16 * 16 + 4

    @property
    def stash_stream_bytes(self) -> int:
        """Bytes from one stream's fragments to the next's in a warp's stash.

        The lanes that store together then touch all banks once.
        """
        return (WARP * FRAGMENT_BYTES + BANK_BYTES) // self.hc

    @property
    def stash_token_bytes(self) -> int:
        """Bytes from one token's fragments to the next's in a warp's stash.

        Half a row of banks more than a multiple: the two tokens that lanes load
        together do not collide.
        """
        return self.stash_stream_bytes * self.hc + BANK_BYTES // 2

    @property
    def lane_words(self) -> int:
        """32-bit words of a collapsed fragment that one of its lanes keeps."""
        return FRAGMENT_WORDS // self.hc

    @property
    def mailbox(self) -> MailboxPlan:
        """The symmetric buffer."""
        return MailboxPlan(self.tp, self.capacity, self.hidden)

    @property
    def lane_map(self) -> LaneMap:
        """Which rank and stream each lane serves."""
        sources = min(self.tp, self.hc)
        return LaneMap(
            lanes=self.hc,
            sources=sources,
            polls=self.tp // sources,
            butterflies=powers_of_two_below(sources),
            splits=tuple(reversed(powers_of_two_below(self.hc))),
        )

    @cached_property
    def targets(self) -> tuple[TargetPlan, ...]:
        """One plan an architecture, in the order of the spec."""
        return tuple(
            plan_target(self, ARCHITECTURES[name], target)
            for name, target in self.spec.targets.items()
        )

    def target(self, arch: str) -> TargetPlan:
        """The plan of one architecture; KeyError if the spec does not name it."""
        for target in self.targets:
            if target.arch == arch:
                return target
        raise KeyError(arch)


def powers_of_two_below(limit: int) -> tuple[int, ...]:
    """1, 2, 4, … below ``limit``."""
    return tuple(1 << bit for bit in range((limit - 1).bit_length()))


def aligned(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def boundary_name(group: int) -> str:
    """The name of the boundary kernel that takes ``group`` tokens a cluster."""
    return "boundary" if group == 1 else f"grouped_boundary_{group}"


def register_limit(threads: int) -> int:
    """Registers a thread may use when a block has a multiprocessor to itself.

    Registers are handed out by eights, to warps by fours.
    """
    warps = aligned(-(-threads // WARP), 4)
    share = REGISTERS_PER_MULTIPROCESSOR // (warps * WARP)
    return min(MAX_REGISTERS_PER_THREAD, share // 8 * 8)


def make_plan(spec: Spec) -> Plan:
    """Derives and validates the plan of a spec.

    Raises:
        PlanError: The spec asks for what the hardware or the kernels cannot do; all
            problems at once, each with the spec key that causes it.
    """
    plan = Plan(spec)
    problems = model_problems(plan)
    if not problems:
        for name, target in spec.targets.items():
            problems += target_problems(plan, ARCHITECTURES[name], target)
    if problems:
        raise PlanError(problems)
    _ = plan.targets
    return plan


def model_problems(plan: Plan) -> list[Problem]:
    """Faults of the spec that no choice of target can mend."""
    problems = unserved_problems(plan.spec)
    if plan.spec.precision.fn_weight == "fp32":
        problems.append(
            Problem(
                ("precision", "fn_weight"),
                "the projection multiplies on BF16 tensor cores, which FP32 rows of fn "
                "do not fit",
                given="fp32",
                allowed="bf16",
            )
        )
    if plan.sums > WARP:
        problems.append(
            Problem(
                ("model", "hc"),
                f"hc {plan.hc} makes {plan.sums} sums a token, and one warp reduces "
                f"{WARP}",
                given=str(plan.hc),
                allowed="2 or 4",
            )
        )
    elif plan.mix % OCTET:
        problems.append(
            Problem(
                ("model", "hc"),
                f"hc {plan.hc} makes {plan.mix} mixes, and the projection takes rows "
                f"of fn by {OCTET}",
                given=str(plan.hc),
                allowed="2 or 4",
            )
        )
    elif not legal_clusters(plan):
        problems.append(
            Problem(
                ("model", "hidden"),
                "no cluster size serves this hidden size; with "
                f"{PORTABLE_CLUSTER} blocks, {cluster_fault(plan, PORTABLE_CLUSTER)}",
                given=str(plan.hidden),
                allowed=f"near it: {', '.join(map(str, nearest_hidden_sizes(plan)))}",
            )
        )
    if plan.mailbox.total_bytes > INT32_MAX:
        fits = INT32_MAX // (GENERATIONS * plan.tp * plan.mailbox.row_bytes)
        problems.append(
            Problem(
                ("capacity", "max_tokens"),
                f"the mailbox takes {plan.mailbox.total_bytes} bytes, and kernels "
                "index it with 32-bit offsets",
                given=str(plan.capacity),
                allowed=f"at most {fits} tokens at this hidden size and tp",
            )
        )
    return problems


def unserved_problems(spec: Spec) -> list[Problem]:
    """Choices that no kernel serves yet."""
    choices: tuple[tuple[tuple[str, ...], object, object], ...] = (
        (("model", "pre_mix"), spec.model.pre_mix, "fresh"),
        (("model", "norm_weight"), spec.model.norm_weight, "plain"),
        (("precision", "activation"), spec.precision.activation, "bf16"),
        (("precision", "projection"), spec.precision.projection, "auto"),
        (("ends", "entry"), spec.ends.entry, False),
        (("ends", "exit"), spec.ends.exit, None),
        (("outputs", "stream_mean"), spec.outputs.stream_mean, False),
    )
    return [
        Problem(key, "no kernel serves this yet", given=str(given), allowed=str(served))
        for key, given, served in choices
        if given != served
    ]


def boundary_registers(plan: Plan) -> int:
    """Registers that a grouped boundary's thread needs; the boundary needs fewer.

    It holds its part of fn, and the inputs of a token twice: of the one in work and of
    the next.
    """
    fn = plan.fn_octets * len(plan.chunks) * FRAGMENT_WORDS
    fragments = plan.lane_map.polls + plan.hc
    weights = 1 + plan.hc
    return fn + 2 * (fragments * FRAGMENT_WORDS + weights) + WORKING_REGISTERS


def cluster_fault(plan: Plan, cluster_size: int) -> str | None:
    """Why a cluster size cannot serve this plan, or None where it can."""
    if cluster_size > PORTABLE_CLUSTER:
        return f"clusters of more than {PORTABLE_CLUSTER} blocks are not portable"
    if plan.fragments % cluster_size:
        return (
            f"{cluster_size} blocks cannot share {plan.fragments} fragments of "
            f"{FRAGMENT_BYTES} bytes (hidden / {FRAGMENT_ELEMENTS}) evenly"
        )
    threads = plan.fragments // cluster_size * plan.lane_map.lanes
    if threads > MAX_THREADS_PER_BLOCK:
        return (
            f"a block would need {threads} threads; the limit is "
            f"{MAX_THREADS_PER_BLOCK}"
        )
    if threads % WARP:
        return (
            f"a block would have {threads} threads, which is no number of whole warps"
        )
    needed = boundary_registers(plan)
    if needed > register_limit(threads):
        return (
            f"{threads} threads a block leave {register_limit(threads)} registers a "
            f"thread, and the boundary needs about {needed}"
        )
    return None


def legal_clusters(plan: Plan) -> tuple[int, ...]:
    """The cluster sizes that can serve this plan, rising."""
    return tuple(
        size
        for size in range(1, PORTABLE_CLUSTER + 1)
        if cluster_fault(plan, size) is None
    )


def nearest_hidden_sizes(plan: Plan) -> list[int]:
    """The next smaller and the next larger hidden size that can be served."""

    def is_legal(hidden: int) -> bool:
        model = plan.spec.model.model_copy(update={"hidden": hidden})
        return bool(legal_clusters(Plan(plan.spec.model_copy(update={"model": model}))))

    smaller = range(plan.hidden - FRAGMENT_ELEMENTS, 0, -FRAGMENT_ELEMENTS)
    larger = range(plan.hidden + FRAGMENT_ELEMENTS, 2 * plan.hidden, FRAGMENT_ELEMENTS)
    found = (next(filter(is_legal, sizes), None) for sizes in (smaller, larger))
    return [size for size in found if size is not None]


def choose_cluster(plan: Plan) -> int:
    """The cluster size for a spec that names none: the largest legal one."""
    return legal_clusters(plan)[-1]


def choose_token_groups(
    plan: Plan, architecture: Architecture, cluster_size: int
) -> tuple[TokenGroup, ...]:
    """Token groups for a spec that names none: one wave of clusters at every M.

    Each group serves the calls that it lets run in one wave; the last one serves the
    rest of the capacity.
    """
    wave = clusters_at_once(architecture, cluster_size)
    rows = []
    for group in TOKEN_GROUPS:
        rows.append(TokenGroup(min(wave * group, plan.capacity), group))
        if rows[-1].max_tokens == plan.capacity:
            return tuple(rows)
    rows[-1] = TokenGroup(plan.capacity, TOKEN_GROUPS[-1])
    return tuple(rows)


def clusters_at_once(architecture: Architecture, cluster_size: int) -> int:
    """Clusters that run together, one block a multiprocessor."""
    return architecture.cluster_8_capacity * PORTABLE_CLUSTER // cluster_size


def target_problems(
    plan: Plan, architecture: Architecture, target: Target
) -> list[Problem]:
    """What keeps one target of the spec from being built."""
    key = ("targets", architecture.name)
    if target.cluster_size is not None:
        fault = cluster_fault(plan, target.cluster_size)
        if fault is not None:
            return [
                Problem(
                    (*key, "cluster_size"),
                    fault,
                    given=str(target.cluster_size),
                    allowed=", ".join(map(str, legal_clusters(plan))),
                    hint="leave it out and the plan picks one",
                )
            ]
    problems = []
    planned = plan_target(plan, architecture, target)
    for index, row in enumerate(target.token_groups or ()):
        needed = planned.shared_bytes(row.group)
        if needed > architecture.shared_bytes:
            fits = max(
                group
                for group in range(1, row.group)
                if planned.shared_bytes(group) <= architecture.shared_bytes
            )
            problems.append(
                Problem(
                    (*key, "token_groups", index, "group"),
                    f"a group of {row.group} tokens needs {needed} bytes of shared "
                    f"memory; {architecture.name} has {architecture.shared_bytes}",
                    given=str(row.group),
                    allowed=f"at most {fits} at cluster size {planned.cluster_size}",
                )
            )
    return problems


def plan_target(plan: Plan, architecture: Architecture, target: Target) -> TargetPlan:
    """Plans one target; it must have no problems."""
    if target.cluster_size is None:
        cluster_size = choose_cluster(plan)
        cluster_reason = "picked: the largest portable one that divides the row"
    else:
        cluster_size = target.cluster_size
        cluster_reason = "from the spec"
    if target.token_groups is None:
        token_groups = choose_token_groups(plan, architecture, cluster_size)
        wave = clusters_at_once(architecture, cluster_size)
        groups_reason = (
            f"picked: about {wave} clusters run at once, and groups of up to "
            f"{TOKEN_GROUPS[-1]} tokens keep a call to one wave where they can"
        )
    else:
        token_groups = tuple(
            TokenGroup(row.max_tokens, row.group) for row in target.token_groups
        )
        groups_reason = "from the spec"
    return TargetPlan(
        plan, architecture, cluster_size, cluster_reason, token_groups, groups_reason
    )
