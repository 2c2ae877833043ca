"""Observations stored once: which keys, what is refused, and that nothing has changed then."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LaneWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
)
from replaykit.storages import observation_table
from tests.storages.dedup import through
from tests.support.refusals import refuses

STORAGES = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])


@pytest.fixture(autouse=True, params=["core", "torch"])
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared and moved by the compiled core, or by torch."""
    if request.param == "torch":
        monkeypatch.setattr(observation_table, "NativeObservations", lambda *_: None)


def _snapshot(rb: ReplayBuffer) -> Any:
    ledger = rb.storage.ledger
    rows = rb[:].clone() if len(rb) else None
    counts = len(rb), rb.write_count, ledger.cursor, ledger.next_position, rb.storage.schema
    return (rows, *counts, rb.storage.overflow_rows if rb.storage.initialized else 0)


def _refused(rb: ReplayBuffer, rows: TensorDict, message: str, error: type = ValueError) -> None:
    before = _snapshot(rb)
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            rb.extend(rows)
        assert type(caught.value) is error
    after = _snapshot(rb)
    assert before[1:] == after[1:]
    if before[0] is not None:
        assert bool((before[0] == after[0]).all())


# -- which keys -----------------------------------------------------------------------------------


def _record() -> TensorDict:
    x = torch.zeros(2, 3)
    flag = torch.tensor([[False], [True]])
    return TensorDict(
        {
            "observation": x,
            "agents": {"observation": x, "reward": x, "done": flag},
            "half": x,
            "short": x,
            "action": x,
            "reward": x,
            "done": flag,
            "terminated": flag,
            "next": {
                "observation": x,
                "agents": {"observation": x, "reward": x, "done": flag},
                "half": x.half(),
                "short": x[:, :2],
                "only": x,
                "reward": x,
                "done": flag,
                "terminated": flag,
            },
        },
        [2],
    )


@STORAGES
@pytest.mark.parametrize(
    ("dedup_next", "keys"),
    [
        (True, {("observation",), ("agents", "observation")}),
        (["observation"], {("observation",)}),
        ([("agents", "observation")], {("agents", "observation")}),
        ([("agents", ("observation",))], {("agents", "observation")}),
        (False, set()),
    ],
)  # fmt: skip
def test_dedup_next_selects_deduplicated_keys(make: Any, dedup_next: Any, keys: set[Any]) -> None:
    storage = make(10, dedup_next=dedup_next, on_mismatch="dense")
    rb = ReplayBuffer(storage=storage)
    rb.extend(_record())
    pairs = getattr(storage.require(), "pairs", None)
    assert (set(pairs.root_of.values()) if pairs else set()) == keys
    assert storage.schema.leaves.keys() == {
        key if isinstance(key, tuple) else (key,) for key in _record().keys(True, True)
    }
    assert bool((rb[:] == _record()).all())


@STORAGES
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dedup_next": []}, ValueError, "at least one key"),
        ({"dedup_next": "observation"}, TypeError, "list of root keys, got 'observation'"),
        ({"dedup_next": 1}, TypeError, "list of root keys, got 1"),
        ({"dedup_next": None}, TypeError, "list of root keys, got None"),
        ({"dedup_next": [1]}, TypeError, "expected a key"),
        (
            {"dedup_next": True, "on_mismatch": "ignore"},
            ValueError,
            "'error' or 'dense', got 'ignore'",
        ),
    ],
)
def test_invalid_dedup_options_are_refused(
    make: Any, options: dict[str, Any], error: type, message: str
) -> None:
    refuses(error, message, make, 10, **options)


@STORAGES
def test_a_lane_key_that_would_be_rebuilt_itself_is_refused(make: Any) -> None:
    rows = through([0, 1, 2], env=[1, 1], next__env=[1, 1])
    rb = ReplayBuffer(storage=make(10, dedup_next=True, lane_key=("next", "env")))
    _refused(rb, rows, r"no lane_key under 'next', got \('next', 'env'\)")
    assert not rb.storage.initialized
    rb = ReplayBuffer(storage=make(10, dedup_next=["observation"], lane_key=("next", "env")))
    rb.extend(rows)
    assert rb.storage.overflow_rows == 1


