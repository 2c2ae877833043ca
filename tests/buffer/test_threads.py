"""Threads that share a buffer: no row is lost, mixed or seen half written."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictRoundRobinWriter,
)
from tests import effort
from tests.buffer.building import STORAGES, in_threads

WIDTH = 200


def numbered(count: int, number: int) -> TensorDict:
    """Rows all of whose values are one number; wide enough that copying them takes a while."""
    return TensorDict(
        {
            "a": torch.full((count, WIDTH), number),
            "b": torch.full((count,), float(number), dtype=torch.float64),
            "next": {"c": torch.full((count, 3), number, dtype=torch.int32)},
        },
        [count],
    )


def mixed(data: TensorDict) -> list[int]:
    """Rows whose values are not one number."""
    wrong = (
        (data["a"] != data["a"][:, :1]).any(1)
        | (data["b"] != data["a"][:, 0])
        | (data["next", "c"] != data["a"][:, :1]).any(1)
    )
    return wrong.nonzero().flatten().tolist()


@pytest.mark.pitfall("TH2")
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("way", ["extend", "add", "edit"])
def test_a_row_is_never_seen_half_written(kind: str, prefetch: int | None, way: str):
    """TH2: torn reads, by ``sample`` and iteration; an ``extend`` is there as a whole or not."""
    buffer = ReplayBuffer(
        storage=STORAGES[kind](16),
        sampler=SamplerWithoutReplacement(),
        batch_size=5,
        prefetch=prefetch,
        transform=lambda data: data,
    )
    buffer.extend(numbered(16, 0))
    end = time.monotonic() + effort.seconds(0.5)
    reads = [0]

    def write() -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            if way == "extend":
                buffer.extend(numbered(16, number))
            elif way == "add":
                buffer.add(numbered(1, number)[0])
            else:
                buffer[3:9] = numbered(6, number)

    def read() -> None:
        while time.monotonic() < end or reads[0] <= 5:
            for data in (buffer.sample(), buffer.sample(9), buffer.next(), buffer.sample(16)):
                assert data is None or not mixed(data)
                assert data is None or way != "extend" or len(data["b"].unique()) == 1
            reads[0] += 1

    in_threads(write, read, read)


@pytest.mark.filterwarnings("ignore:.*sampler is left out")
@pytest.mark.pitfall("TH3")
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("full", [1.5, pytest.param(30.0, marks=pytest.mark.long)])
def test_any_mix_of_calls_from_eight_threads_leaves_a_whole_buffer(
    kind: str, prefetch: int | None, full: float, tmp_path: Any
):
    """Also setters, ``empty`` and saving; errors are the documented ones only."""
    seconds, path = effort.seconds(full), tmp_path
    make = STORAGES[kind]
    buffer = ReplayBuffer(
        storage=make(12),
        sampler=RandomSampler(),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=4,
        prefetch=prefetch,
        generator=torch.Generator(),
    )
    buffer.extend(numbered(12, 1))
    buffer.dumps(path)
    state = buffer.state_dict()
    columns = kind in ("tensor", "memmap")

    def whole(data: Any) -> None:
        if data is not None:
            assert not mixed(data)

    def patch(chance: random.Random) -> None:
        batch, info = buffer.sample(3, return_info=True)
        if "index_generation" in info:
            buffer.update_if_present(
                index=info["index"],
                generation=info["index_generation"],
                patch={k: batch[k] for k in ("a", "b", ("next", "c"))},
            )

    def edit(chance: random.Random) -> None:
        buffer[chance.randrange(4)] = numbered(1, chance.randrange(100))[0]

    def read_transformed(chance: random.Random) -> None:
        buffer[chance.randrange(3) :]  # a view without transforms, hence not compared
        buffer["b"]

    def iterate(chance: random.Random) -> None:
        for turn, batch in enumerate(buffer):
            whole(batch)
            if turn == 3:
                return

    calls: list[tuple[int, Any]] = [
        (6, lambda c: buffer.extend(numbered(c.randrange(20), c.randrange(100)))),
        (3, lambda c: buffer.add(numbered(1, c.randrange(100))[0])),
        (8, lambda c: whole(buffer.sample())),
        (4, lambda c: whole(buffer.sample(c.randrange(1, 9)))),
        (3, lambda c: whole(buffer.next())),
        (2, iterate),
        (2, read_transformed),
        (2, lambda c: buffer.can_sample()),
        (2, lambda c: (buffer.stats(), repr(buffer), len(buffer), buffer.write_count)),
        (1, lambda c: buffer.empty(c.random() < 0.5)),
        (1, lambda c: buffer.set_sampler(RandomSampler())),
        (1, lambda c: buffer.set_sampler(SamplerWithoutReplacement())),
        (1, lambda c: buffer.set_writer(RoundRobinWriter(track_generations=True))),
        (1, lambda c: buffer.set_writer(TensorDictRoundRobinWriter())),
        (1, lambda c: buffer.set_storage(make(12))),
        (1, lambda c: buffer.set_rng(torch.Generator())),
        (1, lambda c: buffer.append_transform(lambda data: data)),
        (1, lambda c: buffer.insert_transform(0, lambda data: data)),
        (1, lambda c: buffer.mark_update(torch.tensor([0]))),
        (1, lambda c: buffer.update_tensordict_priority(buffer.sample(2))),
        (1, lambda c: buffer.dumps(path)),
        (1, lambda c: buffer.loads(path)),
        (1, lambda c: buffer.state_dict()),
        (1, lambda c: buffer.load_state_dict(state)),
        (1, lambda c: copy.deepcopy(buffer)),
        (2, edit),
        (2, patch),
    ]
    documented = (
        "empty storage",  # emptied meanwhile
        "nothing is stored",  # a storage without its first row
        "track_generations",  # a writer that does not
        "has no columns to patch",
        "no key",
        "expected a row in",  # edited beyond what is left
        "expected rows in",  # the same through a transform
        "expected the state of a",  # the sampler is of another kind than the one saved
    )
    functions, weights = [call for _, call in calls], [weight for weight, _ in calls]
    end = time.monotonic() + seconds
    done = [0] * 8

    def work(number: int) -> None:
        chance = random.Random(number)
        # On a busy machine some threads have hardly begun by then.
        while time.monotonic() < end or done[number] <= 3:
            (call,) = chance.choices(functions, weights)
            try:
                call(chance)
            except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
                if not any(text in str(error) for text in documented):
                    raise
            if len(buffer.transform) > 5:
                buffer.transform.entries.clear()
            done[number] += 1

    in_threads(*[lambda n=n: work(n) for n in range(8)], timeout=seconds + 60)
    # Nothing is left in a state that cannot be: it can be filled, read, passed over and saved.
    if columns:
        buffer.set_writer(RoundRobinWriter(track_generations=True))
    buffer.set_sampler(SamplerWithoutReplacement())
    before = len(buffer)
    if before:
        whole(buffer[:])
    ledger = buffer.storage.ledger
    assert 0 <= before <= 12
    assert (ledger.length, ledger.cursor < 12) == (before, True)
    assert sorted(ledger.write_order().tolist()) == list(range(before))
    index = buffer.extend(numbered(12, 77))
    assert sorted(index.tolist()) == list(range(12))
    assert sum(len(batch) for batch in buffer) == 12
    assert (buffer[:]["b"] == 77).all()
    buffer.dumps(path / "end")
    buffer.loads(path / "end")
    assert len(buffer) == 12


@pytest.mark.pitfall("TH3")
def test_writers_lose_no_row():
    """Eight threads write distinct ids into a buffer that has room for all of them."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000))

    def write(number: int) -> None:
        for turn in range(50):
            start = number * 500 + turn * 10
            if turn % 2:
                buffer.extend(torch.arange(start, start + 10))
            else:
                for value in range(start, start + 10):
                    buffer.add(torch.tensor(value))

    in_threads(*[lambda n=n: write(n) for n in range(8)])
    assert (len(buffer), buffer.write_count) == (4000, 4000)
    assert buffer[:].sort().values.tolist() == list(range(4000))


