"""``read_torchrl``: what TorchRL saved, read without TorchRL, and nothing else taken for it."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    read_torchrl,
)
from replaykit.errors import CheckpointError
from tests.checkpoint.building import equal
from tests.support.refusals import refuses

FIXTURES = Path(__file__).parent / "fixtures"
PRIORITIZED, RANDOM = FIXTURES / "torchrl_prioritized", FIXTURES / "torchrl_random"
GENERATOR = Path(__file__).parent / "make_torchrl.py"
WRAPPED = [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]


def rows(numbers: list[int]) -> TensorDict:
    """What ``make_torchrl.rows`` gives of these rows."""
    number = torch.tensor(numbers)
    return TensorDict(
        {
            "obs": torch.stack([number, number + 0.5], -1).float(),
            "pixels": number[:, None].expand(-1, 4).to(torch.uint8),
            "half": number.to(torch.bfloat16),
            "next": {"reward": number[:, None].double(), "done": (number % 5 == 4)[:, None]},
        },
        [len(numbers)],
    )


def priorities(buffer: ReplayBuffer) -> list[float]:
    return buffer.sampler.state_dict()["_priorities"].tolist()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy of the prioritized one, to be changed."""
    return Path(shutil.copytree(PRIORITIZED, tmp_path / "saved"))


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def check_prioritized(folder: Path) -> None:
    buffer = read_torchrl(folder)
    assert type(buffer.storage) is LazyTensorStorage
    assert type(buffer.sampler) is PrioritizedSampler
    assert (len(buffer), buffer.storage.max_size, buffer.write_count) == (10, 10, 13)
    assert equal(buffer[:], rows(WRAPPED))
    sampler = buffer.sampler
    assert (sampler.alpha, sampler.beta, sampler.eps) == (0.7, 0.5, 1e-8)
    assert sampler.dtype == torch.float32
    assert priorities(buffer) == pytest.approx([n / 10 for n in range(1, 11)])
    assert sampler.default_priority == 1.0
    batch = buffer.sample()
    assert len(batch) == 4
    assert equal(batch.select(*rows([0]).keys(True, True)), rows(WRAPPED)[batch["index"]])
    assert buffer.extend(rows([13, 14])).tolist() == [3, 4]
    assert equal(buffer[:], rows([10, 11, 12, 13, 14, *WRAPPED[5:]]))
    # 10..12 go on after 9, and end with the load.
    assert [len(episode) for episode in read_torchrl(folder).episodes] == [2, 5, 3]


def check_random(folder: Path) -> None:
    buffer = read_torchrl(folder)
    assert type(buffer.sampler) is RandomSampler
    assert (len(buffer), buffer.storage.max_size, buffer.write_count) == (7, 10, 7)
    assert equal(buffer[:], rows([*range(7)]))
    assert len(buffer.sample()) == 3
    assert buffer.extend(rows([7])).tolist() == [7]


def check_lanes(folder: Path) -> None:
    buffer = read_torchrl(folder)
    storage = buffer.storage
    assert (storage.ndim, storage.lanes, len(storage), storage.max_size) == (2, (4,), 12, 16)
    # Its rows lie as [time, lane]; the batch was [lane, time].
    expected = rows([*range(12)]).reshape(4, 3).transpose(0, 1)
    assert equal(storage[:], expected.contiguous())


def check_tensor(folder: Path) -> None:
    buffer = read_torchrl(folder)
    assert buffer[:][:, 0].tolist() == [6, 7, 2, 3, 4, 5]
    assert buffer.write_count == 8
    assert buffer.extend(torch.zeros(1, 2)).tolist() == [2]


CHECKS = {
    "prioritized": check_prioritized,
    "random": check_random,
    "lanes": check_lanes,
    "tensor": check_tensor,
}


