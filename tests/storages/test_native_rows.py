"""Rows moved by the core: the same bits as by torch, from and to memory of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import native
from replaykit.schema import Schema, split_leaves
from replaykit.storages.columns import Columns
from replaykit.storages.records import plan_records
from tests.support.refusals import refuses

SOURCES = ["records", "columns", "lanes first", "expanded", "unfolded", "every other", "offset"]
LANES: dict[int, tuple[int, ...]] = {1: (), 2: (3,), 3: (2, 3)}
SLOTS = 11


def _laid_out(source: str, data: torch.Tensor, ndim: int) -> torch.Tensor:
    """The values, or some of them, in memory as wrapped tensors may have them."""
    if source == "lanes first" and ndim > 1:
        return data.transpose(0, 1).contiguous().transpose(0, 1)
    if source == "expanded":
        return data[:1].expand_as(data)
    if source == "every other":
        return torch.cat([data, data])[::2]
    if source == "unfolded" and data.ndim == 2 and ndim == 1 and data.numel():
        # Windows that share most of their memory.
        return data.reshape(-1)[: SLOTS + data.shape[1] - 1].unfold(0, data.shape[1], 1)
    if source == "offset":
        return torch.cat([data[:1], data])[1:]
    return data


def _two(
    leaves: Any, source: str, ndim: int, filled: Any, mapped: bool = False
) -> tuple[Columns, Columns]:
    """The same rows twice, moved by the core and by torch."""
    lanes = LANES[ndim]
    data = {
        key: _laid_out(source, filled((SLOTS, *lanes, *shape), dtype, seed), ndim)
        for seed, (key, (dtype, shape)) in enumerate(leaves.items())
    }
    rows = split_leaves(TensorDict(data, [SLOTS, *lanes]), ndim)
    schema = Schema(rows.root)
    layout = plan_records(schema) if source == "records" else None

    def made() -> Columns:
        if layout is None:
            return Columns(schema, rows.leaves, ndim, mapped=mapped)
        records = torch.zeros(SLOTS, *lanes, layout.stride, dtype=torch.uint8)
        alone = {path: leaf.clone() for path, leaf in rows.leaves.items()}
        columns = Columns(schema, alone, ndim, layout=layout, records=records, mapped=mapped)
        for path in layout.offsets:
            columns[path].copy_(rows.leaves[path])
        return columns

    core, torch_ = made(), made()
    torch_._native = None
    return core, torch_


def _index(draw: Any, count: int, ndim: int) -> torch.Tensor:
    limits = torch.tensor([SLOTS, *LANES[ndim]])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    cells = torch.rand(count, ndim, generator=generator, dtype=torch.float64) * limits
    return cells.long() if ndim > 1 else cells.long()[:, 0]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    data=st.data(),
    source=st.sampled_from(SOURCES),
    ndim=st.integers(1, 3),
    count=st.sampled_from([0, 1, 2, 17, 300]),
    contiguous=st.booleans(),
    mapped=st.booleans(),
)
def test_core_gather_matches_torch(
    layouts: Any,
    filled: Any,
    same_bits: Any,
    data: st.DataObject,
    source: str,
    ndim: int,
    count: int,
    contiguous: bool,
    mapped: bool,
) -> None:
    core, plain = _two(data.draw(layouts), source, ndim, filled, mapped)
    index = _index(data.draw, count, ndim)
    want = plain.gather(index, contiguous=contiguous)
    got = core.gather(index, contiguous=contiguous)
    assert list(got) == list(want) == list(core.schema.leaves)
    for path, leaf in got.items():
        assert same_bits(leaf, want[path])
        assert same_bits(leaf, core[path][tuple(index.T)] if ndim > 1 else core[path][index])
        if contiguous:
            assert leaf.is_contiguous()
            assert want[path].is_contiguous()
        if leaf.numel():  # memory of its own, not of the columns
            start = leaf.untyped_storage().data_ptr()
            assert start not in {t.untyped_storage().data_ptr() for t in core.tensors.values()}
    batch = core.read(index, SLOTS, contiguous=contiguous)
    assert list(batch.keys()) == [path[0] for path in core.schema.leaves]
    assert batch.batch_size == (count,)


@pytest.mark.parametrize("source", ["records", "columns", "expanded", "every other", "offset"])
def test_the_usual_sources_are_read_by_the_core(source: str, filled: Any) -> None:
    """Otherwise the law above would compare torch with itself."""
    leaves = {"a": (torch.float32, (3,)), "b": (torch.bool, (1,)), "wide": (torch.uint8, (600,))}
    for ndim in (1, 2, 3):
        core, _ = _two(leaves, source, ndim, filled)
        # Every other time slot: lanes follow each other, but time slots have gaps between them.
        assert (core._native is None) == (source in ("expanded", "every other") and ndim > 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    data=st.data(),
    source=st.sampled_from(["records", "columns", "lanes first", "every other", "offset"]),
    ndim=st.integers(1, 3),
    ring=st.booleans(),
)
def test_core_scatter_matches_torch(
    layouts: Any,
    filled: Any,
    same_bits: Any,
    data: st.DataObject,
    source: str,
    ndim: int,
    ring: bool,
) -> None:
    leaves = data.draw(layouts)
    core, plain = (_own(columns) for columns in _two(leaves, source, ndim, filled))
    total = data.draw(st.integers(0, SLOTS))
    count = data.draw(st.integers(0, total))
    kept, rows = list(range(total - count, total)), slice(total - count, None)
    if data.draw(st.booleans()):
        kept = data.draw(st.permutations(range(total)))[:count]
        rows = torch.tensor(kept, dtype=torch.int64)
    if ring:
        first = data.draw(st.integers(0, SLOTS - 1))
        slots = (torch.arange(len(kept)) + first) % SLOTS
    else:
        slots = torch.tensor(data.draw(st.permutations(range(SLOTS)))[: len(kept)])
    values = {
        (key,): filled((total, *LANES[ndim], *shape), dtype, 100 + seed)
        for seed, (key, (dtype, shape)) in enumerate(leaves.items())
    }
    before = {path: leaf.clone() for path, leaf in core.tensors.items()}
    for columns in (core, plain):
        columns.scatter(slots.long(), values, rows)
    others = torch.tensor(sorted({*range(SLOTS)} - {*slots.tolist()}), dtype=torch.int64)
    for path in core.tensors:
        assert same_bits(core[path], plain[path])
        assert same_bits(core[path][slots.long()], values[path][rows])
        assert same_bits(core[path][others], before[path][others])


def _own(columns: Columns) -> Columns:
    """Columns in memory that nobody else writes."""
    if columns.records is not None:
        return columns
    own = {path: _like(leaf) for path, leaf in columns.tensors.items()}
    made = Columns(columns.schema, own, columns.ndim)
    if columns._native is None:
        made._native = None
    return made


def _like(leaf: torch.Tensor) -> torch.Tensor:
    memory = leaf.untyped_storage().clone()
    return torch.empty(0, dtype=leaf.dtype).set_(
        memory, leaf.storage_offset(), leaf.shape, leaf.stride()
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), source=st.sampled_from(["records", "columns", "every other", "offset"]))
def test_a_ring_is_written_from_addresses_as_torch_writes_it(
    layouts: Any, filled: Any, same_bits: Any, data: st.DataObject, source: str
) -> None:
    leaves = data.draw(layouts)
    core, plain = (_own(columns) for columns in _two(leaves, source, 1, filled))
    count = data.draw(st.sampled_from([1, 2, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS + 2]))
    first = data.draw(st.integers(0, SLOTS - 1))
    skipped = max(0, count - SLOTS)
    values = {
        (key,): filled((count, *shape), dtype, 100 + seed)
        for seed, (key, (dtype, shape)) in enumerate(leaves.items())
    }
    addresses = [values[path].data_ptr() for path in core.tensors]
    assert core.scatter_ring((first + skipped) % SLOTS, count, addresses, skipped)
    slots = (torch.arange(skipped, count) + first) % SLOTS
    plain.scatter(slots, values, slice(skipped, None))
    for path in core.tensors:
        assert same_bits(core[path], plain[path])


@pytest.fixture
def columns(filled: Any) -> Columns:
    leaves = {"a": (torch.float32, (3,)), "b": (torch.bool, (1,)), "wide": (torch.uint8, (600,))}
    return _two(leaves, "records", 1, filled)[0]


@pytest.mark.parametrize("wrong", [-1, SLOTS, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", [0, 8, 99])
@pytest.mark.parametrize("mapped", [True, False])
def test_rows_outside_are_named(columns: Columns, wrong: int, place: int, mapped: bool) -> None:
    columns.advise = mapped
    index = torch.zeros(100, dtype=torch.int64)
    index[place] = wrong
    refuses(IndexError, rf"expected rows in \[0, {SLOTS}\), got {wrong}$", columns.gather, index)
    index[place] = 5
    refuses(IndexError, r"expected rows in \[0, 5\), got 5", columns.gather, index, 5)
    with pytest.raises(ValueError, match=f"expected at most {SLOTS} rows, got {SLOTS + 1}"):
        columns.gather(index, SLOTS + 1)


def test_a_slot_outside_is_refused_before_anything_is_written(columns: Columns) -> None:
    before = {path: leaf.clone() for path, leaf in columns.tensors.items()}
    values = {path: torch.zeros_like(leaf[:3]) for path, leaf in columns.tensors.items()}
    with pytest.raises(IndexError, match=rf"expected rows in \[0, {SLOTS}\), got {SLOTS}"):
        columns.scatter(torch.tensor([0, 5, SLOTS]), values, slice(None))
    with pytest.raises(IndexError, match=r"expected at most 11 rows from one .* 2 from slot 11"):
        columns._native.scatter_ring(SLOTS, 2, [1, 2, 3], 0)
    with pytest.raises(IndexError, match=r"got 12 from slot 0"):
        columns._native.scatter_ring(0, SLOTS + 1, [1, 2, 3], 0)
    for path, leaf in columns.tensors.items():
        assert torch.equal(leaf.view(torch.uint8), before[path].view(torch.uint8))


def test_a_table_takes_as_many_numbers_as_it_has_fields() -> None:
    memory, index, to = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 8)
    table = native.Table([memory.data_ptr()], [32], [32], 4)
    for addresses, strides in (([], [32]), ([to.data_ptr()], []), ([to.data_ptr()] * 2, [32] * 2)):
        text = "expected an address and a stride for each of 1 fields, got"
        refuses(ValueError, text, table.gather, index.data_ptr(), 2, 4, addresses, strides, 1)
        refuses(ValueError, text, table.gather, index.data_ptr(), 2, 4, addresses, strides, 1, True)
        refuses(ValueError, text, table.scatter, index.data_ptr(), 2, addresses, strides, 1)
    for addresses in ([], [to.data_ptr()] * 2):
        with pytest.raises(ValueError, match="expected an address and a stride for each of 1"):
            table.scatter_ring(0, 2, 0, addresses, 1)
    refuses(ValueError, "as many strides and sizes as fields", native.Table, [0, 0], [1], [1], 1)
    refuses(ValueError, "rows >= 0", native.Table, [0], [1], [1], -1)
    refuses(ValueError, "sizes of at least 0", native.Table, [0], [1], [-1], 1)
