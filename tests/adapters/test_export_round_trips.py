"""Round trips of buffers of all kinds through each exporter and replaykit's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    Shift,
    transition,
)
from replaykit.adapters import to_lerobot, to_minari, to_rlds, to_robomimic, to_zarr
from replaykit.adapters.exporting import unbounded_spaces
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import LEROBOT, LEROBOT_PIXELS, MINARI, RLDS, ROBOMIMIC, ZARR
from replaykit.testing import make_lerobot

pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")


def minari(rb: Any, path: Path) -> Path:
    to_minari(rb, "a-v0", **unbounded_spaces(rb))
    return path.parent / "a-v0"


FORMS = {
    "lerobot": (lambda rb, path: to_lerobot(rb, path, fps=10), LEROBOT),
    "zarr": (to_zarr, ZARR),
    "robomimic": (to_robomimic, ROBOMIMIC),
    "minari": (minari, MINARI),
    "rlds": (to_rlds, RLDS),
}


def episode(length: int, random: np.random.Generator, *, is_open: bool = False) -> TensorDict:
    def some(*shape: int, dtype: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy((random.normal(size=(length + 1, *shape)) * 50).astype(dtype))

    deep = {"er": {"x": some(1, dtype=np.int64)}}
    parts = {"state": some(3), "grid": some(2, 3, dtype=np.float64), "deep": deep}
    parts |= {"count": some(2, dtype=np.int16), "flags": some(4) > 0, "half": some(2).half()}
    parts["image"] = torch.randint(0, 256, (length + 1, 4, 6, 3), dtype=torch.uint8)
    whole = TensorDict(parts, [length + 1])
    last = (torch.arange(length) == length - 1) & (not is_open)
    ends = last & (length % 2 == 0), last & (length % 2 == 1)
    return transition(whole[:-1], some(2)[:-1], some()[:-1], whole[1:], *ends, batch_size=length)


def buffer(kind: str, folder: Path) -> ReplayBuffer[Any, Any, Any, Any]:
    """Return a buffer whose last episode is open."""
    random = np.random.default_rng(0)
    storages = {
        "many": lambda: LazyTensorStorage(3_000),
        "ring": lambda: LazyTensorStorage(37),
        "deduplicated ring": lambda: LazyTensorStorage(37, dedup_next=True),
        "recoverable": lambda: LazyMemmapStorage(99, scratch_dir=folder / "r", recover=True),
    }
    if kind in storages:
        rb = ReplayBuffer(storage=storages[kind]())
        for number in range(count := 300 if kind == "many" else 20):
            length = int(random.integers(1, 5))
            rb.extend(episode(length, random, is_open=number == count - 1))
        return rb
    lanes = [torch.cat([episode(length, random) for length in (3, 4, 5)]) for _ in range(3)]
    if kind == "lanes of a ring":
        rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2))
        rb.extend(torch.stack(lanes))
        return rb
    rb = ReplayBuffer(storage=LazyTensorStorage(30, lane_key="env"), writer=LaneWriter(10))
    for step in range(11):
        rows = torch.stack([lane[step] for lane in lanes])
        rb.extend(rows.set("env", torch.arange(3)))
    return rb


@pytest.mark.filterwarnings("ignore:.*float16")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("many", form) for form in FORMS),
        *((kind, "robomimic") for kind in ("ring", "deduplicated ring", "lanes of a ring")),
        *((kind, "zarr") for kind in ("deduplicated ring", "recoverable", "lanes")),
    ],
)
def test_every_value_of_a_buffer_comes_back(kind, form, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rb = buffer(kind, tmp_path)
    export, layout = FORMS[form]
    data = convert(export(rb, tmp_path / "a"), layout, tmp_path / "data")
    assert data.episodes.lengths.tolist() == rb.episodes.lengths.tolist()
    wanted = torch.cat(
        [each.rows().select("observation", "action", "next") for each in rb.episodes]
    )
    last = torch.zeros(len(wanted), 1, dtype=torch.bool)
    last[rb.episodes.lengths.cumsum(0) - 1] = True
    found = data[:]
    for path in wanted.keys(True, True):
        key = path if isinstance(path, tuple) else (path,)
        if form in ("lerobot", "zarr") and key[:2] == ("next", "observation"):
            continue
        at = key.index("observation") + 1 if "observation" in key else len(key)
        is_flat = form == "robomimic" and at < len(key)
        value = found[(*key[:at], "_".join(key[at:])) if is_flat else key]
        expected = wanted[key]
        if key[-1] in ("truncated", "done"):  # an open episode ends with the data
            expected = expected | (last & ~wanted["next", "terminated"])
        assert value.dtype == expected.dtype
        assert value.reshape(expected.shape).numpy().tobytes() == expected.numpy().tobytes(), key


@pytest.mark.parametrize("layout", [LEROBOT, LEROBOT_PIXELS], ids=lambda each: each.video)
def test_shift_adds_next_observations_to_frames(layout, tmp_path):
    make_lerobot(tmp_path / "set", lengths=[5, 7])
    convert(tmp_path / "set", layout, tmp_path / "data")
    keys = ("observation", "state"), ("observation", "images", "top")
    shifts = [Shift(key, 1, out=("next", *key)) for key in keys]
    data = CorpusExperienceReplay(tmp_path / "data", 64, transform=Compose(*shifts))
    plain = convert(tmp_path / "set", LEROBOT_PIXELS, tmp_path / "pixels")[:]
    batch = data.sample()
    assert set(batch["index"].tolist()) == {*range(4), *range(5, 11)}
    for key in keys:
        assert batch[("next", *key)].equal(plain[key][batch["index"] + 1])
