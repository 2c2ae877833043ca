"""Save and load a mixture with all sources in it, as of one instant and all or nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from replaykit.buffer import ReplayBuffer
from replaykit.buffer import state as buffer_state
from replaykit.buffer.prefetch import Prefetcher
from replaykit.buffer.source import BufferSource, HandleSource
from replaykit.checkpoint import (
    Base,
    Checkpoint,
    MappedCheckpoint,
    Snapshot,
    checkpoint_versions,
    save_snapshot,
)
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.checkpoint.checkpoint_writer import exclusive
from replaykit.declared import Count, decode_state, matching, read_value
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, remove_tree
from replaykit.interrupts import deferred
from replaykit.mixture.choosing import member_named, naming_member
from replaykit.mixture.mixture import Mixture, gathered
from replaykit.storages.memory import by_value, from_value

_Calls = Mapping[str, tuple[HandleSource, str, Any]]
"""Remote members by name, each with the method to call and its argument."""

_OWN = "ensemble"
"""The name of the part with a mixture's own state."""


def _buffers(mixture: Mixture) -> dict[str, ReplayBuffer]:
    """Return the buffers of this process in a mixture, by their names in a checkpoint."""
    return {
        name: source.buffer for name, source in mixture.walk() if isinstance(source, BufferSource)
    }


def _mixtures(mixture: Mixture) -> dict[str, Mixture]:
    """Return a mixture and the mixtures in it, by the prefix of their members' names."""
    return {name: source for name, source in mixture.walk() if isinstance(source, Mixture)}


