"""Files that several processes change in memory: mapped where large pages can be, and unmapped."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.filesystem import LARGE_PAGE, map_common
from replaykit.native import join_pages
from tests.support.refusals import refuses

SIZES = [10_000, LARGE_PAGE, 3 * LARGE_PAGE + 777]
needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
needs_memory = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")


def common(path: Path, nbytes: int) -> torch.Tensor:
    with path.open("a+b") as file:
        file.truncate(nbytes)
        return torch.frombuffer(map_common(file.fileno(), nbytes), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
def test_changes_reach_the_file_and_all_its_mappings(tmp_path: Path, nbytes: int):
    first, second = common(tmp_path / "x", nbytes), common(tmp_path / "x", nbytes)
    first[0], first[-1] = 5, 6
    assert (second[0], second[-1]) == (5, 6)
    child = os.fork()
    if child == 0:
        second[1] = 7
        os._exit(0)
    os.waitpid(child, 0)
    join_pages(first.data_ptr(), nbytes)  # a hint: nothing changes
    assert first[:2].tolist() == [5, 7]
    content = (tmp_path / "x").read_bytes()
    assert (len(content), content[:2], content[-1]) == (nbytes, b"\x05\x07", 6)
    assert not any(content[2:-1])


@needs_proc
@pytest.mark.parametrize("nbytes", SIZES)
def test_mapping_begins_at_a_large_page_and_is_unmapped_whole(tmp_path: Path, nbytes: int):
    def mappings() -> list[str]:
        return Path("/proc/self/maps").read_text().splitlines()

    before = sum("/x" in line for line in mappings())
    tensor = common(tmp_path / "x", nbytes)
    assert nbytes < LARGE_PAGE or tensor.data_ptr() % LARGE_PAGE == 0
    assert sum(line.endswith(str(tmp_path / "x")) for line in mappings()) == 1
    del tensor
    gc.collect()
    assert sum("/x" in line for line in mappings()) == before


def test_failing_common_mapping_raises_the_error_of_the_system(tmp_path: Path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2 * LARGE_PAGE)
        with pytest.raises(PermissionError):
            map_common(file.fileno(), 2 * LARGE_PAGE)
    for nbytes in (10, 2 * LARGE_PAGE):
        refuses(OSError, "Bad file descriptor", map_common, -2, nbytes)


@needs_memory
@needs_proc
def test_shared_rows_lie_in_large_pages_where_the_system_has_them():
    """Linux from 6.1 on joins them on request; other systems leave them as they are."""
    rb = ReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=4, shared=True)
    rb.extend({"x": torch.randn(10, 30), "y": torch.arange(10)})
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    if os.uname().sysname != "Linux" or release < (6, 1) or not known:
        pytest.skip("needs Linux 6.1 with large pages")
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    joined = sum(int(line.split()[1]) for line in smaps if line.startswith("ShmemPmdMapped"))
    if not joined:
        pytest.skip("the system had no large pages left")
    assert joined >= 8 * 1024
    assert rb["y"].tolist() == list(range(10))
