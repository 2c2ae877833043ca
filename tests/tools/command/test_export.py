"""The command `replaykit export`, from each kind of source to each format."""

from __future__ import annotations

import h5py
import minari
import numpy as np
import pytest
import torch

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, transition
from replaykit.datasets import convert
from replaykit.datasets.families import LEROBOT, RLDS, ROBOMIMIC

zarr = pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")


def filled(storage):
    last, rb, seen = torch.arange(8) == 7, ReplayBuffer(storage=storage), []
    for number in (1, 50):
        x = torch.arange(27.0).view(9, 3) + number
        rb.extend(
            transition({"x": x[:-1]}, x[:-1, :2], x[:-1, 0], {"x": x[1:]}, last, ~last & last,
                       batch_size=8)
        )  # fmt: skip
        seen.append(x[:-1])
    return rb, torch.cat(seen).numpy()


@pytest.fixture(params=["data set", "checkpoint", "recording", "buffer"])
def source(request, tmp_path):
    """The path of 16 rows in 2 episodes, and their observations."""
    path = tmp_path / "source"
    if request.param == "recording":
        import gymnasium

        from replaykit.adapters import record

        rb = record(gymnasium.make("CartPole-v1"), None, path, episodes=2, seed=0)
        return path, rb[:]["observation"].numpy()
    if request.param == "buffer":
        return path, filled(LazyMemmapStorage(20, scratch_dir=path, recover=True))[1]
    rb, wanted = filled(LazyTensorStorage(20))
    if request.param == "checkpoint":
        rb.dumps(path)
        return path, wanted
    from replaykit.adapters import to_robomimic

    convert(to_robomimic(rb, tmp_path / "a.hdf5"), ROBOMIMIC, path)
    return path, wanted


def test_each_source_can_be_exported_to_each_format(source, command, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path, wanted = source
    targets = {form: tmp_path / form for form in ("lerobot-v3", "rlds", "robomimic", "zarr")}
    options = {"lerobot-v3": ("--fps", 10, "--task", "reach")}
    for form, target in {**targets, "minari": "me/a-v0"}.items():
        done = command("export", path, target, "--to", form, *options.get(form, ()), "--json")
        assert done.code == 0, done
        assert done.json["episodes"] == 2
        assert done.json["rows"] == len(wanted)
        assert all(found["ok"] for found in done.json["findings"])
    sets = [(LEROBOT, "lerobot-v3"), (RLDS, "rlds")]
    again = [convert(targets[form], layout, tmp_path / f"{form}-again") for layout, form in sets]
    found = [data[:]["observation"] for data in again]
    found = [
        each if isinstance(each, torch.Tensor) else next(iter(each.values())) for each in found
    ]
    assert all(np.array_equal(each.numpy(), wanted) for each in found)
    group = zarr.open_group(targets["zarr"], mode="r")["data"]
    name = "x" if "x" in group else "state"
    assert np.array_equal(group[name][:], wanted)
    with h5py.File(targets["robomimic"]) as file:
        (key,) = file["data/demo_0/obs"]
        parts = [file[f"data/demo_{number}/obs/{key}"][()] for number in range(2)]
    assert np.array_equal(np.concatenate(parts), wanted)
    episodes = [each.observations for each in minari.load_dataset("me/a-v0")]
    parts = [each["x"] if isinstance(each, dict) else each for each in episodes]
    assert np.array_equal(np.concatenate([each[:-1] for each in parts]), wanted)


def test_the_text_says_what_was_read_back(command, tmp_path):
    filled(LazyTensorStorage(20))[0].dumps(tmp_path / "a")
    done = command("export", tmp_path / "a", tmp_path / "b", "--to", "zarr")
    assert done.out == f"exported: {tmp_path}/b: 16 rows in 2 episodes, read back and equal\n"
    done = command("export", tmp_path / "a", tmp_path / "b", "--to", "zarr")
    assert (done.code, "exists" in done.err) == (6, True)
    assert command("export", tmp_path / "a", tmp_path / "b", "--to", "zarr", "--force").code == 0
    done = command("export", tmp_path / "a", tmp_path / "a/b", "--to", "zarr")
    assert (done.code, "outside of the folder" in done.err) == (3, True)


def test_data_with_an_error_is_not_exported(command, tmp_path):
    filled(LazyTensorStorage(20))[0].dumps(tmp_path / "a")
    file = max((tmp_path / "a").glob("data-*.bin"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    done = command("export", tmp_path / "a", tmp_path / "b", "--to", "zarr")
    assert done.code == 3
    assert "is not exported, because it is not valid: version 1: files" in done.err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--to", "zarr", "--fps", 3), "--fps is not an option of --to zarr"),
        (("--to", "lerobot-v3"), "--to lerobot-v3 needs --fps"),
        (("--to", "csv"), "'csv' is not one of"),
    ],
)
def test_options_of_another_format_are_refused(options, says, command, tmp_path):
    done = command("export", tmp_path, tmp_path / "b", *options)
    assert (done.code, says in done.err) == (2, True)


def test_files_that_were_not_converted_are_refused(command, tmp_path):
    (tmp_path / "a.h5").write_bytes(b"")
    done = command("export", tmp_path / "a.h5", tmp_path / "b", "--to", "zarr")
    assert (done.code, "was not converted yet" in done.err) == (3, True)
