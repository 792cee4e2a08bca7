"""The manifest: what a package says about itself, for whoever does not read Python."""

import json
import stat
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

GENERATOR = "mhcgen"
MANIFEST = PurePosixPath("manifest.json")
DSL_RANGE = ">=4.6.3,<4.9"
TVM_FFI_RANGE = ">=0.1.11,<0.2"


@dataclass(frozen=True)
class KernelRow:
    """The launch shape of one kernel on one architecture.

    Attributes:
        name: Its name in the package's table of kernels.
        cluster: Thread blocks of a cluster.
        threads: Threads of a block.
        shared_bytes: Shared memory of a block.
        token_group: Tokens that a cluster takes together; None where it takes all.
        may_spill: Bytes that a thread may spill; 0 where the plan promises none.
    """

    name: str
    cluster: int
    threads: int
    shared_bytes: int
    token_group: int | None = None
    may_spill: int = 0

    def as_json(self) -> dict[str, object]:
        """The row as plain values; most kernels have no ``may_spill``."""
        row = asdict(self)
        if not self.may_spill:
            del row["may_spill"]
        return row

    @classmethod
    def of_json(cls, values: dict[str, object]) -> "KernelRow":
        """The row of plain values.

        Raises:
            TypeError: One is missing, unknown or of another type.
        """
        row = cls(**values)  # type: ignore[arg-type]
        name, *counts = (value for value in vars(row).values() if value is not None)
        if type(name) is not str or {type(count) for count in counts} != {int}:
            raise TypeError(values)
        return row


@dataclass(frozen=True)
class Manifest:
    """What a package is, and what made it.

    Attributes:
        name: The package's name.
        version: The release of mhcgen that made it.
        spec_sha256: Identity of the resolved spec.
        templates_sha256: Identity of the templates.
        kernels: The kernels by architecture.
        files: Every file of the package.
    """

    name: str
    version: str
    spec_sha256: str
    templates_sha256: str
    kernels: dict[str, tuple[KernelRow, ...]]
    files: tuple[PurePosixPath, ...]

    def text(self) -> str:
        """The manifest as its file holds it."""
        content = {
            "generator": GENERATOR,
            "version": self.version,
            "name": self.name,
            "spec_sha256": self.spec_sha256,
            "templates_sha256": self.templates_sha256,
            "requires": {
                "nvidia-cutlass-dsl": DSL_RANGE,
                "apache-tvm-ffi": TVM_FFI_RANGE,
            },
            "kernels": {
                arch: [row.as_json() for row in rows]
                for arch, rows in self.kernels.items()
            },
            "files": sorted(map(str, self.files)),
        }
        return json.dumps(content, indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a package; None where mhcgen did not make the folder.

    Raises:
        OSError: There is a manifest, and it cannot be read.
    """
    try:
        if not stat.S_ISREG((folder / MANIFEST).stat().st_mode):
            return None  # whoever opens a pipe waits for a writer
        content = json.loads((folder / MANIFEST).read_bytes())
        if content["generator"] != GENERATOR or not content["name"].isidentifier():
            return None
        return Manifest(
            name=content["name"],
            version=str(content["version"]),
            spec_sha256=str(content["spec_sha256"]),
            templates_sha256=str(content["templates_sha256"]),
            kernels={
                arch: tuple(map(KernelRow.of_json, rows))
                for arch, rows in content["kernels"].items()
            },
            files=tuple(map(PurePosixPath, content["files"])),
        )
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,  # not JSON, or not UTF-8
        TypeError,
        AttributeError,
        LookupError,
        RecursionError,
    ):
        return None
