from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def as_float(word, *, loc=None, ip=None):
    """The FP32 value whose bits are ``word``."""
    bits = Uint32(word).ir_value(loc=loc, ip=ip)
    return Float32(llvm.bitcast(T.f32(), bits, loc=loc, ip=ip))
