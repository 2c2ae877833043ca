"""The tree of eligible starts against a model that scans, and draws that need rows around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer
from replaykit.episodes import CountLaw, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.samplers.eligible_priorities import EligiblePriorities

# -- a model --------------------------------------------------------------------------------------


class History:
    """All rows that one lane ever had: whether an episode ends with them, whether they are init."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.done: list[bool] = []
        self.init: list[bool] = []
        self.forgotten = 0
        self.joined = False

    def forget(self) -> None:
        # What comes next was joined in the middle, if an episode was open.
        self.joined = bool(self.done) and not self.done[-1]
        self.forgotten = len(self.done)

    def stored(self) -> range:
        return range(max(self.forgotten, len(self.done) - self.slots), len(self.done))

    def starts(self, law: CountLaw) -> dict[int, bool]:
        """Of every stored row: whether a window may start with it."""
        found = {}
        for row in self.stored():
            begin = row
            while begin > self.forgotten and not self.done[begin - 1]:
                begin -= 1
            last = row
            while last < len(self.done) - 1 and not self.done[last]:
                last += 1
            first = max(begin, self.stored().start)
            joined = self.joined and begin == self.forgotten
            reset = begin == first and self.init[begin] and not joined
            is_open = not self.done[last]
            count = law.count(last - first + 1, reset=reset, is_open=is_open)
            found[row] = 0 <= row - first - (0 if reset else law.past) < count
        return found


laws = st.builds(
    lambda length, right, below, past, future, closed, intact: CountLaw(
        length, 1 - length + right, below, past, future, closed, intact
    ),
    st.integers(1, 4),
    st.integers(0, 0) | st.integers(1, 3),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
).filter(lambda law: law.add < 1)


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(1, 40),
    lanes=st.integers(1, 3),
    with_init=st.booleans(),
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("write"),
                st.lists(
                    st.tuples(st.integers(0, 5).map(lambda n: n == 0), st.booleans()),
                    min_size=1,
                    max_size=12,
                ),
            ),
            st.tuples(st.just("update"), st.integers(0, 2**20)),
            st.tuples(st.just("edit"), st.integers(0, 2**20)),
            st.tuples(st.just("alpha"), st.sampled_from([0.5, 1.0])),
            st.tuples(st.just("law"), laws),
            st.tuples(st.just("empty"), st.none()),
        ),
        min_size=1,
        max_size=14,
    ),
    law=laws,
)
def test_the_tree_is_what_a_scan_finds(
    slots: int, lanes: int, with_init: bool, steps: Any, law: CountLaw
) -> None:
    storage = LazyTensorStorage(slots * lanes, ndim=1 if lanes == 1 else 2)
    rb = ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0, dtype=torch.double),
    )
    histories = [History(slots) for _ in range(lanes)]
    tree = EligiblePriorities()
    for what, given_ in steps:
        if what == "write":
            parts = []
            for lane, history in enumerate(histories):
                turned = given_[lane % len(given_) :] + given_[: lane % len(given_)]
                for done, init in turned:
                    history.done.append(done)
                    history.init.append(init if with_init else True)
                columns: dict[str, Any] = {
                    "next": {"done": torch.tensor([done for done, _ in turned])}
                }
                if with_init:
                    columns["is_init"] = torch.tensor([[init] for _, init in turned])
                parts.append(TensorDict(columns, batch_size=[len(turned)]))
            rb.extend(parts[0] if lanes == 1 else torch.stack(parts))
        elif not len(rb):
            continue
        elif what == "update":
            drawn = np.random.default_rng(given_)
            element = drawn.integers(len(rb), size=3)
            rb.update_priority(_index(element, lanes), torch.tensor(drawn.integers(0, 9, 3) / 4.0))
        elif what == "edit":
            drawn = np.random.default_rng(given_)
            lane = int(drawn.integers(lanes))
            row = int(drawn.choice(list(histories[lane].stored())))
            histories[lane].done[row] = not histories[lane].done[row]
            column = rb["next", "done"].clone()  # [T, 1], or [lanes, T, 1]
            slot = (row - histories[lane].forgotten) % slots
            column[(slot,) if lanes == 1 else (lane, slot)] = histories[lane].done[row]
            rb.set_(("next", "done"), column)
        elif what == "alpha":
            rb.sampler.alpha = given_
        elif what == "law":
            law = given_
        else:
            rb.empty()
            for history in histories:
                history.forget()
        if not len(rb):
            continue
        sampler: Any = rb.sampler
        index: EpisodeIndex = storage.episodes
        found = tree.follow(sampler._following(storage), index, law)
        raw = sampler.state_dict()["_priorities"].numpy()
        expected = np.zeros(len(rb))
        for lane, history in enumerate(histories):
            starts = history.starts(law)
            for row, eligible in starts.items():
                element = (row - history.forgotten) % slots * lanes + lane
                expected[element] = raw[element] ** sampler.alpha if eligible else 0.0
        leaves = found.leaves.numpy()
        np.testing.assert_allclose(leaves[: len(rb)], expected, rtol=1e-12)
        assert not leaves[len(rb) :].any()


def _index(element: np.ndarray[Any, Any], lanes: int) -> torch.Tensor:
    if lanes == 1:
        return torch.from_numpy(element)
    return torch.from_numpy(np.stack([element // lanes, element % lanes], -1))
