"""Buffers that hold the same rows: replaykit's, plain tensors, TorchRL's and cpprb's."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contender import expect
from benchmarks.rows import Leaves, as_tensordict, row_count
from benchmarks.setting import BATCH
from replaykit import LazyTensorStorage, ReplayBuffer

__all__ = ["Cpprb", "Holder", "RawTorch", "Replaykit", "TorchRL", "blocks"]

CHUNK = 10_000


class Holder(ABC):
    """A full buffer of given rows, uniform sampling, batches of 256."""

    name: str

    def __init__(self, leaves: Leaves) -> None:
        self.keys = list(leaves)
        self.rows = row_count(leaves)
        self.fill(leaves)

    @abstractmethod
    def fill(self, leaves: Leaves) -> None:
        """Takes the rows."""

    @abstractmethod
    def check_label(self) -> None:
        """Raises Mismatch unless its parts are what its name says."""

    @abstractmethod
    def sampler(self) -> Callable[[Any], Any]:
        """Returns what draws a batch; its argument is ignored."""

    @abstractmethod
    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        """Returns the rows that a batch is said to hold, and what it holds."""

    @abstractmethod
    def writer(self, count: int) -> Callable[[Any], Any]:
        """Returns what appends a block of that many rows, as `block` makes it."""

    @abstractmethod
    def block(self, leaves: Leaves) -> Any:
        """Returns rows in the form that this buffer takes; one row is a single record."""

    @abstractmethod
    def read(self, index: torch.Tensor) -> Leaves:
        """Returns stored rows."""


class Replaykit(Holder):
    """replaykit's ReplayBuffer over a LazyTensorStorage."""

    name = "replaykit"
    storage: Any = LazyTensorStorage
    buffer: Any = None

    def fill(self, leaves: Leaves) -> None:
        self.buffer = self.new_buffer()
        data = as_tensordict(leaves)
        for start in range(0, self.rows, CHUNK):
            self.buffer.extend(data[start : start + CHUNK])

    def new_buffer(self) -> Any:
        return ReplayBuffer(storage=self.storage(self.rows), batch_size=BATCH)

    def check_label(self) -> None:
        expect(type(self.buffer) is ReplayBuffer, f"buffer is a {type(self.buffer)}")
        expect(type(self.buffer.storage) is self.storage, f"over {type(self.buffer.storage)}")
        sampler = type(self.buffer.sampler).__name__
        expect(sampler == "RandomSampler", f"sampler is a {sampler}")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")

    def sampler(self) -> Callable[[Any], Any]:
        sample = self.buffer.sample
        return lambda _: sample()

    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        return batch["index"], {key: batch[key] for key in self.keys}

    def block(self, leaves: Leaves) -> Any:
        data = as_tensordict(leaves)
        return data[0].clone() if row_count(leaves) == 1 else data

    def writer(self, count: int) -> Callable[[Any], Any]:
        write: Callable[[Any], Any] = self.buffer.add if count == 1 else self.buffer.extend
        return write

    def read(self, index: torch.Tensor) -> Leaves:
        rows = self.buffer[index]
        return {key: rows[key] for key in self.keys}


class TorchRL(Replaykit):
    """TorchRL's TensorDictReplayBuffer over its LazyTensorStorage."""

    name = "TorchRL"

    @staticmethod
    def quiet() -> None:
        """Before its first import: no log lines between the figures."""
        os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")

    def new_buffer(self) -> Any:
        self.quiet()
        from torchrl.data import LazyTensorStorage as Storage
        from torchrl.data import TensorDictReplayBuffer

        self.storage = Storage
        return TensorDictReplayBuffer(storage=Storage(self.rows), batch_size=BATCH)

    def check_label(self) -> None:
        buffer = self.buffer
        expect(type(buffer).__name__ == "TensorDictReplayBuffer", f"buffer is a {type(buffer)}")
        expect(type(buffer.storage) is self.storage, f"over {type(buffer.storage)}")
        sampler = type(buffer.sampler).__name__
        expect(sampler == "RandomSampler", f"sampler is a {sampler}")
        expect(len(buffer) == self.rows, f"holds {len(buffer)} rows of {self.rows}")


