"""What a checkpoint of all shards says of itself, and a shard's own of the writes under way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from replaykit.pace import Pace
from replaykit.structure import from_json

__all__ = ["check_common", "check_head", "checked_own"]

_MOST = 2**62
"""Counts are sums of what is less, in 64 bits."""
_MOST_SHARDS = 2**20


def check_head(head: object) -> None:
    """Looks at the part of a manifest that names the checkpoints of the shards.

    Raises:
        ValueError: it is nothing that a save can have written, or the rows are of a class that
            this program has not loaded; says which entry.
    """
    said = head if isinstance(head, Mapping) else {}
    save, shards, rows = said.get("save"), said.get("num_shards"), said.get("rows")
    # The name of a folder: of our own making, so that nothing is opened outside of the directory.
    if not (isinstance(save, str) and re.fullmatch("[0-9a-f]{32}", save)):
        raise ValueError(f"expected the name of a save, got {save!r}")
    if type(shards) is not int or not 1 <= shards <= _MOST_SHARDS:
        raise ValueError(f"expected a number of shards, got {shards!r}")
    if not (isinstance(rows, list) and len(rows) == shards and all(map(_is_count, rows))):
        raise ValueError(f"expected the rows of {shards} shards, got {rows!r}")
    key = said.get("shard_key")
    if not isinstance(key, str | None):
        raise ValueError(f"expected a shard_key, got {key!r}")
    check_common(said)


def check_common(said: Mapping[str, Any]) -> None:
    """Looks at what a checkpoint and a ``state_dict`` say alike of the client.

    Raises:
        ValueError: as of ``check_head``.
    """
    dealt, generator, layout = (said.get(name) for name in ("dealt", "generator", "layout"))
    if not _is_count(dealt):
        raise ValueError(f"expected how many rows were dealt out, got {dealt!r}")
    if generator is not None:
        try:
            torch.Generator().set_state(generator.clone())
        except (RuntimeError, TypeError, AttributeError) as error:
            raise ValueError(f"expected the state of a generator, got {error}") from None
    if layout is not None:
        from_json(layout)
    Pace.check_state(said.get("pace"))


def checked_own(said: object) -> tuple[int, list[Any]]:
    """Returns how many rows a shard had been written before its ledger began, and the writes that
    were under way, of its own checkpoint.

    Raises:
        ValueError: it says something else.
    """
    known = said if isinstance(said, Mapping) else {}
    before, writes = known.get("before"), known.get("writes")
    # Less than nothing where a load has left out rows: what was written goes on from there.
    if type(before) is not int or not -_MOST < before < _MOST:
        raise ValueError(f"expected the number of rows before, got {before!r}")
    if not (isinstance(writes, list) and all(map(_is_write, writes))):
        raise ValueError(f"expected the writes under way, got {writes!r}")
    return before, writes


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_write(value: object) -> bool:
    if not (isinstance(value, list) and len(value) == 4):
        return False
    client, number, shards, _ = value
    return isinstance(client, str) and type(number) is int and type(shards) is int
