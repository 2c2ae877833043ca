"""All processes agree how the next row of a stream that lost all its rows begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from replaykit import LaneWriter, LazyMemmapStorage, ReplayBuffer


@pytest.mark.parametrize("knows", [True, False])  # the writer had the rows that were removed
@pytest.mark.parametrize("ended", [True, False])
def test_processes_agree_on_the_next_row(ended: bool, knows: bool, tmp_path: Path) -> None:
    def extend(rb: ReplayBuffer, key: int, done: bool) -> None:
        row = {"id": torch.tensor([key]), "next": {"done": torch.tensor([[done]])}}
        rb.extend(TensorDict(row, [1]))

    def heads(rb: ReplayBuffer) -> list[str]:
        return [episode.head.name for episode in rb.episodes]

    storage = LazyMemmapStorage(6, lane_key="id", scratch_dir=tmp_path)
    buffers = [ReplayBuffer(storage=storage, writer=LaneWriter(3), shared=True)]
    for key in range(2):
        extend(buffers[0], key, ended)
    buffers += [ReplayBuffer.join(tmp_path, writer=LaneWriter(3)) for _ in range(2)]
    for rb in buffers[: 2 + knows]:
        assert heads(rb) == ["RESET", "RESET"]
    assert buffers[0].remove_oldest(1, lane=0) == 1
    assert [heads(rb) for rb in buffers] == [["RESET"]] * 3
    extend(buffers[2], 0, False)
    begin = "CUT" if knows and not ended else "RESET"
    assert [heads(rb) for rb in buffers] == [[begin, "RESET"]] * 3
