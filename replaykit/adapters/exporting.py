"""Hand episodes to Minari, d3rlpy and robomimic, equal to the bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from replaykit.adapters.export_files import Draft, export_to, new_h5_file
from replaykit.adapters.exported_episodes import (
    ACTION,
    INFO,
    OBSERVATION,
    Array,
    ExportedRows,
    ExportSource,
    as_array,
    in_order_of_keys,
    nested_values,
)
from replaykit.buffer import ReplayBuffer
from replaykit.errors import SchemaError, import_extra
from replaykit.filesystem import replace_file
from replaykit.ted import Key

_MINARI_ID: Final = re.compile(r"(?:(?P<namespace>[-\w]+(?:/[-\w]+)*)/)?[-\w]+-v\d+")


def to_minari(
    data: ReplayBuffer[Any, Any, Any, Any],
    dataset_id: str,
    *,
    env: Any = None,
    observation_space: Any = None,
    action_space: Any = None,
    overwrite: bool = False,
    **metadata: Any,
) -> Any:
    """Write the episodes of a buffer as a data set of Minari, and load it.

    The data set appears in Minari's folder completely or not at all. That folder is the value of
    the environment variable ``MINARI_DATASETS_PATH``, or ``~/.minari/datasets``.

    An episode of T rows becomes T actions, rewards and flags, and T + 1 observations. The last one
    is the next observation of the last row. Images are stored as raw pixels. If the last row of an
    episode has no flag set, its truncation is set, because the data ends there. The seed of an
    episode is ``source_seed`` of its first row, or of the episode table of a data set, if it is
    known. Values below ``("next", "info")`` become infos. Infos also have T + 1 entries. The first
    is the value below ``("info",)`` in the first row, or zeros without such a key. Minari has no
    place for other keys.

    Args:
        data: a buffer or data set.
        dataset_id: an id of Minari, such as ``"cartpole/expert-v0"``.
        env: the recorded environment: an id, an ``EnvSpec`` or an environment of gymnasium. It
            gives the spaces. Minari saves its specification.
        observation_space, action_space: the spaces, if there is no ``env``, or if its spaces are
            not those of the data.
        overwrite: whether to replace an existing data set of this id, in one step at the end.
        metadata: other entries of Minari's metadata, such as ``algorithm_name``, ``author``,
            ``author_email``, ``code_permalink`` and ``description``.

    Returns:
        The ``minari.MinariDataset``.

    Raises:
        ValueError: the id has another form, the data has no episode, or the spaces are missing.
            Also if a next observation differs from the observation of the following row in an
            episode. The message names key and episode.
        KeyError: the data lacks a key. The message names it.
        SchemaError: a column does not have the shape of its space. The message names the key.
        FileExistsError: the id exists, and ``overwrite`` is False. Or its folder has other files.
        ImportError: Minari is not installed.

    Cost: one pass over the rows, with one episode in memory. Each array is written once.

    Example:
        >>> import os, tempfile, gymnasium
        >>> from unittest import mock
        >>> from replaykit.adapters import record, to_minari
        >>> rb = record(gymnasium.make("CartPole-v1"), None, tempfile.mkdtemp(), episodes=2, seed=0)
        >>> with mock.patch.dict(os.environ, MINARI_DATASETS_PATH=tempfile.mkdtemp()):
        ...     dataset = to_minari(rb, "cartpole/random-v0", env="CartPole-v1")
        >>> dataset.total_episodes, dataset.total_steps == len(rb)
        (2, True)
    """
    minari = import_extra("minari", "to_minari needs minari", "minari")
    from minari.dataset.minari_storage import MinariStorage
    from minari.storage.datasets_root_dir import get_dataset_path

    match = _MINARI_ID.fullmatch(dataset_id) if isinstance(dataset_id, str) else None
    if match is None:
        raise ValueError(
            f"expected dataset_id as 'name-v0' or 'namespace/name-v0', got {dataset_id!r}"
        )
    source = ExportSource(data, "Minari")
    spec, spaces = _spaces_of(env, observation_space, action_space)
    for root, space in zip((OBSERVATION, ACTION), spaces, strict=True):
        source.check_space(root, space)
    target = get_dataset_path(dataset_id)

    with export_to(source, target, "data/metadata.json", overwrite=overwrite) as draft:
        draft.path.mkdir()
        storage = MinariStorage.new(
            draft.path / "data",
            observation_space=spaces[0],
            action_space=spaces[1],
            env_spec=spec,
            jpeg_encoding=False,
        )
        named = {"dataset_id": dataset_id, "minari_version": minari.__version__}
        for name in ("author", "author_email"):
            if isinstance(metadata.get(name), str):
                metadata[name] = {metadata[name]}
        storage.update_metadata({**metadata, **named})
        steps = _write_minari(source, spaces, draft)
        storage.update_metadata(
            {
                "total_episodes": len(source),
                "total_steps": steps,
                "dataset_size": storage.get_size(),
            }
        )
        draft.check(lambda number: _parts_of(next(iter(storage.get_episodes([number])))))
        _add_namespaces(target.parent, match["namespace"])
    return minari.load_dataset(dataset_id)


def to_d3rlpy(
    data: ReplayBuffer[Any, Any, Any, Any],
    *,
    discrete: bool | None = None,
    action_size: int | None = None,
) -> Any:
    """Copy the episodes of a buffer into a ReplayBuffer of d3rlpy.

    Each episode becomes one ``d3rlpy.dataset.Episode`` with the same observations, actions and
    rewards, to the bit. ``terminated`` of the episode is ``("next", "terminated")`` of its last
    row. Any other end counts as a timeout.

    d3rlpy stores no next observations. It takes the next observation of a row from the following
    row, so the last next observation of an episode is lost. If the episode terminated, d3rlpy uses
    zeros, which its targets ignore. If not, d3rlpy never samples the last row as a transition, and
    an episode of one row is lost. Other keys, such as infos, ids and seeds, are lost too.

    Args:
        data: a buffer or data set. Nested observations become a tuple of arrays, ordered by key.
        discrete: whether actions are numbers of a discrete space. By default, actions of an integer
            dtype are.
        action_size: the number of discrete actions. The default is one more than the largest
            action in the data. For other actions it is their size.

    Returns:
        A ``d3rlpy.dataset.ReplayBuffer`` over an ``InfiniteBuffer``.

    Raises:
        KeyError: the data lacks a key. The message names it.
        ValueError: the data has no episode, or a next observation differs from the observation of
            the following row in an episode. The message names key and episode.
        SchemaError: actions are nested, or are not one-dimensional.
        ImportError: d3rlpy is not installed.

    Cost: one copy of observations, actions and rewards in memory, because d3rlpy works in memory.
    d3rlpy makes one Python object per row.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> from replaykit.adapters import to_d3rlpy
        >>> states, ends = torch.arange(9.0).view(9, 1), torch.arange(8) == 7
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> never = torch.zeros(8, dtype=torch.bool)
        >>> _ = rb.extend(transition(states[:-1], torch.arange(8) % 2, torch.ones(8), states[1:],
        ...                          ends, never, batch_size=8))
        >>> dataset = to_d3rlpy(rb)
        >>> dataset.size(), dataset.transition_count, dataset.dataset_info.action_size
        (1, 8, 2)
    """
    import_extra("d3rlpy", "to_d3rlpy needs d3rlpy", "d3rlpy")
    from d3rlpy.constants import ActionSpace
    from d3rlpy.dataset import Episode, InfiniteBuffer, Signature
    from d3rlpy.dataset import ReplayBuffer as D3rlpyReplayBuffer

    source = ExportSource(data, "d3rlpy")
    action = source.only_leaf(ACTION)
    if len(action.shape) > 1:
        raise SchemaError(
            f"key 'action': expected vectors or numbers for d3rlpy, got the shape "
            f"{list(action.shape)}"
        )
    if discrete is None:
        discrete = not (action.dtype.is_floating_point or action.dtype.is_complex)
    episodes = []
    largest = 0
    for _, rows in source.episodes():
        actions = rows.arrays[ACTION].reshape(rows.count, -1)
        largest = max(largest, int(actions.max())) if discrete else 0
        episodes.append(
            Episode(
                observations=in_order_of_keys(rows.nested(OBSERVATION)),
                actions=actions,
                rewards=rows.rewards.reshape(-1, 1),
                terminated=bool(rows.terminated[-1]),
            )
        )
    if action_size is None:
        action_size = largest + 1 if discrete else int(action.shape.numel())
    first = episodes[0]

    def signature(arrays: Any) -> Any:
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        return Signature([each.dtype for each in arrays], [each.shape[1:] for each in arrays])

    return D3rlpyReplayBuffer(
        InfiniteBuffer(),
        episodes=episodes,
        observation_signature=signature(first.observations),
        action_signature=signature(first.actions),
        reward_signature=signature(first.rewards),
        action_space=ActionSpace.DISCRETE if discrete else ActionSpace.CONTINUOUS,
        action_size=action_size,
    )


def to_robomimic(
    data: ReplayBuffer[Any, Any, Any, Any],
    path: str | os.PathLike[str],
    *,
    env_args: Mapping[str, Any] | None = None,
    filters: Mapping[str, Sequence[int]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the episodes of a buffer as an H5 file of robomimic.

    The file appears at ``path`` completely or not at all. Episode ``i`` becomes the group
    ``data/demo_<i>`` with ``obs``, ``next_obs``, ``actions``, ``rewards``, ``dones``, and with
    ``states`` if the rows have the key ``state``. Values and dtypes are those of the rows.
    ``dones`` has ``("next", "success")`` as int64, or ``("next", "terminated")`` if the rows do not
    have that key. A nested observation gives one dataset per part. The names of deeper parts are
    joined by ``_``. An observation that is a single array has the name ``flat``, as in robomimic's
    own conversions. Other keys are left out.

    Args:
        data: a buffer or data set.
        path: the file. Missing folders are made.
        env_args: description of the environment, which robomimic's programs require: ``env_name``,
            ``type`` (2 for gymnasium) and ``env_kwargs``. It is stored as JSON.
        filters: named lists of episode positions, such as ``{"train": [0, 1], "valid": [2]}``.
            They become the filter keys below ``mask``.
        overwrite: whether to replace an existing file, in one step at the end.

    Returns:
        The path.

    Raises:
        KeyError: the data lacks a key. The message names it.
        ValueError: the data has no episode, or a filter names an episode that does not exist.
        SchemaError: actions are nested, or two parts of the observation get the same name.
        FileExistsError: the path exists, and ``overwrite`` is False, or it is not a file.
        OSError: the disk has too little room.

    Cost: one pass over the rows, with one episode in memory.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> from replaykit.adapters import to_robomimic
        >>> from replaykit.datasets import convert
        >>> from replaykit.datasets.families import ROBOMIMIC
        >>> joints, ends = torch.randn(9, 2), torch.arange(8) == 7
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> never = torch.zeros(8, dtype=torch.bool)
        >>> _ = rb.extend(transition({"joints": joints[:-1]}, joints[:-1], torch.ones(8),
        ...                          {"joints": joints[1:]}, ends, never, batch_size=8))
        >>> folder = Path(tempfile.mkdtemp())
        >>> file = to_robomimic(rb, folder / "demos.hdf5", filters={"train": [0]})
        >>> again = convert(file, ROBOMIMIC, folder / "data")
        >>> again[:]["observation", "joints"].equal(joints[:-1])
        True
    """
    import h5py

    source = ExportSource(data, "robomimic", joined=False)
    source.only_leaf(ACTION)
    names = source.names(source.below(OBSERVATION), lambda key: "_".join(key[1:]) or "flat")
    count = len(source)
    masks = _masks(filters or {}, count)
    described = None if env_args is None else json.dumps(dict(env_args), indent=4)
    target = Path(path).expanduser()
    with export_to(source, target, "", overwrite=overwrite) as draft:
        with new_h5_file(draft.path) as (file, check_writes):
            group = file.create_group("data", track_order=True)
            total = 0
            for number, rows in source.episodes():
                demo = group.create_group(f"demo_{number}")
                demo.attrs["num_samples"] = rows.count
                values = _values_of_demo(rows, names)
                draft.wrote(values)
                for name, value in values.items():
                    demo[name] = value
                check_writes()
                total += rows.count
            group.attrs["total"] = total
            if described is not None:
                group.attrs["env_args"] = described
            for name, demos in masks.items():
                file[f"mask/{name}"] = demos
        with h5py.File(draft.path) as file:
            draft.check(
                lambda number: {name: file[f"data/demo_{number}/{name}"][()] for name in values}
            )
    return target


