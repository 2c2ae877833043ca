"""The content of a storage on its way to disk and back, through the user's hooks."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import torch

from replaykit._compat import LazyStackedTensorDict, arange
from replaykit.schema import Schema, take_apart
from replaykit.storages.content import Content, Group
from replaykit.structure import build, map_leaves

if TYPE_CHECKING:
    from replaykit.storages.base import Storage
    from replaykit.storages.saving import Hook

__all__ = ["content_after_load", "content_to_save"]


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
