"""Sum discounted rewards, and store Monte-Carlo returns when episodes end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from replaykit._compat import is_tensordict, lookup, new_tensordict
from replaykit.declared import Positive, read_value
from replaykit.episodes import EndReason, EpisodeIndex
from replaykit.keywords import as_number, as_share, one_of
from replaykit.storages import Storage
from replaykit.storages.change_log import ChangeKind
from replaykit.storages.column_storage import ColumnStorage, with_episodes
from replaykit.storages.indexing import elements_of
from replaykit.structure import Path
from replaykit.ted import RETURN_VALID, TERMINATED, Key, end_flags, format_key, unravel
from replaykit.transforms.batch_values import last_real, rows_until, set_all, set_real
from replaykit.transforms.history import (
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    over_features,
    require_all,
)
from replaykit.transforms.trajectory_edits import EditedEpisodes
from replaykit.transforms.transform import Transform

Array = np.ndarray[Any, Any]


def steps_and_gamma(n: Any, gamma: Any) -> tuple[int, float]:
    """Return both arguments as numbers.

    Raises:
        TypeError: ``gamma`` is not a number.
        ValueError: ``n`` is not an int of at least 1, or ``gamma`` is outside ``[0, 1]``.
    """
    read_value(Positive, n, "n")
    return n, as_share("gamma", gamma)


def one_step_key(reward_key: Path) -> Path:
    """Return the key of the one-step reward: the given key with the suffix ``_1``."""
    return (*reward_key[:-1], f"{reward_key[-1]}_1")


def sum_dtype(reward: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums of rewards.

    Floating rewards keep their dtype. Other rewards are converted to torch's default dtype.

    Raises:
        TypeError: the rewards are complex.
    """
    if reward.is_complex():
        raise TypeError(f"expected real rewards, got {reward.dtype}")
    return reward.dtype if reward.dtype.is_floating_point else torch.get_default_dtype()


