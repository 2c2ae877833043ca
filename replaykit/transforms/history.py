"""Define the base of transforms that read other rows than the rows of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.episodes import NOTHING, Needs
from replaykit.storages.row_kernels import Led, StepsPlan
from replaykit.structure import Node, Path
from replaykit.ted import format_key
from replaykit.transforms.transform import Transform

Array = np.ndarray[Any, Any]


@dataclass
class Around:
    """Rows that a transform has read in addition to the rows of a batch.

    Attributes:
        time: times of the rows, int64 ``[B, *k]``. ``time[b]`` belongs to row b of the batch.
        lane: lanes of the rows, in the same shape. ``[B, 1, ...]`` is enough until a transform
            relabels the rows.
        leaves: the stored leaves by key, ``[B, *k, *F]`` each.

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


class Stacks(NamedTuple):
    """The rows up to each row of a batch, as ``Surroundings.stacks`` reads them.

    ``rows`` are the final values by key, or rows that earlier transforms may relabel. ``missing``
    is bool ``[B, count]``, True at rows that are to be zeros.
    """

    rows: Around | dict[Path, torch.Tensor]
    missing: Array | None = None


class Surroundings(ABC):
    """The positions of a batch's rows in their episodes, and access to other rows.

    In each lane, rows are numbered by time: the row before a row is at ``time - 1``. All arrays are
    int64 ``[B]``, with one entry per row of the batch. Padding has the position of the nearest real
    row.

    Attributes:
        time, lane: time and lane of the rows.
        first, last: times of the first stored row and of the newest row of the rows' episodes.
        begin: times at which the rows' episodes began. A time is below ``first`` if the first row
            of the episode is no longer stored.
        head, reason: the ways in which the episodes begin (``Head``) and end (``EndReason``).
        window: index of the window that a row belongs to. Without windows, the index of the row in
            the batch.
        alone: True if there are no windows.
        mask: bool, True at real rows; None if all rows are real.
        generator: the source of random numbers; None: torch's global generator.
        keys: all stored keys of a row.
        next_time: times of the rows from which ``next`` of the batch comes; None: the rows of the
            batch. If a transform reads ``next`` from a later row, its ``fetch`` sets this attribute
            for the transforms after it.
        next_made: the transforms that create leaves under ``next`` that are not stored.
        root: the structure of a row, as ``structure.build`` expects it. Its leaves can be fetched.
        bare: True if the batch has no leaves yet, because its transforms read all of them.
        later: the transforms after the current transform, if the current transform edits episodes.
        rows: the batch, if the current transform may overwrite its leaves in ``fetch``, else None.
            The current transform may do so if it is the first of its chain, and no other object
            refers to the rows.

    Example:
        ``HistoryTransform`` has an example. Its methods receive a ``Surroundings``.

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
    bare: bool = False
    mask: Array | None
    generator: torch.Generator | None
    keys: Collection[Path]
    root: Node

    def __init__(self) -> None:
        self.next_time: Array | None = None
        self.next_made: list[HistoryTransform] = []
        # Earlier transforms that also change the rows that later transforms fetch.
        self.relabels: list[tuple[HistoryTransform, Any]] = []
        self.later: list[Any] = []
        self.rows: Any = None

    def __len__(self) -> int:
        return len(self.time)

    def fetch(self, keys: Sequence[Path], time: Array, lane: Array | None = None) -> Around:
        """Read some keys of other rows, as they are stored.

        Only ``fetch`` of a transform may call this.

        Args:
            keys: stored keys.
            time: int64 ``[B, *k]``, each entry in ``[first, last]`` of its row.
            lane: lanes, broadcastable to ``time``; None for the lanes of the batch rows.

        Raises:
            KeyError: a key is not stored.
        """
        if lane is None:
            lane = self.lane.reshape(-1, *[1] * (time.ndim - 1))
        wanted = dict.fromkeys(keys)
        for transform, _ in self.relabels:
            if not transform.changes.isdisjoint(wanted):
                wanted.update(dict.fromkeys(transform.relabel_keys))
        return Around(time, lane, self.read(list(wanted), time, lane))

    def column(self, key: Path) -> torch.Tensor | None:
        """Return all slots of one stored leaf, ``[slots, *F]``, or None.

        If the result is None, the caller must ``fetch`` the rows instead. The row of a time is in
        slot ``time % slots``. The tensor is valid only while ``fetch`` of a transform runs.
        """
        return None

    def lead(self, plan: StepsPlan) -> Led | None:
        """Sum rewards over several steps, and fill ``rows`` with leaves of the last step.

        Without ``rows``, the plan takes no leaves.

        Only ``fetch`` of a transform may call this. A None result means that nothing has changed.
        The caller must then ``fetch`` the rows instead.
        """
        return None

    def stacks(
        self, keys: Sequence[Path], count: int, *, zero: bool = False, at_next: bool = False
    ) -> Stacks:
        """Read the ``count`` rows up to each row of the batch, for ``frames``.

        Only ``fetch`` of a transform may call this.

        Args:
            keys: stored keys.
            count: number of rows; if the episode has fewer, its first row is repeated.
            zero: use zeros instead of the first row.
            at_next: read the rows up to the rows at ``next_time`` instead.
        """
        last = self.next_time if at_next else self.time
        assert last is not None
        time, first = last[:, None] - np.arange(count - 1, -1, -1), self.first[:, None]
        rows = self.fetch(keys, np.maximum(time, first))
        return Stacks(rows, time < first if zero else None)

    def frames(self, stacks: Stacks) -> dict[Path, torch.Tensor]:
        """Return rows that ``stacks`` has read, ``[B, count, *F]`` by key, oldest first."""
        if isinstance(stacks.rows, dict):
            return stacks.rows
        leaves, missing = self.seen(stacks.rows), stacks.missing
        if missing is None or not missing.any():
            return leaves
        return {key: filled(leaf, as_tensor_like(missing, leaf), 0) for key, leaf in leaves.items()}

    def seen(self, around: Around) -> dict[Path, torch.Tensor]:
        """Return fetched leaves with the changes of earlier transforms that relabel rows."""
        leaves = around.leaves
        for transform, own in self.relabels:
            if not transform.changes.isdisjoint(leaves):
                if around.lane.shape != around.time.shape:
                    around.lane = np.broadcast_to(around.lane, around.time.shape)
                leaves = transform.relabel(dict(leaves), around, own, self)
        return leaves

    def tags(self, name: str, time: Array, lane: Array) -> torch.Tensor:
        """Return a tag of the episodes of rows, ``[B, *F]``.

        Only ``fetch`` of a transform may call this.

        Raises:
            KeyError: no episode was given the tag.
            RuntimeError: an earlier transform has edited the episodes.
        """
        raise RuntimeError(f"tag {name!r}: expected a Tag before a transform that edits episodes")

    @abstractmethod
    def any_rows(self, number: Array) -> tuple[Array, Array]:
        """Return time and lane of stored rows, given their numbers in ``[0, stored())``."""

    @abstractmethod
    def stored(self) -> int:
        """Return the number of rows that ``any_rows`` can choose from."""

    def uniform(self, *shape: int) -> Array:
        """Return numbers in ``[0, 1)`` from the generator, float64."""
        device = "cpu" if self.generator is None else self.generator.device
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator, device=device)
        return drawn.numpy() if drawn.is_cpu else drawn.cpu().numpy()

    def chosen(self, low: Array, high: Array) -> Array:
        """Draw uniformly from ``low .. high``, both included, as int64."""
        count = high - low + 1
        return low + np.minimum((self.uniform(*low.shape) * count).astype(np.int64), count - 1)

    @abstractmethod
    def read(self, keys: list[Path], time: Array, lane: Array) -> dict[Path, torch.Tensor]:
        """Read keys of any rows; ``time`` and ``lane`` are int64 of one shape."""


class HistoryTransform(Transform, ABC):
    """A transform on read that needs rows of the episode that the batch does not have.

    A history transform works in two steps. ``fetch`` reads other rows together with the batch,
    while the lock of the storage is held. ``apply`` changes the batch later, without the lock.
    Stored rows never change. ``needs`` declares the neighbouring rows that the transform needs.
    Samplers do not draw a row if one of them is not stored.

    Attributes:
        needs: the neighbours of a row that must be stored.
        changes: keys that the transform writes.
        relabels: True if the transform also changes the rows that later transforms fetch.
        relabel_keys: keys that the transform needs to change these rows.
        edits_episodes: True if later transforms read the episodes of ``surroundings`` instead of
            the stored episodes.
        uses_random: False if ``fetch`` never draws random numbers. Prefetch threads may then call
            it, because its order does not matter.

    Example:
        This transform adds the change of the observation since the previous row:

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
    uses_random = True

    def forward(self, data: Any) -> Any:
        """Raise RuntimeError, because only a buffer can read rows outside of the batch.

        A subclass that needs only the batch may override this method.
        """
        raise RuntimeError(
            f"{type(self).__name__} reads the rows around those of a batch: pass it to a "
            "ReplayBuffer as transform="
        )

    def fetch(self, around: Surroundings) -> Any:
        """Read the rows that ``apply`` needs. The caller holds the lock of the storage."""
        return None

    @abstractmethod
    def apply(self, data: Any, fetched: Any, around: Surroundings) -> Any:
        """Change a batch ``[B]`` and return it.

        ``data`` is a TensorDict that may be changed in place. The buffer calls this without a lock.
        """

    def relabel(
        self, leaves: dict[Path, torch.Tensor], where: Around, fetched: Any, around: Surroundings
    ) -> dict[Path, torch.Tensor]:
        """Change rows ``[B, *k, *F]`` that a later transform has read.

        The method changes these rows as ``apply`` changes the batch. Element ``[b]`` belongs to row
        b of the batch.
        """
        return leaves

    def surroundings(self, fetched: Any) -> Surroundings:
        """Return the edited episodes of the batch, for ``edits_episodes``."""
        raise NotImplementedError(
            f"{type(self).__name__} sets edits_episodes, but has no surroundings()"
        )


