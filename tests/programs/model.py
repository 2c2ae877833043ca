"""A replay buffer in plain Python, slow and short, that random programs compare the package with.

A row is one dict of numbers. All slots are in one list. With lanes, slot ``time * lanes + lane``
holds the row of that lane, so that one ring serves all lanes. Nothing is derived in advance: every
question is answered by a search over all rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
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
    taken: bool = False
    """True if `take` has returned the row."""
    begin: int = -1
    """The row id of the first row of its episode, which may no longer be stored."""
    step: int = 0
    """The number of rows of its episode before it, with rows that are lost."""


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
    tags: dict[int, int] = field(default_factory=dict)
    """The tag of each episode that has one, by the row id of its first row."""
    ages: bool = False
    """True if a sampler needs the beginnings of all episodes."""
    by_hand: bool = False
    """True if rows were placed by hand, or by rank, since the buffer was empty."""
    episodic: bool = False
    """True if an `EpisodeWriter` stores whole episodes, and evicts the oldest."""
    removals: int = 0
    """The number of times that rows have left, and others moved to their slots."""

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
        made.newest, made.cuts, made.tags = dict(self.newest), set(self.cuts), dict(self.tags)
        return made

    # -- tags ------------------------------------------------------------------------------------

    def find_begins(self) -> None:
        """Find the first row of each episode, before it is lost."""
        numbers = {self[slot].number for slot in self.stored()}
        for episode in self.episodes():
            first = self[episode[0]]
            if first.begin < 0 or first.before in numbers:
                first.begin, first.step = first.number, 0
            for at, slot in enumerate(episode):
                self[slot].begin, self[slot].step = first.begin, first.step + at

    def tag(self, slots: Iterable[int], values: Iterable[int]) -> None:
        """Set the tags of the episodes of rows."""
        self.find_begins()
        for slot, value in zip(slots, values, strict=True):
            self.tags[self[slot].begin] = value

    def tags_of(self, episodes: list[list[int]]) -> list[int]:
        """Return the tags of episodes, 0 for those without one."""
        self.find_begins()
        return [self.tags.get(self[episode[0]].begin, 0) for episode in episodes]

    # -- queues and capacities -------------------------------------------------------------------

    def queues(self) -> dict[int, list[int]]:
        """Return the slots of the rows of each stream that were not taken, the oldest row first."""
        streams = 0 if self.streams or not len(self) else self.lanes
        found: dict[int, list[int]] = {stream: [] for stream in range(streams)}
        for slot in sorted(self.stored(), key=lambda slot: self[slot].number):
            row, key = self[slot], self[slot].stream if self.streams or self.lanes > 1 else 0
            if not row.taken:
                found.setdefault(key, []).append(slot)
        return dict(sorted(found.items()))

    def remove(self, slots: Iterable[int]) -> None:
        """Remove rows. Rows of the last slots move to the free slots."""
        holes, top = sorted(slots), len(self)
        self.removals += 1
        self.find_begins()
        length = top - len(holes)
        last = [slot for slot in range(length, top) if slot not in holes]
        for slot, source in zip([slot for slot in holes if slot < length], last, strict=True):
            self._move(source, slot)
        for slot in range(length, top):
            self.slots[slot] = None
            self.generations[slot] = self.generations[slot].later()

    def _move(self, source: int, target: int) -> None:
        row = self.slots[target] = self[source]
        row.generation = self.generations[target].later()
        self.generations[target] = row.generation.later().following()

    def kept_episodes(self, slots: int) -> list[int]:
        """Return the rows that are left if the oldest episodes leave until the others fit."""
        kept = sorted(self.stored(), key=lambda slot: self[slot].number)
        while len(kept) > slots:
            kept = [slot for slot in kept if self[slot].stream != self[kept[0]].stream]
        return kept

    def fit(self, slots: int) -> None:
        """Move rows as a load into another capacity does."""
        if slots == self.capacity:
            return
        kept = None
        if self.episodic:  # the newest episodes that fit
            kept, left = [], slots
            newest = sorted(self.stored(), key=lambda slot: -self[slot].number)
            for stream in dict.fromkeys(self[slot].stream for slot in newest):
                rows = [slot for slot in newest if self[slot].stream == stream]
                left -= len(rows)
                kept += rows if left >= 0 else []
        if self.ring is not None:  # the same number of rows of each stream
            streams: dict[int, list[int]] = {}
            for slot in sorted(self.stored(), key=lambda slot: -self[slot].number):
                streams.setdefault(self[slot].stream, []).append(slot)
            most = range(self.ring, -1, -1)
            found = ([slot for rows in streams.values() for slot in rows[:n]] for n in most)
            kept = next(slots_ for slots_ in found if len(slots_) <= slots) or None
        self.resize(slots, kept, loads=True)
        for slot in self.stored():  # other buffers may have given these generations to other rows
            self[slot].generation, self.generations[slot] = Generation(0), Generation(1)

    def resize(self, slots: int, kept: list[int] | None = None, *, loads: bool = False) -> int:
        """Change the capacity; return the number of rows that leave.

        Args:
            kept: the slots of the rows that stay, if not the newest ones, or those of best rank.
            loads: True for a load into another capacity.
        """
        before = len(self)
        self.find_begins()
        if kept is None:
            kept = sorted(self.stored(), key=lambda slot: self[slot].number)
            if self.best:
                kept.sort(key=lambda slot: -self[slot].values["rank"])
            kept = sorted(kept[:slots] if self.best else kept[-slots:])
        moves = loads or len(kept) < before or (self.ring is None and not self.episodic)
        if moves:
            kept.sort(key=lambda slot: self[slot].number)
            for slot in (
                [] if self.ring or self.episodic else self.stored()
            ):  # gaps no longer follow
                row = self[slot]
                after = [at for at in self.stored() if self[at].before == row.number]
                if row.number != self.newest[row.stream] and not (
                    after and self._in_one_run(slot, after[0])
                ):
                    self.cuts.add((row.stream, row.number))
        old, stay = self.slots, set(kept)
        free = [slot for slot in self.free if slot in stay]
        self.slots = [None] * slots
        while len(self.generations) < slots:
            self.generations.append(Generation(0))
        for slot, source in enumerate(kept):
            row = self.slots[slot if moves else source] = old[source]
            if moves and slot != source:
                row.generation = self.generations[slot].later()
                self.generations[slot] = row.generation.later().following()
        for slot in range(len(self.generations)):
            if slot >= slots or self.slots[slot] is None:
                self.generations[slot] = self.generations[slot].later()
        self.free = [kept.index(slot) for slot in free] if moves else free
        self.capacity, self.cursor = slots, len(kept) // self.lanes * self.lanes % slots
        return before - len(kept)

    # -- what is stored --------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(row is not None for row in self.slots)

    def __getitem__(self, slot: int) -> Row:
        row = self.slots[slot]
        assert row is not None, f"the model has no row in slot {slot}"
        return row

    def row_in(self, slot: int) -> Row | None:
        """Return the row of a slot, which may be one of an earlier capacity."""
        return self.slots[slot] if slot < len(self.slots) else None

    def has(self, slot: int, generation: int) -> bool:
        """Return whether the row of a handle is stored."""
        row = self.row_in(slot)
        return row is not None and row.generation.known == generation

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
        rows = list(rows)
        holes = self._evict(rows) if self.episodic else []
        default = self.highest_priority
        for position, values in enumerate(rows):
            slot = holes.pop(0) if holes else self._slot_for(values)
            if self.gamma is not None:
                values = {**values, "return": 0.0, "valid": False}
            priority = default if priorities is None else priorities[position]
            if slot >= 0:
                self.place(slot, values, priority)
            if self.best:
                found = [-1 if earlier == slot else earlier for earlier in found]
            found.append(slot)
        if holes:
            self.remove(holes)
        if self.episodic:
            for values in rows:
                self.cut(values["env"])
        if priorities is not None:
            kept = [p for p, slot in zip(priorities, found, strict=True) if slot >= 0]
            self.highest_priority = max([default, *kept])
        if self.gamma is not None:
            self._store_returns(self.gamma)
        return found

    def _evict(self, rows: list[Values]) -> list[int]:
        """Evict the oldest episodes for new rows; return the slots that are free then."""
        need, holes = len(rows) - (self.capacity - len(self)), list[int]()
        oldest = sorted(self.stored(), key=lambda slot: self[slot].number)
        for stream in dict.fromkeys(self[slot].stream for slot in oldest):
            if len(holes) >= need:
                break
            holes += [slot for slot in oldest if self[slot].stream == stream]
        return sorted(holes)

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
        if self.episodic:
            return len(self)
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
        begin, step = -1, 0
        if self.tags or self.ages:
            self.find_begins()
            last = next((r for r in self.slots if r and r.number == self.newest.get(stream)), None)
            if last and not last.values["done"] and (stream, last.number) not in self.cuts:
                begin, step = last.begin, last.step + 1
        row = self.slots[slot] = Row(
            values=dict(values),
            number=self.next_number,
            stream=stream,
            before=self.newest.get(stream),
            begin=begin,
            step=step,
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
        self.outdated = self.by_hand = True
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
        self.free, self.by_hand = [], False

    def cut(self, stream: int | None = None) -> None:
        """End the open episode of a stream, or of all streams."""
        for name, number in self.newest.items():
            if stream is None or name == stream:
                self.cuts.add((name, number))

    def set_priority(self, slot: int, priority: float, generation: int | None) -> None:
        """Set a priority. Without the right generation, drop the update and count it."""
        row = self.row_in(slot)
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
        made.fit(self.capacity)
        made.generations = [
            Generation(max(one.least, other.least))
            for one, other in zip_longest(
                self.generations, saved.generations, fillvalue=Generation(0)
            )
        ]
        for slot in made.stored():
            least = self.generations[slot].least if slot < len(self.generations) else 0
            least = max(least, made[slot].generation.least)
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
            and (self.ring is not None or self.episodic or self._in_one_run(slot, following))
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

    def windows_by_age(self, length: int) -> list[tuple[tuple[int, int], list[int]]]:
        """Return the age and the step of windows, every ``length`` steps, in order."""
        self.find_begins()
        found = []
        for window in self.windows(length):
            first = self[window[0]]
            if first.step % length == 0:
                found.append(((first.begin, first.step), window))
        return sorted(found)

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
    place: Any = (-1, 0)
    """The age of the episode of the last window, and its step, if the sampler keeps an order."""
    first: int = -1
    """The row id of the first row of that window."""
    of: Any = None
    """The numbers of rows and of removals when the pass began. A change begins a new pass."""

    def take(self, taken: Iterable[Any], everything: Callable[[], set[Any]], of: Any) -> bool:
        """Take a batch from the pass; return whether this ends the pass."""
        if not self.left or self.of != of:
            self.left, self.of = everything(), of
        taken = list(taken)
        assert len(set(taken)) == len(taken), f"{taken} repeats within a pass"
        assert set(taken) <= self.left, f"{sorted(set(taken) - self.left)} is not left in the pass"
        self.left -= set(taken)
        return not self.left

    def move(self, before: Model, model: Model, sampler: str) -> None:
        """Follow rows to other slots."""
        numbers = {slot: before[slot].number for slot in before.stored()}
        slots = {model[slot].number: slot for slot in model.stored()}
        if numbers and self.first >= 0 and self._next_row(before, sampler) not in slots:
            self.place, self.first = (-1, 0), -1  # the oldest window
        places = {old: slots[number] for old, number in numbers.items() if number in slots}
        if not self.left:
            return
        if isinstance(self.of, tuple):
            if self.of != (len(numbers), model.removals):
                self.left = None  # the next draw begins a pass
                return
            self.left = {places[slot] for slot in self.left if slot in places}
            self.of = len(model), model.removals
            return
        kept = {
            tuple(one): tuple(places[slot] for slot in one if slot in places) for one in self.of[1]
        }
        self.left = {kept[one] for one in self.left if kept[one]}
        self.of = [self.of[0], [list(one) for one in kept.values()]]

    def _next_row(self, model: Model, sampler: str) -> int:
        """Return the id of the row that saves name as the place of ordered draws."""
        model.find_begins()
        rows = [[model[slot] for slot in episode] for episode in model.episodes()]
        rows.sort(key=lambda episode: episode[0].begin)
        if sampler == "sequential slices":
            if any(self.first == row.number for episode in rows for row in episode):
                return self.first
            later = [e for e in rows if e[0].begin >= self.place[0]]
            return later[0][0].number if later else rows[-1][-1].number
        later = [episode for episode in rows if episode[0].begin > self.place[0]]
        return (later or rows[-1:])[0][-1].number
