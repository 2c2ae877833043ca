"""Buffers of another capacity: rows, ids, episodes, priorities and counts stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    Coverage,
    EpisodeWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RateLimiter,
    ReplayBuffer,
    ReturnToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
    Uniform,
)
from replaykit.errors import BufferFull
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from tests.support.refusals import refuses

_MAKE: dict[str, Callable[[int, Path], Any]] = {
    "list": lambda n, _: ListStorage(n),
    "given": lambda n, _: TensorStorage(_rows(range(n), 0)),
    "tensor": lambda n, _: LazyTensorStorage(n),
    "dedup": lambda n, _: LazyTensorStorage(n, dedup_next=["x"]),
    "private": lambda n, _: LazyMemmapStorage(n),
    "files": lambda n, path: LazyMemmapStorage(n, scratch_dir=path, existsok=True),
    "dedup files": lambda n, path: LazyMemmapStorage(n, scratch_dir=path, dedup_next=["x"]),
    "lanes": lambda n, _: LazyTensorStorage(n, ndim=2),
}


def _rows(times: Any, lanes: int) -> TensorDict:
    t = torch.tensor(list(times))
    t = torch.stack([t + 1000 * lane for lane in range(lanes)]) if lanes else t
    done = (t % 5 == 4).unsqueeze(-1)
    row = {"x": t, "policy_version": t // 7, "next": {"x": t + 1, "done": done}}
    return TensorDict(row, list(t.shape))


def _by_age(rb: ReplayBuffer) -> tuple[list[int], list[int]]:
    """Return the times and the row ids of the stored rows, oldest first, of the first lane."""
    order = rb.storage.ledger.write_order()
    if not len(order):
        return [], []
    rows = rb.storage.get(order)
    x = torch.stack([row["x"] for row in rows]) if isinstance(rows, list) else rows["x"]
    times = x[:, 0] if x.ndim > 1 else x
    return times.tolist(), rb.storage.ledger.positions(order).tolist()


def _lengths(times: list[int]) -> list[int]:
    ends = [i + 1 for i, t in enumerate(times) if t % 5 == 4]
    cuts = [0, *ends, len(times)]
    return [b - a for a, b in pairwise(cuts) if b > a]


@pytest.mark.acceptance("C10", "F61")
@pytest.mark.parametrize(("prioritized", "seed"), [(0, 0), (0, 1), (1, 2), (1, 3)])
@pytest.mark.parametrize("kind", _MAKE)
def test_random_programs_match_a_list(
    kind: str, prioritized: int, seed: int, tmp_path: Path
) -> None:
    rng, lanes = np.random.default_rng(seed), 2 * (kind == "lanes")
    cells = lanes or 1

    def made(slots: int, folder: str) -> ReplayBuffer:
        sampler = PrioritizedSampler(100 * cells, 1.0, 1.0) if prioritized else RandomSampler()
        return ReplayBuffer(
            storage=_MAKE[kind](slots * cells, tmp_path / folder),
            sampler=sampler,
            writer=RoundRobinWriter(track_generations=True),
            batch_size=64,
        )

    slots = 7
    rb = made(slots, "rows")
    model = [(t, t) for t in range(slots)] if kind == "given" else []
    time, handles = len(model), {}
    ranks: dict[int, float] = {}
    for step in range(40):
        action = rng.random()
        if action < 0.6:
            count = int(rng.integers(1, 6))
            rb.extend(_rows(range(time, time + count), lanes))
            model += [(t, t) for t in range(time, time + count)]
            time += count
        elif action < 0.9:
            new = int(rng.integers(1, 14))
            gone = max(0, len(model[-slots:]) - new)
            assert rb.resize(new * cells) == gone * cells
            model, slots = model[-slots:], new
        elif prioritized and model:
            slot = int(rng.integers(len(rb.storage.ledger.write_order())))
            row_id = int(rb.storage.ledger.positions(torch.tensor([slot])))
            ranks[row_id] = float(rng.random() + 0.1)
            index = torch.tensor([[slot, 0]]) if lanes else torch.tensor([slot])
            rb.update_priority(index, torch.tensor([ranks[row_id]]))
        model = model[-slots:]
        assert len(rb) == len(model) * cells
        assert rb.storage.max_size == slots * cells
        times, ids = _by_age(rb)
        assert times == [t for t, _ in model]
        assert ids == [i for _, i in model]
        if not model:
            continue
        order = rb.storage.ledger.write_order()
        for slot, row_id in zip(order.tolist(), ids, strict=True):
            generation = int(rb.storage.ledger.generations(torch.tensor([slot])))
            assert handles.setdefault((slot, generation), row_id) == row_id
        if kind != "list":
            assert rb.episodes.lengths.tolist() == _lengths(times) * cells
        if kind not in ("list", "lanes"):
            assert (rb[:]["next", "x"] == rb[:]["x"] + 1).all()
        if prioritized and not lanes:
            found = rb.sampler.stored_priorities(rb.storage)[order.numpy()]
            known = [ranks[i] for i in ids if i in ranks]
            shown = [p for i, p in zip(ids, found.tolist(), strict=True) if i in ranks]
            assert np.allclose(shown, known)
        assert set(rb.sample()["x"].flatten().tolist()) <= {
            t + 1000 * lane for t in times for lane in range(cells)
        }
        if step % 10 == 9:
            rb.dumps(tmp_path / "saved")
            again = made(slots, f"again{step}")
            again.loads(tmp_path / "saved")
            assert _by_age(again)[0] == times


def _episode(key: int, rows: int) -> TensorDict:
    t = 100 * key + torch.arange(rows)
    done = (torch.arange(rows) == rows - 1).unsqueeze(-1)
    after = {"done": done, "terminated": done, "reward": torch.ones(rows, 1)}
    return TensorDict({"id": torch.full((rows,), key), "x": t, "next": after}, [rows])


def test_episodes_returns_tags_and_counts_stay() -> None:
    sampler = SliceSampler(slice_len=2, measure=Coverage(1.0))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12), sampler=sampler, transform=ReturnToGo(0.5), batch_size=20
    )
    for key in range(4):
        index = rb.extend(_episode(key, 4))
        rb.tag(index[:1], {"task": key})
    evicted: list[int] = []
    rb.on("evict", lambda event: evicted.append(event.count))
    rb.sample()
    before = rb.storage.indexes.data()
    counts, tasks = before["draws"].tolist(), before["task"].tolist()
    returns = rb.storage[:].select("x", "episode_return", "return_valid")
    order = returns["x"].argsort()
    assert rb.resize(6) == 6
    assert evicted == [6]
    data = rb.storage.indexes.data()
    assert data["task"].tolist() == tasks[-2:] == [2, 3]
    assert data["draws"].tolist() == counts[-2:]
    assert [(one.length, one.head.name) for one in rb.episodes] == [(2, "EVICTED"), (4, "RESET")]
    kept = rb[:]
    assert (kept["episode_return"] == returns["episode_return"][order][-6:]).all()
    rb.resize(9)
    rb.extend(_episode(4, 3)[:2])
    rb.resize(10)
    rb.extend(_episode(4, 3)[2:])  # an open episode goes on
    assert rb.episodes.lengths.tolist() == [2, 4, 3]
    assert rb[:]["episode_return"].flatten().tolist()[-3:] == [1.75, 1.5, 1.0]


def test_writers_choose_the_rows_that_stay() -> None:
    best = ReplayBuffer(storage=LazyTensorStorage(6), writer=TensorDictMaxValueWriter("x"))
    best.extend(TensorDict({"x": torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0])}, [5]))
    best.resize(3)
    best.extend(TensorDict({"x": torch.tensor([6.0, 2.0])}, [2]))
    assert sorted(best[:]["x"].tolist()) == [6, 7, 9]

    lanes = ReplayBuffer(storage=LazyTensorStorage(20, lane_key="id"), writer=LaneWriter(3))
    for t in range(5):
        lanes.extend(TensorDict({"id": torch.arange(3), "x": torch.full((3,), t)}, [3]))
    assert lanes.resize(9) == 0
    refuses(BufferFull, "at most 2 streams of 3 rows in 8 slots", lanes.resize, 8)
    lanes.extend(TensorDict({"id": torch.arange(3), "x": torch.full((3,), 5)}, [3]))
    assert lanes.take(3)["x"].tolist() == [[3, 4, 5]] * 3

    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, lane_key="id"),
        sampler=PrioritizedSampler(100, 1.0, 1.0),
        writer=EpisodeWriter(protect="kept"),
    )
    for key in range(3):
        index = rb.extend(_episode(key, 4))
        rb.update_priority(index, torch.full((4,), key + 1.0))
        rb.tag(index[:1], {"kept": key == 0})
    before = rb[:]
    refuses(BufferFull, "protected episodes of at most 3 rows, got 4", rb.resize, 3)
    assert (rb[:] == before).all()
    assert rb.writer.evicted == 0
    assert rb.resize(9) == 4
    assert rb.writer.evicted == 1
    assert sorted(set(rb[:]["id"].tolist())) == [0, 2]
    found = rb.sampler.stored_priorities(rb.storage)
    assert found.tolist() == (rb[:]["id"] + 1).tolist()


def test_draw_counts_and_versions_go_on() -> None:
    once = ReplayBuffer(storage=LazyTensorStorage(8), sampler=ConsumingSampler(order="age"))
    stale = StalenessAwareSampler(max_staleness=1)
    aged = ReplayBuffer(storage=LazyTensorStorage(8), sampler=stale)
    for rb in (once, aged):
        rb.extend(_rows(range(11), 0))
    assert once.sample(2)["x"].tolist() == [3, 4]
    stale.consumer_version = 2
    for slots in (5, 7):
        once.resize(slots)
        aged.resize(slots)
        assert aged.sample(64)["staleness"].unique().tolist() == [1]
    assert once.sample(2)["x"].tolist() == [6, 7]
    once.extend(_rows(range(11, 13), 0))
    assert once.sample(9)["x"].tolist() == [8, 9, 10, 11, 12]


def test_other_buffers_over_the_storage_follow() -> None:
    storage = LazyTensorStorage(6)
    rb = ReplayBuffer(storage=storage)
    other = ReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(100, 1.0, 1.0), batch_size=8, prefetch=2
    )
    rb.extend(_rows(range(8), 0))
    other.update_priority(torch.arange(6), rb[:]["x"].double())
    other.sample()
    rb.resize(4)
    assert other.sampler.stored_priorities(storage).tolist() == rb[:]["x"].tolist() == [4, 5, 6, 7]
    assert set(other.sample()["x"].tolist()) <= {4, 5, 6, 7}


def test_rows_of_chosen_slots_stay_apart_from_the_rows_before() -> None:
    """In write order the placed row 9 follows row 3, but it is no step of the same episode."""
    rb, other = (ReplayBuffer(storage=LazyTensorStorage(slots)) for slots in (6, 9))
    rb.extend(_rows(range(4), 0))
    rb.storage.set([1], _rows([9], 0))
    other.load_state_dict(rb.state_dict())
    rb.resize(20)
    for buffer in (rb, other):
        assert [episode.rows()["x"].tolist() for episode in buffer.episodes] == [[0], [2, 3], [9]]


def test_refusals_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "rows"),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
        rate_limiter=RateLimiter.min_size(2),
    )
    rb.resize(5)  # before the first write
    rb.extend(_rows(range(7), 0))
    before, files = rb[:].clone(), sorted((tmp_path / "rows").rglob("*"))
    for n, error, text in (
        (0, ValueError, "n"),
        (1, ValueError, "min_size_to_sample"),
        (9, ValueError, "max_capacity"),
    ):
        refuses(error, text, rb.resize, n)

    def lacks_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("replaykit.storages.restorable._fill", lacks_memory)
        refuses(MemoryError, "^$", rb.resize, 8)
    assert (rb[:] == before).all()
    assert (rb.storage.max_size, len(rb)) == (5, 5)
    assert sorted((tmp_path / "rows").rglob("*")) == files
    rb.extend(_rows(range(7, 9), 0))
    assert sorted(rb[:]["x"].tolist()) == [4, 5, 6, 7, 8]
    for made in (
        {"storage": LazyMemmapStorage(6, scratch_dir=tmp_path / "kept", recover=True)},
        {"storage": LazyTensorStorage(6), "shared": True},
    ):
        fixed = ReplayBuffer(**made)
        fixed.extend(_rows(range(7), 0))
        refuses(RuntimeError, "without recover=True or shared=True", fixed.resize, 3)
        assert sorted(fixed[:]["x"].tolist()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Ledger, "resize"), (EpisodeIndexes, "restore"), (PrioritizedSampler, "moved")],
)
@pytest.mark.parametrize("kind", [*list(_MAKE)[1:], "episodes"])
def test_an_error_at_any_step_is_undone(
    kind: str, owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, writer = 1 + (kind == "lanes"), None
    storage = _MAKE.get(kind, lambda n, _: LazyTensorStorage(n, lane_key="id"))(
        6 * cells, tmp_path / "rows"
    )
    if kind == "episodes":
        writer = EpisodeWriter()
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(100, 1.0, 1.0), writer=writer)
    for key in range(3):
        rows = _episode(key, 3)
        rb.extend(rows if kind == "episodes" else _rows(range(3 * key, 3 * key + 3), 2 * cells - 2))
    first = torch.zeros(1, 2, dtype=torch.int64) if cells > 1 else torch.tensor([0])
    rb.update_priority(first, torch.tensor([7.0]))
    rb.tag(first, {"task": 5})
    other = ReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=1)
    other.sample()

    def shown() -> str:
        data, ledger = storage.indexes.data(), storage.ledger.state()
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        found = [_by_age(rb), storage.max_size, ledger, files, rb.episodes.lengths, data["task"]]
        found += [rb.sampler.stored_priorities(storage), other.sampler.state_dict()]
        return str([*found, getattr(rb.writer, "evicted", 0)])

    before, real = shown(), getattr(owner, name)

    def fail(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise MemoryError

    for slots in (4, 20)[: 1 + (name != "moved")]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            refuses(MemoryError, "^$", rb.resize, slots * cells)
        assert shown() == before
    rb.extend(_episode(8, 3) if kind == "episodes" else _rows(range(9, 12), 2 * cells - 2))
    assert rb.resize(5 * cells) == (3 if kind == "episodes" else cells)


def test_a_refusal_keeps_prefetched_batches_and_random_numbers() -> None:
    found = []
    for refused in (False, True):
        rb = ReplayBuffer(
            storage=LazyTensorStorage(12, lane_key="id"),
            writer=EpisodeWriter(evict=Uniform(), protect="kept"),
            batch_size=8,
            prefetch=2,
            generator=torch.Generator().manual_seed(0),
        )
        for key in range(3):
            rb.tag(rb.extend(_episode(key, 4))[:1], {"kept": key == 0})
        found.append([rb.sample()["x"]])
        rb.extend(_episode(3, 4))
        if refused:
            refuses(BufferFull, "at most 3 rows", rb.resize, 3)
            refuses(IndexError, "a stream with stored rows", rb.empty, lane=9)
        found[-1] += [rb.sample()["x"] for _ in range(4)]
    assert torch.equal(*map(torch.stack, found))
