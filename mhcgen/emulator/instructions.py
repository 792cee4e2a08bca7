"""What each PTX instruction does, compiled to a function over many threads.

`compile_kernel` turns every instruction into an `Operation`. Those that only compute or
touch memory carry a function of a `Frame`, which gives the registers of the threads
that are at the instruction. The machine itself takes care of the others: branches,
barriers, exits. An instruction or a modifier that is not known here is an error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mhcgen.emulator import arithmetic
from mhcgen.emulator.arithmetic import Array
from mhcgen.emulator.errors import Fault, LaneError, PtxError
from mhcgen.emulator.ptx import (
    PREDICATE,
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Parameter,
    Register,
    Special,
    Symbol,
    Vector,
)

WARP = 32
BARRIERS = 16
FULL_MASK = 0xFFFFFFFF


class Frame(Protocol):
    """The threads that execute an instruction, and what they see."""

    threads: Array

    @property
    def whole(self) -> bool:
        """Whether the threads are whole warps."""

    def read(self, slot: int) -> Array:
        """A register of the threads; never to be changed in place."""

    def write(self, slot: int, value: Array) -> None:
        """Sets a register to an array that nobody else holds, or to one number."""

    def special(self, name: str) -> Array:
        """A special register."""

    def parameter(self, offset: int, width: int) -> Array:
        """Elements of the parameters of each thread's launch."""

    def load_global(self, addresses: Array, width: int) -> Array:
        """Elements of global memory."""

    def store_global(self, addresses: Array, values: Array) -> None:
        """Stores into global memory."""

    def store_multicast(self, addresses: Array, values: Array) -> None:
        """Stores into global memory of all ranks."""

    def load_shared(self, addresses: Array, width: int) -> Array:
        """Elements of the block's shared memory."""

    def store_shared(self, addresses: Array, values: Array) -> None:
        """Stores into shared memory of the cluster."""

    def copy_shared(self, addresses: Array, values: Array) -> None:
        """Starts to copy elements to the block's shared memory."""

    def wait_copies(self) -> None:
        """Waits for the copies that the threads have started."""

    def map_shared(self, addresses: Array, blocks: Array) -> Array:
        """Shared addresses in other blocks of the cluster."""

    def fence(self) -> None:
        """Makes earlier stores visible before later ones."""


Run = Callable[[Frame], None]
Read = Callable[[Frame], Array]
Write = Callable[[Frame, Array], None]


class Kind(enum.Enum):
    """How the machine executes an operation."""

    COMPUTE = enum.auto()
    WARP = enum.auto()
    BRANCH = enum.auto()
    EXIT = enum.auto()
    BLOCK_BARRIER = enum.auto()
    CLUSTER_ARRIVE = enum.auto()
    CLUSTER_WAIT = enum.auto()
    GRID_WAIT = enum.auto()
    GRID_TRIGGER = enum.auto()


@dataclass(frozen=True, slots=True)
class Operation:
    """A compiled instruction.

    Attributes:
        kind: How it is executed.
        instruction: What it was compiled from.
        run: What it computes; for a warp operation, on whole warps.
        guard: The register of its predicate, or -1.
        negated: Whether it is executed where the predicate is false.
        target: Where a branch goes to.
        number: The number of a barrier.
        releases: Whether an arrival makes earlier stores visible.
        polls: Whether a branch closes a loop that only waits for memory to change.
        mask: The lanes that take part in a warp operation; None for the whole warp.
    """

    kind: Kind
    instruction: Instruction
    run: Run | None = None
    guard: int = -1
    negated: bool = False
    target: int = -1
    number: int = 0
    releases: bool = True
    polls: bool = False
    mask: Read | None = None


class _UnknownError(Exception):
    """An instruction that is not understood, and why."""


