"""The values that declared types accept, and damage to every entry of every declared state."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ConsumingSampler,
    LaneWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
)
from replaykit.adapters.recording_folder import _Committed
from replaykit.datasets.dataset_manifest import Array, AttachedFile, Manifest
from replaykit.datasets.hub_files import HubFile, HubListing
from replaykit.declared import (
    MOST,
    Count,
    Positive,
    check_fields,
    decode_state,
    encode_state,
    matching,
    read_value,
    vector,
    within,
)
from replaykit.distributed.shard_config import OwnState, SavedHead, ShardsState
from replaykit.feeds.trajectory_folder import FolderState
from replaykit.pace import LimiterCounts
from replaykit.samplers.priority_rules import SavedPriorities
from tests.checkpoint.values import plain
from tests.support.refusals import refuses

INT64S = Annotated[Any, vector(torch.int64)]


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (bool, [True, False], [0, 1, None, "true"]),
        (str, ["", "a"], [b"a", None, 3]),
        (int, [0, -5, 2**63 - 1], [True, 1.0, 2**63, -(2**63) - 1, np.int64(3), "1"]),
        (float, [0, -1.5, math.inf, 2**62], [True, math.nan, 2**70, "0", None, 1j]),
        (Count, [0, MOST], [-1, MOST + 1, 0.0, False]),
        (Positive | None, [None, 1], [0, "1"]),
        (Annotated[float, within(0, 1)], [0, 0.5, 1], [-0.1, 1.1, math.nan]),
        (Annotated[str, matching("[0-9]{2}")], ["07"], ["7", "077", "7a", "07\n", 7]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0, None]),
        (list[Count], [[], [1, 2]], [(1,), [1, -2], {}, "12"]),
        (tuple[Count, ...], [[], (1, 2)], [[1, -2], {1}, 1]),
        (tuple[str, int], [["a", 1], ("a", 1)], [["a"], [1, "a"], ["a", 1, 2]]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "1"}, {1: 1}, [], None]),
        (float | list[float], [1, [1.0]], ["1", [None], None]),
        (INT64S, [torch.arange(3)], [torch.zeros(3), torch.zeros(2, 2).long(), np.arange(3), [1]]),
    ],
)
def test_a_type_accepts_its_values_and_no_others(hint: Any, good: list[Any], bad: list[Any]):
    for value in good:
        assert plain(read_value(hint, value, "x")) == plain(
            tuple(value) if isinstance(value, list) and "tuple" in str(hint) else value
        )
    for value in bad:
        refuses(ValueError, r"^expected x(\.\w+)? as .*, got ", read_value, hint, value, "x")


@dataclass(frozen=True)
class _Inner:
    low: int
    high: int = 5

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got {self.low} and {self.high}")


@dataclass(frozen=True)
class _Outer:
    PREFIX: ClassVar[str] = "_"
    REST: ClassVar[str] = "more"
    inners: dict[str, _Inner]
    pair: tuple[Literal["x", "y"], tuple[Count, ...]]
    more: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "a clock: expected it as a mapping, got []"),
        ({"_inners": {}}, "a clock: expected _pair as a list of 2 items, got nothing"),
        ({"_inners": {"a": {}}}, "a clock: expected _inners.a.low as an int, got nothing"),
        ({"_inners": {"a": 3}}, "a clock: expected _inners.a as a mapping, got 3"),
        ({"_inners": {"a": {"low": 9}}}, "a clock: _inners.a: expected low <= high, got 9 and 5"),
        (
            {"_inners": {}, "_pair": ["z", []]},
            "a clock: expected _pair.0 as one of ('x', ",
        ),
        (
            {"_inners": {}, "_pair": ["x", [0, 1, -3]]},
            "a clock: expected _pair.1.2 as an int of at least 0, got -3",
        ),
    ],
)
def test_an_error_names_the_part_the_entry_and_what_came(state: Any, message: str):
    with pytest.raises(ValueError) as caught:
        decode_state(_Outer, state, "a clock")
    assert str(caught.value).startswith(message)


def test_a_state_is_encoded_as_it_was_saved():
    state = {"_inners": {"a": {"low": 1, "high": 2}}, "_pair": ["x", [3]], "other": [1]}
    found = decode_state(_Outer, state, "a clock")
    assert found == _Outer({"a": _Inner(1, 2)}, ("x", (3,)), {"other": [1]})
    assert encode_state(found) == state


def test_fields_of_any_record_can_be_checked():
    @dataclass
    class Options:
        mode: Literal["a", "b"] = "a"
        count: Annotated[int, within(0)] = 0
        other: Any = None

    Options.__annotations__.update(mode=Literal["a", "b"], count=Count, other=Any)
    check_fields(Options("b", 3, object()))
    with pytest.raises(ValueError, match="expected mode as one of"):
        check_fields(Options("c"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected count as an int of at least 0, got -1"):
        check_fields(Options(count=-1))


def _rows(count: int) -> TensorDict:
    number = torch.arange(count)
    after = {"done": (number % 5 == 4)[:, None], "reward": number[:, None] / 3}
    return TensorDict(
        {"x": number, "env": number % 3, "policy_version": -number, "next": after}, [count]
    )


def _buffer(**options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(12, lane_key="env" if "writer" in options else None)
    buffer = ReplayBuffer(storage=storage, batch_size=4, **options)
    buffer.extend(_rows(17))
    return buffer


def _sampler(sampler: Any) -> tuple[Any, Any]:
    buffer = _buffer(sampler=sampler)
    buffer.sample()
    return sampler._declared, sampler.state_dict()


def _writer(writer: Any, lane_key: str | None = None) -> tuple[Any, Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, lane_key=lane_key), writer=writer)
    buffer.extend(_rows(17))
    return writer._declared, writer.state_dict()


def _priorities() -> tuple[Any, Any]:
    sampler = PrioritizedSampler(alpha=0.5, beta=0.4)
    return SavedPriorities, _sampler(sampler)[1]


def _paced() -> tuple[Any, Any]:
    buffer = _buffer(rate_limiter=RateLimiter.min_size(2))
    buffer.sample()
    return LimiterCounts, buffer._pace.state()


def _manifest() -> tuple[Any, Any]:
    array = Array(("x",), "x.memmap", torch.float32, (6, 2), 48, 0xABC, {"source": "x"})
    ends = Array(("end",), "episodes/end.memmap", torch.int64, (3,), 24, 5)
    empty: dict[str, Any] = {"name": "a"}
    manifest = Manifest(
        converter=empty,
        identity=empty,
        source=empty,
        rows=6,
        batch=(6,),
        episodes=3,
        options=empty,
        report=empty,
        arrays=(array,),
        episode_arrays=(ends,),
        group_file=AttachedFile("episodes/groups.txt", 9, 3),
    )
    assert Manifest.parse(manifest.dump()) == manifest
    return Manifest, json.loads(manifest.dump())


def _of_shards(cls: Any, *more: Any) -> tuple[Any, Any]:
    generator = torch.Generator().get_state()
    layout = {"kind": "tensor", "dtype": "float32", "shape": [3]}
    pace = {"inserts": 3, "samples": 0}
    return cls, encode_state(cls(2, "env", 8, generator, layout, *more, pace=pace))


STATES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "rows without replacement": lambda: _sampler(SamplerWithoutReplacement()),
    "episodes": lambda: _sampler(SliceSamplerWithoutReplacement(slice_len=2)),
    "sequential": lambda: _sampler(SliceSampler(slice_len=2, draw="sequential")),
    "consuming": lambda: _sampler(ConsumingSampler(2)),
    "staleness": lambda: _sampler(StalenessAwareSampler()),
    "priorities": _priorities,
    "ring": lambda: _writer(RoundRobinWriter()),
    "best": lambda: _writer(TensorDictMaxValueWriter("x")),
    "lanes": lambda: _writer(LaneWriter(3), "env"),
    "pace": _paced,
    "head of shards": lambda: _of_shards(SavedHead, "0" * 32, [4, 4]),
    "state of shards": lambda: _of_shards(ShardsState, [{}, {}]),
    "one shard": lambda: (OwnState, {"before": -3, "writes": [["a", 1, 2, None]]}),
    "data set": _manifest,
    "listing": lambda: (
        HubListing,
        HubListing("me/data", "0" * 40, "http://hub", (HubFile("a.h5", 3, None, None),)).to_json(),
    ),
    "folder": lambda: (
        FolderState,
        encode_state(FolderState("fifo", {"0" * 16 + "-0": 3}, ["a.npz"], 4, 9, 1, 2)),
    ),
    "recording": lambda: (
        _Committed,
        encode_state(_Committed("replaykit-recording", 1, "rows-40", 40, 3, 1)),
    ),
}

GONE = object()
JUNK: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**62, 2**63, 2**70, -(2**70), 0.5, math.nan, math.inf),
    *("", "x", "../x", b"x", [], {}, [0], [[]], {"x": []}, [None], object(), {1: 2}),
    *(torch.zeros(0).long(), torch.zeros(3), torch.arange(12) - 1, torch.full((12,), 2**40)),
    *(torch.arange(12), torch.zeros(12).double(), torch.zeros(2, 2), torch.tensor(3)),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, (dict, list)):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [each for key, item in items for each in ((*path, key), *_places(item, (*path, key)))]


def _replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(state)
    target = found
    for part in path[:-1]:
        target = target[part]
    if value is GONE:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return found


@pytest.mark.pitfall("CK7")
@pytest.mark.parametrize("name", STATES)
def test_any_damage_of_any_entry_is_named_or_a_state_that_can_be_saved(name: str):
    """CK7: every entry of every state, each replaced by everything else, or gone."""
    cls, state = STATES[name]()
    decode_state(cls, {**state, "of a newer version": 1}, "this part")
    refused = total = 0
    for path in _places(state):
        for value in (*JUNK, GONE):
            damaged, total = _replaced(state, path, value), total + 1
            try:
                found = decode_state(cls, damaged, "this part")
            except ValueError as error:
                refused += 1
                text = str(error)
                # A wrong entry is named, or the entries of which it contradicts one.
                names = [part for part in path if isinstance(part, str)]
                assert text.startswith("this part: ")
                assert any(name.strip("_") in text for name in (names[-1], *state)), (path, text)
            else:
                again = decode_state(cls, encode_state(found), "this part")
                assert plain(encode_state(again)) == plain(encode_state(found))
    assert refused > total / 3
