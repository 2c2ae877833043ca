"""A huggingface_hub client that talks to a hub of the test, and to nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replaykit.testing import LoopbackHub


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
