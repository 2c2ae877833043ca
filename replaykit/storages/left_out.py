"""Where episodes began of which a load into a smaller storage leaves the first rows out."""

from __future__ import annotations

from typing import Any, cast

import torch

from replaykit.episodes import BoundaryRule, CutMarks, EpisodeIndex, InterleavedIndex
from replaykit.schema import Schema
from replaykit.storages.content import Content, Group
from replaykit.storages.indexes import heads_of
from replaykit.storages.ledger import Ledger
from replaykit.structure import Branch, Path

__all__ = ["state_of_kept"]


def state_of_kept(
    content: Content,
    state: dict[str, Any] | None,
    ledger: Ledger,
    kept: torch.Tensor,
    lane_key: Path | None,
) -> dict[str, Any] | None:
    """Returns the state of an episode index (``EpisodeIndexes.state``) of rows of which only some
    are kept.

    Args:
        content: all rows that were saved.
        state: the checked state of their index; None: there was none.
        ledger: theirs.
        kept: slots of the rows that are kept, int64 ``[K]``.
        lane_key: column that tells streams apart, where they lie interleaved.

    Cost: one pass over the columns that bound episodes, and an index of the saved rows, 8 bytes
    each (24 with ``lane_key``), for the time of the call.
    """
    if len(content.groups) != 1 or content.plain or not len(kept):
        return state
    group = content.groups[0]
    root = group.schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        return state
    saved = _SavedRows(content, group, state, ledger, lane_key)
    kind = EpisodeIndex if lane_key is None else InterleavedIndex
    heads = kind(cast(Any, saved), saved.rule).state(kept)
    known = state or {"marks": [], "codes": []}
    return {**known, "heads": heads, "root_flags": True}


class _SavedColumns:
    """The columns that bound episodes, as an index reads those of a storage."""

    def __init__(self, content: Content, group: Group, paths: set[Path], slots: int) -> None:
        self.schema: Schema = group.schema
        self.lanes, self.slots = content.lanes, slots
        self.ndim = 1 + len(content.lanes)
        leaves = group.leaves
        self._leaves = {path: leaves[path][:] for path in paths}
        if not paths:  # only its shape is asked for
            shape = (content.rows, *content.lanes)
            self._leaves[()] = torch.zeros((), dtype=torch.bool, device="cpu").expand(shape)
        self.order = list(self._leaves)

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self._leaves[path]

    def follow_memory(self) -> None:
        """Nobody else has the memory of rows that are being read: it stays where it is."""


class _SavedRows:
    """Saved rows with the face by which an index knows its storage."""

    is_told = False

    def __init__(
        self,
        content: Content,
        group: Group,
        state: dict[str, Any] | None,
        ledger: Ledger,
        lane_key: Path | None,
    ) -> None:
        self.rule = BoundaryRule()
        paths = set(self.rule.bind(group.schema).paths)
        if lane_key is not None:
            paths.add(lane_key)
        self._columns = _SavedColumns(content, group, paths, ledger.slots)
        self.lanes, self.ledger, self.lane_key = content.lanes, ledger, lane_key
        known = state or {"marks": [], "codes": [], "heads": None}
        self.marks = CutMarks(known["marks"], known["codes"])
        self._heads: dict[str, Any] | None = heads_of(known, group.schema)

    @property
    def indexes(self) -> _SavedRows:
        return self

    def require(self) -> _SavedColumns:
        return self._columns

    def take_heads(self) -> dict[str, Any] | None:
        return self._heads

    def saved_streams(self) -> tuple[list[list[int]], bool]:
        return ([] if self._heads is None else self._heads.get("streams", [])), False
