"""Hand-written kernels of a few instructions."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mhcgen.emulator.machine import Geometry, Program
from mhcgen.emulator.memory import Allocation
from mhcgen.emulator.ptx import parse
from mhcgen.emulator.scheduler import Stream, World

HEAD = """\
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 shared[];
.visible .entry tiny(.param .u64 out, .param .u64 in)
{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<99>;
.reg .b64 %d<99>;
ld.param.u64 %d1, [out];
ld.param.u64 %d2, [in];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d3, %r1, 4;
add.s64 %d4, %d1, %d3;
add.s64 %d5, %d2, %d3;
"""
FIRST_LINE = HEAD.count("\n") + 1


def program(body: str) -> Program:
    """A kernel whose body begins on FIRST_LINE.

    %d1 and %d2 are its two pointers, %r1 the thread, %d4 and %d5 the places of the
    thread's word behind the pointers.
    """
    (kernel,) = parse(f"{HEAD}{body}\nret;\n}}\n")
    return Program.of(kernel)


@dataclass
class Tiny:
    """A world for tiny kernels, with an output of 256 words on every rank."""

    ranks: int = 1
    seed: int | None = None
    resident_blocks: int | None = None
    world: World = field(init=False)
    out: list[Allocation] = field(init=False)
    streams: list[Stream] = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(1 << 20, self.ranks, self.seed, self.resident_blocks)
        memory = self.world.memory
        self.out = [memory.allocate("out", 1024, rank) for rank in range(self.ranks)]
        self.streams = [Stream(rank) for rank in range(self.ranks)]

    def input(self, values: NDArray[np.generic], rank: int = 0) -> Allocation:
        allocation = self.world.memory.allocate("in", values.nbytes, rank)
        self.world.memory.write(allocation, values)
        return allocation

    def launch(
        self,
        code: Program,
        source: int = 0,
        *,
        target: int | None = None,
        stream: Stream | None = None,
        geometry: Geometry = Geometry((1, 1, 1), 32),  # noqa: B008
        dependent: bool = False,
    ) -> None:
        stream = stream or self.streams[0]
        out = self.out[stream.rank].address if target is None else target
        parameters = np.array([out, source], np.uint64).tobytes()
        self.world.launch(code, geometry, [(stream, parameters)], dependent)

    def words(self, count: int = 32, rank: int = 0) -> NDArray[np.uint32]:
        return self.world.memory.read(self.out[rank], 4 * count).view(np.uint32)


def result(body: str, *columns: NDArray[np.generic]) -> NDArray[np.uint32]:
    """What 32 threads leave in %r9, given words in %r2, %r3, ..."""
    tiny = Tiny()
    loads = ""
    source = 0
    if columns:
        words = [np.ascontiguousarray(column).view(np.uint32) for column in columns]
        source = tiny.input(np.concatenate(words)).address
        loads = "\n".join(
            f"ld.global.b32 %r{2 + index}, [%d5+{128 * index}];"
            for index in range(len(columns))
        )
    tiny.launch(program(f"{loads}\n{body}\nst.global.b32 [%d4], %r9;"), source)
    tiny.world.run()
    return tiny.words()
