"""Define `ReplayBuffer` and its prioritized variants."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from replaykit._ray import actor_class
from replaykit.buffer.components import Components
from replaykit.buffer.core import DataT, PrioritizedT, SamplerT, StorageT, WriterT
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.editing import Editing
from replaykit.buffer.episode_views import Streams
from replaykit.buffer.persistence import Saving
from replaykit.buffer.row_updates import Conditional, Priorities
from replaykit.keywords import Replaced, checked_keywords, named_after
from replaykit.samplers import PrioritizedSampler
from replaykit.storages.memmap import join_storage

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
    """Rows in a storage, chosen by a sampler and placed by a writer.

    Args:
        storage: a storage, or a function that makes it. Default: ``ListStorage(1000)``.
        sampler: a sampler, or a function that makes it. Default: ``RandomSampler()``.
        writer: a writer, or a function that makes it. Default: ``RoundRobinWriter()``.
        sample_unit: the law that turns a drawn row into the rows of a batch. Default:
            ``Transition()``, which returns the drawn row alone.
        collate_fn: a function that combines the rows that were read. Transforms receive its result.
            By default, rows of tensor storages are unchanged and rows of lists are stacked.
        pin_memory: pin the CPU tensors of a batch if there is a CUDA device.
        device: device of batches after the transforms; None for the storage's device. A batch is
            copied to a CUDA device asynchronously, in one copy, through a ring of pinned buffers.
        prefetch: number of batches that threads prepare in advance; needs ``batch_size``. See
            ``docs/overlap.md``.
        transform: a callable, an object with ``forward`` or ``inv``, or a Compose of them.
        transform_factory: a function that makes the transform; implies ``delayed_init``.
        batch_size: default number of rows of a batch.
        dim_extend: the time dimension of written data. Default: ``storage.ndim - 1``.
        generator: source of all randomness. Default: torch's global generator.
        consume_after_n_samples: number of draws after which the slot of a row is free for new rows.
            A ``ConsumingSampler`` with this number replaces a RandomSampler.
        priority_key: the key of priorities in written rows and in batches.
        delayed_init: make the components only at first use.
        contiguous: make every tensor of a batch contiguous. By default small columns are strided
            views of one allocation, which is faster.
        shared: let processes that receive the buffer, spawned or forked, or that call ``join``,
            write and sample the same rows. Requires a LazyTensorStorage or LazyMemmapStorage, and
            a RoundRobinWriter. See ``docs/sharing.md``.
        compilable: no effect; accepted for compatibility with TorchRL. Compiled functions may call
            every method. The call breaks the graph and runs uncompiled. With ``fullgraph=True``,
            ``torch.compile`` raises an error.
        rate_limiter: makes writes and samples wait for each other, so that neither runs too far
            ahead. See ``RateLimiter`` and ``docs/pace.md``.

    Raises:
        TypeError: an argument has another type, or both ``transform`` and ``transform_factory`` are
            given.
        ValueError: a value is out of range, or components do not work together.

    All methods may be called from any thread. A read never returns a half-written row.

    For type checkers, a batch is a TensorDict. ``storage``, ``sampler`` and ``writer`` have the
    types of the arguments; with the plain annotation ``ReplayBuffer`` they may have any type. For
    other rows, annotate the type of a batch:
    ``rb: ReplayBuffer[torch.Tensor] = ReplayBuffer(...)``.

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
        """Return the buffer itself, which is its own handle in this process.

        ``RayReplayBuffer.client()`` returns a handle that can be sent to other processes. With
        ``shared=True`` the buffer itself can be sent.
        """
        return self

    @classmethod
    def join(cls, path: str | os.PathLike[str], **parts: Any) -> Self:
        """Return a buffer over the rows that processes share in a folder.

        The calling process need not be related to the process that made the buffer with
        ``shared=True``. It may write, sample and set priorities like all others. If the storage has
        ``recover=True``, the rows are also found after all processes have ended or were killed.

        Args:
            path: the ``scratch_dir`` of the buffer's storage.
            parts: arguments of the constructor other than ``storage`` and ``shared``. The sampler
                has priorities, and there is a rate limiter, if the other processes' buffers have.

        Raises:
            FileNotFoundError: no processes have shared rows in the folder.
            ValueError: a part is not that of the other processes; the error names it.
            RuntimeError: all processes have ended, and the storage has no ``recover=True``.
            RuntimeError: a process recovers the rows without ``shared=True``, for five seconds.
            CheckpointError: a file in the folder is damaged.

        Cost: the files are mapped, not read. An index of episodes or priorities reads its columns
        at its first use.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from replaykit import LazyMemmapStorage, ReplayBuffer
            >>> folder = tempfile.mkdtemp()
            >>> storage = LazyMemmapStorage(10, scratch_dir=folder, recover=True)
            >>> rb = ReplayBuffer(storage=storage, shared=True)
            >>> _ = rb.extend({"x": torch.arange(3)})
            >>> other = ReplayBuffer.join(folder)  # also in another process
            >>> other[:]["x"].tolist()
            [0, 1, 2]
        """
        for name in ("storage", "shared"):
            if name in parts:
                raise TypeError(f"join() finds the {name} in the folder; got {name}=")
        storage = join_storage(Path(path).expanduser())
        return cls(storage=storage, shared=True, **parts)  # type: ignore[arg-type]

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """Return a Ray actor class of this buffer.

        Its ``.remote(...)`` takes the buffer's arguments and starts an actor.

        Args:
            remote_config: options of ``ray.remote``. Default: one CPU and no GPU.

        Raises:
            RuntimeError: ray is not installed.
        """
        return actor_class(cls, remote_config)


