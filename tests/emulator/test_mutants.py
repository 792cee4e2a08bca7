"""Bugs planted in the kernels: each must be caught, or the tests prove little.

Each mutant changes one place of a rendered package. It is caught where an output, the
state of the mailbox or the emulator's own checks differ in one of a few cases: the hard
inputs of `mhcgen verify`, and some seeds of the adversarial scheduler.

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
from mhcgen.render import Files, render
from mhcgen.verify import Case, Outcome, cases, run
from tests.emulator.conftest import Load

ARCH = "sm_90a"
SEEDS = 16
BOUNDARIES = ("boundary", "grouped_boundary_3")
FINALIZES = tuple(
    f"finalize_{dtype}{shared}_unicast"
    for dtype in ("fp32", "bf16")
    for shared in ("", "_shared")
)
KERNELS = {
    "publish.py": ("publish_unicast",),
    "finalize.py": FINALIZES,
    "boundary.py": BOUNDARIES[:1],
    "grouped_boundary.py": BOUNDARIES[1:],
    "projection_tensor_cores.py": BOUNDARIES,
    "mixes.py": ("mixes",),
    "steps.py": ("publish_unicast", *BOUNDARIES, "mixes"),
    "constants.py": ("publish_unicast", *BOUNDARIES, "mixes"),
}


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``file``, ``old`` becomes ``new``, everywhere."""

    name: str
    file: str
    old: str
    new: str


WAIT = "        cute.arch.griddepcontrol_wait()\n"
TRIGGER = "        cute.arch.griddepcontrol_launch_dependents()\n"
SYNC = "        cute.arch.sync_threads()\n"
CLUSTER_WAIT = "        cute.arch.cluster_wait()\n"
ARRIVE = "        cute.arch.cluster_arrive()\n"
GENERATION = "        generation = ptx.load_int_relaxed(state.iterator.toint())\n"
ADVANCE = "(generation + 1) % GENERATIONS"

