from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def fence_barriers(*, loc=None, ip=None):
    """Shows new barriers to the cluster, once its blocks have met."""
    llvm.inline_asm(
        None,
        [],
        "fence.mbarrier_init.release.cluster;",
        "",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
