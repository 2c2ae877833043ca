"""Shared by the tests of corpus families: sample files, and rows compared bit for bit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets import CorpusExperienceReplay, Layout, convert, load_dataset
from tests.support import LoopbackHub

SHARED = Path(__file__).parents[4] / "shared/data"

SHA256 = {
    "d4rl/hopper_medium-v2.hdf5": (
        "434de4016d4f326be27cc40fe3983d4163ef0c95a171cc361973a0463e26abf1"
    ),
    "d4rl/hopper_medium.hdf5": "3cc2098457b2d73cf2dda539f4d970816c904bb3a26de896d82cd833885b60f2",
    "d4rl/hopper_medium_replay-v1.hdf5": (
        "17fd371d1f27a9703a3c52a4b015f047cf07f8e6ee77c5eb6f3375e06354b579"
    ),
    "d4rl/door-human-v1.hdf5": "cbde548fa776ca8dc3b86cf4c0c47aca94e3ab00896873deeb40cd5e767512e7",
    "d4rl/antmaze-umaze-v0.hdf5": (
        "6f31d8a502398cbde4107830b54f415b26039a8b07c8a6aa62c9a1d45c71f160"
    ),
    "robomimic/robomimic_ph_lift_low_dim.hdf5": (
        "143fbf6bc2b7c649bd2e88c0de659df4cc48c207eb6dd41b01c11847b12a992f"
    ),
    "robosuite/panda_lift.hdf5": "694f2701136b57354e6b45c0b06a70f147416030239ce8fbc7a28984c5a2b989",
    "maniskill/rlboilerplate_trajectory.h5": (
        "3b38f282d5f8083129aaf6c8a5cdaa731bc04aa10359eb37065a6d072c795eab"
    ),
    "minari_generated/cartpole/random-v0/data/main_data.hdf5": (
        "ee44c46af92d5749527b24d2f6f640bebf905d4a3c36637c2e575d251e575474"
    ),
    "minari_generated/dictenv/random-v0/data/main_data.hdf5": (
        "333a40fa32c3bc4afcb30ba1f4a9471a41d09fd6891c1e558f745d01a3978a8c"
    ),
}


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """The path of a sample file; skips where it is absent or another one."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"sample file {path} not present")
        if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256[name]:
            pytest.skip(f"sample file {path} has another sha256")
        return path

    return find


@pytest.fixture
def fetched(tmp_path: Path, point_client_at: Any) -> Callable[..., Any]:
    """Load a data set from a Hub that serves a folder, and open it again without the Hub."""

    def load(name: str, repo: str, folder: Path) -> Any:
        files: dict[str, Any] = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        with warnings.catch_warnings(), LoopbackHub({repo: {"README.md": b"", **files}}) as hub:
            warnings.simplefilter("ignore", UserWarning)
            point_client_at(hub)
            data = load_dataset(name, 4, root=tmp_path / "hub")
        again = load_dataset(name, 4, root=tmp_path / "hub", download=False)
        assert (again[:] == data[:]).all()
        source = data.published.manifest.source
        assert (source["origin"]["kind"], len(source["origin"]["commit"])) == ("hub", 40)
        return data

    return load


@pytest.fixture
def quietly(tmp_path: Path) -> Callable[..., CorpusExperienceReplay]:
    """Converts without a word; ``target`` names the folder."""

    def run(
        files: Any, layout: Layout, target: str = "data", **options: Any
    ) -> CorpusExperienceReplay:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return convert(files, layout, tmp_path / target, **options)

    return run
