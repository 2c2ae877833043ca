"""One program under way: the buffer, its model, and a second buffer that does the same."""

from __future__ import annotations

import dataclasses
import gc
import random
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replaykit import ReplayBuffer
from tests.programs.batches import (
    BatchCheck,
    can_sample,
    check_same_batches,
    flat_slots,
)
from tests.programs.combinations import BATCH, GAMMA, STEPS, STREAMS, Combination
from tests.programs.model import Model, Pass, Values
from tests.programs.rows import COLUMNS, check_rows, make_values, to_columns, to_tensordict
from tests.storages.sharing import another

TWINS = {"lazy": "memmap", "tensor": "tensor"}
"""The storage of the twin, which is a `LazyTensorStorage` for all others."""


@dataclass
class Draw:
    """A batch that was requested and not delivered yet."""

    model: Model
    """The model as of the draw."""
    consumer_version: int
    twin_batch: Any = None
    ended: bool = False
    """True if the batch ends a pass. The next pass is drawn only after it was taken."""
    number: int = 0
    """The number of the draw among all draws."""
    generator: Any = None
    """The state of the twin's generator before the draw."""
    mark: Any = None
    """The twin's place before the draw."""


@dataclass
class Save:
    """A saved state, of the buffer and of its twin."""

    states: list[Any]
    """Folders or dictionaries."""
    model: Model
    passes: Pass
    consumer_version: int


