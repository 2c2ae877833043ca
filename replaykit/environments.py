"""Make rows of the steps of environments, and episodes of interleaved events."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, arange, is_tensordict, new_tensordict
from replaykit.declared import Count, Positive, read_value
from replaykit.errors import BufferFull, SchemaError
from replaykit.keywords import one_of
from replaykit.schema import Schema
from replaykit.structure import Path, flatten, from_numbers, from_numpy
from replaykit.ted import format_key, unravel


def transition(
    observation: Any,
    action: Any,
    reward: Any,
    next_observation: Any,
    terminated: Any,
    truncated: Any,
    *,
    batch_size: int | tuple[int, ...] | None = None,
) -> TensorDict:
    """Make a row, or a batch of rows, from the values of one ``env.step`` call.

    The arguments may be Python numbers, NumPy scalars and arrays, tensors and lists of numbers.
    They may also be dicts and tuples of these, as in nested spaces. A dict becomes a nested
    TensorDict. A tuple becomes a TensorDict with the keys ``"0"``, ``"1"``, and so on. A value
    without feature dimensions gets a dimension of size 1. For example, a discrete action becomes
    ``[1]``.

    Args:
        observation: the observation that the action was chosen for.
        action: the argument of ``env.step``.
        reward, next_observation, terminated, truncated: the results of ``env.step``. At the end of
            an episode, ``next_observation`` is its last observation, not the first observation of
            the next episode.
        batch_size: number of rows, or their shape. The shape of every argument must begin with it.
            By default the arguments are one row of any shape.

    Returns:
        A TensorDict of shape ``batch_size`` (``[]`` by default) with ``observation``, ``action``
        and ``next``. ``next`` has ``observation``, ``reward``, ``terminated``, ``truncated`` and
        ``done``, which is ``terminated | truncated``. The TensorDict owns its memory.

        The dtype of a Python bool is bool, of an int int64, and of a float torch's default dtype
        (float32). Arrays and tensors keep their dtype. The reward is an exception. It always has
        torch's default dtype, because environments return rewards of varying dtypes.

    Raises:
        TypeError: an argument does not hold numbers, or a flag is not bool.
        ValueError: a row has more than one value of a reward or flag, or a shape does not begin
            with ``batch_size``.
        SchemaError: the two observations differ in keys, shapes or dtypes; a ValueError.

    Cost: one copy of every argument.

    Example:
        >>> import numpy as np
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, transition
        >>> before, after = np.zeros(4, np.float32), np.ones(4, np.float32)
        >>> row = transition(before, 1, 0.5, after, False, False)
        >>> row["action"], row["next", "reward"], row["next", "done"]
        (tensor([1]), tensor([0.5000]), tensor([False]))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> rb.add(row)
        0
        >>> many = np.zeros((8, 4), np.float32)
        >>> ends = np.zeros(8, bool)
        >>> rb.extend(transition(many, np.arange(8), np.ones(8), many, ends, ends, batch_size=8))
        tensor([1, 2, 3, 4, 5, 6, 7, 8])
    """
    batch = _batch(batch_size)
    before = _columns(observation, batch, ("observation",))
    after = _columns(next_observation, batch, ("next", "observation"))
    _check_alike(before, after, len(batch))
    ended = _flag(terminated, batch, "terminated")
    cut = _flag(truncated, batch, "truncated")
    return new_tensordict(
        {
            "observation": before,
            "action": _columns(action, batch, ("action",)),
            "next": new_tensordict(
                {
                    "observation": after,
                    "reward": _one_each(reward, batch, "reward").to(torch.get_default_dtype()),
                    "terminated": ended,
                    "truncated": cut,
                    "done": ended | cut,
                },
                batch,
                None,
            ),
        },
        batch,
        None,
    )


class VectorSteps:
    """A vector environment whose steps return rows. Resets make no rows.

    It supports vector environments of gymnasium 1.0 and newer, in every ``AutoresetMode``:

    - ``NEXT_STEP``: the step after the end of an episode resets the environment. It ignores the
      environment's action and makes no row.
    - ``SAME_STEP``: the step that ends an episode also resets the environment.
      ``infos["final_obs"]`` is the next observation of the row. With the wrapper `DictInfoToList`,
      it is ``infos[env]["final_obs"]``.
    - ``DISABLED``: after the end of an episode, the caller must call ``reset(options={"reset_mask":
      steps.ended})``. Otherwise the next step raises.

    Rows of all environments are interleaved. In ``NEXT_STEP`` a step may lack the row of an
    environment. A storage with ``lane_key="env"`` separates the environments, with any writer. No
    window, n-step sum or stack of frames then crosses to another environment, or past the end of an
    episode. In ``SAME_STEP`` each step has a row of each environment, so rows can also be written
    to a storage with ``ndim=2``.

    Args:
        envs: a vector environment.
        autoreset: ``"next_step"``, ``"same_step"`` or ``"disabled"``. None for the mode in
            ``envs.metadata["autoreset_mode"]``.
        lane_key: key of the column with the number of the environment.
        first_lane: number of the first environment. If several vector environments write to one
            buffer, choose separate ranges.

    Attributes:
        observation: the observations for the next actions, as the environment returned them.
        infos: the last infos that ``reset`` or ``step`` returned.
        ended: bool array ``[num_envs]``, True for environments whose last step ended an episode.

    Raises:
        TypeError: ``envs`` is not a vector environment.
        ValueError: the mode does not exist, or is missing from the metadata. Also if ``first_lane``
            is not an int of at least 0, or if a space has unbatched values, such as Sequence.

    Example:
        >>> import gymnasium
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, SliceSampler, VectorSteps
        >>> steps = VectorSteps(gymnasium.make_vec("CartPole-v1", num_envs=4))
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000, lane_key="env"), batch_size=32,
        ...                   sampler=SliceSampler(slice_len=8))
        >>> observation, infos = steps.reset(seed=0)
        >>> for _ in range(100):
        ...     rows = steps.step(steps.envs.action_space.sample())
        ...     _ = rb.extend(rows)
        >>> sorted(rows.keys())
        ['action', 'env', 'episode', 'next', 'observation']
        >>> windows = rb.sample()["env"].view(4, 8)
        >>> bool((windows == windows[:, :1]).all())
        True
    """

    def __init__(
        self,
        envs: Any,
        *,
        autoreset: str | None = None,
        lane_key: str | tuple[str, ...] = "env",
        first_lane: int = 0,
    ) -> None:
        read_value(Count, first_lane, "first_lane")
        if not hasattr(envs, "num_envs"):
            raise TypeError(
                f"expected a vector environment, which has num_envs, got {type(envs).__name__}; "
                "use replaykit.transition() to make rows of a single environment"
            )
        for name in ("observation", "action"):
            _check_batched(
                getattr(envs, f"single_{name}_space", None),
                getattr(envs, f"{name}_space", None),
                (name,),
            )
        self.envs = envs
        self.autoreset = _mode_of(envs, autoreset)
        self.lane_key = unravel(lane_key)
        count = int(envs.num_envs)
        self._batch = torch.Size([count])
        self._lanes = arange(first_lane, first_lane + count)
        self._episodes = torch.full((count,), -1, device="cpu")
        self._next_episode = 0
        self._before: Any = None
        self.observation: Any = None
        self.infos: Any = {}
        self.ended = np.zeros(count, bool)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or only those in ``options["reset_mask"]``.

        Rows of unfinished episodes stay. The next rows belong to new episodes.

        Args:
            seed, options: passed to ``envs.reset``.

        Returns:
            Observations and infos, as ``envs.reset`` returned them.

        Raises:
            RuntimeError: there is a mask, but all environments must be reset first: they were never
                reset, or a call of them raised. Or the reset changed an observation outside of the
                mask, because these environments ignore masks.
        """
        options = None if options is None else dict(options)  # gymnasium removes entries
        mask = None if options is None else options.get("reset_mask")
        before, self._before = self._before, None  # a call that raises may have reset some
        if mask is not None and before is None:
            raise RuntimeError("expected reset() of all environments first, got a 'reset_mask'")
        started = np.ones(len(self.ended), bool) if mask is None else np.array(mask, bool)
        observation, infos = self.envs.reset(seed=seed, options=options)
        after = _columns(observation, self._batch, ("observation",))
        wrong = np.zeros_like(started) if mask is None else _differing(before, after) & ~started
        if wrong.any():
            raise RuntimeError(
                f"the observations of environments {np.flatnonzero(wrong).tolist()} have changed, "
                "although options['reset_mask'] excludes them; these environments ignore masks, so "
                "call reset() without one"
            )
        self._before = after
        self.observation, self.infos = observation, infos
        self.ended = self.ended & ~started
        self._begin(started)
        return observation, infos

    def step(self, action: Any) -> TensorDict:
        """Step the environments; return a row for each one that took a step.

        Args:
            action: the actions of all environments, as for ``envs.step``. Tensors are converted to
                arrays.

        Returns:
            Rows ``[n]`` as from ``transition``, with ``n <= num_envs``. They also have the
            environment's number under ``lane_key`` and the episode's number under ``"episode"``,
            int64 ``[n]`` each. A VectorSteps uses each episode number once. Before another
            VectorSteps writes to the same lanes, call ``rb.cut()``.

        Raises:
            RuntimeError: ``reset`` was not called, or an environment does not behave according to
                its mode. In ``DISABLED``, also if an environment whose episode has ended was not
                reset. If a call of the environments raises, as at Ctrl-C, some may have taken the
                step. Their rows are lost, so ``reset`` must be called for all environments.
        """
        if self._before is None:
            raise RuntimeError("expected reset() before the first step(), and after an error")
        if self.autoreset == "disabled" and self.ended.any():
            raise RuntimeError(
                f"the episodes of environments {np.flatnonzero(self.ended).tolist()} have ended; "
                'call reset(options={"reset_mask": steps.ended}) before the next step'
            )
        action = _as_arrays(action)
        before, self._before = self._before, None
        observation, reward, terminated, truncated, infos = self.envs.step(action)
        rows = transition(
            before, action, reward, observation, terminated, truncated, batch_size=self._batch
        )
        ended = rows["next", "done"].view(-1).cpu().numpy()
        resets = self.ended if self.autoreset == "next_step" else np.zeros_like(ended)
        if (ended & resets).any():
            raise RuntimeError(
                f"environments {np.flatnonzero(ended & resets).tolist()} ended in the step that "
                "resets them; the autoreset mode of these environments is not NEXT_STEP"
            )
        after = rows["next", "observation"].clone()
        if self.autoreset == "same_step" and ended.any():
            rows["next", "observation"] = _with_final(after, infos, ended)
        rows.set(self.lane_key, self._lanes.clone())
        rows.set("episode", self._episodes.clone())
        self._before, self.observation, self.infos = after, observation, infos
        self._begin(ended if self.autoreset == "same_step" else resets)
        self.ended = ended
        return rows[torch.from_numpy(~resets)] if resets.any() else rows

    def _begin(self, started: np.ndarray[Any, Any]) -> None:
        """Number the next episodes of some environments."""
        count = int(np.count_nonzero(started))
        if count:
            numbers = arange(self._next_episode, self._next_episode + count)
            self._episodes[torch.from_numpy(started)] = numbers
            self._next_episode += count

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={len(self.ended)}, autoreset={self.autoreset!r})"


