"""Streams of rows kept as plain lists, which tests scan for what transforms have to find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

CONTINUES, TERMINATED, TRUNCATED = 0, 1, 2


@dataclass
class Row:
    """A row of one lane: its number there, its reward, how it ends, whether it was cut off."""

    number: int
    reward: float
    end: int
    cut: bool = False
    restarted: bool = False


@dataclass
class Streams:
    """Lanes of rows in plain Python, written to a buffer as well, of which each keeps ``slots``."""

    transform: Any
    lanes: int = 1
    slots: int = 10**6
    batch_size: int = 7
    rows: list[list[Row]] = field(default_factory=list)
    buffer: Any = None

    def __post_init__(self) -> None:
        self.rows = [[] for _ in range(self.lanes)]
        self.buffer = self.new_buffer()

    def new_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(self.slots * self.lanes, ndim=1 if self.lanes == 1 else 2),
            sampler=SamplerWithoutReplacement(shuffle=False),
            transform=self.transform,
            batch_size=self.batch_size,
            generator=torch.Generator().manual_seed(0),
        )

    def make(self, ends: list[list[int]]) -> TensorDict:
        """Rows ``[T]`` (``[lanes, T]``) with these ends ``[T][lane]``, also noted in the lists."""
        data = []
        for lane in range(self.lanes):
            own, fresh = self.rows[lane], []
            for step in ends:
                number = len(own)
                reward = float((number * 37 + lane * 11) % 13 - 6) / 4
                own.append(Row(number, reward, step[lane]))
                fresh.append(own[-1])
            code = torch.tensor([[row.end] for row in fresh])
            place = torch.tensor([[lane, row.number] for row in fresh])
            data.append(
                TensorDict(
                    {
                        "observation": place.clone(),
                        "action": place[:, 1] * 10,
                        "next": {
                            "observation": place * 2 + 1,
                            "reward": torch.tensor([[row.reward] for row in fresh]),
                            "done": code > 0,
                            "terminated": code == TERMINATED,
                            "truncated": code == TRUNCATED,
                        },
                    },
                    [len(fresh)],
                )
            )
        return data[0] if self.lanes == 1 else torch.stack(data)

    def extend(self, ends: list[list[int]]) -> None:
        self.buffer.extend(self.make(ends))

    def cut(self) -> None:
        self.buffer.storage.cut(None)
        for own in self.rows:
            if own and own[-1].end == CONTINUES:
                own[-1].cut = True

    def restart(self) -> None:
        """Saves the buffer and goes on with one that has loaded it."""
        state = self.buffer.state_dict()
        self.buffer = self.new_buffer()
        self.buffer.load_state_dict(state)
        for own in self.rows:
            if own[-1].end == CONTINUES and not own[-1].cut:
                own[-1].restarted = True

    # -- scanning -----------------------------------------------------------------------------

    def lowest(self, lane: int) -> int:
        return max(0, len(self.rows[lane]) - self.slots)

    def is_last(self, row: Row) -> bool:
        return row.end != CONTINUES or row.cut or row.restarted

    def begin(self, lane: int, number: int) -> int:
        own = self.rows[lane]
        while number > 0 and not self.is_last(own[number - 1]):
            number -= 1
        return number

    def first(self, lane: int, number: int) -> int:
        return max(self.begin(lane, number), self.lowest(lane))

    def last(self, lane: int, number: int) -> int:
        own = self.rows[lane]
        while number < len(own) - 1 and not self.is_last(own[number]):
            number += 1
        return number

    def is_open(self, lane: int, number: int) -> bool:
        return not self.is_last(self.rows[lane][self.last(lane, number)])

    def has_past(self, lane: int, number: int, past: int) -> bool:
        begin = self.begin(lane, number)
        joined = begin > 0 and self.rows[lane][begin - 1].cut
        if begin >= self.lowest(lane) and not joined:
            return True
        return number - past >= self.first(lane, number)

    def stored(self) -> Iterator[tuple[int, int]]:
        """Lanes and numbers of all rows that are stored."""
        for lane, own in enumerate(self.rows):
            for row in own[self.lowest(lane) :]:
                yield lane, row.number

    def drawn(self) -> dict[tuple[int, int], Any]:
        """Every row that can be drawn, once, as the buffer gives it, by lane and number."""
        found = {}
        for batch in self.buffer:
            places = batch["place"] if "place" in batch else batch["observation"]
            for row, (lane, number) in zip(batch, places.tolist(), strict=True):
                assert (lane, number) not in found
                found[lane, number] = row
        return found


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Draw lanes, slots, and turns of writing: rows, then nothing, a cut or a restart."""
    lanes = draw(st.sampled_from([1, 1, 2, 3]))
    end = st.sampled_from([CONTINUES] * 5 + [TERMINATED, TRUNCATED])
    step = st.lists(end, min_size=lanes, max_size=lanes)
    piece = st.lists(step, min_size=1, max_size=9)
    turn = st.tuples(piece, st.sampled_from([None, None, None, Streams.cut, Streams.restart]))
    return {
        "lanes": lanes,
        "slots": draw(st.integers(1, 14)),
        "turns": draw(st.lists(turn, min_size=1, max_size=6)),
    }


def play(transform: Any, history: dict[str, Any]) -> Streams:
    """Make streams that have been written as a history says."""
    streams = Streams(transform, history["lanes"], history["slots"])
    for piece, change in history["turns"]:
        streams.extend(piece)
        if change:
            change(streams)
    return streams


def stored_bits(rb: ReplayBuffer) -> list[torch.Tensor]:
    columns = rb.storage.get(slice(None))
    return [columns[key].clone() for key in columns.keys(True, True)]
