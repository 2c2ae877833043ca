"""Information about checkpoints and directories of buffers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.adapters.recording_folder import open_recording
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.episodes import Episodes
from replaykit.buffer.state import BufferState, apply_state, saved_sampler
from replaykit.checkpoint import Checkpoint, MappedCheckpoint, checkpoint_versions
from replaykit.datasets.published_buffer import CorpusExperienceReplay
from replaykit.episodes import EndReason
from replaykit.episodes.streams import stream_keys
from replaykit.errors import CheckpointError
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage
from replaykit.storages.content import Content
from replaykit.storages.references import OBSERVATION, ReferencedColumn
from replaykit.structure import Branch
from replaykit.ted import Key
from replaykit.tools.facts import EpisodeFacts, Facts, Table, measured, table_of
from replaykit.writers import RoundRobinWriter
from replaykit.writers.ring_writers import streams_of


def episodes_of(storage: LazyTensorStorage) -> tuple[Episodes | None, EpisodeFacts | None]:
    """Return the stored episodes, and information about them.

    Both results are ``None`` if rows are not TensorDicts or tensorclasses, because such rows have
    no flags. Rewards, if there are any, are read once.
    """
    schema = storage.schema
    root = None if schema is None else schema.root
    if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
        return None, None
    episodes = Episodes(storage)
    returns = None
    with suppress(KeyError):  # rows without rewards
        sums = episodes.returns
        if sums.numel() == len(episodes):
            returns = sums.reshape(-1).numpy()
    reasons, lanes = episodes.reasons.numpy(), episodes.lanes.numpy()
    # Opening the storage cuts the episodes that were open at the save. They are shown as open.
    last = np.append(lanes[1:] != lanes[:-1], True)[: len(lanes)]
    reasons = np.where(last & (reasons == EndReason.CUT), EndReason.OPEN, reasons)
    ends = tuple(EndReason(reason).name.lower() for reason in reasons.tolist())
    return episodes, EpisodeFacts(episodes.lengths.numpy(), ends, returns)


def is_recording(path: Path) -> bool:
    """Return whether a directory is a recording of `record` or `RecordReplay`."""
    if not (path / "recording.json").is_file():
        return False
    return (path / "committed.json").is_file() or any(path.glob("rows-*"))


def recording_facts(path: Path, most_bytes: int | None) -> tuple[Facts, Table]:
    """Open a recording with `open_recording`, and return information about it and its table.

    Other processes may record to it at the same time.

    Raises:
        CheckpointError: a file is missing or damaged. The message names it.
        RuntimeError: no episode has ended yet.
    """
    storage = open_recording(path).storage
    content = storage.content()
    nbytes = sum(values.nbytes for values in content.groups[0].leaves.values())
    about = {"opened by": "replaykit.adapters.open_recording"}
    facts = Facts("recording", str(path), len(storage), nbytes, about, (), None)
    return _with_rows(facts, content, episodes_of(storage), most_bytes)


def _with_rows(
    facts: Facts,
    content: Content,
    found: tuple[Episodes | None, EpisodeFacts | None],
    most_bytes: int | None,
    priorities: Any = None,
) -> tuple[Facts, Table]:
    """Add keys and episodes to facts; return them and the table of the stored rows.

    Rows of several schemas give no columns.
    """
    episodes, known = found
    batch = (content.rows, *content.lanes)

    def rows_of(number: int) -> npt.NDArray[np.int64]:
        assert episodes is not None
        index = episodes[number].index.numpy()
        return index if index.ndim == 1 else np.ravel_multi_index(tuple(index.T), batch)

    leaves = {}
    if len(content.groups) == 1:
        (group,) = content.groups
        for path, values in group.leaves.items():
            spec = group.schema.leaves[path]
            leaves[path] = (values, spec.shape, spec.dtype)
    count = 0 if episodes is None else len(episodes)
    table = table_of(leaves, batch, count, rows_of, priorities)
    keys = tuple(measured(key, column, most_bytes) for key, column in table.columns.items())
    return replace(facts, keys=keys, episodes=known), table


RECOVERY: Final = "%recovery"
_SUFFIX: Final = ".memmap"


def is_scratch(path: Path) -> bool:
    """Return whether a directory belongs to a memory-mapped storage."""
    return (path / RECOVERY / "manifest.json").exists() or any(_row_files(path))


def _row_files(path: Path) -> Iterator[Path]:
    """Yield the files of rows in a directory, without those of other buffers below it."""
    for file in path.rglob(f"*{_SUFFIX}"):
        folders = [each for each in file.parents if each.is_relative_to(path) and each != path]
        if file.is_file() and not any((each / RECOVERY).is_dir() for each in folders):
            yield file


def scratch_facts(path: Path, most_bytes: int | None) -> tuple[Facts, Table]:
    """Open the directory of a storage, and return information about it and its table.

    A directory made with ``recover=True`` is opened in the same way as by the storage. An
    interrupted write is rolled back, and no other process may have the directory open. For other
    directories, only the names of the files are known, because these files do not describe their
    contents.

    Raises:
        CheckpointError: a file is missing or damaged. The message names it.
        RuntimeError: another process has the directory open.
    """
    files = list(_row_files(path))
    nbytes = sum(file.stat().st_size for file in files)
    if not (path / RECOVERY / "manifest.json").exists():
        names = ", ".join(sorted(str(file.relative_to(path)) for file in files)[:20])
        warning = (
            "the storage was made without recover=True, so the keys, dtypes and rows of "
            "these files are not known: save the buffer with dumps() and inspect the checkpoint"
        )
        about: dict[str, Any] = {"files": f"{len(files)}: {names}"}
        return Facts("buffer", str(path), None, nbytes, about, (), None, (warning,)), Table()
    storage = _opened(path)
    content = storage.content()
    about = {"storage": f"LazyMemmapStorage of {storage.max_size:,} rows, recover=True"}
    if content.lanes:
        about["lanes"] = list(content.lanes)
    recovery: Any = storage.recovery
    state, priorities = recovery.state, None
    if state is not None and state.priorities and state.priorities[0].length:
        priorities = torch.from_numpy(recovery.committed_priorities(0, None)[1])
    facts = Facts("buffer", str(path), len(storage), nbytes, about, (), None)
    found = episodes_of(storage) if content.rows and content.groups else (None, None)
    return _with_rows(facts, content, found, most_bytes, priorities)


def _opened(path: Path) -> LazyMemmapStorage:
    file = path / RECOVERY / "manifest.json"
    try:
        content = json.loads(file.read_text("utf-8"))["content"]
        lanes = [int(size) for size in content["lanes"]]
        slots, ndim, key = int(content["slots"]), int(content["ndim"]), content["lane_key"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    return LazyMemmapStorage(
        slots * int(np.prod(lanes)),
        scratch_dir=path,
        ndim=ndim,
        lane_key=tuple(key) if isinstance(key, list) else key,
        dedup_next=[tuple(path) for path in content.get("dedup_next", ())] or False,
        recover=True,
    )


@contextmanager
def _saved(path: Path) -> Iterator[tuple[Checkpoint, Content]]:
    with MappedCheckpoint(path) as saved:
        try:
            content = Content.from_state(saved.part("storage", mapped=["groups"]))
        except ValueError as error:
            raise CheckpointError(f"the rows in {path} are damaged: {error}") from None
        yield saved, content


def checkpoint_facts(path: Path, most_bytes: int | None, stack: ExitStack) -> tuple[Facts, Table]:
    """Open the newest checkpoint of a directory, and return information and a table.

    Sizes and the checksum of the manifest are checked. Checksums of data are not checked. The
    files stay open until the stack is closed.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged. The message names the file.
    """
    saved, content = stack.enter_context(_saved(path))
    manifest = saved.manifest
    warnings: list[str] = []
    found = _episodes(saved, content, warnings)
    if len(content.groups) > 1:
        warnings.append(
            f"rows of {len(content.groups)} layouts in one list: their values are not read"
        )
    versions = checkpoint_versions(path)
    about: dict[str, Any] = {
        "buffer": ", ".join(str(name) for name in manifest["components"].values()),
        "capacity": manifest["max_size"],
        "written": manifest["write_count"],
        "version": f"{versions[-1]} (kept: {', '.join(map(str, versions))})",
        "format": f"{manifest['format_version']}, by replaykit {manifest['library_version']}",
    }
    if manifest["lanes"]:
        about["lanes"] = manifest["lanes"]
    sampler: Any = saved.part("sampler", mapped=["_priorities"]) if "sampler" in saved else None
    priorities = sampler.get("_priorities") if isinstance(sampler, dict) else None
    if priorities is not None and len(priorities):
        about["priorities"] = ", ".join(
            f"{name} {sampler[f'_{name}']:g}"
            for name in ("alpha", "beta", "eps")
            if isinstance(sampler.get(f"_{name}"), (int, float))
        )
    nbytes = sum(record["size"] for record in manifest["files"].values())
    facts = Facts(
        "checkpoint", str(path), manifest["len"], nbytes, about, (), None, tuple(warnings)
    )
    return _with_rows(facts, content, found, most_bytes, priorities)


def _episodes(
    saved: Checkpoint, content: Content, warnings: list[str]
) -> tuple[Any, EpisodeFacts | None]:
    """Return the episodes, found by a buffer whose rows stay in the files."""
    if not content.groups or not content.rows:
        return None, None
    try:
        return episodes_of(_checkpoint_buffer(saved, content).storage)
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        warnings.append(f"the episodes are not listed: {error}")
        return None, None


def _checkpoint_buffer(saved: Checkpoint, content: Content) -> ReplayBuffer[Any, Any, Any, Any]:
    """Return a buffer with the rows of a checkpoint, which stay in the files.

    Episodes depend only on the rows and their order. So a plain writer and sampler are enough, and
    the rest of the saved state is ignored.
    """
    manifest, writer = saved.manifest, RoundRobinWriter()
    state = {**saved.part("writer"), "_kind": writer.kind}
    writer.check_state(state)
    once = [
        path
        for group in content.groups
        for path, column in group.leaves.items()
        if isinstance(column, ReferencedColumn) and column.kind == OBSERVATION
    ]
    storage = LazyTensorStorage(
        manifest["max_size"],
        ndim=manifest["ndim"],
        lane_key=_lane_key(manifest, state, content),
        dedup_next=once or False,
    )
    buffer = ReplayBuffer(storage=storage, writer=writer)
    with buffer._locked():
        sampler, chain = saved_sampler(buffer.sampler), buffer._chain.state_dict()
        apply_state(
            buffer, BufferState(content, None, state, sampler, chain, None, [], mapped=True)
        )
    return buffer


_KEY_BYTES: Final = 64
"""Size of the largest value of a row that is compared with the saved streams."""


def _lane_key(manifest: Mapping[str, Any], writer: dict[str, Any], content: Content) -> Key | None:
    """Return the key that names the stream of a row.

    Earlier releases did not save it. But a LaneWriter and an EpisodeWriter save the number of each
    row's stream, in the order of the values of this key.

    Raises:
        ValueError: an earlier release saved streams of another writer.
    """
    if "lane_key" in manifest:
        return None if manifest["lane_key"] is None else tuple(manifest["lane_key"])
    heads = (writer.get("_episodes") or {}).get("heads") or {}
    if not ("streams" in heads or "_lanes" in writer):
        return None
    if "_lanes" in writer:
        numbers = streams_of(writer).numpy()
        for path, column in content.single_group().leaves.items():
            if column[:1].nbytes <= _KEY_BYTES:
                keys = stream_keys(column[:])
                if np.array_equal(np.unique(keys, return_inverse=True)[1], numbers):
                    return path
    raise ValueError(
        "an earlier release saved interleaved streams without the name of their lane_key; load "
        "the checkpoint into a buffer whose storage has this lane_key, and save it again"
    )


@contextmanager
def opened_buffer(path: Path, kind: str) -> Iterator[ReplayBuffer[Any, Any, Any, Any]]:
    """Open a data set, a checkpoint, a recording or a buffer's directory for reading.

    Args:
        path: the directory.
        kind: the kind of the data, from `kind_of`.

    Raises:
        ValueError: it is none of these, or a buffer made without ``recover=True``.
        RuntimeError, CheckpointError: a file is damaged. The message names it.
    """
    if kind == "corpus":
        yield CorpusExperienceReplay(path)
    elif kind == "recording":
        yield open_recording(path)
    elif kind == "checkpoint":
        with _saved(path) as (saved, content):
            yield _checkpoint_buffer(saved, content)
    elif kind == "buffer" and (path / RECOVERY / "manifest.json").exists():
        yield ReplayBuffer(storage=_opened(path))
    else:
        raise ValueError(
            f"expected a data set, a checkpoint, a recording, or a buffer made with recover=True, "
            f"got {path}; convert files, or save a buffer with dumps()"
        )
