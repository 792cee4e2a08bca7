from cutlass import Boolean, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_words_if(opcode, present, address, count, *, loc=None, ip=None):
    """Loads 1, 2 or 4 words where ``present``; elsewhere reads nothing, gives zeros."""
    operands = [Int64(address), Uint32(Boolean(present))]
    operands = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    registers = ", ".join(f"${index}" for index in range(count))
    zeros = " ".join(f"mov.b32 ${index}, 0;" for index in range(count))
    vector = f".v{count}.b32 {{{registers}}}" if count > 1 else ".b32 $0"
    asm = (
        f"{{ .reg .pred present; setp.ne.u32 present, ${count + 1}, 0; {zeros} "
        f"@present {opcode}{vector}, [${count}]; }}"
    )
    constraints = "=&r," * count + "l,r"
    if count == 1:
        word = llvm.inline_asm(
            T.i32(), operands, asm, constraints, has_side_effects=True, loc=loc, ip=ip
        )
        return (Uint32(word),)
    words = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"),
        operands,
        asm,
        constraints,
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(T.i32(), words, [index], loc=loc, ip=ip))
        for index in range(count)
    )
