"""Define `ReplayBufferEnsemble`, its priority updates and its indexing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, overload

import torch
from typing_extensions import Self

from replaykit._compat import TensorDict, as_tensor, is_tensordict, lookup
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import DataT
from replaykit.ensembles.batch_info import (
    IDS,
    INDEX,
    INNER,
    BatchParts,
    check_stored,
    length_of,
    select,
    stacked,
)
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import SamplerEnsemble, naming_member
from replaykit.ensembles.ensemble_state import EnsembleSaving
from replaykit.ensembles.ensemble_storage import chosen
from replaykit.ensembles.remote_members import Member, as_given
from replaykit.interrupts import deferred
from replaykit.keywords import named_after
from replaykit.samplers.window_forms import MASK
from replaykit.structure import map_leaves
from replaykit.ted import Key, format_key, unravel

__all__ = ["EnsemblePriorities", "EnsembleReading", "ReplayBufferEnsemble"]

_ALONG = ("index_generation", "anchor_index", "anchor_generation", "validity_mask", MASK)
"""Keys of a sample that a member reads, except priorities and index."""


class MemberPriorities(NamedTuple):
    """Rows of one buffer, and the key under which the buffer reads priorities."""

    member: str
    buffer: Any
    rows: TensorDict
    key: Key


class EnsemblePriorities(EnsembleCore[DataT]):
    """``update_priority``, ``update_tensordict_priority``."""

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
        routed = self._routed(_row_by_row(data), "")
        _check_all(routed)
        with deferred:  # Ctrl-C takes effect before all members or after all of them
            for part in _far_first(routed, lambda part: ("update_tensordict_priority", part.rows)):
                part.buffer.update_tensordict_priority(part.rows)

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Set the priorities of rows of members.

        Args:
            index: the ``index`` of a sample. It is a TensorDict or mapping with ``index`` and
                ``buffer_ids``, and with ``inner_ids`` if members are ensembles. Or, without
                ``priority``, a TensorDict as for ``update_tensordict_priority``.
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
        if not self._has_priorities():
            warnings.warn(
                "no member of the ensemble has priorities; the update has no effect",
                UserWarning,
                stacklevel=2,
            )
        if priority is None and is_tensordict(index):
            self.update_tensordict_priority(index)
            return
        if not callable(getattr(index, "get", None)):
            raise TypeError(
                "expected the index of a sample of the ensemble, with index and buffer_ids, got "
                f"{type(index).__name__}"
            )
        parts = {
            name: None if index.get(name, None) is None else as_tensor(index[name])
            for name in ("index", "buffer_ids", "inner_ids")
        }
        ids = parts["buffer_ids"]
        if ids is None or parts["index"] is None:
            raise KeyError("expected index and buffer_ids in the index of rows of an ensemble")
        values = as_tensor(priority)
        if values.ndim == 0:
            values = values.expand(ids.shape)
        if values.shape != ids.shape and values.shape != (*ids.shape, 1):
            raise ValueError(
                f"expected priorities {list(ids.shape)}, one a row, got {list(values.shape)}"
            )
        rows = TensorDict({}, ids.shape)
        for name, value in parts.items():
            if value is not None:
                rows.set(("index", name), value)
        rows.set("_priority", values.reshape(ids.shape))
        if generation is not None:
            rows.set("index_generation", generation)
        routed = self._routed(rows.reshape(-1), "", ("_priority",))
        _check_all(routed)

        def update(part: MemberPriorities) -> tuple[Any, ...]:
            return "update_priority", part.rows.get("index"), part.rows.get("_priority")

        with deferred:  # Ctrl-C takes effect before all members or after all of them
            for part in _far_first(routed, update):
                generation = part.rows.get("index_generation", None)
                _, index, values = update(part)
                part.buffer.update_priority(index, values, generation=generation)

    def _has_priorities(self) -> bool:
        """Return whether any buffer of the ensemble, at any depth, has priorities."""
        return any(
            member._has_priorities()
            if isinstance(member, EnsemblePriorities)
            else member.sampler.prioritized
            for member in self._members
        )

    def _routed(self, flat: Any, path: str, given: Key | None = None) -> list[MemberPriorities]:
        """Return the rows and the priority key of each buffer with priorities.

        Args:
            flat: rows of a sample with their info, batch size ``[N]``.
            path: the path of this ensemble in the outer ensemble, for errors.
            given: the key of the priorities; None for the key of the ensemble, or of each member.
        """
        index, ids, inner = (lookup(flat, key) for key in (INDEX, IDS, INNER))
        for key, found in ((INDEX, index), (IDS, ids)):
            if found is None:
                raise KeyError(f"expected {format_key(key)} in the data; got none")
        if given is None and self._priority_name is not None:
            given = unravel(self._priority_name)
        numbers = ids.unique().tolist()
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(self):
            raise IndexError(f"expected members in [0, {len(self)}), got {numbers}")
        routed: list[MemberPriorities] = []
        for number in numbers:
            buffer, name = self._members[number], f"{path}{number}"
            below = isinstance(buffer, EnsemblePriorities)
            if not below and not buffer.sampler.prioritized:
                continue
            rows = (ids == number).nonzero()[:, 0]
            if below:
                if inner is None:
                    raise KeyError(f"expected {format_key(INNER)} in the data; got none")
                sub = flat[rows].copy()
                sub.set(IDS, inner[rows][:, 0])
                sub.set(INNER, inner[rows][:, 1:])
                routed += buffer._routed(sub, f"{name}.", given)
                continue
            routed.append(_of_member(name, buffer, flat, rows, given))
        return routed


def _of_member(
    name: str, buffer: Any, flat: Any, rows: torch.Tensor, given: Key | None
) -> MemberPriorities:
    """Return rows with the index of their buffer, and priorities under its key."""
    own = buffer._priority_key
    key = own if given is None else given
    value = lookup(flat, key)
    if value is None:
        raise KeyError(f"expected {format_key(key)} in the data for member {name}; got none")
    ndim = buffer.storage.ndim
    part = TensorDict({}, [len(rows)])
    under = key if key == ("_priority",) else own
    part.set(under, value[rows.to(value.device)])
    part.set("index", _as_own(lookup(flat, INDEX)[rows], ndim))
    for along in _ALONG:
        found = lookup(flat, along if isinstance(along, tuple) else (along,))
        if found is not None:
            found = found[rows.to(found.device)]
            part.set(along, _as_own(found, ndim) if along == "anchor_index" else found)
    return MemberPriorities(name, buffer, part, under)


def _row_by_row(data: Any) -> Any:
    """Return a sample with its rows along one dimension.

    Batch dimensions inside the rows become feature dimensions.
    """
    if data.batch_dims <= 2:
        return data if data.batch_dims == 1 else data.reshape(-1)
    flat = data.flatten(0, 1).copy()
    own = flat.batch_dims - 1
    info = {
        key: value.flatten(1, own)[:, 0]
        for key in (INDEX, IDS, INNER, *((k,) if isinstance(k, str) else k for k in _ALONG))
        if (value := lookup(flat, key)) is not None
    }
    flat.batch_size = flat.batch_size[:1]
    for name in {key[0] for key in info}:
        del flat[name]
    for key, value in info.items():
        flat.set(key, value)
    return flat


def _as_own(index: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return an index without padding, as its member returned it."""
    if index.ndim == 1:
        return index
    return index[:, 0] if ndim == 1 else index[:, :ndim]


