"""Mapping every row of a data set into new columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import ReplayBuffer, TensorStorage
from replaykit.datasets import BaseDatasetExperienceReplay
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
from replaykit.transforms import CatTensors, Compose
from tests.datasets.trials import write_file

ROWS = 3 + 7 + 2 + 5


@tensorclass
class Pair:
    observation: torch.Tensor
    action: torch.Tensor


def make_data(folder: Path, trials: tuple[int, ...], **options: Any) -> BaseDatasetExperienceReplay:
    """A data set with an episode for each number of records, one row shorter than that."""
    path = write_file(folder / "a.h5", *trials)

    class Mine(BaseDatasetExperienceReplay):
        available_datasets = ["all"]  # noqa: RUF012
        corpus = "mine"
        layout = ROBOHIVE

        def sources(self) -> Sources:
            return Sources.local([path])

    return Mine("all", 4, root=folder / "root", **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> BaseDatasetExperienceReplay:
    return make_data(tmp_path_factory.mktemp("preprocess"), (4, 8, 3, 6))


@pytest.fixture(scope="module")
def split(tmp_path_factory: Any) -> BaseDatasetExperienceReplay:
    """Ten episodes of at most three steps: more episodes than steps."""
    trials = (4, 3, 2, 4, 3, 4, 2, 4, 3, 4)
    return make_data(tmp_path_factory.mktemp("split"), trials, split_trajs=True)


def double(row: TensorDict) -> TensorDict:
    return TensorDict({"x": row["observation"] * 2, "at": row["time"]}, [])


def expected(data: ReplayBuffer) -> dict[str, torch.Tensor]:
    return {"x": data["observation"] * 2, "at": data["time"]}


def assert_doubled(storage: TensorStorage, data: ReplayBuffer, rows: int = ROWS) -> None:
    assert len(storage) == rows
    stored = storage[:]
    for key, value in expected(data).items():
        assert stored[key].equal(value[:rows])


WAYS = [
    {"num_workers": 0},
    {"num_workers": 2, "mp_start_method": "fork"},
    {"num_workers": 2, "mp_start_method": "spawn", "chunksize": 9},
    {"num_workers": 1, "mp_start_method": "fork", "max_tasks_per_child": 1, "chunksize": 8},
    {"num_workers": 0, "chunksize": 0},
    {"num_workers": 0, "num_chunks": 4, "index_with_generator": True},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_every_way_of_working_gives_the_same_rows(data, tmp_path, way):
    storage = data.preprocess(double, dest=tmp_path / "out", **way)
    assert_doubled(storage, data)


def test_documented_example_runs_with_only_the_imports_changed(data):
    t = Compose(
        CatTensors(in_keys=["observation", "action"], out_key="obs"),
        CatTensors(in_keys=[("next", "observation")], out_key=("next", "obs")),
    )

    def func(td):
        td = td.select(
            "action",
            "episode",
            ("next", "done"),
            ("next", "observation"),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            "observation",
        )
        td = t(td)
        return td  # noqa: RET504 - as users write it

    with TemporaryDirectory() as tmpdir:
        new_storage = data.preprocess(
            func, num_workers=2, pbar=True, mp_start_method="fork", dest=tmpdir
        )
        rb = ReplayBuffer(storage=new_storage)
        assert rb["obs"].equal(torch.cat([data["observation"], data["action"]], -1))
        assert rb["next", "obs"].equal(data["next", "observation"])
        assert rb["episode"].equal(data["episode"])
        assert "TensorStorage" in repr(rb)


def test_the_function_sees_single_rows_and_the_source_does_not_change(data, tmp_path):
    before = data[:].clone()

    def spoil(row: TensorDict) -> TensorDict:
        assert row.batch_size == row["next"].batch_size == torch.Size([])
        row["observation"].zero_()
        return TensorDict({"dims": torch.tensor(row["observation"].ndim)}, [])

    for workers, name in ((0, "out"), (1, "out2")):
        storage = data.preprocess(
            spoil, num_workers=workers, mp_start_method="fork", dest=tmp_path / name
        )
        assert storage[:]["dims"].tolist() == [1] * ROWS
    assert (data[:] == before).all()


def test_only_the_first_frames_on_request_and_mapped_from_dest(data, tmp_path):
    calls = []

    def counted(row: TensorDict) -> TensorDict:
        calls.append(1)
        return double(row)

    dest = tmp_path / "out"
    storage = data.preprocess(counted, num_workers=0, num_frames=5, dest=dest)
    assert_doubled(storage, data, 5)
    assert len(calls) == 5 + 1  # one more for the layout
    assert TensorDict.load_memmap(dest)["x"].equal(expected(data)["x"][:5])
    ReplayBuffer(storage=storage)["x"].fill_(7)
    assert (TensorDict.load_memmap(dest)["x"] == 7).all()


def test_results_may_be_tensorclasses_tensors_or_nested(data, tmp_path):
    def results(function: Callable[[TensorDict], Any], name: str) -> Any:
        return data.preprocess(function, num_workers=0, dest=tmp_path / name)[:]

    pairs = results(lambda row: Pair(row["observation"], row["action"], batch_size=[]), "pairs")
    assert isinstance(pairs, Pair)
    assert pairs.action.equal(data["action"])
    tensors = results(lambda row: row["observation"][:2].float(), "tensors")
    assert tensors.equal(data["observation"][:, :2].float())
    nested = results(lambda row: row.select(("info", "obs_dict", "rest"), ("next", "done")), "next")
    assert nested["info", "obs_dict", "rest"].equal(data["info", "obs_dict", "rest"])
    assert nested["next", "done"].equal(data["next", "done"])


def test_split_trajectories_are_mapped_episode_by_episode(data, tmp_path):
    split = type(data)("all", 2, root=data.root, split_trajs=True)

    def total(episode: TensorDict) -> TensorDict:
        assert episode.batch_size == torch.Size([7])
        return TensorDict({"n": episode["mask"].sum()}, [])

    storage = split.preprocess(total, num_workers=0, dest=tmp_path / "out")
    assert storage[:]["n"].tolist() == [3, 7, 2, 5]


@pytest.mark.parametrize("way", [{}, {"chunksize": 2}, {"num_frames": 2}], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_dim_counts_from_either_end(split, tmp_path, dim, way):
    """More episodes than steps: rows along the wrong dimension would not even be too many."""

    def kept(row: TensorDict) -> TensorDict:
        return row.select("observation", "mask")

    storage = split.preprocess(kept, dim=dim, num_workers=0, dest=tmp_path / "out", **way)
    rows = way.get("num_frames")
    for key in ("observation", "mask"):
        assert storage[:][key].equal(split[key].movedim(dim % 2, 0)[:rows])


def noise(row: TensorDict) -> TensorDict:
    return TensorDict({"x": torch.rand(3)}, [])


def noise_of(data: BaseDatasetExperienceReplay, dest: Path, **options: Any) -> torch.Tensor:
    return data.preprocess(noise, dest=dest, **{"num_workers": 0, **options})[:]["x"].clone()


def test_random_results_depend_on_the_seed_and_on_nothing_else(data, tmp_path):
    def run(name: str, seed: int, **options: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return noise_of(data, tmp_path / name, generator=generator, **options)

    state = torch.get_rng_state()
    here = run("a", 1)
    assert here.equal(run("b", 1, chunksize=4))
    assert here.equal(run("c", 1, num_workers=2, mp_start_method="fork"))
    assert here.equal(run("d", 1, num_workers=2, mp_start_method="fork", chunksize=3))
    assert not here.equal(run("e", 2))
    assert len(here.unique()) == here.numel()
    # The generator of the data set comes before the global one, and goes on from call to call.
    own = type(data)("all", 4, root=data.root, generator=torch.Generator().manual_seed(1))
    assert noise_of(own, tmp_path / "f").equal(here)
    assert not noise_of(own, tmp_path / "g").equal(here)
    assert torch.get_rng_state().equal(state)


def test_without_a_generator_the_global_one_gives_the_seed(data, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = noise_of(data, tmp_path / "a")
        second = noise_of(data, tmp_path / "b")
        after = torch.rand(3)
        torch.manual_seed(1)
        again = noise_of(data, tmp_path / "c", num_workers=2, mp_start_method="fork")
        torch.randint(2**62, ())  # the one draw of the second call
        assert torch.rand(3).equal(after)
        torch.manual_seed(2)
        other = noise_of(data, tmp_path / "d")
    assert first.equal(again)
    assert not first.equal(second)
    assert not first.equal(other)


@pytest.mark.parametrize("there", ["absent", "empty"])
def test_dest_may_be_a_link(data, tmp_path, there):
    real, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    if there == "empty":
        real.mkdir(parents=True)
    link.symlink_to(real)
    assert_doubled(data.preprocess(double, num_workers=0, dest=link), data)
    assert link.is_symlink()
    assert TensorDict.load_memmap(real)["x"].equal(expected(data)["x"])
    assert sorted(path.name for path in real.parent.iterdir()) == [".real.lock", "real"]


# -- refusals ----------------------------------------------------------------------------------


def nothing_left(folder: Path) -> bool:
    """But for the lock of ``out``, where work had begun."""
    return {path.name for path in folder.iterdir()} <= {".out.lock"}


def odd(row: TensorDict) -> TensorDict:
    value = row["observation"]
    return TensorDict({"x": value[:2] if row["time"] == row["time"].new_tensor(0.4) else value})


def fail(row: TensorDict) -> TensorDict:
    if row["episode"] == 2:
        raise ZeroDivisionError("on purpose")
    return double(row)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (odd, ValueError, r"row {late} .*'x': expected float64 \[5\], got .*\[2\]"),
        (fail, ZeroDivisionError, "on purpose"),
        (lambda row: None, TypeError, ""),
        (lambda row: TensorDict({}), ValueError, ""),
    ],
)
def test_errors_of_the_function_and_of_its_results_leave_nothing(
    data, tmp_path, workers, function, error, words
):
    late = (data["time"] == 0.4).nonzero()[0].item()
    with pytest.raises(error, match=words.format(late=late) or None):
        data.preprocess(
            function, num_workers=workers, mp_start_method="fork", dest=tmp_path / "out"
        )
    assert nothing_left(tmp_path)


def test_invalid_destinations_are_refused_before_any_work(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("keep")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "mount")
    before = sorted(tmp_path.rglob("*"))
    for name, error, words in (
        ("file", FileExistsError, "neither"),
        ("link", FileExistsError, "full is neither"),
        ("loop", FileExistsError, "neither"),
        ("file/out", NotADirectoryError, "file is not one"),
        ("mount", ValueError, "is a mount point"),
    ):
        calls: list[Any] = []
        with pytest.raises(error, match=words):
            data.preprocess(calls.append, num_workers=0, dest=tmp_path / name)
        assert not calls
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 11}, "num_frames"),
        ({"chunksize": -1}, "chunksize"),
        ({"chunksize": 2, "num_chunks": 2}, "both"),
        ({"num_chunks": 0}, "num_chunks"),
        *[({"dim": dim}, "expected dim as an int in .-2, 2., got") for dim in (2, -3, 0.0, True)],
        ({"dim": None}, "expected dim as an int in .-2, 2., got"),
        ({"num_workers": -1}, "num_workers"),
        ({"max_tasks_per_child": 0}, "max_tasks_per_child"),
        ({"worker_threads": 0}, "worker_threads"),
        ({"mp_start_method": "thread"}, "mp_start_method in .* got 'thread'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_done(split, tmp_path, options, words):
    calls: list[Any] = []
    with pytest.raises(ValueError, match=words):
        split.preprocess(calls.append, dest=tmp_path / "out", **{"num_workers": 0, **options})
    assert not calls
    assert nothing_left(tmp_path)
