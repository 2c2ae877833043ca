"""Slices of episodes: which rows, how likely, and what the batch says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from replaykit.errors import NotEnoughData

Make = Callable[..., ReplayBuffer]


def _windows(batch: TensorDict) -> list[list[int]]:
    """Values of ``t``, window by window."""
    ids = batch["sequence_id"].tolist()
    windows: list[list[int]] = [[] for _ in range(max(ids) + 1)]
    for number, t in zip(ids, batch["t"].tolist(), strict=True):
        windows[number].append(t)
    return windows


def _together(*episodes: TensorDict) -> TensorDict:
    return torch.cat(list(episodes))


# -- sizes and keys -------------------------------------------------------------------------------


@pytest.mark.pitfall("BD9")
def test_what_a_batch_has(sliced: Make) -> None:
    rb = sliced([5, 9], slice_len=4)
    batch, info = rb.sample(12, return_info=True)
    assert batch.shape == (12,)
    assert {"t", "e", "index", "sequence_id", ("next", "done")} <= set(batch.keys(True))
    assert batch.get("is_init", None) is None
    for found in (batch["index"], info["index"]):
        assert (found.shape, found.dtype) == ((12,), torch.int64)
        assert found.is_contiguous()
    assert batch["sequence_id"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert batch["sequence_id"].dtype == torch.int64
    for name in ("done", "truncated", "terminated"):
        flag = batch["next", name]
        assert (flag.shape, flag.dtype) == ((12, 1), torch.bool)
    assert torch.equal(batch["t"], batch["index"])
    assert all(w == list(range(w[0], w[0] + 4)) for w in _windows(batch))


def test_number_of_slices_instead_of_their_length(sliced: Make) -> None:
    rb = sliced([20], num_slices=3)
    assert rb.sample(12)["sequence_id"].bincount().tolist() == [4, 4, 4]
    assert rb.sample(3)["sequence_id"].bincount().tolist() == [1, 1, 1]


def test_slices_by_length_on_request(sliced: Make) -> None:
    rb = sliced([20], slice_len=4, flat=False, batch_size=12)
    batch = rb.sample()
    assert batch.shape == (3, 4)
    assert batch["sequence_id"].tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert (batch["t"].diff(dim=1) == 1).all()
    assert batch["next", "done"].shape == (3, 4, 1)
    rb = sliced([20, 2], num_slices=2, flat=False, pad="right")
    assert rb.sample(10).shape == (2, 5)


@pytest.mark.parametrize("flags", ["[N]", "[N,1]", "both"])
@pytest.mark.pitfall("BD6")
def test_flags_are_of_one_shape(flags: str, sliced: Make, rows: Callable[..., Any]) -> None:
    first, second = rows([4, 4]), rows([4])
    for part, wide in ((first, flags == "[N,1]"), (second, flags != "[N]")):
        for name in ("done", "truncated", "terminated"):
            if wide:
                part["next", name] = part["next", name].unsqueeze(-1)
    rb = sliced(first, 20, slice_len=3)
    rb.extend(second)
    batch = rb.sample(9)
    assert batch["next", "done"].shape == (9, 1)
    assert batch["next", "done"].sum() == 3


# -- what ends an episode -------------------------------------------------------------------------


@pytest.mark.pitfall("BD1")
def test_truncation_ends_an_episode(sliced: Make, rows: Callable[..., Any]) -> None:
    data = rows([5, 5])
    data["next", "truncated"] = data["next", "done"]
    data["next", "done"] = torch.zeros(10, dtype=torch.bool)
    data["next", "terminated"] = torch.zeros(10, dtype=torch.bool)
    rb = sliced(data, slice_len=5)
    starts = {w[0] for w in _windows(rb.sample(5 * 1000))}
    assert starts == {0, 5}
    rb = sliced(data, slice_len=3)
    assert {w[0] for w in _windows(rb.sample(3 * 1000))} == {0, 1, 2, 5, 6, 7}


@pytest.mark.pitfall("BD2")
def test_numbers_that_start_again_do_not_merge(sliced: Make) -> None:
    seed = torch.arange(3).repeat_interleave(20)
    episode = torch.arange(4).repeat_interleave(5).repeat(3)
    data = TensorDict({"t": torch.arange(60), "seed": seed, "episode": episode}, [60])
    rb = sliced(data, slice_len=5)
    batch = rb.sample(5 * 600)
    assert {w[0] for w in _windows(batch)} == set(range(0, 60, 5))
    pairs = (batch["seed"] * 4 + batch["episode"]).reshape(-1, 5)
    assert (pairs == pairs[:, :1]).all()


@pytest.mark.pitfall("BD14")
def test_interleaved_streams_are_refused_with_what_there_is(sliced: Make) -> None:
    ids = torch.arange(4).repeat(6)
    data = TensorDict({"t": torch.arange(24), "collector": {"traj_ids": ids}}, [24])
    rb = sliced(data, slice_len=3)
    text = "slices of 3 rows, got no window: 24 rows are stored, and the longest episode has 1"
    with pytest.raises(RuntimeError, match=text) as refused:
        rb.sample(6)
    assert "ndim=2" in str(refused.value)
    assert not rb.can_sample(6)
    lanes = data.reshape(6, 4).transpose(0, 1).contiguous()
    rb = sliced(lanes, slice_len=3, ndim=2)
    batch = rb.sample(30)
    assert batch["index"].shape == (30, 2)
    assert (batch["t"].reshape(-1, 3).diff(dim=1) == 4).all()


def test_keys_of_ones_own(sliced: Make, rows: Callable[..., Any]) -> None:
    data = rows([10])
    data["life"] = torch.arange(10) // 4
    data["next", "lost"] = torch.arange(10) == 5
    known: list[tuple[dict[str, Any], set[int]]] = [
        ({"traj_key": "life"}, {0, 1, 4, 5}),
        ({"end_key": ("next", "lost")}, {0, 1, 2, 3, 6, 7}),
        ({"end_keys": [("next", "lost"), ("next", "done")]}, {0, 1, 2, 3, 6, 7}),
        ({"end_key": ("next", "lost"), "traj_key": ["life"]}, {0, 1}),
        ({"end_keys": (), "traj_key": ()}, set(range(8))),
    ]
    for options, expected in known:
        rb = sliced(data, slice_len=3, **options)
        assert {w[0] for w in _windows(rb.sample(900))} == expected, options


@pytest.mark.pitfall("BD18")
def test_columns_that_are_not_there_are_an_error(sliced: Make, rows: Callable[..., Any]) -> None:
    for options in ({"end_key": "lost"}, {"end_keys": ["a", "b"]}, {"traj_key": "life"}):
        rb = sliced([5, 5], slice_len=2, **options)
        assert not rb.can_sample(4)
        with pytest.raises(KeyError, match="expected"):
            rb.sample(4)
    rb = sliced(TensorDict({"t": torch.arange(5)}, [5]), slice_len=2)
    with pytest.raises(KeyError, match="end_key="):
        rb.sample(4)
    # Of several flags those that are not there are left out.
    rb = sliced([5, 5], slice_len=5, end_keys=["lost", ("next", "done")])
    assert {w[0] for w in _windows(rb.sample(100))} == {0, 5}


@pytest.mark.pitfall("BD15")
def test_a_sampler_goes_by_the_keys_of_the_storage_it_is_given(
    sliced: Make, rows: Callable[..., Any]
) -> None:
    rb = sliced((), 20, slice_len=5)
    sampler = rb.sampler
    assert not rb.can_sample(5)
    rb.extend(rows([5, 5]))
    assert {w[0] for w in _windows(rb.sample(500))} == {0, 5}
    ids = TensorDict({"t": torch.arange(12), "episode": torch.arange(12) // 6}, [12])
    other = ReplayBuffer(storage=LazyTensorStorage(12))
    other.extend(ids)
    rb.set_sampler(SliceSampler(slice_len=2))
    other.set_sampler(sampler)
    assert {w[0] for w in _windows(other.sample(500))} == {0, 1, 6, 7}


@pytest.mark.pitfall("BD16")
def test_edits_of_flags_are_seen(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = sliced(rows([10], open_=True), slice_len=5)
    assert {w[0] for w in _windows(rb.sample(500))} == set(range(6))
    rb.set_at_(("next", "done"), torch.tensor([[True]]), torch.tensor([4]))
    assert {w[0] for w in _windows(rb.sample(500))} == {0, 5}


def test_ids_of_a_static_tensor(sliced: Make, rows: Callable[..., Any]) -> None:
    ends = torch.zeros(10, dtype=torch.bool)
    ends[[3, 9]] = True
    for options in ({"ends": ends}, {"trajectories": torch.tensor([7] * 4 + [2] * 6)}):
        rb = sliced(rows([5, 5]), slice_len=4, **options)
        assert {w[0] for w in _windows(rb.sample(400))} == {0, 4, 5, 6}


# -- the law --------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD10")
@pytest.mark.parametrize("measure", ["window", "trajectory"])
def test_windows_of_long_and_short_episodes(
    measure: str, sliced: Make, follows: Callable[..., bool]
) -> None:
    rb = sliced([10, 100], slice_len=5, measure=measure)
    starts = rb.sample(5 * 40_000)["t"].reshape(-1, 5)[:, 0]
    law = torch.zeros(106, dtype=torch.float64)
    law[:6], law[10:] = (1 / 102, 1 / 102) if measure == "window" else (1 / 12, 1 / 192)
    assert follows(starts, law)


@pytest.mark.pitfall("BD11")
@pytest.mark.parametrize("left", [False, True, 0, 2])
@pytest.mark.parametrize("right", [False, True, 0, 2])
def test_slices_that_hang_over(left: Any, right: Any, sliced: Make) -> None:
    length = 4
    rb = sliced([4, 9], slice_len=length, span=(left, right))
    low = length - max(length - 1 if s is True else int(s) for s in (left, right))
    low_hang, high_hang = (length - 1 if s is True else int(s) for s in (left, right))
    expected = set()
    for first, n in ((0, 4), (4, 9)):
        for s in range(-low_hang, n - length + high_hang + 1):
            expected.add((first + max(s, 0), first + min(s + length, n)))
    seen = set()
    batch = rb.sample(length * 10_000)
    for window in _windows(batch):
        assert low <= len(window) <= length
        seen.add((window[0], window[-1] + 1))
    assert seen == expected
    assert batch["next", "done"].sum() == 10_000


def test_short_episodes_where_they_are_welcome(sliced: Make) -> None:
    rb = sliced([2, 6], slice_len=4, strict_length=False)
    windows = _windows(rb.sample(4 * 1000))
    assert {(w[0], len(w)) for w in windows} == {(0, 2), (2, 4), (3, 4), (4, 4)}
    short = sum(len(w) == 2 for w in windows)
    assert 190 < short < 310


@pytest.mark.pitfall("BD19")
def test_strict_slices_are_always_full(sliced: Make) -> None:
    rb = sliced([2, 6, 3, 4], slice_len=4)
    for _ in range(50):
        batch = rb.sample(20)
        assert len(batch) == 20
        assert {len(w) for w in _windows(batch)} == {4}
    padded = sliced([2, 6, 3, 4], slice_len=4, strict_length=False, pad_output=True).sample(20)
    assert len(padded) == 20
    assert ("collector", "mask") in padded.keys(True)


# -- marks ----------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD12")
def test_every_window_is_done_once(sliced: Make) -> None:
    rb = sliced([5, 9, 6], slice_len=4)
    for _ in range(50):
        batch = rb.sample(40)
        assert batch["next", "done"].sum() == 10
        assert batch["next", "done"].reshape(10, 4)[:, -1].all()


@pytest.mark.pitfall("BD7")
def test_where_an_episode_ended_and_where_a_slice_was_cut(
    sliced: Make, rows: Callable[..., Any]
) -> None:
    data = rows([6, 6])  # the first one terminated, the second one truncated
    data["next", "terminated"][11] = False
    data["next", "truncated"][11] = True
    rb = sliced(data, slice_len=3)
    batch = rb.sample(3 * 200)
    last = torch.arange(600) % 3 == 2
    t, done, terminated, truncated = (
        batch[key].reshape(-1)
        for key in ("t", ("next", "done"), ("next", "terminated"), ("next", "truncated"))
    )
    assert torch.equal(done, last)
    assert torch.equal(terminated, t == 5)
    assert torch.equal(truncated, last & (t != 5))


def test_marks_elsewhere_or_not_at_all(sliced: Make) -> None:
    batch = sliced([5, 5], slice_len=3, truncated_key=("cut", "truncated")).sample(6)
    assert batch["cut", "done"].sum() == 2
    assert torch.equal(batch["cut", "truncated"] | batch["cut", "terminated"], batch["cut", "done"])
    assert torch.equal(batch["next", "done"].reshape(-1), (batch["t"] % 5 == 4))
    batch = sliced([5, 5], slice_len=3, truncated_key=None).sample(6)
    assert torch.equal(batch["next", "done"].reshape(-1), (batch["t"] % 5 == 4))


def test_marks_of_data_without_flags(sliced: Make) -> None:
    data = TensorDict({"t": torch.arange(8), "episode": torch.arange(8) // 4}, [8])
    batch = sliced(data, slice_len=2).sample(6)
    last = torch.arange(6).reshape(-1, 1) % 2 == 1
    assert torch.equal(batch["next", "done"], last)
    assert torch.equal(batch["next", "truncated"], last)
    assert not batch["next", "terminated"].any()
    batch["next", "truncated"][:] = False  # memory of its own
    assert torch.equal(batch["next", "done"], last)


def test_first_rows_of_windows(sliced: Make, rows: Callable[..., Any]) -> None:
    data = rows([5, 5])
    data["is_init"] = (torch.arange(10) % 5 == 0).unsqueeze(-1)
    batch = sliced(data, slice_len=3).sample(30)
    assert batch["is_init"].shape == (30, 1)
    assert torch.equal(batch["is_init"].reshape(-1), torch.arange(30) % 3 == 0)


def test_what_a_batch_says_does_not_change_what_is_stored(sliced: Make) -> None:
    rb = sliced([5, 5], slice_len=3)
    before = rb[:].clone()
    batch = rb.sample(30)
    batch["next", "terminated"][:] = True
    batch["t"][:] = -1
    assert (rb[:] == before).all()


# -- padding --------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD8")
@pytest.mark.parametrize(
    "options", [{"strict_length": False, "pad_output": True}, {"pad": "none"}, {"pad": "right"}]
)
def test_the_mask_is_always_there(options: dict[str, Any], sliced: Make) -> None:
    batch = sliced([1000], slice_len=2, **options).sample(4)
    assert batch["collector", "mask"].all()
    assert (batch["collector", "mask"].shape, batch["collector", "mask"].dtype) == (
        (4,),
        torch.bool,
    )


def test_short_windows_repeat_their_last_row(sliced: Make, rows: Callable[..., Any]) -> None:
    data = rows([2])
    data["is_init"] = torch.tensor([[True], [False]])
    batch = sliced(data, slice_len=4, strict_length=False, pad_output=True).sample(8)
    assert batch["t"].tolist() == [0, 1, 1, 1] * 2
    assert batch["index"].tolist() == [0, 1, 1, 1] * 2
    assert batch["collector", "mask"].tolist() == [True, True, False, False] * 2
    for name in ("done", "terminated"):
        assert batch["next", name].reshape(-1).tolist() == [False, True, False, False] * 2
    assert not batch["next", "truncated"].any()
    assert batch["is_init"].reshape(-1).tolist() == [True, False, False, False] * 2


@pytest.mark.parametrize("align", ["left", "right"])
def test_padding_has_its_values(align: str, sliced: Make, rows: Callable[..., Any]) -> None:
    data = rows([2])
    data["x"] = torch.ones(2, 2, 3)
    data["flag"] = torch.ones(2, dtype=torch.bool)
    values = {"t": -5, "x": 0.5}
    batch = sliced(data, slice_len=4, pad="right", align=align, pad_value=values).sample(4)
    mask = batch["collector", "mask"]
    assert mask.tolist() == (
        [True] * 2 + [False] * 2 if align == "left" else [False] * 2 + [True] * 2
    )
    assert batch["t"][mask].tolist() == [0, 1]
    assert batch["t"][~mask].tolist() == [-5, -5]
    assert (batch["x"][mask] == 1).all()
    assert (batch["x"][~mask] == 0.5).all()
    assert batch["e"][~mask].tolist() == [0, 0]
    assert not batch["flag"][~mask].any()
    assert not batch["next", "done"][~mask].any()
    assert batch["next", "done"][mask].reshape(-1).tolist() == [False, True]
    assert (sliced(data, slice_len=4, pad="both")[:]["x"] == 1).all()


@pytest.mark.parametrize("short", ["whole", "law", "exclude"])
@pytest.mark.parametrize("pad", ["none", "left", "right", "both"])
def test_every_padded_window_is_drawn(pad: str, short: str, sliced: Make) -> None:
    rb = sliced([2, 5], slice_len=3, pad=pad, short=short)
    batch = rb.sample(3 * 2000)
    mask = batch["collector", "mask"].reshape(-1, 3)
    t = batch["t"].reshape(-1, 3)
    seen = {tuple(row[real].tolist()) for row, real in zip(t, mask, strict=True)}
    left, right = 2 * (pad in ("left", "both")), 2 * (pad in ("right", "both"))
    whole = short == "whole"
    expected = set()
    for first, n in ((0, 2), (2, 5)):
        if n < 3 and (whole or short == "exclude"):
            expected |= {(0, 1)} if whole else set()
            continue
        for s in range(-left, n - 3 + right + 1):
            expected.add(tuple(range(first + max(s, 0), first + min(s + 3, n))))
    assert seen == expected
    assert (batch["t"][~batch["collector", "mask"]] == 0).all()


# -- rings ----------------------------------------------------------------------------------------


@pytest.mark.pitfall("BD13")
@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_slices_of_a_full_ring(
    more: int, without: bool, sliced: Make, rows: Callable[..., Any]
) -> None:
    """At the capacity, one more, and after a whole turn less one."""
    rb = sliced(rows([4, 4, 4], open_=True)[:10], 10, slice_len=2)
    if without:
        rb.set_sampler(SliceSamplerWithoutReplacement(slice_len=2))
    data = rows([4] * 6)[10 : 10 + more]
    if more:
        rb.extend(data)
    oldest = more
    expected = {t for t in range(oldest, 10 + more - 1) if t // 4 == (t + 1) // 4}
    seen = set()
    for _ in range(60):
        batch = rb.sample(6)
        for window in _windows(batch):
            assert window[1] == window[0] + 1
            seen.add(window[0])
        assert torch.equal(batch["index"], batch["t"] % 10)
    assert seen == expected


def test_windows_wrap_but_do_not_cross_the_seam(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = sliced(rows([30], open_=True)[:14], 10, slice_len=4)
    batch = rb.sample(4 * 400)
    assert {w[0] for w in _windows(batch)} == set(range(4, 11))
    assert [8, 9, 0, 1] in batch["index"].reshape(-1, 4).tolist()


@pytest.mark.pitfall("BD3")
@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_the_seam_survives_a_checkpoint(
    way: str, tmp_path: Any, sliced: Make, rows: Callable[..., Any]
) -> None:
    rb = sliced(rows([40], open_=True)[:17], 10, slice_len=3)
    other = sliced((), 10, slice_len=3)
    if way == "dumps":
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(rb.state_dict())
    for _ in range(2):
        windows = _windows(other.sample(3 * 300))
        assert all(w == [w[0], w[0] + 1, w[0] + 2] for w in windows)
        assert {w[0] for w in windows} >= set(range(10, 15))
        other.extend(rows([40], open_=True)[17:20])


def test_lanes_of_a_storage(sliced: Make, rows: Callable[..., Any]) -> None:
    data = torch.stack([rows([3, 5]), rows([8], start=100)], 0)
    rb = sliced(data, slice_len=3, ndim=2)
    batch = rb.sample(3 * 500)
    assert {w[0] for w in _windows(batch)} == {0, 3, 4, 5, *range(100, 106)}
    lane = batch["index"][:, 1].reshape(-1, 3)
    assert (lane == lane[:, :1]).all()
    assert torch.equal(batch["t"] // 100, batch["index"][:, 1])


def test_after_all_rows_are_gone(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = sliced([5, 5], slice_len=3)
    rb.empty()
    with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage\."):
        rb.sample(3)
    rb.extend(rows([4], start=50))
    assert {w[0] for w in _windows(rb.sample(90))} == {50, 51}


# -- the newest rows, lanes -----------------------------------------------------------------------


def test_recent_rows_come_first(sliced: Make, rows: Callable[..., Any]) -> None:
    """Four lanes, half of the rows from the newest four steps once there are more than eight."""
    rb = sliced((), 4 * 64, slice_len=1, ndim=2, measure="lane", draw="stratified", recent=(0.5, 4))

    def step(first: int, count: int) -> None:
        steps = torch.arange(first, first + count).expand(4, count)
        done = torch.zeros(4, count, dtype=torch.bool)
        rb.extend(TensorDict({"t": steps, "next": {"done": done}}, [4, count]))

    step(0, 1)
    assert rb.sample(4)["index"][:, 1].tolist() == [0, 1, 2, 3]
    step(1, 1)
    assert rb.sample(8)["index"][:, 1].tolist() == [0, 1, 2, 3] * 2
    step(2, 30)
    batch = rb.sample(32)
    recent, rest = batch[:16], batch[16:]
    for part in (recent, rest):
        assert part["index"][:, 1].bincount().tolist() == [4] * 4
    for t in (28, 29, 30, 31):
        assert sorted(recent["index"][:, 1][recent["t"] == t].tolist()) == [0, 1, 2, 3]


def test_recent_rows_only_where_plain_draws_would_miss_them(sliced: Make) -> None:
    """Active where ``ratio * (rows - (T - 1)) > steps``, and then a share rounded up."""
    for rows_, active in ((10, False), (11, True)):
        rb = sliced([rows_], slice_len=3, recent=(0.5, 4))
        starts = torch.cat([rb.sample(15)["t"].reshape(5, 3)[:, :1].T for _ in range(200)])
        newest = starts >= rows_ - 3 + 1 - 4
        assert bool(newest[:, :3].all()) == active
        assert not newest[:, 3:].all()


def test_all_lanes_or_none(sliced: Make, rows: Callable[..., Any]) -> None:
    data = torch.stack([rows([8]), rows([2, 2, 2, 2])], 0)
    rb = sliced(data, slice_len=3, ndim=2, measure="lane")
    assert rb.can_sample(9)
    rb = sliced(data, slice_len=3, ndim=2, measure="lane", strict_lanes=True)
    assert not rb.can_sample(9)
    with pytest.raises(NotEnoughData, match=r"none in 1 of the lanes \(the first: 1\)"):
        rb.sample(9)


def test_draws_without_replacement(sliced: Make) -> None:
    rb = sliced([3, 4], slice_len=2, draw="without_replacement")
    for _ in range(20):
        assert sorted(w[0] for w in _windows(rb.sample(10))) == [0, 1, 3, 4, 5]
    with pytest.raises(NotEnoughData, match="6 slices of 2 rows, got 5 windows"):
        rb.sample(12)
    assert not rb.can_sample(12)
    rb = sliced([3, 4], slice_len=2, draw="without_replacement", allow_short=True)
    assert sorted(w[0] for w in _windows(rb.sample(12))) == [0, 1, 3, 4, 5]


# -- other components -----------------------------------------------------------------------------


@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement"])
@pytest.mark.pitfall("RD14")
def test_a_generator_is_all_that_counts(draw: str, sliced: Make) -> None:
    for measure in ("window", "trajectory", "lane", "transition"):
        one, other = (sliced([9, 30], slice_len=3, draw=draw, measure=measure) for _ in range(2))
        before = torch.get_rng_state()
        first = [one.sample(12)["index"].tolist() for _ in range(5)]
        torch.rand(3)
        torch.set_rng_state(before)
        assert [other.sample(12)["index"].tolist() for _ in range(5)] == first
        assert torch.equal(torch.get_rng_state(), before)
        assert len({tuple(index) for index in first}) > 1


def test_without_a_generator_the_global_one_counts(sliced: Make) -> None:
    rb = sliced([50], slice_len=3)
    rb.set_rng(None)
    torch.manual_seed(4)
    first = rb.sample(30)["index"]
    torch.manual_seed(4)
    assert torch.equal(rb.sample(30)["index"], first)


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_a_writer_that_does_not_keep_the_order(kind: Any) -> None:
    text = f"{kind.__name__} needs rows in the order in which they were written"
    with pytest.raises(ValueError, match=text):
        ReplayBuffer(
            storage=LazyTensorStorage(5),
            sampler=kind(slice_len=2),
            writer=TensorDictMaxValueWriter(),
        )
    rb = ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictMaxValueWriter())
    with pytest.raises(ValueError, match=text):
        rb.set_sampler(kind(slice_len=2))
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=kind(slice_len=2))
    with pytest.raises(ValueError, match=text):
        rb.set_writer(TensorDictMaxValueWriter())
    assert type(rb.sampler) is kind


def test_other_content_is_refused() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend([1, 2, 3])
    with pytest.raises(RuntimeError, match="got a ListStorage"):
        rb.sample(2)
    assert not rb.can_sample(2)
    rb = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SliceSampler(slice_len=2))
    rb.extend(torch.arange(5))
    with pytest.raises(RuntimeError, match="slices need TensorDicts"):
        rb.sample(2)


def test_mapped_storage(tmp_path: Any, rows: Callable[..., Any]) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path), sampler=SliceSampler(slice_len=3)
    )
    rb.extend(rows([4, 10])[:13])
    assert {w[0] for w in _windows(rb.sample(300))} == {4, 5, 6, 7, 8, 9, 10}


@pytest.mark.pitfall("BD20")
def test_slices_from_the_starts_of_episodes(sliced: Make) -> None:
    """The recipe: sequential draws, a stride as long as any episode."""
    rb = sliced([4, 9, 6], slice_len=3, draw="sequential", stride=100)
    assert [w[0] for w in _windows(rb.sample(9))] == [0, 4, 13]


def test_replacement_makes_the_other_class() -> None:
    made = SliceSampler(replacement=False, slice_len=4, shuffle=False)
    assert type(made) is SliceSamplerWithoutReplacement
    assert not made.shuffle
    assert type(SliceSampler(replacement=True, slice_len=4)) is SliceSampler


def test_prefetched_slices(sliced: Make, rows: Callable[..., Any]) -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(50),
        sampler=SliceSampler(slice_len=4),
        batch_size=8,
        prefetch=2,
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(rows([20, 30]))
    plain = sliced([20, 30], slice_len=4, batch_size=8)
    for _ in range(6):
        assert torch.equal(rb.sample()["index"], plain.sample()["index"])
    rb.shutdown()
