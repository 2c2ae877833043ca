"""ALOHA: one file an episode, as the recorder writes it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from replaykit.datasets.families.robohive import ALOHA, AlohaLayout
from replaykit.errors import CorpusError
from tests.datasets.mutated import corpora
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

CORPUS = corpora.CORPORA["aloha"]


def compressed(path: Path) -> np.ndarray:
    """Store images as JPEG in rows of one length, and return their pixels."""
    encoded, pixels = [], []
    for at in range(5):
        buffer = io.BytesIO()
        frame = np.full((32, 48, 3), 40 * at, np.uint8)
        Image.fromarray(frame).save(buffer, "JPEG", quality=50 + 10 * (at % 3))
        encoded.append(buffer.getvalue())
        pixels.append(np.array(Image.open(buffer)))
    longest = max(map(len, encoded)) + 5
    padded = np.stack([np.frombuffer(each.ljust(longest, b"\0"), np.uint8) for each in encoded])
    with h5py.File(path, "a") as file:
        del file["observations/images/top"]
        file["observations/images/top"] = padded
        file["compress_len"] = np.array([[len(entry) for entry in encoded]], np.float32)
        file.attrs["compress"] = True
    return np.stack(pixels)


@pytest.mark.parametrize("compress", [False, True])
def test_every_row_of_files_in_natural_order(tmp_path, quietly, monkeypatch, compress):
    paths = [tmp_path / f"files/episode_{number}.hdf5" for number in (9, 10)]
    paths[0].parent.mkdir()
    shutil.move(CORPUS.write(tmp_path), paths[0])
    shutil.copy(paths[0], paths[1])
    with h5py.File(paths[1], "a") as file:
        file["action"][0] = 7
    native, images = corpora.native, {}
    if compress:
        images = {str(path): compressed(path) for path in paths}

    def decoded(node: Any) -> np.ndarray:
        is_image = compress and node.name.endswith("/top")
        return images[node.file.filename] if is_image else native(node)

    monkeypatch.setattr(corpora, "native", decoded)
    data = quietly(tmp_path / "files", ALOHA)
    check(CORPUS, paths, data.published)
    assert_ted(data.published)
    assert data.episode_table["episode"].tolist() == [9, 10]
    said = data.published.manifest.report["files"]
    assert [entry["file"] for entry in said] == ["episode_9.hdf5", "episode_10.hdf5"]


def test_actions_of_the_record_before(tmp_path, quietly):
    """Only the actions are others, so that the first record gives no row."""
    path = CORPUS.write(tmp_path)
    with h5py.File(path) as file:
        action, base = file["action"][()], file["base_action"][()]
    plain, shifted = (
        quietly(path, layout, f"{layout.action_shift}")
        for layout in (ALOHA, AlohaLayout(action_shift=-1))
    )
    assert_ted(shifted.published)
    for key in (("qpos",), ("images", "top")):
        for root in (("observation",), ("next", "observation")):
            assert shifted[:][(*root, *key)].equal(plain[1:][(*root, *key)])
    np.testing.assert_array_equal(shifted[:]["action"], action[:3])
    np.testing.assert_array_equal(shifted[:]["info", "base_action"], base[:3])
    with pytest.raises(ValueError, match="action_shift as 0 or -1, got 1"):
        AlohaLayout(action_shift=1)


def test_image_that_is_cut_short_is_named(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    compressed(path)
    with h5py.File(path, "a") as file:
        file["observations/images/top"][2, 200:] = 0
    with pytest.raises(CorpusError, match=r"observations/images/top, record 2: is not an image"):
        quietly(path, ALOHA)


@pytest.mark.parametrize("dtype", [[("a", "f4"), ("b", "i4")], h5py.ref_dtype])
def test_objects_that_are_no_images_are_named(tmp_path, quietly, dtype):
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:
        del file["observations/images/top"]
        file.create_dataset("observations/images/top", 5, dtype)
    message = rf"{path}: observations/images/top, record 0: is not an image"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ALOHA)