PROTOCOL = [
    Mutant(
        "the next generation is re-armed instead of the consumed one",
        "steps.py",
        "ptx.store_fragment(slot + rank * SLOT_BYTES, [SENTINEL",
        "ptx.store_fragment(slot + rank * SLOT_BYTES + TP * SLOT_BYTES, [SENTINEL",
    ),
    Mutant(
        "nothing is re-armed",
        "steps.py",
        "    for rank in range(POLLS):\n        ptx.store_fragment(slot",
        "    for rank in range(0):\n        ptx.store_fragment(slot",
    ),
    Mutant(
        "re-armed with plus zero",
        "steps.py",
        "[SENTINEL_PAIR] * FRAGMENT_WORDS",
        "[0] * FRAGMENT_WORDS",
    ),
    Mutant("no sanitize", "steps.py", "payload = sanitize(words)", "payload = words"),
    Mutant(
        "sanitize forgets the high halves",
        "steps.py",
        "return ~nonzero & SENTINEL_PAIR",
        "return ~nonzero & 0x8000",
    ),
    Mutant(
        "the sentinel is compared as a float",
        "steps.py",
        "    return found != 0\n",
        "    values = unpack(words)\n"
        "    for value in values:\n"
        "        zero = cutlass.select_(value == 0.0, Uint32(1), Uint32(0))\n"
        "        found = found | zero\n"
        "    return found != 0\n",
    ),
    Mutant(
        "a fragment has arrived once its first word has",
        "steps.py",
        "while holds_sentinel((word0, word1, word2, word3)):",
        "while holds_sentinel((word0,)):",
    ),
    Mutant("no poll", "steps.py", "poll(slot + rank * SLOT_BYTES, words)", "words"),
    Mutant(
        "every cluster advances the generation",
        "boundary.py",
        "if block == 0 and thread == 0 and arrival == last:",
        "if block == 0 and thread == 0:",
    ),
    Mutant("the generation stays", "boundary.py", ADVANCE, "generation % GENERATIONS"),
    Mutant(
        "four generations in the room of three",
        "grouped_boundary.py",
        ADVANCE,
        "(generation + 1) % 4",
    ),
    Mutant(
        "arrivals are counted by tokens",
        "grouped_boundary.py",
        "last = cute.arch.grid_dim()[1] - 1",
        "last = residual.shape[0] - 1",
    ),
    Mutant(
        "the generation is advanced before the row is read",
        "boundary.py",
        GENERATION,
        GENERATION
        + "        if block == 0 and thread == 0 and token == 0:\n"
        + f"            state[0] = {ADVANCE}\n",
    ),
    Mutant("publish does not wait", "publish.py", WAIT, ""),
    Mutant("publish triggers first", "publish.py", WAIT + TRIGGER, TRIGGER + WAIT),
    Mutant(
        "two generations and no wait",
        "publish.py",
        GENERATION,
        GENERATION.replace("generation =", "generation = 2 *"),
    ),
]
MAPS = [
    Mutant(
        "slots of ranks overlap", "publish.py", "rank * SLOT_BYTES", "rank * ROW_BYTES"
    ),
    Mutant(
        "rows of tokens overlap", "publish.py", "token * ROW_BYTES + column", "column"
    ),
    Mutant(
        "ranks are polled in rotated order",
        "boundary.py",
        "first_rank = stream % SOURCES * POLLS",
        "first_rank = (stream + 1) % SOURCES * POLLS",
    ),
    Mutant(
        "ranks are summed in another order",
        "constants.py",
        "BUTTERFLIES = (\n    1,\n    2,\n)",
        "BUTTERFLIES = (\n    2,\n    1,\n)",
    ),
    Mutant(
        "columns of the collapse are swapped",
        "constants.py",
        "SPLITS = (\n    2,\n    1,\n)",
        "SPLITS = (\n    1,\n    2,\n)",
    ),
    Mutant(
        "comb is read transposed",
        "steps.py",
        "(source * HC + stream) * FLOAT_BYTES",
        "(stream * HC + source) * FLOAT_BYTES",
    ),
    Mutant(
        "chunks of a stream are swapped",
        "projection_tensor_cores.py",
        "part * CHUNK_BYTES)\n            )",
        "(1 - part) * CHUNK_BYTES)\n            )",
    ),
    Mutant(
        "mixes go to the first token of the group",
        "grouped_boundary.py",
        "mix[first + index, thread] = (",
        "mix[first, thread] = (",
    ),
    Mutant(
        "the last group is taken for a whole one",
        "grouped_boundary.py",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0], self.group)",
    ),
    Mutant(
        "the last group is one token short",
        "grouped_boundary.py",
        "count = cutlass.min(residual.shape[0] - first, self.group)",
        "count = cutlass.min(residual.shape[0] - first, self.group - 1)",
    ),
    Mutant(
        "lanes beyond the last token read on",
        "grouped_boundary.py",
        "cutlass.min(octet * 8 + lane // 4, count - 1)",
        "octet * 8 + lane // 4",
    ),
]
NUMERICS = [
    Mutant(
        "y is not rounded", "steps.py", "return unpack(pack(partial))", "return partial"
    ),
    Mutant(
        "the product with post is fused",
        "steps.py",
        "    new = [ptx.mul(post, value) for value in y]\n"
        "    for weight, words in zip(comb, old, strict=True):\n",
        "    new = [ptx.mul(comb[0], value) for value in unpack(old[0])]\n"
        "    new = [ptx.fma(post, a, b) for a, b in zip(y, new, strict=True)]\n"
        "    for weight, words in zip(comb[1:], old[1:], strict=True):\n",
    ),
    Mutant(
        "sources are mixed in reverse",
        "steps.py",
        "zip(comb, old, strict=True)",
        "zip(comb[::-1], old[::-1], strict=True)",
    ),
    Mutant(
        "the mean is over H, not HC times H",
        "constants.py",
        "INVERSE_ROW = 1.0 / (HC * HIDDEN)",
        "INVERSE_ROW = 1.0 / HIDDEN",
    ),
    Mutant(
        "the norm is over HC times H",
        "constants.py",
        "INVERSE_HIDDEN = 1.0 / HIDDEN",
        "INVERSE_HIDDEN = 1.0 / (HC * HIDDEN)",
    ),
    Mutant("no rms_eps", "steps.py", "Float32(RMS_EPS)", "Float32(0.0)"),
    Mutant("no norm_eps", "steps.py", "Float32(NORM_EPS)", "Float32(0.0)"),
    Mutant("no hc_eps in the pre-mix", "steps.py", " + Float32(HC_EPS)", ""),
    Mutant(
        "no hc_eps in the softmax", "mixes.py", "[v + Float32(HC_EPS) for", "[v for"
    ),
    Mutant(
        "no hc_eps in the passes",
        "mixes.py",
        "sum(row[1:], row[0]) + Float32(HC_EPS)",
        "sum(row[1:], row[0])",
    ),
    Mutant(
        "one Sinkhorn pass too many",
        "mixes.py",
        "cutlass.range(SINKHORN_ITERS - 1)",
        "cutlass.range(SINKHORN_ITERS)",
    ),
    Mutant(
        "Sinkhorn ends with the rows",
        "mixes.py",
        "column_pass(row_pass(rows))",
        "row_pass(column_pass(rows))",
    ),
    Mutant("post has the scale of comb", "mixes.py", "scale[1]", "scale[2]"),
    Mutant("no post_mult", "mixes.py", "Float32(POST_MULT) * sigmoid", "sigmoid"),
    Mutant(
        "absent experts are multiplied",
        "finalize.py",
        "cutlass.select_(here, Float32(expert_weights[token, k]), Float32(0.0))",
        "Float32(expert_weights[token, k])",
    ),
    Mutant(
        "absent experts are read",
        "finalize.py",
        "present = [index >= 0 for index in indices]",
        "present = [index >= -1 for index in indices]",
    ),
    Mutant(
        "the shared expert is left out",
        "finalize.py",
        "if cutlass.const_expr(self.shared_expert):",
        "if cutlass.const_expr(False):",
    ),
]
BARRIERS = [
    Mutant(
        "warps do not meet before the sums",
        "boundary.py",
        SYNC + CLUSTER_WAIT,
        CLUSTER_WAIT,
    ),
    Mutant(
        "blocks do not meet after the sums",
        "boundary.py",
        "                ptx.store_peer(place, first_peer + warp, block_total)\n"
        + ARRIVE
        + CLUSTER_WAIT,
        "                ptx.store_peer(place, first_peer + warp, block_total)\n",
    ),
    Mutant(
        "warps do not meet before the norm",
        "grouped_boundary.py",
        "                squares[index, warp] = square\n" + SYNC,
        "                squares[index, warp] = square\n",
    ),
    Mutant(
        "blocks do not meet after the norm",
        "grouped_boundary.py",
        "            ptx.store_peer(place, pair % self.cluster_size, block_square)\n"
        + ARRIVE
        + CLUSTER_WAIT,
        "            ptx.store_peer(place, pair % self.cluster_size, block_square)\n",
    ),
    Mutant(
        "peers are written before they run",
        "boundary.py",
        SYNC + CLUSTER_WAIT,
        SYNC,
    ),
]
MUTANTS = [*PROTOCOL, *MAPS, *NUMERICS, *BARRIERS]


