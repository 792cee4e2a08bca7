"""Bugs planted in the kernels: each must be caught, or the tests prove little.

Each mutant changes one place of a rendered package. It is caught where an output, the
state of the mailbox or the emulator's own checks differ in one of a few cases. Those of
the protocol must fail under the adversarial scheduler, within the seeds that
test_stress.py runs; the others in the hard inputs of `mhcgen verify`, or there.

These changes were tried and break nothing, so they are not here. To advance the
generation by two is as good as by one: modulo three, both visit all. Publish may read
it before its own wait, as long as the host lets each publish wait for the mixes of the
call before it, and so for that call's boundary. A boundary that consumes need not wait
before it ends, and the block that is counted last may advance the generation at once:
it is counted when all rows have come, and then all have read the generation. The warp
of the mixes need not wait for the kernel before where the sums that it takes are behind
such a wait. Weights beyond the group's land where sums are stored later.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
import pytest

from mhcgen.emulator import scheduler
from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.machine import Machine
from mhcgen.emulator.package import EmulatedPackage
from mhcgen.plan import Plan, make_plan
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import run
from mhcgen.verify.report import Outcome
from tests.emulator.conftest import ARCH, SEEDS, Load, stress_cases
from tests.emulator.planting import Mutant, Plant

PUBLISH = ("publish_unicast",)
CONSUMES = ("boundary_1", "boundary_3")
PUBLISHES = ("boundary_1_unicast",)
GROUPS = ("boundary_3_unicast",)
BOUNDARIES = (*CONSUMES, *PUBLISHES, *GROUPS)
FINALIZE = tuple(
    f"finalize_{dtype}{shared}_unicast"
    for dtype in ("fp32", "bf16")
    for shared in ("", "_shared")
)
FINALIZES = tuple(f"boundary_1_{name}" for name in FINALIZE)


def boundary(
    name: str,
    old: str,
    new: str,
    kernels: tuple[str, ...] = PUBLISHES,
    moved: tuple[str, ...] = (),
    seed: int = 0,
) -> Mutant:
    """A bug of the boundary."""
    return Mutant(name, kernels, "boundary.py", old, new, moved, seed)


def step(
    name: str,
    old: str,
    new: str,
    kernels: tuple[str, ...] = PUBLISHES,
    seed: int = 0,
) -> Mutant:
    """A bug of a step."""
    return Mutant(name, kernels, "steps.py", old, new, seed=seed)


WAIT = "        cute.arch.griddepcontrol_wait()\n"
TRIGGER = "        cute.arch.griddepcontrol_launch_dependents()\n"
GENERATION = "        generation = ptx.load_int_relaxed(state.iterator.toint())\n"
ADVANCE = "(generation + 1) % GENERATIONS"
ADVANCES = "        if thread == 0 and arrival == last:\n"
FIRST_WAIT = (
    "        if cutlass.const_expr(self.publishes is not None):\n"
    "            cute.arch.griddepcontrol_wait()\n"
)
LAST = "last = cute.arch.grid_dim()[1] * self.cluster_size - 1"
COUNTS = f"""\
        arrival = Uint32(0)
        {LAST}
        if thread == 0:
            arrival = ptx.count_arrival(state.iterator.toint() + 4, last)
"""
LAST_WAIT = """\
        if cutlass.const_expr(self.publishes is None):
            # The publish before this kernel has read the generation, too.
            cute.arch.griddepcontrol_wait()
"""
COPIES = """\
        for index, share in items:
            self.copy_stream(call, index, share)
"""
PUBLISH_ROWS = """\
        if cutlass.const_expr(self.publishes is not None):
            for batch in batches(items, self.items_at_once):
                self.publish(call, batch, destinations, generation)
"""
WAITS_COPIES = "        ptx.wait_copies()\n"
READY = """\
        cute.arch.cluster_wait()
        ptx.wait_copies()
        self.sync()
"""
MEET = "        self.sync()\n"
REARM = "ptx.store_fragment_if(present, place, SENTINELS)"
REARMS = f"""\
            for present, place in places:
                {REARM}
"""
POLL = "poll(places, load_rows(places, LANE_WORDS), LANE_WORDS)"
POLLS = f"            arrived = {POLL}\n"
POLLED = """\
                    self.present(call, index, share),
                    slots
