"""Run programs, and find the shortest part of a program that still fails."""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.programs.combinations import Combination, accepted
from tests.programs.operations import OPERATIONS, names_for, place_rows
from tests.programs.session import Session

MEMORY = Path("/dev/shm")
"""A folder in memory, where files are synced at once. No program needs more than 64 KiB of it."""
FULL_CHECKS = 0.12
"""The share of operations after which all that buffers show is compared, not the rows alone."""

Step = tuple[str, int]
"""The name of an operation, and the seed of its random numbers."""


def prepare_process() -> None:
    """Make programs fast in this process.

    Small batches are not worth more threads. Recoverable files collect garbage when they are
    opened, which takes 100 ms with all modules.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@dataclass
class Program:
    """A combination of parts, and operations in order. Both follow from a seed."""

    seed: int
    combination: Combination
    steps: list[Step]


@dataclass
class Difference:
    """The difference, and the lines of the program up to the operation that showed it."""

    program: Program
    lines: list[str]
    error: str
    trace: str

    def __str__(self) -> str:
        head = f"seed {self.program.seed}: {self.program.combination}"
        lines = "\n".join(f"    {line}" for line in self.lines)
        return f"{head}\n{lines}\n  {self.error}\n{self.trace}"


def make_program(
    seed: int, length: int, combinations: Sequence[Combination] | None = None
) -> Program:
    """Return the program of a seed.

    Consecutive seeds take the combinations in turn, in an order that mixes them. First come those
    that together have every sampler and every writer over every storage: few combinations have
    lists, and very few a `ConsumingSampler`.
    """
    found = accepted() if combinations is None else combinations
    turn, place = divmod(seed, len(found))
    order = list(range(len(found)))
    random.Random(turn).shuffle(order)
    first: dict[tuple[str, str], int] = {}
    for number in order:
        c = found[number]
        first.setdefault((c.storage, c.sampler), number)
        first.setdefault((c.storage, c.writer), number)
    order = list(dict.fromkeys([*first.values(), *order]))
    combination = found[order[place]]
    rng = random.Random(f"program {seed}")
    names, weights = names_for(combination)
    chosen = rng.choices(names, weights, k=length)
    return Program(seed, combination, [(name, rng.randrange(1 << 30)) for name in chosen])


def run(program: Program) -> Difference | None:
    """Run a program; return what differs."""
    folder = Path(tempfile.mkdtemp(prefix="program-", dir=MEMORY if MEMORY.is_dir() else None))
    lines: list[str] = []
    session = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session = Session(program.combination, folder, program.seed)
            lines = session.lines
            if program.combination.writer == "immutable":
                steps = program.combination.capacity // program.combination.lanes
                place_rows(session, random.Random(program.seed), list(range(steps - 1)))
            for name, seed in program.steps:
                rng = random.Random(seed)
                session.handle = rng.choice(session.handles)
                OPERATIONS[name].act(session, rng)
                session.check(full=rng.random() < FULL_CHECKS)
            session.check(full=True)
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
        return Difference(program, list(lines), first, traceback.format_exc(limit=-3))
    finally:
        if session is not None:
            session.close()
        shutil.rmtree(folder, ignore_errors=True)
    return None


def shrink(difference: Difference) -> Difference:
    """Return the failure of a shorter program: cut at the failure, then without single steps."""
    best = difference
    program = difference.program

    def attempt(steps: list[Step]) -> bool:
        nonlocal best, program
        made = Program(program.seed, program.combination, steps)
        found = run(made)
        if found is None:
            return False
        best, program = found, made
        return True

    low, high = 0, len(program.steps)
    while high - low > 1:  # the shortest prefix that fails
        middle = (low + high) // 2
        if run(Program(program.seed, program.combination, program.steps[:middle])) is None:
            low = middle
        else:
            high = middle
    attempt(program.steps[:high])
    changed = True
    while changed:
        changed = False
        for at in reversed(range(len(program.steps) - 1)):
            changed |= attempt(program.steps[:at] + program.steps[at + 1 :])
    return best


def run_seed(
    seed: int, length: int, combinations: Sequence[Combination] | None = None
) -> str | None:
    """Run the program of a seed; return the shortest failing program as text, or None."""
    found = run(make_program(seed, length, combinations))
    return None if found is None else str(shrink(found))
