"""What programs written for TorchRL do with a buffer and its parts, here too."""

from __future__ import annotations

import functools
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import replaykit
from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Sequence,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    pad_collate,
)
from tests.buffer.building import STORAGES
from tests.support.refusals import refuses


def _rows(count: int, first: int = 0) -> TensorDict:
    x = torch.arange(first, first + count)[:, None]
    done = x % 4 == 3
    return TensorDict(
        {"x": x.float(), "version": x[:, 0], "next": {"reward": x.float(), "done": done}}, [count]
    )


def _buffer(storage: Any, sampler: Any = None, **options: Any) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(1)
    return ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=4, generator=generator, **options
    )


# -- hooks -----------------------------------------------------------------------------------------


class Noting:
    """A hook with the attributes that TorchRL sets."""

    shift = is_full = None

    def __call__(self, data: Any, path: Any = None) -> Any:
        self.called = (self.shift, self.is_full)
        return data


@pytest.mark.parametrize("count", [3, 8, 11, 16])
@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_save_hooks_receive_the_cursor(kind: str, count: int, tmp_path: Path):
    buffer = _buffer(STORAGES[kind](8))
    hook = Noting()
    buffer.register_save_hook(hook)
    for row in _rows(count):
        buffer.add(row)
    buffer.dumps(tmp_path)
    shift, is_full = hook.called
    assert is_full == (count >= 8)
    assert shift == (count - 1) % 8 + 1
    assert int(buffer[shift - 1]["x"]) == count - 1  # the newest row


# -- priorities ------------------------------------------------------------------------------------


def test_priority_updates_without_priorities_warn():
    """Whatever is given; but for the call that learners make whatever the sampler."""
    buffer = _buffer(LazyTensorStorage(8))
    buffer.extend(_rows(8))
    batch = buffer.sample()
    batch["td_error"] = torch.ones(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.update_tensordict_priority(batch)
        buffer.update_priority(batch)
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
        buffer.sampler.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)] * 3
    assert all("RandomSampler has no priorities" in str(warning.message) for warning in caught)
    # A member without priorities is left alone.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = _buffer(LazyTensorStorage(8), PrioritizedSampler(alpha=1.0, beta=1.0))
        plain = _buffer(LazyTensorStorage(8))
        for member in (other, plain):
            member.extend(_rows(8))
        ensemble = ReplayBufferEnsemble(other, plain, batch_size=8)
        batch = ensemble.sample()
        ensemble.update_tensordict_priority(batch.set("td_error", torch.ones(batch.shape)))


# -- folders in use --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["shared", "recover"])
def test_error_for_a_folder_in_use_does_not_suggest_existsok(how: str, tmp_path: Path):
    options = {"recover": True} if how == "recover" else {}
    user = ReplayBuffer(
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path, **options), shared=how == "shared"
    )
    user.extend(_rows(8))
    word = "share" if how == "shared" else "recovers"
    for existsok in (False, True):
        other = _buffer(LazyMemmapStorage(8, scratch_dir=tmp_path, existsok=existsok))
        with pytest.raises(RuntimeError, match=f"in use by.*{word}") as caught:
            other.extend(_rows(8, 50))
        assert "existsok=True" not in str(caught.value)
    assert user["version"].tolist() == list(range(8))
    del user, other
    other = _buffer(LazyMemmapStorage(8, scratch_dir=tmp_path / "free"))
    other.extend(_rows(8))
    again = _buffer(LazyMemmapStorage(8, scratch_dir=tmp_path / "free"))
    refuses(RuntimeError, "existsok=True to use its space", again.extend, _rows(8))


