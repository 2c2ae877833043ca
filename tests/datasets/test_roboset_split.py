"""The split trajectories of RoboSet, beside the flat rows and without them."""

from __future__ import annotations

import shutil

import pytest
import torch

from replaykit.datasets import RobosetExperienceReplay
from tests.datasets.trials import ROBOSET_ID as ID
from tests.datasets.trials import ROBOSET_REPO as REPO
from tests.datasets.trials import construct, served, write_file


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
