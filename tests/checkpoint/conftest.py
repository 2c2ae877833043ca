"""Making, changing and comparing checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, SamplerWithoutReplacement
from replaykit.checkpoint import chunks
from replaykit.episodes.episode_laws import RESTORED


def _make(filled: int = 0, *, capacity: int = 8, seed: int = 0, start: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=SamplerWithoutReplacement(),
        writer=RoundRobinWriter(track_generations=True),
        generator=torch.Generator().manual_seed(seed),
        batch_size=2,
    )
    if filled:
        ids = torch.arange(start, start + filled)
        buffer.extend(TensorDict({"id": ids, "next": {"x": ids[:, None].float()}}, [filled]))
    return buffer


@pytest.fixture(scope="session")
def make() -> Callable[..., ReplayBuffer]:
    """``make(filled, capacity=8, seed=0, start=0)``: a buffer with everything that has state."""
    return _make


@pytest.fixture(scope="session")
def save() -> Callable[[Path], None]:
    """``save(folder)``: a checkpoint of a buffer that has wrapped and been drawn from."""

    def dump(folder: Path) -> None:
        buffer = _make(11)
        buffer.sample()
        buffer.dumps(folder)

    return dump


@pytest.fixture(scope="session")
def flipped() -> Callable[[bytes, int], list[bytes]]:
    """``flipped(content, every)``: copies with a bit changed, one for every so many bytes."""

    def copies(content: bytes, every: int) -> list[bytes]:
        found = []
        for at in range(0, len(content), every):
            copy_ = bytearray(content)
            copy_[at] ^= 1 << (at % 8)
            found.append(bytes(copy_))
        return found

    return copies


@pytest.fixture(scope="session")
def state_of() -> Callable[[ReplayBuffer], Any]:
    """Everything that can be seen of a buffer of ``make``, as plain values that compare."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.tolist())
        if isinstance(value, TensorDict):
            return plain(value.to_dict())
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return lambda buffer: copy.deepcopy(
        plain({**buffer.state_dict(), "capacity": buffer.storage.max_size})
    )


@pytest.fixture(scope="session")
def restarted() -> Callable[[Any], Any]:
    """A state as it is after a restart: the episode that was being written ends at its newest row,
    and nothing else is different."""

    def changed(state: Any) -> Any:
        state = copy.deepcopy(state)
        newest = state["_writer"]["_ledger"]["next_position"] - 1
        assert state["_writer"]["_episodes"]["marks"] == []
        state["_writer"]["_episodes"] |= {"marks": [newest], "codes": [RESTORED]}
        return state

    return changed


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few pages, so that a column is many pieces, of few rows."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 6 * chunks.PAGE_BYTES + 1000)
    monkeypatch.setattr(chunks, "PAGED_BYTES", 1000)
    monkeypatch.setattr(chunks, "chunk_bytes", lambda total: chunks._CHUNK_BYTES)
    monkeypatch.setattr("replaykit.checkpoint.checkpoint_writer.chunk_bytes", chunks.chunk_bytes)
