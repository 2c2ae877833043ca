"""Save and load the states of all members, or of none on an error."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.component_checks import check_mappable
from replaykit.buffer.draw import rewind
from replaykit.buffer.state import (
    BufferState,
    CheckedState,
    UndeliveredDraw,
    check_rows,
    check_state,
    finish_taking,
    generator_state,
    load_rows,
    parts_taken,
    saved_parts,
    saved_sampler,
    undelivered_draws,
)
from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.ensembles.batch_info import depth
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import naming_member
from replaykit.ensembles.remote_members import Member
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, remove_tree
from replaykit.storages.content import Content
from replaykit.storages.save_hooks import content_after_load

__all__ = [
    "REMOTE_PART",
    "JointLock",
    "MemberLoad",
    "buffers_of",
    "check_remote",
    "described",
    "ensembles_of",
    "load_remote_members",
    "load_remote_members_from",
    "member_state",
    "members_locked",
    "remote_folders",
    "remote_states",
    "saved_remote",
    "state_of_member",
    "undelivered_of",
]


def buffers_of(ensemble: EnsembleCore, path: str = "") -> Iterator[tuple[str, ReplayBuffer]]:
    """Yield the local buffers of an ensemble, with their names in a checkpoint.

    This includes the buffers of members that are ensembles.
    """
    for number, member in enumerate(ensemble._members):
        name = f"{path}members/{number}"
        if isinstance(member, EnsembleCore):
            yield from buffers_of(member, f"{name}/")
        elif not isinstance(member, Member):
            yield name, member


def ensembles_of(ensemble: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield an ensemble and its member ensembles, with prefixes for member names."""
    yield path, ensemble
    for number, member in enumerate(ensemble._members):
        if isinstance(member, EnsembleCore):
            yield from ensembles_of(member, f"{path}members/{number}/")


class JointLock:
    """Several locks, always taken in the same order."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = sorted({id(lock): lock for lock in locks}.values(), key=id)

    def __enter__(self) -> JointLock:
        held = []
        try:
            for lock in self._locks:
                lock.acquire()
                held.append(lock)
        except BaseException:  # an interrupt
            for lock in reversed(held):
                lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


@contextlib.contextmanager
def members_locked(ensemble: EnsembleCore) -> Iterator[JointLock]:
    """Lock an ensemble and everything in it; yield the joint lock of the storages."""
    with contextlib.ExitStack() as held:
        # Outer ensembles come first, as in draws. Ensembles of equal depth are in a fixed order.
        ensembles = {id(one): one for _, one in ensembles_of(ensemble)}.values()
        for one in sorted(ensembles, key=lambda one: (-depth(one), id(one))):
            held.enter_context(one._locked())
        buffers = [buffer for _, buffer in buffers_of(ensemble)]
        while True:
            storages = [buffer.storage for buffer in buffers]
            lock = JointLock([storage.lock for storage in storages])
            with lock:
                if all(
                    buffer.storage is storage
                    for buffer, storage in zip(buffers, storages, strict=True)
                ):
                    yield lock
                    return


# -- draws ----------------------------------------------------------------------------------------


def undelivered_of(
    ensemble: EnsembleCore, records: object
) -> Iterator[tuple[ReplayBuffer, UndeliveredDraw]]:
    """Yield the draws of local buffers in a checkpoint's undelivered draws of an ensemble.

    Only earlier releases saved such draws.

    Raises:
        ValueError: such an ensemble cannot have saved them.
    """
    if not isinstance(records, list):
        raise ValueError(f"expected a list of prepared draws, got {records!r}")
    for record in records:
        parts = record.get("parts") if isinstance(record, Mapping) else None
        if not isinstance(parts, list):
            raise ValueError(f"expected a prepared draw of {len(ensemble)} members, got {record!r}")
        for part in parts:
            number = part.get("member") if isinstance(part, Mapping) else None
            if type(number) is not int or number not in range(len(ensemble)):
                raise ValueError(
                    f"expected a prepared draw of {len(ensemble)} members, got {record!r}"
                )
            member, draws = ensemble._members[number], part.get("draws")
            if isinstance(member, EnsembleCore):
                yield from undelivered_of(member, draws)
            elif not isinstance(member, Member):
                for one in undelivered_draws(draws):
                    yield member, one


# -- members --------------------------------------------------------------------------------------


def member_state(buffer: ReplayBuffer, path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the state of a buffer in parts. The caller holds its lock.

    Args:
        path: the directory of the save, or None for a state dict. A save to a directory may read
            large parts later.
    """
    storage, identity = buffer.storage, buffer.storage.identity
    if path is not None and identity is None:
        return saved_parts(buffer, storage, path)
    rewind(buffer)
    sampler = saved_sampler(buffer.sampler, tracked=None if path is None else storage)
    return {
        "storage": storage.state_dict() if identity is None else {"identity": identity},
        "writer": buffer.writer.state_dict(),
        "sampler": sampler,
        "transforms": buffer.transform.state_dict(),
        "generator": generator_state(buffer._generator),
    }


