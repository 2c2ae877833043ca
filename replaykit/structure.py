"""Split containers of tensors into a tree and its leaves, and rebuild them."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import (
    LazyStackedTensorDict,
    Template,
    TensorDict,
    dtype_by_name,
    dtype_name,
    fields_of,
    filled,
    has_names,
    is_non_tensor,
    is_tensordict,
    layout_of,
    new_tensorclass,
    new_tensordict,
    tensorclass_parts,
)
from replaykit.errors import SchemaError
from replaykit.ted import format_key, unravel

Path = tuple[Any, ...]
"""The nested keys and sequence positions that lead to a leaf; ``()`` for a tensor."""


@dataclass(frozen=True)
class Leaf:
    """Feature shape (without the batch dimensions) and dtype of a tensor.

    ``added`` marks a column that an edit of all rows added after the first write. Rows written
    without the column have zeros in it. Comparisons ignore ``added``.
    """

    shape: torch.Size
    dtype: torch.dtype
    added: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """Return the record from which ``from_json`` rebuilds this node."""
        record = {"kind": "tensor", "dtype": dtype_name(self.dtype), "shape": list(self.shape)}
        return {**record, "added": True} if self.added else record


@dataclass(frozen=True)
class Branch:
    """A container, with its kind, its children in order, and data to rebuild it.

    ``kind`` is ``tensordict``, ``tensorclass``, ``mapping`` or ``sequence``. ``extra`` has the
    batch dimensions of a TensorDict inside each row.
    """

    kind: str
    children: tuple[tuple[Any, Node], ...]
    cls: type
    extra: torch.Size = field(default_factory=torch.Size)
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == "sequence":
            return f"{self.cls.__name__} of {len(self.children)}"
        keys = ", ".join(repr(part) for part, _ in self.children)
        return f"{self.cls.__name__} with keys {keys or 'of no tensor'}"

    def to_json(self) -> dict[str, Any]:
        """Return the record from which ``from_json`` rebuilds this node."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "children": [[part, child.to_json()] for part, child in self.children],
        }
        if self.kind != "tensordict" and self.cls not in (dict, list, tuple):
            record["class"] = f"{self.cls.__module__}:{self.cls.__qualname__}"
        elif self.kind != "tensordict":
            record["class"] = self.cls.__name__
        if self.extra:
            record["extra"] = list(self.extra)
        if self.constants:
            record["constants"] = dict(self.constants)
        return record


Node = Branch | Leaf


@dataclass(frozen=True)
class Rules:
    """Special treatment of some paths in ``flatten``.

    ``drop`` names paths to leave out, with everything below them. ``columns`` names leaves that get
    a trailing dimension of size 1 if they have only ``column_ndim`` dimensions. ``stored`` has the
    leaves of a schema, whose dtypes numbers take by the rules of `as_stored`. ``detach`` is False
    for leaves that keep their gradients.
    """

    drop: frozenset[Path] = frozenset()
    columns: frozenset[Path] = frozenset()
    column_ndim: int = 0
    stored: Mapping[Path, Leaf] = field(default_factory=dict)
    detach: bool = True


def flatten(
    data: Any,
    ndim: int,
    rules: Rules | None = None,
) -> tuple[Node, dict[Path, torch.Tensor]]:
    """Split a container into a tree and its leaves.

    Args:
        data: TensorDict, tensorclass, tensor, NumPy array, number, or a pytree (mapping, tuple,
            list, named tuple) of these. See ``from_numbers`` for numbers and lists of numbers.
        ndim: number of leading batch dimensions of every leaf.
        rules: paths that are left out or get a trailing dimension.

    Returns:
        The tree and its leaves by path, in the tree's order. Leaves are the given tensors, detached
        by default and not copied.

    Raises:
        TypeError: a value is not a tensor; the error names its path.
        SchemaError: a leaf has fewer than ``ndim`` dimensions, the rows of a lazy stack differ in
            keys or shapes, or an int does not fit int64.
    """
    leaves: dict[Path, torch.Tensor] = {}
    node = _flatten(data, ndim, (), leaves, rules or Rules())
    return node, leaves


