"""Keywords of TorchRL's constructors: accepted, or one sentence; and those that nobody has."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import replaykit
from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RateLimiter,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from replaykit.datasets import (
    D4RLExperienceReplay,
    MinariExperienceReplay,
    RobosetExperienceReplay,
    VD4RLExperienceReplay,
)
from tests.support.refusals import refuses

PRIORITY = {"alpha": 0.6, "beta": 0.4}

NEEDED: dict[str, dict[str, Any]] = {
    "ReplayBuffer": {},
    "TensorDictReplayBuffer": {},
    "PrioritizedReplayBuffer": PRIORITY,
    "TensorDictPrioritizedReplayBuffer": PRIORITY,
    "ListStorage": {},
    "LazyStackStorage": {},
    "LazyTensorStorage": {"max_size": 10},
    "LazyMemmapStorage": {"max_size": 10},
    "RandomSampler": {},
    "SamplerWithoutReplacement": {},
    "PrioritizedSampler": PRIORITY,
    "SliceSampler": {"slice_len": 2},
    "SliceSamplerWithoutReplacement": {"slice_len": 2},
    "PrioritizedSliceSampler": {**PRIORITY, "slice_len": 2},
    "StalenessAwareSampler": {},
    "RoundRobinWriter": {},
    "TensorDictRoundRobinWriter": {},
    "TensorDictMaxValueWriter": {},
    "ImmutableDatasetWriter": {},
}
"""Classes of TorchRL that are here too, and what they cannot be made without."""

DATASETS = [
    (RobosetExperienceReplay, "DAPG(expert)/door_v2d-v1"),
    (D4RLExperienceReplay, "hopper-medium-v2"),
    (MinariExperienceReplay, "D4RL/door/human-v2"),
    (VD4RLExperienceReplay, "main/walker_walk/random/84px"),
]


def defaults(cls: type) -> dict[str, Any]:
    """The keywords of a class's constructor with their defaults, those that it hands on too."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for one in parameters:
            if one.default is not one.empty:
                found.setdefault(one.name, one.default)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


@pytest.mark.parametrize("name", NEEDED)
def test_every_keyword_of_torchrl_is_accepted_with_its_default(name: str) -> None:
    peers = pytest.importorskip("torchrl.data"), pytest.importorskip("torchrl.data.replay_buffers")
    peer = next((getattr(one, name) for one in peers if hasattr(one, name)), None)
    if peer is None:
        peer = getattr(pytest.importorskip("torchrl.data.replay_buffers.samplers"), name)
    own = getattr(replaykit, name)
    # A `sampler` of None is refused by the buffer that makes its own.
    given = {key: value for key, value in defaults(peer).items() if key not in ("sampler",)}
    assert type(own(**{**given, **NEEDED[name]})).__name__ == name


@pytest.mark.parametrize(("cls", "dataset_id"), DATASETS, ids=lambda given: str(given)[:40])
def test_every_keyword_of_a_data_set_of_torchrl_is_accepted_with_its_default(
    cls: Any, dataset_id: str, tmp_path: Path
) -> None:
    peer = getattr(pytest.importorskip("torchrl.data.datasets"), cls.__name__)
    given = {**defaults(peer), "root": tmp_path, "download": False}
    if "totensor" in given:  # images are not made floats unless a transform does it
        assert given.pop("totensor") is True
    for name in ("batch_size", "storage", "sampler", "writer"):
        given.pop(name, None)
    refuses(FileNotFoundError, "download=True", cls, dataset_id, 32, **given)


@pytest.mark.parametrize(
    ("index", "given", "instead"),
    [
        (1, {"direct_download": False}, "without the d4rl package"),
        (1, {"from_env": True}, "leave it out"),
        (1, {"use_truncated_as_done": False}, r"\('next', 'terminated'\)"),
        (1, {"terminate_on_end": True}, r"Policies\(unrecorded='keep'\)"),
        (2, {"load_from_local_minari": True}, "source="),
        (3, {"totensor": True}, "ImageScale"),
        (3, {"image_size": 64}, "transform="),
        (3, {"num_workers": 4}, "workers="),
        (0, {"checkpointer": object()}, "dumps"),
    ],
)
def test_unsupported_value_for_a_data_set_names_the_alternative(
    index: int, given: dict[str, Any], instead: str, tmp_path: Path
) -> None:
    cls, dataset_id = DATASETS[index]
    name = next(iter(given))
    with pytest.raises(ValueError, match=rf"^{cls.__name__} does not take {name}=.*{instead}"):
        cls(dataset_id, 32, root=tmp_path, download=False, **given)
    assert not list(tmp_path.iterdir())


def test_keywords_of_one_data_set_are_unknown_to_another(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"RobosetExperienceReplay.*'direct_download'"):
        RobosetExperienceReplay(DATASETS[0][1], 32, root=tmp_path, direct_download=True)
    with pytest.raises(TypeError, match=r"did you mean 'split_trajs'\?"):
        RobosetExperienceReplay(DATASETS[0][1], 32, root=tmp_path, split_traj=True)
    with pytest.raises(TypeError, match="'storage'"):
        RobosetExperienceReplay(DATASETS[0][1], 32, root=tmp_path, storage=ListStorage())


