"""All combinations of parts that random programs run over, and those that the package refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replaykit import (
    ConsumingSampler,
    Coverage,
    EpisodeData,
    EpisodeWriter,
    ImmutableDatasetWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReturnToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from tests.programs.model import Model
from tests.programs.rows import to_tensordict

LANES, STREAMS, RING = 2, 3, 3
BATCH = 6
SLICE, BEFORE, STEPS, GAMMA = 2, 1, 2, 0.5
"""The rows of a slice, the burn-in of a sequence, and the steps and the discount of `NStep`."""
ALPHA, BETA, EPS = 0.7, 0.5, 0.25
USES, STALE = 2, 6


def has_mark(episodes: EpisodeData) -> Any:
    """Return whether episodes have the tag 1."""
    return (episodes["mark"] if "mark" in episodes else episodes.length * 0) == 1


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "pass": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=ALPHA, beta=BETA, eps=EPS),
    "slices": lambda: SliceSampler(slice_len=SLICE),
    "slice pass": lambda: SliceSamplerWithoutReplacement(slice_len=SLICE),
    "prioritized slices": lambda: PrioritizedSliceSampler(
        alpha=ALPHA, beta=BETA, eps=EPS, slice_len=SLICE
    ),
    "sequential slices": lambda: SliceSampler(slice_len=SLICE, draw="sequential"),
    "round robin slices": lambda: SliceSampler(slice_len=SLICE, draw="round_robin"),
    "tagged slices": lambda: SliceSampler(slice_len=SLICE, where=has_mark),
    "covering slices": lambda: SliceSampler(slice_len=SLICE, measure=Coverage(2.0)),
    "sequences": RandomSampler,
    "prioritized sequences": lambda: PrioritizedSampler(alpha=ALPHA, beta=BETA, eps=EPS),
    "consuming": lambda: ConsumingSampler(USES),
    "staleness": lambda: StalenessAwareSampler(max_staleness=STALE, version_key="version"),
}
FEWER = ("sequential slices", "round robin slices", "tagged slices", "covering slices")
"""Samplers that programs run with fewer of the other parts."""
WRITERS: dict[str, Callable[[], Any]] = {
    "ring": lambda: RoundRobinWriter(track_generations=True),
    "lanes": lambda: LaneWriter(RING, track_generations=True),
    "best": lambda: TensorDictMaxValueWriter("rank"),
    "episodes": lambda: EpisodeWriter(track_generations=True),
    "immutable": ImmutableDatasetWriter,
}


@dataclass(frozen=True)
class Combination:
    """The parts of one buffer."""

    storage: str
    layout: str = "flat"
    """``flat``, ``ndim=2``, or ``lane_key``."""
    writer: str = "ring"
    sampler: str = "random"
    shared: bool = False
    recover: bool = False
    dedup: bool = False
    prefetch: int = 0
    n_step: bool = False
    returns: bool = False
    """True if a `ReturnToGo` stores returns with the rows."""

    def __str__(self) -> str:
        options = ["shared", "recover", "dedup", "n_step", "returns"]
        names = [name for name in options if getattr(self, name)]
        names += [f"prefetch={self.prefetch}"] if self.prefetch else []
        return ", ".join([self.storage, self.layout, self.writer, self.sampler, *names])

    @property
    def columns(self) -> bool:
        """True if the storage has a schema and an index of episodes."""
        return self.storage not in ("list", "stack")

    @property
    def lanes(self) -> int:
        return LANES if self.layout == "ndim=2" else 1

    @property
    def capacity(self) -> int:
        return 14 if self.lanes > 1 else 9

    @property
    def prioritized(self) -> bool:
        return "prioritized" in self.sampler

    @property
    def windows(self) -> bool:
        return "slice" in self.sampler

    @property
    def sequences(self) -> bool:
        return "sequences" in self.sampler

    @property
    def ordered(self) -> bool:
        """True if the sampler draws windows or episodes in the order of age."""
        return self.sampler in ("sequential slices", "round robin slices")

    @property
    def remembers(self) -> bool:
        """True if each process has a sampler that remembers its draws."""
        return self.passes or self.ordered or self.sampler == "covering slices"

    @property
    def passes(self) -> bool:
        return "pass" in self.sampler

    def model(self) -> Model:
        """Make the model of an empty buffer."""
        return Model(
            self.capacity,
            self.lanes,
            streams=self.layout == "lane_key",
            ring=RING if self.writer == "lanes" else None,
            best=self.writer == "best",
            ages=self.ordered,
            episodic=self.writer == "episodes",
            uses=USES if self.sampler == "consuming" else None,
            gamma=GAMMA if self.returns else None,
        )

    def make_storage(self, folder: Path) -> Any:
        """Make an empty storage, or a full one of zeros that wraps a tensor.

        A recoverable one opens what ``folder`` holds.
        """
        if self.storage == "list":
            return ListStorage(self.capacity)
        if self.storage == "stack":
            return LazyStackStorage(self.capacity)
        options: dict[str, Any] = {}
        if self.lanes > 1:
            options["ndim"] = 2
        if self.layout == "lane_key":
            options["lane_key"] = "env"
        if self.storage == "tensor":
            return TensorStorage(to_tensordict([{}] * self.capacity, self.lanes), **options)
        if self.dedup:
            options |= {"dedup_next": ["observation"], "on_mismatch": "dense"}
        if self.storage == "lazy":
            return LazyTensorStorage(self.capacity, **options)
        if self.recover:
            options |= {"scratch_dir": folder, "recover": True}
        return LazyMemmapStorage(self.capacity, **options)

    def make(self, folder: Path, seed: int) -> ReplayBuffer:
        """Make a buffer over `make_storage`."""
        storage = self.make_storage(folder)
        return ReplayBuffer(storage=storage, shared=self.shared, **self._options(seed))

    def join(self, folder: Path, seed: int) -> ReplayBuffer:
        """Join the buffer in a folder by its path."""
        return ReplayBuffer.join(folder, **self._options(seed))

    def _options(self, seed: int) -> dict[str, Any]:
        transform = NStep(STEPS, GAMMA) if self.n_step else None
        return {
            "sampler": SAMPLERS[self.sampler](),
            "writer": WRITERS[self.writer](),
            "prefetch": self.prefetch or None,
            "batch_size": BATCH,
            "transform": ReturnToGo(GAMMA) if self.returns else transform,
            "sample_unit": Sequence(SLICE, burn_in=BEFORE) if self.sequences else None,
            "generator": torch.Generator().manual_seed(seed),
        }


def combinations() -> Iterator[Combination]:
    """Yield every combination whose storage has the options."""
    for storage, layout, dedup, recover in itertools.product(
        ["list", "stack", "tensor", "lazy", "memmap"],
        ["flat", "ndim=2", "lane_key"],
        [False, True],
        [False, True],
    ):
        if (
            (layout != "flat" and storage in ("list", "stack"))
            or (dedup and storage not in ("lazy", "memmap"))
            or (recover and storage != "memmap")
        ):
            continue
        for writer, sampler, shared, prefetch, n_step in itertools.product(
            WRITERS, SAMPLERS, [False, True], [0, 2], [False, True]
        ):
            few = n_step or writer in ("best", "immutable") or storage not in ("lazy", "memmap")
            refused = writer == "episodes" and layout == "flat" and storage != "lazy"
            if refused or (few and sampler in FEWER):
                continue
            made = Combination(
                storage, layout, writer, sampler, shared, recover, dedup, prefetch, n_step
            )
            yield made
            if _stores_returns(made):
                yield dataclasses.replace(made, returns=True)


def _stores_returns(c: Combination) -> bool:
    """Return whether programs run the combination with a `ReturnToGo`, too."""
    ordered = c.writer in ("ring", "lanes", "episodes") and c.sampler != "consuming"
    return c.storage in ("lazy", "memmap") and ordered and not c.n_step


# -- what the package refuses ----------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Combinations that the package refuses, and a part of the text of the error."""

    applies: Callable[[Combination], bool]
    text: str
    at: str = "make"
    """``make``: the constructor refuses. ``sample``: the first sample does."""


