"""``update_if_present``: every rule against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
)
from tests.buffer.building import in_threads, unchanged
from tests.support.refusals import refuses


def tracked(storage: Any = None, filled: int = 5, **options: Any) -> ReplayBuffer:
    """Rows of value 0..n-1, version 10 each, and a nested column."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(5) if storage is None else storage,
        writer=RoundRobinWriter(track_generations=True),
        **options,
    )
    if filled:
        buffer.extend(content(filled))
    return buffer


def content(count: int, start: int = 0) -> TensorDict:
    return TensorDict(
        {
            "x": torch.arange(start, start + count).float(),
            "v": torch.full((count, 1), 10),
            "next": {"y": torch.zeros(count, 2), "done": torch.zeros(count, 1, dtype=torch.bool)},
        },
        [count],
    )


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


# -- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
def test_slots_without_a_record_are_stale(empty: bool):
    buffer = tracked(filled=3)
    index = torch.tensor([-1, 3, 4, 5, 7, 2**40, 0])
    generation = torch.tensor([0, 0, -1, 0, 0, 0, -1])
    if empty:
        buffer.empty()
        index, generation = torch.arange(5), buffer.writer.generations_of(torch.arange(5))
        assert generation.tolist() == [1, 1, 1, -1, -1]
        buffer.extend(content(1))
    patch = {"x": torch.full(index.shape, 9.0)}
    result = buffer.update_if_present(index=index, generation=generation, patch=patch)
    assert result.stale_count == len(index)
    assert 9.0 not in buffer["x"].tolist()


ENTRIES = st.lists(
    st.tuples(st.integers(-1, 5), st.integers(-1, 3), st.integers(8, 14)), max_size=12
)


@given(
    entries=ENTRIES,
    written=st.integers(1, 14),
    versioned=st.booleans(),
    require_newer=st.booleans(),
    storage=st.sampled_from([LazyTensorStorage, LazyMemmapStorage]),
)
@settings(max_examples=150, deadline=None)
def test_random_patches_follow_all_rules_of_a_model(
    entries: list[Any], written: int, versioned: bool, require_newer: bool, storage: Any
):
    buffer = tracked(storage(5), filled=0)
    for start in range(written):
        buffer.extend(content(1, start))
    stored = min(written, 5)
    values, versions = buffer["x"].tolist(), [10] * stored
    generations = [(written - 1 - slot) // 5 for slot in range(stored)]

    live = [0 <= slot < stored and g == generations[slot] for slot, g, _ in entries]
    updated, rejected = list(live), [False] * len(entries)
    if versioned:
        for slot in range(stored):
            mine = [i for i, (s, _, _) in enumerate(entries) if s == slot and live[i]]
            good = [i for i in mine if entries[i][2] > versions[slot] - (not require_newer)]
            best = max(good, key=lambda i: (entries[i][2], i), default=None)
            for i in mine:
                updated[i], rejected[i] = i == best, i != best
    for i, (slot, _, version) in enumerate(entries):
        if updated[i]:
            values[slot] = 100.0 + i
            versions[slot] = version if versioned else 10

    columns = list(zip(*entries, strict=True)) if entries else [(), (), ()]
    index, generation, version = (torch.tensor(c, dtype=torch.int64) for c in columns)
    keywords = (
        {"version_key": "v", "version": version, "require_newer": require_newer}
        if versioned
        else {}
    )
    result = buffer.update_if_present(
        index=index,
        generation=generation,
        patch={"x": torch.arange(len(entries)) + 100.0},
        **keywords,
    )
    assert result.updated.tolist() == updated
    assert (result.version_rejected.tolist() == rejected) if versioned else True
    assert result.stale_count == live.count(False)
    assert buffer["x"].tolist() == values
    assert buffer["v"].flatten().tolist() == versions


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_cells_of_rows_with_lanes_are_patched_alone(device: str):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6, ndim=2, device=device),
        writer=RoundRobinWriter(track_generations=True),
    )
    data = torch.arange(6).view(2, 3)
    buffer.extend(TensorDict({"x": data, "v": torch.zeros(2, 3)}, [2, 3]))
    buffer.extend(TensorDict({"x": data[:, :1] + 50, "v": torch.zeros(2, 1)}, [2, 1]))
    result = buffer.update_if_present(
        index=torch.tensor([[0, 1], [1, 0], [1, 0], [2, 1], [2, 2], [2, -1], [3, 0]]),
        generation=zeros(7),
        patch={"x": torch.arange(7) + 100},
        version_key="v",
        version=1,
    )
    assert result.updated.tolist() == [False, False, True, True, False, False, False]
    assert result.stale_count == 4
    assert buffer["x"].tolist() == [[50, 102, 2], [53, 4, 103]]
    assert buffer["v"].tolist() == [[0, 1, 0], [0, 0, 1]]


