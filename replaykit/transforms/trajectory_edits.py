"""Edit whole episodes by a function when a batch is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from replaykit._compat import is_tensordict
from replaykit.episodes import EndReason, Head, Needs
from replaykit.structure import Leaf, Node, Path, Rules, build, flatten, leaf_paths
from replaykit.ted import (
    DONE,
    FLAG_KEYS,
    NEXT_FLAGS,
    RESERVED_KEYS,
    TERMINATED,
    TRUNCATED,
    Key,
    end_flags,
    format_key,
)
from replaykit.transforms.history import (
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    over_features,
)

Array = np.ndarray[Any, Any]


class EditedEpisodes(Surroundings):
    """The surroundings of a batch's rows in copies of their episodes.

    Access to these rows needs neither the storage nor its lock. Each episode is a separate lane, in
    which time is the number of steps since the episode began.

    Args:
        root: the structure of a row.
        leaves: leaves by key, ``[n, *F]`` each, episode after episode.
        counts: int64 ``[E]``, the number of rows of each episode.
        missing: int64 ``[E]``, the number of earlier rows of each episode that are not stored.
        reason, head: int64 ``[E]``, the ``EndReason`` and the ``Head`` of each episode.
        generator: the source of random numbers.
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
        """Set time, lane and window of the rows of the batch, int64 ``[B]`` each."""
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
        """Return the positions of rows in the leaves."""
        return self.starts[lane] + time - self.missing[lane]

    def read(self, keys: list[Path], time: Array, lane: Array) -> dict[Path, torch.Tensor]:
        unknown = [format_key(key) for key in keys if key not in self.leaves]
        if unknown:
            known = ", ".join(map(format_key, self.leaves))
            raise KeyError(f"expected the keys {', '.join(unknown)}, got episodes with {known}")
        number = torch.from_numpy(self.numbers(time, lane).reshape(-1))
        found = {}
        for key in keys:
            leaf = self.leaves[key]
            values = leaf.index_select(0, number.to(leaf.device))
            found[key] = values.view(*time.shape, *leaf.shape[1:])
        return found


def same_rows(expected: Node, found: Node, episode: int) -> None:
    """Raise ValueError if edited episodes differ in keys, shapes or dtypes."""
    first: dict[Path, Leaf] = dict(leaf_paths(expected))
    own: dict[Path, Leaf] = dict(leaf_paths(found))
    for path in dict.fromkeys([*first, *own]):
        if first.get(path) != own.get(path):
            raise ValueError(
                f"key {format_key(path)}: expected {first.get(path, 'nothing')} as in the other "
                f"episodes, got {own.get(path, 'nothing')} in edited episode {episode}"
            )


