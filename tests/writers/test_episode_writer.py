"""Whole episodes and evictors, against a model that keeps lists."""

from __future__ import annotations

import gc
import operator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    EpisodeWriter,
    Fifo,
    LazyMemmapStorage,
    LazyTensorStorage,
    LowestPriority,
    NStep,
    Oldest,
    PrioritizedSampler,
    ReplayBuffer,
    ReturnToGo,
    SliceSampler,
    Uniform,
)
from replaykit.episodes import EndReason, Head
from replaykit.errors import BufferFull, SchemaError
from replaykit.storages.columns import Columns
from replaykit.storages.episode_tags import EpisodeTags
from replaykit.storages.ledger import Ledger
from tests.samplers.chi_square import chi_square_p
from tests.storages.sharing import another
from tests.support.refusals import refuses


def rows_of(key: int, n: int, *, end: str | None = "terminated") -> TensorDict:
    done = torch.zeros(n, 1, dtype=torch.bool)
    if end:
        done[-1] = True
    flags = {
        name: done.clone() if name == end else torch.zeros_like(done)
        for name in ("terminated", "truncated")
    }
    t = torch.arange(n) + 1000 * key
    following = {"t": t + 1, "reward": torch.ones(n, 1), "done": done, **flags}
    return TensorDict({"id": torch.full((n,), key), "t": t, "next": following}, [n])


def make(slots: int, *, kind: Any = LazyTensorStorage, **parts: Any) -> ReplayBuffer:
    names = {"evict", "over_long", "max_episodes", "on_duplicate", "protect", "track_generations"}
    own = {name: parts.pop(name) for name in names & parts.keys()}
    parts.setdefault("generator", torch.Generator().manual_seed(3))
    return ReplayBuffer(storage=kind(slots, lane_key="id"), writer=EpisodeWriter(**own), **parts)


def stored(rb: ReplayBuffer) -> dict[int, int]:
    """Return the lengths of the stored episodes, after a check of every row."""
    found = {}
    for episode in rb.episodes:
        rows = episode.rows()
        key, n = int(rows["id"][0]), episode.length
        assert rows["t"].tolist() == [1000 * key + i for i in range(n)]
        found[key] = n
    assert len(rb) == sum(found.values()) <= rb.storage.max_size
    return found


@pytest.mark.acceptance("S25", "C4")
def test_an_episode_leaves_before_the_next_one_is_written() -> None:
    rb, sizes = make(10), []
    for key, n in enumerate((4, 3, 3, 2, 9)):
        rb.extend(rows_of(key, n))
        sizes.append((len(rb), rb.writer.full))
    assert sizes == [(4, False), (7, False), (10, False), (8, True), (9, True)]
    before = rb[:].clone()
    for wrong, text in ((rows_of(7, 11), "at most 10 rows"), (rows_of(4, 2), "is not stored")):
        refuses(ValueError, text, rb.extend, wrong)
    assert (rb[:] == before).all()
    assert stored(rb) == {4: 9}
    rb.empty()
    rb.extend(rows_of(4, 2))  # the identity is free again
    assert stored(rb) == {4: 2}
    assert not rb.writer.full


KINDS: dict[str, Any] = {
    "memory": LazyTensorStorage,
    "files": LazyMemmapStorage,
    "recovered": partial(LazyMemmapStorage, recover=True),
    "shared": LazyTensorStorage,
    "once": partial(LazyTensorStorage, dedup_next=["t"]),
    "shared once": partial(LazyTensorStorage, dedup_next=["t"]),
    "recovered once": partial(LazyMemmapStorage, recover=True, dedup_next=["t"]),
}


def in_folder(kind: str, folder: Path) -> Any:
    options = {"scratch_dir": folder / "rows"} if "recovered" in kind else {}
    return partial(KINDS[kind], **options)