class TensorDictReplayBuffer(ReplayBuffer[DataT, StorageT, SamplerT, WriterT]):
    """A ReplayBuffer whose ``rb[...]`` carries ``index``, as samples do.

    TorchRL has this class for rows that are TensorDicts. All other behaviour is that of the base
    class.

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
        """Store a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: TensorDicts, or other rows that ``ReplayBuffer.extend`` accepts.
            tensordicts: the name of ``data`` in TorchRL.
            update_priority, timeout: as for ``ReplayBuffer.extend``.

        Raises:
            TypeError: both ``data`` and ``tensordicts`` are given.
            ValueError: the data has no rows.
            Other errors as for ``ReplayBuffer.extend``.

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
    """Return the rows that a caller passed as ``data`` or ``tensordicts``.

    Raises:
        TypeError: both ``data`` and ``tensordicts`` are given.
        ValueError: the data has no rows.
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
    """A ReplayBuffer with a PrioritizedSampler over all slots of its storage.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer, weight_norm, stratified:
            options of the PrioritizedSampler.
        sampler: a sampler to use instead.
        sampler_device: device of the priorities; by default the storage's device.
        kwargs: all other arguments of ReplayBuffer.

    Raises:
        TypeError: ``sampler`` is given together with ``sampler_device`` or an option of the
            sampler, or ReplayBuffer has no such argument.
        ValueError: as for ReplayBuffer and PrioritizedSampler.

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
    """A PrioritizedReplayBuffer whose ``rb[...]`` carries ``index``, as samples do.

    TorchRL has this class for rows that are TensorDicts. Everything else is as in
    PrioritizedReplayBuffer.

    Args:
        alpha, beta, eps, reduction, max_priority_within_buffer, weight_norm, stratified: options of
            the PrioritizedSampler.
        priority_key: the key of priorities in written rows and in batches.
        sampler_device: device of the priorities; by default the storage's device.
        kwargs: all other arguments of ReplayBuffer, except ``sampler``.

    Raises:
        TypeError: ``sampler`` is given, or ReplayBuffer has no such argument.
        ValueError: as for ReplayBuffer and PrioritizedSampler.

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
        """Store a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: TensorDicts, or other rows that ``ReplayBuffer.extend`` accepts.
            tensordicts: the name of ``data`` in TorchRL.
            update_priority, timeout: as for ``ReplayBuffer.extend``.

        Raises:
            TypeError: both ``data`` and ``tensordicts`` are given.
            ValueError: the data has no rows.
            Other errors as for ``ReplayBuffer.extend``.

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
