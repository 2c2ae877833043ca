"""Loaders over shards: every stream has a handle of its own, every worker process too."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from replaykit._ray import Carried
from replaykit.buffer.elsewhere import Asked, MemberFacts, Piece, Standing
from replaykit.buffer.generic import DataT
from replaykit.buffer.loading import LoadingElsewhere
from replaykit.sharding.draws import Draws, Pending
from replaykit.sharding.membership import Members
from replaykit.sharding.reading import check_stored
from replaykit.sharding.routed import ClientSettings
from replaykit.sharding.sampling import Sampled
from replaykit.sharding.shards import LocalSupervisor

if TYPE_CHECKING:
    from replaykit.sharding.client import ShardedClient

__all__ = ["Loaded"]


class Loaded(Sampled[DataT], LoadingElsewhere[DataT]):
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

    # -- as a member of an ensemble -----------------------------------------------------------

    def _facts_of_member(self) -> MemberFacts:
        self._check_open()
        if self._tickets.keeper is not None:
            raise ValueError(
                "expected a buffer without a rate limiter, which does not see draws of an "
                f"ensemble, got {self._tickets.keeper.limiter!r}"
            )
        sampler = self._sampler
        return MemberFacts(
            sampler=type(sampler).__name__,
            tells=frozenset(sampler.tells),
            prioritized=sampler.prioritized,
            priority_key=self._priority_key,
            width=1,
            weights=getattr(sampler, "dtype", torch.float32),
            single=not sampler.draws_windows,
            ordered=False,
        )

    def _be_fresh(self, rows: int) -> None:
        self._check_open()
        self._draws.refresh(rows)

    def _ask_part(self, rows: list[int], seed: int, known: MemberFacts) -> Asked:
        self._check_open()
        draws = Draws(self, torch.Generator().manual_seed(seed), generations=True)
        return _Part([(count, draws.begun(count, patient=False)) for count in rows])

    def _ask_standing(self, rows: int) -> Asked:
        def standing() -> Standing:
            ready = self._draws.possible(rows)
            return Standing(len(self), ready)  # type: ignore[arg-type]

        return _Later(standing)

    def _ask_stored(self, index: torch.Tensor) -> Asked:
        return _Later(lambda: check_stored(self, index.cpu().reshape(-1)))  # type: ignore[arg-type]

    def _ask_call(self, name: str, *args: Any, **keywords: Any) -> Asked:
        return _Later(lambda: getattr(self, name)(*args, **keywords))

    def _handed_on(self) -> Any:
        self._check_open()
        return self._alike(None)

    def _alike(self, generator: torch.Generator | None) -> ShardedClient:
        """A handle that draws by the same law as this one now, and has asked for nothing yet."""
        from replaykit.sharding.client import ShardedClient

        settings = replace(self._settings, sampler=copy.deepcopy(self._sampler))
        return ShardedClient(settings, self._members.again(self._members.on_loss), generator)


class _Part:
    """Batches under way, each of so many rows."""

    def __init__(self, asked: list[tuple[int, Pending]]) -> None:
        self._asked = asked

    def result(self, timeout: float | None = None) -> tuple[list[Piece], None]:
        pieces = []
        for count, pending in self._asked:
            piece = Piece(*pending.get(timeout))
            found = len(piece.info["index"])
            if found != count:
                raise ValueError(
                    f"expected {count} rows, got {found}: windows of different lengths do not fill "
                    "a part of a batch; use strict ones, or pad_output=True"
                )
            pieces.append(piece)
        return pieces, None


class _Later:
    """What is asked when the answer is wanted: it takes more than one message."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    def result(self, timeout: float | None = None) -> Any:
        return self._ask()
