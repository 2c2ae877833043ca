"""What a ledger that was saved may say."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.checkpoint import MappedRows
from replaykit.storages.number_sets import all_distinct

__all__ = ["check_generations", "check_positions", "checked_state"]


_MOST = 2**54
"""Numbers beyond this are no counts, and would not fit into int64 a little later, with lanes
counted too."""


def checked_state(state: object) -> dict[str, Any]:
    """Returns the state of a ledger if it is one that `Ledger.state` can have given.

    What tables say that lie in files is left to who reads them: `Ledger.saved`.

    Raises:
        ValueError: names the entry that is missing or impossible.
    """
    if not isinstance(state, dict):
        raise ValueError(f"expected a ledger's state as a mapping, got {type(state).__name__}")
    for name in ("slots", "length", "cursor", "next_position"):
        value = state.get(name)
        most = 2**63 - 1 if name == "slots" else _MOST
        if type(value) is not int or not (name == "slots") <= value <= most:
            raise ValueError(f"expected a count for {name!r}, got {value!r}")
    slots, length, written = state["slots"], state["length"], state["next_position"]
    if not (length <= min(slots, written) and state["cursor"] <= min(length, slots - 1)):
        raise ValueError(
            "expected length <= slots, length <= next_position and a cursor at one of the "
            f"stored records or after them, got {state}"
        )
    positions = _checked_table(state, "positions", length, length)
    if isinstance(positions, torch.Tensor):
        check_positions(positions, written)
    if positions is None and state["cursor"] != length % slots and length < slots:
        raise ValueError(f"expected 'positions', or the cursor at {length}, got {state}")
    if type(state.get("by_stream", False)) is not bool:
        raise ValueError(f"expected a bool for 'by_stream', got {state['by_stream']!r}")
    generations = _checked_table(state, "generations", length, slots)
    if isinstance(generations, torch.Tensor):
        check_generations(generations, length)
    return state


def check_positions(table: torch.Tensor, written: int) -> None:
    """Raises ValueError where these are not positions of stored records, of ``written`` ones."""
    known = table.numpy()
    if len(known) and (known.min() < 0 or known.max() >= written or not all_distinct(known)):
        raise ValueError(f"expected distinct 'positions' below {written}, got {table}")


def check_generations(table: torch.Tensor, length: int) -> None:
    """Raises ValueError where a slot of the first ``length`` was never written, or one that often
    as nobody can have written it."""
    known = table.numpy()
    if len(known) and (known.min() < -1 or known.max() > _MOST or (known[:length] < 0).any()):
        raise ValueError(
            f"expected 'generations' of all {length} stored records, up to {_MOST}, got {table}"
        )


def _checked_table(
    state: dict[str, Any], name: str, fewest: int, most: int
) -> torch.Tensor | MappedRows | None:
    if name not in state:
        raise ValueError(f"expected the entry {name!r} in a ledger's state")
    table = state[name]
    if table is None:
        return None
    if (
        not isinstance(table, (torch.Tensor, MappedRows))
        or table.dtype != torch.int64
        or len(table.shape) != 1
    ):
        raise ValueError(f"expected {name!r} as an int64 vector, got {table!r}")
    if not fewest <= len(table) <= most:
        raise ValueError(f"expected {fewest} to {most} entries in {name!r}, got {len(table)}")
    return table