# -- collation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("lengths", [(3, 3, 3), (2, 3, 5)])
def test_pad_collate_takes_rows_of_list_storages(layout: str, storage: Any, lengths: Any):
    collate = functools.partial(pad_collate, layout=layout)
    padding, plain = _buffer(storage(8), collate_fn=collate), _buffer(storage(8))
    trajectories = [_rows(length) for length in lengths]
    for buffer in (padding, plain):
        buffer.extend(trajectories)
    found = [padding[:]]
    if storage is LazyStackStorage or len(set(lengths)) == 1:
        found.append(collate(plain[:]))
    expected = collate(trajectories)
    for key in ("x", ("next", "reward"), "mask" if layout == "padded" else "lengths"):
        for one in found:
            pair = [each[key] for each in (one, expected)]
            assert torch.equal(*(each.values() if each.is_nested else each for each in pair))
    assert padding.sample().batch_size[0] == 4
    if layout == "padded":
        assert expected["mask"].sum(1).tolist() == list(lengths)


def test_pad_collate_takes_a_lazy_stack_along_another_dimension():
    ragged = [TensorDict({"x": torch.ones(3, n)}, [3, n]) for n in (1, 2)]
    assert pad_collate(lazy_stack([row[0] for row in ragged], 1)).shape == (2, 2)


# -- windows ---------------------------------------------------------------------------------------


def test_a_sequence_expands_a_tuple_index():
    flat = _buffer(LazyTensorStorage(12))
    flat.extend(_rows(12))
    lanes = _buffer(LazyTensorStorage(12, ndim=2))
    lanes.extend(_rows(12).view(2, 6))
    unit = Sequence(length=2)
    for buffer, index in (
        (flat, (torch.tensor([1, 4]),)),
        (lanes, (torch.tensor([1, 4]), torch.tensor([0, 1]))),
    ):
        together = index[0] if len(index) == 1 else torch.stack(index, -1)
        found, told = unit.expand(index, {}, buffer.storage)
        expected, told_then = unit.expand(together, {}, buffer.storage)
        assert torch.equal(found, expected)
        assert all(torch.equal(told[key], told_then[key]) for key in told_then)


def _ends(buffer: ReplayBuffer) -> list[list[int]]:
    """Which rows come together in windows of two."""
    return sorted({tuple(pair) for pair in buffer.sample(400)["version"].view(-1, 2).tolist()})


@pytest.mark.parametrize("end_key", [None, ("next", "done")])
@pytest.mark.parametrize("lacks", ["episode", ("collector", "traj_ids"), ["episode", "seed"]])
def test_missing_trajectory_key_falls_back_to_done_and_warns(lacks: Any, end_key: Any):
    buffer = _buffer(
        LazyTensorStorage(12), SliceSampler(slice_len=2, traj_key=lacks, end_key=end_key)
    )
    buffer.extend(_rows(12))
    with pytest.warns(UserWarning, match=r"no .*\(traj_key\).*'done'"):
        buffer.sample()
    plain = _buffer(LazyTensorStorage(12), SliceSampler(slice_len=2, end_key=("next", "done")))
    plain.extend(_rows(12))
    assert _ends(buffer) == _ends(plain)
    copied = pickle.loads(pickle.dumps(buffer))
    copied.extend(_rows(2))
    assert copied.sample().shape == (4,)


