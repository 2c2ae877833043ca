"""A data set on disk is complete or absent, whenever the making of it ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tensordict import TensorDict

from replaykit.datasets.publishing import open_published, verify_published
from replaykit.filesystem import siblings
from tests.datasets.trials import convert, names


@pytest.mark.pitfall("DS3")
def test_interrupt_at_any_write_leaves_nothing_that_loads(tmp_path, source, monkeypatch):
    """N7: the interrupt comes with the k-th write, for every k."""
    real = os.pwrite
    state = {"count": 0, "stop": 0}

    def counting(*args: Any) -> int:
        state["count"] += 1
        if state["count"] == state["stop"]:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr("os.pwrite", counting)
    convert(tmp_path / "whole", source)
    writes = state["count"]
    assert writes > 30
    target = tmp_path / "root" / "data"
    for stop in [*range(1, writes, 5), writes]:
        state.update(count=0, stop=stop)
        with pytest.raises(KeyboardInterrupt):
            convert(target, source)
        assert names(target.parent) == [".data.lock"]
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(target)
    state.update(stop=0)
    assert convert(target, source).rows == 6
    verify_published(target)


def test_half_built_directory_does_not_load(tmp_path, source, monkeypatch):
    """Not even the private directory can be taken for a table."""
    seen = []

    def look(self: Any) -> None:
        (private,) = siblings(tmp_path / "data", "tmp")
        with pytest.raises(FileNotFoundError):
            TensorDict.load_memmap(private)
        with pytest.raises(RuntimeError, match="no manifest"):
            open_published(private)
        seen.append(private)

    monkeypatch.setattr("replaykit.datasets.engine.row_writer.RowWriter.finish", look)
    convert(tmp_path / "data", source)
    assert len(seen) == 1
    assert not seen[0].exists()
