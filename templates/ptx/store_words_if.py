from cutlass import Boolean, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_words_if(opcode, kind, present, address, words, *, loc=None, ip=None):
    """Stores 1, 2 or 4 words of a PTX type where ``present``; elsewhere nothing."""
    operands = [Int64(address), *(Uint32(word) for word in words)]
    operands.append(Uint32(Boolean(present)))
    count = len(words)
    registers = ", ".join(f"${index + 1}" for index in range(count))
    vector = (
        f".v{count}.{kind} [$0], {{{registers}}}" if count > 1 else f".{kind} [$0], $1"
    )
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        f"{{ .reg .pred present; setp.ne.u32 present, ${count + 1}, 0; "
        f"@present {opcode}{vector}; }}",
        "l" + ",r" * (count + 1),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
