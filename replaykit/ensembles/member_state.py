"""Save and load the states of members, all or nothing."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.buffer_state import (
    BufferState,
    CheckedState,
    check_random,
    check_rows,
    check_state,
    checked_draw,
    draw_state,
    finish_taking,
    generator_state,
    parts_taken,
    prepared_state,
    saved_sampler,
    take_rows,
)
from replaykit.buffer.component_checks import check_mappable
from replaykit.buffer.prefetch import Drawn
from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.ensembles.batch_info import depth
from replaykit.ensembles.ensemble_core import EnsembleCore
from replaykit.ensembles.ensemble_sampler import naming_member
from replaykit.ensembles.remote_draws import EnsembleDrawn, MemberDraw
from replaykit.ensembles.remote_members import Member
from replaykit.ensembles.remote_members import RemoteDraw as Asked
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, remove_tree
from replaykit.storages.content import Content
from replaykit.storages.save_hooks import content_after_load

__all__ = [
    "ELSEWHERE",
    "JointLock",
    "MemberLoad",
    "buffers_of",
    "checked_draws",
    "checked_elsewhere",
    "described",
    "ensembles_of",
    "folders_elsewhere",
    "leaves_of",
    "load_elsewhere",
    "member_state",
    "members_locked",
    "saved_draws",
    "saved_elsewhere",
    "state_of_member",
    "states_elsewhere",
    "take_elsewhere",
]


def buffers_of(ensemble: EnsembleCore, path: str = "") -> Iterator[tuple[str, ReplayBuffer]]:
    """Yields the buffers of an ensemble that are here, also those of members that are ensembles,
    with the names of their parts in a checkpoint."""
    for number, member in enumerate(ensemble._members):
        name = f"{path}members/{number}"
        if isinstance(member, EnsembleCore):
            yield from buffers_of(member, f"{name}/")
        elif not isinstance(member, Member):
            yield name, member


def ensembles_of(ensemble: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields an ensemble and its members that are ones, with the beginning of their names."""
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
    """Holds the locks of an ensemble and of everything in it; gives that of the storages."""
    with contextlib.ExitStack() as held:
        # Above before below, as draws take them; beside one another in the order of all others.
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


def saved_draws(ensemble: EnsembleCore, drawn: EnsembleDrawn) -> dict[str, Any]:
    """Returns a draw without its rows, as values that can be saved. The locks are held."""
    parts = []
    for part in drawn.parts:
        member = ensemble._members[part.member]
        if isinstance(member, EnsembleCore):
            draws = [saved_draws(member, one) for one in part.draws]
        elif isinstance(member, Member):
            draws = [{"rows": one.rows, "seed": one.seed} for one in part.draws]
        else:
            draws = [draw_state(one, member.storage) for one in part.draws]
        parts.append({"member": part.member, "draws": draws})
    return {
        "members": list(drawn.members),
        "rows": drawn.rows,
        "size": drawn.size,
        "ran_out": drawn.ran_out,
        "parts": parts,
    }


def checked_draws(ensemble: EnsembleCore, record: object) -> EnsembleDrawn:
    """Returns a saved draw; ValueError where it is not one of such an ensemble."""
    fields = record if isinstance(record, Mapping) else {}
    members, parts = fields.get("members"), fields.get("parts")
    numbers = [fields.get("rows"), fields.get("size")]
    known = range(len(ensemble))
    if not (
        isinstance(members, list)
        and isinstance(parts, list)
        and all(type(member) is int and member in known for member in members)
        and all(type(number) is int and number > 0 for number in numbers)
        and type(fields.get("ran_out")) is bool
        and all(isinstance(part, Mapping) and isinstance(part.get("draws"), list) for part in parts)
        and [part.get("member") for part in parts] == sorted(set(members))
    ):
        raise ValueError(f"expected a prepared draw of {len(ensemble)} members, got {record!r}")
    found = []
    for part in parts:
        member = ensemble._members[part["member"]]
        draws: list[Any]
        if isinstance(member, EnsembleCore):
            draws = [checked_draws(member, one) for one in part["draws"]]
        elif isinstance(member, Member):
            draws = [Asked.of(member, one) for one in part["draws"]]
        else:
            draws = [checked_draw(one) for one in part["draws"]]
        found.append(MemberDraw(part["member"], draws))
    rows, size = numbers
    return EnsembleDrawn(list(members), rows, size, found, fields["ran_out"])  # type: ignore[arg-type]


