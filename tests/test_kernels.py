"""Compiled kernels of the flagship's shape: resources, PTX of each transport, copies.

No GPU is needed: the compiler makes code for every architecture here.
"""

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from mhcgen.build import write_files
from mhcgen.compilation import CompiledKernel, compile_kernels, jobs_of
from mhcgen.plan import (
    FEW_TOKENS,
    Plan,
    boundary_registers,
    make_plan,
    working_registers,
)
from mhcgen.render import render
from mhcgen.spec import Spec
from tests.variants import VARIANTS

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
TRANSPORTS = ("multicast", "unicast")
FLUSHING = {f"{name}.approx.ftz.f32" for name in ("ex2", "rcp", "rsqrt")}
GROUPS = (1, 5, 16)
PUBLISHING = (1, 5)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The kernels for every architecture, and their PTX."""

    folder: Path
    kernels: list[CompiledKernel]

    def ptx(self, name: str, arch: str) -> str:
        """Of the kernel alone, without the mixes that a boundary launches besides."""
        first, *others = self.entries(name, arch)
        assert len(others) == ("boundary" in name), name
        return first

    def entries(self, name: str, arch: str) -> list[str]:
        """The kernels of a file, each from its name to its end."""
        text = (self.folder / f"{name}.{arch}.ptx").read_text()
        return re.split(r"(?m)^(?=\.visible \.entry )", text)[1:]


@pytest.fixture(scope="session")
def plan(glm53_plan: Plan) -> Plan:
    """The flagship with few of its token groups, which take long to compile.

    The last of them has more clusters than run at once.
    """
    data = glm53_plan.spec.model_dump(mode="json")
    groups = [{"max_tokens": 15 * group, "group": group} for group in PUBLISHING]
    groups.append({"max_tokens": 272, "group": 16})
    data["capacity"]["max_tokens"] = 272
    data["targets"] = {arch: {"token_groups": groups} for arch in ARCHS}
    return make_plan(Spec.model_validate(data))


@pytest.fixture(scope="session")
def compiled(shared_folder: Path, plan: Plan) -> Compiled:
    """Compiled once, whichever test process comes first."""
    folder = shared_folder / "glm53_compiled"
    report = folder / "report.json"
    with FileLock(f"{folder}.lock"):
        if not report.is_file():
            package = folder / "glm53"
            package.mkdir(parents=True)
            write_files(package, render(plan))
            kernels = compile_kernels(jobs_of(package, keep=folder))
            report.write_text(json.dumps([dataclasses.asdict(k) for k in kernels]))
    return Compiled(
        folder, [CompiledKernel(**row) for row in json.loads(report.read_text())]
    )


def publishing_boundaries(transport: str) -> dict[str, int]:
    """The token groups of the boundaries that publish themselves, by name."""
    groups = {f"boundary_{group}_{transport}": group for group in PUBLISHING}
    return groups | dict.fromkeys(finalizing_boundaries(transport), 1)


def finalizing_boundaries(transport: str) -> set[str]:
    """The boundaries that close routed sums, which a cluster of few tokens does."""
    return {
        f"boundary_1_finalize_{dtype}{shared}_{transport}"
        for dtype in ("fp32", "bf16")
        for shared in ("", "_shared")
    }


def expected_names(transports: tuple[str, ...] = TRANSPORTS) -> set[str]:
    names = {"mixes"} | {f"boundary_{group}" for group in GROUPS}
    for transport in transports:
        names.add(f"publish_{transport}")
        names |= publishing_boundaries(transport).keys()
        for dtype in ("fp32", "bf16"):
            names |= {
                f"finalize_{dtype}{shared}_{transport}" for shared in ("", "_shared")
            }
    return names


def test_every_kernel_is_compiled_for_every_architecture(compiled: Compiled) -> None:
    found = {(kernel.name, kernel.arch) for kernel in compiled.kernels}
    assert found == {(name, arch) for name in expected_names() for arch in ARCHS}


def test_nothing_spills(compiled: Compiled) -> None:
    for kernel in compiled.kernels:
        assert kernel.spill_stores == 0, kernel
        assert kernel.spill_loads == 0, kernel
        assert kernel.stack == 0, kernel


def test_registers_stay_within_the_plan(compiled: Compiled, plan: Plan) -> None:
    """Of one token within the plan's estimate; of many, where room is left, above."""
    limit = plan.target("sm_90a").register_limit
    estimate = boundary_registers(plan)
    assert estimate < limit
    for kernel in compiled.kernels:
        if re.fullmatch(r"boundary_1(_[a-z]+)?", kernel.name):
            assert kernel.registers <= estimate, kernel
            assert kernel.registers > estimate - working_registers(plan), kernel
        elif kernel.name.startswith("boundary"):
            assert kernel.registers <= limit - 16, kernel
        else:
            assert kernel.registers <= 64, kernel