@pytest.mark.parametrize("kind", ["prioritized", "random"])
def test_saved_directories_are_read_and_not_changed(kind: str):
    folder = FIXTURES / f"torchrl_{kind}"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    CHECKS[kind](folder)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs torchrl")
def test_checkpoints_of_the_installed_torchrl_are_read(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, GENERATOR, tmp_path, *CHECKS],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for kind, check in CHECKS.items():
        check(tmp_path / kind)


def test_read_buffer_continues_with_the_saved_generator_state():
    expected = (PRIORITIZED / "rng_state" / "rng_state.memmap").read_bytes()
    buffers = [read_torchrl(PRIORITIZED) for _ in range(2)]
    state = buffers[0].state_dict()["_rng"]
    assert bytes(state["state"].tolist()) == expected
    assert torch.equal(*[buffer.sample()["index"] for buffer in buffers])
    given = torch.Generator().manual_seed(5)
    buffer = read_torchrl(PRIORITIZED, generator=given)
    assert torch.equal(
        buffer.state_dict()["_rng"]["state"], torch.Generator().manual_seed(5).get_state()
    )


def test_damaged_generator_state_is_named(saved: Path):
    file = saved / "rng_state" / "rng_state.memmap"
    file.write_bytes(b"\xff" * file.stat().st_size)
    refuses(ValueError, "state of a generator in rng_state, got", read_torchrl, saved)


def test_read_torchrl_writes_rows_into_a_scratch_dir(tmp_path: Path):
    buffer = read_torchrl(RANDOM, scratch_dir=tmp_path / "rows")
    assert type(buffer.storage) is LazyMemmapStorage
    assert (tmp_path / "rows" / "records.memmap").exists()
    assert equal(buffer[:], rows([*range(7)]))
    with pytest.raises(TypeError, match="storage or scratch_dir, got both"):
        read_torchrl(RANDOM, storage=LazyTensorStorage(10), scratch_dir=tmp_path)


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_read_torchrl_fills_a_given_storage(make: Any):
    storage = make(25)
    buffer = read_torchrl(PRIORITIZED, storage=storage, batch_size=6)
    assert buffer.storage is storage
    stored = storage.get(range(10))
    stored = torch.stack(stored) if isinstance(stored, list) else stored
    assert equal(stored, rows([*range(3, 13)]))  # in write order, as after every load
    assert priorities(buffer) == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 0.1, 0.2, 0.3])
    assert len(buffer.sample()) == 6


def test_smaller_storage_keeps_the_newest_rows():
    with pytest.warns(UserWarning, match="6 rows do not fit"):
        buffer = read_torchrl(PRIORITIZED, storage=LazyTensorStorage(4))
    assert equal(buffer[:], rows([9, 10, 11, 12]))
    assert priorities(buffer) == pytest.approx([1.0, 0.1, 0.2, 0.3])


def test_read_torchrl_uses_a_given_sampler():
    folder = PRIORITIZED
    buffer = read_torchrl(folder, sampler=PrioritizedSliceSampler(alpha=1, beta=1, slice_len=2))
    assert buffer.sampler.alpha == 0.7
    assert priorities(buffer) == pytest.approx([n / 10 for n in range(1, 11)])
    assert len(buffer.sample()) == 4
    for sampler in (SliceSampler(slice_len=2), SamplerWithoutReplacement(), RandomSampler()):
        assert len(read_torchrl(folder, sampler=sampler).sample()) == 4
    plain = RANDOM
    buffer = read_torchrl(plain, sampler=PrioritizedSampler(alpha=0.6, beta=0.4))
    assert buffer.sampler.alpha == 0.6
    assert priorities(buffer) == [1.0] * 7
    assert len(buffer.sample()) == 3


def test_buffer_read_from_torchrl_can_be_saved_and_loaded(tmp_path: Path):
    buffer = read_torchrl(PRIORITIZED)
    buffer.dumps(tmp_path)
    other = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=PrioritizedSampler(alpha=1, beta=1), batch_size=4
    )
    other.loads(tmp_path)
    for _ in range(3):
        assert bool((other.sample() == buffer.sample()).all())


