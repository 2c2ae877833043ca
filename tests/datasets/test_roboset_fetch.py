"""RoboSet from the hub to the disk: downloads, files that are refused, copies made anew."""

from __future__ import annotations

import errno
import shutil
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from replaykit.datasets import Policies, RobosetExperienceReplay
from replaykit.errors import CorpusError, DownloadError
from tests.support import Fault, lfs_pointer

REPO = "jdvakil/RoboSet_Sim"
ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


@pytest.mark.pitfall("IF9")
def test_second_construction_makes_no_request(serve, small, root, construct):
    serving = serve(*small)
    construct(root)
    asked = serving.requests
    assert len(construct(root)) == len(construct(root, download=False)) == 17
    assert serving.requests == asked


@pytest.mark.pitfall("DS5")
def test_files_outside_the_directory_of_the_id_are_ignored(
    serve, small, root, tmp_path, construct, write_file
):
    other = write_file(tmp_path / "other.h5", 9, seed=77)
    serve(
        *small,
        **{f"{ID}_extra/seed0/x.h5": other, f"{ID}.h5": other, f"{ID}/seed0/x.txt": b"words"},
    )
    assert len(construct(root)) == 17


@pytest.mark.pitfall("IF9")
def test_absent_data_set_without_download_touches_no_network(serve, small, root, construct):
    serving = serve(*small)
    with pytest.raises(FileNotFoundError, match="download=True"):
        construct(root, download=False)
    assert serving.requests == 0


@pytest.mark.pitfall("DS12")
def test_room_for_the_columns_is_looked_at_before_the_download(
    serve, small, root, construct, monkeypatch
):
    serving = serve(*small)
    total = sum(path.stat().st_size for path in small)

    def free(nbytes: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=nbytes))

    free(2 * total - 1)
    said = rf"{total:,} bytes to download, and about {total:,} bytes .* {2 * total - 1:,} bytes are"
    with pytest.raises(OSError, match=said) as caught:
        construct(root)
    assert caught.value.errno == errno.ENOSPC
    assert str(root / ID) in str(caught.value)
    assert serving.hub.bytes_served == 0
    assert not root.exists() or not list(root.rglob("*.memmap"))
    # What is asked for may be less than what the files hold.
    smaller = Policies(casts={"float64": "float32"})
    assert len(construct(root, policies=smaller)) == 17
    shutil.rmtree(root)
    # What is there already asks for nothing; how much the columns take is known then.
    assert len(construct(root)) == 17


@pytest.mark.pitfall("DS12")
def test_wrong_bytes_of_the_right_length_are_refused(serve, small, root, construct):
    serving = serve(*small)
    wrong = bytes(reversed(small[1].read_bytes()))
    serving.hub.faults.append(Fault(path="*seed1*", method="GET", body=wrong))
    with pytest.raises(DownloadError, match=r"seed1/x_trace\.h5"):
        construct(root)
    assert not (root / ID).exists()


def test_lfs_pointer_in_the_repository_is_called_one(serve, small, root, construct):
    pointer = lfs_pointer(small[0].read_bytes())
    serve(small[0], **{f"{ID}/seed1/pointer.h5": pointer})
    with pytest.raises(CorpusError, match=r"pointer\.h5.*(?i:git lfs)"):
        construct(root)
    assert not (root / ID).exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html><body>sorry</body></html>", "HTML"),
        (b"", "empty"),
        (b"\x80\x04\x95 not hdf5", "pickle"),
        (b"just some bytes that mean nothing at all", "HDF5"),
    ],
)
def test_non_h5_file_error_names_real_format(serve, small, root, content, words, construct):
    serve(small[0], **{f"{ID}/seed1/odd.h5": content})
    with pytest.raises(CorpusError, match=rf"(?s)odd\.h5.*{words}") as caught:
        construct(root)
    # The bytes are those that the Hub lists: fetching them again would change nothing.
    assert "again" not in str(caught.value).replace("downloading it again does not help", "")
    assert not (root / ID).exists()


def test_h5_file_of_another_layout_is_named_with_its_keys(serve, root, tmp_path, construct):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["data/demo_0/actions"] = np.zeros((3, 2))
    serve(path)
    with pytest.raises(CorpusError, match=r"x_trace\.h5.*data"):
        construct(root)


@pytest.mark.pitfall("DS4")
@pytest.mark.parametrize("failure", ["server", "file"])
def test_force_keeps_the_old_copy_until_the_new_one_is_complete(
    serve, small, root, tmp_path, failure, construct, write_file, served
):
    serving = serve(*small)
    old = construct(root)
    before = old[:].clone()
    if failure == "server":
        new = write_file(tmp_path / "n.h5", 8)
        serving.hub.commit(REPO, served(tmp_path, new))
        wrong = bytes(reversed(new.read_bytes()))
        serving.hub.faults.append(Fault(path="*x_trace.h5", method="GET", body=wrong))
        expected: type[Exception] = DownloadError
    else:
        serving.hub.commit(
            REPO,
            served(tmp_path, write_file(tmp_path / "n.h5", 8), *small)
            | {f"{ID}/seed9/bad.h5": b"no"},
        )
        expected = CorpusError
    with pytest.raises(expected):
        construct(root, download="force")
    again = construct(root, download=False)
    assert (again[:] == before).all()
    assert (old[:] == before).all()


def test_forced_download_takes_current_hub_files(
    serve, small, root, tmp_path, construct, write_file, served
):
    serving = serve(*small)
    old = construct(root)
    serving.hub.commit(REPO, served(tmp_path, write_file(tmp_path / "new.h5", 8)))
    assert len(construct(root)) == 17  # pinned until it is forced
    new = construct(root, download="force")
    # The commit replaced the first file: 7 rows in place of 10, beside the 7 of the second.
    assert torch.bincount(new["seed"]).tolist() == [7, 7]
    assert len(construct(root, download=False)) == 14
    assert len(old[:]) == 17  # what is open stays as it was


@pytest.mark.pitfall("DS3")
def test_foreign_directory_is_neither_opened_nor_overwritten(serve, small, root, construct):
    serve(*small)
    folder = root / ID
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("keep")
    for download in (True, False):
        with pytest.raises(RuntimeError, match=r"FK1_MicroOpenRandom.*force"):
            construct(root, download=download)
    with pytest.raises(RuntimeError, match=r"FK1_MicroOpenRandom.* holds mine\.txt"):
        construct(root, download="force")
    assert (folder / "mine.txt").read_text() == "keep"
    (folder / "mine.txt").rename(folder / "column.memmap")
    assert len(construct(root, download="force")) == 17


@pytest.mark.pitfall("DS18")
def test_two_data_sets_share_one_root(
    serve, small, root, tmp_path, monkeypatch, construct, write_file
):
    other_id = "DAPG(human)/door_v2d-v1"
    other = write_file(tmp_path / "d.h5", 5)
    serve(*small, **{f"{other_id}/seed0/d.h5": other})
    first = construct(root)
    second = RobosetExperienceReplay(other_id, batch_size=2, root=root)
    assert (len(first), len(second)) == (17, 4)
    assert second.data_path == root / other_id


def test_cache_that_may_only_be_read_is_used_all_the_same(
    serve, small, root, monkeypatch, construct
):
    serve(*small)
    construct(root)
    shutil.rmtree(root)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert len(construct(root)) == 17
