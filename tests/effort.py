"""How many cases tests of chance draw, and for how long tests of threads run.

Less in a run without tests that are marked `long`, so that `make test` takes minutes: a third of
the examples, and always the same ones, and of products of parameters those that cover them. Any
other run draws new examples, as many as a test names, and has all products.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import settings

__all__ = ["cases", "left_out", "limit_examples", "seconds", "short"]

_PART = 3
_limited = set[Any]()

short = False


def seconds(full: float) -> float:
    """Return for how long a test of threads runs, which in a long run takes ``full`` seconds."""
    return full / _PART if short else full


def limit_examples(item: Any) -> None:
    """Give a test of hypothesis its part of the examples, if the run is short."""
    test = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if short and own is not None and test not in _limited:
        _limited.add(test)  # there is an item for each combination of its parameters
        test._hypothesis_internal_use_settings = settings(
            own, max_examples=-(-own.max_examples // _PART), derandomize=True, database=None
        )


def cases(full: int) -> int:
    """Return how many cases a test draws that draws ``full`` of them in a long run."""
    return -(-full // _PART) if short else full


# -- products of parameters -----------------------------------------------------------------------


def left_out(items: list[Any]) -> set[Any]:
    """Return the items, of tests marked ``covering(n)``, that a short run does without.

    Every combination of values of any n parameters stays in some item.
    """
    if not short:
        return set()
    groups: dict[Any, list[tuple[Any, set[Any]]]] = {}
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark is not None:
            values = [(name, id(value)) for name, value in item.callspec.params.items()]
            covered = set(itertools.combinations(sorted(values), *mark.args))
            groups.setdefault(item.function, []).append((item, covered))
    dropped = set[Any]()
    for group in groups.values():
        random.Random(0).shuffle(group)
        missing = set().union(*(covered for _, covered in group))
        while missing:
            best = max(group, key=lambda each: len(each[1] & missing))
            missing -= best[1]
            group.remove(best)
        dropped.update(item for item, _ in group)
    return dropped