def column(folder: Path, key: str, values: torch.Tensor) -> dict[str, Any]:
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    file = folder.joinpath(*key.split(".")).with_name(f"{key.split('.')[-1]}.memmap")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(raw)
    return {"device": "cpu", "shape": list(values.shape), "dtype": str(values.dtype)}


def write(folder: Path, stored: Any, count: int, cursor: int, **writer: Any) -> Path:
    """Writes a directory as TorchRL does."""
    for part in ("storage", "writer"):
        (folder / part).mkdir(parents=True)
    pytree = {}
    if isinstance(stored, TensorDict):
        _write_tensordict(folder / "storage", stored)
    else:
        leaves = stored if isinstance(stored, dict) else {"_-single-tensor-_": stored}
        pytree = {key: column(folder / "storage", key, leaf) for key, leaf in leaves.items()}
    (folder / "storage" / "storage_metadata.json").write_text(
        json.dumps({"metadata": pytree, "is_pytree": bool(pytree), "len": count})
    )
    (folder / "writer" / "metadata.json").write_text(json.dumps({"cursor": cursor, **writer}))
    (folder / "buffer_metadata.json").write_text(json.dumps({"batch_size": 2}))
    return folder


def _write_tensordict(folder: Path, stored: TensorDict) -> None:
    folder.mkdir(exist_ok=True)
    record: dict[str, Any] = {}
    for key, value in stored.items():
        if isinstance(value, TensorDict):
            record[key] = {"type": "TensorDict"}
            _write_tensordict(folder / key, value)
        else:
            record[key] = {**column(folder, key, value), "is_nested": False}
    record |= {"shape": list(stored.batch_size), "device": "cpu"}
    (folder / "meta.json").write_text(json.dumps(record))


def test_read_torchrl_reads_every_dtype(tmp_path: Path):
    whole = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    other = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    values = {str(dtype)[6:]: torch.arange(6).view(3, 2).to(dtype) for dtype in [*whole, *other]}
    stored = TensorDict({**values, "none": torch.zeros(3, 0)}, [3])
    buffer = read_torchrl(write(tmp_path / "x", stored, 2, 2))
    assert equal(buffer[:], stored[:2])


def test_length_and_cursor_decide_if_a_second_dimension_is_lanes(tmp_path: Path):
    """Whether the second dimension counts as rows follows from length and cursor."""
    stored = TensorDict({"x": torch.arange(12).view(6, 2)}, [6, 2])
    flat = read_torchrl(write(tmp_path / "flat", stored, 4, 4))
    assert (flat.storage.ndim, len(flat)) == (1, 4)
    assert flat.storage[:]["x"].tolist() == stored["x"][:4].tolist()
    lanes = read_torchrl(write(tmp_path / "lanes", stored, 8, 4, write_count=4))
    assert (lanes.storage.ndim, lanes.storage.lanes, len(lanes)) == (2, (2,), 8)
    full = read_torchrl(write(tmp_path / "full", stored, 12, 5))
    assert (full.storage.ndim, len(full), full.write_count) == (2, 12, 22)
    with pytest.raises(CheckpointError, match=r"12 rows .* shape \[6, 2\] and a storage with ndim"):
        read_torchrl(tmp_path / "full", storage=LazyTensorStorage(12))


def test_read_torchrl_restores_dictionaries(tmp_path: Path):
    leaves = {"a": torch.arange(4), "b.c": torch.ones(4, 2), "b.d_<dot>_e": torch.zeros(4)}
    buffer = read_torchrl(write(tmp_path / "x", leaves, 3, 3))
    found = buffer[:]
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"]["c"].shape == (3, 2)
    assert list(found["b"]) == ["c", "d.e"]


