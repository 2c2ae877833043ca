"""Rows on a CUDA device, writes to it, and batches that are moved to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.contender import Contender, Unavailable, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import RawTorch, Replaykit, TorchRL
from benchmarks.laws import expect_frequencies
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_images, make_transitions
from benchmarks.setting import BATCH, Setting
from benchmarks.works.prioritized import ALPHA, BETA, EPS
from benchmarks.works.transitions import Sampling
from benchmarks.works.writes import Writing
from replaykit import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer

__all__ = ["asked", "run"]

DEVICE = "cuda"


def _titles(setting: Setting) -> list[str]:
    return [
        f"uniform sample, {setting.rows:,} rows on cuda",
        f"prioritized sample + update, {setting.rows:,} rows on cuda",
        "transitions from memory to cuda",
        "images from memory to cuda",
        "add 1 from memory to cuda",
        "extend 8 from memory to cuda",
        "extend 64 from memory to cuda",
        "extend 8 on cuda",
        "extend 64 on cuda",
    ]


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return no targets: these figures are for information."""
    return dict.fromkeys(_titles(setting), ())


def _waiting(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the work, complete only when the device has done its part."""

    def run(given: Any) -> Any:
        found = work(given)
        torch.cuda.synchronize()
        return found

    return run


class OnCuda(Replaykit):
    """replaykit's ReplayBuffer over a LazyTensorStorage on the device."""

    def new_buffer(self) -> Any:
        return ReplayBuffer(storage=LazyTensorStorage(self.rows, device=DEVICE), batch_size=BATCH)

    def check_label(self) -> None:
        sample = self.buffer.sample()
        expect(all(leaf.is_cuda for leaf in sample.values(True, True)), "leaves are not on cuda")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")

    def sampler(self) -> Callable[[Any], Any]:
        return _waiting(super().sampler())

    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        return batch["index"].cpu(), {key: batch[key].cpu() for key in self.keys}

    def writer(self, count: int) -> Callable[[Any], Any]:
        return _waiting(super().writer(count))

    def read(self, index: torch.Tensor) -> Leaves:
        return {key: leaf.cpu() for key, leaf in super().read(index.to(DEVICE)).items()}


class TorchRLOnCuda(OnCuda):
    """TorchRL's TensorDictReplayBuffer over its LazyTensorStorage on the device."""

    name = "TorchRL"

    def new_buffer(self) -> Any:
        TorchRL.quiet()
        from torchrl import data

        storage = data.LazyTensorStorage(self.rows, device=DEVICE)
        return data.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)


class FromCuda(OnCuda):
    """The rows that are written lie on the device, too."""

    def block(self, leaves: Leaves) -> Any:
        return super().block(leaves).to(DEVICE)


class TorchRLFromCuda(FromCuda, TorchRLOnCuda):
    """The same with TorchRL."""


class RawOnCuda(RawTorch):
    """One ``index_select`` for each column on the device."""

    def fill(self, leaves: Leaves) -> None:
        super().fill({key: column.to(DEVICE) for key, column in leaves.items()})

    def sampler(self) -> Callable[[Any], Any]:
        return _waiting(super().sampler())

    def _sample(self) -> tuple[torch.Tensor, Leaves]:
        index = torch.randint(self.rows, (BATCH,), device=DEVICE)
        return index, {key: column.index_select(0, index) for key, column in self.columns.items()}

    def tell(self, batch: Any) -> tuple[torch.Tensor, Leaves]:
        index, found = batch
        return index.cpu(), {key: column.cpu() for key, column in found.items()}


class PrioritizedOnCuda(OnCuda):
    """A prioritized buffer with rows on the device, and priorities on the CPU by default."""

    def new_buffer(self) -> Any:
        return TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA,
            beta=BETA,
            eps=EPS,
            storage=LazyTensorStorage(self.rows, device=DEVICE),
            batch_size=BATCH,
        )


class PrioritizedTorchRLOnCuda(OnCuda):
    """TorchRL's prioritized buffer with rows on the device; its trees lie in host memory."""

    name = "TorchRL"

    def new_buffer(self) -> Any:
        TorchRL.quiet()
        from torchrl import data

        try:
            return data.TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA,
                beta=BETA,
                eps=EPS,
                storage=data.LazyTensorStorage(self.rows, device=DEVICE),
                batch_size=BATCH,
            )
        except RuntimeError as error:  # its compiled trees are not there for every torch
            raise Unavailable(str(error).splitlines()[0]) from error


