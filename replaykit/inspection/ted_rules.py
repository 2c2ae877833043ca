"""What every table of transitions keeps, checked row by row against the episode table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.report import duplicates
from replaykit.datasets.opened import Published
from replaykit.inspection.finding import Finding
from replaykit.inspection.words import counted
from replaykit.ted import Key

__all__ = ["ted_findings"]

Array = npt.NDArray[Any]
Advance = Callable[[int], object]

_BLOCK_ROWS: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 22
_MOST_NAMED: Final = 5
_FLAGS: Final = ("done", "terminated", "truncated")


def ted_findings(published: Published, advance: Advance) -> list[Finding]:
    """Checks the columns of a data set against each other and against its episode table.

    Rules by their number in messages: V30 flags agree, V31 ends are where episodes end, V32
    episodes cover all rows once, V33 ids name one episode each, V22 what a row arrives at is what
    the next one begins with, V20 and V21 no NaN where there must be none, V36 no episode twice.
    """
    table = _Table(published)
    found = [*_episodes(table)]
    if any(not each.ok for each in found):
        return found  # rows cannot be told apart by episodes
    found += _flags(table, advance)
    found += _returns(table, advance)
    found += _successors(table, advance)
    found += _holes(published)
    found += _twice(published)
    return found


class _Table:
    """Rows of a data set one after the other, whether it is split by episodes or not."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.starts = published.episodes["start"].numpy()
        self.lengths = published.episodes["length"].numpy()
        self.batch = published.manifest.batch
        self.rows = int(self.lengths.sum())

    def blocks(self, *keys: Key, rows: int = _BLOCK_ROWS) -> Iterator[tuple[int, list[Array]]]:
        """Yields the number of the first row and values ``[n, ...]`` of columns, by blocks."""
        columns = [self.published.columns[key].numpy() for key in keys]
        if len(self.batch) == 1:
            for start in range(0, self.rows, rows):
                yield start, [column[start : start + rows] for column in columns]
            return
        first = 0
        for episode, length in enumerate(self.lengths.tolist()):
            for start in range(0, length, rows):
                stop = min(start + rows, length)
                yield first + start, [column[episode, start:stop] for column in columns]
            first += length

    def has(self, *keys: Key) -> bool:
        return all(key in self.published.columns for key in keys)

    def name(self, row: int) -> str:
        """Says which row of which episode a row is."""
        ends = np.cumsum(self.lengths)
        episode = int(np.searchsorted(ends, row, "right"))
        first = int(ends[episode - 1]) if episode else 0
        return f"row {row} (step {row - first} of episode {episode})"


def _episodes(table: _Table) -> list[Finding]:
    check, lengths, starts = "episode table", table.lengths, table.starts
    if (lengths < 1).any():
        at = int(np.argmax(lengths < 1))
        return [Finding(check, False, f"episode {at} has length {int(lengths[at])} [V32]")]
    is_flat = len(table.batch) == 1
    expected = np.cumsum(lengths) - lengths
    if is_flat and not np.array_equal(starts, expected):
        at = int(np.argmax(starts != expected))
        text = f"episode {at} starts at row {int(starts[at])}, expected {int(expected[at])} [V32]"
        return [Finding(check, False, text)]
    room = table.batch[0] if is_flat else int(np.prod(table.batch))
    if table.rows != room if is_flat else (lengths > table.batch[1]).any():
        text = f"its episodes have {table.rows} rows, the columns {room} [V32]"
        return [Finding(check, False, text)]
    return [
        Finding(
            check,
            True,
            f"{counted(len(lengths), 'episode')} of {counted(table.rows, 'row')} together",
        )
    ]


