"""Save and load an ensemble with its members."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

from replaykit.buffer.components import DataT
from replaykit.buffer.draw import drop_draws, rewind
from replaykit.buffer.prefetch import Prefetcher
from replaykit.buffer.state import UndeliveredDraw, generator_state, saved_generator
from replaykit.checkpoint import Base, Checkpoint, MappedCheckpoint, Snapshot, save_snapshot
from replaykit.ensembles.ensemble_drawing import EnsembleDrawing
from replaykit.ensembles.ensemble_storage import StorageEnsemble, WriterEnsemble
from replaykit.ensembles.member_state import (
    REMOTE_PART,
    MemberLoad,
    buffers_of,
    check_remote,
    described,
    ensembles_of,
    load_remote_members,
    load_remote_members_from,
    member_state,
    members_locked,
    remote_folders,
    remote_states,
    saved_remote,
    state_of_member,
    undelivered_of,
)
from replaykit.ensembles.remote_members import Member
from replaykit.interrupts import deferred
from replaykit.storages.tensor_bytes import by_value, from_value

__all__ = ["EnsembleSaving"]

_OWN = "ensemble"


class EnsembleSaving(EnsembleDrawing[DataT]):
    """``dumps``, ``loads``, ``state_dict``, ``load_state_dict``, pickling."""

    def dumps(self, path: str | os.PathLike[str], *, keep: int = 1) -> None:
        """Save the ensemble and all its members into one directory, or change nothing.

        The result is a checkpoint like that of a buffer. It holds all local members as of one
        instant. Unedited rows of a data set are not saved. The checkpoint only identifies them.

        Args:
            path: the directory. It is created with its parents. If it holds a checkpoint, it is
                replaced atomically. Remote members also save there, each as of a separate instant.
            keep: the maximum number of checkpoints in the directory afterwards.

        Raises:
            As for ``ReplayBuffer.dumps``.

        Cost: the cost of saving the members. Writers to any member wait for copies of 8 MiB.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> def make():
            ...     rbs = [ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2)]
            ...     return ReplayBufferEnsemble(*rbs, p=[1, 3], batch_size=4,
            ...                                 generator=torch.Generator().manual_seed(0))
            >>> ensemble, other = make(), make()
            >>> for rb in ensemble.members:
            ...     _ = rb.extend(torch.arange(9))
            >>> _ = ensemble.sample()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ensemble.dumps(folder)
            ...     other.loads(folder)
            >>> [bool((ensemble.sample() == other.sample()).all()) for _ in range(3)]
            [True, True, True]
        """
        with saved_remote(self, path) as far:
            save_snapshot(path, lambda base: self._snapshot(path, base, far), keep=keep)

    def _snapshot(
        self, path: str | os.PathLike[str], base: Base, far: Mapping[str, Any] | None = None
    ) -> Snapshot:
        with members_locked(self) as lock:
            rewind_all(self)
            parts: dict[str, Any] = {} if far is None else {REMOTE_PART: far}
            documents = []
            for name, buffer in buffers_of(self):
                for part, state in member_state(buffer, path).items():
                    parts[f"{name}/{part}"] = state
                documents.append(described(name, buffer))
            for name, ensemble in ensembles_of(self):
                parts[f"{name}{_OWN}"] = ensemble._own_state()
            document = {
                "components": {"buffer": type(self).__name__},
                "members": documents,
                "batch_size": self._batch_size,
            }
            return Snapshot(parts, document, lock, base)

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        mmap: bool = False,
        verify: bool | None = None,
    ) -> None:
        """Load an ensemble that ``dumps`` saved.

        This ensemble and the saved one then draw the same batches. Members are matched by number,
        and each loads by the rules of ``ReplayBuffer.loads``. If a member is a data set, it must be
        the saved data set.

        Args:
            path: the directory.
            version: the number of the checkpoint in it; None for the newest.
            mmap: leave the rows of members in the files, and read them as they are sampled. The
                rules of ``ReplayBuffer.loads`` apply to each member. Rows of data sets are always
                in files.
            verify: read every file and compare its checksum. None verifies only without ``mmap``.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointError: the checkpoint is damaged, or has a newer format; the error names the
                file.
            ValueError: the checkpoint has other members, or ``mmap`` is given with remote members;
                the error names the member.
            NotImplementedError: ``mmap`` on a system other than 64-bit POSIX.
            OSError: the operating system cannot map the files.

        The load first checks all members and reads the files. If this raises, nothing has changed.
        The load copies the former rows of members. If memory for the rows of a member runs out,
        earlier members get their former rows back. Remote members load last, one after the other.
        If a remote member fails then, the error names the remote members that have already loaded.
        """
        members = dict(buffers_of(self))
        with deferred, (MappedCheckpoint if mmap else Checkpoint)(path, version) as saved:
            if verify or (verify is None and not mmap):
                saved.verify()
            names = list(members)
            found = {name for name in saved.manifest["parts"] if name.endswith("/writer")}
            if found != {f"{name}/writer" for name in names} or _OWN not in saved:
                there = sorted(name.rsplit("/", 1)[0] for name in found)
                raise ValueError(
                    f"expected the checkpoint of an ensemble with the members {names}, got "
                    f"{there or 'that of one buffer'} in {path}"
                )
            far = remote_folders(self, saved, path, mmap=mmap)

            def part(name: str, which: str, *default: Any) -> Any:
                key = f"{name}/{which}"
                if default and key not in saved:
                    return default[0]
                if which == "storage" and "identity" not in saved.manifest["parts"][key]:
                    return saved.part(key, mapped=["groups"])
                if which in ("writer", "sampler") and mmap:
                    return saved.part(key, mapped=getattr(members[name], which).mapped_entries)
                return saved.part(key)

            own = {name: saved.part(f"{name}{_OWN}") for name, _ in ensembles_of(self)}
            self._load_states(
                lambda name, buffer: state_of_member(buffer, name, part, path, mapped=mmap),
                own,
                lambda: load_remote_members_from(far, verify=verify is not False),
                apart=bool(far),
            )

    dump = save = dumps
    load = loads

    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary with copies of everything that ``dumps`` saves.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(2))
            >>> ensemble = ReplayBufferEnsemble(rb)
            >>> state = ensemble.state_dict()
            >>> rb.empty()
            >>> ensemble.load_state_dict(state)
            >>> rb[:]
            tensor([0, 1])
        """
        far = remote_states(self)
        with members_locked(self):
            rewind_all(self)
            return {
                "_elsewhere": far,
                "_members": {name: member_state(buffer, None) for name, buffer in buffers_of(self)},
                "_own": {name: ensemble._own_state() for name, ensemble in ensembles_of(self)},
                "_batch_size": self._batch_size,
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state from ``state_dict``, by the rules of ``loads``.

        Raises:
            ValueError: entries are missing, or do not fit this ensemble; nothing has changed.
        """
        members = state_dict.get("_members") if isinstance(state_dict, Mapping) else None
        own = state_dict.get("_own") if isinstance(state_dict, Mapping) else None
        names = [name for name, _ in buffers_of(self)]
        far = check_remote(self, state_dict)
        if (
            not isinstance(members, Mapping)
            or not isinstance(own, Mapping)
            or (set(members) != set(names) or set(own) != {name for name, _ in ensembles_of(self)})
        ):
            found = sorted(members) if isinstance(members, Mapping) else "none"
            raise ValueError(
                f"expected the state of an ensemble with the members {names}, got {found}"
            )

        def part(name: str, which: str, *default: Any) -> Any:
            state = members[name]
            if default and isinstance(state, Mapping):
                return state.get(which, *default)
            if not isinstance(state, Mapping) or which not in state:
                raise ValueError(f"expected the entry {which!r} in its state")
            return state[which]

        self._load_states(
            lambda name, buffer: state_of_member(buffer, name, part, None),
            own,
            lambda: load_remote_members(far),
            apart=bool(far),
        )

    def _load_states(
        self,
        state_of: Any,
        own: Mapping[str, Any],
        load_remote: Callable[[], None],
        *,
        apart: bool,
    ) -> None:
        """Load the states of all members and ensembles, or change nothing.

        Args:
            load_remote: a function that loads the states of remote members. It is called without a
                lock, after all states have been checked.
            apart: whether there are remote members.
        """
        if apart:
            with members_locked(self):
                self._checked_all(state_of, own)
            load_remote()
        with members_locked(self):
            ensembles, loading = self._checked_all(state_of, own)
            with contextlib.ExitStack() as taken:
                for ensemble, state in ensembles:
                    taken.enter_context(ensemble._own_taken(state))
                loading.apply()
            for ensemble, state in ensembles:
                ensemble._finish_own(state.random)

    def _checked_all(
        self, state_of: Any, own: Mapping[str, Any]
    ) -> tuple[list[tuple[Any, _Own]], MemberLoad]:
        """Return checked states for all members and ensembles; change nothing.

        The caller holds the locks.
        """
        ensembles = [
            (ensemble, ensemble._checked_own(own[name])) for name, ensemble in ensembles_of(self)
        ]
        loading = MemberLoad(one for _, state in ensembles for one in state.undelivered)
        for name, buffer in buffers_of(self):
            loading.check(name, buffer, state_of)
        return ensembles, loading

    # -- the ensemble's own state ---------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {
            "sampler": self._sampler.own_state(),
            "transforms": copy.deepcopy(self._chain.state_dict()),
            "generator": generator_state(self._generator),
        }

    def _checked_own(self, state: Any) -> _Own:
        """Return a saved state; ValueError if it is not that of such an ensemble."""
        names = ("sampler", "transforms", "generator")
        if not isinstance(state, Mapping) or any(name not in state for name in names):
            raise ValueError(f"expected the entries {names} in the state of an ensemble")
        self._sampler.check_own_state(state["sampler"])
        self._chain.check_state(state["transforms"])
        undelivered = list(undelivered_of(self, state.get("prepared", [])))
        generator = saved_generator(state["generator"])
        return _Own(state["sampler"], state["transforms"], generator, undelivered)

    @contextlib.contextmanager
    def _own_taken(self, state: _Own) -> Iterator[None]:
        """Load the choice of members and the transforms; on an error, restore both."""
        rewind(self)
        chain, sampler = copy.deepcopy(self._chain.state_dict()), self._sampler.own_state()
        try:
            self._chain.load_state_dict(copy.deepcopy(state.transforms))
            self._sampler.load_own_state(state.sampler)
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._chain.load_state_dict(chain)
            self._sampler.load_own_state(sampler)
            raise

    def _finish_own(self, saved: torch.Generator | None) -> None:
        """Set a saved generator for later draws."""
        drop_draws(self)
        self._pass_ended = False
        current = self._generator
        if saved is not None:
            if current is not None and current.device == saved.device:
                current.set_state(saved.get_state())
            else:
                self._generator = saved

    # -- pickling -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        with members_locked(self):
            rewind_all(self)
            state = dict(self.__dict__)
            state["_prefetcher"] = state["_making"] = None
            state["_generator"] = by_value(generator_state(self._generator))
            if self._prefetch_depth:
                # Other threads may sample while the rest is pickled. So the states of members are
                # copied now.
                state["_members"] = [
                    member
                    if isinstance(member, Member)
                    else _Taken(type(member), member.__getstate__())
                    for member in self._members
                ]
                state["_storage"] = state["_writer"] = None
                state["_sampler"] = self._sampler.alone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["_members"], list):
            self._members = tuple(
                one.made() if isinstance(one, _Taken) else one for one in state["_members"]
            )
            self._storage = StorageEnsemble(*(member.storage for member in self._members))
            self._writer = WriterEnsemble(*(member.writer for member in self._members))
            for part in (self._storage, self._sampler, self._writer):
                part.attach_members(self._members)
        self._making = threading.RLock()
        self._generator = saved_generator(from_value(state["_generator"]))
        if self._prefetch_depth and not self._closed:
            self._prefetcher = Prefetcher(self._prefetch_depth, cast(Any, self))


def rewind_all(ensemble: Any) -> None:
    """Undo the undelivered draws of an ensemble and of the ensembles in it, outer ones first.

    The caller holds the locks.
    """
    for _, one in ensembles_of(ensemble):
        rewind(one)


class _Taken(NamedTuple):
    """The state of a buffer at an instant, to be pickled later."""

    cls: Any
    state: dict[str, Any]

    def made(self) -> Any:
        """Return a buffer in that state."""
        buffer = self.cls.__new__(self.cls)
        buffer.__setstate__(self.state)
        return buffer


class _Own(NamedTuple):
    """The ensemble's own part of a saved state, after its check."""

    sampler: dict[str, Any]
    transforms: dict[str, Any]
    random: torch.Generator | None
    undelivered: list[tuple[Any, UndeliveredDraw]]
