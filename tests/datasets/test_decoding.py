"""Values that are not stored as numbers, or not in one array."""

from __future__ import annotations

import sys

import h5py
import numpy as np
import pytest

from replaykit.datasets.encoded_frames import image_module
from replaykit.datasets.engine.fields import Preceded, Text
from replaykit.datasets.engine.h5 import open_h5
from replaykit.errors import CorpusError


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