class JointLock:
    """Several locks, always taken in the same order."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = sorted({id(lock): lock for lock in locks}.values(), key=id)

    def __enter__(self) -> JointLock:
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


def _depth(mixture: Mixture) -> int:
    return 1 + max((_depth(s) for s in mixture.sources if isinstance(s, Mixture)), default=0)


@contextlib.contextmanager
def _locked(mixture: Mixture) -> Iterator[JointLock]:
    """Lock a mixture and everything in it; yield the joint lock of the storages."""
    with contextlib.ExitStack() as held:
        # Outer mixtures come first, as in draws. Those of equal depth are in a fixed order.
        inside = {id(one): one for one in _mixtures(mixture).values()}.values()
        for one in sorted(inside, key=lambda one: (-_depth(one), id(one))):
            held.enter_context(one.lock)
        for one in _mixtures(mixture).values():
            one.rewind()
        buffers = [*_buffers(mixture).values()]
        while True:
            storages = [buffer._storage for buffer in buffers]
            lock = JointLock([storage.lock for storage in storages])
            with lock:
                if all(map(lambda one, now: one._storage is now, buffers, storages)):
                    yield lock
                    return


# -- files ----------------------------------------------------------------------------------------


def save_mixture(mixture: Mixture, path: str | os.PathLike[str], *, keep: int, kind: str) -> None:
    """Save a mixture and all its members into one directory, or change nothing.

    Args:
        kind: the class name for the manifest.
    """
    with saved_remote(mixture, path) as far:

        def snapshot(base: Base) -> Snapshot:
            with _locked(mixture) as lock:
                parts: dict[str, Any] = {} if far is None else {REMOTE_PART: far}
                documents = []
                for name, buffer in _buffers(mixture).items():
                    own = buffer_state.saved_parts(buffer, path, by_identity=True)
                    documents.append({"name": name, **buffer_state.described(buffer, own)})
                    parts.update({f"{name}/{part}": state for part, state in own.items()})
                for name, one in _mixtures(mixture).items():
                    parts[f"{name}{_OWN}"] = _own_state(one)
                document = {
                    "components": {"buffer": kind},
                    "members": documents,
                    "batch_size": mixture.batch_size,
                }
                return Snapshot(parts, document, lock, base)

        save_snapshot(path, snapshot, keep=keep)


def load_mixture(
    mixture: Mixture,
    path: str | os.PathLike[str],
    *,
    version: int | None,
    mmap: bool,
    verify: bool | None,
) -> None:
    """Load a mixture that ``save_mixture`` saved."""
    names = [*_buffers(mixture)]
    with deferred, (MappedCheckpoint if mmap else Checkpoint)(path, version) as saved:
        if verify or (verify is None and not mmap):
            saved.verify()
        found = {name for name in saved.manifest["parts"] if name.endswith("/writer")}
        if found != {f"{name}/writer" for name in names} or _OWN not in saved:
            there = sorted(name.rsplit("/", 1)[0] for name in found)
            raise ValueError(
                f"expected the checkpoint of an ensemble with the members {names}, got "
                f"{there or 'that of one buffer'} in {path}"
            )
        far = _remote_loads(mixture, saved, path, mmap=mmap, verify=verify is not False)
        _load(
            mixture,
            {name: saved.part(f"{name}{_OWN}") for name in _mixtures(mixture)},
            lambda name, buffer: buffer_state.part_reader(saved, buffer, f"{name}/", mmap=mmap),
            far,
            path=path,
            mapped=mmap,
        )


# -- dictionaries ---------------------------------------------------------------------------------


def states_of(mixture: Mixture) -> dict[str, Any]:
    """Return a dictionary with copies of everything that ``save_mixture`` saves."""
    calls = {n: functools.partial(s.call, "state_dict") for n, s in _far_of(mixture).items()}
    far = gathered(calls)
    with _locked(mixture):
        return {
            "_elsewhere": far,
            "_members": {
                name: buffer_state.saved_parts(buffer, None, by_identity=True)
                for name, buffer in _buffers(mixture).items()
            },
            "_own": {name: _own_state(one) for name, one in _mixtures(mixture).items()},
            "_batch_size": mixture.batch_size,
        }


@dataclass(frozen=True)
class _SavedMixture:
    """The states of members, remote members and mixtures by name."""

    PREFIX: ClassVar[str] = "_"
    members: dict[str, Any]
    own: dict[str, Any]
    elsewhere: dict[str, Any] = field(default_factory=dict)


def load_states_of(mixture: Mixture, states: Any) -> None:
    """Load a copy of the result of ``states_of``."""
    found = decode_state(_SavedMixture, states, "the state of an ensemble")
    members, own, names = found.members, found.own, [*_buffers(mixture)]
    far = _remote_states(mixture, found.elsewhere)
    if set(members) != set(names) or set(own) != set(_mixtures(mixture)):
        raise ValueError(
            f"expected the state of an ensemble with the members {names}, got {sorted(members)}"
        )

    def reader(name: str, buffer: ReplayBuffer) -> Callable[..., Any]:
        def part(which: str, *default: Any) -> Any:
            state = members[name]
            if isinstance(state, Mapping) and (default or which in state):
                return state.get(which, *default)
            raise ValueError(f"expected the entry {which!r} in its state")

        return part

    _load(mixture, own, reader, far)


# -- both -----------------------------------------------------------------------------------------


def _load(
    mixture: Mixture,
    own: Mapping[str, Any],
    reader: Callable[[str, ReplayBuffer], Callable[..., Any]],
    far: _Calls,
    *,
    path: str | os.PathLike[str] | None = None,
    mapped: bool = False,
) -> None:
    """Load the states of all buffers and mixtures, or change nothing.

    Args:
        own: the states of mixtures.
        reader: a function that returns a function that reads the parts of a buffer.
        far: the calls that load the states of remote members. They are made without a lock, after
            all states have been checked.
        path: the directory of the checkpoint; None for state dicts.
        mapped: whether rows stay in the files of the checkpoint.
    """

    def checked_all() -> tuple[
        list[tuple[Mixture, _Own]], list[tuple[ReplayBuffer, buffer_state.CheckedState]]
    ]:
        mixtures = [(one, _checked_own(one, own[name])) for name, one in _mixtures(mixture).items()]
        undelivered: dict[str, list[Any]] = {}
        for name, one in _mixtures(mixture).items():
            _note_undelivered(one, name, own[name].get("prepared", []), undelivered)
        loads = []
        for name, buffer in _buffers(mixture).items():
            with member_named(name):
                state = buffer_state.read_state(buffer, reader(name, buffer), path, mapped=mapped)
                if name in undelivered:
                    draws = [*state.undelivered, *undelivered[name]]
                    state = replace(state, undelivered=draws)
                loads.append((buffer, buffer_state.check_state(buffer, state, stacklevel=8)))
        return mixtures, loads

    if far:
        with _locked(mixture):
            checked_all()
        _call_in_turn(far)
    with _locked(mixture):
        mixtures, loads = checked_all()
        with contextlib.ExitStack() as taken:
            for one, state in mixtures:
                taken.enter_context(_own_taken(one, state))
            buffer_state.apply_states(loads)
        for one, state in mixtures:
            _finish_own(one, state)


@dataclass(frozen=True)
class _Own:
    """A mixture's own part of a saved state, after its check."""

    sampler: dict[str, Any]
    transforms: dict[str, Any]
    generator: Any


def _own_state(mixture: Mixture) -> dict[str, Any]:
    return {
        "sampler": mixture.sampler.own_state(),
        "transforms": copy.deepcopy(mixture.chain.state_dict()),
        "generator": buffer_state.generator_state(mixture.generator),
    }


