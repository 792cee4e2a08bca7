from cutlass import Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def load_words(opcode, address, count, *, loc=None, ip=None):
    """Loads 1, 2 or 4 words from an Int64 address, or an Int32 one of shared memory."""
    operands = [address.ir_value(loc=loc, ip=ip)]
    kind = "r" if isinstance(address, Int32) else "l"
    if count == 1:
        asm = f"{opcode}.b32 $0, [$1];"
        word = llvm.inline_asm(
            T.i32(), operands, asm, f"=r,{kind}", has_side_effects=True, loc=loc, ip=ip
        )
        return (Uint32(word),)
    registers = ", ".join(f"${index}" for index in range(count))
    words = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"),
        operands,
        f"{opcode}.v{count}.b32 {{{registers}}}, [${count}];",
        "=r," * count + kind,
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Uint32(llvm.extractvalue(T.i32(), words, [index], loc=loc, ip=ip))
        for index in range(count)
    )
