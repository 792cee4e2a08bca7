"""Parsing PTX, and refusing what is not understood."""

import pytest

from mhcgen.emulator.errors import PtxError
from mhcgen.emulator.machine import Program
from mhcgen.emulator.ptx import Address, Immediate, Register, Vector, parse
from tests.emulator.tiny import FIRST_LINE, HEAD, program

TEXT = """
.version 8.8
.target sm_100a
.address_size 64 /* a comment
over two lines */
.extern .shared .align 16 .b8 dynamic[];

.visible .entry first(
	.param .align 8 .b8 first_param_0[16],
	.param .u32 first_param_1,
	.param .u64 first_param_2
)
.reqntid 64, 1, 1
.minnctapersm 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<4>; // another
	.reg .b64 	%rd<2>;
	.shared .align 4 .b8 fixed[12];
	ld.param.b64 	%rd1, [first_param_0+8];
$L__BB0_1:
	@!%p1 bra.uni 	$L__BB0_1;
	{ .reg .b32 %r1; mov.b32 %r1, 0f3F800000; }
	mov.b32 	%r1, -5;
	st.shared.v2.b32 	[dynamic+-4], {%r1, %r2};
	ret;
}
.entry second() { ret; }
"""


def test_parse() -> None:
    first, second = parse(TEXT)
    assert (first.name, first.target) == ("first", "sm_100a")
    assert first.threads == (64, 1, 1)
    assert [(p.offset, p.size) for p in first.parameters] == [(0, 16), (16, 4), (24, 8)]
    assert first.labels == {"$L__BB0_1": 1}
    assert first.shared == {"dynamic": 1024, "fixed": 1024}
    assert first.static_shared == 12
    load, branch, inner, outer, store, ret = first.instructions
    assert load.opcode == "ld.param.b64" and load.line == 20
    assert isinstance(load.operands[1], Address) and load.operands[1].offset == 8
    assert branch.negated and branch.guard is not None and branch.guard.name == "%p1"
    assert inner.operands[1] == Immediate(0x3F800000)
    assert outer.operands[1] == Immediate(-5)
    # The inner register hides the outer one of the same name.
    assert isinstance(inner.operands[0], Register)
    assert isinstance(outer.operands[0], Register)
    assert inner.operands[0].slot != outer.operands[0].slot
    assert isinstance(store.operands[0], Address) and store.operands[0].offset == -4
    assert isinstance(store.operands[1], Vector) and len(store.operands[1].items) == 2
    assert ret.opcode == "ret" and ret.line == 26
    assert second.instructions[0].opcode == "ret"
    assert second.parameters == ()


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("mov.b32 %r77777, 0;", "%r77777"),
        ("mov.b32 %x, 0;", "unknown instruction mov.b32"),
        ("st.global.b32 [%d1*4], %r1;", r"unknown address \[%d1\*4\]"),
        ("bra NOWHERE;", "NOWHERE is not declared"),
        (".reg .q32 %q;", "unknown type q32"),
        (".local .b8 stack[4];", "unknown directive"),
        ("add.f32 %r2, %r1, 1.5;", "unknown operand 1.5"),
        ("frobnicate.b32 %r2, %r1;", "unknown instruction frobnicate.b32"),
        ("add.sat.s32 %r2, %r1, %r1;", r"unknown instruction add.sat.s32 .*\.sat"),
        ("add.rz.f32 %r2, %r1, %r1;", r"\.rz is not supported"),
        ("mul.s32 %r2, %r1, %r1;", "unknown instruction mul.s32"),
        ("div.rn.f32 %r2, %r1, %r1;", "no such operation"),
        ("rcp.rn.f32 %r2, %r1;", "only the approximate rcp"),
        ("ld.b32 %r2, [%d1];", "generic addresses"),
        ("ld.global.v4.b64 {%d1, %d2, %d3, %d4}, [%d1];", "more than 16 bytes"),
        ("ld.global.v4.b32 {%r1, %r2}, [%d1];", "2 registers for 4 elements"),
        ("ld.local.b32 %r2, [%r1];", r"\.local is not supported"),
        ("st.global.nc.b32 [%d1], %r1;", "no such store"),
        ("mov.b64 %d1, %r1;", "%r1 is narrower than .b64"),
        ("cvt.rna.tf32.f32 %r1, %r2;", "no such conversion"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 %r1;", "mma"),
        ("multimem.red.relaxed.sys.global.add.f32 [%d1], %r1;", "only multimem.st"),
        ("shfl.sync.ring.b32 %r2, %r1, 1, 31, -1;", "no .ring"),
        ("setp.maybe.b32 %p1, %r1, %r2;", "no .maybe"),
        ("and.pred %p1, %r1, %p2;", "is no predicate"),
        ("atom.shared.add.u32 %r2, [%r1], 1;", r"\.shared is not supported"),
    ],
)
def test_what_is_not_understood_is_an_error(statement: str, reason: str) -> None:
    with pytest.raises(PtxError, match=reason) as caught:
        program(f"\n{statement}")
    assert caught.value.line == FIRST_LINE + 1
    assert statement.rstrip(";") in str(caught.value)


def test_errors_outside_of_bodies() -> None:
    for text, reason in [
        (".file 1 2", "unknown directive"),
        (".entry k(.param .q9 a) { ret; }", "unknown parameter"),
        (".entry k() { ret;", "not closed"),
        (".entry k()", "no body"),
        (".entry k() .maxnreg 3 { ret; }", "unknown directive"),
    ]:
        with pytest.raises(PtxError, match=reason):
            parse(text)


def test_a_parameter_is_not_read_beyond_its_end() -> None:
    with pytest.raises(PtxError, match="beyond the parameter"):
        Program.of(parse(f"{HEAD} ld.param.u64 %d9, [in+4]; ret; }}")[0])
