"""Stored returns against a model that scans, over random writes."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReturnToGo,
    Storage,
    TensorStorage,
)
from tests.storages.sharing import another
from tests.support.refusals import refuses

DEFAULT = -1000.0


def rows_of(
    rewards: list[float],
    terminated: list[bool] | None = None,
    truncated: list[bool] | None = None,
    start: int = 0,
) -> TensorDict:
    count = len(rewards)
    ended = torch.tensor(terminated or [False] * count).reshape(count, 1)
    cut = torch.tensor(truncated or [False] * count).reshape(count, 1)
    return TensorDict(
        {
            "row": torch.arange(start, start + count),
            "next": {
                "observation": torch.arange(start, start + count).float().unsqueeze(-1),
                "reward": torch.tensor(rewards, dtype=torch.float32).reshape(count, 1),
                "terminated": ended,
                "truncated": cut,
                "done": ended | cut,
            },
        },
        [count],
    )


def buffer_of(transform: Any, capacity: int = 100, **others: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity), transform=transform, **others)


def returns_of(rb: ReplayBuffer) -> list[float]:
    rows = rb.storage.get(slice(None))
    order = rb.storage.ledger.write_order()
    return [round(value, 4) for value in rows["episode_return"][order].flatten().tolist()]


def valid_of(rb: ReplayBuffer) -> list[bool]:
    order = rb.storage.ledger.write_order()
    return rb.storage.get(slice(None))["return_valid"][order].flatten().tolist()


@pytest.mark.acceptance("C13")
@pytest.mark.parametrize("end", ["open", "cut", "truncated", "terminated"])
@pytest.mark.parametrize("at_once", [False, True])
def test_rows_up_to_a_boundary_have_returns_however_the_episode_ends(
    end: str, at_once: bool, tmp_path: Path
) -> None:
    last = [False, False, False, True]
    terminated, truncated = (last if end == name else None for name in ("terminated", "truncated"))
    rows = rows_of([1, 2, 4, 8], terminated, truncated)
    rows["lost"] = torch.tensor([False, True, False, False])
    rb = buffer_of(ReturnToGo(0.5, default=DEFAULT, boundary="lost"))
    for part in [rows] if at_once else rows.split(1):
        rb.extend(part)
    if end == "cut":
        rb.cut()
    rest = [8.0, 8.0] if end == "terminated" else [DEFAULT] * 2
    assert returns_of(rb) == [2.0, 2.0, *rest]
    assert valid_of(rb) == [True, True, *[end == "terminated"] * 2]
    rb.dumps(tmp_path)
    other = buffer_of(ReturnToGo(0.5, default=DEFAULT, boundary="lost"))
    other.loads(tmp_path)
    for buffer in (rb, other):
        buffer[:1] = buffer[:1]  # an edit computes all returns again
        buffer.extend(rows[:1])
        assert returns_of(buffer) == [2.0, 2.0, *rest, DEFAULT]


def test_nothing_is_added_after_a_boundary_at_the_end() -> None:
    rows = rows_of([1, 2, 4], None, [False, False, True])
    rows["lost"] = torch.tensor([[False], [False], [True]])
    rows["v"] = torch.full((3, 1), 100.0)
    rb = buffer_of(ReturnToGo(0.5, boundary="lost", on_truncated="bootstrap", value="v"))
    rb.extend(rows)
    assert returns_of(rb) == [3.0, 4.0, 4.0]


@pytest.mark.parametrize("shape", [(2,), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_rewards_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def column(*values: float) -> torch.Tensor:
        one = torch.tensor(values)
        return torch.stack([one, -one][: shape[0]], 1) if shape else one

    rows = rows_of([1, 2, 4], [False, False, True])
    rows["next", "reward"] = column(1, 2, 4).to(dtype)
    rb = buffer_of(ReturnToGo(0.5))
    rb.extend(rows)
    found = rb[:]["episode_return"]
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    assert torch.equal(found, column(3.0, 4.0, 4.0).to(wanted))
    assert (found.dtype, rb[:]["return_valid"].shape) == (wanted, (3, 1))


def test_without_terminated_flags_done_ends_an_episode() -> None:
    rows = rows_of([1, 2, 8], [False, True, False])
    del rows["next", "terminated"], rows["next", "truncated"]
    rb = buffer_of(ReturnToGo(0.5, default=DEFAULT))
    rb.extend(rows)
    assert returns_of(rb) == [2.0, 2.0, DEFAULT]


def model(
    rewards: list[float], ended: list[bool], cut: list[bool], lost: list[bool], gamma: float
) -> list[float | None]:
    """Returns of rows of one stream; None: the default. Bootstraps with 5."""
    found: list[float | None] = [None] * len(rewards)
    start = 0
    known = [row for row, last in enumerate(lost) if last and not any(ended[row:] + cut[row:])]
    for row in range(len(rewards)):
        if not (ended[row] or cut[row]) and row not in known[-1:]:
            continue
        after = 5.0 if cut[row] and not ended[row] else 0.0
        for back in range(row, start - 1, -1):
            if lost[back]:
                after = 0.0
            after = rewards[back] + gamma * after
            found[back] = after
        start = row + 1
    return found


@given(
    batches=st.lists(st.lists(st.sampled_from("....LTR"), min_size=1, max_size=25), max_size=8),
    capacity=st.integers(3, 40),
    layout=st.sampled_from(["ring", "lanes", "streams", "rings of streams"]),
    width=st.sampled_from([1, 3]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    emptied=st.integers(0, 12),
    loaded=st.integers(0, 12),
)
@settings(max_examples=120, deadline=None)
def test_random_writes_against_a_model(
    batches: list[list[str]],
    capacity: int,
    layout: str,
    width: int,
    gamma: float,
    emptied: int,
    loaded: int,
) -> None:
    """Wrapping rings, lanes, streams, batches of any length, `empty` and a load in between."""
    width = 1 if layout == "ring" else width
    options: dict[str, Any] = {"ring": {}, "lanes": {"ndim": 2}}.get(layout, {"lane_key": "env"})

    def make() -> ReplayBuffer:
        transform = ReturnToGo(
            gamma, default=DEFAULT, boundary="lost", on_truncated="bootstrap", value="v"
        )
        storage = LazyTensorStorage(capacity * width, **options)
        writer = LaneWriter(capacity) if layout == "rings of streams" else None
        return ReplayBuffer(storage=storage, transform=transform, writer=writer)

    rb = make()
    written: list[list[str]] = [[] for _ in range(width)]
    written_rows = 0
    # From which row on rows are there at all, and where a restart has ended what was open.
    begun, restarts = 0, set()
    for number, batch in enumerate(batches):
        if number == emptied:
            rb.empty()
            begun = written_rows
        if number == loaded:
            old, rb = rb, make()
            if written_rows:
                rb.load_state_dict(old.state_dict())
                restarts.add(written_rows)
        parts = []
        for lane in range(width):
            marks = batch[lane % len(batch) :] + batch[: lane % len(batch)]
            numbers = range(len(written[lane]), len(written[lane]) + len(marks))
            rows = rows_of(
                [float(number % 5 - 2) for number in numbers],
                [mark == "T" for mark in marks],
                [mark == "R" for mark in marks],
                len(written[lane]),
            )
            rows["lost"] = torch.tensor([mark == "L" for mark in marks])
            rows["v"] = torch.full((len(marks), 1), 5.0)
            rows["env"] = torch.full((len(marks),), lane)
            written[lane] += marks
            parts.append(rows)
        rb.extend(torch.stack(parts) if layout == "lanes" else torch.stack(parts, 1).reshape(-1))
        written_rows = len(written[0])
        if begun == written_rows:
            continue
        order = rb.storage.ledger.write_order()
        rows = rb.storage.get(slice(None))[order].reshape(-1, width)
        for lane in range(width):
            marks = written[lane]
            found: list[float | None] = []
            # Streams end where the buffer was emptied or loaded.
            cuts = sorted({0, begun, *restarts, len(marks)})
            for first, last in itertools.pairwise(cuts):
                part = marks[first:last]
                found += model(
                    [float(number % 5 - 2) for number in range(first, last)],
                    [mark == "T" for mark in part],
                    [mark == "R" for mark in part],
                    [mark == "L" for mark in part],
                    gamma,
                )
            own = rows[:, lane]
            for row in range(len(own)):
                expected = found[int(own["row"][row])]
                assert bool(own["return_valid"][row]) == (expected is not None)
                value = float(own["episode_return"][row])
                assert value == pytest.approx(DEFAULT if expected is None else expected, rel=1e-6)


def test_a_stored_flag_that_changes() -> None:
    """With the next write all returns are those of the episodes as they are now."""
    rb = buffer_of(ReturnToGo(1.0, default=DEFAULT))
    rb.extend(rows_of([1, 1, 1, 1], [False, True, False, True]))
    assert returns_of(rb) == [2.0, 1.0, 2.0, 1.0]
    for key in ("done", "terminated"):
        rb.set_at_(("next", key), torch.tensor([[False], [False]]), [1, 3])
    rb.extend(rows_of([1]))
    assert returns_of(rb) == [DEFAULT] * 5
    assert not any(valid_of(rb))
    rb.extend(rows_of([1], [True]))
    assert returns_of(rb) == [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_replaced_row_changes_later_returns() -> None:
    rb = buffer_of(ReturnToGo(1.0, default=DEFAULT))
    rb.extend(rows_of([1, 1, 1], [False, False, True]))
    rb[1] = rows_of([5])[0]
    assert returns_of(rb) == [3.0, DEFAULT, 1.0]
    rb.extend(rows_of([1]))
    assert returns_of(rb) == [7.0, 6.0, 1.0, DEFAULT]


def test_open_episodes_end_with_a_cut_and_hold_the_default() -> None:
    rows = rows_of([1, 1, 1, 1], [False, False, False, True])
    rows["episode"] = torch.tensor([0, 0, 1, 1])
    rb = buffer_of(ReturnToGo(1.0, default=DEFAULT))
    rb.extend(rows)
    assert returns_of(rb) == [DEFAULT, DEFAULT, 2.0, 1.0]


def test_a_data_set_without_returns_is_refused() -> None:
    rows, made = rows_of([1, 1], [False, True]), {"writer": ImmutableDatasetWriter()}
    with pytest.raises(ValueError, match="adds 'episode_return' when rows are written"):
        ReplayBuffer(storage=TensorStorage(rows), transform=ReturnToGo(1.0), **made)
    rb = buffer_of(ReturnToGo(1.0))
    rb.extend(rows)
    again = ReplayBuffer(storage=TensorStorage(rb.storage[:]), transform=ReturnToGo(1.0), **made)
    assert returns_of(again) == [2.0, 1.0]


def test_data_that_is_given_stays_as_it_is_also_in_lists() -> None:
    rows = rows_of([1, 2], [False, True])
    before = rows.clone()
    rb = buffer_of(ReturnToGo(0.5))
    rb.extend(list(rows.unbind(0)))
    assert returns_of(rb) == [2.0, 2.0]
    buffer_of(ReturnToGo(0.5)).extend(rows)
    assert set(rows.keys(True, True)) == set(before.keys(True, True))
    assert (rows == before).all()


@pytest.mark.parametrize("kind", ["memory", "memmap"])
def test_checkpoints_keep_returns(tmp_path: Path, kind: str) -> None:
    def make(name: str) -> ReplayBuffer:
        storage = (
            LazyTensorStorage(20)
            if kind == "memory"
            else LazyMemmapStorage(20, scratch_dir=tmp_path / name)
        )
        return ReplayBuffer(storage=storage, transform=ReturnToGo(0.5, default=DEFAULT))

    rb = make("a")
    rb.extend(rows_of([1, 2], None))
    rb.dumps(tmp_path / "saved")
    rb.extend(rows_of([4], [True]))
    rb.dumps(tmp_path / "saved")  # the first rows have changed since
    other = make("b")
    other.loads(tmp_path / "saved")
    assert returns_of(other) == [3.0, 4.0, 4.0]
    other.extend(rows_of([1], [True]))
    assert returns_of(other) == [3.0, 4.0, 4.0, 1.0]


def test_one_transform_for_several_buffers_and_copies_of_it() -> None:
    transform = ReturnToGo(0.5)
    for made in (transform, copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        one, other = buffer_of(made), buffer_of(made)
        one.extend(rows_of([1, 2], [False, False]))
        other.extend(rows_of([8, 4], [False, True]))
        one.extend(rows_of([4], [True]))
        assert returns_of(one) == [3.0, 4.0, 4.0]
        assert returns_of(other) == [10.0, 4.0]


def bootstrapping(value: Any) -> ReturnToGo:
    return ReturnToGo(0.9, on_truncated="bootstrap", value=value)


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (ReturnToGo(0.9, boundary="lost"), KeyError, "lost"),
        (bootstrapping("v"), KeyError, "v"),
        (ReturnToGo(0.9, reward="reward"), KeyError, "reward"),
        (bootstrapping(lambda rows: torch.zeros(1)), ValueError, r"value: .*\[1, 1\], got \[1\]"),
        (bootstrapping(lambda rows: 0.0), TypeError, "value: expected a tensor, got float"),
    ],
)
def test_unsuitable_rows_are_refused(transform: Any, error: Any, text: str) -> None:
    rb = buffer_of(transform)
    refuses(error, text, rb.extend, rows_of([1, 2], None, [False, True]))
    assert len(rb) == 0 or error is not KeyError  # before anything is written
    refuses(TypeError, "expected a TensorDict", buffer_of(transform).extend, torch.zeros(3))
    rb = ReplayBuffer(storage=ListStorage(10), transform=ReturnToGo(0.5))
    refuses(RuntimeError, "ListStorage does not know .*which Ret", rb.extend, rows_of([1]))


def test_wrapped_rows_keep_their_returns() -> None:
    rows = ReturnToGo(0.5, default=DEFAULT).inv(rows_of([1, 2, 4, 0], [False, False, True, False]))
    rb = ReplayBuffer(storage=TensorStorage(rows), transform=ReturnToGo(0.5, default=DEFAULT))
    rb.extend(rows_of([1]))
    assert returns_of(rb)[:2] == [4.0, 4.0]


def test_observations_that_are_stored_once() -> None:
    rows = rows_of([1, 2, 4, 1], None, [False, False, True, False])
    rows["observation"] = rows["next", "observation"] - 1
    rb = ReplayBuffer(
        storage=LazyTensorStorage(9, dedup_next=["observation"]),
        transform=ReturnToGo(
            0.5, on_truncated="bootstrap", value=lambda rows: rows["observation"] * 10
        ),
    )
    for row in rows.unbind(0):
        rb.add(row)
    assert returns_of(rb) == [1 + 0.5 * (2 + 0.5 * 14), 2 + 0.5 * 14, 14.0, 0.0]


@pytest.mark.parametrize("storage", [ListStorage(9), LazyTensorStorage(9)])
def test_records_without_returns_are_refused_before_storing(storage: Storage) -> None:
    """Whole trajectories as records, and storages that know no episodes."""
    rb = ReplayBuffer(storage=storage, transform=ReturnToGo(0.9))
    done = torch.zeros(2, 3, 1, dtype=torch.bool)
    records = TensorDict({"next": {"reward": torch.ones(2, 3, 1), "done": done}}, [2])
    refuses((RuntimeError, ValueError), r"whole trajectories|episodes end", rb.extend, records)
    assert len(rb) == rb.write_count == 0


def test_processes_that_share_rows_complete_each_others_returns() -> None:
    pytest.importorskip("fcntl", reason="processes share files only on systems with flock")
    one = ReplayBuffer(
        storage=LazyTensorStorage(20), transform=ReturnToGo(0.5, default=DEFAULT), shared=True
    )
    other = another(one)
    one.extend(rows_of([1, 2]))
    other.extend(rows_of([4], [True]))
    assert returns_of(one) == returns_of(other) == [3.0, 4.0, 4.0]
    one.extend(rows_of([8]))
    for flag in ("done", "terminated"):
        one["next", flag] = torch.zeros(4, 1, dtype=torch.bool)
    assert returns_of(other) == [3.0, 4.0, 4.0, DEFAULT]
    other.extend(rows_of([16], [True]))  # the next write, by whichever process
    assert returns_of(one) == returns_of(other) == [5.0, 8.0, 12.0, 16.0, 16.0]


def test_returns_that_one_process_failed_to_store_are_stored_by_another() -> None:
    pytest.importorskip("fcntl", reason="processes share files only on systems with flock")
    transform = ReturnToGo(0.5, on_truncated="bootstrap", value=("next", "reward"))
    one = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform, shared=True)
    other = another(one)
    one.transform[0].value = lambda data: torch.zeros(7)
    refuses(ValueError, "shape of the rewards", one.extend, rows_of([1, 2], None, [False, True]))
    assert one[:]["return_valid"].flatten().tolist() == [False, False]
    other.extend(rows_of([5]))
    assert one[:]["return_valid"].flatten().tolist() == [True, True, False]
    assert returns_of(one)[:2] == [2.5, 3.0]
