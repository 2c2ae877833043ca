"""A data set on disk is opened when it is complete, refused when it is not, and removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets import publishing
from replaykit.datasets.dataset_manifest import Manifest
from replaykit.datasets.publishing import open_published, remove_published, verify_published
from tests.datasets.trials import convert, names, never, write_source
from tests.support.refusals import refuses


@pytest.mark.pitfall("DS3")
def test_directory_without_a_manifest_is_no_data_set(tmp_path, source):
    """N7, N33: that a directory exists says nothing; its columns alone do not load either."""
    target = tmp_path / "data"
    target.mkdir()
    for _ in range(2):
        said = r"no manifest.json; convert source files into another path, or .*download=\"force\""
        with pytest.raises(RuntimeError, match=said) as caught:
            convert(target, source)
        assert str(target) in str(caught.value)
        with pytest.raises(RuntimeError, match="not a complete data set"):
            open_published(target)
        (target / "observation.memmap").write_bytes(b"mine")
    assert (target / "observation.memmap").read_bytes() == b"mine"
    assert convert(target, source, force=True).rows == 6
    assert names(target.parent) == [".data.lock", "a.h5", "data"]


def test_file_in_the_place_of_the_data_set_is_named(tmp_path, source):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(RuntimeError, match=r"data is not a complete data set: .*not a directory"):
        convert(tmp_path / "data", source)
    with pytest.raises(
        RuntimeError, match="data is not a directory, and only data sets are replaced"
    ):
        convert(tmp_path / "data", source, force=True)
    assert (tmp_path / "data").read_text() == "mine"


def edit(target: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def column(at: int = 0, **facts: Any) -> Callable[[Path], None]:
    return lambda target: edit(target, lambda m: m["arrays"][at].update(facts))


def text(content: Any) -> Callable[[Path], Any]:
    return lambda target: (target / "manifest.json").write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda t: (t / "manifest.json").unlink(), "no manifest.json"),
    "empty manifest": (text(b""), "not JSON"),
    "cut manifest": (lambda t: os.truncate(t / "manifest.json", 900), "not JSON"),
    "manifest of zeros": (text(bytes(900)), "not JSON"),
    "other JSON": (text(b"[1]"), "not the manifest of a"),
    "checkpoint": (
        text(b'{"format": "replaykit-checkpoint"}'),
        "not the manifest of a replaykit data set (format 'replaykit-checkpoint')",
    ),
    "newer version": (lambda t: edit(t, lambda m: m.update(format_version=99)), "version 99"),
    "other rows": (lambda t: edit(t, lambda m: m.update(rows=5)), "is damaged"),
    "other batch": (lambda t: edit(t, lambda m: m.update(rows=5, batch=[5])), "needs the batch"),
    "other episodes": (lambda t: edit(t, lambda m: m.update(episodes=1)), "needs 1 entries"),
    "no arrays": (lambda t: edit(t, lambda m: m.pop("arrays")), "is damaged"),
    "array of another size": (column(nbytes=1), "is damaged"),
    "unknown dtype": (column(dtype="Tensor"), "the name of a dtype"),
    "file outside": (column(file="../../a.h5"), "names a file of the data set"),
    "absolute file": (
        lambda t: edit(t, lambda m: m["group_file"].update(file="/etc/passwd")),
        "group_file",
    ),
    "missing column": (lambda t: (t / "action.memmap").unlink(), "action.memmap is missing"),
    "missing directory": (lambda t: shutil.rmtree(t / "next"), "is missing"),
    "short column": (lambda t: os.truncate(t / "next/reward.memmap", 40), "40 bytes, expected 48"),
    "long column": (lambda t: os.truncate(t / "seed.memmap", 99), "has 99 bytes, expected 48"),
    "missing episode table": (lambda t: shutil.rmtree(t / "episodes"), "is missing"),
    "short group names": (lambda t: os.truncate(t / "episodes" / "groups.txt", 3), "has 3 bytes"),
}


@pytest.mark.pitfall("DS3")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_data_set_is_refused_and_replaced_only_by_force(target, source, kind):
    """P4: never opened, never overwritten silently."""
    damage, said = DAMAGE[kind]
    damage(target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    for call in (open_published, lambda path: convert(path, get_sources=never)):
        with pytest.raises(RuntimeError, match="is not a complete data set") as caught:
            call(target)
        assert str(target) in str(caught.value)
        assert said in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert convert(target, source, force=True).rows == 6
    verify_published(target)


def test_changed_bytes_are_found_by_verification(target):
    """P4, V61: opening checks sizes; every checksum is compared on request."""
    verify_published(target)
    for name, nbytes, _ in list(open_published(target).manifest.files()):
        path = target / name
        content = path.read_bytes()
        assert len(content) == nbytes
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RuntimeError, match=rf"content of {name} has .*\[V61\]"):
            verify_published(target)
        path.write_bytes(content)
    verify_published(target)


def test_data_set_of_another_identity_is_reported(target, source):
    """P8: neither served nor overwritten."""
    with pytest.raises(RuntimeError, match=r"whose dataset_id is None, but 'x' was asked for"):
        convert(target, source, identity={"dataset_id": "x"})
    convert(target, source, identity={"dataset_id": "x", "commit": "c1"}, force=True)
    assert convert(target, source, identity={"dataset_id": "x"}).rows == 6
    with pytest.raises(RuntimeError, match=r"whose commit is 'c1', but 'c2' was asked for"):
        convert(target, source, identity={"commit": "c2"})
    edit(target, lambda m: m["identity"].update(layout_version=0))
    with pytest.raises(RuntimeError, match=r"pass force=True.*differ: layout_version$"):
        convert(target, source)


def test_link_to_a_data_set_is_followed(tmp_path, target, source):
    link = tmp_path / "link"
    link.symlink_to(target)
    assert open_published(link).rows == 6
    write_source(source, 9)
    assert convert(link, source, force=True).rows == 10
    assert link.is_symlink()
    assert open_published(target).rows == 10


@pytest.mark.pitfall("DS17")
def test_edits_are_private_to_the_process(target):
    """P9, N/E15: visible here, never on disk, not in another opening."""
    first, second = open_published(target), open_published(target)
    wanted = {key: column.clone() for key, column in first.columns.items()}
    data = first.tensordict()
    data.set_("action", torch.full_like(data["action"], 7.0))
    for column in first.columns.values():
        column.zero_()
    assert float(first.columns["action",].abs().sum()) == 0
    assert data["action"].data_ptr() == first.columns["action",].data_ptr()
    loaded = TensorDict.load_memmap(target)
    for key, column in wanted.items():
        assert torch.equal(second.columns[key], column)
        assert torch.equal(loaded[key], column)
    verify_published(target)


def test_column_larger_than_the_memory_can_be_mapped(target):
    """Mapping must not reserve memory for copies that are never made."""
    rows = 1 << 33  # 64 GiB of int64, one block of it on disk
    total = sum(array.nbytes for array in open_published(target).manifest.arrays)
    assert total < 1 << 20

    def enlarge(manifest: dict[str, Any]) -> None:
        manifest.update(rows=rows, batch=[rows])
        manifest["arrays"] = [a for a in manifest["arrays"] if a["key"] == ["seed"]]
        manifest["arrays"][0].update(shape=[rows], nbytes=rows * 8)

    edit(target, enlarge)
    os.truncate(target / "seed.memmap", rows * 8)
    column = open_published(target).columns["seed",]
    assert column.shape == (rows,)
    assert int(column[-1]) == 0
    column[-1] = 3
    assert int(column[-1]) == 3


def swap_at_first_parse(monkeypatch, swap):
    """Has another version published between the reading of a manifest and what follows."""
    real = Manifest.parse
    swapped = []

    def parse(text: bytes) -> Manifest:
        if not swapped:
            swapped.append(True)
            swap()
        return real(text)

    monkeypatch.setattr(Manifest, "parse", parse)


@pytest.mark.parametrize("vanishes", [False, True])
def test_columns_are_of_the_data_set_that_the_manifest_is_of(target, source, monkeypatch, vanishes):
    """A new version that is swapped in meanwhile is not mixed in, or opened where none is left."""
    write_source(source, 5, seed=1)
    if not vanishes:
        monkeypatch.setattr(publishing, "remove_tree", lambda path: None)
    swap_at_first_parse(monkeypatch, lambda: convert(target, source, force=True))
    found = open_published(target)
    assert found.columns["next", "reward"][0] == (101.0 if vanishes else 1.0)
    monkeypatch.undo()
    assert open_published(target).columns["next", "reward"][0] == 101.0


def test_removal_takes_only_the_data_set(target, source):
    found = open_published(target)
    (target.parent / "data_split").mkdir()
    remove_published(target)
    assert names(target.parent) == [".data.lock", "data_split"]
    assert found.columns["next", "reward"][0] == 1.0
    for call in (open_published, verify_published, remove_published):
        refuses(FileNotFoundError, "data", call, target)
        refuses(FileNotFoundError, "absent", call, source.with_name("absent"))
    assert not list(source.parent.glob("*absent*"))
