"""The chain: which way data go through which transforms, and what is taken for one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    NStep,
    ReplayBuffer,
    RewardScale,
    RunningNorm,
    StackFrames,
    Transform,
    Windows,
)
from tests.support.refusals import refuses


class Says(Transform):
    """Writes down its name for every way it is used."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def forward(self, data: Any) -> Any:
        self.log.append(f"{self.name}.forward")
        return data

    def inv(self, data: Any) -> Any:
        self.log.append(f"{self.name}.inv")
        return data


class ForwardOnly:
    def forward(self, data: Any) -> Any:
        return data + 1


class InvOnly:
    def inv(self, data: Any) -> Any:
        return data * 10


def test_reading_goes_in_order_and_writing_in_reverse() -> None:
    log: list[str] = []
    chain = Compose(Says("a", log), Says("b", log))
    chain.append(Says("c", log))
    chain.insert(0, Says("z", log))
    chain.insert(-1, Says("y", log))  # before the last one
    chain.forward(1)
    assert log == ["z.forward", "a.forward", "b.forward", "y.forward", "c.forward"]
    log.clear()
    chain.inv(1)
    assert log == ["c.inv", "y.inv", "b.inv", "a.inv", "z.inv"]
    assert [transform.name for transform in chain] == ["z", "a", "b", "y", "c"]
    assert (len(chain), chain[0].name, chain[-1].name) == (5, "z", "c")


def test_inverted_transform_swaps_forward_and_inv_at_its_position() -> None:
    log: list[str] = []
    chain = Compose(Says("a", log))
    chain.append(Says("b", log), invert=True)
    chain(1)
    assert log == ["a.forward", "b.inv"]
    log.clear()
    chain.inv(1)
    assert log == ["b.forward", "a.inv"]
    assert "(inverted)" in repr(chain)


@pytest.mark.parametrize(
    ("made", "read", "written"),
    [
        (lambda x: x + 1, 2, 1),
        (ForwardOnly(), 2, 1),
        (InvOnly(), 1, 10),
        (Transform(), 1, 1),
    ],
)
def test_a_transform_needs_one_way_only(made: Any, read: int, written: int) -> None:
    chain, turned = Compose(made), Compose()
    assert (chain(1), chain.inv(1)) == (read, written)
    turned.append(made, invert=True)
    assert (turned(1), turned.inv(1)) == (written, read)


def test_chains_can_be_nested() -> None:
    inner = Compose(lambda x: x + 1, lambda x: x * 2)
    assert Compose(inner, lambda x: x - 3)(4) == 7
    log: list[str] = []
    chain = Compose(Compose(Says("a", log), Compose(Says("b", log))), Says("c", log))
    chain.insert(-1, Compose(Says("y", log), Says("z", log)), invert=True)
    chain(1)
    assert log == ["a.forward", "b.forward", "z.inv", "y.inv", "c.forward"]
    log.clear()
    chain.inv(1)
    assert log == ["c.inv", "y.forward", "z.forward", "b.inv", "a.inv"]


def test_nested_transforms_read_other_rows_and_follow_writes() -> None:
    def read(*chain: Any) -> TensorDict:
        rb = ReplayBuffer(storage=LazyTensorStorage(8), transform=chain[0])
        for one in chain[1:]:
            rb.append_transform(one)
        t = torch.arange(5.0)[:, None]
        rb.extend(TensorDict({"x": t, "next": {"reward": t, "done": t == 4}}, [5]))
        return rb[:]

    def parts() -> tuple[Any, Any, Any]:
        return RunningNorm(["x"]), Windows({"x": range(2)}), RewardScale(2.0)

    flat, (norm, windows, scale) = read(Compose(*reversed(parts()[:2]), parts()[2])), parts()
    assert (flat == read(windows, Compose(norm, Compose(scale)))).all()
    assert (flat == read(Compose(Compose(parts()[1], parts()[0]), parts()[2]))).all()


def test_a_row_that_is_swallowed_goes_no_further(snapshot: Any) -> None:
    log: list[str] = []

    class Swallows(Transform):
        def inv(self, data: Any) -> Any:
            return None

    chain = Compose(Says("first", log), Swallows(), Says("last", log))
    assert chain.inv(1) is None
    assert log == ["last.inv"]
    rb = ReplayBuffer(storage=LazyTensorStorage(3), transform=chain)
    before = snapshot(rb)
    assert rb.add(torch.tensor(1)) is None
    assert rb.extend(torch.arange(3)).shape == (0,)
    assert snapshot(rb) == before


def test_a_transform_may_change_the_number_of_rows() -> None:
    class Doubles(Transform):
        def inv(self, data: Any) -> Any:
            return torch.cat([data, data])

    rb = ReplayBuffer(storage=LazyTensorStorage(9), transform=Doubles())
    assert rb.extend(torch.arange(2)).tolist() == [0, 1, 2, 3]
    assert rb.add(torch.tensor(7)).tolist() == [4, 5]
    assert rb[:].tolist() == [0, 1, 0, 1, 7, 7]


