"""A replay buffer in plain Python, slow and short, that random programs compare the package with.

A row is one dict of numbers. All slots are in one list. With lanes, slot ``time * lanes + lane``
holds the row of that lane, so that one ring serves all lanes. Nothing is derived in advance: every
question is answered by a search over all rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]


@dataclass
class Generation:
    """The generation of a row. After a removal or a load it is known only once a batch shows it."""

    least: int
    known: int | None = None

    def following(self) -> Generation:
        """Return the generation of the next row of the slot."""
        return Generation(self.least + 1, None if self.known is None else self.known + 1)

    def later(self) -> Generation:
        """Return a generation that is known only not to be below this one."""
        return Generation(self.least)

    def check(self, found: int) -> None:
        """Compare the generation with that of a batch, and remember it from then on."""
        if self.known is None:
            assert found >= self.least, f"generation {found} was used before {self.least}"
            self.least = self.known = found
        assert found == self.known, f"expected the generation {self.known}, got {found}"


@dataclass
class Row:
    """One stored row."""

    values: Values
    number: int
    """The row id: the number of the row in write order."""
    stream: int
    before: int | None
    """The row id of the row before it in its stream."""
    generation: Generation
    """The number of earlier writes to its slot."""
    priority: float
    draws: int = 0
    """How often a `ConsumingSampler` has drawn the row."""


@dataclass
class Model:
    """Rows by slot, and the counters that writes need."""

    capacity: int
    """The number of slots; with lanes, of all lanes."""
    lanes: int = 1
    streams: bool = False
    """True if the number under ``env`` names the stream of a row."""
    ring: int | None = None
    """The number of rows of each stream, with a `LaneWriter`."""
    best: bool = False
    """True if the writer keeps the rows of largest rank."""
    uses: int | None = None
    """How often each row may be drawn, with a `ConsumingSampler`."""
    gamma: float | None = None
    """The discount of stored returns, with a `ReturnToGo`."""

    slots: list[Row | None] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    """The generation of the next row of each slot."""
    cursor: int = 0
    next_number: int = 0
    write_count: int = 0
    newest: dict[int, int] = field(default_factory=dict)
    """The row id of the newest row of each stream."""
    cuts: set[tuple[int, int]] = field(default_factory=set)
    """Streams, and row ids after which they were cut."""
    highest_priority: float = 1.0
    dropped_updates: int = 0
    placements: int = 0
    """The number of written rows, with those placed by hand. A write ends a pass over episodes."""
    free: list[int] = field(default_factory=list)
    """Slots of rows that are used up, in the order in which they became free."""
    outdated: bool = False
    """True if the next write computes all returns again, since rows or flags were changed."""

    def __post_init__(self) -> None:
        self.slots = [None] * self.capacity
        self.generations = [Generation(0, 0) for _ in range(self.capacity)]

    def frozen(self) -> Model:
        """Return a copy that later changes do not reach."""
        made = copy.copy(self)
        made.slots = [copy.copy(row) for row in self.slots]
        made.generations, made.free = list(self.generations), list(self.free)
        made.newest, made.cuts = dict(self.newest), set(self.cuts)
        return made

    # -- what is stored --------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(row is not None for row in self.slots)

    def __getitem__(self, slot: int) -> Row:
        row = self.slots[slot]
        assert row is not None, f"the model has no row in slot {slot}"
        return row

    def stored(self) -> list[int]:
        """Return the slots that hold rows."""
        return [slot for slot, row in enumerate(self.slots) if row is not None]

    def drawable(self) -> list[int]:
        """Return the slots of the rows that are not used up."""
        return [slot for slot in self.stored() if slot not in self.free]

    # -- writes ----------------------------------------------------------------------------------

    def write(self, rows: Iterable[Values], priorities: list[float] | None = None) -> list[int]:
        """Write rows one by one; return their slots.

        The slot is -1 for a row that the writer refuses. With ``best`` it is also -1 for a row that
        a later row of the same call replaces.
        """
        found: list[int] = []
        default = self.highest_priority
        for position, values in enumerate(rows):
            slot = self._slot_for(values)
            if self.gamma is not None:
                values = {**values, "return": 0.0, "valid": False}
            priority = default if priorities is None else priorities[position]
            if slot >= 0:
                self.place(slot, values, priority)
            if self.best:
                found = [-1 if earlier == slot else earlier for earlier in found]
            found.append(slot)
        if priorities is not None:
            kept = [p for p, slot in zip(priorities, found, strict=True) if slot >= 0]
            self.highest_priority = max([default, *kept])
        if self.gamma is not None:
            self._store_returns(self.gamma)
        return found

    def _store_returns(self, gamma: float) -> None:
        """Store the returns of terminated episodes that have none; of all if rows have changed."""
        if self.outdated:
            for slot in self.stored():
                self.edit(slot, {"return": 0.0, "valid": False})
        for episode in self.episodes():
            last = self[episode[-1]].values
            if last["terminated"] and not last["valid"]:
                total = 0.0
                for slot in reversed(episode):
                    total = self[slot].values["reward"] + gamma * total
                    self.edit(slot, {"return": total, "valid": True})
        self.outdated = False

    def _slot_for(self, values: Values) -> int:
        if self.best:
            return self._best_slot(values)
        if self.ring is not None:
            return self._stream_slot(values["env"])
        if self.free:
            return self.free.pop(0)
        slot = self.cursor
        self.cursor = (self.cursor + 1) % self.capacity
        return slot

    def _best_slot(self, values: Values) -> int:
        """Return a slot for the row if there is room, or if the worst row has a lower rank."""
        if len(self) < self.capacity:
            return len(self)
        worst = min(self.stored(), key=lambda at: (self[at].values["rank"], -self[at].number))
        return worst if values["rank"] > self[worst].values["rank"] else -1

    def _stream_slot(self, stream: int) -> int:
        """Return the next slot until the stream has ``ring`` rows, then that of its oldest row."""
        rows = [slot for slot in self.stored() if self[slot].stream == stream]
        if len(rows) < (self.ring or 0):
            return len(self)
        return min(rows, key=lambda slot: self[slot].number)

    def place(self, slot: int, values: Values, priority: float | None = None) -> None:
        """Write one row into a slot."""
        stream = values["env"] if self.streams else slot % self.lanes
        row = self.slots[slot] = Row(
            values=dict(values),
            number=self.next_number,
            stream=stream,
            before=self.newest.get(stream),
            generation=self.generations[slot],
            priority=self.highest_priority if priority is None else priority,
        )
        self.generations[slot] = row.generation.following()
        self.newest[stream] = self.next_number
        self.next_number += 1
        self.write_count += 1
        self.placements += 1

    def place_by_hand(self, slots: Iterable[int], rows: Iterable[Values]) -> None:
        """Write rows into slots that the program chooses. The writer does not count them."""
        self.outdated = True
        count = self.write_count
        for slot, values in zip(slots, rows, strict=True):
            self.place(slot, values)
        self.write_count = count

    # -- other changes -----------------------------------------------------------------------------

    def edit(self, slot: int, values: Values) -> None:
        """Change values of a stored row, which stays the same row."""
        self[slot].values = {**self[slot].values, **values}
        self.outdated |= "done" in values

    def clear(self) -> None:
        """Remove all rows. A removed row's slot and generation never name a row again."""
        self.slots = [None] * self.capacity
        self.generations = [generation.later() for generation in self.generations]
        self.highest_priority = 1.0
        self.cursor = self.write_count = 0
        self.free = []

    def cut(self, stream: int | None = None) -> None:
        """End the open episode of a stream, or of all streams."""
        for name, number in self.newest.items():
            if stream is None or name == stream:
                self.cuts.add((name, number))

    def set_priority(self, slot: int, priority: float, generation: int | None) -> None:
        """Set a priority. Without the right generation, drop the update and count it."""
        row = self.slots[slot]
        if row is None or (generation is not None and generation != row.generation.known):
            self.dropped_updates += 1
            return
        row.priority = priority
        self.highest_priority = max(self.highest_priority, priority)

    def use(self, slots: Iterable[int]) -> None:
        """Count draws of rows. A row that is used up frees its slot."""
        for slot in slots:
            self[slot].draws += 1
            if self.uses is not None and self[slot].draws == self.uses:
                self.free.append(slot)

    def loaded(self, saved: Model) -> Model:
        """Return the model after a load of a saved one.

        Open episodes end. Generations continue above all that either of the two has given, so that
        an earlier index and generation never name a new row.
        """
        made = saved.frozen()
        for slot, (one, other) in enumerate(zip(self.generations, saved.generations, strict=True)):
            made.generations[slot] = Generation(max(one.least, other.least))
        for slot in made.stored():
            least = max(self.generations[slot].least, saved[slot].generation.least)
            made[slot].generation = Generation(least)
            made.generations[slot] = Generation(least + 1)
        made.next_number = max(made.next_number, self.next_number)
        made.cut()
        return made

    def forget_draws(self) -> None:
        """Count all rows as never drawn. The files of a recoverable storage lack these counts."""
        self.free = []
        for slot in self.stored():
            self[slot].draws = 0

    # -- episodes --------------------------------------------------------------------------------

    def episodes(self) -> list[list[int]]:
        """Return the slots of each stored episode, the oldest row first."""
        found: list[list[int]] = []
        for stream in sorted({self[slot].stream for slot in self.stored()}):
            slots = [slot for slot in self.stored() if self[slot].stream == stream]
            slots.sort(key=lambda slot: self[slot].number)
            for position, slot in enumerate(slots):
                if position and self._continues(slots[position - 1], slot):
                    found[-1].append(slot)
                else:
                    found.append([slot])
        return found

    def _continues(self, slot: int, following: int) -> bool:
        row = self[slot]
        return (
            self[following].before == row.number
            and not row.values["done"]
            and (row.stream, row.number) not in self.cuts
            and (self.ring is not None or self._in_one_run(slot, following))
        )

    def _in_one_run(self, slot: int, following: int) -> bool:
        """Return whether all rows written between two rows lie in the slots between them.

        Rows that were placed by hand, or by rank, end all streams before and after them.
        """
        numbers = range(self[slot].number, self[following].number + 1)
        between = [self.slots[(slot + at) % self.capacity] for at in range(len(numbers))]
        return [row and row.number for row in between] == list(numbers)

    def episode_of(self, slot: int) -> list[int]:
        """Return the slots of the episode of a row."""
        return next(episode for episode in self.episodes() if slot in episode)

    def windows(self, length: int) -> list[list[int]]:
        """Return all windows of consecutive rows of one episode."""
        return [
            episode[start : start + length]
            for episode in self.episodes()
            for start in range(len(episode) - length + 1)
        ]

    def n_step(self, slot: int, steps: int, gamma: float) -> Values:
        """Return the row with the sum of up to ``steps`` rewards, as `NStep` reads it."""
        episode = self.episode_of(slot)
        at = episode.index(slot)
        rows = [self[other].values for other in episode[at : at + steps]]
        last = rows[-1]
        return {
            **rows[0],
            "reward": sum(gamma**step * row["reward"] for step, row in enumerate(rows)),
            **{name: last[name] for name in ("next_observation", "done", "terminated")},
            "truncated": last["truncated"],
            "discount": gamma ** len(rows),
            "steps_used": len(rows),
            "bootstrap": not last["terminated"],
        }


