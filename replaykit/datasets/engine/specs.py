"""The columns of a plan."""

from __future__ import annotations

from typing import Final

import torch

from replaykit.datasets.columns import ColumnSpec, torch_dtype
from replaykit.datasets.engine.plan import Plan, PlannedLeaf
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["ALWAYS_KEYS", "OBSERVED_KEY", "column_specs", "presence", "presence_key"]

OBSERVED_KEY: Final[Key] = ("next", "observed")
"""False on the rows whose next state was not recorded; a column only where there are such rows."""
ALWAYS_KEYS: Final[tuple[Key, ...]] = (
    *((name,) for name in DEFAULT_DONE_KEYS),
    *(("next", name) for name in DEFAULT_DONE_KEYS),
    OBSERVED_KEY,
    ("episode",),
    ("seed",),
)
"""The columns that no leaf fills; `OBSERVED_KEY` only where it is needed."""


def presence_key(target: Key) -> Key:
    """Returns the key that tells values of a column from the zeros of episodes that lack it."""
    return ("present", *(target[1:] if target[0] == "next" else target))


def column_specs(plan: Plan) -> list[ColumnSpec]:
    """Returns the columns of a plan: those that leaves fill, then flags and ids.

    Raises:
        TypeError: torch has no dtype for a leaf.
        CorpusError: two fields fill one column, or one a column below that of the other.
    """
    specs: dict[Key, ColumnSpec] = {}
    sources: dict[Key, str] = {}

    def add(
        key: Key, shape: tuple[int, ...], dtype: torch.dtype, source: str = "the engine"
    ) -> None:
        if key in specs:
            raise CorpusError(
                f"layout {plan.layout.name!r}: two of its fields fill the column {key}: "
                f"{sources[key]} and {source} [V10]"
            )
        specs[key], sources[key] = ColumnSpec(key, shape, dtype), source

    for leaf in plan.leaves:
        for target in leaf.targets:
            add(target.key, leaf.shape, torch_dtype(leaf.stored), repr(leaf.path))
    for key in presence(plan):
        add(key, (), torch.bool)
    for name in DEFAULT_DONE_KEYS:
        add((name,), (1,), torch.bool)
        add(("next", name), (1,), torch.bool)
    if plan.has_unrecorded:
        add(OBSERVED_KEY, (1,), torch.bool)
    for name in ("episode", "seed"):
        add((name,), (), torch.int64)
    for key in specs:
        above = next((key[:size] for size in range(1, len(key)) if key[:size] in specs), None)
        if above is not None:
            raise CorpusError(
                f"layout {plan.layout.name!r}: {sources[above]} fills the column {above}, and "
                f"{sources[key]} the column {key} below it; give one of them another key [V10]"
            )
    return list(specs.values())


def presence(plan: Plan) -> dict[Key, PlannedLeaf]:
    """Returns the columns that say where a leaf is there, for leaves that some episodes lack."""
    return {
        presence_key(target.key): leaf
        for leaf in plan.leaves
        if leaf.is_padded
        for target in leaf.targets
    }
