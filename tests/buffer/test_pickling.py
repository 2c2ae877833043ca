"""Copies and pickles of a buffer: whole, independent, and refused where they would diverge."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
from typing import Any

import pytest
import torch

from replaykit import (
    ImmutableDatasetWriter,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
)
from replaykit.storages.memory import by_value, from_value
from tests import effort
from tests.buffer.building import KINDS, buffer_of, check_whole, rows, same, storage_of, unchanged
from tests.support.refusals import refuses

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


def plus_one(data: Any) -> Any:
    """A transform that can be pickled."""
    return data.set("id", data["id"] + 1)


def used(kind: str, **options: Any) -> ReplayBuffer:
    buffer = buffer_of(
        kind,
        8,
        sampler="without",
        writer=RoundRobinWriter(track_generations=True),
        batch_size=3,
        transform=plus_one,
        **{"seed": 0, **options},
    )
    buffer.extend(rows(11))
    buffer.sample()
    return buffer


@pytest.mark.pitfall("CK13")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_nothing_with_the_original(how: str, kind: str):
    """CK13: whichever of the two goes first, and whatever either of them does."""
    buffer = used(kind)
    copied = COPIES[how](buffer)
    taken = copied.state_dict()
    buffer.extend(rows(5, 40))
    buffer[0] = rows(1, 90)[0]
    buffer.append_transform(plus_one)
    buffer.set_sampler(copy.deepcopy(buffer.sampler))
    same(taken, copied.state_dict())
    assert len(copied.transform) == 1
    untouched = buffer.state_dict()
    copied.empty()
    copied.extend(rows(3, 70))
    same(untouched, buffer.state_dict())
    assert copied["id"].tolist() == [71, 72, 73]
    for part in ("writer", "sampler"):  # which are those of the copy alone
        with pytest.raises(ValueError, match="another buffer uses"):
            ReplayBuffer(storage=storage_of(kind), **{part: getattr(copied, part)})
    del copied
    same(untouched, buffer.state_dict())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_copies_of_buffers_over_one_storage_share_one_storage(how: str, kind: str):
    storage = storage_of(kind, 8)
    pair = [ReplayBuffer(storage=storage), ReplayBuffer(storage=storage)]
    pair[0].extend(rows(3))
    one, two = COPIES[how](pair)
    assert one.storage is two.storage is not storage
    one.extend(rows(2, 3))
    assert two["id"].tolist() == [0, 1, 2, 3, 4]
    assert len(pair[0]) == 3


@pytest.mark.parametrize("how", COPIES)
def test_states_before_the_first_row_are_copied_too(how: str):
    delayed = ReplayBuffer(storage=ListStorage, delayed_init=True, generator=torch.Generator())
    copied = COPIES[how](delayed)
    assert not copied.initialized
    copied.extend([1, 2])
    assert (len(copied), delayed.initialized) == (2, False)
    empty = COPIES[how](buffer_of("tensor"))
    empty.extend(rows(2))
    assert len(empty) == 2
    closed = buffer_of(filled=3, batch_size=2, prefetch=2)
    closed.shutdown()
    refuses(RuntimeError, "shut down", COPIES[how](closed).sample)


@pytest.mark.pitfall("TH2")
def test_a_buffer_can_be_copied_while_it_is_written():
    """TH2: no row is copied half."""
    buffer = buffer_of("tensor", 50)
    end = time.monotonic() + effort.seconds(1.0)

    def write() -> None:
        start = 0
        while time.monotonic() < end:
            buffer.extend(rows(7, start))
            start += 7

    writer = threading.Thread(target=write)
    writer.start()
    while time.monotonic() < end:
        copied = copy.deepcopy(buffer)
        if len(copied):
            check_whole(copied[:])
            copied.extend(rows(1))
    writer.join()


# -- spawned processes ----------------------------------------------------------------------------


def count_rows(buffer: ReplayBuffer, answers: Any) -> None:
    batch = buffer.sample(4)
    answers.put((len(buffer), sorted(buffer["id"].tolist()), tuple(batch["index"].shape)))


def start(buffer: ReplayBuffer) -> Any:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=count_rows, args=(buffer, answers))
    process.start()
    answer = answers.get(timeout=120)
    process.join(30)
    assert process.exitcode == 0
    return answer


@pytest.mark.pitfall("TH1")
@pytest.mark.parametrize("kind", ["list", "tensor", "memmap"])
def test_a_writable_buffer_is_not_handed_to_a_spawned_process(kind: str):
    """TH1: rows written by two processes were lost in silence; here it is an error at once."""
    buffer = buffer_of(kind, filled=5)
    unchanged(buffer, RuntimeError, lambda: start(buffer), "spawned process.*dumps")
    assert pickle.loads(pickle.dumps(buffer))["id"].tolist() == [0, 1, 2, 3, 4]


def test_a_list_is_not_handed_to_a_spawned_process():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(rows(3))
    buffer.set_writer(ImmutableDatasetWriter())
    refuses(RuntimeError, "ListStorage cannot be handed to a spawned process", start, buffer)
    for copied in COPIES.values():  # a copy is as immutable
        refuses(RuntimeError, "doesn't allow writing", copied(buffer).extend, rows(1))


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_a_read_only_buffer_can_be_handed_to_a_spawned_process(kind: str):
    buffer = buffer_of(kind, filled=5, batch_size=2, prefetch=2)
    buffer.set_writer(ImmutableDatasetWriter())
    buffer.sample()
    assert start(buffer) == (5, [0, 1, 2, 3, 4], (4,))


def test_tensors_from_read_only_memory_are_copied():
    """As Ray hands out what lies in its store, where a write would end the process."""
    apart: list[pickle.PickleBuffer] = []
    message = pickle.dumps(by_value(torch.arange(3)), protocol=5, buffer_callback=apart.append)
    kept = [bytes(buffer.raw()) for buffer in apart]
    found = from_value(pickle.loads(message, buffers=[memoryview(block) for block in kept]))
    found += 1
    assert found.tolist() == [1, 2, 3]
    assert kept == [bytes(torch.arange(3).numpy().data)]
