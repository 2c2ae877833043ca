"""RoboSet as a user meets it: the constructor, the list of data sets, rows and trajectories."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch

from replaykit import ImmutableDatasetWriter, LazyMemmapStorage, ReplayBuffer, TensorStorage
from replaykit.datasets import RobosetExperienceReplay
from replaykit.transforms import ExcludeTransform
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import ROBOSET_ID as ID
from tests.datasets.trials import ROBOSET_REPO as REPO
from tests.datasets.trials import assert_ted, construct, served, write_file


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


# -- split trajectories ---------------------------------------------------------------------------


@pytest.mark.pitfall("DS6")
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_split_and_flat_hold_the_same_rows_in_either_order(serve, small, root, order):
    serving = serve(*small)
    found = {order[0]: construct(root, split_trajs=order[0])}
    asked = serving.requests
    found[order[1]] = construct(root, split_trajs=order[1])
    found_again = construct(root, split_trajs=order[0])
    assert serving.requests == asked
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
    assert found[True].sample(3).batch_size == torch.Size([3, 5])


def test_split_batch_carries_its_index_over_the_steps(serve, small, root):
    serve(*small)
    data = construct(root, split_trajs=True)
    batch, info = data.sample(6, return_info=True)
    assert batch["index"].shape == (6, 5)
    assert info["index"].shape == (6,)
    assert (batch["index"] == info["index"][:, None]).all()


OTHER = "DAPG(human)/door_v2d-v1"


@pytest.fixture
def wrong(serve, small, root, request):
    """A root in which a copy of another data set, or of other rules, lies as the one of ``ID``."""
    serve(*small, **{f"{OTHER}/seed0/d.h5": small[0]})
    what = request.param
    dataset_id = OTHER if what == "id" else ID
    found = [
        RobosetExperienceReplay(dataset_id, 4, root=root, split_trajs=split).data_path
        for split in (False, True)
    ]
    for path, name in zip(found, (ID, f"{ID}_split"), strict=True):
        if what == "id":
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            path.rename(root / name)
        else:
            text = (path / "manifest.json").read_text()
            assert '"layout_version": 1' in text
            changed = text.replace('"layout_version": 1', '"layout_version": 0')
            (path / "manifest.json").write_text(changed)
    return {"id": r"whose dataset_id is 'DAPG", "version": r"another layout"}[what]


@pytest.mark.parametrize("wrong", ["id", "version"], indirect=True)
@pytest.mark.parametrize("download", [True, False])
def test_folder_of_another_identity_is_reported_not_served(root, wrong, download):
    """P8: for the flat form, for both together, and for the split form alone."""
    for split in (False, True):
        with pytest.raises(RuntimeError, match=rf"{wrong}.*force"):
            construct(root, download=download, split_trajs=split)
    shutil.rmtree(root / ID)
    with pytest.raises(RuntimeError, match=rf"_split .*{wrong}"):
        construct(root, download=download, split_trajs=True)
    assert len(construct(root, download="force", split_trajs=True)) == 5


@pytest.mark.parametrize("download", [True, False])
def test_one_form_in_the_place_of_the_other_is_reported(serve, small, root, download):
    serve(*small)
    construct(root, split_trajs=True)
    flat, split = root / ID, root / f"{ID}_split"
    flat.rename(root / "kept")
    split.rename(flat)
    with pytest.raises(RuntimeError, match="whose form is 'split trajectories'"):
        construct(root, download=download)
    flat.rename(root / "gone")
    (root / "kept").rename(split)
    with pytest.raises(RuntimeError, match="whose form is None, but 'split trajectories'"):
        construct(root, download=download, split_trajs=True)


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


def test_split_alone_is_enough_once_it_is_there(serve, small, root):
    serving = serve(*small)
    construct(root, split_trajs=True)
    construct(root).delete()
    asked = serving.requests
    assert len(construct(root, split_trajs=True)) == 5
    assert len(construct(root, split_trajs=True, download=False)) == 5
    assert serving.requests == asked


def test_split_form_follows_refetched_flat_form(serve, small, root, tmp_path):
    serving = serve(*small)
    construct(root, split_trajs=True)
    serving.hub.commit(REPO, served(write_file(tmp_path / "new.h5", 8, 3)))
    construct(root, download="force")
    assert construct(root, split_trajs=True)[:].batch_size == torch.Size([2 + 2, 7])
