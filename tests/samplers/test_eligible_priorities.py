"""The tree of eligible starts after any change, and draws that need rows around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    EpisodeWriter,
    LaneWriter,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.errors import NotEnoughData
from replaykit.samplers.priority_draws import EligiblePriorities
from replaykit.storages.indexing import unravel_index
from tests.samplers.building import follows
from tests.samplers.needing import Needing
from tests.support.refusals import refuses

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


rows_written = st.tuples(
    st.just("write"),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5).map(lambda n: n == 0), st.booleans()),
        min_size=1,
        max_size=12,
    ),
)
rows_removed = st.tuples(st.just("remove"), st.integers(0, 2**20))
other_steps = st.one_of(
    st.tuples(st.sampled_from(["update", "edit"]), st.integers(0, 2**20)),
    st.tuples(st.just("alpha"), st.sampled_from([0.5, 1.0])),
    st.tuples(st.just("law"), laws | st.integers(1, 3).map(CountLaw.strict)),
    st.tuples(st.just("empty"), st.none()),
)

WRITERS: dict[str, Any] = {
    "ring": lambda slots: RoundRobinWriter(),
    "lanes": lambda slots: RoundRobinWriter(),
    "streams": lambda slots: RoundRobinWriter(),
    "rings of streams": lambda slots: LaneWriter(slots),
    "whole episodes": lambda slots: EpisodeWriter(),
}


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("seldom_all", [True, False])
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    slots=st.integers(1, 40),
    with_init=st.booleans(),
    steps=st.lists(
        st.tuples(rows_written | rows_removed | other_steps, st.booleans()), min_size=1, max_size=20
    ),
    law=laws | st.integers(1, 3).map(CountLaw.strict),
)
def test_tree_that_follows_changes_equals_a_look_at_all_rows(
    layout: str,
    seldom_all: bool,
    slots: int,
    with_init: bool,
    steps: Any,
    law: CountLaw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where starts are is for `tests/episodes/test_interleaved.py`, law by law."""
    if seldom_all:
        monkeypatch.setattr("replaykit.samplers.priority_draws._MANY", 0)
    slots = max(slots, 12) if layout == "whole episodes" else slots
    lanes = 3 if layout in ("lanes", "rings of streams") else 1
    streams = layout not in ("ring", "lanes")
    options: Any = {"lane_key": "env"} if streams else {"ndim": 2 if layout == "lanes" else 1}
    rb = ReplayBuffer(
        storage=LazyTensorStorage(slots * lanes, **options),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0, dtype=torch.double),
        writer=WRITERS[layout](slots),
    )
    sampler: Any = rb.sampler
    tree = EligiblePriorities()
    for number, ((what, given_), look) in enumerate(steps):
        drawn = np.random.default_rng(given_ if isinstance(given_, int) else 0)
        if what == "write":
            given_ = given_[:slots]
            env, done, init = (torch.tensor(column) for column in zip(*given_, strict=True))
            if layout == "whole episodes":
                env, done = (
                    torch.full_like(env, number),
                    done & (torch.arange(len(done)) == len(done) - 1),
                )
            rows = TensorDict({"env": env, "next": {"done": done}}, [len(env)])
            if layout == "rings of streams":
                rows["env"] %= lanes
            if with_init:
                rows["is_init"] = init[:, None]
            if layout == "lanes":  # each lane has other rows
                rows = torch.stack([rows.roll(lane, 0) for lane in range(lanes)])
            rb.extend(rows)
        elif not len(rb):
            continue
        elif what == "update":
            element = torch.from_numpy(drawn.integers(len(rb), size=3))
            at = unravel_index(element, rb.storage.lanes) if layout == "lanes" else element
            rb.update_priority(at, torch.tensor(drawn.integers(0, 9, 3) / 4.0))
        elif what == "edit":
            column = rb["next", "done"].clone()
            column[tuple(int(drawn.integers(size)) for size in column.shape)] ^= True
            rb["next", "done"] = column
        elif what == "remove" and layout in ("rings of streams", "whole episodes"):
            lane = int(drawn.choice(rb["env"].numpy()))
            rb.remove_oldest(int(drawn.integers(1, 4)), lane=lane)
        elif what == "alpha":
            sampler.alpha = given_
        elif what == "law":
            law = given_
        elif what == "empty":
            rb.empty()
        if not len(rb) or not look:
            continue
        index: EpisodeIndex = rb.storage.episodes
        found = tree.follow(sampler._table.follow(rb.storage), index, law).leaves
        raw = sampler.state_dict()["_priorities"].numpy()
        start = index.eligible_starts(law, *index.time_and_lane(np.arange(len(rb))))
        expected = np.where(start, raw**sampler.alpha, 0.0)
        np.testing.assert_allclose(found[: len(rb)], expected, rtol=1e-12)
        assert not found[len(rb) :].any()