def _check_all(routed: list[MemberPriorities]) -> None:
    """Raise if a member would refuse the priorities of its rows; change nothing."""
    for part in routed:
        _check_values(part)
    asked = []
    for part in routed:
        with _naming(part):
            if isinstance(part.buffer, Member):
                asked.append((part, part.buffer.handle._ask_stored(part.rows.get("index"))))
            else:
                check_stored(part.buffer, part.rows.get("index"))
    for part, answer in asked:
        with _naming(part):
            answer.result()


def _far_first(
    routed: list[MemberPriorities], call: Callable[[MemberPriorities], tuple[Any, ...]]
) -> Iterator[MemberPriorities]:
    """Send priorities to all remote members at once; then yield the local members."""
    asked = []
    for part in routed:
        if isinstance(part.buffer, Member):
            name, *arguments = call(part)
            given = {}
            if name == "update_priority":
                given["generation"] = part.rows.get("index_generation", None)
            with _naming(part):
                asked.append((part, part.buffer.handle._ask_call(name, *arguments, **given)))
    for part, answer in asked:
        with _naming(part):
            answer.result()
    yield from (part for part in routed if not isinstance(part.buffer, Member))


@contextlib.contextmanager
def _naming(part: MemberPriorities) -> Iterator[None]:
    """Make errors inside the context name the member."""
    try:
        yield
    except Exception as error:
        raise naming_member(error, f"member {part.member}") from error


