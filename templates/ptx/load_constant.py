from cutlass import Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_constant(address, *, loc=None, ip=None):
    """Loads 16 bytes that no kernel writes while this one runs: four words.

    Not by ``ld.global.nc``: the compiler sinks those behind a wait for other kernels.
    """
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(T.i32(), words, [index], loc=loc, ip=ip))
        for index in range(4)
    )