def _checked_own(mixture: Mixture, state: Any) -> _Own:
    """Return a saved state; ValueError if it is not that of such a mixture."""
    own = decode_state(_Own, state, "the state of an ensemble")
    mixture.sampler.check_own_state(own.sampler)
    mixture.chain.check_state(own.transforms)
    return replace(own, generator=buffer_state.saved_generator(own.generator))


@dataclass(frozen=True)
class _DrawOfMember:
    """The undelivered draws of a member in a draw of a mixture."""

    member: Count
    draws: list[Any]


@dataclass(frozen=True)
class _DrawOfMixture:
    """An undelivered draw of a mixture."""

    parts: list[_DrawOfMember]


def _note_undelivered(
    mixture: Mixture, path: str, records: object, found: dict[str, list[Any]]
) -> None:
    """Add the undelivered draws of a mixture to those of its buffers, by the buffers' names.

    Only earlier releases saved such draws.

    Raises:
        ValueError: such a mixture cannot have saved them.
    """
    for record in read_value(list[_DrawOfMixture], records, "prepared draws"):
        for part in record.parts:
            number = part.member
            if number >= len(mixture.sources):
                raise ValueError(f"expected a draw of {len(mixture.sources)} members, got {part!r}")
            source = mixture.sources[number]
            name = f"{path}members/{number}"
            if isinstance(source, Mixture):
                _note_undelivered(source, f"{name}/", part.draws, found)
            else:
                found.setdefault(name, []).extend(part.draws)


@contextlib.contextmanager
def _own_taken(mixture: Mixture, state: _Own) -> Iterator[None]:
    """Load the choice of members and the transforms; on an error, restore both."""
    chain, sampler = copy.deepcopy(mixture.chain.state_dict()), mixture.sampler.own_state()
    try:
        mixture.chain.load_state_dict(copy.deepcopy(state.transforms))
        mixture.sampler.load_own_state(state.sampler)
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            mixture.chain.load_state_dict(chain)
        mixture.sampler.load_own_state(sampler)
        raise


def _finish_own(mixture: Mixture, state: _Own) -> None:
    """Set a saved generator for later draws."""
    mixture.drop()
    mixture.generator = buffer_state.loaded_generator(mixture.generator, state.generator)


# -- remote members ------------------------------------------------------------------------------

REMOTE_PART = "elsewhere"
"""Name of the part for remote members' checkpoints, and of their folder."""

_LOCK = ".elsewhere.lock"
"""The file lock that a save holds, so that it removes no folder of another save. The kernel
releases it when its holder dies."""


def _far_of(mixture: Mixture) -> dict[str, HandleSource]:
    """Return the remote members at any depth, by names like those of local members."""
    return {name: source for name, source in mixture.walk() if isinstance(source, HandleSource)}


@contextlib.contextmanager
def saved_remote(mixture: Mixture, path: str | os.PathLike[str]) -> Iterator[dict[str, Any] | None]:
    """Save all remote members at the same time, into a folder of this save.

    The manifest is written inside the context, and is the first file to name the folder. Folders
    that no manifest names are removed afterwards. The context yields the manifest's part for remote
    members; None if there are none.
    """
    far = _far_of(mixture)
    if not far:
        yield None
        return
    folder = Path(path).expanduser().absolute()
    make_directory(folder)
    with exclusive(folder / _LOCK):
        token = uuid.uuid4().hex
        own = folder / REMOTE_PART / token
        try:
            make_directory(own)
            gathered(
                {n: functools.partial(one.call, "dumps", str(own / n)) for n, one in far.items()}
            )
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


def _named(folder: Path) -> set[str]:
    """Return the folders of remote members that a checkpoint names."""
    found: set[str] = set()
    try:
        versions = checkpoint_versions(folder)
    except FileNotFoundError:
        return found
    for version in versions:
        with Checkpoint(folder, version) as saved:
            found.add(_RemoteMembers.of(saved, folder).save)
    return found


