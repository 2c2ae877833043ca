"""Shared by the tests of the command: files to work on, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit_command import main
from tests.support import LoopbackHub


@dataclass
class Done:
    """What a command has said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def lead_client_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[LoopbackHub], None]]:
    """Has the client in this process talk to a hub, by plain requests."""
    import huggingface_hub
    import huggingface_hub.constants

    def lead(hub: LoopbackHub) -> None:
        for name, value in hub.env(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        # Read from the environment when the client was imported, which another test may have done.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)

    yield lead
    huggingface_hub.close_session()


def write_demos(path: Path, lengths: tuple[int, ...] = (5, 3, 4)) -> Path:
    """Demonstrations in robomimic's layout, of random numbers."""
    draw = np.random.default_rng(len(lengths))
    with h5py.File(path, "w") as file:
        for number, steps in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"], demo["rewards"] = draw.normal(size=(steps, 3)), draw.normal(size=steps)
            demo["dones"] = (np.arange(steps) == steps - 1).astype(np.int64) * (number != 1)
            states = draw.normal(size=(steps + 1, 4))
            demo["obs/eef"], demo["next_obs/eef"] = states[:-1], states[1:]
    return path


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """A file of three demonstrations."""
    return write_demos(tmp_path / "demo.hdf5")


@pytest.fixture(name="write_demos")
def _write_demos() -> Callable[..., Path]:
    return write_demos
