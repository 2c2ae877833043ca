"""Shared by the tests of the command: files to work on, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replaykit_command import main
from tests.support import LoopbackHub
from tests.tools.conftest import write_robomimic


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


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """A file of three demonstrations."""
    return write_robomimic(tmp_path / "demo.hdf5")
