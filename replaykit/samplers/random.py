"""Uniform draws with replacement."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from typing_extensions import Self

from replaykit.episodes import WINDOWS
from replaykit.samplers.base import Sampler, as_drawn, drawing_device, require_rows
from replaykit.samplers.eligible import Eligible, eligible_records, index_for
from replaykit.samplers.without_replacement import SamplerWithoutReplacement
from replaykit.storages import Storage

__all__ = ["RandomSampler"]


class RandomSampler(Sampler):
    """Draws every stored record with the same probability, independently.

    Args:
        replacement: ``False`` makes a SamplerWithoutReplacement instead, from the other keywords.

    Cost: O(B).

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8), sampler=RandomSampler(),
        ...                   generator=torch.Generator().manual_seed(0))
        >>> _ = rb.extend(torch.arange(8) * 10)
        >>> rb.sample(4)
        tensor([40, 70, 50,  0])
    """

    kind = "random"
    prompt = True
    stateless = True

    @overload
    def __new__(cls, *, replacement: Literal[True] = True) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]  # of another class, as in TorchRL
        cls, *, replacement: Literal[False], **kwargs: Any
    ) -> SamplerWithoutReplacement: ...
    def __new__(cls, *, replacement: bool = True, **kwargs: Any) -> Any:
        if not replacement:
            return SamplerWithoutReplacement(**kwargs)
        return super().__new__(cls)

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws each record anew out of all; returns the index, and no info."""
        count = require_rows(storage)
        self._ran_out = False  # there is no pass; a flag that was set is over
        if self.needs:
            known = index_for(storage).total(self.needs.single, WINDOWS)
            if known < count:
                records = eligible_records(storage, self.needs)
                records.require()
                return self._eligible(records, storage, batch_size), {}
        generator, home = self.generator, storage.device
        device = home if generator is None else generator.device
        flat = torch.randint(count, (batch_size,), generator=generator, device=device)
        if storage.ndim == 1 and device == home:
            return flat, {}
        return as_drawn(flat, storage), {}

    def _eligible(self, records: Eligible, storage: Storage, batch_size: int) -> torch.Tensor:
        """Draws among the records that have around them what the transforms need."""
        generator, home = self.generator, storage.device
        device = drawing_device(storage, generator)
        number = torch.randint(records.count, (batch_size,), generator=generator, device=device)
        found = records.elements((number if number.is_cpu else number.cpu()).numpy())
        if storage.ndim == 1 and isinstance(home, torch.device) and home.type == "cpu":
            return found
        return as_drawn(found, storage)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        if not len(storage) or not self.needs:
            return len(storage) > 0
        with storage.lock:
            return eligible_records(storage, self.needs).count > 0
