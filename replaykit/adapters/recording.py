"""Record the episodes of an environment to a folder that survives a kill."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from replaykit._compat import TensorDict
from replaykit._version import __version__
from replaykit.adapters.exported_episodes import nested_values, parts_of_space
from replaykit.adapters.recording_folder import RecordingFolder, open_recording
from replaykit.buffer import ReplayBuffer
from replaykit.declared import Positive, read_value
from replaykit.environments import transition
from replaykit.errors import SchemaError
from replaykit.interrupts import deferred
from replaykit.structure import from_numbers, from_numpy
from replaykit.ted import Key, format_key, unravel

try:
    import gymnasium
    from gymnasium import spaces
except ImportError as error:
    raise ImportError(
        "recording needs gymnasium, which is not installed; run pip install 'replaykit[gymnasium]'"
    ) from error

_NEXT_INFO: Final = ("next", "info")


def record(
    env: gymnasium.Env[Any, Any],
    policy: Callable[[Any], Any] | None,
    path: str | os.PathLike[str],
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    info_keys: Iterable[str | Key] = (),
    durable: bool = True,
) -> ReplayBuffer[Any, Any, Any, Any]:
    """Record episodes of a policy to a folder, until it has a number of them.

    An episode is durable when it ends. After a kill, run the same program again. It continues after
    the last episode that had ended, and drops the interrupted one. An error or Ctrl-C drops the
    interrupted episode too. If the folder already has the requested episodes or steps, the call
    records nothing.

    Args:
        env: an environment of gymnasium. The call does not close it.
        policy: a function that maps an observation to an action. None for random actions.
        path: the folder of the recording. It is made with its parents. There is no capacity: the
            files grow with the recording.
        episodes: the number of episodes after which the call ends. Episodes that are already in
            the folder count.
        steps: the number of rows after which the call ends. Rows that are already in the folder
            count. The last episode is cut there, with ``("next", "truncated")`` set.
        seed: episode ``k`` of the folder is reset with ``seed + k``. Random actions are seeded with
            the same number. With None, no reset has a seed.
        info_keys: keys of the information that ``env.step`` returns. Row values are stored below
            ``("next", "info")``. A nested key is a tuple.
        durable: whether an episode also survives a loss of power. Each end of an episode then
            waits for the disk.

    Returns:
        All episodes in the folder, opened by `open_recording`.

    Raises:
        ValueError: neither ``episodes`` nor ``steps`` is given, or one is below 1. Also if the
            folder was recorded with another environment, other spaces or other ``info_keys``, or if
            a space has no fixed shape.
        TypeError: the environment is a vector environment, or ``policy`` is not callable.
        FileExistsError, NotADirectoryError, RuntimeError, CheckpointError: as for `RecordReplay`.
        KeyError, SchemaError: as for `RecordReplay.step`.

    Example:
        >>> import tempfile, gymnasium
        >>> from replaykit.adapters import record
        >>> env, folder = gymnasium.make("CartPole-v1"), tempfile.mkdtemp()
        >>> rb = record(env, lambda observation: int(observation[2] > 0), folder, episodes=2)
        >>> rb = record(env, lambda observation: int(observation[2] > 0), folder, episodes=5)
        >>> len(rb.episodes), rb[:]["episode"].unique()
        (5, tensor([0, 1, 2, 3, 4]))
    """
    for name, count in (("episodes", episodes), ("steps", steps)):
        read_value(Positive | None, count, name)
    if episodes is None and steps is None:
        raise ValueError("expected episodes= or steps=, which end the recording, got neither")
    if policy is not None and not callable(policy):
        raise TypeError(f"expected policy as a function or None, got {type(policy).__name__}")
    recorder = None
    try:
        with deferred:  # an interrupted opening would keep the folder locked
            recorder = _Recorder(env, path, info_keys, durable, seed)
        folder = recorder.folder
        while (episodes is None or folder.episodes < episodes) and (
            steps is None or folder.rows < steps
        ):
            limit = None if steps is None else steps - folder.rows
            _record_episode(env, policy, recorder, limit)
    finally:
        if recorder is not None:
            recorder.close()
    return open_recording(path)


def _record_episode(
    env: gymnasium.Env[Any, Any],
    policy: Callable[[Any], Any] | None,
    recorder: _Recorder,
    limit: int | None,
) -> None:
    """Record one episode; cut it after ``limit`` steps."""
    seed = None if recorder.seed is None else recorder.seed + recorder.folder.episodes
    if policy is None and seed is not None:
        env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    recorder.begin(observation, seed)
    while recorder.is_open:
        action = env.action_space.sample() if policy is None else policy(observation)
        if isinstance(action, torch.Tensor):
            action = action.detach().cpu().numpy()
        recorder.choose(action)
        observation, reward, terminated, truncated, info = env.step(action)
        recorder.add(observation, reward, terminated, truncated, info)
        if recorder.is_open and recorder.length == limit:
            recorder.end()


class RecordReplay(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper of an environment that records its episodes to a folder.

    An episode is durable when ``step`` returns its end. The steps of an unfinished episode are in
    memory only, so a kill drops them. ``reset`` and ``close`` end an unfinished episode: they store
    its steps, with ``("next", "truncated")`` set in the last row. ``discard`` drops these steps. A
    ``with`` block that an error or Ctrl-C leaves drops them too.

    The wrapper changes no value. Stored observations and actions have the dtypes of the
    environment's and the caller's arrays. Python numbers get the dtype of their space. Rewards get
    torch's default dtype.

    Args:
        env: an environment with Box, Discrete, MultiDiscrete or MultiBinary spaces, or Dict and
            Tuple spaces of these.
        path: the folder of the recording. It is made with its parents. If it is a recording, the
            wrapper adds episodes after the last one. The files grow with the recording.
        info_keys: keys of the information that ``env.step`` returns. Values are stored below
            ``("next", "info")``. A nested key is a tuple.
        durable: whether an episode also survives a loss of power. Each end of an episode then
            waits for the disk.

    Raises:
        TypeError: the environment is a vector environment.
        ValueError: the folder was recorded with another environment, other spaces or other
            ``info_keys``. Or a space has no fixed shape.
        FileExistsError, NotADirectoryError: the path holds something else. Nothing was changed.
        RuntimeError: another process or object records to the folder.
        CheckpointError: a file of the recording is damaged. The message names it.

    Example:
        >>> import tempfile, gymnasium
        >>> from replaykit.adapters import RecordReplay, open_recording
        >>> folder = tempfile.mkdtemp()
        >>> with RecordReplay(gymnasium.make("CartPole-v1"), folder) as env:
        ...     for seed in range(3):
        ...         observation, info = env.reset(seed=seed)
        ...         ended = False
        ...         while not ended:
        ...             action = int(observation[2] > 0)
        ...             observation, reward, terminated, truncated, info = env.step(action)
        ...             ended = terminated or truncated
        >>> rb = open_recording(folder)
        >>> [episode.complete for episode in rb.episodes], rb[:]["source_seed"].unique()
        ([True, True, True], tensor([0, 1, 2]))
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        path: str | os.PathLike[str],
        *,
        info_keys: Iterable[str | Key] = (),
        durable: bool = True,
    ) -> None:
        recorder = _Recorder(env, path, info_keys, durable, None)
        super().__init__(env)
        self._recorder = recorder

    @property
    def episodes(self) -> int:
        """The number of episodes in the folder."""
        return self._recorder.folder.episodes

    @property
    def rows(self) -> int:
        """The number of rows in the folder."""
        return self._recorder.folder.rows

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Store an unfinished episode as truncated, and reset the environment.

        Args:
            seed, options: passed to ``env.reset``. The rows of the episode have the seed.

        Raises:
            OSError: the disk has too little room for the unfinished episode.
            SchemaError: the observation does not fit the spaces or the stored rows.
        """
        self._recorder.end()
        observation, info = self.env.reset(seed=seed, options=options)
        self._recorder.begin(observation, seed)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; store the episode if this step ends it.

        Raises:
            RuntimeError: the episode has ended, or ``reset`` was not called.
            SchemaError: the action, the observation or an information value has another shape or
                dtype than its space or the rows before. The message names the key. An action is
                checked before the environment takes the step.
            KeyError: the information lacks a key of ``info_keys``.
            TypeError: a flag is not bool, or a value is not numeric.
            OSError: the disk has too little room. The steps stay in memory, and ``close`` tries to
                store them again.
        """
        self._recorder.choose(action)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except BaseException:
            self._recorder.discard()  # the environment may have taken half a step
            raise
        self._recorder.add(observation, reward, terminated, truncated, info)
        return observation, reward, terminated, truncated, info

    def discard(self) -> None:
        """Drop the steps of the unfinished episode; call ``reset`` next."""
        self._recorder.discard()

    def close(self) -> None:
        """Store an unfinished episode as truncated, and close the recording and the environment."""
        try:
            self._recorder.end()
        finally:
            self._recorder.close()
            super().close()

    def __exit__(self, *args: Any) -> Any:
        if args and args[0] is not None:
            self.discard()
        return super().__exit__(*args)


class _Recorder:
    """The steps of the present episode, and the folder of the episodes before it.

    Attributes:
        folder: the folder of the recording.
        seed: the seed of episode 0; None if resets have no seed.
        is_open: True between the reset and the end of an episode.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        path: str | os.PathLike[str],
        info_keys: Iterable[str | Key],
        durable: bool,
        seed: int | None,
    ) -> None:
        if hasattr(env, "num_envs"):
            raise TypeError(
                f"expected an environment, got the vector environment {type(env).__name__}; record "
                "each environment to a separate folder, or write the rows of "
                "replaykit.VectorSteps to a LazyMemmapStorage with recover=True"
            )
        if isinstance(info_keys, str):
            raise TypeError(f"expected info_keys as a list of keys, got the string {info_keys!r}")
        self._columns = _Columns()
        self._observation = _SpaceValues(env.observation_space, ("observation",), self._columns)
        self._action = _SpaceValues(env.action_space, ("action",), self._columns)
        self._info_keys = {unravel(key): (*_NEXT_INFO, *unravel(key)) for key in info_keys}
        self.seed = seed
        self.folder = RecordingFolder(
            Path(path).expanduser(),
            {
                "env_id": None if env.spec is None else env.spec.id,
                "observation_space": _as_json(env.observation_space),
                "action_space": _as_json(env.action_space),
                "info_keys": [list(key) for key in self._info_keys],
            },
            {"seed": seed, "env_kwargs": _kwargs(env), "versions": _versions()},
            durable=durable,
        )
        if (schema := self.folder.schema) is not None:
            self._columns.dtypes = {
                key: torch.empty((), dtype=leaf.dtype).numpy().dtype
                for key, leaf in schema.leaves.items()
            }
        self.discard()

    def discard(self) -> None:
        """Drop the steps of an unfinished episode."""
        self.is_open = False
        self._observations: list[tuple[np.ndarray, ...]] = []
        self._actions: list[tuple[np.ndarray, ...]] = []
        self._infos: list[tuple[np.ndarray, ...]] = []
        self._rewards: list[float] = []
        self._flags: list[tuple[bool, bool]] = []

    @property
    def length(self) -> int:
        """The number of steps in the present episode."""
        return len(self._flags)

    def begin(self, observation: Any, seed: int | None) -> None:
        """Begin an episode with the observation of a reset."""
        first = self._observation.taken(observation)
        self.discard()
        self._observations.append(first)
        self._source_seed = -1 if seed is None else int(seed)
        self.is_open = True

    def choose(self, action: Any) -> None:
        """Check and copy an action before the environment takes it."""
        # An episode that has ended is still open if it could not be stored.
        if not self.is_open or (self._flags and any(self._flags[-1])):
            raise RuntimeError(
                "expected reset() before step(): the episode has ended or was not begun; a wrapper "
                "that resets the environment automatically belongs around RecordReplay"
            )
        self._chosen = self._action.taken(action)

    def add(
        self,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Mapping[Any, Any],
    ) -> None:
        """Add the results of a step; store the episode if it ends here.

        A value that cannot be stored drops the episode, because a step would be missing in it.
        """
        try:
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if not isinstance(flag, (bool, np.bool_)):
                    raise TypeError(
                        f"expected {name} as bool, got {type(flag).__name__} {flag!r:.40}"
                    )
            after = self._observation.taken(observation)
            values = tuple(
                self._columns.array(_info_value(info, key), path)
                for key, path in self._info_keys.items()
            )
            if not isinstance(reward, float):
                reward = _one_reward(reward)
        except BaseException:
            self.discard()
            raise
        self._observations.append(after)
        self._actions.append(self._chosen)
        self._infos.append(values)
        self._rewards.append(reward)
        self._flags.append((bool(terminated), bool(truncated)))
        if terminated or truncated:
            self.end()

    def end(self) -> None:
        """Store the present episode; mark an unfinished episode as truncated."""
        if self.length:
            if not any(self._flags[-1]):
                self._flags[-1] = (False, True)
            rows = self._rows()
            self.folder.reserve(rows)
            with deferred:
                self.folder.append(rows)
                self.discard()
                self.folder.commit()
        else:
            self.discard()

    def close(self) -> None:
        """Close the folder; steps of an unfinished episode are dropped."""
        self.discard()
        self.folder.close()

    def _rows(self) -> TensorDict:
        count = self.length
        terminated, truncated = np.array(self._flags).T
        rows = transition(
            self._observation.columns(self._observations[:-1]),
            self._action.columns(self._actions),
            np.array(self._rewards),
            self._observation.columns(self._observations[1:]),
            terminated,
            truncated,
            batch_size=count,
        )
        for key, column in zip(
            self._info_keys.values(), zip(*self._infos, strict=True), strict=True
        ):
            value = from_numpy(np.stack(column), key)
            rows.set(key, value.unsqueeze(-1) if value.ndim == 1 else value)
        for name, number in (
            ("episode", self.folder.episodes),
            ("source_seed", self._source_seed),
        ):
            rows.set(name, torch.full((count,), number, dtype=torch.int64, device="cpu"))
        return rows


