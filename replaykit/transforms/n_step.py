"""Sum rewards over several steps, when rows are read or when they are written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import is_tensordict, lookup
from replaykit.declared import Rule, decode_state
from replaykit.episodes import Needs
from replaykit.keywords import one_of, whole_number
from replaykit.storages.row_kernels import Led, StepsPlan
from replaykit.structure import Path
from replaykit.ted import (
    EPISODE_KEYS,
    NEXT_FLAGS,
    REWARD,
    TERMINATED,
    end_flags,
    format_key,
    unravel,
)
from replaykit.transforms.batch_values import (
    nearest_real,
    rows_ahead,
    set_all,
    set_groups,
    set_real,
)
from replaykit.transforms.discounting import (
    bootstrap_of,
    discounted_sums,
    is_set,
    one_step_key,
    powers,
    steps_and_gamma,
    sum_dtype,
)
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    over_features,
    require_all,
)
from replaykit.transforms.transform import Transform

_Rows = Annotated[Any, Rule("a TensorDict", is_tensordict)]


@dataclass(frozen=True)
class _HeldRows:
    held: _Rows | None


class NStepWriting(Transform):
    """A transform that sums rewards over up to ``n`` steps before rows are stored.

    ``NStep(..., when="write")`` creates this transform. Stored rows have the same values under the
    same keys as ``NStep`` computes on read. So a row can be stored only after the ``n - 1`` rows
    after it, or the end of its episode, have been written. Until then the transform holds the row
    back. The transform holds back at most ``n - 1`` rows per lane. With several lanes, it holds
    back a time step until the rows of this step are complete in all lanes. Checkpoints include
    these rows. The results do not depend on the split of a stream into calls.

    ``ReplayBuffer.flush()`` stores the rows held back. Their sums are cut short, as at the newest
    row of an episode. The call also ends the stream, so sums do not continue with later rows.
    ``ReplayBuffer.cut()`` does the same. So does the first write after ``loads`` or
    ``load_state_dict``, because no sum crosses a restart. ``ReplayBuffer.empty()`` drops the rows
    held back.

    An episode ends at a row with ``done``, ``terminated`` or ``truncated`` under ``next``, and
    between rows with different trajectory ids (``("collector", "traj_ids")``, ``episode``,
    ``seed``). Several stored rows carry the flags of the episode's last row. Therefore, use
    ``when="read"`` if you sample slices. Do not replace rows by ``rb[i] = rows``, because those
    rows also pass through this transform.

    Sums follow the order of writes. A buffer refuses this transform for a storage with
    ``lane_key``, whose streams may be written in turn. Use ``when="read"`` there.

    Args:
        n: largest number of steps.
        gamma: discount of one step, in ``[0, 1]``.
        reward_key: key of the rewards to sum.
        time_dim: the time dimension of written batches; the other batch dimensions are lanes.

    Raises:
        ValueError: ``n`` is below 1, or ``gamma`` is outside ``[0, 1]``; on write, rows do not fit
            the rows held back, or ``time_dim`` is not a dimension of the rows.
        TypeError: an argument is not a key or a number; on write, the data is not a TensorDict, or
            rewards are complex.
        KeyError: on write, the reward is absent. After an error on write nothing has changed.

    Cost: ``log2(n)`` passes over the rewards, and one pass over the leaves under ``next``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, NStep, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9),
        ...                   transform=NStep(2, 0.5, when="write"))
        >>> row = TensorDict({"next": {"reward": torch.ones(1, 1),
        ...     "done": torch.zeros(1, 1, dtype=torch.bool)}}, [1])
        >>> rb.extend(row), rb.extend(row)
        (tensor([], dtype=torch.int64), tensor([0]))
        >>> rb.flush(), rb["next", "reward"].squeeze(-1)
        (tensor([1]), tensor([1.5000, 1.0000]))
    """

    ordered = False  # the state changes only with writes

    def __init__(
        self,
        n: int,
        gamma: float = 0.99,
        *,
        reward_key: Any = ("next", "reward"),
        time_dim: int = -1,
    ) -> None:
        self.n, self.gamma = steps_and_gamma(n, gamma)
        whole_number("time_dim", time_dim)
        self.reward_key = unravel(reward_key)
        self.one_step_key = one_step_key(self.reward_key)
        self.time_dim = time_dim
        self._held: Any = None

    def check_parts(self, storage: Any, writer: Any) -> None:
        """Raise ValueError if rows of several streams may be written in turn."""
        lane_key = getattr(storage, "lane_key", None)
        if lane_key is not None:
            raise ValueError(
                "NStep(when='write') sums in the order of writes, and expected a storage without "
                f"lane_key, got {format_key(lane_key)}; when='read' keeps its streams apart"
            )

    def forward(self, data: Any) -> Any:
        """Return a batch unchanged, because stored rewards are already sums."""
        return data

    @torch.no_grad()
    def inv(self, data: Any) -> Any:
        """Return the rows that are now complete, in the order of time, or None."""
        if not is_tensordict(data):
            raise TypeError(f"expected a TensorDict with rewards, got {type(data).__name__}")
        dim = self._time_of(data)
        rows = data if self._held is None else self._with_held(data, dim)
        if not isinstance(lookup(rows, self.reward_key), torch.Tensor):
            raise KeyError(f"{self!r} expected the key {format_key(self.reward_key)}")
        found, ready = self._summed(rows, dim, closing=False)
        length = rows.batch_size[dim]
        held = rows.narrow(dim, ready, length - ready).clone() if ready < length else None
        made = found if ready else None
        self._held = held  # set last, so that an error above changes nothing
        return made

    @torch.no_grad()
    def flush(self) -> Any:
        """Release the rows held back, and return them with sums cut short.

        Return None if no rows are held back. ``ReplayBuffer.flush()`` also stores the rows.
        """
        rows = self._held
        if rows is None:
            return None
        found, _ = self._summed(rows, self._time_of(rows), closing=True)
        self._held = None
        return found

    def empty(self) -> None:
        """Drop the rows held back. ``ReplayBuffer.empty()`` calls this."""
        self._held = None

    def _time_of(self, data: Any) -> int:
        dims = data.batch_dims
        if not -dims <= self.time_dim < dims:
            raise ValueError(
                f"time_dim: expected a batch dimension of rows {list(data.batch_size)}, got "
                f"{self.time_dim}"
            )
        return self.time_dim % dims

    def _with_held(self, data: Any, dim: int) -> Any:
        """Join the rows held back and new rows. Raises ValueError if they do not fit."""
        held = self._held
        old, new = _layout(held, dim), _layout(data, dim)
        if old != new:
            names = [format_key(key) for key in {**old, **new} if old.get(key) != new.get(key)]
            raise ValueError(
                f"expected rows like the {held.batch_size[dim]} held back by {self!r}, got other "
                f"dtypes, shapes or keys under {', '.join(names)}"
            )
        return torch.cat([held, data.to(held.device) if held.device else data], dim)

    def _summed(self, rows: Any, dim: int, *, closing: bool) -> tuple[Any, int]:
        """Return the rows that are complete in all lanes, with sums, and their number."""
        batch_dims = rows.batch_dims
        leaves = {unravel(key): leaf.movedim(dim, 0) for key, leaf in rows.items(True, True)}
        length = rows.batch_size[dim]
        ended = _ended(leaves, batch_dims)
        time = torch.arange(length, device=ended.device)
        time = time.view(-1, *[1] * (ended.ndim - 1))
        stop = torch.where(ended, time, length - 1)
        stop = stop.flip(0).cummin(0).values.flip(0)
        ahead = stop - time
        known = (ahead >= self.n - 1) | ended.gather(0, stop)
        ready = length
        if not closing:
            known = known.reshape(length, -1).all(1)
            ready = int(known.long().cumprod(0).sum())
        reward = leaves[self.reward_key]
        sums = discounted_sums(reward.to(sum_dtype(reward)), ahead, self.gamma, self.n)[:ready]
        steps = ahead.clamp(max=self.n - 1)[:ready]
        last = time[:ready] + steps
        made = rows.narrow(dim, 0, ready).copy()
        values: dict[Path, torch.Tensor] = {
            key: _rows_at(leaf, last)
            for key, leaf in leaves.items()
            if key[0] == "next" and key != self.reward_key
        }
        terminated = _terminated(leaves, ended)
        values |= {
            self.reward_key: sums,
            self.one_step_key: reward[:ready],
            ("discount",): (self.gamma ** (steps + 1).double()).to(sums.dtype).unsqueeze(-1),
            ("steps_used",): (steps + 1).unsqueeze(-1),
            ("bootstrap",): ~is_set(_rows_at(terminated, last), batch_dims).unsqueeze(-1),
        }
        for key, value in values.items():
            made.set(key, value.movedim(0, dim))
        return made, ready

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the rows held back."""
        return {"held": None if self._held is None else self._held.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load rows held back; raise ValueError for the state of another transform."""
        held = decode_state(_HeldRows, state_dict, "the state of an NStep").held
        self._held = None if held is None else held.clone()

    def __repr__(self) -> str:
        key = self.reward_key
        shown = "" if key == REWARD else f", reward_key={format_key(key)}"
        return f"NStep({self.n}, gamma={self.gamma:g}{shown}, when='write')"


def _ended(leaves: dict[Path, torch.Tensor], batch_dims: int) -> torch.Tensor:
    """Return a mask of the rows that end an episode, bool ``[T, *lanes]``."""
    shape = next(iter(leaves.values())).shape[:batch_dims]
    device = next(iter(leaves.values())).device
    ended = torch.zeros(shape, dtype=torch.bool, device=device)
    for key in end_flags(leaves):
        ended |= is_set(leaves[key], batch_dims)
    for key in EPISODE_KEYS:
        ids = leaves.get(key)
        if ids is not None:
            ended[:-1] |= is_set(ids[1:] != ids[:-1], batch_dims)
    return ended


def _terminated(leaves: dict[Path, torch.Tensor], ended: torch.Tensor) -> torch.Tensor:
    """Return a mask of terminated rows; without the flag, ``done & ~truncated``."""
    flags = {key[-1]: is_set(leaves[key], ended.ndim) for key in end_flags(leaves)}
    if "terminated" in flags:
        return flags["terminated"]
    terminated = flags.get("done", torch.zeros_like(ended))
    return terminated & ~flags["truncated"] if "truncated" in flags else terminated


def _rows_at(leaf: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Return values of ``[T, *lanes, *F]`` at times ``[t, *lanes]``, lane by lane."""
    if time.ndim == 1:
        return leaf[time]
    at = time.reshape(*time.shape, *[1] * (leaf.ndim - time.ndim))
    return leaf.gather(0, at.expand(*time.shape, *leaf.shape[time.ndim :]))


def _layout(rows: Any, dim: int) -> dict[Path, Any]:
    """Return dtype and shape of the leaves, without the dimension of time."""
    batch = list(rows.batch_size)
    del batch[dim]
    return {
        unravel(key): (leaf.dtype, tuple(batch), tuple(leaf.shape[rows.batch_dims :]))
        for key, leaf in rows.items(True, True)
    }


Array = np.ndarray[Any, Any]

_DISCOUNT, _STEPS, _BOOTSTRAP = ("discount",), ("steps_used",), ("bootstrap",)


_TABLE_STEPS = 4096
"""Discounts are precomputed for up to this many steps."""


class _Fetched(NamedTuple):
    """The rows that ``fetch`` reads if ``Surroundings.lead`` does not fill the batch.

    ``steps`` is the number of steps after each row, ``[B]``. ``rewards`` has the rewards ``[B, m,
    *F]``, or their sums. ``last`` has the leaves ``keys`` under ``next`` of the last step.
    """

    steps: Array
    rewards: Around | Led
    last: Around | None
    keys: list[Path]


class NStep(HistoryTransform):
    """A transform that sums rewards over up to ``n`` steps.

    ``next`` comes from the last of these steps. Suppose row e is the last stored row of an episode,
    and ``m = min(n, e - t + 1)``. Then row t gets these values:

        ("next", "reward")    r[t] + gamma * r[t+1] + ... + gamma ** (m-1) * r[t+m-1]
        ("next", ...)         the other keys under ``next``, from row t+m-1
        "discount"            gamma ** m, [B, 1], in the dtype of the sum
        "steps_used"          m, int64 [B, 1]
        "bootstrap"           bool [B, 1]: False if row t+m-1 terminated
        ("next", "reward_1")  the reward of row t alone

    A target is then ``reward + discount * bootstrap * value(next)``. This formula also holds at
    time limits, at cuts and at the newest row of an open episode. No sum crosses the end of an
    episode, a cut, a restart, or the write seam of a ring. If a reward has several numbers, each is
    summed separately. Floating rewards keep their dtype. Other rewards are converted to torch's
    default dtype.

    If ``("next", "terminated")`` is not stored, the transform finds the rows that terminated in the
    episode index.

    In a chain, put this transform before ``StackFrames`` and ``PreviousStep``. Those transforms
    then use the rows that ``next`` comes from. Put this transform after ``HindsightGoal``, so that
    it sums the new rewards and uses the new flags.

    Args:
        n: largest number of steps; with ``per_step``, None for no limit.
        gamma: discount of one step, in ``[0, 1]``.
        per_step: if True, sum inside the windows of the batch. Each row sums the rewards up to the
            last real row of its episode in its window, and bootstraps from that last row. The
            leaves under ``next`` of the last row, except reward and flags, are copied to ``"boot"``
            of each row. In ``next`` only the reward changes. With ``n`` a sum has at most ``n``
            rows.
        on_open: treatment of the newest rows of an open episode. "shorten": sum the stored rows.
            "exclude": do not draw these rows until ``n`` rows are stored or the episode ends.
        reward_key: key of the rewards to sum.
        when: "read": sum on read, so that stored rows do not change. "write": create an
            ``NStepWriting`` instead, which changes rows before they are stored.

    Raises:
        ValueError: ``n`` is below 1, ``gamma`` is outside ``[0, 1]``, ``on_open`` or ``when`` is
            unknown, or arguments cannot be combined; on read, an earlier transform has made leaves
            under ``next``, or with ``per_step`` rows of a window do not follow each other.
        TypeError: an argument is not a key or a number; on read, rewards are complex.
        KeyError: on read, the reward is absent.

    Cost: for each row, a read of ``n`` rewards and one ``next``. With ``per_step``, nothing is
    read, and the sums take ``log2(T)`` passes over the rewards of the batch.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, NStep, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=NStep(3, 0.5))
        >>> ends = torch.tensor([False, False, True, False])
        >>> _ = rb.extend(TensorDict({"next": {"reward": torch.tensor([8.0, 4.0, 2.0, 1.0]),
        ...     "terminated": ends, "done": ends}}, [4]))
        >>> batch = rb[:]
        >>> batch["next", "reward"].squeeze(-1), batch["steps_used"].squeeze(-1)
        (tensor([10.5000,  5.0000,  2.0000,  1.0000]), tensor([3, 2, 1, 1]))
        >>> batch["discount"].squeeze(-1), batch["bootstrap"].squeeze(-1)
        (tensor([0.1250, 0.2500, 0.5000, 0.5000]), tensor([False, False, False,  True]))
    """

    uses_random = False

    @overload
    def __new__(cls, *args: Any, when: Literal["read"] = "read", **kwargs: Any) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]  # a transform that works while rows are written
        cls, *args: Any, when: Literal["write"], **kwargs: Any
    ) -> NStepWriting: ...
    def __new__(cls, *args: Any, when: str = "read", **kwargs: Any) -> Any:
        if one_of("when", when, ("read", "write")) == "write":
            return NStepWriting(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        n: int | None = None,
        gamma: float = 0.99,
        per_step: bool = False,
        on_open: str = "shorten",
        reward_key: Any = ("next", "reward"),
        *,
        when: str = "read",
    ) -> None:
        self.per_step = bool(per_step)
        steps, self.gamma = steps_and_gamma(1 if n is None and per_step else n, gamma)
        self.n = None if n is None else steps
        one_of("on_open", on_open, ("shorten", "exclude"))
        if per_step and on_open == "exclude":
            raise ValueError("on_open: expected 'shorten' with per_step, which uses only rows of a "
                             "window, got 'exclude'")  # fmt: skip
        self.on_open = on_open
        self.needs = Needs(open_future=steps - 1) if on_open == "exclude" else Needs()
        self.reward_key = unravel(reward_key)
        self.one_step_key = one_step_key(self.reward_key)
        made = {self.reward_key, self.one_step_key, _DISCOUNT, _STEPS, _BOOTSTRAP}
        self.changes = frozenset(made if per_step else made | set(NEXT_FLAGS))
        # One tuple, because several threads may draw from buffers with other schemas.
        self._known: tuple[Collection[Path], list[Path], dict[bool, StepsPlan]] | None = None
        self._powers: tuple[float, ...] | None = None
        if steps <= _TABLE_STEPS:
            found = np.power(self.gamma, np.arange(1, steps + 1), dtype=np.float64)
            self._powers = tuple(found.tolist())

    # -- under the lock -----------------------------------------------------------------------

    def fetch(self, around: Surroundings) -> _Fetched | Led | None:
        """Read the rewards of the steps, and ``next`` of the last step."""
        if self.n is None or self.per_step:
            return None
        if around.next_made:
            raise ValueError(
                f"expected {self!r} before {around.next_made[-1]!r}, as it would overwrite the "
                "'next' leaves of that transform; change their order"
            )
        if around.next_time is not None:
            raise ValueError(f"expected one NStep in a chain, got {self!r} after another")
        led = None
        if self._powers is not None and not around.relabels:
            led = around.lead(self._plan_for(around.keys, fills=around.rows is not None))
        if led is not None and around.rows is not None:
            around.next_time = led.ends
            return led
        if led is not None:
            steps = led.ends - around.time
            rewards: Around | Led = led
        else:
            steps = np.minimum(around.last - around.time, self.n - 1)
            relabelled = frozenset().union(*(one.changes for one, _ in around.relabels))
            if not relabelled.isdisjoint(NEXT_FLAGS):
                steps = self._ended_earlier(around, steps)
            rewards = around.fetch([self.reward_key], _times(around, steps))
        last = around.next_time = around.time + steps
        keys = self._of_schema(around.keys)[0]
        return _Fetched(steps, rewards, around.fetch(keys, last) if keys else None, keys)

    def _of_schema(self, keys: Collection[Path]) -> tuple[list[Path], dict[bool, StepsPlan]]:
        """Return the stored keys that come from the last step, and the plans of a schema."""
        known = self._known
        if known is None or known[0] is not keys:
            found = [key for key in keys if key[0] == "next" and key != self.reward_key]
            known = self._known = keys, found, {}
        return known[1:]

    def _plan_for(self, keys: Collection[Path], *, fills: bool) -> StepsPlan:
        """Return the plan for the storage; the same object while its keys are the same."""
        taken, plans = self._of_schema(keys)
        if fills not in plans:
            assert self._powers is not None
            flag = TERMINATED if fills and TERMINATED in taken else None
            leaves = tuple(taken) if fills else ()
            plans[fills] = StepsPlan(self.reward_key, flag, leaves, self.gamma, self._powers)
        return plans[fills]

    @staticmethod
    def _ended_earlier(around: Surroundings, steps: Array) -> Array:
        """Return fewer steps for rows whose episode an earlier transform has shortened."""
        flags = [key for key in NEXT_FLAGS if key in around.keys]
        if not flags:
            return steps
        seen = around.seen(around.fetch(flags, _times(around, steps)))
        ended = torch.stack([is_set(seen[key], 2) for key in flags]).any(0).cpu().numpy()
        return np.minimum(np.where(ended.any(1), ended.argmax(1), steps), steps)

    # -- without the lock ---------------------------------------------------------------------

    def apply(self, data: Any, fetched: _Fetched | Led | None, around: Surroundings) -> Any:
        """Replace reward and ``next``, and add the other parts of a target."""
        own = lookup(data, self.reward_key)
        if own is None:
            require_all(data, [self.reward_key], self)
        if fetched is None:
            return self._apply_inside(data, own, around)
        if isinstance(fetched, Led):
            return self._apply_led(data, own, fetched, around)
        steps, rewards = fetched.steps, fetched.rewards
        if isinstance(rewards, Led):
            sums = rewards.sums
        else:
            sums = self._summed(around.seen(rewards)[self.reward_key], steps)
        last: dict[Path, torch.Tensor] = {}
        if fetched.last is not None:
            seen = around.seen(fetched.last)
            last = {key: seen[key] for key in fetched.keys}
        bootstrap = bootstrap_of(last.get(TERMINATED), around, around.time + steps, own)
        set_real(data, last | self._target(own, sums, steps, bootstrap), around.mask)
        return data

    def _target(
        self, own: torch.Tensor, sums: torch.Tensor, steps: Array, bootstrap: torch.Tensor
    ) -> dict[Path, torch.Tensor]:
        return {
            self.reward_key: sums,
            self.one_step_key: own,
            _DISCOUNT: powers(self.gamma, steps + 1, sums),
            _STEPS: as_tensor_like(steps[:, None] + 1, sums),
            _BOOTSTRAP: bootstrap,
        }

    def _apply_led(self, data: Any, own: torch.Tensor, led: Led, around: Surroundings) -> Any:
        """Add the parts of a target to a batch that has the last step's ``next`` already."""
        bootstrap = led.open
        if bootstrap is None:
            bootstrap = bootstrap_of(lookup(data, TERMINATED), around, led.ends, own)
        inner = {self.reward_key[-1]: led.sums, self.one_step_key[-1]: own}
        made = {"discount": led.discounts, "steps_used": led.used, "bootstrap": bootstrap}
        above = self.reward_key[:-1]
        set_groups(data, {above: inner, (): made} if above else {(): {**inner, **made}})
        return data

    def _summed(self, rewards: torch.Tensor, steps: Array) -> torch.Tensor:
        """Return the discounted sum of the first ``steps[b] + 1`` rewards of each row b.

        The rewards are ``[B, m, *F]``.
        """
        rewards = rewards.to(sum_dtype(rewards))
        width = rewards.shape[1]
        if width == 1 or not self.gamma:
            return rewards[:, 0]
        beyond = as_tensor_like(steps[:, None] < np.arange(width), rewards)
        # Later entries repeat the last reward, which may be infinite. So mask it, not multiply by
        # 0.
        exact = rewards.to(torch.float64, copy=True).masked_fill_(over_features(beyond, rewards), 0)
        factors = as_tensor_like(np.power(self.gamma, np.arange(width)), exact)
        return exact.mul_(over_features(factors, exact[0])).sum(1).to(rewards.dtype)

    def _apply_inside(self, data: Any, own: torch.Tensor, around: Surroundings) -> Any:
        """Sum inside the windows of the batch (``per_step``)."""
        done = [
            data.get(key) for key in NEXT_FLAGS if key in around.keys and key in data.keys(True)
        ]
        ended = torch.stack([is_set(flag, 1) for flag in done]).any(0) if done else None
        ahead = rows_ahead(around, None if ended is None else ended.cpu().numpy())
        reach = as_tensor_like(ahead, own)
        sums = discounted_sums(own.to(sum_dtype(own)), reach, self.gamma, self.n)
        steps = ahead if self.n is None else np.minimum(ahead, self.n - 1)
        last = as_tensor_like(np.arange(len(steps)) + steps, own)
        boot = as_tensor_like((np.arange(len(steps)) + steps)[nearest_real(around)], own)
        terminated = lookup(data, TERMINATED)
        flag = None if terminated is None else terminated[last]
        bootstrap = bootstrap_of(flag, around, around.time + steps, own)
        skipped = {*NEXT_FLAGS, self.reward_key, self.one_step_key}
        found = {
            ("boot", *path[1:]): leaf[boot]
            for path, leaf in ((unravel(key), leaf) for key, leaf in data.items(True, True))
            if path[0] == "next" and path not in skipped
        }
        set_real(data, self._target(own, sums, steps, bootstrap), around.mask)
        set_all(data, found)  # this also sets "boot" at padding
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def __repr__(self) -> str:
        parts = [] if self.n is None else [str(self.n)]
        parts.append(f"gamma={self.gamma:g}")
        parts += ["per_step=True"] if self.per_step else []
        parts += ["on_open='exclude'"] if self.on_open == "exclude" else []
        if self.reward_key != REWARD:
            parts.append(f"reward_key={format_key(self.reward_key)}")
        return f"NStep({', '.join(parts)})"


def _times(around: Surroundings, steps: Array) -> Array:
    """Return the times of all steps of each row, ``[B, m]``; the last time repeats."""
    width = int(steps.max()) + 1 if len(steps) else 1
    return around.time[:, None] + np.minimum(np.arange(width), steps[:, None])
