"""Values of a file come from that file alone, and no chunk of it takes more memory than is said."""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Field, convert
from replaykit.datasets.engine import h5_checks
from replaykit.datasets.engine.fields import Images, Preceded, Text
from replaykit.datasets.engine.h5 import open_h5
from replaykit.errors import CorpusError
from replaykit.inspection import opened
from tests.datasets.converted import in_memory
from tests.datasets.trials import arm_layout

SECRET = 1234.5
LAYOUT = arm_layout("arm", Field("pose", "info", before=("pose",), required=False, more=0))
Plant = Callable[[h5py.Group, str, Path], None]


def _external(*pieces: tuple[str, int, int], shape: tuple[int, ...] = (5,), **how: Any) -> Plant:
    def plant(group: h5py.Group, name: str, folder: Path) -> None:
        there = [(str(folder / file), start, size) for file, start, size in pieces]
        group.create_dataset(name, shape, "f8", external=there, **how)

    return plant


def _relative(group: h5py.Group, name: str, folder: Path) -> None:
    group.create_dataset(name, (5,), "f8", external=[("secret.bin", 0, UNLIMITED)])


def _soft_to_external(group: h5py.Group, name: str, folder: Path) -> None:
    _relative(group.file.create_group("elsewhere"), "kept", folder)
    group[name] = h5py.SoftLink("/elsewhere/kept")


def _hard_to_external(group: h5py.Group, name: str, folder: Path) -> None:
    # No link by name leads there, so that nothing but the storage tells.
    _relative(group.file.require_group("notes"), "kept", folder)
    group[name] = group.file["notes/kept"]


def _external_link(group: h5py.Group, name: str, folder: Path) -> None:
    group[name] = h5py.ExternalLink(str(folder / "other.h5"), "/secret")


def _soft_to_external_link(group: h5py.Group, name: str, folder: Path) -> None:
    group.file["way"] = h5py.ExternalLink(str(folder / "other.h5"), "/")
    group[name] = h5py.SoftLink("/way/secret")


def _virtual(group: h5py.Group, name: str, folder: Path) -> None:
    layout = h5py.VirtualLayout((5,), "f8")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "secret", (5,))
    group.create_virtual_dataset(name, layout)


def _virtual_of_external(group: h5py.Group, name: str, folder: Path) -> None:
    _relative(group.file.require_group("notes"), "kept", folder)
    layout = h5py.VirtualLayout((5,), "f8")
    layout[:] = h5py.VirtualSource(".", "notes/kept", (5,))
    group.create_virtual_dataset(name, layout)


def _forge(path: Path) -> None:
    """Writes an address into the layout of the array of 40 bytes that has none."""
    raw = bytearray(path.read_bytes())
    said = b"\x01" + b"\xff" * 8 + struct.pack("<Q", 40)
    assert raw.count(said) == 1
    at = raw.index(said)
    raw[at + 1 : at + 9] = struct.pack("<Q", 96)
    path.write_bytes(raw)


UNLIMITED = h5py.h5f.UNLIMITED
# A forged address in this file hides the list of other files, which HDF5 reads all the same.
PLANTS: dict[str, Plant] = {
    "several files": _external(("secret.bin", 0, 16), ("secret.bin", 16, 24)),
    "relative name": _relative,
    "resizable": _external(("secret.bin", 0, UNLIMITED), maxshape=(None,)),
    "pipe": _external(("pipe", 0, UNLIMITED)),
    "missing": _external(("nowhere", 0, UNLIMITED)),
    "soft link to external": _soft_to_external,
    "hard link to external": _hard_to_external,
    "external link": _external_link,
    "soft link through external link": _soft_to_external_link,
    "virtual": _virtual,
    "virtual of external": _virtual_of_external,
    "forged address": _external(("secret.bin", 0, UNLIMITED)),
    "forged address and pipe": _external(("pipe", 0, UNLIMITED)),
}
FORGED = ("forged address", "forged address and pipe")