def _check_batched(single: Any, batched: Any, path: Path) -> None:
    """Raise ValueError if a vector environment returns a space's values in a tuple.

    One environment's values could then be mistaken for the values of several environments.
    """
    parts = getattr(batched, "spaces", None)
    if single is None or parts is None:
        return
    if not isinstance(single, type(batched)):
        raise ValueError(
            f"expected spaces whose values have one shape, got {type(single).__name__} at key "
            f"{format_key(path)}: its values have no batches; step the environments one by one, "
            "and see 'Values that vary in shape' in docs/environments.md"
        )
    names = parts if isinstance(parts, Mapping) else range(len(parts))
    for name in names:
        _check_batched(single.spaces[name], parts[name], (*path, name))


_MODES = ("next_step", "same_step", "disabled")


def _mode_of(envs: Any, given: object) -> str:
    """Return the given mode, or the one that a vector environment declares, without imports."""
    if given is None:
        mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
        given = getattr(mode, "name", mode)
        if given is None:
            raise ValueError(
                f"expected 'autoreset_mode' in the metadata of {envs}, got none; pass "
                f"autoreset=, one of {', '.join(map(repr, _MODES))}"
            )
    return one_of("autoreset", given.lower() if isinstance(given, str) else given, _MODES)


def _with_final(after: Any, infos: Any, ended: np.ndarray[Any, Any]) -> Any:
    """Return the observations after a step, with final ones for ended episodes.

    ``infos`` is a dict, or a list with a dict of each environment.
    """
    after, is_list = after.clone(), not isinstance(infos, Mapping)
    for env in np.flatnonzero(ended).tolist():
        value = (infos[env] if is_list else infos).get("final_obs")
        if not (is_list or value is None):
            value = _of_one(value, env)
        if value is None:
            raise RuntimeError(
                f"expected the last observation of environment {env}, which has ended, in "
                "infos['final_obs'], got none; the autoreset mode of these environments is not "
                "SAME_STEP"
            )
        row = _columns(value, torch.Size(), ("final_obs",))
        _check_alike(after[env], row, 0)
        after[env] = row
    return after


