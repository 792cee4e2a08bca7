from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def copy_async(place, address, *, loc=None, ip=None):
    """Starts to copy 16 bytes from global memory to this block's shared memory."""
    operands = [Int32(place), Int64(address)]
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "cp.async.cg.shared.global [$0], [$1], 16;",
        "r,l",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
