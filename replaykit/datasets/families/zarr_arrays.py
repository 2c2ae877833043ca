"""The family of Zarr arrays, as diffusion policy and UMI store them."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.h5_checks import MOST_CHUNK_BYTES
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    TableSource,
    dtype_of,
)
from replaykit.datasets.remote_sources import HubFiles
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError, import_extra
from replaykit.ted import TERMINATED, TRUNCATED, Key, format_key

_ENDS: Final = "meta/episode_ends"
_DESCRIPTION: Final = re.compile(r"(?P<array>.+)/(?:\.zarray|zarr\.json)", re.DOTALL)
_CHUNK: Final = re.compile(r"(?:c/)?(\d+(?:[./]\d+)*)")
_OUTSIDE: Final[Mapping[str, Key]] = {
    "action": ("action",),
    "reward": ("next", "reward"),
    "success": ("next", "success"),
    "terminated": TERMINATED,
    "truncated": TRUNCATED,
}
"""Keys of arrays that are no observations."""
_CODECS: Final = re.compile(
    "blosc|zlib|gzip|bz2|lzma|zstd|lz4|delta|shuffle|bitround|quantize|fixedscaleoffset|packbits|"
    "astype|crc32c?|adler32|fletcher32|jenkins_lookup3|zfpy|pcodec|bytes|transpose|"
    "sharding_indexed|vlen-(?:utf8|bytes|array)"
)
"""Codecs that decode bytes to numbers or texts. Others, such as pickle, may run code."""
_IMAGES: Final = "imagecodecs_"
_MOST_MISSING: Final = 1 << 24
"""Number of missing chunks that are looked up one by one."""


def zarr_module() -> Any:
    """Return the module ``zarr``, which also decodes images if imagecodecs is installed.

    Raises:
        ImportError: zarr is not installed, or is older than version 3.
    """
    zarr = import_extra("zarr", "Zarr needs zarr", "zarr")
    import_extra("zarr.storage", "Zarr needs zarr", "zarr")
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ImportError(f"expected zarr 3 or newer, got {zarr.__version__}; install a newer one")
    return zarr


@dataclass(frozen=True, kw_only=True)
class ZarrLayout(TableLayout):
    """The layout of Zarr folders and ``.zip`` files of diffusion policy and UMI.

    The arrays ``data/<name>`` hold one entry for each row, and ``meta/episode_ends`` the end of
    each episode. ``action``, ``reward``, ``success``, ``terminated`` and ``truncated`` become the
    columns of these names, and all other arrays become observations. Groups become nested keys.
    Arrays in the groups ``action`` and ``observation`` have the keys of their paths. Rows have no
    next observation, because the one after the last row was not recorded. An episode is truncated
    if ``terminated`` is not set in its last row. Images may be compressed by JPEG XL and other
    codecs of imagecodecs.

    Example:
        >>> from replaykit.datasets.families import ZARR
        >>> ZARR.name
        'zarr'
    """

    name: str = "zarr"
    version: int = 1

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return _ZarrTable(sources, policies, judge)

    def recognizes(self, path: Path) -> bool:
        return (path / _ENDS).is_dir() or (path.suffix == ".zip" and path.is_file())


ZARR: Final = ZarrLayout()


@contextmanager
def _zarr_errors(where: Location) -> Iterator[None]:
    try:
        yield
    except (CorpusError, ImportError, MemoryError):
        raise
    except Exception as error:  # stores and codecs raise errors of many kinds
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise where.error(f"cannot be read ({text:.300})", "V03") from error


class _Store:
    """A Zarr hierarchy: a folder, or a ZIP file.

    Attributes:
        where: its location.
        stops: the ends of the episodes, int64 ``[E]``.
        arrays: the arrays of zarr by their names below ``data``.
        excluded: descriptions of arrays that policies leave out, which are not opened.
        missing: rows whose chunk is not stored, by the name of the array.
    """

    def __init__(self, path: Path, name: str, members: Sequence[str], policies: Policies) -> None:
        self.where = Location(path, name)
        self._members = frozenset(members)
        zarr = zarr_module()
        found = {m["array"] for each in members if (m := _DESCRIPTION.fullmatch(each))}
        self._below: dict[str, list[str]] = {}
        for member in members:
            at = member.rfind("/")
            while at >= 0 and member[:at] not in found:
                at = member.rfind("/", 0, at)
            self._below.setdefault(member[: max(at, 0)], []).append(member[at + 1 :])
        names = sorted(each.removeprefix("data/") for each in found if each.startswith("data/"))
        with _zarr_errors(self.where):
            is_zip = path.is_file()
            self._zip = zipfile.ZipFile(path) if is_zip else None
            kind = zarr.storage.ZipStore if is_zip else zarr.storage.LocalStore
            # Consolidated metadata could contradict the metadata that is checked here.
            store = kind(path, read_only=True)
            self._group = zarr.open_group(store, mode="r", use_consolidated=False)
        ends = self._open(_ENDS)
        self.arrays: dict[str, Any] = {}
        self.excluded: dict[str, Any] = {}
        self.left_out: list[dict[str, str]] = []
        self.missing: dict[str, npt.NDArray[np.bool_]] = {}
        twice = [key for key, count in Counter(map(key_of, names)).items() if count > 1]
        if twice:
            what = f"two arrays have the key {format_key(twice[0])}"
            raise self.where.at(key="data").error(what, "V10")
        for name in names:
            if not policies.keeps(key_of(name)) and key_of(name) not in (TERMINATED, TRUNCATED):
                with _zarr_errors(self.where.at(key=f"data/{name}")):
                    self.excluded[name] = self._description(f"data/{name}")
                continue
            array = self._open(f"data/{name}")
            if array is None:
                continue
            if array.dtype.kind not in "biuf":
                why = f"its dtype {array.dtype} is not numeric"
                self.left_out.append({"key": name, "why": why})
                continue
            self.arrays[name] = array
        self._check_ends(ends)

    def _check_ends(self, ends: Any) -> None:
        where = self.where.at(key=_ENDS)
        if ends is None or ends.dtype.kind not in "iu" or ends.ndim != 1:
            raise where.error("expected a list of integers", "V10")
        if self._unstored(_ENDS, ends).any():
            raise where.error("a chunk is missing", "V76")
        _check_size(where, "it", ends.shape, ends.dtype)
        with _zarr_errors(where):
            self.stops = np.asarray(ends[:]).astype(np.int64)
        wrong = np.diff(self.stops, prepend=0) < 0
        if wrong.any():
            at = int(np.argmax(wrong))
            what = f"episode {at} ends at row {self.stops[at]}, before the end of the one before"
            raise where.error(what, "V32")
        rows = int(self.stops[-1]) if len(self.stops) else 0
        if not self.arrays:
            raise self.where.at(key="data").error("has no array of numbers", "V12")
        for name, array in self.arrays.items():
            count = array.shape[0] if array.ndim else 0
            if count != rows:
                what = f"has {count} rows, but the episodes end at row {rows}"
                raise self.where.at(key=f"data/{name}").error(what, "V11")
            unstored = self._unstored(f"data/{name}", array)
            if unstored.any():
                self.missing[name] = np.repeat(unstored, array.chunks[0] or 1)[:rows]
            # Zarr reserves memory for whole chunks before it decodes them.
            _check_size(self.where.at(key=f"data/{name}"), "a chunk", array.chunks, array.dtype)

    def _open(self, name: str) -> Any:
        """Open an array after a check of its codecs; None for a group."""
        where = self.where.at(key=name)
        with _zarr_errors(where):
            said = self._description(name)
            if said is None:
                return None
            for codec in _codecs_of(said):
                if _CODECS.fullmatch(codec.removeprefix("numcodecs.")):
                    continue
                if not codec.removeprefix("numcodecs.").startswith(_IMAGES):
                    what = f"is stored by the codec {codec!r}, which is refused"
                    if "pickle" in codec:
                        what += ", because it can run code of the file"
                    raise where.error(what, "V03")
                _register_images(codec)
            found = self._group[name]
            if not isinstance(found, zarr_module().Array):
                raise ValueError("is a group")
            return found

    def _description(self, name: str) -> Any:
        for file in (".zarray", "zarr.json"):
            if f"{name}/{file}" in self._members:
                with self._opened(f"{name}/{file}") as opened:
                    found = json.load(opened)
                return found if found.get("node_type", "array") == "array" else None
        raise KeyError(f"{name} is missing")

    def _opened(self, member: str) -> IO[bytes]:
        return self._zip.open(member) if self._zip else (self.where.file / member).open("rb")

    def _unstored(self, name: str, array: Any) -> npt.NDArray[np.bool_]:
        """Return which chunks along the rows are not stored whole. Zarr reads them as filled."""
        # Files hold chunks, or shards of chunks.
        grid = tuple(max(1, size) for size in array.shards or array.chunks)
        counts = [-(-size // chunk) for size, chunk in zip(array.shape, grid, strict=True)]
        members = set(self._below.get(name, ()))  # a ZIP file may have a name twice
        per = grid[0] // (array.chunks[0] or 1)
        stored: dict[int, int] = {}
        lacks: list[tuple[int, npt.NDArray[np.bool_]]] = []
        for member in members:
            match = _CHUNK.fullmatch(member)
            index = [int(part) for part in re.split(r"[./]", match[1])] if match else []
            # Chunks beyond the shape remain after an array was made smaller.
            if len(index) == len(counts) and all(map(int.__lt__, index, counts)):
                if array.shards:
                    rows = self._unstored_in(name, member, array, index)
                    if rows is None:
                        continue
                    lacks.append((index[0] * per, rows))
                stored[index[0]] = stored.get(index[0], 0) + 1
        absent = (counts[0] - len(stored)) * per
        if absent > _MOST_MISSING:
            raise self.where.at(key=name).error(f"{absent} chunks are missing", "V76")
        each = math.prod(counts[1:])
        is_whole = np.full(counts[0], each == 0)
        is_whole[[at for at, count in stored.items() if count == each]] = True
        found = np.repeat(~is_whole, per)
        for start, rows in lacks:
            found[start : start + len(rows)] |= rows
        return found

    def _unstored_in(
        self, name: str, member: str, array: Any, index: Sequence[int]
    ) -> npt.NDArray[np.bool_] | None:
        """Return which chunks along the rows of a shard are missing; None without a whole index."""
        where, codec = self.where.at(key=f"{name}/{member}"), array.metadata.codecs[0]
        with _zarr_errors(where), self._opened(f"{name}/{member}") as file:
            per = [shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)]
            said = [each.to_dict() for each in codec.index_codecs]
            names = [each["name"] for each in said]
            if names not in (["bytes"], ["bytes", "crc32c"]):
                raise where.error(f"its index has the codecs {names}, which are not read", "V03")
            size = 16 * math.prod(per) + 4 * (len(names) - 1)
            if codec.index_location.value == "end":
                file.seek(max(0, file.seek(0, 2) - size))
            found = file.read(size)
            if len(found) < size:
                return None
            order = "<u8" if said[0]["configuration"]["endian"] == "little" else ">u8"
            entries = np.frombuffer(found, order, 2 * math.prod(per)).reshape(*per, 2)
        # Chunks beyond the shape are not stored.
        inside = tuple(
            slice(max(0, -(-rows // chunk) - at * count))
            for rows, chunk, at, count in zip(array.shape, array.chunks, index, per, strict=True)
        )
        missing = entries[..., 0][inside] == np.iinfo(np.uint64).max
        return np.asarray(missing.reshape(len(missing), -1).any(1))

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows of an array.

        Raises:
            CorpusError: a chunk is damaged (V03).
        """
        with _zarr_errors(self.where.at(key=f"data/{name}")):
            array = self.arrays[name]
            found: Array = np.asarray(array[start:stop]).astype(_native(array), copy=False)
            return found


