"""The state of all parts at one instant, to be written while they go on changing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from replaykit.checkpoint.again import Again, Base
from replaykit.checkpoint.changes import TrackedTensor
from replaykit.checkpoint.frozen import FrozenRows
from replaykit.checkpoint.tree import Tensors, encode

__all__ = ["Snapshot"]


class Snapshot:
    """What a save will write; a context manager, which lets go of it.

    Tensors are copied, but for those whose changes are tracked: these are read block by block
    later, and what is overwritten before is copied first. Of those that others write too, who say
    so to nobody here, what the save will not name again is copied at once.

    Args:
        parts: state of each part: values that ``tree.encode`` takes.
        document: plain JSON values for the head of the manifest.
        lock: guards the tracked tensors. Whoever makes a snapshot holds it.
        base: the checkpoint that the save follows, as it was found a moment ago; None: of what is
            copied at once, it is all.

    Attributes:
        encoded, head: parts and document as JSON.
        plain: copies of the other tensors, by name.
        frozen: the tracked tensors, those of one Changes together.
        again: what of them the save names again, where some are copied at once; else None.

    Raises:
        TypeError: a state that cannot be represented.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        document: Mapping[str, Any],
        lock: AbstractContextManager[Any] | None = None,
        base: Base | None = None,
    ) -> None:
        tensors: Tensors = {}
        self.encoded = {name: encode(state, name, tensors) for name, state in parts.items()}
        self.head = {name: encode(value, name, {}) for name, value in document.items()}
        self.plain: dict[str, torch.Tensor] = {}
        groups: dict[Any, dict[str, TrackedTensor]] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TrackedTensor):
                group = (id(tensor.changes), len(tensor.tensor))
                groups.setdefault(group, {})[name] = tensor
            else:
                self.plain[name] = tensor.to("cpu", copy=True)
        lock = contextlib.nullcontext() if lock is None else lock
        self.frozen: list[FrozenRows] = []
        self.again: Again | None = None
        try:
            for tracked in groups.values():
                changes = next(iter(tracked.values())).changes
                self.frozen.append(changes.freeze(tracked, lock))
            if any(frozen.at_once for frozen in self.frozen):
                self.again = Again(self.frozen, Base() if base is None else base)
        except BaseException:
            self.__exit__()
            raise

    def follows(self, base: Base) -> bool:
        """Whether it can be saved over a checkpoint: that has no later state of the same tensors,
        and is the one that it has copied what is new for."""
        if self.again is not None and self.again.base.save not in (None, base.save):
            return False
        if base.manifest is None:
            return True
        saved = [(frozen.saved(base.manifest), frozen.at) for frozen in self.frozen]
        return not any(rows is not None and rows.at > at for rows, at in saved)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        for frozen in self.frozen:
            frozen.__exit__()
