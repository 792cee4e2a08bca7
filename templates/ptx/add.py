from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def add(a, b, *, loc=None, ip=None):
    """a + b, rounded; subnormals are kept."""
    operands = [Float32(a), Float32(b)]
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            loc=loc,
            ip=ip,
        )
    )
