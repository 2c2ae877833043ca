"""Several handles onto the rows of one shared buffer in one process, and all that they agree on."""

from __future__ import annotations

import pickle
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from replaykit import ReplayBuffer


def another(buffer: ReplayBuffer) -> ReplayBuffer:
    """The buffer as a spawned process gets it. Each handle has a lock of its own, by a file that it
    opened itself, so that the kernel takes two of one process for two processes."""
    set_spawning_popen(object())
    try:
        pickled = ForkingPickler.dumps(buffer)
    finally:
        set_spawning_popen(None)
    made: ReplayBuffer = pickle.loads(pickled)
    return made


def shown(buffer: ReplayBuffer) -> dict[str, Any]:
    """What every process has to find the same, as plain values."""
    storage, ledger = buffer.storage, buffer.storage.ledger
    found: dict[str, Any] = {"len": len(buffer), "write_count": buffer.write_count}
    slots = torch.arange(ledger.slots)
    found |= {
        "cursor": ledger.cursor,
        "next_position": ledger.next_position,
        "cleared": ledger.cleared,
        "order": ledger.write_order().tolist(),
        "positions": ledger.positions(slots).tolist(),
        "generations": ledger.generations(slots).tolist(),
        "schema": None if storage.schema is None else storage.schema.to_json(),
        "lanes": list(storage.lanes),
    }
    if len(buffer):
        rows = buffer[:]
        if isinstance(rows, torch.Tensor):
            found["rows"] = rows.tolist()
        else:
            for key in sorted(rows.keys(True, True), key=str):
                found[f"rows {key}"] = rows[key].tolist()
            facts = buffer.episodes._facts  # what their properties show
            for name in facts._fields:
                found[f"episodes' {name}"] = getattr(facts, name).tolist()
        data = buffer.storage.indexes.data()
        found |= {f"tag {name}": data[name].tolist() for name in buffer.storage.indexes.tags.names}
    sampler: Any = buffer.sampler
    if sampler.prioritized:
        found["priorities"] = sampler.state_dict()["_priorities"].tolist()
        found["default"] = sampler.default_priority
        found["dropped"] = sampler.dropped_updates
    return found


def drawn(buffer: ReplayBuffer, count: int, seed: int) -> Any:
    """A batch from a generator at that seed, as plain values; the error, where it is one."""
    generator = buffer._generator
    assert generator is not None
    generator.manual_seed(seed)
    try:
        rows, info = buffer.sample(count, return_info=True)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error).__name__, str(error)
    if isinstance(rows, torch.Tensor):
        return rows.tolist(), {str(key): _plain(value) for key, value in info.items()}
    keys = sorted(rows.keys(True, True), key=str)
    return {str(key): rows[key].tolist() for key in keys}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
