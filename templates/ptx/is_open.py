from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def is_open(barrier, *, loc=None, ip=None):
    """Whether a barrier's first phase is over; waits a while for it."""
    return Boolean(
        Int32(
            llvm.inline_asm(
                T.i32(),
                [Int32(barrier).ir_value(loc=loc, ip=ip)],
                "{ .reg .pred open; "
                "mbarrier.try_wait.parity.shared::cta.b64 open, [$1], 0; "
                "selp.s32 $0, 1, 0, open; }",
                "=r,r",
                has_side_effects=True,
                loc=loc,
                ip=ip,
            )
        )
        != 0
    )
