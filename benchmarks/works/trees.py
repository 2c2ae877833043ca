"""Trees alone, called from Python: 256 draws and 256 updates, and how they grow."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contender import Contender, Subject, Unavailable, expect
from benchmarks.harness import Times, ready, take_turns
from benchmarks.laws import expect_frequencies
from benchmarks.limits import tree_limit
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.setting import BATCH, Setting
from replaykit.priorities import SumSegmentTree

__all__ = ["BinaryTree", "SumTree", "asked", "run", "subjects"]

YARDSTICK = "binary tree"
GROWTH = 10
"""How many times as many leaves the larger tree has."""


def _title(work: str, leaves: int) -> str:
    return f"tree: {BATCH} {work}, {leaves:,}"


def _smaller(leaves: int) -> str:
    return f"replaykit, {leaves:,}"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    rows = setting.rows
    return {
        _title(work, leaves): targets
        for work in WORKS
        for leaves, targets in (
            (rows, (Target(YARDSTICK, 1 / 4),)),
            (rows * GROWTH, (Target(_smaller(rows), 1.7),)),
        )
    }


class Tree(ABC):
    """A tree with a weight for each leaf."""

    name: str

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves

    @abstractmethod
    def load(self, weights: torch.Tensor) -> None: ...

    @abstractmethod
    def find(self, prefix: torch.Tensor) -> torch.Tensor:
        """Returns the leaves in which running sums pass these values."""

    @abstractmethod
    def total(self) -> float: ...

    @abstractmethod
    def drawer(self) -> Callable[[], Any]:
        """Returns what draws leaves by weight: them, or a tuple that begins with them."""

    @abstractmethod
    def updater(self) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        """Returns what sets the weights of leaves."""


class SumTree(Tree):
    """replaykit's tree."""

    name = SUBJECT

    def __init__(self, leaves: int) -> None:
        super().__init__(leaves)
        self.tree = SumSegmentTree(leaves, dtype=torch.float32)

    def load(self, weights: torch.Tensor) -> None:
        self.tree.load(weights)

    def find(self, prefix: torch.Tensor) -> torch.Tensor:
        return self.tree.find_prefix(prefix)

    def total(self) -> float:
        return float(self.tree.total)

    def drawer(self) -> Callable[[], Any]:
        return partial(self.tree.draw, BATCH)

    def updater(self) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        return self.tree.update


@cache
def _library() -> ctypes.CDLL:
    """Return the compiled binary tree."""
    source = Path(__file__).parents[1] / "binary_tree.cpp"
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/binary_tree.so"
        command = ["c++", "-std=c++17", "-O3", "-shared", "-fPIC", str(source), "-o", made]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"no C++ compiler builds it: {error}") from None
        library = ctypes.CDLL(made)
    library.tree_new.restype = ctypes.c_void_p
    library.tree_total.restype = ctypes.c_double
    return library


class BinaryTree(Tree):
    """A binary tree in C++, walked from the root for each draw and to the root for each update.

    It is handed what replaykit's own tree is: tensors, from Python, in one call for all 256.
    """

    name = YARDSTICK

    def __init__(self, leaves: int) -> None:
        super().__init__(leaves)
        self.core = _library()
        self.tree = ctypes.c_void_p(self.core.tree_new(ctypes.c_int64(leaves)))
        weakref.finalize(self, self.core.tree_delete, self.tree)

    def load(self, weights: torch.Tensor) -> None:
        self._update(torch.arange(self.leaves), weights)

    def find(self, prefix: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(prefix), dtype=torch.int64)
        at, to = ctypes.c_void_p(prefix.data_ptr()), ctypes.c_void_p(found.data_ptr())
        self.core.tree_find(self.tree, at, ctypes.c_int64(len(prefix)), to)
        return found

    def total(self) -> float:
        return float(self.core.tree_total(self.tree))

    def _draw(self) -> torch.Tensor:
        return self.find(torch.rand(BATCH, dtype=torch.float64).mul_(self.total()))

    def drawer(self) -> Callable[[], Any]:
        return self._draw

    def _update(self, index: torch.Tensor, weights: torch.Tensor) -> None:
        at, to = ctypes.c_void_p(index.data_ptr()), ctypes.c_void_p(weights.data_ptr())
        self.core.tree_update(self.tree, at, to, ctypes.c_int64(len(index)))

    def updater(self) -> Callable[[torch.Tensor, torch.Tensor], Any]:
        return self._update


