"""Images that show nothing: black ones, and a camera that stands still (rule V26)."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest

from replaykit.datasets import STEPS, Field, Groups, Layout, Segments
from replaykit.datasets.converting import local_sources
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset

FIELDS = (
    Field("image", "observation", ("observation",), ("next", "observation")),
    Field("action", "action", before=("action",)),
    Field("end", "truncated"),
)
GROUPED = Layout(
    name="cameras", version=1, episodes=Groups("run", having=("action",)), alignment=STEPS,
    clock="action", fields=FIELDS,
)  # fmt: skip
FLAT = Layout(
    name="flat", version=1, episodes=Segments(), alignment=STEPS, clock="action", fields=FIELDS
)


def frames(kind: str, count: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).integers(1, 256, (count, 4, 5, 3), np.uint8)
    if kind in ("black", "still"):
        found[:] = 0 if kind == "black" else found[0]
    if kind in ("black at first", "still at first"):
        found[:-1] = 0 if kind == "black at first" else found[0]
    return found


@pytest.mark.parametrize("block_bytes", [1, 130, 1 << 20])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (["fine", "black at first", "still at first"], {}),
        (["fine", "black", "fine", "black"], {"black images": (2, 1)}),
        (["still", "black", "still"], {"the same image": (2, 0), "black images": (1, 1)}),
    ],
)
def test_images_that_show_nothing_are_reported(tmp_path, kinds, said, is_flat, block_bytes):
    images = [frames(kind, 4 + k, k) for k, kind in enumerate(kinds)]
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        episodes = [np.concatenate(images)] if is_flat else images
        for k, image in enumerate(episodes):
            group = file if is_flat else file.create_group(f"run{k}")
            group["image"], group["action"] = image, np.ones((len(image), 1))
            ends = np.cumsum([len(each) for each in images]) - 1 if is_flat else [len(image) - 1]
            group["end"] = np.isin(np.arange(len(image)), ends)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = ensure_dataset(
            tmp_path / "data",
            get_sources=lambda: local_sources(path),
            layout=FLAT if is_flat else GROUPED,
            options=ConvertOptions(block_bytes=block_bytes),
        )
    starts = np.cumsum([0, *(len(image) for image in images)])
    wanted = {}
    for what, (count, first) in said.items():
        place = f"a.h5: image, record {starts[first]}" if is_flat else f"a.h5: run{first}/image"
        wanted[f"image holds nothing but {what} throughout an episode"] = (count, place)
    notes = [note for note in found.manifest.report["warnings"] if note["rule"] == "V26"]
    assert {note["text"]: (note["count"], note["first"]) for note in notes} == wanted
