"""Columns are mapped without keeping their files open, and unmapped when nobody uses them."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, remove_published, verify_published
from replaykit.datasets.sources import Sources
from replaykit.filesystem import Span, map_private, map_spans
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.limits import limited
from tests.support.refusals import refuses

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


def open_files() -> int:
    gc.collect()  # files of what other tests have let go
    return len(os.listdir("/proc/self/fd"))


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def publish(tmp_path: Path, leaves: int) -> Path:
    trial = make_trial(3, infos=False)
    trial["env_infos"] = {f"leaf{k}": np.arange(3.0) for k in range(leaves)}
    with RoboHiveWriter(tmp_path / "a.h5") as writer:
        writer.add_trial(**trial)
    ensure_dataset(
        tmp_path / "data",
        get_sources=lambda: Sources.local([tmp_path / "a.h5"]),
        layout=ROBOHIVE,
    )
    return tmp_path / "data"


def mapped(path: Path, content: bytes) -> torch.Tensor:
    path.write_bytes(content)
    with path.open("rb") as file:
        return torch.frombuffer(map_private(file.fileno(), len(content)), dtype=torch.uint8)


@needs_proc
def test_many_data_sets_can_be_open_at_once(tmp_path):
    """Forty data sets of about 80 columns, with room for a few dozen files."""
    path = publish(tmp_path, 34)
    before = open_files()
    with limited(resource.RLIMIT_NOFILE, before + 20):
        found = [open_published(path) for _ in range(40)]
        assert len(found[0].columns) > 80
        assert open_files() <= before  # other tests' threads may close files meanwhile
        assert all(data.columns["info", "leaf33"].tolist() == [0.0, 1.0] for data in found)


@needs_proc
def test_conversion_of_many_columns_needs_few_file_descriptors(tmp_path):
    with limited(resource.RLIMIT_NOFILE, open_files() + 20):
        path = publish(tmp_path, 150)
    assert open_published(path).columns["info", "leaf149"].tolist() == [0.0, 1.0]


@needs_proc
@pytest.mark.parametrize("left", [0, 1, 2])
def test_limit_on_open_files_is_no_damage(tmp_path, left):
    path = publish(tmp_path, 3)
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    most = max(spare) + 1
    for descriptor in spare[:left]:
        os.close(descriptor)
    calls = {
        "open": lambda: open_published(path),
        "verify": lambda: verify_published(path),
        "convert": lambda: ensure_dataset(
            tmp_path / "other",
            get_sources=lambda: Sources.local([tmp_path / "a.h5"]),
            layout=ROBOHIVE,
        ),
        "remove": lambda: remove_published(path),
    }
    names = ["open", "verify", "convert", "remove"] if left == 0 else ["convert"]
    names += ["open", "verify"] if left == 1 else []
    try:
        with limited(resource.RLIMIT_NOFILE, most):
            for name in names:
                with pytest.raises(OSError, match="Too many open files"):
                    calls[name]()
    finally:
        for descriptor in spare[left:]:
            os.close(descriptor)
    assert open_published(path).rows == 2


@needs_proc
def test_memory_is_unmapped_when_its_last_tensor_is_freed(tmp_path):
    tensor = mapped(tmp_path / "x", bytes(range(200)) * 100)
    part = tensor[100:].view(-1, 50)[3]
    array = part.numpy()
    del tensor, part
    gc.collect()
    assert is_mapped(tmp_path / "x")
    assert array[0] == 50
    del array
    gc.collect()
    assert not is_mapped(tmp_path / "x")


def test_changes_stay_in_the_process_and_in_a_forked_one(tmp_path):
    tensor = mapped(tmp_path / "x", bytes(10_000))
    tensor[:5] = 7
    child = os.fork()
    if child == 0:
        seen = int(tensor.sum())
        tensor[:] = 1
        del tensor
        gc.collect()
        os._exit(seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 35
    assert int(tensor.sum()) == 35
    assert (tmp_path / "x").read_bytes() == bytes(10_000)


def test_a_tensor_over_the_memory_can_be_pickled_and_sent(tmp_path, forkserver):
    tensor = mapped(tmp_path / "x", b"abc")
    assert pickle.loads(pickle.dumps(tensor)).tolist() == [97, 98, 99]
    ours, theirs = forkserver.Pipe()
    process = forkserver.Process(target=_add_one, args=(tensor, theirs))
    process.start()
    theirs.close()  # so that a process that dies ends the wait
    assert ours.recv() == [98, 99, 100]
    process.join(60)
    assert process.exitcode == 0


def _add_one(tensor: torch.Tensor, pipe: object) -> None:
    pipe.send((tensor + 1).tolist())


def test_tensors_may_outlive_the_finalizers_of_the_process(tmp_path, run_python):
    """At exit memory is not taken from under those who still use it."""
    (tmp_path / "x").write_bytes(b"abc")
    program = """
import atexit, sys, torch
def late():
    print(tensor.tolist())
from replaykit.filesystem import map_private
import weakref
class Late:
    pass
keep = Late()
# A finalizer of one's own, run in the middle of the others.
weakref.finalize(keep, late)
with open(sys.argv[1], "rb") as file:
    tensor = torch.frombuffer(map_private(file.fileno(), 3), dtype=torch.uint8)
atexit.register(late)
"""
    done = run_python(program, tmp_path / "x", fresh=True)
    assert done.stdout.split("\n")[:2] == ["[97, 98, 99]"] * 2


def test_failing_private_mapping_raises_the_error_of_the_system(tmp_path):
    with (tmp_path / "x").open("wb") as file, pytest.raises(PermissionError):
        map_private(file.fileno(), 10)
    refuses(OSError, "Bad file descriptor", map_private, -1, 10)


# -- parts of files in a row ----------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_spans_of_files_join_into_one_tensor_and_files_stay_unchanged(data, tmp_path_factory):
    page = mmap.PAGESIZE
    lengths = st.integers(0, 3 * page) | st.sampled_from([page, 2 * page])
    folder, spans, expected = tmp_path_factory.mktemp("spans"), [], bytearray()
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    files = []
    for number in range(data.draw(st.integers(1, 5))):
        expected += bytes(data.draw(lengths) if data.draw(st.booleans()) else 0)  # a hole
        nbytes = data.draw(lengths)
        # As often where the file can be mapped as where it cannot.
        phase = len(expected) if data.draw(st.booleans()) else data.draw(lengths)
        offset = phase % page + page * data.draw(st.integers(0, 2))
        content = rng.bytes(offset + nbytes + data.draw(st.integers(0, 9)))
        (folder / f"{number}").write_bytes(content)
        files.append((folder / f"{number}", content))
        opened = os.open(folder / f"{number}", os.O_RDONLY)
        spans.append(Span(opened, offset, len(expected), nbytes))
        expected += content[offset : offset + nbytes]
    expected += bytes(data.draw(lengths) + 1)
    memory = map_spans(len(expected), spans)
    for span in spans:
        os.close(span.descriptor)
    found = np.frombuffer(memory, np.uint8)
    assert found.tobytes() == expected
    found[:] = 7
    assert found.min() == found.max() == 7
    assert all(file.read_bytes() == content for file, content in files)


def test_a_span_that_a_file_does_not_have_is_an_error(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    with (tmp_path / "x").open("rb") as file, pytest.raises(OSError, match="ends 1 bytes too"):
        map_spans(10, [Span(file.fileno(), 1, 5, 3)])
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_spans(10 * mmap.PAGESIZE, [Span(-1, 0, 0, 4 * mmap.PAGESIZE)])
