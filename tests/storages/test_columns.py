"""Columns: rows in and out of one tensor per key, for every dtype."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorStorage,
)
from replaykit.errors import SchemaError
from replaykit.storages import columns as storage_columns
from replaykit.storages import row_kernels
from replaykit.storages.columns import Columns
from replaykit.storages.memory import carried
from tests.support.accelerator import no_wait
from tests.support.refusals import refuses

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that its half complex numbers are experimental

    def _holds_data(dtype: torch.dtype) -> bool:
        """Whether torch itself can copy values of it (not the names kept for compilers)."""
        try:
            probe = torch.empty(2, dtype=dtype)
            return not probe.is_quantized and probe.clone().dtype == dtype
        except (RuntimeError, NotImplementedError):
            return False

    DTYPES = sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
    )
    DTYPES = [dtype for dtype in DTYPES if _holds_data(dtype)]


def test_the_dtypes_that_matter_are_among_those_tested() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert names >= {
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2",
    }  # fmt: skip


def _patterned(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Rows ``[count, 2]`` of different bits; bool has two values only."""
    raw = torch.arange(count * 2 * dtype.itemsize) % (2 if dtype == torch.bool else 120)
    return raw.to(torch.uint8).view(dtype).view(count, 2)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(column_kind: Any, fingerprint: Any, dtype: torch.dtype) -> None:
    rows = TensorDict({"x": _patterned(dtype, 5)}, [5])
    rb = column_kind.buffer(4, TensorDict({"x": _patterned(dtype, 1)[0]}, []), batch_size=3)

    def bits(x: torch.Tensor) -> Any:
        assert x.dtype == dtype
        return fingerprint(carried(x))

    raw = carried(rows["x"])
    expected = torch.stack([raw[4], raw[1], raw[2], raw[3]])
    rb.extend(rows)  # one row more than there is room for
    assert bits(rb[:]["x"]) == fingerprint(expected)
    assert bits(rb[1:3]["x"]) == fingerprint(expected[1:3])
    assert bits(rb[[3, 0]]["x"]) == fingerprint(expected[[3, 0]])
    assert bits(rb[2]["x"]) == fingerprint(expected[2])
    assert bits(rb.storage.read(torch.tensor([0, 2]))["x"]) == fingerprint(expected[[0, 2]])
    batch = rb.sample()
    assert bits(batch["x"]) == fingerprint(expected[batch["index"].cpu()])
    rb[0:2] = rb[2:4]
    expected[0:2] = expected[2:4]
    rb.extend([TensorDict({"x": _patterned(dtype, 1)[0]}, [])])
    expected[1] = carried(_patterned(dtype, 1))[0]
    assert bits(rb[:]["x"]) == fingerprint(expected)
    other = column_kind.buffer(4, TensorDict({"x": _patterned(dtype, 1)[0]}, []))
    other.load_state_dict(rb.state_dict())
    assert bits(other[:]["x"]) == fingerprint(expected)
    other.dumps(column_kind.folder / "saved")
    rb.empty()
    rb.loads(column_kind.folder / "saved")
    assert bits(rb[:]["x"]) == fingerprint(expected)


def test_features_without_elements_are_kept(column_kind: Any) -> None:
    row = TensorDict({"none": torch.zeros(0, 3), "x": torch.zeros(())}, [])
    rb = column_kind.buffer(4, row, batch_size=8)
    rb.extend(torch.stack([row] * 6))
    assert (rb[:]["none"].shape, rb.sample()["none"].shape) == ((4, 0, 3), (8, 0, 3))
    other = row.clone().set("none", torch.zeros(0, 2))
    refuses(SchemaError, r"expected float32 \[0, 3\], got float32 \[0, 2\]", rb.add, other)


def test_conjugates_and_negatives_are_stored_as_values(column_kind: Any) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    rows = TensorDict({"z": z.conj(), "y": z.conj().imag}, [2])
    rb = column_kind.buffer(2, TensorDict({"z": z[0], "y": z[0].imag}, []))
    rb.extend(rows)
    assert rb[:]["z"].tolist() == [1 - 2j, 3 + 1j]
    assert rb[:]["y"].tolist() == [-2.0, 1.0]


def test_gradients_stay_outside(storage_kind: Any) -> None:
    weight = torch.ones(3, requires_grad=True)
    rows = TensorDict({"x": weight * 2}, [3])
    rb = storage_kind.buffer(3, rows[0].detach(), batch_size=2)
    rb.extend(rows)
    assert not rb.sample()["x"].requires_grad
    assert not rb[0]["x"].requires_grad
    assert rows["x"].requires_grad