class Stepping(Contender):
    """A buffer that draws by priority and takes new priorities for what it drew."""

    def __init__(self, kind: type[OnCuda], name: str, leaves: Leaves) -> None:
        self.kind, self.name, self.leaves = kind, name, leaves

    def make(self) -> None:
        self.holder = self.kind(self.leaves)

    def check(self) -> None:
        """Rows are drawn as often as their priorities ask for, and hold what was written."""
        holder = self.holder
        holder.check_label()
        rows = torch.arange(holder.rows)
        priorities = (1 + rows % 4).float()
        holder.buffer.update_priority(rows.to(DEVICE), priorities.to(DEVICE))
        counts = torch.zeros(4, dtype=torch.int64)
        for turn in range(200):
            index, batch = holder.tell(holder.buffer.sample())
            counts += (index % 4).bincount(minlength=4)
            if turn < 20:
                for key, column in self.leaves.items():
                    expect(batch[key].equal(column[index]), f"{key} is not what was written")
        shares = torch.zeros(4, dtype=torch.float64)
        shares.index_add_(0, rows % 4, (priorities.double() + EPS) ** ALPHA)
        expect_frequencies(counts, shares)

    def inputs(self, calls: int) -> list[Any]:
        return [torch.rand(BATCH, device=DEVICE) + 1e-3 for _ in range(calls)]

    def timed(self) -> Callable[[Any], Any]:
        sample = self.holder.buffer.sample
        update = self.holder.buffer.update_tensordict_priority

        def step(errors: torch.Tensor) -> Any:
            batch = sample()
            batch.set("td_error", errors)
            update(batch)
            return batch

        return _waiting(step)


class Moved(OnCuda):
    """Rows in host memory; the buffer moves its batches to the device."""

    prefetch: int | None = None

    def new_buffer(self) -> Any:
        return ReplayBuffer(
            storage=LazyTensorStorage(self.rows),
            batch_size=BATCH,
            device=DEVICE,
            prefetch=self.prefetch,
        )


class Prefetched(Moved):
    """The same, two batches in advance."""

    prefetch = 2


class MovedByHand(OnCuda):
    """Rows in TorchRL's buffer in host memory; ``to`` moves each batch."""

    def new_buffer(self) -> Any:
        TorchRL.quiet()
        from torchrl import data

        return data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(self.rows), batch_size=BATCH
        )

    def check_label(self) -> None:
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")

    def sampler(self) -> Callable[[Any], Any]:
        sample = self.buffer.sample
        return _waiting(lambda _: sample().to(DEVICE))


def run(setting: Setting) -> list[Line]:
    """Measures."""
    if not torch.cuda.is_available():
        raise Unavailable("needs a CUDA device")
    transitions, images = make_transitions(setting.rows), make_images(setting.images)
    moved = ((Moved, "replaykit"), (Prefetched, "replaykit, prefetch"), (MovedByHand, "TorchRL"))
    stepping = ((PrioritizedOnCuda, "replaykit"), (PrioritizedTorchRLOnCuda, "TorchRL"))
    uniform = ((OnCuda, "replaykit"), (RawOnCuda, "index_select"), (TorchRLOnCuda, "TorchRL"))
    kinds: list[tuple[Any, Any, Leaves]] = [
        (Sampling, uniform, transitions),
        (Stepping, stepping, transitions),
        (Sampling, moved, transitions),
        (Sampling, moved, images),
    ]
    into = ((OnCuda, "replaykit"), (TorchRLOnCuda, "TorchRL"))
    within = ((FromCuda, "replaykit"), (TorchRLFromCuda, "TorchRL"))
    for contenders, counts in ((into, (1, 8, 64)), (within, (8, 64))):
        kinds += [(partial(Writing, count=count), contenders, transitions) for count in counts]
    lines = []
    for title, (work, contenders, leaves) in zip(_titles(setting), kinds, strict=True):
        subject, *others = (work(kind, name, leaves) for kind, name in contenders)
        found, absent = ready(subject, others)
        times = take_turns(found, rounds=setting.rounds)
        lines += lines_of_turns(title, times, absent, ())
    return lines