"""
ARRIVE = "        cute.arch.cluster_arrive_relaxed()\n"
INIT = "        if thread == 0:\n            # One barrier for the sums"
LOADS_ROW = """\
        words = ptx.load_fragment(
            x.iterator.toint() + Int64(token * ROW_BYTES + column)
        )
"""
STORES_WEIGHTS = """\
        for place, weight in token_weights:
            weights[place] = weight
"""

PROTOCOL = [
    boundary(
        "the next generation is re-armed instead of the consumed one",
        REARM,
        REARM.replace("place", f"place + ({ADVANCE} - generation) * GENERATION_BYTES"),
        PUBLISHES,
    ),
    boundary("nothing is re-armed", REARMS, "", CONSUMES),
    boundary(
        "of a group, only the first token is re-armed",
        REARMS,
        REARMS.replace("places", "places[:TP]"),
        GROUPS,
    ),
    boundary(
        "the last rank is never re-armed",
        REARMS,
        REARMS.replace("places", "places[:-1]"),
        PUBLISHES,
    ),
    boundary(
        "absent tokens are re-armed",
        REARM,
        REARM.replace("present", "True"),
        GROUPS,
        seed=3,
    ),
    boundary(
        "re-armed with plus zero",
        "[SENTINEL_PAIR] * LANE_WORDS",
        "[0] * LANE_WORDS",
        PUBLISHES,
    ),
    boundary(
        "re-armed before the row is read",
        POLLS,
        REARMS + POLLS,
        PUBLISHES,
        moved=(REARMS,),
    ),
    boundary(
        "a lane re-arms words that its neighbour has yet to read",
        REARM,
        REARM.replace("place", "place ^ 4"),
        PUBLISHES,
        seed=1,
    ),
    step(
        "publish does not sanitize",
        "payload = sanitize(words)",
        "payload = words",
        ("publish_unicast",),
        seed=5,
    ),
    boundary(
        "a boundary that publishes does not sanitize",
        "payload = sanitize(words)",
        "payload = words",
        seed=1,
    ),
    step(
        "sanitize forgets the high halves",
        "return ~nonzero & SENTINEL_PAIR",
        "return ~nonzero & 0x8000",
        PUBLISH,
        seed=5,
    ),
    step(
        "the sentinel is compared as a float",
        "    return found != 0\n",
        "    values = unpack(words)\n"
        "    for value in values:\n"
        "        zero = cutlass.select_(value == 0.0, Uint32(1), Uint32(0))\n"
        "        found = found | zero\n"
        "    return found != 0\n",
        CONSUMES,
    ),
    step(
        "all ranks have arrived once the first has",
        "while holds_sentinel(words):",
        "while holds_sentinel(words[:count]):",
        CONSUMES,
    ),
    step(
        "all ranks have arrived once the last has",
        "while holds_sentinel(words):",
        "while holds_sentinel(words[-count:]):",
        PUBLISHES,
    ),
    step(
        "all tokens of a group have arrived once the first has",
        "while holds_sentinel(words):",
        "while holds_sentinel(words[: TP * count]):",
        GROUPS,
    ),
    step(
        "what came late is not loaded again",
        "        words = load_rows(places, count)\n",
        "        words = words[:count] + load_rows(places, count)[count:]\n",
        CONSUMES,
    ),
    step(
        "absent tokens are polled once a row is late",
        "        words = load_rows(places, count)\n",
        "        words = load_rows([(True, place) for _, place in places], count)\n",
        GROUPS,
        seed=3,
    ),
    boundary(
        "absent tokens are polled",
        POLLED,
        POLLED.replace("self.present(call, index, share)", "True"),
        GROUPS,
    ),
    boundary("no poll", POLL, "load_rows(places, LANE_WORDS)", GROUPS),
    boundary(
        "every block advances the generation",
        ADVANCES,
        "        if thread == 0:\n",
        BOUNDARIES,
        seed=5,
    ),
    boundary(
        "the first block to be counted advances the generation",
        ADVANCES,
        "        if thread == 0 and arrival == 0:\n",
        BOUNDARIES,
        seed=5,
    ),
    boundary("the generation stays", ADVANCE, "generation % GENERATIONS", CONSUMES),
    boundary(
        "four generations in the room of three",
        ADVANCE,
        "(generation + 1) % 4",
        GROUPS,
    ),
    boundary(
        "one block too few is counted",
        LAST,
        LAST.replace("- 1", "- 2"),
        PUBLISHES,
        seed=17,
    ),
    boundary("one block too many is counted", LAST, LAST.replace(" - 1", ""), CONSUMES),
    boundary(
        "clusters are counted, not blocks",
        LAST,
        LAST.replace(" * self.cluster_size", ""),
        BOUNDARIES,
        seed=5,
    ),
    boundary(
        "tokens are counted, not groups",
        LAST,
        LAST.replace("cute.arch.grid_dim()[1]", "call.residual.shape[0]"),
        GROUPS,
    ),
    boundary(
        "a block is counted before all of its warps have read the generation",
        READY,
        COUNTS + READY,
        BOUNDARIES,
        moved=(COUNTS,),
        seed=19,
    ),
    boundary(
        "a boundary that consumes advances the generation as soon as all have read it",
        READY,
        READY + COUNTS + ADVANCES + f"            state[0] = {ADVANCE}\n",
        CONSUMES,
        moved=(COUNTS,),
    ),
    boundary(
        "a boundary that consumes counts early and ends before its publish",
        READY,
        READY + COUNTS,
        CONSUMES,
        moved=(COUNTS, LAST_WAIT),
        seed=18,
    ),
    boundary(
        "a block that has been counted reads the generation again",
        COUNTS,
        COUNTS
        + "        again = ptx.load_int_relaxed(state.iterator.toint()) - generation\n"
        + indent(dedent(REARMS), " " * 8).replace(
            "place,", "place + Int64(again) * GENERATION_BYTES,"
        ),
        BOUNDARIES,
        moved=(REARMS,),
    ),
    boundary(
        "absent tokens publish",
        "payload = sanitize(words)\n"
        "            present = self.present(call, index, share)\n",
        "payload = sanitize(words)\n            present = True\n",
        GROUPS,
        seed=3,
    ),
    Mutant("publish does not wait", PUBLISH, "publish.py", WAIT, "", seed=2),
    Mutant(
        "publish triggers first",
        (*PUBLISH, "publish_multicast"),
        "publish.py",
        WAIT + TRIGGER,
        TRIGGER + WAIT,
        seed=43,
    ),
    Mutant(
        "publish reads its row before its wait",
        PUBLISH,
        "publish.py",
        WAIT,
        LOADS_ROW + WAIT,
        moved=(LOADS_ROW,),
        seed=2,
    ),
    Mutant(
        "finalize triggers first",
        FINALIZE,
        "finalize.py",
        WAIT + TRIGGER,
        TRIGGER + WAIT,
    ),
    Mutant(
        "two generations and no wait",
        PUBLISH,
        "publish.py",
        GENERATION,
        GENERATION.replace("generation =", "generation = 2 *"),
        seed=4,
    ),
    boundary("a boundary that publishes does not wait", FIRST_WAIT, "", seed=1),
    boundary(
        "a boundary publishes before its wait",
        FIRST_WAIT,
        "        state = call.state\n" + GENERATION + PUBLISH_ROWS + FIRST_WAIT,
    ),
    boundary(
        "a boundary closes routed sums before its wait",
        FIRST_WAIT,
        "        state = call.state\n" + GENERATION + PUBLISH_ROWS + FIRST_WAIT,
        FINALIZES,
    ),
    boundary(
        "a boundary that publishes reads its streams before its wait",
        FIRST_WAIT,
        COPIES + FIRST_WAIT,
    ),
]
MAPS = [
    Mutant(
        "slots of ranks overlap",
        PUBLISH,
        "publish.py",
        "rank * SLOT_BYTES",
        "rank * ROW_BYTES",
    ),
    boundary(
        "slots of ranks overlap where the boundary publishes",
        "Int64(call.rank) * SLOT_BYTES",
        "Int64(call.rank) * ROW_BYTES",
    ),
    Mutant(
        "rows of tokens overlap",
        PUBLISH,
        "publish.py",
        "token * ROW_BYTES + column",
        "column",
    ),
    boundary(
        "rows of tokens overlap where the boundary publishes",
        "slot + share.words_in_row + index * ROW_BYTES",
        "slot + share.words_in_row",
        GROUPS,
    ),
    boundary(
        "no rank publishes to itself",
        "store_fragment_if(present, place, payload)",
        "store_fragment_if(\n"
        "                        present & (mailbox != call.mailboxes[call.rank]),\n"
        "                        place,\n"
        "                        payload,\n"
        "                    )",
    ),
    boundary(
        "ranks are polled in rotated order",
        "(index * ROW_BYTES + rank * SLOT_BYTES)",
        "(index * ROW_BYTES + (rank + 1) % TP * SLOT_BYTES)",
    ),
    step(
        "ranks are summed in another order",
        "add_pairs([unpack(rank) for rank in ranks])",
        "add_pairs([unpack(rank) for rank in ranks[::2] + ranks[1::2]])",
    ),
    step(
        "the first rank stands for the second as well",
        "words[rank * count : (rank + 1) * count]",
        "words[max(rank - 1, 0) * count : max(rank, 1) * count]",
    ),
    boundary(
        "all tokens of a batch take the arrived rows of the first",
        "sum_ranks(words, LANE_WORDS)",
        "sum_ranks(arrived[: TP * LANE_WORDS], LANE_WORDS)",
        GROUPS,
    ),
    boundary(
        "columns of the new streams are swapped",
        "own_words=words,",
        "own_words=streams + (word ^ 1) * 4,",
    ),
    boundary(
        "columns of the returned streams are swapped",
        "call.first * TOKEN_BYTES + (column + word * 4)",
        "call.first * TOKEN_BYTES + (column + (word ^ 1) * 4)",
    ),
    boundary(
        "streams are returned in reverse",
        "(index * TOKEN_BYTES + j * ROW_BYTES)",
        "(index * TOKEN_BYTES + (HC - 1 - j) * ROW_BYTES)",
    ),
    boundary(
        "columns of the norm's weight are swapped",
        "norm_words[first_word + index]",
        "norm_words[(first_word + index) ^ 1]",
    ),
    boundary(
        "comb is read transposed",
        "[row[j] for row in comb]",
        "comb[j]",
    ),
    boundary(
        "all tokens of a group are weighed like the first",
        "(index * WEIGHTS + row * HC) * FLOAT_BYTES",
        "(row * HC) * FLOAT_BYTES",
        GROUPS,
    ),
    boundary(
        "all streams are weighed by the lane's pre-mix",
        "cute.arch.shuffle_sync(pre, first + j)",
        "pre",
    ),
    boundary(
        "all tokens of a group take the first one's pre-mix",
        "address + token * (HC * FLOAT_BYTES)",
        "address",
        GROUPS,
    ),
    step(
        "square sums go to the tokens in reverse",
        "(lane & distance) != 0)",
        "(lane & distance) == 0)",
        GROUPS,
    ),
    boundary(
        "the last square sum of a group is lost",
        "lane % lanes == 0 and token < self.group",
        "lane % lanes == 0 and token < self.group - 1",
        GROUPS,
    ),
    boundary(
        "all tokens of a group take the first one's norm",
        "self.norm_rstd(call, cutlass.min(token, call.count - 1))",
        "self.norm_rstd(call, 0)",
        GROUPS,
    ),
    boundary(
        "a token too many is present",
        "True if index == 0 else index < call.count",
        "True if index == 0 else index <= call.count",
        GROUPS,
    ),
    boundary(
        "weights beyond the last token are loaded",
        "cutlass.min(place // WEIGHTS, call.count - 1)",
        "place // WEIGHTS",
        GROUPS,
    ),
    Mutant(
        "chunks of a stream are swapped",
        PUBLISHES,
        "projection_tensor_cores.py",
        "stream * ROW_BYTES + part * CHUNK_BYTES",
        "stream * ROW_BYTES + (1 - part) * CHUNK_BYTES",
    ),
    boundary(
        "mixes go to the first token of the group",
        "mix[first + token, number]",
        "mix[first, number]",
        GROUPS,
    ),
    boundary(
        "the last group is taken for a whole one",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0], self.group)",
        GROUPS,
    ),
    boundary(
        "the last group is one token short",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0] - first, self.group - 1)",
        GROUPS,
    ),
    boundary(
        "the last token of a group is not polled",
        POLLED,
        POLLED.replace("index", "index + 1"),
        GROUPS,
    ),
    boundary(
        "lanes beyond the last token read on",
        "cutlass.min(octet * 8 + lane // 4, count - 1)",
        "octet * 8 + lane // 4",
        GROUPS,
    ),
    boundary(
        "all tokens of a group take the streams of the first",
        "call.residual.iterator.toint() + share.stream_in_token + index * TOKEN_BYTES",
        "call.residual.iterator.toint() + share.stream_in_token",
        GROUPS,
    ),
    boundary(
        "streams beyond the last token are read",
        "ptx.copy_async_if(index < call.count, place, address)",
        "ptx.copy_async(place, address)",
        GROUPS,
    ),
    boundary(
        "rows beyond the last token are read",
        "            self.present(call, index, share),\n            call.x",
        "            True,\n            call.x",
        GROUPS,
    ),
    boundary(
        "absent tokens store their streams",
        "                present,\n                call.new_residual",
        "                True,\n                call.new_residual",
        GROUPS,
    ),
    boundary(
        "absent tokens store a layer input",
        "                present,\n                call.layer_input",
        "                True,\n                call.layer_input",
        GROUPS,
    ),
    boundary(
        "all warps project the columns of the first",
        "+ warp * FRAGMENTS_PER_WARP",
        "",
    ),
    Mutant(
        "all tokens take the first one's shared expert",
        FINALIZES[1:2],
        "finalize.py",
        "shared_output.iterator.toint() + Int64(token * ROW_BYTES + column)",
        "shared_output.iterator.toint() + Int64(column)",
    ),
    boundary(
        "a warp sends its sums to one peer, again and again",
        "part + peer * self.senders",
        "part",
        GROUPS,
    ),
    boundary(
        "sums go to the wrong peer",
        "peer = token % self.cluster_size",
        "peer = (token + 1) % self.cluster_size",
    ),
    boundary(
        "squares go to the first block alone",
        "peer = pair % self.cluster_size",
        "peer = 0",
    ),
    boundary(
        "all blocks send their sums to one place",
        "self.warps)\n"
        "                    place = call.sums[token, number, None].iterator.toint() "
        "+ block * 4",
        "self.warps)\n"
        "                    place = call.sums[token, number, None].iterator.toint()",
    ),
]
NUMERICS = [
    step(
        "y is not rounded",
        "return unpack(pack(add_pairs([unpack(rank) for rank in ranks])))",
        "return add_pairs([unpack(rank) for rank in ranks])",
    ),
    step(
        "the product with post is fused",
        "    new = [ptx.mul(post, value) for value in y]\n"
        "    for weight, words in zip(comb, old, strict=True):\n",
        "    new = [ptx.mul(comb[0], value) for value in unpack(old[0])]\n"
        "    new = [ptx.fma(post, a, b) for a, b in zip(y, new, strict=True)]\n"
        "    for weight, words in zip(comb[1:], old[1:], strict=True):\n",
    ),
    step(
        "sources are mixed in reverse",
        "zip(comb, old, strict=True)",
        "zip(comb[::-1], old[::-1], strict=True)",
    ),
    Mutant(
        "the mean is over H, not HC times H",
        PUBLISHES,
        "constants.py",
        "INVERSE_ROW = 1.0 / (HC * HIDDEN)",
        "INVERSE_ROW = 1.0 / HIDDEN",
    ),
    Mutant(
        "the norm is over HC times H",
        PUBLISHES,
        "constants.py",
        "INVERSE_HIDDEN = 1.0 / HIDDEN",
        "INVERSE_HIDDEN = 1.0 / (HC * HIDDEN)",
    ),
    step("no rms_eps", "Float32(RMS_EPS)", "Float32(0.0)"),
    step("no norm_eps", "Float32(NORM_EPS)", "Float32(0.0)"),
    step("no hc_eps in the pre-mix", " + Float32(HC_EPS)", ""),
    boundary("all streams have one base", "call.base[stream]", "call.base[0]"),
    boundary(
        "mixes are not normalized",
        "number] = dot * row_rstd(squares)",
        "number] = dot",
    ),
    Mutant(
        "no hc_eps in the softmax",
        ("mixes",),
        "mixes.py",
        "ptx.fma(power, factor, Float32(HC_EPS))",
        "power * factor",
    ),
    Mutant(
        "no hc_eps in the passes",
        ("mixes",),
        "mixes.py",
        "Float32(HC_EPS) * before",
        "Float32(0.0)",
    ),
    Mutant(
        "one Sinkhorn pass too many",
        ("mixes",),
        "mixes.py",
        "cutlass.range(SINKHORN_ITERS - 1)",
        "cutlass.range(SINKHORN_ITERS)",
    ),
    Mutant(
        "Sinkhorn begins with the rows",
        ("mixes",),
        "mixes.py",
        "inverse_columns, column_scales = scale_rows(columns, ones, ones)",
        "inverse_columns, column_scales = ones, ones",
    ),
    Mutant(
        "post has the scale of comb",
        ("mixes",),
        "mixes.py",
        "scale[min(number // HC, 2)]",
        "scale[2]",
    ),
    Mutant(
        "no post_mult",
        ("mixes",),
        "mixes.py",
        "Float32(POST_MULT) * sigmoid",
        "sigmoid",
    ),
    Mutant(
        "absent experts are multiplied",
        FINALIZES[:1],
        "finalize.py",
        "cutlass.select_(here, Float32(expert_weights[token, k]), Float32(0.0))",
        "Float32(expert_weights[token, k])",
    ),
    Mutant(
        "absent experts are read",
        FINALIZE[:1],
        "finalize.py",
        "present = [index >= 0 for index in indices]",
        "present = [index >= -1 for index in indices]",
    ),
    Mutant(
        "the shared expert is left out",
        FINALIZES[1:2],
        "finalize.py",
        "if shared_output is not None:",
        "if False:",
    ),
]
BARRIERS = [
    boundary(
        "copies are not waited for",
        READY,
        READY.replace(WAITS_COPIES, ""),
    ),
    boundary(
        "copies are waited for once the warps have met",
        READY,
        READY.replace(WAITS_COPIES, "") + WAITS_COPIES,
    ),
    boundary(
        "weights are shared only once the warps have met",
        READY,
        READY + STORES_WEIGHTS,
        BOUNDARIES,
        moved=(STORES_WEIGHTS,),
        seed=5,
    ),
    boundary(
        "warps do not meet before the streams are mixed",
        READY,
        READY.replace(MEET, ""),
        seed=1,
    ),
    boundary(
        "peers are written before they run",
        READY,
        READY.replace("        cute.arch.cluster_wait()\n", ""),
    ),
    boundary(
        "a block tells its peers to write before its barriers are there",
        INIT,
        ARRIVE + INIT,
        moved=(ARRIVE,),
    ),
    boundary(
        "nothing makes the barriers known to the peers",
        "            ptx.fence_barriers()\n",
        "",
    ),
    boundary(
        "a sum less is expected",
        "own_tokens * OWN_SUMS",
        "own_tokens * (OWN_SUMS - 1)",
    ),
    boundary(
        "all blocks expect the mixes of the first",
        "(count + self.cluster_size - 1 - block)",
        "(count + self.cluster_size - 1)",
    ),
    boundary(
        "the mixes of all tokens are expected",
        "own_tokens * OWN_SUMS",
        "count * OWN_SUMS",
    ),
    boundary(
        "the squares of absent tokens are expected",
        "ptx.expect_bytes(arrived + 8, count * ",
        "ptx.expect_bytes(arrived + 8, self.group * ",
        GROUPS,
    ),
    boundary(
        "warps do not meet before their sums are sent",
        MEET + "        self.send_sums",
        "        self.send_sums",
    ),
    boundary("sums are not waited for", "        wait_for_sums(call.arrived)\n", ""),
    boundary(
        "warps do not meet before they share pre-mixes",
        MEET + "        address = pres",
        "        address = pres",
        GROUPS,
    ),
    boundary(
        "warps do not meet before they share norms",
        MEET + "        return [rstds",
        "        return [rstds",
        GROUPS,
    ),
    boundary(
        "warps do not meet before their squares are sent",
        MEET + "        self.send_squares",
        "        self.send_squares",
    ),
    boundary(
        "squares are counted at the barrier of the sums",
        "ptx.store_async(place, call.arrived + 8, peer, total)",
        "ptx.store_async(place, call.arrived, peer, total)",
    ),
    Mutant(
        "the phase before that of the sums is waited for",
        PUBLISHES,
        "ptx.py",
        "open, [$1], 0; ",
        "open, [$1], 1; ",
    ),
    boundary(
        "squares are not waited for", "        wait_for_sums(call.arrived + 8)\n", ""
    ),
]
LANES = [
    boundary(
        "a warp projects streams before all of its lanes have stored them",
        "        cute.arch.sync_warp()\n        lane_tokens",
        "        lane_tokens",
    ),
]
TAIL = [
    boundary(
        "the warp of the mixes is waited for",
        "number_of_threads=self.threads)",
        "number_of_threads=self.threads + 32)",
    ),
    boundary(
        "the warp of the mixes reads sums before they have come",
        WAIT + "        wait_for_sums(call.arrived)\n",
        WAIT,
    ),
    boundary(
        "lanes read logits that others have yet to store",
        "        cute.arch.sync_warp()\n        token = lane",
        "        token = lane",
    ),
    boundary(
        "lanes take tokens of other blocks",
        "token = lane * self.cluster_size + block",
        "token = lane + block",
        GROUPS,
    ),
    boundary(
        "the warp of the mixes stores all at the first token",
        "place = call.first + token",
        "place = call.first",
        GROUPS,
    ),
    boundary(
        "the warp of the mixes takes the first token's squares for all",
        "rstd = row_rstd(squares)",
        "rstd = row_rstd(sum_peers(call.sums[0, SQUARES, None], self.cluster_size))",
        GROUPS,
    ),
    boundary(
        "the warp of the mixes takes part in steps 1 to 5",
        "if cute.arch.warp_idx() < self.warps:",
        "if cute.arch.warp_idx() <= self.warps:",
    ),
]
EIGHT_LANES = [
    boundary(
        "a lane overwrites streams that its neighbour has yet to read",
        "            cute.arch.sync_warp()\n            for new, (index, share)",
        "            for new, (index, share)",
    ),
    boundary(
        "a lane re-arms words that its neighbour has yet to read",
        POLLS,
        POLLS + REARMS,
        moved=(REARMS,),
    ),
]
EIGHT_PROTOCOL = [
    boundary(
        "both lanes of a word publish it",
        "present = (cute.arch.lane_idx() % WORD_LANES == 0) & present\n"
        "            for mailbox",
        "for mailbox",
    ),
]
EIGHT = [
    boundary(
        "a lane stores its streams where its neighbour's belong",
        "own_words=words + stream % WORD_LANES * ",
        "own_words=words + (stream + 1) % WORD_LANES * ",
    ),
    boundary(
        "a lane returns its streams where its neighbour's belong",
        "stream % WORD_LANES * (LANE_STREAMS * ROW_BYTES)",
        "(stream + 1) % WORD_LANES * (LANE_STREAMS * ROW_BYTES)",
    ),
    boundary(
        "both lanes of a word mix the first streams",
        "first = cute.arch.lane_idx() % WORD_LANES * LANE_STREAMS",
        "first = 0",
    ),
    boundary(
        "both lanes of a word weigh by the first pre-mixes",
        "cute.arch.lane_idx() - stream + stream % WORD_LANES * LANE_STREAMS",
        "cute.arch.lane_idx() - stream",
    ),
    boundary(
        "both lanes of a word weigh a group by the first pre-mixes",
        "address = address + stream % WORD_LANES * (LANE_STREAMS * FLOAT_BYTES)",
        "pass",
        GROUPS,
    ),
    step(
        "a lane collapses its own streams alone",
        "for distance in MERGES:",
        "for distance in ():",
    ),
    Mutant(
        "a lane merges its collapse with that of another word",
        PUBLISHES,
        "constants.py",
        "MERGES = (1,)",
        "MERGES = (2,)",
    ),
    boundary(
        "both lanes of a word count its squares",
        "counts = cute.arch.lane_idx() % WORD_LANES == 0",
        "counts = cute.arch.lane_idx() % WORD_LANES >= 0",
    ),
]
SETS = {
    "narrow": [*PROTOCOL, *MAPS, *NUMERICS, *BARRIERS, *LANES],
    "tail": TAIL,
    "eight_streams": [*EIGHT_PROTOCOL, *EIGHT, *EIGHT_LANES],
}
MUTANTS = [(name, mutant) for name, mutants in SETS.items() for mutant in mutants]


@pytest.fixture(scope="session")
def plans(narrow_plan: Plan) -> dict[str, Plan]:
    """The narrow plan; and others of it, with no more than their mutants need."""
    spec = narrow_plan.spec
    unicast = spec.parallel.model_copy(update={"transports": ("unicast",)})
    eight = spec.model.model_copy(update={"hc": 8})
    changes = {"tail": {"mixes": "tail"}, "eight_streams": {"model": eight}}
    plans = {"narrow": narrow_plan}
    for name, own in changes.items():
        common = {"name": name, "parallel": unicast, "moe": None}
        plans[name] = make_plan(spec.model_copy(update=common | own))
    return plans


def hard_cases(mutant: Mutant) -> list[Case]:
    """The hard inputs of sizes that take a kernel of the mutant; the quickest first."""
    grouped = mutant.kernels[0].startswith("boundary_3")
    sizes = ((5,), (5,) * 7) if grouped else ((2,) * 3, (2,) * 7, (1,) * 7)
    return [Case(ARCH, "unicast", tokens, seed=0) for tokens in sizes]


def cases(mutant: Mutant, plan: Plan) -> list[Case]:
    """What a mutant must not survive; one of the protocol, the seeds alone.

    Where it is in kernels of multicast, too, their seeds are behind those of unicast.
    """
    seeds = stress_cases(plan, "unicast", 0, SEEDS)
    if mutant.kernels[-1].endswith("multicast"):
        seeds += stress_cases(plan, "multicast", 0, SEEDS)
    seeds = seeds[mutant.seed :] + seeds[: mutant.seed]
    if mutant in (*PROTOCOL, *EIGHT_PROTOCOL):
        return seeds
    return hard_cases(mutant) + seeds


@pytest.mark.parametrize("name", SETS)
def test_the_original_is_right(load: Load, plans: dict[str, Plan], name: str) -> None:
    """With what mutants get; of the seeds with one: test_stress.py runs them all."""
    package = load(plans[name], ARCH)
    outcomes = [*itertools.islice(with_lanes_apart(package), 3)]
    for kernels in (PUBLISHES, GROUPS):
        mutant = Mutant("none", kernels, "", "", "")
        outcomes += [run(package, case) for case in hard_cases(mutant)]
    outcomes += [
        run(package, case) for case in stress_cases(package.plan, "unicast", 0, 1)
    ]
    for outcome in outcomes:
        assert outcome.ok, (outcome.case, outcome.errors, outcome.problems)


def tries(mutant: Mutant, package: EmulatedPackage) -> Iterator[Outcome]:
    """What comes of what a mutant must not survive."""
    if mutant in LANES or mutant in EIGHT_LANES:
        yield from with_lanes_apart(package)
    else:
        for case in cases(mutant, package.plan):
            yield run(package, case)


def with_lanes_apart(package: EmulatedPackage) -> Iterator[Outcome]:
    """Calls in which random lanes go on, and leave the others behind.

    The seeds elsewhere do so, too, but not for long, and seldom at the one instruction
    where it matters.
    """

    def threads(temper: scheduler._Temper, machine: Machine) -> Array:
        return np.asarray(temper.rng.random(machine.threads) < 0.5)

    def budget(temper: scheduler._Temper) -> int:
        return int(temper.rng.integers(1, 100))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler._Temper, "threads", threads)
        patch.setattr(scheduler._Temper, "budget", budget)
        for seed in range(SEEDS):
            yield run(package, Case(ARCH, "unicast", (1,), seed, stress=True))


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=str)
def test_mutant_is_caught(
    load: Load, plant: Plant, plans: dict[str, Plan], name: str, mutant: Mutant
) -> None:
    package = plant(mutant, load(plans[name], ARCH))
    assert any(not outcome.ok for outcome in tries(mutant, package))


def test_the_documentation_lists_the_mutants_of_the_protocol(repository: Path) -> None:
    text = (repository / "docs" / "emulator.md").read_text("utf-8")
    listed = text.split("Mutants of the protocol:\n\n")[1].split("\n\n")[0]
    assert listed.splitlines() == [f"- {mutant.name}" for mutant in PROTOCOL]
