"""Whole episodes copied out of a storage: what transforms read once they have been edited."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes import EndReason
from replaykit.structure import Leaf, Node, Path, leaf_paths
from replaykit.ted import DEFAULT_DONE_KEYS, Key, end_flags, format_key
from replaykit.transforms.history import Surroundings

__all__ = ["EditedEpisodes", "check_flags", "end_reasons", "same_rows"]

Array = np.ndarray[Any, Any]

_FLAGS: tuple[Key, ...] = tuple(("next", name) for name in DEFAULT_DONE_KEYS)
_DONE, _TRUNCATED, _TERMINATED = _FLAGS


class EditedEpisodes(Surroundings):
    """Surroundings of the rows of a batch in copies of their episodes; needs no storage, no lock.

    Each episode is a lane of its own, in which time is the number of steps since it began.

    Args:
        root: what a row is.
        leaves: ``[n, *F]`` each, episode after episode.
        counts: int64 ``[E]``, rows of each episode.
        missing: int64 ``[E]``, how many rows of it went before those.
        reason, head: int64 ``[E]``, how they end and begin.
        generator: where randomness comes from.
    """

    def __init__(
        self,
        root: Node,
        leaves: dict[Path, torch.Tensor],
        counts: Array,
        missing: Array,
        reason: Array,
        head: Array,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.root, self.leaves = root, leaves
        self.keys = leaves
        self.counts, self.missing = counts, missing
        self.starts = np.cumsum(counts) - counts
        self.reasons, self.heads = reason, head
        self.generator = generator

    def lie_at(
        self, time: Array, lane: Array, window: Array, mask: Array | None, alone: bool
    ) -> None:
        """Sets where the rows of the batch lie; int64 ``[B]``."""
        self.time, self.lane = time, lane
        self.first = self.missing[lane]
        self.last = self.first + self.counts[lane] - 1
        self.begin = np.zeros_like(time)
        self.head, self.reason = self.heads[lane], self.reasons[lane]
        self.window, self.mask, self.alone = window, mask, alone

    def stored(self) -> int:
        return int(self.counts.sum())

    def any_rows(self, number: Array) -> tuple[Array, Array]:
        lane = np.searchsorted(self.starts, number, side="right") - 1
        return number - self.starts[lane] + self.missing[lane], lane

    def numbers(self, time: Array, lane: Array) -> Array:
        """Where rows lie in the leaves."""
        return self.starts[lane] + time - self.missing[lane]

    def read(self, keys: list[Path], time: Array, lane: Array) -> dict[Path, torch.Tensor]:
        unknown = [format_key(key) for key in keys if key not in self.leaves]
        if unknown:
            known = ", ".join(map(format_key, self.leaves))
            raise KeyError(f"expected the keys {', '.join(unknown)}; episodes have {known}")
        number = torch.from_numpy(self.numbers(time, lane).reshape(-1))
        found = {}
        for key in keys:
            leaf = self.leaves[key]
            values = leaf.index_select(0, number.to(leaf.device))
            found[key] = values.view(*time.shape, *leaf.shape[1:])
        return found


def same_rows(expected: Node, found: Node, episode: int) -> None:
    """Raises ValueError where edited episodes differ in keys, shapes or dtypes."""
    first: dict[Path, Leaf] = dict(leaf_paths(expected))
    own: dict[Path, Leaf] = dict(leaf_paths(found))
    for path in dict.fromkeys([*first, *own]):
        if first.get(path) != own.get(path):
            raise ValueError(
                f"key {format_key(path)}: expected {first.get(path, 'nothing')} as in the other "
                f"episodes, got {own.get(path, 'nothing')} in edited episode {episode}"
            )


def _flags(leaves: dict[Path, torch.Tensor]) -> dict[Key, Array]:
    """Flags that there are, bool ``[n]``: set where any number of a row is.

    Those at the root that end episodes come under their names below ``next``.
    """
    found: dict[Key, Array] = {}
    for key in end_flags(leaves):
        leaf = leaves[key]
        if leaf.dtype is not torch.bool:
            raise TypeError(f"key {format_key(key)}: expected bool flags, got {leaf.dtype}")
        flag = leaf.flatten(1).any(1).cpu().numpy() if leaf.ndim > 1 else leaf.numpy()
        found["next", key[-1]] = flag
    return found


def check_flags(leaves: dict[Path, torch.Tensor], rows: Array) -> None:
    """Checks the flags of episodes of so many rows each.

    Raises:
        TypeError: flags that are not bool. ValueError: ``done`` is not ``terminated | truncated``,
            or one of them is set before the last row of an episode.
    """
    flags = _flags(leaves)
    starts = np.cumsum(rows) - rows
    ended = np.zeros(int(rows.sum()), bool)
    for flag in flags.values():
        ended |= flag
    last = np.zeros_like(ended)
    last[starts + rows - 1] = True
    _refuse(ended & ~last, rows, starts, "flags in the last row of an episode alone")
    done = flags.get(_DONE)
    if done is None:
        return
    reasons = [flags[key] for key in (_TERMINATED, _TRUNCATED) if key in flags]
    # With one of both stored, what else ends an episode is told by `done` alone.
    wrong = done != (reasons[0] | reasons[1]) if len(reasons) == 2 else ended & ~done
    _refuse(wrong, rows, starts, "('next', 'done') as terminated | truncated")


def _refuse(wrong: Array, rows: Array, starts: Array, expected: str) -> None:
    if wrong.any():
        at = int(np.nonzero(wrong)[0][0])
        episode = int(np.searchsorted(starts, at, side="right")) - 1
        raise ValueError(
            f"expected {expected}, got others in row {at - int(starts[episode])} of "
            f"{int(rows[episode])} of an edited episode"
        )


def end_reasons(leaves: dict[Path, torch.Tensor], rows: Array, before: Array) -> Array:
    """``EndReason`` of episodes by the flags of their last rows.

    Without any: open if it was ``before``, else cut.
    """
    flags = _flags(leaves)
    at = np.cumsum(rows) - 1
    nothing = np.zeros(len(rows), bool)
    done, cut, ended = (flags[key][at] if key in flags else nothing for key in _FLAGS)
    reason = np.where(before == int(EndReason.OPEN), int(EndReason.OPEN), int(EndReason.CUT))
    if _TERMINATED in flags:
        reason = np.where(done | cut | ended, int(EndReason.TRUNCATED), reason)
        return np.where(ended, int(EndReason.TERMINATED), reason)
    # `done` alone is read as terminated.
    reason = np.where(done, int(EndReason.TERMINATED), reason)
    return np.where(cut, int(EndReason.TRUNCATED), reason)
