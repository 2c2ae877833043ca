"""The random operations of programs.

An operation gets its random numbers from one seed, and looks up in the session what it needs: the
stored rows, old handles, saves. So operations can be left out of a program, and the others still
make sense. Each adds lines to the session that read like the program.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from replaykit import ReplayBuffer
from tests.programs.batches import BatchCheck, can_sample, flat_slots, index_of
from tests.programs.combinations import BATCH, STREAMS, Combination
from tests.programs.model import Model, Pass, Values
from tests.programs.rows import COLUMNS, check_rows, make_values, to_columns, to_tensordict
from tests.programs.session import Save, Session

Random = random.Random
Act = Callable[[Session, Random], None]


@dataclass(frozen=True)
class Operation:
    """One kind of operation."""

    act: Act
    weight: int
    applies: Callable[[Combination], bool]


OPERATIONS: dict[str, Operation] = {}


def operation(
    weight: int, applies: Callable[[Combination], bool] = lambda combination: True
) -> Callable[[Act], Act]:
    """Add a function to the operations of the combinations that it applies to."""

    def added(act: Act) -> Act:
        OPERATIONS[act.__name__] = Operation(act, weight, applies)
        return act

    return added


def writable(c: Combination) -> bool:
    return c.writer != "immutable"


def viewable(c: Combination) -> bool:
    """True if slices are views of the stored rows, and no prefetched batch reads them later."""
    return c.columns and not c.n_step and not c.prefetch


def may_renumber(s: Session, model: Model, slots: int) -> bool:
    """Return whether other slots may end a pass over episodes, as rows were placed by hand."""
    return s.combination.sampler == "slice pass" and model.by_hand and slots != model.capacity


def in_slice_pass(s: Session) -> bool:
    """True during a pass over episodes. It is not documented which edits end it."""
    return s.combination.sampler == "slice pass" and bool(s.passes.left or s.queue)


def row_count(s: Session, rng: Random) -> int:
    """Return a number of rows to write: mostly few, sometimes up to twice the capacity."""
    steps = s.model.capacity // s.combination.lanes
    most = steps if s.combination.writer == "episodes" else 2 * steps
    count = rng.randint(1, 4) if rng.random() < 0.7 else rng.randint(1, most)
    return min(count, most) * s.combination.lanes


def ids(rows: list[Values]) -> str:
    return "[" + ", ".join(str(row["id"]) + "." * row["done"] for row in rows) + "]"


# -- writes ----------------------------------------------------------------------------------------


@operation(6, writable)
def add(s: Session, rng: Random) -> None:
    rows = s.new_rows(rng, s.combination.lanes)
    given = to_tensordict(rows, s.combination.lanes)[0]
    index = s.call(f"rb.add(rows {ids(rows)})", lambda rb: rb.add(given))
    wanted = s.model.write(rows)
    s.written([-1] if index is None else index, wanted)


@operation(14, writable)
def extend(s: Session, rng: Random) -> None:
    rows = s.new_rows(rng, row_count(s, rng))
    given = s.as_given(rows)
    index = s.call(f"rb.extend(rows {ids(rows)})", lambda rb: rb.extend(given))
    s.written(index, s.model.write(rows))


@operation(3, lambda c: writable(c) and c.columns and c.prioritized)
def extend_with_priorities(s: Session, rng: Random) -> None:
    if s.model.next_number == 0:
        return  # the key would become a column
    rows = s.new_rows(rng, row_count(s, rng))
    priorities = [rng.randint(0, 32) / 8 for _ in rows]
    given = s.as_given(rows)
    leaf = torch.tensor(priorities)
    lanes = s.combination.lanes
    given["td_error"] = leaf if lanes == 1 else leaf.reshape(-1, lanes).T.contiguous()
    index = s.call(
        f"rb.extend(rows {ids(rows)} with td_error {priorities})", lambda rb: rb.extend(given)
    )
    s.written(index, s.model.write(rows, priorities))


def random_steps(s: Session, rng: Random) -> tuple[int, int]:
    """Return the first of some stored steps and the one after the last; equal if none is stored."""
    steps = len(s.model) // s.combination.lanes
    if not steps:
        return 0, 0
    first = rng.randrange(steps)
    return first, rng.randint(first + 1, steps)


@operation(4, lambda c: writable(c) and c.writer != "episodes")
def extend_by_view(s: Session, rng: Random) -> None:
    """Write rows that are views of stored rows."""
    lanes = s.combination.lanes
    first, last = random_steps(s, rng)
    if first == last:
        return
    rows = [dict(s.model[slot].values) for slot in range(first * lanes, last * lanes)]

    def act(rb: ReplayBuffer) -> Any:
        view = rb.storage[first:last]
        return rb.extend(view.transpose(0, 1) if lanes > 1 else view)

    index = s.call(f"rb.extend(rb.storage[{first}:{last}])", act)
    s.written(index, s.model.write(rows))


@operation(
    3,
    lambda c: (
        c.writer not in ("lanes", "best", "episodes")
        and c.sampler != "consuming"
        and not (c.ordered or c.sampler == "tagged slices")
        and not c.prefetch
    ),
)
def place(s: Session, rng: Random) -> None:
    """Write rows into slots that the program chooses.

    Only a write through the buffer waits for draws that prefetch threads have not made yet.
    """
    lanes = s.combination.lanes
    steps = s.model.capacity // lanes
    stored = len(s.model) // lanes
    free = list(range(stored)) + ([stored] if stored < steps else [])
    chosen = rng.sample(free, rng.randint(1, min(3, len(free))))
    chosen.sort()
    place_rows(s, rng, chosen)


def place_rows(s: Session, rng: Random, chosen: list[int]) -> None:
    lanes = s.combination.lanes
    steps = s.model.capacity // lanes
    rows = s.new_rows(rng, len(chosen) * lanes)
    if s.combination.returns:
        rows = [{**row, "return": 0.0, "valid": False} for row in rows]
    given: Any = to_tensordict(rows, lanes)
    if not s.combination.columns:
        given = list(given.unbind(0))
    s.call(f"rb.storage.set({chosen}, rows {ids(rows)})", lambda rb: rb.storage.set(chosen, given))
    s.model.place_by_hand([t * lanes + lane for t in chosen for lane in range(lanes)], rows)
    s.model.cursor = (chosen[-1] + 1) % steps * lanes
    s.advance_version()


@operation(1, lambda c: not writable(c))
def refused_write(s: Session, rng: Random) -> None:
    rows = to_tensordict([make_values(0, 1, "open")] * s.combination.lanes, s.combination.lanes)
    s.call("rb.add(row)", lambda rb: rb.add(rows[0]), RuntimeError)
    s.call("rb.extend(rows)", lambda rb: rb.extend(rows), RuntimeError)
    s.call("rb.empty()", lambda rb: rb.empty(), RuntimeError)


@operation(2, lambda c: writable(c) and c.columns)
def refused_rows(s: Session, rng: Random) -> None:
    """Write rows with another dtype, or with a key that is missing."""
    if s.model.next_number == 0:
        return
    given = s.as_given([make_values(-1, 1, "open")] * (2 * s.combination.lanes))
    if rng.random() < 0.5:
        given["reward_of_another_name"] = given.pop("wide")
    else:
        given["wide"] = given["wide"].double()
    s.call("rb.extend(rows of another schema)", lambda rb: rb.extend(given), ValueError)


@operation(1, lambda c: c.writer == "best")
def refused_rank(s: Session, rng: Random) -> None:
    given = s.as_given([make_values(0, 1, "open")] * 3)
    given["rank"][1] = float("nan")
    s.call("rb.extend(rows with a NaN as rank)", lambda rb: rb.extend(given), ValueError)


# -- edits -----------------------------------------------------------------------------------------


def other_values(s: Session, rng: Random, row: Values) -> Values:
    """Return new values of a row that keep its stream, its rank and mostly its flags."""
    keep = {name: row[name] for name in ("id", "env", "rank", "version")}
    if rng.random() < 0.8:
        keep |= {name: row[name] for name in ("done", "terminated", "truncated")}
    made = make_values(row["env"], rng.randrange(500), rng.choice(["open", "terminated"]))
    if s.combination.returns:  # until the next write
        made |= {"return": 0.0, "valid": False}
    return {**made, **keep}


@operation(4)
def edit_row(s: Session, rng: Random) -> None:
    stored = s.model.stored()
    if not stored or in_slice_pass(s):
        return
    slot = rng.choice(stored)
    lanes = s.combination.lanes
    values = other_values(s, rng, s.model[slot].values)
    row = to_tensordict([values])[0]
    index: Any = slot if lanes == 1 else (slot % lanes, slot // lanes)

    def act(rb: ReplayBuffer) -> None:
        rb[index] = row

    s.call(f"rb[{index}] = row  # id {values['id']}, done {values['done']}", act)
    s.model.edit(slot, values)


@operation(3, lambda c: c.lanes == 1)
def edit_rows(s: Session, rng: Random) -> None:
    """Assign rows to a slice, a list, a tensor or a mask."""
    stored = s.model.stored()
    if not stored or in_slice_pass(s):
        return
    count = len(stored)
    form = rng.choice(["slice", "list", "tensor", "mask"])
    slots = sorted(rng.sample(stored, rng.randint(1, count)))
    index: Any = list(slots)
    if form == "slice":
        slots = list(range(slots[0], slots[-1] + 1))
        index = slice(slots[0], slots[-1] + 1)
    elif form == "tensor":
        index = torch.tensor(slots)
    elif form == "mask":
        index = torch.tensor([slot in slots for slot in range(count)])
    values = [other_values(s, rng, s.model[slot].values) for slot in slots]
    rows = to_tensordict(values)

    first = slots == list(range(len(slots)))

    def act(rb: ReplayBuffer) -> None:
        if first:
            rb.write_all(rows)
        else:
            rb[index] = rows

    s.call(f"rb.write_all(rows {slots})" if first else f"rb[{form} {slots}] = rows", act)
    for slot, new in zip(slots, values, strict=True):
        s.model.edit(slot, new)


@operation(3, lambda c: c.columns)
def edit_column(s: Session, rng: Random) -> None:
    """Assign a whole column."""
    if not len(s.model):
        return
    lanes = s.combination.lanes
    name = rng.choice(["reward", "wide", "observation", "next_observation"])
    if name == "reward" and s.combination.returns:
        return  # each process may compute returns again, or not
    number = float(rng.randrange(500))
    slots = s.model.stored()
    new = [{name: number + slot} for slot in slots]
    key = COLUMNS[name][0]
    column = to_tensordict(new, lanes, time_first=False)[key]

    def act(rb: ReplayBuffer) -> None:
        if form == "set_":
            assert rb.set_(key, column) is rb
        elif form == "update_":
            rb.update_({key: column}, clone=rng.random() < 0.5)
        else:
            rb[key] = column

    form = rng.choice(["rb[key] = column", "set_", "update_"])
    s.call(f"{form} of {key!r}  # {number} + slot", act)
    for slot, values in zip(slots, new, strict=True):
        s.model.edit(slot, values)


@operation(2, viewable)
def edit_view(s: Session, rng: Random) -> None:
    """Write into a view of stored rows."""
    lanes = s.combination.lanes
    first, last = random_steps(s, rng)
    if first == last:
        return
    number = float(rng.randrange(500))
    slots = list(range(first * lanes, last * lanes))
    values = [{"wide": number + slot} for slot in slots]
    leaf = to_tensordict(values, lanes)["wide"]

    def act(rb: ReplayBuffer) -> None:
        rb.storage[first:last]["wide"].copy_(leaf)

    s.call(f"rb.storage[{first}:{last}]['wide'].copy_(...)  # {number} + slot", act)
    for slot, new in zip(slots, values, strict=True):
        s.model.edit(slot, new)


@operation(2, lambda c: c.columns and c.writer in ("ring", "lanes", "episodes"))
def update_if_present(s: Session, rng: Random) -> None:
    """Patch rows by old handles; those that were overwritten stay as they are."""
    if not s.kept or not len(s.model):
        return
    batch = rng.choice(s.kept)
    slots = flat_slots(batch["index"], s.combination.lanes)
    generations = batch["index_generation"].tolist()
    number = float(rng.randrange(500))
    values = [{"wide": number + slot} for slot in slots]
    patch = {"wide": to_tensordict(values)["wide"]}
    result = s.call(
        f"rb.update_if_present({slots}, {generations}, 'wide')  # {number} + slot",
        lambda rb: (
            rb.update_if_present(
                index=batch["index"], generation=batch["index_generation"], patch=patch
            ).updated
        ),
    )
    live = [s.model.has(*pair) for pair in zip(slots, generations, strict=True)]
    assert result.tolist() == live, f"expected {live}, got {result.tolist()}"
    for slot, new, is_live in zip(slots, values, live, strict=True):
        if is_live:
            s.model.edit(slot, new)


@operation(1)
def refused_edit(s: Session, rng: Random) -> None:
    """Edit a row that is not stored."""
    lanes = s.combination.lanes
    steps = len(s.model) // lanes
    row = to_tensordict([make_values(0, 1, "open")])[0]
    index: Any = steps if lanes == 1 else (0, steps)

    def act(rb: ReplayBuffer) -> None:
        rb[index] = row

    s.call(f"rb[{index}] = row", act, (IndexError, RuntimeError))


@operation(2, writable)
def empty(s: Session, rng: Random) -> None:
    if s.combination.remembers:
        s.handle = s.buffer  # the pass of another process goes on, if as many rows come again
    count = rng.random() < 0.7
    s.call(f"rb.empty({count})", lambda rb: rb.empty(count))
    before = s.model.write_count
    s.model.clear()
    if not count:
        s.model.write_count = before
    s.passes = Pass()
    s.drop_queue()


@operation(3, lambda c: c.columns)
def cut(s: Session, rng: Random) -> None:
    if in_slice_pass(s):
        return
    streams = sorted({s.model[slot].stream for slot in s.model.stored()})
    stream = rng.choice([None, *streams])
    s.call(f"rb.cut({'' if stream is None else stream})", lambda rb: rb.cut(stream))
    s.model.cut(stream)


@operation(1, lambda c: not c.columns)
def refused_cut(s: Session, rng: Random) -> None:
    if not len(s.model):
        return
    s.lines.append("rb.cut()")
    try:
        s.handle.cut()
    except RuntimeError:
        return
    raise AssertionError("expected a RuntimeError, because lists do not know episodes")


@operation(3, lambda c: c.columns and c.writer != "best")
def tag(s: Session, rng: Random) -> None:
    """Tag episodes by their rows, by old handles or without generations."""
    if not len(s.model) or s.model.by_hand or in_slice_pass(s):
        return
    slots = rng.sample(s.model.stored(), rng.randint(1, len(s.model)))
    index, generation = index_of(slots, s.combination.lanes), None
    if s.kept and s.combination.writer in ("ring", "lanes", "episodes") and rng.random() < 0.5:
        batch = rng.choice(s.kept)
        index, generation = batch["index"], batch["index_generation"]
        slots = flat_slots(index, s.combination.lanes)
    values = [rng.randint(1, 3) for _ in slots]
    given = {"mark": torch.tensor(values)}
    live = [True] * len(slots)
    if generation is not None:
        live = [s.model.has(*pair) for pair in zip(slots, generation.tolist(), strict=True)]
    found = s.call(
        f"rb.tag({slots}, {values}, generation={generation})",
        lambda rb: rb.tag(index, given, generation=generation),
    )
    assert found == sum(live), f"expected {sum(live)} stored rows, got {found}"
    for slot, value, is_live in zip(slots, values, live, strict=True):
        if is_live:
            s.model.tag([slot], [value])


@operation(3, lambda c: writable(c) and c.columns and c.writer != "best")
def extend_with_tags(s: Session, rng: Random) -> None:
    if s.model.by_hand:
        return
    rows = s.new_rows(rng, row_count(s, rng))
    values = [rng.randint(1, 3) for _ in rows]
    given = s.as_given(rows)
    line = f"rb.extend(rows {ids(rows)}, tags={values})"
    index = s.call(line, lambda rb: rb.extend(given, tags={"mark": torch.tensor(values)}))
    wanted = s.model.write(rows)
    s.written(index, wanted)
    numbers = range(s.model.next_number - len(rows), s.model.next_number)
    for slot, value, number in zip(wanted, values, numbers, strict=True):
        if s.model[slot].number == number:
            s.model.tag([slot], [value])


# -- queues and capacities -------------------------------------------------------------------------


def ordered(c: Combination) -> bool:
    """True if the storage has queues of rows, and its twin has the same."""
    removal = c.writer not in ("lanes", "episodes") or removes(c)
    return c.columns and writable(c) and c.sampler != "consuming" and removal


def removes(c: Combination) -> bool:
    """True if rows that are taken leave the storage at once."""
    return c.writer in ("lanes", "episodes")


def remove(s: Session, slots: list[int]) -> None:
    """Remove rows from the model, as the buffer did."""
    if not slots:
        return
    s.model.remove(slots)
    s.passes.left = None


@operation(3, removes)
def remove_oldest(s: Session, rng: Random) -> None:
    """Remove some rows of one stream or of all, or a whole stream."""
    streams: dict[int, list[int]] = {}
    for slot in sorted(s.model.stored(), key=lambda slot: s.model[slot].number):
        streams.setdefault(s.model[slot].stream, []).append(slot)
    lane, count = rng.choice([None, *streams]), rng.randint(0, 3)
    if s.combination.remembers:
        s.handle = s.buffer  # each process makes passes of its own
    s.rewind()
    if lane is not None and rng.random() < 0.3:
        count = s.model.capacity
        s.call(f"rb.empty(lane={lane})", lambda rb: rb.empty(lane=lane))
    else:
        line = f"rb.remove_oldest({count}, lane={lane})"
        s.call(line, lambda rb: rb.remove_oldest(count, lane=lane))
    chosen = streams if lane is None else [lane]
    remove(s, [slot for stream in chosen for slot in streams[stream][:count]])


@operation(3, ordered)
def take(s: Session, rng: Random) -> None:
    """Take rows from a queue; other rows have to stay in it."""
    if s.combination.layout == "lane_key" and (s.model.by_hand or s.model.best):
        return
    queues, count = s.model.queues(), rng.randint(1, 3)
    lanes = s.combination.lanes
    named = rng.choice([None, *queues]) if lanes > 1 or s.model.streams else None
    chosen = [named] if named is not None else list(queues)
    if s.combination.remembers:
        s.handle = s.buffer  # each process makes passes of its own
    least = min((len(queues[stream]) for stream in chosen), default=0)
    name = f"rb.take({count}, {named})"
    if not chosen or least < count:
        errors = (RuntimeError, IndexError, ValueError)
        s.call(name, lambda rb: rb.take(count, named), errors)
        return
    s.rewind()
    slots = [slot for stream in chosen for slot in queues[stream][:count]]
    rows = s.call(name, lambda rb: rb.take(count, named))
    assert rows.shape == (len(chosen), count), f"got the shape {rows.shape}"
    check_rows(to_columns(rows.reshape(-1)), [s.model[slot].values for slot in slots])
    if removes(s.combination):
        remove(s, slots)
    for slot in slots if not removes(s.combination) else []:
        s.model[slot].taken = True


@operation(3, lambda c: ordered(c) and c.writer in ("ring", "lanes"))
def extend_queue(s: Session, rng: Random) -> None:
    """Write rows that replace only taken rows."""
    c, model = s.combination, s.model
    if model.by_hand and c.layout == "lane_key":
        return
    rows = s.new_rows(rng, row_count(s, rng))
    attempt = model.frozen()
    lost = [row for row in attempt.slots if row is not None and not row.taken]
    given, count = s.as_given(rows), len(rows)
    counts = [sum(row["env"] == stream for row in rows) for stream in range(len(s.steps))]
    line = f"rb.extend(rows {ids(rows)}, overwrite=False, timeout=0)"

    def act(rb: ReplayBuffer) -> Any:
        return rb.extend(given, overwrite=False, timeout=0)

    if (model.ring is not None and max(counts) > model.ring) or count > model.capacity:
        s.call(line, act, ValueError)
        return
    attempt.write(rows)
    kept = {row.number for row in attempt.slots if row is not None}
    if any(row.number not in kept for row in lost):
        s.call(line, act, TimeoutError)
    else:
        s.written(s.call(line, act), model.write(rows))


@operation(1, ordered)
def drain(s: Session, rng: Random) -> None:
    if s.combination.layout == "lane_key" and (s.model.by_hand or s.model.best):
        return
    queues = list(s.model.queues().values())
    sizes = {len(queue) for queue in queues}
    if len(sizes) != 1 or 0 in sizes:
        s.call("rb.drain()", lambda rb: rb.drain(), RuntimeError)
        return
    rows = s.call("rb.drain()", lambda rb: rb.drain())
    assert rows.shape == (len(queues), *sizes), f"got the shape {rows.shape}"
    wanted = [s.model[slot].values for queue in queues for slot in queue]
    check_rows(to_columns(rows.reshape(-1)), wanted)
    count = s.model.write_count
    s.model.clear()
    s.model.write_count = count
    s.passes = Pass()
    s.drop_queue()


@operation(3, lambda c: not c.shared and not c.recover and writable(c))
def resize(s: Session, rng: Random) -> None:
    model, lanes = s.model, s.combination.lanes
    if model.outdated:
        return  # it may compute returns, as a write does
    slots = rng.randint(1, 2 * s.combination.capacity // lanes) * lanes
    if model.ring is not None:
        streams = {model[slot].stream for slot in model.stored()}
        if len(streams) * model.ring > slots:
            s.call(f"rb.resize({slots})", lambda rb: rb.resize(slots), RuntimeError)
            return
        slots = max(slots, STREAMS * model.ring)
    if may_renumber(s, model, slots):
        return
    if slots != model.capacity:
        s.rewind()
    kept = model.kept_episodes(slots) if model.episodic else None
    evicted = s.call(f"rb.resize({slots})", lambda rb: rb.resize(slots))
    if slots != model.capacity:
        before = model.frozen()
        wanted = model.resize(slots, kept)
        assert evicted == wanted, f"expected {wanted} evicted rows, got {evicted}"
        s.passes.move(before, model, s.combination.sampler)


# -- priorities ------------------------------------------------------------------------------------


@operation(8, lambda c: c.prioritized)
def update_priority(s: Session, rng: Random) -> None:
    """Set priorities by old handles, which may be those of rows that are gone."""
    if not s.kept or not len(s.model):
        return
    batch = rng.choice(s.kept)
    slots = flat_slots(batch["index"], s.combination.lanes)
    generations = batch["index_generation"].tolist()
    base = rng.randrange(24)
    priorities = [(base + slot) % 24 / 8 for slot in slots]
    single = not s.combination.sequences and not s.combination.windows
    if single and rng.random() < 0.5:
        data = batch.clone()
        data["td_error"] = torch.tensor(priorities)
        s.call(
            f"rb.update_tensordict_priority(batch {slots} {generations}, {priorities})",
            lambda rb: rb.update_tensordict_priority(data),
        )
    else:
        s.call(
            f"rb.update_priority({slots}, {priorities}, generation={generations})",
            lambda rb: rb.update_priority(
                batch["index"], torch.tensor(priorities), generation=batch["index_generation"]
            ),
        )
    for slot, priority, generation in zip(slots, priorities, generations, strict=True):
        s.model.set_priority(slot, priority, generation)


@operation(4, lambda c: c.prioritized)
def set_priority(s: Session, rng: Random) -> None:
    """Set priorities of stored rows without generations, or give the rows the default."""
    stored = s.model.stored()
    if not stored:
        return
    slots = rng.sample(stored, rng.randint(1, len(stored)))
    index = index_of(slots, s.combination.lanes)
    if rng.random() < 1 / 4:
        priorities = [s.model.highest_priority] * len(slots)
        s.call(f"rb.mark_update({slots})", lambda rb: rb.mark_update(index))
    else:
        priorities = [rng.randint(0, 32) / 8 for _ in slots]
        s.call(
            f"rb.update_priority({slots}, {priorities})",
            lambda rb: rb.update_priority(index, torch.tensor(priorities)),
        )
    for slot, priority in zip(slots, priorities, strict=True):
        s.model.set_priority(slot, priority, None)


@operation(1, lambda c: c.prioritized)
def refused_priority(s: Session, rng: Random) -> None:
    stored = s.model.stored()
    if not stored:
        return
    index = index_of(stored, s.combination.lanes)
    priorities = torch.ones(len(stored))
    priorities[-1] = rng.choice([-1.0, float("nan"), float("inf")])
    s.call(
        f"rb.update_priority({stored}, {priorities.tolist()})",
        lambda rb: rb.update_priority(index, priorities),
        ValueError,
    )


@operation(1, lambda c: not c.prioritized)
def useless_priority(s: Session, rng: Random) -> None:
    if not len(s.model):
        return
    index = index_of(s.model.stored()[:1], s.combination.lanes)

    def act(rb: ReplayBuffer) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rb.update_priority(index, torch.ones(1))
        assert any("no priorities" in str(one.message) for one in caught), "expected a warning"

    s.call("rb.update_priority(...)", act)


# -- samples ---------------------------------------------------------------------------------------


def choose_generator(s: Session, rng: Random) -> None:
    """Let the chosen handle of a shared buffer draw as its twin, which knows one handle only."""
    if s.other is None:
        return
    if s.combination.remembers:
        s.handle = s.buffer  # each process makes passes of its own
    seed = rng.randrange(1 << 30)
    for buffer in (s.handle, s.twin):
        buffer.set_rng(torch.Generator().manual_seed(seed))


@operation(18)
def sample(s: Session, rng: Random) -> None:
    choose_generator(s, rng)
    if not s.queue:
        found = s.handle.can_sample()
        assert found == s.can_sample(), f"can_sample() returned {found}"
    if s.can_sample():
        s.next_batch("rb.sample()", with_info=rng.random() < 0.2)
    elif not s.queue:
        s.call("rb.sample()", lambda rb: rb.sample(), (RuntimeError, ValueError))


@operation(5, lambda c: not (c.remembers and c.prefetch))
def sample_other_size(s: Session, rng: Random) -> None:
    choose_generator(s, rng)
    size = rng.randint(1, 2 * s.combination.capacity)
    size += size % 2  # whole slices
    size += 2 * (size == BATCH)  # such a batch would be one of those that are prefetched
    if s.can_sample():
        s.direct_batch(f"rb.sample({size})", size)
    else:
        s.call(f"rb.sample({size})", lambda rb: rb.sample(size), (RuntimeError, ValueError))


@operation(3, lambda c: c.sampler != "consuming")
def iterate(s: Session, rng: Random) -> None:
    """Take batches from an iterator until it ends, at most three."""
    choose_generator(s, rng)
    if not s.can_sample():
        return
    for _ in range(3):
        s.next_batch("next(rb)")
        if s.combination.passes and not s.passes.left:
            return


@operation(2, lambda c: c.passes and not c.prefetch)
def whole_pass(s: Session, rng: Random) -> None:
    """Iterate to the end of a pass: the rest of the pass, each row once."""
    choose_generator(s, rng)
    if not s.can_sample():
        return
    s.lines.append("for batch in rb: ...")
    batches = list(islice(s.handle, 20))
    twins = list(islice(s.twin, 20))
    assert len(batches) == len(twins) < 20, f"{len(batches)} batches, {len(twins)} of the twin"
    for batch, twin in zip(batches, twins, strict=True):
        check = BatchCheck(s.combination, s.model, batch, s.consumer_version)
        check.check(BATCH, s.passes)
        assert torch.equal(batch["index"], twin["index"]), "the twin draws other rows"
    assert not s.passes.left, f"{s.passes.left} is missing at the end of the pass"


@operation(1, lambda c: c.sampler == "staleness")
def newer_learner(s: Session, rng: Random) -> None:
    s.consumer_version += rng.randint(1, 2)
    s.lines.append(f"rb.sampler.consumer_version = {s.consumer_version}")
    for sampler in s.samplers():
        sampler.consumer_version = s.consumer_version


# -- saves and copies ------------------------------------------------------------------------------


@operation(3)
def save(s: Session, rng: Random) -> None:
    """Save into a folder, a new one or that of the last save, or into a dictionary."""
    if s.model.outdated:
        return  # a load does not compute the returns of a save again
    if s.combination.remembers:
        s.handle = s.buffer  # whose pass is saved
    form = rng.choice(["dumps", "dumps again", "state_dict"])
    states: list[Any] = []
    if form == "dumps again" and s.saves and not isinstance(s.saves[-1].states[0], dict):
        paths = list(s.saves.pop().states)
    else:
        paths = [s.new_path(), s.new_path()]

    def act(rb: ReplayBuffer) -> None:
        if form == "state_dict":
            states.append(rb.state_dict())
        else:
            states.append(paths[len(states)])
            rb.dumps(states[-1])

    name = "state = rb.state_dict()" if form == "state_dict" else f"rb.dumps({paths[0].name!r})"
    s.rewind()
    s.call(name, act)
    saved = Save(states, s.model.frozen(), copy.deepcopy(s.passes), s.consumer_version)
    s.saves = [*s.saves[-2:], saved]


def load_rows(rb: ReplayBuffer, saved: Any) -> None:
    """Load a save, which may not fit into the capacity."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*smaller capacity")
        if isinstance(saved, dict):
            rb.load_state_dict(saved)
        else:
            rb.loads(saved)