@pytest.mark.acceptance("C22")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_match_lists(seed: int, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    slots, most, equal = int(rng.integers(8, 60)), int(rng.integers(3, 9)), seed == 3
    shortest_first, one_by_one = bool(rng.integers(2)) and not equal, "shared" in kind
    options: dict[str, Any] = {
        "evict": operator.attrgetter("length") if shortest_first else None,
        "max_episodes": most,
        "on_duplicate": "replace",
        "kind": KINDS[kind],
        "sampler": partial(PrioritizedSampler, alpha=1.0, beta=0.0, eps=0.0),
        "track_generations": True,
        "shared": one_by_one,
    }

    def opened() -> ReplayBuffer:
        gc.collect()
        return make(slots, **{**options, "kind": in_folder(kind, tmp_path)})

    rb = opened()
    handles = [rb, another(rb)] if one_by_one else [rb]
    model: list[tuple[int, int]] = []  # key and length, oldest first
    priority: dict[int, float] = {}  # of each t
    marks: dict[int, int] = {}  # of each key
    for step in range(120):
        rb = handles[step % len(handles)]
        keys = rng.choice(25, int(rng.integers(1, 3)), replace=False).tolist()
        lengths = [3] * len(keys) if equal else rng.integers(1, slots // 3 + 1, len(keys)).tolist()
        rows = torch.cat([rows_of(*pair) for pair in zip(keys, lengths, strict=True)])
        index = rb.extend(rows, tags={"mark": step})
        model = [pair for pair in model if pair[0] not in keys]
        while sum(n for _, n in model) + sum(lengths) > slots or len(model) + len(keys) > most:
            model.remove(min(model, key=lambda pair: pair[1]) if shortest_first else model[0])
        model += zip(keys, lengths, strict=True)
        assert stored(rb) == dict(model)
        marks.update(dict.fromkeys(keys, step))
        data, found = rb.storage.indexes.data(), rb.storage.episodes
        assert data["mark"].tolist() == [marks[key] for key in found.keys(data.lane)]
        t = rb[index]["t"].tolist()
        assert t == [1000 * k + i for k, n in zip(keys, lengths, strict=True) for i in range(n)]
        new = rng.integers(1, 9, len(t)).astype(float)
        rb.update_priority(index, torch.from_numpy(new))
        priority.update(zip(t, new.tolist(), strict=True))
        if step % 7 == 0:  # priorities have moved with their rows
            raw = rb.sampler.state_dict()["_priorities"].tolist()
            assert raw == [priority[t] for t in rb[:]["t"].tolist()]
        if step % 40 == 30 and not one_by_one:
            if "recovered" not in kind:
                rb.dumps(tmp_path / f"{step}")
            handles.clear()
            del rb, data, found
            rb = opened()
            if "recovered" not in kind:
                rb.loads(tmp_path / f"{step}")
            handles.append(rb)
            assert stored(rb) == dict(model)
    handle = rb.writer.generations_of(index)
    rb.extend(rows_of(99, slots))
    assert not (rb.writer.generations_of(index) == handle).any()


def test_windows_sums_and_returns_follow_rows_that_move_and_leave() -> None:
    rb = make(
        50,
        evict=Uniform(),
        sampler=SliceSampler(slice_len=3),
        transform=Compose(ReturnToGo(1.0), NStep(2, 0.5)),
        batch_size=300,
    )
    for key in range(1, 60):
        rb.extend(rows_of(key, 3 + key * 7 % 11))
        if key % 5 == 0:
            rb.remove_oldest(1)
        batch = rb.sample()
        windows = batch["t"].reshape(-1, 3)
        assert (windows.diff() == 1).all()
        assert (windows // 1000 == windows[:, :1] // 1000).all()
        left = 3 + batch["id"] * 7 % 11 - batch["t"] % 1000
        assert batch["return_valid"].all()
        assert batch["episode_return"].flatten().equal(left.float())
        assert batch["next", "reward"].flatten().equal(torch.where(left == 1, 1.0, 1.5))


def test_episode_without_end_is_cut_and_long_one_keeps_its_last_piece() -> None:
    rb = make(6, over_long="split")
    rb.extend(rows_of(0, 2, end=None))
    assert rb.episodes[0].reason == EndReason.CUT
    index = rb.extend(rows_of(1, 9))
    assert index.tolist() == [-1] * 3 + list(range(6))
    assert rb[:]["t"].tolist() == list(range(1003, 1009))
    (only,) = rb.episodes
    assert only.head == Head.CUT
    assert only.reason == EndReason.TERMINATED


@pytest.mark.acceptance("F55")
def test_the_probability_to_leave_is_in_proportion_to_the_length() -> None:
    lengths, gone = (1, 2, 3, 6), [0] * 4
    generator = torch.Generator().manual_seed(0)
    for _ in range(700):
        rb = make(12, evict=Uniform(), generator=generator)
        for key, n in enumerate(lengths):
            rb.extend(rows_of(key, n))
        rb.extend(rows_of(9, 1))
        (lost,) = set(range(4)) - stored(rb).keys()
        gone[lost] += 1
    assert chi_square_p(gone, [700 * n / 12 for n in lengths]) > 1e-3
    rb.extend(rows_of(10, 12))  # ends although everything has to go
    assert stored(rb) == {10: 12}


def test_priorities_and_tags_order_removals() -> None:
    rb = make(9, evict=LowestPriority(), sampler=PrioritizedSampler(alpha=1.0, beta=0.5))
    for key, priority in ((0, [5.0, 1, 1]), (1, [2.0, 2, 2]), (2, [1.0, 1, 4])):
        rb.update_priority(rb.extend(rows_of(key, 3)), torch.tensor(priority))
    rb.extend(rows_of(3, 1))
    assert stored(rb).keys() == {0, 2, 3}
    rb = make(9, evict=Oldest("version"))
    for key, version in ((0, 3), (1, 1), (2, 2)):
        rb.tag(rb.extend(rows_of(key, 3)), {"version": version})
    rb.extend(rows_of(3, 4))
    assert stored(rb).keys() == {0, 3}


@pytest.mark.acceptance("C23")
@pytest.mark.parametrize("by", ["tag", "predicate"])
def test_protected_episodes_stay(by: str) -> None:
    rb = make(9, protect="demo" if by == "tag" else lambda data: data.length == 4)
    index = rb.extend(rows_of(0, 4))
    if by == "tag":
        rb.tag(index, {"demo": True})  # by address, later than the write
    for key in range(1, 9):
        rb.extend(rows_of(key, 3))
    assert stored(rb) == {0: 4, 8: 3}
    before = rb[:].clone()
    refuses(BufferFull, "3 may be removed", rb.extend, rows_of(9, 6))
    assert (rb[:] == before).all()
    assert stored(rb) == {0: 4, 8: 3}
    rb.empty(lane=[0, 8])
    rb.extend(rows_of(9, 2))
    assert stored(rb) == {0: 4, 9: 2}
    rb.empty()
    assert (stored(rb), rb.writer.full) == ({0: 4}, False)
    rb.empty(protected=True)
    assert len(rb) == rb.write_count == 0


def test_a_smaller_buffer_takes_the_newest_whole_episodes(tmp_path: Path) -> None:
    rb = make(20)
    for key, n in enumerate((5, 6, 3, 4)):
        rb.extend(rows_of(key, n))
    rb.dumps(tmp_path)
    small = make(9)
    with pytest.warns(UserWarning, match="11 rows do not fit"):
        small.loads(tmp_path)
    assert stored(small) == {2: 3, 3: 4}
    held = make(20, protect="demo")
    for key, n in enumerate((5, 6, 3, 4)):
        held.extend(rows_of(key, n), tags={"demo": key == 0})
    held.dumps(tmp_path)
    small = make(9, protect="demo")
    with pytest.warns(UserWarning, match="9 rows do not fit"):
        small.loads(tmp_path)
    assert stored(small) == {0: 5, 3: 4}
    before = small[:].clone()
    held.tag(held.extend(rows_of(4, 2)), {"demo": True})
    held.tag(torch.tensor([5]), {"demo": True})
    held.dumps(tmp_path)
    refuses(BufferFull, "at most 9 rows, got 13", small.loads, tmp_path)
    assert (small[:] == before).all()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"evict": Fifo}, TypeError, "an Evictor or a function"),
        ({"evict": 3}, TypeError, "an Evictor or a function"),
        ({"over_long": "drop"}, ValueError, "over_long"),
        ({"on_duplicate": "keep"}, ValueError, "on_duplicate"),
        ({"max_episodes": 0}, ValueError, "max_episodes"),
        ({"protect": 1}, TypeError, "a tag or a function"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], text: str) -> None:
    refuses(error, text, EpisodeWriter, **options)


