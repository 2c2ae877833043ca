"""The compiled episode index against a model that scans lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaykit import native
from replaykit.episodes import EPISODES, ROWS, WINDOWS, CountLaw, Head, StreamEpisodes
from replaykit.episodes.boundaries import RESTORED, SEVERED, SWITCHED
from tests.effort import cases
from tests.support.laws import window_count
from tests.support.refusals import refuses

Array = np.ndarray[Any, Any]
NOT_INIT = 0x20


def new_ring(
    slots: int, lanes: int = 1, *, start: int = 0, begin: Any = None, head: Any = None
) -> StreamEpisodes:
    gone = None if begin is None else np.where(np.array(begin) < 0, 0, start - np.array(begin))
    head = None if head is None else np.array(head)
    return StreamEpisodes(slots, lanes, start=start, gone=gone, head=head)


def severed(ring: StreamEpisodes) -> Array:
    """Time and lane of the rows that a cut separates from the next row."""
    time = np.repeat(np.arange(ring.lo, ring.hi), ring.lanes)
    lane = np.tile(np.arange(ring.lanes), ring.hi - ring.lo)
    _, _, first, last, _ = ring.rows(time, lane)
    cuts = np.stack([time, lane], 1)[(time == last) & (time < ring.hi - 1)]
    before = np.stack([first - 1, lane], 1)[(time == first) & (time > ring.lo)]
    assert sorted(cuts.tolist()) == sorted(before.tolist())
    return cuts


class Model:
    """Every row that ever came, and scans of them."""

    def __init__(
        self, slots: int, lanes: int, start: int, begin: list[int] | None, head: list[int] | None
    ) -> None:
        self.slots, self.lanes, self.start = slots, lanes, start
        self.begin = begin or [-1] * lanes
        self.head = head or [int(Head.RESET)] * lanes
        self.rows: list[list[int]] = [[] for _ in range(lanes)]
        self.severed: list[tuple[int, int]] = []

    @property
    def hi(self) -> int:
        return self.start + len(self.rows[0])

    @property
    def lo(self) -> int:
        return max(self.start, self.hi - self.slots)

    def append(self, codes: Array) -> None:
        for lane in range(self.lanes):
            self.rows[lane] += [int(code) for code in codes[:, lane]]

    def close(self, lanes: list[bool], code: int) -> None:
        if self.hi == self.start:
            return
        for lane in np.flatnonzero(lanes):
            if code in (SEVERED, RESTORED):
                self.severed.append((self.hi - 1, int(lane)))
            if self.rows[lane][-1] & 7 == 0:
                self.rows[lane][-1] |= code

    def episodes(self, lane: int) -> list[tuple[int, int, int, int, int]]:
        """begin, first stored, last, code, head of the stored episodes."""
        found = []
        begin, kind, coming = self.begin[lane], int(Head.RESET), self.head[lane]
        for time, row in enumerate(self.rows[lane], self.start):
            if begin < 0:
                begin, kind = time, int(Head.CUT) if row & NOT_INIT else coming
            if row & 7 or time == self.hi - 1:
                found.append((begin, time, row & 7, kind))
                begin, coming = -1, int(Head.CUT if row & 7 == SEVERED else Head.RESET)
        return [
            (begin, max(begin, self.lo), last, code, int(Head.EVICTED) if begin < self.lo else kind)
            for begin, last, code, kind in found
            if last >= self.lo
        ]

    def windows(self, law: CountLaw, kind: int) -> list[list[tuple[int, int, int, int]]]:
        """base, rows, count and rest of everything that a law numbers, in every lane."""
        lanes = []
        for lane in range(self.lanes):
            own = []
            for _, first, last, code, head in self.episodes(lane):
                reset = head == Head.RESET
                count = window_count(law, last - first + 1, reset=reset, is_open=not code)
                skip = 0 if reset else law.past
                rows = last - first + 1 - skip - (0 if code else law.open_future)
                numbers = {WINDOWS: count, EPISODES: int(count > 0), ROWS: last - first + 1}[kind]
                own += [(first + skip, rows, count, i) for i in range(numbers if count else 0)]
            lanes.append(own)
        return lanes


LAWS = [
    CountLaw.strict(1),
    CountLaw.strict(2),
    CountLaw.strict(4),
    CountLaw(1, 2, past=2),
    CountLaw(3, -2, 1, past=1, open_future=1),
    CountLaw(1, 0, open_future=2),
    CountLaw(1, 0, closed=True),
    CountLaw(2, -1, 1, intact=True),
    CountLaw(1, 0, past=1, closed=True, intact=True),
    CountLaw(1, -3),
    CountLaw(2, 5),
    CountLaw(1, 0, past=2),
    CountLaw(1, 0, open_future=2),
    CountLaw(1, 0, past=1, open_future=1),
]


def assert_same(ring: StreamEpisodes, model: Model) -> None:
    """Everything but the laws."""
    assert (ring.lo, ring.hi, ring.slots, ring.lanes) == (
        model.lo, model.hi, model.slots, model.lanes,
    )  # fmt: skip
    own = [model.episodes(lane) for lane in range(model.lanes)]
    want = [(lane, *episode) for lane, episodes in enumerate(own) for episode in episodes]
    assert list(zip(*(column.tolist() for column in ring.table()), strict=True)) == want
    time = np.array([t for _, _, a, b, _, _ in want for t in range(a, b + 1)], np.int64)
    lane = np.array([e[0] for e in want for _ in range(e[2], e[3] + 1)], np.int64)
    looked = [column.tolist() for column in ring.lookup(time, lane)]
    found = ring.around(time % ring.slots * ring.lanes + lane)
    assert [column.tolist() for column in found] == [time.tolist(), lane.tolist(), *looked]
    rows = [e for e in want for _ in range(e[2], e[3] + 1)]
    assert looked == [[e[i] for e in rows] for i in (1, 3, 4, 5)]
    noted = [model.rows[at][t - model.start] & 7 for t, at in zip(time, lane, strict=True)]
    assert ring.rows(time, lane)[1].tolist() == noted
    newest = [episodes[-1] if episodes else (0, 0, 0, 1, 0) for episodes in own]
    lanes = ring.per_lane()
    assert (lanes[2] != 0).tolist() == [code == 0 for *_, code, _ in newest]
    if model.hi > model.start:
        heads = [e[0][0] if e[0][0] < model.lo else -1 for e in own]
        assert np.maximum(lanes[3], -1).tolist() == heads
    wanted = sorted({one for one in model.severed if model.lo <= one[0] < model.hi - 1})
    cuts = severed(ring).tolist()
    assert sorted((time, lane) for time, lane in cuts if time < model.hi - 1) == wanted
    assert ring.longest() == max((last - first + 1 for _, _, first, last, _, _ in want), default=0)


def assert_same_law(ring: StreamEpisodes, model: Model, law: CountLaw, kind: int) -> None:
    want = model.windows(law, kind)
    assert ring.totals(law, kind).tolist() == [len(own) for own in want]
    flat = [(lane, *one) for lane, own in enumerate(want) for one in own]
    found = ring.find(law, kind, np.arange(len(flat)))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == flat
    assert ring.total(law, kind) == len(flat)
    fits = [at for at, (_, _, rows, _, rest) in enumerate(flat) if rest < rows]
    elements = [
        (base + rest) % ring.slots * ring.lanes + lane
        for lane, base, _, _, rest in (flat[at] for at in fits)
    ]
    assert ring.pick(law, kind, np.array(fits, np.int64)).tolist() == elements
    for wrong in (-1, len(flat)):
        with pytest.raises(IndexError):
            ring.pick(law, kind, np.array([wrong]))
    if kind == WINDOWS:
        for length in {1, 2, 3, ring.slots} & set(range(1, ring.slots + 1)):
            assert_same_slices(ring, law, flat, length)


def assert_same_slices(ring: StreamEpisodes, law: CountLaw, flat: list[Any], length: int) -> None:
    fits = [at for at, (_, _, rows, _, rest) in enumerate(flat) if rest + length <= rows]
    elements = [
        (base + rest + step) % ring.slots * ring.lanes + lane
        for lane, base, _, _, rest in (flat[at] for at in fits)
        for step in range(length)
    ]
    element, window = ring.slices(law, np.array(fits, np.int64), length)
    assert element.tolist() == elements
    assert window.tolist() == [at for at in range(len(fits)) for _ in range(length)]
    for wrong in {-1, len(flat), *range(len(flat))} - set(fits):
        with pytest.raises(IndexError):
            ring.slices(law, np.array([*fits, wrong], np.int64), length)
    for wrong in (0, ring.slots + 1):
        with pytest.raises(ValueError, match=f"got {wrong}"):
            ring.slices(law, np.array(fits, np.int64), wrong)


def random_codes(random: np.random.Generator, n: int, lanes: int, length: float) -> Array:
    codes = random.choice([1, 2, SWITCHED, SEVERED, RESTORED], size=(n, lanes)).astype(np.uint8)
    codes[random.random((n, lanes)) >= 1 / length] = 0
    codes[random.random((n, lanes)) < 0.1] |= NOT_INIT
    return codes


@pytest.mark.parametrize(("slots", "lanes", "length"), [
    (997, 1, 1), (997, 1, 2.5), (1000, 1, 6), (150, 7, 3), (700, 3, 200), (32, 40, 1.5),
    (1, 1, 2), (2, 3, 2), (3, 1, 1.5), (5, 2, 3), (8, 1, 5), (13, 3, 4),
])  # fmt: skip
def test_ring_equals_a_scan_of_all_rows(slots: int, lanes: int, length: float) -> None:
    """Ends of every kind, rows that are joined in the middle, cuts, more rows than slots; also
    thousands of episodes, and laws that are requested always, now and then, and once."""
    small = slots < 20
    for seed in range(cases(12) if small else 1):
        check_program(np.random.default_rng(slots + seed), slots, lanes, length, 1 if small else 12)


def check_program(
    random: np.random.Generator, slots: int, lanes: int, length: float, every: int
) -> None:
    """Follow a random program of appends and cuts, of which ``every`` so many steps are checked."""
    start, begin, head = 0, None, None
    if every == 1 and random.random() < 0.5:  # of a ring that was loaded
        start = int(random.integers(1, 30))
        begin = random.integers(-1, start, lanes).tolist()
        head = random.integers(1, 3, lanes).tolist()
    ring = new_ring(slots, lanes, start=start, begin=begin, head=head)
    model = Model(slots, lanes, start, begin, head)
    assert_same(ring, model)
    sizes, chances = [1, 8, slots // 10, slots // 3, 2 * slots + 1], [0.3, 0.3, 0.2, 0.15, 0.05]
    for step in range(60):
        version = ring.version
        codes = random_codes(random, int(random.choice(sizes, p=chances)), lanes, length)
        ring.append(codes)
        model.append(codes)
        assert (ring.version != version) == bool(len(codes))
        if step % 5 == 0:
            version, closing = ring.version, random.random(lanes) < 0.5
            code = int(random.choice([1, 2, SWITCHED, SEVERED, RESTORED]))
            ring.close(closing, code)
            model.close(closing.tolist(), code)
            assert ring.version != version or model.hi == model.start or not closing.any()
        checked = step % every == every - 1
        if checked:
            assert_same(ring, model)
        asked = [LAWS[1]] + [LAWS[3]] * (step % 7 == 0) + [LAWS[4]] * (step % 20 == 19)
        asked += [LAWS[step % len(LAWS)]] * (step > 30)
        for law in asked if step < 59 or every > 1 else LAWS:
            for kind in (WINDOWS, EPISODES, ROWS):
                totals = ring.totals(law, kind)
                if checked:
                    assert_same_law(ring, model, law, kind)
                elif totals.sum():
                    ring.find(law, kind, random.integers(0, totals.sum(), 200))


def times(*time: int, lane: Any = 1) -> tuple[Array, Array]:
    return np.array(time), np.broadcast_to(np.array(lane), len(time)).copy()


def partly_filled() -> StreamEpisodes:
    ring = new_ring(5, 2)
    ring.append(np.zeros((3, 2), np.uint8))
    assert ring.around(np.arange(6))[0].tolist() == [0, 0, 1, 1, 2, 2]
    return ring


ROWS_OF = (StreamEpisodes.lookup, StreamEpisodes.rows)
STRICT = CountLaw.strict


def _unnumbered_core() -> Any:
    """Return the core of streams whose lanes have no numbers yet."""
    streams, codes = StreamEpisodes(4, keys=np.int64), np.zeros((1, 1), np.uint8)
    columns = native.core.EpisodeColumns([(codes.ctypes.data, 1, 1, 1, False, 4)], [], 1, 1, codes)
    row = np.zeros(1, np.int64)
    streams.append_streams(columns, 0, row, row, row)
    return streams._core


REFUSALS: list[tuple[Callable[[StreamEpisodes], Any], type[Exception], str]] = [
    # Rows, elements and windows that are not there: 5 to 9 are stored.
    *[
        (lambda ring, ask=ask, at=at: ask(ring, *at), IndexError, text)
        for ask in ROWS_OF
        for at, text in (
            (times(4), "got time 4 of lane 1"),
            (times(10), "got time 10 of lane 1"),
            (times(-1), "got time -1 of lane 1"),
            (times(5, 6, 11), "got time 11 of lane 1"),
            (times(7, lane=2), "lane 2"),
            (times(7, lane=-1), "lane -1"),
        )
    ],
    *[
        (lambda _, at=at: partly_filled().around(np.array([0, at])), IndexError, f"rows, got {at}")
        for at in (-1, 6, 7, 10, 11, 10**12)
    ],
    (lambda _: new_ring(5).around(np.array([0])), IndexError, "elements of stored rows, got 0"),
    *[
        (lambda ring, n=n: ring.find(STRICT(2), WINDOWS, np.array([0, n])), IndexError, text)
        for n, text in ((-1, r"in \[0, 8\), got -1"), (8, "got 8"), (10**12, f"got {10**12}"))
    ],
    (lambda r: r.find(STRICT(6), WINDOWS, np.array([0])), IndexError, r"in \[0, 0\), got 0"),
    # Arrays that the core cannot read, and numbers without a sense.
    *[
        (
            lambda ring, ask=ask: ask(ring, np.array([7, 8]), np.array([0])),
            ValueError,
            "`lane`, got 1",
        )
        for ask in ROWS_OF
    ],
    (lambda r: r.append(np.zeros((2, 3), np.uint8)), ValueError, "2 entries in `lanes`, got 3"),
    (lambda r: r.close(np.ones(2, np.int64), 4), TypeError, "`lanes` as a contiguous bool array"),
    (lambda r: r.close(np.ones(1, bool), 4), ValueError, "expected 2 entries in `lanes`, got 1"),
    (lambda r: r.close(np.ones(2, bool), 6), ValueError, "code from 1 to 5"),
    (lambda r: r.lookup(np.zeros(1, np.int32), times(0)[1]), TypeError, "`time` as an int64 array"),
    (
        lambda r: r.find(STRICT(1), WINDOWS, np.zeros((1, 1), np.int64)),
        TypeError,
        "`number` as an int64 array of 1 dim",
    ),
    (lambda r: r.totals(STRICT(2**32), WINDOWS), ValueError, r"up to 2\*\*31, got 4294967296"),
    (lambda r: r.totals(CountLaw(1, 0, -1), WINDOWS), ValueError, "at least 0"),
    (
        lambda _: _unnumbered_core().place(np.zeros(1, np.int64)),
        IndexError,
        "stored rows, got 0",
    ),
    (lambda _: StreamEpisodes(0, 1), ValueError, "at least one slot"),
    (lambda _: StreamEpisodes(3, 1, gone=np.array([-1])), IndexError, "in `gone`, got -1"),
    (lambda _: StreamEpisodes(3, 2, head=np.array([1])), ValueError, "2 entries in `head`, got 1"),
]


def test_the_core_refuses_missing_rows_and_unreadable_arrays() -> None:
    ring = new_ring(5, 2)
    ring.append(np.zeros((10, 2), np.uint8))
    for ask, error, text in REFUSALS:
        refuses(error, text, ask, ring)
    assert ring.hi == 10
    assert not len(ring.find(STRICT(6), WINDOWS, np.zeros(0, np.int64)).base)


def test_arrays_need_not_lie_in_one_piece() -> None:
    ring = StreamEpisodes(8, 2)
    ring.append(np.zeros((6, 2), np.uint8))
    pairs = np.array([[0, 0], [3, 1], [5, 0]])
    begin, last, _, _ = ring.lookup(pairs[:, 0], pairs[:, 1])
    assert (begin.tolist(), last.tolist()) == ([0, 0, 0], [5, 5, 5])
    assert ring.find(CountLaw.strict(1), WINDOWS, np.arange(12)[::-3]).lane.tolist() == [1, 1, 0, 0]


def test_memory_comes_with_the_rows_and_stays_below_24_bytes_a_row() -> None:
    """Episodes of one row are the worst there is."""
    ring = StreamEpisodes(10**9, 1)
    ring.append(np.zeros((1000, 1), np.uint8))
    assert ring.nbytes() < 20_000
    ring = StreamEpisodes(100_000, 1)
    for _ in range(25):
        ring.append(np.ones((10_000, 1), np.uint8))
        ring.totals(CountLaw.strict(1), WINDOWS)
        ring.totals(CountLaw.strict(1), ROWS)
    assert ring.nbytes() < 18 * 100_000
    ring = StreamEpisodes(100_000, 1)
    for _ in range(25):
        ring.append(np.array([[0]] * 199 + [[1]], np.uint8).repeat(10, 0))
        ring.totals(CountLaw.strict(1), WINDOWS)
    assert ring.nbytes() < 8.2 * 100_000