@pytest.mark.parametrize(
    ("cls", "given", "instead"),
    [
        (ReplayBuffer, {"checkpointer": object()}, "dumps"),
        (ReplayBuffer, {"service_backend": "ray"}, "RayReplayBuffer"),
        (TensorDictReplayBuffer, {"service_backend_options": {"a": 1}}, "RayReplayBuffer"),
        (TensorDictReplayBuffer, {"transport": "ray"}, "RayReplayBuffer"),
        (ReplayBuffer, {"transport_options": {"backend": "gloo"}}, "RayReplayBuffer"),
        (PrioritizedReplayBuffer, {**PRIORITY, "sync": False}, "shared=True"),
        (TensorDictPrioritizedReplayBuffer, {**PRIORITY, "sync": False}, "shared=True"),
        (LazyTensorStorage, {"max_size": 9, "shared_init": True}, "shared=True"),
        (LazyMemmapStorage, {"max_size": 9, "shared_init": True}, "shared=True"),
        (LazyTensorStorage, {"max_size": 9, "consolidated": True}, "one piece"),
        (LazyTensorStorage, {"max_size": 9, "cleanup_memmap": False}, "scratch_dir"),
        (SliceSampler, {"slice_len": 2, "fragmented": True}, "lane_key="),
        (SliceSampler, {"slice_len": 2, "step_key": "time"}, "lane_key="),
    ],
)
def test_unsupported_keyword_value_names_the_alternative(
    cls: Any, given: dict[str, Any], instead: str
) -> None:
    refuses(ValueError, rf"^{cls.__name__} does not take .*{instead}", cls, **given)


def public_classes() -> list[type]:
    found = [getattr(replaykit, name) for name in sorted(replaykit.__all__)]
    return [one for one in found if inspect.isclass(one)]


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_error_for_an_unexpected_keyword_names_the_called_class(cls: type) -> None:
    starts_ray = cls.__name__ == "RayReplayBuffer"
    if inspect.isabstract(cls) or vars(cls).get("_is_protocol") or starts_ray:
        pytest.skip("cannot be made so")
    refuses(TypeError, rf"^{cls.__name__}[.(]", cls, no_such_keyword=1)


@pytest.mark.parametrize(
    ("cls", "given", "wrong", "meant"),
    [
        (ReplayBuffer, {}, "batchsize", "batch_size"),
        (TensorDictReplayBuffer, {}, "priority_keys", "priority_key"),
        (PrioritizedReplayBuffer, PRIORITY, "transfrom", "transform"),
        (TensorDictPrioritizedReplayBuffer, {"beta": 0.4}, "alfa", "alpha"),
        (PrioritizedSampler, PRIORITY, "max_capcity", "max_capacity"),
        (PrioritizedSliceSampler, PRIORITY, "slice_length", "slice_len"),
        (SliceSampler, {}, "num_slice", "num_slices"),
        (LazyTensorStorage, {"max_size": 3}, "dims", "ndim"),
        (LazyMemmapStorage, {"max_size": 3}, "scratchdir", "scratch_dir"),
    ],
)
def test_the_nearest_keyword_is_named(
    cls: Any, given: dict[str, Any], wrong: str, meant: str
) -> None:
    text = f"{cls.__name__}.__init__() got an unexpected keyword argument {wrong!r}"
    with pytest.raises(TypeError) as caught:
        cls(**{**given, wrong: 1})
    assert str(caught.value) == f"{text}; did you mean {meant!r}?"


SHARED = {"SegmentTree", "EpisodeLookup", "_RewardTransform", "_Scaling", "_forwarded_property"}
"""Bases of several public classes, none of which is the first among them."""


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_methods_have_the_names_of_public_classes(cls: type) -> None:
    public = {one.__name__ for one in public_classes()} | SHARED
    for name, member in inspect.getmembers(cls):
        method = member.fget if isinstance(member, property) else member
        if name[0] == "_" or not inspect.isroutine(method) or not hasattr(method, "__qualname__"):
            continue
        if method.__module__.partition(".")[0] == "replaykit":
            assert method.__qualname__.partition(".")[0] in public, method


def test_errors_for_arguments_name_the_public_class() -> None:
    """Of methods, of private classes, for missing and extra ones; errors of others stay."""
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    wrong = r"\(\) got an unexpected keyword"
    refuses(TypeError, rf"^ReplayBuffer\.sample{wrong}", rb.sample, nothing=1)
    refuses(TypeError, rf"^TensorStorage\.get{wrong}", rb.storage.get, nothing=1)
    assert pickle.loads(pickle.dumps(ReplayBuffer.sample)) is ReplayBuffer.sample
    name = r"^SliceSampler\.__init__\(\) got .*'slice_length'"
    refuses(TypeError, name, SliceSampler, draw="sequential", slice_length=2)
    name = r"^TensorDictPrioritizedReplayBuffer\..*'alpha'"
    refuses(TypeError, name, TensorDictPrioritizedReplayBuffer, beta=0.4)
    name = r"^ReplayBuffer\.__init__\(\) takes 1 positional"
    refuses(TypeError, name, ReplayBuffer, ListStorage())
    name = r"^ListStorage\.__init__\(\) got .*'nothing'$"
    refuses(TypeError, name, ReplayBuffer, storage=lambda: ListStorage(nothing=1))  # type: ignore[call-arg]


