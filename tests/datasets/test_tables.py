"""Tables and trajectories become data sets: the rows, the rules of values, and all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    AmagoTrajectories,
    LazyTensorStorage,
    LeRobotExperienceReplay,
    ReplayBuffer,
    TrajectoryChunks,
    TrajectoryWriter,
    feed_trajectories,
)
from replaykit.datasets import Policies, convert
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.table_sources import SourceColumn, TableEpisodes, TableLayout
from replaykit.datasets.families import D4RL
from replaykit.errors import CorpusError
from replaykit.inspection import validate

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped. a.txt. part 2. it has no rows")
LENGTHS = [4, 3, 0, 2]
STATE, ACTION = ("observation", "state"), ("action",)
REWARD, NEXT = ("next", "reward"), ("next", "observation", "state")
ENDED = ("next", "terminated")


@dataclass(frozen=True, kw_only=True)
class Memory(TableLayout):
    """A layout whose source is this object, with columns in memory."""

    name: str = "memory"
    version: int = 1
    suffixes: tuple[str, ...] = (".txt",)
    columns_of: dict[Any, np.ndarray] = field(default_factory=dict)
    step: int = 3

    def open(self, sources: Any, policies: Any, judge: Any) -> Any:
        return self

    left_out = ()
    attached = {}  # noqa: RUF012
    facts = {"fps": 10}  # noqa: RUF012
    splits = {"train": [1, 3]}  # noqa: RUF012

    @property
    def episodes(self) -> TableEpisodes:
        names = [f"part {at}" for at in range(len(LENGTHS))]
        return TableEpisodes(np.array(LENGTHS), np.arange(len(LENGTHS)), names)

    @property
    def columns(self) -> list[SourceColumn]:
        return [
            SourceColumn(key, values.shape[1:], values.dtype, "/".join(key))
            for key, values in self.columns_of.items()
        ]

    def location(self, position: int) -> Location:
        return Location(Path("a.txt"), "a.txt", f"part {position}")

    def blocks(self, kept: Any, keys: Any, block_bytes: int) -> Iterator[Any]:
        rows = np.repeat(kept, LENGTHS)
        for size, key in enumerate(keys):  # the columns do not advance together
            values = self.columns_of[key][rows]
            for start in range(0, len(values), self.step + size):
                yield {key: values[start : start + self.step + size]}


def memory(**changes: Any) -> Memory:
    rng, total = np.random.default_rng(0), sum(LENGTHS)
    state = rng.normal(size=(total, 2))
    last = np.cumsum(LENGTHS)[[0, 1, 3]] - 1
    after = np.roll(state, -1, 0)
    after[last] = -1
    columns = {
        STATE: state,
        NEXT: after,
        ACTION: rng.normal(size=(total, 1)).astype(np.float32),
        REWARD: np.arange(total, dtype=np.float32)[:, None],
        ENDED: np.isin(np.arange(total), last[:2])[:, None],
    }
    columns.update(
        {key: change(columns[key].copy()) for key, change in changes.pop("of", {}).items()}
    )
    return Memory(columns_of=columns, **changes)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    return tmp_path / "a.txt"


@pytest.mark.parametrize("dest", ["", "a/b", "../link/b"])
@pytest.mark.parametrize(
    "call",
    [
        lambda folder, dest: convert(folder, memory(), dest),
        lambda folder, dest: convert(folder, D4RL, dest),
        lambda folder, dest: LeRobotExperienceReplay(
            "me", 1, source=folder, root=dest, layout=memory()
        ),
    ],
)
def test_no_data_set_is_made_in_the_folder_of_its_source(
    call: Any, dest: str, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"expected a directory outside of the source {folder}"):
        call(folder, folder / dest)
    assert sorted(tmp_path.rglob("*")) == before


def spoil(row: int, value: Any) -> Any:
    def change(values: np.ndarray) -> np.ndarray:
        values[row] = value
        return values

    return change


@pytest.mark.parametrize("repeated", ["keep", "once"])
def test_rows_of_a_table(repeated: Any, source: Path, tmp_path: Path) -> None:
    layout = memory()
    policies = Policies(casts={"float64": "float32"}, repeated=repeated)
    data = convert(source, layout, tmp_path / "data", policies=policies)
    rows, table = data[:], data.episode_table
    for key, values in layout.columns_of.items():
        cast = values.astype(np.float32) if values.dtype == np.float64 else values
        assert np.array_equal(rows[key].numpy(), cast), key
    assert bool(data.published.manifest.finals) == (repeated == "once")
    assert table["length"].tolist() == [4, 3, 2]
    assert table["return"].tolist() == [6, 15, 15]
    assert table["terminated"].tolist() == [True, True, False]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [3, 6, 8]
    assert rows["episode"].tolist() == [0] * 4 + [1] * 3 + [3] * 2
    assert data.published.manifest.report["splits"] == {"train": [1, 2]}
    assert data.storage.fps == 10
    found = data.statistics([ACTION])["action", "mean"]
    assert torch.allclose(found, rows["action"].double().mean(0))
    assert all(finding.ok for finding in validate(tmp_path / "data"))
    assert convert(source, layout, tmp_path / "data", policies=policies).storage.identity == (
        data.storage.identity
    )
    kept = convert(source, layout, tmp_path / "part", policies=Policies(include=[ACTION]))
    assert set(kept.published.columns) > {ACTION}
    assert STATE not in kept.published.columns


@pytest.mark.parametrize(
    ("of", "rule", "text"),
    [
        ({ACTION: spoil(5, np.nan)}, "V20", r"part 1/action, record 1: is not finite"),
        ({STATE: spoil(8, np.inf)}, "V21", r"part 3/observation/state, record 1"),
        ({REWARD: spoil(0, np.nan)}, "V21", r"part 0/next/reward, record 0"),
        ({ENDED: spoil(1, True)}, "V31", r"part 0/next/terminated, record 1"),
    ],
)
def test_bad_values_are_refused_or_left_out(
    of: Any, rule: str, text: str, source: Path, tmp_path: Path
) -> None:
    layout = memory(of=of)
    with pytest.raises(CorpusError, match=rf"{text}.*\[{rule}\]"):
        convert(source, layout, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    policies = Policies(on_invalid="skip", copies="drop")
    with pytest.warns(UserWarning, match=rf"skipped.*\[{rule}\]"):
        data = convert(source, layout, tmp_path / "data", policies=policies)
    assert data.published.manifest.episodes == 2
    assert all(finding.ok for finding in validate(tmp_path / "data"))


def test_a_late_fault_of_an_episode_without_rows_is_reported(source: Path, tmp_path: Path) -> None:
    class Late(Memory):
        def open(self, sources: Any, policies: Any, judge: Any) -> Any:
            Late.judge = judge
            return self

        def blocks(self, kept: Any, keys: Any, block_bytes: int) -> Iterator[Any]:
            Late.judge.condemn(2, self.location(2).error("is odd", "V70"))
            return super().blocks(kept, keys, block_bytes)

    layout, policies = Late(columns_of=memory().columns_of), Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=r"skipped: a.txt: part 2: is odd \[V70\]"):
        data = convert(source, layout, tmp_path / "data", policies=policies)
    assert data.published.manifest.episodes == 3


def test_policies_of_tables(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policy 'constant'"):
        convert(source, memory(), tmp_path / "data", policies=Policies(constant="drop"))
    with pytest.raises(ValueError, match="exclude: 'nothing' matches nothing"):
        convert(source, memory(), tmp_path / "data", policies=Policies(exclude=["nothing"]))
    for value, dtype in ((1e300, "float32"), (-1.0, "uint8"), (0.5, "int64"), (np.nan, "int32")):
        policies = Policies(casts={"float64": dtype}, exclude=[("next", "observation")])
        layout = memory()
        layout.columns_of[STATE] = wholes = np.full((sum(LENGTHS), 2), 255.0)
        data = convert(source, layout, tmp_path / dtype, policies=policies)
        assert (data[:][STATE] == 255).all()
        wholes[4] = value
        with pytest.raises(CorpusError, match=rf"part 1.*does not fit {dtype} \[V10\]"):
            convert(source, layout, tmp_path / "data", policies=policies)
    for layout in (None, "lerobot"):
        with pytest.raises(TypeError, match=f"expected a layout .* such as LEROBOT .* {layout!r}"):
            convert(source, layout, tmp_path / "data")


def steps(count: int, seed: int) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    states = torch.randn(count + 1, 2, generator=rng)
    last = torch.arange(count) == count - 1
    return TensorDict(
        {
            "observation": states[:-1],
            "action": torch.randn(count, 1, generator=rng),
            "next": {
                "observation": states[1:],
                "reward": torch.ones(count, 1),
                "terminated": last.unsqueeze(1),
                "truncated": torch.zeros(count, 1, dtype=torch.bool),
                "done": last.unsqueeze(1),
            },
        },
        [count],
    )


def chunks(folder: Path, seeds: Sequence[int] = (4, 1, 6)) -> Any:
    with TrajectoryWriter(folder) as writer:
        for seed in seeds:
            writer.extend(steps(seed, seed))
    return TrajectoryChunks(folder)


def amago(folder: Path) -> Any:
    folder.mkdir()
    for name, count in (("a", 3), ("b", 5)):
        np.savez(
            folder / f"{name}.npz",
            _OBS_KEY_observation=np.random.default_rng(count).normal(size=(count + 1, 2)),
            actions=np.ones((count, 1)),
            rews=np.arange(count)[:, None],
            dones=(np.arange(count) == count - 1)[:, None],
            time_idxs=np.arange(count + 1),
        )
    return AmagoTrajectories(folder)


@pytest.mark.parametrize("make", [chunks, amago])
def test_trajectories_become_the_rows_that_they_feed(make: Any, tmp_path: Path) -> None:
    trajectories = make(tmp_path / "source")
    data = convert(trajectories, None, tmp_path / "data", policies=Policies(repeated="once"))
    rb: Any = ReplayBuffer(storage=LazyTensorStorage(100))
    assert feed_trajectories(rb, trajectories) == len(data)
    fed, rows = rb[:], data[:]
    for key in fed.keys(True, True):
        if key not in ("index", "index_generation"):
            assert torch.equal(rows[key], fed[key]), key
    assert data.published.manifest.finals
    assert data.episode_table["length"].tolist() == rb.episodes.lengths.tolist()
    again = convert(trajectories, None, tmp_path / "data", policies=Policies(repeated="once"))
    assert again.storage.identity == data.storage.identity
    other = AmagoTrajectories(tmp_path) if make is amago else chunks(tmp_path / "other", [2])
    with pytest.raises(RuntimeError, match="a data set whose files"):
        convert(other, None, tmp_path / "data", policies=Policies(repeated="once"))


def test_copies_of_episodes(tmp_path: Path) -> None:
    twice = chunks(tmp_path / "source", [4, 3, 4])
    with pytest.warns(UserWarning, match=r"trajectory_2 as .*trajectory_0 \[V36\]"):
        assert len(convert(twice, None, tmp_path / "keep")) == 11
    with pytest.raises(CorpusError, match=r"trajectory_2.*trajectory_0 \[V36\]"):
        convert(twice, None, tmp_path / "data", policies=Policies(copies="error"))
    unseen = Policies(copies="drop", exclude=["observation", ("next", "observation")])
    with pytest.raises(ValueError, match="copies of episodes cannot be recognized"):
        convert(twice, None, tmp_path / "data", policies=unseen)
    with pytest.warns(UserWarning, match="V36"):
        data = convert(twice, None, tmp_path / "data", policies=Policies(copies="drop"))
    assert data.episode_table["episode"].tolist() == [0, 1]
