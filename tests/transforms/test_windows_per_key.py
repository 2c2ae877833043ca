"""Windows per key against plain models of LeRobot, of diffusion policy, and of streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    HindsightGoal,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    Windows,
)
from replaykit.datasets import CorpusExperienceReplay, Policies
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.published_buffer import MappedStorage
from tests.datasets.test_split import flat
from tests.support.refusals import refuses
from tests.transforms.streams import histories, play

LENGTHS = (5, 1, 20, 9)
OFFSETS = {"observation.state": [-1, 0], "action": range(16), ("camera",): [0], "task": [-7, 40]}


def episodes() -> TensorDict:
    count = sum(LENGTHS)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    made = torch.arange(count * 12.0).reshape(count, 12)
    return TensorDict(
        {
            "observation": {"state": made[:, :5], "seen": torch.zeros(count, 2)},
            "action": made[:, 5:].double(),
            "camera": torch.arange(count)[:, None, None].expand(count, 8, 8).byte(),
            "task": torch.arange(count),
            "next": {"done": done},
        },
        [count],
    )


def lerobot(rows: Any, key: Any, at: int, lengths: Any, offsets: Any) -> tuple[Any, list[bool]]:
    """What LeRobot gives for ``delta_timestamps``: rows of the episode, and which are padding."""
    stop = 0
    for length in lengths:
        begin, stop = stop, stop + length
        if at < stop:
            break
    near = [max(begin, min(stop - 1, at + offset)) for offset in offsets]
    return rows[key][near], [not begin <= at + offset < stop for offset in offsets]


def check(rows: Any, batch: Any, offsets: Any, lengths: Any = LENGTHS) -> None:
    for row, at in zip(batch, batch["index"].tolist(), strict=True):
        for key, wanted in offsets.items():
            path = tuple(key.split(".")) if isinstance(key, str) else key
            value, padded = lerobot(rows, path, at, lengths, wanted)
            assert torch.equal(row[path], value)
            assert row[path].dtype is value.dtype
            assert row[(*path[:-1], path[-1] + "_is_pad")].tolist() == padded


def every(buffer: ReplayBuffer) -> Iterator[Any]:
    """Batches that have each row once."""
    seen: list[int] = []
    for batch in buffer:
        seen += batch["index"].tolist()
        yield batch
    assert sorted(seen) == list(range(len(buffer)))


@pytest.mark.parametrize("how", ["sample_unit", "transform"])
@pytest.mark.parametrize("place", ["memory", "dedup", "memmap", "prefetch", "loader"])
def test_items_are_those_of_lerobot(tmp_path: Path, how: str, place: str) -> None:
    rows, storage = episodes(), LazyTensorStorage(50, dedup_next=place == "dedup")
    rows["camera"] = rows["camera"].to(torch.uint16)
    if place == "memmap":
        storage = LazyMemmapStorage(50, scratch_dir=tmp_path)  # type: ignore[assignment]
    if place == "dedup":
        following = rows["observation", "state"] + 12
        rows["next", "observation", "state"] = following
    rb: Any = ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(), batch_size=8,
        prefetch=2 if place == "prefetch" else None, **{how: Windows(OFFSETS)},
    )  # fmt: skip
    rb.extend(rows)
    for batch in rb.dataloader(workers=2) if place == "loader" else every(rb):
        check(rows, batch, OFFSETS)
        assert (("next", "done") in batch.keys(True)) == (how == "transform")
    assert rb[:]["task"].shape == ((35, 2) if how == "transform" else (35,))


@pytest.mark.parametrize("choice", [{}, {"episodes": [0, 2, 3]}])
def test_windows_of_data_sets_on_disk(tmp_path: Path, choice: Any) -> None:
    options = ConvertOptions(policies=Policies(repeated="once"))
    published = flat(tmp_path / "data", *LENGTHS, options=options)
    assert ("next", "observation") in published.finals
    offsets = {"observation": [-2, 0], "action": range(9), "next.observation": [-1, 3]}
    lengths = [LENGTHS[e] for e in choice.get("episodes", range(4))]

    def opened(windows: Windows) -> Any:
        sampler = SamplerWithoutReplacement()
        return CorpusExperienceReplay(published, 8, sampler=sampler, sample_unit=windows, **choice)

    rows = CorpusExperienceReplay(published, **choice)[:]
    for batch in every(opened(Windows(offsets))):
        check(rows, batch, offsets, lengths)
    seconds = {key: [offset / 20 for offset in wanted] for key, wanted in offsets.items()}
    refuses(ValueError, "states its fps", opened, Windows(seconds, "seconds"))
    report = {**published.manifest.report, "about": {"fps": 20}}
    published = replace(published, manifest=replace(published.manifest, report=report))
    assert MappedStorage(published).fps == 20
    for windows in (Windows(seconds, "seconds"), Windows(seconds, "seconds", fps=20)):
        check(rows, next(every(opened(windows))), offsets, lengths)
    with pytest.raises(ValueError, match="expected 20 as in the data set, got 30"):
        opened(Windows({"action": [0]}, "seconds", fps=30))


def diffusion_policy(
    rows: Any, lengths: Any, size: int, before: int, after: int, first_k: dict[Any, int]
) -> list[dict[Any, Any]]:
    """All items of diffusion policy's ``SequenceSampler``, in order."""
    before, after = (min(max(pad, 0), size - 1) for pad in (before, after))
    items, start = [], 0
    for length in lengths:
        for shift in range(-before, length - size + after + 1):
            begin, end = max(shift, 0), min(shift + size, length)
            low, high = begin - shift, size - (shift + size - end)
            item = {}
            for key, column in rows.items():
                sample = column[start + begin : start + end].astype(float)
                sample[first_k.get(key, len(sample)) :] = np.nan
                whole = np.zeros((size, *column.shape[1:]))
                whole[:low], whole[high:], whole[low:high] = sample[0], sample[-1], sample
                item[key] = whole
            items.append(item)
        start += length
    return items


