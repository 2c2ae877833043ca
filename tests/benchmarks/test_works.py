"""Every work runs through on few rows, and its record holds what the table shows."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.calibration import Calibration, save
from benchmarks.contender import Contender, Mismatch
from benchmarks.harness import ready, take_turns
from benchmarks.holders import RawTorch, Replaykit
from benchmarks.machine import fingerprint
from benchmarks.rows import make_transitions
from benchmarks.setting import Setting
from benchmarks.works import WORKS, calls
from benchmarks.works.growing import AHEAD, RemoteSampling
from benchmarks.works.prioritized import PrioritizedReplaykit, Stepping
from benchmarks.works.transitions import Sampling
from benchmarks.works.trees import BinaryTree, Drawing, SumTree, Updating
from benchmarks.works.writes import Writing
from tests.support.refusals import refuses

HERE = Calibration(
    host=fingerprint(),
    copy={1: 20.0},
    read={1: 40.0},
    lines={1: {1 << 20: 1.0}},
    disk={"sequential_gbs": 1.0, "reads_per_s_1": 20_000.0},
)


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(folder: Path, *arguments: str, calibration: Calibration = HERE) -> tuple[int, Any]:
    save(calibration, folder / "constants.json")
    status = command.main(
        [
            *("--rows", "2000", "--images", "300", "--rounds", "3"),
            *("--calibration", str(folder / "constants.json"), "--scratch", str(folder)),
            *("--json", str(folder / "figures.json"), *arguments),
        ]
    )
    return status, json.loads((folder / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture
def no_cpprb(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the extra `bench` only: the tests do without."""
    monkeypatch.setitem(sys.modules, "cpprb", None)


@pytest.mark.programs
@pytest.mark.usefixtures("no_cpprb")
@pytest.mark.filterwarnings("ignore")
def test_all_works_run_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Conversions take a minute, workers of Ray that import TorchRL half of one.
    works = [name for name in WORKS if name not in ("corpora", "growing")]
    status, record = run(tmp_path, "--only", *works)
    assert status == 0
    assert record["machine"]["processor"] == fingerprint()["processor"]
    assert record["others"] is None or 0 <= record["others"] <= 1
    assert (record["rows"], record["images"], record["rounds"]) == (2000, 300, 3)
    lines = {(line["work"], line["name"]): line for line in record["lines"]}
    ours = lines["uniform sample, 2,000 rows", "replaykit"]
    assert ours["value"] > 0
    assert ours["share"] == pytest.approx(256 * 170 / 20e3 / ours["value"])
    floor = lines["uniform sample, 2,000 rows", "index_select"]
    assert floor["at_most"] == 0.5
    assert floor["low"] <= floor["ratio"] <= floor["high"]
    assert floor["is_met"] == (floor["ratio"] <= 0.5)
    for title in ("add 1", "extend 8", "extend 64", "images, 300 x 2 x 3x64x64"):
        assert lines[title, "replaykit"]["value"] > 0
    assert lines["memory of records", "raw bytes"]["value"] == 170
    prioritized = "prioritized sample + update, 2,000"
    assert lines[prioritized, "replaykit"]["value"] > 0
    assert lines[prioritized, "cpprb"]["at_most"] == 0.2
    assert lines["tree: 256 draws, 20,000", "replaykit, 2,000"]["at_most"] == 1.7
    assert lines["tree: 256 updates, 2,000", "binary tree"]["at_most"] == 0.25
    assert lines["memory of a float32 tree", "replaykit"]["value"] > 4
    cpprb = "uniform sample, 2,000 rows: cpprb"
    assert "cpprb" in record["left_out"][cpprb]
    text = capsys.readouterr().out
    assert f"left out: {cpprb}: " in text
    assert "what is asked, is asked of 1,000,000 rows" in text
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "scratch files are gone"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_corpora_work_compares_with_h5py_and_torchrl(tmp_path: Path) -> None:
    status, record = run(tmp_path, "corpora", "--rounds", "1")
    assert status == 0
    lines = {(line["work"], line["name"]): line for line in record["lines"]}
    for title in ("flat steps, gzip", "demonstrations, images, gzip", "RoboSet trials, gzip"):
        assert lines[title, "plain h5py"]["at_most"] == 2.0
        assert lines[title, "plain h5py"]["ratio"] > 0
        assert lines[f"{title}: 2 at once", "replaykit"]["at_most"] == 0.625
        assert lines[f"{title}: 2 at once", "replaykit"]["ratio"] > 0
    assert lines["one RoboSet file of 2 trials", "TorchRL"]["at_most"] == pytest.approx(1 / 15)
    for title in ("images, 340 MB", "10 steps an episode, 300 MB"):
        assert 0 < lines[f"peak memory, {title}", "replaykit"]["value"] < 256


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_remote_sampling_work_compares_with_torchrl(tmp_path: Path, ray_cluster: Any) -> None:
    status, record = run(tmp_path, "growing")
    assert status == 0
    assert ray_cluster.is_initialized()
    lines = {(line["work"], line["name"]): line for line in record["lines"]}
    for title, most in (("sample over Ray", 0.5), ("sample over Ray, 4 under way", 0.25)):
        assert lines[title, "replaykit"]["value"] > 0
        assert lines[title, "TorchRL"]["at_most"] == most
        assert lines[title, "TorchRL"]["ratio"] > 0


