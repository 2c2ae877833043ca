"""The core's checksum is zlib's."""

from __future__ import annotations

import random
import threading
import zlib

import numpy as np
import pytest

from replaykit import native
from replaykit.native import crc32


def test_crc32_equals_zlib_for_any_length_and_alignment():
    chance = random.Random(0)
    data = chance.randbytes(200_000)
    lengths = [0, 1, 63, 64, 65, 1023, *range(1024, 1024 + 130), 4096, 65_536, 199_000]
    for length in lengths:
        for first in (0, 1, 7, 16):
            start = chance.randrange(2**32)
            part = memoryview(data)[first : first + length]
            assert crc32(part, start) == zlib.crc32(part, start)
            assert crc32(part) == zlib.crc32(part)
    for same in (bytes(5000), b"\xff" * 5000):
        assert crc32(same) == zlib.crc32(same)


def test_crc32_continues_from_part_to_part():
    chance = random.Random(1)
    data, found, at = chance.randbytes(300_000), 0, 0
    while at < len(data):
        count = chance.choice([1, 100, 1024, 5003, 70_000])
        found, at = crc32(data[at : at + count], found), at + count
    assert found == zlib.crc32(data)
    rows = np.arange(6000, dtype=np.float32).reshape(60, 100)
    assert crc32(rows) == zlib.crc32(rows)


def test_threads_can_share_the_bytes():
    data = random.Random(2).randbytes(3_000_000)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(crc32(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [zlib.crc32(data)] * 4


def test_core_refuses_lengths_that_are_no_multiple_of_16():
    core = native.core
    if core is None or not core.has_fast_crc32:
        pytest.skip("no core, or a processor without PCLMULQDQ")
    for length in (0, 48, 65, 1000):
        with pytest.raises(ValueError, match="multiple of 16"):
            core.crc32(np.zeros(length, np.uint8), 0)
