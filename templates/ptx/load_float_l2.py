from cutlass import Float32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_float_l2(address, *, loc=None, ip=None):
    """Loads an FP32 value that an earlier kernel wrote, from L2."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Int64(address).ir_value(loc=loc, ip=ip)],
            "ld.global.cg.f32 $0, [$1];",
            "=f,l",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )
