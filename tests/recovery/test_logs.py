"""Committed tags and cuts: what a commit costs, and what a restart and other processes read."""

from __future__ import annotations

import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from replaykit.errors import CheckpointError
from tests.storages.sharing import another

EPISODES = 150
FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures"


def _rows(count: int) -> TensorDict:
    """Return episodes of one row."""
    return TensorDict({"next": {"done": torch.ones(count, dtype=torch.bool)}}, [count])


def _opened(folder: Path) -> ReplayBuffer:
    storage = LazyMemmapStorage(EPISODES, scratch_dir=folder, recover=True)
    return ReplayBuffer(storage=storage, batch_size=2)


def _shown(rb: ReplayBuffer) -> dict[str, Any]:
    with rb.storage.lock:
        data = rb.storage.indexes.data()
        return {name: data[name].tolist() for name in rb.storage.indexes.tags.names}


def _is_one(episodes: Any) -> Any:
    return episodes["a"] == 1


def _handles(shared: bool, folder: Path) -> tuple[ReplayBuffer, ReplayBuffer | None]:
    """Return a buffer whose commits write logs, and another handle if it is shared."""
    if not shared:
        return _opened(folder), None
    rb = ReplayBuffer(storage=LazyTensorStorage(EPISODES), shared=True)
    return rb, another(rb)


@pytest.mark.parametrize("shared", [False, True])
def test_tags_of_many_commits_are_read_again(shared: bool, tmp_path: Path) -> None:
    """The log of changed tags is replaced several times, and tags get more names."""
    draw = random.Random(0)
    rb, reader = _handles(shared, tmp_path)
    rb.extend(_rows(EPISODES))
    wanted: dict[str, list[int]] = {}
    for step in range(1500):
        name = draw.choice("abc"[: 1 + step // 500])
        at = draw.randrange(EPISODES)
        rb.tag(torch.tensor([at]), {name: step})
        wanted.setdefault(name, [0] * EPISODES)[at] = step
        if draw.random() < 0.004:
            if reader is not None:
                assert _shown(reader) == wanted
                rb, reader = reader, rb
                continue
            rb.storage.close()
            rb = _opened(tmp_path)
            assert _shown(rb) == wanted
    assert _shown(rb if reader is None else reader) == wanted
    assert all(file.stat().st_size <= 1 << 16 for file in tmp_path.rglob("table-*.bin"))


def test_tags_that_a_load_replaces_are_read_again(tmp_path: Path) -> None:
    rb = _opened(tmp_path / "rows")
    rb.extend(_rows(4))
    rb.tag(torch.arange(4), {"a": torch.arange(4)})
    rb.dumps(tmp_path / "save")
    rb.tag(torch.arange(4), {"a": 9, "b": 1})
    rb.loads(tmp_path / "save")
    rb.storage.close()
    rb = _opened(tmp_path / "rows")
    assert _shown(rb) == {"a": [0, 1, 2, 3]}
    rb.empty()
    rb.extend(_rows(2))
    rb.storage.close()
    assert not any(_shown(_opened(tmp_path / "rows"))["a"])


def test_processes_follow_tags_that_a_load_removes(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), shared=True)
    reader = another(rb)
    rb.extend(_rows(4))
    rb.dumps(tmp_path)
    for value in range(1, 4):
        rb.tag(torch.arange(value), {"a": value})
        assert _shown(reader) == {"a": [value] * value + [0] * (4 - value)}
        rb.loads(tmp_path)


def test_a_commit_writes_the_changed_tags_alone(tmp_path: Path) -> None:
    """Neither the state of a commit nor the log grows with the tagged episodes."""
    rb = _opened(tmp_path)
    rb.extend(_rows(EPISODES))
    rb.tag(torch.arange(EPISODES), {"a": torch.zeros(EPISODES, 40)})
    logs = [*tmp_path.rglob("table-*.bin")]
    before = [file.read_bytes() for file in logs]
    for at in range(5):
        rb.tag(torch.tensor([at]), {"a": torch.ones(1, 40)})
        rb.extend(_rows(1))
    assert {file.stat().st_size for file in tmp_path.rglob("state-*.bin")} == {4096}
    changed = sum(
        one != two
        for file, old in zip(logs, before, strict=True)
        for one, two in zip(file.read_bytes(), old, strict=False)
    )
    assert 5 * 40 < changed < 5 * 8 * 60


def test_damaged_tags_are_refused_by_name(tmp_path: Path) -> None:
    draw = random.Random(0)
    rb = _opened(tmp_path)
    rb.extend(_rows(4))
    for step in range(3):
        rb.tag(torch.tensor([step]), {"a": step})
    rb.storage.close()
    (log,) = tmp_path.rglob("table-404-*.bin")
    whole, refused = log.read_bytes(), 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole.rstrip(b"\0")))] = draw.randrange(256)
        log.write_bytes(damaged)
        try:
            _opened(tmp_path).storage.close()
        except CheckpointError as error:
            refused += "table 404" in str(error)
    assert refused > 20
    log.write_bytes(whole)
    assert _shown(_opened(tmp_path)) == {"a": [0, 1, 2, 0]}


def test_samples_without_the_lock_notice_changed_tags() -> None:
    """The reader's ledger has followed a write that its index lacks."""
    where = SliceSampler(slice_len=1, where=_is_one)
    rb = ReplayBuffer(storage=LazyTensorStorage(9), sampler=where, batch_size=20, shared=True)
    reader = another(rb)
    rb.extend(_rows(4), tags={"a": torch.ones(4, dtype=torch.int64)})
    reader.sample()
    rb.extend(_rows(1))
    assert len(reader) == 5
    rb.tag(torch.arange(3), {"a": 0})
    assert set(reader.sample()["index"].tolist()) == {3}


def test_tags_of_an_interrupted_commit_that_took_effect_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = _opened(tmp_path / "rows")
    rb.extend(_rows(4))
    rb.tag(torch.arange(4), {"a": 0})
    home = rb.storage.recovery.home
    commit = home.commit

    def interrupted(*state: Any) -> None:
        commit(*state)
        raise KeyboardInterrupt

    monkeypatch.setattr(home, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.tag(torch.tensor([1]), {"a": 11})

    def killed(*state: Any) -> int:
        shutil.copytree(tmp_path / "rows", tmp_path / "killed")
        return commit(*state)

    monkeypatch.setattr(home, "commit", killed)
    rb.tag(torch.tensor([2]), {"a": 22})
    assert _shown(_opened(tmp_path / "killed")) == {"a": [0, 11, 0, 0]}
    assert _shown(rb) == {"a": [0, 11, 22, 0]}


def _steps(count: int) -> TensorDict:
    """Return rows that end no episode."""
    return TensorDict({"next": {"done": torch.zeros(count, dtype=torch.bool)}}, [count])


def _lengths(rb: ReplayBuffer) -> list[int]:
    """Return the numbers of stored rows of the episodes, the oldest first."""
    with rb.storage.lock:
        return rb.storage.indexes.data().length.tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_cuts_of_many_commits_are_read_again(shared: bool, tmp_path: Path) -> None:
    """The log of cuts is replaced. A list holds the episode of each row."""
    draw = random.Random(0)
    rb, reader = _handles(shared, tmp_path)
    episodes, episode = [], 0
    for _ in range(1800):
        count = draw.randrange(1, 4)
        rb.extend(_steps(count))
        episodes = (episodes + [episode] * count)[-EPISODES:]
        if draw.random() < 0.95:
            rb.cut()
            episode += 1
        if draw.random() < 0.002:
            rb.empty()
            episodes, episode = [], episode + 1
        elif draw.random() < 0.004:
            if reader is not None:
                rb, reader = reader, rb
            else:
                rb.storage.close()
                rb = _opened(tmp_path)
                episode += 1  # a restart cuts the open episode
            wanted = [episodes.count(number) for number in sorted(set(episodes))]
            assert _lengths(rb) == wanted
    assert all(file.stat().st_size <= 1 << 16 for file in tmp_path.rglob("table-*.bin"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_commit_writes_the_new_cuts_alone(shared: bool, tmp_path: Path) -> None:
    """Neither the state of a commit nor the log grows with the cuts of stored rows."""
    storage = LazyMemmapStorage(1200, scratch_dir=tmp_path, recover=True)
    rb = ReplayBuffer(storage=storage, shared=shared)
    with rb.storage.lock:
        for _ in range(600):
            rb.extend(_steps(2))
            rb.cut()
    logs = [*tmp_path.rglob("table-40[56]-*.bin")]
    before = [file.read_bytes() for file in logs]
    for _ in range(5):
        rb.extend(_steps(1))
        rb.cut()
    assert len(_lengths(rb)) == 603  # of 605, two are overwritten
    assert {file.stat().st_size for file in tmp_path.rglob("state-*.bin")} == {4096}
    changed = sum(
        one != two
        for file, old in zip(logs, before, strict=True)
        for one, two in zip(file.read_bytes(), old, strict=False)
    )
    assert 5 < changed <= 5 * 8 * 3


def _lanes(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count).expand(2, count).contiguous()
    done = torch.zeros(2, count, 1, dtype=torch.bool)
    return TensorDict({"number": number, "next": {"done": done}}, [2, count])


@pytest.mark.parametrize("shared", [False, True])
def test_cuts_in_the_state_of_older_folders_are_read(shared: bool, tmp_path: Path) -> None:
    """The fixture holds the same rows, cut in a state; a restart was before row 8."""
    expected = ReplayBuffer(storage=LazyTensorStorage(16, ndim=2))
    for first, count, lane in ((0, 3, None), (3, 3, 1), (6, 2, None)):
        expected.extend(_lanes(first, count))
        expected.cut(lane)
    expected.extend(_lanes(8, 2))
    expected.cut()
    with zipfile.ZipFile(FIXTURES / "cuts-1" / "recovered.zip") as archive:
        archive.extractall(tmp_path)
    for first in (10, 12, 14):
        storage = LazyMemmapStorage(16, scratch_dir=tmp_path, recover=True, ndim=2)
        rb = ReplayBuffer(storage=storage, shared=shared)
        if first == 10:
            assert _shown(rb) == {"a": [7, 0, 0, 0, 8, 0, 0]}
        if shared:
            rb.cut()  # processes that share rows do not end episodes at their start
        assert _lengths(rb) == _lengths(expected)
        rb.extend(_lanes(first, 2))
        expected.extend(_lanes(first, 2))
        assert _lengths(another(rb) if shared else rb) == _lengths(expected)
        expected.cut()
        del rb, storage


def test_damaged_cuts_are_refused_by_name(tmp_path: Path) -> None:
    rb = _opened(tmp_path)
    for _ in range(3):
        rb.extend(_steps(2))
        rb.cut()
    rb.storage.close()
    log = next(tmp_path.rglob("table-406-*.bin"))
    whole = log.read_bytes()
    for number, value in ((0, 0), (0, 99), (2, 3), (3, 1)):
        damaged = bytearray(whole)
        damaged[8 * number] = value
        log.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="table 406"):
            _opened(tmp_path)
    log.write_bytes(whole)
    assert _lengths(_opened(tmp_path)) == [2, 2, 2]
