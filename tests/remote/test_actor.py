"""The buffer as an actor of a real Ray that runs here, and without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
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

ROOT = Path(replaykit.__file__).parents[1]

# Ray's own start says this and that about what it will do one day.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of this test run alone, whose workers import this checkout."""
    if " " in sys.executable:
        pytest.skip("Ray starts no workers with an interpreter whose path has a space")
    ray = pytest.importorskip("ray")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    yield ray
    ray.shutdown()


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
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_actor_does_what_a_local_buffer_does(cls: Any, ray: Any, tmp_path: Path):
    """TH11: same calls, same results; varying batch sizes are served."""
    call = ray.get
    remote = cls.as_remote({"num_cpus": 0.5}).remote(**arguments())
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
    ray.kill(remote)


def _on(remote: Any, function: Any) -> Any:
    """The same call, on an actor."""

    class Forward:
        def __getattr__(self, name: str) -> Any:
            return getattr(remote, name).remote

    return function(Forward())


@pytest.mark.pitfall("TH12")
def test_errors_of_an_actor_keep_their_kind(ray: Any):
    """TH12: ``except ValueError`` works across the actor."""
    remote = ReplayBuffer.as_remote().remote(storage=lambda: LazyTensorStorage(5), batch_size=2)
    with pytest.raises(RuntimeError, match="empty storage"):
        ray.get(remote.sample.remote())
    ray.get(remote.extend.remote(content(2)))
    with pytest.raises(ValueError, match="'next', 'x'"):
        ray.get(remote.extend.remote(content(2).exclude(("next", "x"))))
    with pytest.raises(KeyError, match="unknown"):
        ray.get(remote.set_.remote("unknown", torch.zeros(2)))
    assert ray.get(remote.__len__.remote()) == 2
    ray.kill(remote)


def test_the_options_reach_ray(ray: Any):
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
