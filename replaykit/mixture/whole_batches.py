"""Combine whole batches of several buffers: one of each, or one of two at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from replaykit._compat import TensorDict, is_tensordict
from replaykit.declared import Count, Positive, read_value
from replaykit.errors import NotReady
from replaykit.mixture.choosing import member_named
from replaykit.mixture.ensemble import ReplayBufferEnsemble

_TOTAL = "batch_size"


class JointBatch:
    """Samples one batch from each of several buffers, as groups of one TensorDict.

    Unlike the members of an ensemble, those of a joint batch may have different keys, shapes and
    batch sizes. Priorities go to the member: ``rb.update_tensordict_priority(batch["group"])``.

    Args:
        members: the buffers by group name, as a mapping or as pairs. Each has a ``batch_size``.
            Ensembles and remote buffers are also possible.
        every: the groups that not every batch has. With ``{"expert": 4}``, batches 0, 4, 8, ...
            have the group "expert".
        group: name of an outer group that holds the groups; None for no outer group.

    Raises:
        ValueError: there is no member, two members have one group, a group is named "batch_size",
            or a number of ``every`` is not an int of at least 1.
        KeyError: ``every`` names an unknown group.
        TypeError: a member cannot be sampled.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import JointBatch, LazyTensorStorage, ReplayBuffer
        >>> images, tokens = (
        ...     ReplayBuffer(storage=LazyTensorStorage(9), batch_size=size) for size in (6, 2))
        >>> _ = images.extend(TensorDict({"image": torch.zeros(9, 3)}, [9]))
        >>> _ = tokens.extend(TensorDict({"token": torch.zeros(9)}, [9]))
        >>> batch = JointBatch({"images": images, "tokens": tokens}).sample()
        >>> batch["images", "image"].shape, batch["tokens", "token"].shape, batch["batch_size"]
        (torch.Size([6, 3]), torch.Size([2]), tensor(8))
    """

    def __init__(
        self,
        members: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        every: Mapping[str, int] | None = None,
        group: str | None = None,
    ) -> None:
        pairs = list(members.items() if isinstance(members, Mapping) else members)
        self.members: dict[str, Any] = dict(pairs)
        if not pairs or len(self.members) < len(pairs) or _TOTAL in self.members:
            raise ValueError(
                f"expected members with different groups, none of them {_TOTAL!r}, got "
                f"{[name for name, _ in pairs]}"
            )
        for name, member in pairs:
            if not callable(getattr(member, "can_sample", None)):
                raise TypeError(f"expected {name!r} as a buffer, got {type(member).__name__}")
        self.every = dict(every or {})
        for name, number in self.every.items():
            if name not in self.members:
                raise KeyError(f"expected every for some of {list(self.members)}, got {name!r}")
            read_value(Positive, number, f"every[{name!r}]")
        self.group, self.step = group, 0

    def _due(self) -> dict[str, Any]:
        return {
            name: member
            for name, member in self.members.items()
            if self.step % self.every.get(name, 1) == 0
        }

    def can_sample(self) -> bool:
        """Return whether ``sample`` would succeed now without waiting."""
        return all(member.can_sample() for member in self._due().values())

    def sample(self) -> Any:
        """Return a TensorDict of batch size ``[]`` with a batch of each group that is due.

        ``"batch_size"``, int64 ``[]``, is the number of rows of all groups together.

        Raises:
            NotReady: a member cannot be sampled now; the error names it. Nothing was drawn.
        """
        due = self._due()
        for name, member in due.items():
            if not member.can_sample():
                raise NotReady(f"expected enough data in the group {name!r} for a batch, got less")
        made, rows = TensorDict({}, []), 0
        for name, member in due.items():
            with member_named(name):
                batch = member.sample()
            made.set(name, batch)
            rows += batch.batch_size.numel() if is_tensordict(batch) else len(batch)
        made.set(_TOTAL, torch.tensor(rows))
        self.step += 1
        return made if self.group is None else TensorDict({self.group: made}, [])

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end. A second iteration continues with the next batch."""
        while True:
            yield self.sample()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next batch. The members save their states themselves."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the batch of a saved state.

        Raises:
            ValueError: the state has no valid number; nothing has changed.
        """
        self.step = read_value(Count, state_dict.get("step"), "step")


def ScheduledChoice(
    first: Any,
    second: Any,
    p: float | Callable[[int], float] | None = None,
    *,
    every: int | None = None,
    **options: Any,
) -> ReplayBufferEnsemble[Any]:
    """Return an ensemble whose batches come entirely from one of two buffers.

    Args:
        first, second: the buffers.
        p: probability that a batch comes from ``first``: a number, or a function of the number of
            the batch, 0, 1, ...
        every: instead of ``p``, batches 0, ``every``, 2 * ``every``, ... come from ``first``, and
            all others from ``second``.
        options: further arguments of `ReplayBufferEnsemble`.

    Returns:
        An ensemble with one part. Its batches have the shape ``[1, B]``.

    Raises:
        TypeError: both or neither of ``p`` and ``every`` are given.
        ValueError: ``p`` is outside [0, 1], also when a function is evaluated, or ``every`` is not
            an int of at least 1.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, ScheduledChoice
        >>> expert, online = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2))
        >>> _ = expert.extend(torch.zeros(9)), online.extend(torch.ones(9))
        >>> choice = ScheduledChoice(expert, online, every=3, batch_size=2)
        >>> [choice.sample()[0, 0].item() for _ in range(4)]
        [0.0, 1.0, 1.0, 0.0]
    """
    if (p is None) == (every is None):
        raise TypeError(f"expected either p= or every=, got {p!r} and {every!r}")
    if every is not None:
        p = functools.partial(_every, read_value(Positive, every, "every"))
    weights = functools.partial(_both, p) if callable(p) else _both(p, 0)
    return ReplayBufferEnsemble(first, second, p=weights, num_buffer_sampled=1, **options)


def _every(number: int, step: int) -> float:
    return float(step % number == 0)


def _both(p: Any, step: int) -> list[float]:
    """Return the weights of two members, given the probability of the first."""
    chance = p(step) if callable(p) else p
    if not 0 <= chance <= 1:
        raise ValueError(f"expected a probability p between 0 and 1, got {chance} for batch {step}")
    return [float(chance), 1.0 - float(chance)]