def _check_values(part: MemberPriorities) -> None:
    """Raise ValueError if a priority of a real row is NaN, infinite or negative."""
    value, index = part.rows.get(part.key), part.rows.get("index")
    real = part.rows.get("validity_mask", part.rows.get(MASK, None))
    wrong = ~((value >= 0) & value.isfinite())
    wrong = wrong.reshape(len(index), -1).any(1)
    if real is not None:
        wrong &= real.to(wrong.device).reshape(-1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"expected priorities that are finite and not negative for member {part.member}, got "
            f"{value[row].tolist()}"
        )


class EnsembleReading(EnsembleCore[DataT]):
    """``ensemble[...]``."""

    @overload  # type: ignore[override]
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
            >>> ensemble[1] is rbs[1], len(ensemble[1:]), ensemble[:, 3]
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
            numbers = chosen(index, len(self), "an ensemble")
            return (
                as_given(self._members[numbers]) if isinstance(numbers, int) else self._of(numbers)
            )
        if not index:
            return self
        numbers = chosen(index[0], len(self), "an ensemble")
        if len(index) == 1:
            return self[index[0]]
        inner = index[1] if len(index) == 2 else index[1:]
        if isinstance(numbers, int):
            return self._members[numbers][inner]
        return self._rows(numbers, inner)

    def _rows(self, numbers: list[int], inner: Any) -> Any:
        """Return the rows at an index of some members, combined and transformed."""
        single = _is_number(inner)
        pieces = []
        for number in numbers:
            data = self._members[number][inner]
            if self._keys is not None:
                data = select(data, self._keys, number)
            pieces.append((number, _as_batch(data) if single else data))
        if self._collate_fn is not None:
            data = self._collate_fn([data for _, data in pieces])
        else:
            counts = {length_of(data) for _, data in pieces}
            if len(counts) > 1:
                raise ValueError(f"expected equally many rows of each member, got {sorted(counts)}")
            # By position, because an index may name a member twice and in any order.
            places = BatchParts(list(range(len(pieces))), counts.pop())
            data = stacked([(i, data) for i, (_, data) in enumerate(pieces)], places)
        if single:
            data = _without_rows(data)
        return self._chain.forward(data) if len(self._chain) else data

    def _of(self, numbers: list[int]) -> Any:
        """Return an ensemble like this one, of some of the members."""
        if numbers == list(range(len(self))):
            return self
        if not numbers:
            raise IndexError("expected at least one member of an ensemble, got none")
        sampler: SamplerEnsemble = self._sampler
        everyone = sampler.sample_from_all
        return type(self)(
            *(self.members[number] for number in numbers),
            transform=self._chain,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=[self._collate_fns[number] for number in numbers],
            p=sampler.p[numbers] if isinstance(sampler.p, torch.Tensor) else sampler.p,
            sample_from_all=everyone,
            num_buffer_sampled=None if everyone else sampler._parts,
            counts=None if everyone else sampler.counts,
            unready=sampler.unready,
            keys=self._keys,
            device=self._device,
            generator=self._generator,
            priority_key=self._priority_name,
            pin_memory=self._pin_memory,
            prefetch=self._prefetch_depth,
            contiguous=self._contiguous,
        )


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype is not torch.bool
    return hasattr(index, "__index__") and not isinstance(index, bool)


def _as_batch(data: Any) -> Any:
    if isinstance(data, torch.Tensor) or is_tensordict(data):
        return data.unsqueeze(0)
    return map_leaves(data, lambda leaf: leaf.unsqueeze(0))


def _without_rows(data: Any) -> Any:
    if isinstance(data, torch.Tensor) or is_tensordict(data):
        return data.squeeze(1)
    return map_leaves(data, lambda leaf: leaf.squeeze(1))


@named_after
class ReplayBufferEnsemble(
    EnsembleReading[DataT], EnsemblePriorities[DataT], EnsembleSaving[DataT]
):
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
            time, also by a scheduler: ``LinearScheduler(ensemble, "p", [0.5, 0.5], num_steps)``.
        sample_from_all: every member has one part, in the order of the members.
        num_buffer_sampled: the number of parts K; by default the number of members.
        counts: with "multinomial", the member of each part is drawn independently, with
            replacement. With "exact", each member has ``K * p`` parts, rounded at random if this is
            not a whole number.
        unready: the treatment of members with a positive weight that cannot return their rows now.
            "raise" raises the error of such a member, even if it would not be chosen. "skip" treats
            its weight as 0.
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
    ensemble, ``("index", "inner_ids")`` names the member of that ensemble, and so on. All batches
    have the same info keys. If a member's sampler does not return a key of another member, the
    member's rows get a default value for that key. The default is 1 for ``priority_weight`` and
    True for masks. Such a row is its own anchor, and a sequence of length 1. Windows are numbered
    from 0 in each part.

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
