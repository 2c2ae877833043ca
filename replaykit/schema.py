"""Fix the layout of a row, and check later data against it.

The first write fixes the keys, the feature shapes and the dtypes. After that, tensors and arrays
are never cast, broadcast, filled in or left out. Numbers take the dtype of their column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit import native
from replaykit._compat import TENSORDICT_PARTS, TensorDict, is_tensordict
from replaykit.errors import SchemaError
from replaykit.structure import (
    Branch,
    Leaf,
    Node,
    Path,
    Rules,
    flatten,
    from_json,
    from_numbers,
    from_numpy,
    leaf_paths,
    only_tensordicts,
    shown,
)
from replaykit.ted import FLAG_KEYS, RESERVED_KEYS, end_flags, no_key, unravel

_RESERVED_PATHS: frozenset[Path] = frozenset((name,) for name in RESERVED_KEYS)


class Rows:
    """Rows as a tree, with its leaves by path and their common batch shape.

    Dimension 0 of every leaf is the row. For storages with lanes it is time, and the lane
    dimensions follow.
    """

    def __init__(self, root: Node, leaves: dict[Path, torch.Tensor], batch: torch.Size) -> None:
        self.root = root
        self.leaves = leaves
        self.batch = batch

    def __len__(self) -> int:
        return self.batch[0]

    def on_cpu(self) -> bool:
        """Return whether all leaves are on the CPU."""
        return all(leaf.is_cpu for leaf in self.leaves.values())

    def complete(self, schema: Schema) -> None:
        """Add zeros for the added columns of a schema that the rows lack."""
        missing = schema.added.difference(self.leaves)
        if not missing:
            return
        device = next(iter(self.leaves.values())).device
        leaves = {path: schema.leaves[path] for path in schema.leaves if path in missing}
        zeros = {path: zeros_of(leaf, self.batch, device) for path, leaf in leaves.items()}
        self._select({**self.leaves, **zeros})
        # The kinds of containers do not change, so that the check still refuses wrong containers.
        self.root = Schema(self.root).with_added(schema.part(list(leaves)).root).root

    def _select(self, leaves: dict[Path, torch.Tensor]) -> None:
        self.leaves = leaves


def zeros_of(leaf: Leaf, batch: torch.Size, device: torch.device) -> torch.Tensor:
    """Return zeros ``[*batch, *F]`` that use the memory of one value."""
    return torch.zeros((), dtype=leaf.dtype, device=device).expand(batch + leaf.shape)


class Schema:
    """Keys, feature shapes and dtypes of the rows of one storage.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit.schema import Schema, split_leaves
        >>> schema = Schema(split_leaves(TensorDict({"x": torch.zeros(4, 3)}, [4]), ndim=1).root)
        >>> schema.check(split_leaves(TensorDict({"x": torch.zeros(2, 5)}, [2]), ndim=1).root)
        Traceback (most recent call last):
        replaykit.errors.SchemaError: key 'x': expected float32 [3], got float32 [5]
    """

    def __init__(self, root: Node) -> None:
        self.root = root
        self.leaves: dict[Path, Leaf] = dict(leaf_paths(root))
        self.added = frozenset(path for path, leaf in self.leaves.items() if leaf.added)
        # Rows are checked on arrival and again under the lock. This makes the second check cheap.
        self._accepted = root
        # Fields that are not tensors may define equality in any way.
        self._plain = not _has_constants(root)

    def leaf(self, key: Any) -> Leaf:
        """Return feature shape and dtype of a column.

        Raises:
            KeyError: there is no leaf with this name.
        """
        path = unravel(key)
        if path not in self.leaves:
            raise no_key(path, self.leaves, "column")
        return self.leaves[path]

    def check(self, root: Node) -> None:
        """Compare the tree of other rows with the schema.

        Raises:
            SchemaError: a key is missing, unknown, or has another shape or dtype. The error lists
                all such keys, with the expected and the given layout.
        """
        if root is self._accepted or (self._plain and root == self.root):
            self._accepted = root
            return
        got = dict(leaf_paths(root))
        expected_kind, got_kind = _kind(self.root), _kind(root)
        if expected_kind != got_kind:
            raise SchemaError(f"expected {expected_kind} records, got {got_kind}")
        problems = [] if got == self.leaves else self._differences(got)
        problems += _container_differences(self.root, root, ())
        if problems:
            raise SchemaError("; ".join(problems) + self._hint(got))
        self._accepted = root

    def _differences(self, got: dict[Path, Leaf]) -> list[str]:
        paths = sorted(self.leaves.keys() | got.keys(), key=lambda path: [str(p) for p in path])
        return [
            f"key {shown(path)}: expected {self.leaves.get(path, 'no such key')}, "
            f"got {got.get(path, 'nothing')}"
            for path in paths
            if self.leaves.get(path) != got.get(path)
        ]

    def _hint(self, got: dict[Path, Leaf]) -> str:
        """Return a hint if a batch was given instead of one row, else an empty string."""
        batches = got.keys() == self.leaves.keys() and all(
            leaf.shape[1:] == self.leaves[path].shape and len(leaf.shape)
            for path, leaf in got.items()
        )
        return "; add() takes one row, extend() a batch" if batches and got else ""

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain JSON values, for ``from_json``."""
        return self.root.to_json()

    @classmethod
    def from_json(cls, record: object) -> Schema:
        """Return the schema of a ``to_json`` record; ValueError for other records."""
        return cls(from_json(record))

    def part(self, paths: Collection[Path]) -> Schema:
        """Return the schema of some of the leaves, in the order of this one."""
        return Schema(_part(self.root, (), frozenset(paths)) or self.root)

    def with_added(self, root: Node) -> Schema:
        """Return the schema with missing leaves of another tree, marked as added.

        Raises:
            SchemaError: a new leaf is in a container with fixed fields or below a tensor. Or a new
                leaf lacks the batch dimensions of the TensorDict that will hold it.
        """
        merged = _merged(self.root, root, ())
        return self if merged is self.root else Schema(merged)

    def without_added(self, kept: Collection[Path]) -> Schema:
        """Return the schema without the added leaves that are not among ``kept``."""
        if self.added <= set(kept):
            return self
        return self.part([path for path in self.leaves if path in kept or path not in self.added])

    def row_bytes(self) -> int:
        """Return the bytes of one row, without padding."""
        return sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in self.leaves.values())

    def __repr__(self) -> str:
        lines = [f"    {shown(path)}: {leaf}" for path, leaf in self.leaves.items()]
        return "\n".join(["Schema(", *lines, ")"])