@pytest.mark.parametrize("escaped", [True, False])
def test_read_torchrl_restores_escaped_keys(escaped: bool, tmp_path: Path):
    """The file of a key that holds a character which some file system does not take."""
    keys = {"a b": "a%20b", "50%": "50%25", "x:y": "x%3Ay", "\u00e4": "\u00e4", "b%20": "b%2520"}
    if escaped:
        keys |= {
            "a/b": "a%2Fb",
            "..": "%2E%2E",
            ".": "%2E",
            "": "%",
            "a\\b": "a%5Cb",
            "\x7f": "%7F",
        }
    part = {key: torch.arange(4) + number for number, key in enumerate(keys)}
    stored = TensorDict({**part, "t": TensorDict(part, [4])}, [4])
    for folder in (tmp_path / "x" / "storage", tmp_path / "x" / "storage" / "t"):
        folder.mkdir(parents=True)
        names = {key: name if escaped else key for key, name in keys.items()}
        found = {key: column(folder, "raw", value) for key, value in part.items()}
        for key, name in names.items():
            (folder / f"{name}.memmap").write_bytes(part[key].numpy().tobytes())
        (folder / "raw.memmap").unlink()
        inner = {"t": {"type": "TensorDict"}} if folder.name == "storage" else {}
        (folder / "meta.json").write_text(json.dumps({**found, **inner, "shape": [4]}))
    write(tmp_path / "y", torch.arange(4), 3, 3)
    shutil.rmtree(tmp_path / "y" / "storage")
    shutil.copytree(tmp_path / "x" / "storage", tmp_path / "y" / "storage")
    (tmp_path / "y" / STORAGE).write_text(json.dumps({"metadata": {}, "len": 3}))
    assert equal(read_torchrl(tmp_path / "y")[:], stored[:3])


@pytest.mark.parametrize("key", ["shape", "device", "_type"])
@pytest.mark.parametrize("nested", [False, True])
def test_column_without_its_record_is_named(key: str, nested: bool, tmp_path: Path):
    """A key that is called as an entry of the record of the whole, which has taken its place."""
    value: Any = torch.arange(4)
    stored = TensorDict({"x": value, key: TensorDict({"x": value}, [4]) if nested else value}, [4])
    folder = write(tmp_path / "x", stored, 3, 3)
    edit(folder / "storage" / "meta.json", _type="<class 'tensordict._td.TensorDict'>")
    refuses(ValueError, rf"record of each column .* got none of \('{key}',\)", read_torchrl, folder)


def test_read_torchrl_reads_an_empty_buffer(tmp_path: Path):
    buffer = read_torchrl(write(tmp_path / "x", TensorDict({"x": torch.arange(4)}, [4]), 0, 0))
    assert len(buffer) == 0
    assert buffer.extend(TensorDict({"x": torch.arange(3)}, [3])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 2.5])
def test_sampling_probabilities_equal_the_saved_ones(alpha: float, tmp_path: Path):
    raw = torch.rand(50, dtype=torch.float64) * 10
    value = (raw + 1e-3) ** alpha
    folder = write(tmp_path / "x", TensorDict({"x": torch.arange(64)}, [64]), 50, 50)
    (folder / "sampler").mkdir()
    column(folder / "sampler", "sumtree", torch.cat([value, torch.zeros(14)]))
    (folder / "sampler" / "sampler_metadata.json").write_text(
        json.dumps(
            {"_alpha": alpha, "_beta": 1, "_eps": 1e-3, "_max_priority": 3.0, "_max_capacity": 64}
        )
    )
    buffer = read_torchrl(folder)
    assert buffer.sampler.dtype == (torch.float64 if alpha else torch.float32)
    found = (buffer.sampler.state_dict()["_priorities"] + 1e-3) ** alpha
    torch.testing.assert_close(found / found.sum(), value / value.sum(), check_dtype=False)
    if alpha:
        torch.testing.assert_close(buffer.sampler.state_dict()["_priorities"], raw)
    assert buffer.sampler.default_priority == pytest.approx(
        max(3.0, float(raw.max()) if alpha else 0)
    )


