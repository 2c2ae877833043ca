"""Batches: what is in them, whose they are, how they are made, how iteration ends."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict

from replaykit import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SampleUnit,
    Storage,
    TensorStorage,
)

KINDS = ["list", "lazy_stack", "tensor", "memmap"]


class Point(TensorClass):
    """Content that is no TensorDict."""

    x: torch.Tensor


class Twice(SampleUnit):
    """Every drawn record and the one after it."""

    def expand(self, index: torch.Tensor, info: dict[str, Any], storage: Storage) -> Any:
        assert storage.lock.acquire(blocking=False), "called without the storage's lock"
        storage.lock.release()
        step = torch.arange(2).repeat(len(index))
        index = (index.repeat_interleave(2) + step) % len(storage)
        info = {key: value.repeat_interleave(2, 0) for key, value in info.items()}
        return index, {**info, "step": step}


class Known(Sampler):
    """Draws given slots, and knows things of them."""

    def __init__(self, index: Any, **info: Any) -> None:
        super().__init__()
        self.index, self.info = index, info

    def sample(self, storage: Storage, batch_size: int) -> Any:
        return self.index, self.info


# -- what is in a batch ---------------------------------------------------------------------------


@pytest.mark.pitfall("BD9")
@pytest.mark.pitfall("RD4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["random", "without", "ordered"])
@pytest.mark.parametrize("track", [False, True])
def test_a_batch_has_its_rows_their_index_and_no_more(
    kind: str, sampler: str, track: bool, buffer_of: Any, rows: Any, check_whole: Any
):
    """BD9, RD4, D1: ``index`` is ``[B]`` in data and info, and says where each row lies."""
    writer = RoundRobinWriter(track_generations=track)
    buffer = buffer_of(kind, 8, sampler=sampler, writer=writer)
    buffer.extend(rows(11))
    data, info = buffer.sample(5, return_info=True)
    extra = {"index", "index_generation"} if track else {"index"}
    assert set(data.keys()) == {"id", "observation", "pixels", "next"} | extra
    assert set(info) == extra
    assert data.batch_size == (5,)
    for key in extra:
        assert (info[key].shape, info[key].dtype) == ((5,), torch.int64)
        assert info[key] is data[key] or torch.equal(info[key], data[key])
    slots = {number % 8: number for number in range(11)}
    assert check_whole(data) == [slots[i] for i in data["index"].tolist()]
    if track:
        assert data["index_generation"].tolist() == [data["id"][i] // 8 for i in range(5)]
    assert not data.is_locked


@pytest.mark.pitfall("BD9")
@pytest.mark.parametrize("sampler", ["random", "without", "ordered"])
def test_an_index_has_a_coordinate_per_dimension_of_the_storage(sampler: str, buffer_of: Any):
    """BD9: ``[B, ndim]``, never a tuple."""
    buffer = buffer_of("tensor", 24, ndim=3, sampler=sampler)
    data = torch.arange(24).view(2, 3, 4)
    buffer.extend(TensorDict({"x": data}, [2, 3, 4]))
    batch, info = buffer.sample(10, return_info=True)
    assert batch.batch_size == (10,)
    assert batch["index"].shape == info["index"].shape == (10, 3)
    time_major = data.transpose(0, 2)
    assert batch["x"].tolist() == [int(time_major[tuple(i)]) for i in batch["index"].tolist()]


@pytest.mark.pitfall("BD6")
@pytest.mark.parametrize("kind", KINDS)
def test_flags_come_back_with_a_trailing_dimension(kind: str, buffer_of: Any, rows: Any):
    """BD6, D5: ``[N]`` and ``[N, 1]`` are mixed across writes, at the root and under ``next``."""
    buffer = buffer_of(kind)
    for shape in ((2, 1), (2,), (2, 1)):
        data = rows(2)
        for key in ("done", ("next", "done"), ("next", "terminated"), ("next", "truncated")):
            data[key] = torch.ones(shape, dtype=torch.bool)
        buffer.extend(data)
    data["done"] = torch.zeros(2, dtype=torch.bool)
    buffer.add(data[0])
    batch = buffer.sample(9)
    assert batch["done"].shape == batch["next", "done"].shape == (9, 1)
    assert batch["next", "truncated"].shape == (9, 1)
    assert buffer["done"].squeeze(-1).tolist() == [True] * 6 + [False]


def test_content_that_is_no_tensordict_comes_alone():
    for content in (
        torch.arange(4.0),
        Point(x=torch.arange(4.0), batch_size=[4]),
        {"a": torch.arange(4), "b": (torch.zeros(4, 2),)},
    ):
        buffer = ReplayBuffer(storage=TensorStorage(content))
        data, info = buffer.sample(3, return_info=True)
        assert type(data) is type(content)
        assert type(buffer.sample(3)) is type(content)
        assert info["index"].shape == (3,)
    assert torch.equal(data["a"], info["index"])
    numbers = ReplayBuffer(storage=ListStorage(5))
    numbers.extend([3, 4, 5])
    data, info = numbers.sample(6, return_info=True)
    assert torch.equal(data, info["index"] + 3)


@pytest.mark.pitfall("IF7")
def test_info_can_be_left_out_of_the_data(buffer_of: Any):
    """IF7: ``include_info=False`` is deprecated; ``True`` is the default."""
    buffer = buffer_of(filled=4)
    with pytest.warns(DeprecationWarning, match="include_info"):
        data, info = buffer.sample(2, return_info=True, include_info=False)
    assert set(data.keys()) == {"id", "observation", "pixels", "next"}
    assert set(info) == {"index"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "index" in set(buffer.sample(2, include_info=True).keys())


@pytest.mark.pitfall("RD1")
@pytest.mark.parametrize("constructor", [None, 3])
def test_the_batch_size_of_the_call_wins(constructor: int | None, buffer_of: Any):
    """E23: without a warning."""
    buffer = buffer_of(filled=10, batch_size=constructor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(buffer.sample(7)) == len(buffer.sample(batch_size=7)) == 7
    if constructor is None:
        for call in (buffer.sample, buffer.can_sample):
            with pytest.raises(RuntimeError, match="batch_size"):
                call()
    else:
        assert len(buffer.sample()) == 3
    for bad in (0, -1, 2.0, True, "3", torch.tensor(3)):
        with pytest.raises(ValueError, match="batch_size"):
            buffer.sample(bad)


def test_rows_that_are_trajectories_repeat_what_is_known_of_them(buffer_of: Any):
    data = TensorDict({"x": torch.arange(24).view(4, 3, 2)}, [4, 3, 2])
    for kind in ("list", "tensor"):
        buffer = buffer_of(kind, writer=RoundRobinWriter(track_generations=True))
        buffer.extend(data)
        batch, info = buffer.sample(5, return_info=True)
        assert batch.batch_size == (5, 3, 2)
        for key in ("index", "index_generation"):
            assert batch[key].shape == (5, 3, 2)
            assert info[key].shape == (5,)
            assert torch.equal(batch[key], info[key][:, None, None].expand(5, 3, 2))
        assert torch.equal(batch["x"], data["x"][info["index"]])
        batch["index"] += 1  # memory of its own
        assert int(info["index"].max()) < 4


@pytest.mark.parametrize("stack_dim", [0, 1, -1])
def test_lazy_stacks_carry_the_index_along_their_stack_dimension(stack_dim: int):
    buffer = ReplayBuffer(storage=LazyStackStorage(10, stack_dim=stack_dim))
    for number in range(4):
        buffer.add(TensorDict({"x": torch.full((3, number + 1), number)}, [3]))
    batch, info = buffer.sample(6, return_info=True)
    assert isinstance(batch, LazyStackedTensorDict)
    dim = stack_dim % 2
    assert batch.batch_size == ((6, 3) if dim == 0 else (3, 6))
    assert info["index"].shape == (6,)
    for number, row in zip(info["index"].tolist(), batch.unbind(dim), strict=True):
        assert row["x"].shape == (3, number + 1)
        assert (row["x"] == number).all()
        assert row["index"].tolist() == [number] * 3


def test_rows_of_different_keys_can_be_stacked_lazily():
    buffer = ReplayBuffer(storage=LazyStackStorage(10))
    buffer.add(TensorDict({"x": torch.zeros(()), "a": torch.ones(())}, []))
    buffer.add(TensorDict({"x": torch.zeros(()), "b": torch.ones(())}, []))
    batch = buffer.sample(20)
    assert set(batch.keys()) == {"x", "index"}
    assert {name for row in batch.unbind(0) for name in row.keys()} == {"x", "index", "a", "b"}  # noqa: SIM118


# -- whose it is ----------------------------------------------------------------------------------


def _scribble(data: Any) -> None:
    if isinstance(data, torch.Tensor):
        data.fill_(113)
    elif isinstance(data, dict):
        for value in data.values():
            _scribble(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _scribble(value)
    else:
        for value in data.values(True, True):
            value.fill_(113)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collate", [None, "list", "stack"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_editing_a_batch_never_changes_the_buffer(
    kind: str, collate: str | None, prefetch: int | None, buffer_of: Any, same: Any
):
    """G3: whatever the storage, and where a ``collate_fn`` hands the rows out as they are."""
    collate_fn = {None: None, "list": lambda rows: list(rows), "stack": torch.stack}[collate]
    if collate == "stack" and kind != "list":
        pytest.skip("rows are stacked already")
    buffer = buffer_of(
        kind, filled=6, sampler="without", batch_size=3, collate_fn=collate_fn, prefetch=prefetch
    )
    before = buffer.state_dict()["_storage"]
    for _ in range(4):
        data, info = buffer.sample(return_info=True)
        _scribble(data)
        _scribble(info)
    same(before, buffer.state_dict()["_storage"])
    assert sorted(int(i) for _ in range(2) for i in buffer.sample(None, True)[1]["index"]) == list(
        range(6)
    )


def test_tensors_inside_other_objects_are_copied_for_a_collate_function():
    """G3: also rows that are mappings, lists or tuples of tensors."""
    buffer = ReplayBuffer(storage=ListStorage(3), collate_fn=list)
    buffer.extend([{"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(1), "text")]}])
    _scribble(buffer.sample(2)[0]["a"])
    _scribble(buffer.sample(2)[0]["b"][0])
    _scribble(buffer.sample(2)[0]["b"][1][0])
    row = buffer.sample(1)[0]
    assert row["a"].tolist() == [0.0, 0.0]
    assert (row["b"][0].item(), row["b"][1]) == (0.0, (torch.zeros(1), "text"))


def test_two_batches_share_no_memory(buffer_of: Any):
    buffer = buffer_of("tensor", filled=6, sampler="ordered", batch_size=6)
    first, second = buffer.sample(), buffer.sample()
    first["observation"].fill_(113)
    first["index"].fill_(113)
    assert second["index"].tolist() == list(range(6))
    assert int(second["observation"].max()) < 113


# -- transforms and collation ---------------------------------------------------------------------


def test_transforms_run_in_order_after_collation_and_before_the_info():
    seen: list[Any] = []

    def collate(rows: list[Any]) -> TensorDict:
        seen.append("collate")
        return TensorDict({"x": torch.tensor(rows)}, [len(rows)])

    def first(data: TensorDict) -> TensorDict:
        seen.append(("first", set(data.keys())))
        data["y"] = data["x"] * 2
        return data

    def second(data: TensorDict) -> TensorDict:
        seen.append("second")
        return data.select("y").lock_()

    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=collate, transform=first)
    buffer.append_transform(second)
    buffer.extend([1, 2, 3])
    seen.clear()
    batch = buffer.sample(4)
    assert seen == ["collate", ("first", {"x"}), "second"]
    assert set(batch.keys()) == {"y", "index"}
    assert torch.equal(batch["y"], (batch["index"] + 1) * 2)
    assert not batch.is_locked


def test_transforms_run_without_the_lock(buffer_of: Any, rows: Any):
    """Threads write while a transform works."""
    done = threading.Event()

    def transform(data: TensorDict) -> TensorDict:
        thread = threading.Thread(target=lambda: (buffer.extend(rows(1, 4)), done.set()))
        thread.start()
        assert done.wait(20), "the lock was held"
        return data

    buffer = buffer_of(filled=4)
    buffer.append_transform(transform)
    buffer.sample(2)
    assert len(buffer) == 5


@pytest.mark.parametrize(
    "change", [lambda td: td[:2], lambda td: torch.cat([td, td]), lambda td: td.sum(dim=0)]
)
def test_a_transform_that_changes_the_number_of_rows_needs_return_info(change: Any, buffer_of: Any):
    buffer = buffer_of(filled=4, batch_size=3, transform=change)
    for call in (buffer.sample, buffer.next, lambda: next(iter(buffer))):
        with pytest.raises(RuntimeError, match="return_info"):
            call()
    data, info = buffer.sample(return_info=True)
    assert data.batch_size != (3,)
    assert "index" not in set(data.keys())
    assert info["index"].shape == (3,)


def test_a_transform_may_return_something_else(buffer_of: Any):
    buffer = buffer_of(filled=4, transform=lambda td: td["id"])
    data, info = buffer.sample(3, return_info=True)
    assert torch.equal(data, info["index"])


# -- samplers and units of one's own --------------------------------------------------------------


@pytest.mark.pitfall("BD9")
@pytest.mark.parametrize("form", ["tensor", "tuple", "list"])
def test_a_sampler_of_ones_own_may_draw_a_tuple(form: str, buffer_of: Any):
    """BD9: what users see is always a tensor ``[B]``."""
    index = torch.tensor([3, 1, 1])
    drawn = {"tensor": index, "tuple": (index,), "list": [3, 1, 1]}[form]
    sampler = Known(drawn, weight=torch.tensor([0.1, 0.2, 0.3]), note=torch.tensor(7), name="me")
    buffer = buffer_of(filled=5, sampler=sampler)
    data, info = buffer.sample(3, return_info=True)
    assert data["index"].tolist() == info["index"].tolist() == data["id"].tolist() == [3, 1, 1]
    assert torch.equal(data["weight"], sampler.info["weight"])
    assert (info["name"], int(info["note"])) == ("me", 7)
    assert set(data.keys()) == {"id", "observation", "pixels", "next", "index", "weight"}
    assert "index" not in sampler.info


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_a_sampler_of_ones_own_draws_coordinates_where_there_are_lanes(form: str, buffer_of: Any):
    time, lane = torch.tensor([2, 0, 1]), torch.tensor([0, 1, 1])
    drawn = (time, lane) if form == "tuple" else torch.stack((time, lane), -1)
    buffer = buffer_of("tensor", 10, ndim=2, sampler=Known(drawn))
    buffer.extend(TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3]))
    batch = buffer.sample(3)
    assert batch["index"].tolist() == [[2, 0], [0, 1], [1, 1]]
    assert batch["x"].tolist() == [2, 3, 4]


def test_info_may_have_nested_keys_and_never_replaces_the_index(buffer_of: Any):
    sampler = Known(torch.tensor([2]))
    sampler.info = {"index": torch.tensor([0]), ("next", "truncated"): torch.tensor([[True]])}
    buffer = buffer_of(filled=5, sampler=sampler)
    data, info = buffer.sample(1, return_info=True)
    assert data["index"].tolist() == info["index"].tolist() == data["id"].tolist() == [2]
    assert data["next", "truncated"].tolist() == [[True]]


def test_a_sampler_that_draws_rows_that_are_not_stored_gets_an_index_error(
    buffer_of: Any, unchanged: Any
):
    buffer = buffer_of(filled=5, sampler=Known(torch.tensor([5])))
    unchanged(buffer, IndexError, lambda: buffer.sample(1), "5")


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_sample_unit_expands_what_was_drawn(prefetch: int | None, buffer_of: Any):
    sampler = Known(torch.tensor([3, 4]), weight=torch.tensor([0.5, 1.0]))
    buffer = buffer_of(
        filled=5,
        sampler=sampler,
        sample_unit=Twice(),
        batch_size=2,
        prefetch=prefetch,
        writer=RoundRobinWriter(track_generations=True),
    )
    batch = buffer.sample()
    assert batch.batch_size == (4,)
    assert batch["index"].tolist() == batch["id"].tolist() == [3, 4, 4, 0]
    assert batch["weight"].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert batch["step"].tolist() == [0, 1, 0, 1]
    assert batch["index_generation"].shape == (4,)
    assert sampler.index.tolist() == [3, 4]


# -- whether, and how long ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_can_sample_says_whether_sample_would_succeed(
    kind: str, prefetch: int | None, buffer_of: Any, rows: Any, snapshot: Any, same: Any
):
    for sampler, enough in (("random", 1), ("without", 1), ("drop_last", 3)):
        buffer = buffer_of(kind, sampler=sampler, batch_size=3, prefetch=prefetch, seed=1)
        for stored in range(5):
            before = snapshot(buffer)
            assert buffer.can_sample() is (stored >= enough)
            assert buffer.can_sample(3) is buffer.can_sample()
            if prefetch is None:  # else threads draw ahead meanwhile
                same(before, snapshot(buffer))
            if stored >= enough:
                buffer.sample()
            else:
                with pytest.raises((RuntimeError, ValueError)):
                    buffer.sample()
            buffer.extend(rows(1, stored))


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [8, 10])
def test_iteration_is_one_pass(prefetch: int | None, drop_last: bool, count: int, buffer_of: Any):
    """RD13: the last batch is shorter, not topped up with other rows; or left out."""
    sampler = SamplerWithoutReplacement(drop_last=drop_last)
    buffer = buffer_of(filled=count, sampler=sampler, batch_size=4, prefetch=prefetch)
    for _ in range(3):
        sizes, ids = [], []
        for batch in buffer:
            sizes.append(len(batch))
            ids += batch["id"].tolist()
            assert buffer.sampler.ran_out is (len(ids) + (count % 4 if drop_last else 0) == count)
        assert sizes == [4, 4] + ([count - 8] if count > 8 and not drop_last else [])
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_iteration_after_a_break_continues_the_pass(prefetch: int | None, buffer_of: Any):
    buffer = buffer_of(filled=10, sampler="without", batch_size=3, prefetch=prefetch)
    seen = []
    for batch in buffer:
        seen += batch["id"].tolist()
        break
    seen += buffer.sample()["id"].tolist()
    seen += buffer.next()["id"].tolist()
    for batch in buffer:
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_next_gives_none_at_the_end_and_starts_over(prefetch: int | None, buffer_of: Any):
    buffer = buffer_of(filled=5, sampler="ordered", batch_size=2, prefetch=prefetch)
    for _ in range(3):
        ids = [buffer.next()["id"].tolist() for _ in range(3)]
        assert ids == [[0, 1], [2, 3], [4]]
        assert buffer.next() is None


def test_iteration_with_replacement_does_not_end(buffer_of: Any):
    buffer = buffer_of(filled=2, batch_size=2)
    for count, _ in enumerate(buffer):
        if count == 20:
            break
    assert all(buffer.next() is not None for _ in range(20))


def test_iteration_needs_a_batch_size(buffer_of: Any):
    buffer = buffer_of(filled=2)
    for call in (lambda: iter(buffer), buffer.next):
        with pytest.raises(RuntimeError, match="batch_size"):
            call()


def test_an_error_does_not_end_an_iteration(buffer_of: Any, rows: Any):
    buffer = buffer_of(sampler="ordered", batch_size=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="empty storage"):
            buffer.next()
    buffer.extend(rows(3))
    assert [buffer.next()["id"].tolist() for _ in range(2)] == [[0, 1], [2]]
    assert buffer.next() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_begins_anew_when_rows_came_but_not_when_they_changed(
    kind: str, buffer_of: Any, rows: Any
):
    buffer = buffer_of(kind, 8, filled=6, sampler="ordered")
    assert buffer.sample(4)["index"].tolist() == [0, 1, 2, 3]
    buffer.extend(rows(1, 6))
    assert buffer.sample(4)["index"].tolist() == [0, 1, 2, 3]
    buffer.extend(rows(1, 7))
    buffer.sample(6)
    buffer.extend(rows(3, 8))
    assert buffer.sample(4)["id"].tolist() == [6, 7]
    assert buffer.sampler.ran_out


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_draws_reach_every_row_equally_often(kind: str, buffer_of: Any, rows: Any):
    """Chi-square at fixed seeds, over a ring that has wrapped."""
    buffer = buffer_of(kind, 10, seed=7)
    buffer.extend(rows(13))
    counts = torch.bincount(buffer.sample(5000)["index"], minlength=10).double()
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert 1 < statistic < 27.9  # 9 degrees of freedom: 99.9 % below, and not exactly even


def test_without_a_pin_there_is_no_pinned_memory(buffer_of: Any):
    buffer = buffer_of(filled=4, pin_memory=True)
    assert buffer.sample(3)["observation"].is_pinned() is torch.cuda.is_available()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["tensor", "list", "tensorclass", "pytree"])
def test_a_batch_is_pinned_where_there_is_an_accelerator(kind: str, rows: Any):
    content = {
        "tensor": rows(4),
        "list": rows(4),
        "tensorclass": Point(x=torch.arange(4.0), batch_size=[4]),
        "pytree": (torch.zeros(4), {"a": torch.zeros(4)}),
    }[kind]
    storage = ListStorage(4) if kind == "list" else LazyTensorStorage(4)
    buffer = ReplayBuffer(storage=storage, pin_memory=True, transform=lambda data: data)
    buffer.extend(content)
    data, info = buffer.sample(3, return_info=True)
    assert info["index"].is_pinned()
    first = data[1]["a"] if kind == "pytree" else data.x if kind == "tensorclass" else data["id"]
    assert first.is_pinned()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampler", ["random", "without"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_batch_lives_on_the_device_of_the_storage(sampler: str, prefetch: Any, rows: Any):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20, device="cuda"),
        sampler=SamplerWithoutReplacement() if sampler == "without" else None,
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator(),
        prefetch=prefetch,
        batch_size=5,
    )
    buffer.extend(rows(20))
    for _ in range(6):
        batch = buffer.sample()
        assert batch["id"].device.type == batch["index"].device.type == "cuda"
        assert torch.equal(batch["id"], batch["index"])