@dataclass
class Prepared:
    """The rows that the history transforms of a chain have read for one draw."""

    around: Surroundings
    fetched: dict[int, Any] = field(default_factory=dict)


def needs_of(transforms: Sequence[Any]) -> Needs:
    """Return the rows that a chain of transforms needs around a row."""
    needs = NOTHING
    for transform in transforms:
        if isinstance(transform, HistoryTransform):
            needs |= transform.needs
    return needs


def as_tensor_like(values: Array, leaf: torch.Tensor) -> torch.Tensor:
    """Return numbers ``[B, ...]`` as a tensor on the device of a leaf."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(leaf.device)


def over_features(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Append dimensions of size 1 to values ``[B, *k]``, to match those of ``like``."""
    more = like.ndim - values.ndim
    if more == 0:
        return values
    return values.unsqueeze(-1) if more == 1 else values.reshape(*values.shape, *[1] * more)


def filled(values: torch.Tensor, rows: torch.Tensor, number: float) -> torch.Tensor:
    """Return a copy of values ``[B, *k, *F]`` with a number where ``rows``, bool ``[B, *k]``."""
    # `masked_fill` lacks some dtypes.
    new = torch.tensor(number, dtype=values.dtype, device=values.device)
    return torch.where(over_features(rows, values), new, values)


def require_all(data: Any, keys: Sequence[Path], who: object) -> Mapping[Path, torch.Tensor]:
    """Return leaves of a batch. Raises KeyError with the missing keys."""
    found = {key: lookup(data, key) for key in keys}
    missing = [key for key, value in found.items() if value is None]
    if missing:
        raise KeyError(
            f"{type(who).__name__} expected the keys {', '.join(map(format_key, missing))}, got "
            "data without them"
        )
    return found
