"""Compare batches with the laws of their samplers, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.programs.combinations import (
    ALPHA,
    BATCH,
    BEFORE,
    BETA,
    EPS,
    GAMMA,
    SLICE,
    STALE,
    STEPS,
    Combination,
)
from tests.programs.model import Model, Pass, Values, chances, weights
from tests.programs.rows import FLAGS, check_rows, to_columns


def flat_slots(index: Any, lanes: int) -> list[int]:
    """Return the slots of an index of the package, as the model numbers them."""
    index = torch.as_tensor(index)
    if lanes > 1:
        return [int(time) * lanes + int(lane) for time, lane in index.reshape(-1, 2).tolist()]
    return [int(slot) for slot in index.reshape(-1).tolist()]


def index_of(slots: list[int], lanes: int) -> torch.Tensor:
    """Return the index that the package uses for slots of the model."""
    flat = torch.tensor(slots, dtype=torch.int64)
    return flat if lanes == 1 else torch.stack([flat // lanes, flat % lanes], 1)


def young(model: Model, consumer_version: int) -> list[int]:
    """Return the slots of the rows that are not too stale."""
    return [
        slot for slot in model.stored() if consumer_version - model[slot].values["version"] <= STALE
    ]


def can_sample(combination: Combination, model: Model, consumer_version: int) -> bool:
    """Return whether a batch can be drawn."""
    if not combination.columns and refused_reads(combination):
        return False
    if combination.sampler == "sequential slices":
        return bool(model.windows_by_age(SLICE))
    if combination.windows:
        return bool(allowed_windows(combination, model))
    if combination.sampler == "consuming":
        return bool(model.drawable())
    if combination.sampler == "staleness":
        return bool(young(model, consumer_version))
    return len(model) > 0


def allowed_windows(combination: Combination, model: Model) -> list[list[int]]:
    """Return the windows that a sampler of slices may draw."""
    windows = model.windows(SLICE)
    if combination.sampler != "tagged slices":
        return windows
    episodes = [model.episode_of(window[0]) for window in windows]
    return [w for w, tag in zip(windows, model.tags_of(episodes), strict=True) if tag == 1]


def refused_reads(combination: Combination) -> bool:
    """Return whether the storage lacks the index of episodes that a read needs."""
    return combination.n_step or combination.windows


class BatchCheck:
    """One batch, and the model as of its draw."""

    def __init__(
        self,
        combination: Combination,
        model: Model,
        batch: Any,
        consumer_version: int,
    ) -> None:
        self.combination, self.model, self.batch = combination, model, batch
        self.consumer_version = consumer_version
        self.slots = flat_slots(batch["index"], combination.lanes)
        for slot in self.slots:
            assert model.slots[slot] is not None, f"slot {slot} holds no row at the draw"

    def read(self, slot: int) -> Values:
        """Return the row as the buffer reads it."""
        if self.combination.n_step:
            return self.model.n_step(slot, STEPS, GAMMA)
        return self.model[slot].values

    def check(self, size: int, passes: Pass) -> None:
        """Compare the batch with the law of its sampler.

        Args:
            size: the number of rows that were asked for.
            passes: the pass that the batch continues, if the sampler makes passes.
        """
        found = to_columns(self.batch)
        self._generations("index_generation", self.slots)
        if self.combination.windows:
            self._windows(found, size, passes)
        elif self.combination.sequences:
            self._sequences(found, size)
        else:
            check_rows(found, [self.read(slot) for slot in self.slots])
            self._single_rows(size, passes)

    def _generations(self, key: str, slots: list[int]) -> None:
        if key in self.batch.keys():  # noqa: SIM118
            for slot, generation in zip(slots, self.batch[key].tolist(), strict=True):
                self.model[slot].generation.check(generation)

    def _single_rows(self, size: int, passes: Pass) -> None:
        name, model = self.combination.sampler, self.model
        if name == "pass":
            of = len(model), model.removals
            left = len(passes.left) if passes.left and passes.of == of else len(model)
            assert len(self.slots) == min(size, left), f"{len(self.slots)} rows, {left} left"
            passes.take(self.slots, lambda: set(model.stored()), of)
            return
        if name == "consuming":
            size = min(size, len(model.drawable()))
        assert len(self.slots) == size, f"{len(self.slots)} rows"
        if name == "prioritized":
            self._weights(self.slots, model.stored())
        if name == "consuming":
            assert len(set(self.slots)) == size, f"{self.slots} repeats within a batch"
            assert set(self.slots) <= set(model.drawable()), "a row is used up"
        if name == "staleness":
            allowed = young(model, self.consumer_version)
            assert set(self.slots) <= set(allowed), "a row is too stale"
            if len(allowed) >= size:
                assert len(set(self.slots)) == size, f"{self.slots} repeats within a batch"
            wanted = [self.consumer_version - model[at].values["version"] for at in self.slots]
            assert self.batch["staleness"].tolist() == wanted, f"staleness: expected {wanted}"

    def _weights(self, drawn: list[int], eligible: list[int]) -> None:
        wanted = weights(chances(self.model, eligible, ALPHA, EPS), BETA)
        found = self.batch["priority_weight"].double().numpy()
        expected = np.array([wanted[slot] for slot in drawn])
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-6), (
            f"priority_weight: expected {expected.tolist()}, got {found.tolist()}"
        )

    def _windows(self, found: dict[str, np.ndarray], size: int, passes: Pass) -> None:
        model = self.model
        count = len(self.slots) // SLICE
        windows = [self.slots[at * SLICE : (at + 1) * SLICE] for at in range(count)]
        allowed = allowed_windows(self.combination, model)
        for window in windows:
            assert window in allowed, f"{window} is no window of an episode"
        ids = [at // SLICE for at in range(len(self.slots))]
        assert self.batch["sequence_id"].tolist() == ids, "sequence_id"
        rows = [dict(self.read(slot)) for slot in self.slots]
        for at, (slot, row) in enumerate(zip(self.slots, rows, strict=True)):
            if at % SLICE == SLICE - 1 and not model[slot].values["done"]:
                row["done"] = row["truncated"] = True
        check_rows(found, rows, without=FLAGS if self.combination.n_step else ())
        if self.combination.sampler == "slice pass":
            episodes = [episode for episode in model.episodes() if len(episode) >= SLICE]
            of = [model.placements, episodes]
            left = len(passes.left) if passes.left and passes.of == of else len(episodes)
            assert count == min(size // SLICE, left), f"{count} slices, {left} left"
            taken = [tuple(e) for window in windows for e in episodes if window[0] in e]
            passes.take(taken, lambda: {tuple(episode) for episode in episodes}, of)
            return
        assert count == size // SLICE, f"{count} slices"
        if self.combination.ordered:
            self._in_order(windows, passes)
        if self.combination.prioritized:
            self._weights([slot for w in windows for slot in [w[0]] * SLICE], model.stored())

    def _in_order(self, windows: list[list[int]], passes: Pass) -> None:
        """Compare windows with the next ones in the order of age."""
        model = self.model
        order = model.windows_by_age(SLICE)
        if self.combination.sampler == "round robin slices":
            model.find_begins()
            ages = sorted({model[window[0]].begin for window in model.windows(SLICE)})
            order = [((age, 0), []) for age in ages]
        place = passes.place
        for row in map(model.row_in, range(model.capacity)):  # edits move ends of episodes
            if order[0][1] and row is not None and row.number == passes.first:
                place = row.begin, row.step
        start = sum(key <= place for key, _ in order)
        wanted = [order[(start + at) % len(order)] for at in range(len(windows))]
        passes.place, passes.first = wanted[-1][0], model[windows[-1][0]].number
        if self.combination.sampler == "sequential slices":
            expected = [window for _, window in wanted]
            assert windows == expected, f"expected the windows {expected}, got {windows}"
            return
        found = [model[window[0]].begin for window in windows]
        ages = [key[0] for key, _ in wanted]
        assert found == ages, f"expected windows of the episodes {ages}, got {found}"

    def _sequences(self, found: dict[str, np.ndarray], size: int) -> None:
        model, batch, width = self.model, self.batch, BEFORE + SLICE
        assert len(self.slots) == size * width, f"{len(self.slots)} rows"
        anchors = flat_slots(batch["anchor_index"], self.combination.lanes)
        wanted, valid = [], []
        for anchor in anchors[::width]:
            episode = model.episode_of(anchor)
            first = episode.index(anchor) - BEFORE
            for at in range(first, first + width):
                wanted.append(episode[min(max(at, 0), len(episode) - 1)])
                valid.append(0 <= at < len(episode))
        assert anchors == [anchor for anchor in anchors[::width] for _ in range(width)], "anchors"
        assert self.slots == wanted, f"index: expected {wanted}, got {self.slots}"
        assert batch["validity_mask"].tolist() == valid, f"validity_mask: expected {valid}"
        steps = list(range(width)) * size
        assert batch["step_in_sequence"].tolist() == steps, "step_in_sequence"
        assert batch["learning_mask"].tolist() == [step >= BEFORE for step in steps]
        assert batch["sequence_id"].tolist() == [at // width for at in range(len(steps))]
        self._generations("anchor_generation", anchors)
        rows = [self.read(slot) for slot in self.slots]
        if self.combination.n_step:  # rows that fill a gap have no return
            found = {name: column[valid] for name, column in found.items()}
            rows = [row for row, is_valid in zip(rows, valid, strict=True) if is_valid]
        check_rows(found, rows)
        if self.combination.prioritized:
            self._weights(anchors, model.stored())


def check_same_batches(one: Any, other: Any) -> None:
    """Compare all keys and values of two batches, bit for bit."""
    keys = sorted(one.keys(True, True), key=lambda key: (key != "index", str(key)))
    assert set(keys) == set(other.keys(True, True)), "two buffers give other keys"
    for key in keys:
        assert torch.equal(one[key], other[key]), (
            f"two buffers differ in {key}: {one[key].tolist()}, {other[key].tolist()}"
        )


__all__ = [
    "BATCH",
    "BatchCheck",
    "can_sample",
    "check_same_batches",
    "flat_slots",
    "index_of",
    "young",
]
