"""Count the rows and episodes of a buffer, and collect other numbers of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from replaykit.buffer.events import EVENTS, Event
from replaykit.declared import Positive, Rule, decode_state, read_value

HISTOGRAM = "histogram:"
"""The prefix of lists whose numbers are a distribution, and are not added up."""


_Number = Annotated[Any, Rule("a number", lambda value: type(value) in (int, float))]
"""A number that may be NaN, for example the loss of a failed update."""


@dataclass(frozen=True)
class _State:
    sums: dict[str, _Number]
    windows: dict[str, list[_Number]]


class Metrics:
    """Sums and recent values of named numbers, which events of buffers and callers report.

    With ``attach``, the keys "write", "evict" and "sample" count rows, and "episode_end" counts
    ended episodes. The state is saved with the buffer. All methods may be called from any thread.

    Args:
        window: number of recent values of each key that are stored.
        every: number of written rows between two calls of ``log``.
        log: a function that receives the values of ``get_report()``; None for none.

    Raises:
        ValueError: ``window`` or ``every`` is not an int of at least 1.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, Metrics, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> metrics = Metrics().attach(rb)
        >>> for _ in range(3):
        ...     _ = rb.extend(torch.zeros(2))
        >>> _ = rb.sample()
        >>> metrics.report({"loss": 0.5}, {"return": [1.0, 3.0]})
        >>> values, windows = metrics.get_report()
        >>> values["write/cumulative"], values["evict/cumulative"], values["return"]
        (6.0, 2.0, 2.0)
        >>> windows["write"]
        [2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        window: int = 1000,
        every: int = 10_000,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        self.window: int = read_value(Positive, window, "window")
        self.every: int = read_value(Positive, every, "every")
        self.log = log
        self._sums: dict[str, float] = {}
        self._windows: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._due = self.every

    def attach(self, buffer: Any) -> Metrics:
        """Count the events of a buffer, and save the state with it; return the metrics."""
        for kind in EVENTS:
            buffer.on(kind, self._count, state=self)
        return self

    def _count(self, event: Event) -> None:
        self.report({event.kind: event.count})
        written = self._sums.get("write", 0)
        if event.kind == "write" and written >= self._due:
            self._due = written + self.every
            if self.log is not None:
                self.log(self.get_report()[0])

    def report(
        self,
        scalars: Mapping[str, float] | None = None,
        lists: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add numbers.

        Args:
            scalars: a number for each key.
            lists: several numbers for each key. Those of keys that begin with "histogram:" have no
                sum.
        """
        added = {**{key: [value] for key, value in (scalars or {}).items()}, **(lists or {})}
        checked = {key: [float(value) for value in values] for key, values in added.items()}
        with self._lock:
            for key, values in checked.items():
                self._windows.setdefault(key, deque(maxlen=self.window)).extend(values)
                if not key.startswith(HISTOGRAM):
                    self._sums[key] = self._sums.get(key, 0.0) + sum(values)

    @contextlib.contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """Report the seconds that the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.report({key: time.perf_counter() - begun})

    def get_report(
        self, keys: Iterable[str] | None = None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Return values and recent numbers.

        Args:
            keys: the keys; None for all. Unknown keys are left out.

        Returns:
            Two results. The first has the mean of the recent numbers under each key, and the sum of
            all numbers under ``"<key>/cumulative"``. The second has the recent numbers.
        """
        with self._lock:
            known = list(self._windows) if keys is None else [k for k in keys if k in self._windows]
            windows = {key: list(self._windows[key]) for key in known}
            sums = {f"{key}/cumulative": self._sums[key] for key in known if key in self._sums}
        means = {key: sum(numbers) / len(numbers) for key, numbers in windows.items() if numbers}
        return {**means, **sums}, windows

    def state_dict(self) -> dict[str, Any]:
        """Return all sums and recent numbers."""
        with self._lock:
            windows = {key: list(numbers) for key, numbers in self._windows.items()}
            return {"sums": dict(self._sums), "windows": windows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load sums and recent numbers; raise ValueError if the state is invalid."""
        state = decode_state(_State, state_dict, "the state of Metrics")
        with self._lock:
            self._sums = dict(state.sums)
            windows = state.windows.items()
            self._windows = {key: deque(numbers, self.window) for key, numbers in windows}
            self._due = self._sums.get("write", 0) + self.every