# -- share, client, cleanup ---------------------------------------------------------------------


def numbered(start: int, stop: int) -> TensorDict:
    return TensorDict({"x": torch.arange(start, stop)}, [stop - start])


def write(buffer: ReplayBuffer, start: int) -> None:
    buffer.extend(numbered(start, start + 10))


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("prioritized", [False, True])
def test_processes_write_into_a_buffer_after_share(
    kind: Any, prioritized: bool, forkserver: Any
) -> None:
    sampler = PrioritizedSampler(**PRIORITY) if prioritized else None
    rb = ReplayBuffer(storage=kind(100), sampler=sampler, batch_size=16)
    assert not rb.shared
    assert rb.share() is rb
    assert rb.share(True) is rb
    assert rb.shared
    rb.extend(numbered(0, 10))
    worker = forkserver.Process(target=write, args=(rb, 10))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert sorted(rb[:]["x"].tolist()) == list(range(20))
    drawn = {value for _ in range(40) for value in rb.sample()["x"].tolist()}
    assert drawn == set(range(20))


def test_share_refuses_unshareable_buffers_and_changes_nothing() -> None:
    stored = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    stored.extend(numbered(0, 4))
    ahead = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, prefetch=2)
    for rb, what in (
        (stored, "never written to"),
        (ahead, "prefetch=0"),
        (ReplayBuffer(storage=ListStorage(10)), "LazyTensorStorage"),
    ):
        refuses(ValueError, what, rb.share)
        assert not rb.shared
        assert rb.share(False) is rb
    stored.extend(numbered(4, 8))
    assert stored[:]["x"].tolist() == list(range(8))
    shared = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    refuses(RuntimeError, "stays shared", shared.share, False)


def test_share_keeps_the_pace_for_all_processes(forkserver: Any) -> None:
    limiter = RateLimiter(1.0, min_size_to_sample=1, error_buffer=1000.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, rate_limiter=limiter).share()
    worker = forkserver.Process(target=write, args=(rb, 0))
    worker.start()
    worker.join()
    assert rb.stats()["inserts"] == 10


def test_a_buffer_is_its_own_client() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert rb.client() is rb


def test_cleanup_removes_a_private_folder_and_keeps_the_rows(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(100, auto_cleanup=True)
    rb = ReplayBuffer(storage=storage, batch_size=8)
    assert storage.cleanup() is False  # nothing was made yet
    rb.extend(numbered(0, 10))
    folder = storage._made_in
    assert folder is not None
    copied = copy.deepcopy(rb)
    assert folder.exists()
    assert storage.cleanup() is True
    assert not folder.exists()
    assert storage.cleanup() is False
    rb.extend(numbered(10, 20))
    assert rb[:]["x"].tolist() == list(range(20))
    rb.dumps(tmp_path / "saved")
    again = ReplayBuffer(storage=LazyMemmapStorage(100))
    again.loads(tmp_path / "saved")
    assert again[:]["x"].tolist() == list(range(20))
    assert copied[:]["x"].tolist() == list(range(10))
    assert copied.storage.cleanup() is True
    later = copy.deepcopy(rb)
    later.extend(numbered(20, 30))
    assert later[:]["x"].tolist() == list(range(30))
    drawn = next(iter(rb.dataloader(batch_size=4, workers=1, steps=2)))
    assert set(drawn["x"].tolist()) <= set(range(20))


def test_cleanup_of_other_folders_is_refused(tmp_path: Path) -> None:
    """Of those that were given, and where files are still used."""
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows", auto_cleanup=False)
    ReplayBuffer(storage=storage).extend(numbered(0, 10))
    before = sorted(os.listdir(tmp_path / "rows"))
    refuses(RuntimeError, r"shutil\.rmtree", storage.cleanup)
    assert sorted(os.listdir(tmp_path / "rows")) == before != []
    once = LazyMemmapStorage(100, dedup_next=True)
    refuses(RuntimeError, "dedup_next", once.cleanup)
    shared: Any = ReplayBuffer(storage=LazyMemmapStorage(100), shared=True)
    refuses(RuntimeError, "other processes", shared.storage.cleanup)
    for words, options in (
        ("leave scratch_dir out", {"auto_cleanup": True, "scratch_dir": tmp_path}),
        ("give a scratch_dir", {"auto_cleanup": False}),
    ):
        refuses(ValueError, f"auto_cleanup.*{words}", LazyMemmapStorage, 100, **options)