@pytest.mark.parametrize("thing", [None, "x", object(), Transform, dict])
def test_invalid_transform_is_refused(thing: Any) -> None:
    chain = Compose(abs)
    for use in (
        lambda: Compose(thing),
        lambda: chain.append(thing),
        lambda: chain.insert(0, thing),
        lambda: ReplayBuffer().append_transform(thing),
        lambda: ReplayBuffer().insert_transform(0, thing),
    ):
        refuses(RuntimeError, "expected a callable, or an object with forward", use)
    assert len(chain) == 1


def test_invalid_position_is_refused() -> None:
    chain = Compose(abs)
    for index in (2, -2):
        refuses(IndexError, r"a position in \[0, 1\], got", chain.insert, index, abs)
    with pytest.raises(IndexError):
        chain[1]


def test_modules_are_put_in_eval_mode() -> None:
    noisy = torch.nn.Dropout(0.5)
    assert noisy.training
    chain = Compose(noisy)
    assert not noisy.training
    assert torch.equal(chain(torch.ones(100)), torch.ones(100))
    later = torch.nn.Dropout(0.5)
    rb = ReplayBuffer(storage=LazyTensorStorage(3)).append_transform(later)
    assert not later.training
    rb.extend(torch.ones(3))
    assert rb.sample(20).tolist() == [1.0] * 20


def test_a_copy_is_a_chain_of_the_same_transforms() -> None:
    chain = Compose(abs)
    twin = chain.copy()
    twin.append(abs)
    assert (len(chain), len(twin)) == (1, 2)
    assert twin[0] is chain[0]


@pytest.mark.pitfall("WR13")
@pytest.mark.parametrize("index", [0, -1, slice(None), slice(0, 2), [0, 1], None])
def test_a_transform_in_place_never_reaches_the_rows(
    storage_kind: Any, make_rows: Any, index: Any
) -> None:
    """WR13, E6: what is read through a transform is a copy."""

    def edits(batch: TensorDict) -> TensorDict:
        assert not batch.is_locked
        batch["observation"].mul_(-1)
        batch.set(("next", "reward"), batch["next", "reward"].add_(100))
        return batch.set("new", batch["id"].clone())

    rb = storage_kind.buffer(4, batch_size=6)
    rb.extend(make_rows(0, 4))
    rb.append_transform(edits)
    for _ in range(3):
        rows = rb.sample() if index is None else rb[index]
        assert (rows["next", "reward"] >= 100).all()
    for row, number in zip(rb.storage, range(4), strict=True):
        assert row["observation"].tolist() == [number * 10.0, number * 10.0 + 1, number * 10.0 + 2]
        assert row["next", "reward"].tolist() == [number / 2]
        assert "new" not in set(row.keys())


def test_written_rows_go_through_inv_and_read_rows_through_forward() -> None:
    class Scales(Transform):
        def forward(self, data: Any) -> Any:
            return data / 10

        def inv(self, data: Any) -> Any:
            return data * 10

    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=Scales())
    rb.extend(torch.tensor([1.0, 2.0]))
    rb.add(torch.tensor(3.0))
    rb[0] = torch.tensor(4.0)
    assert rb.storage[:].tolist() == [40.0, 20.0, 30.0]
    assert rb[:].tolist() == [4.0, 2.0, 3.0]
    assert float(rb[2]) == 3.0
    assert set(rb.sample(50).tolist()) == {4.0, 2.0, 3.0}


def test_adding_one_row_shows_transforms_a_batch_of_one() -> None:
    shapes: list[Any] = []

    class Looks(Transform):
        def inv(self, data: Any) -> Any:
            shapes.append(tuple(data.shape))
            return data

    for ndim, row in ((1, torch.zeros(3)), (2, torch.zeros(4, 3))):
        rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=ndim), transform=Looks())
        rb.add(row)
    assert shapes == [(1, 3), (4, 1, 3)]


class Counts(Transform):
    """Has a state: how many batches it saw."""

    def __init__(self) -> None:
        self.seen = torch.tensor(0)

    def forward(self, data: Any) -> Any:
        self.seen += 1
        return data

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].clone()


def test_transforms_with_state_take_batches_in_order() -> None:
    class Learns(Transform):
        ordered = True

    module = torch.nn.BatchNorm1d(3)
    assert Compose(Compose(ForwardOnly(), Counts())).ordered
    assert Compose(Learns()).ordered
    assert not Compose(ForwardOnly(), Compose(), lambda data: data, module).ordered
    chain = Compose(module)
    module.train()
    assert chain.ordered
    assert not Compose(NStep(2, 0.9, when="write")).ordered


def test_states_are_found_by_position() -> None:
    chain = Compose(abs, Counts(), torch.nn.Identity(), Counts())
    chain(torch.tensor(1))
    chain[3].forward(None)
    state = chain.state_dict()
    assert {key: int(value["seen"]) for key, value in state.items()} == {"1": 1, "3": 2}
    twin = Compose(abs, Counts(), abs, Counts())
    twin.load_state_dict(state)
    assert [int(twin[i].seen) for i in (1, 3)] == [1, 2]