def described(name: str, buffer: ReplayBuffer) -> dict[str, Any]:
    """Return the description of a member for the header of a manifest."""
    storage = buffer.storage
    return {
        "name": name,
        "buffer": type(buffer).__name__,
        "storage": type(storage).__name__,
        "sampler": type(buffer.sampler).__name__,
        "writer": type(buffer.writer).__name__,
        "schema": None if storage.schema is None else storage.schema.to_json(),
        "ndim": storage.ndim,
        "lanes": list(storage.lanes),
        "len": len(storage),
        "max_size": storage.max_size,
        "write_count": buffer.write_count,
    }


def state_of_member(
    buffer: ReplayBuffer,
    name: str,
    part: Callable[..., Any],
    path: str | os.PathLike[str] | None,
    *,
    mapped: bool = False,
) -> BufferState:
    """Return the saved state of a buffer.

    Args:
        name: the name of the buffer in the checkpoint.
        part: a function that returns a part of a buffer, given the names of buffer and part, and
            optionally a default.
        path: the directory of the checkpoint; None for a state dict.
        mapped: whether rows stay in the files of the checkpoint.

    Raises:
        ValueError: the state is not that of such a storage.
        CheckpointError: the state is damaged.
    """
    head, storage = part(name, "storage"), buffer.storage
    if not isinstance(head, Mapping):
        raise ValueError(f"expected the state of a storage, got {type(head).__name__}")
    content, rows, same = None, None, "identity" in head
    if same:
        _check_identity(storage.identity, head["identity"])
    elif path is None:
        rows = dict(head)
        content = storage.content_of(rows)
    else:
        try:
            content = Content.from_state(head)
        except ValueError as error:
            raise CheckpointError(f"the rows of {name} in {path} are damaged: {error}") from None
        if mapped:
            check_mappable(storage)
        content = content_after_load(storage, content)
    names = ("writer", "sampler", "transforms", "generator")
    writer, sampler, transforms, generator = (part(name, which) for which in names)
    return BufferState(
        content,
        rows,
        writer,
        sampler,
        transforms,
        generator,
        part(name, "prepared", []),
        mapped=mapped and not same,
        same_rows=same,
    )