def compile_kernel(kernel: Kernel) -> list[Operation]:
    """Compiles every instruction of a kernel.

    Raises:
        PtxError: An instruction is not known.
    """
    operations = []
    for place, instruction in enumerate(kernel.instructions):
        try:
            operations.append(_compile(kernel, instruction, place))
        except _UnknownError as error:
            reason = str(error)
        except (IndexError, KeyError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            continue
        raise PtxError(
            kernel.name,
            instruction.line,
            instruction.text,
            f"unknown instruction {instruction.opcode} ({reason})",
        )
    return operations


def _compile(kernel: Kernel, instruction: Instruction, place: int) -> Operation:
    base, *rest = instruction.opcode.split(".")
    guard = -1 if instruction.guard is None else instruction.guard.slot

    def operation(kind: Kind, run: Run | None = None, **details: Any) -> Operation:
        return Operation(kind, instruction, run, guard, instruction.negated, **details)

    match [base, *rest]:
        case ["bra"] | ["bra", "uni"]:
            (label,) = instruction.operands
            if not isinstance(label, Symbol):
                raise _UnknownError("only direct branches")
            target = kernel.labels[label.name]
            polls = target <= place and _only_waits(kernel, target, place)
            return operation(Kind.BRANCH, target=target, polls=polls)
        case ["ret"] | ["exit"]:
            return operation(Kind.EXIT)
        case ["bar" | "barrier", "sync"] | ["barrier", "sync", "aligned"]:
            (number,) = instruction.operands
            if not isinstance(number, Immediate) or not 0 <= number.value < BARRIERS:
                raise _UnknownError("only barriers 0 to 15")
            return operation(Kind.BLOCK_BARRIER, number=number.value)
        case ["bar", "warp", "sync"]:
            return operation(
                Kind.WARP, lambda frame: None, mask=_mask(instruction.operands[0])
            )
        case ["barrier", "cluster", "arrive", *modifiers]:
            _expect(modifiers, {"aligned", "relaxed", "release"})
            releases = "relaxed" not in modifiers
            return operation(Kind.CLUSTER_ARRIVE, releases=releases)
        case ["barrier", "cluster", "wait", *modifiers]:
            _expect(modifiers, {"aligned", "acquire"})
            return operation(Kind.CLUSTER_WAIT)
        case ["griddepcontrol", "wait"]:
            return operation(Kind.GRID_WAIT)
        case ["griddepcontrol", "launch_dependents"]:
            return operation(Kind.GRID_TRIGGER)
        case ["shfl", "sync", mode, "b32"]:
            run = _shuffle(mode, instruction.operands)
            return operation(Kind.WARP, run, mask=_mask(instruction.operands[4]))
        case ["mma", "sync", "aligned", "m16n8k16", "row", "col", *types]:
            if types != ["f32", "bf16", "bf16", "f32"]:
                raise _UnknownError("only FP32 sums of BF16")
            return operation(Kind.WARP, _matrix(instruction.operands))
        case _:
            build = _BUILDERS.get(base)
            if build is None:
                raise _UnknownError("no such operation")
            return operation(
                Kind.COMPUTE, build(kernel, base, rest, instruction.operands)
            )


def _only_waits(kernel: Kernel, first: int, last: int) -> bool:
    """Whether a loop reads memory that others write, and has no effect itself."""
    body = [i.opcode.split(".") for i in kernel.instructions[first : last + 1]]
    watches = any(
        parts[0] == "ld" and {"volatile", "relaxed", "acquire"} & {*parts}
        for parts in body
    )
    effects = {"st", "atom", "red", "multimem", "bar", "barrier", "shfl", "mma"}
    return watches and not any(parts[0] in effects for parts in body)


def _expect(modifiers: Sequence[str], allowed: set[str]) -> None:
    for modifier in modifiers:
        if modifier not in allowed:
            raise _UnknownError(f".{modifier} is not supported")


# --- operands -----------------------------------------------------------------------


def numpy_type(name: str) -> np.dtype[Any]:
    """The NumPy type that a PTX type is computed in."""
    size = TYPE_BYTES[name]
    if name == "f32x2":
        return np.dtype(np.float32)
    if name in ("f32", "f64"):
        return np.dtype(f"f{size}")
    return np.dtype(f"{'i' if name[0] == 's' else 'u'}{size}")


def _unsigned(kind: str) -> np.dtype[Any]:
    """The type that a register is kept in."""
    if kind == PREDICATE:
        return np.dtype(bool)
    return np.dtype(f"u{TYPE_BYTES[kind]}")


def _source(operand: Operand, kind: str, kernel: Kernel | None = None) -> Read:
    """Reads an operand as a type; of a wider register, its low part."""
    dtype = numpy_type(kind)
    size = TYPE_BYTES[kind]
    if isinstance(operand, Register):
        slot = operand.slot
        if operand.type == PREDICATE:
            raise _UnknownError(f"{operand.name} is a predicate")
        width = TYPE_BYTES[operand.type]
        if width < size:
            raise _UnknownError(f"{operand.name} is narrower than .{kind}")
        if width > size:
            narrow = np.dtype(f"u{size}")
            return lambda frame: frame.read(slot).astype(narrow).view(dtype)
        if dtype.kind == "u":
            return lambda frame: frame.read(slot)
        return lambda frame: frame.read(slot).view(dtype)
    if isinstance(operand, Immediate):
        value = _constant(operand.value, kind)
        return lambda frame: value
    if isinstance(operand, Special):
        name = operand.name
        return lambda frame: frame.special(name).astype(f"u{size}").view(dtype)
    if isinstance(operand, Symbol) and kernel is not None:
        value = _constant(kernel.shared[operand.name], kind)
        return lambda frame: value
    raise _UnknownError(f"{operand} is no value")


def _constant(value: int, kind: str) -> Array:
    size = TYPE_BYTES[kind]
    if kind == "f32x2":
        raise _UnknownError("a pair of floats cannot be a number")
    bits = np.array(value & ((1 << 8 * size) - 1), np.dtype(f"u{size}"))
    return bits.view(numpy_type(kind))


def _predicate(operand: Operand) -> Read:
    if not isinstance(operand, Register) or operand.type != PREDICATE:
        raise _UnknownError(f"{operand} is no predicate")
    slot = operand.slot
    return lambda frame: frame.read(slot)


def _sink(operand: Operand, kind: str) -> Write:
    """Writes a result; a wider register is filled by extension."""
    if isinstance(operand, Symbol) and operand.name == "_":
        return lambda frame, value: None
    if not isinstance(operand, Register) or operand.type == PREDICATE:
        raise _UnknownError(f"{operand} is no register for a result")
    slot, register = operand.slot, _unsigned(operand.type)
    size = TYPE_BYTES[kind]
    if register.itemsize < size:
        raise _UnknownError(f"{operand.name} is narrower than .{kind}")
    if register.itemsize == size:
        return lambda frame, value: frame.write(slot, value.view(register))
    return lambda frame, value: frame.write(slot, value.astype(register))


def _mask(operand: Operand) -> Read | None:
    if isinstance(operand, Immediate) and operand.value & FULL_MASK == FULL_MASK:
        return None
    return _source(operand, "b32")


def _elementwise(
    function: Callable[..., Array],
    kind: str,
    operands: Sequence[Operand],
    sources: Sequence[str] | None = None,
) -> Run:
    """An operation on each thread's operands alone."""
    write = _sink(operands[0], kind)
    kinds = sources or [kind] * (len(operands) - 1)
    reads = [_source(o, k) for o, k in zip(operands[1:], kinds, strict=True)]
    if len(reads) == 2:
        first, second = reads
        return lambda frame: write(frame, function(first(frame), second(frame)))
    return lambda frame: write(frame, function(*(read(frame) for read in reads)))


# --- arithmetic ---------------------------------------------------------------------

Builder = Callable[[Kernel, str, list[str], Sequence[Operand]], Run]
_BUILDERS: dict[str, Builder] = {}

_FLOAT: dict[str, Callable[..., Array]] = {
    "add": arithmetic.add,
    "sub": arithmetic.subtract,
    "mul": arithmetic.multiply,
    "fma": arithmetic.fma,
    "min": arithmetic.minimum,
    "max": arithmetic.maximum,
    "neg": arithmetic.negate,
    "abs": arithmetic.absolute,
    "rcp": arithmetic.reciprocal,
    "rsqrt": arithmetic.reciprocal_root,
    "ex2": arithmetic.power_of_two,
    "lg2": arithmetic.logarithm,
}
_APPROXIMATE = {"rcp", "rsqrt", "ex2", "lg2"}
_INTEGER: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}
_LOGIC: dict[str, Callable[..., Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED: dict[str, Callable[[Array, Array], Array]] = {
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _arithmetic(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    *modifiers, kind = parts
    if kind == PREDICATE:
        _expect(modifiers, set())
        return _logic(base, operands)
    if base in ("fma", "add") and kind == "bf16" and modifiers[-1:] == ["f32"]:
        return _mixed(base, modifiers[:-1], operands)
    if kind in ("f32", "f32x2"):
        return _float(base, modifiers, kind, operands)
    if kind not in TYPE_BYTES or kind[0] == "f" or base not in _INTEGER:
        raise _UnknownError(f"no {base} of .{kind}")
    _expect(modifiers, set())
    return _elementwise(_INTEGER[base], kind, operands)


def _float(
    base: str, modifiers: list[str], kind: str, operands: Sequence[Operand]
) -> Run:
    function = _FLOAT[base]
    if base in _APPROXIMATE:
        if "approx" not in modifiers:
            raise _UnknownError(f"only the approximate {base}")
        modifiers = [modifier for modifier in modifiers if modifier != "approx"]
    elif base == "fma" and "rn" not in modifiers:
        raise _UnknownError("fma names its rounding")
    _expect(modifiers, {"rn", "ftz"})
    if "ftz" in modifiers:
        function = _flushing(function)
    return _elementwise(function, kind, operands)


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function with subnormal operands and results flushed to zero."""

    def flushing(*values: Array) -> Array:
        return arithmetic.flushed(function(*map(arithmetic.flushed, values)))

    return flushing


def _mixed(base: str, modifiers: list[str], operands: Sequence[Operand]) -> Run:
    """BF16 factors, or a BF16 summand, and the rest in FP32."""
    _expect(modifiers, {"rn"})
    if base == "add":

        def function(a: Array, c: Array) -> Array:
            return arithmetic.add(arithmetic.from_bf16(a), c)

        return _elementwise(function, "f32", operands, ("bf16", "f32"))

    def fused(a: Array, b: Array, c: Array) -> Array:
        return arithmetic.fma(arithmetic.from_bf16(a), arithmetic.from_bf16(b), c)

    return _elementwise(fused, "f32", operands, ("bf16", "bf16", "f32"))


def _logic(base: str, operands: Sequence[Operand]) -> Run:
    function = _LOGIC[base]
    slot = _predicate_slot(operands[0])
    reads = [_predicate(operand) for operand in operands[1:]]
    return lambda frame: frame.write(slot, function(*(r(frame) for r in reads)))


def _predicate_slot(operand: Operand) -> int:
    if not isinstance(operand, Register) or operand.type != PREDICATE:
        raise _UnknownError(f"{operand} is no predicate")
    return operand.slot


def _multiply(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    if parts[-1][0] == "f":
        return _arithmetic(kernel, base, parts, operands)
    form, kind = parts
    if kind[0] not in "su":
        raise _UnknownError(f"no {base} of .{kind}")
    result = kind
    function: Callable[[Array, Array], Array]
    if form == "wide":
        result = f"{kind[0]}{16 * TYPE_BYTES[kind]}"
        function = arithmetic.multiply_wide
    elif form in ("lo", "hi"):
        function = np.multiply if form == "lo" else arithmetic.multiply_high
    else:
        raise _UnknownError(f".{form} is not supported")
    dtype = numpy_type(kind)

    def multiply(a: Array, b: Array) -> Array:
        return function(a.astype(dtype, copy=False), b.astype(dtype, copy=False))

    if base == "mul":
        return _elementwise(multiply, result, operands, (kind, kind))
    return _elementwise(
        lambda a, b, c: multiply(a, b) + c, result, operands, (kind, kind, result)
    )


def _shift(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    (kind,) = parts
    by = operands[2]
    if isinstance(by, Immediate) and 0 <= by.value < 8 * TYPE_BYTES[kind]:
        shift = np.left_shift if base == "shl" else np.right_shift
        return _elementwise(shift, kind, operands)
    function = arithmetic.shift_left if base == "shl" else arithmetic.shift_right
    return _elementwise(function, kind, operands, (kind, "u32"))


def _compare(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    """``setp``: a comparison, and a second predicate that it may be joined with."""
    name, *modifiers, kind = parts
    join = None
    if modifiers[:1] and modifiers[0] in ("and", "or", "xor"):
        join = _LOGIC[modifiers.pop(0)]
    is_float = kind == "f32"
    _expect(modifiers, {"ftz"} if is_float else set())
    if name in ("lo", "ls", "hi", "hs") and kind[0] != "u":
        raise _UnknownError(f"no .{name} of .{kind}")
    comparison = _COMPARISONS.get(name) or (_UNORDERED.get(name) if is_float else None)
    if name == "ne" and not is_float:
        comparison = np.not_equal
    if comparison is None:
        raise _UnknownError(f"no .{name} of .{kind}")
    if "ftz" in modifiers:
        comparison = _with_flushed_operands(comparison)
    slot = _predicate_slot(operands[0])
    first, second = _source(operands[1], kind), _source(operands[2], kind)
    if join is None:
        return lambda f: f.write(slot, comparison(first(f), second(f)))
    other, combine = _predicate(operands[3]), join
    return lambda f: f.write(slot, combine(comparison(first(f), second(f)), other(f)))


def _with_flushed_operands(
    function: Callable[[Array, Array], Array],
) -> Callable[[Array, Array], Array]:
    return lambda a, b: function(arithmetic.flushed(a), arithmetic.flushed(b))


def _select(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    (kind,) = parts
    write = _sink(operands[0], kind)
    first, second = _source(operands[1], kind), _source(operands[2], kind)
    choice = _predicate(operands[3])
    return lambda f: write(f, np.where(choice(f), first(f), second(f)))


def _look_up(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    table = operands[4]
    if parts != ["b32"] or not isinstance(table, Immediate):
        raise _UnknownError("only .b32 with a constant table")
    value = table.value
    return _elementwise(
        lambda a, b, c: arithmetic.look_up(a, b, c, value), "b32", operands[:4]
    )


def _permute(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    if parts != ["b32"]:
        raise _UnknownError("only .b32")
    return _elementwise(arithmetic.permute, "b32", operands)


# --- moves and conversions ----------------------------------------------------------


def _move(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    (kind,) = parts
    target, source = operands
    if kind == PREDICATE:
        slot = _predicate_slot(target)
        if isinstance(source, Immediate):
            value = np.array(source.value != 0)
            return lambda frame: frame.write(slot, value)
        read = _predicate(source)
        return lambda frame: frame.write(slot, read(frame).copy())
    if isinstance(target, Vector):
        return _unpack(kind, target, source)
    write = _sink(target, kind)
    if isinstance(source, Vector):
        part = f"b{8 * TYPE_BYTES[kind] // len(source.items)}"
        reads = [_source(item, part) for item in source.items]

        def pack(frame: Frame) -> None:
            columns = np.broadcast_arrays(*(read(frame) for read in reads))
            write(frame, np.stack(columns, axis=1).view(numpy_type(kind)).ravel())

        return pack
    read = _source(source, kind, kernel)
    return lambda frame: write(frame, read(frame).copy())


def _unpack(kind: str, target: Vector, source: Operand) -> Run:
    part = f"b{8 * TYPE_BYTES[kind] // len(target.items)}"
    writes = [_sink(item, part) for item in target.items]
    read = _source(source, kind)

    def unpack(frame: Frame) -> None:
        columns = read(frame).view(numpy_type(part)).reshape(-1, len(writes))
        for write, column in zip(writes, columns.T, strict=True):
            write(frame, column.copy())

    return unpack


def _convert(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    match parts:
        case ["f32", "bf16"]:
            return _elementwise(arithmetic.from_bf16, "f32", operands, ("bf16",))
        case ["rn", "bf16", "f32"]:
            return _elementwise(
                lambda x: arithmetic.to_bf16(x).astype(np.uint16),
                "bf16",
                operands,
                ("f32",),
            )
        case ["f32", "f16"]:
            return _elementwise(arithmetic.from_f16, "f32", operands, ("f16",))
        case ["rn", "f16x2", "f32"]:
            return _elementwise(arithmetic.pack_f16x2, "b32", operands, ("f32", "f32"))
        case ["rn", "bf16x2", "f32"]:
            return _elementwise(arithmetic.pack_bf16x2, "b32", operands, ("f32", "f32"))
        case ["rn", "f32", kind] if kind in ("s32", "u32"):
            return _elementwise(
                lambda x: x.astype(np.float32), "f32", operands, (kind,)
            )
        case [to, kind] if to[0] in "su" and kind[0] in "su":
            result = numpy_type(to)
            return _elementwise(lambda x: x.astype(result), to, operands, (kind,))
        case _:
            raise _UnknownError("no such conversion")


# --- memory -------------------------------------------------------------------------

_ORDERS = {"volatile", "relaxed", "acquire", "release", "weak", "nc", "cg"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}


@dataclass(frozen=True)
class _Access:
    """The modifiers of a load or store."""

    space: str
    count: int
    kind: str

    @property
    def width(self) -> int:
        return self.count * TYPE_BYTES[self.kind]


def _access(parts: list[str]) -> _Access:
    *modifiers, kind = parts
    count, space = 1, ""
    for modifier in modifiers:
        if modifier in ("global", "param", "shared", "shared::cta", "shared::cluster"):
            space = modifier
        elif modifier in ("v2", "v4"):
            count = int(modifier[1])
        elif modifier not in _ORDERS | _SCOPES:
            raise _UnknownError(f".{modifier} is not supported")
    access = _Access(space, count, kind)
    if not space:
        raise _UnknownError("generic addresses are not supported")
    if access.width > 16:
        raise _UnknownError("more than 16 bytes")
    return access


def _address(operand: Operand, space: str, kernel: Kernel) -> Read:
    """The byte addresses of an access."""
    if not isinstance(operand, Address) or isinstance(operand.base, Parameter):
        raise _UnknownError(f"{operand} is no address in this space")
    base, offset = operand.base, operand.offset
    if isinstance(base, Symbol):
        place = np.uint32(kernel.shared[base.name] + offset)
        return lambda frame: np.full(frame.threads.size, place)
    read = _source(base, "u64" if space == "global" else "u32")
    if offset == 0:
        return read
    size = 64 if space == "global" else 32
    addend = np.dtype(f"u{size // 8}").type(offset & ((1 << size) - 1))
    return lambda frame: read(frame) + addend


def _items(operand: Operand, count: int) -> Sequence[Operand]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise _UnknownError(f"{len(items)} registers for {count} elements")
    return items


def _load(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    access = _access(parts)
    dtype, width, count = numpy_type(access.kind), access.width, access.count
    writes = [_sink(item, access.kind) for item in _items(operands[0], count)]

    def write_all(frame: Frame, elements: Array) -> None:
        if count == 1:
            writes[0](frame, elements.view(dtype))
            return
        rows = np.ascontiguousarray(elements.view(dtype).reshape(-1, count).T)
        for write, row in zip(writes, rows, strict=True):
            write(frame, row)

    if access.space == "param":
        source = operands[1]
        if not isinstance(source, Address) or not isinstance(source.base, Parameter):
            raise _UnknownError("no such parameter")
        place = source.base.offset + source.offset
        if not 0 <= source.offset <= source.base.size - width:
            raise _UnknownError("beyond the parameter")
        return lambda frame: write_all(frame, frame.parameter(place, width))
    address = _address(operands[1], access.space, kernel)
    if access.space == "global":
        return lambda f: write_all(f, f.load_global(address(f), width))
    if access.space == "shared::cluster":
        raise _UnknownError("loads from other blocks are not supported")
    return lambda f: write_all(f, f.load_shared(address(f), width))


def _elements(operand: Operand, count: int, kind: str, width: int) -> Read:
    """The registers of a store as one element a thread."""
    reads = [_source(item, kind) for item in _items(operand, count)]
    element = np.dtype(np.complex128) if width == 16 else np.dtype(f"u{width}")

    def elements(frame: Frame) -> Array:
        rows = np.empty((frame.threads.size, count), numpy_type(kind))
        for column, read in enumerate(reads):
            rows[:, column] = read(frame)
        return rows.view(element).ravel()

    return elements


def _store(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    access = _access(parts)
    if {"nc", "acquire"} & {*parts} or access.space == "param":
        raise _UnknownError("no such store")
    address = _address(operands[0], access.space, kernel)
    elements = _elements(operands[1], access.count, access.kind, access.width)
    if access.space == "global":
        return lambda f: f.store_global(address(f), elements(f))
    return lambda f: f.store_shared(address(f), elements(f))


def _multimem(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    if parts[0] != "st":
        raise _UnknownError("only multimem.st")
    access = _access(parts[1:])
    if access.space != "global":
        raise _UnknownError("only global memory")
    address = _address(operands[0], access.space, kernel)
    elements = _elements(operands[1], access.count, access.kind, access.width)
    return lambda f: f.store_multicast(address(f), elements(f))


def _copy(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    """``cp.async``: 16 bytes to shared memory, of which the last may be zeros."""
    if parts == ["async", "wait_all"]:
        return lambda frame: frame.wait_copies()
    if parts not in (
        ["async", "cg", "shared", "global"],
        ["async", "cg", "shared::cta", "global"],
    ):
        raise _UnknownError("only cp.async.cg.shared.global and cp.async.wait_all")
    if not isinstance(operands[2], Immediate) or operands[2].value != 16:
        raise _UnknownError("only copies of 16 bytes")
    place = _address(operands[0], "shared", kernel)
    address = _address(operands[1], "global", kernel)
    size = _source(operands[3] if len(operands) > 3 else operands[2], "u32")

    def run(frame: Frame) -> None:
        addresses = address(frame)
        sizes = np.broadcast_to(size(frame), addresses.shape)
        if np.any((sizes != 0) & (sizes != 16)):
            lane = int(np.flatnonzero((sizes != 0) & (sizes != 16))[0])
            raise Fault(LaneError, f"a copy that reads {int(sizes[lane])} bytes", lane)
        values = np.zeros(addresses.size, np.complex128)
        read = sizes == 16
        if read.any():
            values[read] = frame.load_global(addresses[read], 16)
        frame.copy_shared(place(frame), values)

    return run


def _map(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    if parts != ["shared::cluster", "u32"]:
        raise _UnknownError("only 32-bit shared addresses")
    write = _sink(operands[0], "u32")
    address, block = _source(operands[1], "u32", kernel), _source(operands[2], "u32")
    return lambda f: write(f, f.map_shared(address(f), block(f)))


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, value: old + value,
    "inc": lambda old, limit: 0 if old >= limit else old + 1,
    "dec": lambda old, limit: limit if old == 0 or old > limit else old - 1,
    "exch": lambda old, value: value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
}


def _atomic(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    *modifiers, name, kind = parts
    _expect(modifiers, {"global", "relaxed", "acquire", "release", "acq_rel"} | _SCOPES)
    if "global" not in modifiers or kind[0] == "f":
        raise _UnknownError("only integers in global memory")
    function = _ATOMIC[name]
    width = TYPE_BYTES[kind]
    write = _sink(operands[0], kind) if base == "atom" else lambda frame, value: None
    address = _address(operands[-2], "global", kernel)
    operand = _source(operands[-1], kind)
    dtype, mask = numpy_type(kind), (1 << 8 * width) - 1

    def run(frame: Frame) -> None:
        addresses = address(frame)
        values = np.broadcast_to(operand(frame), addresses.shape)
        before = frame.load_global(addresses, width).view(dtype)
        memory: dict[int, int] = {}
        results = []
        for place, old, value in zip(
            addresses.tolist(), before.tolist(), values.tolist(), strict=True
        ):
            results.append(memory.get(place, old))
            memory[place] = function(results[-1], value)
        places = np.array(list(memory), np.uint64)
        after = np.array([value & mask for value in memory.values()], f"u{width}")
        frame.store_global(places, after)
        write(frame, np.array(results, dtype))

    return run


def _fence(
    kernel: Kernel, base: str, parts: list[str], operands: Sequence[Operand]
) -> Run:
    _expect(parts, {"acq_rel", "sc", "gl"} | _SCOPES)
    return lambda frame: frame.fence()


# --- warps --------------------------------------------------------------------------


def _shuffle(mode: str, operands: Sequence[Operand]) -> Run:
    """``shfl.sync``: each lane takes a register of another lane of its segment."""
    write = _sink(operands[0], "b32")
    value, by, clamp = (_source(operand, "u32") for operand in operands[1:4])
    if mode not in ("idx", "bfly", "up", "down"):
        raise _UnknownError(f"no .{mode}")

    def run(frame: Frame) -> None:
        threads = frame.threads
        lane = threads % WARP
        bits = clamp(frame).astype(np.int64)
        distance = by(frame).astype(np.int64) & 31
        segment = bits >> 8 & 31
        first = lane & segment
        last = first | (bits & 31 & ~segment)
        if mode == "idx":
            source = first | (distance & ~segment)
            inside = source <= last
        elif mode == "bfly":
            source = lane ^ distance
            inside = source <= last
        elif mode == "up":
            source = lane - distance
            inside = source >= last
        else:
            source = lane + distance
            inside = source <= last
        source = np.where(inside, source, lane)
        if frame.whole:
            place = np.arange(threads.size) - lane + source
            write(frame, _spread(value(frame), lane.size)[place])
            return
        source = threads - lane + source
        place = np.searchsorted(threads, source)
        place = np.minimum(place, threads.size - 1)
        missing = threads[place] != source
        if missing.any():
            at = int(np.flatnonzero(missing)[0])
            raise Fault(
                LaneError,
                f"the shuffle takes a value from lane {int(source[at]) % WARP}, which "
                "does not take part",
                at,
            )
        write(frame, _spread(value(frame), lane.size)[place])

    return run


def _spread(value: Array, count: int) -> Array:
    """A value for each thread; a constant is one number until then."""
    return value if value.ndim else np.full(count, value)


def _matrix(operands: Sequence[Operand]) -> Run:
    writes = [_sink(item, "f32") for item in _items(operands[0], 4)]
    a, b, c = (
        [_source(item, kind) for item in _items(operand, count)]
        for operand, count, kind in zip(
            operands[1:], (4, 2, 4), ("b32", "b32", "f32"), strict=True
        )
    )

    def run(frame: Frame) -> None:
        size = frame.threads.size

        def rows(reads: list[Read], dtype: type[np.generic]) -> Array:
            each = np.empty((len(reads), size), dtype)
            for row, read in zip(each, reads, strict=True):
                row[:] = read(frame)
            return each

        tile = arithmetic.matrix_multiply_add(
            rows(a, np.uint32), rows(b, np.uint32), rows(c, np.float32)
        )
        for write, row in zip(writes, tile, strict=True):
            write(frame, row)

    return run


_BUILDERS |= dict.fromkeys([*_FLOAT, *_INTEGER], _arithmetic)
_BUILDERS |= {
    "mul": _multiply,
    "mad": _multiply,
    "shl": _shift,
    "shr": _shift,
    "setp": _compare,
    "selp": _select,
    "lop3": _look_up,
    "prmt": _permute,
    "mov": _move,
    "cvt": _convert,
    "ld": _load,
    "st": _store,
    "multimem": _multimem,
    "mapa": _map,
    "cp": _copy,
    "atom": _atomic,
    "red": _atomic,
    "fence": _fence,
    "membar": _fence,
}
