from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_async(address, barrier, peer, value, *, loc=None, ip=None):
    """Stores FP32 in block ``peer`` of the cluster and counts it at a barrier there."""
    operands = [Int32(address), Int32(barrier), Int32(peer), Float32(value)]
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "{ .reg .b32 remote, there; mapa.shared::cluster.u32 remote, $0, $2; "
        "mapa.shared::cluster.u32 there, $1, $2; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 "
        "[remote], $3, [there]; }",
        "r,r,r,f",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
