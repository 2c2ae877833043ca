"""Episodes of a buffer as NumPy arrays, checked for exports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from replaykit.buffer import ReplayBuffer
from replaykit.datasets.published_buffer import encoded_frames
from replaykit.errors import SchemaError
from replaykit.storages.memory import differing
from replaykit.ted import DONE, REWARD, TERMINATED, TRUNCATED, Key, format_key

Array = np.ndarray[Any, Any]
Values = Array | dict[str, "Values"]
"""An array, or arrays by the parts of a key."""

OBSERVATION: Final = ("observation",)
ACTION: Final = ("action",)
INFO: Final = ("info",)
SEED: Final = ("source_seed",)
SINGLE: Final = (REWARD, ("next", "success"))
"""Keys with one value in a row."""


class ExportedRows:
    """The rows of one episode as arrays ``[T, *F]``, by key."""

    def __init__(self, arrays: dict[Key, Array], flags: tuple[Key | None, Key | None]) -> None:
        self.arrays = arrays
        self.count = len(next(iter(arrays.values())))
        # `done` alone shows terminations.
        none = np.zeros(self.count, bool)
        terminated, truncated = (none if key is None else arrays[key].reshape(-1) for key in flags)
        self.terminated, self.truncated = terminated, truncated

    @property
    def rewards(self) -> Array:
        """The rewards, ``[T]``."""
        return self.arrays[REWARD].reshape(-1)

    def table(self, names: Mapping[Key, str], images: Collection[str]) -> dict[str, Array]:
        """Return columns by name, with images as ``[T, H, W, 3]``."""
        found = {name: self.arrays[key] for key, name in names.items()}
        found |= {name: channels_last(found[name]) for name in images}
        for key in SINGLE:
            if key in names:
                found[names[key]] = self.arrays[key].reshape(-1)
        flags = {"terminated": self.terminated, "truncated": self.truncated}
        return found | flags

    def nested(self, root: Key) -> Values:
        """Return the values at or below a key."""
        return nested_values(
            {key[len(root) :]: self.arrays[key] for key in self.arrays if is_below(key, root)}
        )

    def shaped(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Return values in the shape of their space, ``[T, *shape]``."""
        return self.arrays[key].reshape((self.count, *shape))

    def with_last(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Return the observations and the last next observation, ``[T + 1, *shape]``."""
        after = self.arrays[next_key(key)][-1:]
        return np.concatenate([self.arrays[key], after]).reshape((self.count + 1, *shape))

    def info(self, key: Key) -> Array:
        """Return T + 1 values of an info; the first is that of the reset."""
        values = self.arrays[key]
        before = self.arrays.get(key[1:])
        first = np.zeros_like(values[:1]) if before is None else before[:1]
        found = np.concatenate([first, values])
        return found.reshape(-1) if found.shape[1:] == (1,) else found


def next_key(key: Key) -> Key:
    return ("next", *key)


def is_below(key: Key, root: Key) -> bool:
    return key[: len(root)] == root


def nested_values(values: Mapping[Key, Array]) -> Values:
    """Return values by nested names; the array itself for the empty key."""
    if tuple(values) == ((),):
        return values[()]
    found: dict[str, Any] = {}
    for key, value in values.items():
        at = found
        for name in key[:-1]:
            at = at.setdefault(name, {})
        at[key[-1]] = value
    return found


def in_order_of_keys(values: Values) -> Any:
    """Return an array, or a tuple of all arrays ordered by key."""
    if not isinstance(values, dict):
        return values
    found: list[Array] = []
    for name in sorted(values):
        part = in_order_of_keys(values[name])
        found += part if isinstance(part, tuple) else (part,)
    return tuple(found)


class ExportSource:
    """The episodes of a buffer, checked for the keys that an export needs.

    Args:
        data: the buffer.
        target: the name of the target, for messages.
        whole: False if rows need neither next observations nor actions and rewards.
        joined: True if the target stores an observation, which is also the next observation of the
            row before, once.

    Attributes:
        leaves: the layout of each column.
        folders: the folders of the data.

    Raises:
        TypeError: ``data`` is not a buffer with episodes.
        ValueError: there is no episode.
        KeyError: a key is missing.
        SchemaError: a column has a shape that no target can store.
    """

    def __init__(self, data: Any, target: str, *, whole: bool = True, joined: bool = True) -> None:
        self._target, self._whole, self._joined = target, whole, joined
        if not isinstance(data, ReplayBuffer):
            raise TypeError(
                f"expected data as a ReplayBuffer or a data set, got {type(data).__name__}"
            )
        self._episodes = data.episodes
        if not len(self._episodes):
            raise ValueError(f"expected data with at least one episode for {target}, got no rows")
        schema = data.storage.schema
        assert schema is not None
        self.leaves = dict(schema.leaves)
        self._frames = encoded_frames(data.storage)
        for key, facts in {} if self._frames is None else self._frames.frames.items():
            shape = torch.Size(facts["shape"])
            self.leaves[key] = replace(self.leaves[key], shape=shape, dtype=torch.uint8)
        table = getattr(data, "episode_table", None)
        # A cut or an edit of flags may have changed the episodes of a data set.
        if table is not None and len(table) != len(self._episodes):
            table = None
        self._seeds = None if table is None else table.get("source_seed", None)
        self._flags = self._found_flags()
        self._keys = self._wanted()
        published = getattr(data.storage, "published", None)
        folders = (getattr(published, "path", None), getattr(data.storage, "scratch_dir", None))
        self.folders = [each for each in folders if each is not None]

    def _found_flags(self) -> tuple[Key | None, Key | None]:
        """Return the keys of terminations and truncations; `done` alone means terminations."""
        terminated = TERMINATED
        truncated = TRUNCATED if TRUNCATED in self.leaves else None
        if terminated not in self.leaves and truncated is None and DONE in self.leaves:
            terminated = DONE
        self._require(terminated)
        if self._whole:
            self._require(REWARD)
        for key in (terminated, truncated, REWARD):
            if key is None or key not in self.leaves:
                continue
            shape = self.leaves[key].shape
            if shape.numel() != 1:
                raise SchemaError(
                    f"key {format_key(key)}: expected one value per row for {self._target}, got "
                    f"the shape {list(shape)}; open a data set without split_trajs"
                )
        return terminated, truncated

    def _wanted(self) -> list[Key]:
        for root in (OBSERVATION, ACTION) if self._whole else (OBSERVATION,):
            if not self.below(root):
                self._require(root)
        for key in self.below(OBSERVATION):
            after = next_key(key)
            if self._whole:
                self._require(after)
            if self.leaves.get(after, self.leaves[key]) != self.leaves[key]:
                raise SchemaError(
                    f"key {format_key(after)}: expected {self.leaves[key]}, as for "
                    f"{format_key(key)}, got {self.leaves[after]}"
                )
        roots = (OBSERVATION, next_key(OBSERVATION), ACTION, INFO, next_key(INFO))
        single = {*SINGLE, ("state",), SEED, *self._flags}
        found = [
            key
            for key in self.leaves
            if key in single or any(is_below(key, root) for root in roots)
        ]
        for key in found:
            try:
                as_array(torch.empty(0, dtype=self.leaves[key].dtype))
            except TypeError as error:
                raise SchemaError(
                    f"key {format_key(key)}: expected a dtype of NumPy for {self._target}, got "
                    f"{self.leaves[key].dtype}"
                ) from error
        return found

    def _require(self, key: Key) -> None:
        """Raise KeyError if there is no such column."""
        if key not in self.leaves:
            known = ", ".join(map(format_key, self.leaves))
            raise KeyError(
                f"key {format_key(key)}: expected such a column for {self._target}, got only "
                f"{known}"
            )

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, before any compression."""
        leaves = [self.leaves[key] for key in self._keys]
        each = sum(leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves)
        return each * int(self._episodes.lengths.sum())

    def below(self, root: Key) -> list[Key]:
        """Return the keys of the leaves at or below a key."""
        return [key for key in self.leaves if is_below(key, root)]

    def table_names(self, name_of: Callable[[Key, bool], str]) -> tuple[dict[Key, str], list[str]]:
        """Return the names of columns in a target of flat columns, and of those with images.

        The columns are observations, actions, rewards and successes. ``name_of`` also gets whether
        a column holds images.
        """
        keys = [*self.below(OBSERVATION), *self.below(ACTION)]
        keys += [key for key in SINGLE if key in self.leaves]
        # A reader would take an observation of such a name for the action or the result.
        absent = [name_of(key, False) for key in (ACTION, *SINGLE) if key not in self.leaves]
        taken = ("terminated", "truncated", *absent)
        names = self.names(keys, lambda key: name_of(key, is_image(self.leaves[key])), taken)
        return names, [name for key, name in names.items() if is_image(self.leaves[key])]

    def names(
        self, keys: Iterable[Key], name_of: Callable[[Key], str], taken: Collection[str] = ()
    ) -> dict[Key, str]:
        """Return the names of columns in a flat target, which are not among ``taken``.

        Raises:
            SchemaError: two columns get one name, or a name is not possible in files.
        """
        found: dict[Key, str] = {}
        for key in keys:
            name = name_of(key)
            if name in taken or name in found.values():
                raise SchemaError(
                    f"key {format_key(key)}: expected a unique name without '/' for each column of "
                    f"{self._target}, got {name!r}; rename the parts of the row"
                )
            self._check_name(key, name)
            found[key] = name
        return found

    def _check_name(self, key: Key, name: str) -> None:
        is_split = any("/" in part or "\0" in part for part in key)
        if is_split or any(part[:1] in ("", ".") for part in name.split("/")):
            raise SchemaError(
                f"key {format_key(key)}: expected a name without '/', which does not begin with "
                f"'.', for each column of {self._target}, got {name!r}; rename the parts of the row"
            )

    def seed_of(self, number: int, rows: ExportedRows) -> int | None:
        """Return the seed of the reset of an episode; None if it is unknown."""
        seeds = rows.arrays.get(SEED) if self._seeds is None else self._seeds[number].numpy()
        if seeds is None or seeds.size == 0 or seeds.dtype.kind not in "iu":
            return None
        seed = int(seeds.flat[0])
        return seed if seed >= 0 else None

    def only_leaf(self, key: Key) -> Any:
        """Return the layout of a column.

        Raises:
            SchemaError: the key has parts.
        """
        found = self.below(key)
        if found != [key]:
            raise SchemaError(
                f"key {format_key(key)}: expected one array for {self._target}, got the parts "
                f"{', '.join(map(format_key, found))}"
            )
        return self.leaves[key]

    def check_space(self, key: Key, space: Any) -> None:
        """Raise SchemaError unless the columns below a key have the shapes of a space."""
        parts = self.parts(space, key)
        if parts is not None:
            for name, part, below in parts:
                self._check_name(below, name)
                self.check_space(below, part)
            return
        shape = getattr(space, "shape", None)
        if shape is None:
            raise SchemaError(
                f"key {format_key(key)}: expected a space with a fixed shape, got "
                f"{type(space).__name__}"
            )
        self._require(key)
        leaf = self.leaves[key].shape
        # A value without dimensions has one of size 1 in a row.
        if tuple(leaf) != (tuple(shape) or (1,)) and not (tuple(shape) == () and not leaf):
            raise SchemaError(
                f"key {format_key(key)}: expected the shape {list(shape)} of its space, got "
                f"{list(leaf)}"
            )

    def parts(self, space: Any, key: Key) -> list[tuple[str, Any, Key]] | None:
        """Return name, space and key of each part of a Dict or Tuple; None for other spaces.

        A part of a Tuple has its number as a key, or ``_index_`` and the number, as in data sets
        that were converted from Minari.
        """
        parts = parts_of_space(space)
        if parts is None:
            return None
        found = []
        for name, part in parts:
            below = (*key, name)
            if isinstance(name, int):
                below = (*key, f"_index_{name}")
                below = below if self.below(below) else (*key, str(name))
            found.append((str(name), part, below))
        return found

    def episodes(self) -> Iterator[tuple[int, ExportedRows]]:
        """Yield position and rows of each episode; one episode is in memory at a time.

        Raises:
            ValueError: the target stores each observation once, and a next observation is not the
                observation of the following row. The message names key and episode.
        """
        for number, episode in enumerate(self._episodes):
            data = episode.rows()
            if self._frames is not None:
                data = self._frames(data)
            rows = ExportedRows({key: as_array(data.get(key)) for key in self._keys}, self._flags)
            if self._joined:
                _check_follows(rows, number)
            yield number, rows


def _check_follows(rows: ExportedRows, number: int) -> None:
    """Raise ValueError unless each next observation is the observation of the following row."""
    for key, values in rows.arrays.items():
        if key[:1] != OBSERVATION or next_key(key) not in rows.arrays:
            continue
        before, after = values[1:], rows.arrays[next_key(key)][:-1]
        wrong = differing(torch.from_numpy(before), torch.from_numpy(after))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"key {format_key(('next', *key))}: in episode {number}, the next observation of "
                f"row {row} is not the observation of row {row + 1}; the target stores each "
                "observation once and cannot keep both"
            )


def is_image(leaf: Any) -> bool:
    """Return whether a column holds RGB images, ``[H, W, 3]`` or ``[3, H, W]``."""
    shape = tuple(leaf.shape)
    return leaf.dtype == torch.uint8 and len(shape) == 3 and 3 in (shape[0], shape[2])


def channels_last(images: Array) -> Array:
    """Return images as ``[T, H, W, 3]``."""
    return images if images.shape[3] == 3 else np.ascontiguousarray(images.transpose(0, 2, 3, 1))


def as_array(values: torch.Tensor) -> Array:
    return np.ascontiguousarray(values.cpu().numpy())


def parts_of_space(space: Any) -> list[tuple[Any, Any]] | None:
    """Return name and space of each part of a Dict or Tuple; None for other spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None
