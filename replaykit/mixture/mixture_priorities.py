"""Pass priorities of a mixture's samples on to the members that hold the rows."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch

from replaykit._compat import TensorDict, as_tensor, is_tensordict, lookup
from replaykit.buffer.source import RemoteRequest
from replaykit.interrupts import deferred
from replaykit.mixture.choosing import member_named
from replaykit.mixture.joining import IDS, INDEX
from replaykit.mixture.mixture import Mixture, RowSource, gathered
from replaykit.samplers.window_forms import MASK
from replaykit.ted import Key, format_key, unravel

_ALONG = ("index_generation", "anchor_index", "anchor_generation", "validity_mask", MASK)
"""Keys of a sample that a member reads, except priorities and index."""

_GIVEN = ("_priority",)
"""The key of priorities that were not given in a sample."""


@dataclass
class MemberUpdate:
    """Rows of one member, and the key of their priorities."""

    member: int
    source: RowSource
    rows: TensorDict
    key: Key

    def send(self) -> RemoteRequest:
        """Set the priorities, or request it."""
        if self.key != _GIVEN:
            return self.source.call("update_tensordict_priority", self.rows)
        index, priority = self.rows.get("index"), self.rows.get(self.key)
        generation = self.rows.get("index_generation", None)
        return self.source.call("update_priority", index, priority, generation=generation)

    def check_values(self) -> None:
        """Raise ValueError if a priority of a real row is NaN, infinite or negative."""
        value, index = self.rows.get(self.key), self.rows.get("index")
        real = self.rows.get("validity_mask", self.rows.get(MASK, None))
        wrong = ~((value >= 0) & value.isfinite())
        wrong = wrong.reshape(len(index), -1).any(1)
        if real is not None:
            wrong &= real.to(wrong.device).reshape(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"expected priorities that are finite and not negative for member {self.member}, "
                f"got {value[row].tolist()}"
            )


def update_from_batch(mixture: Mixture, data: Any) -> None:
    """Set priorities that the learner has written into a sample."""
    _apply(_routed(mixture, _row_by_row(data), None))


def update_rows(mixture: Mixture, index: Any, priority: Any, generation: Any) -> None:
    """Set the priorities of rows of members."""
    if not mixture.facts.prioritized:
        warnings.warn(
            "no member of the ensemble has priorities; the update has no effect",
            stacklevel=3,
        )
    if priority is None and is_tensordict(index):
        update_from_batch(mixture, index)
        return
    if not callable(getattr(index, "get", None)):
        raise TypeError(
            "expected the index of a sample of the ensemble, with index and buffer_ids, got "
            f"{type(index).__name__}"
        )
    if index.get("buffer_ids", None) is None or index.get("index", None) is None:
        raise KeyError("expected index and buffer_ids in the index of rows of an ensemble")
    ids, values = as_tensor(index["buffer_ids"]), as_tensor(priority)
    if values.ndim == 0:
        values = values.expand(ids.shape)
    if values.shape != ids.shape and values.shape != (*ids.shape, 1):
        raise ValueError(
            f"expected priorities {list(ids.shape)}, one a row, got {list(values.shape)}"
        )
    rows = TensorDict({}, ids.shape)
    rows.set(INDEX, as_tensor(index["index"]))
    rows.set(IDS, ids)
    if not ids.numel():
        return
    rows.set(_GIVEN, values.reshape(ids.shape))
    if generation is not None:
        rows.set("index_generation", generation)
    _apply(_routed(mixture, rows.reshape(-1), _GIVEN))


def _routed(mixture: Mixture, flat: Any, given: Key | None) -> list[MemberUpdate]:
    """Return the rows and the priority key of each member with priorities.

    Args:
        flat: rows of a sample with their info, batch size ``[N]``.
        given: the key of the priorities; None for the key of the mixture, or of each member.
    """
    index, ids = lookup(flat, INDEX), lookup(flat, IDS)
    for name, found in ((INDEX, index), (IDS, ids)):
        if found is None:
            raise KeyError(f"expected {format_key(name)} in the data; got none")
    if given is None and mixture.priority_key is not None:
        given = unravel(mixture.priority_key)
    numbers, count = ids.unique().tolist(), len(mixture.sources)
    if numbers and not 0 <= numbers[0] <= numbers[-1] < count:
        raise IndexError(f"expected members in [0, {count}), got {numbers}")
    routed: list[MemberUpdate] = []
    for number in numbers:
        source, facts = mixture.sources[number], mixture.sources[number].facts
        if not facts.prioritized:
            continue
        if isinstance(source, Mixture):
            raise TypeError(
                f"expected rows of buffers, got rows of member {number}, an ensemble, whose index "
                "does not name their buffers: give its members to this ensemble"
            )
        key = facts.priority_key if given is None else given
        value = lookup(flat, key)
        if value is None:
            raise KeyError(f"expected {format_key(key)} in the data for member {number}; got none")
        under = key if key == _GIVEN else facts.priority_key
        rows = (ids == number).nonzero()[:, 0]
        part = TensorDict({}, [len(rows)])
        part.set(under, value[rows.to(value.device)])
        part.set("index", _as_own(index, rows, facts.width))
        for along in _ALONG:
            found = lookup(flat, along if isinstance(along, tuple) else (along,))
            if found is None:
                continue
            wide = along == "anchor_index"
            part.set(
                along,
                _as_own(found, rows, facts.width) if wide else found[rows.to(found.device)],
            )
        routed.append(MemberUpdate(number, cast(RowSource, source), part, under))
    return routed


def _row_by_row(data: Any) -> Any:
    """Return a sample with its rows along one dimension.

    Batch dimensions inside the rows become feature dimensions.
    """
    if data.batch_dims <= 2 or not all(_along_rows(data, key) for key in (INDEX, IDS)):
        return data if data.batch_dims == 1 else data.reshape(data.batch_size.numel())
    flat = data.flatten(0, 1).copy()
    own = flat.batch_dims - 1
    info = {
        key: value.flatten(1, own)[:, 0]
        for key in (INDEX, IDS, *((k,) if isinstance(k, str) else k for k in _ALONG))
        if (value := lookup(flat, key)) is not None
    }
    flat.batch_size = flat.batch_size[:1]
    for name in {key[0] for key in info}:
        del flat[name]
    for key, value in info.items():
        flat.set(key, value)
    return flat


def _along_rows(data: Any, key: Key) -> bool:
    """Return whether a value is the same along all but the first two batch dimensions."""
    value = lookup(data, key)
    if value is None:
        return True
    inner = value.flatten(2, data.batch_dims - 1)
    return bool((inner == inner[:, :, :1]).all())


def _as_own(index: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Return some rows of an index without padding, as their member returned it."""
    own = index[rows.to(index.device)]
    if own.ndim == 1:
        return own
    return own[:, 0] if width == 1 else own[:, :width]


def _apply(updates: list[MemberUpdate]) -> None:
    """Set all priorities, or raise an error before any has changed.

    Requests go to remote members first, all at the same time. They cost two round trips.
    """
    for update in updates:
        update.check_values()
    far = [update for update in updates if update.source.remote]
    near = [update for update in updates if not update.source.remote]

    def check(update: MemberUpdate) -> RemoteRequest:
        return update.source.check_stored(update.rows.get("index"))

    for update in near:
        with member_named(update.member):
            check(update)
    gathered({one.member: functools.partial(check, one) for one in far})
    with deferred:  # Ctrl-C takes effect before all members or after all of them
        gathered({one.member: one.send for one in far})
        for update in near:
            update.send()