@pytest.mark.parametrize("leaves", ["a tensor", "wide leaves"])
@pytest.mark.parametrize("kind", ["cursor in the middle", "around the end"])
def test_rows_of_the_buffer_itself_can_be_written_again(
    column_kind: Any, kind: str, leaves: str
) -> None:
    """Slices are views: what a write displaces must not be read as its own input."""

    def rows(numbers: torch.Tensor) -> Any:
        if leaves == "a tensor":
            return numbers
        wide = numbers[:, None].expand(-1, 300)
        return TensorDict({"wide": wide, "double": numbers.double()}, [len(numbers)])

    def numbers_in(buffer: ReplayBuffer) -> list[int]:
        if leaves == "a tensor":
            return buffer[:].tolist()
        assert (buffer["wide"] == buffer["double"][:, None]).all()
        return buffer["wide"][:, 0].tolist()

    rb = column_kind.buffer(10, rows(torch.arange(1))[0])
    rb.extend(rows(torch.arange(18 if kind == "around the end" else 15)))
    stored = numbers_in(rb)
    cursor = rb.storage.ledger.cursor
    for first in (cursor - 2, cursor - 3, 2):
        expected = stored.copy()
        for i in range(4):
            expected[(cursor + i) % 10] = stored[first + i]
        rb.extend(rb[first : first + 4])
        assert numbers_in(rb) == expected
        stored, cursor = expected, (cursor + 4) % 10
    rb[2:7] = rb[1:6]
    stored[2:7] = stored[1:6]
    assert numbers_in(rb) == stored
    rb[[5, 4, 3]] = rb[3:6]
    stored[5], stored[4], stored[3] = stored[3], stored[4], stored[5]
    assert numbers_in(rb) == stored


def test_columns_can_be_exchanged_with_one_another(column_kind: Any) -> None:
    row = TensorDict({"a": torch.tensor(0.0), "b": torch.tensor(1.0)}, [])
    rb = column_kind.buffer(4, row)
    rb.extend(torch.stack([row] * 4))
    rb.update_({"a": rb["b"], "b": rb["a"]})
    assert (rb["a"].tolist(), rb["b"].tolist()) == ([1.0] * 4, [0.0] * 4)
    rb["a"] = torch.arange(4.0)
    rb.set_at_("a", rb["a"][:3], slice(1, 4))
    assert rb["a"].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_last_value_of_a_repeated_row_wins_in_every_column(column_kind: Any) -> None:
    """Otherwise chance decides, and for every column anew: a record mixed of two."""
    row = TensorDict({"a": torch.tensor(0), "b": torch.zeros(3)}, [])
    rb = column_kind.buffer(100, row)
    rb.extend(torch.stack([row] * 100))
    index = torch.randint(0, 100, (50_000,), generator=torch.Generator().manual_seed(0))
    values = torch.arange(50_000)
    rb[index] = TensorDict({"a": values, "b": values[:, None].float().expand(-1, 3)}, [50_000])
    expected = torch.zeros(100, dtype=torch.int64)
    for position, slot in enumerate(index.tolist()):
        expected[slot] = position
    assert torch.equal(rb["a"].cpu(), expected)
    assert torch.equal(rb["b"].cpu(), expected[:, None].float().expand(-1, 3))
    rb[[[1, 2], [2, 1]]] = TensorDict(
        {"a": -values[:4].view(2, 2), "b": torch.ones(2, 2, 3)}, [2, 2]
    )
    assert rb["a"][1:3].tolist() == [-3, -2]
    lanes = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    lanes.extend(torch.zeros(2, 3, dtype=torch.int64))
    lanes[torch.tensor([0, 1, 0]), torch.tensor([2, 1, 2])] = torch.tensor([5, 6, 7])
    assert lanes[:].tolist() == [[0, 0, 7], [0, 6, 0]]


@pytest.mark.parametrize(
    "shared",
    [
        torch.zeros(1, 2).expand(3, 2),
        torch.arange(5.0).unfold(0, 3, 1),
        torch.zeros(3, 1).expand(3, 4),
    ],
    ids=["expanded rows", "sliding windows", "expanded features"],
)
def test_rows_that_share_memory_can_be_read_and_not_written(shared: torch.Tensor) -> None:
    """One write would change several rows; the other columns stay as well."""
    data = TensorDict({"own": torch.zeros(3), "shared": shared}, [3])
    rb = ReplayBuffer(storage=TensorStorage(data))
    assert torch.equal(rb[:]["shared"], shared)
    row = TensorDict({"own": torch.ones(()), "shared": torch.ones(shared.shape[1])}, [])
    for write in (
        lambda: rb.add(row),
        lambda: rb.__setitem__(0, row),
        lambda: rb.set_("shared", torch.ones_like(shared)),
    ):
        refuses(RuntimeError, r"rows that share no memory.*'shared'; clone", write)
    assert rb["own"].tolist() == [0.0, 0.0, 0.0]
    assert rb.storage.ledger.next_position == 3


