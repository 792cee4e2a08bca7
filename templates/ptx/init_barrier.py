from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def init_barrier(address, *, loc=None, ip=None):
    """Makes 8 bytes of shared memory a barrier of one arrival, and of bytes to come."""
    llvm.inline_asm(
        None,
        [Int32(address).ir_value(loc=loc, ip=ip)],
        "mbarrier.init.shared::cta.b64 [$0], 1;",
        "r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
