"""Draws by episode: coverage, predicates and tags, and round robin."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Coverage,
    EpisodeWriter,
    LazyTensorStorage,
    MostSampled,
    ReplayBuffer,
    SliceSampler,
)
from replaykit.episodes import CountLaw, StreamEpisodes
from replaykit.errors import NotEnoughData, SchemaError
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses


def make(
    lengths: list[int], slots: int = 0, *, batch: int = 30, seed: int = 0, **arguments: Any
) -> ReplayBuffer:
    """Return a buffer of episodes; ``t`` of a row is ``100 * episode + step``."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(slots or 2 * sum(lengths)),
        sampler=SliceSampler(slice_len=arguments.pop("slice_len", 3), **arguments),
        generator=torch.Generator().manual_seed(seed),
        batch_size=batch,
    )
    write(rb, dict(enumerate(lengths)))
    return rb


def write(rb: ReplayBuffer, lengths: dict[int, int]) -> torch.Tensor:
    t = torch.cat([100 * key + torch.arange(n) for key, n in lengths.items()])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths.values()])
    return rb.extend(TensorDict({"t": t, "next": {"done": done}}, [len(t)]))


def starts(rb: ReplayBuffer, length: int = 3) -> list[int]:
    return rb.sample()["t"][::length].tolist()


@pytest.mark.acceptance("S31", "C30")
@pytest.mark.parametrize(
    ("alpha", "live", "least"),
    [
        (0.0, False, 0.4), (0.5, False, 0.6), (1.0, False, 0.8),
        (0.0, True, 0.4), (0.5, True, 0.6), (1.0, True, 0.7),
    ],
)  # fmt: skip
def test_new_episodes_get_their_share(alpha: float, live: bool, least: float) -> None:
    rb = make([10] * 204, batch=40, slice_len=8, measure=Coverage(alpha, live=live))
    share = {0.0: (0.50, 0.50), 0.5: (0.83, 0.67), 1.0: (0.96, 0.74)}[alpha][live]
    for _ in range(1024):
        rb.sample()
    write(rb, {1000 + key: 10 for key in range(204)})
    new = sum(t >= 100_000 for _ in range(1024) for t in starts(rb, 8)) / 5120
    assert new > least
    assert abs(new - share) < 0.03


@pytest.mark.parametrize("base", ["window", "trajectory", "transition", "lane"])
@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement"])
def test_without_a_preference_the_base_remains(base: str, draw: str) -> None:
    options = {"slice_len": 3, "batch": 9, "draw": draw, "seed": 5}
    rb = make([3, 9, 1, 5], measure=Coverage(0.0, base=base), **options)
    plain = make([3, 9, 1, 5], measure=base, **options)
    counts: dict[int, list[int]] = {}
    for which, source in enumerate((rb, plain)):
        for _ in range(700):
            for t in starts(source):
                counts.setdefault(t, [0, 0])[which] += 1
    # Both are samples of one law.
    mean = [sum(pair) / 2 for pair in counts.values()]
    assert len(counts) == 11
    for which in (0, 1):
        assert chi_square_p([pair[which] for pair in counts.values()], mean) > 1e-3


