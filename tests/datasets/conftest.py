"""Shared by the tests of data sets: a hub, files of trials, conversions, and RoboSet over both."""

from __future__ import annotations

import hashlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from replaykit.datasets import RobosetExperienceReplay
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import Published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.support import LoopbackHub

# -- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def point_client_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[LoopbackHub], None]]:
    """Leads the client, in this process, to a hub and to a cache below ``tmp_path / "hf"``.

    Where the client waits between attempts of its own, it does not.
    """
    import huggingface_hub

    def point(hub: LoopbackHub) -> None:
        for name, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)

    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", clock)
    # Read from the environment when the client is imported, which has been done.
    for name in ("TELEMETRY", "XET", "IMPLICIT_TOKEN"):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_HUB_DISABLE_{name}", True)
    # Not by its functions: they warn where the environment says so too.
    bars = sys.modules["huggingface_hub.utils.tqdm"]
    monkeypatch.setitem(bars.progress_bar_states, "_global", False)
    yield point
    huggingface_hub.close_session()


class CountingHub(LoopbackHub):
    """A hub whose every request counts, those of the client for itself apart."""

    def asked(self, method: str | None = None, route: str | None = None) -> list[Any]:
        return [
            request
            for request in self.requests
            if request.route and method in (None, request.method) and route in (None, request.route)
        ]


@pytest.fixture
def hub(
    request: pytest.FixtureRequest, point_client_at: Callable[[LoopbackHub], None]
) -> Iterator[CountingHub]:
    """A hub that serves the ``FILES`` of the test's module as its ``REPO``."""
    with CountingHub({request.module.REPO: request.module.FILES}) as hub:
        point_client_at(hub)
        yield hub


# -- files and their conversion -------------------------------------------------------------------


SAMPLE = Path(__file__).parents[3] / "shared/data/robohive/fk1_random_policy_trace.h5"
SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"


@pytest.fixture
def sample() -> Path:
    if not SAMPLE.exists():
        pytest.skip(f"sample file {SAMPLE} not present")
    if hashlib.sha256(SAMPLE.read_bytes()).hexdigest() != SAMPLE_SHA256:
        pytest.skip(f"sample file {SAMPLE} has another sha256")
    return SAMPLE


