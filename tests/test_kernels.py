"""The compiled kernels of the flagship: resources, PTX of each transport, and copies.

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
from mhcgen.plan import Plan, boundary_registers, working_registers
from mhcgen.render import render

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
TRANSPORTS = ("multicast", "unicast")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The kernels of generated/glm53 for every architecture, and their PTX."""

    folder: Path
    kernels: list[CompiledKernel]

    def ptx(self, name: str, arch: str) -> str:
        return (self.folder / f"{name}.{arch}.ptx").read_text()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, glm53_plan: Plan) -> Compiled:
    """Compiled once, whichever test process comes first."""
    folder = tmp_path_factory.getbasetemp().parent / "glm53_compiled"
    report = folder / "report.json"
    with FileLock(f"{folder}.lock"):
        if not report.is_file():
            package = folder / "glm53"
            package.mkdir(parents=True)
            write_files(package, render(glm53_plan))
            kernels = compile_kernels(jobs_of(package, keep=folder))
            report.write_text(json.dumps([dataclasses.asdict(k) for k in kernels]))
    return Compiled(
        folder, [CompiledKernel(**row) for row in json.loads(report.read_text())]
    )


def expected_names(transports: tuple[str, ...] = TRANSPORTS) -> set[str]:
    names = {"boundary", "mixes"}
    names |= {f"grouped_boundary_{group}" for group in (2, 3, 4, 5, 8, 12, 16)}
    for transport in transports:
        names.add(f"publish_{transport}")
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


def test_registers_stay_within_the_plan(compiled: Compiled, glm53_plan: Plan) -> None:
    """Boundaries within the plan's estimate, the others far below."""
    estimate = boundary_registers(glm53_plan)
    assert estimate <= glm53_plan.target("sm_90a").register_limit
    for kernel in compiled.kernels:
        if "boundary" in kernel.name:
            assert kernel.registers <= estimate, kernel
            assert kernel.registers > estimate - working_registers(glm53_plan), kernel
        else:
            assert kernel.registers <= 64, kernel


def test_shared_memory_is_what_the_plan_says(
    compiled: Compiled, glm53_plan: Plan
) -> None:
    """The bytes that the launch asks for, read off the compiled host code."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from glm53 import kernels\n"
        "from glm53.runtime.compiler import compile_kernel\n"
        "import json\n"
        "names = sys.argv[2:]\n"
        "table = kernels.kernels('sm_90a')\n"
        "print(json.dumps({name: str(compile_kernel(table[name], name, 'sm_90a')"
        ".ir_module) for name in names}))\n"
    )
    target = glm53_plan.target("sm_90a")
    names = {"boundary": 1, "grouped_boundary_5": 5, "grouped_boundary_16": 16}
    run = subprocess.run(
        [sys.executable, "-c", script, str(compiled.folder), *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=compiled.folder,
    )
    modules = json.loads(run.stdout.splitlines()[-1])
    for name, group in names.items():
        wanted = target.shared_bytes(group)
        assert re.search(rf"constant\({wanted} : i\d+\)", modules[name]), name


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
def test_no_kernel_flushes_subnormals_or_divides_slowly(
    compiled: Compiled, arch: str
) -> None:
    """Flushing would break the payload's bits; no step needs an exact division."""
    for name in expected_names():
        ptx = compiled.ptx(name, arch)
        assert ".ftz" not in ptx, name
        assert "div." not in ptx, name
        assert "call" not in re.findall(r"^\s*(\w+)", ptx, re.MULTILINE), name


@pytest.mark.parametrize("arch", ARCHS)
def test_polls_are_volatile_and_wide(compiled: Compiled, arch: str) -> None:
    for name in expected_names():
        if "boundary" in name:
            ptx = compiled.ptx(name, arch)
            assert "ld.volatile.global.v4.b32" in ptx, name
            assert "barrier.cluster.arrive" in ptx, name


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
        "assert callable(compiled['boundary'])\n"
        "assert package.CAPACITY == 256 and callable(package.load)\n"
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