def leaves_of(ensemble: EnsembleCore, drawn: EnsembleDrawn) -> Iterator[tuple[ReplayBuffer, Drawn]]:
    """Yields what the buffers that are here have drawn for a draw."""
    for part in drawn.parts:
        member = ensemble._members[part.member]
        for one in part.draws:
            if isinstance(member, EnsembleCore):
                yield from leaves_of(member, one)
            elif not isinstance(member, Member):
                yield member, one


# -- members --------------------------------------------------------------------------------------


def member_state(buffer: ReplayBuffer, path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Returns the state of a buffer in parts; its lock is held.

    Args:
        path: the directory that it will be saved to, where large parts may be read later; None: it
            will not be.
    """
    storage, identity = buffer.storage, buffer.storage.identity
    if path is not None and identity is None:
        return buffer._saved_parts(storage, path)
    prepared = prepared_state(buffer)  # first, since it may give draws back
    sampler = saved_sampler(buffer.sampler, tracked=None if path is None else storage)
    return {
        "storage": storage.state_dict() if identity is None else {"identity": identity},
        "writer": buffer.writer.state_dict(),
        "sampler": sampler,
        "transforms": buffer.transform.state_dict(),
        "generator": generator_state(buffer._generator),
        "prepared": prepared,
    }


def described(name: str, buffer: ReplayBuffer) -> dict[str, Any]:
    """What the head of a manifest says of a member."""
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
    part: Callable[[str, str], Any],
    path: str | os.PathLike[str] | None,
    *,
    mapped: bool = False,
) -> BufferState:
    """Returns the saved state of a buffer.

    Args:
        name: of the buffer in the checkpoint.
        part: returns a part of a buffer by both names.
        path: the directory that it was saved to; None: it is a state dict.
        mapped: whether rows stay in the files there.

    Raises:
        ValueError: it is not one of such a storage. CheckpointError: it is damaged.
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
    names = ("writer", "sampler", "transforms", "generator", "prepared")
    writer, sampler, transforms, generator, prepared = (part(name, which) for which in names)
    return BufferState(
        content,
        rows,
        writer,
        sampler,
        transforms,
        generator,
        prepared,
        mapped=mapped and not same,
        same_rows=same,
    )


def _check_identity(own: Any, saved: Any) -> None:
    """Raises ValueError where a storage does not hold the rows that were not saved."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected what tells a data set, got {saved!r}")
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
            else "another one, or other episodes of it"
        )
        raise ValueError(
            "expected the data set that the ensemble was saved with, whose rows are not "
            f"in the checkpoint; got {found}"
        )


@dataclass
class _Entry:
    buffer: ReplayBuffer
    checked: CheckedState
    elsewhere: list[Drawn] = field(default_factory=list)


class MemberLoad:
    """Has several buffers take over states, all or nothing. Their locks are held.

    Args:
        draws: saved draws of ensembles, with the generator that each is made by, if one was saved.
    """

    def __init__(
        self, draws: Sequence[tuple[EnsembleCore, EnsembleDrawn, torch.Generator | None]]
    ) -> None:
        self._entries: list[_Entry] = []
        self._elsewhere: dict[int, list[tuple[Drawn, torch.Generator | None]]] = {}
        for ensemble, drawn, generator in draws:
            for buffer, one in leaves_of(ensemble, drawn):
                self._elsewhere.setdefault(id(buffer), []).append((one, generator))

    def check(
        self, name: str, buffer: ReplayBuffer, state_of: Callable[[str, ReplayBuffer], BufferState]
    ) -> None:
        """Checks a state against a buffer, which will take it over; changes nothing.

        Raises:
            ValueError: it does not fit; names the member.
        """
        try:
            state = state_of(name, buffer)
            checked = check_state(buffer, state, stacklevel=8)
            elsewhere = self._elsewhere.get(id(buffer), [])
            check_rows([one for one, _ in elsewhere], state)
            for one, generator in elsewhere:
                if generator is not None:
                    check_random([one], generator)
        except (ValueError, TypeError) as error:
            raise naming_member(error, name) from error
        self._entries.append(_Entry(buffer, checked, [one for one, _ in elsewhere]))

    def take(self) -> None:
        """Has all of them take over their states; where one fails, all have what they had."""
        with contextlib.ExitStack() as parts:
            for entry in self._entries:
                parts.enter_context(parts_taken(entry.buffer, entry.checked))
            undo: list[Callable[[], None]] = []
            try:
                for place, entry in enumerate(self._entries):
                    back = None
                    if place + 1 < len(self._entries) and not entry.checked.state.same_rows:
                        back = entry.buffer.storage.undo_content()
                    take_rows(entry.buffer, entry.checked)
                    if back is not None:
                        undo.append(back)
            except BaseException:
                for back in reversed(undo):
                    back()
                raise
        for entry in self._entries:
            finish_taking(entry.buffer, entry.checked, elsewhere=entry.elsewhere)

    def deliverable(self, ensemble: EnsembleCore, drawn: EnsembleDrawn) -> bool:
        """Whether the rows of a saved draw lie where they did; else it goes back, as far as it has
        not yet."""
        moved = {id(e.buffer) for e in self._entries if e.checked.rows is not None}
        leaves = list(leaves_of(ensemble, drawn))
        if not any(id(buffer) in moved for buffer, _ in leaves):
            return True
        for buffer, one in leaves:
            if id(buffer) not in moved:
                buffer.sampler.put_back([one.anchors], buffer.storage)
        return False


ELSEWHERE = "elsewhere"
"""The part that says where members elsewhere have saved themselves, and the folder of it all."""

_LOCK = ".elsewhere.lock"
"""Who saves holds it: what a save removes is then nobody else's. The kernel lets go of it when its
holder dies."""

_TOKEN = re.compile("[0-9a-f]{32}")


def far_of(ensemble: EnsembleCore, path: str = "") -> Iterator[tuple[str, Member]]:
    """Yields the members elsewhere, also those of members, by names as those here have."""
    for number, member in enumerate(ensemble._members):
        name = f"{path}members/{number}"
        if isinstance(member, EnsembleCore):
            yield from far_of(member, f"{name}/")
        elif isinstance(member, Member):
            yield name, member


# -- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def saved_elsewhere(
    ensemble: EnsembleCore, path: str | os.PathLike[str]
) -> Iterator[dict[str, Any] | None]:
    """Has members elsewhere save themselves, all at a time, into a folder of this save alone.

    Nothing names it before the manifest does that is written inside; what no manifest names is
    removed afterwards. Gives what the manifest has to say; None where there are no such members.
    """
    far = dict(far_of(ensemble))
    if not far:
        yield None
        return
    from filelock import FileLock  # which loads asyncio, for whoever imports the package

    folder = Path(path).expanduser().absolute()
    make_directory(folder)
    with FileLock(folder / _LOCK):
        token = uuid.uuid4().hex
        own = folder / ELSEWHERE / token
        try:
            make_directory(own)
            _all(far, lambda name, member: member.handle._ask_call("dumps", str(own / name)))
            for name in far:
                if not (own / name / MANIFEST).exists():
                    raise CheckpointError(
                        f"{name}: expected its {MANIFEST} in {own / name}, found none: a member "
                        "elsewhere has to see the same file system"
                    )
            yield {"save": token, "members": sorted(far)}
        finally:
            with contextlib.suppress(CheckpointError):  # then nobody knows what is named
                named = _named(folder)
                for other in (folder / ELSEWHERE).iterdir():
                    if other.name not in named:
                        remove_tree(other)


def _all(far: Mapping[str, Member], ask: Callable[[str, Member], Any]) -> dict[str, Any]:
    """Asks all, and waits for all, whatever the others say; then raises the first error."""
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
    """The folders of members elsewhere that a checkpoint names."""
    found: set[str] = set()
    try:
        versions = checkpoint_versions(folder)
    except FileNotFoundError:
        return found
    for version in versions:
        with Checkpoint(folder, version) as saved:
            if ELSEWHERE in saved:
                found.add(_checked(saved.part(ELSEWHERE), folder)["save"])
    return found


def _checked(part: Any, path: Any) -> dict[str, Any]:
    if (
        not isinstance(part, dict)
        or not isinstance(part.get("members"), list)
        or not isinstance(part.get("save"), str)
        or not _TOKEN.fullmatch(part["save"])
    ):
        raise CheckpointError(f"what {path} says of members elsewhere is damaged: {part!r}")
    return part


def folders_elsewhere(
    ensemble: EnsembleCore, saved: Checkpoint, path: str | os.PathLike[str], *, mmap: bool
) -> dict[str, tuple[Member, Path]]:
    """Where members elsewhere have saved themselves, by name.

    Raises:
        ValueError: those that were saved are others than those of the ensemble; ``mmap`` with
            members elsewhere.
    """
    far = dict(far_of(ensemble))
    if mmap and far:
        raise ValueError(
            f"expected mmap=False with members elsewhere, which are loaded into memory: {[*far]}"
        )
    part = {"save": "", "members": []}
    if ELSEWHERE in saved:
        part = _checked(saved.part(ELSEWHERE), path)
    if part["members"] != sorted(far):
        raise ValueError(
            f"expected the checkpoint of an ensemble with the members {sorted(far)} elsewhere, got "
            f"{part['members']} in {path}"
        )
    own = Path(path).expanduser().absolute() / ELSEWHERE / str(part["save"])
    return {name: (member, own / name) for name, member in far.items()}


def load_elsewhere(far: Mapping[str, tuple[Member, Path]], *, verify: bool) -> None:
    """Has members elsewhere read what they have saved, after all files have been looked at."""
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
            also = f"{name} ({', '.join(done)} had theirs already)" if done else name
            raise naming_member(error, also) from error
        done.append(name)


# -- dictionaries ---------------------------------------------------------------------------------


def states_elsewhere(ensemble: EnsembleCore) -> dict[str, Any]:
    """Copies of all that members elsewhere hold, by name."""
    far = dict(far_of(ensemble))
    return _all(far, lambda name, member: member.handle._ask_call("state_dict"))


def checked_elsewhere(ensemble: EnsembleCore, state: Any) -> dict[str, tuple[Member, Any]]:
    """What each member elsewhere is to take over; ValueError where they are others."""
    far = dict(far_of(ensemble))
    found = state.get("_elsewhere", {}) if isinstance(state, Mapping) else {}
    if not isinstance(found, Mapping) or set(found) != set(far):
        raise ValueError(
            f"expected the state of an ensemble with the members {sorted(far)} elsewhere, got "
            f"{sorted(found) if isinstance(found, Mapping) else found!r}"
        )
    return {name: (member, found[name]) for name, member in far.items()}


def take_elsewhere(far: Mapping[str, tuple[Member, Any]]) -> None:
    """Has members elsewhere take over their states."""
    _one_by_one({name: (member, "load_state_dict", state) for name, (member, state) in far.items()})