_ROWS_AROUND = "which transforms that read the rows around need; use a tensor or memmap storage"
REFUSALS = [
    Refusal(
        lambda c: not c.columns and c.sequences,
        "expected a tensor or memmap storage for a Sequence",
    ),
    Refusal(
        lambda c: c.sampler == "consuming" and c.writer != "ring",
        "expected a writer with write_at for a ConsumingSampler",
    ),
    Refusal(
        lambda c: c.sampler == "consuming" and c.lanes > 1,
        "expected ndim=1 for a ConsumingSampler",
    ),
    Refusal(
        lambda c: c.sampler == "consuming" and c.prefetch > 0,
        "expected a ConsumingSampler without prefetch",
    ),
    Refusal(
        lambda c: c.sampler == "consuming" and c.shared,
        "expected a ConsumingSampler without shared=True",
    ),
    Refusal(
        lambda c: c.sampler == "consuming" and c.n_step,
        "expected a ConsumingSampler without transforms that read the rows around",
    ),
    Refusal(
        lambda c: c.windows and c.writer == "best",
        "needs rows in the order in which they were written, which TensorDictMaxValueWriter",
    ),
    Refusal(
        lambda c: c.shared and c.prefetch > 0,
        "Cannot share prefetched replay buffers",
    ),
    Refusal(
        lambda c: c.shared and c.storage not in ("lazy", "memmap"),
        "expected a LazyTensorStorage or LazyMemmapStorage for shared=True",
    ),
    Refusal(
        lambda c: c.shared and c.writer not in ("ring", "lanes", "episodes"),
        "expected a RoundRobinWriter, LaneWriter or EpisodeWriter for shared=True",
    ),
    Refusal(
        lambda c: c.writer == "lanes" and c.layout != "lane_key",
        "a LaneWriter expected a tensor or memmap storage with lane_key=",
    ),
    Refusal(
        lambda c: c.writer == "episodes" and c.layout != "lane_key",
        "EpisodeWriter expected a tensor or memmap storage with lane_key=",
    ),
    Refusal(
        lambda c: c.writer == "best" and c.lanes > 1,
        "a TensorDictMaxValueWriter expected a storage with ndim=1",
    ),
    Refusal(
        lambda c: not c.columns and c.windows,
        "Could not get a tensordict out of the storage, which is required for",
        at="sample",
    ),
    Refusal(
        lambda c: not c.columns and c.n_step,
        _ROWS_AROUND,
        at="sample",
    ),
]
"""If several entries apply to a combination, the package may name any of their reasons."""


def refusals_of(combination: Combination, at: str) -> list[str]:
    """Return the texts of which one is in the error, or nothing for a combination that works."""
    return [one.text for one in REFUSALS if one.at == at and one.applies(combination)]


@functools.cache
def accepted() -> tuple[Combination, ...]:
    """Return all combinations that work."""
    return tuple(
        combination
        for combination in combinations()
        if not refusals_of(combination, "make") and not refusals_of(combination, "sample")
    )
