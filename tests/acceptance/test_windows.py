"""Windows: where they may start and how often each row is in one, draws, padding, refusals."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from replaykit import (
    HindsightGoal,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StackFrames,
)
from replaykit.errors import NotEnoughData
from tests.support.refusals import refuses


def all_windows(rb: ReplayBuffer, length: int, **options: Any) -> list[list[tuple[int, bool]]]:
    """``(t, real)`` of the rows of every window there is: one more is refused."""
    count = 1
    while True:
        try:
            sampler = SliceSampler(
                slice_len=length, draw="without_replacement", flat=False, **options
            )
            rb.set_sampler(sampler)
            batch = rb.sample(count * length)
        except NotEnoughData:
            break
        count += 1
    assert len(batch) == count - 1
    mask = batch.get(("collector", "mask"), batch["t"] >= 0)
    return [
        list(zip(t, real, strict=True))
        for t, real in zip(batch["t"].tolist(), mask.tolist(), strict=True)
    ]


def covered(windows: list[list[tuple[int, bool]]], rows: int) -> list[int]:
    found = Counter(t for window in windows for t, real in window if real)
    return [found[t] for t in range(rows)]


NONE = [1, 2, 3, 4, 4, 4, 4, 3, 2, 1]
LEFT = [4, 4, 4, 4, 4, 4, 4, 3, 2, 1]


@pytest.mark.acceptance("S18", "F32")
@pytest.mark.parametrize("align", ["left", "right"])
@pytest.mark.parametrize(
    ("pad", "starts", "rows"),
    [("none", 7, NONE), ("left", 10, LEFT), ("right", 10, LEFT[::-1]), ("both", 13, [4] * 10)],
)
def test_starts_and_how_often_each_row_is_covered(
    align: str, pad: str, starts: int, rows: list[int], ted: Any, codes_of: Any, buffer: Any
) -> None:
    rb = buffer(20)
    rb.extend(ted(codes_of([10])))
    windows = all_windows(rb, 4, pad=pad, align=align)
    assert len(windows) == starts
    assert covered(windows, 10) == rows
    for window in windows:
        real = [t for t, is_real in window if is_real]
        assert real == list(range(real[0], real[0] + len(real)))
        places = [at for at, (_, is_real) in enumerate(window) if is_real]
        assert places[0 if align == "left" else -1] == (0 if align == "left" else 3)
        assert len(places) == places[-1] - places[0] + 1
    alone = [w for w in windows if sum(real for _, real in w) == 1 and (9, True) in w]
    assert len(alone) == (pad in ("right", "both"))


@pytest.mark.acceptance("S18")
@pytest.mark.parametrize("pad", ["left", "right", "both"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_short_episodes(pad: str, rows: int, ted: Any, codes_of: Any, buffer: Any) -> None:
    rb = buffer(20)
    rb.extend(ted(codes_of([rows])))
    (window,) = all_windows(rb, 4, pad=pad, short="whole")
    assert [t for t, real in window if real] == list(range(rows))
    assert sum(real for _, real in window) == rows
    law = all_windows(rb, 4, pad=pad, short="law")
    wanted = {
        "both": [4] * rows,
        "left": [min(4, rows - t) for t in range(rows)],
        "right": [min(4, t + 1) for t in range(rows)],
    }
    assert covered(law, rows) == wanted[pad]
    if rows < 4:
        rb.set_sampler(SliceSampler(slice_len=4, pad=pad, short="exclude"))
        with pytest.raises(NotEnoughData):
            rb.sample(4)
        assert not rb.can_sample(4)


def prioritized(**options: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(alpha=1.0, beta=1.0, **options)


@pytest.mark.acceptance("S18", "F33")
@pytest.mark.parametrize(
    ("make", "given", "named"),
    [
        (SliceSampler, {"slice_len": 4, "pad": "middle"}, "middle"),
        (SliceSampler, {"slice_len": 4, "pad": "left", "short": "maybe"}, "maybe"),
        (SliceSampler, {"slice_len": 4, "pad": "left", "align": "centre"}, "centre"),
        (SliceSampler, {"slice_len": 4, "measure": "episode"}, "episode"),
        (SliceSampler, {"slice_len": 4, "draw": "random"}, "random"),
        (SliceSampler, {"slice_len": 4, "stride": 0, "draw": "sequential"}, "stride"),
        (SliceSampler, {"slice_len": 4, "span": "both"}, "both"),
        (SliceSampler, {"slice_len": 0}, "slice_len"),
        (SliceSampler, {"num_slices": -1}, "num_slices"),
        (prioritized, {"slice_len": 4, "pad": "left"}, "pad"),
        (prioritized, {"slice_len": 4, "unit": "episode!"}, "episode!"),
        (prioritized, {"slice_len": 4, "draw": "random"}, "random"),
        (prioritized, {"slice_len": 4, "weight_norm": "none"}, "none"),
        (Sequence, {"length": 4, "episode_boundary": "wrap"}, "wrap"),
        (Sequence, {"length": 0}, "0"),
        (Sequence, {"length": 4, "burn_in": -1}, "-1"),
        (NStep, {"n": 0, "gamma": 0.9}, "0"),
        (NStep, {"n": 3, "gamma": 1.1}, "1.1"),
        (NStep, {"n": 3, "gamma": 0.9, "on_open": "wait"}, "wait"),
        (NStep, {"n": 3, "gamma": 0.9, "when": "later"}, "later"),
        (StackFrames, {"keys": ["x"], "k": 0}, "0"),
        (StackFrames, {"keys": ["x"], "k": 2, "pad": "mirror"}, "mirror"),
        (HindsightGoal, {"strategy": "past"}, "past"),
    ],
)
def test_unknown_modes_are_refused_at_construction(
    make: Any, given: dict[str, Any], named: str
) -> None:
    refuses((ValueError, TypeError), named, make, **given)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("kind", ["uniform", "whole passes", "prioritized"])
def test_missing_window_error_states_stored_rows(
    kind: str, lanes: int, ted: Any, codes_of: Any, buffer: Any
) -> None:
    makers: dict[str, Any] = {
        "uniform": SliceSampler,
        "whole passes": SliceSamplerWithoutReplacement,
        "prioritized": prioritized,
    }
    rb = buffer(50, makers[kind](slice_len=9), lanes=lanes)
    codes = codes_of([3, 7, 5])
    rb.extend(ted(codes if lanes == 1 else [codes] * lanes))
    with pytest.raises(NotEnoughData) as caught:
        rb.sample(9)
    text = str(caught.value)
    assert "9" in text, text  # what is needed
    assert str(15 * lanes) in text, text  # how many rows there are
    assert "7" in text, text  # and how long the longest episode is
    assert not rb.can_sample(9)
    with pytest.raises(RuntimeError):
        buffer(50, makers[kind](slice_len=9), lanes=lanes).sample(9)


@pytest.mark.acceptance("F34")
@pytest.mark.parametrize("pad", ["right", "both"])
def test_padding_of_windows_has_no_flags(pad: str, ted: Any, codes_of: Any, buffer: Any) -> None:
    sampler = SliceSampler(slice_len=4, pad=pad, short="law", flat=False, pad_value=1)
    rb = buffer(50, sampler)
    rb.extend(ted(codes_of([1, 3, 6])))
    batch = rb.sample(400)
    mask = batch["collector", "mask"]
    for flag in ("done", "terminated", "truncated"):
        assert not batch["next", flag][~mask].any()
    assert batch["next", "terminated"][mask].any()
    assert (batch["next", "reward"][~mask] == 1).all()
    assert (batch["next", "reward"][mask] == 1).any()  # row 1 really has that


def ranges(batch: Any) -> list[tuple[int, int]]:
    found = []
    for key in batch.keys(True, True):
        memory = batch[key].untyped_storage()
        found.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes()))
    return found


@pytest.mark.acceptance("S28")
@pytest.mark.parametrize("windows", [256, 512])
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "padded", "memmap"])
def test_samples_never_share_memory(
    kind: str, windows: int, ted: Any, codes_of: Any, tmp_path: Any
) -> None:
    sampler: Any = SliceSampler(slice_len=3, pad="both" if kind == "padded" else None)
    if kind == "prioritized":
        sampler = PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=3)
    storage: Any = LazyTensorStorage(2400)
    if kind == "memmap":
        storage = LazyMemmapStorage(2400, scratch_dir=tmp_path)
    rb = ReplayBuffer(storage=storage, sampler=sampler)
    rows = ted(codes_of([4] * 600))
    rb.extend(rows)
    kept = [rb.sample(3 * windows) for _ in range(100)]
    spans = sorted((*span, number) for number, one in enumerate(kept) for span in ranges(one))
    for (_, end, one), (start, _, other) in pairwise(spans):
        assert start >= end or one == other
    for one in kept[:3]:
        for key in one.keys(True, True):
            one[key].zero_()
    assert (rb.episodes.rows() == rows).all()


@pytest.mark.pitfall("BD10")
@pytest.mark.acceptance("S30", "F53")
def test_the_law_of_windows_and_of_transitions(ted: Any, codes_of: Any, buffer: Any) -> None:
    """Stratified draws have exactly the shares of the law."""
    rb = buffer(20)
    rb.extend(ted(codes_of([3, 9])))

    def shares(count: int, measure: str) -> list[int]:
        rb.set_sampler(SliceSampler(slice_len=3, measure=measure, draw="stratified"))
        starts = Counter(rb.sample(3 * count)["t"].reshape(-1, 3)[:, 0].tolist())
        return [starts[t] for t in (0, 3, 4, 5, 6, 7, 8, 9)]

    for _ in range(5):
        assert shares(800, "window") == [100] * 8
        assert shares(280, "transition") == [70] + [30] * 7
        assert shares(140, "trajectory") == [70] + [10] * 7
    rb.set_sampler(SliceSampler(slice_len=3, measure="transition"))
    starts = Counter(rb.sample(3 * 28000)["t"].reshape(-1, 3)[:, 0].tolist())
    assert abs(starts[0] / 28000 - 0.25) < 0.012  # 4.6 standard deviations
    assert all(abs(starts[t] / 28000 - 3 / 28) < 0.009 for t in range(3, 10))


@pytest.mark.acceptance("S30", "F54")
@pytest.mark.parametrize("streams", [False, True])
def test_sequential_windows_continue_at_the_last_position(
    streams: bool, ted: Any, codes_of: Any, buffer: Any, tmp_path: Any
) -> None:
    def make() -> ReplayBuffer:
        sampler = SliceSampler(slice_len=3, draw="sequential")
        return buffer(20, sampler, lane_key="lane" if streams else None)

    rb, other = make(), make()
    columns = {"lane": torch.zeros(12, dtype=torch.long)} if streams else {}
    rb.extend(ted(codes_of([4, 8]), **columns))

    def starts(count: int, of: ReplayBuffer = rb) -> list[int]:
        return of.sample(3 * count)["t"].reshape(-1, 3)[:, 0].tolist()

    # Rows 3, 10 and 11 are left over.
    assert starts(2) == [0, 4]
    assert starts(2) == [7, 0]
    assert starts(1) == [4]
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert starts(4) == starts(4, other) == [7, 0, 4, 7]
