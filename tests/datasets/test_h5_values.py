"""Values of H5 files: inflated here, held in memory, or not stored as numbers."""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from isal import isal_zlib

from replaykit.datasets.encoded_frames import image_module
from replaykit.datasets.engine import h5_values, scan
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.engine.fields import Preceded, Text
from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.h5_values import HeldValues
from replaykit.errors import CorpusError
from tests.datasets.trials import convert, write_file

GZIP: dict[str, Any] = {"compression": "gzip"}
NAMES = ("g/little", "g/deep/one", "g/wide", "g/packed")


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


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "a.h5"
    with h5py.File(found, "w") as file:
        file["g/little"] = np.arange(12, dtype=">f4").reshape(6, 2)
        file["g/deep/one"] = 7
        file["g/wide"] = np.zeros((6, 3000))
        file["g/none"] = np.zeros((0, 3))
        file["g/text"] = "text"
        file.create_dataset("g/packed", data=np.arange(6), compression="gzip", chunks=(6,))
    return found


@pytest.mark.parametrize("is_sent", [False, True])
def test_small_datasets_are_held_and_read_as_the_file_has_them(path, is_sent):
    held = HeldValues(1 << 20)
    with open_h5(path) as file:
        file.hold(held)
        file.leaves("g")
    assert [name for name in NAMES if name in held] == ["g/little", "g/deep/one", "g/packed"]
    if is_sent:
        held = pickle.loads(pickle.dumps(held))
    with open_h5(path) as file, open_h5(path) as plain:
        file.hold(held)
        for name in NAMES:
            for start, stop in ((0, 1),) if name == "g/deep/one" else ((0, 6), (2, 4), (3, 3)):
                found, wanted = (each.read(name, start, stop) for each in (file, plain))
                np.testing.assert_array_equal(found, wanted)
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        file.read("g/little", 0, 6)[:] = -1
        assert file.read("g/little", 0, 6).min() == 0
        # What is not there is refused whether held or not.
        for each in (file, plain):
            with pytest.raises(CorpusError):
                each.read("g/little", 0, 7)


@pytest.mark.parametrize("workers", [1, 2])
def test_converted_data_do_not_depend_on_size_of_held_cache(tmp_path, monkeypatch, workers):
    files = [write_file(tmp_path / f"{k}.h5", *range(60, 69), seed=9 * k) for k in range(2)]
    made = []
    for blocks, block_bytes in ((2, 1 << 20), (1, 1 << 18), (0, 1 << 20)):
        monkeypatch.setattr(scan, "_HELD_BLOCKS", blocks)
        options = ConvertOptions(block_bytes=block_bytes, workers=workers)
        found = convert(tmp_path / str(blocks), *files, options=options)
        made.append([(array.key, array.crc32) for array in found.manifest.arrays])
    assert made[0] == made[1] == made[2]


def test_text_is_its_bytes_with_zeros_behind(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = ["a", "", "\u00e9x"]
        file["fixed"] = np.array([b"ab", b"c"])
    with open_h5(tmp_path / "a.h5") as file:
        found = Text(4).read(file, "t", 1, 3)
        assert found.tolist() == [[0, 0, 0, 0], [0xC3, 0xA9, ord("x"), 0]]
        assert Text(2).read(file, "fixed", 0, 2).tolist() == [[97, 98], [99, 0]]
        with pytest.raises(CorpusError, match=r"a\.h5: t, record 2: .*3 bytes, expected at most 2"):
            Text(2).read(file, "t", 0, 3)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (0, 1), (1, 4), (2, 3), (0, 0)])
def test_separately_stored_first_record_comes_first(tmp_path, start, stop):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["e/states/x"], file["e/initial/x"] = np.arange(1, 4), np.array([0])
        file["e/initial/y"] = np.zeros((1, 2))
        file["e/states/y"] = np.zeros((3, 3))
    with open_h5(tmp_path / "a.h5") as file:
        found = Preceded("states", "initial").read(file, "e/states/x", start, stop)
        assert found.tolist() == list(range(4))[start:stop]
        with pytest.raises(CorpusError, match=r"e/initial/y: has records of shape \[2\]"):
            Preceded("states", "initial").read(file, "e/states/y", 0, 4)


def test_missing_pillow_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"need Pillow.*pip install 'replaykit\[images\]'"):
        image_module()


@dataclass
class Answering:
    """A low-level dataset whose chunks have given bytes and filters."""

    node: Any
    chunk: tuple[int, bytes] | Exception

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def read_direct_chunk(self, _: tuple[int, ...]) -> tuple[int, bytes]:
        if isinstance(self.chunk, Exception):
            raise self.chunk
        return self.chunk


@pytest.fixture
def inflated(tmp_path: Path) -> Iterator[Callable[..., bool]]:
    """Return whether an array was inflated, given the bytes and filters of its chunk."""
    values = np.zeros((1000, 30), np.float32)
    with h5py.File(_write(tmp_path / "a.h5", values, chunks=(1000, 30), **GZIP)) as file:
        node = file["values"].id

        def run(chunk: tuple[int, bytes] | Exception, into: np.ndarray[Any, Any] = values) -> bool:
            return h5_values.inflate(Answering(node, chunk), 0, 1000, into, h5py.h5t.NATIVE_FLOAT)

        yield run


WHOLE = (0, zlib.compress(bytes(120_000)))


def test_unreadable_chunk_is_left_to_hdf5(inflated):
    assert inflated(WHOLE)
    for error in (OSError, ValueError, KeyError, RuntimeError):
        assert not inflated(error("no such chunk"))
    assert not inflated((0, b"no zlib at all"))


@pytest.mark.parametrize("error", [MemoryError, TypeError])
def test_no_other_fault_is_hidden(inflated, monkeypatch, error):
    with pytest.raises(error, match="of another kind"):
        inflated(error("of another kind"))
    into = np.empty((1000, 30), np.float32)
    into.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        inflated(WHOLE, into)

    def raising(*_: object) -> bytes:
        raise error("of another kind")

    monkeypatch.setattr(isal_zlib, "decompressobj", raising)
    with pytest.raises(error, match="of another kind"):
        inflated(WHOLE)
