"""Opening files of unknown origin: each is read right or refused by name."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.h5_checks import SIGNATURE, check_signature
from replaykit.errors import CorpusError
from tests.datasets.trials import write_file

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty file"),
        (POINTER, "Git LFS pointer, not the data"),
        (b"\n <!DOCTYPE html><html>", "HTML page"),
        (b"<html><body>404", "HTML page"),
        (b'<?xml version="1.0"?><Error>', "XML"),
        (b'{"error": "not found"}', "text that begins"),
        (pickle.dumps({"Trial0": [1]}), "Python pickle"),
        (pickle.dumps([1], protocol=2), "Python pickle"),
        (b"PK\x03\x04rest", "zip archive"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x93NUMPY\x01\x00", "NumPy"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"CDF\x01\x00", "NetCDF 3"),
        (b"\x0e\x03\x13\x01", "HDF4"),
        (b"\x00" * 4096, "filled with zeros"),
        (b"\xde\xad\xbe\xef", "de ad be ef"),
        (b"\x89HDF\r\n\x1a", "89 48 44 46"),
    ],
)
def test_non_hdf5_file_error_names_real_format(tmp_path, content, said):
    path = tmp_path / "seed0_trace.h5"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"\[V01\]") as caught, open_h5(path):
        pass
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert ";" in str(caught.value)
    if "pickle" in said:
        return
    # With the right checksum it need not be fetched again.
    wrong = r"wrong there.*does not help: report it to the owner"
    with pytest.raises(CorpusError, match=wrong) as caught, open_h5(path, is_verified=True):
        pass
    assert not re.search("download the file again|fetch", str(caught.value))


@pytest.mark.pitfall("DS16")
def test_pickle_is_never_loaded(tmp_path):
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (marker,))

    path = tmp_path / "trace.h5"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CorpusError, match="pickle"):
        check_signature(path)
    assert not marker.exists()


def test_missing_file_and_directory_are_named(tmp_path):
    for error, path in ((FileNotFoundError, tmp_path / "absent.h5"), (IsADirectoryError, tmp_path)):
        with pytest.raises(error, match=path.name), open_h5(path):
            pass


@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.9, 0.999, None])
@pytest.mark.parametrize("is_verified", [False, True])
def test_damaged_file_is_named(tmp_path, part, is_verified):
    """One with the right checksum need not be fetched again."""
    path = write_file(tmp_path / "a.h5", 20)
    content = path.read_bytes()
    if part is None:
        with h5py.File(path) as file:
            chunk = file["Trial0/observations"].id.get_chunk_info(0)
        at = slice(chunk.byte_offset, chunk.byte_offset + chunk.size)
        content = content[: at.start] + bytes(chunk.size) + content[at.stop :]
    else:
        content = content[: max(9, int(len(content) * part))]
    path.write_bytes(content)
    said = "damaged: its bytes match the hash that its source lists" if is_verified else "damaged"
    with (
        pytest.raises(CorpusError, match=said) as caught,
        open_h5(path, is_verified=is_verified) as file,
    ):
        file.read("Trial0/observations", 0, 20)
    assert str(path) in str(caught.value)
    assert is_verified or "cut short or damaged" in str(caught.value)


def test_file_that_another_process_is_writing_is_named(tmp_path):
    path = tmp_path / "a.h5"
    code = "import h5py, sys; f = h5py.File(sys.argv[1], 'w'); print('ready', flush=True); input()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        path.write_bytes(SIGNATURE + path.read_bytes()[8:])
        with pytest.raises(CorpusError, match="open for writing: close it"), open_h5(path):
            pass
        writer.communicate(b"\n")


def test_unknown_compression_is_named(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("e/x", data=np.arange(50), chunks=(50,), compression="gzip")
    # The number of a filter stands eight bytes before its name.
    content = bytearray(path.read_bytes())
    where = content.index(b"deflate") - 8
    assert content[where : where + 2] == b"\x01\x00"
    content[where : where + 2] = (32001).to_bytes(2, "little")
    path.write_bytes(content)
    with open_h5(path) as file, pytest.raises(CorpusError, match="hdf5plugin") as caught:
        file.read("e/x", 0, 50)
    assert f"{path}: e/x" in str(caught.value)


def test_missing_h5py_is_an_import_error_with_advice(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="pip install h5py"), open_h5(tmp_path / "a.h5"):
        pass


def test_importing_all_modules_loads_no_optional_library(run_python):
    code = (
        "import sys, pkgutil, importlib, replaykit.datasets as room\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "print({'h5py', 'huggingface_hub', 'httpx', 'filelock', 'PIL'} & set(sys.modules))"
    )
    assert run_python(code, fresh=True).stdout.strip() == "set()"


def test_dataset_blocks_equal_h5py_reads(tmp_path):
    values = np.random.default_rng(0).normal(size=(37, 3, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["e/plain"] = values
        file.create_dataset("e/chunked", data=values, chunks=(5, 2, 1), compression="gzip")
        file["e/big_endian"] = values.astype(">f4")
        file["e/flag"] = values[:, 0, 0] > 0
        file["e/narrow"] = np.zeros((37, 0))
    with h5py.File(tmp_path / "a.h5") as plain, open_h5(tmp_path / "a.h5") as file:
        for name in plain["e"]:
            for start, stop in [(0, 37), (0, 1), (4, 11), (36, 37), (7, 7)]:
                found = file.read(f"e/{name}", start, stop)
                np.testing.assert_array_equal(found, plain[f"e/{name}"][start:stop])
                assert found.dtype == plain[f"e/{name}"].dtype.newbyteorder("=")
                assert found.dtype.isnative


def test_leaves_declare_shape_dtype_and_what_is_no_number(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = np.arange(4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("e")
        group["x/y"] = np.zeros((4, 2), np.float16)
        group["text"] = ["a", "b"]
        group["fields"] = np.zeros(3, [("a", "f4"), ("b", "i4")])
        group["empty"] = h5py.Empty("f4")
        group["wide"] = np.zeros(3, np.longdouble)
        group["enum"] = np.zeros(3, h5py.enum_dtype({"a": 0, "b": 1}, "i2"))
        group["external"] = h5py.ExternalLink("other.h5", "/secret")
        group["soft"] = h5py.SoftLink("/e/x/y")
        group.create_dataset("unwritten", (4,), "f8", chunks=(2,))
        virtual = h5py.VirtualLayout((4,), "i8")
        virtual[:] = h5py.VirtualSource("other.h5", "secret", (4,))
        group.create_virtual_dataset("virtual", virtual)
    with open_h5(tmp_path / "a.h5") as file:
        found = {leaf.path: leaf for leaf in file.leaves("e")}
    assert (found["x/y"].shape, found["x/y"].dtype) == ((4, 2), np.float16)
    assert found["x/y"].problem is None
    enum = found.pop("enum")
    assert (enum.dtype, enum.problem) == (np.int16, None)
    problems = {
        "text": "text",
        "fields": "named fields",
        "empty": "no values",
        "wide": "cannot be a column",
        "external": "link out",
        "soft": "soft link, which is not followed",
        "unwritten": "never written",
        "virtual": "another file",
    }
    assert found.keys() == {"x/y", *problems}
    for name, said in problems.items():
        assert said in (found[name].problem or ""), name


def test_groups_that_contain_themselves_end_in_an_error(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("e")
        group["x"] = np.zeros(3)
        group["again"] = group
    with open_h5(path) as file, pytest.raises(CorpusError, match="nested without end") as caught:
        file.leaves("e")
    assert str(path) in str(caught.value)
