"""The replay buffer: all of its faces in one class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit._ray import actor_class
from replaykit.buffer.components import Components
from replaykit.buffer.conditional import Conditional
from replaykit.buffer.editing import Editing
from replaykit.buffer.generic import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.loading import Loading
from replaykit.buffer.priorities import Priorities
from replaykit.buffer.saving import Saving
from replaykit.buffer.streams import Streams
from replaykit.keywords import named_after

__all__ = ["ReplayBuffer", "TensorDictReplayBuffer", "rows_by_name"]


@named_after
class ReplayBuffer(
    Streams[DataT, StorageT, SamplerT, WriterT],
    Loading[DataT, StorageT, SamplerT, WriterT],
    Editing[DataT, StorageT, SamplerT, WriterT],
    Priorities[DataT, StorageT, SamplerT, WriterT],
    Conditional[DataT, StorageT, SamplerT, WriterT],
    Components[DataT, StorageT, SamplerT, WriterT],
    Saving[DataT, StorageT, SamplerT, WriterT],
):
    """Records in a storage, chosen by a sampler, placed by a writer.

    Args:
        storage: where records live, or a function that makes it; ``ListStorage(1000)``.
        sampler: which records come next, or a function that makes it; ``RandomSampler()``.
        writer: which slots new records take, or a function that makes it; ``RoundRobinWriter()``.
        sample_unit: what a drawn record stands for; ``Transition()``: itself.
        collate_fn: called with the rows as they were read; its result is what transforms see. By
            default nothing for tensor storages, and a stack for lists.
        pin_memory: pin the CPU tensors of a sample, where there is a CUDA device.
        device: where samples go after the transforms; None: they stay with the storage. To a CUDA
            device through a ring of pinned buffers, in one copy a batch that nobody waits for.
        prefetch: number of batches prepared ahead in threads; needs ``batch_size``. See
            ``docs/overlap.md``.
        transform: callable, object with ``forward`` or ``inv``, or Compose of them.
        transform_factory: function that makes the transform; implies ``delayed_init``.
        batch_size: default number of rows of a sample.
        dim_extend: dimension of written data that is time; ``storage.ndim - 1``.
        generator: where all randomness comes from; torch's global generator.
        consume_after_n_samples: how often a record is drawn before its slot is written again; has a
            ``ConsumingSampler`` of as many in the place of a RandomSampler.
        priority_key: where written data and learners put priorities.
        delayed_init: make the components at first use only.
        contiguous: every tensor of a sample lies in one piece. By default small columns come back
            as strided views of one allocation, which is faster.
        shared: processes that get the buffer, spawned or forked, write and sample the same rows.
            For a LazyTensorStorage or LazyMemmapStorage and a RoundRobinWriter; see
            ``docs/sharing.md``.
        compilable: accepted for TorchRL's programs. Every call may stand in a function that
            ``torch.compile`` compiles, with or without it: it breaks the graph there, and runs as
            it does elsewhere; ``fullgraph=True`` refuses it.
        rate_limiter: has writes wait for samples and samples for writes, so that neither runs
            ahead of the other by more than it allows; see ``RateLimiter`` and ``docs/pace.md``.

    Raises:
        TypeError: an argument of another kind, or ``transform`` with ``transform_factory``.
        ValueError: a value that cannot be, or components that do not go together.

    Every method may be called from any thread; no record is ever seen half written.

    For type checkers a batch is a TensorDict, and ``storage``, ``sampler`` and ``writer`` are of
    the classes that were given (``ReplayBuffer`` alone: of any). For other records say what a batch
    is: ``rb: ReplayBuffer[torch.Tensor] = ReplayBuffer(...)``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4,
        ...                   generator=torch.Generator().manual_seed(0))
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3)}, [20]))
        >>> rb.sample()["index"]
        tensor([ 4, 19, 13,  0])
    """

    def client(self) -> ReplayBuffer:
        """Returns the buffer itself, which is its own handle in this process.

        ``RayReplayBuffer.client()`` returns a handle that can be sent to other processes; with
        ``shared=True`` the buffer itself can.
        """
        return self

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Returns a Ray actor class of this buffer; ``.remote(...)`` with its arguments starts one.

        Args:
            remote_config: options of ``ray.remote``; one CPU and no GPU by default.

        Raises:
            RuntimeError: ray is not installed.
        """
        return actor_class(cls, remote_config)


class TensorDictReplayBuffer(ReplayBuffer[DataT, StorageT, SamplerT, WriterT]):
    """The same as ReplayBuffer, under the name that code for TensorDicts uses; what
    ``rb[...]`` gives carries ``index``, as samples do.

    Example:
        >>> from replaykit import TensorDictReplayBuffer
        >>> len(TensorDictReplayBuffer())
        0
    """

    _reads_index = True

    def __init__(
        self,
        *,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        priority_key: Any = "td_error",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            storage=storage, sampler=sampler, writer=writer, priority_key=priority_key, **kwargs
        )

    def extend(
        self,
        data: Any = None,
        *,
        tensordicts: Any = None,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Stores a batch, as ``ReplayBuffer.extend``.

        Args:
            data: TensorDicts, or what ``ReplayBuffer.extend`` stores as they are stored.
            tensordicts: TorchRL's name for ``data``.
            update_priority, timeout: as ``ReplayBuffer.extend``.

        Raises:
            TypeError: both names. ValueError: something without rows. Else as
                ``ReplayBuffer.extend``.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, TensorDictReplayBuffer
            >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
            >>> rb.extend(tensordicts=TensorDict({"x": torch.zeros(3)}, [3]))
            tensor([0, 1, 2])
        """
        rows = rows_by_name(type(self).__name__, data, tensordicts)
        return super().extend(rows, update_priority=update_priority, timeout=timeout)


def rows_by_name(name: str, data: Any, tensordicts: Any) -> Any:
    """Returns the rows that a buffer of TensorDicts was given, under either name.

    Raises:
        TypeError: both names. ValueError: something without rows.
    """
    if tensordicts is not None:
        if data is not None:
            raise TypeError("expected data or tensordicts, got both: they are one argument")
        data = tensordicts
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        raise ValueError(
            f"{name} only accepts TensorDictBase subclasses, and dicts, lists, tensors and "
            f"tensorclasses that are stored alike; expected rows, got {data!r:.80}"
        )
    return data
