from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def mul(a, b, *, loc=None, ip=None):
    """a * b, rounded: never contracted into a fused multiply-add."""
    operands = [Float32(a), Float32(b)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "mul.rn.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
