from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def exp2(x, *, loc=None, ip=None):
    """2 ** x, within 2 ulp; subnormals become zero."""
    operands = [Float32(x)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
