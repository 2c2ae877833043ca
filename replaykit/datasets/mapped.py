"""A published data set as a storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from tensordict import TensorDict

from replaykit.datasets.opened import Published, open_directory
from replaykit.datasets.selection import rows_of
from replaykit.schema import Rows, Schema, take_apart
from replaykit.storages import TensorStorage
from replaykit.storages.beside import grow_in_memory
from replaykit.storages.columns import Columns
from replaykit.storages.once import OnceColumns
from replaykit.storages.pairs import pairs_of
from replaykit.storages.scattered import ScatteredColumns
from replaykit.structure import Path
from replaykit.ted import format_key

__all__ = ["MappedStorage"]


def _following(stored: Columns, published: Published, episodes: torch.Tensor | None) -> OnceColumns:
    """Returns columns that take what follows a row from the row after it, and at ends of episodes
    from what the data set has of these."""
    lengths, finals = published.episodes["length"], published.finals
    if episodes is not None:
        lengths = lengths[episodes]
        first, last = int(episodes[0]), int(episodes[-1])
        is_run = len(episodes) == last + 1 - first
        at = slice(first, last + 1) if is_run else episodes
        finals = {key: value[at] for key, value in finals.items()}
    leaves = {**published.columns, **{key: published.columns[key[1:]] for key in finals}}
    pairs = pairs_of(
        Schema(take_apart(_together(leaves), 1).root), tuple(key[1:] for key in finals)
    )
    if isinstance(stored, ScatteredColumns):
        rows = stored.part(list(pairs.stored.leaves))
    else:
        rows = Columns(
            pairs.stored, stored.tensors, 1, mapped=stored.advise, changes=stored.changes
        )
    found = OnceColumns(pairs, rows, grow_in_memory(rows.device))
    found.adopt(lengths.cumsum(0) - 1, Columns(pairs.beside, finals, 1))
    return found


def _together(columns: Mapping[Path, torch.Tensor]) -> TensorDict:
    """Returns columns as one TensorDict with a batch dimension for the first of theirs."""
    data = TensorDict({}, batch_size=[len(next(iter(columns.values())))])
    for key, value in columns.items():
        data.set(key, value)
    return data


class MappedStorage(TensorStorage):
    """The rows of a published data set, mapped copy-on-write.

    Opening costs no read of the data. Edits are seen by this process only and never reach the
    disk. A copy of a storage without edits, as another process gets it, maps the same files.

    Args:
        published: the opened data set.
        episodes: positions of the episodes to serve, in order; ``None`` for all. Where they do not
            follow one another, their rows are read where they lie all the same, but what would be
            views (``storage[a:b]``, ``column``) are copies; see `ScatteredColumns`.
    """

    def __init__(self, published: Published, episodes: torch.Tensor | None = None) -> None:
        data = TensorDict({}, batch_size=published.batch_size)
        for key, value in published.columns.items():
            data.set(key, value)
        starts, lengths = torch.zeros(1, dtype=torch.int64), torch.tensor([published.rows])
        if episodes is not None:
            starts, lengths = rows_of(published, episodes)
        first = int(starts[0]) if len(starts) == 1 else 0
        super().__init__(data[first : first + int(lengths.sum())])
        stored = self.require()
        stored.advise = True
        if len(starts) > 1:
            leaves = take_apart(data, 1).leaves
            everything = Columns(stored.schema, leaves, 1, mapped=True)
            stored = self._columns = ScatteredColumns(everything, starts, lengths)
            stored.changes.lend()  # as of all of them
            self._adopt(stored)
        if published.finals and isinstance(stored, Columns):
            self._columns = _following(stored, published, episodes)
            self._adopt(self._columns)
        self.published = published
        self.chosen = episodes
        self._edited = False

    @property
    def episode_table(self) -> TensorDict:
        """The episodes that are served, a TensorDict ``[E]``; ``start`` counts the rows here."""
        table = self.published.episodes
        if self.chosen is None:
            return table
        table = table[self.chosen]
        lengths = table["length"]
        return table.set("start", lengths.cumsum(0) - lengths)

    @property
    def identity(self) -> dict[str, Any] | None:
        """The data set and which of its episodes, as long as nobody has edited them here."""
        if self._edited:
            return None
        chosen = None if self.chosen is None else self.chosen.clone()
        return {"content": self.published.manifest.content_id(), "episodes": chosen}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        self._edited = True
        super().set(cursor, data, set_cursor=set_cursor)

    def write(self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice) -> None:
        self._edited = True
        super().write(slots, rows, kept)

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        self._edited = True
        super().edit(index, value, time_dim=time_dim)

    def edit_columns(
        self,
        values: Mapping[Path, Any],
        index: Any = None,
        *,
        time_dim: int = 0,
        adds: bool = False,
    ) -> None:
        self._edited = True
        super().edit_columns(values, index, time_dim=time_dim, adds=adds)

    def _check_addable(self, paths: Collection[Path]) -> None:
        raise RuntimeError(
            f"key {format_key(next(iter(paths)))}: expected a stored key, since a data set has "
            "the columns that were published; preprocess(fn, dest=...) makes one with others"
        )

    def load_content(self, content: Any, target: Any, rows: torch.Tensor | None) -> None:
        self._edited = True
        super().load_content(content, target, rows)

    def for_readers(self) -> Any:
        return super().for_readers() if self._edited else self

    def __getstate__(self) -> dict[str, Any]:
        path = self.published.path
        if self._edited:
            return {**super().__getstate__(), "published": None}
        content = self.published.manifest.content_id()
        return {
            "path": str(path),
            "content": content,
            "chosen": self.chosen,
            "ledger": self.ledger.state(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "path" not in state:
            super().__setstate__(state)
            return
        published = open_directory(FilePath(state["path"]))
        if published.manifest.content_id() != state["content"]:
            raise RuntimeError(
                f"{state['path']} holds another version of the data set than the one that was "
                "handed over; open it anew"
            )
        self.__init__(published, state["chosen"])  # type: ignore[misc]
        self.ledger.restore(state["ledger"], None)
