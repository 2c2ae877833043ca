"""Define `ReplayBufferEnsemble`: its priorities, its rows, and the whole class."""

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
from replaykit.buffer.core import DataT
from replaykit.ensembles.batch_info import (
    IDS,
    INDEX,
    INNER,
    Places,
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
"""What a member asks of a sample beside priorities and the index."""


class MemberPriorities(NamedTuple):
    """Rows of one buffer, and the key under which it looks for priorities."""

    member: str
    buffer: Any
    rows: TensorDict
    key: Key


class EnsemblePriorities(EnsembleCore[DataT]):
    """``update_priority``, ``update_tensordict_priority``."""

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets priorities from a sample that the learner has put them into, member by member.

        Args:
            data: a TensorDict as ``sample`` returned it, or some of its rows, in any batch shape,
                with values under the ``priority_key`` of the ensemble, or else of each member:
                one a row, or with more dimensions, which are reduced.

        Rows of members without priorities are left alone, and so are rows that were overwritten
        since they were sampled.

        Raises:
            KeyError: no ``priority_key``, or nothing that says which member a row is of.
            ValueError: a priority of a real row is NaN, negative or infinite.
            IndexError: no such member, or a row that it does not hold. Nothing has changed then.
            ActorLost, TimeoutError: a member elsewhere has ended, or does not answer; nothing has
                changed, unless that was after all of them had said that they hold their rows.

        Members elsewhere are asked first, all at a time. Cost: of them two round trips.

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
        with deferred:  # Ctrl-C comes before all members or after all of them
            for part in _far_first(routed, lambda part: ("update_tensordict_priority", part.rows)):
                part.buffer.update_tensordict_priority(part.rows)

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: torch.Tensor | None = None
    ) -> None:
        """Sets the priorities of rows of members.

        Args:
            index: the ``index`` of a sample: a TensorDict or mapping with ``index`` and
                ``buffer_ids``, and ``inner_ids`` where members are ensembles. Or, without
                ``priority``, a TensorDict as for ``update_tensordict_priority``.
            priority: a number, or one a row, in the batch shape of ``index``.
            generation: those of the rows when they were sampled; what was written since is left
                out.

        Rows of members without priorities are left alone; a warning says when no member has any.

        Raises:
            As ``update_tensordict_priority``. TypeError: an index that does not name members.
            ValueError: priorities that are not one a row.
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

        with deferred:  # Ctrl-C comes before all members or after all of them
            for part in _far_first(routed, update):
                generation = part.rows.get("index_generation", None)
                _, index, values = update(part)
                part.buffer.update_priority(index, values, generation=generation)

    def _has_priorities(self) -> bool:
        """Return whether any buffer below has priorities."""
        return any(
            member._has_priorities()
            if isinstance(member, EnsemblePriorities)
            else member.sampler.prioritized
            for member in self._members
        )

    def _routed(self, flat: Any, path: str, given: Key | None = None) -> list[MemberPriorities]:
        """Rows of the buffers that have priorities; what each of them needs of these.

        Args:
            flat: rows with what a sample says of them, batch size ``[N]``.
            path: of this ensemble in the one above, for errors.
            given: the key of the priorities; None: that of the ensemble, or of each member.
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
    """The rows of a buffer as it knows them, with priorities under a key that it looks for."""
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
    """A sample with its rows along one dimension; those that rows have themselves are features."""
    if data.batch_dims <= 2:
        return data if data.batch_dims == 1 else data.reshape(-1)
    flat = data.flatten(0, 1).copy()
    own = flat.batch_dims - 1
    told = {
        key: value.flatten(1, own)[:, 0]
        for key in (INDEX, IDS, INNER, *((k,) if isinstance(k, str) else k for k in _ALONG))
        if (value := lookup(flat, key)) is not None
    }
    flat.batch_size = flat.batch_size[:1]
    for name in {key[0] for key in told}:
        del flat[name]
    for key, value in told.items():
        flat.set(key, value)
    return flat


def _as_own(index: torch.Tensor, ndim: int) -> torch.Tensor:
    """An index as a member with so many dimensions gave it, before it was put beside others."""
    if index.ndim == 1:
        return index
    return index[:, 0] if ndim == 1 else index[:, :ndim]


