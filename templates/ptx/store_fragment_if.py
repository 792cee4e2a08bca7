from cutlass import Boolean, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_fragment_if(present, address, words, *, loc=None, ip=None):
    """Stores a fragment of four words where ``present``; elsewhere nothing."""
    operands = [Int64(address), *(Uint32(word) for word in words)]
    operands.append(Uint32(Boolean(present)))
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "{ .reg .pred present; setp.ne.u32 present, $5, 0; "
        "@present st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
        "l,r,r,r,r,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
