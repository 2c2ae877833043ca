"""Rows of a storage in a directory of their own, and the hooks that map them on the way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from replaykit.checkpoint import Base, Checkpoint, Snapshot, save_snapshot
from replaykit.interrupts import deferred
from replaykit.storages.content import Content
from replaykit.storages.indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.saved import content_after_load, content_to_save

if TYPE_CHECKING:
    from replaykit.storages.base import Storage

__all__ = ["Hook", "SavedRows", "check_no_checkpointer", "warn_left_out"]

Hook = Callable[..., Any]


class SavedRows:
    """What every storage has of ``dumps`` and ``loads``.

    Attributes:
        save_hooks, load_hooks: in the order in which they came.
    """

    def __init__(self) -> None:
        self.save_hooks: list[Hook] = []
        self.load_hooks: list[Hook] = []

    @property
    def checkpointer(self) -> None:
        """None: a storage saves itself, in one format. TypeError for any other value."""
        return None

    @checkpointer.setter
    def checkpointer(self, value: object) -> None:
        check_no_checkpointer(value)

    def register_save_hook(self, hook: Hook) -> None:
        """Adds a function that maps the content before ``dumps`` writes it.

        Attributes ``shift`` and ``is_full`` of the hook, if it has them, are set before each call:
        the slot behind the newest row, and whether every slot holds a row.
        """
        self.save_hooks.append(_checked_hook(hook))

    def register_load_hook(self, hook: Hook) -> None:
        """Adds a function that maps the content after ``loads`` has read it."""
        self.load_hooks.append(_checked_hook(hook))

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Saves the rows and where they lie into a directory, all or nothing.

        ``keep``, and what it costs: as for ``ReplayBuffer.dumps``.

        Raises:
            TypeError: rows that cannot be represented without pickle; nothing was written.
        """
        save_snapshot(path, lambda base: self._snapshot(path, base), keep=keep)

    def _snapshot(self, path: str | os.PathLike[str], base: Base) -> Snapshot:
        storage = cast("Storage", self)
        with storage.lock:
            parts = {
                "storage": content_to_save(storage, path).to_state(tracked=True),
                "ledger": storage.ledger.state(),
                "episodes": storage.episode_state(),
            }
            document = {"storage": type(storage).__name__, "len": len(storage)}
            return Snapshot(parts, document, storage.lock, base)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes over rows that ``dumps`` saved, of this or another kind of storage.

        With another capacity the rows lie in write order from 0; with a smaller one the newest
        that fit are kept, and a UserWarning says how many were left out.

        Raises:
            FileNotFoundError: nothing saved there. CheckpointError: it is damaged.
            SchemaError: the rows do not fit. Nothing has changed then.
        """
        storage = cast("Storage", self)
        with deferred, Checkpoint(path) as saved, storage.lock:
            saved.verify()
            content = Content.from_state(saved.part("storage", mapped=["groups"]))
            content = content_after_load(storage, content)
            ledger = Ledger.check(saved.part("ledger"))
            episodes = EpisodeIndexes.check(saved.part("episodes") if "episodes" in saved else None)
            _restore(storage, content, ledger, episodes)

    dump = save = dumps
    load = loads


def _restore(
    storage: Storage,
    content: Content,
    state: dict[str, Any],
    episodes: dict[str, Any] | None = None,
) -> None:
    """Brings rows and a ledger's state in; the lock is held and the state is checked."""
    if content.rows != state["length"]:
        raise ValueError(f"expected {state['length']} rows, got {content.rows}")
    target = storage.check_content(content)
    slots = getattr(target, "slots", storage.ledger.slots)
    rows = None
    saved = Ledger(state["slots"])
    saved.restore(state, None)
    if not saved.keeps_slots(slots):
        rows = saved.write_order()[-slots:]
        warn_left_out(content.rows - len(rows))
    episodes = storage.episodes_of_kept(content, episodes, saved, rows)
    storage.load_content(replace(content, ledger=saved), target, rows)
    storage.ledger.restore(state, rows)
    storage.restore_episodes(episodes, saved, rows)
    storage.edits += 1


def warn_left_out(count: int, stacklevel: int = 4) -> None:
    """Says how many rows did not fit into a smaller capacity."""
    if count:
        warnings.warn(
            f"{count} rows do not fit into the smaller capacity and were left out",
            UserWarning,
            stacklevel=stacklevel,
        )


def _checked_hook(hook: Hook) -> Hook:
    if not callable(hook):
        raise TypeError(f"expected a callable hook, got {type(hook).__name__}")
    return hook


def check_no_checkpointer(value: object) -> None:
    """Raises TypeError for what TorchRL's storages and buffers are told to save themselves with."""
    if value is not None:
        raise TypeError(
            f"expected no checkpointer, got a {type(value).__name__}: dumps and loads have one "
            "format; map rows with register_save_hook and register_load_hook, and read "
            "TorchRL's directories with replaykit.read_torchrl"
        )
