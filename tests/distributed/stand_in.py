"""An actor that answers at once, in this process, and as much of Ray as a handle asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from replaykit import RayReplayBufferClient, ReplayBuffer
from replaykit.distributed.host import Host
from replaykit.distributed.protocol import unpack

__all__ = ["Actor", "Ray", "Untold", "client_of", "failing", "no_answer", "stand_in"]


class _TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _ActorError(Exception):
    pass


class _GetTimeoutError(Exception):
    pass


class _ObjectLostError(Exception):
    pass


class Untold(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Ray:
    """The part of Ray that `replaykit.distributed.requests` calls; references are functions."""

    exceptions = SimpleNamespace(
        RayTaskError=_TaskError,
        RayActorError=_ActorError,
        GetTimeoutError=_GetTimeoutError,
        ObjectLostError=_ObjectLostError,
    )

    def is_initialized(self) -> bool:
        return True

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        return ref()

    def wait(self, refs: list[Any], *, num_returns: int = 1, **_: Any) -> tuple[list[Any], Any]:
        ready = [ref for ref in refs if ref is not no_answer][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has handles use this in the place of Ray."""
    monkeypatch.setattr("replaykit.distributed.requests.ray_module", Ray)
    monkeypatch.setattr(
        "replaykit.distributed.write_queue._PENDING", {}
    )  # those of others have a real Ray


class Actor:
    """A `Host` of a buffer, with the methods of a handle of Ray's.

    Attributes:
        buffer: the buffer in it.
        called: names of the methods called, and of functions on the buffer, in their order.
        busy: what is asked for meanwhile has no answer yet.
    """

    def __init__(self, **arguments: Any) -> None:
        self._host = Host(ReplayBuffer, arguments)
        self._host.ready()
        self.buffer = self._host._buffer
        self.called: list[str] = []
        self.busy = False

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **keywords: Any) -> Any:
            of_buffer = name == "call" and not isinstance(args[0], str)
            self.called.append(unpack(args[0]).__name__ if of_buffer else name)
            if self.busy:
                return no_answer
            try:
                result = getattr(self._host, name)(*args, **keywords)
            except Exception as error:
                return failing(error)
            return lambda: result

        return SimpleNamespace(remote=remote, options=lambda **options: _split(remote, **options))


def _split(remote: Any, *, num_returns: int = 1, **_: Any) -> Any:
    """The method, with a reference for each of its results."""
    if num_returns == 1:
        return SimpleNamespace(remote=remote)

    def references(*args: Any, **keywords: Any) -> list[Any]:
        ref = remote(*args, **keywords)
        if ref is no_answer:
            return [ref] * num_returns
        return [lambda at=at: ref()[at] for at in range(num_returns)]

    return SimpleNamespace(remote=references)


def client_of(actor: Actor, **options: Any) -> RayReplayBufferClient:
    """A handle of it."""
    return RayReplayBufferClient(actor, ReplayBuffer, **options)


def no_answer() -> Any:
    """The reference of a call that has not come to an end."""
    raise _GetTimeoutError


def failing(error: Exception) -> Any:
    """The reference of a call that raised this in the actor."""

    def get() -> Any:
        raise _TaskError(error)

    return get