@pytest.mark.parametrize(
    ("size", "before", "after"),
    [(1, 0, 0), (2, 1, 0), (2, 0, 1), (8, 0, 0), (8, 3, 2), (16, 1, 7), (16, 7, 8), (3, -4, 2)],
)
def test_items_are_those_of_diffusion_policy(size: int, before: int, after: int) -> None:
    rows, seen = episodes(), min(2, size)
    columns = {"action": rows["action"].numpy(), "state": rows["observation", "state"].numpy()}
    wanted = diffusion_policy(columns, LENGTHS, size, before, after, {"state": seen})
    pad = max(before, 0)
    offsets = {"action": range(-pad, size - pad), "observation.state": range(-pad, seen - pad)}
    rb: Any = ReplayBuffer(
        storage=LazyTensorStorage(50), sampler=SamplerWithoutReplacement(shuffle=False),
        sample_unit=Windows(offsets, pad_after=after), batch_size=4,
    )  # fmt: skip
    rb.extend(rows)
    found = [row for batch in rb for row in batch]
    assert len(found) == len(wanted) > 0
    for row, item in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(row["action"], item["action"])
        np.testing.assert_array_equal(row["observation", "state"], item["state"][:seen])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    offsets=st.lists(st.integers(-4, 4), min_size=1, max_size=4),
    pad_after=st.sampled_from([None, None, 0, 1]),
)
def test_windows_match_a_scan_of_streams(
    data: Any, offsets: list[int], pad_after: int | None
) -> None:
    windows = Windows({"action": offsets, "next.reward": [0]}, pad_after=pad_after)
    streams = play(windows, data.draw(histories()))
    ahead = 0 if pad_after is None else max([*offsets, 0]) - pad_after
    eligible = {
        (lane, number) for lane, number in streams.stored()
        if streams.has_past(lane, number, max(0, -min(offsets)))
        and (ahead <= 0 or number + ahead <= streams.last(lane, number))
    }  # fmt: skip
    if not eligible:
        refuses(RuntimeError, r"rows|eligible", streams.buffer.sample)
        return
    found = streams.drawn()
    assert set(found) == eligible
    for (lane, number), row in found.items():
        first, last = streams.first(lane, number), streams.last(lane, number)
        near = [min(max(number + offset, first), last) for offset in offsets]
        assert row["action"].tolist() == [10 * place for place in near]
        assert row["next", "reward"].item() == streams.rows[lane][number].reward
        wanted = [number + offset != place for offset, place in zip(offsets, near, strict=True)]
        assert row["action_is_pad"].tolist() == wanted


