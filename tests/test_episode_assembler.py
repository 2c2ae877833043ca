"""Episodes that are assembled from interleaved events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import EpisodeAssembler, LazyTensorStorage, ReplayBuffer, SliceSampler
from replaykit.errors import BufferFull, SchemaError
from tests.support.refusals import refuses


def buffer(**storage: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(1000, **storage))


def begin(*identities: Any) -> dict[Any, Any]:
    return {one: {"observation": torch.tensor([0.0])} for one in identities}


def step(number: int, reward: float = 0.0, **flags: bool) -> dict[str, Any]:
    return {"observation": torch.tensor([float(number)]), "reward": reward, **flags}


def run(assembler: EpisodeAssembler, identity: Any, length: int, end: str = "terminated") -> None:
    assembler.observe(begin(identity))
    for number in range(1, length + 1):
        assembler.respond({identity: number - 1})
        last = {end: True} if number == length else {}
        assembler.observe({identity: step(number, 10.0 * number, **last)})


@pytest.mark.acceptance("S33", "C15")
def test_rewards_belong_to_the_actions_before_them() -> None:
    rb = buffer()
    run(EpisodeAssembler(rb), "a", 2, "truncated")
    rows = rb[:]
    assert rows["observation"].flatten().tolist() == [0, 1]
    assert rows["next", "observation"].flatten().tolist() == [1, 2]
    assert rows["action"].flatten().tolist() == [0, 1]
    assert rows["next", "reward"].flatten().tolist() == [10, 20]
    assert rows["next", "truncated"].flatten().tolist() == [False, True]
    assert not rows["next", "terminated"].any()


@pytest.mark.parametrize("visible", ["complete", "partial"])
@pytest.mark.parametrize("form", ["events", "rows"])
def test_interleaved_identities_become_their_own_episodes(visible: str, form: str) -> None:
    """Against lists: random environments, which begin, act and end at random."""
    random = np.random.default_rng(0)
    rb = buffer(lane_key="env" if visible == "partial" else None)
    assembler = EpisodeAssembler(rb, visible=visible)
    model: dict[int, list[float]] = {}
    finished: list[list[float]] = []
    value = 0.0
    for _ in range(120):
        events: dict[int, Any] = {}
        whole: dict[int, Any] = {}
        for one in random.permutation([-5, -1, 0, 3, 8])[: random.integers(1, 6)].tolist():
            value += 1
            if one not in model:
                model[one] = [value]
                events[one] = {"observation": np.array([value])}
                continue
            if form == "events":
                assembler.respond({one: value})
            done = bool(random.random() < 0.2)
            before = model[one][-1]
            model[one].append(value)
            events[one] = {"observation": np.array([value]), "reward": value, "truncated": done}
            whole[one] = TensorDict(
                {
                    "observation": torch.tensor([before]),
                    "next": {"observation": torch.tensor([value]), "done": torch.tensor([done])},
                },
                [],
            )
            if done:
                finished.append(model.pop(one))
        if form == "events":
            assembler.observe(events)
            for event in events.values():
                event["observation"][:] = -1.0  # environments may reuse their memory
        else:
            assembler.add(whole)
    assert len(assembler) == (
        len(model) if form == "events" else len([m for m in model.values() if m[1:]])
    )
    found = [
        [*rows["observation"].flatten().tolist(), rows["next", "observation"][-1].item()]
        for rows in (episode.rows() for episode in rb.episodes if episode.complete)
    ]
    assert sorted(found) == sorted(finished)
    if visible == "complete":
        assert found == finished
    else:
        assert len(rb) == sum(len(one) - 1 for one in (*finished, *model.values()))


@pytest.mark.acceptance("S33")
@pytest.mark.parametrize("given", [3, None])
def test_short_episodes_are_dropped_and_counted(given: int | None) -> None:
    sampler = SliceSampler(slice_len=3)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    assembler = EpisodeAssembler(rb, min_length=given)
    for length in (2, 3, 1, 5):
        run(assembler, 7, length)
    assert rb.episodes.lengths.tolist() == [3, 5]
    assert (assembler.dropped, len(assembler)) == (2, 0)
    assembler.observe(begin(1))
    assert assembler.drop(1)
    assert not assembler.drop(1)
    assert assembler.dropped == 3


def test_an_end_of_an_unknown_identity_is_ignored_with_one_warning() -> None:
    assembler = EpisodeAssembler(buffer())
    with pytest.warns(UserWarning, match="never began"):
        assembler.observe({3: step(1, terminated=True)})
    assembler.observe({4: step(1, truncated=True), **begin(5)})
    assert (assembler.unknown, len(assembler)) == (2, 1)


@pytest.mark.acceptance("S33", "F58")
@pytest.mark.parametrize(
    ("events", "words"),
    [
        ({"a": begin("a")["a"]}, "'a': expected a first event .* a second one"),
        ({"c": step(1)}, "'c': expected a first event"),
        ({"a": step(1)}, r"'a': expected respond\(\)"),
        ({"b": {"observation": 0, "reward": 1.0}}, "differs"),
        ({"b": step(1, done=True)}, "'b': expected an event with observation and reward"),
        ({"b": {"reward": 1.0}}, "'b': expected an event with observation and reward"),
        ({"b": step(1), "d": begin(0)[0], "e": begin(0)[0]}, "at most 3 open"),
    ],
)
def test_an_invalid_event_changes_nothing(events: dict[Any, Any], words: str) -> None:
    rb = buffer()
    assembler = EpisodeAssembler(rb, max_open=3)
    assembler.observe(begin("a", "b"))
    assembler.respond({"b": 4})
    refuses((ValueError, TypeError, BufferFull), words, assembler.observe, {**events, **begin("z")})
    for actions in ({"b": 1}, {"z": 1}, {"a": 0, "b": 1}):
        refuses(ValueError, "expected an observation", assembler.respond, actions)
    assert len(assembler) == 2
    assembler.observe({"b": step(1, 5.0, terminated=True)})
    assert (rb[:]["action"].item(), rb[:]["next", "reward"].item()) == (4, 5)
    refuses(ValueError, "observe", assembler.add, {"a": rb[0]})
    with pytest.raises(KeyError):
        assembler.add({"z": TensorDict({"x": torch.zeros(1)}, [])})


def test_a_refused_write_leaves_the_episode_open() -> None:
    rb = buffer()
    assembler = EpisodeAssembler(rb)
    run(assembler, "a", 1)
    assembler.observe({"b": {"observation": torch.zeros(9)}})
    assembler.respond({"b": 0})
    last = {"b": {"observation": torch.zeros(9), "reward": 1.0, "terminated": True}}
    for _ in range(2):
        refuses(SchemaError, "observation", assembler.observe, last)
    assert (len(rb), len(assembler)) == (1, 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sink": 3}, TypeError),
        ({"visible": "some"}, ValueError),
        ({"min_length": -1}, ValueError),
        ({"max_open": 0}, ValueError),
        ({"visible": "partial"}, ValueError),
        ({"sink": buffer(lane_key="env"), "visible": "partial", "min_length": 2}, ValueError),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        EpisodeAssembler(**{"sink": buffer(), **options})


def test_partial_rows_need_numbers_as_identities() -> None:
    assembler = EpisodeAssembler(buffer(lane_key="env"), visible="partial")
    refuses(ValueError, "an int as identity", run, assembler, "a", 1)
