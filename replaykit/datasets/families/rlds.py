"""The family of RLDS data sets, as TensorFlow Datasets stores them.

A TFRecord file is a row of records: the length in 8 bytes, its checksum, the data, its checksum.
Numbers are little-endian, and checksums are CRC-32C with a mask. A record is a protobuf message
``tf.train.Example``: a map from names to lists of bytes, of floats, or of integers.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.encoded_frames import decode_image, open_image
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    TableSource,
    dtype_of,
    episode_blocks,
)
from replaykit.datasets.remote_sources import HubFiles
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError, import_extra
from replaykit.ted import TERMINATED, TRUNCATED, Key

_FEATURES: Final = "features.json"
_INFO: Final = "dataset_info.json"
_SHARD: Final = re.compile(
    r"(?:.*/)?(?P<set>[^/]+)-(?P<split>[^-/]+)\.tfrecord-(?P<number>\d{5,})-of-(?P<count>\d{5,})"
)
_FLAGS: Final = ("is_first", "is_last", "is_terminal")
_RESULTS: Final = ("reward", "discount")


@dataclass(frozen=True, kw_only=True)
class RldsLayout(TableLayout):
    """The layout of RLDS data sets in TFRecord files of TensorFlow Datasets.

    An episode of T steps becomes T - 1 rows, each with the observation of the next step. RLDS
    defines that action, reward and discount of the last step are not valid, so they are left out.
    ``reward`` and ``discount`` have keys below ``next``. An episode is terminated if its last step
    has ``is_terminal``, and otherwise truncated. Images are decoded to pixels. A text becomes its
    number in a list, which `RldsExperienceReplay.texts` returns. Metadata of episodes, and values
    without a fixed shape, are left out.

    Example:
        >>> from replaykit.datasets.families import RLDS
        >>> RLDS.name
        'rlds'
    """

    name: str = "rlds"
    version: int = 1

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return _RldsTable(sources, judge)

    def recognizes(self, path: Path) -> bool:
        return (path / _FEATURES).is_file() and (path / _INFO).is_file()


RLDS: Final = RldsLayout()


@contextmanager
def _errors(where: Location, rule: str) -> Iterator[None]:
    try:
        yield
    except CorpusError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        text = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise where.error(text, rule) from error


@dataclass(frozen=True)
class _Feature:
    """A feature of a step.

    Attributes:
        name: its path below ``steps``.
        kind: ``"numbers"``, ``"encoded"`` numbers, ``"image"`` or ``"text"``.
        dtype, shape: those of one value.
        listed: the length of an inner sequence; None for other features.
        compressed: True if encoded numbers are compressed.
    """

    name: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    listed: int | None = None
    compressed: bool = False

    @property
    def key(self) -> Key:
        parts = tuple(self.name.split("/"))
        return ("next", *parts) if parts[0] in _RESULTS else parts

    @property
    def is_observed(self) -> bool:
        """True if a value also belongs to the row before, as its next observation."""
        return self.name.partition("/")[0] == "observation"


class _RldsTable:
    """The steps of the episodes in all shards."""

    attached: Mapping[str, Path] = {}

    def __init__(self, sources: Sources, judge: Judge) -> None:
        self._judge = judge
        names = {file.name: file.path for file in sources.files}
        found = [name for name in names if name.rpartition("/")[2] == _FEATURES]
        if len(found) != 1:
            first = sources.files[0]
            what = f"{len(found)} files named {_FEATURES} describe data sets, expected one"
            raise Location(first.path, first.name).error(what, "V04")
        self._where = Location(names[found[0]], found[0])
        folder = found[0].removesuffix(_FEATURES)
        self.left_out: list[dict[str, str]] = []
        with _errors(self._where, "V04"):
            said = json.loads(self._where.file.read_bytes())
            self._features = list(self._steps_of(said))
        self._shards: list[tuple[Path, str, RecordFile]] = []
        self._read_shards(folder, names)
        for feature in self._features:
            self._check_size(feature)
        self._counts = [len(file) for _, _, file in self._shards]
        self._firsts = np.concatenate([[0], np.cumsum(self._counts)])
        self.splits = self._find_splits(folder, names)
        self.texts: dict[str, dict[str, int]] = {}
        self.facts: dict[str, Any] = {"format": "rlds", "texts": {}}
        count = int(self._firsts[-1])
        numbers = np.concatenate([np.arange(each) for each in self._counts])
        self.episodes = TableEpisodes(
            np.zeros(count, np.int64),
            numbers,
            [f"record_{number}" for number in numbers.tolist()],
            files=np.repeat(np.arange(len(self._counts)), self._counts),
        )
        self.steps = np.zeros(count, np.int64)
        for position in range(count):
            try:
                self.steps[position] = self._steps_in(position)
            except CorpusError as error:
                judge.condemn(position, error)
        self.episodes.lengths[:] = np.maximum(self.steps - 1, 0)
        columns = [each for each in self._features if each.name not in _FLAGS]
        self._features = [self._resolved(each) for each in columns]
        self.columns = list(self._columns())

    # -- descriptions -----------------------------------------------------------------------------

    def _steps_of(self, said: Mapping[str, Any]) -> Iterator[_Feature]:
        """Yield the features of steps, from the description of all features."""
        features = said["featuresDict"]["features"]
        for name in features:
            if name != "steps":
                self.left_out.append({"key": name, "why": "it describes the whole episode"})
        yield from self._feature("", features["steps"]["sequence"]["feature"], None)

    def _feature(
        self, name: str, said: Mapping[str, Any], listed: int | None
    ) -> Iterator[_Feature]:
        if "featuresDict" in said:
            for inner, each in said["featuresDict"]["features"].items():
                yield from self._feature(f"{name}/{inner}" if name else inner, each, listed)
            return
        if "sequence" in said and listed is None:
            length = int(said["sequence"].get("length", -1))
            yield from self._feature(name, said["sequence"]["feature"], length)
            return
        found: _Feature | None = None
        if "text" in said or said.get("tensor", {}).get("dtype") == "string":
            found = _Feature(name, "text", np.dtype(np.int64), ())
        elif "image" in said:
            shape = _shape_of(said["image"])
            if said["image"].get("dtype", "uint8") == "uint8":
                found = _Feature(name, "image", np.dtype(np.uint8), shape or (-1, -1, -1))
        elif "classLabel" in said:
            found = _Feature(name, "numbers", np.dtype(np.int64), ())
        elif "boundingBox" in said:
            found = _Feature(name, "numbers", np.dtype(np.float32), (4,))
        elif "tensor" in said:
            tensor = said["tensor"]
            encoding = str(tensor.get("encoding", "none")).lower()
            found = _Feature(
                name,
                "numbers" if encoding == "none" else "encoded",
                dtype_of(tensor["dtype"]),
                _shape_of(tensor),
                compressed=encoding == "zlib",
            )
        is_listed = listed is not None
        if found is not None and is_listed and found.kind == "numbers" and listed != -1:
            shape = (int(listed or 0), *found.shape)
            found = _Feature(name, "numbers", found.dtype, shape, listed=listed)
        elif is_listed:
            found = None
        if found is None or (found.kind != "image" and min(found.shape, default=0) < 0):
            self.left_out.append({"key": name, "why": "its values have no fixed shape"})
            return
        if found.dtype.kind not in "biufc":
            self.left_out.append({"key": name, "why": "its dtype is not numeric"})
            return
        yield found

    def _resolved(self, feature: _Feature) -> _Feature:
        """Return a feature whose shape is that of its first image, if it is not declared."""
        if min(feature.shape, default=0) >= 0:
            return feature
        for position in np.flatnonzero(self.steps).tolist():
            where = self.location(position).at(key=f"steps/{feature.name}", record=0)
            with _errors(where, "V78"):
                entry = bytes(self._example(position).bytes(f"steps/{feature.name}")[0])
            with open_image(entry, str(where)) as image:
                shape = np.asarray(image).shape
            return replace(feature, shape=(*shape, 1)[:3])
        return replace(feature, shape=(0, 0, 0))

    def _check_size(self, feature: _Feature) -> None:
        """Check that a value fits in a record, where each number takes at least one byte."""
        size, sizes = math.prod(feature.shape), [np.diff(file.spans) for *_, file in self._shards]
        largest = max((int(each.max()) for each in sizes if len(each)), default=0)
        if feature.kind in ("numbers", "encoded") and not feature.compressed and size > largest:
            what = f"has the shape {list(feature.shape)}, but no record is larger than {largest}"
            raise self._where.at(key=f"steps/{feature.name}").error(f"{what} bytes", "V78")

    def _columns(self) -> Iterator[SourceColumn]:
        for feature in self._features:
            shape, name = feature.shape, f"steps/{feature.name}"
            if feature.name in _RESULTS and shape == ():
                shape = (1,)
            yield SourceColumn(feature.key, shape, feature.dtype, name)
            if feature.is_observed:
                yield SourceColumn(("next", *feature.key), shape, feature.dtype, name)
        for key in (TERMINATED, TRUNCATED):
            yield SourceColumn(key, (1,), np.dtype(bool), "steps/is_terminal")

    # -- shards -----------------------------------------------------------------------------------

    def _read_shards(self, folder: str, names: Mapping[str, Path]) -> None:
        shards: dict[tuple[str, str, str], list[str]] = {}
        for name in sorted(names):
            match = _SHARD.fullmatch(name) if name.startswith(folder) else None
            if match is not None:
                shards.setdefault((match["set"], match["split"], match["count"]), []).append(name)
        for (_, split, count), found in shards.items():
            if len(found) != int(count):
                what = f"{len(found)} of {int(count)} shards of the split {split} are there"
                self._judge.notes.add("V15", what, self._where)
            for name in found:
                where = Location(names[name], name)
                with _errors(where, "V77"):
                    self._shards.append((names[name], name, RecordFile(names[name])))
        if not self._shards:
            raise self._where.error(
                "no file is named like <set>-<split>.tfrecord-<n>-of-<m>", "V05"
            )

    def _find_splits(self, folder: str, names: Mapping[str, Path]) -> dict[str, list[int]]:
        """Return the positions of each split, after a check of the stated counts."""
        splits: dict[str, list[int]] = {}
        said: dict[str, list[int]] = {}
        path = names.get(f"{folder}{_INFO}")
        if path is not None:
            with _errors(Location(path, f"{folder}{_INFO}"), "V04"):
                for split in json.loads(path.read_bytes()).get("splits", ()):
                    said[split["name"]] = [int(count) for count in split.get("shardLengths", ())]
        for at, (path, name, file) in enumerate(self._shards):
            match = _SHARD.fullmatch(name)
            assert match is not None
            first = int(self._firsts[at])
            splits.setdefault(match["split"], []).extend(range(first, first + len(file)))
            lengths, number = said.get(match["split"], []), int(match["number"])
            if number < len(lengths) and lengths[number] != len(file):
                what = f"has {len(file)} records, {_INFO} states {lengths[number]}"
                raise Location(path, name).error(what, "V15")
        return splits

    def location(self, position: int) -> Location:
        path, name, _ = self._shards[int(self.episodes.files[position])]
        return Location(path, name, self.episodes.names[position])

    def _record(self, position: int) -> tuple[RecordFile, int]:
        file = int(self.episodes.files[position])
        return self._shards[file][2], position - int(self._firsts[file])

    def _example(self, position: int) -> Example:
        file, number = self._record(position)
        with _errors(self.location(position), "V78"):
            return file.example(number)

    def _steps_in(self, position: int) -> int:
        """Return the count of steps of an episode, from one feature if they make a row."""
        file, number = self._record(position)
        example, counts = self._example(position), dict[str, int]()
        with _errors(self.location(position), "V78"):
            known = [each for each in self._features if each.listed is None]
            flags = [each for each in known if each.name in _FLAGS]
            for feature in (*flags, *known):
                name, is_number = f"steps/{feature.name}", feature.kind == "numbers"
                entries = _numbers(example, name) if is_number else example.bytes(name)
                if size := math.prod(feature.shape) if is_number else 1:
                    counts[name] = len(entries) // size
                    if counts[name] > 1:
                        break
            # Nothing else is read of an episode without rows.
            if len(set(counts.values())) > 1:
                raise ValueError(f"features have different numbers of steps: {counts}")
        if not counts:
            raise self._where.error("steps have no features of fixed shapes", "V12")
        steps = next(iter(counts.values()))
        if steps < 2:
            with _errors(self.location(position), "V77"):
                file.check(number)
        return steps

    # -- rows -------------------------------------------------------------------------------------

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        self.texts = {}
        wanted = {key[1:] if key[:2] == ("next", "observation") else key for key in keys}
        rows = partial(self._rows, wanted=wanted)
        yield from episode_blocks(self, kept, keys, rows, self._judge)
        self.facts["texts"] = {name: list(numbers) for name, numbers in self.texts.items()}

    def _rows(self, position: int, wanted: set[Key]) -> dict[Key, Array]:
        where, steps = self.location(position), int(self.steps[position])
        file, number = self._record(position)
        with _errors(where, "V77"):
            file.check(number)
        example = self._example(position)
        found: dict[Key, Array] = {}
        for feature in self._features:
            if feature.key not in wanted:
                continue
            inside = where.at(key=f"steps/{feature.name}")
            with _errors(inside, "V78"):
                values = self._values(example, feature, steps, inside)
            if feature.is_observed:
                following: Key = ("next", *feature.key)
                found[following] = values[1:]
            if feature.name in _RESULTS and not feature.shape:
                values = values[:, None]
            found[feature.key] = values[:-1]
        ends = {name: self._flag(example, name, steps, where) for name in _FLAGS}
        for name, at in (("is_first", 0), ("is_last", steps - 1), ("is_terminal", steps - 1)):
            wrong = np.flatnonzero(ends[name])
            if len(wrong[wrong != at]):
                step = int(wrong[wrong != at][0])
                what = f"{name} is set at step {step} of {steps}"
                self._judge.fail(position, where, what, "V31")
        terminated = np.zeros((steps - 1, 1), bool)
        terminated[-1] = ends["is_terminal"][-1]
        found[TERMINATED] = terminated
        found[TRUNCATED] = np.zeros_like(terminated)  # the writer cuts other episodes
        return found

    def _flag(self, example: Example, name: str, steps: int, where: Location) -> Array:
        path = f"steps/{name}"
        if path not in example.names:
            return np.zeros(steps, bool)
        with _errors(where.at(key=path), "V78"):
            found = _numbers(example, path)
            if len(found) != steps:
                raise ValueError(f"has {len(found)} entries, expected {steps}")
            return found.astype(bool)

    def _values(self, example: Example, feature: _Feature, steps: int, where: Location) -> Array:
        """Return the values of all steps, ``[T, *shape]``."""
        name = f"steps/{feature.name}"
        if feature.kind == "numbers":
            if feature.listed is not None:
                lengths = _numbers(example, f"{name}/ragged_row_lengths_0")
                if len(lengths) != steps or (lengths != feature.listed).any():
                    raise ValueError(f"has lists of other lengths than {feature.listed}")
                name += "/ragged_flat_values"
            numbers = _numbers(example, name)
            size = math.prod(feature.shape)
            if len(numbers) != steps * size:
                raise ValueError(f"has {len(numbers)} numbers, expected {steps} x {size}")
            if feature.dtype == np.uint64:
                numbers = numbers.view(np.uint64)
            found = numbers.astype(feature.dtype)
            is_float = feature.dtype.kind == "f"
            if size and (
                (numbers.dtype.kind == "f") != is_float
                or (not is_float and (found != numbers).any())
            ):
                raise ValueError(f"has numbers that are not {feature.dtype}")
            return found.reshape(steps, *feature.shape)
        entries = example.bytes(name)
        if len(entries) != steps:
            raise ValueError(f"has {len(entries)} entries, expected {steps}")
        if feature.kind == "text":
            known = self.texts.setdefault(feature.name, {})
            texts = [bytes(each).decode("utf-8", "replace") for each in entries]
            return np.array([known.setdefault(each, len(known)) for each in texts], np.int64)
        found = np.empty((steps, *feature.shape), feature.dtype)
        for at, entry in enumerate(entries):
            if feature.kind == "image":
                decode_image(bytes(entry), found[at], str(where.at(record=at)))
                continue
            raw = bytes(entry)
            if feature.compressed:
                raw = zlib.decompressobj().decompress(raw, found[at].nbytes + 1)
            if len(raw) != found[at].nbytes:
                raise ValueError(f"step {at} has {len(raw)} bytes, expected {found[at].nbytes}")
            found[at] = np.frombuffer(raw, feature.dtype).reshape(feature.shape)
        return found


def _shape_of(said: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in said.get("shape", {}).get("dimensions", ()))


def _numbers(example: Example, name: str) -> Array:
    """Return the floats or integers of a feature.

    Raises:
        KeyError: there is no such feature.
        ValueError: it has bytes.
    """
    kind = example.kind(name)
    if kind == "bytes":
        raise ValueError("has bytes, expected numbers")
    return example.floats(name) if kind == "floats" else example.integers(name)


class RldsExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of RLDS data sets.

    ``source`` is the folder with ``features.json``, such as ``bridge/1.0.0``. Any names joined by
    "/" serve as id. Without ``source``, an id ``owner/name`` names a repository of a Hub. See
    `RldsLayout` for keys, ends of episodes, images and texts.

    See BaseDatasetExperienceReplay for arguments, errors and methods.

    Example:
        >>> from replaykit.datasets import RldsExperienceReplay
        >>> RldsExperienceReplay("me/bridge", 32, download=False, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'me/bridge' is not in ...
    """

    any_id = True
    corpus = "rlds"
    layout = RLDS
    owner: ClassVar[str] = "rlds"

    @property
    def texts(self) -> dict[str, list[str]]:
        """The texts that the numbers in a column stand for, by the name of the column."""
        found: dict[str, list[str]] = self.published.manifest.report["about"]["texts"]
        return found

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        return HubFiles.of_id(dataset_id, "")