@pytest.mark.pitfall("TH3")
def test_the_first_write_of_two_threads_fixes_one_schema():
    for _ in range(30):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        refused: list[str] = []

        def write(value: Any, buffer: Any = buffer, refused: Any = refused) -> None:
            try:
                buffer.extend(value)
            except ValueError as error:
                refused.append(str(error))

        in_threads(
            lambda w=write: w(TensorDict({"x": torch.zeros(3)}, [3])),
            lambda w=write: w(TensorDict({"y": torch.zeros(3)}, [3])),
        )
        assert len(refused) == 1
        assert len(buffer) == 3


@pytest.mark.pitfall("TH2")
def test_reads_during_set_storage_use_one_storage():
    """Rows read from a list are stacked as a list's, whatever storage has come meanwhile."""
    listed, tensors = ListStorage(8), LazyTensorStorage(8)
    buffer = ReplayBuffer(storage=listed)
    for storage in (tensors, listed):
        buffer.set_storage(storage)
        buffer.extend(numbered(8, 3))
    end = time.monotonic() + effort.seconds(0.7)

    def swap() -> None:
        while time.monotonic() < end:
            buffer.set_storage(tensors)
            buffer.set_storage(listed)

    def read() -> None:
        while time.monotonic() < end:
            for data in (buffer.sample(4), buffer[:4], buffer[[1, 2]]):
                assert isinstance(data, TensorDict)
                assert not mixed(data)

    in_threads(swap, read, read)


