"""Where rows lie in their episodes, what a clear and a restart leave, and returns."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Bootstrap,
    Compose,
    Coverage,
    EpisodeWriter,
    HindsightGoal,
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    NStep,
    PreviousStep,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReturnToGo,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    StackFrames,
    StepCount,
)
from replaykit.episodes import EndReason, Head
from replaykit.errors import NotEnoughData
from tests import effort


@pytest.mark.acceptance("S12")
@pytest.mark.parametrize("chance", [0.1, 0.004])
def test_steps_to_the_end_in_rings_of_streams(chance: float, ted: Any, buffer: Any) -> None:
    """Each of two streams has a ring of 100 rows; `test_histories` has the other layouts."""
    dice = random.Random(f"{chance}")
    rb = buffer(200, lane_key="lane", writer=LaneWriter(100))
    kept: list[list[tuple[int, bool]]] = [[], []]  # of each lane: (begin, done)
    begin = [0, 0]
    for written in range(effort.cases(1000)):
        lane = dice.randrange(2)
        t, done = len(kept[lane]), dice.random() < chance
        kept[lane].append((begin[lane], done))
        begin[lane] = t + 1 if done else begin[lane]
        rb.extend(ted([int(done)], t, lane=[lane]))
        if written % 3:
            continue
        looks = rb.episodes
        index = looks.index
        last = [[0] * len(own) for own in kept]
        for lane, own in enumerate(kept):
            for t in range(len(own) - 1, max(len(own) - 202, -1), -1):
                last[lane][t] = t if own[t][1] or t == len(own) - 1 else last[lane][t + 1]
        columns = (rb["lane"][index], rb["t"][index], looks.steps_to_end(index))
        columns = (*columns, looks.step(index), looks.reason(index))
        seen = []
        for lane, t, to_end, step, reason in zip(*(c.tolist() for c in columns), strict=True):
            end = last[lane][t]
            assert (to_end, step) == (end - t, t - kept[lane][t][0])
            assert reason == kept[lane][end][1]
            seen.append((lane, t))
        newest = [(lane, t) for lane in (0, 1) for t in [*range(len(kept[lane]))][-100:]]
        assert sorted(seen) == newest


@pytest.mark.acceptance("F3", "F4")
@pytest.mark.parametrize("lane_key", [None, "lane"])
def test_emptied_rows_are_never_seen_again(lane_key: Any, ted: Any, buffer: Any) -> None:
    rb = buffer(6, lane_key=lane_key, writer=RoundRobinWriter(track_generations=True))
    columns = {} if lane_key is None else {"lane": torch.zeros(8, dtype=torch.long)}
    rb.extend(ted([0] * 8, **columns))
    old = rb.episodes
    addresses = set(old.position(old.index).tolist())
    sample = rb.sample(64)
    rb.empty()
    assert len(rb.episodes) == 0
    columns = {} if lane_key is None else {"lane": torch.zeros(3, dtype=torch.long)}
    rb.extend(ted([0] * 3, 8, **columns))
    (episode,) = rb.episodes
    assert (episode.head, episode.evicted, episode.length) == (Head.CUT, 0, 3)
    assert episode.reason == EndReason.OPEN
    looks = rb.episodes
    index = looks.index
    assert looks.begin(index).tolist() == [looks.position(index).tolist()[0]] * 3
    assert looks.step(index).tolist() == [0, 1, 2]
    # Positions go on: no address means another row than it did.
    assert not addresses & set(looks.position(index).tolist())
    assert episode.begin > max(addresses)
    now = rb.sample(64)
    handles = set(zip(now["index"].tolist(), now["index_generation"].tolist(), strict=True))
    gone = zip(sample["index"].tolist(), sample["index_generation"].tolist(), strict=True)
    assert not handles & set(gone)


@pytest.mark.acceptance("S13", "F18")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reward_clip": (-1, 1)}, [-7.0, -7.0]),
        ({"reward_clip": (-1, 1), "on_truncated": "bootstrap"}, [50.5, 99.0]),
        ({"on_truncated": "bootstrap"}, [53.5, 97.0]),
    ],
)
def test_returns_of_clipped_rewards_and_of_a_value(
    options: dict[str, Any], expected: list[float], ted: Any, buffer: Any
) -> None:
    def value(last: Any) -> torch.Tensor:
        return torch.full((len(last), 1), 200.0)

    given = {"value": value} if "on_truncated" in options else {"default": -7.0}
    rb = buffer(10, transform=ReturnToGo(0.5, **given, **options))
    rows = ted([0, 2])
    rows["next", "reward"] = torch.tensor([[5.0], [-3.0]])
    for row in rows.split(1):
        rb.extend(row)
    assert rb[:]["episode_return"].flatten().tolist() == expected


@pytest.mark.acceptance("S17")
@pytest.mark.parametrize("how", ["dumps", "state_dict", "memmap"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_episodes_end_at_a_restart(
    how: str, lanes: int, ted: Any, buffer: Any, tmp_path: Any
) -> None:
    """Rows 0..5 of an open episode, a restart, rows 6..11: two episodes for everyone."""

    def make(place: str) -> ReplayBuffer:
        transform = Compose(
            HindsightGoal(1.0, "final"),
            NStep(4, 1.0),
            StackFrames(["observation"], 3),
            PreviousStep(["t"], init=-1),
            StepCount(),
            ReturnToGo(1.0),
        )
        sampler, unit = SamplerWithoutReplacement(shuffle=False), {}
        if how != "memmap":
            return buffer(40, sampler, lanes=lanes, transform=transform, **unit)
        storage = LazyMemmapStorage(
            40 * lanes, ndim=1 if lanes == 1 else 2, scratch_dir=tmp_path / place
        )
        return ReplayBuffer(storage=storage, sampler=sampler, transform=transform)

    def rows(start: int, code: int) -> Any:
        codes = [0] * 5 + [code]
        made = ted(codes if lanes == 1 else [codes] * lanes, start)
        made["next", "reward"] = torch.ones_like(made["next", "reward"])
        for part in (made, made["next"]):
            part["achieved_goal"] = part["observation"].clone()
            part["desired_goal"] = torch.full_like(part["observation"], 99.0)
        return made

    rb, other = make("one"), make("two")
    rb.extend(rows(0, 0))
    if how == "state_dict":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    assert other.episodes.reasons.tolist() == [EndReason.CUT] * lanes
    other.extend(rows(6, 1))
    assert other.episodes.lengths.tolist() == [6, 6] * lanes
    assert other.episodes.heads.tolist() == [Head.RESET, Head.RESET] * lanes
    assert other.episodes.reasons.tolist() == [EndReason.CUT, EndReason.TERMINATED] * lanes
    batch = other.sample(12 * lanes)
    assert len(set(map(str, batch["index"].tolist()))) == 12 * lanes
    for row in batch:
        t = int(row["t"])
        first, last = (0, 5) if t < 6 else (6, 11)
        m = min(4, last - t + 1)
        assert row["steps_used"].item() == m
        # Of the goal that is reached with the last row of this side: 0 there, -1 before.
        assert row["next", "reward"].item() == -m + (t + m - 1 == last)
        assert row["next", "observation"].tolist()[-1] == t + m
        assert row["bootstrap"].item() == (not (last == 11 and t + m - 1 == 11))
        frames = [max(t - back, first) for back in (2, 1, 0)]
        assert row["observation"].tolist() == frames
        assert row["previous_t"].item() == (t - 1 if t > first else -1)
        assert row["step_count"].item() == t - first
        assert row["desired_goal"].item() == last + 1
        assert row["return_valid"].item() == (t > 5)
        assert row["episode_return"].item() == (12 - t if t > 5 else 0)
    for length, count in ((6, 2), (2, 10)):
        draw = SliceSampler(slice_len=length, draw="without_replacement")
        other.set_sampler(draw)
        starts = other.sample(length * count * lanes)["t"].reshape(-1, length)
        assert set(starts[:, 0].tolist()).isdisjoint(range(7 - length, 6))


@pytest.mark.acceptance("S27", "F45")
@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_bootstrap_mask_of_windows(code: int, length: int, ted: Any, buffer: Any) -> None:
    """At the end of a terminated episode 0, of a truncated one 1, and 1 short of the end; it is
    the key that ``NStep`` gives too."""
    for transform in (Bootstrap(per_window=True), NStep(None, 0.9, per_step=True)):
        sampler = SliceSampler(slice_len=length, draw="without_replacement", flat=False)
        rb = buffer(40, sampler, transform=transform)
        rb.extend(ted([0] * 5 + [code]))
        batch = rb.sample((7 - length) * length)
        for t, mask in zip(batch["t"].tolist(), batch["bootstrap"].tolist(), strict=True):
            assert mask == [[not (t[-1] == 5 and code == 1)]] * length
    rb = buffer(40, transform=NStep(3, 0.9))
    rb.extend(ted([0] * 5 + [code]))
    batch = rb[:]
    assert batch["bootstrap"].squeeze(-1).tolist() == [True] * 3 + [code == 2] * 3
    assert batch["bootstrap"].dtype == torch.bool


class Identified:
    """Episodes of 2 to 5 rows, each under its identity."""

    def __init__(self, capacity: int = 20_000, sampler: Any = None) -> None:
        self.rb = ReplayBuffer(
            storage=LazyTensorStorage(capacity, lane_key="identity"),
            writer=EpisodeWriter(),
            sampler=sampler or SliceSampler(slice_len=2, measure=Coverage()),
            generator=torch.Generator().manual_seed(0),
            batch_size=40,
        )

    def add(self, identities: range) -> Identified:
        for k in identities:
            n = 2 + k % 4
            done = (torch.arange(n) == n - 1)[:, None]
            row = {"identity": torch.full((n,), k), "t": torch.arange(n), "next": {"done": done}}
            self.rb.extend(TensorDict(row, [n]))
        return self

    def load(self, folder: Path) -> Identified:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that do not fit, and of another sampler
            self.rb.loads(folder)
        return self

    def identities(self) -> list[int]:
        """The identities of the stored episodes, each of which is whole."""
        found = []
        for episode in self.rb.episodes:
            rows = episode.rows()
            (k,) = set(rows["identity"].tolist())
            assert rows["t"].tolist() == list(range(2 + k % 4))
            found.append(k)
        batch = self.rb.sample()
        assert set(batch["identity"].tolist()) <= set(found)
        assert (batch["t"].reshape(-1, 2).diff() == 1).all()
        return sorted(found)


@pytest.mark.acceptance("S32")
def test_a_thousand_episodes_are_exported_and_restored(tmp_path: Path) -> None:
    one, folder = Identified().add(range(1000)), tmp_path / "saved"
    one.rb.sample()
    one.rb.dumps(folder)
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    assert sum(file.st_size for file in files) > 10_000
    assert all(file.st_mode & 0o444 == 0o444 for file in files)

    other = Identified().load(folder)
    assert (other.rb[:] == one.rb[:]).all()
    assert (other.rb.sample() == one.rb.sample()).all()
    assert other.add(range(2000, 5000)).identities() == [*range(1000), *range(2000, 5000)]
    assert Identified().add(range(900, 1200)).load(folder).identities() == list(range(1000))
    by_priority = PrioritizedSliceSampler(alpha=1, beta=1, slice_len=2, unit="episode")
    assert Identified(sampler=by_priority).load(folder).identities() == list(range(1000))
    assert Identified(1000).load(folder).identities() == list(range(715, 1000))

    other.rb.empty()
    assert other.add(range(1000)).identities() == list(range(1000))
    other.rb.empty()
    other.rb.dumps(tmp_path / "empty")
    empty = Identified().add(range(3)).load(tmp_path / "empty")
    with pytest.raises(NotEnoughData):
        empty.rb.sample()
    assert empty.add(range(3)).identities() == [0, 1, 2]


@pytest.mark.acceptance("S32")
def test_a_fixture_of_episodes_is_imported() -> None:
    found = Identified().load(Path(__file__).parent.parent / "checkpoint/fixtures/episodes-3")
    assert found.identities() == list(range(100))
    assert int(found.rb.storage.indexes.data().draws.sum()) == 40 + 20