@operation(3)
def load(s: Session, rng: Random) -> None:
    """Go back to a saved state."""
    if not s.saves:
        return
    saved = rng.choice(s.saves)
    if may_renumber(s, saved.model, s.model.capacity):
        return
    s.handle = s.buffer
    states = iter(saved.states)

    def act(rb: ReplayBuffer) -> None:
        state = next(states)
        load_rows(rb, state)

    first = saved.states[0]
    name = "load_state_dict(state)" if isinstance(first, dict) else f"loads({first.name!r})"
    s.call(f"rb.{name}", act)
    s.model, s.passes = s.model.loaded(saved.model), copy.deepcopy(saved.passes)
    s.passes.move(saved.model, s.model, s.combination.sampler)
    s.consumer_version = saved.consumer_version
    s.drop_queue()
    if s.other is not None:
        s.advance_version()


OTHER_STORAGES = {"list": "lazy", "stack": "list", "tensor": "memmap", "lazy": "memmap"}


@operation(2)
def load_elsewhere(s: Session, rng: Random) -> None:
    """Load a save into a new buffer with another kind of storage, and sample from it."""
    c = s.combination
    other = Combination(
        OTHER_STORAGES.get(c.storage, "lazy"),
        c.layout,
        c.writer,
        c.sampler,
        n_step=c.n_step,
        returns=c.returns,
        dedup=c.storage in ("lazy", "memmap") and rng.random() < 0.5,
    )
    if not other.columns and (other.windows or other.n_step or other.sequences):
        return
    if may_renumber(s, s.model, c.capacity):
        return
    path = s.new_path()
    s.lines.append(f"other = new buffer ({other}); rb.dumps(...); other.loads(...)")
    s.handle.dumps(path)
    s.rewind()
    made = other.make(s.new_path(), 0)
    load_rows(made, path)
    model = s.model.frozen()
    passes = copy.deepcopy(s.passes)
    if not c.columns:
        model.cuts.clear()  # a storage of lists knows no cuts
    model.fit(c.capacity)
    passes.move(s.model.frozen(), model, c.sampler)
    model.cut()
    check_copy(s, made, other, model, passes, rng)


