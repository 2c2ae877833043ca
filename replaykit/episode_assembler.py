"""Assemble episodes from interleaved events of many environments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from replaykit._compat import TensorDict
from replaykit.declared import Count, Positive, read_value
from replaykit.environments import transition
from replaykit.errors import BufferFull
from replaykit.keywords import one_of

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
