"""What a person does on the first day with the package, and what it answers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from replaykit.errors import SchemaError
from replaykit.transforms import Compose
from tests.buffer.building import same
from tests.support.refusals import refuses


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count * 3.0).view(count, 3)}, [count])


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_a_row_that_is_given_to_extend_is_refused(storage: Any):
    """A list storage lost it without a word."""
    buffer = ReplayBuffer(storage=storage(5))
    refuses(SchemaError, r"add\(\)", buffer.extend, rows(1)[0])
    if storage is ListStorage:
        for scalar in (torch.tensor(1.0), np.asarray(1.0)):
            refuses(SchemaError, r"add\(\) stores one row", buffer.extend, scalar)
    assert len(buffer) == buffer.write_count == 0
    lanes = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    refuses(SchemaError, "time along batch dimension 1", lanes.add, torch.tensor(1.0))


def test_a_batch_that_is_given_to_add_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.add(rows(1)[0])
    refuses(SchemaError, r"'x': .*; add\(\) takes one row, extend\(\) a batch", buffer.add, rows(2))
    with pytest.raises(SchemaError) as error:
        buffer.add(TensorDict({"x": torch.zeros(4)}, []))
    assert "extend()" not in str(error.value)


@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage])
@pytest.mark.parametrize("transformed", [False, True])
def test_time_may_be_another_dimension(kind: Any, transformed: bool):
    """Every storage takes ``dim_extend``: rows of a [3, 4] batch are its columns."""
    table = torch.arange(12).view(3, 4)
    transform = (lambda data: data) if transformed else None
    buffer = ReplayBuffer(storage=kind(10), dim_extend=1, transform=transform)
    buffer.extend(table)
    buffer.add(torch.tensor([7, 8, 9]))
    if kind is ListStorage:
        buffer.extend(table.numpy())
    expected = [*table.T.tolist(), [7, 8, 9]]
    assert buffer[:5].tolist() == expected
    assert len(buffer) == (9 if kind is ListStorage else 5)


@pytest.mark.parametrize(
    ("storage", "row", "seen"),
    [
        (LazyTensorStorage, {"a": torch.zeros(3)}, {"a": torch.zeros(1, 3)}),
        (LazyTensorStorage, (torch.zeros(2), torch.zeros(())), (torch.zeros(1, 2), torch.zeros(1))),
        (ListStorage, "text", ["text"]),
        (ListStorage, {"a": 1}, [{"a": 1}]),
        (ListStorage, torch.zeros(3), torch.zeros(1, 3)),
    ],
)
def test_transforms_see_a_batch_of_one_in_add(storage: Any, row: Any, seen: Any):
    """Whatever a row is, as in ``extend``."""
    batches = []

    class Looks:
        def inv(self, data: Any) -> Any:
            batches.append(data)
            return data

    buffer = ReplayBuffer(storage=storage(4), transform=Looks())
    assert buffer.add(row) == 0
    buffer[0] = row
    same(batches, [seen, seen])
    assert len(buffer) == 1


def test_dicts_and_tuples_of_tensors_are_stacked():
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2)
    buffer.extend([{"a": torch.full((2,), float(i)), "b": (i, np.ones(3) * i)} for i in range(3)])
    batch = buffer.sample()
    assert batch["a"].shape == (2, 2)
    assert batch["b"][1].shape == (2, 3)
    assert torch.equal(batch["a"][:, 0].double(), batch["b"][1][:, 0])
    assert buffer[:]["b"][0].tolist() == [0, 1, 2]
    buffer.add({"a": torch.zeros(2)})
    refuses(TypeError, r"same keys.*collate_fn", lambda: buffer[:])


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_torch_load_reads_a_state_dict_with_weights_only(storage: Any):
    """Tensors, numbers and containers only: ``torch.load`` takes it as it is."""
    data = TensorDict(
        {"x": torch.rand(5, 3), "next": {"done": torch.zeros(5, 1, dtype=torch.bool)}}, [5]
    )
    parts = {"sampler": SamplerWithoutReplacement(), "batch_size": 2}
    buffer = ReplayBuffer(storage=storage(8), prefetch=2, **parts)
    buffer.extend(data)
    buffer.sample()
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other = ReplayBuffer(
        storage=LazyTensorStorage(8), **{**parts, "sampler": SamplerWithoutReplacement()}
    )
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other[:]["x"], data["x"])
    assert other[:]["next", "done"].shape == (5, 1)
    for _ in range(2):
        assert torch.equal(other.sample()["index"], buffer.sample()["index"])


def test_numbers_of_numpy_are_batch_sizes():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=np.int64(2))
    buffer.extend(rows(3))
    assert len(buffer.sample()) == 2
    assert len(buffer.sample(np.int32(3))) == 3
    refuses(ValueError, r"got 2.0", buffer.sample, 2.0)


@pytest.mark.parametrize("kind", ["transform", "save hook", "load hook"])
def test_a_function_that_forgets_to_return_is_named(kind: str, tmp_path: Any):
    def forgets(data: Any) -> None:
        pass

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(rows(3))
    buffer.dumps(tmp_path / "good")
    reads: list[Callable[[], Any]] = [lambda: buffer.dumps(tmp_path / "bad")]
    if kind == "transform":
        buffer.append_transform(forgets)
        reads = [buffer.sample, lambda: buffer[:]]
    elif kind == "save hook":
        buffer.register_save_hook(forgets)
    else:
        buffer.register_load_hook(forgets)
        reads = [lambda: buffer.loads(tmp_path / "good")]
    for read in reads:
        refuses(TypeError, f"{kind}.*forgets.*returned None", read)
    assert len(buffer) == 3


def test_error_names_the_library_of_a_foreign_storage():
    class LazyTensorStorageElsewhere:
        pass

    LazyTensorStorageElsewhere.__module__ = "elsewhere.data"
    LazyTensorStorageElsewhere.__qualname__ = "LazyTensorStorage"
    with pytest.raises(TypeError, match="got elsewhere LazyTensorStorage"):
        ReplayBuffer(storage=LazyTensorStorageElsewhere())


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_invalid_device_is_named(storage: Any):
    refuses(ValueError, r"expected a device such as .*got 'foo'", storage, 3, device="foo")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_unavailable_device_is_named():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3, device="cuda"))
    refuses(RuntimeError, "got cuda: CUDA is not available", buffer.extend, rows(2))
    assert len(buffer) == 0


def test_error_for_an_absent_key_lists_the_existing_ones():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(rows(2))
    refuses(KeyError, "no key 'y'; there are 'x'", lambda: buffer["y"])


def test_slice_of_compose_is_a_compose():
    chain = Compose(abs, lambda x: x + 1, lambda x: x * 10)
    assert isinstance(chain[1:], Compose)
    assert chain[1:](2) == 30
    assert chain[:0](2) == 2


def test_max_value_writer_refuses_complex_ranks():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("r"))
    with pytest.raises(ValueError, match="expected real numbers to rank by, got complex64"):
        buffer.extend(TensorDict({"r": torch.zeros(2, dtype=torch.complex64)}, [2]))
    assert len(buffer) == 0
    assert TensorDictMaxValueWriter(rank_key=None).rank_key == ("next", "reward")


def test_drop_last_accepts_values_that_are_not_bool():
    sampler = SamplerWithoutReplacement(drop_last=1)  # type: ignore[arg-type]
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=2)
    buffer.extend(rows(5))
    assert sum(len(batch) for batch in buffer) == 4
