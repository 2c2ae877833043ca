"""What a plan must be before the first row is written, whoever found the episodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError

__all__ = ["check_plan"]

_DIGITS: Final = "0123456789"


def check_plan(plan: Plan, sources: Sources) -> None:
    """Checks the rows of every episode against the law of its layout, and the order of groups.

    Cost: O(E), some 0.5 us for each group.

    Raises:
        CorpusError: the groups of a file are not in natural order (rule V35); names two of them.
        RuntimeError: episodes have other rows than their layout gives them, or these do not
            follow one another (rule V34): a fault of this engine, or of a finder.
    """
    for index, spans in plan.spans.by_file().items():
        groups = (plan.spans.groups[at] for at in spans)
        for group, following in pairwise(groups):
            if not _follows(group, following):
                raise CorpusError(
                    f"{sources.files[index].path}: {following}: comes after {group}, but the "
                    "episodes of a file are in natural order of their names [V35]"
                )
    episodes = plan.episodes
    records, rows, starts = (episodes.column(name) for name in ("records", "rows", "start"))
    law = records - plan.layout.lost + episodes.column("is_open")
    wrong = (rows != law) | (rows < 1) | (starts != np.cumsum(rows) - rows)
    if wrong.any() or int(rows.sum()) != plan.rows:
        at = int(np.argmax(wrong)) if wrong.any() else len(episodes) - 1
        found = episodes[at]
        raise RuntimeError(
            f"{sources.files[found.file].path}: {found.name}: {found.records} records are rows "
            f"{found.start} to {found.start + found.rows - 1} of {plan.rows}, where the layout "
            f"{plan.layout.name!r} makes {int(law[at])} rows of them, after those before [V34]"
        )


def _follows(group: str, following: str) -> bool:
    """Whether a name comes after another one in natural order."""
    # Nearly all names differ only in the number at their end, of which this takes a fifth.
    heads = group.rstrip(_DIGITS), following.rstrip(_DIGITS)
    begin = len(heads[0])
    if heads[0] == heads[1] and "0" not in (group[begin : begin + 1], following[begin : begin + 1]):
        return (len(group), group) < (len(following), following)
    return natural_key(group) < natural_key(following)
