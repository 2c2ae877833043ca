"""Combine a data set with new rows: by batches, or by copies of rows."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import as_chain
from replaykit.datasets.dataset import load_dataset
from replaykit.declared import Positive, read_value
from replaykit.mixture import ReplayBufferEnsemble
from replaykit.storages import LazyTensorStorage, Storage

_INFO = ("index", "index_generation")


class OfflineToOnlineReplayBuffer:
    """A data set and a buffer of new rows, with a fixed share of each in every batch.

    TorchRL has this class. It is an ensemble of two members with exact counts, ``mixture``.
    ``("index", "buffer_ids")`` of a batch is 0 for rows of the data set, and 1 for new rows.

    Args:
        offline_dataset: a data set or another buffer, or the name of a data set for `load_dataset`.
        online_storage: the storage of the buffer of new rows.
        online_capacity: the number of rows of a LazyTensorStorage, instead of ``online_storage``.
        offline_fraction: share of a batch that comes from the data set, above 0 and below 1.
        batch_size: default number of rows of a batch. Needed for the name of a data set.
        transform: a transform of the joined batch.
        dataset_kwargs: arguments of `load_dataset`, only for a name.

    Raises:
        ValueError: not exactly one of ``online_storage`` and ``online_capacity`` is given, or
            ``offline_fraction`` is out of range. Also if ``batch_size`` is missing for a name, or
            ``dataset_kwargs`` are given without a name.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, OfflineToOnlineReplayBuffer, ReplayBuffer
        >>> offline = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> _ = offline.extend(TensorDict({"x": torch.zeros(100)}, [100]))
        >>> rb = OfflineToOnlineReplayBuffer(offline, online_capacity=50, offline_fraction=0.25,
        ...                                  batch_size=8)
        >>> rb.sample()["x"].sum()
        tensor(0.)
        >>> _ = rb.extend(TensorDict({"x": torch.ones(5)}, [5]))
        >>> rb.sample()["x"].sum()
        tensor(6.)
    """

    def __init__(
        self,
        offline_dataset: str | ReplayBuffer,
        *,
        online_storage: Storage | None = None,
        online_capacity: int | None = None,
        offline_fraction: float = 0.5,
        batch_size: int | None = None,
        transform: Any = None,
        **dataset_kwargs: Any,
    ) -> None:
        if (online_storage is None) == (online_capacity is None):
            raise ValueError(
                "expected one of online_storage and online_capacity, got "
                f"{online_storage!r} and {online_capacity!r}"
            )
        if not 0.0 < offline_fraction < 1.0:
            raise ValueError(
                f"expected offline_fraction above 0 and below 1, got {offline_fraction}"
            )
        if isinstance(offline_dataset, str):
            size = dataset_kwargs.pop("batch_size", batch_size)
            if size is None:
                raise ValueError("expected batch_size together with the name of a data set")
            offline: Any = load_dataset(offline_dataset, size, **dataset_kwargs)
        elif dataset_kwargs:
            raise ValueError(
                f"expected {sorted(dataset_kwargs)} only with the name of a data set, got a "
                f"{type(offline_dataset).__name__}: give them to its constructor"
            )
        else:
            offline = offline_dataset
        storage = LazyTensorStorage(online_capacity) if online_storage is None else online_storage  # type: ignore[arg-type]
        self.batch_size, self._chain = batch_size, as_chain(transform)
        self._fraction = self._base = float(offline_fraction)
        self._lock = threading.RLock()
        online = ReplayBuffer(storage=storage)
        self.mixture: ReplayBufferEnsemble[Any] = ReplayBufferEnsemble(
            offline, online, p=[self._fraction, 1 - self._fraction], counts="exact"
        )

    @property
    def offline_fraction(self) -> float:
        """The present share of the data set in a batch."""
        return self._fraction

    @property
    def offline_buffer(self) -> Any:
        """The data set."""
        return self.mixture[0]

    @property
    def online_buffer(self) -> ReplayBuffer:
        """The buffer of new rows."""
        return self.mixture[1]

    def extend(self, data: Any) -> torch.Tensor:
        """Store new rows, as ``ReplayBuffer.extend`` does; return their slots."""
        return self.online_buffer.extend(data)

    def sample(self, batch_size: int | None = None) -> Any:
        """Draw a batch ``[B]`` with ``round(offline_fraction * B)`` rows of the data set first.

        Without new rows, all rows come from the data set.

        Raises:
            ValueError: no batch size is given, or members differ in keys, shapes or dtypes.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("expected batch_size in the constructor or in sample(), got None")
        read_value(Positive, size, "batch_size")
        offline = round(self._fraction * size) if len(self.online_buffer) else size
        with self._lock:
            self.mixture.sampler.p = [offline, size - offline]
            self.mixture.sampler.num_buffer_sampled = size
            batch = self.mixture.sample(size)[:, 0]
        return self._chain.forward(batch) if len(self._chain) else batch

    def anneal(self, step: int, total_steps: int) -> None:
        """Lower the share of the data set linearly, to 0 at ``total_steps``."""
        self._fraction = self._base * max(0.0, 1.0 - step / total_steps)

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities of both members from a batch, as ``ReplayBufferEnsemble`` does."""
        self.mixture.update_tensordict_priority(data)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save new rows, the random state and the present share of the data set."""
        with self._lock:
            self.mixture.sampler.p = [self._fraction, 1 - self._fraction]
            self.mixture.dumps(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Load a state that ``dumps`` saved, by the rules of ``ReplayBufferEnsemble.loads``."""
        with self._lock:
            self.mixture.loads(path)
            self._fraction = float(self.mixture.sampler.p[0])

    def __len__(self) -> int:
        """Return the number of rows of both members."""
        return len(self.mixture)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(offline={type(self.offline_buffer).__name__}, "
            f"offline_fraction={self._fraction:.3f}, online_size={len(self.online_buffer)}, "
            f"batch_size={self.batch_size})"
        )


def prefill_replay_buffer(
    rb: ReplayBuffer,
    dataset: str | ReplayBuffer,
    n_samples: int | None = None,
    chunk_size: int = 1000,
) -> ReplayBuffer:
    """Copy rows of a data set into a buffer, in their order; return the buffer.

    TorchRL draws rows with replacement. This function copies each row at most once, so with all
    rows the episodes are whole.

    Args:
        rb: the buffer to write to.
        dataset: a data set or another buffer, or the name of a data set for `load_dataset`.
        n_samples: number of rows, chosen by the generator of the data set; None, or more than there
            are, for all.
        chunk_size: number of rows per write.

    Raises:
        ValueError: ``n_samples`` is negative, ``chunk_size`` is less than 1, or rows have lanes.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, prefill_replay_buffer
        >>> data, rb = (ReplayBuffer(storage=LazyTensorStorage(500)) for _ in range(2))
        >>> _ = data.extend(TensorDict({"x": torch.arange(500)}, [500]))
        >>> len(prefill_replay_buffer(rb, data, n_samples=200))
        200
    """
    read_value(Positive, chunk_size, "chunk_size")
    source = load_dataset(dataset, chunk_size) if isinstance(dataset, str) else dataset
    if source.storage.ndim > 1:
        raise ValueError("expected a data set without lanes, whose rows are along one dimension")
    count = len(source)
    chosen = torch.arange(count)
    if n_samples is not None:
        if n_samples < 0:
            raise ValueError(f"expected n_samples of at least 0, got {n_samples}")
        if n_samples < count:
            chosen = torch.randperm(count, generator=source.sampler.generator)[:n_samples].sort()[0]
    for index in chosen.split(chunk_size):
        rows = source[index]
        rb.extend(rows.exclude(*_INFO) if hasattr(rows, "exclude") else rows)
    return rb
