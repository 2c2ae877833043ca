"""Every kernel that can keep an index."""

from __future__ import annotations

import pytest

from replaykit import native
from replaykit.episodes import index
from replaykit.episodes.ring import RingEpisodes

KERNELS = [
    "numpy",
    pytest.param("core", marks=pytest.mark.skipif(not native.HAS_CORE, reason="no core")),
]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel of all indexes that a test makes."""
    if request.param == "numpy":
        monkeypatch.setattr(index, "new_ring", RingEpisodes)
    return request.param
