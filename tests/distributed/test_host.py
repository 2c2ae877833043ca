"""What the actor does with messages, called here without Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from replaykit import (
    LazyTensorStorage,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from replaykit.distributed import host as module
from replaykit.distributed.host import Host
from replaykit.distributed.protocol import pack, unpack
from replaykit.distributed.requests import unpack_reply
from tests.conftest import make_rows
from tests.distributed.stand_in import Untold
from tests.support.refusals import refuses


def host_of(cls: type = ReplayBuffer, **arguments: Any) -> Host:
    made = Host(cls, {"storage": LazyTensorStorage(50), "batch_size": 4, **arguments})
    made.ready()
    return made


def write(host: Host, counts: list[int], start: int = 0, **columns: Any) -> list[Any]:
    rows = make_rows(start, sum(max(count, 1) for count in counts), **columns)
    return list(unpack(host.write(counts, pack(rows))))


class Failing(ReplayBuffer):
    """Stores what it gets, and then says that the disk is full."""

    def add(self, data: Any, **keywords: Any) -> Any:
        super().add(data, **keywords)
        raise OSError("no space left")

    def extend(self, data: Any, **keywords: Any) -> Any:
        super().extend(data, **keywords)
        raise OSError("no space left")


def test_writes_that_fail_half_way_are_not_made_again() -> None:
    """Only what was refused is tried one by one; all of the others are told."""
    host = host_of(Failing)
    outcomes = write(host, [0, 0, 3])
    assert [done for done, _ in outcomes] == [False] * 3
    assert all(type(error) is OSError and "no space" in str(error) for _, error in outcomes)
    assert host._buffer["id"].tolist() == [0, 1, 2, 3, 4]


def test_subclass_with_custom_add_gets_each_write_alone() -> None:
    class Own(ReplayBuffer):
        def add(self, data: Any, **keywords: Any) -> Any:
            return super().add(data.set("id", data["id"] + 100), **keywords)

    host = host_of(Own)
    assert write(host, [0, 0]) == [(True, 0), (True, 1)]
    assert host._buffer["id"].tolist() == [100, 101]


def test_rows_are_written_singly_if_a_limiter_lacks_room() -> None:
    """Together they would wait for a sample that waits for one of them."""
    host = host_of(rate_limiter=RateLimiter.queue(8))
    write(host, [0] * 3)
    writer = threading.Thread(target=write, args=(host, [0] * 6, 3), daemon=True)
    writer.start()
    batch = host._buffer.sample(timeout=30)
    writer.join(30)
    assert not writer.is_alive()
    assert batch.shape == (4,)
    assert host._buffer["id"].tolist() == list(range(9))


def test_record_of_passes_does_not_grow_with_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest are forgotten: their handles have had their last answers long ago."""
    monkeypatch.setattr(module, "_MOST_PASSES", 3)
    host = host_of(sampler=SamplerWithoutReplacement())
    write(host, [4])
    for handle in range(10):
        assert len(unpack(host.step(f"{handle}", 0))) == 4
        assert unpack(host.step(f"{handle}", 0)) is None
        assert unpack(host.step(f"{handle}", 0)) is None  # asked for ahead
    assert list(host._passes) == ["7", "8", "9"]
    assert len(unpack(host.step("9", 1))) == 4


def test_failed_batch_loses_no_other_batch_of_its_message() -> None:
    """It is told as if it had been asked for alone, with where it was raised."""
    calls = iter(range(100))

    def third_fails(rows: Any) -> Any:
        if next(calls) == 2:
            raise Untold(1, 2)
        return rows

    host = host_of(transform_factory=lambda: third_fails)
    write(host, [50])
    with pytest.raises(RuntimeError, match="Untold: 1 and 2") as raised:
        [unpack_reply(answer) for answer in host.sample_4()[2:3]]
    assert "third_fails" in str(raised.value.__cause__)
    answers = host.sample_2() + host.sample_4()
    assert [unpack_reply(answer).shape for answer in answers] == [(4,)] * 6
    assert {type(answer) for answer in answers} == {bytes}


def test_steps_of_a_message_end_with_the_pass() -> None:
    host = host_of(sampler=SamplerWithoutReplacement())
    write(host, [10])
    found = [unpack(answer) for answer in host.step_4("one", 0, True)]
    assert [None if batch is None else len(batch) for batch in found] == [4, 4, 2, None]
    assert [unpack(answer) for answer in host.step_2("one", 0, True)] == [None, None]
    assert [len(unpack(answer)) for answer in host.step_2("one", 1, True)] == [4, 4]


def test_a_message_for_several_batches_draws_none_that_would_be_used_up() -> None:
    host = host_of(consume_after_n_samples=1)
    write(host, [10])
    for answer in [*host.sample_2(), *host.step_2("one", 0, True)]:
        refuses(ValueError, r"prefetch.*ConsumingSampler", unpack_reply, answer)
    assert len(host._buffer) == 10


def test_unpicklable_error_loses_no_other_result() -> None:
    """Its kind and text arrive, and so do the results of the rows that are stored."""

    class Odd(ReplayBuffer):
        def add(self, data: Any, **keywords: Any) -> Any:
            if data["id"] == 1:
                raise Untold(1, 2)
            return super().add(data, **keywords)

    outcomes = write(host_of(Odd), [0, 0, 0])
    assert outcomes[0] == (True, 0)
    assert outcomes[2] == (True, 1)
    assert type(outcomes[1][1]) is RuntimeError
    assert "Untold: 1 and 2" in str(outcomes[1][1])
    with pytest.raises(RuntimeError, match="Untold: 1 and 2"):
        host_of(Odd).call("add", [pack(make_rows(1, 1)[0])], {})