# -- rows of many leaves ---------------------------------------------------------------------------


LAYOUTS = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}
SLOTS = 37


@pytest.mark.pitfall("TH2")
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_concurrent_reads_never_mix_leaves_of_two_rows(kind: str, contiguous: bool):
    """Two threads write round the end of the ring, three read, with threads of the core's own.

    Small leaves go with their record and wide ones alone, from the caller's memory, and without
    the interpreter lock: only the storage's own lock keeps them together.
    """
    buffer = ReplayBuffer(storage=LAYOUTS[kind](SLOTS), batch_size=90, contiguous=contiguous)
    dtypes = {"a": torch.int64, "b": torch.float64, "c": torch.int32, "d": torch.float16}

    def rows(count: int, number: int) -> TensorDict:
        small = {key: torch.full((count, 3), number, dtype=t) for key, t in dtypes.items()}
        wide = torch.full((count, 6000), number, dtype=torch.int32)
        pixels = torch.full((count, 9, 60), number % 128, dtype=torch.uint8)
        return TensorDict({**small, "wide": wide, "next": {"p": pixels, "r": wide[:, :1]}}, [count])

    def whole(data: TensorDict) -> None:
        number = data["a"][:, :1]
        for key, leaf in data.items(True, True):
            if key == ("next", "p"):
                assert (leaf.flatten(1) == number % 128).all()
            elif key != "index":
                assert (leaf == number).all(), key

    buffer.extend(rows(SLOTS, 0))
    end = time.monotonic() + effort.seconds(1.5)
    written, read_ = [0, 0], [0, 0, 0]

    def write(which: int) -> None:
        chance = random.Random(which)
        while time.monotonic() < end or written[which] <= 5:
            number = 2 * chance.randrange(500) + which
            if chance.random() < 0.3:
                buffer.add(rows(1, number)[0])
            else:
                data = rows(chance.randrange(1, 60), number)
                if chance.random() < 0.3:  # not in one piece: taken apart, and brought into it
                    data["a"] = torch.stack([data["a"]] * 2, -1)[..., 0]
                buffer.extend(data)
            written[which] += 1

    def read(which: int) -> None:
        while time.monotonic() < end or read_[which] <= 3:
            whole(buffer.sample())
            whole(buffer.storage.get(torch.arange(SLOTS).flip(0)))
            read_[which] += 1

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        in_threads(
            *[lambda w=w: write(w) for w in (0, 1)], *[lambda w=w: read(w) for w in range(3)]
        )
    finally:
        torch.set_num_threads(before)
    whole(buffer[:])