def _part(node: Node, path: Path, paths: frozenset[Path]) -> Node | None:
    if isinstance(node, Leaf):
        return node if path in paths else None
    children = [(part, _part(child, (*path, part), paths)) for part, child in node.children]
    kept = tuple((part, child) for part, child in children if child is not None)
    return replace(node, children=kept) if kept else None


def _merged(mine: Node, other: Node, path: Path) -> Node:
    """Return a tree with children that only the other tree has, marked as added."""
    if isinstance(mine, Leaf) or isinstance(other, Leaf):
        if isinstance(other, Branch) and other.children:
            raise SchemaError(f"key {shown(path)}: expected {mine}, got a {_kind(other)}")
        return mine
    known, theirs = dict(mine.children), dict(other.children)
    children = [
        (part, _merged(child, theirs[part], (*path, part)) if part in theirs else child)
        for part, child in mine.children
    ]
    new = [(part, _added(child)) for part, child in other.children if part not in known]
    if new and mine.kind not in ("tensordict", "mapping"):
        raise SchemaError(
            f"key {shown((*path, new[0][0]))}: expected no such key, since the fields of a "
            f"{_kind(mine)} are fixed"
        )
    for part, child in new:
        for inner, leaf in leaf_paths(child, (*path, part)):
            if leaf.shape[: len(mine.extra)] != mine.extra:
                raise SchemaError(
                    f"key {shown(inner)}: expected a shape that begins with {list(mine.extra)}, "
                    f"the batch dimensions of its TensorDict, got {list(leaf.shape)}"
                )
    if not new and all(child is known[part] for part, child in children):
        return mine
    return replace(mine, children=(*children, *new))


