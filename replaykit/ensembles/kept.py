"""The states of members: taken, checked together, and put back all or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.mapped import check_mappable
from replaykit.buffer.prefetch import Drawn
from replaykit.buffer.state import (
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
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.drawn import EnsembleDrawn, Part
from replaykit.ensembles.elsewhere import Drawn as Asked
from replaykit.ensembles.elsewhere import Member
from replaykit.ensembles.pairs import naming_member
from replaykit.ensembles.told import depth
from replaykit.errors import CheckpointError
from replaykit.storages.content import Content
from replaykit.storages.saved import content_after_load

__all__ = [
    "JointLock",
    "Loading",
    "buffers_of",
    "checked_draws",
    "described",
    "ensembles_of",
    "leaves_of",
    "member_state",
    "members_locked",
    "saved_draws",
    "state_of_member",
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
        found.append(Part(part["member"], draws))
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


class Loading:
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
