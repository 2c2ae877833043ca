"""Workers of a ``DataLoader`` open a data set's files themselves."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from replaykit import ImmutableDatasetWriter, ReplayBuffer, SamplerWithoutReplacement
from replaykit.datasets.published_buffer import MappedStorage
from replaykit.datasets.publishing import open_directory

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_read_a_data_set_where_it_lies(method: str, target: Path, fingerprint: Any) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"needs {method}")
    storage = MappedStorage(open_directory(target))
    rb = ReplayBuffer(
        storage=storage,
        writer=ImmutableDatasetWriter(),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
    )
    here = list(rb.dataloader(seed=4))
    loader = rb.dataloader(workers=1, multiprocessing_context=method, seed=4)
    there = list(loader)
    for left, right in zip(here, there, strict=True):
        assert fingerprint(left) == fingerprint(right)
    assert sorted(torch.cat([batch["index"] for batch in there]).tolist()) == list(range(len(rb)))
    rb.set_at_("action", rb["action"][:1] + 1, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="a MappedStorage would be copied"):
        rb.dataloader(workers=1, multiprocessing_context="spawn")
    assert not multiprocessing.active_children()