def is_set(flag: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a bool mask of the rows in which a flag is set.

    The mask has the first ``rows`` dimensions of the flag. A flag of several numbers is set if any
    of these numbers is not zero.
    """
    found = flag if flag.dtype is torch.bool else flag != 0
    if found.ndim == rows:
        return found
    found = found.flatten(rows)
    return found[..., 0] if found.shape[-1] == 1 else found.any(-1)


def powers(gamma: float, steps: Array, like: torch.Tensor) -> torch.Tensor:
    """Return ``gamma ** steps``, ``[..., 1]``, with the dtype and device of a leaf."""
    values = np.power(gamma, steps, dtype=np.float64)[..., None]
    if like.dtype is torch.float32:
        values = values.astype(np.float32)
    return torch.from_numpy(values).to(like.device, like.dtype)


def discounted_sums(
    reward: torch.Tensor, ahead: torch.Tensor, gamma: float, n: int | None
) -> torch.Tensor:
    """Return the discounted sum of up to ``n`` rewards that begins at each row.

    The sum of row t adds ``gamma ** k * reward[t + k]`` for k = 0, 1, ...

    Args:
        reward: floating, ``[T, *lanes, *F]``, in the order of time.
        ahead: int64 ``[T, *lanes]``, the largest number of later rows that each sum includes.
        n: the largest number of rewards in a sum; None: no limit except ``ahead``.

    Cost: ``log2(n)`` passes over the rewards. Each pass doubles the length of the sums: 1, 2, 4,
    ... rows.
    """
    longest = int(ahead.max()) + 1 if ahead.numel() else 1
    left = longest if n is None else min(n, longest)
    if not gamma or left <= 1:
        return reward.clone()
    block = reward.float() if reward.dtype.itemsize < 4 else reward
    reach = over_features(ahead, reward)
    sums: torch.Tensor | None = None
    size = 1
    while True:
        if left & 1:
            sums = block if sums is None else _joined(block, sums, size, reach, gamma)
        left >>= 1
        if not left:
            assert sums is not None
            return sums.to(reward.dtype)
        block = _joined(block, block, size, reach, gamma)
        size *= 2


def _joined(
    first: torch.Tensor, then: torch.Tensor, size: int, reach: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Add to each sum over ``size`` rows the sum that begins ``size`` rows later."""
    later = torch.zeros_like(then)
    later[:-size] = then[size:]
    # Select values instead of multiplying by 0, because rewards of other episodes may be infinite.
    return first + gamma**size * torch.where(reach >= size, later, torch.zeros_like(later))


def discounted_returns(values: Array, stops: Array, gamma: float) -> Array:
    """Add to each row the discounted values of later rows, up to the next stop.

    Args:
        values: float64 ``[n, *F]``; changed in place and returned.
        stops: bool ``[n]``, True at the last row of a sum. ``stops`` must be True at the very last
            row.

    Cost: O(n log m) with m rows between two stops. Every pass doubles the number of rows in a sum.

    Example:
        >>> import numpy as np
        >>> from replaykit.transforms.discounting import discounted_returns
        >>> discounted_returns(np.array([1.0, 2.0, 4.0]), np.array([False, False, True]), 0.5)
        array([3., 4., 4.])
    """
    rest, reach = rows_until(stops), 1
    longest = int(rest.max(initial=0))
    while reach <= longest and gamma > 0:
        on = np.nonzero(rest >= reach)[0]
        values[on] += gamma**reach * values[on + reach]
        reach *= 2
    return values


def bootstrap_of(
    flag: torch.Tensor | None, around: Surroundings, last: Array, like: torch.Tensor
) -> torch.Tensor:
    """Return a mask of the rows ``last`` that did not terminate, bool ``[B, 1]``.

    ``flag`` is their terminated flag. Without it, the mask follows from the episode index.
    """
    if flag is None:
        ended = (last == around.last) & (around.reason == int(EndReason.TERMINATED))
        return as_tensor_like(~ended[:, None], like)
    if flag.dtype is torch.bool and flag.shape[1:] == (1,):
        return ~flag
    return ~is_set(flag, 1).unsqueeze(-1)


class Bootstrap(HistoryTransform):
    """A transform that adds ``"bootstrap"``, the mask for the value of the next state.

    The mask is bool ``[B, 1]``. It is False at rows where ``boundary`` is set, because the episode
    terminated there. It is True at time limits, at cuts and at the newest row of an episode, even
    if ``done`` is set. ``NStep`` also writes ``"bootstrap"``, so use this transform for one-step
    losses only. If ``("next", "terminated")`` is not stored, the mask is False at the rows that
    terminated according to the episode index.

    Args:
        boundary: the flag that ends bootstrapping, for example a separate flag for a lost life.
        per_window: give all rows of a window the value at its last real row. This value is False
            only if the window reaches the end of an episode that terminated.

    Raises:
        TypeError: ``boundary`` is not a key.
        KeyError: on read, a custom ``boundary`` is absent.

    Cost: one pass over the column ``boundary``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Bootstrap, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Bootstrap())
        >>> flags = torch.tensor([[False], [True]])
        >>> _ = rb.extend(TensorDict({"next": {"terminated": flags, "done": flags}}, [2]))
        >>> rb[:]["bootstrap"].squeeze(-1)
        tensor([ True, False])
    """

    uses_random = False

    def __init__(self, boundary: Any = TERMINATED, per_window: bool = False) -> None:
        self.boundary = unravel(boundary)
        self.per_window = bool(per_window)
        self.changes = frozenset({("bootstrap",)})

    def apply(self, data: Any, fetched: None, around: Surroundings) -> Any:
        """Add the mask."""
        flag = lookup(data, self.boundary)
        if flag is None and self.boundary != TERMINATED:
            raise KeyError(f"{self!r}: expected the key {format_key(self.boundary)} in the batch")
        time = around.time if around.next_time is None else around.next_time
        bootstrap = bootstrap_of(flag, around, time, next(iter(data.values(True, True))))
        if self.per_window:
            set_all(data, {("bootstrap",): bootstrap[as_tensor_like(last_real(around), bootstrap)]})
        else:
            set_real(data, {("bootstrap",): bootstrap}, around.mask)
        return data

    def __repr__(self) -> str:
        parts = [] if self.boundary == TERMINATED else [format_key(self.boundary)]
        parts += ["per_window=True"] if self.per_window else []
        return f"Bootstrap({', '.join(parts)})"


_NEED: Final = ", which ReturnToGo needs"


class ReturnToGo(Transform):
    """A transform that stores with every row its discounted return.

    The return is the discounted sum of rewards from the row to the end of its episode. The
    transform adds two columns to written rows: ``key``, filled with ``default``, and
    ``return_valid``, filled with False. When an episode ends, its stored rows get
    ``G_t = sum_k gamma^(k-t) * reward_k``, for k from t to the last row. Their ``return_valid``
    becomes True. Samples and checkpoints have both columns.

    Rows of open episodes, and of episodes that were cut without a flag, keep the default. But rows
    up to the last ``boundary`` of any episode have their return once the boundary is written.

    If stored flags change, or rows change by ``rb[i] = ...``, the next write recomputes all
    returns. If only stored rewards change, returns are not recomputed. After a
    ``TrajectoryTransform``, reading a batch gives the returns of the edited episodes.

    Returns have the shape of the rewards. They have the floating dtype of the rewards, or torch's
    default dtype for integer rewards. ``return_valid`` is bool ``[N, 1]``. Sums are computed in
    float64.

    Args:
        gamma: discount, in [0, 1].
        reward_clip: ``(min, max)``, the range to which rewards are clipped before they are summed.
            Pass the range here even if another transform clips rewards on read.
        default: value for rows that have no return yet. If returns are used as lower bounds, choose
            a default below all possible returns, or use ``return_valid``.
        boundary: key of a flag that ends sums. The sum of a row with this flag is its own reward.
            The next row starts a new sum. The rows up to it are known at once, whatever ends the
            episode later. Use ``boundary`` for signals that do not end an episode,
            such as the loss of a life.
        on_truncated: "default": rows of truncated episodes keep the default. "bootstrap": their
            sums have the additional term ``gamma^(n-t) * V``. V is the value of the state after the
            last row.
        key: key of the returns.
        value: the source of V, with "bootstrap". It is a stored key, which is read at the last row.
            Or it is a function of a TensorDict ``[k]`` that contains ``next`` of the last rows of k
            episodes. V has the shape of the rewards, ``[k, *F]``. The buffer calls the function
            with its lock held.
        reward: key of the rewards, ``[*F]`` per row; each number is summed separately.

    Raises:
        TypeError: an argument is not a number or a key; on write, data is not a TensorDict, or
            rewards are complex.
        ValueError: ``gamma`` is outside [0, 1]; ``reward_clip`` has min above max; ``on_truncated``
            is unknown; "bootstrap" is given without ``value``, or ``value`` without "bootstrap";
            values and rewards differ in shape.
        KeyError: on write, rewards, a ``boundary`` other than the default one, or the key of
            ``value`` is absent.
        RuntimeError: on write, the storage has no episode index.
        ValueError: when a buffer is made, its rows are those of a data set without returns.

    Cost: a check of each written row. When an episode of n rows ends, its returns take O(n log n).
    Episodes that end in the same write are computed together.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReturnToGo
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=ReturnToGo(gamma=0.5))
        >>> done = torch.tensor([[False], [False], [True], [False]])
        >>> _ = rb.extend(TensorDict({"next": {
        ...     "reward": torch.tensor([[1.0], [2.0], [4.0], [8.0]]),
        ...     "terminated": done, "done": done}}, [4]))
        >>> rb[:]["episode_return"].squeeze(-1), rb[:]["return_valid"].squeeze(-1)
        (tensor([3., 4., 4., 0.]), tensor([ True,  True,  True, False]))
    """

    def __init__(
        self,
        gamma: float,
        reward_clip: tuple[float, float] | None = None,
        default: float = 0.0,
        boundary: Any = TERMINATED,
        on_truncated: str = "default",
        key: Any = "episode_return",
        *,
        value: Any = None,
        reward: Any = ("next", "reward"),
    ) -> None:
        self.gamma = as_share("gamma", gamma)
        self.reward_clip = None if reward_clip is None else _checked_clip(reward_clip)
        self.default = as_number("default", default)
        self.boundary = unravel(boundary)
        one_of("on_truncated", on_truncated, ("default", "bootstrap"))
        if (value is None) == (on_truncated == "bootstrap"):
            raise ValueError(
                "expected value with on_truncated='bootstrap', and None otherwise, got "
                f"on_truncated={on_truncated!r} and value={value!r}"
            )
        self.on_truncated = on_truncated
        self.key, self.reward = unravel(key), unravel(reward)
        if self.key in (RETURN_VALID, self.reward):
            raise ValueError(
                f"key: expected neither the key of the rewards nor 'return_valid', got "
                f"{format_key(self.key)}"
            )
        self.value: Callable[[Any], Any] | Key | None = None
        if value is not None:
            self.value = value if callable(value) else unravel(value)
        self._forget()

    def _forget(self) -> None:
        # The place in each storage's log up to which returns are computed.
        self._seen: weakref.WeakKeyDictionary[Storage, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    # -- on write -------------------------------------------------------------------------------

    def inv(self, data: Any) -> Any:
        """Return written rows with both columns; the given TensorDict does not change.

        Raises:
            TypeError: the data is not a TensorDict.
            KeyError: a needed column is absent.
        """
        if isinstance(data, (list, tuple)) and data and all(map(is_tensordict, data)):
            data = torch.stack(list(data))
        if not is_tensordict(data):
            raise TypeError(f"expected a TensorDict with rewards, got {type(data).__name__}")
        needed = [self.reward]
        if self.boundary != TERMINATED:
            needed.append(self.boundary)
        if isinstance(self.value, tuple):
            needed.append(self.value)
        reward = require_all(data, needed, self)[self.reward]
        data = data.copy()
        data.set(self.key, torch.full_like(reward, self.default, dtype=sum_dtype(reward)))
        shape = (*data.batch_size, 1)
        data.set(RETURN_VALID, torch.zeros(shape, dtype=torch.bool, device=reward.device))
        return data

    def check_parts(self, storage: Storage, writer: Any) -> None:
        """Raise ValueError if no row gets returns, because the rows are those of a data set."""
        schema = storage.schema
        if writer.kind == "immutable" and schema is not None and self.key not in schema.leaves:
            raise ValueError(
                f"ReturnToGo adds {format_key(self.key)} when rows are written, and expected a "
                f"buffer that can be written to, got {type(writer).__name__}; "
                "prefill_replay_buffer copies a data set into a buffer"
            )

    def check_rows(self, storage: Storage, rows: Any) -> None:
        """Raise an error if new rows cannot get returns.

        Raises:
            RuntimeError: the storage has no episode index.
            ValueError: rows are whole trajectories.
        """
        with_episodes(storage, _NEED)
        for key in end_flags(rows.leaves):
            flag = rows.leaves[key]
            if flag.shape[storage.ndim :].numel() != 1:
                raise ValueError(
                    f"key {format_key(key)}: expected one flag per row, got "
                    f"{list(flag.shape[storage.ndim :])}; ReturnToGo cannot be used where rows are "
                    "whole trajectories"
                )

    def written(self, storage: Storage) -> None:
        """Fill in the returns of the episodes that have ended since the last call.

        The buffer calls this after every write, with the lock of the storage held.

        Raises:
            RuntimeError: the storage has no episode index.
            ValueError: values differ from rewards in shape.
        """
        storage = with_episodes(storage, _NEED)
        if not storage.initialized:
            return
        index, ledger = storage.episodes, storage.ledger
        seen = self._seen.get(storage)
        outdated = _is_outdated(storage, index, None if seen is None else seen[0])
        whole = seen is None or outdated
        slots = np.arange(ledger.length) if whole else np.unique(ledger.written_since(seen)[1])
        ended = index.ended_among(slots)
        chosen = self._computed(ended[2])
        if not outdated and chosen.any():
            # Rows have returns after a load, or if another process has written them.
            known = self._gather(storage, index, [RETURN_VALID], *ended[:2])[RETURN_VALID]
            chosen &= ~known.flatten(1).any(1).cpu().numpy()
        element, returns = torch.zeros(0, dtype=torch.int64, device="cpu"), None
        ends = [part[chosen] for part in ended]
        before = self._before_boundaries(storage, index, slots, ends, known_only=not outdated)
        ends = [np.concatenate(pair) for pair in zip(ends, before, strict=True)]
        if len(ends[0]):
            element, returns = self._sums(storage, index, *ends)
        if outdated:
            self._replace_all(storage, element, returns)
        elif returns is not None:
            valid = torch.ones(len(element), 1, dtype=torch.bool, device="cpu")
            storage.put(element, {self.key: returns, RETURN_VALID: valid})
        self._seen[storage] = ledger.place_in_log

    def resized(self, storage: Storage) -> None:
        """Keep the returns of stored rows, which have moved in a storage of another capacity."""
        self._seen.pop(storage, None)

    def _before_boundaries(
        self,
        storage: ColumnStorage,
        index: EpisodeIndex,
        slots: Array,
        ends: list[Array],
        *,
        known_only: bool,
    ) -> list[Array]:
        """Return time, lane and code of the last boundaries in episodes without a return.

        Args:
            slots: the rows that are new.
            ends: the ends of episodes that get returns now.
            known_only: leave out boundaries whose rows have returns already.
        """
        nothing = np.zeros(0, np.int64)
        if self.boundary == TERMINATED or self.boundary not in storage.require().schema.leaves:
            return [nothing, nothing, nothing]
        lanes = storage.lanes.numel()
        element = elements_of(slots, lanes)
        read = storage.require().gather_keys(
            [self.boundary, RETURN_VALID], torch.from_numpy(element)
        )
        flag, valid = (is_set(read[key], 1).cpu().numpy() for key in (self.boundary, RETURN_VALID))
        element = element[flag & ~(valid & known_only)]
        time, lane = index.time_and_lane(element)
        order = np.lexsort((time, lane))
        time, lane = time[order], lane[order]
        _, last = index.spans(time, lane)
        # The last boundary of each episode, unless the whole episode gets returns.
        newest = np.append((last[1:] != last[:-1]) | (lane[1:] != lane[:-1]), True)[: len(time)]
        whole = set(zip(ends[0].tolist(), ends[1].tolist(), strict=True))
        pairs = zip(last.tolist(), lane.tolist(), strict=True)
        newest &= np.fromiter((pair not in whole for pair in pairs), bool, len(last))
        return [time[newest], lane[newest], np.zeros(int(newest.sum()), np.int64)]

    def _replace_all(
        self, storage: ColumnStorage, element: torch.Tensor, returns: torch.Tensor | None
    ) -> None:
        """Store the returns of these elements, and the default in all other rows."""
        leaf, shape, rows = storage.leaf(self.key), storage.visible_shape(), len(storage)
        values = torch.full((rows, *leaf.shape), self.default, dtype=leaf.dtype, device="cpu")
        valid = torch.zeros(rows, 1, dtype=torch.bool, device="cpu")
        if returns is not None:
            values[element], valid[element] = returns, True
        columns = {self.key: values.view(*shape, *leaf.shape), RETURN_VALID: valid.view(*shape, 1)}
        storage.edit_columns(columns)

    def _computed(self, code: Array) -> Array:
        """Return a bool mask of the ended episodes that get returns."""
        if self.on_truncated == "bootstrap":
            return np.ones(len(code), bool)
        return code == int(EndReason.TERMINATED)

    def _sums(
        self, storage: ColumnStorage, index: EpisodeIndex, last: Array, lane: Array, code: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements and the returns of all stored rows of episodes.

        ``last``, ``lane`` and ``code`` are those of the last rows.
        """
        first, _ = index.spans(last, lane)
        rows = last - first + 1
        of_row = np.repeat(np.arange(len(rows)), rows)
        time = np.arange(len(of_row)) - (np.cumsum(rows) - rows - first)[of_row]
        keys = [self.reward]
        if self.boundary in storage.require().schema.leaves:
            keys.append(self.boundary)
        leaves = self._gather(storage, index, keys, time, lane[of_row])
        value = None
        truncated = code == int(EndReason.TRUNCATED)
        if truncated.any():
            at = truncated.nonzero()[0]
            stored = storage.require().schema.leaves
            wanted = [path for path in stored if path[0] == "next"]
            if isinstance(self.value, tuple):
                wanted = [self.value]
            found = self._gather(storage, index, wanted, last[at], lane[at])
            value = self._values(found, leaves[self.reward], truncated)
        returns = self._returns(leaves, rows, value).to(storage.leaf(self.key).dtype)
        return torch.from_numpy(index.element(time, lane[of_row])), returns

    @staticmethod
    def _gather(
        storage: ColumnStorage, index: EpisodeIndex, keys: list[Path], time: Array, lane: Array
    ) -> dict[Path, torch.Tensor]:
        rows = torch.from_numpy(index.element(time, lane))
        return storage.require().gather_keys(keys, rows)

    # -- sums -----------------------------------------------------------------------------------

    def _values(
        self, found: dict[Path, torch.Tensor], reward: torch.Tensor, truncated: Array
    ) -> Array:
        """Return V of each episode, float64 ``[E, *F]``; 0 if the episode terminated."""
        if isinstance(self.value, tuple):
            value = found[self.value]
        else:
            assert self.value is not None
            value = self.value(_nested(found, int(truncated.sum())))
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"value: expected a tensor, got {type(value).__name__}")
        expected = (int(truncated.sum()), *reward.shape[1:])
        if value.shape != expected:
            raise ValueError(
                f"value: expected the shape of the rewards, {list(expected)}, got "
                f"{list(value.shape)}"
            )
        values = np.zeros((len(truncated), *reward.shape[1:]))
        values[truncated] = value.detach().to("cpu", torch.float64).numpy()
        return values

    def _returns(
        self, leaves: dict[Path, torch.Tensor], rows: Array, value: Array | None
    ) -> torch.Tensor:
        """Return the returns ``[n, *F]`` of consecutive whole episodes, on the CPU."""
        reward = leaves[self.reward]
        sums = reward.detach().to("cpu", torch.float64, copy=True).numpy()
        if self.reward_clip is not None:
            np.clip(sums, *self.reward_clip, out=sums)
        last = np.cumsum(rows) - 1
        stops = np.zeros(len(sums), bool)
        flag = leaves.get(self.boundary)
        if flag is not None:
            stops |= is_set(flag, 1).cpu().numpy()
        if value is not None:
            on = ~stops[last]  # no value is added after a boundary
            sums[last[on]] += self.gamma * value[on]
        stops[last] = True
        return torch.from_numpy(discounted_returns(sums, stops, self.gamma)).to(sum_dtype(reward))

    def edited(self, episodes: EditedEpisodes) -> None:
        """Recompute the returns of episodes that a ``TrajectoryTransform`` has edited."""
        leaves = episodes.leaves
        if not {self.key, RETURN_VALID, self.reward} <= set(leaves):
            return
        reason, rows = episodes.reasons, episodes.counts
        truncated = reason == int(EndReason.TRUNCATED)
        ended = (reason == int(EndReason.TERMINATED)) | truncated
        ended[ended] = self._computed(reason[ended])
        value = None
        if self.value is not None and truncated.any():
            at = torch.from_numpy((np.cumsum(rows) - 1)[truncated])
            found = {key: leaf[at.to(leaf.device)] for key, leaf in leaves.items()}
            if isinstance(self.value, tuple):
                found = {self.value: found[self.value]}
            else:
                found = {key: leaf for key, leaf in found.items() if key[0] == "next"}
            value = self._values(found, leaves[self.reward], truncated)
        returns = self._returns(leaves, rows, value)
        known = np.repeat(ended, rows)
        if self.boundary != TERMINATED and self.boundary in leaves:
            # Rows up to the last boundary of their episode: those from which one follows.
            flag = is_set(leaves[self.boundary], 1).cpu().numpy()
            stop = np.repeat(np.cumsum(rows), rows)
            upto = np.append(0, np.cumsum(flag))
            known |= upto[stop] > upto[np.arange(len(stop))]
        valid = torch.from_numpy(known)
        old = leaves[self.key]
        returns = torch.where(over_features(valid, returns), returns, self.default)
        leaves[self.key] = returns.to(old.device, old.dtype)
        leaves[RETURN_VALID] = valid.view(-1, 1).to(old.device)

    def __repr__(self) -> str:
        return f"ReturnToGo(gamma={self.gamma:g}, key={format_key(self.key)})"


def _is_outdated(storage: ColumnStorage, index: EpisodeIndex, seen: int | None) -> bool:
    """Return whether stored rows have moved, or may end other episodes, since ``seen``.

    Without ``seen``, only changes since the last load count, because loaded rows have returns.
    """
    changes = storage.ledger.log.since(seen or 0)
    if changes is None:
        return seen is not None
    moves, outdated, paths = {ChangeKind.MOVE}, False, index.bound.paths
    if not storage.ledger.by_stream:  # else writes have placed rows
        moves.add(ChangeKind.PLACE)
    for kind, _, columns in changes:
        if kind in moves:
            outdated = seen is not None or kind is not ChangeKind.MOVE
        elif kind is ChangeKind.EDIT:
            outdated |= columns is None or not columns.isdisjoint(paths)
    return outdated


def _nested(leaves: dict[Path, torch.Tensor], rows: int) -> Any:
    """Return the leaves under ``next`` as a TensorDict ``[rows]``."""
    device = next(iter(leaves.values())).device
    data = new_tensordict({}, torch.Size([rows]), device)
    for path, leaf in leaves.items():
        data.set(path[1:], leaf)
    return data


def _checked_clip(clip: Any) -> tuple[float, float]:
    if not isinstance(clip, (tuple, list)) or len(clip) != 2:
        raise TypeError(f"reward_clip: expected (min, max), got {clip!r}")
    low, high = as_number("reward_clip", clip[0]), as_number("reward_clip", clip[1])
    if not low <= high:
        raise ValueError(f"reward_clip: expected min at most max, got {low} and {high}")
    return low, high
