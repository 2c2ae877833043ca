"""RoboSet as a user meets it: the constructor, the list of data sets, rows and trajectories."""

from __future__ import annotations

import errno
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import ImmutableDatasetWriter, LazyMemmapStorage, ReplayBuffer, TensorStorage
from replaykit.datasets import Policies, RobosetExperienceReplay
from replaykit.errors import CorpusError, DownloadError
from replaykit.transforms import ExcludeTransform
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import ROBOSET_ID as ID
from tests.datasets.trials import ROBOSET_REPO as REPO
from tests.datasets.trials import assert_ted, construct, served, write_file
from tests.support import Fault


def test_there_are_twenty_data_sets_in_their_groups():
    ids = RobosetExperienceReplay.available_datasets
    groups: dict[str, int] = {}
    for dataset_id in ids:
        group = dataset_id.rsplit("/", 1)[0]
        groups[group] = groups.get(group, 0) + 1
    assert len(set(ids)) == len(ids) == 20
    assert groups == {
        "DAPG(expert)": 4,
        "DAPG(human)": 4,
        "FK1-v4(expert)": 5,
        "FK1-v4(human)": 1,
        "FK1-v4(human)/human_demos_by_task": 6,
    }


@pytest.mark.pitfall("DS14")
@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("sampeler", None, TypeError),
        ("storage", None, TypeError),
        ("batch_size", 0, ValueError),
        ("prefetch", -1, ValueError),
        ("sampler", 3, TypeError),
        ("transform", 3, RuntimeError),
        ("generator", 7, TypeError),
        # What is equal to False is not False: it must not be taken for leave to use the network.
        *[
            ("download", value, ValueError)
            for value in (0, 1, 0.0, np.int64(0), "True", "FORCE", None, [], torch.zeros(()))
        ],
    ],
)
def test_bad_argument_is_refused_before_anything_is_fetched(
    serve, small, root, option, value, error
):
    serving = serve(*small)
    with pytest.raises(error, match=option if value is None and error is TypeError else None):
        construct(root, **{option: value})
    assert serving.requests == 0
    assert not root.exists()


def test_default_root_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\.cache/replaykit/roboset/FK1-v4"):
        RobosetExperienceReplay(ID, batch_size=4, download=False)
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("module", ["h5py", "huggingface_hub"])
def test_missing_library_is_named_at_construction_only(serve, small, root, monkeypatch, module):
    serve(*small)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        construct(root)
    assert not (root / ID).exists()


def test_download_takes_the_bools_of_numpy(serve, small, root):
    serving = serve(*small)
    with pytest.raises(FileNotFoundError, match="download=True"):
        construct(root, download=np.False_)
    assert serving.requests == 0
    assert construct(root, download=np.True_).download is True


@pytest.mark.pitfall("DS2")
@pytest.mark.pitfall("BD2")
def test_every_value_of_written_files_is_that_of_h5py(serve, small, root):
    """Trials of the same number in different files stay apart."""
    serve(*small)
    data = construct(root)
    assert isinstance(data.storage, TensorStorage)
    check(CORPORA["roboset"], small, data.published)
    assert_ted(data.published)
    assert (data[:] == data.published.tensordict()).all()
    assert data["next", "terminated"].flatten().nonzero().flatten().tolist() == [9, 16]


def test_documented_example_runs_with_only_the_imports_changed(serve, small, root):
    serve(*small)
    torch.manual_seed(0)
    d = RobosetExperienceReplay(
        ID, batch_size=32, root=root, transform=ExcludeTransform("info", ("next", "info"))
    )
    for batch in d:  # noqa: B007 - as users write it
        break
    flags = dict.fromkeys(("done", "terminated", "truncated"), (1,))
    shapes = {"action": (2,), "observation": (5,), **flags}
    shapes |= dict.fromkeys(("episode", "index", "seed", "time"), ())
    after = {"observation": (5,), "reward": (1,), **flags}
    shapes |= {("next", key): shape for key, shape in after.items()}
    found = {key: tuple(batch[key].shape) for key in batch.keys(True, True)}
    assert found == {key: (32, *shape) for key, shape in shapes.items()}
    assert batch["action"].dtype == batch["observation"].dtype == torch.float64
    assert batch["index"].dtype == batch["seed"].dtype == batch["episode"].dtype == torch.int64