def _added(node: Node) -> Node:
    if isinstance(node, Leaf):
        return replace(node, added=True)
    return replace(node, children=tuple((part, _added(child)) for part, child in node.children))


def _has_constants(node: Node) -> bool:
    if isinstance(node, Leaf):
        return False
    return bool(node.constants) or any(_has_constants(child) for _, child in node.children)


def _kind(node: Node) -> str:
    if isinstance(node, Leaf):
        return "tensor"
    if node.kind in ("tensordict", "mapping"):
        return {"tensordict": "TensorDict", "mapping": "mapping"}[node.kind]
    return node.cls.__qualname__


def _container_differences(expected: Node, got: Node, path: Path) -> list[str]:
    """Return differences in kinds of containers and in fields without tensors."""
    if not (isinstance(expected, Branch) and isinstance(got, Branch)):
        return []
    if _kind(expected) != _kind(got):
        return [f"key {shown(path)}: expected a {_kind(expected)}, got a {_kind(got)}"]
    problems = []
    if expected.kind == "tensorclass":
        for name in sorted(expected.constants.keys() | got.constants.keys()):
            want, have = expected.constants.get(name), got.constants.get(name)
            if type(want) is not type(have) or want != have:
                problems.append(
                    f"field {shown((*path, name))}: expected {want!r} (a field without a tensor is "
                    f"the same in every row), got {have!r}"
                )
    others = dict(got.children)
    for part, child in expected.children:
        if part in others:
            problems += _container_differences(child, others[part], (*path, part))
    return problems


def check_alike(one: tuple[int, Node], other: tuple[int, Node]) -> None:
    """Raise SchemaError if the samples of two numbered members differ in their contents.

    The classes, the order of keys, and the constants of containers may differ. A batch takes them
    from the first sample.
    """
    (first, tree), (second, found) = one, other
    known, there = dict(leaf_paths(tree)), dict(leaf_paths(found))
    lines = [
        f"key {shown(path)}: {known.get(path, 'nothing')} and {there.get(path, 'nothing')}"
        for path in sorted(set(known) | set(there), key=str)
        if known.get(path) != there.get(path)
    ]
    if not lines and not _same_kinds(tree, found):
        lines.append("containers of other kinds")
    if lines:
        raise SchemaError(
            "expected equal keys, shapes and dtypes in all samples, got others in those of members "
            f"{first} and {second}: {'; '.join(lines)}. Choose common keys with keys=, or give the "
            "members transforms, or a collate_fn="
        )


def _same_kinds(one: Node, other: Node) -> bool:
    """Return whether two trees with the same leaves have the same kinds of containers."""
    if isinstance(one, Leaf) or isinstance(other, Leaf):
        return isinstance(one, Leaf) and isinstance(other, Leaf)
    theirs = dict(other.children)
    return (one.kind, one.extra) == (other.kind, other.extra) and all(
        part in theirs and _same_kinds(child, theirs[part]) for part, child in one.children
    )


def split_leaves(
    data: Any,
    ndim: int,
    *,
    single: bool = False,
    time_dim: int = 0,
    optional: Collection[Path] = (),
    schema: Schema | None = None,
) -> Rows:
    """Split data into leaves with time along dimension 0.

    Args:
        data: a batch, a list with one element per row, or one row if ``single``.
        ndim: number of batch dimensions of the storage, including time.
        single: True if ``data`` is one row without a time dimension. A time dimension of size 1 is
            then added.
        time_dim: the time dimension of the data. The time dimension is swapped with dimension 0.
        optional: paths that are dropped if the schema does not have them.
        schema: the storage's schema, if it is already fixed. Numbers take its dtypes.

    If a flag of a TensorDict has no trailing dimension, it gets one of size 1. Flags are ``done``,
    ``terminated`` and ``truncated``, at the root and under ``next``. The reserved keys ``index``
    and ``index_generation`` of a TensorDict are left out. The caller's object is not changed.

    Raises:
        TypeError: a leaf is not a tensor.
        SchemaError: there is nothing to store, leaves disagree on the batch shape, or rows of a
            list differ in layout.
    """
    drop = frozenset(path for path in optional if schema is not None and path not in schema.leaves)
    stored: Mapping[Path, Leaf] = {} if schema is None else schema.leaves
    if isinstance(data, list) and not single and ndim:
        rows: list[Rows] = []
        for row in data:
            rows.append(_taken_apart(row, ndim, True, time_dim, drop, stored))
            if schema is None:  # numbers take the dtypes of the first row
                stored = dict(leaf_paths(rows[0].root))
        return _stack(rows)
    return _taken_apart(data, ndim, single, time_dim, drop, stored)


