"""State of a buffer's parts: those of one's own keep it, and what is refused changes nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from tests.buffer.building import Turning, buffer_of, rows, same, unchanged
from tests.support.refusals import refuses


class Scale:
    """A transform with state: a tensor, a number and a text."""

    def __init__(self, factor: float = 1.0, failing: bool = False) -> None:
        self.factor, self.calls = torch.tensor(factor), 0
        self.failing = failing

    def forward(self, data: Any) -> Any:
        self.calls += 1
        return data * self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "calls": self.calls, "name": "scale", "on": True}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]
        self.calls = state["calls"]
        if self.failing:
            raise ConnectionError("transform")


@pytest.mark.pitfall("CK15")
def test_custom_transforms_and_samplers_keep_their_state(tmp_path: Path):
    """CK15: transform state is part of the checkpoint."""

    def make(factor: float) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(5), sampler=Turning(), transform=Scale(factor)
        )

    buffer = make(3.0)
    buffer.append_transform(lambda x: x + 1)
    buffer.extend(torch.arange(5.0))
    buffer.sample(2)
    buffer.dumps(tmp_path)
    loaded = make(1.0)
    loaded.append_transform(lambda x: x + 1)
    loaded.loads(tmp_path)
    assert loaded.sample(2).tolist() == buffer.sample(2).tolist() == [7.0, 10.0]
    assert (loaded.transform[0].calls, loaded.transform[0].factor.item()) == (2, 3.0)
    plain = ReplayBuffer(storage=LazyTensorStorage(5), sampler=Turning())
    refuses(ValueError, "transform with state at position 0", plain.loads, tmp_path)


def test_transform_state_that_cannot_be_saved_is_named(tmp_path: Path):
    scale = Scale()
    scale.factor = object()  # type: ignore[assignment]
    buffer = ReplayBuffer(storage=ListStorage(5), transform=scale)
    refuses(TypeError, r"transforms\['0'\]\['factor'\].*object", buffer.dumps, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.pitfall("CK2")
@pytest.mark.parametrize(
    ("part", "initialised"),
    [
        ("sampler", False),
        ("sampler", True),
        ("transform", False),
        ("transform", True),
        ("memory", False),
    ],
)
@pytest.mark.parametrize("how", ["loads", "load_state_dict"])
def test_a_part_that_refuses_its_state_leaves_everything_as_it_was(
    part: str,
    initialised: bool,
    how: str,
    tmp_path: Path,
    monkeypatch: Any,
):
    """CK2, G1: also parts that were loaded before it, and files that would have been made."""
    source = ReplayBuffer(
        storage=LazyTensorStorage(8), sampler=Turning(), transform=Scale(2.0), batch_size=2
    )
    source.extend(rows(6).select("observation"))
    source.sample()
    source.dumps(tmp_path / "saved")
    state = source.state_dict()
    scratch = tmp_path / "scratch"
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(8, scratch_dir=scratch),
        sampler=Turning(failing=part == "sampler"),
        transform=Scale(5.0, failing=part == "transform"),
        generator=torch.Generator().manual_seed(1),
        batch_size=2,
    )
    if initialised:
        buffer.extend(rows(3, 40).select("observation"))
        buffer.sample()
    elif part == "memory":

        def refuse(*_: Any, **__: Any) -> None:
            raise ConnectionError("no memory")

        monkeypatch.setattr(LazyMemmapStorage, "_allocate", refuse)

    def load() -> None:
        buffer.loads(tmp_path / "saved") if how == "loads" else buffer.load_state_dict(state)

    unchanged(buffer, ConnectionError, load)
    monkeypatch.undo()
    assert scratch.exists() is initialised
    buffer.sampler.failing = buffer.transform[0].failing = False
    load()
    assert torch.equal(buffer[:]["observation"], source[:]["observation"])
    assert (len(buffer), buffer.sampler.at) == (6, 2)


@pytest.mark.pitfall("CK10")
def test_other_components_or_rows_are_refused_before_anything_changes(tmp_path: Path):
    """CK10, C6: another kind of writer, other keys, shapes, dtypes or lanes."""
    buffer_of("tensor", filled=6, sampler="without").dumps(tmp_path)
    good = {"sampler": "without", "filled": 3, "seed": 0}
    buffer = buffer_of("tensor", **good, writer=TensorDictMaxValueWriter("id"))
    match = "'max_value' writer, got 'round"
    unchanged(buffer, ValueError, lambda: buffer.loads(tmp_path), match)
    for change, words in [
        (lambda td: td.exclude("pixels"), "'pixels'"),
        (lambda td: td.set("extra", torch.zeros(3)), "'extra'"),
        (lambda td: td.set("id", td["id"].float()), "'id'.*float32.*int64"),
        (lambda td: td.set("observation", torch.zeros(3, 4)), r"'observation'.*\[4\].*\[3\]"),
    ]:
        buffer = buffer_of("tensor", sampler="without", seed=0)
        buffer.extend(change(rows(3)))
        unchanged(buffer, ValueError, lambda b=buffer: b.loads(tmp_path), words)
    listed = ReplayBuffer(storage=ListStorage(5), sampler=SamplerWithoutReplacement())
    listed.extend(["a", torch.zeros(2)])
    listed.dumps(tmp_path / "objects")
    for kind in ("tensor", "memmap"):
        buffer = buffer_of(kind, **good)
        unchanged(buffer, ValueError, lambda b=buffer: b.loads(tmp_path / "objects"), "layout")
    texts = ReplayBuffer(storage=ListStorage(5), sampler=SamplerWithoutReplacement())
    texts.extend(["a", "b"])
    texts.dumps(tmp_path / "texts")
    empty = buffer_of("tensor", sampler="without")
    unchanged(empty, ValueError, lambda: empty.loads(tmp_path / "texts"), "layout")
    lanes, other = (buffer_of("tensor", 12, ndim=2, sampler="without") for _ in range(2))
    lanes.extend(TensorDict({"id": torch.zeros(3, 3).long()}, [3, 3]))
    lanes.dumps(tmp_path / "lanes")
    other.extend(TensorDict({"id": torch.zeros(4, 1).long()}, [4, 1]))
    unchanged(other, ValueError, lambda: other.loads(tmp_path / "lanes"), "lanes")
    unchanged(empty, ValueError, lambda: empty.loads(tmp_path / "lanes"), "ndim")


PRIORITIZED = ("prioritized", "prioritized slices")
SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices without": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(alpha=0.9, beta=0.4, slice_len=2),
    "consuming": lambda: ConsumingSampler(2),
}


@pytest.mark.parametrize(
    ("saved", "own", "capacity", "kind"),
    [
        (*pair, capacity, kind)
        for pair, capacity, kind in zip(
            itertools.permutations(SAMPLERS, 2),
            itertools.cycle([20, 10, 40]),
            itertools.cycle([LazyTensorStorage, LazyMemmapStorage]),
            strict=False,
        )
    ],
)
@pytest.mark.filterwarnings("ignore:.*rows.*left out")
def test_load_into_another_sampler_kind_resets_it_and_warns(
    saved: str, own: str, capacity: int, kind: Any, tmp_path: Path
) -> None:
    """Also with another kind of storage, of another capacity, and opened in place."""

    def made(sampler: str, size: int, storage: Any = LazyTensorStorage) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(1)
        return ReplayBuffer(
            storage=storage(size), sampler=SAMPLERS[sampler](), batch_size=4, generator=generator
        )

    def steps(first: int, count: int) -> TensorDict:
        number = torch.arange(first, first + count)
        return TensorDict({"x": number, "next": {"done": number % 5 == 4}}, [count])

    source = made(saved, 20)
    source.extend(steps(0, 27))
    if saved in PRIORITIZED:
        source.update_priority(torch.arange(20), torch.arange(20.0) + 1)
    source.sample()
    source.dumps(tmp_path)
    how = "starts over"
    if own in PRIORITIZED:
        how = "keeps the priorities" if saved in PRIORITIZED else "gives each row priority 1"
    copied, moved, mapped = made(own, 20), made(own, capacity, kind), made(own, 20)
    moved.extend(steps(500, 7))
    moved.sample()
    for buffer in (copied, moved, mapped):
        match = f"sampler is left out: this buffer has .*{how}"
        with pytest.warns(UserWarning, match=match) as caught:
            buffer.loads(tmp_path, mmap=buffer is mapped)
        assert {warning.filename for warning in caught} == {__file__}
    for _ in range(3):
        same(copied.sample(), mapped.sample())
    for buffer in (moved, mapped):
        stored = buffer.storage[:]["x"].tolist()
        assert sorted(stored) == list(range(27 - min(buffer.storage.max_size, 20), 27))
        if own in PRIORITIZED:
            priorities = dict.fromkeys(range(27), 1.0)
            if saved in PRIORITIZED:
                slots = source.storage[:]["x"].tolist()
                priorities = {x: 1.0 + slot for slot, x in enumerate(slots)}
            sampler: Any = buffer.sampler
            assert sampler.alpha == SAMPLERS[own]().alpha
            found = sampler.state_dict()["_priorities"].tolist()
            assert found == [priorities[x] for x in stored]
        buffer.extend(steps(900, 5))
        assert len(buffer.sample()) == 4


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(("sampler", "uses"), [("without", 1), ("consuming", 2)])
@pytest.mark.filterwarnings("ignore:.*sampler is left out")
def test_passes_begin_with_all_rows_that_were_loaded(
    sampler: str, uses: int, mmap: bool, tmp_path: Path
) -> None:
    buffer = buffer_of(sampler=SAMPLERS[sampler](), batch_size=2)
    buffer_of(filled=10).dumps(tmp_path)
    buffer.loads(tmp_path, mmap=mmap)
    found: list[int] = []
    while len(found) < 10 * uses:
        found += buffer.sample()["id"].tolist()
    assert sorted(found) == sorted([*range(10)] * uses)
