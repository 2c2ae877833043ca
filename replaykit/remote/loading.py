"""Loaders over a buffer in an actor: each batch is asked for with a seed of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch

from replaykit._ray import Carried
from replaykit.buffer.core import checked_batch_size
from replaykit.buffer.elsewhere import Asked, MemberFacts
from replaykit.buffer.generic import DataT
from replaykit.buffer.loading import LoadingElsewhere
from replaykit.remote.forwarding import Forwarding
from replaykit.remote.replies import RemoteResult, Reply, fetch

__all__ = ["Loaded"]

_SEEDS = 2**62


class Loaded(Forwarding, LoadingElsewhere[DataT]):
    """``dataloader``, and what `BufferDataset` asks for."""

    def __init__(self, actor: Any, cls: type, *, devices: bool, paced: bool) -> None:
        super().__init__(actor, cls, devices=devices, paced=paced)
        self._process = os.getpid()

    def _size_of(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else checked_batch_size(batch_size)
        if size is None:
            raise RuntimeError(
                "batch_size not specified: expected a batch_size, of the buffer or in this call"
            )
        return int(size)

    def _check_loader(self) -> None:
        self._before("check_loader")
        fetch(self._method("check_loader", None).remote())

    def _check_workers(self, method: str | None = None) -> None:
        if method == "fork" or self._process != os.getpid():
            raise ValueError(
                "expected worker processes that are spawned (multiprocessing_context='spawn'): "
                "one that was forked has no connection with Ray"
            )

    def _asking(self, generator: torch.Generator) -> Callable[[int], Asked]:
        def asked(size: int) -> Asked:
            seed = int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))
            return _Seeded(self, size, seed)

        return asked

    def _carried(self) -> Carried:
        return Carried.of(self._handed_on())

    # -- as a member of an ensemble -----------------------------------------------------------

    def _facts_of_member(self) -> MemberFacts:
        return cast(MemberFacts, Reply(self._told("facts")).get())

    def _be_fresh(self, rows: int) -> None:
        """Nothing is known here."""

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> Asked:
        return RemoteResult(Reply(self._told("part", rows, seed, known)))

    def _ask_standing(self, rows: int) -> Asked:
        return RemoteResult(Reply(self._told("standing", rows)))

    def _ask_stored(self, index: torch.Tensor) -> Asked:
        return _Plain(self._told("check_stored", self._packed(index)))

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> Asked:
        self._before(name)
        return RemoteResult(Reply(self._submit(name, args, keywords)))

    def _told(self, name: str, *args: Any) -> Any:
        """Sends a message of an ensemble's, after the writes of this handle."""
        self._before(name)
        return self._method(name, None).remote(*args)

    def _handed_on(self) -> Loaded[DataT]:
        from replaykit.remote.client import RayReplayBufferClient

        return RayReplayBufferClient(
            self._live(), self._cls, devices=self._devices, paced=self._paced
        )


class _Plain:
    """The answer to a message that only says whether something is so."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self, timeout: float | None = None) -> Any:
        return fetch(self._ref, timeout)


class _Seeded:
    """A batch that is asked for when somebody wants it."""

    def __init__(self, handle: Loaded, size: int, seed: int) -> None:
        self._handle, self._size, self._seed = handle, size, seed

    def result(self, timeout: float | None = None) -> Any:
        handle = self._handle
        handle._before("draw")
        return Reply(handle._method("draw", None).remote(self._size, self._seed)).get(timeout)