def write(path: Path, *trials: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with RoboHiveWriter(path, float_dtype=None) as writer:
        for trial in trials:
            writer.add_trial(**trial)
    return path


@pytest.fixture(name="write")
def _write() -> Callable[..., Any]:
    return write


def convert(target: Path, *files: Path, **options: Any) -> Published:
    return ensure_dataset(
        target, get_sources=lambda: Sources.local(files), layout=ROBOHIVE, **options
    )


@pytest.fixture(name="convert")
def _convert() -> Callable[..., Any]:
    return convert


def quietly(target: Path, *files: Path, **options: Any) -> Published:
    """Converts files of which it is known that something is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return convert(target, *files, **options)


@pytest.fixture(name="quietly")
def _quietly() -> Callable[..., Any]:
    return quietly


# -- rows against their files ---------------------------------------------------------------------


def read_rows(files: list[Path], leaves: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """The rows of trials, one at a time, straight from the alignment table of the layout."""
    rows: dict[tuple[str, ...], list[Any]] = {}

    def put(value: Any, *key: str) -> None:
        rows.setdefault(key, []).append(value)

    for seed, path in enumerate(sorted(files, key=str)):
        with h5py.File(path) as file:
            numbers = sorted(int(re.fullmatch(r"Trial(\d+)", name)[1]) for name in file)
            for number in numbers:
                trial = {leaf: file[f"Trial{number}/{leaf}"][...] for leaf in leaves}
                records = len(trial["actions"])
                tailed = bool(np.isnan(trial["actions"][records - 1]).all())
                for t in range(records - 1):
                    last = t == records - 2
                    done = bool(trial["done"][t + 1])
                    put(trial["observations"][t], "observation")
                    put(trial["actions"][t], "action")
                    put(trial["time"][t], "time")
                    put(trial["observations"][t + 1], "next", "observation")
                    put([trial["rewards"][t + 1]], "next", "reward")
                    put([done], "next", "terminated")
                    put([last and not (done and tailed)], "next", "truncated")
                    put([last or done], "next", "done")
                    put(seed, "seed")
                    put(number, "episode")
                    for flag in ("done", "terminated", "truncated"):
                        put([False], flag)
                    for leaf in leaves:
                        if leaf.startswith("env_infos/"):
                            key = leaf.split("/")[1:]
                            put(trial[leaf][t], "info", *key)
                            put(trial[leaf][t + 1], "next", "info", *key)
    return {key: np.stack([np.asarray(value) for value in found]) for key, found in rows.items()}


@pytest.fixture(name="read_rows")
def _read_rows() -> Callable[..., Any]:
    return read_rows


def leaf_paths(path: Path) -> list[str]:
    found: list[str] = []
    with h5py.File(path) as file:
        group = file[next(iter(file))]
        group.visititems(lambda n, o: found.append(n) if isinstance(o, h5py.Dataset) else None)
    return found


@pytest.fixture(name="leaf_paths")
def _leaf_paths() -> Callable[..., Any]:
    return leaf_paths


def assert_equal(found: Published, expected: dict[tuple[str, ...], np.ndarray]) -> None:
    """Same keys, and for each the same shape, dtype and bytes."""
    assert found.columns.keys() == expected.keys()
    for key, column in found.columns.items():
        ours, theirs = column.numpy(), expected[key]
        assert ours.shape == theirs.shape, key
        assert ours.dtype == theirs.dtype, key
        assert ours.tobytes() == theirs.tobytes(), key


@pytest.fixture(name="assert_equal")
def _assert_equal() -> Callable[..., Any]:
    return assert_equal


def assert_ted(found: Published) -> None:
    """The invariants T1 to T9 of a table of transitions."""
    data = found.tensordict()
    done, terminated, truncated = (
        data["next", name].squeeze(-1) for name in ("done", "terminated", "truncated")
    )
    assert torch.equal(done, terminated | truncated)
    for name in ("done", "terminated", "truncated"):
        assert data[name].shape == (found.rows, 1)
        assert not data[name].any()
    assert ("reward",) not in found.columns
    ids = torch.stack([data["seed"], data["episode"]], 1)
    starts, lengths = found.episodes["start"], found.episodes["length"]
    assert starts.tolist() == [0, *np.cumsum(lengths.numpy())[:-1]]
    assert int(lengths.sum()) == found.rows
    assert done.nonzero().flatten().tolist() == (starts + lengths - 1).tolist()
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        assert len(ids[rows].unique(dim=0)) == 1
        assert torch.equal(data["next", "observation"][rows][:-1], data["observation"][rows][1:])
    assert len(ids.unique(dim=0)) == len(starts)
    assert data["next"].batch_size == data.batch_size
    if ("info", "time") in found.columns:
        assert data["info"].batch_size == data.batch_size
        assert data["next", "info"].batch_size == data.batch_size


@pytest.fixture(name="assert_ted")
def _assert_ted() -> Callable[..., Any]:
    return assert_ted


# -- a published data set -------------------------------------------------------------------------


def write_source(path: Path, records: int = 5, seed: int = 0) -> Path:
    with RoboHiveWriter(path) as writer:
        writer.add_trial(**make_trial(records, seed=seed))
        writer.add_trial(**make_trial(3, seed=seed + 50, terminated=True))
    return path


@pytest.fixture(name="write_source")
def _write_source() -> Callable[..., Any]:
    return write_source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "a.h5")


@pytest.fixture
def target(tmp_path: Path, source: Path) -> Path:
    """A published data set of six rows, alone in its directory."""
    convert(tmp_path / "root" / "data", source)
    return tmp_path / "root" / "data"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(name="names")
def _names() -> Callable[..., Any]:
    return names


def never() -> Sources:
    raise AssertionError("the sources were asked for")


@pytest.fixture(name="never")
def _never() -> Callable[..., Any]:
    return never


# -- RoboSet --------------------------------------------------------------------------------------


ROBOSET_REPO = "jdvakil/RoboSet_Sim"
ROBOSET_ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


def write_file(path: Path, *lengths: int, seed: int = 0, **options: Any) -> Path:
    with RoboHiveWriter(path) as writer:
        for number, records in enumerate(lengths):
            writer.add_trial(**make_trial(records, seed=seed + number, **options))
    return path


@pytest.fixture(name="write_file")
def _write_file() -> Callable[..., Any]:
    return write_file


def served(folder: Path, *files: Path, dataset_id: str = ROBOSET_ID) -> dict[str, Path]:
    return {f"{dataset_id}/seed{i}/x_trace.h5": path for i, path in enumerate(files)}


@pytest.fixture(name="served")
def _served() -> Callable[..., Any]:
    return served


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
    import huggingface_hub

    hubs = []

    def start(*files: Path, **more: Path | bytes) -> Serving:
        hub = LoopbackHub({ROBOSET_REPO: {**served(tmp_path, *files), **more}})
        hub.__enter__()
        hubs.append(hub)
        return Serving(hub, tmp_path, monkeypatch)

    yield start
    huggingface_hub.close_session()
    for hub in hubs:
        hub.__exit__(None, None, None)


def construct(root: Path, **options: Any) -> RobosetExperienceReplay:
    return RobosetExperienceReplay(ROBOSET_ID, **{"batch_size": 4, "root": root, **options})


@pytest.fixture(name="construct")
def _construct() -> Callable[..., Any]:
    return construct