def _flatten(
    data: Any, ndim: int, path: Path, leaves: dict[Path, torch.Tensor], rules: Rules
) -> Node:
    if isinstance(data, np.ndarray):
        data = from_numpy(data, path)
    if isinstance(data, torch.Tensor):
        if data.layout is not torch.strided or data.is_quantized or data.is_nested or data.is_meta:
            kind = "a nested tensor" if data.is_nested else f"layout {data.layout}"
            raise TypeError(
                f"key {shown(path)}: expected a dense tensor with values, got {kind}, "
                f"dtype {data.dtype}, device {data.device}"
            )
        if data.ndim < ndim:
            raise SchemaError(
                f"key {shown(path)}: expected at least {ndim} batch dimension(s), "
                f"got shape {list(data.shape)}; extend() takes a batch, add() one row"
            )
        leaf = data.detach() if rules.detach else data
        if leaf.is_conj() or leaf.is_neg():  # lazy, so its bytes are not those of its values
            leaf = leaf.resolve_conj().resolve_neg()
        if path in rules.columns and leaf.ndim == rules.column_ndim:
            leaf = leaf.unsqueeze(-1)
        leaves[path] = leaf
        return Leaf(leaf.shape[ndim:], leaf.dtype)
    if is_non_tensor(data):
        raise TypeError(
            f"key {shown(path)}: expected a tensor, got non-tensor data; "
            "ListStorage and LazyStackStorage take any object"
        )
    constants: dict[str, Any] = {}
    extra = torch.Size()
    if is_tensorclass(data):
        tensors, constants = tensorclass_parts(data)
        items, kind, extra = _fields(tensors, ndim, path, rules), "tensorclass", tensors.batch_size
    elif is_tensordict(data):
        if isinstance(data, LazyStackedTensorDict):
            _check_lazy_stack(data, path)
        items, kind, extra = _fields(data, ndim, path, rules), "tensordict", data.batch_size
    elif isinstance(data, Mapping):
        items, kind = list(data.items()), "mapping"
    elif (numbers := from_numbers(data, path)) is not None:
        if path in rules.stored:
            numbers = as_stored(numbers, rules.stored[path].dtype)
        return _flatten(numbers, ndim, path, leaves, rules)
    elif isinstance(data, (tuple, list)):
        items, kind = list(enumerate(data)), "sequence"
    else:
        raise TypeError(
            f"key {shown(path)}: expected a TensorDict, tensor, array, number or pytree of these, "
            f"got {type(data).__name__}"
        )
    children = tuple(
        (part, _flatten(value, ndim, (*path, part), leaves, rules))
        for part, value in items
        if (*path, part) not in rules.drop
    )
    return Branch(kind, children, type(data), extra[ndim:], constants)


def _fields(data: Any, ndim: int, path: Path, rules: Rules) -> list[tuple[Any, Any]]:
    """Return the values of a TensorDict; only a plain one may include dropped ones."""
    if data.batch_dims < ndim:
        raise SchemaError(
            f"key {shown(path)}: expected a batch_size of at least {ndim} dimension(s), "
            f"got {list(data.batch_size)}; extend() takes a batch, add() one row"
        )
    # Only a plain TensorDict stores its values. Other kinds compute them one by one.
    if type(data) is TensorDict:
        return list(data.items())
    names = [part for part in data.keys() if (*path, part) not in rules.drop]  # noqa: SIM118
    return [(part, _get(data, part, path)) for part in names]


def _get(data: Any, part: str, path: Path) -> Any:
    try:
        return data.get(part)
    except RuntimeError as error:
        raise SchemaError(
            f"key {shown((*path, part))}: expected rows of one shape, got a lazy stack whose rows "
            f"differ ({error})"
        ) from None


