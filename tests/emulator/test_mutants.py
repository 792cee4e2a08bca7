"""Bugs planted in the kernels: each must be caught, or the tests prove little.

Each mutant changes one place of a rendered package. It is caught where an output, the
state of the mailbox or the emulator's own checks differ in one of a few cases. Those of
the protocol must fail under the adversarial scheduler, within the seeds that
test_stress.py runs; the others in the hard inputs of `mhcgen verify`, or there.

Two changes were tried and break nothing, so they are not here. To advance the
generation by two is as good as by one: modulo three, both visit all. And publish may
read it before its own wait, as long as the host lets each publish wait for the mixes of
the call before it, and so for that call's boundary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest
from filelock import FileLock

from mhcgen.build import write_files
from mhcgen.compilation import compile_kernels, jobs_of
from mhcgen.emulator.package import EmulatedPackage, load_package
from mhcgen.plan import Plan, make_plan
from mhcgen.render import Files, kernel_rows, render
from mhcgen.verify.cases import Case
from mhcgen.verify.on_cpu import run
from mhcgen.verify.report import Outcome
from tests.emulator.conftest import ARCH, SEEDS, Load, stress_cases

pytestmark = pytest.mark.mutants

FINALIZES = tuple(
    f"finalize_{dtype}{shared}_unicast"
    for dtype in ("fp32", "bf16")
    for shared in ("", "_shared")
)
FINALIZING = tuple(f"boundary_1_{name}" for name in FINALIZES)
CONSUMES = ("boundary_1",)
PUBLISHES = ("boundary_1_unicast",)
BOUNDARIES = (*CONSUMES, *PUBLISHES)
GROUPS = ("boundary_3", "boundary_3_unicast")
SENDS = ("publish_unicast", *PUBLISHES)


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``file``, ``old`` becomes ``new``, in some kernels.

    What is ``moved`` away is gone from its place.
    """

    name: str
    kernels: tuple[str, ...]
    file: str
    old: str
    new: str
    moved: tuple[str, ...] = ()


def boundary(
    name: str,
    old: str,
    new: str,
    kernels: tuple[str, ...] = PUBLISHES,
    moved: tuple[str, ...] = (),
) -> Mutant:
    """A bug of the boundary."""
    return Mutant(name, kernels, "boundary.py", old, new, moved)


def step(name: str, old: str, new: str, kernels: tuple[str, ...] = PUBLISHES) -> Mutant:
    """A bug of a step."""
    return Mutant(name, kernels, "steps.py", old, new)


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
            ptx.copy_async(
                share.stash + index * STASH_TOKEN,
                call.residual.iterator.toint()
                + Int64(tokens[index] * TOKEN_BYTES)
                + (stream * ROW_BYTES + share.column),
            )
"""
PUBLISH = """\
        if cutlass.const_expr(self.publishes is not None):
            for batch in batches(items, self.items_at_once):
                self.publish(call, batch, tokens, destinations, generation, stream)
"""
READY = """\
        cute.arch.cluster_wait()
        ptx.wait_copies()
        self.sync()