FILES = sorted(
    str(file.relative_to(PRIORITIZED))
    for file in (PRIORITIZED).rglob("*")
    if file.is_file() and file.name not in ("prefetch.pkl", "mintree.memmap")
)


@pytest.mark.parametrize("name", FILES)
def test_a_torn_file_is_named(name: str, saved: Path):
    file = saved / name
    whole = file.read_bytes()
    damaged = [whole[:-1], whole + b"x" if name.endswith("memmap") else whole + b"}", b""]
    for content in damaged:
        file.write_bytes(content)
        refuses(CheckpointError, file.name, read_torchrl, saved)
    file.unlink()
    (saved / "elsewhere").write_bytes(whole)
    file.symlink_to(saved / "elsewhere")
    refuses(CheckpointError, f"{file.name} is damaged: it is a link", read_torchrl, saved)
    file.unlink()
    kind: Any = FileNotFoundError if name == "buffer_metadata.json" else CheckpointError
    if name == "sampler/sampler_metadata.json":
        kind = ValueError  # the state of another sampler, then
    refuses(kind, r"buffer_metadata|is missing|which is not read", read_torchrl, saved)


def _meta(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "storage" / "meta.json", **entries)


def _leaf(**entries: Any) -> Callable[[Path], None]:
    record = {"device": "cpu", "shape": [10, 2], "dtype": "torch.float32", "is_nested": False}
    return _meta(obs={**record, **entries})


def _of(name: str, **entries: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / name, **entries)


STORAGE, SAMPLER = "storage/storage_metadata.json", "sampler/sampler_metadata.json"
WRITER = "writer/metadata.json"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (_leaf(dtype="torch.load"), CheckpointError, "meta.json is damaged: .*torch dtype"),
        (_leaf(dtype=5), CheckpointError, "meta.json is damaged"),
        (_leaf(shape=[10, -2]), CheckpointError, "meta.json is damaged: shape"),
        (_leaf(shape=[2**61, 2**61]), CheckpointError, "meta.json is damaged: shape"),
        (_leaf(shape=[20, 1]), CheckpointError, r"'obs' of shape \[20, 1\] in \[10\]"),
        (_leaf(shape=[10, 3]), CheckpointError, "obs.memmap is torn: expected 120 bytes, got 80"),
        (_leaf(is_nested=True), ValueError, r"nested one under \('obs',\)"),
        (_meta(shape=[11]), CheckpointError, "of shape .* in .11."),
        (_meta(shape=[]), CheckpointError, "no rows of shape"),
        (_meta(_type="<class 'a.Stack'>"), ValueError, "expected a TensorDict .* got <class 'a.St"),
        (_meta(text={"type": "NonTensorData"}), ValueError, r"NonTensorData under \('text',\)"),
        (_meta(**{"../obs": {"shape": [10], "dtype": "torch.bool"}}), ValueError, "names of files"),
        (_meta(**{"..": {"type": "TensorDict"}}), ValueError, "names of files"),
        (_meta(**{"/etc": {"type": "TensorDict"}}), ValueError, "names of files"),
        (_of(STORAGE, len=11), CheckpointError, "11 rows and the cursor at 3"),
        (_of(STORAGE, len=9), CheckpointError, "9 rows and the cursor at 3"),
        (_of(STORAGE, len="10"), CheckpointError, "storage_metadata.json is damaged: len"),
        (_of(STORAGE, is_pytree=True), CheckpointError, "storage_metadata.json is damaged: no col"),
        (
            _of(STORAGE, is_pytree=True, metadata={"0": {}}),
            ValueError,
            "of a list or a tuple, which is not read",
        ),
        (
            _of(STORAGE, is_pytree=True, metadata={"/etc/passwd": {"shape": [1]}}),
            ValueError,
            "names of files",
        ),
        (_of(WRITER, cursor=10), CheckpointError, "10 rows and the cursor at 10"),
        (_of(WRITER, cursor=-1), CheckpointError, "writer/metadata.json is damaged: cursor"),
        (_of(WRITER, rank_key="x"), ValueError, "expected the state of a RoundRobinWriter"),
        (_of(SAMPLER, _alpha=-1), CheckpointError, "sampler_metadata.json is damaged: _alpha"),
        (_of(SAMPLER, _eps="1"), CheckpointError, "sampler_metadata.json is damaged: _eps"),
        (_of(SAMPLER, _beta=float("nan")), CheckpointError, "damaged: _beta"),
        (_of(SAMPLER, _max_capacity=9.0), CheckpointError, "_max_capacity 9.0 for 10 rows"),
        (_of(SAMPLER, _max_capacity=11), CheckpointError, "sumtree.memmap is torn"),
        (_of("buffer_metadata.json", batch_size=0), CheckpointError, "batch_size 0"),
    ],
)
def test_unsupported_and_damaged_content_is_named(
    change: Callable[[Path], None], error: type[Exception], match: str, saved: Path
):
    change(saved)
    refuses(error, match, read_torchrl, saved)