def test_a_transfer_that_fails_changes_nothing(
    make_rows: Any, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: all values are brought to the device before the first column is touched."""
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(make_rows(0, 4))
    before = snapshot(rb)
    calls: list[int] = []
    whole = Columns.own

    def failing(self: Columns, values: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return whole(self, values)

    # Values on another device, or in memory of the buffer's own, go this way.
    monkeypatch.setattr(Columns, "scatter_ring", lambda *_: False)
    monkeypatch.setattr(Columns, "own", failing)
    refuses(RuntimeError, "out of memory", rb.extend, make_rows(7, 2))
    assert len(calls) == 4
    assert snapshot(rb) == before


def test_an_interrupt_is_passed_on_after_the_last_column(
    make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is never left half old and half new (G4), not even by Ctrl-C."""

    def rows(first: int, count: int) -> TensorDict:
        wide = torch.arange(first, first + count)[:, None].expand(count, 100)
        return make_rows(first, count).set("wide", wide)  # not in the records

    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(rows(0, 4))
    whole = row_kernels.scatter
    calls: list[int] = []

    def interrupted(columns: Columns, slots: Any, runs: Any, sources: Any, block: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            assert block is not None
            whole(columns, slots, runs, sources)  # all columns but the records
            raise KeyboardInterrupt
        whole(columns, slots, runs, sources, block)

    # The core is not interrupted at all; torch is, between two columns.
    rb.storage.require()._native = None
    monkeypatch.setattr(row_kernels, "scatter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rb.extend(rows(7, 2))
    assert len(calls) == 2
    assert rb["wide"][:, 99].tolist() == [7, 8, 2, 3]
    assert rb["id"].tolist() == [7, 8, 2, 3]
    assert rb["observation"][:, 0].tolist() == [70.0, 80.0, 20.0, 30.0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no second device on this machine")
def test_rows_move_to_the_device_of_the_storage(make_rows: Any) -> None:
    for home, other in (("cpu", "cuda"), ("cuda", "cpu")):
        rb = ReplayBuffer(storage=LazyTensorStorage(4, device=home))
        rb.extend(make_rows(0, 3).to(other))
        assert rb.sample(2).device.type == home
        assert rb["id"].tolist() == [0, 1, 2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no second device on this machine")
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_write_does_not_wait_for_the_device(make_rows: Any, prioritized: bool) -> None:
    sampler = PrioritizedSampler(10, 0.6, 0.4) if prioritized else RandomSampler()
    rb = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), sampler=sampler)
    rb.extend(make_rows(0, 3))
    with no_wait():
        rb.extend(make_rows(3, 4))
        rb.add(make_rows(7, 1)[0])
        rb.extend(make_rows(8, 5))  # around the end of the ring
    assert rb["id"].tolist() == [10, 11, 12, *range(3, 10)]
    expected = make_rows(3, 10)[[7, 8, 9, *range(7)]]
    assert (rb[:].cpu() == expected).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no second device on this machine")
def test_a_sample_in_another_stream_has_the_written_rows(make_rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100, device="cuda"), batch_size=50)
    rb.extend(make_rows(0, 100))
    side = torch.cuda.Stream()
    for turn in range(1, 20):
        torch.cuda._sleep(10_000_000)  # the write begins later
        rb.extend(make_rows(100 * turn, 100))
        with torch.cuda.stream(side):
            assert (rb.sample()["id"] >= 100 * turn).all()


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("packed", [True, False])
def test_torch_writes_values_of_all_kinds(
    device: str, count: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lazy conjugates, negatives and zeros have other bytes than their values."""
    if not packed:  # as if there were many rows
        monkeypatch.setattr(storage_columns, "_MOST_PACKED", 0)
    values = torch.arange(count * 6).view(count, 3, 2)
    complexes = torch.complex(values[:, 0].float(), values[:, 1].float())
    rows = {
        "long": values,
        "byte": values[:, 0].to(torch.uint8),
        "number": values[:, 0, 0].double(),
        "turned": values.transpose(1, 2).float(),
        "conjugate": complexes.conj(),
        "negative": complexes.conj().imag,
        "zero": torch._efficientzerotensor((count, 2)),
        "short": values.to(torch.uint16),
        "empty": torch.zeros(count, 0),
    }
    plain = {key: leaf.clone().resolve_conj().resolve_neg() for key, leaf in rows.items()}
    capacity = count + count // 2
    rb = ReplayBuffer(storage=LazyTensorStorage(capacity, device=device))
    rb.extend(TensorDict(plain, [count]))
    rb.storage.require()._native = None  # type: ignore[union-attr]
    rb.extend(TensorDict(rows, [count]))  # around the end of the ring
    slots = (torch.arange(count) + count) % capacity
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for at in (slots, slots[mixed]):
        for key, leaf in plain.items():
            stored = carried(rb.storage.require()[(key,)])[at.to(device)].cpu()
            assert torch.equal(stored, carried(leaf)), key
        leaves = {(key,): leaf for key, leaf in rows.items()}
        rb.storage.require().scatter(slots[mixed], leaves, slice(None))


class Wrapped(torch.Tensor):
    """Values in another tensor; so the address of this one is not theirs."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        found = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        found = func(*plain, **(kwargs or {}))
        wraps = isinstance(found, torch.Tensor) and isinstance(args[0], Wrapped)
        return Wrapped(found) if wraps else found


def test_tensors_without_memory_are_packed_by_their_values() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"x": torch.zeros(4), "y": torch.zeros(4)}, [4]))
    rb.storage.require()._native = None  # type: ignore[union-attr]
    rb.extend(TensorDict({"x": Wrapped(torch.arange(3.0)), "y": torch.ones(3)}, [3]))
    assert rb["x"].tolist() == [0.0, 1.0, 2.0, 0.0]