@STORAGES
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["missing"], "'missing'.*got nothing and nothing"),
        (["action"], "'action'.*got float32 .3. and nothing"),
        (["half"], "'half'.*float32 .3. and float16 .3."),
        (["observation", "short"], "'short'.*float32 .3. and float32 .2."),
        (["only"], "'only'.*got nothing and float32"),
        (["agents"], "'agents'.*got nothing and nothing"),
        ([("next", "observation")], "'next', 'observation'"),
        (["done"], "expected no flag, got 'done'"),
    ],
)
def test_keys_missing_at_root_or_under_next_are_refused(make: Any, keys: Any, message: str) -> None:
    rb = ReplayBuffer(storage=make(10, dedup_next=keys))
    _refused(rb, _record(), message)
    assert not rb.storage.initialized
    rb.storage.dedup_next = False
    rb.extend(_record())


@pytest.mark.parametrize("rows", [torch.zeros(3), TensorDict({"x": torch.zeros(3)}, [3])])
def test_rows_without_a_shared_key_are_refused(rows: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10, dedup_next=True))
    refuses(ValueError, "occurs at the root and under 'next'", rb.extend, rows)
    assert not rb.storage.initialized


# -- rows that do not go on -----------------------------------------------------------------------


@STORAGES
@pytest.mark.parametrize("slots", [2, 10])
def test_a_mismatch_in_the_first_batch(make: Any, slots: int) -> None:
    """Also in a row that the batch itself would overwrite."""
    rb = ReplayBuffer(storage=make(slots, dedup_next=True))
    rows = through([0, 1, 2, 3, 4])
    rows["next", "observation"][1] = 9
    message = r"key 'observation', row 2: .* row 1 has under \('next', 'observation'\).*dense"
    _refused(rb, rows, message)
    assert not rb.storage.initialized


@pytest.mark.parametrize("value", [float("nan"), -0.0, 5.0])
def test_a_mismatch_after_the_newest_row(value: float) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(3, dedup_next=True))
    rb.extend(through([1, 2, 3, 4, 0]))
    _refused(rb, through([value, 1]), "key 'observation', row 0: .*the newest stored row has")
    refuses(ValueError, "row 0", rb.add, through([value, 1])[0])
    rb.extend(through([0, 1]))
    assert rb["next", "observation"].flatten().tolist() == [0, 1, 4]


def test_nan_matches_nan_in_the_next_row() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True))
    rb.extend(through([0, float("nan"), float("nan"), 1, float("nan")]))
    rb.extend(through([float("nan"), -0.0, 2]))
    assert rb.storage.overflow_rows == 1


@pytest.mark.parametrize("flag", ["done", "truncated", "terminated"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_any_flag_ends_an_episode(flag: str, dtype: torch.dtype) -> None:
    rows = through([0, 1, 2, 3, 4])
    rows["next", "observation"][1] = 9
    rows["next", flag] = torch.tensor([[-0.0], [2], [-0.0], [3]]).to(dtype)
    rb = ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True))
    rb.extend(rows)
    rb.extend(rows)
    assert bool((rb[:] == torch.cat([rows, rows])).all())
    assert rb.storage.overflow_rows == 4
    wrong = rows.clone()  # -0.0 is no end, though one of its bits is set
    wrong["next", "observation"][0] = 9
    _refused(rb, wrong, "row 1")


@pytest.mark.parametrize("key", ["episode", "seed", "collector__traj_ids"])
def test_another_id_is_another_episode(key: str) -> None:
    rows = through([0, 1, 2, 3, 4], **{key: [5, 5, 6, 6]})
    rows["next", "observation"][1] = 9
    rb = ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True))
    rb.extend(rows)
    rb.extend(rows)
    assert bool((rb[:] == torch.cat([rows, rows])).all())
    _refused(rb, through([0, 1], **{key: [6]}), "row 0")


def test_flags_of_the_state_before_end_nothing() -> None:
    rows = through([0, 1, 2, 3, 4], done=[[False], [True], [True], [False]])
    rows["next", "observation"][1] = 9
    _refused(ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True)), rows, "row 2")


@pytest.mark.parametrize("lane", [0, 2])
def test_lanes_are_checked_one_by_one(transitions: Any, lane: int) -> None:
    stream = transitions(3, (3,))
    rb = ReplayBuffer(storage=LazyTensorStorage(300, ndim=2, dedup_next=True))
    rows = stream.steps(4)
    rows["next", "done"][:] = False
    wrong = rows.clone()
    for key in ("observation", "pixels"):
        rows["next", key][:-1] = rows[key][1:]
        wrong["next", key][:-1] = wrong[key][1:]
    wrong["pixels"][2, lane] += 1
    _refused(rb, wrong.transpose(0, 1), rf"key 'pixels', row 2 \(lane {lane}\)")
    rb.extend(rows.transpose(0, 1))
    following = stream.noise(1)
    for key in ("observation", "pixels"):
        following[key][0] = rows["next", key][-1]
    following["pixels"][0, lane] += 1
    _refused(rb, following.transpose(0, 1), rf"row 0 \(lane {lane}\): .*newest")


