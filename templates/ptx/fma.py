from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None):
    """a * b + c with one rounding."""
    operands = [Float32(a), Float32(b), Float32(c)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