# -- prioritized draws where transforms need rows around ------------------------------------------


def steps(done: list[int], **columns: Any) -> TensorDict:
    done_ = torch.tensor(done, dtype=torch.bool)
    columns = {name: torch.as_tensor(value) for name, value in columns.items()}
    return TensorDict({"next": {"done": done_}, **columns}, batch_size=[len(done)])


def needing(capacity: int, *transforms: Needing, eps: float = 0.0, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity, ndim=options.pop("ndim", 1)),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=eps, **options),
        transform=Compose(*transforms) if transforms else None,
        generator=torch.Generator().manual_seed(0),
    )


def law_of(values: list[float]) -> torch.Tensor:
    found = torch.tensor(values, dtype=torch.float64)
    return found / found.sum()


def test_rows_without_history_are_not_drawn() -> None:
    rb = needing(10, Needing(past=2))
    joined = [False, True, True, True, True, True, True, True, True, True]
    rb.extend(steps([0, 0, 0, 0, 1, 0, 0, 0, 0, 0], is_init=joined))
    rb.update_priority(torch.arange(10), torch.arange(1.0, 11.0))
    data = rb.sample(20_000)
    # The first episode was joined in the middle; the second one begins with its reset.
    assert follows(data["index"], law_of([0, 0, 3, 4, 5, 6, 7, 8, 9, 10]))
    # Relative to the least likely of all stored rows, also of those not drawn now.
    assert torch.equal(data["priority_weight"], 1 / (data["index"] + 1).float())
    at, values = torch.tensor([3, 7, 0]), torch.tensor([40.0, 1.0, 9.0])
    rb.update_priority(at, values)
    for tensor in (at, values):
        tensor.fill_(5)  # a learner may use its memory again
    assert follows(rb.sample(20_000)["index"], law_of([0, 0, 3, 40, 5, 6, 7, 1, 9, 10]))


def test_rows_that_arrive_one_at_a_time() -> None:
    rb = needing(10, Needing(past=2))
    for step in range(2):
        rb.extend(steps([0], is_init=[False]))
        assert not rb.can_sample(1)
        refuses(NotEnoughData, f"none of the {step + 1} stored rows", rb.sample, 10)
    rb.extend(steps([0], is_init=[False]))
    data = rb.sample(10)
    assert data["index"].tolist() == [2] * 10
    assert data["priority_weight"].tolist() == [1.0] * 10


def test_zero_weight_of_all_eligible_rows_raises_error() -> None:
    rb = needing(4, Needing(past=1))
    rb.extend(steps([0] * 4, is_init=[False] * 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 0, 0, 0]))
    assert not rb.can_sample(1)
    with pytest.raises(RuntimeError, match="zero") as raised:
        rb.sample(1)
    assert not isinstance(raised.value, NotEnoughData)
    rb.update_priority(torch.tensor([2]), torch.tensor([1.0]))
    assert rb.sample(2)["index"].tolist() == [2, 2]


def test_a_storage_that_knows_no_episodes() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(4),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0),
        transform=Needing(past=1),
    )
    rb.extend(steps([0, 0]))
    refuses(RuntimeError, "ListStorage", rb.sample, 1)
