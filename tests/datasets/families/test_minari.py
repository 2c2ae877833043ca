"""Minari's HDF5 storage: each row against what h5py reads, and files with the family's traps."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from replaykit.datasets import Policies
from replaykit.datasets.families.minari import MINARI
from replaykit.errors import CorpusError
from tests.datasets.mutated import corpora
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted


def test_every_row_of_the_sample_of_nested_spaces(shared, quietly, monkeypatch):
    """N16: Dict and Tuple spaces, JPEG images, text, Dict actions and nested infos."""
    path, native = shared("minari_generated/dictenv/random-v0/data/main_data.hdf5"), corpora.native

    def decoded(node: h5py.Dataset) -> np.ndarray:
        if node.name.endswith("/img"):
            return np.stack([np.array(Image.open(io.BytesIO(each.tobytes()))) for each in node])
        if node.name.endswith("/txt"):
            return np.stack([np.frombuffer(each.ljust(8, b"\0"), np.uint8) for each in node])
        return native(node)

    monkeypatch.setattr(corpora, "native", decoded)
    data = quietly(path, MINARI)
    check(corpora.CORPORA["minari"], path, data.published)
    assert_ted(data.published)
    assert data[:]["observation", "img"].shape == (21, 36, 36, 3)
    assert data.episode_table["return"].tolist() == [28.0] * 3


BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}


def episode(steps: int, *, seed: int = 0, terminated: bool = False, **more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "observations": draw.normal(size=(steps + 1, 2)).astype(np.float32),
        "actions": draw.integers(0, 3, steps),
        "rewards": draw.normal(size=steps),
        "terminations": (np.arange(steps) == steps - 1) & terminated,
        "truncations": (np.arange(steps) == steps - 1) & (not terminated),
        **more,
    }


def write(root: Path, *episodes: dict[str, Any], **metadata: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    steps = [len(values["rewards"]) for values in episodes]
    with h5py.File(root / "main_data.hdf5", "w", track_order=True) as file:
        for number, values in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": steps[number]})
            group.create_group("infos")
            for key, value in values.items():
                if key.startswith("@"):
                    group.attrs[key[1:]] = value
                else:
                    group[key] = value
    said = {
        "total_episodes": len(episodes),
        "total_steps": sum(steps),
        "data_format": "hdf5",
        "observation_space": json.dumps(BOX),
        "action_space": json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}),
        **metadata,
    }
    (root / "metadata.json").write_text(json.dumps(said))
    return root / "main_data.hdf5"


def image_space(jpeg: bool) -> dict[str, Any]:
    full = np.full((32, 40, 3), 255)
    space = {"type": "Box", "dtype": "uint8", "shape": [32, 40, 3]}
    space |= {"low": (full * 0).tolist(), "high": full.tolist()}
    return {"observation_space": json.dumps(space), "jpeg_encoding": jpeg}


@pytest.mark.parametrize("form", ["vlen", "rows", "plain", "broken"])
def test_images_of_every_form_become_their_pixels(tmp_path, quietly, form):
    """Frames that compress to one length are stored as rows of bytes, others by length.

    The metadata say whether images are encoded. It is not guessed from their shape.
    """
    draw = np.random.default_rng(0)
    frames, pixels = [], []
    for _ in range(4):
        buffer = io.BytesIO()
        frame = np.full((32, 40, 3), draw.integers(0, 256, 3), np.uint8)
        Image.fromarray(frame).save(buffer, "JPEG")
        frames.append(np.frombuffer(buffer.getvalue(), np.uint8))
        pixels.append(np.array(Image.open(buffer)))
    longest = max(map(len, frames))
    stored: Any = np.stack([np.pad(frame, (0, longest - len(frame))) for frame in frames])
    if form == "plain":
        stored = np.stack(pixels)
    elif form == "broken":
        stored = np.zeros((4, 100), np.uint8)
    values = episode(3, observations=stored)
    path = write(tmp_path / "a", values, **image_space(jpeg=form != "plain"))
    if form == "vlen":
        with h5py.File(path, "a") as file:
            del file["episode_0/observations"]
            kind = h5py.vlen_dtype(np.uint8)
            node = file.create_dataset("episode_0/observations", (4,), kind)
            for at, frame in enumerate(frames):
                node[at] = frame
    if form == "broken":
        with pytest.raises(CorpusError, match=r"main_data\.hdf5: episode_0/observations, record 0"):
            quietly(path, MINARI)
        return
    data = quietly(path, MINARI)
    np.testing.assert_array_equal(data[:]["observation"], np.stack(pixels[:-1]))
    np.testing.assert_array_equal(data[:]["next", "observation"], np.stack(pixels[1:]))


@pytest.mark.parametrize(
    ("metadata", "said", "rule"),
    [
        ({"total_steps": 8}, "has 7 records, but its description says 8", "V15"),
        ({"total_episodes": 3}, "has 2 episodes, but its description says 3", "V15"),
        ({"total_steps": "seven"}, "its description says 'seven'", "V15"),
        ({"data_format": "arrow"}, "stored as 'arrow', expected 'hdf5' .*", "V04"),
        ({"observation_space": "{"}, r"a space in metadata\.json cannot be read.*", "V04"),
        ({"observation_space": '{"type": "Text"}'}, "the observation_space .*'max_length'", "V04"),
        (None, r"metadata\.json.* is not next to it", "V04"),
    ],
)
def test_metadata_that_contradicts_the_arrays(tmp_path, quietly, metadata, said, rule):
    """Totals that differ are an error, or a warning where episodes may be skipped or kept."""
    values = [episode(4), episode(3, seed=1)]
    path = write(tmp_path / "a", *values, **(metadata or {}))
    if metadata is None:
        path.with_name("metadata.json").unlink()
    with pytest.raises(CorpusError, match=rf"main_data\.hdf5: .*{said}.*{rule}"):
        quietly(path, MINARI)
    if rule == "V04":
        return
    for on_invalid in ("skip", "keep"):
        policies = Policies(on_invalid=on_invalid)
        data = quietly(path, MINARI, on_invalid, policies=policies)
        assert data.episode_table["length"].tolist() == [4, 3]
        joined = np.concatenate([one["actions"] for one in values])
        np.testing.assert_array_equal(data[:]["action"], joined)
        notes = data.published.manifest.report["warnings"]
        assert [(note["rule"], note["first"]) for note in notes] == [("V15", "main_data.hdf5")]
        assert said in notes[0]["text"]


BOUNDED = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, 0], "high": [1, 5]}


@pytest.mark.parametrize(
    ("space", "action", "outside"),
    [
        (BOUNDED, [[1, 5], [-1, 0], [0.5, 2]], []),
        (BOUNDED, [[1, 5], [-1, -0.1], [1.5, 2]], [1, 2]),
        ({"type": "Discrete", "start": 1, "n": 3}, [1, 4, 3], [1]),
        ({"type": "Discrete", "start": 1, "n": 3}, [0, 1, 3], [0]),
        ({**BOUNDED, "low": [-1]}, [[-1, -1], [-2, 5], [0, 0]], [1]),
        ({**BOUNDED, "low": [None, 0]}, [[-9, 5]] * 3, []),
        ({**BOUNDED, "low": [0, 0, 0]}, [[-9, 9]] * 3, []),
    ],
)
def test_actions_outside_of_their_space_are_reported(tmp_path, quietly, space, action, outside):
    values = episode(3, actions=np.array(action))
    path = write(tmp_path / "a", values, action_space=json.dumps(space))
    notes = quietly(path, MINARI).published.manifest.report["warnings"]
    assert [(n["rule"], n["count"], n["first"]) for n in notes] == [
        ("V25", len(outside), f"main_data.hdf5: episode_0/actions, record {at}")
        for at in outside[:1]
    ]


def test_bounds_of_parts_of_an_action(tmp_path, quietly):
    nested = {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 2}]}
    space = {"type": "Dict", "subspaces": {"a": BOUNDED, "b": nested}}
    values = episode(3)
    del values["actions"]
    values |= {"actions/a": np.full((3, 2), 7.0), "actions/b/_index_0": np.array([0, 1, 2])}
    path = write(tmp_path / "a", values, action_space=json.dumps(space))
    notes = quietly(path, MINARI).published.manifest.report["warnings"]
    assert {(note["text"].split()[0], note["count"]) for note in notes} == {
        ("actions/a", 3),
        ("actions/b/_index_0", 1),
    }
