"""Write episodes as an RLDS data set in TFRecord files."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaykit.adapters.export_files import export_to
from replaykit.adapters.exported_episodes import (
    ACTION,
    OBSERVATION,
    Array,
    ExportedRows,
    ExportSource,
    channels_last,
    is_image,
    next_key,
)
from replaykit.buffer import ReplayBuffer
from replaykit.datasets.encoded_frames import image_module
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.families.rlds import RLDS, masked_crc
from replaykit.datasets.sources import Sources
from replaykit.ted import REWARD, TERMINATED, Key

_SHARD_BYTES: Final = 1 << 28
_RECORD_BYTES: Final = (1 << 31) - 1
"""The most bytes that protobuf reads as one message."""
_CLASS: Final = "tensorflow_datasets.core.features."
_FLAGS: Final = ("is_first", "is_last", "is_terminal")


def to_rlds(
    data: ReplayBuffer[Any, Any, Any, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> Path:
    """Write the episodes of a buffer as an RLDS data set, as TensorFlow Datasets reads them.

    The folder appears at ``path`` completely or not at all. Its last part is the version if it has
    the form ``1.0.0``, and the part before it the name. Otherwise the last part is the name. An
    episode of T rows becomes T + 1 steps, of which the last has the last next observation. RLDS
    defines that action, reward and discount of that step are not valid; they are 0. The discount of
    other steps is 1, or 0 if the episode terminates with the step. Images ``[H, W, 3]`` become PNG.
    Numbers of 64-bit floats and complex numbers are stored as bytes, which loses nothing. Other
    keys are left out.

    Args:
        data: a buffer or data set.
        path: the folder. Missing parents are made.
        overwrite: whether to replace an existing RLDS data set, in one step at the end.

    Returns:
        The path.

    Raises:
        KeyError: the data lacks a key. The message names it.
        ValueError: the data has no episode, a next observation differs from the observation of the
            following row, or an episode has 2 GiB or more. The message names key or episode.
        SchemaError: a column has a name or a shape that RLDS cannot keep.
        FileExistsError: the path exists, and ``overwrite`` is False, or it is no RLDS data set.
        OSError: the disk has too little room.
        ImportError: google-crc32c or Pillow is not installed.

    Cost: two passes, because the records are read back and compared. Memory: one episode.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> from replaykit.adapters import to_rlds
        >>> joints, ends = torch.randn(9, 2), torch.arange(8) == 7
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> never = torch.zeros(8, dtype=torch.bool)
        >>> _ = rb.extend(transition(joints[:-1], joints[:-1], torch.ones(8), joints[1:],
        ...                          ends, never, batch_size=8))
        >>> path = to_rlds(rb, Path(tempfile.mkdtemp()) / "push" / "1.0.0")
        >>> sorted(file.name for file in path.iterdir())
        ['dataset_info.json', 'features.json', 'push-train.tfrecord-00000-of-00001']
    """
    source = ExportSource(data, "RLDS")
    keys = [*source.below(OBSERVATION), *source.below(ACTION), REWARD]
    source.names(keys, ".".join)  # no part of a key has a slash
    images = {_name(key) for key in keys if is_image(source.leaves[key])}
    target = Path(path).expanduser()
    with export_to(source, target, "features.json", overwrite=overwrite) as draft:
        draft.path.mkdir()
        files = _Shards(draft.path)
        steps: dict[str, Any] = {}
        for number, rows in source.episodes():
            columns = {key: _steps_of(key, source.leaves[key], rows) for key in keys}
            draft.wrote(_compared(columns, rows))
            stored = {_name(key): values for key, values in columns.items()}
            stored |= dict(zip(_FLAGS, _flags(rows), strict=True))
            goes_on = 1 - rows.terminated.astype(np.float32)
            stored["discount"] = np.append(goes_on, np.float32(0))
            parts = {name: _Encoded(values, name in images) for name, values in stored.items()}
            message = _example({f"steps/{name}": part.data for name, part in parts.items()})
            if len(message) > _RECORD_BYTES:
                raise ValueError(
                    f"episode {number}: expected less than 2 GiB for RLDS, got {len(message):,} "
                    "bytes"
                )
            files.write(message)
            steps = steps or {name: part.feature for name, part in parts.items()}
        named, version = _named(target)
        splits = [files.close(named)]
        made = {"name": named, "version": version, "fileFormat": "tfrecord", "splits": splits}
        _write_json(draft.path / "dataset_info.json", made)
        inner = {"feature": _nested(steps), "length": "-1"}
        described = {"pythonClassName": f"{_CLASS}dataset_feature.Dataset", "sequence": inner}
        _write_json(draft.path / "features.json", _dict_of({"steps": described}))
        found = _read_back(draft.path)
        draft.check(lambda number: next(found))
    return target


def _name(key: Key) -> str:
    """Return the name of a column below ``steps``."""
    return "/".join(key[1:] if key == REWARD else key)


def _steps_of(key: Key, leaf: Any, rows: ExportedRows) -> Array:
    """Return the values of all steps, ``[T + 1, *shape]``."""
    if key[:1] == OBSERVATION:
        found = rows.with_last(key, tuple(leaf.shape))
    else:
        values = rows.rewards if key == REWARD else rows.arrays[key]
        found = np.concatenate([values, np.zeros_like(values[:1])])
    return channels_last(found) if is_image(leaf) else found


def _compared(columns: Mapping[Key, Array], rows: ExportedRows) -> dict[str, Array]:
    """Return the rows that replaykit's reader finds in the steps of an episode."""
    found = {"/".join(TERMINATED): rows.terminated[:, None]}
    for key, values in columns.items():
        found["/".join(key)] = values[:-1, None] if key == REWARD else values[:-1]
        if key[:1] == OBSERVATION:
            found["/".join(next_key(key))] = values[1:]
    return found