def _check_all(routed: list[MemberPriorities]) -> None:
    """Raises where a member would refuse the priorities of its rows; changes nothing."""
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
    """Has members elsewhere take their priorities, all at a time; then yields the others."""
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
    """Has an error name the member."""
    try:
        yield
    except Exception as error:
        raise naming_member(error, f"member {part.member}") from error


def _check_values(part: MemberPriorities) -> None:
    """Raises where the priorities of rows cannot be any."""
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
        """Returns a member, an ensemble of several, or rows of members.

        Args:
            index: an int for a member; a slice, list, tensor of ints, or bools, for an ensemble
                over these members, with their weights; ``...`` for one over all. With a second
                index what that gives of the member, or of each of these, put together:
                ``ensemble[:, 3]`` is row 3 of every member, ``ensemble[:, :8]`` a batch ``[K, 8]``.

        Raises:
            IndexError: no such member or row. TypeError: numbers with fractions. RuntimeError: an
                index of more than one dimension. ValueError: rows of members that differ in keys,
                shapes or dtypes, or are not equally many.

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
        """What an index gives of each of some members, put together and transformed."""
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
            # By position: a member may be named twice, in any order.
            places = Places(list(range(len(pieces))), counts.pop())
            data = stacked([(i, data) for i, (_, data) in enumerate(pieces)], places)
        if single:
            data = _without_rows(data)
        return self._chain.forward(data) if len(self._chain) else data

    def _of(self, numbers: list[int]) -> Any:
        """An ensemble like this over some of the members."""
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
    """Several buffers sampled as one: data sets, online buffers, ensembles, in any mixture.

    A batch of B rows has K parts of ``B // K`` rows, each of one member, and batch size
    ``[K, B // K]``; with ``num_buffer_sampled=B`` every row is of a member of its own. Members are
    used as they are: each draws by its sampler, in its storage, through its transforms, and goes on
    being written to and sampled by itself, as ``ensemble[i]``.

    Args:
        rbs: the buffers; of those in other processes a RayReplayBuffer, a ShardedReplayBuffer, or a
            ``client()`` of one. Or, instead of them, all of the next three.
        storages, samplers, writers: the parts of buffers that are made of them.
        transform: of the batch, after those of the members; not one that reads the rows around.
        batch_size: default number of rows of a batch.
        collate_fn: makes a batch of the samples of the parts, a list of K; by default tensors are
            stacked, and what is in the samples has to be the same.
        collate_fns: one function a member, or None, in the place of its own ``collate_fn``.
        p: relative weights of the members; ``"size"``: by the rows that each holds at the draw;
            None: equal ones. ``ensemble.sampler.p`` may be set at any time, and by a scheduler:
            ``LinearScheduler(ensemble, "p", [0.5, 0.5], num_steps)``.
        sample_from_all: every member has one part, in their order.
        num_buffer_sampled: K; by default the number of members.
        counts: "multinomial": the member of each part is drawn independently, with replacement;
            "exact": each member has ``K * p`` parts, rounded at random where that is no whole
            number.
        unready: what becomes of a member that can be chosen and cannot give its rows. "raise": its
            error, whoever would be chosen. "skip": it is left out as if its weight were 0.
        keys: what to take of the samples of members that have more in them; None: everything.
        device: where samples of members are moved to; None: they have to be on one.
        generator: chooses members, and has them draw; None: members are chosen by torch's global
            generator, and draw by their own. Those elsewhere draw by seeds from it.
        shared: processes that get the ensemble write and sample the same rows; members have to be
            shared, or data sets.
        priority_key: where learners put priorities, for all members; None: where each looks.
        pin_memory, prefetch, transform_factory, delayed_init, contiguous, compilable: as for
            ReplayBuffer; members' own batches made ahead are not used.

    Raises:
        RuntimeError: buffers and parts of them; weights with ``sample_from_all``.
        TypeError: neither, or arguments of another kind. ValueError: values that cannot be; a
            buffer with a rate limiter, or one elsewhere whose sampler has passes.

    Samples carry ``("index", "index")``, ``("index", "buffer_ids")`` and, where a member is an
    ensemble, ``("index", "inner_ids")``: the member's member, and so on. Beside it is what
    samplers tell, the same in every batch: what one member tells and another does not is 1 in
    ``priority_weight``, True in masks; a row by itself is its own anchor, and a sequence of one.
    Windows are numbered anew in each part.

    A member that draws without replacement begins another pass where one ends. Iteration ends with
    the batch in which the last of the members that can be chosen has ended one; if any draws with
    replacement, never.

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
