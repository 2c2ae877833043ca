"""The Minari family in HDF5, Arrow and Parquet files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.encoded_frames import decode_image
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import FINAL_STATE, Alignment, Decoder, Field, Images, Text
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Bounds, Layout, Sidecar, SourceFacts, read_sidecar
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.table_sources import (
    Array,
    SourceColumn,
    TableEpisodes,
    TableLayout,
    TableSource,
    episode_blocks,
)
from replaykit.datasets.families.lerobot_files import Feature, arrow, file_errors, values_of
from replaykit.datasets.remote_sources import HubFiles
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.keywords import Replaced
from replaykit.ted import TERMINATED, TRUNCATED, Key

_D4RL: Final = {
    "antmaze": (
        "v1",
        ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse"),
    ),
    "door": ("v2", ("human", "cloned", "expert")),
    "hammer": ("v2", ("human", "cloned", "expert")),
    "kitchen": ("v2", ("complete", "mixed", "partial")),
    "minigrid": ("v0", ("fourrooms", "fourrooms-random")),
    "pen": ("v2", ("human", "cloned", "expert")),
    "pointmaze": (
        "v2",
        (
            "open", "open-dense", "umaze", "umaze-dense", "medium", "medium-dense", "large",
            "large-dense",
        ),
    ),
    "relocate": ("v2", ("human", "cloned", "expert")),
}  # fmt: skip
_TWO: Final = ("medium", "expert")
_THREE: Final = ("simple", *_TWO)
_MUJOCO: Final = {
    "ant": _THREE,
    "halfcheetah": _THREE,
    "hopper": _THREE,
    "humanoid": _THREE,
    "humanoidstandup": _THREE,
    "inverteddoublependulum": _TWO,
    "invertedpendulum": _TWO,
    "pusher": _TWO,
    "reacher": _TWO,
    "swimmer": _TWO,
    "walker2d": _THREE,
}


def _ids() -> list[str]:
    """Return the ids, such as ``D4RL/door/human-v2``."""
    return [*_d4rl(), *(f"mujoco/{task}/{level}-v0" for task in _MUJOCO for level in _MUJOCO[task])]


def _d4rl() -> Iterator[str]:
    for task, (version, kinds) in _D4RL.items():
        for kind in kinds:
            yield f"D4RL/{task}/{kind}-{version}"


_EPISODES: Final = Groups("episode_", having=("rewards", "terminations"))
METADATA: Final = "metadata.json"
_LEAST_IMAGE: Final = 32
"""Least height and width of a uint8 box that Minari encodes as an image."""
_NEXT_OBSERVATION: Final = ("next", "observation")


@dataclass(frozen=True, kw_only=True)
class MinariLayout(Layout):
    """Layout of data sets that Minari has written as HDF5.

    Dict and Tuple spaces become nested keys. The parts of a tuple have the keys ``_index_0``,
    ``_index_1``, and so on. JPEG images are decoded to pixels. Text is stored as UTF-8 bytes,
    padded with zeros.
    """

    name: str = "minari-hdf5"
    version: int = 1
    episodes: Finder = _EPISODES
    alignment: Alignment = FINAL_STATE
    clock: str = "rewards"
    attributes: tuple[str, ...] = ("seed",)
    count: str | None = "total_steps"
    fields: tuple[Field, ...] = (
        Field("observations", "observation", ("observation",), _NEXT_OBSERVATION, nested=True),
        Field("actions", "action", before=("action",), nested=True),
        Field("rewards", "reward", after=("next", "reward"), column=True),
        Field("terminations", "terminated"),
        Field("truncations", "truncated"),
        Field("infos/", "info", ("info",), ("next", "info"), required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Return the layout with decoders for images and text, found from the spaces."""
        said = _metadata(location).content
        kind = said.get("data_format", "hdf5")
        if kind != "hdf5":
            raise location.error(f"the data set is stored as {kind!r}, expected 'hdf5'", "V04")
        decoders: list[tuple[str, Decoder]] = []
        for root, name in (("observations", "observation_space"), ("actions", "action_space")):
            space = parsed_space(said.get(name, "null"), location)
            try:
                decoders.extend(_decoders(root, space, bool(said.get("jpeg_encoding"))))
            except (KeyError, TypeError, ValueError) as error:
                text = f"the {name} in {METADATA} is not one that Minari writes ({error!r})"
                raise location.error(text, "V04") from error
        bounds = tuple(_bounds("actions", parsed_space(said.get("action_space", "null"), location)))
        return replace(self, decoders=tuple(decoders), bounds=bounds)

    def sidecar_facts(self, location: Location) -> dict[str, Any]:
        """Return the data set's names from the metadata file, and the hash of that file."""
        return _metadata(location).facts("dataset_id", "minari_version", "algorithm_name")

    def described_by(self, path: Path) -> tuple[Path, ...]:
        return (path.with_name(METADATA),)

    def totals(self, location: Location) -> dict[str, Any]:
        """Return the counts in the metadata.

        After an interrupted write, the file has fewer episodes or records than these counts.
        """
        said = _metadata(location).content
        known = {"episodes": said.get("total_episodes"), "records": said.get("total_steps")}
        return {name: count for name, count in known.items() if count is not None}

    def facts(
        self,
        attributes: Mapping[str, Any],
        name: str,
        records: int,
        location: Location,
        notes: RuleFindings,
    ) -> SourceFacts:
        """Return the seed of the episode, if it was recorded."""
        return SourceFacts(SourceFacts.seed_of(attributes.get("seed")))