def _flags(rows: ExportedRows) -> Iterator[Array]:
    """Yield the flags of the first, the last and the terminal step."""
    at = np.arange(rows.count + 1)
    yield at == 0
    yield at == rows.count
    yield (at == rows.count) & rows.terminated[-1]


def _read_back(folder: Path) -> Iterator[dict[str, Array]]:
    """Yield the rows of each episode, as replaykit's reader finds them."""
    sources = Sources.local(sorted(folder.iterdir()), checked=False)
    table = RLDS.open(sources, Policies(), Judge("error", RuleFindings()))
    keys = [column.key for column in table.columns]
    kept = np.ones(len(table.episodes.lengths), bool)
    for block in table.blocks(kept, keys, 0):
        yield {"/".join(key): values for key, values in block.items()}


def _named(target: Path) -> tuple[str, str]:
    """Return name and version of the data set in a folder."""
    absolute, version = Path(os.path.abspath(target)), "1.0.0"
    name = absolute.name
    if re.fullmatch(r"\d+\.\d+\.\d+", name):
        name, version = absolute.parent.name, name
    return re.sub(r"\W", "_", name) or "_", version


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


# -- features -------------------------------------------------------------------------------------


class _Encoded:
    """The steps of a column as TensorFlow Datasets stores them.

    Attributes:
        data: a message ``tf.train.Feature``.
        feature: the description of the column for ``features.json``.
    """

    def __init__(self, values: Array, is_image: bool) -> None:
        shape = [str(size) for size in values.shape[1:]]
        about: dict[str, Any] = {"shape": {"dimensions": shape} if shape else {}}
        about["dtype"] = values.dtype.name
        kind = "image" if is_image else "tensor"
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        if is_image:
            about["encodingFormat"] = "png"
            self.data = _bytes_list(_png(each) for each in values)
        elif values.dtype.kind == "c" or values.dtype == np.float64:
            about["encoding"] = "bytes"
            self.data = _bytes_list(each.tobytes() for each in little)
        else:
            about["encoding"] = "none"
            is_float = values.dtype.kind == "f"
            numbers = values.astype("<f4").tobytes() if is_float else _varints(values)
            self.data = _field(2 if is_float else 3, _field(1, numbers))
        name = f"{_CLASS}{kind}_feature.{kind.capitalize()}"
        self.feature = {"pythonClassName": name, kind: about}


def _png(pixels: Array) -> bytes:
    file = io.BytesIO()
    image_module().fromarray(np.ascontiguousarray(pixels)).save(file, "png")
    return file.getvalue()


def _nested(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of features whose names are paths."""
    found: dict[str, Any] = {}
    for name, feature in features.items():
        *parents, last = name.split("/")
        at = found
        for parent in parents:
            at = at.setdefault(parent, _dict_of({}))["featuresDict"]["features"]
        at[last] = feature
    return _dict_of(found)


def _dict_of(features: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{_CLASS}features_dict.FeaturesDict"
    return {"pythonClassName": name, "featuresDict": {"features": features}}


# -- protobuf and TFRecord ------------------------------------------------------------------------


def _varints(values: Array) -> bytes:
    """Return integers as varints of protobuf: 7 bits to a byte, the lowest first."""
    number = values.reshape(-1).astype(np.int64).view(np.uint64)
    parts: list[bytes] = []
    shifts = np.arange(0, 70, 7, dtype=np.uint64)
    for at in range(0, len(number), 1 << 16):  # ten numbers of 8 bytes for each
        rest = number[at : at + (1 << 16), None] >> shifts
        more = np.zeros(rest.shape, bool)
        more[:, :-1] = rest[:, 1:] > 0
        octets = (rest & np.uint64(0x7F)).astype(np.uint8) | more.astype(np.uint8) << 7
        kept = np.ones(rest.shape, bool)
        kept[:, 1:] = more[:, :-1]
        parts.append(octets[kept].tobytes())
    return b"".join(parts)


def _varint(number: int) -> bytes:
    return _varints(np.array([number]))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _bytes_list(entries: Iterator[bytes]) -> bytes:
    return _field(1, b"".join(_field(1, each) for each in entries))


def _example(features: Mapping[str, bytes]) -> bytes:
    """Return a message ``tf.train.Example``."""
    entries = (
        _field(1, _field(1, name.encode()) + _field(2, feature))
        for name, feature in sorted(features.items())
    )
    return _field(1, b"".join(entries))


class _Shards:
    """The TFRecord files of a split, each of about 256 MiB."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lengths: list[int] = []
        self._room = self._bytes = 0

    def write(self, message: bytes) -> None:
        """Append a record."""
        if self._room <= 0:
            self._room = _SHARD_BYTES
            self._lengths.append(0)
        length = struct.pack("<Q", len(message))
        with open(self._folder / f"{len(self._lengths) - 1}", "ab") as file:
            file.write(length + struct.pack("<I", masked_crc(length)))
            file.write(message)
            file.write(struct.pack("<I", masked_crc(message)))
        self._lengths[-1] += 1
        self._room -= len(message)
        self._bytes += len(message)

    def close(self, name: str) -> dict[str, Any]:
        """Give the files their names, and return the description of the split."""
        count = len(self._lengths)
        for number in range(count):
            shard = self._folder / f"{name}-train.tfrecord-{number:05d}-of-{count:05d}"
            (self._folder / f"{number}").rename(shard)
        return {
            "name": "train",
            "shardLengths": [str(length) for length in self._lengths],
            "numBytes": str(self._bytes),
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        }
