"""Loaders over shards: every stream has a handle of its own, every worker process too."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from replaykit._ray import Carried
from replaykit.buffer.elsewhere import Asked
from replaykit.buffer.loading import LoadingElsewhere
from replaykit.sharding.membership import Members
from replaykit.sharding.routed import ClientSettings
from replaykit.sharding.sampling import Sampled
from replaykit.sharding.shards import LocalSupervisor

if TYPE_CHECKING:
    from replaykit.sharding.client import ShardedClient

__all__ = ["Loaded"]


class Loaded(Sampled, LoadingElsewhere):
    """``dataloader``, and what `BufferDataset` asks for."""

    def __init__(
        self,
        settings: ClientSettings,
        members: Members,
        generator: torch.Generator | None,
        prefetch: int,
    ) -> None:
        super().__init__(settings, members, generator, prefetch)
        self._process = os.getpid()

    def _check_loader(self) -> None:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without rate_limiter: batches that a loader has asked for once "
                "more, to go on where it was, would count twice"
            )

    def _check_workers(self, method: str | None = None) -> None:
        if isinstance(self._members.supervisor, LocalSupervisor):
            raise ValueError(
                "expected shards in actors (backend='ray') for worker processes, got shards in "
                "this process; make batches without workers"
            )
        if method == "fork" or self._process != os.getpid():
            raise ValueError(
                "expected worker processes that are spawned (multiprocessing_context='spawn'): "
                "one that was forked has no connection with Ray"
            )

    def _asking(self, generator: torch.Generator) -> Callable[[int], Asked]:
        self._check_open()
        return self._alike(generator).sample_async

    def _carried(self) -> Carried:
        self._check_open()
        return Carried.of(self._alike(None))

    def _alike(self, generator: torch.Generator | None) -> ShardedClient:
        """A handle that draws by the same law as this one now, and has asked for nothing yet."""
        from replaykit.sharding.client import ShardedClient

        settings = replace(self._settings, sampler=copy.deepcopy(self._sampler))
        return ShardedClient(settings, self._members.again(self._members.on_loss), generator)
