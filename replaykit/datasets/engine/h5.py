"""Opening and reading of H5 files of unknown origin. Every error names the file.

The first bytes of a file are checked before the HDF5 library opens it (`check_signature`). Values
are read with h5py's low-level objects. For the many small arrays of a robot corpus, the high-level
wrapper would cost more than the reads. The first call that needs h5py imports it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5_checks import (
    FAULTS,
    ChunkChecks,
    Types,
    check_signature,
    entries_of,
    link_problem,
    links_of,
    naming,
    not_numbers,
    storage_of,
)
from replaykit.datasets.engine.h5_values import (
    LEAST_BYTES,
    HeldValues,
    attribute_problem,
    inflate,
    pieces_of,
    require_texts,
)
from replaykit.datasets.engine.locations import Location, SourcePart
from replaykit.errors import CorpusError

_NO_DATA: Final = "it is neither an array nor a group"
_SLOTS: Final = 10_007
"""Number of chunks that HDF5 can cache. Its documentation recommends a prime."""
_MAX_DEPTH: Final = 16
"""Greatest depth of nested groups. A deeper file probably has a cycle of links."""
_MAX_LEAVES: Final = 100_000
"""Greatest number of leaves of one episode. A file with more is damaged or hostile."""


@contextmanager
def open_h5(path: Path, *, is_verified: bool = False) -> Iterator[H5File]:
    """Open an H5 file for reading. Its suffix does not matter.

    Args:
        path: the file.
        is_verified: True if the bytes are known to equal those of the source. Error messages then
            do not advise the user to fetch the file again.

    Raises:
        ImportError: h5py is not installed.
        CorpusError: the file is not HDF5, cut short, or damaged. The message names the file.
        FileNotFoundError, PermissionError, IsADirectoryError: the file cannot be opened at all.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "reading H5 corpora needs h5py, which is not installed: `pip install h5py`"
        ) from error
    check_signature(path, is_verified=is_verified)
    with naming(path, None, is_verified):
        # With best-effort locks, file systems without locks, such as some network mounts, also
        # work.
        handle = h5py.File(path, "r", locking="best-effort")
    try:
        yield H5File(path, handle, is_verified)
    finally:
        handle.close()


@dataclass(frozen=True)
class H5Member:
    """An entry of a group. If it is a group, ``children`` are its sorted entries.

    Soft and external links are not followed. A soft or external link never counts as a group.
    """

    name: str
    is_group: bool
    children: tuple[str, ...] = ()
    is_link: bool = False


