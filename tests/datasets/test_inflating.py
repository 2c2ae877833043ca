"""Chunks that are inflated here have the values that h5py reads."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets.engine import h5_values
from replaykit.datasets.engine.h5 import open_h5
from replaykit.errors import CorpusError

GZIP: dict[str, Any] = {"compression": "gzip"}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each reading of an array was done without HDF5."""
    said: list[bool] = []
    original = h5_values.inflate

    def watched(*args: Any) -> bool:
        said.append(original(*args))
        return said[-1]

    monkeypatch.setattr("replaykit.datasets.engine.h5.inflate", watched)
    monkeypatch.setattr(h5_values, "_LEAST_CHUNK_BYTES", 1)
    return said


def _write(path: Path, values: np.ndarray[Any, Any], **how: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("values", data=values, **how)
    return path


def _check(path: Path) -> None:
    with h5py.File(path) as file:
        values = file["values"][...]
    with open_h5(path) as ours:
        for start, stop in ((0, len(values)), (1, len(values)), (337, 901), (0, 800)):
            found = ours.read("values", start, stop)
            assert found.dtype == values.dtype
            assert found.tobytes() == values[start:stop].tobytes()


def _grown(node: h5py.Dataset) -> None:
    node[...] = np.arange(30_000).reshape(1000, 30)


def _partly(node: h5py.Dataset) -> None:
    node[:100] = 1


def _raw(node: h5py.Dataset) -> None:
    node.id.write_direct_chunk((0, 0), np.arange(30_000, dtype="f4").tobytes(), filter_mask=1)


@pytest.mark.parametrize(
    ("fill", "chunks", "maxshape", "by_hdf5"),
    [
        (_grown, (512, 64), (None, None), False),  # chunks beyond the end
        (_partly, (100, 30), None, True),  # chunks that were never written have the fill value
        (_raw, (1000, 30), None, True),  # a chunk that passed by the filter
    ],
)
def test_chunks_of_other_kinds_are_those_of_h5py(tmp_path, taken, fill, chunks, maxshape, by_hdf5):
    how = {"chunks": chunks, "maxshape": maxshape, "fillvalue": 7.5, **GZIP}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        fill(file.create_dataset("values", (1000, 30), "float32", **how))
    _check(tmp_path / "a.h5")
    assert taken
    assert all(taken) != by_hdf5


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shape", "chunks"),
    [
        ("float32", (1000, 17), None),
        ("float32", (1000, 17), (64, 5)),
        ("float64", (1000, 3, 7), (1, 3, 7)),
        ("uint8", (1000, 12, 8, 3), (7, 12, 5, 2)),
        ("int64", (20_000,), (4096,)),
        ("bool", (70_000,), (4096,)),
        ("float16", (1000, 40), (999, 39)),
    ],
)
def test_values_are_those_of_h5py(tmp_path, taken, dtype, shape, chunks, shuffle):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    _check(_write(tmp_path / "a.h5", values, chunks=chunks, shuffle=shuffle, **GZIP))
    assert set(taken) == {True}


OTHERS: dict[str, dict[str, Any]] = {
    "other byte order": {"dtype": ">f4", **GZIP},
    "checksums": {"fletcher32": True, **GZIP},
    "other compression": {"compression": "lzf"},
    "chunks alone": {"chunks": (10, 30)},
    "in one piece": {},
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_storage_layouts_are_read_by_hdf5(tmp_path, taken, how):
    values = np.arange(30_000, dtype="f4").reshape(1000, 30)
    with open_h5(_write(tmp_path / "a.h5", values, **OTHERS[how])) as ours:
        np.testing.assert_array_equal(ours.read("values", 0, 1000), values)
    assert taken == [False]


@pytest.mark.parametrize("stored", [b"no zlib at all", None], ids=["nonsense", "too short"])
def test_damaged_chunks_are_refused_in_the_words_of_hdf5(tmp_path, stored):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        node = file.create_dataset("values", (1000, 30), "float32", chunks=(1000, 30), **GZIP)
        node.id.write_direct_chunk((0, 0), stored or zlib.compress(bytes(1000))[:-3])
    with (
        open_h5(tmp_path / "a.h5") as ours,
        pytest.raises(CorpusError, match=r"a\.h5: values: cannot be read .*\[V03\]"),
    ):
        ours.read("values", 0, 1000)


def test_no_record_beyond_the_end_is_made_up(tmp_path):
    values = np.arange(40_960, dtype=np.float32).reshape(10, 4096)
    path = _write(tmp_path / "a.h5", values, chunks=(8, 4096), **GZIP)
    with open_h5(path) as file:
        np.testing.assert_array_equal(file.read("values", 5, 10), values[5:])
        with pytest.raises(CorpusError, match="values"):
            file.read("values", 5, 14)


def test_without_the_library_hdf5_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(h5_values, "_decompressor", lambda: None)
    _check(_write(tmp_path / "a.h5", np.arange(40_000.0).reshape(1000, 40), **GZIP))
