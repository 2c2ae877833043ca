"""A buffer behind Ray, on this machine: one sample after the other, and with four under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.contender import Unavailable, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import Holder, Replaykit, TorchRL
from benchmarks.report import Line, Target, lines_of_turns
from benchmarks.rows import Leaves, make_transitions
from benchmarks.setting import BATCH, Setting
from benchmarks.works.transitions import Sampling
from replaykit import LazyTensorStorage, RayReplayBuffer

__all__ = ["asked", "run"]

AHEAD = 4
ONE, PIPELINED = "sample over Ray", f"sample over Ray, {AHEAD} under way"
ACTOR = {"num_cpus": 1}
SETTLED = 0.02
"""Seconds after which nothing of the turn before is under way any more."""


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {ONE: (Target("TorchRL", 1 / 2),), PIPELINED: (Target("TorchRL", 1 / 4),)}


class RayReplaykit(Replaykit):
    """replaykit's RayReplayBuffer; one round trip a sample."""

    def new_buffer(self) -> Any:
        return RayReplayBuffer(
            storage=partial(LazyTensorStorage, self.rows), batch_size=BATCH, remote_config=ACTOR
        )

    def check_label(self) -> None:
        expect(type(self.buffer) is RayReplayBuffer, f"buffer is a {type(self.buffer)}")
        parts = self.buffer.run(lambda b: [type(b.storage).__name__, type(b.sampler).__name__])
        expect(parts == ["LazyTensorStorage", "RandomSampler"], f"it has {parts}")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")


class Pipelining(RayReplaykit):
    """The same, by a handle that asks for batches ahead."""

    def sampler(self) -> Callable[[Any], Any]:
        sample = self.buffer.client(prefetch=AHEAD).sample
        return lambda _: sample()


class RayTorchRL(TorchRL):
    """TorchRL's RayReplayBuffer of a TensorDictReplayBuffer."""

    def new_buffer(self) -> Any:
        self.quiet()
        from torchrl.data import LazyTensorStorage as Storage
        from torchrl.data import RayReplayBuffer as Buffer
        from torchrl.data import TensorDictReplayBuffer

        return Buffer(
            replay_buffer_cls=TensorDictReplayBuffer,
            storage=partial(Storage, self.rows),
            batch_size=BATCH,
            remote_config=ACTOR,
        )

    def check_label(self) -> None:
        kind = type(self.buffer)
        expect(kind.__module__.startswith("torchrl."), f"buffer is a {kind}")
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")


class RemoteSampling(Sampling):
    """A remote buffer that returns random rows; nothing of others is under way in its turn.

    Args:
        kind, title, leaves: as for a Sampling.
        untimed: batches taken before each turn: as many as may be there by then, which would cost
            their asking only.
    """

    def __init__(
        self, kind: Callable[[Leaves], Holder], title: str, leaves: Leaves, untimed: int = 0
    ) -> None:
        super().__init__(kind, title, leaves)
        self._untimed = untimed

    def timed(self) -> Callable[[Any], Any]:
        self._sample = super().timed()
        return self._sample

    def inputs(self, calls: int) -> Iterable[Any]:
        time.sleep(SETTLED)
        for _ in range(self._untimed):
            self._sample(None)
        return super().inputs(calls)

    def close(self) -> None:
        """Ends the actor, if there is one."""
        holder = getattr(self, "holder", None)
        if holder is not None:
            holder.buffer.close()


def run(setting: Setting) -> list[Line]:
    """Measures."""
    with _running_ray():
        return [
            *_measure(setting, ONE, RayReplaykit, 0),
            *_measure(setting, PIPELINED, Pipelining, AHEAD),
        ]


def _measure(setting: Setting, title: str, kind: type[RayReplaykit], untimed: int) -> list[Line]:
    leaves = make_transitions(setting.rows)
    subject = RemoteSampling(kind, kind.name, leaves, untimed)
    other = RemoteSampling(RayTorchRL, RayTorchRL.name, leaves, untimed)
    try:
        found, absent = ready(subject, [other])
        times = take_turns(found, rounds=setting.rounds)
    finally:
        subject.close()
        other.close()
    return lines_of_turns(title, times, absent, asked(setting)[title])


@contextmanager
def _running_ray() -> Iterator[None]:
    """Ray as it runs, or one for the while."""
    try:
        import ray
    except ImportError as error:
        raise Unavailable(f"{error}; it is in the extra `ray`") from None
    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        if started:
            ray.shutdown()