def _differing(before: Any, after: Any) -> np.ndarray[Any, Any]:
    """Return which rows of two observations differ; NaN equals NaN."""
    one, other = (flatten(each, 1)[1].values() for each in (before, after))
    wrong = [((a != b) & ((a == a) | (b == b))).flatten(1) for a, b in zip(one, other, strict=True)]
    return np.asarray(torch.cat(wrong, 1).any(1).cpu())


def _of_one(values: Any, env: int) -> Any:
    """Return the values of one environment from an array of objects or columns."""
    if isinstance(values, Mapping):
        return {key: _of_one(value, env) for key, value in values.items() if key[:1] != "_"}
    if isinstance(values, tuple):
        return tuple(_of_one(value, env) for value in values)
    return values[env]


def _as_arrays(action: Any) -> Any:
    if isinstance(action, torch.Tensor):
        return action.detach().cpu().numpy()
    if isinstance(action, Mapping):
        return {key: _as_arrays(value) for key, value in action.items()}
    return tuple(map(_as_arrays, action)) if isinstance(action, tuple) else action


# -- parts of a row -------------------------------------------------------------------------------


def _batch(batch_size: Any) -> torch.Size:
    sizes = () if batch_size is None else batch_size
    sizes = (sizes,) if isinstance(sizes, (int, np.integer)) else tuple(sizes)
    if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in sizes):
        raise ValueError(f"expected batch_size as ints of at least 0, got {batch_size!r}")
    return torch.Size(map(int, sizes))


