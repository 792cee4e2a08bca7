from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def wait_copies(*, loc=None, ip=None):
    """Waits until all copies that this thread has started are in shared memory."""
    llvm.inline_asm(
        None,
        [],
        "cp.async.wait_all;",
        "",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