def _one_reward(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"expected the reward as one number, got {type(reward).__name__} {reward!r:.80}"
        ) from None


# -- values ---------------------------------------------------------------------------------------


class _Columns:
    """Shapes and dtypes of recorded values by key. The first value fixes a missing one.

    Attributes:
        dtypes: the dtypes.
        shapes: the shapes, with their origin for messages.
    """

    def __init__(self) -> None:
        self.dtypes: dict[Key, np.dtype[Any]] = {}
        self.shapes: dict[Key, tuple[tuple[int, ...], str]] = {}

    def array(self, value: Any, key: Key, dtype: Any = None) -> np.ndarray:
        """Return a copy of a value.

        Args:
            value: a tensor, array, number or list of numbers.
            key: the key of the value in a row.
            dtype: the dtype of Python numbers. By default, the package's rules give it.

        Raises:
            SchemaError: the value has another shape or dtype than before.
        """
        found = _copied(value, key, dtype)
        shape, origin = self.shapes.setdefault(key, (found.shape, "the step before"))
        if found.shape != shape:
            raise SchemaError(
                f"key {format_key(key)}: expected the shape {list(shape)} of {origin}, got "
                f"{list(found.shape)}"
            )
        if key not in self.dtypes:
            from_numpy(found, key)  # raises if torch has no such dtype
            self.dtypes[key] = found.dtype
        elif found.dtype != self.dtypes[key]:
            raise SchemaError(
                f"key {format_key(key)}: expected {self.dtypes[key]}, as in the rows before, got "
                f"{found.dtype}; convert the value"
            )
        return found


