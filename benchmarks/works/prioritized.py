"""Prioritized samples of 256 small transitions, then new priorities for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.contender import Contender, Subject, Unavailable, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Cpprb, Holder, Replaykit, TorchRL
from benchmarks.laws import expect_frequencies, importance_weights
from benchmarks.limits import Limit, gather_limit, tree_limit
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions, row_bytes
from benchmarks.setting import BATCH, Setting
from replaykit import TensorDictPrioritizedReplayBuffer

__all__ = ["asked", "run", "subjects"]

TARGETS = (Target("cpprb", 1 / 5),)
ALPHA, BETA, EPS = 0.6, 0.4, 1e-8


def _title(setting: Setting) -> str:
    return f"prioritized sample + update, {setting.rows:,}"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {_title(setting): TARGETS}


class PrioritizedReplaykit(Replaykit):
    """replaykit's TensorDictPrioritizedReplayBuffer; errors go back with the batch."""

    def new_buffer(self) -> Any:
        storage = self.storage(self.rows)
        return TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, eps=EPS, storage=storage, batch_size=BATCH
        )

    def check_label(self) -> None:
        sampler = type(self.buffer.sampler).__name__
        expect(sampler == "PrioritizedSampler", f"sampler is a {sampler}")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")

    def prioritize(self, priorities: torch.Tensor) -> None:
        self.buffer.update_priority(torch.arange(self.rows), priorities)

    def weights(self, batch: Any) -> torch.Tensor:
        key = "priority_weight" if batch.get("priority_weight") is not None else "_weight"
        return batch[key]

    def given(self, errors: torch.Tensor) -> Any:
        return errors

    def stepper(self) -> Callable[[Any], Any]:
        sample, update = self.buffer.sample, self.buffer.update_tensordict_priority

        def step(errors: torch.Tensor) -> Any:
            batch = sample()
            batch.set("td_error", errors)
            update(batch)
            return batch

        return step


class ByIndex(PrioritizedReplaykit):
    """The same buffer; errors go back with the index alone."""

    def stepper(self) -> Callable[[Any], Any]:
        sample, update = self.buffer.sample, self.buffer.update_priority

        def step(errors: torch.Tensor) -> Any:
            batch = sample()
            update(batch["index"], errors)
            return batch

        return step


class PrioritizedTorchRL(PrioritizedReplaykit):
    """TorchRL's TensorDictPrioritizedReplayBuffer."""

    def new_buffer(self) -> Any:
        TorchRL.quiet()
        from torchrl import data

        try:
            return data.TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA,
                beta=BETA,
                eps=EPS,
                storage=data.LazyTensorStorage(self.rows),
                batch_size=BATCH,
            )
        except RuntimeError as error:  # its compiled trees are not there for every torch
            reason = str(error).splitlines()[0]
            raise Unavailable(f"not with torch {torch.__version__}: {reason}") from error


class PrioritizedCpprb(Cpprb):
    """cpprb's PrioritizedReplayBuffer; all columns, weights and indices become tensors."""

    def new_buffer(self, fields: dict[str, Any]) -> Any:
        import cpprb

        return cpprb.PrioritizedReplayBuffer(self.rows, fields, alpha=ALPHA, eps=EPS)

    def check_label(self) -> None:
        kind = type(self.buffer).__name__
        expect(kind == "PrioritizedReplayBuffer", f"buffer is a {kind}")
        stored = self.buffer.get_stored_size()
        expect(stored == self.rows, f"holds {stored} rows of {self.rows}")

    def sampler(self) -> Callable[[Any], Any]:
        sample = self.buffer.sample
        return lambda _: self._as_tensors(sample(BATCH, beta=BETA))

    def _as_tensors(self, batch: dict[str, Any]) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = {
            key: torch.from_numpy(batch[name]) for name, key in self.names.items()
        }
        found["weights"] = torch.from_numpy(batch["weights"])
        found["indexes"] = torch.from_numpy(batch["indexes"])
        return found

    def prioritize(self, priorities: torch.Tensor) -> None:
        self.buffer.update_priorities(torch.arange(self.rows).numpy(), priorities.numpy())

    def weights(self, batch: Any) -> torch.Tensor:
        return batch["weights"]

    def given(self, errors: torch.Tensor) -> Any:
        return errors.numpy()

    def stepper(self) -> Callable[[Any], Any]:
        sample, update, convert = (
            self.buffer.sample,
            self.buffer.update_priorities,
            self._as_tensors,
        )

        def step(errors: Any) -> Any:
            batch = sample(BATCH, beta=BETA)
            found = convert(batch)
            update(batch["indexes"], errors)
            return found

        return step


