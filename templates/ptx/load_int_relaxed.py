from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_int_relaxed(address, *, loc=None, ip=None):
    """Loads a 32-bit integer that an earlier kernel wrote, past the L1 cache."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int64(address).ir_value(loc=loc, ip=ip)],
            "ld.relaxed.gpu.global.s32 $0, [$1];",
            "=r,l",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )
