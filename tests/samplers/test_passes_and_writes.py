"""Rows that lose what transforms need are not drawn, whatever was kept between draws."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from replaykit import (
    LaneWriter,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackFrames,
    StalenessAwareSampler,
)
from replaykit.episodes import Needs
from replaykit.transforms import Transform
from tests.samplers.needing import Needing
from tests.support.refusals import refuses

CAPACITY = 24


@dataclass
class _Row:
    begin: int
    """Number of the first row of its episode."""
    reset: bool
    """Whether the episode began with a reset."""
    done: bool
    severed: bool = False


class _Truth:
    """Every row ever written, by number, in plain Python: number ``t`` lies in slot ``t % N``."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []

    def write(self, done: list[bool]) -> TensorDict:
        first = len(self.rows)
        for flag in done:
            last = self.rows[-1] if self.rows else None
            if last is None or last.done:
                self.rows.append(_Row(len(self.rows), True, flag))
            elif last.severed:
                self.rows.append(_Row(len(self.rows), False, flag))
            else:
                self.rows.append(_Row(last.begin, last.reset, flag))
        t = torch.arange(first, len(self.rows))
        value = t.float()[:, None]
        ends = torch.tensor(done)[:, None]
        after = {"f": value + 1, "reward": value, "done": ends, "terminated": ends}
        root = {"t": t, "f": value, "action": value, "policy_version": torch.zeros_like(t)}
        return TensorDict({**root, "next": after}, [len(t)])

    def sever(self) -> None:
        if self.rows and not self.rows[-1].done:
            self.rows[-1].severed = True

    @property
    def low(self) -> int:
        return max(0, len(self.rows) - CAPACITY)

    def last(self, t: int) -> int:
        while t + 1 < len(self.rows) and self.rows[t + 1].begin == self.rows[t].begin:
            t += 1
        return t

    def may_draw(self, t: int, needs: Needs) -> bool:
        row, low, last = self.rows[t], self.low, self.last(t)
        intact = row.reset and row.begin >= low
        is_open = last + 1 == len(self.rows) and not (
            self.rows[last].done or self.rows[last].severed
        )
        if not intact and t - needs.past < max(row.begin, low):
            return False
        if is_open and (needs.closed or t + needs.open_future > last):
            return False
        return intact or not needs.intact

    def eligible(self, needs: Needs) -> list[int]:
        return [t for t in range(self.low, len(self.rows)) if self.may_draw(t, needs)]


_NEEDS = [
    Needs(),
    Needs(past=2),
    Needs(past=1),
    Needs(open_future=3),
    Needs(past=3, open_future=2),
    Needs(closed=True),
    Needs(intact=True),
    Needs(closed=True, intact=True),
]


def _fields(needs: Needs) -> dict[str, Any]:
    return {field.name: getattr(needs, field.name) for field in dataclasses.fields(needs)}


def _some(rng: random.Random, most: int = 4) -> list[bool]:
    return [rng.random() < 0.15 for _ in range(rng.randint(1, most))]


def _buffer(sampler: Any, transform: Any, seed: int = 0, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=sampler,
        batch_size=options.pop("batch_size", 4),
        generator=torch.Generator().manual_seed(seed),
        transform=transform,
        **options,
    )


# -- a pass against a model of it -----------------------------------------------------------------


class _Pass:
    """The law of a pass in plain Python: slots in an order; what cannot be drawn is left out.

    ``seed``: of the permutations; None: there are none.
    """

    def __init__(self, truth: _Truth, drop_last: bool, seed: int | None) -> None:
        self.truth, self.drop_last = truth, drop_last
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.left: list[int] = []
        self.length = -1

    def draw(self, size: int, needs: Needs) -> tuple[list[int], bool] | None:
        """Rows by number, and whether they end the pass; None: nothing can be drawn."""
        truth = self.truth
        now = truth.eligible(needs)
        stored = len(truth.rows) - truth.low
        if len(now) < (size if self.drop_last else 1):
            return None
        if self.length != stored:
            self.left = []
        slots = {t % CAPACITY: t for t in now}
        there = [slot for slot in self.left if slot in slots]
        if len(there) < (size if self.drop_last else 1):
            there = [t % CAPACITY for t in now]
            if needs == Needs():  # there is no need to ask where episodes are
                there.sort()
            if self.generator is not None:
                order = torch.randperm(len(now), generator=self.generator)
                there = [there[number] for number in order.tolist()]
            self.left = there
        drawn, there = there[:size], there[size:]
        # Left out for good is what came before the last row that was drawn, or than the next one.
        self.left = self.left[self.left.index(drawn[-1]) + 1 :]
        if there:
            self.left = self.left[self.left.index(there[0]) :]
        ended = len(there) < (size if self.drop_last else 1)
        if ended:
            self.left = []
        self.length = stored
        return [slots[slot] for slot in drawn], ended


@pytest.mark.pitfall("RD13")
@pytest.mark.covering(2)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("needs", _NEEDS, ids=str)
def test_pass_between_writes_matches_model(needs: Needs, drop_last: bool, shuffle: bool) -> None:
    """RD13: rows, their order, ``ran_out`` and ``can_sample`` of 15 programs of 60 steps."""
    for seed in range(15):
        rng = random.Random(seed)
        truth = _Truth()
        model = _Pass(truth, drop_last, seed if shuffle else None)
        sampler = SamplerWithoutReplacement(shuffle=shuffle, drop_last=drop_last)
        rb = _buffer(sampler, Needing(**_fields(needs)), seed)
        for _ in range(60):
            what = rng.random()
            if what < 0.25:
                rb.extend(truth.write(_some(rng)))
            elif what < 0.3:
                rb.cut()
                truth.sever()
            else:
                size = rng.choice([1, 2, 3, 4, 5, 6, 9, 30])
                expected = model.draw(size, needs)
                assert rb.can_sample(size) == (expected is not None), seed
                if expected is None:
                    with pytest.raises((RuntimeError, ValueError)):
                        rb.sample(size)
                    continue
                batch = rb.sample(size)
                assert (batch["t"].tolist(), rb.sampler.ran_out) == expected, seed


# -- every sampler that keeps something -----------------------------------------------------------

_SAMPLERS: dict[str, Callable[[], Any]] = {
    "pass": SamplerWithoutReplacement,
    "pass in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "pass, drop_last": lambda: SamplerWithoutReplacement(drop_last=True),
    "slices": lambda: SliceSampler(slice_len=1),
    "slices by turns": lambda: SliceSampler(slice_len=1, draw="sequential"),
    "windows by turns": lambda: SliceSampler(slice_len=2, draw="sequential"),
    "pass of slices": lambda: SliceSamplerWithoutReplacement(slice_len=1),
    "pass of windows": lambda: SliceSamplerWithoutReplacement(slice_len=2, shuffle=False),
    "priorities": lambda: PrioritizedSampler(alpha=0.7, beta=0.9),
    "priorities of windows": lambda: PrioritizedSliceSampler(slice_len=2, alpha=0.7, beta=0.9),
    "staleness": StalenessAwareSampler,
}
_TRANSFORMS: dict[str, Callable[[], Any]] = {
    "stack": lambda: StackFrames(["f"], 3),
    "n-step": lambda: NStep(3, gamma=1.0, on_open="exclude"),
    "previous": lambda: PreviousStep(["action"]),
}


def _check_true(batch: TensorDict, transform: str, truth: _Truth) -> None:
    """What a transform made of each row is what the rows ever written say."""
    for number, t in enumerate(batch["t"].tolist()):
        begin, last = truth.rows[t].begin, truth.last(t)
        row = batch[number]
        if transform == "stack":
            frames = [float(max(begin, t - back)) for back in (2, 1, 0)]
            assert row["f"].flatten().tolist() == frames, t
        elif transform == "n-step":
            upto = min(t + 2, last)
            assert row["steps_used"].item() == upto - t + 1, t
            assert row["next", "reward"].item() == sum(range(t, upto + 1)), t
        else:
            expected = float(t - 1) if t > begin else 0.0
            assert row["previous_action"].item() == expected, t


@pytest.mark.covering(2)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("transform", list(_TRANSFORMS))
@pytest.mark.parametrize("sampler", list(_SAMPLERS))
def test_batches_between_writes_match_written_history(
    sampler: str, transform: str, prefetch: int, tmp_path: Path
) -> None:
    """Draws, writes, saves and loads in turn: no batch has a history, or a sum, that is false."""
    options = {"prefetch": prefetch} if prefetch else {}
    for seed in range(2):
        rng = random.Random(seed)
        truth = _Truth()

        def made(seed: int = seed) -> ReplayBuffer:
            return _buffer(_SAMPLERS[sampler](), _TRANSFORMS[transform](), seed, **options)

        rb = made()
        rb.extend(truth.write([rng.random() < 0.1 for _ in range(CAPACITY)]))
        for _ in range(40):
            what = rng.random()
            if what < 0.3:
                rb.extend(truth.write(_some(rng)))
            elif what < 0.33:
                path = tmp_path / f"{seed}-{len(truth.rows)}-{rng.random()}"
                rb.dumps(path)
                if rng.random() < 0.5:
                    rb.shutdown()
                    rb = made()
                    rb.loads(path)
                    if not truth.rows[-1].done:  # nothing spans a restart
                        truth.rows[-1].done = True
            elif rb.can_sample():
                _check_true(rb.sample(), transform, truth)
        rb.shutdown()


@pytest.mark.parametrize("sampler", ["pass", "pass in order", "slices by turns"])
def test_transform_added_during_a_pass_excludes_rows_it_cannot_serve(sampler: str) -> None:
    """A pass begun without transforms leaves out rows that one which is added cannot serve."""
    for prefetch in ({}, {"prefetch": 3}):
        truth = _Truth()
        rb = _buffer(_SAMPLERS[sampler](), None, batch_size=2, **prefetch)
        rb.extend(truth.write([t == 20 for t in range(CAPACITY + 10)]))
        assert len(rb.sample()) == 2
        rb.append_transform(StackFrames(["f"], 4))
        for _ in range(3):
            batch = rb.sample()
            assert all(truth.may_draw(t, Needs(past=3)) for t in batch["t"].tolist())
        rb.shutdown()


def test_repeated_draw_excludes_rows_that_lost_history() -> None:
    """A batch whose making fails comes again, but for rows that cannot be drawn any more."""
    failing = [False]

    def collate(rows: Any) -> Any:
        if failing[0]:
            raise OSError("no")
        return rows

    truth = _Truth()
    sampler = SamplerWithoutReplacement(shuffle=False)
    rb = _buffer(sampler, StackFrames(["f"], 3), batch_size=8, collate_fn=collate)
    rb.extend(truth.write([False] * (CAPACITY + 4)))
    assert rb.sample()["t"].tolist() == list(range(6, 14))
    failing[0] = True
    refuses(OSError, "no", rb.sample)
    failing[0] = False
    rb.extend(truth.write([False] * 10))  # rows 14 and 15 have lost their history, as of row 14
    batch = rb.sample()
    assert batch["t"].tolist() == list(range(16, 24))
    _check_true(batch, "stack", truth)


@pytest.mark.parametrize("shuffle", [False, True])
def test_prefetch_of_the_next_pass_keeps_end_of_the_pass(shuffle: bool, tmp_path: Path) -> None:
    """Of four batches drawn ahead, which a save reads again, one has lost rows: what was left of
    the pass comes, and its end, and none of its rows again."""
    truth = _Truth()
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    rb = _buffer(sampler, StackFrames(["f"], 3), batch_size=8, prefetch=4)
    rb.extend(truth.write([t % 8 == 7 for t in range(CAPACITY)]))
    first = {t % CAPACITY for t in rb.next()["t"].tolist()}
    rb.extend(truth.write([False] * 9))  # rows 9 and 10 have lost row 8
    rb.dumps(tmp_path / "saved")
    batches = []
    while (batch := rb.next()) is not None:
        _check_true(batch, "stack", truth)
        batches.append([t % CAPACITY for t in batch["t"].tolist()])
    rest = [slot for slots in batches for slot in slots]
    may = {t % CAPACITY for t in truth.eligible(Needs(past=2))}
    assert sorted(rest) == sorted(may - first)
    assert shuffle or batches == [[8, *range(11, 18)], [*range(18, 24)]]
    rb.shutdown()


def test_ensemble_draws_only_drawable_rows_of_members() -> None:
    for prefetch in ({}, {"prefetch": 2}):
        truths = [_Truth(), _Truth()]
        members = [
            _buffer(SamplerWithoutReplacement(), StackFrames(["f"], 3), seed) for seed in range(2)
        ]
        together = ReplayBufferEnsemble(*members, batch_size=6, sample_from_all=True, **prefetch)
        for seed in range(4):
            rng = random.Random(seed)
            for _ in range(30):
                for truth, member in zip(truths, members, strict=True):
                    if rng.random() < 0.3 or len(truth.rows) < CAPACITY:
                        member.extend(truth.write(_some(rng)))
                if not together.can_sample():
                    continue
                batch = together.sample()
                for member, truth in enumerate(truths):
                    _check_true(batch[member], "stack", truth)
        together.shutdown()


def test_loader_counts_and_draws_exactly_the_drawable_rows() -> None:
    truth = _Truth()
    rb = _buffer(SamplerWithoutReplacement(), StackFrames(["f"], 3))
    rb.extend(truth.write([t % 7 == 6 for t in range(CAPACITY + 3)]))
    for more in range(3):
        loader = rb.dataloader()
        assert isinstance(loader, DataLoader)
        batches = list(loader)
        assert len(batches) == len(loader)
        numbers = [t for batch in batches for t in batch["t"].tolist()]
        assert sorted(numbers) == truth.eligible(Needs(past=2))
        rb.extend(truth.write([False] * (more + 1)))


class _Fails(Transform):
    fails = False

    def forward(self, data: Any) -> Any:
        if self.fails:
            raise OSError("fails")
        return data


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, SliceSamplerWithoutReplacement])
def test_a_failed_draw_does_not_return_to_a_pass_after_a_removal(sampler: Any) -> None:
    slices = sampler is SliceSamplerWithoutReplacement
    storage = LazyTensorStorage(60, lane_key="env")
    other = ReplayBuffer(storage=storage, writer=LaneWriter(12, range(4)))
    transform = _Fails()
    rb = ReplayBuffer(
        storage=storage, sampler=sampler(slice_len=1) if slices else sampler(),
        transform=transform, batch_size=4,
    )  # fmt: skip
    for t in range(8):
        n, done = torch.arange(4 * t, 4 * t + 4), torch.ones(4, dtype=torch.bool)
        other.extend(TensorDict({"env": torch.arange(4), "n": n, "next": {"done": done}}, [4]))
    transform.fails = True
    refuses(OSError, "fails", rb.sample)
    transform.fails = False
    other.remove_oldest(2, lane=1)  # moves rows of the last slots
    seen = rb.sample(3)["n"].tolist()  # begins a pass
    while not rb.sampler.ran_out:
        seen += rb.sample()["n"].tolist()
    assert sorted(seen) == sorted({*range(32)} - {1, 5})