def test_rows_without_next_observation_are_refused() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30, dedup_next=True))
    rb.extend(through([0, 1, 2]))
    with pytest.raises(ValueError, match=r"\('next', 'observation'\).*got nothing"):
        rb.extend(through([2, 3]).exclude(("next", "observation")))


@pytest.mark.parametrize("lane", [None, 1])
def test_after_a_cut_another_episode_begins(lane: int | None) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2, dedup_next=True))
    rows = torch.stack([through([0, 1, 2]), through([0, 1, 2])])
    rb.extend(rows)
    rb.writer.cut(lane)
    if lane is not None:
        _refused(rb, rows, r"row 0 \(lane 0\): .*newest")
        rows[0] = through([2, 1, 0])
    rb.extend(rows)
    assert bool((rb[:, 2:] == rows).all())
    # The cut was behind that row, and is no more.
    other = torch.stack([through([5, 6, 7]), through([5, 6, 7])])
    _refused(rb, other, r"row 0 \(lane 0\): .*newest")


# -- interleaved streams --------------------------------------------------------------------------


def _streams(envs: list[int], values: list[float], after: list[float], **ends: Any) -> TensorDict:
    """Rows of environments, each with its observation and the next one."""
    x, then = (torch.tensor(part, dtype=torch.float32)[:, None] for part in (values, after))
    done = torch.tensor(ends.get("done", [False] * len(envs)))[:, None]
    following = {"observation": then, "done": done}
    rows = {"env": torch.tensor(envs), "observation": x, "next": following}
    return TensorDict(
        {**rows, **{k: torch.tensor(v) for k, v in ends.items() if k != "done"}}, [len(envs)]
    )


WRITERS = pytest.mark.parametrize("length", [None, 6], ids=["ring", "by stream"])


def _buffer(length: int | None, *rows: TensorDict, **options: Any) -> ReplayBuffer:
    options = {"lane_key": "env", **options}
    storage = LazyTensorStorage(18, dedup_next=True, **options)
    rb = ReplayBuffer(storage=storage, writer=None if length is None else LaneWriter(length))
    for part in rows:
        rb.extend(part)
    return rb


@WRITERS
def test_rows_that_do_not_continue_their_stream_are_refused(length: int | None) -> None:
    wrong = _streams([1, 2, 1, 2], [0, 10, 1, 12], [1, 11, 2, 13])
    fresh = _buffer(length)
    refuses(ValueError, r"row 3: .* row 1, of the same stream, has .*next", fresh.extend, wrong)
    assert not fresh.storage.initialized
    rb = _buffer(length, _streams([1, 2], [0, 10], [1, 11]))
    # Each stream goes on from its own newest row, whatever lies between.
    rb.extend(_streams([2, 2, 2], [11, 12, 13], [12, 13, 14]))
    _refused(rb, _streams([3, 2, 1], [7, 14, 2], [8, 15, 3]), "row 2: .*newest stored row of its")
    _refused(rb, _streams([1, 2, 1], [1, 14, 7], [2, 15, 3]), "row 2: .* row 0, of the same stream")
    rb.extend(_streams([3, 2, 1], [7, 14, 1], [8, 15, 2]))
    with pytest.raises(ValueError, match=r"row 0: .*newest stored row of its stream"):
        rb.add(_streams([3], [7], [9])[0])
    assert rb.storage.overflow_rows == 3
    rb.add(_streams([3], [8], [9])[0])
    assert rb.storage.overflow_rows == 3


@WRITERS
@pytest.mark.parametrize("ends", [{"done": [False, True]}, {"episode": [4, 5]}], ids=str)
def test_rows_after_an_end_may_start_at_any_value(length: int | None, ends: dict[str, Any]) -> None:
    # The second stream has come to its end, or begins anew.
    same = {name: [value[0]] * 2 for name, value in ends.items()}
    rb = _buffer(length, _streams([1, 2], [0, 10], [1, 11], **(ends if "done" in ends else same)))
    rb.extend(_streams([1, 2], [1, 50], [2, 51], **(same if "done" in ends else ends)))
    _refused(rb, _streams([1], [9], [9], **{n: v[:1] for n, v in same.items()}), "row 0")
    assert rb["next", "observation"].flatten().tolist() == [1, 11, 2, 51]


