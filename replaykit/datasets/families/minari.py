"""Declare Minari's HDF5 storage, and read JSON files that accompany source files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaykit.datasets.engine.fields import FINAL_STATE, Alignment, Decoder, Field, Images, Text
from replaykit.datasets.engine.finding import Finder, Groups
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Bounds, Layout, SourceFacts
from replaykit.datasets.engine.places import Notes, Place

__all__ = ["MINARI", "MinariLayout", "Sidecar", "minari_ids", "read_sidecar"]


class Sidecar:
    """A JSON object and where it was.

    Attributes:
        path: the file.
        sha256: of its content, for the manifest.
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
        """Returns the sidecar's name and hash, and some of its plain values."""
        known = {name: self.content.get(name) for name in names}
        return {
            "described_by": {"name": self.path.name, "sha256": self.sha256},
            **{k: v for k, v in known.items() if isinstance(v, (str, int, float, bool))},
        }


def read_sidecar(place: Place, name: str) -> Sidecar | None:
    """Reads the file of a name beside a source file; ``None`` where there is none.

    Raises:
        CorpusError: it is no JSON object (rule V04).
    """
    path = Path(place.file).with_name(name)
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise place.error(f"{path}, which describes it, cannot be read ({error})", "V04") from error


@lru_cache(maxsize=8)
def _read(path: Path, mtime: int, size: int) -> Sidecar:
    # Asked for with every episode; the time and the size are there to see that it has changed.
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


def minari_ids() -> list[str]:
    """Returns the ids, such as ``D4RL/door/human-v2``."""
    return [*_d4rl(), *(f"mujoco/{task}/{level}-v0" for task in _MUJOCO for level in _MUJOCO[task])]


def _d4rl() -> Iterator[str]:
    for task, (version, kinds) in _D4RL.items():
        for kind in kinds:
            yield f"D4RL/{task}/{kind}-{version}"


_EPISODES: Final = Groups("episode_", having=("rewards", "terminations"))
_METADATA: Final = "metadata.json"
_LEAST_IMAGE: Final = 32
"""Sides from which on Minari encodes a uint8 box as an image."""
_NEXT_OBSERVATION: Final = ("next", "observation")


@dataclass(frozen=True, kw_only=True)
class MinariLayout(Layout):
    """Data sets that Minari has written as HDF5.

    Dict and Tuple spaces become nested keys, the parts of a tuple as ``_index_0``, ``_index_1``.
    Images that were encoded as JPEG become their pixels, text its UTF-8 bytes, padded with zeros.
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

    def resolve(self, file: H5File, place: Place) -> Layout:
        """Reads from the spaces which datasets hold encoded images and text."""
        said = _metadata(place).content
        kind = said.get("data_format", "hdf5")
        if kind != "hdf5":
            raise place.error(f"the data set is stored as {kind!r}, expected 'hdf5'", "V04")
        decoders: list[tuple[str, Decoder]] = []
        for root, name in (("observations", "observation_space"), ("actions", "action_space")):
            space = _parsed(said.get(name, "null"), place)
            try:
                decoders.extend(_decoders(root, space, bool(said.get("jpeg_encoding"))))
            except (KeyError, TypeError, ValueError) as error:
                text = f"the {name} in {_METADATA} is not one that Minari writes ({error!r})"
                raise place.error(text, "V04") from error
        bounds = tuple(_bounds("actions", _parsed(said.get("action_space", "null"), place)))
        return replace(self, decoders=tuple(decoders), bounds=bounds)

    def beside(self, place: Place) -> dict[str, Any]:
        """Returns the names that the metadata gives the data set, and the hash of it."""
        return _metadata(place).facts("dataset_id", "minari_version", "algorithm_name")

    def described_by(self, path: Path) -> tuple[Path, ...]:
        return (path.with_name(_METADATA),)

    def totals(self, place: Place) -> dict[str, int]:
        """Returns the counts of the metadata; an interrupted writer leaves fewer."""
        said = _metadata(place).content
        known = {"episodes": said.get("total_episodes"), "records": said.get("total_steps")}
        for name, count in known.items():
            if count is not None and not isinstance(count, int):
                text = f"{_METADATA} says that it has {count!r:.40} {name}, expected a number"
                raise place.error(text, "V15")
        return {name: count for name, count in known.items() if count is not None}

    def facts(
        self, attributes: Mapping[str, Any], name: str, records: int, place: Place, notes: Notes
    ) -> SourceFacts:
        """Takes the seed of the episode, where it was recorded."""
        return SourceFacts(SourceFacts.seed_of(attributes.get("seed")))


MINARI: Final = MinariLayout()


def _metadata(place: Place) -> Sidecar:
    found = read_sidecar(place, _METADATA)
    if found is None:
        raise place.error(f"{_METADATA} is not beside it, which says what its arrays are", "V04")
    return found


def _parsed(text: Any, place: Place) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise place.error(f"a space in {_METADATA} cannot be read ({error})", "V04") from error


def _parts(path: str, space: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the spaces below one that are no Dict or Tuple, by the paths of their datasets."""
    if not isinstance(space, dict):
        return
    kind, parts = space.get("type"), space.get("subspaces")
    if kind == "Dict" and isinstance(parts, dict):
        for name, part in parts.items():
            yield from _parts(f"{path}/{name}", part)
    elif kind == "Tuple" and isinstance(parts, list):
        for index, part in enumerate(parts):
            yield from _parts(f"{path}/_index_{index}", part)
    else:
        yield path, space


def _bounds(path: str, space: Any) -> Iterator[tuple[str, Bounds]]:
    """Yields what bounds each dataset below a path, where its space says so."""
    for name, part in _parts(path, space):
        # Bounds in another form are none that could be compared with.
        with suppress(KeyError, TypeError, ValueError):
            if part.get("type") == "Box":
                yield name, (_numbers(part["low"]), _numbers(part["high"]))
            elif part.get("type") == "Discrete":
                start = float(part.get("start", 0))
                yield name, ((start,), (start + float(part["n"]) - 1,))


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float64).reshape(-1).tolist())


def _decoders(path: str, space: Any, jpeg: bool) -> Iterator[tuple[str, Decoder]]:
    """Yields what decodes each dataset below a path whose values are not plain numbers."""
    for name, part in _parts(path, space):
        if part.get("type") == "Text":
            longest = max((len(char.encode()) for char in part.get("charset", "")), default=4)
            yield name, Text(int(part["max_length"]) * longest)
        elif jpeg and part.get("type") == "Box" and _is_image(part):
            yield name, Images(tuple(part["shape"]))


def _is_image(space: Mapping[str, Any]) -> bool:
    shape = space.get("shape", [])
    sides = len(shape) in (2, 3) and all(size >= _LEAST_IMAGE for size in shape[:2])
    channels = shape[2:] in ([], [1], [3])
    if space.get("dtype") != "uint8" or not sides or not channels:
        return False
    return _all(space.get("low"), 0) and _all(space.get("high"), 255)


def _all(values: Any, wanted: int) -> bool:
    """Whether a nested list holds one number throughout."""
    if isinstance(values, list):
        return all(_all(value, wanted) for value in values)
    return bool(values == wanted)
