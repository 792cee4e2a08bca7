"""PTX text to kernels: parameters, registers, shared memory, instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mhcgen.emulator.errors import PtxError
from mhcgen.runtime.occupancy import MIXES

TYPE_BYTES = {
    f"{kind}{bits}": bits // 8 for kind in "bsu" for bits in (8, 16, 32, 64)
} | {"f32": 4, "f64": 8, "f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32x2": 8}
PREDICATE = "pred"
SINK = "_"
"""The operand in place of a result that nobody takes."""
SHARED_BASE = 1024
"""Shared addresses start here, as on hardware, so that a null address is no address."""

_NAME = r"[A-Za-z_$%][\w$]*"
_REGISTER_RANGE = re.compile(rf"({_NAME})<(\d+)>")
_PARAMETER = re.compile(
    rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})(?:\[(\d+)\])?"
)
_SHARED = re.compile(
    rf"(?:\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})\[(\d*)\]"
)
_ENTRY = re.compile(rf"(?:\.visible\s+|\.weak\s+)*\.entry\s+({_NAME})\s*")
_PREDICATED = re.compile(rf"@(!?)({_NAME})\s+(.*)", re.DOTALL)
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_ADDRESS = re.compile(rf"\[\s*({_NAME}(?:\.\w+)?)\s*(?:\+\s*([+-]?\d+))?\s*\]")
_SPECIAL = re.compile(r"%[a-z]\w*(?:\.[xyz])?")
_LABEL = re.compile(rf"({_NAME}):")


@dataclass(frozen=True)
class Register:
    """A register.

    Attributes:
        slot: Its place in the kernel's table of registers.
        type: Its declared type, such as ``b32`` or ``pred``.
        name: Its name.
    """

    slot: int
    type: str
    name: str


@dataclass(frozen=True)
class Immediate:
    """A number in an instruction: the value of an integer, or the bits of a float."""

    value: int


@dataclass(frozen=True)
class Special:
    """A special register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable in shared memory, or a label."""

    name: str


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter.

    Attributes:
        name: Its name.
        offset: Its place in parameter space.
        size: Its bytes.
        type: Its type; ``b8`` for a structure.
    """

    name: str
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class Address:
    """An address in brackets.

    Attributes:
        base: A register, a shared variable or a parameter.
        offset: Bytes added to it.
    """

    base: "Register | Symbol | Parameter"
    offset: int


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    items: "tuple[Operand, ...]"


Operand = Register | Immediate | Special | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: The operation and its modifiers, such as ``add.rn.f32``.
        operands: The operands, the destination first.
        guard: The predicate that it is executed under; None means always.
        negated: Whether it is executed where the guard is false.
        line: Its line in the text.
        text: The instruction itself.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    line: int
    text: str


@dataclass
class Kernel:
    """One entry of a PTX module.

    Attributes:
        name: Its name.
        target: The architecture, such as ``sm_90a``.
        parameters: Its parameters by rising offset.
        registers: The type of each register.
        shared: The address of each variable in shared memory.
        static_shared: Bytes of shared memory that the text declares.
        threads: Threads of a block, if the text requires a number.
        instructions: The instructions.
        labels: The instruction that each label stands before.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...] = ()
    registers: list[str] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    threads: tuple[int, ...] | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name without what the DSL adds: the types of the arguments."""
        return self.name.partition("_kernel_cutlass")[0]


def read_kernel(path: Path) -> Kernel:
    """The kernel of a PTX file, without the mixes that a boundary launches besides.

    Those are the same in every boundary, and in a file of their own.

    Raises:
        PtxError: The text is not understood, or holds another number of kernels.
    """
    found = parse(path.read_text("utf-8"))
    beside = {f"{kernel.label}{MIXES}" for kernel in found}
    kernels = [kernel for kernel in found if kernel.label not in beside]
    if len(kernels) != 1:
        raise PtxError("", 1, path.name, f"the file holds {len(kernels)} kernels")
    return kernels[0]


def parse(text: str) -> list[Kernel]:
    """The kernels of a PTX module.

    Raises:
        PtxError: The text is not understood.
    """
    return list(_Module(text).kernels())