def _flags(table: _Table, advance: Advance) -> list[Finding]:
    check = "flags"
    following = [("next", name) for name in _FLAGS]
    if not table.has(*following):
        missing = [key for key in following if not table.has(key)]
        return [Finding(check, False, f"the columns {missing} are missing [V30]")]
    last = np.cumsum(table.lengths) - 1
    said = [table.published.episodes[name].numpy() for name in ("terminated", "truncated")]
    for start, flags in table.blocks(*following):
        done, terminated, truncated = (flag.reshape(len(flag)) for flag in flags)
        advance(3 * len(done))
        wrong = done != (terminated | truncated)
        if wrong.any():
            at = table.name(start + int(np.argmax(wrong)))
            text = f"next/done is not next/terminated or next/truncated at {at} [V30]"
            return [Finding(check, False, text)]
        low, high = np.searchsorted(last, [start, start + len(done)])
        ends = last[low:high] - start
        expected = np.zeros(len(done), np.bool_)
        expected[ends] = True
        if not np.array_equal(expected, done):
            row = int(np.argmax(expected != done))
            what = "is no end of an episode" if done[row] else "ends an episode without it"
            text = f"next/done: {table.name(start + row)} {what} [V31]"
            return [Finding(check, False, text)]
        for number, (name, flag) in enumerate(
            zip(_FLAGS[1:], (terminated, truncated), strict=True)
        ):
            column = said[number][low:high]
            differs = flag[ends] != column
            if differs.any():
                first = int(np.argmax(differs))
                is_set = bool(column[first])
                text = (
                    f"the table says {name} {is_set} of episode {low + first}, its last row "
                    f"next/{name} {not is_set} [V31]"
                )
                return [Finding(check, False, text)]
    found = [Finding(check, True, f"{table.rows:,} rows, {len(last):,} ends")]
    return found + _before(table, advance) + _ids(table, advance)


def _before(table: _Table, advance: Advance) -> list[Finding]:
    for name in _FLAGS:
        if not table.has((name,)):
            continue
        for start, (flag,) in table.blocks((name,)):
            advance(len(flag))
            if flag.any():
                at = table.name(start + int(np.argmax(flag.reshape(len(flag)))))
                return [Finding("flags before", False, f"{name} is set at {at} [V30]")]
    return [Finding("flags before", True, "none is set")]


def _ids(table: _Table, advance: Advance) -> list[Finding]:
    check = "ids"
    if not table.has(("episode",), ("seed",)):
        return [Finding(check, False, "the columns 'episode' and 'seed' are missing [V33]")]
    episodes = table.published.episodes
    pairs = np.stack([episodes["seed"].numpy(), episodes["episode"].numpy()], 1)
    if len(np.unique(pairs, axis=0)) < len(pairs):
        return [Finding(check, False, "two episodes have the same seed and episode [V33]")]
    ends = np.cumsum(table.lengths)
    for start, (seed, episode) in table.blocks(("seed",), ("episode",)):
        advance(seed.nbytes + episode.nbytes)
        of = np.searchsorted(ends, np.arange(start, start + len(seed)), "right")
        wrong = (seed.reshape(-1) != pairs[of, 0]) | (episode.reshape(-1) != pairs[of, 1])
        if wrong.any():
            at = table.name(start + int(np.argmax(wrong)))
            return [
                Finding(check, False, f"seed and episode are those of another one at {at} [V33]")
            ]
    return [Finding(check, True, f"{len(pairs):,} pairs of seed and episode")]


def _returns(table: _Table, advance: Advance) -> list[Finding]:
    key = ("next", "reward")
    if not table.has(key) or table.published.columns[key].numel() != np.prod(table.batch):
        return []
    sums = np.zeros(len(table.lengths))
    sizes = np.zeros(len(table.lengths))
    ends = np.cumsum(table.lengths)
    for start, (reward,) in table.blocks(key):
        advance(reward.nbytes)
        of = np.searchsorted(ends, np.arange(start, start + len(reward)), "right")
        values = reward.reshape(-1).astype(np.float64)
        np.add.at(sums, of, values)
        np.add.at(sizes, of, np.abs(values))
    said = table.published.episodes["return"].numpy()
    # The table's sums are of the source, before a cast, and in another order.
    precision = max(1e-9, 8 * _precision(table.published.columns[key].numpy().dtype))
    wrong = ~(np.abs(sums - said) <= 1e-12 + precision * sizes) & np.isfinite(sums)
    if wrong.any():
        at = int(np.argmax(wrong))
        text = (
            f"the table says {said[at]:.9g} of episode {at}, the sum of its next/reward is "
            f"{sums[at]:.9g}"
        )
        return [Finding("returns", False, text)]
    return [Finding("returns", True, f"{len(said):,} sums of next/reward")]


