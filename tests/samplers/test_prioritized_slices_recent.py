"""Priorities together with a share of the newest windows: F5, by the law of C27."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
from tests.samplers.building import follows

LENGTH = 3


class Model:
    """Every window of some lanes, by a scan, and its probability in a batch of ``count``."""

    def __init__(
        self,
        done: dict[Any, list[bool]],
        priorities: dict[tuple[Any, int], float],
        recent: tuple[float, int],
        alpha: float,
    ) -> None:
        self.recent, self.alpha = recent, alpha
        self.value = {row: p**alpha if p else 0.0 for row, p in priorities.items()}
        self.rows = sum(map(len, done.values())) / len(done)
        self.starts: list[tuple[Any, int]] = []
        self.newest: list[tuple[Any, int]] = []
        for lane, ends in done.items():
            own = [
                (lane, t)
                for t in range(len(ends) - LENGTH + 1)
                if not any(ends[t : t + LENGTH - 1])
            ]
            self.starts += own
            self.newest += own[-recent[1] :]

    def share(self, count: int) -> int:
        ratio, steps = self.recent
        active = ratio * (self.rows - (LENGTH - 1)) > steps
        return math.ceil(ratio * count) if active else 0

    def among(self, rows: list[tuple[Any, int]]) -> dict[tuple[Any, int], float]:
        total = sum(self.value[row] for row in rows)
        return {row: self.value[row] / total if row in rows else 0.0 for row in self.starts}

    def mixed(self, count: int) -> dict[tuple[Any, int], float]:
        q = self.share(count) / count
        base = self.among(self.starts)
        recent = self.among(self.newest) if q else base
        return {row: q * recent[row] + (1 - q) * base[row] for row in self.starts}

    def weight(self, count: int, beta: float, drawn: list[Any], norm: str) -> torch.Tensor:
        law = self.mixed(count)
        if norm == "batch":
            low = min(law[row] for row in drawn)
        else:
            least = min(value for value in self.value.values() if value)
            total = sum(self.value[row] for row in self.starts)
            low = (1 - self.share(count) / count) * least / total
        return torch.tensor([(law[row] / low) ** -beta for row in drawn], dtype=torch.float64)


def make(
    done: dict[Any, list[bool]], p: torch.Tensor, how: str = "flat", **options: Any
) -> tuple[ReplayBuffer, list[tuple[Any, int]]]:
    """A buffer with some lanes, and which row each element is, ``p`` being of the elements."""
    rows: list[tuple[Any, int]]
    if how == "streams":
        drawn = np.random.default_rng(0)
        lanes = drawn.permutation([lane for lane, ends in done.items() for _ in ends]).tolist()
        rows, seen = [], dict.fromkeys(done, 0)
        for lane in lanes:
            rows.append((lane, seen[lane]))
            seen[lane] += 1
        shape = [len(rows)]
    else:
        rows = [(lane, t) for t in range(len(done[0])) for lane in done]
        shape = [len(done[0]), len(done)] if how == "lanes" else [len(rows)]
    ends = torch.tensor([done[lane][t] for lane, t in rows]).reshape(shape)
    env = torch.tensor([lane for lane, _ in rows]).reshape(shape)
    time = torch.tensor([t for _, t in rows]).reshape(shape)
    data = TensorDict({"env": env, "t": time, "next": {"done": ends}}, shape)
    storage = LazyTensorStorage(
        len(rows),
        ndim=2 if how == "lanes" else 1,
        lane_key="env" if how == "streams" else None,
    )
    options = {"alpha": 0.7, "beta": 0.9, "eps": 0.0, "dtype": torch.float64, **options}
    rb = ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSliceSampler(slice_len=LENGTH, **options),
        generator=torch.Generator().manual_seed(3),
    )
    rb.extend(data.transpose(0, 1) if how == "lanes" else data)
    index = torch.arange(len(rows))
    if how == "lanes":
        index = torch.stack([index // len(done), index % len(done)], -1)
    rb.update_priority(index, p.double())
    return rb, rows


def drawn_starts(data: TensorDict) -> list[tuple[int, int]]:
    windows = data.reshape(-1, LENGTH)
    assert bool((windows["t"].diff(dim=1) == 1).all())
    assert bool((windows["env"].diff(dim=1) == 0).all())
    weight = windows["priority_weight"]
    assert weight.equal(weight[:, :1].expand_as(weight))
    first = windows[:, 0]
    return list(zip(first["env"].tolist(), first["t"].tolist(), strict=True))


def lanes_of(how: str) -> dict[Any, list[bool]]:
    drawn = np.random.default_rng(1)
    lengths = {"flat": [40], "lanes": [30, 30, 30], "streams": [40, 18, 27]}[how]
    return {lane: (drawn.random(n) < 0.15).tolist() for lane, n in enumerate(lengths)}


@pytest.mark.acceptance("F5")
@pytest.mark.parametrize("norm", ["global", "batch"])
@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("how", ["flat", "lanes", "streams"])
def test_shares_and_weights(how: str, stratified: bool, norm: str) -> None:
    """The newest by priority among themselves, the rest by priority, one weight for both."""
    done, recent = lanes_of(how), (0.4, 5)
    p = torch.rand(sum(map(len, done.values())), generator=torch.Generator().manual_seed(2)) + 0.1
    p[::7] = 0
    rb, rows = make(done, p, how, recent=recent, stratified=stratified, weight_norm=norm)
    model = Model(done, dict(zip(rows, p.double().tolist(), strict=True)), recent, 0.7)
    number = {row: i for i, row in enumerate(model.starts)}
    count, share = 10, 4
    assert model.share(count) == share
    newest: list[int] = []
    rest: list[int] = []
    # The norm is of weights alone.
    for turn in range(1500 if norm == "global" else 20):
        data = rb.sample(count * LENGTH)
        starts = drawn_starts(data)
        newest += [number[row] for row in starts[:share]]
        rest += [number[row] for row in starts[share:]]
        if turn < 20:
            weight = data["priority_weight"].reshape(count, LENGTH)[:, 0]
            torch.testing.assert_close(weight, model.weight(count, 0.9, starts, norm))
            assert float(weight.max()) <= 1 + 1e-12
    if norm != "global":
        return
    order = list(number)
    laws = [model.among(model.newest), model.among(model.starts), model.mixed(count)]
    for drawn, law in zip([newest, rest, newest + rest], laws, strict=True):
        expected = torch.tensor([law[row] for row in order], dtype=torch.float64)
        if stratified:  # less variance than chi-square expects: what is counted is close
            counts = torch.bincount(torch.tensor(drawn), minlength=len(order)) / len(drawn)
            torch.testing.assert_close(counts.double(), expected, rtol=0.15, atol=2e-3)
        else:
            assert follows(torch.tensor(drawn), expected)


def test_importance_weights_undo_the_mix() -> None:
    """With beta 1, means over weighted draws are means over all windows alike."""
    done, recent = lanes_of("flat"), (0.5, 4)
    p = torch.rand(40, generator=torch.Generator().manual_seed(5)) + 0.2
    rb, rows = make(done, p, beta=1.0, recent=recent)
    model = Model(done, dict(zip(rows, p.double().tolist(), strict=True)), recent, 0.7)
    data = rb.sample(LENGTH * 60_000).reshape(-1, LENGTH)[:, 0]
    weight, t = data["priority_weight"], data["t"].double()
    mean = float((weight * t).sum() / weight.sum())
    assert mean == pytest.approx(sum(t for _, t in model.starts) / len(model.starts), rel=0.02)


def test_the_law_after_writes_updates_and_edits() -> None:
    rb, _ = make({0: [False] * 30}, torch.ones(30), alpha=1.0, recent=(0.5, 4))
    done = [False] * 30
    drawn = np.random.default_rng(7)
    for step in range(5):
        if step:
            fresh = (drawn.random(9) < 0.2).tolist()
            time = torch.arange(len(done), len(done) + 9)
            rows = {"env": time * 0, "t": time, "next": {"done": torch.tensor(fresh)}}
            rb.extend(TensorDict(rows, [9]))
            done += fresh
        if step == 3:
            row = int(drawn.integers(len(done) - 30, len(done)))
            done[row] = not done[row]
            flag = torch.tensor([[done[row]]])
            rb.set_at_(("next", "done"), flag, torch.tensor([row % 30]))
        at = torch.from_numpy(drawn.integers(30, size=6))
        rb.update_priority(at, torch.from_numpy(drawn.random(6) * 5))
        raw = rb.sampler.state_dict()["_priorities"]
        stored = len(done) - 30
        own = {(0, t): float(raw[(stored + t) % 30]) for t in range(30)}
        model = Model({0: done[stored:]}, own, (0.5, 4), 1.0)
        starts = [(0, t - stored) for _, t in drawn_starts(rb.sample(4000 * LENGTH))]
        law = model.mixed(4000)
        expected = torch.tensor([law.get((0, t), 0.0) for t in range(30)], dtype=torch.float64)
        assert follows(torch.tensor([t for _, t in starts]), expected)


def test_inactive_recent_share_changes_no_draw() -> None:
    """Too few rows, or no weight among the newest: the same draws from the same seed."""
    done = {0: [False] * 20}
    p = torch.arange(1.0, 21.0)
    for recent, zero in (((0.2, 4), 0), ((0.5, 4), 6)):
        p[20 - zero :] = 0
        rb, _ = make(done, p, recent=recent)
        plain, _ = make(done, p)
        for _ in range(3):
            a, b = rb.sample(30), plain.sample(30)
            assert a["t"].equal(b["t"])
            assert a["priority_weight"].equal(b["priority_weight"])