class _SpaceValues:
    """The parts of a space, as arrays with a fixed shape and dtype."""

    def __init__(self, space: Any, root: Key, columns: _Columns) -> None:
        self._root, self._columns = root, columns
        self._parts: list[tuple[Key, tuple[Any, ...], Any]] = []
        self._containers: list[tuple[tuple[Any, ...], int]] = []
        self._add(space, root, ())

    def _add(self, space: Any, key: Key, path: tuple[Any, ...]) -> None:
        parts = parts_of_space(space)
        if parts is not None:
            self._containers.append((path, len(parts)))
            for name, part in parts:
                self._add(part, (*key, str(name)), (*path, name))
        elif isinstance(space, _FIXED):
            self._parts.append((key, path, space))
            self._columns.shapes[key] = (tuple(space.shape or ()), "its space")
        else:
            raise ValueError(
                f"key {format_key(key)}: expected a Box, Discrete, MultiDiscrete, MultiBinary, "
                f"Dict or Tuple space, got {type(space).__name__}, whose values vary in shape; "
                "wrap the environment so that it pads them"
            )

    def taken(self, value: Any) -> tuple[np.ndarray, ...]:
        """Return copies of the parts of a value.

        Raises:
            SchemaError: a part is missing or has another shape or dtype.
        """
        for path, count in self._containers:
            found = self._at(value, path)
            if not hasattr(found, "__len__") or len(found) != count:
                raise SchemaError(
                    f"key {format_key((*self._root, *map(str, path)))}: expected {count} parts, as "
                    f"in its space, got {found!r:.80}"
                )
        return tuple(
            self._columns.array(self._at(value, path), key, space.dtype)
            for key, path, space in self._parts
        )

    def _at(self, value: Any, path: tuple[Any, ...]) -> Any:
        for done, part in enumerate(path, 1):
            try:
                value = value[part]
            except (LookupError, TypeError):
                key = (*self._root, *map(str, path[:done]))
                raise SchemaError(
                    f"key {format_key(key)}: expected a value, as in its space, got none"
                ) from None
        return value

    def columns(self, values: list[tuple[np.ndarray, ...]]) -> Any:
        """Return the parts of many values as arrays ``[N, ...]``, in nested dicts."""
        arrays = map(np.stack, zip(*values, strict=True))
        count = len(self._root)
        return nested_values(
            {key[count:]: array for (key, _, _), array in zip(self._parts, arrays, strict=True)}
        )


