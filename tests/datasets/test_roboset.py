"""RoboSet as a user meets it: the constructor, rows against h5py, downloads, copies on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import huggingface_hub
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from replaykit.datasets import BaseDatasetExperienceReplay, RobosetExperienceReplay
from replaykit.errors import CorpusError, DownloadError
from replaykit.testing import Fault, LoopbackHub, lfs_pointer
from replaykit.testing.robohive import RoboHiveWriter, make_trial
from replaykit.transforms import ExcludeTransform

REPO = "jdvakil/RoboSet_Sim"
ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"
SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "robohive" / "fk1_random_policy_trace.h5"
SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"
FLAGS = ("done", "terminated", "truncated")


def sample_file() -> Path:
    if not SAMPLE.exists():
        pytest.skip("sample file ../shared/data/robohive/fk1_random_policy_trace.h5 not present")
    if hashlib.sha256(SAMPLE.read_bytes()).hexdigest() != SAMPLE_SHA256:
        pytest.skip("../shared/data/robohive/fk1_random_policy_trace.h5 has another checksum")
    return SAMPLE


def write_file(path: Path, *lengths: int, seed: int = 0, **options: Any) -> Path:
    with RoboHiveWriter(path) as writer:
        for number, records in enumerate(lengths):
            writer.add_trial(**make_trial(records, seed=seed + number, **options))
    return path


def served(folder: Path, *files: Path, dataset_id: str = ID) -> dict[str, Path]:
    return {f"{dataset_id}/seed{i}/x_trace.h5": path for i, path in enumerate(files)}


@pytest.fixture
def small(tmp_path: Path) -> list[Path]:
    """Two files: trials of 4, 6, 3 and of 5, 4 records, the last of each file terminated."""
    folder = tmp_path / "files"
    folder.mkdir()
    paths = []
    for number, lengths in enumerate(((4, 6, 3), (5, 4))):
        path = folder / f"{number}.h5"
        with RoboHiveWriter(path) as writer:
            for k, records in enumerate(lengths):
                last = k == len(lengths) - 1
                writer.add_trial(**make_trial(records, seed=10 * number + k, terminated=last))
        paths.append(path)
    return paths


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


class Serving:
    """A hub with the files, and the environment that points the client to it."""

    def __init__(self, hub: LoopbackHub, tmp_path: Path, monkeypatch: Any) -> None:
        self.hub = hub
        self.cache = tmp_path / "cache"
        self.env = hub.env(self.cache)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)

    @property
    def requests(self) -> int:
        return len(self.hub.requests)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    hubs = []

    def start(*files: Path, **more: Path | bytes) -> Serving:
        hub = LoopbackHub({REPO: {**served(tmp_path, *files), **more}})
        hub.__enter__()
        hubs.append(hub)
        return Serving(hub, tmp_path, monkeypatch)

    yield start
    huggingface_hub.close_session()
    for hub in hubs:
        hub.__exit__(None, None, None)


def construct(root: Path, **options: Any) -> RobosetExperienceReplay:
    return RobosetExperienceReplay(ID, **{"batch_size": 4, "root": root, **options})


# -- the face that users know ------------------------------------------------------------------


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
def test_unknown_keyword_is_refused_before_anything_is_fetched(serve, small, root, keyword):
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
    serve, small, root, option, value, error
):
    serving = serve(*small)
    with pytest.raises(error):
        construct(root, **{option: value})
    assert serving.requests == 0


@pytest.mark.parametrize(
    "value", [0, 1, 0.0, np.int64(0), "True", "FORCE", None, [], torch.zeros(())]
)
def test_download_is_a_bool_or_the_word_force(serve, small, root, value):
    """What is equal to False is not False: it must not be taken for leave to use the network."""
    serving = serve(*small)
    with pytest.raises(ValueError, match='True, False or "force", got'):
        construct(root, download=value)
    assert serving.requests == 0


def test_download_takes_the_bools_of_numpy(serve, small, root):
    serving = serve(*small)
    with pytest.raises(FileNotFoundError, match="download=True"):
        construct(root, download=np.False_)
    assert serving.requests == 0
    assert construct(root, download=np.True_).download is True


@pytest.mark.pitfall("DS14")
def test_generator_makes_batches_repeat(serve, small, root):
    serve(*small)

    def draws() -> list[list[int]]:
        data = construct(root, generator=torch.Generator().manual_seed(3))
        return [data.sample()["index"].tolist() for _ in range(4)]

    assert draws() == draws()


# -- rows --------------------------------------------------------------------------------------


def leaves_of(group: h5py.Group, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            found.update(leaves_of(item, (*prefix, name)))
        else:
            found[(*prefix, name)] = item[...]
    return found


def rows_by_h5py(paths: list[Path]) -> dict[tuple[str, ...], np.ndarray]:
    """What the data set must hold, computed from the files record by record."""
    rows: dict[tuple[str, ...], list[Any]] = {}

    def put(key: tuple[str, ...], value: Any) -> None:
        rows.setdefault(key, []).append(value)

    for seed, path in enumerate(paths):
        with h5py.File(path) as file:
            for name in sorted(file, key=lambda trial: int(trial.removeprefix("Trial"))):
                trial = file[name]
                infos = leaves_of(trial["env_infos"])
                records = len(trial["actions"])
                for t in range(records - 1):
                    put(("observation",), trial["observations"][t])
                    put(("action",), trial["actions"][t])
                    put(("time",), trial["time"][t])
                    put(("episode",), int(name.removeprefix("Trial")))
                    put(("seed",), seed)
                    put(("next", "observation"), trial["observations"][t + 1])
                    put(("next", "reward"), [trial["rewards"][t + 1]])
                    terminated = bool(trial["done"][t + 1])
                    truncated = t == records - 2 and not terminated
                    put(("next", "terminated"), [terminated])
                    put(("next", "truncated"), [truncated])
                    put(("next", "done"), [terminated or truncated])
                    for flag in FLAGS:
                        put((flag,), [False])
                    for key, values in infos.items():
                        put(("info", *key), values[t])
                        put(("next", "info", *key), values[t + 1])
    return {key: np.asarray(values) for key, values in rows.items()}


def assert_equal_rows(data: ReplayBuffer, expected: dict[tuple[str, ...], np.ndarray]) -> None:
    stored = data[:]
    keys = {key if isinstance(key, tuple) else (key,) for key in stored.keys(True, True)}
    constant_nan = {k for k, v in expected.items() if v.dtype.kind == "f" and np.isnan(v).all()}
    assert keys == expected.keys() - constant_nan
    for key in keys:
        want, have = expected[key], stored[key].numpy()
        assert have.shape == want.shape, key
        assert have.dtype == want.dtype, key
        assert np.array_equal(have.view(np.uint8), np.ascontiguousarray(want).view(np.uint8)), key


@pytest.mark.pitfall("DS2")
@pytest.mark.parametrize("copies", [1, 2])
def test_every_value_of_the_real_file_is_that_of_h5py(serve, root, copies):
    path = sample_file()
    serve(*[path] * copies)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # leaves without values are left out; tested on their own
        data = construct(root)
    assert len(data) == 500 * copies
    assert_equal_rows(data, rows_by_h5py([path] * copies))
    assert int(data["next", "done"].sum()) == 10 * copies
    total = float(data["next", "reward"].sum())
    assert total == pytest.approx(-416.28576943 * copies, abs=1e-6)


@pytest.mark.pitfall("DS2")
def test_every_value_of_written_files_is_that_of_h5py(serve, small, root):
    serve(*small)
    data = construct(root)
    assert len(data) == (3 + 5 + 2) + (4 + 3)
    assert_equal_rows(data, rows_by_h5py(small))
    assert data["next", "terminated"].flatten().nonzero().flatten().tolist() == [9, 16]


@pytest.mark.pitfall("DS9")
def test_trials_are_in_the_order_of_their_numbers(serve, tmp_path, root):
    serve(write_file(tmp_path / "a.h5", *[3] * 12))
    assert construct(root)["episode"].tolist() == [k for k in range(12) for _ in range(2)]


@pytest.mark.pitfall("BD2")
def test_trials_of_the_same_number_in_different_files_stay_apart(serve, small, root):
    serve(*small)
    data = construct(root)
    ids = list(zip(data["seed"].tolist(), data["episode"].tolist(), strict=True))
    assert sorted(set(ids)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    changes = [i for i in range(1, len(ids)) if ids[i] != ids[i - 1]]
    ends = data["next", "done"].flatten().nonzero().flatten().tolist()
    assert [change - 1 for change in changes] == ends[:-1]


@pytest.mark.pitfall("DS11")
def test_nested_tensordicts_have_the_batch_size_of_the_rows(serve, small, root):
    serve(*small)
    data = construct(root)
    for rows in (data[:], data.sample(), data.storage[:]):
        nested = [rows["next"], rows["info"], rows["next", "info"], rows["info", "obs_dict"]]
        assert {part.batch_size for part in nested} == {rows.batch_size}


def test_documented_example_runs_with_only_the_imports_changed(serve, small, root):
    serve(*small)
    torch.manual_seed(0)
    d = RobosetExperienceReplay(
        ID, batch_size=32, root=root, transform=ExcludeTransform("info", ("next", "info"))
    )
    for batch in d:  # noqa: B007 - as users write it
        break
    shapes = {key: tuple(batch[key].shape) for key in batch.keys(True, True)}
    assert shapes == {
        "action": (32, 2),
        "done": (32, 1),
        "episode": (32,),
        "index": (32,),
        ("next", "done"): (32, 1),
        ("next", "observation"): (32, 5),
        ("next", "reward"): (32, 1),
        ("next", "terminated"): (32, 1),
        ("next", "truncated"): (32, 1),
        "observation": (32, 5),
        "seed": (32,),
        "terminated": (32, 1),
        "time": (32,),
        "truncated": (32, 1),
    }
    assert batch["action"].dtype == batch["observation"].dtype == torch.float64
    assert batch["index"].dtype == batch["seed"].dtype == batch["episode"].dtype == torch.int64


def test_a_cast_that_the_caller_asks_for_is_a_transform(serve, small, root):
    serve(*small)
    data = construct(root, transform=lambda batch: batch.float())
    assert data.sample()["observation"].dtype == torch.float32
    assert data.storage["observation" and slice(None)]["observation"].dtype == torch.float64


def test_sampling_without_replacement_visits_every_row_once(serve, small, root):
    serve(*small)
    data = construct(root, sampler=SamplerWithoutReplacement())
    seen = torch.cat([batch["index"] for batch in data])
    assert seen.sort().values.tolist() == list(range(17))


def test_buffer_is_immutable_and_its_rows_can_be_edited(serve, small, root):
    serve(*small)
    data = construct(root)
    row = data[0]
    for write in (lambda: data.add(row), lambda: data.extend(row.unsqueeze(0)), data.empty):
        with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
            write()
    assert data.write_count == 0
    data.set_at_("action", torch.zeros(2, dtype=torch.float64), 3)
    assert data["action"][3].tolist() == [0.0, 0.0]


@pytest.mark.pitfall("DS17")
def test_edits_never_reach_the_disk(serve, small, root):
    serve(*small)
    first = construct(root)
    before = first["action"].clone()
    first.set_("action", torch.zeros_like(before))
    first[:2] = first[2:4].clone()
    first.update_({("next", "reward"): torch.ones(17, 1, dtype=torch.float64)})
    second = construct(root, download=False)
    assert second["action"].equal(before)
    assert not second["next", "reward"].equal(first["next", "reward"])


def test_a_buffer_over_a_data_set_can_be_saved_and_loaded(serve, small, root, tmp_path):
    serve(*small)
    data = construct(root, generator=torch.Generator().manual_seed(1))
    data.dumps(tmp_path / "saved")
    other = ReplayBuffer(
        storage=replaykit.LazyMemmapStorage(17),
        sampler=RandomSampler(),
        writer=replaykit.ImmutableDatasetWriter(),
        batch_size=4,
    )
    other.loads(tmp_path / "saved")
    for _ in range(5):
        left, right = data.sample(), other.sample()
        assert all(left[key].equal(right[key]) for key in left.keys(True, True))


# -- fetching ----------------------------------------------------------------------------------


@pytest.mark.pitfall("IF9")
def test_second_construction_makes_no_request(serve, small, root):
    serving = serve(*small)
    construct(root)
    asked = serving.requests
    assert len(construct(root)) == len(construct(root, download=False)) == 17
    assert serving.requests == asked


@pytest.mark.pitfall("DS5")
def test_files_beside_the_directory_of_the_id_are_not_taken(serve, small, root, tmp_path):
    other = write_file(tmp_path / "other.h5", 9, seed=77)
    serve(
        *small,
        **{f"{ID}_extra/seed0/x.h5": other, f"{ID}.h5": other, f"{ID}/seed0/x.txt": b"words"},
    )
    assert len(construct(root)) == 17


@pytest.mark.pitfall("IF9")
def test_absent_data_set_without_download_touches_no_network(serve, small, root):
    serving = serve(*small)
    with pytest.raises(FileNotFoundError, match="download=True"):
        construct(root, download=False)
    assert serving.requests == 0


@pytest.mark.pitfall("DS12")
def test_wrong_bytes_of_the_right_length_are_refused(serve, small, root):
    serving = serve(*small)
    wrong = bytes(reversed(small[1].read_bytes()))
    serving.hub.faults.append(Fault(path="*seed1*", method="GET", body=wrong))
    with pytest.raises(DownloadError, match=r"seed1/x_trace\.h5"):
        construct(root)
    assert not (root / ID).exists()


def test_lfs_pointer_in_the_repository_is_named_for_what_it_is(serve, small, root):
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
def test_a_file_that_is_not_h5_is_named_with_what_it_is(serve, small, root, content, words):
    serve(small[0], **{f"{ID}/seed1/odd.h5": content})
    with pytest.raises(CorpusError, match=rf"(?s)odd\.h5.*{words}") as caught:
        construct(root)
    # The bytes are those that the Hub lists: fetching them again would change nothing.
    assert "again" not in str(caught.value).replace("downloading it again does not help", "")
    assert not (root / ID).exists()


def test_h5_of_another_layout_is_named_with_what_it_holds(serve, root, tmp_path):
    path = tmp_path / "other.h5"
    with h5py.File(path, "w") as file:
        file["data/demo_0/actions"] = np.zeros((3, 2))
    serve(path)
    with pytest.raises(CorpusError, match=r"x_trace\.h5.*data"):
        construct(root)


@pytest.mark.pitfall("DS4")
@pytest.mark.parametrize("failure", ["server", "file"])
def test_force_keeps_the_old_copy_until_the_new_one_is_complete(
    serve, small, root, tmp_path, failure
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


def test_force_takes_what_the_hub_has_now(serve, small, root, tmp_path):
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
def test_a_directory_that_is_no_data_set_is_neither_opened_nor_overwritten(serve, small, root):
    serve(*small)
    folder = root / ID
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("keep")
    for download in (True, False):
        with pytest.raises(RuntimeError, match=r"FK1_MicroOpenRandom.*force"):
            construct(root, download=download)
    assert (folder / "mine.txt").read_text() == "keep"
    assert len(construct(root, download="force")) == 17


@pytest.mark.pitfall("DS18")
def test_two_data_sets_live_beside_each_other(serve, small, root, tmp_path, monkeypatch):
    other_id = "DAPG(human)/door_v2d-v1"
    other = write_file(tmp_path / "d.h5", 5)
    serve(*small, **{f"{other_id}/seed0/d.h5": other})
    first = construct(root)
    second = RobosetExperienceReplay(other_id, batch_size=2, root=root)
    assert (len(first), len(second)) == (17, 4)
    assert second.data_path == root / other_id


CHILD = """
import sys, warnings
warnings.simplefilter("ignore")
from replaykit.datasets import RobosetExperienceReplay
data = RobosetExperienceReplay({id!r}, batch_size=4, root={root!r})
print(len(data), float(data["next", "reward"].sum()))
"""


def child(serving: Serving, root: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(id=ID, root=str(root))],
        env={**os.environ, **serving.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Says when it is ready, begins when it is told, and notes every conversion, which takes a while.
TOGETHER = """
import sys, time
from pathlib import Path
from replaykit.datasets import convert, split
for module, name in ((convert, "_convert"), (split, "_split")):
    def slowly(*arguments, real=getattr(module, name), name=name):
        with Path({log!r}).open("a") as file:
            file.write(name + "\\n")
        time.sleep(1)
        return real(*arguments)
    setattr(module, name, slowly)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.pitfall("DS12")