def test_invalid_priorities_are_refused(saved: Path):
    values = torch.ones(10, dtype=torch.float64)
    for number in (float("nan"), -1.0, float("inf")):
        values[3] = number
        column(saved / "sampler", "sumtree", values)
        refuses(CheckpointError, r"sumtree.memmap is damaged: expected finite", read_torchrl, saved)
    values[3] = 2.0
    column(saved / "sampler", "sumtree", values)
    read_torchrl(saved)
    edit(saved / SAMPLER, _alpha=1e-5)
    refuses(CheckpointError, r"sumtree.memmap is damaged: .* not powers 1e-05", read_torchrl, saved)


class _Poison:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_no_pickle_is_opened(saved: Path, tmp_path: Path):
    poison = pickle.dumps(_Poison(tmp_path / "ran"))
    (saved / "prefetch.pkl").write_bytes(poison)
    (saved / "transform.t").write_bytes(poison)
    with pytest.warns(UserWarning, match=r"transform.t is a pickle and is not read"):
        buffer = read_torchrl(saved)
    assert equal(buffer[:], rows(WRAPPED))
    shutil.rmtree(saved / "sampler")
    (saved / "sampler").mkdir()
    (saved / "sampler" / "consuming_sampler.pt").write_bytes(poison)
    (saved / "transform.t").unlink()
    with pytest.raises(
        ValueError, match=r"got .*consuming_sampler.pt, which is not read; give sam"
    ):
        read_torchrl(saved)
    assert len(read_torchrl(saved, sampler=RandomSampler())) == 10
    (saved / "storage" / "meta.json").unlink()
    (saved / "storage" / "meta.pt").write_bytes(poison)
    with pytest.raises(ValueError, match=r"meta.pt is a pickle, as tensordict wrote it before 0.3"):
        read_torchrl(saved, sampler=RandomSampler())
    assert not (tmp_path / "ran").exists()


def test_directories_of_other_formats_are_refused(saved: Path, tmp_path: Path):
    refuses(FileNotFoundError, "no checkpoint of TorchRL", read_torchrl, tmp_path)
    read_torchrl(saved).dumps(tmp_path / "own")
    refuses(FileNotFoundError, r"expected buffer_metadata.json", read_torchrl, tmp_path / "own")
    with pytest.raises(ValueError, match="expected the state of a 'max_value' writer"):
        read_torchrl(saved, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
    (saved / "storage" / "next").rename(saved / "next")
    (saved / "storage" / "next").symlink_to(saved / "next")
    refuses(CheckpointError, "next is damaged: it is a link", read_torchrl, saved)