@dataclass(frozen=True)
class H5Leaf:
    """The declaration of a dataset in a file.

    ``dtype`` is the native NumPy dtype. ``problem`` is the reason why the values cannot be a column
    of numbers, or ``None``. For example, the values are text or compounds, or are stored in another
    file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    problem: str | None = None


class H5File:
    """An open source file.

    All paths are relative to the root, with ``/`` between parts.

    Attributes:
        path: the path of the file.
        parts: the files that are read as this file; empty for a single file.
        listed: the results of `leaves` that were computed earlier, by group.
    """

    parts: tuple[SourcePart, ...] = ()
    listed: Mapping[str, list[H5Leaf]] = MappingProxyType({})

    def __init__(self, path: Path, handle: Any, is_verified: bool = False) -> None:
        self.path = path
        self._root = handle.id
        self._is_verified = is_verified
        self._types = Types()
        self._kept: dict[str, tuple[Any, int]] = {}
        self._held: HeldValues | None = None
        self._chunks = ChunkChecks()
        self._text_bytes = 0
        self._last: tuple[str, Any] = ("", handle.id)
        """The group opened last. Datasets of one group are usually read one after the other."""

    def hold(self, held: HeldValues) -> None:
        """Make `leaves` store values of small datasets in ``held``, for use by `read`."""
        self._held = held

    def location(self, name: str) -> Location:
        """Return the location of the file, whose path in the corpus is ``name``."""
        return Location(self.path, name, parts=self.parts)

    def has_group(self, path: str) -> bool:
        """Return whether a path is a group, without soft and external links on the path."""
        import h5py

        with self._naming(path):
            node = self._root
            for part in path.split("/"):
                if link_problem(node, part.encode()) is not None:
                    return False
                node = h5py.h5o.open(node, part.encode())
                if not isinstance(node, h5py.h5g.GroupID):
                    return False
        return True

    def members(self, group: str = "") -> Iterator[H5Member]:
        """Yield the entries of a group, or of the root, in the library's (byte) order.

        Soft and external links are listed, but not followed.
        """
        import h5py

        with self._naming(group or "/"):
            for name, node in entries_of(self._node(group)):
                if isinstance(node, h5py.h5g.GroupID):
                    children = tuple(sorted(_text(child) for child, _ in links_of(node)))
                    yield H5Member(_text(name), True, children)
                else:
                    yield H5Member(_text(name), False, is_link=isinstance(node, str))

    def leaves(self, group: str, *, without: Collection[str] = ()) -> list[H5Leaf]:
        """Return all datasets below a group, with paths relative to the group.

        Links out of the file become leaves with a ``problem``. Cost: every dataset is opened once.
        The only values that are read are the values to store in ``held``; see `hold`.

        Args:
            group: the group; ``""`` for the root.
            without: entries of the group to skip.
        """
        if not without and group in self.listed:
            return self.listed[group]
        found: list[H5Leaf] = []
        with self._naming(group or "/"):
            above = f"{group}/" if group else ""
            self._walk(self._node(group), "", (), found, without, base=above)
        return found

    def attributes(self, group: str, names: Collection[str]) -> dict[str, Any]:
        """Return the named attributes that a group has, as Python values.

        Text is returned as ``str``, a single number as a number, and several numbers as an array.

        Raises:
            CorpusError: an attribute would take more memory than `MOST_TEXT_BYTES`.
        """
        import h5py

        found: dict[str, Any] = {}
        with self._naming(group or "/"):
            attributes = h5py.Group(self._node(group)).attrs
            for name in names:
                if name in attributes:
                    why = attribute_problem(attributes.get_id(name))
                    if why is not None:
                        raise CorpusError(f"its attribute {name!r} cannot be read: {why}")
                    value = attributes[name]
                    if isinstance(value, np.generic) or np.shape(value) == (1,):
                        value = np.asarray(value).reshape(()).item()
                    found[name] = value.decode() if isinstance(value, bytes) else value
        return found

    def _node(self, path: str) -> Any:
        """Open the object at a path. Soft and external links on the path are errors."""
        import h5py

        if path == self._last[0]:
            return self._last[1]
        if not path:
            return h5py.h5o.open(self._root, b".")
        node = self._root
        for part in path.split("/"):
            name = part.encode()
            why = link_problem(node, name)
            if why is not None:
                raise CorpusError(why)
            node = h5py.h5o.open(node, name)
        self._last = (path, node)
        return node

    def _dataset(self, dataset: str, access: Any = None) -> tuple[Any, int]:
        """Open a dataset. Soft and external links and values in other files are errors.

        The result also has the most bytes that one stored byte may inflate to; see `storage_of`.
        """
        import h5py

        above, _, name = dataset.rpartition("/")
        group = self._node(above)
        why = link_problem(group, name.encode())
        if why is None:
            node = h5py.h5d.open(group, name.encode(), access)
            why, ratio = storage_of(node)
        if why is not None:
            raise CorpusError(why)
        return node, ratio

    def below(self, group: str) -> H5File:
        """Return a group as a file whose root is the group."""
        import h5py

        with self._naming(group):
            return H5File(self.path, h5py.Group(self._node(group)), self._is_verified)

    def read(
        self, dataset: str, start: int, stop: int, into: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Return entries ``start .. stop - 1`` of a dataset, in the native byte order.

        A dataset without dimensions has one entry.

        Args:
            into: the array that receives the entries and is returned. It must be contiguous, of the
                size of the entries and of the native dtype.

        Raises:
            CorpusError: some entries cannot be read (rule V03). The message names file, dataset and
                cause.
        """
        import h5py

        with self._naming(dataset):
            values = None if self._held is None else self._held.get(dataset)
            if values is not None and stop <= len(values):
                if into is None:
                    return values[start:stop].copy()
                into[...] = values[start:stop].reshape(into.shape)
                return into
            kept = self._kept.get(dataset)
            node, ratio = self._dataset(dataset) if kept is None else kept
            space = node.get_space()
            shape = space.get_simple_extent_dims()
            block = (stop - start, *shape[1:])
            if into is None:
                dtype = self._types.of(node)
                if dtype.hasobject:
                    raise CorpusError(f"it holds {not_numbers(dtype)}, expected numbers")
                into = np.empty(block, dtype)
            elif into.size != math.prod(block):
                raise CorpusError(f"has shape {list(block)}, expected {list(into.shape)}")
            if into.size == 0:
                return into
            kind = self._types.in_memory(into.dtype)
            # In a block of `keeping`, HDF5 inflates chunks once. `inflate` would do so for each
            # piece.
            is_worth = into.nbytes >= LEAST_BYTES and kept is None
            if is_worth and inflate(node, start, stop, into, kind):
                return into
            self._chunks.require(node, ratio, dataset, start, stop)
            if not shape or stop - start == shape[0]:
                node.read(h5py.h5s.ALL, h5py.h5s.ALL, into, kind)
            else:
                space.select_hyperslab((start, *(0 for _ in shape[1:])), block)
                node.read(h5py.h5s.create_simple(block), space, into, kind)
            return into

    @contextmanager
    def keeping(self, datasets: Collection[str], nbytes: int) -> Iterator[None]:
        """Make HDF5 cache ``nbytes`` of inflated chunks per dataset in the ``with`` block.

        With ``nbytes=0``, HDF5 uses its default cache, which is 1 MiB within one read.
        """
        import h5py

        if nbytes:
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            access.set_chunk_cache(_SLOTS, nbytes, 1.0)
            for dataset in datasets:
                with self._naming(dataset):
                    self._kept[dataset] = self._dataset(dataset, access)
        try:
            yield
        finally:
            self._kept.clear()

    def entries(self, dataset: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return entries of a dataset of text or varying-length values, as Python objects.

        Raises:
            CorpusError: the entries take more memory than `MOST_TEXT_BYTES`, or cannot be read.
        """
        import h5py

        with self._naming(dataset):
            node, ratio = self._dataset(dataset)
            self._chunks.require(node, ratio, dataset, start, stop)
            pieces = pieces_of(node, start, stop)
            parts = [np.asarray(h5py.Dataset(node)[begin:end]) for begin, end in pieces]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def texts(self, dataset: str) -> list[str]:
        """Return the values of a dataset of fixed-length or variable-length text.

        Raises:
            CorpusError: the values cannot be read. Or the texts that this method has returned for
                this file take more memory than `MOST_TEXT_BYTES` in total.
        """
        import h5py

        with self._naming(dataset):
            node, ratio = self._dataset(dataset)
            records = sum(node.shape[:1])
            self._chunks.require(node, ratio, dataset, 0, records)
            texts: list[str] = []
            for begin, end in pieces_of(node, 0, records):
                found = h5py.Dataset(node)[begin:end] if node.shape else h5py.Dataset(node)[...]
                for value in found.reshape(-1).tolist():
                    texts.append(value.decode() if isinstance(value, bytes) else str(value))
                    # A text may take four times as many bytes in memory as in the file.
                    self._text_bytes += sys.getsizeof(texts[-1])
                require_texts(self._text_bytes)
            return texts

    def shape(self, dataset: str) -> tuple[int, ...]:
        """Return the shape of a dataset."""
        with self._naming(dataset):
            return tuple(map(int, self._dataset(dataset)[0].shape))

    def stripe(self, dataset: str) -> tuple[int, int]:
        """Return the count of entries in one stripe of chunks, and the size of the chunks.

        A stripe is all chunks with the same first index. The size, in bytes, includes the parts of
        chunks beyond the edges of the dataset. Without chunks, a stripe is one entry.
        """
        import h5py

        with self._naming(dataset):
            node, _ = self._dataset(dataset)
            properties, shape = node.get_create_plist(), node.shape
            if properties.get_layout() != h5py.h5d.CHUNKED:
                return 1, math.prod(shape[1:]) * node.get_type().get_size()
            chunk = properties.get_chunk()
            count = math.prod(-(-n // step) for n, step in zip(shape[1:], chunk[1:], strict=True))
            return int(chunk[0]), count * math.prod(chunk) * node.get_type().get_size()

    def _hold(self, dataset: str, node: Any, leaf: H5Leaf, ratio: int) -> None:
        """Hold the values of an open leaf if there is room.

        Values that cannot be read are skipped, because `read` reports the error later.
        """
        import h5py

        if self._held is None or leaf.problem is not None:
            return
        values = self._held.room_for(dataset, leaf.shape or (1,), np.dtype(leaf.dtype))
        if values is not None:
            with suppress(*FAULTS):
                self._chunks.require(node, ratio, dataset, 0, sum(leaf.shape[:1]))
                kind = self._types.in_memory(values.dtype)
                node.read(h5py.h5s.ALL, h5py.h5s.ALL, values, kind)
                self._held.put(dataset, values)

    def _naming(self, where: str) -> naming:
        return naming(self.path, where, self._is_verified)

    def _walk(
        self,
        node: Any,
        prefix: str,
        above: tuple[int, ...],
        found: list[H5Leaf],
        without: Collection[str] = (),
        base: str = "",
    ) -> None:
        import h5py

        if not isinstance(node, h5py.h5g.GroupID):
            raise CorpusError("not a group")
        address = h5py.h5o.get_info(node).addr
        if address in above or len(above) >= _MAX_DEPTH:
            raise CorpusError(f"the groups below {prefix or '/'!r} are nested without end")
        for name, child in entries_of(node):
            path = prefix + _text(name)
            if path in without:
                continue
            if isinstance(child, h5py.h5g.GroupID):
                self._walk(child, f"{path}/", (*above, address), found, base=base)
            elif isinstance(child, h5py.h5d.DatasetID):
                leaf, ratio = self._leaf(path, child)
                found.append(leaf)
                self._hold(base + path, child, leaf, ratio)
            else:
                why = child if isinstance(child, str) else _NO_DATA
                found.append(H5Leaf(path, (), np.uint8, why))
            if len(found) > _MAX_LEAVES:
                raise CorpusError(f"it holds more than {_MAX_LEAVES} datasets")

    def _leaf(self, path: str, node: Any) -> tuple[H5Leaf, int]:
        """Return the declaration of a dataset, and the inflation limit of its chunks."""
        import h5py

        space = node.get_space()
        shape = space.get_simple_extent_dims()
        if not shape and space.get_simple_extent_type() == h5py.h5s.NULL:
            return H5Leaf(path, (), np.uint8, "it has no values at all"), 1
        try:
            dtype = self._types.of(node)
        except (TypeError, ValueError) as error:
            return H5Leaf(path, shape, np.uint8, f"its type is not supported ({error})"), 1
        problem, ratio = storage_of(node)
        other = not_numbers(dtype)
        if problem is None and other is not None:
            problem = f"it holds {other}, which cannot be a column of numbers"
        elif problem is None and 0 not in shape and _is_unwritten(node):
            problem = "its values were never written"
        return H5Leaf(path, shape, dtype, problem), ratio


def _is_unwritten(node: Any) -> bool:
    import h5py

    if node.get_storage_size() or node.get_offset() is not None:
        return False
    return bool(node.get_create_plist().get_layout() != h5py.h5d.COMPACT)


def _text(name: bytes) -> str:
    return name.decode("utf-8")