def test_any_sampler_draws_the_rows_of_windows() -> None:
    def make(sampler: Any, how: str = "sample_unit") -> Any:
        rb = ReplayBuffer(
            storage=LazyTensorStorage(50), sampler=sampler, **{how: Windows(OFFSETS)},
            generator=torch.Generator().manual_seed(0), batch_size=64,
        )  # fmt: skip
        rb.extend(episodes())
        return rb

    slices = SliceSampler(slice_len=1, measure="trajectory")
    prioritized = make(PrioritizedSampler(alpha=1.0, beta=1.0))
    for rb in (make(slices), prioritized):
        check(episodes(), rb.sample(), OFFSETS)
    prioritized.update_priority(torch.arange(35), (torch.arange(35) == 7).float() + 1e-6)
    assert (prioritized.sample()["index"] == 7).float().mean() > 0.9
    both = ReplayBufferEnsemble(make(slices), prioritized, num_buffer_sampled=8, batch_size=32)
    joined = both.sample().flatten()
    index = joined["index", "index"]
    check(episodes(), joined.exclude("index").set("index", index.reshape(-1)), OFFSETS)
    with pytest.raises(ValueError, match=r"slice_len=1\), or pass the windows as transform="):
        make(SliceSampler(slice_len=2))
    padded = make(
        SliceSampler(slice_len=4, pad="right", measure="trajectory"), "transform"
    ).sample()
    real = padded["collector", "mask"].flatten()
    assert not real.all()
    assert bool(padded["action_is_pad"][~real].all())
    check(episodes(), padded[real], OFFSETS)


def test_earlier_transforms_relabel_the_rows_of_windows() -> None:
    number, last = torch.arange(35), torch.tensor(LENGTHS).cumsum(0) - 1
    rows = episodes().set("goal", number)
    rows["next"].update({"task": number, "goal": number, "reward": number[:, None] * 1.0})
    goals = HindsightGoal(
        1.0, "final", achieved="task", goal="goal", reward_fn=lambda a, g: a[:, None] * 1.0
    )
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50), transform=Compose(goals, Windows({"goal": [-1, 0, 1]}))
    )
    rb.extend(rows)
    batch = rb.sample(16)
    own = last[torch.searchsorted(last, batch["index"])]
    assert torch.equal(batch["goal"], own[:, None].expand(-1, 3))


def test_names_with_dots_are_resolved_if_they_are_unambiguous() -> None:
    values = {"a": {"b.c": torch.zeros(3), "b": {"c": torch.ones(3)}}, "x.y": torch.arange(3)}
    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=Windows({"x.y": [0, 1]}))
    rb.extend(TensorDict({**values, "next": {"done": torch.zeros(3, 1).bool()}}, [3]))
    assert rb[:]["x.y"].tolist() == [[0, 1], [1, 2], [2, 2]]
    for key, error in {"a.b.c": "one key of that name, got", "x.z": "come after Windows"}.items():
        rb = ReplayBuffer(storage=rb.storage, sample_unit=Windows({key: [0]}))
        refuses(KeyError, error, rb.sample, 2)
    rb = ReplayBuffer(storage=rb.storage, sample_unit=Windows({"x.y": [0], ("x.y",): [1]}))
    refuses(KeyError, r"another key than 'x\.y'", rb.sample, 2)
    rb = ReplayBuffer(storage=rb.storage, sample_unit=Windows({("a", "b.c"): [0]}))
    assert not rb.sample(2)["a", "b.c"].any()


def test_a_storage_without_episodes_is_refused() -> None:
    rb = ReplayBuffer(storage=ListStorage(9), sample_unit=Windows({"task": [0]}))
    rb.extend(episodes())
    refuses(RuntimeError, "does not know where episodes end", rb.sample, 2)