@dataclass(frozen=True)
class _RemoteMembers:
    """The folder and the names of remote members in a checkpoint."""

    save: Annotated[str, matching("[0-9a-f]{32}")]
    members: list[str]

    @classmethod
    def of(cls, saved: Checkpoint, path: object) -> _RemoteMembers:
        """Return those that a checkpoint names."""
        if REMOTE_PART not in saved:
            return cls("", [])
        try:
            where = f"the record of remote members in {path}"
            return decode_state(cls, saved.part(REMOTE_PART), where)
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def _remote_loads(
    mixture: Mixture, saved: Checkpoint, path: str | os.PathLike[str], *, mmap: bool, verify: bool
) -> _Calls:
    """Check the checkpoints of remote members; return the calls that load them, by name.

    Raises:
        ValueError: the saved members are not those of the ensemble, or ``mmap`` is given with
            remote members.
        CheckpointError: a checkpoint is missing or damaged.
    """
    far = _far_of(mixture)
    if mmap and far:
        raise ValueError(
            f"expected mmap=False with remote members, which are loaded into memory: {[*far]}"
        )
    part = _RemoteMembers.of(saved, path)
    if part.members != sorted(far):
        raise ValueError(
            f"expected the checkpoint of an ensemble with the remote members {sorted(far)}, got "
            f"{part.members} in {path}"
        )
    calls: dict[str, tuple[HandleSource, str, Any]] = {}
    for name, member in far.items():
        folder = Path(path).expanduser().absolute() / REMOTE_PART / part.save / name
        manifests = sorted(folder.rglob(MANIFEST))
        if not manifests:
            raise CheckpointError(f"{name}: expected {MANIFEST} in {folder}, found none")
        for manifest in manifests:
            with Checkpoint(manifest.parent) as own:
                if verify:
                    own.verify()
        calls[name] = member, "loads", str(folder)
    return calls


def _remote_states(mixture: Mixture, found: dict[str, Any]) -> _Calls:
    """Return the calls that load the saved states of remote members, by name.

    Raises:
        ValueError: the saved members are not those of the ensemble.
    """
    far = _far_of(mixture)
    if set(found) != set(far):
        raise ValueError(f"expected the remote members {sorted(far)}, got {sorted(found)}")
    return {name: (member, "load_state_dict", found[name]) for name, member in far.items()}


def _call_in_turn(calls: _Calls) -> None:
    done: list[str] = []
    for name, (member, method, argument) in calls.items():
        try:
            member.call(method, argument).result()
        except Exception as error:
            also = f"{name} ({', '.join(done)} had loaded theirs already)" if done else name
            raise naming_member(error, also) from error
        done.append(name)


# -- pickling -------------------------------------------------------------------------------------


class _Taken:
    """The state of a buffer or mixture at an instant, to be pickled later."""

    def __init__(self, cls: Any, state: dict[str, Any]) -> None:
        self._cls, self._state = cls, state
        self._made: Any = None

    def made(self) -> Any:
        """Return the one object in that state."""
        if self._made is None:
            self._made = self._cls.__new__(self._cls)
            if self._cls is Mixture:
                unpickled(self._made, self._state)
            else:
                self._made.__setstate__(self._state)
        return self._made


def pickled(mixture: Mixture) -> dict[str, Any]:
    """Return the state of a mixture to be pickled.

    Other threads may sample while the rest is pickled. So the states of members are copied now.
    """
    taken: dict[int, _Taken] = {}

    def take(one: Any, state: Callable[[], dict[str, Any]]) -> _Taken:
        if id(one) not in taken:
            taken[id(one)] = _Taken(type(one), state())
        return taken[id(one)]

    def state_of_mixture(mixture: Mixture) -> dict[str, Any]:
        sources: list[Any] = []
        for source in mixture.sources:
            if isinstance(source, BufferSource):
                buffer: Any = take(source.buffer, source.buffer.__getstate__)
                sources.append(BufferSource(buffer, source.collate))
            elif isinstance(source, Mixture):
                sources.append(take(source, functools.partial(state_of_mixture, source)))
            else:
                sources.append(source)
        return {
            **{name: value for name, value in mixture.__dict__.items() if name != "lock"},
            "sources": sources,
            "sampler": mixture.sampler.alone(),
            "generator": by_value(buffer_state.generator_state(mixture.generator)),
            "_prefetcher": None,
        }

    with _locked(mixture):
        return state_of_mixture(mixture)


def unpickled(mixture: Mixture, state: dict[str, Any]) -> None:
    """Set the state that ``pickled`` returned."""
    mixture.__dict__.update(state)
    for number, source in enumerate(mixture.sources):
        if isinstance(source, _Taken):
            mixture.sources[number] = source.made()
        elif isinstance(source, BufferSource):
            source.buffer = cast(_Taken, source.buffer).made()
    mixture.generator = buffer_state.saved_generator(from_value(state["generator"]))
    mixture.sampler.follow(mixture.sources)
    if mixture.depth and not mixture.closed:
        mixture._prefetcher = Prefetcher(mixture.depth, cast(Any, mixture))
