from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_peer(address, peer, value, *, loc=None, ip=None):
    """Stores FP32 at a shared-memory address of block ``peer`` of the cluster."""
    operands = [Int32(address), Int32(peer), Float32(value)]
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; "
        "st.shared::cluster.f32 [remote], $2; }",
        "r,r,f",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