@dataclass(frozen=True)
class _Piece:
    """A statement, a brace or a label, and the line where it starts."""

    text: str
    line: int


class _Module:
    """A module on its way from text to kernels."""

    def __init__(self, text: str) -> None:
        self.text = _without_comments(text)
        self.target = ""
        self.shared: list[tuple[str, int, int]] = []

    def kernels(self) -> Iterator[Kernel]:
        position = 0
        while match := re.compile(r"\S").search(self.text, position):
            start = match.start()
            line = self.text.count("\n", 0, start) + 1
            entry = _ENTRY.match(self.text, start)
            if entry:
                kernel, position = self._entry(entry, line)
                yield kernel
            elif shared := _SHARED.match(self.text, start):
                self.shared.append(_shared_variable(shared))
                position = self.text.find(";", start) + 1
            else:
                position = self._directive(start, line)

    def _directive(self, start: int, line: int) -> int:
        end = self.text.find("\n", start)
        words = self.text[start : end if end >= 0 else None].split()
        if words[0] == ".target":
            self.target = words[1].rstrip(",")
        elif words[0] not in (".version", ".address_size"):
            raise PtxError("", line, " ".join(words), "unknown directive")
        return end if end >= 0 else len(self.text)

    def _entry(self, entry: re.Match[str], line: int) -> tuple[Kernel, int]:
        kernel = Kernel(entry[1], self.target)
        position = entry.end()
        if self.text[position : position + 1] == "(":
            end = self.text.index(")", position)
            kernel.parameters = _parameters(
                kernel.name, self.text[position + 1 : end], line
            )
            position = end + 1
        start = self.text.find("{", position)
        if start < 0:
            raise PtxError(kernel.name, line, entry[0], "the entry has no body")
        for words in self.text[position:start].replace(",", " ").split("\n"):
            fields = words.split()
            if fields and fields[0] == ".reqntid":
                kernel.threads = tuple(map(int, fields[1:]))
            elif fields and fields[0] not in (".minnctapersm", ".maxntid"):
                raise PtxError(kernel.name, line, words, "unknown directive")
        end = _closing(self.text, start, kernel.name, line)
        first = self.text.count("\n", 0, start + 1) + 1
        _Body(kernel, self.shared).read(self.text[start + 1 : end], first)
        return kernel, end + 1


