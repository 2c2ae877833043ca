"""The Minari family in HDF5, and JSON files next to source files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.episode_finders import Finder, Groups
from replaykit.datasets.engine.fields import FINAL_STATE, Alignment, Decoder, Field, Images, Text
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Bounds, Layout, SourceFacts
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.remote_sources import HubFiles
from replaykit.keywords import Replaced


class Sidecar:
    """A JSON object, and the file that contains it.

    Attributes:
        path: the file.
        sha256: the SHA-256 of the file's content, for the manifest.
        content: the object.
    """

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(text).hexdigest()
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, expected an object")
        self.content: dict[str, Any] = found

    def facts(self, *names: str) -> dict[str, Any]:
        """Return name and hash of the file, and the values of the named entries."""
        known = {name: self.content.get(name) for name in names}
        return {
            "described_by": {"name": self.path.name, "sha256": self.sha256},
            **{k: v for k, v in known.items() if isinstance(v, (str, int, float, bool))},
        }


def read_sidecar(location: Location, name: str) -> Sidecar | None:
    """Read a JSON file in the folder of a source file; return ``None`` if it is absent.

    Raises:
        CorpusError: the file is not a JSON object (rule V04).
    """
    path = Path(location.file).with_name(name)
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise location.error(
            f"{path}, which describes it, cannot be read ({error})", "V04"
        ) from error


@lru_cache(maxsize=8)
def _read(path: Path, mtime: int, size: int) -> Sidecar:
    # This is called for every episode. The cache key contains time and size, so a change is
    # noticed.
    return Sidecar(path, path.read_bytes())


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

    def beside(self, location: Location) -> dict[str, Any]:
        """Return the data set's names from the metadata file, and the hash of that file."""
        return _metadata(location).facts("dataset_id", "minari_version", "algorithm_name")

    def described_by(self, path: Path) -> tuple[Path, ...]:
        return (path.with_name(METADATA),)

    def totals(self, location: Location) -> dict[str, int]:
        """Return the counts in the metadata.

        After an interrupted write, the file has fewer episodes or records than these counts.
        """
        said = _metadata(location).content
        known = {"episodes": said.get("total_episodes"), "records": said.get("total_steps")}
        for name, count in known.items():
            if count is not None and not isinstance(count, int):
                text = f"{METADATA} gives {count!r:.40} {name}, expected a number"
                raise location.error(text, "V15")
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