def _check_lazy_stack(data: LazyStackedTensorDict, path: Path) -> None:
    rows = data.tensordicts
    first = set(rows[0].keys(True, True)) if rows else set()
    for position, row in enumerate(rows):
        differing = first.symmetric_difference(row.keys(True, True))
        if differing:
            names = ", ".join(sorted(format_key(unravel(key)) for key in differing))
            raise SchemaError(
                f"key {shown(path)}: expected rows with the same keys, "
                f"row {position} differs from row 0 in {names}"
            )


def from_numpy(data: np.ndarray, path: Path = ()) -> torch.Tensor:
    """Return a tensor over the array, or over a copy if torch cannot share its memory.

    Raises:
        TypeError: the array does not hold numbers of a dtype that torch has.
    """
    plain = data.flags.writeable and all(stride >= 0 for stride in data.strides)
    try:
        return torch.from_numpy(data if plain else data.copy())
    except (TypeError, ValueError):
        raise TypeError(
            f"key {shown(path)}: expected an array of numbers, got NumPy dtype {data.dtype}"
        ) from None


def from_numbers(data: Any, path: Path = ()) -> torch.Tensor | None:
    """Return a number, a NumPy scalar or a list of numbers as a tensor.

    The result is None for any other value. The dtype of a Python bool is bool, of an int int64, and
    of a float torch's default dtype (float32). NumPy values keep their dtype. A list of numbers of
    any depth is one array. If its first number is a NumPy number, NumPy's dtype rules apply. A
    tuple is a container with elements of any kinds.

    Raises:
        SchemaError: nested lists have different lengths, or an int does not fit int64.
        TypeError: a NumPy scalar is not a number.
    """
    first = data
    while isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, _NUMBERS) or (first is not data and not _all_numbers(data)):
        return None
    try:
        if not isinstance(first, np.generic):
            return torch.tensor(data, device="cpu")
        array = np.asarray(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(
            f"key {shown(path)}: expected numbers of one shape that torch can hold ({error})"
        ) from None
    return from_numpy(array, path)


def as_stored(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in the dtype of their column, if it can hold them.

    A float column accepts ints and floats. An int column accepts ints in its range. A bool column
    accepts only bools. Numbers that do not fit are returned unchanged.

    Example:
        >>> import torch
        >>> from replaykit.structure import as_stored
        >>> as_stored(torch.tensor(-100), torch.float32)
        tensor(-100.)
        >>> as_stored(torch.tensor(300), torch.uint8).dtype
        torch.int64
    """
    own = numbers.dtype
    if own == dtype or torch.bool in (own, dtype) or own.is_complex:
        return numbers
    if dtype.is_floating_point or dtype.is_complex:
        return numbers.to(dtype)
    if own.is_floating_point:
        return numbers
    cast = numbers.to(dtype)
    return cast if torch.equal(cast.to(own), numbers) else numbers


_NUMBERS = (bool, int, float, complex, np.generic)


def _all_numbers(data: Any) -> bool:
    return all(map(_all_numbers, data)) if isinstance(data, list) else isinstance(data, _NUMBERS)


def shown(path: Path) -> str:
    """Return a path as errors show it."""
    return format_key(path) if path else "(root)"


def leaf_paths(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Yield the path and the leaf of every leaf, in the tree's order."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for part, child in node.children:
        yield from leaf_paths(child, (*path, part))


def build(
    node: Node,
    leaves: Mapping[Path, torch.Tensor],
    batch_size: torch.Size,
    device: torch.device | None,
    path: Path = (),
) -> Any:
    """Build a container over the given leaves, without checks or copies.

    ``batch_size`` is the batch size of the rows. The shape of every leaf must start with it. Cost:
    one Python step per node.
    """
    if isinstance(node, Leaf):
        return leaves[path]
    items = {
        part: build(child, leaves, batch_size, device, (*path, part))
        for part, child in node.children
    }
    if node.kind == "tensordict":
        return new_tensordict(items, batch_size + node.extra, device)
    if node.kind == "tensorclass":
        tensordict = new_tensordict(items, batch_size + node.extra, device)
        return new_tensorclass(node.cls, tensordict, node.constants)
    if node.kind == "mapping":
        return items
    if hasattr(node.cls, "_fields"):
        return node.cls(*items.values())
    return tuple(items.values()) if issubclass(node.cls, tuple) else list(items.values())


def map_leaves(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the container with a shape-preserving ``function`` applied to leaves."""
    node, leaves = flatten(data, 0)
    mapped = {path: function(leaf) for path, leaf in leaves.items()}
    device = next(iter(mapped.values())).device if mapped else None
    return build(node, mapped, torch.Size(), device)


_NAMES: dict[str, tuple[type, ...]] = {
    "tensordict": (str,),
    "tensorclass": (str,),
    "mapping": (str, int, bool),
    "sequence": (int,),
}
"""The types of children's names, for each kind of container."""


def from_json(record: object) -> Node:
    """Rebuild a tree from a record of ``to_json``.

    Classes are looked up in modules that are already imported. Nothing is imported or evaluated.

    Raises:
        ValueError: the record does not describe a tree, or names a class that is not loaded.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a record of a container, got {record!r}")
    kind = record.get("kind")
    if kind == "tensor":
        added = record.get("added", False)
        if type(added) is not bool:
            raise ValueError(f"expected added as a bool, got {added!r}")
        return Leaf(_sizes(record.get("shape")), dtype_by_name(record.get("dtype")), added)
    children = record.get("children")
    if not (isinstance(kind, str) and kind in _NAMES and isinstance(children, list)):
        raise ValueError(f"expected a record of a container, got kind {kind!r}")
    parts: dict[Any, Node] = {}
    for item in children:
        if not (isinstance(item, list) and len(item) == 2 and type(item[0]) in _NAMES[kind]):
            raise ValueError(f"expected [name, record], got {item!r}")
        if item[0] in parts:
            raise ValueError(f"expected one record of each name, got two of {item[0]!r}")
        parts[item[0]] = from_json(item[1])
    constants = record.get("constants", {})
    if not isinstance(constants, dict):
        raise ValueError(f"expected constants as a mapping, got {constants!r}")
    return Branch(
        kind,
        tuple(parts.items()),
        _class_of(kind, record.get("class")),
        _sizes(record.get("extra", [])),
        constants,
    )


def _sizes(value: object) -> torch.Size:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"expected a list of sizes, got {value!r}")
    return torch.Size(value)


def _class_of(kind: str, name: object) -> type:
    builtin = {"mapping": dict, "list": list, "tuple": tuple, "dict": dict}
    if kind == "tensordict":
        return TensorDict
    if isinstance(name, str) and name in builtin:
        return builtin[name]
    if not isinstance(name, str) or name.count(":") != 1:
        raise ValueError(f"expected module:class, got {name!r}")
    module_name, qualname = name.split(":")
    target: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        target = getattr(target, part, None)
    accepted = (
        is_tensorclass(target)
        if kind == "tensorclass"
        else (isinstance(target, type) and issubclass(target, (tuple, list, Mapping)))
    )
    if not isinstance(target, type) or not accepted:
        raise ValueError(
            f"the class {qualname!r} of module {module_name!r} is not loaded; "
            "import the module that defines it first"
        )
    return target


def assembler(
    root: Node, paths: Sequence[Path]
) -> Callable[[Sequence[torch.Tensor], torch.Size, torch.device | None], Any]:
    """Return a function that builds containers from leaves in the order of ``paths``.

    ``assembler`` does all work that does not depend on the leaves, so the function is fast.
    """
    places = {path: place for place, path in enumerate(paths)}
    if isinstance(root, Leaf):
        return lambda leaves, batch, device: leaves[0]
    if not only_tensordicts(root):
        return lambda leaves, batch, device: build(
            root, dict(zip(paths, leaves, strict=True)), batch, device
        )
    template = _template(root, (), places)
    return functools.partial(filled, template)


def only_tensordicts(node: Node) -> bool:
    """Return whether all containers of a tree are TensorDicts."""
    if isinstance(node, Leaf):
        return True
    return node.kind == "tensordict" and all(only_tensordicts(child) for _, child in node.children)


def _template(node: Branch, path: Path, places: Mapping[Path, int]) -> Template:
    children: list[tuple[str, int, Any]] = []
    for part, child in node.children:
        inner = (*path, part)
        if isinstance(child, Leaf):
            children.append((part, places[inner], None))
        else:
            children.append((part, -1, _template(child, inner, places)))
    return node.extra, children


def contiguous(data: Any) -> Any:
    """Return the container with contiguous tensors; sparse tensors are unchanged."""
    return map_tensors(
        data, lambda tensor: tensor.contiguous() if tensor.layout is torch.strided else tensor
    )


def map_tensors(
    data: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    device: torch.device | None = None,
) -> Any:
    """Return the container with ``function`` applied to every tensor.

    ``function`` must not change shapes. Values that are neither tensors nor containers of tensors
    are not copied. Lazy stacks, whose rows are separate objects, stay lazy stacks. ``device`` is
    the device of the new tensors.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, LazyStackedTensorDict):
        rows = [map_tensors(row, function, device=device) for row in data.tensordicts]
        return LazyStackedTensorDict(*rows, stack_dim=data.stack_dim)
    if type(data) is TensorDict and _only_tensors(data):
        return _map_fields(data, function, device)
    if is_tensordict(data) or is_tensorclass(data):
        return data.apply(function) if device is None else data.apply(function, device=device)
    if isinstance(data, dict):
        mapped = {key: map_tensors(value, function, device=device) for key, value in data.items()}
        if type(data) is dict:
            return mapped
        other = copy.copy(data)  # a mapping may have more than its items, such as a default
        other.update(mapped)
        return other
    if isinstance(data, (tuple, list)):
        items = [map_tensors(value, function, device=device) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data


def each_tensor(data: Any, function: Callable[[torch.Tensor], Any]) -> None:
    """Call ``function`` with every tensor that ``map_tensors`` would pass to it.

    Common containers are not built again, which takes most of the time of ``map_tensors``.
    """
    if isinstance(data, torch.Tensor):
        function(data)
    elif type(data) is TensorDict:
        for value in fields_of(data).values():
            each_tensor(value, function)
    elif type(data) is tuple or type(data) is list:
        for value in data:
            each_tensor(value, function)
    elif type(data) is dict:
        for value in data.values():
            each_tensor(value, function)
    else:

        def unchanged(tensor: torch.Tensor) -> torch.Tensor:
            function(tensor)
            return tensor

        map_tensors(data, unchanged)


def _only_tensors(data: TensorDict) -> bool:
    """Return whether nothing of the container would be lost by `new_tensordict`."""
    if data.is_locked or has_names(data):
        return False
    return all(
        _only_tensors(value) if type(value) is TensorDict else isinstance(value, torch.Tensor)
        for value in fields_of(data).values()
    )


def _map_fields(
    data: TensorDict, function: Callable[[torch.Tensor], torch.Tensor], device: torch.device | None
) -> TensorDict:
    """Map a container of tensors and such containers; about five times cheaper than ``apply``."""
    _, batch_size, source = layout_of(data)
    fields = {
        name: _map_fields(value, function, device) if type(value) is TensorDict else function(value)
        for name, value in fields_of(data).items()
    }
    return new_tensordict(fields, batch_size, source if device is None else device)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the values, uint8 ``[n]`` on the CPU; a view if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1), because a single value counts as contiguous with any stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