@pytest.mark.pitfall("DS17")
def test_buffer_is_immutable_and_edits_of_its_rows_never_reach_the_disk(serve, small, root):
    serve(*small)
    data = construct(root)
    row, before = data[0], data["action"].clone()
    for write in (lambda: data.add(row), lambda: data.extend(row.unsqueeze(0)), data.empty):
        with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
            write()
    assert data.write_count == 0
    data.set_("action", torch.zeros_like(before))
    data[:2] = data[2:4].clone()
    data.update_({("next", "reward"): torch.ones(17, 1, dtype=torch.float64)})
    data.set_at_("action", torch.ones(2, dtype=torch.float64), 3)
    assert data["action"].sum(1).nonzero().flatten().tolist() == [3]
    second = construct(root, download=False)
    assert second["action"].equal(before)
    assert not second["next", "reward"].equal(data["next", "reward"])


@pytest.mark.pitfall("DS14")
def test_a_saved_data_set_continues_with_the_batches_of_its_generator(serve, small, root, tmp_path):
    serve(*small)
    data, again = (construct(root, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    data.dumps(tmp_path / "saved")
    other = ReplayBuffer(
        storage=LazyMemmapStorage(17), writer=ImmutableDatasetWriter(), batch_size=4
    )
    other.loads(tmp_path / "saved")
    for _ in range(5):
        batch = data.sample()
        for found in (again.sample(), other.sample()):
            assert all(batch[key].equal(found[key]) for key in batch.keys(True, True))


@pytest.mark.pitfall("DS6")
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_split_and_flat_hold_the_same_rows_in_either_order(serve, small, root, order):
    serving = serve(*small)
    found = {order[0]: construct(root, split_trajs=order[0])}
    asked = serving.requests
    found[order[1]] = construct(root, split_trajs=order[1])
    found_again = construct(root, split_trajs=order[0])
    assert (found_again[:] == found[order[0]][:]).all()

    flat, split = found[False][:], found[True][:]
    lengths = [3, 5, 2, 4, 3]
    assert split.batch_size == torch.Size([5, 5])
    assert len(found[True]) == 5
    assert split["mask"].sum(1).tolist() == lengths
    inside = split["mask"]
    for key in flat.keys(True, True):
        assert split[key][inside].equal(flat[key]), key
        assert not split[key][~inside].any(), key
    assert split["traj_ids"][inside].tolist() == [
        e for e, n in enumerate(lengths) for _ in range(n)
    ]
    batch, info = found[True].sample(6, return_info=True)
    assert batch.batch_size == batch["index"].shape == (6, 5)
    assert (batch["index"] == info["index"][:, None]).all()
    found[False].delete()
    for download in (True, False):
        assert len(construct(root, split_trajs=True, download=download)) == 5
    assert serving.requests == asked


OTHER = "DAPG(human)/door_v2d-v1"


@pytest.mark.parametrize("download", [True, False])
def test_folder_of_another_identity_is_reported_not_served(serve, small, root, download):
    """P8: for the flat form, for both together, and for the split form alone."""
    serve(*small, **{f"{OTHER}/seed0/d.h5": small[0]})
    (root / ID).parent.mkdir(parents=True)
    for split, name in ((False, ID), (True, f"{ID}_split")):
        other = RobosetExperienceReplay(OTHER, 4, root=root, split_trajs=split)
        other.data_path.rename(root / name)
    for split in (False, True):
        with pytest.raises(RuntimeError, match=r"whose dataset_id is 'DAPG.*force"):
            construct(root, download=download, split_trajs=split)
    shutil.rmtree(root / ID)
    with pytest.raises(RuntimeError, match=r"_split .*whose dataset_id is 'DAPG"):
        construct(root, download=download, split_trajs=True)
    split = construct(root, download="force", split_trajs=True)
    assert len(split) == 5
    construct(root).delete()
    split.data_path.rename(root / ID)
    with pytest.raises(RuntimeError, match="whose form is 'split trajectories'"):
        construct(root, download=download)


def test_delete_removes_only_the_copy_in_use(serve, small, root):
    serve(*small)
    split = construct(root, split_trajs=True)
    flat = construct(root)
    assert split.data_path == root / f"{ID}_split"
    assert split.data_path_root == flat.data_path == root / ID
    split.delete()
    assert not split.data_path.exists()
    assert flat.data_path.exists()
    with pytest.raises(FileNotFoundError):
        split.delete()
    flat.delete()
    assert not flat.data_path.exists()
    assert len(split.sample()) == len(flat.sample()) == 4  # what is open stays readable


@pytest.mark.pitfall("DS12")
def test_room_for_the_columns_is_looked_at_before_the_download(serve, small, root, monkeypatch):
    serving = serve(*small)
    total = sum(path.stat().st_size for path in small)
    usage = SimpleNamespace(free=2 * total - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
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


@pytest.mark.pitfall("DS4")
@pytest.mark.parametrize("failure", ["server", "file"])
def test_force_keeps_the_old_copy_until_the_new_one_is_complete(
    serve, small, root, tmp_path, failure
):
    serving = serve(*small)
    old = construct(root)
    before, new = old[:].clone(), write_file(tmp_path / "n.h5", 8)
    more = {} if failure == "server" else {f"{ID}/seed9/bad.h5": b"no"}
    serving.hub.commit(REPO, served(new) | more)
    if failure == "server":
        wrong = bytes(reversed(new.read_bytes()))
        serving.hub.faults.append(Fault(path="*x_trace.h5", method="GET", body=wrong))
    with pytest.raises(DownloadError if failure == "server" else CorpusError):
        construct(root, download="force")
    again = construct(root, download=False)
    assert (again[:] == before).all()
    assert (old[:] == before).all()


def test_forced_download_takes_current_hub_files(serve, small, root, tmp_path):
    serving = serve(*small)
    old = construct(root)
    construct(root, split_trajs=True)
    serving.hub.commit(REPO, served(write_file(tmp_path / "new.h5", 8)))
    assert len(construct(root)) == 17  # pinned until it is forced
    new = construct(root, download="force")
    # The commit replaced the first file: 7 rows in place of 10, beside the 7 of the second.
    assert torch.bincount(new["seed"]).tolist() == [7, 7]
    assert len(construct(root, download=False)) == 14
    assert construct(root, split_trajs=True)[:].batch_size == torch.Size([1 + 2, 7])
    assert len(old[:]) == 17  # what is open stays as it was


def test_cache_that_may_only_be_read_is_used_all_the_same(serve, small, root, monkeypatch):
    serve(*small)
    construct(root)
    shutil.rmtree(root)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert len(construct(root)) == 17


def test_offline_client_uses_the_last_commit_that_is_complete(
    serve, small, root, tmp_path, monkeypatch
):
    """D7: the remembered listing and the cache are enough, also after a download that failed."""
    serving = serve(*small)
    construct(root)
    new = write_file(tmp_path / "new.h5", 8)
    serving.hub.commit(REPO, served(new))
    wrong = bytes(reversed(new.read_bytes()))
    serving.hub.faults.append(Fault(path="*seed0*", method="GET", body=wrong))
    with pytest.raises(DownloadError):
        construct(root, download="force")
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        asked = serving.requests
        assert len(construct(tmp_path / "elsewhere")) == 17
        assert serving.requests == asked
    serving.hub.faults.clear()
    assert len(construct(root, download="force")) == 14
    shutil.rmtree(root)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = serving.requests
    assert len(construct(root)) == 14
    assert serving.requests == asked


@pytest.mark.parametrize("is_damaged", [True, False])
def test_offline_client_without_a_cache_or_its_listing_says_so(
    serve, small, root, monkeypatch, is_damaged
):
    serving = serve(*small)
    if is_damaged:
        construct(root)
        shutil.rmtree(root)
        (memory,) = serving.cache.rglob("replaykit/*.json")
        memory.write_text(memory.read_text()[:-20])
    asked = serving.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = "(?s)offline mode forbids every request.*HF_HUB_OFFLINE"
    with pytest.raises(FileNotFoundError, match=said):
        construct(root)
    assert serving.requests == asked
