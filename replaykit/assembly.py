"""Containers put together from leaves again and again: worked out once, filled every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from replaykit._compat import TensorDict, new_tensordict
from replaykit.structure import Branch, Leaf, Node, Path, build

__all__ = ["assembler"]


def assembler(
    root: Node, paths: Sequence[Path]
) -> Callable[[Sequence[torch.Tensor], torch.Size, torch.device | None], Any]:
    """Returns a function that does what ``build`` does, with leaves in the order of ``paths``.

    What does not depend on the leaves is worked out here, once.
    """
    places = {path: place for place, path in enumerate(paths)}
    if isinstance(root, Leaf):
        return lambda leaves, batch, device: leaves[0]
    if not _plain(root):
        return lambda leaves, batch, device: build(
            root, dict(zip(paths, leaves, strict=True)), batch, device
        )
    template = _template(root, (), places)

    def assemble(
        leaves: Sequence[torch.Tensor], batch: torch.Size, device: torch.device | None
    ) -> Any:
        return _filled(template, leaves, batch, device)

    return assemble


_Template = tuple[torch.Size, list[tuple[str, int, Any]]]
"""A TensorDict: its own batch dimensions, and its children: name, place of a leaf, or template."""


def _plain(node: Node) -> bool:
    """Whether a tree is of TensorDicts alone."""
    if isinstance(node, Leaf):
        return True
    return node.kind == "tensordict" and all(_plain(child) for _, child in node.children)


def _template(node: Branch, path: Path, places: Mapping[Path, int]) -> _Template:
    children: list[tuple[str, int, Any]] = []
    for part, child in node.children:
        inner = (*path, part)
        if isinstance(child, Leaf):
            children.append((part, places[inner], None))
        else:
            children.append((part, -1, _template(child, inner, places)))
    return node.extra, children


def _filled(
    template: _Template,
    leaves: Sequence[torch.Tensor],
    batch: torch.Size,
    device: torch.device | None,
) -> TensorDict:
    extra, children = template
    fields: dict[str, Any] = {}
    for part, place, child in children:
        fields[part] = leaves[place] if child is None else _filled(child, leaves, batch, device)
    return new_tensordict(fields, batch + extra if extra else batch, device)
