"""What stops an emulation: the reason, and where in which kernel it happened."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where an instruction was executed.

    Attributes:
        kernel: The entry's name.
        line: The line of the PTX text.
        text: The instruction.
        rank: The rank that launched the kernel.
        block: The block in its grid.
        thread: The thread in its block.
    """

    kernel: str
    line: int
    text: str
    rank: int
    block: tuple[int, int, int]
    thread: int

    def __str__(self) -> str:
        """The place in two lines."""
        block = ", ".join(map(str, self.block))
        return (
            f"  in {self.kernel}, rank {self.rank}, block ({block}), thread "
            f"{self.thread}\n  line {self.line}: {self.text}"
        )


class EmulatorError(Exception):
    """An emulation cannot go on."""


class PtxError(EmulatorError):
    """PTX that the emulator does not understand."""

    def __init__(self, kernel: str, line: int, text: str, reason: str) -> None:
        """Takes the kernel's name if it is known, and the line that is wrong."""
        name = kernel or "PTX"
        super().__init__(f"{name}, line {line}: {reason}\n  {text.strip()}")
        self.line = line
        self.reason = reason


class ExecutionError(EmulatorError):
    """A kernel did what hardware forbids or leaves undefined.

    Attributes:
        reason: What it did.
        place: Where.
    """

    def __init__(self, reason: str, place: Place) -> None:
        """Takes the reason and the place."""
        super().__init__(f"{reason}\n{place}")
        self.reason = reason
        self.place = place


class MemoryFaultError(ExecutionError):
    """An access out of bounds, misaligned, of the wrong kind, or before any write."""


class LaneError(ExecutionError):
    """A warp operation that not all lanes of its mask take part in."""


class BarrierError(ExecutionError):
    """A barrier that is used out of turn."""


class UnwrittenError(EmulatorError):
    """The host reads what no kernel has written."""


class DeadlockError(EmulatorError):
    """Nothing can advance any more."""


@dataclass(eq=False)
class Fault(Exception):  # noqa: N818 - it is raised again as an error
    """A reason without a place: the machine knows the place and adds it.

    Attributes:
        error: The error to raise.
        reason: What went wrong.
        lane: The position, among the threads that executed, of the one at fault.
    """

    error: type[ExecutionError]
    reason: str
    lane: int = field(default=0)
