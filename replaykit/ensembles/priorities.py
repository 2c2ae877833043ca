"""Priorities from learners to the members that rows are of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from replaykit._compat import TensorDict, as_tensor, is_tensordict, lookup
from replaykit.buffer.generic import DataT
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.elsewhere import Member
from replaykit.ensembles.pairs import naming_member
from replaykit.ensembles.parts import check_stored
from replaykit.ensembles.told import IDS, INDEX, INNER
from replaykit.interrupts import deferred
from replaykit.samplers.markers import MASK
from replaykit.ted import Key, format_key, unravel

__all__ = ["EnsemblePriorities"]

_ALONG = ("index_generation", "anchor_index", "anchor_generation", "validity_mask", MASK)
"""What a member asks of a sample beside priorities and the index."""


class Routed(NamedTuple):
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

        def update(part: Routed) -> tuple[Any, ...]:
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

    def _routed(self, flat: Any, path: str, given: Key | None = None) -> list[Routed]:
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
        routed: list[Routed] = []
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


def _of_member(name: str, buffer: Any, flat: Any, rows: torch.Tensor, given: Key | None) -> Routed:
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
    return Routed(name, buffer, part, under)


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


def _check_all(routed: list[Routed]) -> None:
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


def _far_first(routed: list[Routed], call: Callable[[Routed], tuple[Any, ...]]) -> Iterator[Routed]:
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
def _naming(part: Routed) -> Iterator[None]:
    """Has an error name the member."""
    try:
        yield
    except Exception as error:
        raise naming_member(error, f"member {part.member}") from error


def _check_values(part: Routed) -> None:
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