def _flags(leaves: dict[Path, torch.Tensor]) -> dict[Key, Array]:
    """Return the flags in ``leaves``, bool ``[n]``.

    A flag is True for a row if any of its numbers is set. Flags at the root that end episodes are
    returned under ``next``.
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
    """Check the flags of episodes with these counts of rows.

    Raises:
        TypeError: a flag is not bool.
        ValueError: ``done`` is not ``terminated | truncated``, or a flag is set before the last row
            of an episode.
    """
    flags = _flags(leaves)
    starts = np.cumsum(rows) - rows
    ended = np.zeros(int(rows.sum()), bool)
    for flag in flags.values():
        ended |= flag
    last = np.zeros_like(ended)
    last[starts + rows - 1] = True
    _refuse(ended & ~last, rows, starts, "flags in the last row of an episode alone")
    done = flags.get(DONE)
    if done is None:
        return
    reasons = [flags[key] for key in (TERMINATED, TRUNCATED) if key in flags]
    # If only one of the two flags is stored, `done` without it marks the other kind of end.
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
    """Return the ``EndReason`` of episodes from the flags of their last rows.

    An episode without flags stays open if its reason ``before`` the edit was open. Otherwise the
    result is a cut.
    """
    flags = _flags(leaves)
    at = np.cumsum(rows) - 1
    nothing = np.zeros(len(rows), bool)
    done, cut, ended = (flags[key][at] if key in flags else nothing for key in NEXT_FLAGS)
    reason = np.where(before == int(EndReason.OPEN), int(EndReason.OPEN), int(EndReason.CUT))
    if TERMINATED in flags:
        reason = np.where(done | cut | ended, int(EndReason.TRUNCATED), reason)
        return np.where(ended, int(EndReason.TERMINATED), reason)
    # `done` alone counts as terminated.
    reason = np.where(done, int(EndReason.TERMINATED), reason)
    return np.where(cut, int(EndReason.TRUNCATED), reason)


_MASK: Final[Key] = ("collector", "mask")
_OTHER_MASKS: Final[tuple[Key, ...]] = (("validity_mask",), ("learning_mask",))
_IS_INIT: Final[Key] = ("is_init",)
_RULES = Rules(frozenset((key,) for key in RESERVED_KEYS), FLAG_KEYS, 1)
_LARGEST_SEED: Final = 2**62


@dataclass
class _Copied:
    """The whole episodes of a batch's rows, mostly as arrays int64 ``[E]``.

    ``leaves`` are ``[n, *F]``, episode after episode. ``apply`` is bool, True if the function gets
    the episode. ``episode``, ``[B]``, is the number of the episode of each row of the batch.
    ``segment``, ``[B]``, is the number of the row's segment. A segment is the part of a window in
    one episode. ``shift`` has a number in [0, 1) for each segment.
    """

    root: Node
    leaves: dict[Path, torch.Tensor]
    first: Array
    rows: Array
    missing: Array
    reason: Array
    head: Array
    apply: Array
    episode: Array
    segment: Array
    shift: Array
    seed: int
    later: list[Any]
    edited: EditedEpisodes | None = None


class TrajectoryTransform(HistoryTransform):
    """A transform that edits the whole episodes of a batch by a function.

    The function gets each distinct episode of a batch once. It may change values, keys and the
    number of rows. The transform then cuts each window from the edited episode. Suppose that a
    window of t rows had offset o in an episode of n rows, and that the edited episode has n' rows.
    There were m = n-t+1 possible offsets. The new offset is ``floor((o + u) / m * m')`` with
    ``m' = n'-t'+1``, ``t' = min(t, n')`` and u uniform in [0, 1). The new offset is uniform if o
    was uniform, and it equals o if n' = n. If a window now has fewer rows, its last row is
    repeated. If a window crosses episodes, each of its parts counts as a separate window.

    Later history transforms (``StackFrames``, ``NStep``, ``PreviousStep``, ``StepCount``,
    ``HindsightGoal``) read only edited episodes. A later ``ReturnToGo`` recomputes its returns. No
    history transform can come before this transform. Stored rows do not change. ``index`` and the
    sampler's other info in a batch still belong to the drawn rows.

    The transform writes ``("collector", "mask")``, bool ``[B]``, in every batch. The mask is False
    at repeated rows and padding.

    Args:
        fn: function of a TensorDict ``[n]`` with all stored keys, in separate memory. It returns a
            TensorDict ``[n']``, n' >= 1. The buffer calls ``fn`` without holding a lock. With
            ``prefetch``, it calls ``fn`` in prefetch threads.
        allow_open: whether rows of open episodes can be drawn and edited.
        allow_headless: whether rows of episodes whose first rows are not stored can be drawn and
            edited.

    Raises:
        TypeError: ``fn`` is not callable; on read, it does not return a TensorDict, or returns
            flags that are not bool.
        ValueError: on read, it returns no rows; keys, shapes or dtypes differ between episodes;
            ``("next", "done")`` is not ``terminated | truncated``; an episode ends before its last
            row.

    If an episode cannot be drawn, ``rb[...]`` returns its rows as they are stored. All random
    numbers come from the buffer's generator.

    Cost: one read of all rows of the batch's distinct episodes, and one call per episode.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, TrajectoryTransform
        >>> rows = TensorDict({
        ...     "x": torch.arange(6),
        ...     "next": {"done": torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)}}, [6])
        >>> def without_last(episode):
        ...     episode = episode[:-1].clone()
        ...     episode["next", "done"][-1] = True
        ...     return episode
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=100,
        ...                   transform=TrajectoryTransform(without_last))
        >>> _ = rb.extend(rows)
        >>> rb.sample()["x"].unique().tolist()
        [0, 1, 3, 4]
    """

    stage = "episode"
    edits_episodes = True
    changes = frozenset({_MASK, *_OTHER_MASKS, DONE, TRUNCATED, TERMINATED, _IS_INIT})

    def __init__(
        self,
        fn: Callable[[Any], Any],
        allow_open: bool = False,
        allow_headless: bool = False,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn: expected a function of an episode, got {fn!r}")
        self.fn = fn
        self.allow_open, self.allow_headless = bool(allow_open), bool(allow_headless)
        self.needs = Needs(closed=not self.allow_open, intact=not self.allow_headless)

    # -- copying ----------------------------------------------------------------------------------

    def fetch(self, around: Surroundings) -> _Copied | None:
        """Copy each whole episode of the batch once, in one read."""
        if not len(around):
            return None
        reach = int(around.first.max() - around.first.min()) + 1
        key = around.lane * reach + around.first - around.first.min()
        _, lead, episode = np.unique(key, return_index=True, return_inverse=True)
        episode = episode.reshape(-1)
        first, lane = around.first[lead], around.lane[lead]
        rows = around.last[lead] - first + 1
        of_row = np.repeat(np.arange(len(rows)), rows)
        time = np.arange(len(of_row)) - (np.cumsum(rows) - rows - first)[of_row]
        leaves = around.read([path for path, _ in leaf_paths(around.root)], time, lane[of_row])
        reason, head = around.reason[lead], around.head[lead]
        fits = np.ones(len(rows), bool)
        if not self.allow_open:
            fits &= reason != int(EndReason.OPEN)
        if not self.allow_headless:
            fits &= head == int(Head.RESET)
        if around.alone:
            segment = np.arange(len(around))
        else:
            _, window = np.unique(around.window, return_inverse=True)
            runs = window.reshape(-1) * len(rows) + episode
            segment = np.unique(runs, return_inverse=True)[1].reshape(-1)
        return _Copied(
            around.root,
            leaves,
            first,
            rows,
            first - around.begin[lead],
            reason,
            head,
            fits,
            episode,
            segment,
            around.uniform(int(segment.max()) + 1),
            _seed(around.generator),
            list(around.later),
        )

    # -- editing ----------------------------------------------------------------------------------

    def apply(self, data: Any, fetched: _Copied | None, around: Surroundings) -> Any:
        """Return the batch with rows of the edited episodes."""
        if fetched is None:
            return data
        edited = self._edit(fetched)
        for transform in fetched.later:
            if callable(getattr(transform, "edited", None)):
                transform.edited(edited)
        cut = _cut(fetched, edited, around)
        fetched.edited = edited
        return _put(data, fetched, edited, cut)

    def surroundings(self, fetched: _Copied | None) -> Surroundings:
        """Return the edited episodes."""
        if fetched is None or fetched.edited is None:
            raise RuntimeError("expected a batch with rows, got an empty one")
        return fetched.edited

    def _edit(self, copied: _Copied) -> EditedEpisodes:
        parts: list[dict[Path, torch.Tensor]] = []
        root: Node | None = None
        count = np.zeros_like(copied.rows)
        stops = np.cumsum(copied.rows)
        like = next(iter(copied.leaves.values()))
        for number, stop in enumerate(stops.tolist()):
            size = int(copied.rows[number])
            leaves = {path: leaf[stop - size : stop] for path, leaf in copied.leaves.items()}
            own = copied.root
            if copied.apply[number]:
                given = build(own, leaves, torch.Size([size]), like.device)
                own, leaves, size = _taken_apart(self.fn(given), number)
            if root is None:
                root = own
            elif own is not root:
                same_rows(root, own, number)
            parts.append(leaves)
            count[number] = size
        assert root is not None
        joined = {
            path: torch.cat([part[path] for part in parts]).to(like.device) for path in parts[0]
        }
        some = joined
        if not copied.apply.all():  # stored episodes do not come from the function
            chosen = torch.from_numpy(np.repeat(copied.apply, count))
            some = {path: leaf[chosen.to(leaf.device)] for path, leaf in joined.items()}
        check_flags(some, count[copied.apply])
        reason = end_reasons(joined, count, copied.reason)
        reason = np.where(copied.apply, reason, copied.reason)
        generator = torch.Generator("cpu").manual_seed(copied.seed)
        return EditedEpisodes(root, joined, count, copied.missing, reason, copied.head, generator)

    def __repr__(self) -> str:
        return f"TrajectoryTransform({getattr(self.fn, '__name__', repr(self.fn))})"


def _seed(generator: torch.Generator | None) -> int:
    """Draw a seed for the random numbers that later transforms draw without the lock.

    The seed itself is drawn with the lock held, in the order of draws.
    """
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(_LARGEST_SEED, (), generator=generator, device=device))


def _taken_apart(episode: Any, number: int) -> tuple[Node, dict[Path, torch.Tensor], int]:
    if not is_tensordict(episode):
        raise TypeError(f"fn: expected a TensorDict for an episode, got {type(episode).__name__}")
    if not episode.batch_dims:
        raise ValueError("fn: expected an episode of batch size [n], got []")
    if not len(episode):
        raise ValueError(f"fn: expected at least one row of an episode, got none for {number}")
    root, leaves = flatten(episode, 1, _RULES)
    return root, leaves, len(episode)


@dataclass
class _Cut:
    """The positions of a batch's rows in edited episodes; ``[B]`` each.

    ``drawn`` is the position of the drawn row in the copied leaves. ``number`` is the position in
    the edited leaves of the row that replaces it. ``real`` is False at repeated rows and padding.
    """

    drawn: Array
    number: Array
    real: Array


def _cut(copied: _Copied, edited: EditedEpisodes, around: Surroundings) -> _Cut:
    """Move every segment into its edited episode, with as many rows as it has."""
    segment = copied.segment
    count = len(copied.shift)
    offset = around.time - copied.first[copied.episode]
    begin = np.full(count, np.iinfo(np.int64).max)
    end = np.zeros(count, np.int64)
    own = np.zeros(count, np.int64)
    np.minimum.at(begin, segment, offset)
    np.maximum.at(end, segment, offset)
    own[segment] = copied.episode
    rows, left = copied.rows[own], edited.counts[own]
    length = end - begin + 1
    kept = np.minimum(length, left)
    before, after = rows - length + 1, left - kept + 1
    moved = np.floor((begin + copied.shift) / before * after).astype(np.int64)
    start = np.where(left == rows, begin, np.minimum(moved, after - 1))
    step = offset - begin[segment]
    there = step < kept[segment]
    latest = np.zeros(count, np.int64)
    np.maximum.at(latest, segment[there], step[there])
    step = np.where(there, step, latest[segment])
    time = start[segment] + step + edited.missing[copied.episode]
    real = there if around.mask is None else there & around.mask
    mask = None if real.all() else real
    edited.lie_at(time, copied.episode, around.window, mask, around.alone)
    drawn = (np.cumsum(copied.rows) - copied.rows)[copied.episode] + offset
    return _Cut(drawn, edited.numbers(time, copied.episode), real)


def _put(data: Any, copied: _Copied, edited: EditedEpisodes, cut: _Cut) -> Any:
    """Replace the rows of the batch by edited rows."""
    marks = _marks(data, copied, edited, cut)
    number = torch.from_numpy(cut.number)
    for path in copied.leaves:
        if path not in edited.leaves:
            data.del_(path if len(path) > 1 else path[0])
    for path, leaf in edited.leaves.items():
        data.set(path, leaf.index_select(0, number.to(leaf.device)))
    like = next(iter(edited.leaves.values()))
    real = as_tensor_like(cut.real, like)
    for path in (TRUNCATED, TERMINATED, DONE, _IS_INIT):
        flag = data.get(path, None)
        if flag is None or flag.dtype is not torch.bool:
            continue
        if path in marks:
            where = over_features(marks[path], flag)
            flag = flag | where if path in edited.leaves else where.expand_as(flag).clone()
        # Only real rows mark ends and beginnings.
        data.set(path, flag & over_features(real, flag))
    data.set(_MASK, real)
    for key in _OTHER_MASKS:
        mask = data.get(key, None)
        if mask is not None and mask.shape[:1] == real.shape and mask.dtype is torch.bool:
            data.set(key, mask & over_features(real, mask))
    return data


def _marks(
    data: Any, copied: _Copied, edited: EditedEpisodes, cut: _Cut
) -> dict[Path, torch.Tensor]:
    """Return the sampler's flags for the edited rows, bool ``[B]`` by key.

    A sampler that marks windows sets ``truncated`` and ``done`` at the last row of a window that
    was cut short, and ``is_init`` at its first row. These flags are not stored.
    """
    found: dict[Path, torch.Tensor] = {}
    count = len(copied.shift)
    real = np.nonzero(cut.real)[0]
    for path in (TRUNCATED, _IS_INIT):
        shown, stored = data.get(path, None), copied.leaves.get(path)
        if shown is None:
            continue
        if stored is not None:
            shown = shown & ~stored.index_select(0, torch.from_numpy(cut.drawn).to(stored.device))
        if not bool(shown.any()):
            continue
        edge = np.full(count, -1)
        if path == _IS_INIT:
            edge[copied.segment[real[::-1]]] = real[::-1]
        else:
            edge[copied.segment[real]] = real
            last = np.cumsum(edited.counts) - 1
            lane = edited.lane[edge]
            flagged = np.isin(edited.reason[edge], (EndReason.TERMINATED, EndReason.TRUNCATED))
            edge[flagged & (cut.number[edge] == last[lane])] = -1
        where = np.zeros(len(cut.real), bool)
        where[edge[edge >= 0]] = True
        found[path] = as_tensor_like(where, shown)
    if TRUNCATED in found:
        found[DONE] = found[TRUNCATED]
    return found
