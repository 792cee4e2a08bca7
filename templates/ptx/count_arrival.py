from cutlass import Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def count_arrival(address, last, *, loc=None, ip=None):
    """Counts one arrival; the arrival after number ``last`` is number 0 again.

    Returns the number of this arrival, so the counter re-arms itself.
    """
    operands = [Int64(address), Uint32(last)]
    return Uint32(
        llvm.inline_asm(
            T.i32(),
            [operand.ir_value(loc=loc, ip=ip) for operand in operands],
            "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;",
            "=r,l,r",
            has_side_effects=True,
            loc=loc,
            ip=ip,
        )
    )
