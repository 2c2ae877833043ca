"""Find out fast whether rows fit the schema without conversion, and split them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from replaykit import native
from replaykit._compat import TENSORDICT_PARTS, TensorDict
from replaykit.schema import Rows, Schema
from replaykit.structure import Branch, Leaf, Node, Path
from replaykit.ted import end_flags

_CACHED_SHAPES = 16
"""Most batch shapes with a cached template; training loops use one or two."""

_UNKNOWN: Any = object()

_EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""The functions of torch that describe a tensor, from version 2.10 on."""


_Known = tuple[torch.Size, int | None, Any]
"""The batch shape of rows, the number of given dimensions if they differ, and the template."""


class Matcher:
    """A fast split of dense, contiguous TensorDicts on the CPU that fit a schema.

    For other data the caller uses ``schema.split_leaves``, which converts the data or raises an
    error.

    Args:
        schema: the schema of the rows.
        lanes: the sizes of the lanes of the storage.

    Cost: a third of a microsecond per leaf.
    """

    def __init__(self, schema: Schema, lanes: torch.Size) -> None:
        self.root, self.lanes = schema.root, lanes
        self.paths = list(schema.leaves)
        self._leaves = schema.leaves
        self._episode_columns: tuple[Any, list[int], list[int]] = (None, [], [])
        self._templates: dict[tuple[bool, int, torch.Size], _Known | None] = {}

    def rows(
        self, data: Any, *, single: bool, time_dim: int = 0, optional: Collection[Path] = ()
    ) -> Rows | None:
        """Return the rows, with the address of each leaf's first value.

        Return None if the rows may not fit.

        Args:
            data: a batch ``[B, *lanes]``, or one row ``[*lanes]`` if ``single`` is set.
            time_dim: the time dimension of the batch.
            optional: at most one path that the data may have, although the schema lacks it.
        """
        if type(data) is not TensorDict:
            return None
        kind = (single, time_dim, data.batch_size)
        known = self._templates.get(kind, _UNKNOWN)
        if known is _UNKNOWN:
            known = self._templates[kind] = self._compile(*kind)
        if known is None:
            return None
        batch, given, template = known
        spare = None
        for path in optional:
            spare = path[0] if len(path) == 1 else None
        try:
            found = template.match(data, spare)
        except RuntimeError:  # such a tensor has no strides or no address
            return None
        return None if found is None else MatchedRows(self, found, batch, given)

    def episode_columns(self, lane_key: Path | None) -> tuple[list[int], list[int]]:
        """Return places and bytes of the lane key and of the flags that end episodes.

        They are empty if the core cannot read these columns.
        """
        if self._episode_columns[0] != lane_key:
            used = [] if lane_key is None else [lane_key, *end_flags(self._leaves)]
            leaves = [self._leaves[path] for path in used]
            kinds = [torch.int64, *([torch.bool] * (len(used) - 1))]
            sizes = [leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves]
            places = [self.paths.index(path) for path in used]
            if [leaf.dtype for leaf in leaves] != kinds or sizes[0] != 8:
                places, sizes = [], []
            self._episode_columns = lane_key, places, sizes
        return self._episode_columns[1:]

    def _compile(self, single: bool, time_dim: int, batch: torch.Size) -> _Known | None:
        """Return shapes and template for a batch shape; None if no data can match."""
        if len(self._templates) >= _CACHED_SHAPES:
            self._templates.clear()
        if TENSORDICT_PARTS is None or not _of_tensordicts(self.root):
            return None
        given = batch[: len(self.lanes) + (not single)]
        rows = torch.Size([1, *given]) if single else given
        if time_dim == 1 and not single and given[1:2] == (1,):  # in memory as with time first
            rows = torch.Size([1, given[0], *given[2:]])
        elif time_dim > single:
            return None
        if not rows or rows[1:] != self.lanes:
            return None
        places = {path: place for place, path in enumerate(self.paths)}
        branches: list[tuple[Any, ...]] = []
        pending: list[tuple[int, str, Path, Any]] = [(-1, "", (), self.root)]
        for parent, part, path, branch in pending:
            leaves = []
            for name, child in branch.children:
                inner = (*path, name)
                if isinstance(child, Branch):
                    pending.append((len(branches), name, inner, child))
                    continue
                example = torch.empty((), dtype=child.dtype, device="cpu")
                example = example.expand(given + child.shape)
                leaves.append((name, example, places[inner]))
            names = frozenset(name for name, _ in branch.children)
            branches.append((parent, part, torch.Size(given + branch.extra), names, leaves))
        types = torch.Tensor, TensorDict
        template = native.core.Template(types, TENSORDICT_PARTS, _EXCHANGE, _address, branches)
        return rows, None if rows == given else len(given), template


def _address(leaf: torch.Tensor, example: torch.Tensor) -> int | None:
    """Return the address of a contiguous tensor of the CPU with another's dtype and shape.

    Return None for any other tensor.
    """
    if (
        leaf.dtype is not example.dtype
        or leaf.shape != example.shape
        or not leaf.is_cpu
        or not leaf.is_contiguous()
    ):
        return None
    # Neither tensors without elements nor lazy zeros (ZeroTensor) have an address.
    address = leaf.data_ptr()
    return address if address or not leaf.numel() else None


class MatchedRows(Rows):
    """Rows with contiguous leaves, at ``addresses``.

    The leaves are in the order of the matcher's schema. Another storage may have the same leaves in
    another order.
    """

    def __init__(
        self,
        matcher: Matcher,
        found: tuple[list[torch.Tensor], list[int]],
        batch: torch.Size,
        given: int | None,
    ) -> None:
        self.matcher = matcher
        self.root = matcher.root
        self.batch = batch
        self._given, self.addresses = found
        self._dims = given  # of the batch shape of the leaves, if it is not that of the rows
        self._taken: dict[Path, torch.Tensor] | None = None

    @property
    def leaves(self) -> dict[Path, torch.Tensor]:  # type: ignore[override]
        """The leaves by path, in a dict that each access makes.

        A write to the ring uses only the addresses.
        """
        if self._taken is not None:
            return self._taken
        given, dims = self._given, self._dims
        if dims is not None:
            given = [leaf.view(self.batch + leaf.shape[dims:]) for leaf in given]
        return dict(zip(self.matcher.paths, given, strict=True))

    def whole_episode(self, lane_key: Path | None) -> int | None:
        """Return the identity of rows that are one episode, with a flag at its end only.

        Return None for other rows, and for rows that the core cannot read.
        """
        places, sizes = self.matcher.episode_columns(lane_key)
        if not places or self._taken is not None:
            return None
        addresses = [self.addresses[place] for place in places]
        found: int | None = native.core.whole_episode(addresses, sizes, self.batch[0])
        return found

    def _select(self, leaves: dict[Path, torch.Tensor]) -> None:
        self._taken = leaves


def _of_tensordicts(node: Node) -> bool:
    if not isinstance(node, Branch) or node.kind != "tensordict":
        return False
    return all(isinstance(child, Leaf) or _of_tensordicts(child) for _, child in node.children)