class Whole(Compose):
    """Stays one transform of a chain, as every Compose did in version 0.1.0."""


def test_a_checkpoint_of_nested_chains_loads_into_a_flat_one(tmp_path: Path) -> None:
    def buffer(*transforms: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(5), transform=Compose(*transforms))

    counts = [Counts() for _ in range(3)]
    saved = buffer(counts[0], Whole(abs, Whole(counts[1])), abs, counts[2])
    saved.extend(torch.arange(3))
    for number, one in enumerate(counts):
        one.seen += 5 * number
    saved.dumps(tmp_path)
    for flat in (True, False):
        loaded = [Counts() for _ in range(3)]
        inner = [abs, Compose(loaded[1])] if flat else [Whole(abs, Whole(loaded[1]))]
        buffer(loaded[0], *inner, abs, loaded[2]).loads(tmp_path)
        assert [int(one.seen) for one in loaded] == [0, 5, 10]
    refuses(ValueError, "at position 3, got none", buffer(Counts(), Counts()).loads, tmp_path)


class RawCounts(Counts):
    stage = "raw"


class ValueCounts(Counts):
    stage = "value"


def test_states_of_another_nested_chain_are_refused() -> None:
    seen = {"seen": torch.tensor(5)}
    for transforms, order, states in (
        ((Compose(ValueCounts()), RawCounts()), "auto", {"0": {"0": seen}, "1": seen}),
        ((Compose(Counts()), Counts()), "strict", {"1": {"0": seen}, "7": seen}),
        ((Compose(Counts()), Counts()), "strict", {"0": {"0": seen}, "x": seen}),
    ):
        rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=Compose(*transforms, order=order))
        rb.extend(torch.arange(3))
        state = {**rb.state_dict(), "_transforms": states}
        refuses((ValueError, KeyError), "expected a transform|seen", rb.load_state_dict, state)
        assert all(int(one.seen) == 0 for one in rb.transform if isinstance(one, Counts))


def test_a_subclass_with_transforms_that_follow_writes_is_refused() -> None:
    for one in (RunningNorm(["x"]), StackFrames(["x"], 2)):
        refuses(ValueError, "in a Whole, which stays one transform", Compose, abs, Whole(one))
    assert len(Compose(Whole(abs, abs))) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the states of transforms"),
        ({"0": {"seen": torch.tensor(1)}}, "at position 0, got builtin_function"),
        ({"2": {"seen": torch.tensor(1)}}, "at position 2, got none"),
        ({"x": {}}, "at position x, got none"),
        ({"-1": {}}, "at position -1, got none"),
    ],
)
def test_state_for_a_missing_transform_is_refused(state: Any, message: str) -> None:
    chain = Compose(abs, Counts())
    refuses(ValueError, message, chain.load_state_dict, state)
    assert int(chain[1].seen) == 0


@pytest.fixture(scope="module")
def torchrl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.envs import transforms
    return transforms


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchrl_transforms_read_and_write(torchrl: Any, make_rows: Any) -> None:
    """Objects of the library that this one is compatible with work as they are."""
    pixels = torch.arange(2 * 4 * 5 * 3).view(2, 4, 5, 3).to(torch.uint8)
    rows = make_rows(0, 2, pixels=pixels, real=torch.arange(2.0, dtype=torch.float64))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(5),
        transform=torchrl.ExcludeTransform("observation", ("next", "done")),
        batch_size=3,
    )
    rb.append_transform(torchrl.RenameTransform(["action", ("next", "reward")], ["act", "rew"]))
    rb.append_transform(torchrl.ToTensorImage(in_keys=["pixels"]))
    rb.append_transform(torchrl.DoubleToFloat(in_keys=["real"]))
    rb.extend(rows)
    assert torch.equal(rb.storage[:]["pixels"], pixels)
    batch = rb.sample()
    assert set(batch.keys()) == {"id", "act", "rew", "next", "pixels", "real", "index"}
    assert batch["pixels"].shape == (3, 3, 4, 5)
    assert batch["pixels"].dtype == torch.float32
    expected = pixels[batch["index"]].permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(batch["pixels"], expected)
    assert batch["real"].dtype == torch.float32
    assert torch.equal(batch["rew"], batch["id"][:, None] / 2)
    assert set(rb.storage[:].keys()) == {"id", "observation", "action", "next", "pixels", "real"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchrl_transforms_with_a_way_back_are_inverted_on_writing(
    torchrl: Any, fingerprint: Any
) -> None:
    rows = TensorDict({"x": torch.arange(3, dtype=torch.float32), "secret": torch.ones(3)}, [3])
    before = fingerprint(rows)
    cast = torchrl.DTypeCastTransform(
        torch.float64, torch.float32, in_keys=["x"], in_keys_inv=["x"]
    )
    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=cast)
    rb.append_transform(torchrl.ExcludeTransform("secret"), invert=True)
    rb.extend(rows)
    assert set(rb.storage[:].keys()) == {"x"}
    assert rb.storage[:]["x"].dtype == torch.float64
    assert rb.sample(2)["x"].dtype == torch.float32
    assert fingerprint(rows) == before
