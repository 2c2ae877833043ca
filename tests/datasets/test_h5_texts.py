"""Texts and values of varying length take no more memory than is said, whatever a file claims."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import convert
from replaykit.datasets.engine import h5_values
from replaykit.datasets.engine.h5 import H5File, open_h5
from replaykit.datasets.families import ROBOMIMIC
from replaykit.errors import CorpusError
from tests.datasets.converted import in_memory
from tests.datasets.mutated.corpora import CORPORA

BOUND = 16 << 20
WORDS = ["a" * (3 * n % 50) for n in range(37)]
SEQUENCES = h5py.vlen_dtype("uint16")
TEXTS = h5py.string_dtype()


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5_values, "MOST_TEXT_BYTES", BOUND)


def _reference(path: Path, dataset: str) -> bytes:
    with h5py.File(path) as file:
        at = file[dataset].id.get_offset()
    return path.read_bytes()[at : at + 16]


def _repeated(path: Path, dataset: str, dtype: Any, times: int, value: Any) -> Path:
    """Writes one large value, and a dataset of so many references to it in a deflated chunk."""
    with h5py.File(path, "a") as file:
        one = file.create_dataset("one", (1,), dtype=dtype)
        one[0] = value
        file.create_dataset(dataset, (times,), dtype, chunks=(times,), compression="gzip")
    stored = zlib.compress(_reference(path, "one") * times)
    with h5py.File(path, "a") as file:
        file[dataset].id.write_direct_chunk((0,), stored)
    return path


@pytest.mark.parametrize("dtype", [TEXTS, SEQUENCES])
@pytest.mark.parametrize("method", ["texts", "entries"])
def test_many_references_to_one_large_value_are_refused(tmp_path, dtype, method):
    value = "x" * 200_000 if dtype is TEXTS else np.ones(100_000, np.uint16)
    path = _repeated(tmp_path / "a.h5", "x", dtype, 1000, value)

    def read() -> None:
        said = r"a\.h5: x: its texts take at least 200,128,000 bytes.* at most 16,777,216.*V03"
        with open_h5(path) as file, pytest.raises(CorpusError, match=said):
            file.texts("x") if method == "texts" else file.entries("x", 0, 1000)

    assert in_memory(read) < BOUND
    with open_h5(path) as file:  # a part of them is within the bound
        assert len(file.entries("x", 10, 30)) == 20


def test_robomimic_mask_beyond_the_bound_is_refused(tmp_path):
    path = CORPORA["robomimic"].write(tmp_path)
    _repeated(path, "mask/valid", TEXTS, 1000, "x" * 200_000)
    with pytest.raises(CorpusError, match=r"low_dim\.hdf5: mask/valid: its texts take at least"):
        convert(path, ROBOMIMIC, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_texts_of_all_datasets_of_a_file_are_counted_together(tmp_path):
    path = _repeated(tmp_path / "a.h5", "x", TEXTS, 60, "x" * 200_000)
    with open_h5(path) as file:
        assert len(file.texts("x")) == 60
        with pytest.raises(CorpusError, match="x: its texts take at least 24,"):
            file.texts("x")


def test_texts_count_by_their_size_in_memory(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=["\N{GRINNING FACE}" + "x" * 100_000] * 60, dtype=TEXTS)
    with (
        open_h5(tmp_path / "a.h5") as file,  # four bytes for each letter
        pytest.raises(CorpusError, match="x: its texts take at least 24,"),
    ):
        file.texts("x")


@pytest.mark.parametrize("dtype", [TEXTS, SEQUENCES, h5py.vlen_dtype("float64")])
@pytest.mark.parametrize("how", [{}, {"chunks": (3,), "compression": "gzip"}])
def test_forged_length_takes_no_memory(tmp_path, dtype, how):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        node = file.create_dataset("x", (3,), dtype=dtype, **how)
        node[1] = "abc" if dtype is TEXTS else np.ones(3)
        plain = file.create_dataset("plain", (3,), dtype=dtype)
        plain[1] = "abc" if dtype is TEXTS else np.ones(3)
        at = plain.id.get_offset()
    raw = path.read_bytes()
    forged = raw[at : at + 16] + struct.pack("<I", 0x0FFF_FFFF) + raw[at + 20 : at + 48]
    if how:
        with h5py.File(path, "a") as file:
            file["x"].id.write_direct_chunk((0,), zlib.compress(forged))
    else:
        with h5py.File(path) as file:
            mine = file["x"].id.get_offset()
        path.write_bytes(raw[:mine] + forged + raw[mine + 48 :])

    def read() -> None:
        with (
            open_h5(path) as file,
            pytest.raises(CorpusError, match=r"x: its texts take at least [0-9,]{11}"),
        ):
            file.entries("x", 0, 3)

    assert in_memory(read) < BOUND


def _never_written(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 40,), TEXTS, chunks=(1 << 10,))


def _filled(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10_000,), TEXTS, chunks=(1 << 10,), fillvalue="x" * 10_000)


def _of_fixed_length(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 20,), "S1000", chunks=(1,), compression="gzip")


def _compact(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["padding"] = np.zeros(1 << 20, np.uint8)
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.COMPACT)
        kind, space = h5py.h5t.py_create(TEXTS, logical=True), h5py.h5s.create_simple((100,))
        h5py.h5d.create(file.id, b"x", kind, space, create)


@pytest.mark.parametrize("write", [_never_written, _filled, _of_fixed_length, _compact])
def test_texts_declared_but_never_written_are_refused(tmp_path, write):
    write(tmp_path / "a.h5")
    with open_h5(tmp_path / "a.h5") as file:
        before = time.monotonic()
        with pytest.raises(CorpusError, match=r"x: its texts take at least"):
            file.texts("x")
        assert time.monotonic() - before < 30


def test_nested_variable_length_values_are_refused(tmp_path):
    kinds = {
        "nested": h5py.vlen_dtype(h5py.vlen_dtype("uint8")),
        "record": np.dtype([("name", TEXTS), ("x", "f8")]),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, kind in kinds.items():
            file.create_dataset(name, (2,), dtype=kind)
    with open_h5(tmp_path / "a.h5") as file:
        for name in kinds:
            for read in (file.texts, lambda name: file.entries(name, 0, 2)):
                with pytest.raises(CorpusError, match=rf"{name}: it holds .*, expected text or"):
                    read(name)


@pytest.mark.parametrize("dtype", [TEXTS, SEQUENCES])
def test_numbers_are_read_from_numbers_only(tmp_path, dtype):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2,), dtype=dtype)
    with (
        open_h5(tmp_path / "a.h5") as file,
        pytest.raises(CorpusError, match="it holds text or values of varying length, expected"),
    ):
        file.read("x", 0, 2)


def test_attributes_of_many_references_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["padding"] = np.zeros(1 << 20, np.uint8)
        file.attrs.create("many", ["x"] * 100, dtype=TEXTS)
        file.attrs.create("some", ["x", "y"], dtype=TEXTS)
        file.attrs.update({"one": "z", "count": 3, "empty": h5py.Empty("f8"), "sizes": [1, 2]})
    with open_h5(tmp_path / "a.h5") as file:
        found = file.attributes("", ["some", "one", "count", "sizes", "lacking"])
        assert (list(found["some"]), found["one"], found["count"]) == (["x", "y"], "z", 3)
        assert isinstance(file.attributes("", ["empty"])["empty"], h5py.Empty)
        said = (
            r"a\.h5: /: its attribute 'many' cannot be read: its 100 values could take 1[0-9]{2},"
        )
        with pytest.raises(CorpusError, match=said):
            file.attributes("", ["many"])


HOW: list[dict[str, Any]] = [
    {},
    {"chunks": (5,)},
    {"chunks": (5,), "maxshape": (None,), "compression": "gzip"},
    {"chunks": (64,), "maxshape": (None,), "compression": "lzf", "shuffle": True},
]  # fmt: skip


@pytest.mark.parametrize("piece", [1, 500, 16 << 20])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("how", HOW)
def test_values_within_the_bound_are_those_of_h5py(tmp_path, monkeypatch, how, libver, piece):
    monkeypatch.setattr(h5_values, "_PIECE_BYTES", piece)
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("texts", (37,), TEXTS, **how)[:30] = WORDS[:30]
        node = file.create_dataset("numbers", (37,), SEQUENCES, **how)
        for at, word in enumerate(WORDS):
            node[at] = np.arange(len(word))
        chunks = {"chunks": (4, 2)} if how else {}
        file.create_dataset("wide", data=[[w, w + "x", ""] for w in WORDS], dtype=TEXTS, **chunks)
        file.create_dataset("bytes", data=np.array(WORDS, "S"), **how)
        file["one"], file["none"] = "hello", np.empty(0, TEXTS)
    with h5py.File(tmp_path / "a.h5") as file:
        expected = {name: file[name][...] for name in file}
    with open_h5(tmp_path / "a.h5") as file:
        reads: dict[str, Callable[[H5File], list[str]]] = {
            name: lambda file, name=name: file.texts(name)
            for name in ("texts", "wide", "bytes", "one", "none")
        }
        for name, read in reads.items():
            assert read(file) == [v.decode() for v in expected[name].reshape(-1).tolist()]
        for name in ("texts", "wide", "bytes", "numbers"):
            found = file.entries(name, 3, 33)
            assert found.shape == expected[name][3:33].shape
            for mine, theirs in zip(found, expected[name][3:33], strict=True):
                np.testing.assert_array_equal(mine, theirs)