MINARI: Final = MinariLayout()


def _metadata(location: Location) -> Sidecar:
    found = read_sidecar(location, METADATA)
    if found is None:
        raise location.error(f"{METADATA}, which describes its arrays, is not next to it", "V04")
    return found


def parsed_space(text: Any, location: Location) -> Any:
    """Return a space in the metadata as JSON values.

    Raises:
        CorpusError: it is not JSON (rule V04).
    """
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise location.error(f"a space in {METADATA} cannot be read ({error})", "V04") from error


def space_parts(path: str, space: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and space of each dataset below a Dict or Tuple space."""
    if not isinstance(space, dict):
        return
    kind, parts = space.get("type"), space.get("subspaces")
    if kind == "Dict" and isinstance(parts, dict):
        for name, part in parts.items():
            yield from space_parts(f"{path}/{name}", part)
    elif kind == "Tuple" and isinstance(parts, list):
        for index, part in enumerate(parts):
            yield from space_parts(f"{path}/_index_{index}", part)
    else:
        yield path, space


def _bounds(path: str, space: Any) -> Iterator[tuple[str, Bounds]]:
    """Yield the bounds of each dataset below a path whose space has bounds."""
    for name, part in space_parts(path, space):
        # Bounds in another form cannot be compared, so they are ignored.
        with suppress(KeyError, TypeError, ValueError):
            if part.get("type") == "Box":
                yield name, (_numbers(part["low"]), _numbers(part["high"]))
            elif part.get("type") == "Discrete":
                start = float(part.get("start", 0))
                yield name, ((start,), (start + float(part["n"]) - 1,))


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).reshape(-1).tolist())


def _decoders(path: str, space: Any, jpeg: bool) -> Iterator[tuple[str, Decoder]]:
    """Yield the decoder of each dataset below a path that holds images or text."""
    for name, part in space_parts(path, space):
        if part.get("type") == "Text":
            yield name, Text(text_width(part))
        elif jpeg and part.get("type") == "Box" and is_image_space(part):
            yield name, Images(tuple(part["shape"]))


def text_width(space: Mapping[str, Any]) -> int:
    """Return the largest number of bytes of a text of a space."""
    longest = max((len(char.encode()) for char in space.get("charset", "")), default=4)
    return int(space["max_length"]) * longest


def is_image_space(space: Mapping[str, Any]) -> bool:
    """Return whether Minari encodes the values of a box as images."""
    shape = space.get("shape", [])
    sides = len(shape) in (2, 3) and all(size >= _LEAST_IMAGE for size in shape[:2])
    channels = shape[2:] in ([], [1], [3])
    if space.get("dtype") != "uint8" or not sides or not channels:
        return False
    return _all(space.get("low"), 0) and _all(space.get("high"), 255)


def _all(values: Any, wanted: int) -> bool:
    """Return whether all numbers of a nested list equal ``wanted``."""
    if isinstance(values, list):
        return all(_all(value, wanted) for value in values)
    return bool(values == wanted)


class MinariExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of Minari's data sets in HDF5 storage.

    Ids are Minari's ids, such as ``D4RL/door/human-v2``. The first part names the repository below
    ``farama-minari``. The ids of ``D4RL`` and ``mujoco`` are listed; other ids are also accepted.
    See `MinariLayout` for spaces, images and text.

    See BaseDatasetExperienceReplay for arguments, errors and methods. Source:
    https://minari.farama.org; each data set has a separate licence.

    Example:
        >>> from replaykit.datasets import MinariExperienceReplay
        >>> "mujoco/hopper/medium-v0" in MinariExperienceReplay.available_datasets
        True
        >>> MinariExperienceReplay("D4RL/door/human-v2", 32, download=False,
        ...                        root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'D4RL/door/human-v2' is not in ...
    """

    available_datasets: ClassVar[list[str]] = _ids()
    any_id = True
    corpus = "minari"
    layout = MINARI
    _replaced: ClassVar[dict[str, Replaced]] = {
        "load_from_local_minari": Replaced(
            (False,),
            "source= takes the local files, such as "
            "'~/.minari/datasets/D4RL/door/human-v2/data/main_data.hdf5'",
        ),
    }
    owner: ClassVar[str] = "farama-minari"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        repository, folder = minari_repository(dataset_id)
        return HubFiles(repository, folder, ".hdf5", descriptions=("/metadata.json",))


def minari_repository(dataset_id: str) -> tuple[str, str]:
    """Return the repository of a data set of Minari, and the folder in it.

    Raises:
        FileNotFoundError: the id has only one part.
    """
    namespace, _, rest = dataset_id.partition("/")
    if not rest:
        raise FileNotFoundError(
            f"{dataset_id!r} names no repository: expected namespace/.../name-v0, or local "
            "files with source="
        )
    return f"farama-minari/{namespace}", rest


_FORMATS: Final = ("arrow", "parquet")
_SINGLE: Final[Mapping[str, Key]] = {
    "rewards": ("next", "reward"),
    "terminations": TERMINATED,
    "truncations": TRUNCATED,
}


@dataclass(frozen=True, kw_only=True)
class MinariArrowLayout(TableLayout):
    """Layout of data sets that Minari has written as Arrow or Parquet files.

    The columns are those of `MinariLayout`, which is for HDF5. Lists of texts, infos without a
    fixed shape, and infos that some episodes lack are left out and reported.

    Example:
        >>> from replaykit.datasets.families import MINARI_ARROW
        >>> MINARI_ARROW.name
        'minari-arrow'
    """

    name: str = "minari-arrow"
    version: int = 1
    suffixes: tuple[str, ...] = (".json", ".arrow", ".parquet")

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return _MinariTable(sources, judge)

    def recognizes(self, path: Path) -> bool:
        return any(_format_of(path / name / METADATA) in _FORMATS for name in ("", "data"))


MINARI_ARROW: Final = MinariArrowLayout()


def _format_of(path: Path) -> Any:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return said.get("data_format") if isinstance(said, dict) else None


@dataclass(frozen=True)
class _Part:
    """A part of a space, with the place of its values in the files.

    Attributes:
        path: the names of columns and fields, from outside to inside.
        feature: the key before a step, and shape and dtype of one value.
        kind: ``"numbers"``, ``"images"`` or ``"texts"``.
    """

    path: tuple[str, ...]
    feature: Feature
    kind: str = "numbers"


class _MinariTable:
    """The steps of a data set, whose episodes have one folder each."""

    attached: Mapping[str, Path] = {}
    splits: Mapping[str, Sequence[int]] = {}

    def __init__(self, sources: Sources, judge: Judge) -> None:
        self._judge = judge
        names = {file.name: file.path for file in sources.files}
        found = [
            name for name, path in names.items()
            if path.name == METADATA and _format_of(path) in _FORMATS
        ]  # fmt: skip
        if len(found) != 1:
            first = sources.files[0]
            what = f"{len(found)} files named {METADATA} describe data sets of Minari as Arrow or"
            raise Location(first.path, first.name).error(f"{what} Parquet, expected one", "V04")
        self._where = Location(names[found[0]], found[0])
        root = found[0].removesuffix(METADATA)
        with file_errors(self._where.file, "V15"):
            said = json.loads(self._where.file.read_bytes())
            self._jpeg = bool(said.get("jpeg_encoding", True))
            self._format = said["data_format"]
            count = int(said["total_episodes"])
            steps = int(said["total_steps"])
            if not 0 <= count <= len(names):
                raise ValueError(f"total_episodes is {count}, but there are {len(names)} files")
        self._files: list[list[tuple[Path, str]]] = [[] for _ in range(count)]
        self._lengths, seeds = np.zeros(count, np.int64), np.full(count, -1)
        for number in range(count):
            try:
                self._find_episode(number, f"{root}{number}/", names, seeds)
            except CorpusError as error:
                judge.condemn(number, error)
        self.left_out: list[dict[str, str]] = []
        self._parts = [*self._spaces(said, "observation"), *self._spaces(said, "action")]
        self.episodes = TableEpisodes(
            self._lengths,
            np.arange(count),
            [f"episode_{number}" for number in range(count)],
            seeds=seeds,
        )
        if int(self._lengths.sum()) != steps and not judge.bad:
            what = f"total_steps is {steps}, the episodes have {int(self._lengths.sum())} steps"
            wrong = self._where.error(what, "V15")
            if judge.skips:
                for number in range(count):
                    self._judge_length(number)
            if not judge.bad:
                raise wrong
        self.facts = {
            name: said[name]
            for name in ("dataset_id", "minari_version", "algorithm_name")
            if isinstance(said.get(name), str)
        }
        self.columns = list(self._columns())

    def _find_episode(
        self, number: int, folder: str, names: Mapping[str, Path], seeds: Array
    ) -> None:
        files = sorted(
            name for name in names
            if name.startswith(folder) and name.endswith(f".{self._format}")
        )  # fmt: skip
        where = self._where.at(group=f"episode_{number}")
        if not files or f"{folder}{METADATA}" not in names:
            missing = f"{folder}{METADATA}" if files else f"files of {folder}"
            raise where.error(f"{missing} are missing", "V32")
        self._files[number] = [(names[name], name) for name in files]
        path = names[f"{folder}{METADATA}"]
        with file_errors(path, "V15"):
            said = json.loads(path.read_bytes())
            length = int(said["total_steps"])
            if length < 0:
                raise ValueError(f"total_steps is {length}")
            seeds[number] = SourceFacts.seed_of(said.get("seed"))
            self._lengths[number] = length
        size = sum(names[name].stat().st_size for name in files)
        if length > size:  # few files have more steps than bytes
            self._judge_length(number)

    def _judge_length(self, number: int) -> None:
        try:
            self._check_length(len(self._table(number)), number)
        except CorpusError as error:
            self._judge.condemn(number, error)

    def _spaces(self, said: Mapping[str, Any], role: str) -> Iterator[_Part]:
        space = parsed_space(said.get(f"{role}_space", "null"), self._where)
        if not isinstance(space, dict):
            raise self._where.error(f"it has no {role}_space", "V12")
        try:
            for path, part in space_parts(role, space):
                yield self._part(tuple(path.split("/")), part)
        except (KeyError, TypeError, ValueError) as error:
            what = f"the {role}_space is not one that Minari writes ({error!r})"
            raise self._where.error(what, "V04") from error

    def _part(self, key: Key, space: Mapping[str, Any]) -> _Part:
        kind, name = space["type"], "/".join(key)
        path = (f"{key[0]}s", *(part.removeprefix("_index_") for part in key[1:]))
        if kind == "Text":
            return _Part(path, Feature(name, key, "uint8", (text_width(space),)), "texts")
        if kind == "Discrete":
            return _Part(path, Feature(name, key, space["dtype"], ()))
        if kind == "MultiBinary":
            size = space["n"]
            shape = (size,) if isinstance(size, int) else tuple(size)
            return _Part(path, Feature(name, key, "int8", shape))
        if kind == "MultiDiscrete":
            shape = np.asarray(space["nvec"]).shape
            return _Part(path, Feature(name, key, space["dtype"], shape))
        if kind != "Box":
            raise ValueError(f"space {kind!r} of {name}")
        shape = tuple(space["shape"])
        encoded = self._jpeg and is_image_space(space)
        return _Part(
            path, Feature(name, key, space["dtype"], shape), "images" if encoded else "numbers"
        )

    def _columns(self) -> Iterator[SourceColumn]:
        schemas: dict[int, Any] = {}
        for position in np.flatnonzero(self._lengths).tolist():
            try:
                with self._reader(self._files[position][0][0]) as (schema, _):
                    schemas[position] = schema
            except CorpusError as error:
                self._judge.condemn(position, error)
        if not schemas:
            return
        first = next(iter(schemas))
        for part in self._parts:
            yield self._column(part, part.feature.key)
            if part.path[0] == "observations":
                yield self._column(part, ("next", *part.feature.key))
        with file_errors(self._files[first][0][0], "V12"):
            for name, key in _SINGLE.items():
                dtype = np.dtype(schemas[first].field(name).type.to_pandas_dtype())
                if dtype.kind not in "biuf":
                    raise ValueError(f"{name!r} is {dtype}, expected numbers")
                yield SourceColumn(key, (1,), dtype, name)
        infos = self._shared_infos(schemas)
        self._parts += infos
        for part in infos:
            yield self._column(part, part.feature.key)
            yield self._column(part, ("next", *part.feature.key))

    def _shared_infos(self, schemas: Mapping[int, Any]) -> list[_Part]:
        """Return the parts of infos that all episodes have; report the others as left out."""
        why: dict[str, str] = {}
        counts: Counter[_Part] = Counter()
        for position, schema in schemas.items():
            if "infos" in schema.names:
                with file_errors(self._files[position][0][0], "V10"):
                    counts.update(self._infos(schema.field("infos"), ("info",), why))
        for part, count in counts.items():
            if count < len(schemas):
                lacks = f"{len(schemas) - count} of {len(schemas)} episodes"
                said = f"{lacks} do not have it as {part.feature.dtype} {list(part.feature.shape)}"
                why.setdefault(part.feature.name, said)
        self.left_out += [{"key": name, "why": text} for name, text in why.items()]
        return [part for part, count in counts.items() if count == len(schemas)]

    def _column(self, part: _Part, key: Key) -> SourceColumn:
        name = "/".join(part.path)
        return SourceColumn(key, part.feature.shape, np.dtype(part.feature.dtype), name)

    def _infos(self, field: Any, key: Key, why: dict[str, str]) -> Iterator[_Part]:
        """Yield the parts of infos whose values have one shape; add a reason for the others."""
        import pyarrow as pa

        if pa.types.is_struct(field.type):
            for inner in field.type:
                yield from self._infos(inner, (*key, inner.name), why)
            return
        kind: Any = field.type
        shape: tuple[int, ...] = ()
        if pa.types.is_fixed_size_list(kind):
            said = (field.metadata or {}).get(b"shape", str(kind.list_size).encode())
            shape = tuple(int(size) for size in said.split(b",") if size)
            kind = kind.value_type
        name = "/".join(key)
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind == pa.bool_()):
            why.setdefault(name, f"its type {field.type} has no fixed shape")
            return
        dtype = np.dtype(kind.to_pandas_dtype()).name
        yield _Part(("infos", *key[1:]), Feature(name, key, dtype, shape))

    def location(self, position: int) -> Location:
        where = self._where  # an episode may have no files
        if self._files[position]:
            where = Location(*self._files[position][0])
        return where.at(group=self.episodes.names[position])

    @contextmanager
    def _reader(self, path: Path) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Open a file of Arrow or Parquet; return its schema, and a function that reads it."""
        import pyarrow as pa

        with file_errors(path, "V03"):
            if self._format == "parquet":
                with arrow().ParquetFile(path) as file:
                    yield file.schema_arrow, file.read
            else:
                with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
                    yield reader.schema, reader.read_all

    def _table(self, position: int) -> Any:
        """Return the entries of an episode as a table of Arrow, which is checked."""
        import pyarrow as pa

        tables = []
        for path, _ in self._files[position]:
            with self._reader(path) as (_, read):
                tables.append(read())
                tables[-1].validate(full=True)
        with file_errors(self._files[position][0][0], "V10"):
            return pa.concat_tables(tables)

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        yield from episode_blocks(self, kept, keys, self._rows, self._judge)

    def _rows(self, position: int) -> dict[Key, Array]:
        table, length = self._table(position), int(self._lengths[position])
        path = self._files[position][0][0]
        self._check_length(len(table), position)
        found: dict[Key, Array] = {}
        with file_errors(path, "V10"):
            for part in self._parts:
                key, is_action = part.feature.key, part.path[0] == "actions"
                column = _inner(table, part.path)
                column = column.slice(0, length) if is_action else column
                values = self._values(part, column, path)
                found[key] = values[:length]
                if not is_action:
                    following: Key = ("next", *key)
                    found[following] = values[1:]
            for name, key in _SINGLE.items():
                dtype = next(column.dtype.name for column in self.columns if column.key == key)
                column = table[name].slice(0, length)
                found[key] = values_of(column, Feature(name, key, dtype, (1,)))
        return found

    def _check_length(self, entries: int, position: int) -> None:
        (path, name), length = self._files[position][0], int(self._lengths[position])
        if entries != length + 1:
            what = f"has {entries} entries, expected {length + 1} for {length} steps"
            raise Location(path, name, f"episode_{position}").error(what, "V34")

    def _values(self, part: _Part, column: Any, path: Path) -> Array:
        feature = part.feature
        if part.kind == "numbers":
            # Minari stores values of any shape as flat lists.
            flat = replace(feature, shape=(int(np.prod(feature.shape)),))
            return values_of(column, flat).reshape(len(column), *feature.shape)
        found = np.zeros((len(column), *feature.shape), np.uint8)
        for at, entry in enumerate(column.to_pylist()):
            if part.kind == "images":
                if not isinstance(entry, bytes):
                    raise ValueError(f"{feature.name}, entry {at}: is no encoded image")
                decode_image(entry, found[at], f"{path}: {feature.name}, entry {at}")
                continue
            text = entry.encode() if isinstance(entry, str) else None
            if text is None or len(text) > feature.shape[0]:
                raise ValueError(f"{feature.name}, entry {at}: is no text of the space")
            found[at, : len(text)] = np.frombuffer(text, np.uint8)
        return found


def _inner(table: Any, path: Sequence[str]) -> Any:
    """Return a field of nested structures."""
    import pyarrow.compute as pc

    column = table[path[0]]
    for name in path[1:]:
        if column.null_count:
            raise ValueError(f"{'/'.join(path)} has {column.null_count} nulls")
        column = pc.struct_field(column, [column.type.get_field_index(name)])
    return column


class MinariArrowExperienceReplay(BaseDatasetExperienceReplay[SamplerT]):
    """Transitions of Minari's data sets in Arrow or Parquet storage.

    Ids are Minari's ids. The first part names the repository below ``farama-minari``. See
    `MinariArrowLayout` for keys, and BaseDatasetExperienceReplay for arguments, errors and methods.

    Example:
        >>> from replaykit.datasets import MinariArrowExperienceReplay
        >>> MinariArrowExperienceReplay("me/door/human-v2", 32, download=False, root="no-such")
        Traceback (most recent call last):
        FileNotFoundError: the data set 'me/door/human-v2' is not in ...
    """

    any_id = True
    corpus = "minari-arrow"
    layout = MINARI_ARROW
    owner: ClassVar[str] = "farama-minari"

    @classmethod
    def remote(cls, dataset_id: str) -> HubFiles:
        """Return the location of a data set's files."""
        repository, folder = minari_repository(dataset_id)
        return HubFiles(repository, folder, cls.layout.suffixes, natural=True)
