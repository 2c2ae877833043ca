"""Transforms that look at other rows than those of the batch: what they ask, and whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.episodes import NOTHING, Needs
from replaykit.storages.history_kernels import Led, StepsPlan
from replaykit.structure import Node, Path
from replaykit.transforms.transform import Transform

__all__ = ["Around", "HistoryTransform", "Surroundings"]

Array = np.ndarray[Any, Any]


@dataclass
class Around:
    """Rows read besides those of a batch.

    Attributes:
        time: where they lie, int64 ``[B, *k]``; row b of the batch asked for ``[b]``.
        lane: the same; ``[B, 1, ...]`` will do until a relabel is asked.
        leaves: by key, ``[B, *k, *F]``, as they are stored.

    Example:
        >>> import numpy as np, torch
        >>> from replaykit import Around
        >>> time = np.array([[3, 4]])
        >>> rows = Around(time, np.zeros_like(time), {("x",): torch.tensor([[30, 40]])})
        >>> rows.leaves[("x",)].shape
        torch.Size([1, 2])
    """

    time: Array
    lane: Array
    leaves: dict[Path, torch.Tensor]


class Surroundings(ABC):
    """Where the rows of a batch lie in their episodes, and the way to other rows.

    In a lane rows are counted by time: the row before one is ``time - 1``. All arrays are int64
    ``[B]``, one entry a row of the batch; padding has the place of the nearest real row.

    Attributes:
        time, lane: where the rows lie.
        first, last: first stored and newest row of their episodes.
        begin: where their episodes began; below ``first`` where that row is stored no more.
        head, reason: how the episodes begin (``Head``) and end (``EndReason``).
        window: which window of the batch a row belongs to; without windows its own number.
        alone: whether there are no windows.
        mask: bool, True at real rows; None: all are.
        generator: where randomness comes from; None: torch's global one.
        keys: what is stored of a row.
        next_time: of which rows the batch has ``next``; None: of its own. A transform that takes
            ``next`` from a later row sets it in ``fetch``, for those after it.
        next_made: the transforms that have made leaves under ``next`` that are not stored.
        root: what a row is, as ``structure.build`` takes it; its leaves can be fetched.
        later: the transforms after the one that asks, where that edits episodes.
        rows: the batch, where it is for the one that asks to overwrite its leaves in ``fetch``: it
            is the first of its chain, and nobody else has seen the rows. None: it is not.

    Example:
        See ``HistoryTransform``, whose methods get them.

        >>> from replaykit import Surroundings
        >>> hasattr(Surroundings, "fetch")
        True
    """

    time: Array
    lane: Array
    first: Array
    last: Array
    begin: Array
    head: Array
    reason: Array
    window: Array
    alone: bool = False
    mask: Array | None
    generator: torch.Generator | None
    keys: Collection[Path]
    root: Node

    def __init__(self) -> None:
        self.next_time: Array | None = None
        self.next_made: list[HistoryTransform] = []
        # Those of the transforms before the one that asks that change rows wherever they are read.
        self.relabels: list[tuple[HistoryTransform, Any]] = []
        self.later: list[Any] = []
        self.rows: Any = None

    def __len__(self) -> int:
        return len(self.time)

    def fetch(self, keys: Sequence[Path], time: Array, lane: Array | None = None) -> Around:
        """Reads some keys of other rows, as they are stored; only while ``fetch`` of a transform
        runs.

        Args:
            keys: stored keys.
            time: int64 ``[B, *k]``, each in ``[first, last]`` of its row.
            lane: in a shape that goes with it; None: that of the row.

        Raises:
            KeyError: a key that is not stored.
        """
        if lane is None:
            lane = self.lane.reshape(-1, *[1] * (time.ndim - 1))
        wanted = dict.fromkeys(keys)
        for transform, _ in self.relabels:
            if not transform.changes.isdisjoint(wanted):
                wanted.update(dict.fromkeys(transform.relabel_keys))
        return Around(time, lane, self.read(list(wanted), time, lane))

    def column(self, key: Path) -> torch.Tensor | None:
        """All slots of one stored leaf, ``[slots, *F]``, where the row of a time lies in slot
        ``time % slots``; to be looked at only while ``fetch`` runs. None: ``fetch`` the rows.
        """
        return None

    def discounted(self, key: Path, steps: Array, gamma: float) -> torch.Tensor | None:
        """Discounted sums of one stored number a row over it and ``steps`` int64 ``[B]`` more of
        its episode, as they are stored; only while ``fetch`` runs. None: fetch the rows, and sum.
        """
        return None

    def lead(self, plan: StepsPlan) -> Led | None:
        """Sums over several steps, and overwrites in ``rows`` what is taken from the last of them;
        only while ``fetch`` runs. None, and nothing has changed: ``discounted`` and ``fetch`` do.
        """
        return None

    def stacks(
        self, keys: Sequence[Path], count: int, *, zero: bool, flat: bool
    ) -> dict[Path, tuple[torch.Tensor, torch.Size]] | None:
        """The ``count`` rows up to each row of the batch, the oldest first, as one leaf; only while
        ``fetch`` runs.

        Args:
            keys: stored keys.
            count: how many; where there are fewer in the episode its first one is repeated.
            zero: take zeros there instead.
            flat: put them along the first feature dimension, where there is one.

        Returns:
            By key ``[B, count, *F]``; ``flat``: ``[B, count * F[0], *F[1:]]``; and ``F``. None:
            fetch them.
        """
        return None

    def stacks_before_next(
        self, keys: Sequence[Path], count: int, *, zero: bool, flat: bool
    ) -> dict[Path, tuple[torch.Tensor, torch.Size]] | None:
        """``stacks`` of the rows at ``next_time``."""
        return None

    def pairs(self, keys: Sequence[Path], *, joined: bool) -> list[list[torch.Tensor]] | None:
        """The row before each row of the batch, zeros where there is none, and the row that comes
        before the state that follows; only while ``fetch`` runs.

        Args:
            joined: put all keys next to each other, if they are all of torch's default dtype.

        Returns:
            Two leaves ``[B, *F]`` for each key; ``joined``: two ``[B, A]`` for all. None: fetch
            them.
        """
        return None

    def seen(self, around: Around) -> dict[Path, torch.Tensor]:
        """What was fetched as the transforms before this one have it: relabelled."""
        leaves = around.leaves
        for transform, own in self.relabels:
            if not transform.changes.isdisjoint(leaves):
                if around.lane.shape != around.time.shape:
                    around.lane = np.broadcast_to(around.lane, around.time.shape)
                leaves = transform.relabel(dict(leaves), around, own, self)
        return leaves

    @abstractmethod
    def any_rows(self, number: Array) -> tuple[Array, Array]:
        """Time and lane of stored rows by their number, in ``[0, stored())``."""

    @abstractmethod
    def stored(self) -> int:
        """How many rows there are to choose from in ``any_rows``."""

    def uniform(self, *shape: int) -> Array:
        """Numbers of ``[0, 1)`` from the generator, float64."""
        device = "cpu" if self.generator is None else self.generator.device
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator, device=device)
        return drawn.numpy() if drawn.is_cpu else drawn.cpu().numpy()

    def chosen(self, low: Array, high: Array) -> Array:
        """Draws uniformly from ``low .. high``, both included, int64 like them."""
        count = high - low + 1
        return low + np.minimum((self.uniform(*low.shape) * count).astype(np.int64), count - 1)

    @abstractmethod
    def read(self, keys: list[Path], time: Array, lane: Array) -> dict[Path, torch.Tensor]:
        """What ``fetch`` reads, for any rows: ``time`` and ``lane`` int64 of one shape."""


class HistoryTransform(Transform, ABC):
    """A transform on read that needs other rows of the episode than the batch has.

    Works in two steps. ``fetch`` runs while the batch is read, under the storage's lock: it reads
    other rows. ``apply`` runs without the lock: it changes the batch by them. Stored data never
    changes. What must be stored around a row follows from ``needs``, and no row without it is
    drawn: there is no constant to be kept in step by hand.

    Attributes:
        needs: what must be stored around a row.
        changes: keys that it writes.
        relabels: whether later transforms are to see rows that they fetch as it changes them.
        relabel_keys: keys that it needs for that.
        edits_episodes: whether later transforms read other episodes than the stored ones: those
            that ``surroundings`` gives.

    Example:
        How much the observation has changed since the row before:

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import HistoryTransform, LazyTensorStorage, ReplayBuffer
        >>> from replaykit.episodes import Needs
        >>> class Change(HistoryTransform):
        ...     needs, changes = Needs(past=1), frozenset({("change",)})
        ...     def fetch(self, around):
        ...         before = (around.time - 1).clip(around.first)
        ...         return around.fetch([("x",)], before)
        ...     def apply(self, data, fetched, around):
        ...         return data.set("change", data["x"] - around.seen(fetched)[("x",)])
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Change())
        >>> done = torch.tensor([False, True, False, False])
        >>> x = torch.tensor([1, 3, 7, 8])
        >>> _ = rb.extend(TensorDict({"x": x, "next": {"done": done}}, [4]))
        >>> rb[:]["change"]
        tensor([0, 2, 0, 1])
    """

    stage = "history"
    needs: Needs = NOTHING
    changes: frozenset[Path] = frozenset()
    relabels = False
    relabel_keys: tuple[Path, ...] = ()
    edits_episodes = False

    def forward(self, data: Any) -> Any:
        """Raises RuntimeError: it needs a buffer, which knows the rows around.

        Where such a transform can work on a batch alone it says so.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads the rows around those of a batch: give it to a "
            "ReplayBuffer as transform="
        )

    def fetch(self, around: Surroundings) -> Any:
        """Reads what ``apply`` needs; holds the storage's lock."""
        return None

    @abstractmethod
    def apply(self, data: Any, fetched: Any, around: Surroundings) -> Any:
        """Changes a batch ``[B]`` (a TensorDict of its own) and returns it; no lock is held."""

    def relabel(
        self, leaves: dict[Path, torch.Tensor], where: Around, fetched: Any, around: Surroundings
    ) -> dict[Path, torch.Tensor]:
        """Changes rows that another transform has read, ``[B, *k, *F]``, as it changes the batch.

        Those of ``[b]`` belong to row b of the batch.
        """
        return leaves

    def surroundings(self, fetched: Any) -> Surroundings:
        """The rows around those of the batch as ``apply`` has left them; for ``edits_episodes``."""
        raise NotImplementedError(f"{type(self).__name__} edits episodes, but not their rows")


@dataclass
class Prepared:
    """What the history transforms of a chain have read for one draw."""

    around: Surroundings
    fetched: dict[int, Any] = field(default_factory=dict)


def needs_of(transforms: Sequence[Any]) -> Needs:
    """What a chain of transforms needs around a row."""
    needs = NOTHING
    for transform in transforms:
        if isinstance(transform, HistoryTransform):
            needs |= transform.needs
    return needs


def as_tensor_like(values: Array, leaf: torch.Tensor) -> torch.Tensor:
    """Numbers ``[B, ...]`` as a tensor on the device of a leaf."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(leaf.device)


def require(data: Any, keys: Sequence[Path], who: object) -> Mapping[Path, torch.Tensor]:
    """Returns leaves of a batch; KeyError naming those that it does not have."""
    found = {key: lookup(data, key) for key in keys}
    missing = [key for key, value in found.items() if value is None]
    if missing:
        raise KeyError(f"{type(who).__name__} expected the keys {missing}, got a batch without")
    return found
