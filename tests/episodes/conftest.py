"""Every kernel that can keep an index."""

from __future__ import annotations

import pytest

from replaykit.episodes import index
from tests.episodes.numpy_ring import NumpyRing

KERNELS = ["numpy", "core"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel of all indexes that a test makes."""
    if request.param == "numpy":
        monkeypatch.setattr(index, "RingEpisodes", NumpyRing)
    return request.param
