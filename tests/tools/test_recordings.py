"""Information about recordings, and their validation, against the rows that were recorded."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import pytest

from replaykit.adapters import RecordReplay, open_recording, record
from replaykit.inspection import kind_of, opened, validate
from tests.support.refusals import refuses


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    env = gymnasium.make("CartPole-v1")
    record(env, None, tmp_path / "cartpole", episodes=3, seed=0, durable=False)
    return tmp_path / "cartpole"


def test_facts_of_a_recording_equal_its_rows(recording: Path) -> None:
    rb = open_recording(recording)
    with opened(recording, most_bytes=None) as (facts, table):
        assert kind_of(recording) == facts.kind == "recording"
        assert (facts.rows, facts.warnings) == (len(rb), ())
        assert facts.episodes is not None
        assert facts.episodes.lengths.tolist() == rb.episodes.lengths.tolist()
        assert facts.episodes.ends == ("terminated",) * 3
        keys = {key.key: key for key in facts.keys}
        assert keys["observation"].shape == (4,)
        statistics = keys["episode"].statistics
        assert statistics is not None
        assert statistics["max"] == 2
        assert facts.nbytes == sum(leaf.nbytes for leaf in rb[:].values(True, True))
        assert (table.columns["action"].read(0, len(rb)) == rb[:]["action"].numpy()).all()


def test_flags_and_files_of_a_recording_are_validated(recording: Path) -> None:
    rows = len(open_recording(recording))
    assert [(found.ok, found.text) for found in validate(recording)] == [
        (True, f"{rows} rows"),
        (True, "3 episodes"),
    ]
    (home,) = recording.glob("rows-*")
    for file in home.rglob("*.memmap"):
        size = file.stat().st_size
        file.write_bytes(bytes(size))  # no flag ends an episode now
    wrong = [found for found in validate(recording) if not found.ok]
    assert [found.check for found in wrong] == ["flags and episode numbers"]
    for file in home.rglob("*.memmap"):
        file.write_bytes(b"")
    (found,) = validate(recording)
    assert not found.ok
    assert "expected" in found.text
    (recording / "recording.json").write_text("{")
    (found,) = validate(recording)
    assert "recording.json is damaged" in found.text


def test_a_recording_without_episodes_is_refused(tmp_path: Path) -> None:
    with RecordReplay(gymnasium.make("CartPole-v1"), tmp_path / "empty", durable=False):
        pass
    assert kind_of(tmp_path / "empty") == "recording"
    refuses(RuntimeError, "no episode yet", validate, tmp_path / "empty")
    with pytest.raises(RuntimeError, match="no episode yet"), opened(tmp_path / "empty"):
        pass