@pytest.mark.usefixtures("no_cpprb")
@pytest.mark.filterwarnings("ignore")
def test_constants_of_another_host_give_no_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(HERE, host={**HERE.host, "processor": "abacus"})
    _, record = run(tmp_path, "--only", "memmap_warm", calibration=other)
    assert record["calibration"] is None
    assert all(line["share"] is None for line in record["lines"])
    assert "there abacus" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_missed_target_is_an_exit_status_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.works.memory.RECORDS_AT_MOST", 0.5)
    assert run(tmp_path, "--only", "memory")[0] == 0
    assert run(tmp_path, "--only", "memory", "--check")[0] == 1


class Shifted(RawTorch):
    """Says one row and returns the next."""

    def tell(self, batch: Any) -> Any:
        index, leaves = batch
        return (index + 1) % self.rows, leaves


class Biased(RawTorch):
    """Draws from the first half."""

    def sampler(self) -> Any:
        def sample(_: Any) -> Any:
            index = torch.randint(self.rows // 2, (256,))
            return index, {key: column[index] for key, column in self.columns.items()}

        return sample


class Forgetful(RawTorch):
    """Writes all leaves but one."""

    def writer(self, count: int) -> Any:
        write = super().writer(count)
        return lambda block: write({**block, ("action",): torch.zeros_like(block["action",])})


class Neighbour(SumTree):
    """Finds the leaf beside the right one."""

    def find(self, prefix: torch.Tensor) -> torch.Tensor:
        return (super().find(prefix) + 1) % self.leaves


class Stale(SumTree):
    """Takes new weights and keeps the old ones."""

    def updater(self) -> Any:
        return lambda index, weights: None


class Flat(SumTree):
    """Draws all leaves that have a weight alike."""

    def drawer(self) -> Any:
        leaves = (self.tree.leaves > 0).nonzero().flatten()
        return lambda: leaves[torch.randint(len(leaves) // 2, (256,))]


def test_binary_tree_passes_the_same_checks_or_is_named() -> None:
    found, absent = ready(Updating(SumTree, "ours", 999), [Updating(BinaryTree, "other", 999)])
    assert list(found) == ["ours", "other"]
    assert absent == {}


class Unweighted(PrioritizedReplaykit):
    """Gives every row the same weight."""

    def weights(self, batch: Any) -> torch.Tensor:
        return torch.ones(len(super().weights(batch)))


class Unmoved(PrioritizedReplaykit):
    """Takes no priorities at all."""

    def prioritize(self, priorities: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "work", "ours", "complaint"),
    [
        (Shifted, Sampling, Replaykit, "is not what was written"),
        (Biased, Sampling, Replaykit, "frequencies are not of the law"),
        (Forgetful, Writing, Replaykit, "is not what was written"),
        (Unweighted, Stepping, PrioritizedReplaykit, "weights are not"),
        (Unmoved, Stepping, PrioritizedReplaykit, "frequencies are not"),
        *((kind, Drawing, SumTree, "refused") for kind in (Neighbour, Stale, Flat)),
    ],
)
def test_contender_that_does_other_work_is_refused(
    kind: Any, work: Any, ours: Any, complaint: str
) -> None:
    given = 1000 if work is Drawing else make_transitions(1000)
    found, absent = ready(work(ours, "ours", given), [work(kind, "wrong", given)])
    assert list(found) == ["ours"]
    assert complaint in absent["wrong"]


def test_contender_with_an_empty_buffer_is_refused() -> None:
    leaves = make_transitions(1000)
    contender = Sampling(Replaykit, "ours", leaves)
    contender.make()
    contender.holder.buffer.empty()  # type: ignore[attr-defined]
    refuses(Mismatch, "holds 0 rows of 1000", contender.check)


class Known(Contender):
    """Make two Python calls and three C calls, and its own call."""

    name = "known"

    def make(self) -> None: ...

    def check(self) -> None: ...

    def timed(self) -> Callable[[Any], Any]:
        def step() -> int:
            return len("row")

        def work(_: Any) -> int:
            return step() + step() + abs(-1)

        return work


def test_calls_of_python_and_of_c_are_counted_apart() -> None:
    assert calls.count_calls(Known()) == (3, 3)
    assert sys.getprofile() is None


@pytest.mark.programs
def test_two_runs_count_the_same_calls(tmp_path: Path) -> None:
    setting = Setting(rows=1000, images=100, rounds=1, threads=1, scratch=tmp_path)
    first, second = calls.run(setting), calls.run(setting)
    assert first == second
    assert [line.work for line in first] == list(calls.asked(setting))
    assert all(isinstance(line.value, int) and line.value > 10 for line in first)


SECONDS = 0.004


class Pipeline:
    """Serves one request after the other, SECONDS each, with AHEAD of them under way."""

    def __init__(self, leaves: Any) -> None:
        self.due: deque[float] = deque()
        self.last = 0.0

    def sampler(self) -> Callable[[Any], None]:
        return self.sample

    def sample(self, _: Any) -> None:
        while len(self.due) <= AHEAD:
            self.last = max(self.last, time.perf_counter()) + SECONDS
            self.due.append(self.last)
        time.sleep(max(0.0, self.due.popleft() - time.perf_counter()))


def test_timing_excludes_batches_prepared_before_the_turn() -> None:
    """A sample of a full pipeline takes as long as the actor needs for one, and no less."""
    kind: Any = Pipeline
    work = RemoteSampling(kind, "pipeline", {"x": torch.zeros(1)}, AHEAD)
    work.make()
    times = take_turns({"pipeline": work}, rounds=7)["pipeline"]
    assert statistics.median(times.rounds) > 0.85 * SECONDS * 1e6
