"""A state is there whole, or the one before it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from replaykit.recovery.journal import States
from tests.support.refusals import refuses


def test_the_latest_state_is_found_again(tmp_path: Path) -> None:
    states = States(tmp_path)
    assert states.sequence == 0
    assert not len(states.latest())
    for number in range(1, 6):
        numbers = np.arange(number * 200)
        states.commit(numbers)
        again = States(tmp_path)
        assert again.sequence == number
        assert again.latest().tolist() == numbers.tolist()


@pytest.mark.parametrize("damage", range(24, 32 + 8 * 3))
def test_previous_state_is_used_after_a_torn_state(tmp_path: Path, damage: int) -> None:
    states = States(tmp_path, durable=True)
    states.commit(np.array([1, 2, 3]))
    states.commit(np.array([4, 5, 6]))
    with open(tmp_path / "state-0.bin", "r+b") as file:
        file.seek(damage)
        byte = file.read(1)
        file.seek(damage)
        file.write(bytes([byte[0] ^ 1]))
    again = States(tmp_path)
    assert (again.sequence, again.latest().tolist()) == (1, [1, 2, 3])


def test_previous_state_is_used_if_the_new_length_of_a_file_was_lost(tmp_path: Path) -> None:
    states = States(tmp_path, durable=True)
    for number in (1, 2):
        states.commit(np.array([number]))
    states.commit(np.arange(1000))
    os.truncate(tmp_path / "state-1.bin", 4096)
    again = States(tmp_path, durable=True)
    assert (again.sequence, again.latest().tolist()) == (2, [2])
    again.commit(np.arange(1000))
    assert States(tmp_path).latest().tolist() == list(range(1000))


@pytest.mark.parametrize("damage", range(16, 32 + 8 * 3, 5))
def test_a_state_that_no_loss_of_power_can_have_torn_is_damaged(
    tmp_path: Path, damage: int
) -> None:
    states = States(tmp_path)
    states.commit(np.array([1, 2, 3]))
    states.commit(np.array([4, 5, 6]))
    content = bytearray((tmp_path / "state-0.bin").read_bytes())
    content[damage] ^= 1
    (tmp_path / "state-0.bin").write_bytes(content)
    refuses(ValueError, r"state-0\.bin", States, tmp_path)


def test_a_commit_that_the_disk_refused_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = States(tmp_path, durable=True)
    states.commit(np.array([1]))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    refuses(OSError, "error", states.commit, np.array([2]))
    assert (states.sequence, States(tmp_path).latest().tolist()) == (1, [1])
    monkeypatch.undo()
    states.commit(np.array([3]))
    assert (states.sequence, States(tmp_path).latest().tolist()) == (2, [3])
