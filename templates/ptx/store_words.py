from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def store_words(opcode, kind, address, words, *, loc=None, ip=None):
    """Stores 1, 2 or 4 words of a PTX type; shared memory has Int32 addresses."""
    shared = isinstance(address, Int32)
    operands = [address if shared else Int64(address)]
    operands += [Uint32(word) for word in words]
    count = len(words)
    registers = ", ".join(f"${index + 1}" for index in range(count))
    vector = (
        f".v{count}.{kind} [$0], {{{registers}}}" if count > 1 else f".{kind} [$0], $1"
    )
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        f"{opcode}{vector};",
        ("r" if shared else "l") + ",r" * count,
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