def _saved_and_loaded(rb: ReplayBuffer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rb.dumps(folder)
        rb.loads(folder)


FORGETTING: dict[str, Callable[[ReplayBuffer], Any]] = {
    "cut": lambda rb: rb.cut(),
    "edited next": lambda rb: rb.set_(("next", "observation"), rb["next", "observation"] + 1),
    "edited rows": lambda rb: rb.__setitem__(slice(None), rb[:].clone()),
    "edited streams": lambda rb: rb.__setitem__("env", rb["env"].clone()),
    "ended": lambda rb: rb.set_(("next", "done"), torch.ones(len(rb), 1, dtype=torch.bool)),
    "state": lambda rb: rb.load_state_dict(rb.state_dict()),
    "saved": _saved_and_loaded,
    "empty": lambda rb: rb.empty(),
    "write_at": lambda rb: rb.writer.write_at(1, _streams([1], [80], [81])[0]),
    "set": lambda rb: rb.storage.set([0], _streams([1], [60], [61])),
}


@pytest.mark.parametrize(
    ("kind", "forget"),
    [
        (kind, forget)
        for kind in ("one stream", "ring", "by stream")
        for forget in FORGETTING
        if (kind, forget) != ("one stream", "edited streams")
        and (kind, forget[:2]) not in (("by stream", "wr"), ("by stream", "se"))
    ],
)
def test_forgotten_expectations_accept_any_next_row_once(kind: str, forget: str) -> None:
    envs = [1, 1] if kind == "one stream" else [1, 2]

    def rows(value: float) -> TensorDict:
        values = [value, value + 1] if kind == "one stream" else [value, value]
        return _streams(envs, values, [one + 1 for one in values])

    options = {"lane_key": None} if kind == "one stream" else {}
    rb = _buffer(6 if kind == "by stream" else None, rows(0), **options)
    _refused(rb, rows(20), "row 0")
    FORGETTING[forget](rb)
    rb.extend(rows(20))
    for env in envs:
        _refused(rb, _streams([env], [40], [41]), "row 0")
    # What has nothing to do with observations changes nothing.
    rb.set_(("next", "done"), torch.zeros(len(rb), 1, dtype=torch.bool))
    _refused(rb, rows(40), "row 0")


def test_a_cut_of_one_stream_leaves_the_others() -> None:
    rb = _buffer(6, _streams([1, 2], [0, 10], [1, 11]))
    rb.cut(2)
    _refused(rb, _streams([1], [0], [0]), "row 0")
    rb.extend(_streams([2, 1], [30, 1], [31, 2]))
    _refused(rb, _streams([2], [0], [0]), "row 0")


@WRITERS
@pytest.mark.parametrize("count", [18, 19, 50])
def test_batches_larger_than_the_ring_are_checked(length: int | None, count: int) -> None:
    rb = _buffer(length, _streams([1, 2], [0, 10], [1, 11]))
    envs = [1 + place % 2 for place in range(count)]
    values = [10 * (env - 1) + place // 2 + 1 for place, env in enumerate(envs)]
    rows = _streams(envs, values, [value + 1 for value in values])
    for row, message in ((0, "newest stored row of its"), (2, "row 0, of the same stream")):
        wrong = rows.clone()
        wrong["observation"][row] += 0.5
        _refused(rb, wrong, f"row {row}: .*{message}")
    rb.extend(rows)
    assert bool((rb["next", "observation"] == rb["observation"] + 1).all())
    assert rb.storage.overflow_rows == 2
    _refused(rb, _streams([1], [0], [1]), "row 0")


def test_stream_forgotten_by_the_ring_restarts() -> None:
    rb = _buffer(None, _streams([1], [0], [1]))
    rb.extend(_streams([2] * 18, list(range(18)), list(range(1, 19))))
    rb.extend(_streams([1], [7], [8]))
    assert rb.storage.overflow_rows == 2


def test_many_streams_are_forgotten_with_their_rows() -> None:
    rb = _buffer(None)
    for start in range(0, 9000, 9):
        envs = list(range(start, start + 9))
        rb.extend(_streams(envs, [0.0] * 9, [1.0] * 9))
    columns = rb.storage.require()
    assert len(columns._tails._slots) <= 1024 + 9
    assert columns._continuing <= columns._tails._slots.keys()
    _refused(rb, _streams([8999], [5], [6]), "row 0")
    rb.extend(_streams([8999, 8990], [1, 1], [2, 2]))
    assert rb.storage.overflow_rows == 16
