"""One slice of every episode, before any gives another."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.keywords import checked_keywords
from replaykit.samplers.draws import uniform
from replaykit.samplers.episode_order import EpisodeOrder
from replaykit.samplers.markers import Markers
from replaykit.samplers.measures import floor_below
from replaykit.samplers.saved_arrays import made_of_saved
from replaykit.samplers.slice_arguments import Boundaries, SliceSize, checked_form
from replaykit.samplers.slicing import Request, Sliced, Slicing
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

__all__ = ["SliceSamplerWithoutReplacement"]

Array = np.ndarray[Any, Any]


class SliceSamplerWithoutReplacement(Sliced):
    """Draws one window of every episode that has one, pass after pass; its start is uniform.

    ``ran_out`` turns True with the batch that ends a pass; it may have fewer slices than asked
    for. The next draw begins a new pass, and so does a write.

    Args:
        drop_last: leave out a last batch that would have fewer slices.
        shuffle: ``False``: episodes in the order in which they were written, lane by lane.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key,
            init_key, strict_length, flat, compile, use_gpu: as in SliceSampler.
        replacement: no effect.

    What a batch says of its rows: as with SliceSampler.

    Raises:
        As SliceSampler. ValueError: ``drop_last`` and fewer episodes than slices of one batch.

    Cost: O(B + K log E); O(E) once a pass, and 8 bytes an episode.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4,
        ...                   sampler=SliceSamplerWithoutReplacement(slice_len=2, shuffle=False))
        >>> done = torch.arange(15) % 5 == 4
        >>> _ = rb.extend(TensorDict({"step": torch.arange(15), "next": {"done": done}}, [15]))
        >>> [(batch["step"] // 5).tolist() for batch in rb]
        [[0, 0, 1, 1], [2, 2]]
    """

    kind = "slice_without_replacement"
    mapped_entries = ("_remaining",)
    passes = True

    _remaining = ReadOnce[torch.Tensor | None]()
    """Numbers of the episodes still to come; None: the next draw begins a pass."""

    @checked_keywords
    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Any = None,
        traj_key: Any = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: Any = False,
        use_gpu: Any = False,
        flat: bool = True,
        replacement: bool = False,
    ) -> None:
        super().__init__()
        self.drop_last, self.shuffle = bool(drop_last), bool(shuffle)
        boundaries = Boundaries(end_key, end_keys, traj_key, ends, trajectories)
        if not flat and slice_len is None:
            raise ValueError(
                "expected slice_len with flat=False, since a batch may have fewer slices; got "
                "num_slices"
            )
        self._slicing = Slicing(
            SliceSize(num_slices, slice_len),
            boundaries,
            checked_form(strict_length=strict_length),
            Markers(truncated_key, init_key, boundaries.rule.flags),
            flat,
        )
        self._remaining = None
        self._episodes = 0
        # Rows of slices that were given back, as elements: their episodes come next.
        self._returned: torch.Tensor | None = None
        self._index: EpisodeIndex | None = None
        # Of which state of the index; None: of the rows that a state was loaded with.
        self._version: int | None = None
        self._law: CountLaw | None = None
        self._length = 0
        self._rows = 0

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draws the next slices of the pass; returns their rows, and which slice each belongs to.

        Raises:
            NotEnoughData: no window is stored. ValueError: ``drop_last`` and fewer episodes than
                slices. RuntimeError, KeyError: as ``SliceSampler.sample``.
        """
        with storage.lock:
            request, order = self._prepare(storage, batch_size)
            remaining = self._left(request, order)
            if self._too_few(remaining, request.slices):
                remaining = self._new_pass(order.count)
            chosen, rest = remaining[: request.slices], remaining[request.slices :]
            found = order.find(chosen.numpy())
            start = floor_below(uniform(len(chosen), self.generator) * found.count, found.count)
            cut = request.window.cut(found._replace(rest=start))
            index, info = self._slicing.deliver(storage, request, cut)
            self._ran_out = not len(rest) or self._too_few(rest, request.slices)
            self._remaining = None if self._ran_out else rest
            self._episodes, self._length = order.count, request.window.length
            self._index, self._version = request.episodes, request.episodes.version
            self._law = request.law
            self._rows = len(storage)
            return index, info

    def _prepare(self, storage: Storage, batch_size: int) -> tuple[Request, EpisodeOrder]:
        request = self._slicing.request(storage, batch_size, self.needs)
        order = EpisodeOrder(request.episodes, request.law)
        if not order.count:
            raise self._slicing.refuse(request, self.needs)
        if self.drop_last and request.slices > order.count:
            raise ValueError(
                f"expected at most {order.count} slices with drop_last, one of each episode that "
                f"has a window of {request.window.length} rows; got {request.slices}"
            )
        return request, order

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        self._prepare(storage, batch_size)

    def _left(self, request: Request, order: EpisodeOrder) -> torch.Tensor:
        """Numbers of the episodes that the pass still has; all, in a new order, after a write."""
        remaining, returned = self._remaining, self._returned
        self._returned = None
        old = (
            order.count != self._episodes
            or self._length != request.window.length
            or (
                self._version is not None
                and (
                    self._index is not request.episodes
                    or self._version != request.episodes.version
                    or self._law != request.law
                )
            )
        )
        if old or (remaining is None and returned is None):
            return self._new_pass(order.count)
        if remaining is None:
            remaining = arange(0)
        if returned is not None:
            time, lane = request.episodes.place(returned.numpy())
            number = order.of(time, lane)
            first = np.sort(np.unique(number, return_index=True)[1])
            again = torch.from_numpy(number[first][number[first] >= 0])
            remaining = torch.cat([again, remaining[~torch.isin(remaining, again)]])
        return remaining if len(remaining) else self._new_pass(order.count)

    def _too_few(self, remaining: torch.Tensor, slices: int) -> bool:
        return self.drop_last and len(remaining) < slices

    def _new_pass(self, count: int) -> torch.Tensor:
        if not self.shuffle:
            return arange(count)
        device = "cpu" if self.generator is None else self.generator.device
        return torch.randperm(count, generator=self.generator, device=device).cpu()

    # -- being told ---------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        if self._version is not None and self._index is not None:
            self._forget()

    def add(self, index: Any) -> None:
        self._forget()

    def extend(self, index: torch.Tensor) -> None:
        self._forget()

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        self._forget()

    def _forget(self) -> None:
        self._remaining = self._returned = self._index = None

    def empty(self) -> None:
        super().empty()
        self._forget()

    def drop_pass(self) -> None:
        self._remaining = None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        flat = [ravel(index, storage.lanes) if storage.ndim > 1 else index for index in drawn]
        flat = [index.cpu() for index in flat]
        if self._returned is not None:
            flat.append(self._returned)
        if flat:
            self._returned = torch.cat(flat)

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        lanes = storage.lanes.numel()
        if len(rows) * lanes != self._rows or (len(rows) and int(rows.max()) >= len(rows)):
            self._forget()  # rows are gone, and episodes with them
        elif self._returned is not None:
            now = torch.empty(len(rows), dtype=torch.int64, device="cpu")
            now[rows.cpu()] = arange(len(rows))
            self._returned = now[self._returned // lanes] * lanes + self._returned % lanes

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        index = self._index
        fresh = self._version is None or (index is not None and index.version == self._version)
        remaining, returned = self._remaining, self._returned
        return {
            **super().state_dict(),
            "_remaining": remaining.clone() if fresh and remaining is not None else None,
            "_returned": returned.clone() if fresh and returned is not None else None,
            "_episodes": self._episodes,
            "_length": self._length,
            "_rows": self._rows,
            "_ran_out": self._ran_out,
        }

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        super().check_state(state_dict, storage)
        _pass_of(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._remaining, self._returned = _pass_of(state_dict)
        self._episodes, self._length = state_dict["_episodes"], state_dict["_length"]
        self._rows, self._ran_out = state_dict["_rows"], state_dict["_ran_out"]
        self._index = self._version = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._slicing.size!r}, drop_last={self.drop_last}, "
            f"shuffle={self.shuffle})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_index": None, "_version": None}


def _pass_of(
    state: dict[str, Any],
) -> tuple[torch.Tensor | ReadLater[torch.Tensor] | None, torch.Tensor | None]:
    """Episodes that a saved pass has yet to draw, and rows that were given back; ValueError where
    they are none."""
    numbers: list[Any] = [state.get(name) for name in ("_episodes", "_length", "_rows")]
    if any(type(n) is not int or n < 0 for n in numbers) or type(state.get("_ran_out")) is not bool:
        raise ValueError(f"expected counts and ran_out of a pass over episodes, got {state}")
    found: list[Any] = []
    for name, limit in (("_remaining", numbers[0]), ("_returned", numbers[2])):
        if state.get(name) is None:
            found.append(None)
            continue
        make = functools.partial(_checked_numbers, name=name, limit=limit)
        found.append(made_of_saved(state, {name: (torch.int64,)}, make, "pass over episodes"))
    return found[0], found[1]


def _checked_numbers(numbers: Array, name: str, limit: int) -> torch.Tensor:
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
        raise ValueError(f"expected {name} in [0, {limit}), got {numbers}")
    return torch.from_numpy(numbers)