def test_trajectory_key_is_required_where_no_done_flag_exists():
    rows = _rows(12).set("episode", torch.arange(12) // 6)
    buffer = _buffer(LazyTensorStorage(12), SliceSampler(slice_len=2, traj_key="episode"))
    buffer.extend(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (2, 3) in _ends(buffer)
    bare = _buffer(LazyTensorStorage(12), SliceSampler(slice_len=2, traj_key="episode"))
    bare.extend(_rows(12).exclude("next"))
    refuses(KeyError, "'episode'", bare.sample)
    only = _buffer(
        LazyTensorStorage(12), SliceSampler(slice_len=2, traj_key="episode", end_key="stop")
    )
    only.extend(_rows(12))
    refuses(KeyError, "'stop'", only.sample)


# -- storages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("cursor", [0, range(3), slice(0, 3), torch.arange(3)])
def test_first_write_through_the_storage_leaves_the_cursor(kind: str, cursor: Any):
    storage = STORAGES[kind](8)
    buffer = _buffer(storage)
    rows = _rows(3)[0] if isinstance(cursor, int) else _rows(3)
    count = 1 if rows.ndim == 0 else 3
    with pytest.raises(RuntimeError, match=r"no gap|up to 0"):
        storage.set(range(2, 4), _rows(2), set_cursor=False)
    assert len(storage) == 0
    storage.set(cursor, rows, set_cursor=False)
    assert len(storage) == len(buffer) == count
    assert torch.equal(buffer["version"], torch.arange(count))
    storage.set(0, _rows(1, 40)[0], set_cursor=False)  # replaces what is stored
    assert buffer["version"].tolist() == [40, 1, 2][:count]
    with pytest.raises((IndexError, RuntimeError)):
        storage.set(count, _rows(1)[0], set_cursor=False)
    assert buffer.extend(_rows(2, 20)).tolist() == [0, 1]
    assert buffer["version"].tolist() == [20, 21, 2][: max(count, 2)]


def test_patches_may_have_the_layout_of_the_data():
    buffer = _buffer(LazyTensorStorage(12, ndim=2), writer=RoundRobinWriter(track_generations=True))
    data = _rows(12).view(2, 6)
    index = buffer.extend(data)
    generation = buffer.writer.generations_of(index)
    patch = {("next", "reward"): torch.arange(12.0).view(2, 6, 1) * 3, "x": data["x"] + 1}
    patch["next", "done"] = torch.ones(2, 6, dtype=torch.bool)
    result = buffer.update_if_present(index=index, generation=generation, patch=patch)
    assert bool(result.updated.all())
    for key, value in patch.items():
        assert torch.equal(buffer[key].reshape(-1), value.reshape(-1))
    newer = data["version"] + torch.tensor([[1], [-1]])
    result = buffer.update_if_present(
        index=index,
        generation=generation,
        patch=TensorDict({"x": torch.zeros(2, 6, 1)}, [2, 6]),
        version_key="version",
        version=newer,
    )
    assert result.updated.view(6, 2).tolist() == [[True, False]] * 6
    assert torch.equal(buffer["x"][0], torch.zeros(6, 1))
    assert torch.equal(buffer["x"][1], data["x"][1] + 1)
    with pytest.raises(ValueError, match=r"\[12, 1\], got float32 \[2, 5, 1\]"):
        buffer.update_if_present(
            index=index, generation=generation, patch={"x": torch.zeros(2, 5, 1)}
        )


@pytest.mark.parametrize("how", ["private", "folder", "recover", "shared", "once"])
@pytest.mark.parametrize("lanes", [False, True])
def test_column_file_gives_the_file_of_a_column(how: str, lanes: bool, tmp_path: Path):
    options: dict[str, Any] = {"ndim": 2} if lanes else {}
    if how in ("folder", "recover"):
        options |= {"scratch_dir": tmp_path, "recover": how == "recover"}
    if how == "once":
        options |= {"dedup_next": ["x"], "on_mismatch": "dense"}
    storage = LazyMemmapStorage(8, **options)
    refuses(RuntimeError, "nothing is stored", storage.column_file, "x")
    buffer = ReplayBuffer(storage=storage, shared=how == "shared")
    rows = _rows(8).set("wide", torch.rand(8, 300))
    rows["next", "x"] = rows["x"] + 1
    buffer.extend(rows.view(2, 4) if lanes else rows)
    if how in ("private", "folder", "once"):
        values = torch.rand(2, 4, 2) if lanes else torch.rand(8, 2)
        buffer["added"] = values
    for key in buffer[:].keys(True, True):
        if how == "once" and key in ("x", ("next", "x")):
            refuses(KeyError, "stored once", storage.column_file, key)
            continue
        found = storage.column_file(key)
        held = np.memmap(found.path, mode="r")
        kind = torch.zeros((), dtype=found.dtype).numpy().dtype
        read = np.ndarray(found.shape, kind, held, found.offset, found.strides)
        expected = buffer[key].transpose(0, 1) if lanes else buffer[key]
        assert np.array_equal(read[: len(expected)], expected.numpy())
    assert found.path.is_file()
    refuses(KeyError, "no column 'none'", storage.column_file, "none")


def test_column_file_fails_after_cleanup_but_columns_still_work():
    buffer = _buffer(LazyMemmapStorage(8))
    buffer.extend(_rows(8))
    assert buffer.storage.cleanup()
    refuses(RuntimeError, r"cleanup\(\)", buffer.storage.column_file, "x")
    buffer["added"] = torch.arange(8)
    buffer.extend(_rows(2, 8))
    assert buffer["added"].tolist() == [0, 0, 2, 3, 4, 5, 6, 7]


# -- reading ---------------------------------------------------------------------------------------


def _named(prioritized: bool, storage: Any, **options: Any) -> ReplayBuffer:
    if prioritized:
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, **options)
    return TensorDictReplayBuffer(storage=storage, **options)


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("kind", STORAGES)
def test_rows_that_are_read_carry_their_index(kind: str, prioritized: bool):
    buffer = _named(prioritized, STORAGES[kind](8))
    buffer.extend(_rows(11))
    assert buffer[:]["index"].tolist() == buffer["index"].tolist() == list(range(8))
    assert buffer[3]["index"].item() == 3
    assert buffer[-1]["index"].item() == 7
    assert buffer[2:5]["index"].tolist() == [2, 3, 4]
    assert buffer[torch.tensor([4, 1])]["index"].tolist() == [4, 1]
    assert buffer[torch.arange(8) % 4 == 1]["index"].tolist() == [1, 5]
    batch = buffer.sample(4)
    assert torch.equal(buffer[batch["index"]]["x"], batch["x"])
    # It is no column: what is stored, written back or read from a ReplayBuffer has none.
    assert all(row.get("index", None) is None for row in buffer.storage)
    buffer.write_all(buffer[:])
    plain = _buffer(STORAGES[kind](8))
    plain.extend(buffer[:])
    assert plain[:].get("index", None) is None
    if prioritized:
        buffer.update_priority(buffer[:]["index"], torch.arange(8) + 1.0)


def test_rows_of_lanes_and_of_transforms_carry_their_index():
    lanes = _named(False, LazyTensorStorage(12, ndim=2))
    index = lanes.extend(_rows(12).view(2, 6))
    found = lanes[:]["index"]
    assert found.shape == (2, 6, 2)
    assert torch.equal(found.transpose(0, 1).reshape(12, 2), index)
    assert torch.equal(lanes[1]["index"], found[1])
    assert torch.equal(lanes[:, 2:4]["index"], found[:, 2:4])
    made = _named(False, LazyTensorStorage(8), transform=lambda rows: rows.exclude("x"))
    made.extend(_rows(8))
    assert made[1:3]["index"].tolist() == [1, 2]
    shorter = _named(False, LazyTensorStorage(8), transform=lambda rows: rows[:1])
    shorter.extend(_rows(8))
    assert shorter[:]["index"].tolist() == [0]  # it goes with its row
    whole = _named(False, LazyTensorStorage(4))
    whole.extend(_rows(12).view(3, 4))
    assert whole[:]["index"].tolist() == [[n] * 4 for n in range(3)]


# -- rows of several lengths, what transforms see, attributes --------------------------------------


def _trajectories(*lengths: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.arange(n)}, [n]) for n in lengths]


