"""Somebody uses a folder as long as any process does that said so, or was forked by one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replaykit.recovery.locks import ProcessRegistry

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_registry_is_empty_after_the_last_member_leaves(tmp_path: Path) -> None:
    path = tmp_path / "members"
    assert not ProcessRegistry.is_unused(path), "there is no such folder to clear"
    members = [ProcessRegistry(path) for _ in range(3)]
    for member in members:
        assert not ProcessRegistry.is_unused(path)
        member.drop()
        member.drop()
    assert ProcessRegistry.is_unused(path)
    assert ProcessRegistry.is_unused(path), "asking takes nothing"


def test_deleted_member_leaves_the_registry(tmp_path: Path) -> None:
    member = ProcessRegistry(tmp_path / "members")
    del member
    assert ProcessRegistry.is_unused(tmp_path / "members")


@needs_fork
def test_forked_child_stays_registered_after_its_parent_leaves(tmp_path: Path) -> None:
    path = tmp_path / "members"
    member = ProcessRegistry(path)
    waiting, leave = os.pipe()
    child = os.fork()
    if not child:
        os.close(leave)
        os.read(waiting, 1)
        os._exit(0)
    member.drop()
    assert not ProcessRegistry.is_unused(path)
    os.close(leave)
    os.waitpid(child, 0)
    assert ProcessRegistry.is_unused(path)
