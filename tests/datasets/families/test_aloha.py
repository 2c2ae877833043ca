"""ALOHA: one file an episode, as the recorder writes it."""

from __future__ import annotations

import io
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


def write(root: Path, number: int, steps: int, *, compress: bool = False) -> dict[str, Any]:
    """Writes an episode and returns its arrays, images as pixels."""
    draw = np.random.default_rng(number)
    shape = (steps, 14)
    arrays: dict[str, Any] = {
        name: draw.normal(size=shape).astype(np.float32) for name in ("qpos", "qvel", "action")
    }
    frames = [np.full((32, 48, 3), draw.integers(0, 256, 3), np.uint8) for _ in range(steps)]
    with h5py.File(root / f"episode_{number}.hdf5", "w") as file:
        file.attrs.update({"sim": True, "compress": compress})
        file["action"] = arrays["action"]
        file["base_action"] = arrays["action"][:, :2]
        file["observations/qpos"], file["observations/qvel"] = arrays["qpos"], arrays["qvel"]
        if compress:
            encoded, frames = [], [*frames]
            for at, frame in enumerate(frames):
                buffer = io.BytesIO()
                Image.fromarray(frame).save(buffer, "JPEG", quality=50 + 10 * (at % 3))
                encoded.append(buffer.getvalue())
                frames[at] = np.array(Image.open(buffer))
            longest = max(map(len, encoded))
            padded = np.zeros((steps, longest + 5), np.uint8)
            for at, entry in enumerate(encoded):
                padded[at, : len(entry)] = np.frombuffer(entry, np.uint8)
            file["observations/images/top"] = padded
            file["compress_len"] = np.array([[len(entry) for entry in encoded]], np.float32)
        else:
            file["observations/images/top"] = np.stack(frames)
        file["observations/images/top_depth"] = np.arange(steps * 6, dtype="u2").reshape(
            steps, 2, 3
        )
    arrays["images"] = np.stack(frames)
    return arrays


@pytest.mark.parametrize("compress", [False, True])
def test_every_row_of_files_in_natural_order(tmp_path, quietly, monkeypatch, compress):
    (tmp_path / "files").mkdir()
    paths = [tmp_path / f"files/episode_{number}.hdf5" for number in (9, 10)]
    files = [
        write(path.parent, k, 4 + k % 3, compress=compress)
        for path, k in zip(paths, (9, 10), strict=True)
    ]
    data = quietly(tmp_path / "files", ALOHA)
    images = {str(path): arrays["images"] for path, arrays in zip(paths, files, strict=True)}
    native = corpora.native

    def decoded(node: Any) -> np.ndarray:
        return images[node.file.filename] if node.name.endswith("/top") else native(node)

    monkeypatch.setattr(corpora, "native", decoded)
    check(corpora.CORPORA["aloha"], paths, data.published)
    assert_ted(data.published)
    assert data.episode_table["episode"].tolist() == [9, 10]
    said = data.published.manifest.report["files"]
    assert [entry["file"] for entry in said] == ["episode_9.hdf5", "episode_10.hdf5"]


def test_actions_of_the_record_before(tmp_path, quietly):
    """Only the actions are others, so that the first record gives no row."""
    (tmp_path / "files").mkdir()
    arrays = write(tmp_path / "files", 0, 6)
    plain, shifted = (
        quietly(tmp_path / "files", layout, f"{layout.action_shift}")
        for layout in (ALOHA, AlohaLayout(action_shift=-1))
    )
    assert_ted(shifted.published)
    for key in ("qpos", "qvel", ("images", "top"), ("images", "top_depth")):
        for root in (("observation",), ("next", "observation")):
            at = (*root, *([key] if isinstance(key, str) else key))
            assert shifted[:][at].equal(plain[1:][at])
    np.testing.assert_array_equal(shifted[:]["action"], arrays["action"][:4])
    np.testing.assert_array_equal(shifted[:]["info", "base_action"], arrays["action"][:4, :2])
    with pytest.raises(ValueError, match="action_shift as 0 or -1, got 1"):
        AlohaLayout(action_shift=1)


def test_image_that_is_cut_short_is_named(tmp_path, quietly):
    write(tmp_path, 0, 4, compress=True)
    path = tmp_path / "episode_0.hdf5"
    with h5py.File(path, "a") as file:
        file["observations/images/top"][2, 200:] = 0
    with pytest.raises(CorpusError, match=r"observations/images/top, record 2: is not an image"):
        quietly(path, ALOHA)
