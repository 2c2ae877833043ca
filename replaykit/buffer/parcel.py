"""A batch on its way from a worker process: one piece of shared memory, whatever it is made of."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from replaykit._compat import shared_bytes
from replaykit.transfer import Packing, View, is_plain

__all__ = ["Parcel"]


class Parcel:
    """Arrives as the batch itself where it is unpickled.

    Its tensors are copied once, into one block of shared memory that the receiver has for itself;
    sent as they are, each would be a file of its own to be opened there. Containers and objects are
    pickled around them; tensors that are more than their bytes go with these.

    Cost: one copy of the batch where it is sent, none where it arrives.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        around = _Around()
        around.dump(self._batch)
        packing = Packing(around.tensors)
        block = shared_bytes(packing.nbytes)
        packing.fill(block)
        views = [packing.views[place] for place in range(len(around.tensors))]
        return _opened, (around.stream.getvalue(), block, views)


class _Around(pickle.Pickler):
    """Pickles everything but plain tensors, which it keeps."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        self.tensors: list[torch.Tensor] = []
        super().__init__(self.stream, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or not value.is_cpu or not is_plain(value):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Back(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self._tensors[place]


def _opened(pickled: bytes, block: torch.Tensor, views: Sequence[View]) -> Any:
    return _Back(pickled, [view.of(block) for view in views]).load()
