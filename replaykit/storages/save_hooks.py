"""Save and load the rows of a storage in a separate directory, with user hooks."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from replaykit._compat import LazyStackedTensorDict, arange
from replaykit.checkpoint import Base, Checkpoint, Snapshot
from replaykit.interrupts import deferred
from replaykit.schema import Schema, split_leaves
from replaykit.storages.content import Content, Group
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.structure import build, map_leaves

if TYPE_CHECKING:
    from replaykit.storages.storage import Storage


def content_to_save(storage: Storage, path: str | os.PathLike[str]) -> Content:
    """Return the rows of a storage, changed by its save hooks.

    The caller holds the lock. Without hooks the columns are views. A hook gets a copy of
    ``storage[:]`` and, if it accepts ``path=``, the folder of the files. If the hook has the
    attributes ``shift`` and ``is_full``, they are set before the call. See
    ``Storage.register_save_hook``.
    """
    content = storage.content()
    if not storage.save_hooks or not content.rows:
        return content
    data, ledger = _copied(storage), storage.ledger
    is_full = ledger.length == ledger.slots
    # With a full ring and the cursor at 0, the newest row is in the last slot.
    shift = ledger.cursor or (ledger.length if is_full else 0)
    for hook in storage.save_hooks:
        for name, value in (("shift", shift), ("is_full", is_full)):
            if hasattr(hook, name):
                setattr(hook, name, value)
        data = _call(hook, "save", data, path=path)
    return _content_of(data, storage)


def content_after_load(storage: Storage, content: Content) -> Content:
    """Return loaded rows, changed by the storage's load hooks.

    A hook gets the loaded rows. If it accepts ``out=``, it also gets a copy of the rows that the
    storage holds, or None if it holds none.
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
    """Return a copy of all rows, in the storage's layout."""
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
    rows = split_leaves(data, 1)
    leaves = rows.leaves
    # A hook may change the layout of rows with lanes. If it does not, the lanes are also saved.
    lanes = torch.Size([len(rows), *storage.lanes])
    if storage.ndim > 1 and (
        not storage.lanes or all(leaf.shape[: storage.ndim] == lanes for leaf in leaves.values())
    ):
        rows = split_leaves(data, storage.ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    return Content(len(rows), rows.batch[1:], (group,))


Hook = Callable[..., Any]


def rows_snapshot(storage: Storage, path: str | os.PathLike[str], base: Base) -> Snapshot:
    """Return the snapshot of a storage's rows, slots and episodes."""
    with storage.lock:
        parts = {
            "storage": content_to_save(storage, path).to_state(tracked=True),
            "ledger": storage.ledger.state(),
            "episodes": storage.episode_state(),
        }
        document = {"storage": type(storage).__name__, "len": len(storage)}
        return Snapshot(parts, document, storage.lock, base)


def load_rows(storage: Storage, path: str | os.PathLike[str]) -> None:
    """Load the rows of a directory; see ``Storage.loads``."""
    with deferred, Checkpoint(path) as saved, storage.lock:
        saved.verify()
        content = Content.from_state(saved.part("storage", mapped=["groups"]))
        content = content_after_load(storage, content)
        state = Ledger.check(saved.part("ledger"))
        episodes = EpisodeIndexes.check(saved.part("episodes") if "episodes" in saved else None)
        if content.rows != state["length"]:
            raise ValueError(f"expected {state['length']} rows, got {content.rows}")
        target = storage.check_content(content)
        slots = getattr(target, "slots", storage.ledger.slots)
        rows, ledger = None, Ledger.saved(state)
        if not ledger.keeps_slots(slots):
            rows = ledger.write_order()[-slots:]
            warn_left_out(content.rows - len(rows), stacklevel=4)
        episodes = storage.episodes_of_subset(content, episodes, ledger, rows)
        storage.load_content(replace(content, ledger=ledger), target, rows)
        storage.ledger.restore(state, rows)
        storage.restore_episodes(episodes, ledger, rows)


def warn_left_out(count: int, stacklevel: int) -> None:
    """Warn of the number of rows that did not fit into a smaller capacity."""
    if count:
        warnings.warn(
            f"{count} rows do not fit into the smaller capacity and were left out",
            stacklevel=stacklevel,
        )


def checked_hook(hook: Hook) -> Hook:
    """Return a hook; TypeError if it is not callable."""
    if not callable(hook):
        raise TypeError(f"expected a callable hook, got {type(hook).__name__}")
    return hook


def check_no_checkpointer(value: object) -> None:
    """Raise TypeError unless ``value`` is None; TorchRL's checkpointers do not fit."""
    if value is not None:
        raise TypeError(
            f"expected no checkpointer, got a {type(value).__name__}: dumps and loads have one "
            "format; map rows with register_save_hook and register_load_hook, and read "
            "TorchRL's directories with replaykit.read_torchrl"
        )
