"""Define the prioritized buffers, and those of TorchRL's TensorDict classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from replaykit.buffer.components import DataT, PrioritizedT, SamplerT, StorageT, WriterT
from replaykit.buffer.replay_buffer import ReplayBuffer
from replaykit.keywords import Replaced, checked_keywords
from replaykit.samplers import PrioritizedSampler


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
        overwrite: bool = True,
        tags: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Store a batch, as ``ReplayBuffer.extend`` does.

        Args:
            data: TensorDicts, or other rows that ``ReplayBuffer.extend`` accepts.
            tensordicts: the name of ``data`` in TorchRL.
            update_priority, timeout, overwrite, tags: as for ``ReplayBuffer.extend``.

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
        return ReplayBuffer.extend(
            self,
            rows,
            update_priority=update_priority,
            timeout=timeout,
            overwrite=overwrite,
            tags=tags,
        )


class PrioritizedReplayBuffer(ReplayBuffer[DataT, StorageT, PrioritizedT, WriterT]):
    """A ReplayBuffer with a PrioritizedSampler over all slots of its storage.

    Args:
        alpha, beta, eps, dtype, reduction, max_priority_within_buffer, weight_norm, stratified:
            options of the PrioritizedSampler.
        sampler: a sampler to use instead.
        sampler_device: device of the priorities; by default the CPU.
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
        sampler_device: device of the priorities; by default the CPU.
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

    extend = TensorDictReplayBuffer.extend