def _taken_apart(
    data: Any,
    ndim: int,
    single: bool,
    time_dim: int,
    drop: frozenset[Path],
    stored: Mapping[Path, Leaf],
) -> Rows:
    if time_dim:
        data = _exchange(data, time_dim, single)
        single = False
    rules = Rules(drop, stored=stored)
    if is_tensordict(data):
        rules = Rules(drop | _RESERVED_PATHS, FLAG_KEYS, data.batch_dims)
    root, leaves = flatten(data, ndim - single, rules)
    if not leaves:
        if is_tensordict(data) and not single and not data.batch_size[:ndim].numel():
            return Rows(root, {}, torch.Size([0, *data.batch_size[1:ndim]]))
        raise SchemaError(f"expected at least one tensor, got an empty {type(data).__name__}")
    if single:
        leaves = {path: leaf.unsqueeze(0) for path, leaf in leaves.items()}
    batch = _common_batch(leaves, ndim)
    if ndim > 1 and batch[0] and not batch.numel():
        # Time steps without lanes have no rows.
        batch = torch.Size([0, *batch[1:]])
        leaves = {path: leaf[:0] for path, leaf in leaves.items()}
    return Rows(root, leaves, batch)


def _exchange(data: Any, time_dim: int, single: bool) -> Any:
    if isinstance(data, np.ndarray):
        data = from_numpy(data)
    if is_tensordict(data) or is_tensorclass(data) or isinstance(data, torch.Tensor):
        dims = data.ndim if isinstance(data, torch.Tensor) else data.batch_dims
        if single and dims >= time_dim:
            data, dims = data.unsqueeze(time_dim), dims + 1
        if dims <= time_dim:
            raise SchemaError(
                f"expected time along batch dimension {time_dim}, got batch shape "
                f"{list(data.shape)}"
            )
        return data.transpose(0, time_dim)
    if (numbers := from_numbers(data)) is not None:
        return _exchange(numbers, time_dim, single)
    if isinstance(data, dict):
        return {key: _exchange(value, time_dim, single) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        items = [_exchange(value, time_dim, single) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    raise TypeError(f"expected a TensorDict or tensor, got {type(data).__name__}")


def _stack(rows: list[Rows]) -> Rows:
    if not rows:
        return Rows(Branch("sequence", (), list), {}, torch.Size([0]))
    first = Schema(rows[0].root)
    for position, row in enumerate(rows):
        try:
            first.check(row.root)
        except SchemaError as error:
            raise SchemaError(f"row {position} of the list differs from row 0: {error}") from None
    leaves = {path: torch.cat([row.leaves[path] for row in rows]) for path in first.leaves}
    return Rows(rows[0].root, leaves, torch.Size([len(rows), *rows[0].batch[1:]]))


def _common_batch(leaves: dict[Path, torch.Tensor], ndim: int) -> torch.Size:
    shapes = {leaf.shape[:ndim] for leaf in leaves.values()}
    if len(shapes) > 1:
        found = ", ".join(f"{shown(path)}: {list(leaf.shape)}" for path, leaf in leaves.items())
        raise SchemaError(
            f"expected all tensors to share the first {ndim} dimension(s), got {found}"
        )
    return shapes.pop()


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
        root = self.root
        if TENSORDICT_PARTS is None or isinstance(root, Leaf) or not only_tensordicts(root):
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
        pending: list[tuple[int, str, Path, Any]] = [(-1, "", (), root)]
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
