from cutlass import Boolean, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_volatile_if(present, address, *, loc=None, ip=None):
    """Loads a fragment that another device may be writing, where ``present``.

    Elsewhere it reads nothing and gives zeros.
    """
    operands = [Int64(address), Uint32(Boolean(present))]
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "{ .reg .pred present; setp.ne.u32 present, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@present ld.volatile.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(T.i32(), words, [index], loc=loc, ip=ip))
        for index in range(4)
    )
