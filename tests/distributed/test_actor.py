"""The buffer as an actor of a real Ray that runs here, and without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import (
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from replaykit.remote import DEFAULT_REMOTE_CLASS_CONFIG
from tests.ray_cluster import RAY_MARKS

ROOT = Path(replaykit.__file__).parents[1]

pytestmark = RAY_MARKS


def content(count: int, start: int = 0) -> TensorDict:
    ids = torch.arange(start, start + count)
    return TensorDict({"id": ids, "next": {"x": ids[:, None].float()}}, [count])


def arguments() -> dict[str, Any]:
    return {
        "storage": lambda: LazyTensorStorage(20),
        "sampler": SamplerWithoutReplacement,
        "batch_size": 4,
        "transform_factory": lambda: lambda td: td.set("twice", td["id"] * 2),
    }


@pytest.mark.pitfall("TH11")
def test_actor_matches_local_buffer(ray_cluster: Any, tmp_path: Path):
    """TH11: same calls, same results; varying batch sizes are served."""
    cls = TensorDictReplayBuffer
    call = ray_cluster.get
    remote = cls.as_remote({"num_cpus": 0}).remote(**arguments())
    local = cls(**arguments())
    for buffer_call in (
        lambda b: b.extend(content(15)),
        lambda b: b.add(content(1, 15)[0]),
    ):
        local_result = buffer_call(local)
        assert torch.equal(
            torch.as_tensor(call(_on(remote, buffer_call))), torch.as_tensor(local_result)
        )
    assert call(remote.__len__.remote()) == len(local) == 16
    local.dumps(tmp_path)
    call(remote.loads.remote(str(tmp_path)))
    assert call(remote.stats.remote()) == local.stats()
    seen: list[int] = []
    for size in (4, 7, None, 1):
        batch = call(remote.sample.remote(size))
        assert len(batch) == (size or 4)
        assert torch.equal(batch["twice"], batch["id"] * 2)
        assert torch.equal(batch["index"], batch["id"])
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(16))
    assert call(remote.can_sample.remote(4))
    batch = call(remote.next.remote())
    assert len(batch) == 4
    _check_errors(remote, call)
    ray_cluster.kill(remote)


def _on(remote: Any, function: Any) -> Any:
    """The same call, on an actor."""

    class Forward:
        def __getattr__(self, name: str) -> Any:
            return getattr(remote, name).remote

    return function(Forward())


def _check_errors(remote: Any, call: Any) -> None:
    """TH12: ``except ValueError`` works across the actor."""
    with pytest.raises(ValueError, match="'next', 'x'"):
        call(remote.extend.remote(content(2).exclude(("next", "x"))))
    with pytest.raises(KeyError, match="unknown"):
        call(remote.set_.remote("unknown", torch.zeros(2)))
    call(remote.empty.remote())
    with pytest.raises(RuntimeError, match="empty storage"):
        call(remote.sample.remote())


def test_the_options_reach_ray(ray_cluster: Any):
    assert DEFAULT_REMOTE_CLASS_CONFIG == {"num_cpus": 1, "num_gpus": 0}
    default = ReplayBuffer.as_remote()
    assert default._default_options["num_cpus"] == 1
    assert default._default_options["num_gpus"] == 0
    given = ReplayBuffer.as_remote({"num_cpus": 0.25, "max_restarts": 3})
    assert given._default_options["num_cpus"] == 0.25
    assert given._default_options["max_restarts"] == 3
    assert "num_cpus" not in ReplayBuffer.as_remote({})._default_options
    assert DEFAULT_REMOTE_CLASS_CONFIG == {"num_cpus": 1, "num_gpus": 0}


def test_without_ray_the_extra_is_named(monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=r"pip install 'replaykit\[ray\]'"):
        ReplayBuffer.as_remote()
    with pytest.raises(RuntimeError, match="ray"):
        TensorDictReplayBuffer.as_remote({"num_cpus": 1})


@pytest.mark.pitfall("TH10")
def test_importing_the_package_does_not_import_ray():
    """TH10, G7: also the part about remote buffers waits until it is used."""
    program = (
        "import sys, replaykit, replaykit.remote; replaykit.DEFAULT_REMOTE_CLASS_CONFIG; "
        "sys.exit('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0