def _values_of_demo(rows: ExportedRows, names: Mapping[Key, str]) -> dict[str, Array]:
    """Return the datasets of an episode, by their names in its group."""
    found = {}
    for root, folder in (((), "obs"), (("next",), "next_obs")):
        for key, name in names.items():
            found[f"{folder}/{name}"] = rows.arrays[root + key]
    success = rows.arrays.get(("next", "success"), rows.terminated).reshape(-1)
    found |= {"actions": rows.arrays[ACTION], "rewards": rows.rewards}
    found["dones"] = success.astype(np.int64)
    if ("state",) in rows.arrays:
        found["states"] = rows.arrays["state",]
    return found


def _masks(filters: Mapping[str, Sequence[int]], count: int) -> dict[str, Array]:
    found = {}
    for name, positions in filters.items():
        bad = [n for n in positions if type(n) is not int or not 0 <= n < count]
        if bad:
            raise ValueError(
                f"filters[{name!r}]: expected positions of {count} episodes, got {bad[0]!r}"
            )
        found[name] = np.array([f"demo_{n}" for n in positions], "S")
    return found


# -- Minari ---------------------------------------------------------------------------------------


def _spaces_of(env: Any, observation_space: Any, action_space: Any) -> tuple[Any, tuple[Any, Any]]:
    """Return the specification of an environment, and the two spaces."""
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    given = (observation_space, action_space)
    if env is None:
        if None in given:
            raise ValueError(
                "expected env=, or both observation_space= and action_space=, which Minari stores"
            )
        return None, given
    spec = gymnasium.spec(env) if isinstance(env, str) else env
    is_spec = isinstance(spec, EnvSpec)
    if is_spec and None not in given:
        return spec, given
    made = gymnasium.make(spec) if is_spec else env
    if not isinstance(made, gymnasium.Env):
        raise TypeError(
            f"expected env as an id, an EnvSpec or an environment of gymnasium, got "
            f"{type(env).__name__}"
        )
    known = (made.observation_space, made.action_space)
    if is_spec:
        made.close()
    first, second = (old if new is None else new for old, new in zip(known, given, strict=True))
    return spec if is_spec else made.spec, (first, second)


