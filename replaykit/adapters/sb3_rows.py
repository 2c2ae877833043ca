"""Rows, slots and draws in the order of Stable-Baselines3.

`SB3Ring` numbers slots. `GlobalNumpySampler` and `RewardsAhead` make batches. `SB3Step` holds the
rows of one write.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from replaykit._compat import TensorDict
from replaykit.errors import NotEnoughData
from replaykit.samplers import Sampler
from replaykit.storages import Storage
from replaykit.ted import REWARD, TERMINATED, TRUNCATED
from replaykit.transforms import Around, HistoryTransform, Surroundings

Array = np.ndarray[Any, Any]
Observation = dict[str, Array]
"""Observations by key; an observation that is a single array has the empty key."""

ENV = "env"
"""Key of the number of a row's environment, int32. Rows of a single environment lack it."""

REWARDS, STEPS = "rewards", "steps"
"""Keys of n-step batches: the rewards of the steps ``[B, n]``, and their number ``[B]``."""


def draw_integers(low: Array | int, high: Array | int, count: int) -> Array:
    """Draw ``count`` integers below ``high`` with NumPy's global generator.

    Stable-Baselines3 draws from this generator, so another generator would give other batches.
    """
    drawn: Array = np.random.randint(low, high, size=count)  # noqa: NPY002
    return drawn


class SB3Ring:
    """The slots of a storage as Stable-Baselines3 numbers them.

    Every write has one row of each environment. The row of environment ``e`` in the write number
    ``w`` is in slot ``w % writes * envs + e``. Stable-Baselines3 gives this write the position
    ``w % positions``. ``writes`` exceeds ``positions`` if frames are stacked, because the oldest
    stacks need some older frames.
    """

    def __init__(self, positions: int, envs: int, older: int) -> None:
        self.positions, self.envs, self.writes = positions, envs, positions + older

    def written(self, storage: Storage) -> int:
        """Return the number of writes since the storage was last cleared.

        A load into another capacity moves the rows. The result then fits the cursor, but it is
        smaller than the number of all writes.
        """
        ledger = storage.ledger
        stored, cursor = ledger.length // self.envs, ledger.cursor // self.envs
        if stored < self.writes:
            return stored
        count = (ledger.next_position - ledger.cleared) // self.envs
        return count if count % self.writes == cursor else self.writes + cursor

    def size(self, storage: Storage) -> int:
        """Return the number of positions with rows."""
        return min(self.written(storage), self.positions)

    def slots(self, storage: Storage, position: Array, env: Array | int) -> Array:
        """Return the slots of rows, int64 ``[B]``."""
        if self.writes != self.positions:
            newest = self.written(storage) - 1
            position = (newest - (newest - position) % self.positions) % self.writes
        return position * self.envs + env if self.envs > 1 else position


class GlobalNumpySampler(Sampler):
    """Draws rows uniformly with NumPy's global generator.

    The draws equal those of Stable-Baselines3: first positions, then environments.
    """

    kind = "sb3"
    stateless = True

    def __init__(self, ring: SB3Ring) -> None:
        super().__init__()
        self.ring = ring

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        size = self.ring.size(storage)
        if not size:
            raise NotEnoughData("expected stored rows to draw from, got an empty buffer")
        position = draw_integers(0, size, batch_size)
        env: Array | int = 0  # NumPy draws nothing for a single environment
        if self.ring.envs > 1:
            env = draw_integers(0, self.ring.envs, batch_size)
        return torch.from_numpy(self.ring.slots(storage, position, env)), {}


class RewardsAhead(HistoryTransform):
    """Adds the rewards of up to ``n`` steps, and takes ``next`` from the last of these steps.

    The buffer sums the rewards later, because a ``VecNormalize`` must first scale each of them.
    """

    uses_random = False
    changes = frozenset({(REWARDS,), (STEPS,), TERMINATED, TRUNCATED})

    def __init__(self, n: int) -> None:
        self.n = n
        self._steps = np.arange(n)

    def fetch(self, around: Surroundings) -> tuple[Around, Around, Array]:
        ahead = np.minimum(around.last - around.time, self.n - 1)
        last = around.next_time = around.time + ahead
        time = np.minimum(around.time[:, None] + self._steps, last[:, None])
        keys = [key for key in around.keys if key[0] == "next" and key != REWARD]
        return around.fetch([REWARD], time), around.fetch(keys, last), ahead + 1

    def apply(self, data: Any, fetched: tuple[Around, Around, Array], around: Surroundings) -> Any:
        rewards, last, steps = fetched
        data.set(REWARDS, around.seen(rewards)[REWARD].squeeze(-1))
        data.set(STEPS, torch.from_numpy(steps))
        for key, leaf in around.seen(last).items():
            data.set(key, leaf)
        return data


