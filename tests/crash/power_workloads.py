"""Workloads whose files are recorded, and checks of what a loss of power leaves of them.

Each workload takes the folder to record and further arguments of `Recorder`. It returns its
`Recorder` and a function that opens a folder. The function raises if the folder has none of the
states of the given steps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from replaykit import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
)
from replaykit.adapters import RecordReplay, open_recording
from replaykit.checkpoint import checkpoint_versions
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import open_published, remove_published, verify_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.crash.disk_events import Done, Recorder
from tests.crash.power import Cut, write_tree
from tests.crash.recovering import apply, differences, new_buffer, restart, shown

__all__ = ["GROWING", "Check", "commits", "publications", "recordings", "recovery", "saves"]

Check = Callable[[Path, Sequence[int]], None]

# -- durable commits ------------------------------------------------------------------------------

_LINES = ("recovery/journal.py", "recovery/recovery_folder.py")

GROWING = ("growing ring", "growing streams", "growing best", "growing once")
"""Buffers of many small rows: tables, states, the journal and overflow entries grow."""
_GROWING_SLOTS = 1500


def _small_rows(first: int, count: int, streams: int) -> TensorDict:
    number = torch.arange(first, first + count)
    draw = torch.Generator().manual_seed(first)
    noise = torch.rand(count, generator=draw)
    return TensorDict(
        {
            "number": number,
            "lane": number % streams,
            "place": noise,
            "next": {
                "place": torch.rand(count, generator=draw),  # equals no following row
                "reward": torch.rand(count, generator=draw),
                "done": noise < 0.1,
            },
        },
        [count],
    )


def _growing(kind: str, folder: Path | None) -> ReplayBuffer:
    options: dict[str, Any] = {}
    if "streams" in kind:
        options["lane_key"] = "lane"
    if "once" in kind:
        options |= {"dedup_next": True, "on_mismatch": "dense"}
    storage: Any = LazyTensorStorage(_GROWING_SLOTS, **options)
    if folder is not None:
        storage = LazyMemmapStorage(
            _GROWING_SLOTS, scratch_dir=folder, recover=True, durable=True, **options
        )
    writer: Any = TensorDictMaxValueWriter() if "best" in kind else None
    sampler = PrioritizedSampler(alpha=0.7, beta=0.5)
    return ReplayBuffer(storage=storage, sampler=sampler, writer=writer)


def _grow(buffer: ReplayBuffer, step: int) -> None:
    if step % 3:
        buffer.extend(_small_rows(1000 * step, 300 * step % 900, 60 * step))
    else:
        some = torch.arange(0, len(buffer), 7)
        buffer.update_priority(some, some / 7.0 + step)


def _buffer_of(kind: str, folder: Path | None) -> ReplayBuffer:
    if kind in GROWING:
        return _growing(kind, folder)
    return new_buffer(kind, folder, durable=folder is not None)


_NUMBERS = (2, 1, 16, 7, 0, 25, 26, 13, 20, 15)
"""Numbers of operations for `apply`: writes, priorities, a cut, edits, a clear; 0 for a load."""


def _apply(buffer: ReplayBuffer, kind: str, step: int, saved: Path) -> None:
    if kind in GROWING:
        _grow(buffer, step)
    elif _NUMBERS[step - 1]:
        apply(buffer, kind, _NUMBERS[step - 1])
    else:
        buffer.loads(saved)


def _release(buffer: ReplayBuffer) -> None:
    buffer.storage.recovery.home.close()


def commits(kind: str, folder: Path, **options: Any) -> tuple[Recorder, Check]:
    """Change a durable buffer of a kind of `GROWING` or `new_buffer`; each change is a step."""
    folder.mkdir()
    saved, steps = folder.with_name("saved"), len(_NUMBERS)
    source = _buffer_of(kind, None)
    for step in (1, 2):
        _apply(source, kind, step, saved)
    source.dumps(saved)
    with Recorder(folder, lines_of=_LINES, **options) as recorder:
        buffer = _buffer_of(kind, folder / "rows")
        for step in range(1, steps + 1):
            with recorder.step(step):
                _apply(buffer, kind, step, saved)
        _release(buffer)
    wanted = []
    for stop in range(steps + 1):
        model = _buffer_of(kind, None)
        for step in range(1, stop + 1):
            _apply(model, kind, step, saved)
        restart(model)
        wanted.append(shown(model))

    def check(folder: Path, steps: Sequence[int]) -> None:
        buffer = _buffer_of(kind, folder / "rows")
        try:
            found = shown(buffer)
            off = [differences(found, wanted[step]) for step in steps]
            assert [] in off, off
            _apply(buffer, kind, 1, saved)
        finally:
            _release(buffer)

    return recorder, check


def recovery(kind: str, cut: Cut, folder: Path, check: Check) -> Recorder:
    """Open what a cut has left of `commits`; all of it is the step that is found."""
    write_tree(cut.tree, folder)
    with Recorder(folder, lines_of=_LINES) as recorder:
        _release(_buffer_of(kind, folder / "rows"))
    step = cut.steps[0]
    for step in cut.steps:
        copy = folder.with_name(f"{folder.name} {step}")
        write_tree(cut.tree, copy)
        with contextlib.suppress(AssertionError):
            check(copy, [step])
            break
    recorder.events.insert(recorder.start, Done(step))
    return recorder


# -- checkpoints ----------------------------------------------------------------------------------

_SAVED_SLOTS = 40


def _saved_rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {"number": number, "wide": number[:, None].expand(count, 300).clone().double()}, [count]
    )


def _saved_buffer() -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(_SAVED_SLOTS),
        sampler=PrioritizedSampler(alpha=0.7, beta=0.5),
        batch_size=4,
    )


def _content(buffer: ReplayBuffer) -> Any:
    if not len(buffer):
        return None
    rows = buffer[:]
    columns = [rows["number"].tolist(), rows["wide"].tolist()]
    return [*columns, buffer.sampler.state_dict()["_priorities"].tolist(), buffer.write_count]


def _save(buffer: ReplayBuffer, folder: Path, step: int, keep: int) -> Any:
    """Change a buffer and save it; return what a load must find."""
    buffer.extend(_saved_rows(100 * step, 13))
    buffer.update_priority(torch.arange(0, 9, step), torch.full([-(-9 // step)], step / 2))
    if step == 3:
        buffer[torch.tensor([1])] = _saved_rows(7000, 1)
    buffer.dumps(folder, keep=keep)
    return _content(buffer)


def saves(folder: Path, keep: int, **options: Any) -> tuple[Recorder, Check]:
    """Save a buffer over and over into one directory; each save is a step."""
    folder.mkdir()
    wanted = [None]
    buffer = _saved_buffer()
    with Recorder(folder, **options) as recorder:
        for step in range(1, 6):
            with recorder.step(step):
                wanted.append(_save(buffer, folder / "a" / "saved", step, keep))

    def check(folder: Path, steps: Sequence[int]) -> None:
        buffer, saved = _saved_buffer(), folder / "a" / "saved"
        try:
            buffer.loads(saved)
        except FileNotFoundError:
            assert 0 in steps, "no checkpoint"
            found = 0
        else:
            found = next((step for step in steps if _content(buffer) == wanted[step]), -1)
            assert found > 0, buffer[:]["number"]
        versions = checkpoint_versions(saved) if found else []
        for version, step in zip(reversed(versions), range(found, 0, -1), strict=False):
            buffer.loads(saved, version=version)
            assert _content(buffer) == wanted[step], version
        assert len(versions) >= min(found, keep)
        # The next save removes the remains.
        after = _save(buffer, saved, 9, 1)
        again = _saved_buffer()
        again.loads(saved)
        assert _content(again) == after
        manifest = json.loads((saved / "manifest.json").read_text())
        assert {*os.listdir(saved)} - {".lock"} == {"manifest.json", *manifest["files"]}

    return recorder, check


# -- data sets ------------------------------------------------------------------------------------


def _files_of(root: Path) -> dict[str, bytes]:
    """Every byte of a data set, except when it was made."""
    found = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    manifest = json.loads(found.pop("manifest.json"))
    del manifest["made"], manifest["crc32"]
    return {**found, "manifest": json.dumps(manifest).encode()}


def _convert(target: Path, sources: Sequence[Path], **options: Any) -> Any:
    return ensure_dataset(
        target, get_sources=lambda: Sources.local(sources), layout=ROBOHIVE, **options
    )


def _sources(folder: Path) -> list[list[Path]]:
    """Two corpora of three files each."""
    folder.mkdir()
    corpora = []
    for corpus in range(2):
        files = [folder / f"{corpus}-{number}.h5" for number in range(3)]
        for number, path in enumerate(files):
            with RoboHiveWriter(path, float_dtype=None) as writer:
                writer.add_trial(**make_trial(5 + number + 4 * corpus, seed=10 * corpus + number))
        corpora.append(files)
    return corpora


def publications(folder: Path, **options: Any) -> tuple[Recorder, Check]:
    """Convert files to a data set, replace the data set, and remove it, in three steps."""
    folder.mkdir()
    corpora = _sources(folder.with_name("sources"))
    target = folder / "root" / "data"
    wanted: list[Any] = [None]
    with Recorder(folder, **options) as recorder:
        for step, sources in enumerate(corpora, 1):
            with recorder.step(step):
                _convert(target, sources, force=step > 1)
            wanted.append(_files_of(target))
        with recorder.step(3):
            remove_published(target)
    wanted.append(None)

    def check(folder: Path, steps: Sequence[int]) -> None:
        target = folder / "root" / "data"
        try:
            open_published(target)
        except FileNotFoundError:
            found = None
        else:
            verify_published(target)
            found = _files_of(target)
        assert found in [wanted[step] for step in steps], "another data set"
        # The next conversion continues an interrupted one, and removes the remains.
        step = min(max(*steps, 1), len(corpora))
        _convert(target, corpora[step - 1], force=found is not None)
        verify_published(target)
        assert _files_of(target) == wanted[step]
        assert {*os.listdir(target.parent)} == {".data.lock", "data"}

    return recorder, check


# -- recordings -----------------------------------------------------------------------------------


def _episode(env: RecordReplay, number: int) -> None:
    env.action_space.seed(number)
    env.reset(seed=number)
    ended = False
    while not ended:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated or truncated


def recordings(folder: Path, **options: Any) -> tuple[Recorder, Check]:
    """Record episodes of an environment, in two sessions; each episode is a step."""
    folder.mkdir()
    with Recorder(folder, lines_of=_LINES, **options) as recorder:
        recorder.begin(1)
        for numbers in (range(1, 3), range(3, 6)):
            with RecordReplay(gymnasium.make("CartPole-v1"), folder / "a" / "run") as env:
                for number in numbers:
                    with recorder.step(number):
                        _episode(env, number)
    rows = open_recording(folder / "a" / "run")[:]
    wanted = [rows[rows["episode"] < count] for count in range(6)]
    assert len({len(each) for each in wanted}) == len(wanted)

    def check(folder: Path, steps: Sequence[int]) -> None:
        path = folder / "a" / "run"
        found = wanted[0]
        with contextlib.suppress(FileNotFoundError):
            try:
                found = open_recording(path)[:]
            except RuntimeError as error:
                if "no episode yet" not in str(error):
                    raise
        assert any(_same(found, wanted[step]) for step in steps), found["episode"]
        with RecordReplay(gymnasium.make("CartPole-v1"), path) as env:
            assert env.episodes in steps
            for number in range(env.episodes + 1, len(wanted)):
                _episode(env, number)
        assert _same(open_recording(path)[:], wanted[-1])

    return recorder, check


def _same(one: TensorDict, other: TensorDict) -> bool:
    return one.batch_size == other.batch_size and bool((one == other).all())