Prioritized = PrioritizedReplaykit | PrioritizedCpprb


class Stepping(Contender):
    """A buffer that draws by priority and takes new priorities for what it drew."""

    def __init__(self, kind: Callable[[Leaves], Prioritized], title: str, leaves: Leaves) -> None:
        self.name = title
        self.kind = kind
        self.leaves = leaves

    def make(self) -> None:
        self.holder: Any = self.kind(self.leaves)
        assert isinstance(self.holder, Holder)

    def check(self) -> None:
        """Frequencies, importance weights and values are right, before and after updates."""
        holder = self.holder
        holder.check_label()
        rows = torch.arange(holder.rows)
        priorities = (1 + rows % 4).float()
        holder.prioritize(priorities)
        parts = min(16, holder.rows // 4)
        kinds = rows * parts // holder.rows * 4 + rows % 4
        shares = torch.zeros(4 * parts, dtype=torch.float64)
        shares.index_add_(0, kinds, (priorities.double() + EPS) ** ALPHA)
        counts = torch.zeros(4 * parts, dtype=torch.int64)
        sample = holder.sampler()
        for _ in range(200):
            index, _batch = holder.tell(sample(None))
            counts += kinds[index].bincount(minlength=4 * parts)
        expect_frequencies(counts, shares)
        for turn in range(30):
            # What an index gets follows from it: of equal ones it does not matter which wins.
            batch = sample(None)
            index, found = holder.tell(batch)
            expect(len(index) == BATCH, f"a batch of {len(index)}")
            for key, column in self.leaves.items():
                expect(found[key].equal(column[index]), f"{key} is not what was written")
            right = importance_weights(priorities, index, alpha=ALPHA, beta=BETA, eps=EPS)
            close = torch.allclose(holder.weights(batch).double().flatten(), right, rtol=1e-3)
            expect(close, f"weights are not those of the priorities after {turn} updates")
            errors = ((index * 7919 + turn * 104729) % 1000 + 1) / 250
            priorities[index] = errors
            self._update(batch, errors)

    def _update(self, batch: Any, errors: torch.Tensor) -> None:
        """The second half of a step, on a batch drawn before."""
        holder = self.holder
        if isinstance(holder, PrioritizedCpprb):
            holder.buffer.update_priorities(batch["indexes"].numpy(), errors.numpy())
        elif isinstance(holder, ByIndex):
            holder.buffer.update_priority(batch["index"], errors)
        else:
            batch.set("td_error", errors)
            holder.buffer.update_tensordict_priority(batch)

    def inputs(self, calls: int) -> Iterable[Any]:
        return [self.holder.given(torch.rand(BATCH) + 1e-3) for _ in range(calls)]

    def timed(self) -> Callable[[Any], Any]:
        return self.holder.stepper()


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    kinds = {_title(setting): PrioritizedReplaykit, f"{_title(setting)}, by index": ByIndex}

    def contender(kind: type[PrioritizedReplaykit]) -> Stepping:
        return Stepping(kind, SUBJECT, make_transitions(setting.rows))

    return {title: Subject(partial(contender, kind)) for title, kind in kinds.items()}


def run(setting: Setting) -> list[Line]:
    """Measures."""
    leaves = make_transitions(setting.rows)
    found, absent = ready(
        Stepping(PrioritizedReplaykit, "replaykit", leaves),
        [
            Stepping(ByIndex, "replaykit, by index", leaves),
            Stepping(PrioritizedTorchRL, "TorchRL", leaves),
            Stepping(PrioritizedCpprb, "cpprb", leaves),
        ],
    )
    times = take_turns(found, rounds=setting.rounds)
    size = row_bytes(leaves)
    at = setting.calibration
    limit = None
    if at is not None:
        rows = gather_limit(at, BATCH, size, setting.threads, setting.rows * size)
        tree = tree_limit(at, BATCH, setting.rows)
        limit = Limit(f"{rows.name} + tree", rows.us + 2 * tree.us)
    return lines_of_turns(_title(setting), times, absent, TARGETS, limit=limit)