class RawTorch(Holder):
    """The floor: preallocated columns, one ``index_select`` or copy per leaf and call."""

    name = "index_select"

    def fill(self, leaves: Leaves) -> None:
        self.columns = {key: value.clone() for key, value in leaves.items()}
        self.cursor = 0

    def check_label(self) -> None:
        for key, column in self.columns.items():
            expect(len(column) == self.rows and column.is_contiguous(), f"{key} is no column")

    def sampler(self) -> Callable[[Any], Any]:
        return lambda _: self._sample()

    def _sample(self) -> tuple[torch.Tensor, Leaves]:
        index = torch.randint(self.rows, (BATCH,))
        return index, {key: column.index_select(0, index) for key, column in self.columns.items()}

    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        return batch

    def block(self, leaves: Leaves) -> Leaves:
        return leaves

    def writer(self, count: int) -> Callable[[Any], Any]:
        return self._write

    def _write(self, block: Leaves) -> None:
        count = row_count(block)
        start = self.cursor if self.cursor + count <= self.rows else 0
        for key, column in self.columns.items():
            column[start : start + count].copy_(block[key])
        self.cursor = start + count

    def read(self, index: torch.Tensor) -> Leaves:
        return {key: column[index] for key, column in self.columns.items()}


class Cpprb(Holder):
    """cpprb's ReplayBuffer; samples become tensors without a copy."""

    name = "cpprb"
    buffer: Any

    def fill(self, leaves: Leaves) -> None:
        self.names = {"/".join(key): key for key in leaves}
        fields = {
            name: {"shape": tuple(leaves[key].shape[1:]), "dtype": leaves[key].numpy().dtype}
            for name, key in self.names.items()
        }
        self.buffer = self.new_buffer(fields)
        for start in range(0, self.rows, CHUNK):
            self.add({key: leaf[start : start + CHUNK] for key, leaf in leaves.items()})

    def new_buffer(self, fields: dict[str, Any]) -> Any:
        import cpprb

        return cpprb.ReplayBuffer(self.rows, fields)

    def add(self, leaves: Leaves) -> None:
        self.buffer.add(**self.block(leaves))

    def check_label(self) -> None:
        kind = type(self.buffer).__name__
        expect(kind == "ReplayBuffer", f"buffer is a {kind}")
        stored = self.buffer.get_stored_size()
        expect(stored == self.rows, f"holds {stored} rows of {self.rows}")

    def sampler(self) -> Callable[[Any], Any]:
        sample, from_numpy, names = self.buffer.sample, torch.from_numpy, list(self.names.items())

        def work(_: Any) -> Leaves:
            batch = sample(BATCH)
            return {key: from_numpy(batch[name]) for name, key in names}

        return work

    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        # It does not tell the index; the reward of a row is its number.
        return batch["next", "reward"].flatten().long(), batch

    def block(self, leaves: Leaves) -> Any:
        return {name: leaves[key].numpy() for name, key in self.names.items()}

    def writer(self, count: int) -> Callable[[Any], Any]:
        add = self.buffer.add
        return lambda block: add(**block)

    def read(self, index: torch.Tensor) -> Leaves:
        rows = self.buffer._encode_sample(index.numpy())
        return {key: torch.from_numpy(rows[name]) for name, key in self.names.items()}


def blocks(holder: Holder, leaves: Leaves, count: int) -> Callable[[int], list[Any]]:
    """Returns what hands out blocks of ``count`` rows, going round through the leaves given."""
    parts = [
        holder.block({key: leaf[at : at + count].clone() for key, leaf in leaves.items()})
        for at in range(0, row_count(leaves) - count + 1, count)
    ]
    source = itertools.cycle(parts)
    return lambda calls: list(itertools.islice(source, calls))
