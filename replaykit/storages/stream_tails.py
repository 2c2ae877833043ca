"""The newest stored row of each stream."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from replaykit.episodes.stream_keys import stream_keys
from replaykit.storages.columns import Columns
from replaykit.storages.links import Chains, Links
from replaykit.structure import Path

__all__ = ["StreamTails"]

Array = np.ndarray[Any, Any]

_LEAST_KNOWN: Final = 1024
"""Streams from which on those of which nothing is stored are looked for, to forget them."""


class StreamTails:
    """In which slot the newest row of each stream lies, by the key of the stream.

    Rows may be gone without a word: whether one still is there is told from the key in its slot.

    Args:
        links: what follows what.
        rows, key: where the key of a row lies.
        dtype: that of keys.

    Cost: an entry of a dict for each stream that was written, at most twice as many as there are.
    """

    def __init__(self, links: Links, rows: Columns, key: Path, dtype: np.dtype[Any]) -> None:
        self._links, self._rows, self._key, self._dtype = links, rows, key, dtype
        self._slots: dict[Any, int] = {}
        self._most = _LEAST_KNOWN

    def __len__(self) -> int:
        return len(self._slots)

    def keys(self) -> Any:
        """Streams of which a row is known; some may be gone."""
        return self._slots.keys()

    def found(self, slots: torch.Tensor) -> None:
        """Told which rows there are that nothing follows, from the oldest to the newest."""
        self._slots = dict(zip(self._keys_at(slots).tolist(), slots.tolist(), strict=True))
        self._most = max(_LEAST_KNOWN, 2 * len(self._slots))

    def clear(self) -> None:
        """Told that no row is stored any more."""
        self._slots = {}

    def of(self, found: Chains) -> tuple[Array, torch.Tensor]:
        """Of which streams, by number in ``found``, the newest row is stored, and its slot.

        Nothing follows those rows yet.
        """
        known = self._slots
        slots = np.array([known.get(key, -1) for key in found.keys.tolist()], np.int64)
        at = np.flatnonzero(slots >= 0)
        newest = slots[at]
        if len(at):
            held = self._links.ends(newest)
            held &= self._keys_at(torch.from_numpy(newest)) == found.keys[at]
            if not held.all():
                at, newest = at[held], newest[held]
        return at, torch.from_numpy(newest).to(self._rows.device)

    def note(self, found: Chains, slots: torch.Tensor) -> list[Any] | None:
        """Told of rows that were written to slots ``[K]``.

        Returns:
            The streams that are there, where it has forgotten all others; else None.
        """
        self._slots.update(zip(found.keys.tolist(), slots[found.last].tolist(), strict=True))
        if len(self._slots) <= self._most:
            return None
        # Those that are gone are as many as those that are there: looked for rarely enough.
        keys = np.array(list(self._slots), self._dtype)
        slots = torch.tensor(list(self._slots.values()), device="cpu")
        there = self._keys_at(slots) == keys
        names, at = keys[there].tolist(), slots[torch.from_numpy(there)].tolist()
        self._slots = dict(zip(names, at, strict=True))
        self._most = max(_LEAST_KNOWN, 2 * len(names))
        return list(names)

    def _keys_at(self, slots: torch.Tensor) -> Array:
        return stream_keys(self._rows.gather_keys([self._key], slots)[self._key])
