"""Which calls are made, and the command that repeats them."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mhcgen import reference
from mhcgen.errors import MhcgenError
from mhcgen.token_list import parse_tokens
from mhcgen.verify.subject import Subject

CALLS = len(reference.VARIANTS)
STRESS_CALLS = 6
STRESS_TOKENS = (1, 2, 3, 5)
TORCHRUN = "python -m torch.distributed.run --nproc-per-node"


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        archs: The architectures; all, if empty.
        transports: The transports; all, if empty.
        tokens: The sizes of calls, such as ``1,3,64``; sizes that suit the package, if
            empty.
        calls: Calls of a case; a number that shows everything, if None.
        seed: The first seed.
        stress: The number of seeds to run under stress; 0 for no stress.
    """

    archs: Sequence[str] = ()
    transports: Sequence[str] = ()
    tokens: str = ""
    calls: int | None = None
    seed: int = 0
    stress: int = 0

    def sizes(self, subject: Subject) -> tuple[int, ...]:
        """The sizes of calls.

        Raises:
            MhcgenError: One is no number, or no call can have so many tokens.
        """
        sizes = parse_tokens(self.tokens) if self.tokens else []
        for m in sizes:
            if m > subject.capacity:
                raise MhcgenError(
                    f"--tokens {m}: a call of {subject.name} has 1 to "
                    f"{subject.capacity} tokens (capacity.max_tokens)"
                )
        return tuple(sizes)


@dataclass(frozen=True)
class Case:
    """Some calls of a package.

    Attributes:
        arch: The architecture of the kernels.
        transport: How publish reaches the other ranks.
        tokens: The tokens of each call.
        seed: What the inputs are drawn from; the scheduler's seed under stress.
        stress: Whether the calls are in flight at once, under the adversary.
        drawn_from: The sizes that those of the calls were drawn from, under stress.
        device: ``cpu``, where the emulator runs the kernels, or ``cuda``.
        processes: Those that play the ranks; one may play all.
    """

    arch: str
    transport: str
    tokens: tuple[int, ...]
    seed: int
    stress: bool = False
    drawn_from: tuple[int, ...] = ()
    device: str = "cpu"
    processes: int = 1

    def command(self, source: Path) -> str:
        """The command that repeats the case."""
        sizes = ",".join(map(str, self.drawn_from or sorted(set(self.tokens))))
        words = ["mhcgen"]
        if self.processes > 1:
            words = [*TORCHRUN.split(), str(self.processes), "-m", "mhcgen"]
        words += ["verify", str(source)]
        on_cuda = self.device == "cuda"
        words += ["--device", "cuda"] if on_cuda else ["--arch", self.arch]
        words += ["--transport", self.transport, "--tokens", sizes]
        words += ["--calls", str(len(self.tokens)), "--seed", str(self.seed)]
        return shlex.join(words + ["--stress", "1"] * self.stress)


def default_tokens(subject: Subject, arch: str) -> tuple[int, ...]:
    """One token, three, and a call whose last token group is partial."""
    groups = [group for _, group in subject.token_groups[arch] if group > 1]
    grouped = [first_partial(subject, arch, group) for group in groups[:1]]
    return tuple(sorted({min(m, subject.capacity) for m in (1, 3, *grouped)}))


def first_partial(subject: Subject, arch: str, group: int) -> int:
    """The smallest call of a token group that does not fill its last cluster."""
    first = 1
    for max_tokens, size in subject.token_groups[arch]:
        if size == group:
            for tokens in range(first, max_tokens + 1):
                if tokens % group:
                    return tokens
        first = max_tokens + 1
    return subject.capacity


def cases(
    subject: Subject,
    options: Options,
    archs: Sequence[str],
    transports: Sequence[str],
    device: str = "cpu",
    processes: int = 1,
) -> Iterator[Case]:
    """The cases to run: each makes calls of one size, or under stress of changing size.

    Args:
        subject: The package.
        options: What was asked for.
        archs: The architectures.
        transports: The transports.
        device: Where the kernels run.
        processes: Those that play the ranks.
    """
    tokens = options.sizes(subject)
    for arch, transport in itertools.product(archs, transports):
        if options.stress:
            sizes = tokens or tuple(m for m in STRESS_TOKENS if m <= subject.capacity)
            for seed in range(options.seed, options.seed + options.stress):
                rng = np.random.default_rng(seed)
                drawn = rng.choice(sizes, options.calls or STRESS_CALLS).tolist()
                yield Case(arch, transport, tuple(drawn), seed, True, sizes)
            continue
        for m in tokens or default_tokens(subject, arch):
            yield Case(
                arch,
                transport,
                (m,) * (options.calls or CALLS),
                options.seed,
                device=device,
                processes=processes,
            )


def check_choice(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Makes sure that a package has what is asked for.

    Raises:
        MhcgenError: It has not.
    """
    for value in given:
        if value not in known:
            raise MhcgenError(
                f"{option} {value!r}: the package has {', '.join(known)}; choose one "
                "of these"
            )