@pytest.mark.parametrize("name", ["glm53", "tail", "delayed_tail", "split_fn"])
def test_shared_memory_is_what_the_plan_says(
    name: str, plan: Plan, tmp_path: Path
) -> None:
    """The bytes that the launch asks for, read off the compiled host code.

    It does not round up the last of the stages; the plan does.
    """
    chosen = next((each for each in VARIANTS if each.name == name), plan)
    script = (
        "import importlib, json, sys\n"
        "package, names = sys.argv[1], sys.argv[2:]\n"
        "kernels = importlib.import_module(f'{package}.kernels')\n"
        "compiler = importlib.import_module(f'{package}.runtime.compiler')\n"
        "table = kernels.kernels('sm_90a')\n"
        "print(json.dumps({name: str(compiler.compile_kernel(table[name], name, "
        "'sm_90a').ir_module) for name in names}))\n"
    )
    target = chosen.target("sm_90a")
    # In one each lane computes pre-mixes and norms, in the other a thread for all.
    rows = [row for row in target.forms if row.group in (1, *range(FEW_TOKENS + 1, 16))]
    assert {row.group > FEW_TOKENS for row in rows} == {False, True}
    names = [chosen.boundary_name(row.kernel) for row in rows]
    write_files(tmp_path / chosen.name, render(chosen))
    run = subprocess.run(
        [sys.executable, "-c", script, chosen.name, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    modules = json.loads(run.stdout.splitlines()[-1])
    for name, row in zip(names, rows, strict=True):
        planned = row.shared_bytes
        text = modules[name]
        asked = {
            int(number) for number in re.findall(r"constant\((\d+) : i\d+\)", text)
        }
        assert asked & set(range(planned - 15, planned + 1)), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stores_of_a_transport(compiled: Compiled, arch: str, transport: str) -> None:
    """A multicast address takes only multimem stores; unicast takes none."""
    for name in expected_names((transport,)):
        if not name.startswith(("publish", "finalize")):
            continue
        ptx = compiled.ptx(name, arch)
        multimem = re.findall(r"multimem\.st\.\S+", ptx)
        ordinary = re.findall(r"\bst\.global\S*", ptx)
        if transport == "multicast":
            assert multimem == ["multimem.st.relaxed.sys.global.v4.bf16x2"]
            assert ordinary == []
        else:
            assert multimem == []
            assert ordinary == ["st.global.v4.b32"] * 4


@pytest.mark.parametrize("arch", ARCHS)
def test_only_approximations_flush_subnormals(compiled: Compiled, arch: str) -> None:
    """Elsewhere flushing would break bits; no step needs an exact division.

    Arguments of the approximations are normal: a spec's epsilons are.
    """
    for name in expected_names():
        ptx = compiled.ptx(name, arch)
        flushing = set(re.findall(r"[\w.]*\.ftz[\w.]*", ptx))
        assert flushing <= FLUSHING, name
        assert "div." not in ptx, name
        assert "call" not in re.findall(r"^\s*(\w+)", ptx, re.MULTILINE), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stores_of_boundaries(
    compiled: Compiled, plan: Plan, arch: str, transport: str
) -> None:
    """A boundary publishes by its transport alone, or not at all.

    Each lane sends its word of a token to every rank. Beside that it stores words: one
    of each stream, of each rank's slot to re-arm it, and of the layer input.
    """
    silent = {f"boundary_{group}": group for group in GROUPS}
    for name, group in (silent | publishing_boundaries(transport)).items():
        ptx = compiled.ptx(name, arch)
        multimem = re.findall(r"multimem\.\S+", ptx)
        wide = re.findall(r"\bst\.global\.v\S*", ptx)
        words = re.findall(r"@\w+ st\.global\.b32", ptx)
        sends = 0 if name in silent else group
        if transport == "multicast":
            assert multimem == ["multimem.st.relaxed.sys.global.bf16x2"] * sends
            sends = 0
        else:
            assert multimem == [], name
        assert wide == [], name
        kept = plan.hc + plan.tp + 1
        assert len(words) == group * kept + sends * plan.tp, name


@pytest.mark.parametrize("arch", ARCHS)
def test_polls_are_volatile_and_of_all_ranks(
    compiled: Compiled, plan: Plan, arch: str
) -> None:
    """Each word is loaded once, and again in the one loop of its batch of tokens."""
    for name in expected_names():
        if "boundary" in name:
            ptx = compiled.ptx(name, arch)
            group = int(name.split("_")[1])
            loads = re.findall(r"ld\.volatile\.global\S*", ptx)
            assert set(loads) == {"ld.volatile.global.b32"}, name
            assert len(loads) == 2 * group * plan.tp, name


@pytest.mark.parametrize("arch", ARCHS)
def test_barriers_are_fenced_before_the_cluster_arrives(
    compiled: Compiled, arch: str
) -> None:
    """The arrival is relaxed: the fence alone makes the barriers known to the peers."""
    for name in expected_names():
        if "boundary" in name:
            ptx = compiled.ptx(name, arch)
            order = re.findall(
                r"mbarrier\.init|fence\.mbarrier_init[a-z.]*"
                r"|barrier\.cluster\.arrive[a-z.]*",
                ptx,
            )
            assert order == [
                "mbarrier.init",
                "mbarrier.init",
                "fence.mbarrier_init.release.cluster",
                "barrier.cluster.arrive.relaxed",
            ], (name, order)


@pytest.mark.parametrize("arch", ARCHS)
def test_fn_is_loaded_before_anything_is_waited_for(
    compiled: Compiled, plan: Plan, arch: str
) -> None:
    """Not by ``ld.global.nc``, which the assembler sinks behind the wait."""
    for name in expected_names():
        if "boundary" in name:
            ptx = compiled.ptx(name, arch)
            assert "ld.global.nc" not in ptx, name
            generation = ptx.index("ld.relaxed.gpu.global")
            first = min(generation, ptx.index("griddepcontrol.wait"))
            load = r"\bld\.global\.v4\.b32"
            assert len(re.findall(load, ptx[:first])) == plan.fn_fragments, name
            if "finalize" not in name:  # whose routed rows are read alike, after it
                assert not re.search(load, ptx[first:]), name


@pytest.mark.parametrize("arch", ARCHS)
def test_boundaries_wait_before_they_need_to(
    compiled: Compiled, plan: Plan, arch: str
) -> None:
    """What earlier kernels wrote is read behind a wait: this kernel's, or a publish's.

    A boundary that publishes itself waits before it reads the generation, the streams
    and x. One that a publish has come before reads no x, and waits before it ends: all
    have then read the generation that it advances.
    """
    publishing = {name for each in TRANSPORTS for name in publishing_boundaries(each)}
    for name in expected_names():
        if "boundary" not in name:
            continue
        ptx = compiled.ptx(name, arch)
        order = re.findall(r"griddepcontrol\.(\w+)", ptx)
        assert order == ["launch_dependents", "wait"], name
        before, after = ptx.split("griddepcontrol.wait")
        # Routed rows, of which only those on this rank are read, or x.
        x = "ld.global.b32" if "finalize" in name else "ld.global.cg.b32"
        reads = ("ld.relaxed.gpu.global", "cp.async.cg", "ld.global.cg.f32")
        if name in publishing:
            for load in (*reads, "ld.volatile"):
                assert load not in before and load in after, (name, load)
            assert x in after, name
            fragments = len(re.findall(r"\bld\.global\S*\.v4", before))
            assert fragments == plan.fn_fragments, name
            assert "st.global" not in before and "multimem" not in before, name
        else:
            assert x not in ptx, name
            for load in (*reads, "ld.volatile"):
                assert load in before and load not in after, (name, load)
            assert re.findall(r"\bst\.global\S*", after) == ["st.global.b32"], name


@pytest.mark.parametrize("arch", ARCHS)
def test_publishes_trigger_after_their_wait(compiled: Compiled, arch: str) -> None:
    """The boundary reads what earlier kernels wrote on the strength of this order."""
    for name in expected_names():
        if name.startswith(("publish", "finalize")):
            ptx = compiled.ptx(name, arch)
            order = re.findall(r"griddepcontrol\.(\w+)", ptx)
            assert order == ["wait", "launch_dependents"], name
            body = ptx[: ptx.index("griddepcontrol.wait")]
            loads = re.findall(r"\bld\.(?:volatile\.)?global\S*", body)
            assert set(loads) <= {"ld.global.b64", "ld.global.v2.b64"}, name


def test_symbols_name_package_and_kernel(compiled: Compiled) -> None:
    for name in expected_names():
        ptx = compiled.ptx(name, "sm_90a")
        assert re.search(rf"\.entry \w*mhcgen_glm53_{name}\w*\(", ptx), name


@pytest.mark.parametrize("arch", ARCHS)
def test_boundaries_launch_the_mixes_as_they_are(compiled: Compiled, arch: str) -> None:
    """Beside themselves: the code of the mixes kernel, by a name of its own."""
    (mixes,) = compiled.entries("mixes", arch)
    for name in expected_names():
        if "boundary" in name:
            beside = compiled.entries(name, arch)[1]
            assert f"mhcgen_glm53_{name}_mixes" in beside, name
            assert without_names(beside) == without_names(mixes), name


def without_names(ptx: str) -> str:
    """A kernel's code without comments, the kernel's name and its place in a file."""
    code = re.sub(r"//.*", "", ptx).replace("$L__BB1_", "$L__BB0_")
    label = re.search(r"\.entry (\w+)", code)
    assert label is not None
    return code.replace(label[1], "kernel").strip()


def test_a_vendored_copy_works_alone(compiled: Compiled, tmp_path: Path) -> None:
    """Copied into a bare project where mhcgen is not installed, a package compiles."""
    vendored = tmp_path / "engine" / "kernels" / "glm53"
    shutil.copytree(compiled.folder / "glm53", vendored)
    (vendored.parent / "__init__.py").touch()
    (vendored.parent.parent / "__init__.py").touch()
    script = (
        "import sys\n"
        "sys.modules['mhcgen'] = None\n"
        "import engine.kernels.glm53 as package\n"
        "from engine.kernels.glm53 import kernels\n"
        "from engine.kernels.glm53.runtime.compiler import compile_package\n"
        "compiled = compile_package(kernels, 'sm_90a', 'unicast')\n"
        "assert callable(compiled['boundary_1_unicast'])\n"
        "assert package.CAPACITY == 272 and callable(package.load)\n"
        "print(*sorted(compiled))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == expected_names(("unicast",))
    assert {path.name for path in tmp_path.iterdir()} == {"engine"}


ALLOWED = {*sys.stdlib_module_names, "torch", "cutlass", "cuda", "tvm_ffi"}


def test_packages_import_little(glm53_plan: Plan) -> None:
    """Only the standard library, torch, the DSL and the package itself."""
    for path, text in render(glm53_plan).items():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in ALLOWED, (path, name)
