"""Loaders over a buffer in an actor: each batch is asked for with a seed of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from replaykit._ray import Carried
from replaykit.buffer.core import checked_batch_size
from replaykit.buffer.elsewhere import Asked
from replaykit.buffer.loading import LoadingElsewhere
from replaykit.remote.forwarding import Forwarding
from replaykit.remote.replies import Reply, fetch

__all__ = ["Loaded"]

_SEEDS = 2**62


class Loaded(Forwarding, LoadingElsewhere):
    """``dataloader``, and what `BufferDataset` asks for."""

    def __init__(self, actor: Any, cls: type, *, devices: bool, paced: bool) -> None:
        super().__init__(actor, cls, devices=devices, paced=paced)
        self._process = os.getpid()

    def _size_of(self, batch_size: int | None) -> int:
        size = self.batch_size if batch_size is None else checked_batch_size(batch_size)
        if size is None:
            raise RuntimeError("expected a batch_size, of the buffer or in this call; got neither")
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
        from replaykit.remote.client import RayReplayBufferClient

        return Carried.of(
            RayReplayBufferClient(self._live(), self._cls, devices=self._devices, paced=self._paced)
        )


class _Seeded:
    """A batch that is asked for when somebody wants it."""

    def __init__(self, handle: Loaded, size: int, seed: int) -> None:
        self._handle, self._size, self._seed = handle, size, seed

    def result(self, timeout: float | None = None) -> Any:
        handle = self._handle
        handle._before("draw")
        return Reply(handle._method("draw", None).remote(self._size, self._seed)).get(timeout)
