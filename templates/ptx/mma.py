from cutlass import Float32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def mma(a, b, total, *, loc=None, ip=None):
    """A 16x8 tile of FP32 plus a 16x16 by a 16x8 BF16 product, over a warp.

    Lane 4g+q holds four words of ``a`` (rows g, g+8, g, g+8; columns 2q, 2q, 2q+8,
    2q+8), two of ``b`` (column g; rows 2q, 2q+8) and four of the tile (rows g, g, g+8,
    g+8; columns 2q, 2q+1, 2q, 2q+1).
    """
    operands = [*(Uint32(w) for w in a), *(Uint32(w) for w in b)]
    operands += [Float32(value) for value in total]
    tile = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Float32(llvm.extractvalue(T.f32(), tile, [index], loc=loc, ip=ip))
        for index in range(4)
    )
