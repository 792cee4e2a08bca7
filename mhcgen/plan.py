"""Everything that follows from a spec: sizes, launch shapes and the M → kernel table.

All arithmetic on shapes happens here, before anything is rendered. Templates only place
these numbers, and what hardware cannot do is refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal, get_args

from mhcgen import cost
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
from mhcgen.spec import NormWeight, Spec, Target

FRAGMENT_BYTES = 16
FRAGMENT_ELEMENTS = 8  # 16 bytes of a two-byte activation
FRAGMENT_WORDS = 4
QUAD = 4  # lanes of a tensor-core row
OCTET = 8  # rows or tokens of half a tensor-core tile
BANK_BYTES = 128  # one word in each bank of shared memory
GENERATIONS = 3
LOCAL = "local"  # the transport of one rank alone
PUBLISH_THREADS = 128
MAX_FN_AHEAD = 6  # octets of fn in flight while the projection reads it from L2
MBARRIER_BYTES = 8
FINALIZING_GROUP = 3  # tokens of a cluster whose boundary also closes routed sums
FEW_TOKENS = 2  # whose pre-mix each lane of a boundary computes for itself
MOST_AT_ONCE = 5  # fragments whose arrival a thread awaits together
MOST_AT_ONCE_OF_TWO = 4  # where two blocks share a multiprocessor: five spill
RESERVED_SHARED_BYTES = 1024  # of a block, by the driver
# Registers that the compiler does without where two blocks are to share a
# multiprocessor, and spills none: measured on DSL 4.8.1.
BOUND_SAVES = 16
FEWEST_TOKENS = 4  # tokens a cluster that fn must leave room for in shared memory
TRIPS = (1, 2, 4, 8, 16, 32)  # what the plan picks from
TOKEN_GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 20, 24)  # what the plan picks from
MAY_SPILL = 64  # bytes of a thread, where no promise is made
MANY_WORDS = 16  # of one token from all ranks, which take many registers
FEW_REGISTERS = 128  # of a thread, where blocks have more than 384
# Of all shares of a token from all ranks: with few registers, the places of those of
# two tokens spill more than may be, 328 bytes on DSL 4.8.1.
SHARE_WORDS = 64
MIXES_THREADS = 32
INT32_MAX = 2**31 - 1
SHARED_EXPERT = {"optional": (False, True), "always": (True,), "never": (False,)}
# Registers of a thread that polls, beyond those of fn and of the words. Measured on
# DSL 4.8.1.
POLLING_REGISTERS = 42
# Registers of the projection beyond those that hold fn and the totals.
PROJECTION_REGISTERS = 40
# Those of a projection by FMA beyond fn: 32 sums of four tokens, a fragment and what is
# in work; and those for tokens beyond the four. Measured on DSL 4.8.1.
FMA_REGISTERS, FMA_TOKENS, FMA_MORE_REGISTERS = 80, 4, 20

FnHome = Literal["registers", "shared", "global"]
FN_HOMES: tuple[FnHome, ...] = get_args(FnHome)
Projection = Literal["tensor_cores", "fma"]
DSL_TYPES = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}
ENDS_THREADS = 128  # of a block of the entry or the exit


@dataclass(frozen=True)
class Design:
    """What a package's boundary kernels hold on to, the same for all targets.

    Attributes:
        trips: Shares of a row that each warp takes one after another.
        fn_home: Where a block keeps its part of fn from its start on: in registers, in
            shared memory, or nowhere, so that the projection reads it from L2.
    """

    trips: int
    fn_home: FnHome


DESIGNS = tuple(
    Design(trips, fn_home)
    for trips in TRIPS
    for fn_home in FN_HOMES
    # fn of several shares does not fit.
    if trips == 1 or fn_home != "registers"
)
"""What the plan picks from: the first that every target can run."""


@dataclass(frozen=True)
class TokenGroup:
    """One row of a dispatch table: calls of up to ``max_tokens`` tokens.

    Attributes:
        max_tokens: The largest M that this row serves.
        group: Tokens that one cluster takes together.
        at_once: Fragments that a thread takes at once, of all those of its tokens.
        senders: Warps that send a token's sums to the blocks of the cluster.
        most_peers: Blocks that each of them sends to, at most.
        shared_bytes: Shared memory of a block.
        fn_octets: Octets of fn's rows that threads keep in registers.
        split: Whether they could keep more, and the rest is in shared memory.
        blocks: Blocks that share a multiprocessor.
        launches: 1 where the boundary publishes itself, 2 where a launch before it
            does, or where there is nothing to publish.
        finalizes: Whether a boundary that publishes itself closes routed sums, too.
    """

    max_tokens: int
    group: int
    at_once: int
    senders: int
    most_peers: int
    shared_bytes: int
    fn_octets: int
    split: bool
    blocks: int
    launches: int
    finalizes: bool

    @property
    def kernel(self) -> str:
        """What its boundary kernels are named by; rows may share them."""
        return f"{self.group}_split" if self.split else f"{self.group}"


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
    """What a lane takes of a fragment, which has ``lanes`` lanes.

    Lane ``l`` takes words ``l // word_lanes * words …`` of all ranks, and from them
    computes these words of its ``streams`` streams, from ``l % word_lanes * streams``
    on. Old streams come as whole fragments: lane ``l`` copies that of stream ``l``.

    Attributes:
        lanes: Lanes of one fragment, one a stream.
        words: 32-bit words of a fragment that a lane takes.
        word_lanes: Lanes that share these words, and divide their streams.
        streams: Streams whose words a lane computes.
        merges: Lane distances of the shuffles that sum a collapse over the streams of
            all lanes that share its words.
    """

    lanes: int
    words: int
    word_lanes: int
    streams: int
    merges: tuple[int, ...]


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
    def warps(self) -> int:
        """Warps of a boundary block."""
        return -(-self.plan.shares // (self.cluster_size * self.plan.trips))

    @property
    def threads(self) -> int:
        """Threads of a boundary block."""
        return self.warps * WARP

    @property
    def fragments_per_block(self) -> int:
        """Fragments of a row that one block serves; some may be beyond the row."""
        return self.warps * self.plan.trips * self.plan.fragments_per_warp

    @property
    def launched_threads(self) -> int:
        """Threads of a boundary block with those of its mixes."""
        return self.threads + WARP * self.plan.tail

    @property
    def idle_lanes(self) -> bool:
        """Whether some lanes of a cluster have no fragment."""
        return self.cluster_size * self.fragments_per_block > self.plan.fragments

    @property
    def register_limit(self) -> int:
        """Registers that a boundary thread may use with one block a multiprocessor."""
        return register_limit(self.launched_threads)

    @property
    def may_spill(self) -> int:
        """Bytes that a boundary's thread may spill; 0 where the plan promises none.

        The assembler loads fn from L2, and keeps the places of many words, as far as
        registers allow, and overshoots by a few. With few registers it does so as well
        where they hold fn, or multiply by FMA. Measured on DSL 4.8.1: up to 56 bytes.
        """
        plan = self.plan
        ahead = plan.fn_home == "global" or plan.arrived_words >= MANY_WORDS
        full = plan.fn_home == "registers" or plan.projection == "fma"
        tight = full and self.register_limit <= FEW_REGISTERS
        return MAY_SPILL if ahead or tight else 0

    def may_spill_of(self, row: TokenGroup) -> int:
        """As ``may_spill``, of the kernels of a dispatch row.

        Two blocks leave their threads few registers: measured up to four bytes.
        """
        return MAY_SPILL if row.blocks > 1 else self.may_spill

    def shared_bytes(self, group: int, fn_octets: int | None = None) -> int:
        """Shared memory of one boundary block that takes ``group`` tokens.

        Args:
            group: Tokens of a cluster.
            fn_octets: As in ``held_octets``.
        """
        plan = self.plan
        stages = (
            group * (plan.last_sum + 1) * self.cluster_size * 4,  # sums of the blocks
            0 if plan.delayed else group * self.cluster_size * 4,  # their squares
            2 * MBARRIER_BYTES,
            group * plan.mix * 4 if plan.tail else 0,  # logits of the mixes
            self.warps * plan.trips * group * plan.stash_token_bytes,
            group * plan.token_weights * 4,
            self.warps * group * plan.sums_stride * 4,  # partial sums
            0 if plan.delayed else group * self.warps * 4,  # squares of the warps
            0 if plan.delayed or group <= FEW_TOKENS else group * plan.hc * 4,  # pre
            0 if group <= FEW_TOKENS else group * 4,  # rstd of the norms
            self.fn_bytes(fn_octets),
        )
        # The launch does not round up the last, but loads of it may be wider.
        return sum(aligned(stage, FRAGMENT_BYTES) for stage in stages)

    def fn_bytes(self, fn_octets: int | None = None) -> int:
        """Shared memory that holds a block's part of fn, or what registers leave of it.

        Args:
            fn_octets: As in ``held_octets``.
        """
        plan = self.plan
        if plan.fn_home == "global":
            return 0
        rest = plan.fn_fragments - plan.held_fragments(fn_octets)
        return self.threads * rest * FRAGMENT_BYTES

    @property
    def rows(self) -> tuple[str, ...]:
        """The dispatch rows, each as a package's ``TokenGroup`` takes it."""
        plan = self.plan
        names = ["max_tokens", "group", "at_once", "senders", "most_peers"]
        names.append("shared_bytes")
        names += ["fn_octets", "blocks"] * plan.splits_fn
        names += ["launches"] * (plan.tp > 1)
        names += ["finalizes"] * plan.finalizes_inside
        return tuple(
            ", ".join(str(getattr(row, name)) for name in names)
            for row in self.token_groups
        )

    @property
    def groups(self) -> tuple[int, ...]:
        """The distinct token groups, rising."""
        return tuple(sorted({row.group for row in self.token_groups}))

    @property
    def forms(self) -> tuple[TokenGroup, ...]:
        """A dispatch row for each boundary kernel, by rising token group."""
        return distinct(self.token_groups)

    @property
    def finalizing(self) -> tuple[TokenGroup, ...]:
        """As ``forms``, of the boundaries that close routed sums."""
        return distinct(row for row in self.token_groups if row.finalizes)

    @property
    def publishing(self) -> tuple[TokenGroup, ...]:
        """As ``forms``, of the boundaries that publish themselves."""
        rows = self.token_groups if self.plan.tp > 1 else ()
        return distinct(row for row in rows if row.launches == 1)

    def wave(self, blocks: int = 1) -> int:
        """Clusters that run at once, ``blocks`` blocks a multiprocessor."""
        return clusters_at_once(self.architecture, self.cluster_size, blocks)

    def waves(self, tokens: int, group: int, blocks: int = 1) -> int:
        """How often the device fills with the clusters of a call."""
        clusters = -(-tokens // group)
        return -(-clusters // self.wave(blocks))

    def predicted(self, tokens: int, group: int, blocks: int = 1) -> float:
        """Microseconds of a call of ``tokens`` in groups of ``group``, roughly."""
        elements = self.fragments_per_block * FRAGMENT_ELEMENTS * self.plan.hc
        fn_bytes = self.plan.mix * self.plan.fn_row_bytes
        wave = self.wave(blocks)
        return cost.predicted(tokens, group, wave, blocks, elements, fn_bytes)

    def token_group(self, tokens: int) -> TokenGroup:
        """The dispatch row for a call of ``tokens`` tokens (1 to the capacity)."""
        for row in self.token_groups:
            if tokens <= row.max_tokens:
                return row
        raise ValueError(f"{tokens} tokens exceed the capacity of {self.plan.capacity}")

    def publish_launch(self, tokens: int) -> Launch:
        """The launch of a publish, or of a finalize, of ``tokens`` tokens."""
        plan = self.plan
        grid = (plan.publish_blocks, tokens, 1)
        return Launch("publish", grid, plan.publish_threads, 1, 0)

    def boundary_launch(self, tokens: int, publishes: str | None = None) -> Launch:
        """The launch of the boundary of ``tokens`` tokens.

        Args:
            tokens: M.
            publishes: The transport of its own publish, or None.
        """
        row = self.token_group(tokens)
        return Launch(
            self.plan.boundary_name(row.kernel, publishes),
            (self.cluster_size, -(-tokens // row.group), 1),
            self.launched_threads,
            self.cluster_size,
            row.shared_bytes,
        )

    def mixes_launch(self, tokens: int) -> Launch:
        """The launch of the mixes of ``tokens`` tokens, where they have their own."""
        grid = (-(-tokens // MIXES_THREADS), 1, 1)
        return Launch("mixes", grid, MIXES_THREADS, 1, 0)

    def launches(self, tokens: int) -> tuple[Launch, ...]:
        """The launches of one boundary call, in order.

        One rank alone has nothing to publish.
        """
        mixes = () if self.plan.tail else (self.mixes_launch(tokens),)
        if self.plan.tp == 1:
            return (self.boundary_launch(tokens), *mixes)
        if self.token_group(tokens).launches == 1:
            transport = self.plan.transports[0]
            return (self.boundary_launch(tokens, transport), *mixes)
        return (self.publish_launch(tokens), self.boundary_launch(tokens), *mixes)


@dataclass(frozen=True)
class Plan:
    """A spec with everything that follows from it.

    Attributes:
        spec: The spec.
        design: What its boundary kernels hold on to.
    """

    spec: Spec
    design: Design = DESIGNS[0]

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
        """Values of the first reduction: the mixes and the square sum.

        With a delayed pre-mix, it has the squares of the norm as well.
        """
        return self.mix + 1 + self.delayed

    @property
    def projection(self) -> Projection:
        """What multiplies the streams with fn.

        Tensor cores take BF16 alone.
        """
        chosen = self.spec.precision.projection
        if chosen == "auto":
            return "fma" if self.wide_types else "tensor_cores"
        return chosen

    @property
    def wide_types(self) -> tuple[tuple[str, str], ...]:
        """Keys of precision, and their values, that BF16 tensor cores do not fit."""
        precision = self.spec.precision
        types = (
            ("activation", precision.activation),
            ("fn_weight", precision.fn_weight),
        )
        return tuple((key, value) for key, value in types if value != "bf16")

    @property
    def activation(self) -> str:
        """The name of the activations' type, in comments."""
        return self.spec.precision.activation.upper()

    @property
    def activation_type(self) -> str:
        """The DSL's name of the activations' type."""
        return DSL_TYPES[self.spec.precision.activation]

    @property
    def act(self) -> str:
        """The function that rounds to the activations' type, in docstrings."""
        return self.spec.precision.activation

    @property
    def pair_type(self) -> str:
        """PTX's name of two activations in a word."""
        return {"bf16": "bf16x2", "fp16": "f16x2"}[self.spec.precision.activation]

    @property
    def tensor_types(self) -> str:
        """The types of a boundary's tensors, as the DSL names them."""
        return ", ".join(sorted({self.activation_type, self.fn_type, "Float32"}))

    @property
    def exit_types(self) -> str:
        """What the exit's module takes from the DSL beside ``cute``."""
        heads = {self.fn_type} if self.exit_by == "sigmoid" else set()
        mailbox = {"Int32", "Uint32"} if self.tp > 1 else set()
        names = {self.activation_type, "Float32", "Int64"} | heads | mailbox
        return ", ".join(sorted(names))

    @property
    def projection_means(self) -> str:
        """How the projection sums over a warp, in comments."""
        return "by shuffles" if self.projection == "fma" else "on tensor cores"

    @property
    def fn_weight(self) -> str:
        """The name of fn's type, in comments."""
        return self.spec.precision.fn_weight.upper()

    @property
    def fn_type(self) -> str:
        """The DSL's name of fn's type."""
        return DSL_TYPES[self.spec.precision.fn_weight]

    @property
    def fn_halves(self) -> int:
        """Loads of 16 bytes that take eight elements of fn."""
        return 2 if self.spec.precision.fn_weight == "fp32" else 1

    @property
    def delayed(self) -> bool:
        """Whether the collapse uses the pre-mix of the boundary before."""
        return self.spec.model.pre_mix == "delayed"

    @property
    def norm_weight(self) -> NormWeight:
        """The weight of the norm."""
        return self.spec.model.norm_weight

    @property
    def stream_mean(self) -> bool:
        """Whether a boundary returns the mean of the new streams."""
        return self.spec.outputs.stream_mean

    @property
    def exit_by(self) -> str | None:
        """What the exit collapses the streams by; None without an exit."""
        return self.spec.ends.exit

    @property
    def ends(self) -> bool:
        """Whether there is an entry or an exit."""
        return self.spec.ends.entry or self.exit_by is not None

    @property
    def multiplies_rows(self) -> bool:
        """Whether a kernel multiplies rows of fn by FMA."""
        return self.ends_multiply or self.projection == "fma"

    @property
    def loads_rows(self) -> bool:
        """Whether one takes them from global memory, and not from copies."""
        by_fma = self.projection == "fma" and self.fn_home != "shared"
        return self.ends_multiply or by_fma

    @property
    def ends_multiply(self) -> bool:
        """Whether the entry or the exit multiplies rows of fn, for a pre-mix."""
        return self.spec.ends.entry or self.exit_by == "sigmoid"

    @property
    def ends_cluster(self) -> int:
        """Blocks of a cluster of the entry and of the exit."""
        whole = self.fragments // ENDS_THREADS
        return min(PORTABLE_CLUSTER, 1 << max(0, whole.bit_length() - 1))

    @property
    def ends_threads(self) -> int:
        """Threads of a block of the entry and of the exit."""
        return ENDS_THREADS

    @property
    def ends_warps(self) -> int:
        """Warps of such a block."""
        return ENDS_THREADS // WARP

    @property
    def ends_stride(self) -> int:
        """Fragments that a cluster of the entry or the exit takes in a turn."""
        return self.ends_cluster * ENDS_THREADS

    @property
    def ends_turns(self) -> int:
        """Turns that a row takes, the last perhaps in part."""
        return -(-self.fragments // self.ends_stride)

    @property
    def exit_sums(self) -> int:
        """Sums that the exit takes before the collapse; none without a head."""
        return self.hc + 1 if self.exit_by == "sigmoid" else 0

    def ends_shared_bytes(self, sums: int, stash_fragments: int) -> int:
        """Shared memory of a block of the entry or the exit.

        Args:
            sums: Values that the cluster sums before the norm's squares.
            stash_fragments: Fragments that a thread keeps.
        """
        stages = (
            stash_fragments * ENDS_THREADS * FRAGMENT_BYTES,
            *(
                part
                for count in (sums, 1)
                for part in (count * self.ends_warps * 4, count * self.ends_cluster * 4)
            ),
        )
        return sum(aligned(stage, FRAGMENT_BYTES) for stage in stages)

    def ends_launches(self, tokens: int) -> dict[str, Launch]:
        """The launches of the entry and of the exit, by kernel."""
        grid = (self.ends_cluster, tokens, 1)
        shared_bytes = {}
        if self.spec.ends.entry:
            shared_bytes["entry"] = self.ends_shared_bytes(self.mix + 1, 0)
        if self.exit_by is not None:
            streams = self.hc if self.exit_by == "sigmoid" else 1
            stash = streams * self.ends_turns
            shared_bytes["exit"] = self.ends_shared_bytes(self.exit_sums, stash)
        return {
            name: Launch(name, grid, ENDS_THREADS, self.ends_cluster, size)
            for name, size in shared_bytes.items()
        }

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
        if self.tp == 1:
            return (LOCAL,)
        return tuple(self.spec.parallel.transports)

    @property
    def finalizes_inside(self) -> bool:
        """Whether boundaries that publish themselves also close routed sums."""
        return self.spec.moe is not None and self.tp > 1

    @property
    def shared_expert(self) -> tuple[bool, ...]:
        """Whether finalize kernels are built without and with a shared expert."""
        if self.spec.moe is None:
            return ()
        return SHARED_EXPERT[self.spec.moe.shared_expert]

    @property
    def trips(self) -> int:
        """Shares of a row that each warp takes one after another."""
        return self.design.trips

    @property
    def fn_home(self) -> FnHome:
        """Where a boundary block keeps its part of fn."""
        return self.design.fn_home

    @property
    def tail(self) -> bool:
        """Whether a warp of each boundary computes the mixes."""
        return self.spec.mixes == "tail"

    @property
    def has_mixes_kernel(self) -> bool:
        """Whether some mixes have a launch of their own; an entry's always have."""
        return not self.tail or self.spec.ends.entry

    def boundary_name(self, kernel: str, publishes: str | None = None) -> str:
        """The name of a boundary kernel, given what dispatch rows call it."""
        return f"boundary_{kernel}_{publishes}" if publishes else f"boundary_{kernel}"

    @property
    def token_weights(self) -> int:
        """Mixes that weigh a token's streams: post and comb, and a carried pre-mix."""
        return self.hc * (1 + self.hc + self.delayed)

    @property
    def shared_sums(self) -> int:
        """Sums of a token that every block of a cluster takes.

        They are the pre-mix and the square sum; with a carried pre-mix, two squares.
        """
        return 2 if self.delayed else self.hc + 1

    @property
    def own_sums(self) -> int:
        """Sums of a token that only the block of its mixes takes."""
        return self.mix if self.delayed else self.mix - self.hc

    @property
    def publish_threads(self) -> int:
        """Threads of a publish block, one a fragment.

        They divide the row evenly, unless that would leave less than a warp.
        """
        divisors = [
            threads
            for threads in range(WARP, PUBLISH_THREADS + 1)
            if self.fragments % threads == 0
        ]
        with_idle = min(PUBLISH_THREADS, aligned(self.fragments, WARP))
        return max(divisors, default=with_idle)

    @property
    def publish_blocks(self) -> int:
        """Publish blocks a row."""
        return -(-self.fragments // self.publish_threads)

    @property
    def publish_idle_lanes(self) -> bool:
        """Whether some threads of a publish have no fragment."""
        return self.publish_blocks * self.publish_threads > self.fragments

    @cached_property
    def idle_lanes(self) -> bool:
        """Whether some lanes of a boundary have no fragment, on any target."""
        return any(target.idle_lanes for target in self.targets)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's residual streams."""
        return self.hc * self.mailbox.row_bytes

    @property
    def fn_row_bytes(self) -> int:
        """Bytes of one row of fn."""
        return self.hc * self.fn_stream_bytes

    @property
    def fn_stream_bytes(self) -> int:
        """Bytes of one stream's part of a row of fn."""
        return self.hidden * 2 * self.fn_halves

    @property
    def fn_fragment_bytes(self) -> int:
        """Bytes of eight elements of fn."""
        return FRAGMENT_BYTES * self.fn_halves

    @property
    def fn_trip_bytes(self) -> int:
        """Bytes of fn that one thread multiplies with in a trip."""
        return self.fn_fragments * FRAGMENT_BYTES // self.trips

    @property
    def fn_rows(self) -> int:
        """Rows of fn that a thread multiplies with: its octets', or all of them."""
        return self.fn_octets if self.projection == "tensor_cores" else self.mix

    @property
    def fragments_per_warp(self) -> int:
        """Fragments of each stream that a warp holds: its share of a row."""
        return WARP // self.hc

    @property
    def shares(self) -> int:
        """Shares of a row that warps take, the last perhaps in part."""
        return -(-self.fragments // self.fragments_per_warp)

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
        """Octets of fn rows, the last perhaps in part."""
        return -(-self.mix // OCTET)

    @property
    def fn_fragments(self) -> int:
        """Fragments of fn that one thread multiplies."""
        if self.projection == "fma":
            return self.trips * self.mix * self.fn_halves
        return self.trips * len(self.chunks) * self.fn_octets

    @property
    def fn_thread_bytes(self) -> int:
        """Bytes of fn that one thread multiplies."""
        return self.fn_fragments * FRAGMENT_BYTES

    def held_octets(self, wanted: int | None = None) -> int:
        """Octets of fn's rows that a thread keeps in registers.

        Args:
            wanted: What a token group asks for; None for all that the design keeps.
        """
        if self.fn_home != "registers":
            return 0
        return self.fn_octets if wanted is None else wanted

    def held_fragments(self, wanted: int | None = None) -> int:
        """Fragments of fn that a thread keeps in registers; as ``held_octets``."""
        return self.fn_fragments * self.held_octets(wanted) // self.fn_octets

    @cached_property
    def splits_fn(self) -> bool:
        """Whether some boundaries keep a part of fn in registers, and copy the rest."""
        return any(row.split for target in self.targets for row in target.token_groups)

    @property
    def row_kernel(self) -> str:
        """The attribute of a package's dispatch rows that names their kernels."""
        return "kernel" if self.splits_fn else "size"

    @property
    def few_tokens(self) -> int:
        """Tokens of a cluster whose pre-mix and norm each lane computes for itself."""
        return FEW_TOKENS

    @property
    def mixes_threads(self) -> int:
        """Threads of a block of the mixes kernel, one a token."""
        return MIXES_THREADS

    @property
    def fn_partial_octet(self) -> bool:
        """Whether the rows of fn end within an octet."""
        return self.mix % OCTET > 0

    @property
    def fn_octets_are_odd(self) -> bool:
        """Whether the rows of fn leave half a tile to the tokens, and not a whole."""
        return self.fn_octets % 2 == 1

    @property
    def fn_ahead(self) -> int:
        """Octets of fn in flight while the projection reads it from L2."""
        return min(2 * self.fn_rows, MAX_FN_AHEAD)

    @property
    def tiles(self) -> int:
        """Tensor-core tiles of two octets: the rows of fn, then the tokens."""
        return self.fn_octets // 2 + 1

    @property
    def squares(self) -> int:
        """Place of the square sum behind the mixes, or behind their octets."""
        if self.projection == "fma":
            return self.mix
        return self.fn_octets * OCTET

    @property
    def last_sum(self) -> int:
        """Place of the last sum: with a delayed pre-mix, of the norm's squares."""
        return self.squares + self.delayed

    @property
    def sum_tiles(self) -> int:
        """Warps' worth of sums that the projection reduces one after another."""
        return -(-(self.squares + 1) // WARP)

    @property
    def sums_stride(self) -> int:
        """Words from one token's sums to the next's in shared memory.

        Lanes store octets of two neighbouring tokens at once: a stride of 4 modulo 16
        keeps the four pairs of a warp in different banks.
        """
        return (self.last_sum + 1 + 11) // 16 * 16 + 4

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
    def mailbox(self) -> MailboxPlan:
        """The symmetric buffer."""
        return MailboxPlan(self.tp, self.capacity, self.hidden)

    @property
    def lane_map(self) -> LaneMap:
        """What each lane takes of a fragment."""
        word_lanes = max(1, self.hc // FRAGMENT_WORDS)
        return LaneMap(
            lanes=self.hc,
            words=max(1, FRAGMENT_WORDS // self.hc),
            word_lanes=word_lanes,
            streams=self.hc // word_lanes,
            merges=powers_of_two_below(word_lanes),
        )

    @property
    def arrived_words(self) -> int:
        """Words of a token that a lane takes from all ranks together."""
        return self.tp * self.lane_map.words

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


def distinct(rows: Iterable[TokenGroup]) -> tuple[TokenGroup, ...]:
    """The first dispatch row of each kernel, by rising token group."""
    first: dict[tuple[int, bool], TokenGroup] = {}
    for row in rows:
        first.setdefault((row.group, row.split), row)
    return tuple(first[key] for key in sorted(first))


def powers_of_two_below(limit: int) -> tuple[int, ...]:
    """1, 2, 4, … below ``limit``."""
    return tuple(1 << bit for bit in range((limit - 1).bit_length()))


def aligned(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


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
    problems = model_problems(Plan(spec))
    if problems:
        raise PlanError(problems)
    for _, designs in groupby(designs_for(spec), key=lambda design: design.trips):
        for design in designs:
            plan = Plan(spec, design)
            problems = plan_problems(plan)
            if not problems:
                return plan
        # More trips could make room for more tokens, at the cost of every call.
        if all("token_groups" in problem.loc for problem in problems):
            break
    raise PlanError(problems)


def designs_for(spec: Spec) -> list[Design]:
    """The designs that can serve a spec, in order of preference.

    Where it says how much of fn registers hold, fn is at home there.
    """
    rows = [row for t in spec.targets.values() for row in t.token_groups or ()]
    splits = any(row.fn_octets is not None for row in rows)
    return [d for d in DESIGNS if d.fn_home == "registers" or not splits]


def plan_problems(plan: Plan) -> list[Problem]:
    """What keeps the targets of a spec from being built by one design."""
    return [
        problem
        for name, target in plan.spec.targets.items()
        for problem in target_problems(plan, ARCHITECTURES[name], target)
    ]


def model_problems(plan: Plan) -> list[Problem]:
    """Faults of the spec that no choice of target can mend."""
    problems = []
    if plan.projection == "tensor_cores":
        problems += [
            Problem(
                ("precision", "projection"),
                f"tensor cores multiply BF16 with BF16, and {key} is {value}",
                given="tensor_cores",
                allowed="auto, fma",
            )
            for key, value in plan.wide_types
        ]
    if plan.exit_by == "pre_mix" and not plan.delayed:
        problems.append(
            Problem(
                ("ends", "exit"),
                "an exit by pre-mix takes the one that the last boundary returned, and "
                "none does where model.pre_mix is fresh",
                given="pre_mix",
                allowed="mean, sigmoid",
                hint="or set model.pre_mix to delayed",
            )
        )
    for name, target in plan.spec.targets.items():
        problems += fn_octets_problems(plan, name, target)
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


def working_registers(plan: Plan) -> int:
    """Registers of a boundary's thread beyond those for fn, once tokens have come.

    They hold addresses, sums and what is in work.
    """
    return 60 + 2 * plan.hc


def boundary_registers(
    plan: Plan, at_once: int = 1, fn_octets: int | None = None
) -> int:
    """Registers that a boundary's thread needs for the tokens' rows.

    It holds its part of fn, as far as that is at home there, and its words of the
    arrived rows that it takes at once, each with its place.
    """
    fn = plan.held_fragments(fn_octets) * FRAGMENT_WORDS
    polling = POLLING_REGISTERS + at_once * plan.arrived_words * 2
    return fn + max(polling, working_registers(plan))


def fragments_at_once(
    plan: Plan,
    group: int,
    limit: int,
    fn_octets: int | None = None,
    most: int = MOST_AT_ONCE,
) -> int:
    """Fragments that a thread takes at once, of those of its ``group`` tokens.

    As many as registers and ``most`` allow, and about as many each time.
    """
    items = group * plan.trips
    # In trips, collapsed fragments take registers as well.
    numbers = range(1, most + 1) if plan.trips == 1 else (1, 2)
    fitting = [n for n in numbers if boundary_registers(plan, n, fn_octets) <= limit]
    together = max(fitting, default=1)
    return -(-items // -(-items // together))


def projection_registers(plan: Plan, group: int, fn_octets: int | None = None) -> int:
    """Registers that a boundary's thread needs to project ``group`` tokens."""
    if plan.projection == "fma":
        # The compiler takes two more of them ahead.
        held = plan.fn_fragments if plan.fn_home == "registers" else MAX_FN_AHEAD + 2
        more = FMA_MORE_REGISTERS if group > FMA_TOKENS else 0
        return held * FRAGMENT_WORDS + FMA_REGISTERS + more
    copied_octets = plan.fn_octets - plan.held_octets(fn_octets)
    homes = {
        "registers": plan.held_fragments(fn_octets) + copied_octets,
        "shared": plan.fn_octets,
        # The compiler takes more of them ahead: measured on DSL 4.8.1.
        "global": 3 * plan.fn_octets + plan.fn_ahead,
    }
    octets = -(-group // OCTET)
    totals = octets * plan.tiles * FRAGMENT_WORDS
    addresses = octets
    # With a carried pre-mix the tokens are collapsed before; measured on DSL 4.8.1.
    words = group * plan.trips * plan.lane_map.words
    collapsed = words + 3 + octets if plan.delayed else 0
    held = homes[plan.fn_home] * FRAGMENT_WORDS + collapsed
    return held + totals + addresses + PROJECTION_REGISTERS


def group_fault(
    target: TargetPlan, group: int, fn_octets: int | None = None
) -> str | None:
    """Why a cluster cannot take so many tokens together, or None where it can."""
    plan, name = target.plan, target.arch
    tokens = f"{group} token{'s' * (group > 1)}"
    if plan.tail and group > WARP * target.cluster_size:
        return (
            f"the mixes of a group of {tokens} take more than one lane a token of the "
            f"warp of each of {target.cluster_size} blocks: mixes is tail"
        )
    needed = target.shared_bytes(group, fn_octets)
    limit = target.architecture.shared_bytes
    if needed > limit:
        return (
            f"a group of {tokens} needs {needed} bytes of shared memory; {name} has "
            f"{limit}"
        )
    words = plan.arrived_words * plan.trips
    few = target.register_limit <= FEW_REGISTERS
    if few and group > 1 and plan.trips > 1 and words >= SHARE_WORDS:
        return (
            f"a group of {tokens} polls for {words} words of each with "
            f"{target.register_limit} registers a thread, and would spill many"
        )
    registers = projection_registers(plan, group, fn_octets)
    if registers > target.register_limit:
        return (
            f"to project a group of {tokens} takes about {registers} registers a "
            f"thread; {target.launched_threads} threads a block leave "
            f"{target.register_limit}"
        )
    return None


def cluster_fault(
    plan: Plan, architecture: Architecture, cluster_size: int
) -> str | None:
    """Why a cluster size cannot serve this plan, or None where it can."""
    if cluster_size > architecture.max_cluster:
        return (
            f"{architecture.name} has clusters of at most {architecture.max_cluster} "
            "blocks"
        )
    target = TargetPlan(plan, architecture, cluster_size, "", (), "")
    if target.launched_threads > MAX_THREADS_PER_BLOCK:
        return (
            f"a block would need {target.launched_threads} threads; the limit is "
            f"{MAX_THREADS_PER_BLOCK}"
        )
    needed = boundary_registers(plan)
    if needed > target.register_limit:
        with_fn = " with fn in them" if plan.fn_home == "registers" else ""
        return (
            f"{target.launched_threads} threads a block leave {target.register_limit} "
            f"registers a thread, and the boundary needs about {needed}{with_fn}"
        )
    # With fn in shared memory, little room for tokens is a bad bargain.
    fewest = min(FEWEST_TOKENS, plan.capacity) if plan.fn_home == "shared" else 1
    return group_fault(target, fewest)


def legal_clusters(plan: Plan, architecture: Architecture) -> tuple[int, ...]:
    """The cluster sizes that can serve this plan, rising."""
    return tuple(
        size
        for size in range(1, architecture.max_cluster + 1)
        if cluster_fault(plan, architecture, size) is None
    )


def choose_cluster(plan: Plan, architecture: Architecture) -> int | None:
    """The cluster size for a spec that names none.

    The portable one that leaves each warp least to do; of these, the smallest.
    """

    def warps(size: int) -> int:
        return -(-plan.shares // size)

    sizes = [s for s in legal_clusters(plan, architecture) if s <= PORTABLE_CLUSTER]
    return min(sizes, key=warps, default=None)


def choose_token_groups(target: TargetPlan) -> Iterator[TokenGroup]:
    """Token groups for a spec that names none: the fastest at every M, by the model.

    A call in one wave takes one launch, so a group's row ends where its wave does, if
    the group goes on to serve larger calls.
    """
    capacity = target.plan.capacity
    groups = [group for group in TOKEN_GROUPS if group_fault(target, group) is None]
    group = groups[0]
    ends: dict[tuple[int, bool], int] = {}
    for tokens in range(1, capacity + 1):
        larger = [g for g in groups if g >= group]
        group = min(larger, key=lambda g: (target.predicted(tokens, g), g))
        ends[group, target.waves(tokens, group) == 1] = tokens
    for (group, _), end in ends.items():
        yield plan_group(target, end, group, None)


def plan_group(
    target: TargetPlan,
    max_tokens: int,
    group: int,
    launches: int | None,
    fn_octets: int | None = None,
) -> TokenGroup:
    """One row of a dispatch table."""
    plan = target.plan
    blocks = blocks_together(target, group, fn_octets)
    if launches is None:
        launches = 1 if launches_fault(target, max_tokens, group, blocks) is None else 2
    limit, most = target.register_limit, MOST_AT_ONCE
    if blocks > 1:
        limit = register_limit(blocks * target.launched_threads) + BOUND_SAVES
        most = MOST_AT_ONCE_OF_TWO
    held = plan.held_octets(fn_octets)
    senders = max(1, target.warps // group)
    return TokenGroup(
        max_tokens=max_tokens,
        group=group,
        at_once=fragments_at_once(plan, group, limit, fn_octets, most),
        senders=senders,
        most_peers=-(-target.cluster_size // senders),
        shared_bytes=target.shared_bytes(group, fn_octets),
        fn_octets=held,
        split=held < plan.held_octets(),
        blocks=blocks,
        launches=launches,
        finalizes=plan.finalizes_inside and launches == 1 and group <= FINALIZING_GROUP,
    )


def blocks_together(target: TargetPlan, group: int, fn_octets: int | None) -> int:
    """Blocks of a boundary that are to share a multiprocessor: one or two.

    Two where they fit, because threads keep less of fn in registers than they could:
    the one waits, for its launch or for other ranks, while the other works.
    """
    plan = target.plan
    if plan.held_octets(fn_octets) == plan.held_octets():
        return 1
    limit = register_limit(2 * target.launched_threads)
    shared = 2 * (target.shared_bytes(group, fn_octets) + RESERVED_SHARED_BYTES)
    fits = (
        boundary_registers(plan, 1, fn_octets) <= limit + BOUND_SAVES
        and projection_registers(plan, group, fn_octets) <= limit
        and shared <= target.architecture.shared_bytes + RESERVED_SHARED_BYTES
    )
    return 2 if fits else 1


def shared_octets(target: TargetPlan, group: int) -> int | None:
    """The fewest octets of fn to move from registers to shared memory for two blocks.

    None where no number makes two blocks of a boundary share a multiprocessor.
    """
    held = target.plan.held_octets()
    if target.plan.projection == "fma":
        return None
    moved = range(1, held + 1)
    fitting = (n for n in moved if blocks_together(target, group, held - n) > 1)
    return next(fitting, None)


def launches_fault(
    target: TargetPlan, max_tokens: int, group: int, blocks: int
) -> str | None:
    """Why a boundary cannot publish itself, or None where it can.

    Its blocks wait for those of other ranks, so all must run at once everywhere.
    """
    clusters = -(-max_tokens // group)
    wave = target.wave(blocks)
    if target.plan.tp == 1:
        return "one rank has nothing to publish"
    if clusters > wave:
        return f"{clusters} clusters would have to run at once, and about {wave} do"
    return None


def launches_hint(target: TargetPlan, group: int, blocks: int) -> str | None:
    """What calls of a token group one launch can serve; None if there are none."""
    if target.plan.tp == 1:
        return None
    wave = target.wave(blocks)
    return f"or end the entry at {wave * group} tokens"


def clusters_at_once(
    architecture: Architecture, cluster_size: int, blocks: int = 1
) -> int:
    """Clusters that run together, ``blocks`` blocks a multiprocessor.

    What exceeds a portable cluster shares one of the device's GPCs with no other, or
    with what fits its multiprocessors beside it.
    """
    places = architecture.cluster_8_capacity * PORTABLE_CLUSTER
    if cluster_size <= PORTABLE_CLUSTER:
        return blocks * (places // cluster_size)
    gpcs = places // architecture.max_cluster
    return gpcs * (blocks * architecture.max_cluster // cluster_size)


def target_problems(
    plan: Plan, architecture: Architecture, target: Target
) -> list[Problem]:
    """What keeps one target of the spec from being built by a design."""
    key = ("targets", architecture.name)
    if target.cluster_size is None:
        if choose_cluster(plan, architecture) is None:
            fault = cluster_fault(plan, architecture, PORTABLE_CLUSTER)
            return [
                Problem(
                    ("model", "hidden"),
                    f"no portable cluster of {architecture.name} serves this hidden "
                    f"size; with {PORTABLE_CLUSTER} blocks, {fault}",
                    given=str(plan.hidden),
                    hint="name a larger cluster_size",
                )
            ]
    else:
        fault = cluster_fault(plan, architecture, target.cluster_size)
        if fault is not None:
            return [
                Problem(
                    (*key, "cluster_size"),
                    fault,
                    given=str(target.cluster_size),
                    allowed=", ".join(map(str, served_clusters(plan, architecture))),
                    hint="leave it out and the plan picks one",
                )
            ]
    problems = []
    planned = plan_target(plan, architecture, target)
    for index, row in enumerate(target.token_groups or ()):
        if row.launches == 1:
            blocks = planned.token_groups[index].blocks
            fault = launches_fault(planned, row.max_tokens, row.group, blocks)
            if fault is not None:
                problems.append(
                    Problem(
                        (*key, "token_groups", index, "launches"),
                        fault,
                        given="1",
                        allowed="2",
                        hint=launches_hint(planned, row.group, blocks),
                    )
                )
        fault = group_fault(planned, row.group, row.fn_octets)
        if fault is not None:
            fits = max(
                group
                for group in range(1, row.group)
                if group_fault(planned, group, row.fn_octets) is None
            )
            problems.append(
                Problem(
                    (*key, "token_groups", index, "group"),
                    fault,
                    given=str(row.group),
                    allowed=f"at most {fits} at cluster size {planned.cluster_size}",
                )
            )
    return problems


def fn_octets_problems(plan: Plan, name: str, target: Target) -> list[Problem]:
    """Faults of what a target says about fn's place."""
    problems = []
    seen: dict[int, int] = {}
    for index, row in enumerate(target.token_groups or ()):
        fault, allowed = None, f"a whole number from 0 to {plan.fn_octets}"
        octets = plan.fn_octets if row.fn_octets is None else row.fn_octets
        before = octets
        if octets < plan.fn_octets:
            before = seen.setdefault(row.group, octets)
        if row.fn_octets is not None and plan.projection == "fma":
            fault, allowed = "a projection by FMA keeps fn in one place", "null"
        elif (row.fn_octets or 0) > plan.fn_octets:
            fault = f"fn has {plan.fn_octets} octets of rows, of {plan.mix} rows"
        elif before != octets:
            allowed = f"{before}, null"
            fault = (
                f"another row of groups of {row.group} splits fn otherwise, and they "
                "share their kernels"
            )
        if fault is not None:
            loc = ("targets", name, "token_groups", index, "fn_octets")
            given = "null" if row.fn_octets is None else str(row.fn_octets)
            problems.append(Problem(loc, fault, given=given, allowed=allowed))
    return problems


def served_clusters(plan: Plan, architecture: Architecture) -> list[int]:
    """The cluster sizes that some design can serve, rising."""
    plans = [Plan(plan.spec, design) for design in designs_for(plan.spec)]
    return sorted({size for p in plans for size in legal_clusters(p, architecture)})


def plan_target(plan: Plan, architecture: Architecture, target: Target) -> TargetPlan:
    """Plans one target; it must have no problems."""
    cluster_size = target.cluster_size or choose_cluster(plan, architecture)
    assert cluster_size is not None
    cluster_reason = (
        "from the spec"
        if target.cluster_size
        else "picked: the smallest portable one of those that need the fewest warps"
    )
    planned = TargetPlan(plan, architecture, cluster_size, cluster_reason, (), "")
    if target.token_groups is None:
        token_groups = tuple(choose_token_groups(planned))
        groups_reason = (
            f"picked: about {planned.wave()} clusters run at once, and these groups "
            "should be the fastest"
        )
    else:
        token_groups = tuple(
            plan_group(planned, row.max_tokens, row.group, row.launches, row.fn_octets)
            for row in target.token_groups
        )
        groups_reason = "from the spec"
    return replace(planned, token_groups=token_groups, groups_reason=groups_reason)
