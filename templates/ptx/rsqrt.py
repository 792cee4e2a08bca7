from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def rsqrt(x, *, loc=None, ip=None):
    """1 / sqrt(x) of a normal number, within 2 ulp."""
    operands = [Float32(x)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "rsqrt.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
