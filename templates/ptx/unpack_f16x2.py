from cutlass import Float32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def unpack_f16x2(word, *, loc=None, ip=None):
    """Widens a word of FP16 to two FP32 values, the low half first: exact."""
    values = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32)>"),
        [Uint32(word).ir_value(loc=loc, ip=ip)],
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        "=f,=f,r",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Float32(llvm.extractvalue(T.f32(), values, [index], loc=loc, ip=ip))
        for index in range(2)
    )
