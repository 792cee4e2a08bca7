"""A stand-in for the sublayers of the model: kernels that write what a boundary takes.

They let their dependents start at once, as an engine's kernels may, and write late.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from mhcgen.emulator.machine import Geometry, Program
from mhcgen.emulator.memory import Allocation
from mhcgen.emulator.ptx import parse
from mhcgen.emulator.scheduler import Stream, World

THREADS = 64

_COPY = """
.visible .entry sublayer(.param .u64 source, .param .u64 target, .param .u32 count)
.reqntid 64, 1, 1
{
    .reg .pred %beyond;
    .reg .b32 %r<9>;
    .reg .b64 %d<9>;
    griddepcontrol.launch_dependents;
    ld.param.b64 %d1, [source];
    ld.param.b64 %d2, [target];
    ld.param.b32 %r1, [count];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r4, %r3, 64, %r2;
    mul.wide.u32 %d3, %r4, BYTES;
    add.s64 %d4, %d1, %d3;
    add.s64 %d5, %d2, %d3;
    setp.ge.u32 %beyond, %r4, %r1;
    griddepcontrol.wait;
    @%beyond ret;
    ld.global.TYPE REGISTERS, [%d4];
    st.global.TYPE [%d5], REGISTERS;
    ret;
}
"""


@cache
def _program(width: int) -> Program:
    """Copies elements of a width in bytes."""
    kind, registers = ("v4.b32", "{%r5, %r6, %r7, %r8}")
    if width == 4:
        kind, registers = "b32", "%r5"
    text = _COPY.replace("BYTES", str(width))
    text = text.replace("TYPE", kind).replace("REGISTERS", registers)
    (kernel,) = parse(text)
    return Program.of(kernel)


def launch_copy(
    world: World,
    streams: Sequence[Stream],
    sources: Sequence[Allocation],
    targets: Sequence[Allocation],
) -> None:
    """Puts a kernel into each stream that fills a target from a source.

    Args:
        world: Where they run.
        streams: The streams.
        sources: What each copies, all of one size, a multiple of 4 bytes.
        targets: Where to.
    """
    size = sources[0].size
    width = 4 if size % 16 else 16
    count = size // width
    requests = [
        (
            stream,
            np.array([source.address, target.address, count], np.uint64).tobytes()[:20],
        )
        for stream, source, target in zip(streams, sources, targets, strict=True)
    ]
    geometry = Geometry((-(-count // THREADS), 1, 1), THREADS)
    world.launch(_program(width), geometry, requests, dependent=True)