@pytest.mark.parametrize("split", [False, True])
def test_two_processes_that_ask_at_once_share_one_conversion(serve, small, root, tmp_path, split):
    """One downloads and converts, the other waits and opens: both have the same files."""
    serving = serve(*small)
    log = tmp_path / "log"
    program = TOGETHER.format(log=str(log)) + CHILD.format(id=ID, root=str(root))
    if split:
        program = program.replace("batch_size=4", "batch_size=4, split_trajs=True")
    program += "print(data.storage.published.manifest.made, data.data_path.stat().st_ino)"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **serving.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in children] == ["ready\n"] * 2
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in children]
    assert [process.returncode for process in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert log.read_text().split() == ["_convert", "_split"][: 1 + split]
    bodies = [r for r in serving.hub.requests if r.method == "GET" and "x_trace" in r.path]
    assert len(bodies) == len(small)


def rows_offline(serving: Serving, root: Path) -> int:
    asked = serving.requests
    process = child(serving, root, HF_HUB_OFFLINE="1")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert serving.requests == asked
    return int(output.split()[0])


@pytest.mark.parametrize("other_root", [False, True])
def test_offline_client_uses_its_cache_and_the_remembered_listing(serve, small, root, other_root):
    """D7: the cache is complete, wherever the rows go."""
    serving = serve(*small)
    construct(root)
    shutil.rmtree(root)
    assert rows_offline(serving, root.with_name("elsewhere") if other_root else root) == 17


def test_offline_client_uses_the_last_commit_that_is_complete(serve, small, root, tmp_path):
    """A download that fails does not make the client forget what it has."""
    serving = serve(*small)
    construct(root)
    new = write_file(tmp_path / "new.h5", 8)
    serving.hub.commit(REPO, served(tmp_path, new))
    wrong = bytes(reversed(new.read_bytes()))
    serving.hub.faults.append(Fault(path="*seed0*", method="GET", body=wrong))
    with pytest.raises(DownloadError):
        construct(root, download="force")
    shutil.rmtree(root)
    assert rows_offline(serving, root) == 17
    serving.hub.faults.clear()
    assert len(construct(root, download="force")) == 14
    shutil.rmtree(root)
    assert rows_offline(serving, root) == 14


def test_remembered_listing_that_is_damaged_is_none(serve, small, root):
    serving = serve(*small)
    construct(root)
    shutil.rmtree(root)
    (memory,) = serving.cache.rglob("replaykit/*.json")
    memory.write_text(memory.read_text()[:-20])
    process = child(serving, root, HF_HUB_OFFLINE="1")
    _, errors = process.communicate(timeout=120)
    assert "offline mode forbids every request" in errors


def test_cache_that_may_only_be_read_is_used_all_the_same(serve, small, root, monkeypatch):
    serve(*small)
    construct(root)
    shutil.rmtree(root)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert len(construct(root)) == 17


def test_offline_client_without_a_cache_says_what_is_missing(serve, small, root):
    serving = serve(*small)
    process = child(serving, root, HF_HUB_OFFLINE="1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "FileNotFoundError" in errors
    assert "HF_HUB_OFFLINE" in errors
    assert serving.requests == 0


# -- split trajectories ------------------------------------------------------------------------


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
    return {"id": "dataset_id is 'DAPG", "version": "layout_version is 0"}[what]


@pytest.mark.parametrize("wrong", ["id", "version"], indirect=True)
@pytest.mark.parametrize("download", [True, False])
def test_folder_of_another_identity_is_reported_not_served(root, wrong, download):
    """P8: for the flat form, for both together, and for the split form alone."""
    for split in (False, True):
        with pytest.raises(RuntimeError, match=rf"whose {re.escape(wrong)}.*was asked for.*force"):
            construct(root, download=download, split_trajs=split)
    shutil.rmtree(root / ID)
    with pytest.raises(RuntimeError, match=rf"_split holds .*whose {re.escape(wrong)}"):
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


@pytest.mark.parametrize("download", [True, False])
def test_split_of_another_data_set_beside_the_right_flat_one_is_reported(
    serve, small, root, download
):
    serve(*small, **{f"{OTHER}/seed0/d.h5": small[0]})
    construct(root)
    other = RobosetExperienceReplay(OTHER, 4, root=root, split_trajs=True)
    other.data_path.rename(root / f"{ID}_split")
    with pytest.raises(RuntimeError, match="whose dataset_id is 'DAPG"):
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


def test_split_follows_a_flat_copy_that_was_fetched_anew(serve, small, root, tmp_path):
    serving = serve(*small)
    construct(root, split_trajs=True)
    serving.hub.commit(REPO, served(tmp_path, write_file(tmp_path / "new.h5", 8, 3)))
    construct(root, download="force")
    assert construct(root, split_trajs=True)[:].batch_size == torch.Size([2 + 2, 7])


# -- other ways in and out ---------------------------------------------------------------------


def test_columns_on_disk_are_readable_by_tensordict(serve, small, root):
    serve(*small)
    data = construct(root)
    stored = TensorDict.load_memmap(data.data_path)
    assert (stored == data[:]).all()


def test_a_corpus_class_of_ones_own_needs_four_lines(tmp_path, small):
    from replaykit.datasets.robohive import ROBOHIVE
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
def test_missing_library_is_named_at_construction_only(serve, small, root, monkeypatch, module):
    serve(*small)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        construct(root)
    assert not (root / ID).exists()


def test_published_data_set_needs_neither_h5py_nor_the_client(serve, small, root, monkeypatch):
    serve(*small)
    construct(root)
    for module in ("h5py", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, module, None)
    assert len(construct(root)) == 17
