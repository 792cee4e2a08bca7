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

    @property
    def wakes(self) -> bool:
        """Whether the step may make others ready that share a cell with it."""
        return False

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
    residual: int | None  # counts the blocks that wrote it
    blocks: int

    @property
    def reads(self) -> tuple[int, ...]:
        """The generation and the residual."""
        return (self.cell,) if self.residual is None else (self.cell, self.residual)

    def run(self, memory: bytearray) -> str | None:
        """Compares both with what they must be in this call."""
        if memory[self.cell] != self.expected:
            return f"reads generation {memory[self.cell]}, not {self.expected}"
        if self.residual is not None and memory[self.residual] != self.blocks:
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
    def wakes(self) -> bool:
        """A poll may wait for it."""
        return True

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
    """A block counts itself: ``atom.inc``, which wraps after ``last``.

    If ``advance`` is given, the last one stores the generation of the next call there.
    """

    counter: int
    turn: int  # keeps whether the count was the chosen one
    last: int
    chosen: int
    advance: tuple[int, int] | None = None  # the cell of the generation, and the next

    @property
    def writes(self) -> tuple[int, ...]:
        """The counter and whose turn it is, and the generation."""
        cells = (self.counter, self.turn)
        return cells if self.advance is None else (*cells, self.advance[0])

    def run(self, memory: bytearray) -> str | None:
        """Takes a number and counts on."""
        count = memory[self.counter]
        memory[self.turn] = count == self.chosen
        memory[self.counter] = 0 if count >= self.last else count + 1
        if self.advance is not None and count == self.last:
            cell, following = self.advance
            memory[cell] = following
        return None


@dataclass(frozen=True)
class Finish(Step):
    """A block's end: the one whose turn it is advances the generation."""

    turn: int
    generation: int
    following: int
    residual: int

    @property
    def writes(self) -> tuple[int, ...]:
        """The turn, the generation and the count of blocks that have ended."""
        return (self.turn, self.generation, self.residual)

    def run(self, memory: bytearray) -> str | None:
        """Stores the generation of the next call, if it falls to this block."""
        memory[self.residual] += 1
        if memory[self.turn]:
            memory[self.generation] = self.following
        memory[self.turn] = 0  # states that differ in it alone are one from here on
        return None


@dataclass(frozen=True)
class Enter(Step):
    """A cluster starts, once there is room for it on its device."""

    running: int  # counts the clusters that run
    room: int

    @property
    def writes(self) -> tuple[int, ...]:
        """The count of clusters that run."""
        return (self.running,)

    def ready(self, memory: bytes) -> bool:
        """Whether one more cluster can run."""
        return memory[self.running] < self.room

    def run(self, memory: bytearray) -> str | None:
        """Takes a place."""
        memory[self.running] += 1
        return None


@dataclass(frozen=True)
class Leave(Step):
    """A cluster is gone."""

    running: int

    @property
    def wakes(self) -> bool:
        """A cluster may wait for its place."""
        return True

    @property
    def writes(self) -> tuple[int, ...]:
        """The count of clusters that run."""
        return (self.running,)

    def run(self, memory: bytearray) -> str | None:
        """Gives its place back."""
        memory[self.running] -= 1
        return None