# -- what each sampler may draw --------------------------------------------------------------------


def chances(model: Model, slots: list[int], alpha: float, eps: float) -> dict[int, float]:
    """Return the value ``(p + eps) ** alpha`` of each row, to which its chance is proportional."""
    return {slot: (model[slot].priority + eps) ** alpha for slot in slots}


def weights(values: dict[int, float], beta: float) -> dict[int, float]:
    """Return the importance weight of each row: ``(v / min v) ** -beta``."""
    least = min(value for value in values.values() if value > 0)
    return {slot: (value / least) ** -beta for slot, value in values.items() if value > 0}


@dataclass
class Pass:
    """A pass without replacement: what it has left, or None between two passes."""

    left: set[Any] | None = None
    of: Any = None
    """The number of rows when the pass began. If it changes, a new pass begins."""

    def take(self, taken: Iterable[Any], everything: Callable[[], set[Any]], of: Any) -> bool:
        """Take a batch from the pass; return whether this ends the pass."""
        if not self.left or self.of != of:
            self.left, self.of = everything(), of
        taken = list(taken)
        assert len(set(taken)) == len(taken), f"{taken} repeats within a pass"
        assert set(taken) <= self.left, f"{sorted(set(taken) - self.left)} is not left in the pass"
        self.left -= set(taken)
        return not self.left