@pytest.mark.parametrize("kernel", ["", "portable", "torch"])
def test_the_law_follows_each_draw(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYKIT_TREE", kernel)
    found = {}
    for seed in range(800):
        rb = make([3, 9], batch=3, seed=seed, measure=Coverage(1.0))
        key = tuple(starts(rb)[0] // 100 for _ in range(2))
        found[key] = found.get(key, 0) + 1
    # 1 and 7 windows; after a draw, the mass of the episode halves.
    law = {
        (0, 0): 1 / 8 * 0.5 / 7.5, (0, 1): 1 / 8 * 7 / 7.5,
        (1, 0): 7 / 8 * 1 / 4.5, (1, 1): 7 / 8 * 3.5 / 4.5,
    }  # fmt: skip
    assert chi_square_p([found[k] for k in law], [800 * p for p in law.values()]) > 1e-3


@pytest.mark.acceptance("F48")
@pytest.mark.parametrize("live", [True, False])
def test_counts_are_saved_and_only_delivered_draws_count(live: bool, tmp_path: Path) -> None:
    measure = Coverage(1.0, live=live)
    options: Any = {"batch": 6, "measure": measure}
    rb = make([3, 9, 5], **options)
    ahead = ReplayBuffer(
        storage=LazyTensorStorage(34), sampler=SliceSampler(slice_len=3, measure=measure),
        batch_size=6, prefetch=3, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    write(ahead, {0: 3, 1: 9, 2: 5})
    for step in range(20):
        assert starts(rb) == starts(ahead)
        if step == 10:
            rb.tag(torch.tensor([0]), {"task": 1})  # no other episodes
    for buffer in (rb, ahead):
        buffer.dumps(tmp_path)
        other = make([4], 34, seed=9, **options)
        other.loads(tmp_path)
        counts = other.storage.indexes.data().draws
        assert counts.sum() == 40
        assert [starts(other) for _ in range(9)] == [starts(buffer) for _ in range(9)]
    small = make([1], 14, seed=9, **options)
    with pytest.warns(UserWarning, match="3 rows"):
        small.loads(tmp_path)
    assert small.storage.indexes.data().draws.tolist() == counts[1:].tolist()


def test_the_most_sampled_episode_leaves_first() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, lane_key="id"),
        writer=EpisodeWriter(MostSampled()),
        sampler=SliceSampler(slice_len=2, measure=Coverage(0.0)),
        batch_size=2,
        generator=torch.Generator().manual_seed(1),
    )
    counts: dict[int, int] = {}
    for key in range(60):
        n = 2 + key % 3
        rows = {"id": torch.full((n,), key), "next": {"done": torch.arange(n) == n - 1}}
        rb.extend(TensorDict(rows, [n]))
        need = sum(counts_of := {k: 2 + k % 3 for k in [*counts, key]}.values()) - 12
        for old in sorted(counts, key=lambda k: (-counts[k], k)):
            if need <= 0:
                break
            need -= 2 + old % 3
            del counts[old]
        counts[key] = 0
        assert len(counts_of) >= len(counts)
        assert {int(e.rows()["id"][0]) for e in rb.episodes} == counts.keys()
        for _ in range(5):
            counts[int(rb.sample()["id"][0])] += 1


@pytest.mark.acceptance("C8")
def test_predicates_follow_tags_and_writes(tmp_path: Path) -> None:
    rb = make([3, 9, 4], 20, where=lambda data: data["task"] == 2)
    refuses(KeyError, "task", rb.sample)
    index = torch.arange(16)
    assert rb.tag(index[[0, 4]], {"task": torch.tensor([1, 2]), "name": torch.zeros(2, 3)}) == 2
    assert {t // 100 for _ in range(20) for t in starts(rb)} == {1}
    rb.tag(index[[0]], {"task": 2})
    counts = torch.bincount(
        torch.tensor([t for _ in range(200) for t in starts(rb)]), minlength=107
    )
    assert chi_square_p(counts[[0, *range(100, 107)]].tolist()) > 1e-3
    rb.dumps(tmp_path)
    other = make([1], 20, where=rb.sampler.where)
    other.loads(tmp_path)
    assert {t // 100 for _ in range(20) for t in starts(other)} == {0, 1}
    generation = rb.storage.ledger.generations(index)
    write(rb, {3: 7})  # overwrites episode 0
    assert rb.tag(index[[0, 15]], {"task": 2}, generation=generation[[0, 15]]) == 1
    assert {t // 100 for _ in range(20) for t in starts(rb)} == {1, 2}
    assert rb.storage.indexes.data()["task"].tolist() == [2, 2, 0]
    rb.tag(index[[4, 15]], {"task": 0})
    refuses(NotEnoughData, "no window that where= allows", rb.sample)
    for values, error in (
        ({"task": 2.0}, SchemaError), ({"task": torch.zeros(2, 2)}, SchemaError),
        ({"task": torch.zeros(3)}, ValueError), ({"draws": 1}, ValueError),
        ({"task": "one"}, TypeError), ({"task": None}, TypeError),
    ):  # fmt: skip
        refuses(error, r"tag|name", rb.tag, index[[4, 15]], values)
    rb.empty()
    other.load_state_dict(rb.state_dict())
    other.resize(30)
    write(other, {4: 9})  # the tag is known without an episode that has it
    refuses(NotEnoughData, "no window that where= allows", other.sample)


@pytest.mark.acceptance("C31")
@pytest.mark.parametrize("offset", ["first", "random"])
def test_round_robin_visits_each_episode_once_a_pass(offset: str, tmp_path: Path) -> None:
    rb = make([3, 9, 2, 4, 5], 40, batch=6, draw="round_robin", offset=offset)
    seen = [t for _ in range(10) for t in starts(rb)]
    assert [t // 100 for t in seen] == [0, 1, 3, 4] * 5
    assert rb.sampler.pass_index == 4
    assert offset == "random" or all(t % 100 == 0 for t in seen)
    assert {t for t in seen if t // 100 == 3} <= {300, 301}
    starts(rb)  # 0 and 1
    rb.dumps(tmp_path)
    other = make([1] * 5, 40, batch=6, draw="round_robin", offset=offset)
    other.loads(tmp_path)
    for buffer in (rb, other):
        write(buffer, {5: 3})
        assert [t // 100 for _ in range(3) for t in starts(buffer)] == [3, 4, 5, 0, 1, 3]
        write(buffer, {6: 33})  # overwrites 0 to 3, and a part of 4
        assert [t // 100 for _ in range(2) for t in starts(buffer)] == [4, 5, 6, 4]
    assert rb.sampler.pass_index == other.sampler.pass_index


def test_a_saved_round_that_ended_goes_on_with_new_episodes() -> None:
    rb, other = (make([3, 3], 40, batch=6, draw="round_robin") for _ in range(2))
    assert starts(rb) == [0, 100]
    other.load_state_dict(rb.state_dict())
    for buffer in (rb, other):
        write(buffer, {2: 3, 3: 3})
        assert starts(buffer) == [200, 300]


FOLLOWING: dict[str, dict[str, Any]] = {
    **{base: {"measure": Coverage(1.0, base=base)} for base in ("window", "transition")},
    "stratified": {"measure": Coverage(0.5, base="trajectory"), "draw": "stratified"},
    "distinct": {"measure": Coverage(), "draw": "without_replacement", "allow_short": True},
    "round robin": {"draw": "round_robin", "measure": "lane"},
}


def written(storage: str, count: int) -> TensorDict:
    """Return rows whose episodes end at random, in 2 lanes or 3 streams if these exist."""
    shape = [2, count] if storage == "lanes" else [count]
    rows = {"env": torch.randint(3, shape), "next": {"done": torch.rand(shape) < 0.3}}
    return TensorDict(rows, shape)


def storage_of(storage: str, slots: int) -> LazyTensorStorage:
    if storage == "lanes":
        return LazyTensorStorage(2 * slots, ndim=2)
    return LazyTensorStorage(slots, lane_key="env" if storage == "streams" else None)


@pytest.mark.parametrize("form", FOLLOWING)
@pytest.mark.parametrize("storage", ["ring", "lanes", "streams"])
def test_a_copy_that_reads_all_episodes_draws_the_same(storage: str, form: str) -> None:
    torch.manual_seed(len(storage) + len(form))
    rb = ReplayBuffer(
        storage=storage_of(storage, 24), sampler=SliceSampler(slice_len=2, **FOLLOWING[form]),
        batch_size=8, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for step in range(30):
        rb.extend(written(storage, 30 if step == 20 else 1 + step % 6))
        if step % 5 == 4:
            rb.cut()
        if step == 12:
            rb.empty()
            rb.extend(written(storage, 8))
        other = copy.deepcopy(rb)  # makes its masses again
        if other.sampler.can_sample(other.storage, 8):
            drawn, again = (b.sample(return_info=True)[1]["index"] for b in (rb, other))
            assert drawn.equal(again), step


@pytest.mark.parametrize("draw", ["iid", "stratified", "without_replacement", "round_robin"])
def test_placed_rows_have_later_ids_than_rows_after_them(draw: str) -> None:
    measure = "window" if draw == "round_robin" else Coverage(99.0)
    rb = make([3] * 4, 12, batch=3, draw=draw, measure=measure)
    stored, drawn = [0, 100, 200, 300], dict.fromkeys(range(0, 1600, 100), 0)
    for t in range(400, 1600, 100):
        rows = rb[0:3]
        rows["t"] = t + torch.arange(3)
        slots = torch.arange(6, 9)
        if t % 500:
            slots = rb.extend(rows)
        else:
            rb.storage.set(slots, rows)
        stored[int(slots[0]) // 3] = t
        seen = []
        for _ in range(4):
            seen += starts(rb)
            if draw != "round_robin":
                assert drawn[seen[-1]] == min(drawn[one] for one in stored)
            drawn[seen[-1]] += 1
        if draw == "round_robin":
            assert sorted(seen) == sorted(stored)


@pytest.mark.parametrize("form", ["window", "round robin"])
@pytest.mark.parametrize("storage", ["ring", "lanes", "streams"])
def test_a_draw_after_a_write_looks_at_few_episodes(
    storage: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def counted(law: CountLaw, stored: Any, *more: Any) -> Any:
        looks.append(len(stored))
        return counts(law, stored, *more)

    counts = CountLaw.counts
    monkeypatch.setattr(CountLaw, "counts", counted)
    table = StreamEpisodes.table
    monkeypatch.setattr(StreamEpisodes, "table", lambda self: looks.append(0) or table(self))
    rb = ReplayBuffer(
        storage=storage_of(storage, 20_000), sampler=SliceSampler(slice_len=2, **FOLLOWING[form]),
        batch_size=8, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    torch.manual_seed(0)
    rb.extend(written(storage, 20_000))
    rb.sample()
    assert max(looks) > 5_000
    assert 0 in looks  # the table of all episodes
    looks.clear()
    for _ in range(40):
        rb.extend(written(storage, 10))
        rb.sample()
    assert 0 not in looks
    assert 40 <= sum(looks) <= 40 * (2 * 10 + 2 * 3)


PASSES: dict[str, dict[str, Any]] = {
    "shuffled": {"replacement": False},
    "in order": {"replacement": False, "shuffle": False},
    "sequential": {"draw": "sequential"},
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_has_the_chosen_episodes_only(kind: str, tmp_path: Path) -> None:
    options = {"batch": 6, "where": lambda data: data["task"] == 1, **PASSES[kind]}
    rb = make([3, 9, 2, 4, 5, 7], 40, **options)
    index = torch.arange(30)
    rb.tag(index, {"task": torch.tensor([1, 1, 1, 0, 1, 1]).repeat_interleave(LENGTHS)})

    def batches(*episodes: int) -> None:
        """Two batches, of which the first begins a pass."""
        found = [t for _ in range(2) for t in starts(rb)]
        if kind == "shuffled":
            assert {t // 100 for t in found} == set(episodes)
        elif kind == "in order":
            assert [t // 100 for t in found] == list(episodes)
        else:
            grid = [100 * e + i for e in episodes for i in range(0, LENGTHS[e] - 2, 3)]
            assert found == (grid * 2)[at : at + 4]

    at = 0
    batches(0, 1, 4, 5)
    if kind == "sequential":
        at = 4
        batches(0, 1, 4, 5)
        rb.dumps(tmp_path)
        rb = make([1], 40, **options)
        rb.loads(tmp_path)
        rb.tag(index[:3], {"task": 0})  # the episode of the last window
        at = 0
        batches(1, 4, 5)
    else:
        starts(rb)
        rb.tag(index[:3], {"task": 0})
        found = {t // 100 for _ in range(2) for t in starts(rb)}  # a new pass
        assert found == {1, 4, 5}
    rb.tag(index, {"task": 0})
    refuses(NotEnoughData, "where=", rb.sample)
    assert not rb.sampler.can_sample(rb.storage, 6)


LENGTHS = torch.tensor([3, 9, 2, 4, 5, 7])


@pytest.mark.parametrize("follow", ["load", "resize"])
@pytest.mark.parametrize("early", [True, False])
def test_a_tag_ends_a_pass_before_and_after_a_load(follow: str, early: bool) -> None:
    options = {"where": lambda data: data["task"] == 1, **PASSES["in order"]}
    rb = make([3] * 5, 40, batch=3, **options)
    index = torch.arange(0, 15, 3)
    rb.tag(index, {"task": torch.tensor([1, 1, 1, 1, 0])})

    def tag() -> None:  # as many episodes, but others
        rb.tag(index[[1, 4]], {"task": torch.tensor([0, 1])})

    assert starts(rb) == [0]
    if early:
        tag()
    if follow == "load":
        rb.load_state_dict(rb.state_dict())
    else:
        rb.resize(50)
    if not early:
        assert starts(copy.deepcopy(rb)) == [100]
        tag()
    assert [starts(rb)[0] // 100 for _ in range(4)] == [0, 2, 3, 4]


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_crosses_ends(kind: str) -> None:
    rb = make([3, 5, 2], 40, batch=3, cross=True, **PASSES[kind])
    rb.cut()
    write(rb, {3: 5, 4: 1})
    rows = rb[:]["t"].tolist()
    parts = [rows[:10], rows[10:]]
    found = [rb.sample()["t"].tolist() for _ in range(5 if kind == "sequential" else 60)]
    every = [part[i : i + 3] for part in parts for i in range(len(part) - 2)]
    assert all(window in every for window in found)
    if kind == "sequential":
        grid = [part[i : i + 3] for part in parts for i in range(0, len(part) - 2, 3)]
        assert found == grid
    else:  # one window of each part in a pass
        assert len({tuple(window) for window in found}) == len(every)
        assert all(
            (a in every[:8]) != (b in every[:8])
            for a, b in zip(found[::2], found[1::2], strict=True)
        )


def test_wrong_arguments_are_refused() -> None:
    for wrong, error in ((-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="alpha"):
            Coverage(wrong)  # type: ignore[arg-type]
    refuses(ValueError, "base", Coverage, base="rows")
    for arguments, text in (
        ({"where": lambda data: data, "recent": (0.5, 3)}, "where="),
        ({"measure": Coverage(), "draw": "sequential"}, "without a measure"),
        ({"measure": Coverage(), "recent": (0.5, 3)}, "Coverage"),
        ({"measure": Coverage(), "draw": "round_robin"}, "without a measure"),
        ({"offset": "first"}, "offset"),
    ):
        with pytest.raises(ValueError, match=text):
            SliceSampler(slice_len=2, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="where"):
        SliceSampler(slice_len=2, where=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a bool for each of 2 episodes"):
        make([3, 3], where=lambda data: data.length).sample()
    with pytest.raises(ValueError, match="episodes of the storage"):
        make([3, 3], where=lambda data: data.length > 0, end_keys=(), traj_key=()).sample()