class SB3Step:
    """The next row of each environment, in memory that every write reuses.

    To make a new TensorDict for each write would take longer than to store it.

    Args:
        space: the observation space.
        shape: shape of an observation, or shapes by key.
        action: a dtype and a number of values.
        envs: number of environments.
        frame: size of the first axis of a frame; 0 if whole observations are stored.

    Attributes:
        rows: the rows, ``[envs]``.
        before, after: the whole observations of the rows. They share memory with ``rows``.
        ended: which environments ended an episode with the rows; None before the first rows.
    """

    def __init__(
        self, space: spaces.Space[Any], shape: Any, action: tuple[Any, int], envs: int, frame: int
    ) -> None:
        self._arguments = space, shape, action, envs, frame
        shapes, parts = parts_of(shape), parts_of(space)
        self.before, self.after = (
            {key: np.zeros((envs, *shapes[key]), part.dtype) for key, part in parts.items()}
            for _ in range(2)
        )
        self.action = np.zeros((envs, action[1]), action[0])
        self.reward = np.zeros((envs, 1), np.float32)
        self.terminated, self.truncated = (np.zeros((envs, 1), np.bool_) for _ in range(2))
        self.ended: Array | None = None
        following = {
            "observation": stored_part(self.after, frame),
            "reward": torch.from_numpy(self.reward),
            "terminated": torch.from_numpy(self.terminated),
            "truncated": torch.from_numpy(self.truncated),
        }
        rows = {
            "observation": stored_part(self.before, frame),
            "action": torch.from_numpy(self.action),
            "next": TensorDict(following, [envs]),
        }
        if envs > 1:
            rows[ENV] = torch.arange(envs, dtype=torch.int32)
        self.rows = TensorDict(rows, [envs])

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self._arguments, "after": self.after, "ended": self.ended}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]
        fill_observation(self.after, parts_of(state["after"]))  # an array in older states
        self.ended = state["ended"]


def parts_of(given: Any) -> dict[str, Any]:
    """Return a dict or a Dict space by key; another value by the empty key."""
    return dict(given.items()) if isinstance(given, (dict, spaces.Dict)) else {"": given}


def stored_part(observation: Observation, frame: int) -> Any:
    """Return the part of observations that is stored: all of it, or the newest frame."""
    leaves = {key: torch.from_numpy(values) for key, values in observation.items()}
    whole = leaves.get("")
    if whole is None:
        return TensorDict(leaves, [len(next(iter(leaves.values())))])
    return whole[:, -frame:] if frame else whole


def fill_observation(target: Observation, values: Observation) -> None:
    for key, part in target.items():
        part[...] = values[key]


def shaped_observation(target: Observation, given: Any, name: str) -> Observation:
    """Return observations in the shapes and dtypes of ``target``."""
    parts = parts_of(given)
    return {
        key: shaped_values(part, parts[key], f"{name}[{key!r}]" if key else name)
        for key, part in target.items()
    }


def shaped_values(target: Array, given: Any, name: str) -> Array:
    """Return values in the shape and dtype of ``target``. Raises ValueError for other shapes."""
    values = np.asarray(given, target.dtype)
    try:
        return values.reshape(target.shape)
    except ValueError:
        raise ValueError(f"{name}: expected the shape {target.shape}, got {values.shape}") from None


def same_observations(one: Observation, other: Observation) -> Array:
    """Return which environments have equal observations, bool ``[envs]``."""
    found: Array = np.logical_and.reduce([equal_rows(one[key], other[key]) for key in one])
    return found


def equal_rows(one: Array, other: Array) -> Array:
    """Return which rows of two arrays are equal, bool ``[N]``."""
    equal: Array = (one == other).reshape(len(one), -1).all(1)
    return equal
