from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def pack_f16x2(low, high, *, loc=None, ip=None):
    """Rounds two FP32 values to nearest even into one word of FP16."""
    operands = [Float32(low), Float32(high)]
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