def _check_size(where: Location, what: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Check a size in bytes before memory for it is allocated (V03)."""
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_CHUNK_BYTES:
        text = f"{what} has {size:,} bytes, but at most {MOST_CHUNK_BYTES:,} are read at once"
        raise where.error(text, "V03")


def _native(array: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = array.dtype.newbyteorder("=")
    return found


def _codecs_of(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the codecs of an array, from its metadata."""
    for each in [said.get("compressor"), *(said.get("filters") or ())]:
        if each is not None:
            yield str(each["id"])
    for each in said.get("codecs") or ():
        yield str(each["name"])
        inner = each.get("configuration") or {}
        yield from _codecs_of({"codecs": inner.get("codecs")})
        yield from _codecs_of({"codecs": inner.get("index_codecs")})


def _register_images(codec: str) -> None:
    need = f"images stored by {codec} need imagecodecs"
    module = import_extra("imagecodecs.numcodecs", need, "zarr")
    module.register_codecs(codec, force=True, verbose=False)


def key_of(name: str) -> Key:
    """Return the key of the array ``data/<name>``."""
    parts = tuple(name.split("/"))
    is_key = len(parts) > 1 and parts[0] in ("action", "observation")
    return parts if is_key else _OUTSIDE.get(name, ("observation", *parts))


class _ZarrTable:
    """The rows of one or more Zarr hierarchies."""

    attached: Mapping[str, Path] = {}
    splits: Mapping[str, Sequence[int]] = {}

    def __init__(self, sources: Sources, policies: Policies, judge: Judge) -> None:
        self._judge = judge
        self._stores = [_Store(*found, policies) for found in _hierarchies(sources)]
        first = self._stores[0]
        for other in self._stores[1:]:
            self._check_alike(first, other)
        self._names = {key_of(name): name for name in first.arrays}
        self.columns = []
        for key, name in self._names.items():
            array = first.arrays[name]
            shape = tuple(array.shape[1:]) or ((1,) if key[0] == "next" else ())
            self.columns.append(SourceColumn(key, shape, _native(array), f"data/{name}"))
        for name, said in first.excluded.items():
            if said is not None:
                dtype = dtype_of(said.get("dtype", said.get("data_type")))
                self.columns.append(SourceColumn(key_of(name), (1,), dtype, f"data/{name}"))
        self.left_out = first.left_out
        lengths = [np.diff(store.stops, prepend=0) for store in self._stores]
        counts = [len(each) for each in lengths]
        numbers = np.concatenate([np.arange(count) for count in counts])
        self.episodes = TableEpisodes(
            np.concatenate(lengths),
            numbers,
            [f"episode_{number}" for number in numbers.tolist()],
            files=np.repeat(np.arange(len(counts)), counts),
        )
        self._starts = np.concatenate([store.stops for store in self._stores])
        self._starts -= self.episodes.lengths
        self.facts = {"format": "zarr"}
        for at, store in enumerate(self._stores):
            for name, rows in store.missing.items():
                self._report_missing(at, name, rows)

    def _check_alike(self, first: _Store, other: _Store) -> None:
        for name in sorted({*first.arrays, *other.arrays}):
            where = other.where.at(key=f"data/{name}")
            if name not in other.arrays or name not in first.arrays:
                raise where.error("not all hierarchies have this array", "V12")
            one, two = ((store.arrays[name].shape[1:], store.arrays[name].dtype)
                        for store in (first, other))  # fmt: skip
            if one != two:
                what = f"is {two[1]} {list(two[0])}, expected {one[1]} {list(one[0])}"
                raise where.error(what, "V10")

    def _report_missing(self, file: int, name: str, rows: npt.NDArray[np.bool_]) -> None:
        at = np.flatnonzero(self.episodes.files == file)
        bounds = np.concatenate([[0], rows.cumsum()])
        starts = self._starts[at]
        counts = bounds[starts + self.episodes.lengths[at]] - bounds[starts]
        for position, count in zip(at.tolist(), counts.tolist(), strict=True):
            if count:
                where = self.location(position).at(key=f"data/{name}")
                what = f"the chunks of {count} rows are missing, which Zarr would fill"
                self._judge.fail(position, where, what, "V76")

    def location(self, position: int) -> Location:
        store = self._stores[int(self.episodes.files[position])]
        return store.where.at(group=self.episodes.names[position])

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        files, starts = self.episodes.files, self._starts
        stops = starts + self.episodes.lengths
        positions = np.flatnonzero(kept)
        # Runs of neighbouring episodes are read together.
        is_new = np.ones(len(positions), bool)
        is_new[1:] = (starts[positions[1:]] != stops[positions[:-1]]) | (
            files[positions[1:]] != files[positions[:-1]]
        )
        firsts = np.flatnonzero(is_new)
        lasts = np.append(firsts[1:], len(positions)) - 1
        for first, last in zip(positions[firsts], positions[lasts], strict=True):
            store = self._stores[int(files[first])]
            for key in keys:
                array = store.arrays[self._names[key]]
                each = max(1, array.dtype.itemsize * int(np.prod(array.shape[1:])))
                chunk = max(1, array.chunks[0])
                step = max(1, block_bytes // each // chunk) * chunk
                start, end = int(starts[first]), int(stops[last])
                while start < end:
                    # Blocks end where chunks end, so no chunk is decoded twice.
                    stop = min(end, (start // step + 1) * step)
                    yield {key: self._read(store, key, start, stop)}
                    start = stop

    def _read(self, store: _Store, key: Key, start: int, stop: int) -> Array:
        name = self._names[key]
        try:
            found = store.read(name, start, stop)
        except CorpusError as error:
            if not self._judge.skips:
                raise
            file = self._stores.index(store)
            stops = self._starts + self.episodes.lengths
            near = (self.episodes.files == file) & (stops > start) & (self._starts < stop)
            array = store.arrays[name]
            found = np.zeros((stop - start, *array.shape[1:]), _native(array))
            for position in np.flatnonzero(near).tolist():
                span = max(start, int(self._starts[position])), min(stop, int(stops[position]))
                try:  # the values of sound episodes are checked, too
                    found[span[0] - start : span[1] - start] = store.read(name, *span)
                except CorpusError:
                    self._judge.condemn(position, error)
        return found.reshape(-1, 1) if key[0] == "next" else found


def _hierarchies(sources: Sources) -> Iterator[tuple[Path, str, list[str]]]:
    """Yield path, name and members of each Zarr hierarchy among the files.

    Raises:
        CorpusError: there is none, or a file is no ZIP file.
    """
    count = 0
    folders: dict[str, list[str]] = {}
    names = [file.name for file in sources.files]
    ends = re.compile(rf"(?P<root>(?:.*/)?){_ENDS}/(?:\.zarray|zarr\.json)")
    for root in (match["root"] for each in names if (match := ends.fullmatch(each))):
        folders[root] = []
    for file in sources.files:
        root = next((root for root in folders if file.name.startswith(root)), None)
        if root is not None:
            folders[root].append(file.name[len(root) :])
        elif file.path.suffix == ".zip":
            count += 1
            where = Location(file.path, file.name)
            with _zarr_errors(where), zipfile.ZipFile(file.path) as archive:
                members = archive.namelist()
            if not any(ends.fullmatch(each) for each in members):
                raise where.error(f"it has no array {_ENDS}", "V04")
            yield file.path, file.name, members
    base = {file.name: file.path for file in sources.files}
    for root, members in folders.items():
        count += 1
        path = base[root + members[0]]
        for _ in members[0].split("/"):
            path = path.parent
        yield path, root.rstrip("/") or path.name, members
    if not count:
        found = sources.files[0]
        where = Location(found.path, found.name)
        raise where.error(f"no folder or ZIP file among the files has an array {_ENDS}", "V04")


class ZarrExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Rows of Zarr arrays in the layout of diffusion policy.

    ``source`` is a folder, or a ``.zip`` file as UMI publishes them. Any name serves as id. Without
    ``source``, an id ``owner/name`` names a repository of a Hub, whose ``.zip`` files are read. See
    `ZarrLayout` for keys and ends of episodes.

    See BaseDatasetExperienceReplay for arguments, errors and methods.

    Example:
        >>> from replaykit.datasets import ZarrExperienceReplay
        >>> ZarrExperienceReplay("me/pusht", 32, download=False, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'me/pusht' is not in ...
    """

    any_id = True
    corpus = "zarr"
    layout = ZARR
    owner: ClassVar[str] = "zarr"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        return HubFiles.of_id(dataset_id, ".zip")
