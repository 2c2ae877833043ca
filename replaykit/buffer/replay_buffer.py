"""Define `ReplayBuffer` and its prioritized variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from replaykit._ray import actor_class
from replaykit.buffer.components import Components
from replaykit.buffer.core import DataT, PrioritizedT, SamplerT, StorageT, WriterT
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.episode_views import Streams
from replaykit.buffer.persistence import Saving
from replaykit.buffer.row_updates import Conditional, Priorities
from replaykit.buffer.writing import Editing
from replaykit.keywords import Replaced, checked_keywords, named_after
from replaykit.samplers import PrioritizedSampler

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "rows_by_name",
]


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


class PrioritizedReplayBuffer(ReplayBuffer[DataT, StorageT, PrioritizedT, WriterT]):
    """A ReplayBuffer with a PrioritizedSampler as large as its storage.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer, weight_norm, stratified:
            of the PrioritizedSampler.
        sampler: takes its place.
        sampler_device: where priorities lie; by default with the storage.
        kwargs: everything else that a ReplayBuffer takes.

    Raises:
        TypeError: ``sampler`` with ``sampler_device`` or another option of samplers, or what a
            ReplayBuffer does not take.
        ValueError: as a ReplayBuffer and a PrioritizedSampler do.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, PrioritizedReplayBuffer
        >>> rb = PrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(100),
        ...                              batch_size=4)
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(20, 3)}, [20]))
        >>> batch = rb.sample()
        >>> rb.update_priority(batch["index"], torch.rand(4), generation=batch["index_generation"])
        >>> batch["priority_weight"].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    _replaced: ClassVar[dict[str, Replaced]] = {
        "sync": Replaced(
            (True,),
            "shared=True has several processes write and one of them draw by priority; leave "
            "sync out",
        ),
    }

    @checked_keywords
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: StorageT | Callable[[], StorageT] | None = None,
        sampler: PrioritizedT | Callable[[], PrioritizedT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        sampler_device: torch.device | str | int | None = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        weight_norm: str = "global",
        stratified: bool = False,
        **kwargs: Any,
    ) -> None:
        if sampler is not None and sampler_device is not None:
            raise TypeError("expected sampler or sampler_device, got both")
        given = {
            "dtype": dtype is not torch.float,
            "reduction": reduction != "max",
            "max_priority_within_buffer": max_priority_within_buffer,
            "weight_norm": weight_norm != "global",
            "stratified": stratified,
        }
        if sampler is not None and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise TypeError(f"expected a sampler or its options, got sampler and {names}")
        own: Any = PrioritizedSampler(
            alpha=alpha,
            beta=beta,
            eps=eps,
            dtype=dtype,
            reduction=reduction,
            max_priority_within_buffer=max_priority_within_buffer,
            device=sampler_device,
            weight_norm=weight_norm,
            stratified=stratified,
        )
        super().__init__(
            storage=storage, sampler=own if sampler is None else sampler, writer=writer, **kwargs
        )


class TensorDictPrioritizedReplayBuffer(
    PrioritizedReplayBuffer[DataT, StorageT, PrioritizedT, WriterT]
):
    """The same as PrioritizedReplayBuffer, under the name that code for TensorDicts uses; what
    ``rb[...]`` gives carries ``index``, as samples do.

    Args:
        alpha, beta, eps, reduction, max_priority_within_buffer, weight_norm, stratified: of the
            PrioritizedSampler.
        priority_key: where written data and learners put priorities.
        sampler_device: where priorities lie; by default with the storage.
        kwargs: everything else that a ReplayBuffer takes, ``sampler`` apart.

    Raises:
        TypeError: ``sampler``, or what a ReplayBuffer does not take.
        ValueError: as a ReplayBuffer and a PrioritizedSampler do.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, batch_size=8,
        ...                                        storage=LazyTensorStorage(100))
        >>> _ = rb.extend(TensorDict({"observation": torch.randn(50, 3)}, [50]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(8)
        >>> rb.update_tensordict_priority(batch)
    """

    _reads_index = True

    @checked_keywords
    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: Any = "td_error",
        eps: float = 1e-8,
        sampler_device: torch.device | str | int | None = None,
        reduction: str = "max",
        storage: StorageT | Callable[[], StorageT] | None = None,
        writer: WriterT | Callable[[], WriterT] | None = None,
        **kwargs: Any,
    ) -> None:
        if "sampler" in kwargs:
            raise TypeError("a TensorDictPrioritizedReplayBuffer makes its own sampler; got one")
        super().__init__(
            alpha=alpha,
            beta=beta,
            priority_key=priority_key,
            eps=eps,
            sampler_device=sampler_device,
            reduction=reduction,
            storage=storage,
            writer=writer,
            **kwargs,
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
            >>> from replaykit import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
            >>> rb = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5,
            ...                                        storage=LazyTensorStorage(10))
            >>> rb.extend(tensordicts=TensorDict({"x": torch.zeros(3)}, [3]))
            tensor([0, 1, 2])
        """
        rows = rows_by_name(type(self).__name__, data, tensordicts)
        return super().extend(rows, update_priority=update_priority, timeout=timeout)
