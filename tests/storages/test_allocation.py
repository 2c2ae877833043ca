"""Memory for columns: what is taken, and what is refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.schema import Schema, split_leaves
from replaykit.storages import memory
from replaykit.storages.memory import (
    allocate,
    available_memory,
    format_bytes,
)

CPU = torch.device("cpu")


def _schema() -> Schema:
    rows = split_leaves({"x": torch.zeros(1, 3), "y": torch.zeros(1, 0, dtype=torch.int8)}, 1)
    return Schema(rows.root)


@pytest.mark.pitfall("WR19")
def test_an_over_large_request_is_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, make_rows: Any
) -> None:
    """WR19: the message names the rows, the bytes that are needed and those there are."""
    rb = ReplayBuffer(storage=LazyTensorStorage(2**45))
    monkeypatch.setattr(memory, "available_memory", lambda _: 3 * 2**30)

    def taken(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(memory.torch, "empty", taken)
    with pytest.raises(MemoryError) as caught:
        rb.extend(make_rows(0, 3))
    assert str(caught.value) == (
        "a storage of 35184372088832 rows of 32 bytes needs 1.0 PiB on cpu, 3.0 GiB are "
        "available; use a smaller max_size, or LazyMemmapStorage to keep the rows on disk"
    )
    monkeypatch.undo()
    assert rb.storage.schema is None
    assert (len(rb), rb.write_count, rb.storage.max_size) == (0, 0, 2**45)


def test_allocation_that_just_fits_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _: 60)
    assert len(allocate(_schema(), 5, torch.Size(), CPU, None)[0]) == 2
    monkeypatch.setattr(memory, "available_memory", lambda _: 59)
    with pytest.raises(MemoryError, match=r"5 rows of 12 bytes needs 60 B.* 59 B are available"):
        allocate(_schema(), 5, torch.Size(), CPU, None)


def test_allocation_is_tried_if_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory(torch.device("meta")) is None
    monkeypatch.setattr(memory, "_free_of_machine", lambda: None)
    monkeypatch.setattr(memory, "_free_of_group", lambda: None)
    assert available_memory(CPU) is None
    assert len(allocate(_schema(), 5, torch.Size(), CPU, None)[0]) == 2


def test_the_tighter_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_of_machine", lambda: 500)
    for group, expected in ((300, 300), (700, 500), (None, 500)):
        monkeypatch.setattr(memory, "_free_of_group", lambda group=group: group)
        assert available_memory(CPU) == expected


@pytest.mark.parametrize(
    ("layout", "free"),
    [
        (
            {
                "memory.max": "1000\n",
                "memory.current": "700\n",
                "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
            },
            450,
        ),
        ({"memory.max": "100", "memory.current": "700", "memory.stat": ""}, 0),
        ({"memory.max": "max\n", "memory.current": "700", "memory.stat": ""}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "400",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
            },
            700,
        ),
        ({}, None),
    ],
    ids=["second version", "beyond the limit", "no limit", "first version", "no groups"],
)
def test_the_limit_of_a_container_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: dict[str, str], free: int | None
) -> None:
    for name, text in layout.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "FilePath", lambda _: tmp_path)
    assert memory._free_of_group() == free


def test_the_memory_of_the_machine_is_found_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(memory, "open", missing, raising=False)
    free = memory._free_of_machine()
    assert free is None or free > 2**20
    monkeypatch.undo()
    assert 2**20 < (available_memory(CPU) or 0) < 2**50


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 2**20, "1.5 GiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
    ],
)
def test_sizes_are_printed_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(count) == text