def unbounded_spaces(data: ReplayBuffer[Any, Any, Any, Any]) -> dict[str, Any]:
    """Return spaces of Minari that hold all values of the dtypes of a buffer's columns."""
    from gymnasium.spaces import Box, Dict

    source = ExportSource(data, "Minari")

    def box(key: Key) -> Any:
        leaf = source.leaves[key]
        dtype = as_array(torch.empty(0, dtype=leaf.dtype)).dtype
        low, high = -np.inf, np.inf
        if dtype.kind in "iu":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        elif dtype.kind == "b":
            low, high = 0, 1
        return Box(low, high, tuple(leaf.shape), dtype)

    def space(root: Key) -> Any:
        keys = source.below(root)
        if keys == [root]:
            return box(root)
        names = dict.fromkeys(key[len(root)] for key in keys)
        return Dict({name: space((*root, name)) for name in names})

    return {"observation_space": space(OBSERVATION), "action_space": space(ACTION)}


def _write_minari(source: ExportSource, spaces: tuple[Any, Any], draft: Draft) -> int:
    """Write all episodes as Minari does; return the count of steps."""
    infos = source.below(("next", *INFO))
    total = 0
    with new_h5_file(draft.path / "data" / "main_data.hdf5") as (file, check_writes):
        for number, rows in source.episodes():
            truncated = rows.truncated
            if not (truncated[-1] or rows.terminated[-1]):
                truncated = truncated.copy()
                truncated[-1] = True
            values = {
                "observations": _of_space(source, rows.with_last, spaces[0], OBSERVATION),
                "actions": _of_space(source, rows.shaped, spaces[1], ACTION),
                "rewards": rows.rewards,
                "terminations": rows.terminated,
                "truncations": truncated,
            }
            if infos:
                values["infos"] = nested_values({key[2:]: rows.info(key) for key in infos})
            parts = _parts_of(values)
            draft.wrote(parts)
            episode = file.create_group(f"episode_{number}")
            episode.attrs.update({"id": number, "total_steps": rows.count})
            seed = source.seed_of(number, rows)
            if seed is not None:
                episode.attrs["seed"] = seed
            for name, value in parts.items():
                shape = (None, *value.shape[1:])
                episode.create_dataset(name, data=value, chunks=True, maxshape=shape)
            check_writes()
            total += rows.count
    return total


def _parts_of(values: Any, name: str = "") -> dict[str, Array]:
    """Return the arrays in nested dicts and tuples, by joined names."""
    if isinstance(values, tuple):
        values = {f"_index_{at}": value for at, value in enumerate(values)}
    if not isinstance(values, dict):
        return {name: values}
    found: dict[str, Array] = {}
    for part, value in values.items():
        found |= _parts_of(value, f"{name}/{part}" if name else part)
    return found


def _of_space(
    source: ExportSource, read: Callable[[Key, tuple[int, ...]], Array], space: Any, key: Key
) -> Any:
    """Return arrays in the containers of a space."""
    parts = source.parts(space, key)
    if parts is None:
        return read(key, space.shape)
    found = {name: _of_space(source, read, part, below) for name, part, below in parts}
    return found if isinstance(space.spaces, Mapping) else tuple(found.values())


def _add_namespaces(folder: Path, namespace: str | None) -> None:
    """Add the file of each namespace of an id that Minari does not know yet."""
    for _ in (namespace or "").split("/") if namespace else ():
        file = folder / "namespace_metadata.json"
        if not file.exists():
            replace_file(file, "{}")
        folder = folder.parent
