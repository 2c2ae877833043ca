"""What the scan reads on its way is what is written, and is not opened again."""

from __future__ import annotations

import pickle

import h5py
import numpy as np
import pytest

from replaykit.datasets.engine import scan
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.h5_values import HeldValues
from replaykit.errors import CorpusError
from tests.datasets.trials import convert, write_file

NAMES = ("g/little", "g/deep/one", "g/wide", "g/packed")


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