def check_copy(
    s: Session, made: ReplayBuffer, c: Combination, model: Any, passes: Pass, rng: Random
) -> None:
    """Check a copy of the buffer: its rows, one batch, and one write, which it makes alone."""
    s.check_content(made, model, c)
    model.outdated = False  # a copy's first write computes only missing returns
    version = s.consumer_version
    if s.handle is s.buffer and can_sample(c, model, version):
        batch = made.sample()
        check = BatchCheck(c, model, batch, version)
        check.check(BATCH, passes)
        if c.sampler == "consuming":
            model.use(check.slots)
    if writable(c):
        steps = list(s.steps)
        rows = s.new_rows(rng, c.lanes)
        s.steps = steps
        made.extend(s.as_given(rows))
        model.write(rows)
        s.check_content(made, model, c)
    made.shutdown()


@operation(2)
def clone(s: Session, rng: Random) -> None:
    """Copy the buffer by pickle or deepcopy. A copy is not shared and not recoverable."""
    if rng.random() < 0.5:
        s.lines.append("copied = pickle.loads(pickle.dumps(rb))")
        made = pickle.loads(pickle.dumps(s.handle))
    else:
        s.lines.append("copied = copy.deepcopy(rb)")
        made = copy.deepcopy(s.handle)
    s.rewind()
    check_copy(s, made, s.combination, s.model.frozen(), copy.deepcopy(s.passes), rng)