_HEADER: Final = 12
_FOOTER: Final = 4
_MASK: Final = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LISTS: Final = {1: "bytes", 2: "floats", 3: "integers"}


def masked_crc(data: Any) -> int:
    """Return the masked CRC-32C of some bytes.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    module = import_extra("google_crc32c", "TFRecord files need google-crc32c", "rlds")
    crc = module.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class RecordFile:
    """A TFRecord file, of which only the headers of records are read when it is opened.

    Attributes:
        spans: first byte and end of the data of each record, int64 ``[R, 2]``.

    Raises:
        ValueError: a header is damaged, or the file ends inside a record.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        spans: list[tuple[int, int]] = []
        at = 0
        while at < size:
            header = self._memory[at : at + _HEADER]
            if len(header) < _HEADER:
                raise ValueError(f"it ends inside the header of record {len(spans)}")
            length, crc = struct.unpack("<QI", header)
            if masked_crc(header[:8]) != crc:
                raise ValueError(f"the length of record {len(spans)} has a wrong checksum")
            stop = at + _HEADER + length
            if stop + _FOOTER > size:
                raise ValueError(f"it ends inside record {len(spans)} of {length:,} bytes")
            spans.append((at + _HEADER, stop))
            at = stop + _FOOTER
        self.spans = np.array(spans, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.spans)

    def example(self, number: int) -> Example:
        """Return a record, whose data is read when it is used. The checksum is not checked."""
        start, stop = self.spans[number].tolist()
        return Example(memoryview(self._memory)[start:stop])

    def check(self, number: int) -> None:
        """Check the checksum of a record's data.

        Raises:
            ValueError: it is wrong.
        """
        start, stop = self.spans[number].tolist()
        (crc,) = struct.unpack("<I", self._memory[stop : stop + _FOOTER])
        if masked_crc(self._memory[start:stop]) != crc:
            raise ValueError(f"the data of record {number} has a wrong checksum")


