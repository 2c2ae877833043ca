"""Stacks of frames against a scan for the beginning of the episode, and against live ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    SliceSampler,
    StackFrames,
)
from replaykit.episodes import Needs
from replaykit.samplers import Sampler
from tests.support.refusals import refuses
from tests.transforms.streams import Streams, histories, play


def frames_of(streams: Any, lane: int, number: int, k: int) -> list[int]:
    """Numbers of the frames of a row, -1 before the beginning."""
    first = streams.first(lane, number)
    return [place if place >= first else -1 for place in range(number - k + 1, number + 1)]


def check(streams: Any, found: dict[Any, Any], k: int, pad: str, n: int = 1) -> None:
    for (lane, number), row in found.items():
        last = min(streams.last(lane, number), number + n - 1)
        first = streams.first(lane, number)

        def frame(place: int, lane: int = lane, first: int = first) -> list[int]:
            if place >= 0:
                return [lane, place]
            return [0, 0] if pad == "zero" else [lane, first]

        own = [frame(place) for place in frames_of(streams, lane, number, k)]
        assert row["observation"].tolist() == own
        before = [frame(place) for place in frames_of(streams, lane, last, k)]
        following = [*before[1:], [lane * 2 + 1, last * 2 + 1]]
        assert row["next", "observation"].tolist() == following


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    k=st.integers(1, 5),
    pad=st.sampled_from(["repeat", "zero"]),
    n=st.sampled_from([1, 1, 3]),
)
def test_stacks_match_a_scan(data: Any, k: int, pad: str, n: int) -> None:
    def place(batch: Any) -> Any:
        return batch.set("place", batch["observation"].clone())

    stack = StackFrames(["observation"], k, pad=pad, new_dim=True)
    chain = Compose(place, *[NStep(n, 0.9)] * (n > 1), stack)
    streams = play(chain, data.draw(histories()))
    eligible = {
        (lane, number) for lane, number in streams.stored()
        if streams.has_past(lane, number, k - 1)
    }  # fmt: skip
    if not eligible:
        refuses(RuntimeError, f"{k - 1} rows of history", streams.buffer.sample)
        return
    found = streams.drawn()
    assert set(found) == eligible
    check(streams, found, k, pad, n)


def recorded(*shape: int) -> TensorDict:
    """Rows of one episode, the frame of a row its number."""
    x = torch.arange(21).view(21, *[1] * len(shape)).expand(21, *shape)
    ends = torch.zeros(20, 1, dtype=torch.bool)
    return TensorDict({"x": x[:-1], "next": {"x": x[1:], "done": ends}}, [20])


def test_frames_are_stacked_in_slices() -> None:
    """Slices begin where their first row has its history, or its reset."""
    own = Streams(None, slots=19)
    own.extend([[0], [0], [0], [0], [0], [0], [1]] * 5)
    buffer = ReplayBuffer(
        storage=own.buffer.storage, sampler=SliceSampler(slice_len=2), batch_size=200,
        transform=StackFrames(["observation"], 3, new_dim=True),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    batch = buffer.sample()
    drawn = set()
    for row in batch:
        number = row["observation"][-1, 1].item()
        drawn.add(number)
        check(own, {(0, number): row}, 3, "repeat")
    # Stored are rows 16 to 34; 16 and 17 have lost frames that they had.
    assert drawn == set(range(18, 35))


class Padded(Sampler):
    """Draws slots, some of them padding."""

    def __init__(self, slots: list[int], real: list[bool]) -> None:
        super().__init__()
        self.slots, self.real = slots, real

    def sample(self, storage: Any, batch_size: int) -> Any:
        info: dict[Any, Any] = {"sequence_id": torch.zeros(len(self.slots), dtype=torch.int64)}
        info["collector", "mask"] = torch.tensor(self.real)
        return torch.tensor(self.slots), info


def test_padding_has_its_own_frame() -> None:
    own = Streams(None)
    own.extend([[0]] * 5)
    buffer = ReplayBuffer(
        storage=own.buffer.storage, transform=StackFrames(["action"], 3),
        sampler=Padded([2, 3, 4, 4], [True, True, True, False]),
    )  # fmt: skip
    assert buffer.sample(4)["action"].tolist() == [
        [0, 10, 20], [10, 20, 30], [20, 30, 40], [40, 40, 40],
    ]  # fmt: skip


def test_rows_by_index_are_cut_short() -> None:
    own = Streams(StackFrames(["action"], 3), slots=4)
    own.extend([[0]] * 6)
    assert own.buffer[:]["action"].tolist() == [
        [20, 30, 40], [30, 40, 50], [20, 20, 20], [20, 20, 30],
    ]  # fmt: skip
    assert set(own.drawn()) == {(0, 4), (0, 5)}


@pytest.mark.parametrize("threads", [1, 2])
def test_stacks_of_megabytes_equal_frames_read_one_by_one(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randint(0, 256, (64, 1, 96, 96), dtype=torch.uint8)
        ends = torch.arange(64)[:, None] % 9 == 8
        rows = {"x": x, "next": {"x": x.flip(0), "done": ends, "reward": torch.rand(64, 1)}}
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(64), transform=StackFrames(["x"], 4), batch_size=60
        )
        buffer.extend(TensorDict(rows, [64]))
        batch = buffer.sample()
        assert batch["x"].nbytes > 2**21
        age = torch.arange(3, -1, -1)
        at = batch["index"][:, None] - age
        at = torch.maximum(at, batch["index"][:, None] // 9 * 9)
        assert torch.equal(batch["x"], x[at].flatten(1, 2))
        following = torch.cat([x[at[:, 1:]], x.flip(0)[batch["index"]][:, None]], 1)
        assert torch.equal(batch["next", "x"], following.flatten(1, 2))
    finally:
        torch.set_num_threads(before)


def changed_before_stacks(change: Any) -> ReplayBuffer:
    """Return a buffer in which another transform puts something else in the place of `next`."""

    def put(data: Any) -> Any:
        return data.set(("next", "x"), change(data["next", "x"]))

    chain = Compose(put, StackFrames(["x"], 3))
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=chain)
    buffer.extend(recorded(4).float())
    return buffer


def test_stacks_accept_next_rows_changed_by_earlier_transforms() -> None:
    """Another dtype, other numbers, values that lie apart: as torch puts them together."""
    changes = [
        torch.Tensor.double,
        lambda x: -x,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[:, :1].expand_as(x),
        lambda x: x.clone().requires_grad_(),
    ]
    for change in changes:
        buffer = changed_before_stacks(change)
        plain = buffer.storage[:]["next", "x"]
        found = buffer[:]["next", "x"]
        assert found.dtype is change(plain).dtype
        assert found[:, -4:].equal(change(plain))
        assert found[5:, :8].equal(buffer[:]["x"][5:, 4:].to(found.dtype))
        assert found.requires_grad == change(plain).requires_grad


@pytest.mark.parametrize("other", [lambda x: x[:, 0], lambda x: x[:, :1], lambda x: x[..., None]])
def test_next_rows_of_another_shape_are_refused(other: Any) -> None:
    with pytest.raises(RuntimeError):
        changed_before_stacks(other)[:]


def test_single_frame_changes_nothing() -> None:
    own = Streams(StackFrames(["observation"], 1))
    own.extend([[0]] * 3)
    assert own.buffer[:]["observation"].equal(own.buffer.storage[:]["observation"])
    assert StackFrames(["x"], 1).needs == Needs()
    own = Streams(StackFrames(["observation"], 1, new_dim=True))
    own.extend([[0]] * 3)
    assert own.buffer[:]["observation"].shape == (3, 1, 2)
    assert own.buffer[:]["next", "observation"].shape == (3, 1, 2)


@pytest.mark.parametrize(("dim", "shape"), [(0, (2, 5, 6)), (1, (5, 2, 6)), (-1, (5, 6, 2))])
def test_new_dim_stacks_along_a_new_dimension(dim: int, shape: tuple[int, ...]) -> None:
    transform = StackFrames(["x"], 2, dim, new_dim=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform)
    buffer.extend(recorded(5, 6))
    found = buffer[5]
    assert found["x"].shape == found["next", "x"].shape == shape
    assert found["x"].movedim(dim, 0)[:, 0, 0].tolist() == [4, 5]
    assert found["next", "x"].movedim(dim, 0)[:, 0, 0].tolist() == [5, 6]
    assert transform.tiled(torch.zeros(5, 6)).shape == shape


def test_leaves_of_a_batch_do_not_share_memory() -> None:
    own = Streams(StackFrames(["observation"], 3, new_dim=True))
    own.extend([[0]] * 9)
    batch = own.buffer.sample()
    following = batch["next", "observation"].clone()
    batch["observation"].zero_()
    assert batch["next", "observation"].equal(following)
    assert own.buffer.storage[:]["observation"][:, 1].tolist() == list(range(9))


@pytest.mark.parametrize(
    ("key", "dim", "new_dim", "error", "words"),
    [
        ("observation", 1, False, ValueError, r"in \[-1, 1\) for frames \[2\], got 1"),
        ("observation", -2, False, ValueError, "got -2"),
        ("observation", 2, True, ValueError, r"in \[-2, 2\)"),
        ("action", 1, False, ValueError, "0 or -1 for single numbers"),
        ("pixels", 0, False, KeyError, "pixels"),
    ],
)
def test_invalid_chains_and_rows_are_refused_on_read(
    key: str, dim: int, new_dim: bool, error: Any, words: str
) -> None:
    own = Streams(StackFrames([key], 2, dim, new_dim=new_dim))
    own.extend([[0]] * 3)
    refuses(error, words, own.buffer.sample)


def test_stream_refuses_invalid_frames_and_stays_unchanged() -> None:
    def frames(*x: float) -> TensorDict:
        return TensorDict({"x": torch.tensor(x)}, [len(x)])

    stream = StackFrames(["x"], 2).stream()
    stream(frames(1, 2))
    refuses(TypeError, "TensorDict", stream, torch.zeros(2))
    refuses(ValueError, r"\[lanes\], got \[\]", stream, frames(1)[0])
    refuses(ValueError, r"'x': expected torch\.int64", stream, frames(0.0, 0.0))
    refuses(ValueError, "'x'", stream, frames(1, 2, 3))
    refuses(KeyError, "x", stream, TensorDict({"y": torch.zeros(2)}, [2]))
    for reset in (torch.zeros(2), torch.zeros(3, dtype=torch.bool), [True, False]):
        refuses(ValueError, "reset", stream, frames(1, 2), reset)
    assert stream(frames(3, 4))["x"].tolist() == [[1, 3], [2, 4]]
    stream.reset()
    assert stream(frames(5, 6))["x"].tolist() == [[5, 5], [6, 6]]
