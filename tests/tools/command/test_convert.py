"""``convert`` against h5py, with its policies; ``inspect`` and ``validate`` of what it made."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from typing import get_args, get_type_hints

import h5py
import numpy as np
import pytest
import torch

import replaykit.datasets
from replaykit import LazyTensorStorage, ReplayBuffer, transition
from replaykit.adapters import to_rlds
from replaykit.datasets import Policies
from tests.datasets.families import test_minari_arrow, test_rlds, test_zarr
from tests.support import LoopbackHub
from tests.tools.test_layouts import OWN


@pytest.mark.parametrize("layout", [[], ["--layout", "robomimic"]])
def test_a_file_is_converted_and_described(command, demos, tmp_path, layout):
    guess = None if layout else command("inspect", demos, "--json").json["guess"]
    told = command("convert", demos, "--to", tmp_path / "data", *layout)
    assert told.code == 0
    assert "12 rows in 3 episodes" in told.out
    start = "" if layout else "layout robomimic: 3 episodes at the paths of the layout"
    assert told.err.startswith(start)
    assert told.err.count("\n") == (not layout)
    done = command("convert", demos, "--to", tmp_path / "again", *layout, "--json")
    assert (done.code, done.err) == (0, "")
    data = replaykit.datasets.open(tmp_path / "again")
    assert done.json == {
        "name": None,
        "path": str(tmp_path / "again"),
        "layout": "robomimic",
        "rows": 12,
        "episodes": 3,
        "bytes": sum(size for _, size, _ in data.published.manifest.files()),
        "content": data.published.manifest.content_id(),
        "warnings": [],
        "guess": guess and {"layout": "robomimic", "reasons": guess["reasons"]},
    }
    with h5py.File(demos) as file:
        action = np.concatenate([file[f"data/demo_{i}/actions"][...] for i in range(3)])
    np.testing.assert_array_equal(data[:]["action"], action)


def test_skipped_episodes_are_warnings_of_the_json(command, demos, tmp_path):
    with h5py.File(demos, "r+") as file:
        file["data/demo_2/actions"][1] = np.nan
    options = ("--on-invalid", "skip", "--workers", 2, "--json")
    done = command("convert", demos, "--to", tmp_path / "data", *options)
    assert (done.code, done.json["rows"]) == (0, 8)
    assert any("demo_2" in text and "[V20]" in text for text in done.json["warnings"])


def test_convert_reads_a_folder_with_a_custom_layout(command, tmp_path):
    (tmp_path / "own.py").write_text(f"print('loaded')\n{OWN}")
    (tmp_path / "files").mkdir()
    for name in ("b", "a"):
        with h5py.File(tmp_path / "files" / f"{name}.h5", "w") as file:
            file["run1/joints"], file["run1/torque"] = np.eye(4), np.ones((4, 1))
    layout, target = f"{tmp_path}/own.py:ARM", tmp_path / "data"
    done = command("convert", tmp_path / "files", "--layout", layout, "--to", target, "--json")
    assert (done.code, done.err) == (0, "loaded\n")  # what it prints is not in the JSON
    assert (done.json["rows"], done.json["episodes"], done.json["layout"]) == (6, 2, "arm")
    # A second call opens what is there.
    again = command("convert", tmp_path / "files", "--layout", layout, "--to", target, "--json")
    assert again.json["content"] == done.json["content"]


def test_a_name_that_is_not_utf8_is_refused_by_name(command, demos, tmp_path):
    named = os.path.join(os.fsencode(tmp_path), b"n\xff.h5")
    try:
        shutil.copy(demos, named)
    except OSError:
        pytest.skip("the file system has no such names")
    made = ["--layout", "robomimic", "--to", tmp_path / "data", "--json"]
    done = command("convert", os.fsdecode(named), *made)
    assert done.code == 3
    expected = r"expected names of files in UTF-8, got b'n\xff.h5'"
    assert done.json["error"]["message"] == expected


@pytest.mark.parametrize("arguments", [[], ["--layout", "robomimic"]])
def test_urls_are_fetched(command, demos, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "kept"))
    local = command("convert", demos, "--to", tmp_path / "local", "--json").json
    with LoopbackHub({"lab/files": {"demo.hdf5": demos}}) as served:
        url = f"{served.url}/datasets/lab/files/resolve/main/demo.hdf5"
        done = command("convert", url, "--to", tmp_path / "data", "--json", *arguments)
        bodies = [each for each in served.requests if each.method == "GET"]
    assert done.code == 0, done.out
    assert (done.json["layout"], done.json["rows"]) == ("robomimic", 12)
    assert len(bodies) == 1  # the guess has what it fetched
    assert done.json["bytes"] > 0
    manifest = replaykit.datasets.open(tmp_path / "data").published.manifest
    assert manifest.source["origin"] == {"kind": "http", "urls": [url]}
    ours = replaykit.datasets.open(local["path"])[:]
    assert (replaykit.datasets.open(tmp_path / "data")[:] == ours).all()
    done = command("convert", f"file://{demos}", "--to", tmp_path / "third", "--json", *arguments)
    assert (done.code, done.json["rows"]) == (0, 12)


def test_unreachable_url_is_named(command, tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAYKIT_DOWNLOADS", str(tmp_path / "kept"))
    with LoopbackHub({}) as served:
        url = f"{served.url}/datasets/lab/files/resolve/main/demo.hdf5"
        for arguments in ([], ["--layout", "robomimic"]):
            done = command("convert", url, "--to", tmp_path / "data", *arguments)
            assert (done.code, done.err.count("\n")) == (4, 1)
            assert url in done.err


@pytest.mark.parametrize("name", ["convert", "download"])
def test_every_policy_is_an_option_with_the_same_choices(command, name):
    options = command(name, "--help").out.partition("Options:")[2]
    shown = " ".join(options.split())
    types = get_type_hints(Policies)
    for field in dataclasses.fields(Policies):
        option = {"casts": "--cast"}.get(field.name, f"--{field.name.replace('_', '-')}")
        (words,) = re.findall(rf"(?<= {option} )[^ ].*?(?= --)", shown)
        if field.name in ("casts", "include", "exclude"):
            assert words.split()[0] in ("A=B", "KEY")
        elif types[field.name] is not bool:
            choices, _, about = words.partition(" ")
            assert choices.strip("[]").split("|") == list(get_args(types[field.name]))
            assert about.endswith(f"[default: {field.default}]")


def test_every_option_becomes_its_policy(command, monkeypatch, tmp_path):
    asked = []

    def noting(*_: object, policies: Policies, **__: object) -> None:
        asked.append(policies)
        raise ValueError("that will do")

    monkeypatch.setattr("replaykit.datasets.convert", noting)
    base = ["convert", "a.h5", "--layout", "d4rl", "--to", tmp_path]
    arguments, other = [], {}
    for field in dataclasses.fields(Policies):
        if isinstance(field.default, str):
            choices = get_args(get_type_hints(Policies)[field.name])
            other[field.name] = next(each for each in choices if each != field.default)
            arguments += [f"--{field.name.replace('_', '-')}", other[field.name]]
    arguments += ["--strict", "--cast", "float64=float32", "--cast", "int64=int32"]
    arguments += ["--include", "a/b", "--include", "c", "--exclude", "a/b/d"]
    assert command(*base).code == command(*base, *arguments).code == 3
    assert asked == [
        Policies(),
        Policies(
            **other, strict=True, casts={"float64": "float32", "int64": "int32"},
            include=[("a", "b"), "c"], exclude=[("a", "b", "d")],
        ),
    ]  # fmt: skip


def test_convert_overwrites_a_data_set_only_with_force(command, demos, write_robomimic, tmp_path):
    target = tmp_path / "data"
    command("convert", demos, "--to", target)
    other = write_robomimic(tmp_path / "other.hdf5", (7, 2))
    done = command("convert", other, "--to", target)
    assert done.code == 3
    assert "asked for" in done.err
    assert "--force" in done.err
    assert len(replaykit.datasets.open(target)) == 12
    assert command("convert", other, "--to", target, "--force").code == 0
    assert len(replaykit.datasets.open(target)) == 9


def test_inspect_gives_the_same_facts_as_text_and_json(command, demos):
    done = command("inspect", demos, "--episodes", 2)
    assert (done.code, done.err) == (0, "")
    with h5py.File(demos) as file:
        actions = np.concatenate([file[f"data/demo_{i}/actions"][...] for i in range(3)])
        returns = [file[f"data/demo_{i}/rewards"][...].sum() for i in range(3)]
    (line,) = [line for line in done.out.splitlines() if line.startswith("data/demo_*/actions")]
    assert line.split()[1:] == [
        "float64", "3", "12", f"{actions.min():.4g}", f"{actions.mean():.4g}",
        f"{actions.max():.4g}", f"{actions.std():.4g}", "0",
    ]  # fmt: skip
    assert "3 episodes: 2 terminated, 1 truncated" in done.out
    assert "... 1 more" in done.out
    found = command("inspect", demos, "--json", "--episodes", 2).json
    assert found.keys() == {
        "kind", "path", "rows", "nbytes", "about", "keys", "warnings", "guess", "episodes", "html",
    }  # fmt: skip
    (key,) = [key for key in found["keys"] if key["key"] == "data/demo_*/actions"]
    assert key["statistics"]["max"] == actions.max()
    first = found["episodes"]["first"]
    assert [each["length"] for each in first] == [5, 3]
    np.testing.assert_allclose([each["return"] for each in first], returns[:2])
    assert found["guess"]["layout"] == "robomimic"


def test_inspect_writes_a_page(command, demos, tmp_path):
    done = command("inspect", demos, "--html", tmp_path / "page.html")
    assert done.code == 0
    assert done.out.rstrip().endswith(f"page: {tmp_path}/page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    done = command("inspect", demos, "--html", tmp_path / "absent" / "page.html", "--json")
    assert done.code in (4, 6)
    assert "page cannot be written" in done.json["error"]["message"]


def test_control_characters_of_a_name_are_escaped(command, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["[red]bold[/red]\x1b[31m\nreplaykit: all right"] = np.arange(3)
    done = command("inspect", tmp_path / "x.h5")
    assert "\x1b[31m" not in done.out
    assert "[red]bold[/red]\\x1b[31m\\nreplaykit: all right" in done.out


def test_validate_gives_the_verdict_as_its_exit_code(command, demos, tmp_path):
    target = tmp_path / "data"
    command("convert", demos, "--to", target)
    done = command("validate", target)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"{target}: all right"
    file = target / "action.memmap"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = command("validate", target)
    assert done.code == 1
    assert "action.memmap (288 bytes) does not match its checksum" in done.out
    assert done.out.splitlines()[-1] == f"{target}: 1 wrong"
    found = command("validate", target, "--json")
    assert found.code == 1
    assert found.json["ok"] is False
    bad = [each for each in found.json["findings"] if not each["ok"]]
    assert [(each["check"], each["is_warning"]) for each in bad] == [("checksums", False)]


def test_checkpoints_are_inspected_and_validated(command, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    import torch

    rb.extend(torch.arange(4.0))
    rb.dumps(tmp_path / "saved")
    assert command("inspect", tmp_path / "saved", "--json").json["rows"] == 4
    assert command("validate", tmp_path / "saved").code == 0
    (file,) = (tmp_path / "saved").glob("data-*.bin")
    file.unlink()
    done = command("validate", tmp_path / "saved")
    assert done.code == 1
    assert f"{file} is missing" in done.out
    assert command("inspect", tmp_path / "saved").code == 3


SETS = {
    "zarr": (test_zarr.write, 20, "3 episodes of layout zarr without a fault"),
    "zarr.zip": (test_zarr.write, 20, "3 episodes of layout zarr without a fault"),
    "minari-arrow": (
        lambda path: test_minari_arrow.write(path, "arrow"), 14,
        "3 episodes of layout minari-arrow without a fault",
    ),
    "rlds": (test_rlds.write, 14, "3 episodes of layout rlds without a fault, and 1 without rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_folders_and_archives_are_recognized(name, command, tmp_path):
    write, rows, says = SETS[name]
    layout = name.removesuffix(".zip")
    path = tmp_path / f"set{name.removeprefix(layout)}"
    write(path)
    done = command("validate", path)
    assert (done.code, says in done.out) == (0, True), done
    done = command("inspect", path)
    assert (done.code, f"{rows} rows" in done.out, f"layout: {layout}" in done.out) == (
        0,
        True,
        True,
    )
    for number, options in enumerate(((), ("--layout", layout))):
        done = command("convert", path, "--to", tmp_path / f"{number}", *options, "--json")
        assert (done.code, f'"rows": {rows}' in done.out) == (0, True), done
    other = "zarr" if layout == "rlds" else "rlds"
    done = command("convert", path, "--to", tmp_path / "other", "--layout", other)
    assert (done.code, "[V04]" in done.err) == (3, True), done
    assert not (tmp_path / "other").exists()


def test_a_fault_of_a_table_is_counted_once(command, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(9))
    x, ends = torch.arange(12.0).view(6, 2), torch.tensor([False, False, True] * 2)
    x[1, 0] = torch.nan
    rb.extend(transition(x, x, x[:, 0] * 0, x.roll(-1, 0), ends, ends & False, batch_size=6))
    path = to_rlds(rb, tmp_path / "reach/1.0.0")
    done = command("validate", path)
    assert done.code == 1
    assert "[V21]" in done.out
    assert "ok     episodes  1 episode of layout rlds without a fault" in done.out
    assert "1 wrong" in done.out
    assert "texts:" not in command("inspect", path).out  # it has none
