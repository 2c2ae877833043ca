"""Choose the episodes that an EpisodeWriter removes to make room."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from replaykit.storages.episode_tags import EpisodeData

Array = np.ndarray[Any, Any]


class Evictor(ABC):
    """Orders the episodes that may be removed. The first ones are removed first.

    A custom evictor defines ``order``. A function of an ``EpisodeData`` also works as ``evict=`` of
    an EpisodeWriter. It returns a number for each episode, and the lowest are removed first.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import EpisodeWriter, LazyTensorStorage, ReplayBuffer
        >>> shortest_first = lambda episodes: episodes.length
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6, lane_key="id"),
        ...                   writer=EpisodeWriter(evict=shortest_first))
        >>> for id_, rows in ((0, 3), (1, 2), (2, 3)):
        ...     done = torch.arange(rows) == rows - 1
        ...     ids = torch.full((rows,), id_)
        ...     _ = rb.extend(TensorDict({"id": ids, "next": {"done": done}}, [rows]))
        >>> [episode.rows()["id"][0].item() for episode in rb.episodes]
        [0, 2]
    """

    @abstractmethod
    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        """Return the numbers of all episodes in the order of removal, int64 ``[J]``.

        Args:
            episodes: the stored episodes.
            draw: a function of a count, which returns random numbers in [0, 1), float64.
        """


class Fifo(Evictor):
    """Removes the episode first that was written first.

    Example:
        >>> from replaykit import EpisodeWriter, Fifo
        >>> EpisodeWriter(evict=Fifo()).evict
        Fifo()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.argsort(episodes.id)

    def __repr__(self) -> str:
        return "Fifo()"


class Uniform(Evictor):
    """Removes episodes at random, with probabilities in proportion to their lengths.

    A removed episode is the next of successive draws without replacement. So every stored row is
    equally likely to lose its episode.

    Example:
        >>> from replaykit import EpisodeWriter, Uniform
        >>> EpisodeWriter(evict=Uniform()).evict
        Uniform()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        # The order of the keys has the distribution (Efraimidis and Spirakis, 2006).
        return np.argsort(-np.log1p(-draw(len(episodes))) / episodes.length, kind="stable")

    def __repr__(self) -> str:
        return "Uniform()"


class MostSampled(Evictor):
    """Removes the episode first from which samplers have drawn most windows.

    The counts are those of ``Coverage``. Among equal counts, the oldest episode goes first.

    Example:
        >>> from replaykit import EpisodeWriter, MostSampled
        >>> EpisodeWriter(evict=MostSampled()).evict
        MostSampled()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.lexsort((episodes.id, -episodes.draws))

    def __repr__(self) -> str:
        return "MostSampled()"


class Oldest(Evictor):
    """Removes the episode first whose tag is lowest, such as a time or a version.

    Args:
        tag: the name of a tag with one number per episode.

    Example:
        >>> from replaykit import EpisodeWriter, Oldest
        >>> EpisodeWriter(evict=Oldest("policy_version")).evict
        Oldest('policy_version')
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        values = episodes[self.tag].reshape(len(episodes), -1)
        if values.shape[1] != 1:
            raise ValueError(f"tag {self.tag!r}: expected one number, got {values.shape[1]}")
        return np.lexsort((episodes.id, values[:, 0]))

    def __repr__(self) -> str:
        return f"Oldest({self.tag!r})"


class LowestPriority(Evictor):
    """Removes the episode first whose largest row priority is lowest.

    The buffer needs a sampler with priorities. Among equal priorities, the oldest episode goes
    first.

    Example:
        >>> from replaykit import EpisodeWriter, LowestPriority
        >>> EpisodeWriter(evict=LowestPriority()).evict
        LowestPriority()
    """

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        return np.lexsort((episodes.id, episodes.priority))

    def __repr__(self) -> str:
        return "LowestPriority()"


class ByNumber(Evictor):
    """Removes the episodes first for which a function returns the lowest numbers."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def order(self, episodes: EpisodeData, draw: Any) -> Array:
        found = np.asarray(self.number(episodes))
        if found.shape != (len(episodes),) or found.dtype.kind not in "biuf":
            raise ValueError(
                f"evict: expected a number for each of {len(episodes)} episodes, got "
                f"{found.dtype} {list(found.shape)}"
            )
        return np.lexsort((episodes.id, found))

    def __repr__(self) -> str:
        return repr(self.number)
