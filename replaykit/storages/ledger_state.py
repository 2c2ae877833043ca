"""What a ledger that was saved may say."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.storages.number_sets import all_distinct

__all__ = ["checked_state"]


def checked_state(state: object) -> dict[str, Any]:
    """Returns the state of a ledger if it is one that `Ledger.state` can have given.

    Raises:
        ValueError: names the entry that is missing or impossible.
    """
    if not isinstance(state, dict):
        raise ValueError(f"expected a ledger's state as a mapping, got {type(state).__name__}")
    for name in ("slots", "length", "cursor", "next_position"):
        value = state.get(name)
        # Numbers beyond this are no counts, and would not fit into int64 a little later, with
        # lanes counted too.
        most = 2**63 - 1 if name == "slots" else 2**54
        if type(value) is not int or not (name == "slots") <= value <= most:
            raise ValueError(f"expected a count for {name!r}, got {value!r}")
    slots, length, written = state["slots"], state["length"], state["next_position"]
    if not (length <= min(slots, written) and state["cursor"] <= min(length, slots - 1)):
        raise ValueError(
            "expected length <= slots, length <= next_position and a cursor at one of the "
            f"stored records or after them, got {state}"
        )
    positions = _checked_table(state, "positions", length, length)
    if positions is not None and length:
        known = positions.numpy()
        if known.min() < 0 or known.max() >= written or not all_distinct(known):
            raise ValueError(f"expected distinct 'positions' below {written}, got {positions}")
    if positions is None and state["cursor"] != length % slots and length < slots:
        raise ValueError(f"expected 'positions', or the cursor at {length}, got {state}")
    if type(state.get("by_stream", False)) is not bool:
        raise ValueError(f"expected a bool for 'by_stream', got {state['by_stream']!r}")
    generations = _checked_table(state, "generations", length, slots)
    if generations is not None and bool((generations[:length] < 0).any()):
        raise ValueError(f"expected 'generations' of all {length} stored records")
    return state


def _checked_table(state: dict[str, Any], name: str, fewest: int, most: int) -> torch.Tensor | None:
    if name not in state:
        raise ValueError(f"expected the entry {name!r} in a ledger's state")
    table = state[name]
    if table is None:
        return None
    if not isinstance(table, torch.Tensor) or table.dtype != torch.int64 or table.ndim != 1:
        raise ValueError(f"expected {name!r} as an int64 vector, got {table!r}")
    if not fewest <= len(table) <= most:
        raise ValueError(f"expected {fewest} to {most} entries in {name!r}, got {len(table)}")
    return table