@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("transform", [None, lambda rows: rows])
def test_rows_of_several_lengths_are_sampled_as_a_lazy_stack(cls: Any, transform: Any) -> None:
    rb = cls(storage=LazyStackStorage(5), batch_size=4, transform=transform)
    for row in _trajectories(2, 3, 4):
        rb.add(row)
    for batch in (rb.sample(), rb.sample(2), rb[:], rb[[0, 2]], next(iter(rb))):
        for row in batch.unbind(0):
            assert row["x"].tolist() == list(range(len(row)))
            if "index" in row:
                assert row["index"].tolist() == [len(row) - 2] * len(row)
    assert "index" in rb.sample().unbind(0)[0]
    assert ("index" in rb[:].unbind(0)[0]) == (cls is not ReplayBuffer)
    assert "index" not in rb.storage[0]
    rb.add(_trajectories(2)[0].unsqueeze(0))
    refuses(ValueError, r"equally many batch dimensions.*\[1, 2\]", lambda: rb[:])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ["TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer"])
def test_transforms_of_buffers_of_tensordicts_see_the_index(name: str, prefetch: int) -> None:
    law = {"alpha": 0.7, "beta": 0.5} if "Prioritized" in name else {}
    table = torch.arange(20) * 10
    rb = getattr(replaykit, name)(
        storage=LazyTensorStorage(20),
        batch_size=4,
        prefetch=prefetch,
        transform=lambda rows: rows.set("looked", table[rows["index"]]),
        **law,
    )
    rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
    loader = rb.dataloader(4, steps=2) if not law else ()
    for batch in (rb.sample(), rb.sample(7), rb[:], rb[3:5], rb[2], *loader):
        assert torch.equal(batch["looked"], batch["x"] * 10)
        assert torch.equal(batch["index"], batch["x"])
    with pytest.warns(DeprecationWarning, match="include_info"):
        assert "index" not in rb.sample(include_info=False)
    lanes = getattr(replaykit, name)(
        storage=LazyTensorStorage(20, ndim=2),
        batch_size=4,
        transform=lambda rows: rows.set("looked", rows["index"].sum(-1)),
        **law,
    )
    lanes.extend(TensorDict({"x": torch.arange(20).view(2, 10)}, [2, 10]))
    for batch in (lanes.sample(), lanes[:], lanes[1, 3]):
        assert torch.equal(batch["looked"], batch["x"] // 10 + batch["x"] % 10)


def test_arguments_can_be_read_and_named_as_in_torchrl() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(9), priority_key="p")
    assert (rb.priority_key, rb.service_backend, rb.checkpointer) == ("p", "direct", None)
    assert ReplayBuffer(priority_key=("a", "b")).priority_key == ("a", "b")
    assert (rb.storage.shared_init, rb.storage.consolidated) == (False, False)
    rows = TensorDict({"x": torch.arange(3)}, [3])
    assert rb.extend(tensordicts=rows).tolist() == [0, 1, 2]
    assert rb.extend(data=rows).tolist() == [3, 4, 5]
    refuses(TypeError, "one argument", rb.extend, rows, tensordicts=rows)
    for part in (rb, rb.storage):
        part.checkpointer = None
        with pytest.raises(TypeError, match=r"register_save_hook.*read_torchrl"):
            part.checkpointer = "other"  # type: ignore[assignment]


def test_write_all_explains_values_that_are_not_batches() -> None:
    tensors = ReplayBuffer(storage=LazyTensorStorage(5))
    tensors.extend(torch.zeros(3))
    objects = ReplayBuffer(storage=ListStorage(5), batch_size=2)
    objects.extend([torch.zeros(2), TensorDict({"x": torch.zeros(2)}, [2])])
    for rb in (tensors, objects):
        for given in (3, 2.5, torch.zeros(())):
            refuses(TypeError, r"expected a batch of rows.*got", rb.write_all, given)
        refuses(TypeError, "expected rows to write, got None", rb.write_all, None)
    refuses(ValueError, "one kind of rows, got Tensor and TensorDict", lambda: objects[:])
    objects.write_all([torch.zeros(2), torch.zeros(3)])
    refuses(ValueError, r"one shape of rows, got \[2\] and \[3\]", lambda: objects[:])


def test_share_of_an_emptied_buffer_explains_the_refusal() -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(32))
    rb.extend(torch.zeros(1))
    rb.empty()
    refuses(ValueError, r"never written to.*emptied.*make a new buffer", rb.share, True)
