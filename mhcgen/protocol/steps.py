"""What an event does to memory, atomically: each step names the cells it touches.

Memory is a row of cells, one byte each. The search relies on ``reads`` and ``writes``:
two steps that share no cell, or only read those they share, commute.
"""

from __future__ import annotations

from dataclasses import dataclass

EMPTY = 255  # the sentinel in a mailbox cell; others hold the call that sent the row


@dataclass(frozen=True)
class Step:
    """A step that touches nothing."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Cells that the step reads."""
        return ()

    @property
    def writes(self) -> tuple[int, ...]:
        """Cells that the step writes; they count as read as well."""
        return ()

    def ready(self, memory: bytes) -> bool:
        """Whether the step can run: a poll waits for its cell."""
        return True

    def run(self, memory: bytearray) -> str | None:
        """Runs the step, and says what is wrong with what it saw, if anything is."""
        return None


@dataclass(frozen=True)
class ReadGeneration(Step):
    """Reads the generation, and what the kernels before this one left."""

    cell: int
    expected: int
    residual: int | None  # counts the clusters that wrote it
    clusters: int

    @property
    def reads(self) -> tuple[int, ...]:
        """The generation and the residual."""
        return (self.cell,) if self.residual is None else (self.cell, self.residual)

    def run(self, memory: bytearray) -> str | None:
        """Compares both with what they must be in this call."""
        if memory[self.cell] != self.expected:
            return f"reads generation {memory[self.cell]}, not {self.expected}"
        if self.residual is not None and memory[self.residual] != self.clusters:
            return "reads a residual that the boundary before has not finished"
        return None


@dataclass(frozen=True)
class ReadInput(Step):
    """Reads a row of x."""

    cell: int
    call: int

    @property
    def reads(self) -> tuple[int, ...]:
        """The cell of x."""
        return (self.cell,)

    def run(self, memory: bytearray) -> str | None:
        """Compares x with that of this call."""
        if memory[self.cell] != self.call:
            return f"reads the x of call {memory[self.cell]}"
        return None


@dataclass(frozen=True)
class WriteInput(Step):
    """Overwrites x with that of a later call."""

    cell: int
    call: int

    @property
    def writes(self) -> tuple[int, ...]:
        """The cell of x."""
        return (self.cell,)

    def run(self, memory: bytearray) -> str | None:
        """Stores the number of the call."""
        memory[self.cell] = self.call
        return None


@dataclass(frozen=True)
class Slot(Step):
    """A step on one mailbox cell: a fragment of a row, of one rank and generation."""

    cell: int
    call: int


@dataclass(frozen=True)
class Land(Slot):
    """A store arrives in a mailbox."""

    sentinel: bool = False  # the payload itself looks like the sentinel

    @property
    def writes(self) -> tuple[int, ...]:
        """The mailbox cell."""
        return (self.cell,)

    def run(self, memory: bytearray) -> str | None:
        """Stores the payload; the cell must be armed."""
        found = memory[self.cell]
        memory[self.cell] = EMPTY if self.sentinel else self.call
        if found != EMPTY:
            return f"overwrites the row of call {found}, which nobody has re-armed"
        return None


@dataclass(frozen=True)
class Poll(Slot):
    """A lane waits until its fragment is not the sentinel."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The mailbox cell."""
        return (self.cell,)

    def ready(self, memory: bytes) -> bool:
        """Whether anything has arrived."""
        return memory[self.cell] != EMPTY

    def run(self, memory: bytearray) -> str | None:
        """Compares the payload with that of this call."""
        if memory[self.cell] != self.call:
            return f"reads the row of call {memory[self.cell]}"
        return None


@dataclass(frozen=True)
class Rearm(Slot):
    """A lane stores the sentinel."""

    @property
    def writes(self) -> tuple[int, ...]:
        """The mailbox cell."""
        return (self.cell,)

    def run(self, memory: bytearray) -> str | None:
        """Stores the sentinel; no row of a later call may be there."""
        found = memory[self.cell]
        memory[self.cell] = EMPTY
        if self.call < found < EMPTY:
            return f"clears the row of call {found}, which nobody has read"
        return None


@dataclass(frozen=True)
class Arrive(Step):
    """A cluster counts its arrival: ``atom.inc``, which wraps after ``last``."""

    counter: int
    number: int  # keeps what the count was
    last: int

    @property
    def writes(self) -> tuple[int, ...]:
        """The counter and this cluster's number."""
        return (self.counter, self.number)

    def run(self, memory: bytearray) -> str | None:
        """Takes a number and counts on."""
        count = memory[self.counter]
        memory[self.number] = count
        memory[self.counter] = 0 if count >= self.last else count + 1
        return None


@dataclass(frozen=True)
class Finish(Step):
    """A cluster's end: the one with the right number advances the generation."""

    number: int
    chosen: int
    generation: int
    following: int
    residual: int

    @property
    def writes(self) -> tuple[int, ...]:
        """The number, the generation and the count of clusters that have ended."""
        return (self.number, self.generation, self.residual)

    def run(self, memory: bytearray) -> str | None:
        """Stores the generation of the next call, if it falls to this cluster."""
        memory[self.residual] += 1
        if memory[self.number] == self.chosen:
            memory[self.generation] = self.following
        memory[self.number] = 0  # states that differ in it alone are one from here on
        return None