def _check_identity(own: Any, saved: Any) -> None:
    """Raise ValueError if a storage lacks rows that were not saved."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected the identity of a data set, got {saved!r}")
    same = isinstance(own, Mapping) and set(own) == set(saved)
    for key, value in saved.items() if same else ():
        there = own[key]
        tensors = [isinstance(item, torch.Tensor) for item in (value, there)]
        same = same and (
            torch.equal(value, there) if all(tensors) else not any(tensors) and value == there
        )
    if not same:
        found = (
            "one that was edited, or no data set"
            if own is None
            else "another data set, or other episodes of it"
        )
        raise ValueError(
            "expected the data set that the ensemble was saved with, whose rows are not "
            f"in the checkpoint; got {found}"
        )


@dataclass
class _Entry:
    buffer: ReplayBuffer
    checked: CheckedState
    undelivered: list[UndeliveredDraw]


class MemberLoad:
    """A load of states into several buffers, which succeeds or changes nothing.

    The caller holds their locks.

    Args:
        draws: undelivered draws of ensembles, with the buffers that made them.
    """

    def __init__(self, draws: Iterable[tuple[ReplayBuffer, UndeliveredDraw]]) -> None:
        self._entries: list[_Entry] = []
        self._undelivered: dict[int, list[UndeliveredDraw]] = {}
        for buffer, drawn in draws:
            self._undelivered.setdefault(id(buffer), []).append(drawn)

    def check(
        self, name: str, buffer: ReplayBuffer, state_of: Callable[[str, ReplayBuffer], BufferState]
    ) -> None:
        """Check a state for a buffer before the load; change nothing.

        Raises:
            ValueError: the state does not fit; the error names the member.
        """
        try:
            state = state_of(name, buffer)
            checked = check_state(buffer, state, stacklevel=8)
            undelivered = self._undelivered.get(id(buffer), [])
            check_rows(undelivered, state)
        except (ValueError, TypeError) as error:
            raise naming_member(error, name) from error
        self._entries.append(_Entry(buffer, checked, undelivered))

    def apply(self) -> None:
        """Load all states. If one load fails, restore the old states of all buffers."""
        with contextlib.ExitStack() as parts:
            for entry in self._entries:
                parts.enter_context(parts_taken(entry.buffer, entry.checked))
            undo: list[Callable[[], None]] = []
            try:
                for place, entry in enumerate(self._entries):
                    back = None
                    if place + 1 < len(self._entries) and not entry.checked.state.same_rows:
                        back = entry.buffer.storage.undo_content()
                    load_rows(entry.buffer, entry.checked)
                    if back is not None:
                        undo.append(back)
            except BaseException:
                for back in reversed(undo):
                    back()
                raise
        for entry in self._entries:
            finish_taking(entry.buffer, entry.checked, more=entry.undelivered)


REMOTE_PART = "elsewhere"
"""Name of the part for remote members' checkpoints, and of their folder."""

_LOCK = ".elsewhere.lock"
"""The file lock that a save holds, so that it removes no folder of another save. The kernel
releases it when its holder dies."""

_TOKEN = re.compile("[0-9a-f]{32}")


def far_of(ensemble: EnsembleCore, path: str = "") -> Iterator[tuple[str, Member]]:
    """Yield the remote members at any depth, with names like local members."""
    for number, member in enumerate(ensemble._members):
        name = f"{path}members/{number}"
        if isinstance(member, EnsembleCore):
            yield from far_of(member, f"{name}/")
        elif isinstance(member, Member):
            yield name, member


# -- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def saved_remote(
    ensemble: EnsembleCore, path: str | os.PathLike[str]
) -> Iterator[dict[str, Any] | None]:
    """Save all remote members at the same time, into a folder of this save.

    The manifest is written inside the context, and is the first file to name the folder. Folders
    that no manifest names are removed afterwards. The context yields the manifest's part for remote
    members; None if there are none.
    """
    far = dict(far_of(ensemble))
    if not far:
        yield None
        return
    from filelock import FileLock  # imported here, because it loads asyncio

    folder = Path(path).expanduser().absolute()
    make_directory(folder)
    with FileLock(folder / _LOCK):
        token = uuid.uuid4().hex
        own = folder / REMOTE_PART / token
        try:
            make_directory(own)
            _all(far, lambda name, member: member.handle._ask_call("dumps", str(own / name)))
            for name in far:
                if not (own / name / MANIFEST).exists():
                    raise CheckpointError(
                        f"{name}: expected its {MANIFEST} in {own / name}, found none: a remote "
                        "member has to see the same file system"
                    )
            yield {"save": token, "members": sorted(far)}
        finally:
            with contextlib.suppress(CheckpointError):  # then the named folders are unknown
                named = _named(folder)
                for other in (folder / REMOTE_PART).iterdir():
                    if other.name not in named:
                        remove_tree(other)


def _all(far: Mapping[str, Member], ask: Callable[[str, Member], Any]) -> dict[str, Any]:
    """Send all requests, wait for all answers, then raise the first error."""
    asked, answers = {}, {}
    failed: list[tuple[str, Exception]] = []
    for name, member in far.items():
        try:
            asked[name] = ask(name, member)
        except Exception as error:
            failed.append((name, error))
    for name, one in asked.items():
        try:
            answers[name] = one.result()
        except Exception as error:
            failed.append((name, error))
    if failed:
        name, first = failed[0]
        raise naming_member(first, name) from first
    return answers