def _columns(value: Any, batch: torch.Size, path: Path) -> Any:
    """Return a copy as a tensor, or a TensorDict of tensors, with feature dimensions."""
    if is_tensordict(value) or isinstance(value, Mapping):
        fields = dict(value.items())
        for name in fields:
            if not isinstance(name, str):
                raise TypeError(f"key {format_key(path)}: expected names as strings, got {name!r}")
    elif isinstance(value, tuple):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        fields = dict(zip(names, value, strict=True))
    else:
        tensor = _tensor(value, path)
        if tensor.shape[: len(batch)] != batch:
            raise ValueError(
                f"key {format_key(path)}: expected a shape that begins with batch_size "
                f"{list(batch)}, got {list(tensor.shape)}"
            )
        return tensor.unsqueeze(-1) if tensor.ndim == len(batch) else tensor
    columns = {name: _columns(field, batch, (*path, name)) for name, field in fields.items()}
    return new_tensordict(columns, batch, None)


def _tensor(value: Any, path: Path) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return from_numpy(value, path).clone()
    found = from_numbers(value, path)
    if found is None:
        raise TypeError(
            f"key {format_key(path)}: expected a tensor, array, number, or a dict or tuple of "
            f"these, got {type(value).__name__}"
        )
    return found


def _one_each(value: Any, batch: torch.Size, name: str) -> torch.Tensor:
    """Return one number per row, ``[*batch, 1]``."""
    tensor = _tensor(value, ("next", name))
    if tensor.shape not in (batch, (*batch, 1)):
        hint = "; pass batch_size= for several rows" if not batch and tensor.ndim else ""
        raise ValueError(
            f"expected one {name} per row, of shape {list(batch)} or {[*batch, 1]}, got "
            f"{list(tensor.shape)}{hint}"
        )
    return tensor.reshape(*batch, 1)


def _flag(value: Any, batch: torch.Size, name: str) -> torch.Tensor:
    tensor = _one_each(value, batch, name)
    if tensor.dtype != torch.bool:
        raise TypeError(f"expected {name} as bool, got {tensor.dtype}")
    return tensor


def _check_alike(before: Any, after: Any, ndim: int) -> None:
    """Raise SchemaError if two observations differ in keys, shapes or dtypes."""
    try:
        Schema(flatten(before, ndim)[0]).check(flatten(after, ndim)[0])
    except SchemaError as error:
        raise SchemaError(f"the next observation differs from the observation: {error}") from None


_ENDS = ("terminated", "truncated")