@pytest.fixture
def folder(tmp_path: Path, no_pipe_is_waited_for: None) -> Path:
    """A folder with what a crafted file would like to read."""
    (tmp_path / "secret.bin").write_bytes(np.full(16, SECRET).tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = np.full(5, SECRET)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def _write(folder: Path, name: str, key: str) -> Path:
    (folder / "crafted").mkdir(exist_ok=True)
    path = folder / "crafted" / "runs.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        run = file.create_group("run0")
        whole: dict[str, Any] = {
            "joints": np.arange(12.0).reshape(6, 2), "torque": np.ones((5, 1)),
            "score": np.arange(5.0), "pose": np.arange(5.0),
        }  # fmt: skip
        for each, values in whole.items():
            if each != key:
                run[each] = values
        PLANTS[name](run, key, folder)
    if name in FORGED:
        _forge(path)
        if "pipe" not in name:  # the file is what it is meant to be
            with h5py.File(path) as file:
                assert file["run0"][key].id.get_offset() is not None
                assert (file["run0"][key][...] == SECRET).all()
    return path


@pytest.mark.parametrize("key", ["score", "pose"])
@pytest.mark.parametrize("plant", PLANTS)
def test_no_value_comes_from_another_file(folder, plant, key, monkeypatch, recwarn):
    path = _write(folder, plant, key)
    monkeypatch.chdir(folder)
    if key == "score":  # required
        with pytest.raises(CorpusError, match=r"score.*(link|another file|lie)"):
            convert(path, LAYOUT, folder / "data")
        assert not (folder / "data").exists()
    else:
        data = convert(path, LAYOUT, folder / "data")
        assert "pose" not in data[:]
    with opened(path) as (facts, table):
        # None of the columns and statistics is of the other file.
        for key_facts in facts.keys:
            said = key_facts.statistics or {}
            assert SECRET not in said.values()
        for name in table.columns:
            for number in range(max(1, table.episodes)):
                assert SECRET not in np.asarray(table.columns[name].episode(number, 100))


@pytest.mark.parametrize("plant", PLANTS)
def test_every_way_to_read_a_dataset_refuses(folder, plant, monkeypatch):
    path = _write(folder, plant, "score")
    monkeypatch.chdir(folder / "crafted")
    with open_h5(path) as file:
        reads: list[Callable[[], object]] = [
            lambda: file.read("run0/score", 0, 5),
            lambda: file.entries("run0/score", 0, 5),
            lambda: file.texts("run0/score"),
            lambda: file.shape("run0/score"),
            lambda: file.stripe("run0/score"),
            lambda: file.below("run0").read("score", 0, 5),
            lambda: Images((1, 1, 3)).read(file, "run0/score", 0, 1),
            lambda: Text(8).read(file, "run0/score", 0, 1),
            lambda: Preceded("run0", "run0").read(file, "run0/score", 0, 2),
        ]
        for read in reads:
            with pytest.raises(CorpusError, match=r"runs\.h5: .*score: .*\[V03\]"):
                read()
        with pytest.raises(CorpusError, match="score"), file.keeping(["run0/score"], 1 << 20):
            pass


@pytest.mark.parametrize("link", ["soft", "external"])
def test_no_group_is_reached_by_a_link(folder, link):
    path = _write(folder, "relative name", "score")
    with h5py.File(path, "a") as file:
        target = h5py.SoftLink("/run0") if link == "soft" else h5py.ExternalLink("other.h5", "/")
        file["way"] = target
    with open_h5(path) as file:
        for read in (
            lambda: list(file.members("way")),
            lambda: file.leaves("way"),
            lambda: file.attributes("way", ["x"]),
            lambda: file.read("way/torque", 0, 5),
            lambda: file.read("way/secret", 0, 5),
            lambda: file.below("way"),
        ):
            with pytest.raises(CorpusError, match="link"):
                read()


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_external_storage_without_values_is_refused_too(folder, shape):
    with h5py.File(folder / "a.h5", "w") as file:
        _external(("secret.bin", 0, UNLIMITED), shape=shape)(file, "x", folder)
    with open_h5(folder / "a.h5") as file:
        [leaf] = file.leaves("")
    assert leaf.problem == h5_checks.EXTERNAL


def _bomb(path: Path, rows: int, chunk: int, stored: bytes, **how: Any) -> None:
    with h5py.File(path, "w") as file:
        node = file.create_dataset("x", (rows,), "u1", chunks=(chunk,), maxshape=(None,), **how)
        node.id.write_direct_chunk((0,), stored)


@functools.cache
def _deflated(nbytes: int, times: int = 1) -> bytes:
    stream = zlib.compressobj(9)
    piece = bytes(1 << 20)
    content = b"".join(stream.compress(piece) for _ in range(nbytes >> 20)) + stream.flush()
    for _ in range(times - 1):
        content = zlib.compress(content, 9)
    return content


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("fletcher32", [False, True])
@pytest.mark.parametrize("rows", [1000, 1 << 20])
def test_a_chunk_that_inflates_beyond_the_bound_is_refused(
    tmp_path, monkeypatch, shuffle, fletcher32, rows
):
    monkeypatch.setattr(h5_checks, "MOST_CHUNK_BYTES", 32 << 20)
    content = _deflated(256 << 20) + bytes(4 * fletcher32)
    _bomb(tmp_path / "a.h5", rows, 1 << 20, content, shuffle=shuffle, compression=9,
          fletcher32=fletcher32)  # fmt: skip

    def read() -> None:
        with (
            open_h5(tmp_path / "a.h5") as file,
            pytest.raises(CorpusError, match=r"x: the chunk at \[0\] may inflate to more"),
        ):
            file.read("x", 0, rows)

    assert in_memory(read) < 64 << 20


def test_doubly_compressed_chunk_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(h5_checks, "MOST_CHUNK_BYTES", 32 << 20)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_chunk((1 << 20,))
    create.set_deflate(9)
    create.set_deflate(9)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((1000,), (h5py.h5s.UNLIMITED,))
        node = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_UINT8, space, create)
        node.write_direct_chunk((0,), _deflated(256 << 20, times=2))
    with (
        open_h5(tmp_path / "a.h5") as file,
        pytest.raises(CorpusError, match="may inflate to more"),
    ):
        file.read("x", 0, 1000)


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
def test_a_chunk_declared_beyond_the_bound_is_no_column(tmp_path, compression):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "x", (10,), "u1", chunks=((1 << 30) + 1,), maxshape=(None,), compression=compression
        )
    with open_h5(tmp_path / "a.h5") as file:
        [leaf] = file.leaves("")
        assert "1,073,741,825 bytes each" in str(leaf.problem)
        assert "h5repack" in str(leaf.problem)
        with pytest.raises(CorpusError, match="h5repack"):
            file.read("x", 0, 10)


@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
@pytest.mark.parametrize("compression", ["gzip", "lzf"])
@pytest.mark.parametrize("by_hdf5", [False, True])
def test_large_chunks_within_the_bound_are_read(tmp_path, monkeypatch, dtype, compression, by_hdf5):
    if by_hdf5:
        monkeypatch.setattr("replaykit.datasets.engine.h5.inflate", lambda *_: False)
    # So small a bound that every chunk has to be looked at.
    monkeypatch.setattr(h5_checks, "MOST_CHUNK_BYTES", 90 * 900_000)
    values = np.random.default_rng(0).normal(size=(5, 100_000)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, 100_000), compression=compression)
    with open_h5(tmp_path / "a.h5") as file:
        for start, stop in ((0, 2), (1, 5), (0, 5)):
            np.testing.assert_array_equal(file.read("x", start, stop), values[start:stop])