def _named(folder: Path) -> set[str]:
    """Return the folders of remote members that a checkpoint names."""
    found: set[str] = set()
    try:
        versions = checkpoint_versions(folder)
    except FileNotFoundError:
        return found
    for version in versions:
        with Checkpoint(folder, version) as saved:
            if REMOTE_PART in saved:
                found.add(_checked(saved.part(REMOTE_PART), folder)["save"])
    return found


def _checked(part: Any, path: Any) -> dict[str, Any]:
    if (
        not isinstance(part, dict)
        or not isinstance(part.get("members"), list)
        or not isinstance(part.get("save"), str)
        or not _TOKEN.fullmatch(part["save"])
    ):
        raise CheckpointError(f"the record of remote members in {path} is damaged: {part!r}")
    return part


def remote_folders(
    ensemble: EnsembleCore, saved: Checkpoint, path: str | os.PathLike[str], *, mmap: bool
) -> dict[str, tuple[Member, Path]]:
    """Return each remote member with the folder of its checkpoint, by name.

    Raises:
        ValueError: the saved members are not those of the ensemble, or ``mmap`` is given with
            remote members.
    """
    far = dict(far_of(ensemble))
    if mmap and far:
        raise ValueError(
            f"expected mmap=False with remote members, which are loaded into memory: {[*far]}"
        )
    part = {"save": "", "members": []}
    if REMOTE_PART in saved:
        part = _checked(saved.part(REMOTE_PART), path)
    if part["members"] != sorted(far):
        raise ValueError(
            f"expected the checkpoint of an ensemble with the remote members {sorted(far)}, got "
            f"{part['members']} in {path}"
        )
    own = Path(path).expanduser().absolute() / REMOTE_PART / str(part["save"])
    return {name: (member, own / name) for name, member in far.items()}


def load_remote_members_from(far: Mapping[str, tuple[Member, Path]], *, verify: bool) -> None:
    """Load the checkpoints of remote members, after a check of all files."""
    for name, (_, folder) in far.items():
        manifests = sorted(folder.rglob(MANIFEST))
        if not manifests:
            raise CheckpointError(f"{name}: expected {MANIFEST} in {folder}, found none")
        for manifest in manifests:
            with Checkpoint(manifest.parent) as saved:
                if verify:
                    saved.verify()
    _one_by_one({name: (member, "loads", str(folder)) for name, (member, folder) in far.items()})


def _one_by_one(calls: Mapping[str, tuple[Member, str, Any]]) -> None:
    done: list[str] = []
    for name, (member, method, argument) in calls.items():
        try:
            member.handle._ask_call(method, argument).result()
        except Exception as error:
            also = f"{name} ({', '.join(done)} had loaded theirs already)" if done else name
            raise naming_member(error, also) from error
        done.append(name)


# -- dictionaries ---------------------------------------------------------------------------------


def remote_states(ensemble: EnsembleCore) -> dict[str, Any]:
    """Return copies of the states of all remote members, by name."""
    far = dict(far_of(ensemble))
    return _all(far, lambda name, member: member.handle._ask_call("state_dict"))


def check_remote(ensemble: EnsembleCore, state: Any) -> dict[str, tuple[Member, Any]]:
    """Return each remote member with its saved state; ValueError if members differ."""
    far = dict(far_of(ensemble))
    found = state.get("_elsewhere", {}) if isinstance(state, Mapping) else {}
    if not isinstance(found, Mapping) or set(found) != set(far):
        raise ValueError(
            f"expected the state of an ensemble with the remote members {sorted(far)}, got "
            f"{sorted(found) if isinstance(found, Mapping) else found!r}"
        )
    return {name: (member, found[name]) for name, member in far.items()}


def load_remote_members(far: Mapping[str, tuple[Member, Any]]) -> None:
    """Load the states of remote members."""
    _one_by_one({name: (member, "load_state_dict", state) for name, (member, state) in far.items()})