def _info_value(info: Mapping[Any, Any], key: Key) -> Any:
    """Return a requested value of the information of a step; KeyError if it is missing."""
    value: Any = info
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(
                f"expected the key {format_key(key)} of info_keys in the information of "
                f"every step, got only {sorted(map(str, info))}"
            )
        value = value[part]
    return value


def _copied(value: Any, key: Key, dtype: Any) -> np.ndarray:
    """Return a copy of numbers as an array; see `_Columns.array`."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.array(value)
    try:
        if dtype is not None:
            return np.array(value, dtype=dtype)
        numbers = from_numbers(value, key)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"key {format_key(key)}: expected numbers, got {value!r:.80}") from error
    if numbers is None:
        raise TypeError(f"key {format_key(key)}: expected numbers, got {value!r:.80}")
    return numbers.numpy()


# -- spaces and metadata --------------------------------------------------------------------------

_FIXED: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def _as_json(space: Any) -> dict[str, Any]:
    """Return a space as JSON values. Equal bounds of a Box are one number."""
    kind = type(space).__name__
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {n: _as_json(part) for n, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [_as_json(part) for part in space.spaces]}
    found = {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape)}
    if isinstance(space, spaces.Box):
        return {**found, "low": _bound(space.low), "high": _bound(space.high)}
    if isinstance(space, spaces.Discrete):
        return {**found, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {**found, "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return found


def _bound(values: np.ndarray) -> Any:
    """Return bounds as numbers, or as text if they are infinite, which JSON lacks."""
    if values.size and (values == values.flat[0]).all():
        values = values.flat[0]
    found = np.asarray(values)
    if np.isfinite(found).all():
        return found.tolist()
    texts = np.vectorize(lambda value: value if np.isfinite(value) else str(value), otypes=[object])
    return texts(found).tolist()


def _kwargs(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """Return the keywords of the environment as JSON values, others as text."""
    given = {} if env.spec is None else env.spec.kwargs
    found: dict[str, Any] = json.loads(json.dumps(given, default=repr, skipkeys=True))
    return found


def _versions() -> dict[str, str]:
    return {
        "replaykit": __version__,
        "python": platform.python_version(),
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
