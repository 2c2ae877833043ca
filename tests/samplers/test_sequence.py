"""Windows around drawn rows: what the contract says, row by row, and against a model that scans."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    NStep,
    PreviousStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    Sequence,
    Shift,
    SliceSampler,
    StackFrames,
    TensorStorage,
    Transition,
)
from tests.samplers.building import follows
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses


def rows(done: list[int], start: int = 0, **columns: Any) -> TensorDict:
    count = len(done)
    return TensorDict(
        {
            "step": torch.arange(start, start + count),
            "next": {"done": torch.tensor(done, dtype=torch.bool)},
            **columns,
        },
        batch_size=[count],
    )


def buffer(unit: Sequence, done: list[int], capacity: int = 0, **options: Any) -> ReplayBuffer:
    made = ReplayBuffer(
        storage=LazyTensorStorage(capacity or len(done)), sample_unit=unit, **options
    )
    made.extend(rows(done))
    return made


def expanded(rb: ReplayBuffer, anchors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    index, info = rb._sample_unit.expand(torch.tensor(anchors), {}, rb.storage)
    return index.tolist(), {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in info.items()
    }


TWO = [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
"""Episodes in rows 0..3 and 4..9."""


def test_batch_has_sequence_keys_and_masks() -> None:
    rb = buffer(Sequence(2, bootstrap=1), TWO, batch_size=4)
    data, info = rb.sample(return_info=True)
    assert data.batch_size == (12,)
    assert torch.equal(data["step"], data["index"])
    assert torch.equal(data["sequence_id"], torch.arange(4).repeat_interleave(3))
    assert torch.equal(data["step_in_sequence"], torch.arange(3).repeat(4))
    assert torch.equal(data["learning_mask"], torch.tensor([True, True, False]).repeat(4))
    assert "index_generation" not in info
    assert "anchor_generation" not in info


# -- a model that scans ---------------------------------------------------------------------------


class Lane:
    """The rows of one lane in write order, and where an episode of it ends."""

    def __init__(self) -> None:
        self.done: list[bool] = []
        self.ids: list[int] = []
        self.slots = 1

    def first(self) -> int:
        return max(0, len(self.done) - self.slots)

    def ends(self, row: int, key: str) -> bool:
        if row == len(self.done) - 1:
            return True
        if key == "none":
            return False
        return self.done[row] or self.ids[row] != self.ids[row + 1]

    def around(self, row: int, key: str) -> tuple[int, int]:
        low = high = row
        while low > self.first() and not self.ends(low - 1, key):
            low -= 1
        while not self.ends(high, key):
            high += 1
        return low, high

    def window(self, anchor: int, unit: Sequence, key: str) -> tuple[list[int], list[bool]]:
        across = unit.episode_boundary == "include_reset" or key == "none"
        low, high = self.around(anchor, "none" if across else key)
        offsets = [unit.dilation * (s - unit.burn_in) for s in range(unit.width)]
        if unit.episode_boundary == "stop":
            while anchor > low and anchor + offsets[-1] > high:
                anchor -= 1
        wanted = [anchor + offset for offset in offsets]
        return (
            [min(max(row, low), high) for row in wanted],
            [low <= row <= high for row in wanted],
        )


@settings(max_examples=80, deadline=None)
@given(
    writes=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=9),
        min_size=1,
        max_size=6,
    ),
    slots=st.integers(1, 14),
    lanes=st.integers(1, 3),
    boundary=st.sampled_from(["pad", "stop", "include_reset"]),
    key=st.sampled_from(["default", "other", "none"]),
    sizes=st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)),
)
def test_sequences_match_a_scan(
    writes: Any, slots: int, lanes: int, boundary: str, key: str, sizes: Any
) -> None:
    length, burn_in, bootstrap, dilation = sizes
    done_key = {"default": ("next", "done"), "other": ("over",), "none": None}[key]
    unit = Sequence(length, boundary, done_key, burn_in, bootstrap, dilation)
    ndim = 1 if lanes == 1 else 2
    rb = ReplayBuffer(storage=LazyTensorStorage(slots * lanes, ndim=ndim), sample_unit=unit)
    streams = [Lane() for _ in range(lanes)]
    for number, written in enumerate(writes):
        parts = []
        for lane, stream in enumerate(streams):
            # Lanes have the same pattern, each a little later.
            turned = written[lane % len(written) :] + written[: lane % len(written)]
            stream.done += [flag for flag, _ in turned]
            stream.ids += [one for _, one in turned]
            stream.slots = slots
            flags = torch.tensor([flag for flag, _ in turned])
            parts.append(
                TensorDict(
                    {
                        "step": torch.arange(len(stream.done) - len(turned), len(stream.done)),
                        "episode": torch.tensor([one for _, one in turned]),
                        "over": flags if key == "other" else ~flags,
                        "next": {"truncated": ~flags if key == "other" else flags},
                    },
                    batch_size=[len(turned)],
                )
            )
        rb.extend(parts[0] if lanes == 1 else torch.stack(parts))
        if number % 2 and number < len(writes) - 1:
            continue
        cells = [(row, lane) for lane in range(lanes) for row in _stored(streams[lane])]
        at = [[row % slots, lane] if lanes > 1 else row % slots for row, lane in cells]
        index, info = unit.expand(torch.tensor(at), {}, rb.storage)
        assert info["anchor_index"].tolist() == [one for one in at for _ in range(unit.width)]
        learns = [burn_in <= place < burn_in + length for place in range(unit.width)]
        assert info["learning_mask"].tolist() == learns * len(cells)
        step = rb.storage.get(tuple(index.T) if lanes > 1 else index)["step"]
        step = step.reshape(len(cells), unit.width).tolist()
        valid = info["validity_mask"].reshape(len(cells), unit.width).tolist()
        for place, (row, lane) in enumerate(cells):
            assert (step[place], valid[place]) == streams[lane].window(row, unit, key)
        if lanes > 1:
            assert torch.equal(
                index[:, 1], torch.tensor([lane for _, lane in cells]).repeat_interleave(unit.width)
            )


def _stored(lane: Lane) -> range:
    return range(lane.first(), len(lane.done))


# -- with other parts -----------------------------------------------------------------------------


def test_sampler_info_is_repeated_for_each_row() -> None:
    class Telling(RandomSampler):
        def sample(self, storage: Any, batch_size: int) -> Any:
            index = torch.tensor([3, 8])
            return index, {"score": torch.tensor([[1.0], [2.0]]), "temperature": torch.tensor(0.5)}

    rb = buffer(Sequence(2), TWO, sampler=Telling())
    _, info = rb.sample(2, return_info=True)
    assert info["score"].tolist() == [[1.0], [1.0], [2.0], [2.0]]
    assert info["temperature"] == 0.5


def test_sequences_carry_generations() -> None:
    from replaykit import RoundRobinWriter

    rb = ReplayBuffer(
        storage=LazyTensorStorage(4),
        sample_unit=Sequence(2),
        writer=RoundRobinWriter(track_generations=True),
    )
    rb.extend(rows([0, 0, 0, 0]))
    rb.extend(rows([0, 0], start=4))
    data = rb.sample(64)
    now = rb.writer.generations_of(torch.arange(4))
    assert now.tolist() == [1, 1, 0, 0]
    assert torch.equal(data["index_generation"], now[data["index"]])
    assert torch.equal(data["anchor_generation"], now[data["anchor_index"]])


def test_with_transforms_that_read_around() -> None:
    rb = buffer(Sequence(3, burn_in=1), TWO, transform=PreviousStep(["step"], init=-1))
    data = rb.sample(50)
    step = data["step"]
    first = (step == 0) | (step == 4)
    valid = data["validity_mask"]
    before = torch.where(first, -1, step - 1)
    assert torch.equal(data["previous_step"].reshape(-1)[valid], before[valid])


@pytest.mark.parametrize(
    ("transform", "ended", "boundary", "anchors"),
    [
        (StackFrames(["step"], 3), [15, 19], "pad", range(10, 20)),
        (StackFrames(["step"], 3), [15, 19], "stop", range(12, 20)),  # it may move back by two
        (Shift("step", 1), [15, 19], "pad", [*range(6, 13), 16]),
        (Shift("step", 1), [15, 19], "stop", [*range(6, 13), 16]),
        (NStep(2, 1.0, on_open="exclude"), [15], "pad", range(6, 17)),
    ],
)
def test_all_rows_of_a_window_have_the_neighbours_that_transforms_need(
    transform: Any, ended: list[int], boundary: str, anchors: Any
) -> None:
    """Rows 6 to 19 are stored, in episodes that end at some of them."""
    unit = Sequence(3, boundary, burn_in=2)
    rb = ReplayBuffer(storage=LazyTensorStorage(14), sample_unit=unit, transform=transform)
    data = rows([int(step in ended) for step in range(20)])
    data["next", "reward"] = data["step"].float()
    rb.extend(data)
    drawn = set()
    for _ in range(200):
        batch = rb.sample(2)
        slot = batch["anchor_index"]
        drawn |= set(torch.where(slot < 6, slot + 14, slot).tolist())
        for row in batch[batch["validity_mask"]]:
            step = row["step"].reshape(-1)[-1]
            if isinstance(transform, StackFrames):
                begin = 16 if step > 15 else 0
                assert row["step"].tolist() == [max(int(step) - k, begin) for k in (2, 1, 0)]
            elif isinstance(transform, Shift):
                assert row["step+1"] == step + 1
            else:
                assert row["steps_used"] == (1 if step == 15 else 2)
    assert drawn == {*anchors}


def test_an_index_of_another_key_follows_writes() -> None:
    unit = Sequence(3, done_key="over")
    rb = ReplayBuffer(storage=LazyTensorStorage(8), sample_unit=unit)
    rb.extend(rows([0] * 4, over=torch.tensor([0, 1, 0, 0])))
    assert expanded(rb, [0, 2])[0] == [0, 1, 1, 2, 3, 3]
    rb.extend(rows([0] * 2, start=4, over=torch.tensor([1, 0])))
    assert expanded(rb, [2, 4])[0] == [2, 3, 4, 4, 4, 4]
    rb.set_at_("over", torch.tensor([1]), torch.tensor([3]))
    assert expanded(rb, [2])[0] == [2, 3, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
def test_copied_buffer_keeps_unit_and_rows(copied: Any) -> None:
    rb = buffer(Sequence(3, done_key=None), TWO)
    rb.sample(2)
    other = copied(rb)
    assert expanded(other, [2])[0] == [2, 3, 4]


def test_after_loading_no_window_crosses_the_restart(tmp_path: Any) -> None:
    rb = buffer(Sequence(3), [0, 0, 0], capacity=6)
    rb.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyTensorStorage(6), sample_unit=Sequence(3))
    other.loads(tmp_path / "saved")
    other.extend(rows([0, 0], start=3))
    assert expanded(other, [1, 3])[0] == [1, 2, 2, 3, 4, 4]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"length": 0}, ValueError),
        ({"length": 2, "burn_in": -1}, ValueError),
        ({"length": 2, "bootstrap": -1}, ValueError),
        ({"length": 2, "dilation": 0}, ValueError),
        ({"length": 2, "episode_boundary": "wrap"}, ValueError),
        ({"length": 2.0}, TypeError),
        ({"length": True}, TypeError),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    refuses(error, list(options)[-1], Sequence, **options)


def test_other_content_is_refused() -> None:
    refuses(TypeError, "ListStorage", ReplayBuffer, storage=ListStorage(4), sample_unit=Sequence(2))
    with pytest.raises(TypeError, match="tensor"):
        ReplayBuffer(storage=TensorStorage(torch.zeros(4)), sample_unit=Sequence(2))
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sample_unit=Sequence(2))
    rb.extend(torch.zeros(3))
    refuses(TypeError, "TensorDicts", rb.sample, 1)


def test_setters_keep_the_old_part() -> None:
    def windows() -> SliceSampler:
        return SliceSampler(slice_len=2)

    refuses(ValueError, "SliceSampler", buffer, Sequence(2), TWO, sampler=windows())
    rb = buffer(Sequence(2), TWO)
    before: tuple[Sampler, Any] = rb.sampler, rb.storage
    refuses(ValueError, "SliceSampler", rb.set_sampler, windows())
    refuses(TypeError, "ListStorage", rb.set_storage, ListStorage(3))
    assert (rb.sampler, rb.storage) == before
    assert rb.sample(2).batch_size == (4,)
    other = ReplayBuffer(sampler=windows(), sample_unit=Transition())
    assert other.sampler.draws_windows


def test_a_missing_done_key() -> None:
    rb = buffer(Sequence(2, done_key=("next", "over")), TWO)
    refuses(KeyError, "over", rb.sample, 2)


# -- priorities -----------------------------------------------------------------------------------


def prioritized(unit: Sequence, **options: Any) -> ReplayBuffer:
    return buffer(
        unit,
        TWO,
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0),
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def test_anchors_are_drawn_by_priority() -> None:
    rb = prioritized(Sequence(2, burn_in=1))
    rb.update_priority(torch.arange(10), torch.arange(10.0))
    data = rb.sample(20_000)
    anchors = data["anchor_index"].reshape(-1, 3)[:, 0]
    law = torch.arange(10, dtype=torch.float64)
    assert follows(anchors, law / law.sum())
    assert torch.equal(data["priority_weight"], 1 / data["anchor_index"].float())


@pytest.mark.parametrize("shape", [(120,), (120, 1), (120, 2, 3), (30, 4), (30, 4, 1)])
@pytest.mark.parametrize("part", [120, 80])
def test_an_anchor_gets_the_largest_of_its_valid_rows(part: int, shape: tuple[int, ...]) -> None:
    """Of all rows of a batch, or of some of them in any order."""
    rb = prioritized(Sequence(3, burn_in=1))
    value = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    data = rb.sample(30)
    rows = data.reshape(shape[:2]) if shape[0] == 30 else data
    rows["td_error"] = value
    mask = rows["validity_mask"]
    rows["td_error"][~mask] = float("nan")
    if shape[0] == 120:
        rows = rows[torch.randperm(120, generator=torch.Generator().manual_seed(2))[:part]]
    rb.update_tensordict_priority(rows)
    now, rows = rb.sampler.state_dict()["_priorities"], rows.reshape(-1)
    for row in range(10):
        chosen = (rows["anchor_index"] == row) & rows["validity_mask"]
        assert now[row] == (rows["td_error"][chosen].max() if chosen.any() else 1.0)
    assert len(data["anchor_index"].unique()) < 30  # several windows of one anchor were among them


def test_an_anchor_that_was_overwritten_keeps_the_new_priority() -> None:
    rb = prioritized(Sequence(3))
    data = rb.sample(40)
    rb.extend(rows([0, 0, 0], start=10))  # slots 0..2
    data["td_error"] = torch.full((120,), 7.0)
    rb.update_tensordict_priority(data)
    now = rb.sampler.state_dict()["_priorities"]
    drawn = data["anchor_index"].unique()
    assert (now[:3] == 1.0).all()
    assert (now[drawn[drawn > 2]] == 7.0).all()
    assert rb.sampler.dropped_updates == (drawn < 3).sum()


def test_lanes_have_separate_priorities() -> None:
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0),
        sample_unit=Sequence(2),
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(torch.stack([rows([0, 0, 1, 0, 0, 0]), rows([0] * 6, start=100)]))
    data = rb.sample(64)
    assert data["anchor_index"].shape == (128, 2)
    data["td_error"] = data["step"].float()
    rb.update_tensordict_priority(data)
    now = rb.sampler.state_dict()["_priorities"].reshape(6, 2)
    assert now[:, 0].tolist() == [1, 2, 2, 4, 5, 5]
    assert now[:, 1].tolist() == [101, 102, 103, 104, 105, 105]


def test_priority_update_needs_errors_and_validity_mask() -> None:
    rb = prioritized(Sequence(3))
    data = rb.sample(2)
    refuses(KeyError, "td_error", rb.update_tensordict_priority, data)
    data["td_error"] = torch.zeros(6)
    refuses(KeyError, "validity_mask", rb.update_tensordict_priority, data.exclude("validity_mask"))
    data["td_error"][0] = -1
    refuses(ValueError, "not negative", rb.update_tensordict_priority, data)
    assert (rb.sampler.state_dict()["_priorities"] == 1).all()


@pytest.mark.parametrize("measure", ["window", "trajectory", "transition", "lane"])
def test_anchors_by_the_measure_of_slices_of_one_row(measure: str) -> None:
    """Chi-square: an anchor is as likely as a window of one row is under the measure."""
    lengths = [1, 2, 3, 6]
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])
    rb = ReplayBuffer(
        storage=LazyTensorStorage(12),
        sampler=SliceSampler(slice_len=1, measure=measure),
        sample_unit=Sequence(2, burn_in=1),
        batch_size=200,
        generator=torch.Generator().manual_seed(3),
    )
    rb.extend(TensorDict({"row": torch.arange(12), "next": {"done": done}}, [12]))
    counts, draws = torch.zeros(12, dtype=torch.float64), 60
    for _ in range(draws):
        batch = rb.sample()
        assert batch.shape == (600,)
        anchors = batch["anchor_index"].view(200, 3)
        assert (batch["row"].view(200, 3)[:, 1] == anchors[:, 1]).all()
        assert not batch["next", "done"].view(200, 3)[~done[batch["row"]].view(200, 3)].any()
        counts += torch.bincount(anchors[:, 0], minlength=12)
    share = [1 / (4 * n) if measure == "trajectory" else 1 / 12 for n in lengths for _ in range(n)]
    assert chi_square_p(counts.tolist(), [p * 200 * draws for p in share]) > 1e-3


def test_recent_anchors_and_draws_in_order() -> None:
    def sampled(**options: Any) -> list[int]:
        rb = ReplayBuffer(
            storage=LazyTensorStorage(40),
            sampler=SliceSampler(slice_len=1, **options),
            sample_unit=Sequence(3),
            batch_size=8,
        )
        done = torch.arange(40) % 10 == 9
        rb.extend(TensorDict({"row": torch.arange(40), "next": {"done": done}}, [40]))
        return rb.sample()["anchor_index"][::3].tolist()

    assert min(sampled(recent=(0.5, 4))[:4]) >= 36
    assert sampled(draw="sequential") == list(range(8))
    assert len(set(sampled(draw="without_replacement"))) == 8


@pytest.mark.parametrize(
    "options", [{"slice_len": 2}, {"num_slices": 4}, {"slice_len": 1, "flat": False}]
)
def test_other_slices_are_windows_already(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="slice_len=1"):
        ReplayBuffer(
            storage=LazyTensorStorage(4),
            sampler=SliceSampler(**options),
            sample_unit=Sequence(2),
            batch_size=4,
        )