# -- processes -------------------------------------------------------------------------------------


@operation(4, lambda c: c.recover)
def reopen(s: Session, rng: Random) -> None:
    """Close the files and open them again, as after a restart of the program."""
    if s.model.outdated:
        return  # the first write after it computes only missing returns
    s.lines.append("rb = the same buffer, opened again")
    s.reopen(rng.randrange(1 << 30))
    s.model.cut()
    s.model.forget_draws()
    s.passes = Pass()
    s.drop_queue()
    s.advance_version()
    s.write_by_all()


def _write_in_child(buffer: ReplayBuffer, given: list[Any]) -> None:
    torch.set_num_threads(1)
    for rows in given:
        buffer.extend(rows)


@operation(1, lambda c: c.shared)
def fork(s: Session, rng: Random) -> None:
    """Write a few rows in a forked process."""
    batches = [s.new_rows(rng, row_count(s, rng)) for _ in range(2)]
    given = [s.as_given(rows) for rows in batches]
    s.lines.append(f"in a forked process: rb.extend(rows {', '.join(map(ids, batches))})")
    child = multiprocessing.get_context("fork").Process(
        target=_write_in_child, args=(s.handle, given)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0, f"the process ended with {child.exitcode}"
    for rows, data in zip(batches, given, strict=True):
        s.twin.extend(data)
        s.model.write(rows)
    s.advance_version()


def names_for(combination: Combination) -> tuple[list[str], list[int]]:
    """Return the operations of a combination and their weights."""
    chosen = {name: op for name, op in OPERATIONS.items() if op.applies(combination)}
    return list(chosen), [op.weight for op in chosen.values()]