class _OnTree(Contender):
    """A tree of that many leaves, at work."""

    def __init__(self, kind: Callable[[int], Tree], name: str, leaves: int) -> None:
        self.name = name
        self.kind = kind
        self.leaves = leaves

    def make(self) -> None:
        self.tree = self.kind(self.leaves)

    def check(self) -> None:
        """Finds what a running sum finds, before and after updates; draws by weight.

        Weights are whole numbers, of which sums are exact: the tree has no room to differ.
        """
        tree = self.tree
        draw = torch.Generator().manual_seed(self.leaves)
        weights = torch.randint(8, (self.leaves,), generator=draw).float()
        tree.load(weights)
        for turn in range(3):
            ends = weights.double().cumsum(0)
            expect(tree.total() == float(ends[-1]), f"total {tree.total()} is not {ends[-1]}")
            prefix = torch.randint(int(ends[-1]), (4 * BATCH,), generator=draw).double()
            right = torch.searchsorted(ends, prefix, right=True)
            expect(tree.find(prefix).equal(right), f"other leaves are found in turn {turn}")
            # Distinct ones: which of equal indices wins is not the question here.
            index = torch.randperm(self.leaves, generator=draw)[: min(BATCH, self.leaves)]
            values = torch.randint(8, (len(index),), generator=draw).float()
            weights[index] = values
            tree.updater()(index, values)
        parts = min(64, self.leaves)
        part = torch.arange(self.leaves) * parts // self.leaves
        shares = torch.zeros(parts, dtype=torch.float64).index_add_(0, part, weights.double())
        counts = torch.zeros(parts, dtype=torch.int64)
        draw_leaves = tree.drawer()
        for _ in range(200):
            drawn = draw_leaves()
            index = drawn[0] if isinstance(drawn, tuple) else drawn
            expect(len(index) == BATCH, f"{len(index)} draws")
            expect(bool((weights[index] > 0).all()), "a leaf without weight was drawn")
            counts += part[index].bincount(minlength=parts)
        expect_frequencies(counts, shares)
        tree.load(torch.rand(self.leaves, generator=draw) + 1e-3)


class Drawing(_OnTree):
    """256 leaves by weight."""

    def timed(self) -> Callable[[Any], Any]:
        draw = self.tree.drawer()
        return lambda _: draw()


class Finding(_OnTree):
    """256 leaves by weight, of which the random numbers are given: the tree and nothing else."""

    def inputs(self, calls: int) -> Iterable[Any]:
        return list(torch.rand(calls, BATCH, dtype=torch.float64).mul_(self.tree.total()))

    def timed(self) -> Callable[[Any], Any]:
        return self.tree.find


class Updating(_OnTree):
    """256 new weights at random leaves."""

    def inputs(self, calls: int) -> Iterable[Any]:
        index = torch.randint(self.leaves, (calls, BATCH))
        return list(zip(index, torch.rand(calls, BATCH) + 1e-3, strict=True))

    def timed(self) -> Callable[[Any], Any]:
        update = self.tree.updater()
        return lambda given: update(*given)


WORKS: dict[str, type[_OnTree]] = {
    "draws": Drawing,
    "finds": Finding,
    "updates": Updating,
}


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    return {
        _title(work, leaves): Subject(partial(kind, SumTree, SUBJECT, leaves))
        for work, kind in WORKS.items()
        for leaves in (setting.rows, setting.rows * GROWTH)
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    return [line for work, kind in WORKS.items() for line in _measure(setting, work, kind)]


def _measure(setting: Setting, work: str, kind: type[_OnTree]) -> list[Line]:
    small, large = setting.rows, setting.rows * GROWTH
    subject = kind(SumTree, f"{SUBJECT} {small}", small)
    others = [
        kind(SumTree, f"{SUBJECT} {large}", large),
        kind(BinaryTree, f"{YARDSTICK} {small}", small),
        kind(BinaryTree, f"{YARDSTICK} {large}", large),
    ]
    found, absent = ready(subject, others)
    times = take_turns(found, rounds=setting.rounds)
    lines = []
    targets = asked(setting)
    for leaves in (small, large):
        title = _title(work, leaves)
        mine: dict[str, Times] = {}
        missing = {}
        for name in (SUBJECT, YARDSTICK):
            if (key := f"{name} {leaves}") in times:
                mine[name] = times[key]
            else:
                missing[name] = absent[key]
        if leaves == large:
            mine[_smaller(small)] = times[subject.name]
        limit = setting.limit(partial(tree_limit, queries=BATCH, leaves=leaves))
        lines += lines_of_turns(title, mine, missing, targets[title], limit=limit)
    # The smaller tree has less to do: its share of the larger one's limit means nothing.
    return [
        replace(line, share=None, limit=None) if line.name == _smaller(small) else line
        for line in lines
    ]