_KEYS = {"observation", "reward", *_ENDS}


@dataclass
class _Open:
    """An episode that has not ended.

    Attributes:
        rows: its rows, which are not written yet.
        observation: the latest observation; None if rows come as a whole.
        action: the action for this observation, in a list; None before the response.
    """

    observation: Any = None
    action: list[Any] | None = None
    rows: list[TensorDict] = field(default_factory=list)


class EpisodeAssembler:
    """Makes whole episodes from events of environments, and writes them to a buffer.

    Each environment has an identity, which is any hashable value. ``observe`` takes the latest
    observations, and ``respond`` takes the actions for them. So ``reward`` of an event belongs to
    the last action before it. ``add`` takes finished rows instead.

    Args:
        sink: a buffer, or another object with ``extend``. It gets the rows of episodes, one episode
            after the other.
        min_length: minimum number of rows of an episode. Shorter ones are dropped and counted. With
            None, it is the ``slice_len`` of the buffer's sampler, if that draws only whole slices,
            else 0.
        visible: "complete" writes an episode after its end. "partial" writes each row at once, into
            a storage with ``lane_key``. The identities are then ints, and are stored under that
            key.
        max_open: the maximum number of episodes that have not ended; None for no maximum.

    Attributes:
        dropped: number of episodes that were too short, or that ``drop`` has removed.
        unknown: number of ends of identities without an episode.

    Raises:
        TypeError: the sink has no ``extend``.
        ValueError: a number is out of range, or the sink has no ``lane_key`` although
            ``visible="partial"``, or ``min_length`` is given with it.

    Cost: a few Python steps per event. Open episodes are in memory, and are not saved, because
    their environments begin again after a restart.

    Example:
        >>> import torch
        >>> from replaykit import EpisodeAssembler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> assembler = EpisodeAssembler(rb, min_length=2)
        >>> assembler.observe({"left": {"observation": [0.0]}, "right": {"observation": [5.0]}})
        >>> assembler.respond({"left": 0, "right": 0})
        >>> assembler.observe({"left": {"observation": [1.0], "reward": 10.0}})
        >>> assembler.respond({"left": 1})
        >>> assembler.observe({
        ...     "left": {"observation": [2.0], "reward": 20.0, "terminated": True},
        ...     "right": {"observation": [6.0], "reward": 0.0, "truncated": True}})
        >>> rb[:]["action"].flatten(), rb[:]["next", "reward"].flatten(), assembler.dropped
        (tensor([0, 1]), tensor([10., 20.]), 1)
    """

    def __init__(
        self,
        sink: Any,
        *,
        min_length: int | None = None,
        visible: str = "complete",
        max_open: int | None = None,
    ) -> None:
        one_of("visible", visible, ("complete", "partial"))
        if not callable(getattr(sink, "extend", None)):
            raise TypeError(f"expected a sink with extend, got {type(sink).__name__}")
        self.sink, self.visible = sink, visible
        self._lane_key = getattr(getattr(sink, "storage", None), "lane_key", None)
        if visible == "partial" and (self._lane_key is None or min_length is not None):
            raise ValueError(
                "expected a storage with lane_key, and no min_length, with visible='partial'"
            )
        self.min_length: int = read_value(
            Count, _whole_slice(sink) if min_length is None else min_length, "min_length"
        )
        self.max_open = None if max_open is None else read_value(Positive, max_open, "max_open")
        self.dropped = self.unknown = 0
        self._open: dict[Hashable, _Open] = {}

    def __len__(self) -> int:
        """Return the number of episodes that have not ended."""
        return len(self._open)

    def observe(self, events: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take the latest observations.

        Args:
            events: a mapping with ``observation`` for each identity, as for `transition`. If it has
                nothing else, it begins an episode. Otherwise it also has ``reward``, and
                ``terminated`` or ``truncated`` if True. ``observation`` is then the observation
                after the action.

        An end of an identity without an episode is ignored and counted. The first one issues a
        UserWarning.

        Raises:
            ValueError: an event begins an episode of an identity that has one, or belongs to none,
                or follows no response, or has other keys.
            BufferFull: more than ``max_open`` episodes would be open.

        If the call raises, no event counts.
        """
        begun: dict[Any, _Open] = {}
        made: dict[Any, TensorDict] = {}
        after: dict[Any, Any] = {}
        unknown = 0
        for identity, event in events.items():
            known, first = self._open.get(identity), set(event) == {"observation"}
            if known is None and first:
                begun[identity] = _Open(copy.deepcopy(event["observation"]))
            elif known is None and any(bool(event.get(name, False)) for name in _ENDS):
                unknown += 1
            elif known is None or first:
                raise ValueError(
                    f"identity {identity!r}: expected a first event with only an observation, got "
                    f"{'a second one' if first else sorted(event)}"
                )
            elif known.action is None:
                raise ValueError(
                    f"identity {identity!r}: expected respond() before the next event, got "
                    f"{sorted(event)}"
                )
            else:
                if not {"observation", "reward"} <= set(event) <= _KEYS:
                    raise ValueError(
                        f"identity {identity!r}: expected an event with observation and reward, "
                        f"and possibly terminated or truncated, got {list(event)}"
                    )
                ends = [event.get(name, False) for name in _ENDS]
                after[identity] = copy.deepcopy(event["observation"])
                made[identity] = transition(
                    known.observation, known.action[0], event["reward"], after[identity], *ends
                )
        self._commit(begun, made)
        for identity, observation in after.items():
            if identity in self._open:
                known = self._open[identity]
                known.observation, known.action = observation, None
        if unknown and not self.unknown:
            warnings.warn("an episode ended that never began; it is ignored", stacklevel=2)
        self.unknown += unknown

    def respond(self, actions: Mapping[Any, Any]) -> None:
        """Take the actions for the latest observations.

        Raises:
            ValueError: an identity has no episode, or already has an action for its observation. No
                action counts then.
        """
        for identity in actions:
            known = self._open.get(identity)
            if known is None or known.action is not None or known.observation is None:
                found = "no episode" if known is None else "no observation without an action"
                raise ValueError(f"identity {identity!r}: expected an observation, got {found}")
        for identity, action in actions.items():
            self._open[identity].action = [copy.deepcopy(action)]

    def add(self, rows: Mapping[Any, TensorDict]) -> None:
        """Take a finished row for each identity, as a TensorDict ``[]`` with ``("next", "done")``.

        The first row of an identity begins its episode.

        Raises:
            ValueError: ``observe`` has begun the episode of an identity.
            KeyError: a row has no ``("next", "done")``.
            BufferFull: as for ``observe``. If the call raises, no row counts.
        """
        begun = {identity: _Open() for identity in rows if identity not in self._open}
        for identity in rows:
            if identity in self._open and self._open[identity].observation is not None:
                raise ValueError(f"identity {identity!r}: expected observe() for its episode")
        self._commit(begun, dict(rows))

    def drop(self, identity: Hashable) -> bool:
        """Remove the rows of an open episode; return whether there was one."""
        found = self._open.pop(identity, None) is not None
        self.dropped += found
        return found

    def _commit(self, begun: dict[Any, _Open], made: dict[Any, TensorDict]) -> None:
        """Begin episodes, append rows, and write; change nothing if the write raises."""
        ended = [one for one, row in made.items() if bool(row["next", "done"].any())]
        count = len(self._open) + len(begun) - len(ended)
        if self.max_open is not None and count > self.max_open:
            raise BufferFull(f"expected at most {self.max_open} open episodes, got {count}")
        rows: list[TensorDict] = []
        dropped = 0
        if self.visible == "partial":
            rows = [self._with_lane(identity, row) for identity, row in made.items()]
        else:
            for identity in ended:
                before = self._open[identity].rows if identity in self._open else []
                whole = len(before) + 1 >= self.min_length
                dropped += not whole
                rows += [*before, made[identity]] if whole else []
        if rows:
            self.sink.extend(torch.stack(rows))
        self.dropped += dropped
        self._open.update(begun)
        for identity, row in made.items():
            if identity in ended:
                del self._open[identity]
            elif self.visible == "complete":
                self._open[identity].rows.append(row)

    def _with_lane(self, identity: Any, row: TensorDict) -> TensorDict:
        if type(identity) is not int:
            raise ValueError(
                f"expected an int as identity with visible='partial', got {identity!r}"
            )
        return row.copy().set(self._lane_key, torch.tensor(identity))


def _whole_slice(sink: Any) -> int:
    """Return the length of the slices that a buffer's sampler draws, if all are whole."""
    sampler = getattr(sink, "sampler", None)
    strict = getattr(sampler, "strict_length", False)
    return (getattr(sampler, "slice_len", None) or 0) if strict else 0