class Session:
    """The buffer, its twin and the model.

    The twin has another storage, is not shared and does not prefetch. If the buffer prefetches, the
    twin's batches are drawn as early as the buffer's: that is the law of docs/overlap.md. A save
    undoes the draws that were not delivered, so the twin goes back to the first of them.
    """

    def __init__(self, combination: Combination, folder: Path, seed: int) -> None:
        self.combination, self.folder, self.seed = combination, folder, seed
        c = combination
        self.twin_combination = dataclasses.replace(
            c,
            storage=TWINS.get(c.storage, "lazy") if not c.recover else "memmap",
            shared=False,
            dedup=False,
            prefetch=0,
        )
        self.model = c.model()
        self.buffer = c.make(folder / "rows", seed)
        self.other = self._another() if c.shared else None
        self.handle = self.buffer
        self.twin = self.twin_combination.make(folder / "twin", seed)
        self.steps = [0] * (STREAMS if c.layout == "lane_key" else c.lanes)
        self.episodes = 0  # written by an `EpisodeWriter`
        self.queue: deque[Draw] = deque()
        self.draws = 0
        self.passes = Pass()
        self.kept: list[Any] = []
        """Batches that were delivered, whose handles later updates use."""
        self.saves: list[Save] = []
        self.consumer_version = 0
        self.lines: list[str] = []
        self.count = 0
        if c.storage == "tensor":
            self._begin_full()
        self.write_by_all()

    def _begin_full(self) -> None:
        """Begin with a tensor that is full of zeros; empty the buffer if it can be emptied."""
        zeros = [dict.fromkeys(COLUMNS, 0)] * self.combination.capacity
        self.model.place_by_hand(range(self.combination.capacity), zeros)
        if self.combination.writer != "immutable":
            self.call("rb.empty()", lambda rb: rb.empty())
            self.model.clear()

    def write_by_all(self) -> None:
        """Write a row by each process whose first write computes only missing returns."""
        if not (self.combination.returns and self.combination.shared):
            return
        for handle in self.handles:
            self.handle = handle
            rows = self.new_rows(random.Random(0), self.combination.lanes)
            given = self.as_given(rows)
            self.call("rb.extend(first rows)", lambda rb, given=given: rb.extend(given))
            self.model.write(rows)
            self.advance_version()

    def _another(self) -> ReplayBuffer:
        """Return the buffer as another process gets it, from its parent or by its path."""
        c = self.combination
        return c.join(self.folder / "rows", self.seed) if c.recover else another(self.buffer)

    def reopen(self, seed: int) -> None:
        """Close the files of all handles and open them again."""
        c = self.combination
        for buffer in (*self.handles, self.twin):
            buffer.shutdown()
        self.queue.clear()  # its marks may keep the twin's rows
        self.buffer = self.other = self.handle = self.twin = buffer = None  # type: ignore[assignment]
        gc.collect(2 if c.shared else 0)  # a handle that is not collected yet keeps the rows shared
        make = c.join if c.shared and seed % 2 and (self.folder / "rows").exists() else c.make
        self.buffer = self.handle = make(self.folder / "rows", seed)
        self.other = self._another() if c.shared else None
        self.twin = self.twin_combination.make(self.folder / "twin", seed)

    def close(self) -> None:
        """End threads and remove files."""
        for buffer in (self.buffer, self.other, self.twin):
            if buffer is not None:
                buffer.shutdown()
        self.buffer = self.other = self.handle = self.twin = None  # type: ignore[assignment]
        gc.collect(0)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- calls -----------------------------------------------------------------------------------

    @property
    def handles(self) -> list[ReplayBuffer]:
        return [self.buffer] if self.other is None else [self.buffer, self.other]

    def samplers(self) -> list[Any]:
        """Return the samplers of all handles and of the twin."""
        return [buffer.sampler for buffer in [*self.handles, self.twin]]

    def new_path(self) -> Path:
        self.count += 1
        return self.folder / f"save-{self.count}"

    def call(
        self,
        line: str,
        act: Callable[[ReplayBuffer], Any],
        error: type[Exception] | tuple[type[Exception], ...] | None = None,
    ) -> Any:
        """Do the same to the buffer and to its twin; return what the buffer returned.

        Args:
            line: the call, as readers of a failure will see it.
            error: the kind of error that both have to raise.
        """
        name = "other" if self.handle is self.other else "rb"
        self.lines.append(line.replace("rb", name, 1) if name != "rb" else line)
        results = []
        for buffer in (self.handle, self.twin):
            try:
                results.append(act(buffer))
            except Exception as raised:
                if error is None or not isinstance(raised, error):
                    raise
                self.lines[-1] += f"  # {type(raised).__name__}"
            else:
                assert error is None, f"expected an error, got {results[-1]}"
        if not results:
            return None
        if isinstance(results[0], torch.Tensor):
            assert torch.equal(results[0], results[1]), f"the twin returns {results[1]}"
        return results[0]

    # -- rows ------------------------------------------------------------------------------------

    def new_rows(self, rng: random.Random, count: int) -> list[Values]:
        """Return the next ``count`` rows, in the order in which slots take them."""
        rows = []
        if self.combination.writer == "episodes":
            while len(rows) < count:
                length = rng.randint(1, min(4, count - len(rows)))
                end = rng.choice(["open", "terminated", "truncated"])
                rows += [make_values(self.episodes, step, "open") for step in range(length - 1)]
                rows.append(make_values(self.episodes, length - 1, end))
                self.episodes += 1
            return rows
        for at in range(count):
            streams = len(self.steps)
            stream = at % streams if self.combination.lanes > 1 else rng.randrange(streams)
            end = rng.choices(["open", "terminated", "truncated"], [5, 1, 1])[0]
            rows.append(make_values(stream, self.steps[stream], end))
            self.steps[stream] += 1
        return rows

    def as_given(self, rows: list[Values]) -> Any:
        """Return rows in the layout of writes."""
        return to_tensordict(rows, self.combination.lanes, time_first=False)

    def written(self, slots: Any, wanted: list[int]) -> None:
        """Compare the slots that a write returned with those of the model."""
        found = flat_slots(slots, self.combination.lanes)
        assert found == wanted, f"expected the slots {wanted}, got {found}"
        self.advance_version()

    def advance_version(self) -> None:
        """Keep the version of the learner at least as new as that of any row."""
        if self.combination.sampler != "staleness":
            return
        newest = max((self.model[at].values["version"] for at in self.model.stored()), default=0)
        self.consumer_version = max(self.consumer_version, newest)
        for sampler in self.samplers():
            if sampler.consumer_version != self.consumer_version:
                sampler.consumer_version = self.consumer_version

    # -- samples ---------------------------------------------------------------------------------

    def can_sample(self) -> bool:
        return can_sample(self.combination, self.model, self.consumer_version)

    def next_batch(self, line: str, *, with_info: bool = False) -> None:
        """Take the next batch of the buffer's size, and check it."""
        self._draw_ahead(self.combination.prefetch + 1)
        draw = self.queue.popleft()
        self._draw_ahead(self.combination.prefetch)
        self.lines.append(line)
        if with_info:
            batch, info = self.handle.sample(return_info=True)
            assert torch.equal(info["index"], batch["index"])
        else:
            batch = self.handle.sample()
        self.check_batch(draw, batch, BATCH)

    def _draw_ahead(self, count: int) -> None:
        """Request batches until ``count`` wait, or until one of them ends a pass."""
        while len(self.queue) < count and not (self.queue and self.queue[-1].ended):
            draw = self._new_draw()
            if self.combination.prefetch:
                draw.generator = self.twin._generator.get_state()
                if self.combination.remembers:
                    draw.mark = self.twin.sampler.mark(self.twin.storage)
            draw.twin_batch = self.twin.sample()
            draw.ended = self.combination.passes and bool(self.twin.sampler.ran_out)
            self.queue.append(draw)

    def _new_draw(self) -> Draw:
        self.draws += 1
        return Draw(self.model.frozen(), self.consumer_version, number=self.draws)

    def rewind(self) -> None:
        """Let the twin undo the draws that the buffer has not delivered, as a save does.

        The generator stays where it is if a batch of another size was drawn since.
        """
        while self.queue and self.queue[-1].number == self.draws:
            draw = self.queue.pop()
            self.draws -= 1
            self.twin._generator.set_state(draw.generator)
            if draw.mark is not None:
                self.twin.sampler.rollback(draw.mark, self.twin.storage)
        self.queue.clear()

    def direct_batch(self, line: str, size: int) -> None:
        """Take a batch of another size, which is drawn at once, and check it."""
        draw = self._new_draw()
        draw.twin_batch = self.twin.sample(size)
        self.lines.append(line)
        self.check_batch(draw, self.handle.sample(size), size)

    def check_batch(self, draw: Draw, batch: Any, size: int) -> None:
        """Compare a batch with the model as of its draw, and with the twin's batch."""
        self.lines[-1] += f"  # index {flat_slots(batch['index'], self.combination.lanes)}"
        if not (self.combination.shared and self.combination.sampler == "staleness"):
            # Each process has an order of the rows of a version, by the updates that it has seen.
            check_same_batches(batch, draw.twin_batch)
        self.kept = [*self.kept[-3:], batch]
        check = BatchCheck(self.combination, draw.model, batch, draw.consumer_version)
        check.check(size, self.passes)
        if self.combination.passes and not self.combination.prefetch:
            ended = bool(self.handle.sampler.ran_out)
            left = self.passes.left
            assert ended == (not left), f"ran_out is {ended}, {left} is left"
        if self.combination.sampler == "consuming":
            self.model.use(check.slots)

    def drop_queue(self) -> None:
        """Forget batches that were drawn and that the buffer has dropped."""
        self.queue.clear()

    # -- checks after every operation --------------------------------------------------------------

    def check(self, *, full: bool) -> None:
        """Compare what the buffer shows with the model.

        Args:
            full: compare all of it, which costs most of the time of a program.
        """
        for buffer in [*self.handles, self.twin] if full else [self.handle]:
            self.check_content(buffer, self.model, self.combination, full=full)

    def check_content(
        self, buffer: ReplayBuffer, model: Model, c: Combination, *, full: bool = True
    ) -> None:
        """Compare the rows, the counters and the episodes of a buffer with a model."""
        assert len(buffer) == len(model.drawable()), f"expected {len(model.drawable())} rows"
        count = buffer.write_count
        assert count == model.write_count, f"write_count: expected {model.write_count}, got {count}"
        if c.prioritized:
            sampler: Any = buffer.sampler
            default = sampler.default_priority
            assert default == model.highest_priority, f"default_priority is {default}"
            dropped = sampler.dropped_updates
            assert dropped == model.dropped_updates, (
                f"dropped_updates: expected {model.dropped_updates}, got {dropped}"
            )
        if not len(model):
            return
        slots = model.stored()
        check_rows(to_columns(buffer.storage[:], c.lanes), [model[at].values for at in slots])
        if full and c.columns and c.sampler != "consuming":
            shown = sorted(flat_slots(e.index, c.lanes) for e in buffer.episodes)
            assert shown == sorted(model.episodes()), (
                f"episodes: expected {sorted(model.episodes())}, got {shown}"
            )
            if model.tags and not (model.by_hand or model.best):
                data = buffer.storage.indexes.data()  # type: ignore[attr-defined]
                marks = data["mark"].tolist() if "mark" in data else [0] * len(data)
                found = dict(zip(data.id.tolist(), marks, strict=True))
                tags = [found[episode.id] for episode in buffer.episodes]
                wanted = model.tags_of([flat_slots(e.index, c.lanes) for e in buffer.episodes])
                assert tags == wanted, f"tags: expected {wanted}, got {tags}"
            if c.n_step:
                rows = buffer[:]
                rows = rows.transpose(0, 1).contiguous() if c.lanes > 1 else rows
                read = [model.n_step(slot, STEPS, GAMMA) for slot in slots]
                check_rows(to_columns(rows, c.lanes), read)
