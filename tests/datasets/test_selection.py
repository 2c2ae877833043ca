"""Episodes that are chosen: by a name, a range, positions, or a look at the table."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replaykit.datasets import RobosetExperienceReplay, convert
from replaykit.datasets import open as open_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.published_buffer import chosen_episodes
from replaykit.testing.robohive_files import make_trial
from tests.datasets.trials import write

ID = "DAPG(human)/pen_v2d-v1"


@pytest.fixture
def data(tmp_path):
    """Episodes of 3, 5, 2 and 4 rows in two files."""
    trials = [make_trial(n + 1, seed=k, terminated=k % 2 == 0) for k, n in enumerate((3, 5, 2, 4))]
    files = [write(tmp_path / "a.h5", *trials[:2]), write(tmp_path / "b.h5", *trials[2:])]
    return convert(files, ROBOHIVE, tmp_path / "data")


CHOICES = {
    "range": ({"split": "1:3"}, [1, 2]),
    "fraction": ({"split": "25%:75%"}, [1, 3]),
    "open range": ({"split": "2:"}, [2, 3]),
    "slice": ({"episodes": slice(0, 2)}, [0, 1]),
    "steps": ({"episodes": slice(None, None, 2)}, [0, 2]),
    "positions": ({"episodes": [3, 0, 3]}, [0, 3]),
    "tensor": ({"episodes": torch.tensor([1, 3])}, [1, 3]),
    "predicate": ({"episodes": lambda table: table["length"] > 2}, [0, 1, 3]),
    "both": ({"split": "1:", "episodes": lambda table: table["terminated"]}, [2]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_rows_are_those_of_the_chosen_episodes(tmp_path, data, name):
    arguments, positions = CHOICES[name]
    some = open_dataset(tmp_path / "data", **arguments)
    table = data.episode_table
    rows = torch.cat(
        [torch.arange(table["start"][e], table["start"][e] + table["length"][e]) for e in positions]
    )
    assert (some[:] == data[:][rows]).all()
    assert some.episode_table["digest"].tolist() == table["digest"][positions].tolist()
    starts, lengths = some.episode_table["start"], some.episode_table["length"]
    assert starts.tolist() == [0, *np.cumsum(lengths.numpy())[:-1].tolist()]
    ends = some[:]["next", "done"].nonzero()[:, 0]
    assert ends.tolist() == (starts + lengths - 1).tolist()
    for _ in range(2):
        again = pickle.loads(pickle.dumps(some.storage))
        assert (again[:] == some[:]).all()
        assert again.episode_table["start"].tolist() == starts.tolist()
        some[0] = some[1]  # a copy of edited rows is made without the files


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("cuts", [(50,), (80,), (33.3, 66.6), (10, 20, 90), (0,), (100,)])
@pytest.mark.parametrize("seed", ["", "@0", "@7"])
def test_fractions_are_disjoint_and_cover_all_episodes(count, cuts, seed):
    """S3: and are the same every time."""
    published = SimpleNamespace(manifest=SimpleNamespace(episodes=count, report={}))

    def chosen(first: float, stop: float) -> list[int]:
        try:
            return chosen_episodes(published, f"{first}%:{stop}%{seed}", None).tolist()
        except ValueError:
            return []

    parts = [chosen(a, b) for a, b in itertools.pairwise((0, *cuts, 100))]
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert parts == [chosen(a, b) for a, b in itertools.pairwise((0, *cuts, 100))]
    for part, (a, b) in zip(parts, itertools.pairwise((0, *cuts, 100)), strict=True):
        assert abs(len(part) - count * (b - a) / 100) <= 1


def test_fractions_are_of_a_random_order_that_the_seed_decides():
    """The numbers are those of NumPy's MT19937, which never change."""
    published = SimpleNamespace(manifest=SimpleNamespace(episodes=10, report={}))
    found = {s: chosen_episodes(published, f":30%@{s}", None).tolist() for s in (0, 1, 2)}
    wanted = {s: sorted(np.random.RandomState(s).permutation(10)[:3].tolist()) for s in (0, 1, 2)}
    assert found == wanted
    assert chosen_episodes(published, "0%:30%", None).tolist() == found[0] == [2, 4, 8]


def test_episodes_that_follow_one_another_are_mapped(tmp_path, data):
    """S4: no copy; what is chosen lies inside the mapped column."""
    some = open_dataset(tmp_path / "data", split="1:3")
    column = some.published.columns["observation",]
    address, row_bytes = column.data_ptr(), column[0].nbytes
    assert some.storage.column("observation").data_ptr() == address + 3 * row_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "train"}, "split as a range such as '0:100' or '0%:80%', got 'train'"),
        ({"split": "0%:101%"}, "split as a range within '0%:100%', got '0%:101%'"),
        ({"split": "80%:20%"}, "split as a range within '0%:100%', got '80%:20%'"),
        ({"split": "0%:80%@x"}, "split as a range such as '0:100' or '0%:80%', got '0%:80%@x'"),
        ({"split": "50%:50%"}, "to choose some of 4 episodes, got none"),
        ({"split": "4:"}, "to choose some of 4 episodes, got none"),
        ({"episodes": [4]}, "episodes as positions below 4, got 4"),
        ({"episodes": [-1]}, "episodes as positions below 4, got -1"),
        ({"episodes": [0.5]}, "episodes as positions, got torch.float32"),
        ({"episodes": lambda table: table["length"]}, r"return bool \[4\], got torch.int64"),
        ({"episodes": lambda table: torch.ones(3, dtype=torch.bool)}, r"bool \[4\], .*\[3\]"),
    ],
)
def test_invalid_selection_of_episodes_is_refused(tmp_path, data, arguments, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / "data", **arguments)


def test_class_chooses_too_flat_and_split(tmp_path, data):
    files = [tmp_path / "a.h5", tmp_path / "b.h5"]
    options = {"root": tmp_path / "root", "source": files, "episodes": [1, 3]}
    flat = RobosetExperienceReplay(ID, 2, **options)
    assert len(flat) == 9
    padded = RobosetExperienceReplay(ID, 2, split_trajs=True, **options)
    assert padded[:].shape == (2, 5)
    assert padded[:]["mask"].sum(1).tolist() == [5, 4]
    kept = flat[:]["next", "reward"]
    assert torch.equal(padded[:]["next", "reward"][padded[:]["mask"]], kept)