def test_patches_may_have_flags_without_their_last_dimension_and_keys_with_a_dot():
    buffer = tracked()
    result = buffer.update_if_present(
        index=torch.tensor([1, 2]),
        generation=zeros(2),
        patch=TensorDict({"next": {"done": torch.tensor([True, False])}}, [2]),
    )
    assert result.updated_count == 2
    assert buffer["next", "done"].flatten().tolist() == [False, True, False, False, False]
    dotted = tracked(filled=0)
    dotted.extend(TensorDict({"a.b": torch.zeros(3), "a": {"v": zeros(3)}}, [3]))
    dotted.update_if_present(
        index=torch.tensor([1]),
        generation=zeros(1),
        patch={"a.b": torch.ones(1)},
        version_key=("a", "v"),
        version=4,
    )
    assert dotted[("a.b",)].tolist() == [0.0, 1.0, 0.0]
    assert dotted["a", "v"].tolist() == [0, 4, 0]


# -- errors ---------------------------------------------------------------------------------------


def test_buffers_that_cannot_be_patched_raise_the_reason():
    one = {"index": torch.tensor([0]), "generation": zeros(1), "patch": {"x": torch.ones(1)}}
    for buffer, match in [
        (ReplayBuffer(storage=LazyTensorStorage(5)), "track_generations"),
        (tracked(ListStorage(5)), "ListStorage"),
        (tracked(filled=0), "nothing is stored"),
    ]:
        if "nothing" not in match and not len(buffer):
            buffer.extend(content(2))
        refuses(RuntimeError, match, buffer.update_if_present, **one)


BAD: list[Any] = [
    (TypeError, {"patch": torch.zeros(2)}, "patch as a mapping"),
    (TypeError, {"patch": [("x", torch.zeros(2))]}, "patch as a mapping"),
    (TypeError, {"patch": None}, "patch as a mapping"),
    (KeyError, {"patch": {"x": torch.ones(2), "unknown": torch.ones(2)}}, "unknown"),
    (KeyError, {"patch": {"next": {"unknown": torch.ones(2)}}}, "unknown"),
    (KeyError, {"version_key": "unknown", "version": 11}, "unknown"),
    (ValueError, {"patch": {"x": torch.ones(3)}}, r"'x'.*\[2\].*\[3\]"),
    (ValueError, {"patch": {"x": torch.ones(2, 1)}}, r"\[2, 1\]"),
    (ValueError, {"patch": {"x": torch.ones(2).double()}}, "float32.*float64"),
    (ValueError, {"patch": {"x": torch.ones(2), "next": {"y": torch.ones(2, 1)}}}, "'y'"),
    (ValueError, {"generation": zeros(3)}, "2 generations"),
    (ValueError, {"generation": zeros(2)[:, None]}, "2 generations"),
    (ValueError, {"generation": torch.zeros(2)}, "generation as integers"),
    (ValueError, {"index": torch.tensor([[0, 1]])}, "index of shape"),
    (ValueError, {"index": torch.tensor([0.0, 1.0])}, "index as integers"),
    (ValueError, {"version_key": "v"}, "together"),
    (ValueError, {"version": 11}, "together"),
    (ValueError, {"version_key": "x", "version": 11}, "not to be in the patch"),
    (ValueError, {"version_key": ("next", "y"), "version": 11}, "one version per row"),
    (ValueError, {"version_key": "next.y", "version": 11}, "tuple"),
    (ValueError, {"version_key": "v", "version": torch.tensor([11, 12, 13])}, "versions"),
    (ValueError, {"version_key": "v", "version": torch.tensor([11])}, "versions"),
    (ValueError, {"version_key": "v", "version": 11.5}, "int64 can hold"),
    (ValueError, {"version_key": "v", "version": float("nan")}, "int64 can hold"),
]


@pytest.mark.parametrize(("error", "changed", "match"), BAD)
def test_everything_is_checked_before_the_first_write(
    error: type, changed: dict[str, Any], match: str
):
    buffer = tracked()
    call = {
        "index": torch.tensor([0, 1]),
        "generation": zeros(2),
        "patch": {"x": torch.ones(2)},
        **changed,
    }
    unchanged(buffer, error, lambda: buffer.update_if_present(**call), match)


@pytest.mark.pitfall("TH2")
def test_concurrent_patches_and_writes_never_mix_in_one_record():
    """A patch goes to the record that was sampled, or nowhere."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8), writer=RoundRobinWriter(track_generations=True)
    )

    def rows(number: int) -> TensorDict:
        return TensorDict({"a": torch.full((4,), number), "b": torch.full((4,), number)}, [4])

    buffer.extend(rows(0))

    def write() -> None:
        for number in range(1, 400):
            buffer.extend(rows(number))

    def patch() -> None:
        for _ in range(400):
            batch = buffer.sample(6)
            buffer.update_if_present(
                index=batch["index"], generation=batch["index_generation"], patch={"b": batch["a"]}
            )

    in_threads(write, patch, patch)
    assert torch.equal(buffer["a"], buffer["b"])