class _Body:
    """The body of a kernel: fills in its registers and instructions."""

    def __init__(self, kernel: Kernel, shared: list[tuple[str, int, int]]) -> None:
        self.kernel = kernel
        self.scopes: list[dict[str, Register]] = [{}]
        self.parameters = {p.name: p for p in kernel.parameters}
        for name, size, alignment in shared:
            self._place(name, size, alignment)

    def read(self, text: str, line: int) -> None:
        for piece in _pieces(text, line):
            try:
                self._piece(piece)
            except _SyntaxError as error:
                raise PtxError(
                    self.kernel.name, piece.line, piece.text, str(error)
                ) from None
        for instruction in self.kernel.instructions:
            for operand in instruction.operands:
                if isinstance(operand, Symbol) and not (
                    operand.name == SINK
                    or operand.name in self.kernel.labels
                    or operand.name in self.kernel.shared
                ):
                    raise PtxError(
                        self.kernel.name,
                        instruction.line,
                        instruction.text,
                        f"{operand.name} is not declared",
                    )

    def _piece(self, piece: _Piece) -> None:
        text = piece.text
        if text == "{":
            self.scopes.append({})
        elif text == "}":
            self.scopes.pop()
        elif text.endswith(":"):
            self.kernel.labels[text[:-1]] = len(self.kernel.instructions)
        elif text.startswith(".reg"):
            self._declare(text)
        elif shared := _SHARED.match(text):
            self._place(*_shared_variable(shared))
        elif not text.startswith(".pragma"):
            if text.startswith("."):
                raise _SyntaxError("unknown directive")
            self.kernel.instructions.append(self._instruction(text, piece.line))

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        kind = kind.removeprefix(".")
        if kind not in TYPE_BYTES and kind != PREDICATE:
            raise _SyntaxError(f"unknown type {kind}")
        for name in map(str.strip, names.split(",")):
            many = _REGISTER_RANGE.fullmatch(name)
            every = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
            for each in every:
                slot = len(self.kernel.registers)
                self.kernel.registers.append(kind)
                self.scopes[-1][each] = Register(slot, kind, each)

    def _place(self, name: str, size: int, alignment: int) -> None:
        start = -(-self.kernel.static_shared // alignment) * alignment
        self.kernel.shared[name] = SHARED_BASE + start
        self.kernel.static_shared = start + size

    def _instruction(self, text: str, line: int) -> Instruction:
        guard, negated, rest = None, False, text
        if match := _PREDICATED.fullmatch(text):
            guard = self._register(match[2])
            negated, rest = match[1] == "!", match[3]
        opcode, _, operands = rest.partition(" ")
        return Instruction(
            opcode,
            tuple(self._operand(part) for part in _split(operands)),
            guard,
            negated,
            line,
            text,
        )

    def _register(self, name: str) -> Register:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise _SyntaxError(f"{name} is not declared")

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            match = _ADDRESS.fullmatch(text)
            if not match:
                raise _SyntaxError(f"unknown address {text}")
            return Address(self._base(match[1]), int(match[2] or 0))
        if match := _FLOAT.fullmatch(text):
            return Immediate(int(match[1] or match[2], 16))
        if _INTEGER.fullmatch(text):
            return Immediate(int(text.rstrip("U"), 0))
        if any(text in scope for scope in self.scopes):
            return self._register(text)
        if _SPECIAL.fullmatch(text):
            return Special(text)
        if re.fullmatch(_NAME, text):
            return Symbol(text)
        raise _SyntaxError(f"unknown operand {text}")

    def _base(self, name: str) -> Register | Symbol | Parameter:
        if name in self.parameters:
            return self.parameters[name]
        if name in self.kernel.shared:
            return Symbol(name)
        return self._register(name)


class _SyntaxError(Exception):
    """What is wrong with a statement; the reader knows which."""


def _without_comments(text: str) -> str:
    """The text with comments blanked, so that lines keep their numbers."""
    return re.sub(
        r"//[^\n]*|/\*.*?\*/",
        lambda match: re.sub(r"[^\n]", " ", match[0]),
        text,
        flags=re.DOTALL,
    )


def _closing(text: str, start: int, kernel: str, line: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError(kernel, line, "{", "the body is not closed")


def _pieces(text: str, line: int) -> Iterator[_Piece]:
    """The statements of a body; braces of vectors are part of their statement."""
    position = 0
    while match := re.compile(r"\S").search(text, position):
        start = match.start()
        here = line + text.count("\n", 0, start)
        label = _LABEL.match(text, start)
        if text[start] in "{}":
            position = start + 1
            yield _Piece(text[start], here)
        elif label:
            position = label.end()
            yield _Piece(label[0], here)
        else:
            end = text.find(";", start)
            if end < 0:
                end = len(text)
            position = end + 1
            yield _Piece(" ".join(text[start:end].split()), here)


def _split(text: str) -> list[str]:
    """Splits operands at the commas that are not inside braces."""
    parts = re.findall(r"\s*(\{[^}]*\}|[^,{}]+)\s*(?:,|$)", text)
    return [part.strip() for part in parts if part.strip()]


def _parameters(kernel: str, text: str, line: int) -> tuple[Parameter, ...]:
    parameters = []
    offset = 0
    for part in filter(None, map(str.strip, text.split(","))):
        match = _PARAMETER.fullmatch(" ".join(part.split()))
        if not match or match[2] not in TYPE_BYTES:
            raise PtxError(kernel, line, part, "unknown parameter")
        size = TYPE_BYTES[match[2]] * int(match[4] or 1)
        alignment = int(match[1] or TYPE_BYTES[match[2]])
        offset = -(-offset // alignment) * alignment
        parameters.append(Parameter(match[3], offset, size, match[2]))
        offset += size
    return tuple(parameters)


def _shared_variable(match: re.Match[str]) -> tuple[str, int, int]:
    unit = TYPE_BYTES[match[2]]
    return match[3], unit * int(match[4] or 0), int(match[1] or unit)