"""
REARM = "ptx.store_fragment_if(present, slot + source * SLOT_BYTES, SENTINELS)"
REARMS = "cutlass.range_constexpr(POLLS):\n                " + REARM
ARRIVE = "        cute.arch.cluster_arrive()\n"
INIT = "        if thread == 0:\n            # One barrier for the sums"

PROTOCOL = [
    boundary(
        "the next generation is re-armed instead of the consumed one",
        REARM,
        REARM.replace(
            "source * SLOT_BYTES",
            f"source * SLOT_BYTES + ({ADVANCE} - generation) * GENERATION_BYTES",
        ),
        BOUNDARIES,
    ),
    boundary("nothing is re-armed", REARMS, REARMS.replace("POLLS", "0"), BOUNDARIES),
    boundary(
        "of a group, only the first token is re-armed",
        REARMS,
        REARMS.replace("POLLS", "POLLS if index == 0 else 0"),
        GROUPS,
    ),
    boundary(
        "re-armed with plus zero",
        "[SENTINEL_PAIR] * FRAGMENT_WORDS",
        "[0] * FRAGMENT_WORDS",
        BOUNDARIES,
    ),
    boundary(
        "re-armed before the row is read",
        "            arrivals = [\n",
        "            for place in places:\n"
        "                ptx.store_fragment_if(count > 0, place, SENTINELS)\n"
        "            arrivals = [\n",
        BOUNDARIES,
    ),
    step(
        "publish does not sanitize",
        "payload = sanitize(words)",
        "payload = words",
        ("publish_unicast",),
    ),
    boundary(
        "a boundary that publishes does not sanitize",
        "payload = sanitize(words)",
        "payload = words",
    ),
    step(
        "sanitize forgets the high halves",
        "return ~nonzero & SENTINEL_PAIR",
        "return ~nonzero & 0x8000",
        SENDS,
    ),
    step(
        "the sentinel is compared as a float",
        "    return found != 0\n",
        "    values = unpack(words)\n"
        "    for value in values:\n"
        "        zero = cutlass.select_(value == 0.0, Uint32(1), Uint32(0))\n"
        "        found = found | zero\n"
        "    return found != 0\n",
        BOUNDARIES,
    ),
    step(
        "a fragment has arrived once its first word has",
        "while holds_sentinel((word0, word1, word2, word3)):",
        "while holds_sentinel((word0,)):",
        BOUNDARIES,
    ),
    step("no poll", "poll(slot + rank * SLOT_BYTES, words)", "words", BOUNDARIES),
    boundary(
        "every block advances the generation",
        ADVANCES,
        "        if thread == 0:\n",
        (*BOUNDARIES, *GROUPS),
    ),
    boundary(
        "the first block to be counted advances the generation",
        ADVANCES,
        "        if thread == 0 and arrival == 0:\n",
        (*BOUNDARIES, *GROUPS),
    ),
    boundary("the generation stays", ADVANCE, "generation % GENERATIONS", BOUNDARIES),
    boundary(
        "four generations in the room of three",
        ADVANCE,
        "(generation + 1) % 4",
        GROUPS,
    ),
    boundary(
        "one block too few is counted", LAST, LAST.replace("- 1", "- 2"), BOUNDARIES
    ),
    boundary(
        "one block too many is counted", LAST, LAST.replace(" - 1", ""), BOUNDARIES
    ),
    boundary(
        "clusters are counted, not blocks",
        LAST,
        LAST.replace(" * self.cluster_size", ""),
        BOUNDARIES,
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
    ),
    Mutant("publish does not wait", SENDS[:1], "publish.py", WAIT, ""),
    Mutant(
        "publish triggers first",
        SENDS[:1],
        "publish.py",
        WAIT + TRIGGER,
        TRIGGER + WAIT,
    ),
    Mutant(
        "two generations and no wait",
        SENDS[:1],
        "publish.py",
        GENERATION,
        GENERATION.replace("generation =", "generation = 2 *"),
    ),
    boundary("a boundary that publishes does not wait", FIRST_WAIT, ""),
    boundary(
        "a boundary publishes before its wait",
        FIRST_WAIT,
        "        state = call.state\n" + GENERATION + PUBLISH + FIRST_WAIT,
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
        SENDS[:1],
        "publish.py",
        "rank * SLOT_BYTES",
        "rank * ROW_BYTES",
    ),
    boundary(
        "slots of ranks overlap where the boundary publishes",
        "call.rank * SLOT_BYTES",
        "call.rank * ROW_BYTES",
    ),
    Mutant(
        "rows of tokens overlap",
        SENDS[:1],
        "publish.py",
        "token * ROW_BYTES + column",
        "column",
    ),
    boundary(
        "rows of tokens overlap where the boundary publishes",
        "offset = slot + (tokens[index] * ROW_BYTES + share.column)",
        "offset = slot + share.column",
    ),
    boundary(
        "no rank publishes to itself",
        "own = present & (stream + turn * HC < TP)",
        "own = present & (stream + turn * HC != call.rank)",
    ),
    boundary(
        "ranks are polled in rotated order",
        "+ stream % SOURCES * POLLS",
        "+ (stream + 1) % SOURCES * POLLS",
    ),
    Mutant(
        "ranks are summed in another order",
        PUBLISHES,
        "constants.py",
        "BUTTERFLIES = (\n    1,\n    2,\n)",
        "BUTTERFLIES = (\n    2,\n    1,\n)",
    ),
    Mutant(
        "columns of the collapse are swapped",
        PUBLISHES,
        "constants.py",
        "SPLITS = (\n    2,\n    1,\n)",
        "SPLITS = (\n    1,\n    2,\n)",
    ),
    boundary(
        "comb is read transposed",
        "[weights[index * WEIGHTS + stream + row * HC] for row in range(HC + 1)]",
        "[weights[index * WEIGHTS + stream]] + "
        "[weights[index * WEIGHTS + (stream + 1) * HC + row] for row in range(HC)]",
    ),
    boundary(
        "all tokens of a group are weighed like the first",
        "[weights[index * WEIGHTS + stream + row * HC]",
        "[weights[stream + row * HC]",
        GROUPS[1:],
    ),
    boundary(
        "weights beyond the group are loaded",
        "cutlass.min(place, self.group * WEIGHTS - 1)",
        "place",
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
        GROUPS[1:],
    ),
    boundary(
        "the last group is taken for a whole one",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0], self.group)",
        GROUPS[1:],
    ),
    boundary(
        "the last group is one token short",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0] - first, self.group - 1)",
        GROUPS[1:],
    ),
    boundary(
        "the last token of a group is not polled",
        "load_arrivals(place, (index < count))",
        "load_arrivals(place, (index < count - 1))",
        GROUPS[1:],
    ),
    boundary(
        "lanes beyond the last token read on",
        "cutlass.min(octet * 8 + lane // 4, count - 1)",
        "octet * 8 + lane // 4",
        GROUPS[1:],
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
    step("y is not rounded", "return unpack(pack(partial))", "return partial"),
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
        FINALIZING,
        "finalize.py",
        "cutlass.select_(here, Float32(expert_weights[token, k]), Float32(0.0))",
        "Float32(expert_weights[token, k])",
    ),
    Mutant(
        "absent experts are read",
        FINALIZES,
        "finalize.py",
        "present = [index >= 0 for index in indices]",
        "present = [index >= -1 for index in indices]",
    ),
    Mutant(
        "the shared expert is left out",
        FINALIZING,
        "finalize.py",
        "if shared_output is not None:",
        "if False:",
    ),
]
BARRIERS = [
    boundary(
        "copies are not waited for",
        READY,
        READY.replace("        ptx.wait_copies()\n", ""),
    ),
    boundary(
        "warps do not meet before the streams are mixed",
        READY,
        READY.replace("        self.sync()\n", ""),
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
    ),
    boundary(
        "the fence of the barriers is missing", "            ptx.fence_barriers()\n", ""
    ),
    boundary(
        "a sum less is expected",
        "own_tokens * OWN_SUMS",
        "own_tokens * (OWN_SUMS - 1)",
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
        GROUPS[1:],
    ),
    boundary(
        "a lane overwrites streams that its neighbours have yet to read",
        "            cute.arch.sync_warp()\n            for new, (index, share)",
        "            for new, (index, share)",
    ),
    boundary(
        "a warp projects streams before all of its lanes have stored them",
        "        cute.arch.sync_warp()\n        lane_tokens",
        "        lane_tokens",
    ),
    boundary(
        "warps do not meet before their sums are sent",
        "        self.sync()\n        self.send_sums",
        "        self.send_sums",
    ),
    boundary("sums are not waited for", "        wait_for_sums(call.arrived)\n", ""),
    boundary(
        "warps do not meet before they share pre-mixes",
        "        self.sync()\n        return [pres",
        "        return [pres",
        GROUPS[1:],
    ),
    boundary(
        "warps do not meet before their squares are sent",
        "        self.sync()\n        self.send_squares",
        "        self.send_squares",
    ),
    boundary(
        "squares are counted at the barrier of the sums",
        "ptx.store_async(place, call.arrived + 8, peer, total)",
        "ptx.store_async(place, call.arrived, peer, total)",
    ),
    boundary(
        "squares are not waited for", "        wait_for_sums(call.arrived + 8)\n", ""
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
    ),
    boundary(
        "the warp of the mixes takes part in steps 1 to 5",
        "if cute.arch.warp_idx() < self.warps:",
        "if cute.arch.warp_idx() <= self.warps:",
    ),
]
SETS = {"narrow": [*PROTOCOL, *MAPS, *NUMERICS, *BARRIERS], "tail": TAIL}
MUTANTS = [(name, mutant) for name, mutants in SETS.items() for mutant in mutants]


@pytest.fixture(scope="session")
def plans(narrow_plan: Plan) -> dict[str, Plan]:
    """The narrow plan, with an hc_eps that the tolerance of the mixes can see."""
    model = narrow_plan.spec.model.model_copy(update={"hc_eps": 1e-2})
    return {
        name: make_plan(
            narrow_plan.spec.model_copy(
                update={"name": f"mutated_{name}", "model": model, "mixes": mixes}
            )
        )
        for name, mixes in (("narrow", "side_stream"), ("tail", "tail"))
    }


@pytest.fixture(scope="session")
def originals(load: Load, plans: dict[str, Plan]) -> dict[str, EmulatedPackage]:
    """The kernels without a bug."""
    return {
        name: load(
            plan,
            ARCH,
            [r.name for r in kernel_rows(plan.target(ARCH)) if "multi" not in r.name],
        )
        for name, plan in plans.items()
    }


def stressed(package: EmulatedPackage) -> Iterator[Outcome]:
    """The seeds that no mutant of the protocol survives."""
    for case in stress_cases(package.plan, "unicast", 0, SEEDS):
        yield run(package, case)


def outcomes(package: EmulatedPackage) -> Iterator[Outcome]:
    """What no other mutant survives: the hard inputs, then the seeds."""
    for tokens in ((1,) * 7, (2,) * 7, (5,) * 7):
        yield run(package, Case(ARCH, "unicast", tokens, seed=1))
    yield from stressed(package)


@pytest.mark.parametrize("name", SETS)
def test_the_original_is_right(
    originals: dict[str, EmulatedPackage], name: str
) -> None:
    for outcome in outcomes(originals[name]):
        assert outcome.ok, (outcome.case, outcome.errors, outcome.problems)


@pytest.fixture(scope="session")
def mutants(shared_folder: Path, plans: dict[str, Plan]) -> Path:
    """A folder for each mutant: its package and its PTX, compiled once."""
    root = shared_folder / "mutants"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            half = root.with_name("half_mutants")
            jobs = []
            for index, (name, mutant) in enumerate(MUTANTS):
                folder = half / str(index) / plans[name].name
                folder.mkdir(parents=True)
                write_files(folder, mutated(mutant, plans[name]))
                jobs += [
                    job
                    for job in jobs_of(folder, [ARCH], half / str(index) / "ptx")
                    if job.row.name in mutant.kernels
                ]
            compile_kernels(jobs)
            half.rename(root)
    return root


def mutated(mutant: Mutant, plan: Plan) -> Files:
    files = render(plan)
    path = PurePosixPath(mutant.file)
    text = files[path]
    for old, new in [*((old, "") for old in mutant.moved), (mutant.old, mutant.new)]:
        assert text.count(old) == 1, f"{mutant.name}: the kernels changed: change it"
        text = text.replace(old, new)
    return {**files, path: text}


@pytest.mark.parametrize(
    "index", range(len(MUTANTS)), ids=[mutant.name for _, mutant in MUTANTS]
)
def test_mutant_is_caught(
    originals: dict[str, EmulatedPackage], mutants: Path, index: int
) -> None:
    name, mutant = MUTANTS[index]
    original, place = originals[name], mutants / str(index)
    changed = load_package(place / original.plan.name, ARCH, place / "ptx")
    package = EmulatedPackage(
        original.plan,
        ARCH,
        {**original.programs, **changed.programs},
        {**original.host, **changed.host},
    )
    tried = stressed(package) if mutant in PROTOCOL else outcomes(package)
    assert any(not outcome.ok for outcome in tried)


def test_the_documentation_lists_the_mutants_of_the_protocol(repository: Path) -> None:
    text = (repository / "docs" / "emulator.md").read_text("utf-8")
    listed = text.split("Mutants of the protocol:\n\n")[1].split("\n\n")[0]
    assert listed.splitlines() == [f"- {mutant.name}" for mutant in PROTOCOL]
