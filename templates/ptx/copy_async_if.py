from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def copy_async_if(present, place, address, *, loc=None, ip=None):
    """Starts to copy 16 bytes from global to shared memory where ``present``.

    Elsewhere it reads nothing and fills the place with zeros.
    """
    size = Int32(Boolean(present)) * 16
    operands = [Int32(place), Int64(address), size]
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
