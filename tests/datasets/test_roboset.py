"""RoboSet as a user meets it: the constructor, its members, the list of its data sets."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest
import torch

from replaykit import TensorStorage
from replaykit.datasets import BaseDatasetExperienceReplay, RobosetExperienceReplay

ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


def test_constructor_has_the_arguments_and_defaults_that_users_know():
    parameters = inspect.signature(RobosetExperienceReplay.__init__).parameters
    keyword, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    expected = [
        ("self", positional, empty),
        ("dataset_id", positional, empty),
        ("batch_size", positional, empty),
        ("root", keyword, None),
        ("download", keyword, True),
        ("sampler", keyword, None),
        ("writer", keyword, None),
        ("collate_fn", keyword, None),
        ("pin_memory", keyword, False),
        ("prefetch", keyword, None),
        ("transform", keyword, None),
        ("split_trajs", keyword, False),
        ("split", keyword, None),
        ("episodes", keyword, None),
        ("source", keyword, None),
        ("policies", keyword, None),
        ("layout", keyword, None),
        ("workers", keyword, 1),
        ("env_kwargs", inspect.Parameter.VAR_KEYWORD, empty),
    ]
    assert [(p.name, p.kind, p.default) for p in parameters.values()] == expected


MEMBERS = """
    add append_transform as_remote batch_size data_path data_path_root delete dump dumps empty
    extend initialized insert_transform load loads next preprocess read_all_in_order
    register_load_hook register_save_hook sample sampler save set_ set_at_ set_sampler set_storage
    set_writer storage transform update_ write_all write_count writer available_datasets
"""


@pytest.mark.parametrize("name", sorted(set(MEMBERS.split())))
def test_every_documented_member_is_there(name):
    assert hasattr(RobosetExperienceReplay, name)


def test_preprocess_has_the_arguments_and_defaults_that_users_know():
    parameters = list(inspect.signature(RobosetExperienceReplay.preprocess).parameters.values())
    assert [(p.name, p.default) for p in parameters[2:4]] == [("dim", 0), ("num_workers", None)]
    assert {p.name: p.default for p in parameters[4:]} == {
        "chunksize": None,
        "num_chunks": None,
        "pool": None,
        "generator": None,
        "max_tasks_per_child": None,
        "worker_threads": 1,
        "index_with_generator": False,
        "pbar": False,
        "mp_start_method": None,
        "num_frames": None,
        "dest": inspect.Parameter.empty,
    }


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


def test_unknown_id_is_refused_with_the_list(root):
    with pytest.raises(ValueError, match=r"DAPG\(human\)/pen_v2d-v1.*got 'nope'"):
        RobosetExperienceReplay("nope", batch_size=4, root=root)


@pytest.mark.pitfall("DS14")
@pytest.mark.parametrize("keyword", ["sampeler", "storage"])
def test_unknown_keyword_is_refused_before_anything_is_fetched(
    serve, small, root, keyword, construct
):
    serving = serve(*small)
    with pytest.raises(TypeError, match=keyword):
        construct(root, **{keyword: None})
    assert serving.requests == 0
    assert not root.exists()


@pytest.mark.pitfall("DS14")
@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("batch_size", 0, ValueError),
        ("prefetch", -1, ValueError),
        ("sampler", 3, TypeError),
        ("transform", 3, RuntimeError),
        ("download", "maybe", ValueError),
        ("generator", 7, TypeError),
    ],
)
def test_bad_argument_is_refused_before_anything_is_fetched(
    serve, small, root, option, value, error, construct
):
    serving = serve(*small)
    with pytest.raises(error):
        construct(root, **{option: value})
    assert serving.requests == 0


@pytest.mark.parametrize(
    "value", [0, 1, 0.0, np.int64(0), "True", "FORCE", None, [], torch.zeros(())]
)
def test_download_is_a_bool_or_the_word_force(serve, small, root, value, construct):
    """What is equal to False is not False: it must not be taken for leave to use the network."""
    serving = serve(*small)
    with pytest.raises(ValueError, match='True, False or "force", got'):
        construct(root, download=value)
    assert serving.requests == 0


def test_download_takes_the_bools_of_numpy(serve, small, root, construct):
    serving = serve(*small)
    with pytest.raises(FileNotFoundError, match="download=True"):
        construct(root, download=np.False_)
    assert serving.requests == 0
    assert construct(root, download=np.True_).download is True


@pytest.mark.pitfall("DS14")
def test_generator_makes_batches_repeat(serve, small, root, construct):
    serve(*small)

    def draws() -> list[list[int]]:
        data = construct(root, generator=torch.Generator().manual_seed(3))
        return [data.sample()["index"].tolist() for _ in range(4)]

    assert draws() == draws()


def test_custom_corpus_class_needs_four_lines(tmp_path, small):
    from replaykit.datasets.families.robohive import ROBOHIVE
    from replaykit.datasets.sources import Sources

    class Mine(BaseDatasetExperienceReplay):
        available_datasets = ["all"]  # noqa: RUF012
        corpus = "mine"
        layout = ROBOHIVE

        def sources(self):
            return Sources.local(small)

    data = Mine("all", 4, root=tmp_path / "mine")
    assert isinstance(data.storage, TensorStorage)
    assert len(data) == 17


def test_default_root_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\.cache/replaykit/roboset/FK1-v4"):
        RobosetExperienceReplay(ID, batch_size=4, download=False)
    assert not (tmp_path / ".cache").exists()


@pytest.mark.parametrize("module", ["h5py", "huggingface_hub"])
def test_missing_library_is_named_at_construction_only(
    serve, small, root, monkeypatch, module, construct
):
    serve(*small)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        construct(root)
    assert not (root / ID).exists()


def test_published_data_set_needs_neither_h5py_nor_the_client(
    serve, small, root, monkeypatch, construct
):
    serve(*small)
    construct(root)
    for module in ("h5py", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, module, None)
    assert len(construct(root)) == 17
