"""The tree of eligible starts against a model that scans, and draws that need rows around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import Compose, LazyTensorStorage, ListStorage, PrioritizedSampler, ReplayBuffer
from replaykit.episodes import CountLaw, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.samplers.priority_draws import EligiblePriorities
from tests.samplers.building import follows
from tests.samplers.needing import Needing
from tests.support.refusals import refuses

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


@pytest.fixture(params=["never all rows", "all rows where it is less work"])
def share(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "never all rows":
        monkeypatch.setattr("replaykit.samplers.priority_draws._MANY", 0)


@pytest.mark.usefixtures("share")
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
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
        max_size=20,
    ),
    law=laws,
)
def test_tree_matches_scan(
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
            if not len(rb):  # of rows never stored an index says nothing if it was emptied before
                given_ = given_[:slots]
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
        found = tree.follow(sampler._table.follow(storage), index, law)
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


def test_changing_transforms_and_back_restores_the_law() -> None:
    rb = needing(8)
    rb.extend(steps([0, 0, 0, 1, 0, 0, 0, 0], is_init=[False] * 8))
    p = torch.tensor([1.0, 4, 2, 3, 5, 1, 2, 6])
    rb.update_priority(torch.arange(8), p)
    before = rb.sampler.state_dict()["_priorities"]
    generator = rb._generator
    assert generator is not None
    state = generator.get_state()
    first = rb.sample(1000)["index"]
    laws = {
        Needs(past=1): [0, 4, 2, 3, 0, 1, 2, 6],
        Needs(past=3): [0, 0, 0, 3, 0, 0, 0, 6],
        Needs(closed=True): [1, 4, 2, 3, 0, 0, 0, 0],
        Needs(open_future=2): [1, 4, 2, 3, 5, 1, 0, 0],
    }
    for needs, expected in laws.items():
        rb._needs = needs
        assert follows(rb.sample(20_000)["index"], law_of([float(x) for x in expected]))
    rb._needs = Needs()
    assert torch.equal(rb.sampler.state_dict()["_priorities"], before)
    generator.set_state(state)
    assert torch.equal(rb.sample(1000)["index"], first)


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


def test_saved_and_loaded(tmp_path: Any) -> None:
    rb = needing(6, Needing(past=1))
    rb.extend(steps([0] * 8, is_init=[False] * 8))
    rb.update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    rb.sample(3)
    rb.dumps(tmp_path / "saved")
    other = needing(6, Needing(past=1))
    other.extend(steps([0, 1], is_init=[True] * 2))
    other.sample(1)
    other.loads(tmp_path / "saved")
    assert follows(other.sample(5000)["index"], law_of([1, 2, 0, 4, 5, 6]))


def test_a_storage_that_knows_no_episodes() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(4),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0),
        transform=Needing(past=1),
    )
    rb.extend(steps([0, 0]))
    refuses(RuntimeError, "ListStorage", rb.sample, 1)
