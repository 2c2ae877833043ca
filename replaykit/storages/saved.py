"""The content of a storage on its way to disk and back, through the user's hooks."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import torch

from replaykit.schema import Schema, take_apart
from replaykit.storages.content import Content, Group
from replaykit.structure import build, map_leaves

if TYPE_CHECKING:
    from replaykit.storages.base import Hook, Storage

__all__ = ["content_after_load", "content_to_save"]


def content_to_save(storage: Storage, path: str | os.PathLike[str]) -> Content:
    """Returns what a storage holds, mapped by its save hooks. The lock is held.

    Without hooks the columns are views. A hook gets a copy of ``storage[:]`` and, if it accepts
    ``path=``, where the files go.
    """
    content = storage.content()
    if not storage.save_hooks or not content.rows:
        return content
    data = storage[:]
    if not isinstance(data, list):
        data = map_leaves(data, torch.clone)
    for hook in storage.save_hooks:
        data = _call(hook, data, path=path)
    return _content_of(data, 1)


def content_after_load(storage: Storage, content: Content) -> Content:
    """Returns what was read, mapped by the storage's load hooks.

    A hook gets the rows and, if it accepts ``out=``, what the storage holds now (None if empty).
    """
    if not storage.load_hooks or not content.rows:
        return content
    if len(content.groups) == 1 and not content.plain:
        group = content.groups[0]
        leaves = {path: column[:] for path, column in group.leaves.items()}
        batch = torch.Size([content.rows, *content.lanes])
        data = build(group.schema.root, leaves, batch, None)
        data = map_leaves(data, torch.clone)
    else:
        data = content.items()
    for hook in storage.load_hooks:
        data = _call(hook, data, out=storage[:] if len(storage) else None)
    return _content_of(data, storage.ndim)


def _call(hook: Hook, data: Any, **offered: Any) -> Any:
    parameters = inspect.signature(hook).parameters.values()
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = {name: value for name, value in offered.items() if any_keyword or name in names}
    return hook(data, **taken)


def _content_of(data: Any, ndim: int) -> Content:
    if isinstance(data, list):
        return Content.of_items(data)
    rows = take_apart(data, ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    return Content(len(rows), rows.batch[1:], (group,))