@pytest.mark.acceptance("F50")
def test_wrong_rows_and_storages_are_refused() -> None:
    for shared in (False, True):
        with pytest.raises(ValueError, match="lane_key="):
            ReplayBuffer(storage=LazyTensorStorage(9), writer=EpisodeWriter(), shared=shared)
    rb = make(9, max_episodes=2, evict=lambda data: data.length[:-1])
    rb.extend(rows_of(0, 4))
    early = rows_of(1, 3)
    early["next", "done"][0] = True
    mixed = torch.cat([rows_of(1, 1), rows_of(2, 1), rows_of(1, 1)])
    several = torch.cat([rows_of(key, 1) for key in (1, 2, 3)])
    for rows, text in (
        (early, "at its last row, got one at row 0"),
        (mixed, "one after another"),
        (several, "at most 2 episodes"),
        (rows_of(1, 9), "a number for each of 1 episodes"),
    ):
        refuses(ValueError, text, rb.extend, rows)
    refuses(SchemaError, "'t'", rb.extend, rows_of(1, 1).exclude("t"))
    assert stored(rb) == {0: 4}


def test_priorities_stay_after_many_removals_without_a_draw() -> None:
    rb = make(1000, sampler=lambda: PrioritizedSampler(alpha=1.0, beta=0.0, eps=0.0))
    index = rb.extend(torch.cat([rows_of(key, 5) for key in range(200)]))
    rb.update_priority(index, (index + 2).double())
    for key in range(200, 280):
        rb.extend(rows_of(key, 4 + key % 2))
    for key in range(100, 170):
        rb.remove_oldest(1, lane=key)
    t = rb[:]["t"]
    wanted = torch.where(t < 200_000, t // 1000 * 5 + t % 1000 + 2.0, 1001.0).tolist()
    assert rb.sampler.state_dict()["_priorities"].tolist() == wanted


def test_the_order_of_removal_follows_rows_removed_by_hand() -> None:
    rb = make(12)
    for key in range(4):
        rb.extend(rows_of(key, 2))
    rb.remove_oldest(1)
    rb.extend(rows_of(4, 2))  # this write needs no room
    rb.extend(rows_of(5, 9))
    assert sorted(set(rb[:]["id"].tolist())) == [3, 4, 5]


def test_a_loaded_turn_follows_rows_that_move_in_the_first_write(tmp_path: Path) -> None:
    options: Any = {"sampler": partial(SliceSampler, draw="round_robin", slice_len=1)}
    rb = make(12, batch_size=1, **options)
    for key, n in enumerate((4, 2, 3, 3)):
        rb.extend(rows_of(key, n))
    assert [int(rb.sample()["id"]) for _ in range(3)] == [0, 1, 2]
    rb.dumps(tmp_path)
    rb = make(12, batch_size=1, **options)
    rb.loads(tmp_path)
    rb.extend(rows_of(9, 1))  # episode 0 leaves, and rows of episode 3 move
    assert [int(rb.sample()["id"]) for _ in range(5)] == [3, 9, 1, 2, 3]


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", ["memory", "recovered", "once", "recovered once"])
@pytest.mark.parametrize("action", ["write", "fit", "run", "remove", "tag"])
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (Columns, "gather", 0),
        *((Columns, "scatter", calls) for calls in (0, 1)),
        (Ledger, "reserve", 0),
        *((Ledger, "_table_for", calls) for calls in (0, 1)),
    ],
)
def test_a_fault_leaves_all_rows_as_they_were(
    owner: Any, name: str, after: int, action: str, kind: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    rb = make(12, kind=in_folder(kind, tmp_path), on_duplicate="replace")
    for key, n in enumerate((6, 2, 2)):
        rb.extend(rows_of(key, n), tags={"mark": key})
    before = rb[:].clone(), stored(rb)
    key, n = {"fit": (0, 6), "run": (9, 6)}.get(action, (9, 3))
    if action == "run":
        rb.extend(rows_of(3, 2), tags={"mark": 3})
        before = rb[:].clone(), stored(rb)
    calls, real = [], getattr(owner, name)

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == after + 1:
            raise MemoryError
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        try:
            if action == "remove":
                rb.remove_oldest(1)
            else:
                new = rows_of(key, n)
                new["next", "reward"] += 1
                rb.extend(new, tags={"mark": 0.5 if action == "tag" else 9})
        except (MemoryError, SchemaError):
            failed = True
        else:
            failed = False
            assert len(calls) <= after
    if failed:
        assert (rb[:] == before[0]).all()
        assert stored(rb) == before[1]
        assert rb.storage.indexes.data()["mark"].tolist() == [0, 1, 2, 3][: len(before[1])]
    rb.extend(rows_of(10, 12))
    assert stored(rb) == {10: 12}


def test_tags_of_a_write_protect_its_episodes_and_name_each_row() -> None:
    rb = make(9, protect="demo")
    rows = torch.cat([rows_of(0, 2), rows_of(1, 3)])
    demo = torch.tensor([False, True, False, False, False])  # the last row of an episode counts
    rb.extend(rows, tags={"demo": demo})
    rb.extend(rows_of(2, 7))
    assert stored(rb) == {0: 2, 2: 7}
    before = rb[:].clone()
    for tags, error in (({"demo": 1}, SchemaError), ({"draws": 1}, ValueError),
                        ({"demo": demo}, SchemaError)):  # fmt: skip
        with pytest.raises(error):
            rb.extend(rows_of(3, 2), tags=tags)
    assert (rb[:] == before).all()
    plain = ReplayBuffer(storage=LazyTensorStorage(9))
    refuses(RuntimeError, "TensorDicts", plain.extend, torch.arange(3), tags={"demo": True})
    assert not len(plain)


@pytest.mark.parametrize("kind", ["memory", "recovered", "shared"])
def test_lack_of_memory_separates_no_rows_from_their_tags(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rb = make(12, kind=in_folder(kind, tmp_path), shared=kind == "shared")
    rb.extend(rows_of(0, 2), tags={"mark": 1})
    real, failed = EpisodeTags.places, []

    def fail_once(*args: Any) -> Any:
        if len(failed) <= (kind == "memory"):
            failed.append(0)
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(EpisodeTags, "places", fail_once)
    rb.extend(rows_of(1, 3), tags={"mark": 7, "other": 2.0})
    if kind == "memory":
        with pytest.raises(MemoryError):  # once more, before anything changes
            rb.extend(rows_of(2, 9))
        assert stored(rb) == {0: 2, 1: 3}
    rb.extend(rows_of(2, 9))  # episode 0 leaves, and rows of the next one move
    data = rb.storage.indexes.data()
    assert failed
    assert dict(zip(data.id.tolist(), data["mark"].tolist(), strict=True)) == {2: 7, 5: 0}
    assert "other" in data
    assert "another" not in data