@pytest.fixture(scope="session")
def mutated_plan(narrow_plan: Plan) -> Plan:
    """The narrow plan, with an hc_eps that the tolerance of the mixes can see."""
    model = narrow_plan.spec.model.model_copy(update={"hc_eps": 1e-2})
    spec = narrow_plan.spec.model_copy(update={"name": "mutated", "model": model})
    return make_plan(spec)


@pytest.fixture(scope="session")
def original(load: Load, mutated_plan: Plan) -> EmulatedPackage:
    names = {name for kernels in KERNELS.values() for name in kernels} | set(FINALIZES)
    return load(mutated_plan, ARCH, sorted(names))


def outcomes(package: EmulatedPackage) -> Iterator[Outcome]:
    """The cases that mutants must not survive, cheap ones first."""
    for tokens in ((1,) * 7, (2,) * 7, (5,) * 7):
        yield run(package, Case(ARCH, "unicast", tokens, seed=1))
    for case in cases(package.plan, [ARCH], ["unicast"], [], None, 0, SEEDS):
        yield run(package, case)


def test_the_original_is_right(original: EmulatedPackage) -> None:
    for outcome in outcomes(original):
        assert outcome.ok, (outcome.case, outcome.errors, outcome.problems)


@pytest.fixture(scope="session")
def mutants(session_folder: Path, mutated_plan: Plan) -> Path:
    """A folder for each mutant: its package and its PTX, compiled once."""
    root = session_folder / "mutants"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            half = root.with_name("half_mutants")
            jobs = []
            for index, mutant in enumerate(MUTANTS):
                folder = half / str(index) / mutated_plan.name
                folder.mkdir(parents=True)
                write_files(folder, mutated(mutant, mutated_plan))
                jobs += [
                    job
                    for job in jobs_of(folder, [ARCH], half / str(index) / "ptx")
                    if job.row.name in KERNELS[mutant.file]
                ]
            compile_kernels(jobs)
            half.rename(root)
    return root


def mutated(mutant: Mutant, plan: Plan) -> Files:
    files = render(plan)
    path = PurePosixPath(mutant.file)
    text = files[path]
    assert mutant.old in text, f"{mutant.name}: the kernels changed, so change it, too"
    text = text.replace(mutant.old, mutant.new)
    if "TP * SLOT_BYTES" in mutant.new:
        text = text.replace("    SPLITS,\n", "    SPLITS,\n    TP,\n")
    return {**files, path: text}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(
    original: EmulatedPackage, mutants: Path, mutated_plan: Plan, mutant: Mutant
) -> None:
    place = mutants / str(MUTANTS.index(mutant))
    changed = load_package(place / mutated_plan.name, ARCH, place / "ptx")
    package = EmulatedPackage(
        changed.plan, ARCH, {**original.programs, **changed.programs}, changed.host
    )
    assert any(not outcome.ok for outcome in outcomes(package))