def _precision(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).eps) if dtype.kind == "f" else 0.0


def _successors(table: _Table, advance: Advance) -> list[Finding]:
    """What rows arrive at is what the next ones of their episodes begin with, byte by byte."""
    columns, found = table.published.columns, []
    last = np.cumsum(table.lengths) - 1
    for key in columns:
        if key[0] != "observation" or not table.has(("next", *key)):
            continue
        one = columns[key]
        width = max(1, one[:1].numel() // max(1, int(np.prod(one.shape[: len(table.batch)][1:]))))
        rows = max(2, _BLOCK_BYTES // (width * one.element_size()))
        before = held = one.numpy()[:0].reshape(0, *one.shape[len(table.batch) :])
        count, first = 0, None
        for start, (now, after) in table.blocks(key, ("next", *key), rows=rows):
            advance(2 * now.nbytes)
            joined, following = np.concatenate([before, now]), np.concatenate([held, after])
            base = start - len(before)
            wrong = _differ(following[:-1], joined[1:])
            ends = last[(last >= base) & (last < base + len(wrong))] - base
            wrong[ends] = False
            count += int(wrong.sum())
            if first is None and wrong.any():
                first = base + int(np.argmax(wrong))
            before, held = now[-1:], after[-1:]
        if first is not None:
            text = (
                f"next/{'/'.join(key)} is not the {'/'.join(key)} of the next row in {count} rows, "
                f"first at {table.name(first)} [V22]"
            )
            found.append(
                Finding("successors", False, text, is_warning=_has_own(table.published, key))
            )
    checked = sum(key[0] == "observation" and table.has(("next", *key)) for key in columns)
    return found or [Finding("successors", True, f"{checked} keys of observations")]


def _differ(one: Array, other: Array) -> Array:
    """Which rows differ in a byte: NaN is equal to itself."""
    width = int(np.prod(one.shape[1:])) * one.dtype.itemsize
    if not width or not len(one):
        return np.zeros(len(one), np.bool_)
    first = np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8)
    second = np.ascontiguousarray(other).reshape(len(one), -1).view(np.uint8)
    return np.asarray((first != second).any(axis=1))


def _has_own(published: Published, key: Key) -> bool:
    """Whether the states arrived at have a source of their own, which may contradict the other."""
    sources = {array.key: array.facts.get("source") for array in published.manifest.arrays}
    return sources.get(key) != sources.get(("next", *key))


def _holes(published: Published) -> list[Finding]:
    """NaN where there must be none, by the statistics of the manifest, which checksums cover not.

    A column is read for it only if there are no statistics.
    """
    policies = published.manifest.options.get("policies", {})
    kept = policies.get("on_invalid") == "keep"
    found, count = [], 0
    for array in (*published.manifest.arrays, *published.manifest.finals):
        role = array.key[1] if array.key[0] == "next" and len(array.key) > 1 else array.key[0]
        if role not in ("observation", "action", "reward"):
            continue
        count += 1
        nan = (array.facts.get("statistics") or {}).get("nan", 0)
        if nan:
            rule = "V20" if role == "action" else "V21"
            text = f"{'/'.join(array.key)} holds {nan} NaN [{rule}]"
            found.append(Finding("numbers", False, text, is_warning=kept))
    return found or [Finding("numbers", True, f"no NaN in {count} keys")]


def _twice(published: Published) -> list[Finding]:
    if "digest" not in published.episodes:
        return []
    pairs = duplicates(published.episodes["digest"].numpy())
    if not pairs:
        return [Finding("duplicates", True, "no episode is there twice")]
    listed = ", ".join(f"{later} as {first}" for later, first in pairs[:_MOST_NAMED])
    text = f"{counted(len(pairs), 'episode')} with the content of an earlier one: {listed} [V36]"
    return [Finding("duplicates", False, text, is_warning=True)]
