"""``push`` and ``pull`` against a Hub on this machine."""

from __future__ import annotations

import numpy as np
import pytest

import replaykit.datasets
from tests.support import LoopbackHub


@pytest.fixture
def hub(lead_client_to, monkeypatch):
    with LoopbackHub() as served:
        lead_client_to(served)
        monkeypatch.setenv("HF_TOKEN", "any")
        yield served


def test_pull_gets_the_pushed_data_set(command, hub, demos, tmp_path):
    command("convert", demos, "--to", tmp_path / "data")
    done = command(
        "push", tmp_path / "data", "me/lift", "--license", "mit", "--tag", "robotics", "--json"
    )
    assert done.code == 0, done.out
    assert done.json["url"].endswith(hub.head("me/lift"))
    done = command("pull", "me/lift", "--root", tmp_path / "pulled", "--json")
    assert done.code == 0, done.out
    assert (done.json["name"], done.json["rows"]) == ("me/lift", 12)
    ours = replaykit.datasets.open(tmp_path / "data")
    theirs = replaykit.datasets.open(done.json["path"])
    assert done.json["content"] == ours.published.manifest.content_id()
    for key, column in ours.published.columns.items():
        np.testing.assert_array_equal(column.numpy(), theirs.published.columns[key].numpy())
    assert command("validate", done.json["path"]).code == 0
    done = command("push", tmp_path / "data", "me/lift", "--license", "mit")
    assert done.out.startswith("pushed: ")


def test_hub_errors_are_printed_in_one_sentence(command, hub, demos, tmp_path):
    done = command("pull", "me/absent", "--root", tmp_path / "pulled")
    assert done.code == 4
    assert "me/absent" in done.err
    assert done.err.count("\n") == 1
    done = command("push", tmp_path / "absent", "me/lift", "--license", "mit", "--json")
    assert (done.code, done.json["error"]["kind"]) == (4, "FileNotFoundError")
    command("convert", demos, "--to", tmp_path / "data")
    done = command("push", tmp_path / "data", "me/lift")
    assert done.code == 3
    assert "licen" in done.err
    done = command("push", tmp_path / "data", "lift", "--license", "mit")
    assert done.code == 3
    assert "owner/name" in done.err
