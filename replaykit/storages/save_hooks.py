"""Save the rows of a storage to a directory of their own, through the hooks of users."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from replaykit._compat import LazyStackedTensorDict, arange
from replaykit.checkpoint import Base, Checkpoint, Snapshot, save_snapshot
from replaykit.interrupts import deferred
from replaykit.schema import Schema, take_apart
from replaykit.storages.content import Content, Group
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.structure import build, map_leaves

if TYPE_CHECKING:
    from replaykit.storages.storage import Storage

__all__ = [
    "Hook",
    "SavedRows",
    "check_no_checkpointer",
    "content_after_load",
    "content_to_save",
    "warn_left_out",
]


def content_to_save(storage: Storage, path: str | os.PathLike[str]) -> Content:
    """Returns what a storage holds, mapped by its save hooks. The lock is held.

    Without hooks the columns are views. A hook gets a copy of ``storage[:]`` and, if it accepts
    ``path=``, where the files go. Its attributes ``shift`` and ``is_full`` are set before, if it
    has them: the slot behind the newest row, and whether every slot holds one.
    """
    content = storage.content()
    if not storage.save_hooks or not content.rows:
        return content
    data = _copied(storage)
    for hook in storage.save_hooks:
        _tell_cursor(hook, storage)
        data = _call(hook, "save", data, path=path)
    return _content_of(data, storage)


def _tell_cursor(hook: Hook, storage: Storage) -> None:
    ledger = storage.ledger
    is_full = bool(ledger.length) and ledger.length == ledger.slots
    # Behind the last slot, where the next row comes into the first one.
    shift = ledger.cursor or (ledger.length if is_full else 0)
    for name, value in (("shift", shift), ("is_full", is_full)):
        if hasattr(hook, name):
            setattr(hook, name, value)


def content_after_load(storage: Storage, content: Content) -> Content:
    """Returns what was read, mapped by the storage's load hooks.

    A hook gets the rows and, if it accepts ``out=``, a copy of what the storage holds now (None if
    that is nothing).
    """
    if not storage.load_hooks or not content.rows:
        return content
    if len(content.groups) == 1 and not content.plain:
        group = content.groups[0]
        leaves = {path: column[:].clone() for path, column in group.leaves.items()}
        data = build(group.schema.root, leaves, torch.Size([content.rows, *content.lanes]), None)
    else:
        data = content.items()
    for hook in storage.load_hooks:
        data = _call(hook, "load", data, out=_copied(storage) if len(storage) else None)
    return _content_of(data, storage)


def _copied(storage: Storage) -> Any:
    """All rows, in memory of their own, in the storage's layout."""
    if storage.ndim == 1:
        return storage.read(arange(len(storage)))
    return map_leaves(storage[:], torch.clone)


def _call(hook: Hook, kind: str, data: Any, **offered: Any) -> Any:
    parameters = inspect.signature(hook).parameters.values()
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = {name: value for name, value in offered.items() if any_keyword or name in names}
    result = hook(data, **taken)
    if result is None:
        raise TypeError(f"the {kind} hook {hook!r} returned None; expected the rows")
    return result


def _content_of(data: Any, storage: Storage) -> Content:
    if isinstance(data, LazyStackedTensorDict):
        data = list(data.unbind(storage.stack_dim))
    if isinstance(data, list):
        return Content.of_items(data)
    rows = take_apart(data, 1)
    leaves = rows.leaves
    # A hook may change the layout of rows with lanes; what keeps it is saved with it.
    lanes = torch.Size([len(rows), *storage.lanes])
    if storage.ndim > 1 and (
        not storage.lanes or all(leaf.shape[: storage.ndim] == lanes for leaf in leaves.values())
    ):
        rows = take_apart(data, storage.ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    return Content(len(rows), rows.batch[1:], (group,))


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
