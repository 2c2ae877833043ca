"""Define `ReplayBufferEnsemble`, the public name of a mixture."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from typing_extensions import Self

from replaykit._compat import TensorDict, is_tensordict
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.buffer_dataset import check_loaded, check_workers, for_readers
from replaykit.buffer.components import (
    DataT,
    as_chain,
    check_generator,
    checked_prefetch,
)
from replaykit.buffer.dataloader import Loading
from replaykit.buffer.deliver import should_merge
from replaykit.buffer.draw import check_iterable, checked_batch_size
from replaykit.buffer.source import (
    BatchStreams,
    BufferHandle,
    BufferSource,
    HandleSource,
    RemoteRequest,
    Source,
    check_unlimited,
)
from replaykit.declared import Count, read_value
from replaykit.interrupts import deferred
from replaykit.keywords import checked_keywords, named_after
from replaykit.mixture import mixture_saving
from replaykit.mixture.choosing import SamplerEnsemble, member_named
from replaykit.mixture.joining import INDEX, BatchParts, length_of, merged, select, stacked
from replaykit.mixture.member_parts import Ramp, StorageEnsemble, WriterEnsemble, chosen, refused
from replaykit.mixture.mixture import Mixture, MixtureDraw
from replaykit.mixture.mixture_priorities import update_from_batch, update_rows
from replaykit.structure import map_leaves
from replaykit.transfer import device_named
from replaykit.transforms import Compose


@named_after
class ReplayBufferEnsemble(Loading[DataT], BatchStreams):
    """Several buffers sampled as one. Members are buffers, data sets or ensembles.

    A batch of B rows has batch size ``[K, B // K]``. Its K parts of ``B // K`` rows each come from
    one member. With ``num_buffer_sampled=B`` the member of every row is chosen separately. Each
    member uses its own sampler, storage and transforms. Members may be written to and sampled
    separately at any time, as ``ensemble[i]``.

    Args:
        rbs: the buffers. A remote buffer is a RayReplayBuffer, a ShardedReplayBuffer, or a
            ``client()`` of such a buffer. Instead of buffers, all of the next three arguments may
            be given.
        storages, samplers, writers: the components from which the buffers are made.
        transform: transform of the batch, applied after the members' transforms. It must not read
            neighbouring rows.
        batch_size: default number of rows of a batch.
        collate_fn: a function that makes a batch of a list of K samples, one per part. By default
            tensors are stacked, and all samples must have equal keys, shapes and dtypes.
        collate_fns: one function or None per member. A function replaces the member's own
            ``collate_fn``.
        p: relative weights of the members. With ``"size"``, a weight is the number of rows of the
            member at the draw. None means equal weights. ``ensemble.sampler.p`` may be set at any
            time, also by a scheduler: ``LinearScheduler(ensemble, "p", [0.5, 0.5], num_steps)``. A
            function gets the number of the batch, 0, 1, ..., and returns weights.
        sample_from_all: every member has one part, in the order of the members.
        num_buffer_sampled: the number of parts K; by default the number of members.
        counts: with "multinomial", the member of each part is drawn independently, with
            replacement. With "exact", each member has ``K * p`` parts, rounded at random if this is
            not a whole number.
        unready: the treatment of members with a positive weight that cannot return their rows now.
            "raise" raises the error of such a member, even if it would not be chosen. "skip" treats
            its weight as 0.
        ramp: a `Ramp`, which moves the weights of members to ``p`` over epochs. ``set_epoch``
            numbers the epochs.
        ready: a minimum for each member, below which its weight is 0. A minimum is a number of
            rows, a pair such as ``(10, "episodes")`` or ``(100, "windows")``, or None for 1 row.
            Windows are those that the member's sampler can draw. Remote members and ensembles
            count rows only.
        keys: the keys to keep, if samples of members have further keys; None for all.
        device: device to which the samples of members are moved. With None, all samples must be on
            one device.
        generator: source of randomness for the choice of members and for their draws. With None,
            torch's global generator chooses members, and each member draws with its own generator.
            Remote members draw with seeds from the source that chooses members.
        shared: let processes that receive the ensemble write and sample the same rows. The members
            must be shared, or data sets.
        priority_key: the key under which learners write priorities, for all members. None for the
            key of each member.
        pin_memory, prefetch, transform_factory, delayed_init, contiguous, compilable: as for
            ReplayBuffer. Batches that members have prefetched are not used.

    Raises:
        RuntimeError: both buffers and components are given, or weights with ``sample_from_all``.
        TypeError: neither buffers nor components are given, or an argument has another type.
        ValueError: a value is out of range, a buffer has a rate limiter, or the sampler of a remote
            buffer has passes.

    Samples carry ``("index", "index")`` and ``("index", "buffer_ids")``. If a member is an
    ensemble, the index is that in the buffer of the row, and does not name that buffer. Priorities
    of such rows cannot be set. All batches have the same info keys. If a member's sampler does not
    return a key of another member, the member's rows get a default value for that key. The default
    is 1 for ``priority_weight`` and True for masks. Such a row is its own anchor, and a sequence of
    length 1. Windows are numbered from 0 in each part.

    A member that draws without replacement starts another pass at the end of a pass. An iteration
    ends after the batch with which every member that can be chosen has ended a pass. If such a
    member draws with replacement, the iteration never ends.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> demonstrations, online = (
        ...     ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        >>> _ = demonstrations.extend(TensorDict({"x": torch.zeros(100)}, [100]))
        >>> mixture = ReplayBufferEnsemble(
        ...     demonstrations, online, p=[1, 3], num_buffer_sampled=8, counts="exact",
        ...     unready="skip", batch_size=32)
        >>> mixture.sample()["x"].mean()
        tensor(0.)
        >>> _ = online.extend(TensorDict({"x": torch.ones(4)}, [4]))
        >>> mixture.sample()["x"].mean()
        tensor(0.7500)
    """

    _replaced = ReplayBuffer._replaced

    @checked_keywords
    def __init__(
        self,
        *rbs: ReplayBuffer[DataT] | BufferHandle,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Any = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        counts: str | None = None,
        unready: str = "raise",
        ramp: Ramp | None = None,
        ready: Sequence[Any] | None = None,
        keys: Sequence[Any] | None = None,
        device: torch.device | str | int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        priority_key: Any = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform_factory: Callable[[], Any] | None = None,
        delayed_init: bool | None = None,
        contiguous: bool = False,
        compilable: bool = False,
    ) -> None:
        parts = {"storages": storages, "samplers": samplers, "writers": writers}
        given = [name for name, part in parts.items() if part is not None]
        if rbs and given:
            raise RuntimeError(
                f"expected either buffers or storages, samplers and writers, got {given} too"
            )
        if not rbs and len(given) < len(parts):
            raise TypeError(
                "expected buffers, or storages=, samplers= and writers=, got "
                f"{given or 'none of them'}"
            )
        given_choice = (p, num_buffer_sampled, counts, ramp, ready) != (None,) * 5
        if samplers is not None and (given_choice or sample_from_all or unready != "raise"):
            raise TypeError(
                "expected p=, sample_from_all=, num_buffer_sampled=, counts=, unready=, ramp= and "
                "ready= of the SamplerEnsemble if one is given"
            )
        members = tuple(rbs or _made_of(parts, priority_key))
        self._members: tuple[Any, ...] = members
        collates = _checked_collates(collate_fns, members)
        sources = [*map(_source_of, range(len(members)), members, collates)]
        if samplers is None:
            samplers = SamplerEnsemble(
                *(source.sampler for source in sources),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
                counts=counts,
                unready=unready,
                ramp=ramp,
                ready=ready,
            )
        if shared:
            _check_shared(members)
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory are both given; expected one")
        check_generator(generator)
        self._shared = bool(shared)
        batch_size = None if batch_size is None else checked_batch_size(batch_size)
        self._mixture = Mixture(
            sources,
            samplers,
            transform_factory or functools.partial(as_chain, transform),
            batch_size=batch_size,
            collate_fn=collate_fn,
            keys=None if keys is None else _checked_keys(keys),
            device=None if device is None else device_named(device),
            generator=generator,
            priority_key=priority_key,
            pin_memory=pin_memory,
            contiguous=bool(contiguous),
            depth=checked_prefetch(prefetch, batch_size),
        )
        _check_prefetch(self._mixture)
        self._pass_ended = False
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            _ = self._mixture.chain

    @classmethod
    def _over(cls, mixture: Mixture) -> Self:
        """Return an ensemble over a mixture."""
        self = cls.__new__(cls)
        self._set_mixture(mixture, shared=False)
        return self

    def _set_mixture(self, mixture: Mixture, *, shared: bool) -> None:
        self._mixture, self._shared, self._pass_ended = mixture, shared, False
        self._members = tuple(map(_given, mixture.sources))

    # -- description ----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Any, ...]:
        """The buffers that the ensemble draws from; handles for remote ones."""
        return self._members

    @property
    def num_members(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def initialized(self) -> bool:
        """True if the transforms exist. With ``transform_factory`` they may not exist yet."""
        return self._mixture.initialized

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members. That of a remote member is its handle."""
        transforms = [getattr(one, "transform", None) for one in self._members]
        chains = [one if type(one) is Compose else None for one in transforms]
        return StorageEnsemble(*self._of_members("storage"), transforms=chains)

    @property
    def sampler(self) -> SamplerEnsemble:
        """The samplers of the members, with the weights that choose among them."""
        return self._mixture.sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members. That of a remote member is its handle."""
        return WriterEnsemble(*self._of_members("writer"))

    def _of_members(self, name: str) -> list[Any]:
        return [
            one if isinstance(one, BufferHandle) else getattr(one, name) for one in self._members
        ]

    @property
    def transform(self) -> Compose:
        """The chain of transforms of batches, possibly empty."""
        return self._mixture.chain

    @property
    def batch_size(self) -> int | None:
        """Default number of rows of a batch."""
        return self._mixture.batch_size

    @property
    def shared(self) -> bool:
        """True if processes that receive the ensemble write and sample the same rows."""
        return self._shared

    @property
    def write_count(self) -> int:
        """Number of rows written through all members, summed over all lanes."""
        return sum(member.write_count for member in self._members)

    def __len__(self) -> int:
        """Return the number of rows of all members; ``num_members`` is the number of members."""
        return sum(map(len, self._members))

    def stats(self) -> dict[str, Any]:
        """Return size, write count, capacity and utilization of all members together.

        The result also has the number of prefetched batches and the number of members. The method
        changes nothing. Cost: O(members).

        Example:
            >>> import torch
            >>> from replaykit import ReplayBuffer, ReplayBufferEnsemble, LazyTensorStorage
            >>> one, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
            >>> _ = one.extend(torch.zeros(5))
            >>> stats = ReplayBufferEnsemble(one, other).stats()
            >>> stats["size"], stats["utilization"], stats["num_buffers"]
            (5, 0.25, 2)
        """
        each = [member.stats() for member in self._members]
        size, capacity = (sum(one[name] for one in each) for name in ("size", "capacity"))
        return {
            "size": size,
            "write_count": sum(one["write_count"] for one in each),
            "prefetch_queue_size": self._mixture.queued(),
            "initialized": self.initialized,
            "capacity": capacity,
            "utilization": size / capacity if capacity else 0.0,
            "num_buffers": len(each),
        }

    def __repr__(self) -> str:
        if not self.initialized:
            return f"{type(self).__name__}(not initialized)"
        parts = [f"{member!r}" for member in self._members]
        parts += [
            f"p={self.sampler.p}",
            f"batch_size={self.batch_size}",
            f"transform={self.transform!r}",
        ]
        inside = ",\n".join("    " + part.replace("\n", "\n    ") for part in parts)
        return f"{type(self).__name__}(\n{inside})"

    # -- sampling -------------------------------------------------------------------------------

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[True] = ...,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[DataT, TensorDict]: ...
    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> DataT | tuple[DataT, TensorDict]: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: number of rows of all parts together; None for the constructor's
                ``batch_size``.
            return_info: also return the info of the draw.
            include_info: if False, the TensorDict does not contain the info. Deprecated.
            timeout: seconds to wait for remote members. With None the call waits until they answer
                or end, or up to the ``timeout`` of a sharded buffer. Local members need no wait.

        Returns:
            For TensorDict rows, a TensorDict of batch size ``[K, B // K]`` for K parts. Its
            ``("index", "index")`` is int64. If a member has lanes, its shape is ``[K, B // K,
            ndim]``, padded with -1 for members with fewer dimensions. ``("index", "buffer_ids")``
            is the member of each row. The batch also has ``index_generation`` and the info of the
            members' samplers; see `ReplayBufferEnsemble`. For other rows, the data alone. The batch
            owns its memory. With ``return_info``, the result is a pair of the batch and a
            TensorDict of the info.

        Raises:
            RuntimeError: no batch size is given, or a transform changed the number of rows.
            ValueError: the number of parts does not divide the batch size, or samples of members
                differ in keys, shapes or dtypes. The error names the difference.
            TimeoutError, ActorLost: a remote member has not answered in time, or has ended.
            The error of a member that cannot return its rows, with the number of the member.

        If the call raises, all draws are rolled back. No row has left a pass, and the next call
        returns the batch that this call would have returned.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> one, other = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2))
            >>> _ = one.extend(TensorDict({"x": torch.arange(9)}, [9]))
            >>> _ = other.extend(TensorDict({"x": torch.arange(9) + 10}, [9]))
            >>> ensemble = ReplayBufferEnsemble(one, other, sample_from_all=True, batch_size=6)
            >>> batch = ensemble.sample()
            >>> batch.shape, batch["index", "buffer_ids"]
            (torch.Size([2, 3]), tensor([[0, 0, 0],
                    [1, 1, 1]]))
            >>> rows = batch["index", "index"] + 10 * batch["index", "buffer_ids"]
            >>> bool((batch["x"] == rows).all())
            True
        """
        merge = include_info is None or should_merge(include_info)
        needed = not return_info
        _, data, info = self._mixture.next_in_turn(batch_size, timeout, merge=merge, needed=needed)
        if needed:
            return data
        collated = TensorDict({}, info[INDEX].shape[:2])
        for key, value in info.items():
            collated.set(key, value)
        return data, collated

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether ``sample`` would succeed now.

        It would succeed if every member that can be chosen is ready.

        Raises:
            RuntimeError: no batch size is given.
        """
        return self._mixture.ready(self._mixture.size_of(batch_size))

    def __iter__(self) -> Iterator[DataT]:
        """Yield batches until every member that can be chosen has ended a pass.

        With draws with replacement, the iteration never ends.

        Raises:
            RuntimeError: the ensemble has no batch size.
        """
        check_iterable(self.batch_size)
        return self._batches()

    def _batches(self) -> Iterator[DataT]:
        ran_out = False
        while not ran_out:
            draw, data, _ = self._mixture.next_in_turn(None)
            ran_out = draw.ran_out
            yield data

    def next(self) -> DataT | None:
        """Return the next batch of the ensemble's own iteration, or None at its end.

        The call after None starts the next iteration.
        """
        check_iterable(self.batch_size)
        if self._pass_ended:
            self._pass_ended = False
            return None
        draw, data, _ = self._mixture.next_in_turn(None)
        self._pass_ended = draw.ran_out
        return data

    def shutdown(self) -> None:
        """Join the prefetch threads. Later calls of ``sample`` raise RuntimeError.

        Draws of batches that were not delivered are undone, so a later save lacks no row of a pass.
        """
        self._mixture.shut_down()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Replace the generator that chooses members and draws their rows.

        Args:
            generator: the new generator. With None, torch's global generator chooses members, and
                each member draws with its own generator.
        """
        check_generator(generator)
        with self._mixture.lock:
            self._mixture.rewind()
            self._mixture.generator = generator

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which a `Ramp` counts, also in inner ensembles.

        Call it at the beginning of each epoch, also of epochs without training. Members that are
        ready for the first time are ready since this epoch. Prefetched batches are drawn again.
        Worker processes of a loader use the epoch at their start.

        Raises:
            ValueError: ``epoch`` is not an int of at least 0.
        """
        read_value(Count, epoch, "epoch")
        for _, one in self._mixture.walk():
            if isinstance(one, Mixture):
                with one.lock:
                    one.rewind()
                    one.sampler.set_epoch(epoch)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform at the end of the chain; return the ensemble.

        Raises:
            RuntimeError: ``transform`` is neither a callable nor an object with ``forward`` or
                ``inv``.
            ValueError: the transform reads neighbouring rows, or follows writes.
        """
        return self.insert_transform(len(self.transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Insert a transform before position ``index`` of the chain; return the ensemble.

        Prefetched batches are drawn again.

        Raises:
            IndexError: ``index`` is not a position in the chain.
            RuntimeError, ValueError: as for ``append_transform``.
        """
        with self._mixture.lock:
            chain = self.transform.copy()
            chain.insert(index, transform, invert=invert)
            self._mixture.chain = chain
            self._mixture.rewind()
        return self

    # -- priorities -----------------------------------------------------------------------------

    def update_tensordict_priority(self, data: Any) -> None:
        """Set priorities that the learner has written into a sample.

        Each member receives the priorities of its rows.

        Args:
            data: a TensorDict from ``sample``, or some of its rows in any batch shape. The values
                are under the ``priority_key`` of the ensemble, or by default of each member. There
                is one value per row. Further dimensions are reduced.

        Rows of members without priorities are skipped. So are rows that were overwritten since the
        sample.

        Raises:
            KeyError: the ``priority_key``, or the key that names the member of a row, is missing.
            TypeError: a row comes from a prioritized buffer of a member that is an ensemble.
            ValueError: a priority of a real row is NaN, negative or infinite.
            IndexError: a member does not exist, or does not store a row. Nothing has changed.
            ActorLost, TimeoutError: a remote member has ended, or does not answer. Priorities may
                have changed only if all members had already confirmed their rows.

        Requests go to remote members first, all at the same time. They cost two round trips.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import (LazyTensorStorage, PrioritizedSampler, ReplayBuffer,
            ...                        ReplayBufferEnsemble)
            >>> plain, by_priority = ReplayBuffer(storage=LazyTensorStorage(4)), ReplayBuffer(
            ...     storage=LazyTensorStorage(4), sampler=PrioritizedSampler(alpha=1.0, beta=1.0))
            >>> for rb in (plain, by_priority):
            ...     _ = rb.extend(TensorDict({"x": torch.arange(4)}, [4]))
            >>> ensemble = ReplayBufferEnsemble(plain, by_priority, sample_from_all=True)
            >>> batch = ensemble.sample(8)
            >>> batch["td_error"] = (batch["index", "index"] == 2).float()
            >>> ensemble.update_tensordict_priority(batch)
            >>> batch = ensemble.sample(8)
            >>> ensemble.update_tensordict_priority(batch.set("td_error", torch.ones(2, 4)))
        """
        update_from_batch(self._mixture, data)

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Set the priorities of rows of members.

        Args:
            index: the ``index`` of a sample. It is a TensorDict or mapping with ``index`` and
                ``buffer_ids``. Or, without ``priority``, a TensorDict as for
                ``update_tensordict_priority``.
            priority: a number, or one number per row in the batch shape of ``index``.
            generation: the generations of the slots when they were sampled. Slots written since are
                skipped.

        Rows of members without priorities are skipped. If no member has priorities, a UserWarning
        is issued.

        Raises:
            TypeError: the index does not name members.
            ValueError: there is not one priority per row.
            Other errors as for ``update_tensordict_priority``.
        """
        update_rows(self._mixture, index, priority, generation)

    # -- members and rows -----------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> ReplayBuffer[DataT]: ...
    @overload
    def __getitem__(self, index: tuple[Any, str]) -> Any: ...
    @overload
    def __getitem__(self, index: tuple[Any, Any]) -> DataT: ...
    @overload
    def __getitem__(
        self, index: slice | EllipsisType | Sequence[int] | Sequence[bool] | torch.Tensor
    ) -> Self: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of several members, or rows of members.

        Args:
            index: an int for one member. A slice, list or tensor of ints or bools for an ensemble
                of these members, with their weights. ``...`` for an ensemble of all members. A
                second index applies to the member, or to each of the members. The rows of several
                members are stacked. For example, ``ensemble[:, 3]`` is row 3 of every member, and
                ``ensemble[:, :8]`` is a batch ``[K, 8]``.

        Raises:
            IndexError: a member or row does not exist.
            TypeError: the index has numbers with fractions.
            RuntimeError: the index has more than one dimension.
            ValueError: the rows of members differ in keys, shapes, dtypes or number.

        Example:
            >>> import torch
            >>> from replaykit import ReplayBuffer, ReplayBufferEnsemble, LazyTensorStorage
            >>> rbs = [ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(3)]
            >>> for number, rb in enumerate(rbs):
            ...     _ = rb.extend(torch.arange(5) + 10 * number)
            >>> ensemble = ReplayBufferEnsemble(*rbs)
            >>> ensemble[1] is rbs[1], ensemble[1:].num_members, ensemble[:, 3]
            (True, 2, tensor([ 3, 13, 23]))
            >>> ensemble[[0, 2], 1:3]
            tensor([[ 1,  2],
                    [21, 22]])
        """
        if isinstance(index, str) or (
            isinstance(index, tuple) and bool(index) and isinstance(index[0], str)
        ):
            raise TypeError(
                f"expected members of the ensemble, got a key: columns are those of a member, "
                f"ensemble[i][{index!r}]"
            )
        if not isinstance(index, tuple):
            numbers = chosen(index, self.num_members, "an ensemble")
            return self._members[numbers] if isinstance(numbers, int) else self._of(numbers)
        if not index:
            return self
        numbers = chosen(index[0], self.num_members, "an ensemble")
        if len(index) == 1:
            return self[index[0]]
        inner = index[1] if len(index) == 2 else index[1:]
        if isinstance(numbers, int):
            return self._members[numbers][inner]
        return self._rows(numbers, inner)

    def _rows(self, numbers: list[int], inner: Any) -> Any:
        """Return the rows at an index of some members, combined and transformed."""
        single, keys, collate = _is_number(inner), self._mixture.keys, self._mixture.collate_fn
        pieces = [self._members[number][[int(inner)] if single else inner] for number in numbers]
        if keys is not None:
            pieces = [select(data, keys, n) for n, data in zip(numbers, pieces, strict=True)]
        if collate is not None:
            data = collate(pieces)
        else:
            counts = {*map(length_of, pieces)}
            if len(counts) > 1:
                raise ValueError(f"expected equally many rows of each member, got {sorted(counts)}")
            # By position, because an index may name a member twice and in any order.
            places = BatchParts(list(range(len(pieces))), counts.pop())
            data = stacked([*enumerate(pieces)], places)
        if single and (isinstance(data, torch.Tensor) or is_tensordict(data)):
            data = data.squeeze(1)
        elif single:
            data = map_leaves(data, lambda leaf: leaf.squeeze(1))
        return self.transform.forward(data) if len(self.transform) else data

    def _of(self, numbers: list[int]) -> Any:
        """Return an ensemble like this one, of some of the members."""
        if numbers == list(range(self.num_members)):
            return self
        if not numbers:
            raise IndexError("expected at least one member of an ensemble, got none")
        mixture = self._mixture
        members = [self._members[number] for number in numbers]
        depth, generator = mixture.depth, mixture.generator
        arguments = self._arguments(numbers)
        made = type(self)(*members, **arguments, prefetch=depth, generator=generator)
        made.sampler.weights.load_state_dict(self.sampler.weights.state_of(numbers))
        return made

    def _arguments(self, numbers: list[int]) -> dict[str, Any]:
        """Return the arguments of an ensemble like this one, of some of the members."""
        mixture = self._mixture
        collates = [getattr(source, "collate", None) for source in mixture.sources]
        return {
            "transform": mixture.chain,
            "batch_size": mixture.batch_size,
            "collate_fn": mixture.collate_fn,
            "collate_fns": [collates[number] for number in numbers],
            **mixture.sampler.arguments(numbers),
            "keys": mixture.keys,
            "device": mixture.device,
            "priority_key": mixture.priority_key,
            "pin_memory": mixture.pin_memory,
            "contiguous": mixture.contiguous,
        }

    # -- refused: for members only --------------------------------------------------------------

    add = refused("ReplayBufferEnsemble.add")
    extend = refused("ReplayBufferEnsemble.extend")
    empty = refused("ReplayBufferEnsemble.empty")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = not name.startswith("_") and hasattr(ReplayBuffer, name)
            hint = f": it is for one of its members, as ensemble[i].{name}" if known else ""
            raise AttributeError(f"a {type(self).__name__} has no {name!r}{hint}")

    # -- saving ---------------------------------------------------------------------------------

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the ensemble and all its members into one directory, or change nothing.

        The result is a checkpoint like that of a buffer. It holds all local members as of one
        instant. Unedited rows of a data set are not saved. The checkpoint only identifies them.

        Args:
            path: the directory. It is created with its parents. If it holds a checkpoint, it is
                replaced atomically. Remote members also save there, each as of a separate instant.
            keep: the maximum number of checkpoints in the directory afterwards.

        Raises:
            As for ``ReplayBuffer.dumps``.

        Cost: the cost of saving the members. Writers to any member wait for copies of 8 MiB.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> def make():
            ...     rbs = [ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)]
            ...     return ReplayBufferEnsemble(*rbs, p=[1, 3], batch_size=4,
            ...                                 generator=torch.Generator().manual_seed(0))
            >>> ensemble, other = make(), make()
            >>> for rb in ensemble.members:
            ...     _ = rb.extend(torch.arange(9))
            >>> _ = ensemble.sample()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ensemble.dumps(folder)
            ...     other.loads(folder)
            >>> [bool((ensemble.sample() == other.sample()).all()) for _ in range(3)]
            [True, True, True]
        """
        mixture_saving.save_mixture(self._mixture, path, keep=keep, kind=type(self).__name__)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        mmap: bool = False,
        verify: bool | None = None,
    ) -> None:
        """Load an ensemble that ``dumps`` saved.

        This ensemble and the saved one then draw the same batches. Members are matched by number,
        and each loads by the rules of ``ReplayBuffer.loads``. If a member is a data set, it must be
        the saved data set.

        Args:
            path: the directory.
            version: the number of the checkpoint in it; None for the newest.
            mmap: leave the rows of members in the files, and read them as they are sampled. The
                rules of ``ReplayBuffer.loads`` apply to each member. Rows of data sets are always
                in files.
            verify: read every file and compare its checksum. None verifies only without ``mmap``.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the checkpoint is damaged, or has a newer format; the error names the
                file.
            ValueError: the checkpoint has other members, or ``mmap`` is given with remote members;
                the error names the member.
            OSError: the operating system cannot map the files.

        The load first checks all members and reads the files. If this raises, nothing has changed.
        The load copies the former rows of members. If memory for the rows of a member runs out,
        earlier members get their former rows back. Remote members load last, one after the other.
        If a remote member fails then, the error names the remote members that have already loaded.
        """
        mixture_saving.load_mixture(self._mixture, path, version=version, mmap=mmap, verify=verify)
        self._pass_ended = False

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary with copies of everything that ``dumps`` saves.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(2))
            >>> ensemble = ReplayBufferEnsemble(rb)
            >>> state = ensemble.state_dict()
            >>> rb.empty()
            >>> ensemble.load_state_dict(state)
            >>> rb[:]
            tensor([0, 1])
        """
        return mixture_saving.states_of(self._mixture)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state from ``state_dict``, by the rules of ``loads``.

        Raises:
            ValueError: entries are missing, or do not fit this ensemble; nothing has changed.
        """
        mixture_saving.load_states_of(self._mixture, state_dict)
        self._pass_ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {
            "mixture": mixture_saving.pickled(self._mixture),
            "shared": self._shared,
            "pass_ended": self._pass_ended,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        mixture = Mixture.__new__(Mixture)
        mixture_saving.unpickled(mixture, state["mixture"])
        self._set_mixture(mixture, shared=state["shared"])
        self._pass_ended = state["pass_ended"]

    # -- for loaders ----------------------------------------------------------------------------

    def _size_of(self, batch_size: int | None) -> int:
        return self._mixture.size_of(batch_size)

    def _check_loader(self) -> None:
        for number, member in enumerate(self._members):
            with member_named(number):
                check_loaded(member)

    def _check_workers(self, method: str | None = None) -> None:
        device = self._mixture.device
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"expected an ensemble without device for workers, got device={str(device)!r}: "
                "they make batches on the CPU; move these with to_device, or use prefetch="
            )
        for number, member in enumerate(self._members):
            with member_named(number):
                check_workers(member, method)

    def _asking(self, generator: torch.Generator) -> Callable[[int], RemoteRequest]:
        return self._asking_from(generator, 0, 1)

    def _asking_from(
        self, generator: torch.Generator, number: int, stride: int
    ) -> Callable[[int], RemoteRequest]:
        mixture = self._mixture.apart()
        mixture.sampler.weights.step, mixture.sampler.weights.stride = number, stride

        def asked(size: int) -> RemoteRequest:
            with deferred:
                return _Unread(mixture, mixture.drawn(size, mixture.asked(size), generator))

        return asked

    def _carried(self, known: dict[int, Any]) -> Any:
        arguments = {**self._arguments([*range(self.num_members)]), "pin_memory": False}
        readers = [for_readers(member, known) for member in self._members]
        # It has no tensors, because a tensor would be moved to shared memory.
        weights = self.sampler.weights.state_of([*range(self.num_members)])
        return MixtureReader(readers, arguments, weights)

    def _copied_buffers(self) -> list[ReplayBuffer]:
        found: list[ReplayBuffer] = []
        for _, source in self._mixture.walk():
            if isinstance(source, BufferSource) and not source.buffer.shared:
                found.append(source.buffer)
        return found


@dataclass
class _Unread:
    """A draw for a loader, whose rows are joined when the batch is needed."""

    mixture: Mixture
    draw: MixtureDraw

    def result(self, timeout: float | None = None) -> Any:
        return merged(*self.mixture.read(self.draw), needed=True)


@dataclass(frozen=True)
class MixtureReader:
    """The parts of an ensemble that a spawned process makes over the same rows."""

    members: list[Any]
    arguments: dict[str, Any]
    weights: dict[str, Any]

    def made(self) -> ReplayBufferEnsemble[Any]:
        """Return the ensemble."""
        members = [one.made() if hasattr(one, "made") else one for one in self.members]
        ensemble = ReplayBufferEnsemble(*members, **self.arguments)
        ensemble.sampler.weights.load_state_dict(self.weights)
        return ensemble


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype is not torch.bool
    return hasattr(index, "__index__") and not isinstance(index, bool)


def _source_of(number: int, member: Any, collate: Any) -> Source:
    """Return a member as a source.

    Raises:
        TypeError, ValueError: a buffer cannot be a member; the error names it.
    """
    if isinstance(member, ReplayBufferEnsemble):
        return member._mixture
    if not isinstance(member, (ReplayBuffer, BufferHandle)):
        raise TypeError(
            f"expected member {number} as a ReplayBuffer, got {type(member).__name__}; for a "
            "remote buffer give a RayReplayBuffer, a ShardedReplayBuffer, or a client() of one"
        )
    with member_named(number):
        if isinstance(member, BufferHandle):
            return HandleSource(member)
        check_unlimited(member)
        member._ready()
        return BufferSource(member, collate)


def _given(source: Any) -> Any:
    """Return the buffer, handle or ensemble of a source."""
    if isinstance(source, Mixture):
        return ReplayBufferEnsemble._over(source)
    return source.buffer if isinstance(source, BufferSource) else source.handle


def _check_prefetch(mixture: Mixture) -> None:
    """Raise ValueError if prefetched batches would use rows up."""
    for number, member in enumerate(mixture.sources if mixture.depth else ()):
        inside = [one for _, one in member.walk()] if isinstance(member, Mixture) else [member]
        if any(isinstance(one, BufferSource) and one.sampler.consumes for one in inside):
            raise ValueError(
                f"expected member {number} without a ConsumingSampler if prefetch={mixture.depth}: "
                "batches that are not delivered would use its rows up"
            )


def _made_of(parts: dict[str, Any], priority_key: Any) -> tuple[ReplayBuffer, ...]:
    """Return buffers made from the members of three ensembles.

    Raises:
        TypeError: an ensemble is of another kind.
        ValueError: the ensembles have different numbers of members.
    """
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, kind in kinds.items():
        if not isinstance(parts[name], kind):
            raise TypeError(
                f"expected {name} as a {kind.__name__}, got {type(parts[name]).__name__}"
            )
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"expected as many storages as samplers and writers, got {counts}")
    storages = parts["storages"]
    key = {} if priority_key is None else {"priority_key": priority_key}
    return tuple(
        ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=chain, **key)
        for storage, sampler, writer, chain in zip(
            storages.storages,
            parts["samplers"].samplers,
            parts["writers"].writers,
            storages.transforms,
            strict=True,
        )
    )


def _checked_collates(given: Sequence[Any] | None, members: Sequence[Any]) -> list[Any]:
    count = len(members)
    if given is None:
        return [None] * count
    found = list(given)
    if len(found) != count or not all(one is None or callable(one) for one in found):
        raise TypeError(f"expected collate_fns as {count} functions, one a member, got {given!r}")
    for number, (one, member) in enumerate(zip(found, members, strict=True)):
        if one is not None and not isinstance(member, ReplayBuffer):
            raise ValueError(
                f"expected None in collate_fns for member {number}, which collates its rows "
                "itself: give the member the collate_fn"
            )
    return found


def _checked_keys(keys: Sequence[Any]) -> list[Any]:
    if isinstance(keys, str) or not keys:
        raise TypeError(f"expected keys= as a list of keys, got {keys!r}")
    return list(keys)


def _check_shared(members: Sequence[Any]) -> None:
    for number, member in enumerate(members):
        kind = getattr(getattr(member, "writer", None), "kind", None)
        if not getattr(member, "shared", True) and kind != "immutable":
            raise ValueError(
                f"expected members with shared=True, or data sets, in an ensemble with "
                f"shared=True; member {number} is neither"
            )