class Example:
    """A message ``tf.train.Example``: lists of bytes, floats or integers by name.

    Args:
        data: the encoded message.

    Raises:
        ValueError: the data is not such a message.

    Example:
        >>> from replaykit.datasets.families.rlds import Example
        >>> number = b"\\x0a\\x01a\\x12\\x05\\x1a\\x03\\x0a\\x01\\x07"
        >>> example = Example(memoryview(b"\\x0a\\x0c\\x0a\\x0a" + number))
        >>> example.names, example.integers("a")
        (['a'], array([7]))
    """

    def __init__(self, data: memoryview) -> None:
        self._features: dict[str, memoryview] = {}
        for features in _fields(data, 1):
            for entry in _fields(features, 1):
                (name,) = list(_fields(entry, 1)) or [memoryview(b"")]
                values = list(_fields(entry, 2))
                self._features[bytes(name).decode()] = values[-1] if values else memoryview(b"")

    @property
    def names(self) -> list[str]:
        """The names of all features."""
        return list(self._features)

    def kind(self, name: str) -> str | None:
        """Return ``"bytes"``, ``"floats"``, ``"integers"``, or None for a feature without any."""
        found = None
        for number, _, _ in _walk(self._features[name]):
            found = _LISTS.get(number, found)
        return found

    def _parts(self, name: str, number: int, single: int) -> Iterator[tuple[int, Any]]:
        """Yield wire type and value of the entries of a list, which may be packed."""
        for values in _fields(self._features[name], number):
            for field, kind, value in _walk(values):
                if field == 1 and kind not in (single, _BYTES):
                    raise ValueError(f"a list has an entry of the wrong type {kind}")
                if field == 1:
                    yield kind, value

    def bytes(self, name: str) -> list[memoryview]:
        """Return the entries of a list of bytes, without copying them."""
        return [_data(value) for _, value in self._parts(name, 1, _BYTES)]

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Return a list of floats."""
        parts = [
            np.frombuffer(value if kind == _BYTES else struct.pack("<I", value), "<f4")
            for kind, value in self._parts(name, 2, _FIXED32)
        ]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """Return a list of integers."""
        parts = [
            _varints(value) if kind == _BYTES else np.array([value], np.uint64)
            for kind, value in self._parts(name, 3, _VARINT)
        ]
        found = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
        return found.view(np.int64)


def _varints(data: Any) -> npt.NDArray[np.uint64]:
    """Decode packed integers of 7 bits in each byte."""
    octets = np.frombuffer(data, np.uint8)
    last = octets < 0x80
    if not len(octets):
        return np.zeros(0, np.uint64)
    if not last[-1]:
        raise ValueError("a list of integers ends inside a number")
    starts = np.append(0, np.flatnonzero(last)[:-1] + 1)
    places = np.arange(len(octets)) - np.repeat(starts, np.diff(np.append(starts, len(octets))))
    if places.max() > 9:
        raise ValueError("an integer has more than 10 bytes")
    shifted = (octets & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    found: npt.NDArray[np.uint64] = np.bitwise_or.reduceat(shifted, starts)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a message ends inside a number")
        octet = data[at]
        found |= (octet & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if octet < 0x80:
            return found & (2**64 - 1), at


def _walk(data: memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
    """Yield number, wire type and value of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a message has a field of the unknown type {kind}")
        part = data[at : at + size]
        if len(part) < size:
            raise ValueError("a message ends inside a field")
        at += size
        if kind == _BYTES:
            yield tag >> 3, kind, part
        else:
            yield tag >> 3, kind, int.from_bytes(part, "little")


def _data(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a message has a number, expected bytes")
    return value


def _fields(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the values of the fields of one number, which are messages or bytes."""
    for found, _, value in _walk(data):
        if found == number:
            yield _data(value)
