"""Priorities: of written rows, from learners, in prioritized buffers and samplers of users."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    Storage,
    TensorDictPrioritizedReplayBuffer,
)
from tests.buffer.building import buffer_of, in_threads, storage_of, unchanged
from tests.support.refusals import refuses

NAMED = [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


class Step(TensorClass):
    """A tensorclass that carries a priority."""

    x: torch.Tensor
    td_error: torch.Tensor


def rows(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count)}, [count])


def data(*td_errors: float, key: Any = "td_error", dtype: Any = torch.float32) -> TensorDict:
    return rows(len(td_errors)).set(key, torch.tensor(td_errors, dtype=dtype))


def make(
    cls: Any = TensorDictPrioritizedReplayBuffer, storage: Any = "tensor", **options: Any
) -> Any:
    generator = torch.Generator().manual_seed(options.pop("seed", 0))
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 4, **options}
    storage = storage_of(storage) if isinstance(storage, str) else storage
    return cls(storage=storage, generator=generator, **options)


def raw(buffer: ReplayBuffer) -> list[float]:
    """Return the priorities by slot, with those of the lanes of a slot side by side."""
    sampler: Any = buffer.sampler
    return sampler.stored_priorities(buffer.storage).tolist()


# -- from written data ----------------------------------------------------------------------------


class Weighted(Sampler):
    """The least that a sampler with priorities is: one number per slot, draws by weight."""

    prioritized = True

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, float] = {}
        self.updates: list[int] = []

    def sample(self, storage: Storage, batch_size: int) -> Any:
        weights = torch.tensor([self.weights[slot] for slot in range(len(storage))])
        return torch.multinomial(weights, batch_size, True, generator=self.generator), {}

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        self.update_priority(index, torch.ones(len(index)), storage=storage)

    def update_priority(self, index: Any, priority: Any, **_: Any) -> None:
        self.weights.update(zip(index.tolist(), priority.tolist(), strict=True))
        self.updates += index.tolist()


@pytest.mark.pitfall("IF3")
@pytest.mark.pitfall("PR9")
@pytest.mark.parametrize("kind", ["tensor", "list", "lazy_stack"])
@pytest.mark.parametrize("own", [False, True])
def test_each_written_row_gets_its_priority_once(kind: str, own: bool):
    buffer = (
        make(storage=kind)
        if not own
        else ReplayBuffer(storage=storage_of(kind), sampler=Weighted())
    )
    buffer.extend(data(1.0, 2.0, 3.0))
    buffer.add(data(4.0)[0])
    buffer.extend(list(data(5.0, 6.0).unbind(0)))
    if kind == "list":
        buffer.extend(tuple(data(7.0, 8.0).unbind(0)))
    expected = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][: 8 if kind == "list" else 6]
    if not own:
        assert raw(buffer) == expected
        return
    assert buffer.sampler.weights == dict(enumerate(expected))
    assert sorted(buffer.sampler.updates) == list(range(len(expected)))
    batch = buffer.sample(2)
    buffer.update_tensordict_priority(batch.set("td_error", batch["td_error"] * 0))
    assert not set(buffer.sample(20)["index"].tolist()) & set(batch["index"].tolist())


@pytest.mark.pitfall("PR9")
def test_rows_without_priorities_get_the_default():
    """Also where the caller asks to ignore what the data carries."""
    buffer = make()
    buffer.extend(data(3.0, 4.0).exclude("td_error"))
    buffer.extend(data(5.0), update_priority=False)
    buffer.extend(data(6.0), update_priority=True)
    buffer.extend([])
    assert raw(buffer) == [1.0, 1.0, 1.0, 6.0]
    partly = list(data(7.0, 8.0).unbind(0))
    del partly[0]["td_error"]
    listed = make(storage="list")
    listed.extend(partly)
    assert raw(listed) == [1.0, 1.0]


def test_priorities_of_nested_keys_trajectories_and_tensorclasses():
    nested = make(priority_key=("next", "p"))
    nested.extend(data(3.0, 4.0, key=("next", "p")).set("td_error", torch.tensor([8.0, 9.0])))
    assert raw(nested) == [3.0, 4.0]
    whole = make()
    whole.extend(TensorDict({"td_error": torch.tensor([[1.0, 5.0], [2.0, 3.0]])}, [2, 2]))
    assert raw(whole) == [5.0, 3.0]
    ragged = make(storage="lazy_stack")
    ragged.extend([TensorDict({"td_error": torch.arange(1.0, n)}, []) for n in (3, 5)])
    assert raw(ragged) == [2.0, 4.0]
    steps = make()
    steps.extend(Step(x=torch.zeros(2), td_error=torch.tensor([2.0, 3.0]), batch_size=[2]))
    assert raw(steps) == [2.0, 3.0]


@pytest.mark.parametrize("dim_extend", [None, 0])
@pytest.mark.parametrize("how", ["extend", "add", "list"])
def test_every_cell_of_rows_with_lanes_has_a_separate_priority(how: str, dim_extend: Any):
    buffer = make(storage=LazyTensorStorage(12, ndim=2), dim_extend=dim_extend)
    errors = torch.arange(6.0).view(2, 3)  # two lanes, three steps
    layout = errors if dim_extend is None else errors.T
    content = TensorDict({"td_error": layout}, layout.shape)
    steps = [content[:, t] if dim_extend is None else content[t] for t in range(3)]
    if how == "extend":
        buffer.extend(content)
    elif how == "list":
        buffer.extend(steps)
    else:
        for step in steps:
            buffer.add(step)
    assert raw(buffer) == errors.T.flatten().tolist()


@pytest.mark.pitfall("PR10")
@pytest.mark.pitfall("PR2")
@pytest.mark.parametrize("how", ["extend", "add", "list"])
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *itertools.product(["tensor", "list", "own"], [float("nan"), -1.0, float("inf")]),
        *itertools.product(["tensor", "list"], [1e39]),
    ],
)
def test_a_bad_priority_is_found_before_anything_is_stored(how: str, kind: str, wrong: float):
    """Wherever it is; 1e39 is finite as it comes and infinite as it would be kept."""
    own = kind == "own"
    buffer = make(storage=kind) if not own else buffer_of(sampler=Weighted())
    buffer.extend(data(1.0, 2.0, dtype=torch.float64))
    for position in range(3):
        errors = [1.0, 2.0, 3.0]
        errors[position] = wrong
        bad = data(*errors, dtype=torch.float64)

        def write(bad: TensorDict = bad, position: int = position) -> None:
            if how == "add":
                buffer.add(bad[position])
            else:
                buffer.extend(bad if how == "extend" else list(bad.unbind(0)))

        unchanged(buffer, ValueError, write, "priorities")
        given = list(buffer.sampler.weights.values()) if own else raw(buffer)
        assert given == [1.0, 2.0]
    buffer.extend(bad, update_priority=False)
    assert len(buffer) == 5


@pytest.mark.pitfall("PR10")
def test_priorities_of_the_wrong_shape_are_found_before_anything_is_stored():
    """None per row, or a bad one in one cell."""
    flat, lanes = make(), make(storage=LazyTensorStorage(12, ndim=2))
    flat.extend(data(1.0))
    lanes.extend(TensorDict({"td_error": torch.ones(2, 3)}, [2, 3]))
    none = TensorDict({"x": torch.zeros(2), "td_error": torch.ones(2, 0)}, [2])
    unchanged(flat, ValueError, lambda: flat.extend(none))
    bad = TensorDict({"td_error": torch.ones(2, 3)}, [2, 3])
    bad["td_error"][1, 2] = -1
    unchanged(
        lanes, ValueError, lambda: lanes.extend(bad), "finite and not negative under 'td_error'"
    )


@pytest.mark.pitfall("PR10")
@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", 4.0), ("min", 1.0), ("mean", 2.25), ("median", 2.0), ("sum", 9.0)],
)
def test_priorities_with_more_dimensions_are_reduced(reduction: str, expected: float) -> None:
    """In the data and from the learner."""
    buffer = make(reduction=reduction)
    values = torch.tensor([1.0, 2.0, 2.0, 4.0]).expand(3, 4)
    buffer.extend(rows(3).set("td_error", values))
    assert raw(buffer) == [expected] * 3
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", batch["td_error"] * 2))
    assert set(raw(buffer)) <= {expected, 2 * expected}


# -- with other components ------------------------------------------------------------------------


@pytest.mark.pitfall("PR12")
def test_new_sampler_gives_stored_rows_the_default_priority():
    """Over a filled storage, by constructor, ``set_sampler`` and ``set_storage``."""
    storage = LazyTensorStorage(10)
    changed = ReplayBuffer(storage=storage)
    changed.extend(rows(4))
    built, moved = make(storage=storage), make()
    moved.extend(data(5.0, 6.0, 7.0, 8.0, 9.0))
    moved.set_storage(storage)
    changed.set_sampler(PrioritizedSampler(alpha=0.7, beta=0.9))
    for buffer in (built, changed, moved):
        assert raw(buffer) == [1.0] * 4
        assert buffer.sample(2)["x"].shape == (2,)


@pytest.mark.pitfall("WR15")
def test_rows_written_by_another_buffer_get_the_default():
    """Every buffer over a storage knows of all rows."""
    storage = LazyTensorStorage(10)
    one, two = (make(storage=storage) for _ in range(2))
    one.extend(data(0.5, 0.25))
    two.extend(data(0.75))
    assert raw(one) == [0.5, 0.25, 1.0]
    assert raw(two) == [1.0, 1.0, 0.75]
    two.writer.write_at(torch.tensor([0]), data(0.0))
    assert raw(one) == [1.0, 0.25, 1.0]


# -- from learners ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["update_priority", "update_tensordict_priority"])
def test_learners_give_priorities_back_with_the_sample(how: str):
    buffer = make(priority_key=("next", "p"))
    buffer.extend(rows(6))
    batch = buffer.sample(3)
    batch["next", "p"] = torch.tensor([[2.0, 3.0]]).expand(3, 1, 2)
    getattr(buffer, how)(batch)
    drawn = set(batch["index"].tolist())
    assert raw(buffer) == [3.0 if slot in drawn else 1.0 for slot in range(6)]
    buffer.update_tensordict_priority(batch[2].set(("next", "p"), torch.tensor(6.0)))
    assert raw(buffer)[int(batch["index"][2])] == 6.0


@pytest.mark.pitfall("PR15")
def test_a_missing_priority_key_is_an_error():
    """It reset the rows to the default priority."""
    buffer = make()
    buffer.extend(rows(6))
    batch = buffer.sample(3)
    unchanged(buffer, KeyError, lambda: buffer.update_tensordict_priority(batch), "td_error")
    batch = batch.set("td_error", torch.ones(3)).exclude("index")
    unchanged(buffer, KeyError, lambda: buffer.update_priority(batch), "index")


@pytest.mark.parametrize("stack_dim", [None, 0, 1])
def test_samples_of_trajectories_give_one_priority_each(stack_dim: int | None):
    """What is known of a trajectory is repeated over its steps; its priority is reduced."""
    kind = LazyTensorStorage(5) if stack_dim is None else LazyStackStorage(5, stack_dim=stack_dim)
    buffer = make(storage=kind)
    buffer.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    batch, info = buffer.sample(20, return_info=True)
    buffer.update_tensordict_priority(batch.set("td_error", batch["x"] + 1.0))
    seen = set(info["index"].tolist())
    assert raw(buffer) == [3.0 * slot + 3 if slot in seen else 1.0 for slot in range(4)]


@pytest.mark.parametrize("lanes", [(2,), (2, 3)])
@pytest.mark.parametrize("shape", ["written", "flat", "column"])
def test_priorities_may_have_the_layout_of_the_written_data(lanes: Any, shape: str):
    buffer = make(storage=LazyTensorStorage(100, ndim=len(lanes) + 1))
    content = torch.arange(torch.Size([*lanes, 4]).numel()).view(*lanes, 4)
    index = buffer.extend(TensorDict({"x": content}, content.shape))
    time_major = content.transpose(0, len(lanes)).reshape(-1).double()
    given = {"written": content.double(), "flat": time_major, "column": time_major[:, None]}
    buffer.update_priority(index, given[shape])
    assert raw(buffer) == time_major.tolist()


def test_a_single_slot_can_be_given_a_priority():
    buffer = make()
    buffer.extend(data(*[0.5] * 6))
    buffer.update_priority(3, 8.0)
    buffer.update_priority(torch.tensor([4]), torch.tensor([[9.0]]))
    buffer.mark_update(torch.tensor([0]))
    assert raw(buffer) == [9.0, 0.5, 0.5, 8.0, 9.0, 0.5]


def test_update_with_a_dict_batch_names_the_right_call() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(10), batch_size=4
    )
    rb.extend({"x": torch.arange(5.0)})
    batch = {**rb.sample(), "td_error": torch.ones(4)}
    with pytest.raises(TypeError, match=r"expected a TensorDict.*transition.*return_info"):
        rb.update_tensordict_priority(batch)
    _, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], torch.ones(4))


# -- constructors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", NAMED)
def test_arguments_reach_the_sampler(cls: Any) -> None:
    buffer = make(
        cls,
        eps=1e-3,
        reduction="mean",
        sampler_device="cpu",
        stratified=True,
        weight_norm="batch",
        max_priority_within_buffer=True,
        dtype=torch.float64,
    )
    sampler = buffer.sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.9, 1e-3)
    assert (sampler.reduction, sampler.weight_norm, sampler.stratified) == ("mean", "batch", True)
    assert sampler.max_priority_within_buffer
    assert (sampler.dtype, sampler.device) == (torch.float64, torch.device("cpu"))
    buffer.extend(rows(3))
    assert buffer.sample()["priority_weight"].dtype == torch.float64


@pytest.mark.pitfall("IF6")
@pytest.mark.parametrize("cls", NAMED)
def test_named_buffers_are_buffers(cls: Any) -> None:
    """IF6: with signatures that say which arguments they need."""
    assert issubclass(cls, ReplayBuffer)
    parameters = inspect.signature(cls).parameters
    assert parameters["alpha"].default is inspect.Parameter.empty
    assert parameters["alpha"].kind is inspect.Parameter.KEYWORD_ONLY
    refuses(TypeError, "alpha", cls, beta=0.9)
    refuses(TypeError, "unknown", cls, alpha=0.7, beta=0.9, unknown=3)
    refuses(ValueError, "beta", cls, alpha=0.7, beta=-1)


def test_a_sampler_takes_the_place_of_the_named_ones() -> None:
    own = PrioritizedSampler(alpha=0.1, beta=0.2)
    assert make(PrioritizedReplayBuffer, sampler=own).sampler is own
    made = make(PrioritizedReplayBuffer, sampler=RandomSampler)
    assert isinstance(made.sampler, RandomSampler)
    with pytest.raises(TypeError, match="sampler or sampler_device, got both"):
        make(PrioritizedReplayBuffer, sampler=own, sampler_device="cpu")
    with pytest.raises(TypeError, match="makes its own sampler"):
        make(TensorDictPrioritizedReplayBuffer, sampler=RandomSampler())


@pytest.mark.parametrize(("source", "target"), [*itertools.pairwise([*NAMED, "plain", NAMED[0]])])
def test_checkpoints_are_interchangeable(source: Any, target: Any, tmp_path: Path) -> None:
    def built(cls: Any, seed: int) -> Any:
        if cls != "plain":
            return make(cls, seed=seed)
        sampler = PrioritizedSampler(alpha=0.7, beta=0.9)
        return buffer_of(sampler=sampler, batch_size=4, seed=seed)

    buffer, other = built(source, 0), built(target, 1)
    buffer.extend(rows(14))
    buffer.update_priority(torch.arange(10), torch.rand(10))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(3):
        assert bool((buffer.sample() == other.sample()).all())


def test_objects_have_priorities_too() -> None:
    buffer = PrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(5), collate_fn=list, batch_size=10
    )
    index = buffer.extend(["left", "right", "stop"])
    buffer.update_priority(index, torch.tensor([0.0, 1.0, 0.0]))
    assert set(buffer.sample()) == {"right"}
    rewritten, info = buffer.sample(return_info=True)
    assert rewritten == ["right"] * 10
    assert info["priority_weight"].tolist() == [1.0] * 10


# -- threads and processes ------------------------------------------------------------------------


@pytest.mark.pitfall("TH4")
def test_no_reader_sees_a_new_row_with_its_predecessors_priority() -> None:
    """TH4: rows of even rounds have priority 1 and of odd ones 0: those are never drawn."""
    buffer = make(storage=LazyTensorStorage(8), eps=0.0, alpha=1.0)
    done = threading.Event()

    def round_of(number: int) -> TensorDict:
        drawable = torch.arange(8) % 2 == number % 2
        return TensorDict({"drawable": drawable, "td_error": drawable.float()}, [8])

    buffer.extend(round_of(0))
    rounds = [0]

    def write() -> None:
        try:
            for number in range(1, 400):
                buffer.extend(round_of(number))
                rounds[0] = number
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            batch = buffer.sample(8)
            assert bool(batch["drawable"].all())
            assert bool((batch["priority_weight"] == 1).all())

    in_threads(write, read, read)
    assert rounds[0] == 399


def test_updates_draws_and_exponents_from_several_threads() -> None:
    """The trees stay those of the priorities, also where the sampler itself is used."""
    buffer = make(storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(rows(64))

    def learn() -> None:
        for number in range(150):
            batch = buffer.sample()
            buffer.update_tensordict_priority(batch.set("td_error", torch.rand(16) + number % 3))

    def write() -> None:
        for number in range(150):
            buffer.extend(rows(5, number))

    def anneal() -> None:
        for number in range(150):
            buffer.sampler.alpha = number % 5 / 4
            buffer.sampler.update_priority(torch.arange(64), torch.rand(64))
            buffer.sampler.state_dict()

    in_threads(learn, learn, write, anneal)
    sampler = buffer.sampler
    stored = torch.tensor(raw(buffer))
    assert torch.equal(sampler._table._sums.leaves, sampler._table.law.values(stored).float())
    assert sampler._table.smallest() == sampler._table._sums.leaves.min().item()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_process_gets_separate_priority_trees(run_python: Any) -> None:
    """A thread of the parent may hold the lock of a tree when the process forks."""
    done = run_python(
        """
import os, signal, torch, warnings
from replaykit import LazyTensorStorage, PrioritizedReplayBuffer

rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(50), batch_size=20,
                             generator=torch.Generator().manual_seed(0))
rb.update_priority(rb.extend(torch.arange(40)), torch.arange(40.0))
table = rb.sampler._table
warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads
with table._sums._lock, table._least._lock:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        drawn = rb.sample()
        rb.update_priority(torch.arange(40), 1.0)
        rb.extend(torch.arange(20))
        rb.sample()
        os.write(1, str(drawn.tolist()).encode())
        os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert rb.sampler.state_dict()["_priorities"].tolist() == list(range(40))
os.write(1, b"\\n" + str(rb.sample().tolist()).encode())
"""
    )
    of_child, of_parent = done.stdout.splitlines()
    assert of_child == of_parent
