"""Find out fast whether rows fit the schema without conversion, and split them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from replaykit._compat import TensorDict, fields_of
from replaykit.schema import Rows, Schema
from replaykit.structure import Branch, Leaf, Node, Path

__all__ = ["MatchedRows", "Matcher"]

_CACHED_SHAPES = 16
"""Most batch shapes with a cached template; training loops use one or two."""

_LeafCheck = tuple[str, torch.dtype, torch.Size, int, bool]
_BranchCheck = tuple[int, str, torch.Size, list[_LeafCheck], int]
_Template = tuple[torch.Size, list[_BranchCheck]]
_UNKNOWN: Any = object()


class Matcher:
    """A fast split of dense, contiguous TensorDicts on the CPU that fit a schema.

    For other data the caller uses ``schema.split_leaves``, which converts the data or raises an
    error.

    Cost: under a microsecond per leaf.
    """

    def __init__(self, schema: Schema) -> None:
        self.root = schema.root
        self.paths = list(schema.leaves)
        self._zeros = [0] * len(self.paths)
        self._templates: dict[tuple[bool, torch.Size], _Template | None] = {}

    def rows(self, data: Any, *, single: bool, optional: Collection[Path] = ()) -> Rows | None:
        """Return the rows, with the address of each leaf's first value.

        Return None if the rows may not fit.

        Args:
            data: a batch ``[B]``, or one row if ``single`` is set.
            optional: at most one path that the data may have, although the schema lacks it.
        """
        try:
            return self._matched(data, single, optional)
        except RuntimeError:  # such a tensor has no strides or no address
            return None

    def _matched(self, data: Any, single: bool, optional: Collection[Path]) -> Rows | None:
        if type(data) is not TensorDict:
            return None
        batch = data.batch_size
        kind = (single, batch)
        template = self._templates.get(kind, _UNKNOWN)
        if template is _UNKNOWN:
            template = self._templates[kind] = self._compile(single, batch)
        if template is None:
            return None
        rows, branches = template
        leaves: list[Any] = self.paths.copy()  # each path is replaced by its leaf
        addresses = self._zeros.copy()
        containers: list[dict[str, Any]] = []
        for parent, part, size, checks, width in branches:
            inner, found = data, batch
            if parent >= 0:
                inner = containers[parent].get(part)
                if type(inner) is not TensorDict:
                    return None
                found = inner.batch_size
            if found != size:
                return None
            fields = fields_of(inner)
            if len(fields) != width and (
                parent >= 0 or len(fields) != width + 1 or not self._spare(fields, optional)
            ):
                return None
            for key, dtype, shape, place, lazy in checks:
                leaf = fields.get(key)
                if (
                    type(leaf) is not torch.Tensor
                    or leaf.dtype is not dtype
                    or leaf.shape != shape
                    or leaf.requires_grad
                    or not leaf.is_cpu
                    or not leaf.is_contiguous()
                    or (lazy and (leaf.is_neg() or (dtype.is_complex and leaf.is_conj())))
                ):
                    return None
                leaves[place] = leaf
                addresses[place] = leaf.data_ptr()
            containers.append(fields)
        # Neither tensors without elements nor lazy zeros (ZeroTensor) have an address.
        if not all(addresses) and any(
            leaf.numel() for leaf, address in zip(leaves, addresses, strict=True) if not address
        ):
            return None
        return MatchedRows(self, leaves, rows, addresses, single)

    def _spare(self, fields: dict[str, Any], optional: Collection[Path]) -> bool:
        """Return whether the only additional field is the optional field."""
        for path in optional:
            return len(path) == 1 and path not in self.paths and path[0] in fields
        return False

    def _compile(self, single: bool, batch: torch.Size) -> _Template | None:
        """Return each container's checks for a batch shape; None if no data can match."""
        if len(self._templates) >= _CACHED_SHAPES:
            self._templates.clear()
        if not _of_tensordicts(self.root) or not (single or batch):
            return None
        rows = torch.Size(() if single else batch[:1])
        places = {path: place for place, path in enumerate(self.paths)}
        branches: list[_BranchCheck] = []
        pending: list[tuple[int, str, Path, Any]] = [(-1, "", (), self.root)]
        for parent, part, path, branch in pending:
            checks: list[_LeafCheck] = []
            for name, child in branch.children:
                inner = (*path, name)
                if isinstance(child, Branch):
                    pending.append((len(branches), name, inner, child))
                    continue
                lazy = child.dtype.is_floating_point or child.dtype.is_complex
                place = places[inner]
                checks.append((name, child.dtype, torch.Size(rows + child.shape), place, lazy))
            size = torch.Size(rows + branch.extra)
            branches.append((parent, part, size, checks, len(branch.children)))
        return torch.Size([1]) if single else rows, branches


class MatchedRows(Rows):
    """Rows with contiguous leaves, at ``addresses``.

    The leaves are in the order of the matcher's schema. Another storage may have the same leaves in
    another order.
    """

    def __init__(
        self,
        matcher: Matcher,
        leaves: list[torch.Tensor],
        batch: torch.Size,
        addresses: list[int],
        single: bool,
    ) -> None:
        self.matcher = matcher
        self.root = matcher.root
        self.batch = batch
        self.addresses = addresses
        self._given = leaves
        self._single = single
        self._taken: dict[Path, torch.Tensor] | None = None

    @property
    def leaves(self) -> dict[Path, torch.Tensor]:  # type: ignore[override]
        """The leaves by path, in a dict that each access makes.

        A write to the ring uses only the addresses.
        """
        if self._taken is not None:
            return self._taken
        given = [leaf.unsqueeze(0) for leaf in self._given] if self._single else self._given
        return dict(zip(self.matcher.paths, given, strict=True))

    def _select(self, leaves: dict[Path, torch.Tensor]) -> None:
        self._taken = leaves


def _of_tensordicts(node: Node) -> bool:
    if not isinstance(node, Branch) or node.kind != "tensordict":
        return False
    return all(isinstance(child, Leaf) or _of_tensordicts(child) for _, child in node.children)
