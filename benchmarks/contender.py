"""What takes part in a comparison, and the two ways in which it can fail to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Contender", "Mismatch", "Subject", "Unavailable", "expect"]


class Unavailable(Exception):
    """A contender, or what is to be measured, does not exist here; says why."""


class Mismatch(Exception):
    """A contender does other work than it should: wrong values, or another law."""


class Contender(ABC):
    """Someone who does a piece of work. Used in this order: made, checked, timed.

    Attributes:
        name: what it is called in the table.
    """

    name: str

    @abstractmethod
    def make(self) -> None:
        """Gets ready; ImportError or Unavailable, with the reason, where it cannot be had."""

    @abstractmethod
    def check(self) -> None:
        """Raises Mismatch unless the work and its size are what the table says."""

    def inputs(self, calls: int) -> Iterable[Any]:
        """Returns what to hand to each of the next calls; outside the timer."""
        return [None] * calls

    @abstractmethod
    def timed(self) -> Callable[[Any], Any]:
        """Returns the work: called once with each of the inputs, inside the timer."""


@dataclass(frozen=True)
class Subject:
    """How a work makes its own contender, without the others.

    Attributes:
        contender: makes the contender, which is neither made nor checked yet.
        calls: calls in a turn.
    """

    contender: Callable[[], Contender]
    calls: int = 10


def expect(correct: bool, complaint: str) -> None:
    """Raises Mismatch with the complaint unless that is correct."""
    if not correct:
        raise Mismatch(complaint)
