"""Interrupts for tests: sent by a call at its every step, or by another process at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["Stepper", "interrupted_at", "random_interrupts"]


class Stepper:
    """Counts the steps of calls in this thread, and sends SIGINT to the process at one of them.

    A step is a bytecode of a function of the package, or the begin or end of any call, of C
    functions too.

    Args:
        at: number of the step at which SIGINT is sent; None: never.
        bytecodes: whether bytecodes count, or calls only.
    """

    def __init__(self, at: int | None, *, bytecodes: bool = False) -> None:
        self.at, self.bytecodes, self.steps = at, bytecodes, 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            signal.raise_signal(signal.SIGINT)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename != __file__:
            self._step()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if "replaykit" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        self._step()
        return self._trace

    def __enter__(self) -> Stepper:
        if self.bytecodes:
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)


def interrupted_at(
    step: int | None, call: Callable[[], Any], *, bytecodes: bool
) -> tuple[bool, int]:
    """Runs a call with SIGINT at one of its steps; whether it was interrupted, and its steps."""
    stepper = Stepper(step, bytecodes=bytecodes)
    try:
        with stepper:
            call()
    except KeyboardInterrupt:
        return True, stepper.steps
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return False, stepper.steps


_SENDER = """
import os, random, signal, sys, time
process, least, most = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
while os.getppid() == process:
    time.sleep(random.uniform(least, most))
    os.kill(process, signal.SIGINT)
"""


class Alarm:
    """What SIGINT does while a call is under way: it raises KeyboardInterrupt, and is counted."""

    def __init__(self) -> None:
        self.armed, self.count = False, 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def interrupts(self, call: Callable[[], Any]) -> bool:
        """Runs a call; whether an interrupt ended it."""
        try:
            try:
                self.armed = True
                call()
            finally:
                self.armed = False
        except KeyboardInterrupt:
            self.armed = False
            return True
        return False


@contextlib.contextmanager
def random_interrupts(least: float, most: float) -> Iterator[Alarm]:
    """While another process sends SIGINT again and again, after ``least`` to ``most`` seconds."""
    alarm = Alarm()
    before = signal.signal(signal.SIGINT, alarm.handle)
    command = [sys.executable, "-c", _SENDER, str(os.getpid()), str(least), str(most)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdout.readline()
        sender.stdin.write(b"\n")
        sender.stdin.flush()
        yield alarm
    finally:
        sender.kill()
        sender.communicate()
        signal.signal(signal.SIGINT, before)
