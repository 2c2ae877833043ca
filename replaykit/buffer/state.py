"""Save, check and load the state of a buffer."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.context
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch

from replaykit.buffer.components import (
    check_mappable,
    check_mapped_rows,
    claim_parts,
    limiter_queue,
    uses_of,
)
from replaykit.buffer.draw import drop_draws, rewind
from replaykit.buffer.prefetch import Prefetcher
from replaykit.checkpoint import Base, Checkpoint, MappedCheckpoint, Snapshot
from replaykit.declared import Rule, decode_state, encode_state
from replaykit.errors import CheckpointError
from replaykit.interrupts import deferred
from replaykit.pace import LimiterQueue
from replaykit.samplers import Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.samplers.sampler import equal_states
from replaykit.storages import LazyTensorStorage, Storage
from replaykit.storages.content import Content
from replaykit.storages.memory import by_value, from_value
from replaykit.storages.save_hooks import content_after_load, content_to_save, warn_left_out
from replaykit.storages.taken_rows import load_taken, taken_mask
from replaykit.writers.writer import ledger_of

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


@dataclass(frozen=True)
class BufferState:
    """The parts of a saved buffer.

    Attributes:
        content: the rows; None if the storage loads its own state dict, which is ``storage``.
        writer, sampler, transforms: state dicts of the components.
        generator: device and state of the generator; None without one.
        undelivered: prefetched draws, which only earlier releases saved.
        mapped: whether the rows stay in the files of the checkpoint.
        same_rows: whether the rows were not saved because the storage already holds them.
        pace: counts of a rate limiter; None without one.
        observers: states of the objects that are registered with functions for events.
        taken: which rows were taken from a queue, bool ``[rows * lanes]``; None if none were.
    """

    content: Content | None
    storage: Mapping[str, Any] | None
    writer: dict[str, Any]
    sampler: dict[str, Any]
    transforms: dict[str, Any]
    generator: Mapping[str, Any] | None
    undelivered: list[Any]
    mapped: bool = False
    same_rows: bool = False
    pace: Mapping[str, int] | None = None
    observers: Mapping[str, Any] | None = None
    taken: torch.Tensor | None = None


def saved_sampler(sampler: Sampler, *, tracked: Storage | None = None) -> dict[str, Any]:
    """Return a sampler's state together with the kind of the sampler.

    Custom samplers need not store their kind themselves. The caller holds the lock.

    Args:
        tracked: the storage, if the save writes only changes; else None.
    """
    state = sampler.state_dict() if tracked is None else sampler.state_to_save(tracked)
    if isinstance(state, Mapping) and state.get("_kind") == sampler.kind:
        return dict(state)
    return {"_kind": sampler.kind, "_state": state}


def _checked_sampler(sampler: Sampler, saved: Any, storage: Storage) -> Any:
    """Return the state for the sampler; ValueError if it is that of another kind."""
    if not (isinstance(saved, Mapping) and "_state" in saved):
        sampler.check_state(saved, storage)
        return saved
    if saved.get("_kind") != sampler.kind:
        raise ValueError(
            f"expected the state of a {sampler.kind!r} sampler, got {saved.get('_kind')!r}"
        )
    return copy.deepcopy(saved["_state"])


def generator_state(generator: torch.Generator | None) -> dict[str, Any] | None:
    """Return device and state of a generator, as values that can be saved."""
    if generator is None:
        return None
    return {"device": str(generator.device), "state": generator.get_state()}


def _is_index(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim in (1, 2)


@dataclass(frozen=True)
class UndeliveredDraw:
    """A prefetched draw in a checkpoint of an earlier release, which saved these draws.

    Attributes:
        anchors: the index that the sampler drew.
        ran_out: whether the draw ended a pass.
    """

    anchors: Annotated[Any, Rule("an int64 index", _is_index)]
    ran_out: bool


@dataclass(frozen=True)
class CheckedState:
    """A state that a buffer can load, with the results of its check.

    Attributes:
        state: the state itself.
        sampler: the state in the form that the sampler loads.
        writer: the writer's state, including begins of kept episodes that only dropped rows show.
        generator, undelivered: the checked generator, and the checked prefetched draws.
        target: the destination of the rows, in the storage's own form.
        rows: the slots of the rows to keep; None if all rows keep their slots.
    """

    state: BufferState
    sampler: Any
    writer: dict[str, Any]
    generator: torch.Generator | None
    undelivered: list[UndeliveredDraw]
    target: Any
    rows: torch.Tensor | None


def apply_state(buffer: ReplayBuffer, state: BufferState) -> None:
    """Load a saved state into a buffer, or change nothing. The caller holds the lock.

    Raises:
        ValueError: a part belongs to another kind of component than the buffer has, or contradicts
            another part.
    """
    apply_states([(buffer, check_state(buffer, state, stacklevel=7))])


def apply_states(loads: Sequence[tuple[ReplayBuffer, CheckedState]]) -> None:
    """Load checked states into buffers. If one load fails, restore all buffers.

    The caller holds the locks.
    """
    with contextlib.ExitStack() as parts:
        for buffer, checked in loads:
            parts.enter_context(parts_taken(buffer, checked))
        undo: list[Callable[[], None]] = []
        try:
            for place, (buffer, checked) in enumerate(loads, 1):
                back = None
                if place < len(loads) and not checked.state.same_rows:
                    back = buffer._storage.undo_content()
                load_rows(buffer, checked)
                if back is not None:
                    undo.append(back)
        except BaseException:
            for back in reversed(undo):
                back()
            raise
    for buffer, checked in loads:
        finish_taking(buffer, checked)


def check_state(buffer: ReplayBuffer, state: BufferState, *, stacklevel: int) -> CheckedState:
    """Check a saved state against a buffer; change nothing. The caller holds the lock.

    Args:
        stacklevel: as for ``warnings.warn``, for the warning about rows that will be dropped.

    Raises:
        ValueError: a part belongs to another kind of component than the buffer has, or contradicts
            another part.
    """
    storage, writer, sampler = buffer._storage, buffer._writer, buffer._sampler
    writer.check_state(state.writer)
    sampler_state = _checked_sampler(sampler, state.sampler, storage)
    buffer._chain.check_state(state.transforms)
    generator = saved_generator(state.generator)
    undelivered = undelivered_draws(state.undelivered)
    LimiterQueue.check_state(state.pace)
    _check_stored(sampler, sampler_state, state.content)
    _check_taken(state)
    target, rows = _target_of_rows(buffer, state, stacklevel)
    check_rows(undelivered, state)
    last = next((at for at, draw in enumerate(undelivered, 1) if draw.ran_out), None)
    if last is not None and sampler.passes and "_remaining" in sampler_state:
        undelivered = undelivered[:last]  # the next pass has not begun
        sampler_state = {**sampler_state, "_remaining": None}
    writer_state = state.writer
    if state.content is not None:
        # Dropped rows show where kept episodes begin, so the writer reads them before they are
        # lost.
        writer_state = writer.state_of_subset(state.content, writer_state, rows)
    return CheckedState(state, sampler_state, writer_state, generator, undelivered, target, rows)


@contextlib.contextmanager
def parts_taken(buffer: ReplayBuffer, checked: CheckedState) -> Iterator[None]:
    """Load the states of transforms and sampler; on an error, restore the old states.

    An error inside the context also restores them. Both loads may run user code. Undelivered draws
    are undone first, because the old state of the sampler would otherwise lack their rows. The
    caller holds the lock.
    """
    rewind(buffer)
    sampler = buffer._sampler
    chain_before = copy.deepcopy(buffer._chain.state_dict())
    sampler_before = copy.deepcopy(sampler.state_dict())
    observers, saved = buffer._observers, checked.state.observers
    observers_before = None if observers is None else observers.state_dict()
    try:
        if observers is not None and saved is not None:
            observers.load_state_dict(copy.deepcopy(saved))
        buffer._chain.load_state_dict(copy.deepcopy(checked.state.transforms))
        sampler.load_state_dict(checked.sampler)
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            buffer._chain.load_state_dict(chain_before)
        with contextlib.suppress(Exception):
            sampler.load_state_dict(sampler_before)
        if observers is not None and observers_before is not None:
            observers.load_state_dict(observers_before)
        raise


def load_rows(buffer: ReplayBuffer, checked: CheckedState) -> None:
    """Load the rows. The storage allocates memory before it changes anything."""
    storage, state = buffer._storage, checked.state
    if state.same_rows:
        return
    if state.content is None:
        storage.load_state_dict(dict(state.storage or {}))
    elif state.mapped and state.content.groups:
        cast(LazyTensorStorage, storage).map_content(state.content, checked.target.slots)
    else:
        content = replace(state.content, ledger=ledger_of(state.writer))
        storage.load_content(content, checked.target, checked.rows)


def finish_taking(buffer: ReplayBuffer, checked: CheckedState) -> None:
    """Load the rest of a state, which cannot fail. The caller holds the lock."""
    storage, sampler, rows = buffer._storage, buffer._sampler, checked.rows
    drop_draws(buffer)
    buffer._pass_ended, buffer._restarted = False, True
    buffer._writer.restore(checked.writer, rows)
    buffer._generator = sampler.generator = loaded_generator(buffer._generator, checked.generator)
    if checked.undelivered:
        sampler.put_back([draw.anchors for draw in checked.undelivered], storage)
    if rows is not None:
        sampler.moved(rows, storage)
    if buffer._shared:  # other processes may overwrite rows before the next draw
        sampler.about_to_write()
    load_taken(storage, checked.state.taken, rows)
    if buffer._pace is not None:
        buffer._pace.load_state(checked.state.pace, len(buffer))
    if buffer._observers is not None:
        buffer._observers.look(storage)


def _check_stored(sampler: Sampler, saved: Any, content: Content | None) -> None:
    """Raise ValueError if a sampler's state is for another number of rows."""
    known = sampler.stored_in(saved)
    if known is None or content is None:
        return
    stored = content.rows * content.lanes.numel()
    if known != stored:
        raise ValueError(f"expected {stored} rows in the sampler's state, got {known}")


def _check_taken(state: BufferState) -> None:
    """Raise ValueError if the taken rows are not those of the saved rows."""
    mask, content = state.taken, state.content
    rows = None if content is None else content.rows * content.lanes.numel()
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or (mask.dtype, list(mask.shape)) != (torch.bool, [rows]):
        raise ValueError(f"expected the taken ones of {rows} rows, got {mask!r}")


def _target_of_rows(
    buffer: ReplayBuffer, state: BufferState, stacklevel: int
) -> tuple[Any, torch.Tensor | None]:
    """Return the storage's target, and the slots to keep if rows must move."""
    storage, ledger = buffer._storage, state.writer["_ledger"]
    if state.content is None:
        if storage.ledger.slots != ledger["slots"]:
            raise ValueError(
                f"expected the state of {storage.ledger.slots} slots, got {ledger['slots']}"
            )
        return None, None
    if state.content.rows != ledger["length"]:
        raise ValueError(
            f"expected {ledger['length']} rows, got {state.content.rows}; if the rows were saved "
            "through a hook, register the load hook that undoes it"
        )
    target = storage.check_content(state.content)
    slots = getattr(target, "slots", storage.ledger.slots)
    keeps_all = buffer._writer.keeps_all(slots, state.writer)
    rows = None if keeps_all else buffer._writer.survivors(slots, state.writer)
    if state.mapped:
        if rows is not None:
            ledger_of(state.writer).read_tables()  # raises if tables are damaged
        check_mapped_rows(cast(LazyTensorStorage, storage), state.content, slots, rows)
    if rows is None:
        return target, None
    warn_left_out(state.content.rows - len(rows), stacklevel=stacklevel)
    return target, rows


def saved_generator(saved: Mapping[str, Any] | None, where: str = "") -> torch.Generator | None:
    """Return a generator in the saved state; None if no state was saved.

    ``where`` is a clause for the error that names the place of the state.
    """
    if saved is None:
        return None
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected the state of a generator, got {saved!r}")
    try:
        generator = torch.Generator(torch.device(saved["device"]))
        # Copied, because torch reads from the start of the tensor's storage, not of the tensor.
        generator.set_state(saved["state"].cpu().clone())
    except (KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"expected the state of a generator{where}, got {error}") from None
    return generator


def loaded_generator(
    current: torch.Generator | None, saved: torch.Generator | None
) -> torch.Generator | None:
    """Set the user's generator to the saved state; return the generator to use.

    A buffer without a generator gets a new generator. The same holds if its generator is on another
    device. If no generator was saved, that of the buffer stays unchanged.
    """
    if saved is None:
        return current
    if current is None or current.device != saved.device:
        return saved
    current.set_state(saved.get_state())
    return current


def undelivered_draws(saved: object) -> list[UndeliveredDraw]:
    """Return the prefetched draws of a checkpoint; ValueError if they are invalid."""
    if not isinstance(saved, list):
        raise ValueError(f"expected a list of prepared draws, got {saved!r}")
    return [decode_state(UndeliveredDraw, record, "a prepared draw") for record in saved]


def check_rows(draws: Sequence[UndeliveredDraw], state: BufferState) -> None:
    """Raise ValueError if a prefetched draw contains a row that was not saved."""
    if state.content is None:
        return
    shape = torch.tensor([state.content.rows, *state.content.lanes], device="cpu")
    for drawn in draws:
        cells = (drawn.anchors if drawn.anchors.ndim > 1 else drawn.anchors[:, None]).cpu()
        if cells.shape[-1] != len(shape) or not bool(((cells >= 0) & (cells < shape)).all()):
            raise ValueError(
                f"expected draws among the {shape.tolist()} saved rows, got "
                f"{drawn.anchors.tolist()}"
            )


def of_another_kind(saved: Any, sampler: Sampler) -> bool:
    """Return whether a saved state belongs to another kind of sampler."""
    kind = saved.get("_kind") if isinstance(saved, Mapping) else None
    return isinstance(kind, str) and kind != sampler.kind


def restarted(sampler: Sampler, saved: Mapping[str, Any], content: Content) -> dict[str, Any]:
    """Return the state of a new sampler over the loaded rows.

    The saved state belongs to another kind of sampler. A warning names the parts that are kept.

    Raises:
        ValueError: the saved priorities are invalid.
    """
    fresh = copy.deepcopy(sampler)
    fresh.empty()
    state, count = saved_sampler(fresh), content.rows * content.lanes.numel()
    how = "which starts over"
    if sampler.prioritized and "_priorities" in state:
        raw = torch.ones(count, dtype=torch.float64, device="cpu")
        most, how = 1.0, "which gives each row priority 1"
        if "_priorities" in saved:
            other = SavedPriorities.from_state(dict(saved), torch.float64)
            most, raw = other.max_priority, other.priorities
            how = "which keeps the priorities and its own exponents"
        law = state["_alpha"], state["_beta"], state["_eps"]
        state |= encode_state(SavedPriorities(*law, most, 0, raw))
    warnings.warn(
        f"the state of a {saved['_kind']!r} sampler is left out: this buffer has a "
        f"{sampler.kind!r} one, {how}",
        stacklevel=4,
    )
    return state


def snapshot_of(
    buffer: ReplayBuffer,
    path: str | os.PathLike[str],
    base: Base,
    more: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Return the state that a save writes. ``more`` has the states of further parts."""
    with buffer._locked(settled=False) as storage:
        parts = {**saved_parts(buffer, path), **(more or {})}
        return Snapshot(parts, described(buffer, parts), storage.lock, base)


def described(buffer: ReplayBuffer, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a buffer for a manifest, given the parts of its save."""
    storage = buffer._storage
    return {
        "components": {
            "buffer": type(buffer).__name__,
            "storage": type(storage).__name__,
            "sampler": type(buffer._sampler).__name__,
            "writer": type(buffer._writer).__name__,
        },
        "schema": None if storage.schema is None else storage.schema.to_json(),
        "ndim": storage.ndim,
        "lanes": list(storage.lanes),
        "lane_key": None if (key := getattr(storage, "lane_key", None)) is None else list(key),
        "len": len(storage),
        "max_size": storage.max_size,
        "cursor": parts["writer"]["_cursor"],
        "write_count": buffer._writer.write_count,
        "batch_size": buffer._batch_size,
        "consume_after_n_samples": uses_of(buffer._sampler),
    }


def saved_parts(
    buffer: ReplayBuffer, path: str | os.PathLike[str] | None, *, by_identity: bool = False
) -> dict[str, Any]:
    """Return the parts of a save. The caller holds the lock.

    Args:
        path: the directory of the save, which reads large parts later. None for copies of all.
        by_identity: leave out rows that another file or directory keeps unchanged.
    """
    rewind(buffer)
    storage, writer = buffer._storage, buffer._writer.state_dict()
    identity = storage.identity if by_identity else None
    sampler = saved_sampler(buffer._sampler, tracked=None if path is None else storage)
    transforms = buffer._chain.state_dict()
    if path is None:
        sampler, transforms = copy.deepcopy(sampler), copy.deepcopy(transforms)
    pace = {} if buffer._pace is None else {"pace": buffer._pace.state()}
    observers, mask = buffer._observers, taken_mask(storage)
    rest = {
        **pace,
        **({} if mask is None else {"taken": mask}),
        **({} if observers is None else {"observers": copy.deepcopy(observers.state_dict())}),
        "writer": writer,
        "sampler": sampler,
        "transforms": transforms,
        "generator": generator_state(buffer._generator),
    }
    if identity is not None:
        return {"storage": {"identity": identity}, **rest}
    if path is None:
        return {"storage": storage.state_dict(), **rest}
    # Only the state may hold views of rows, because any other view counts as a possible change.
    return {"storage": content_to_save(storage, path).to_state(tracked=True), **rest}


def part_reader(
    saved: Checkpoint, buffer: ReplayBuffer, prefix: str = "", *, mmap: bool
) -> Callable[..., Any]:
    """Return a function that reads a part of a buffer, or returns a default.

    Args:
        prefix: the prefix of the names of the buffer's parts.
        mmap: leave tables of the writer and the sampler in the files.
    """

    def part(which: str, *default: Any) -> Any:
        name = prefix + which
        if default and name not in saved:
            return default[0]
        if which == "storage" and not _has_identity(saved.manifest["parts"].get(name)):
            return saved.part(name, mapped=["groups"])
        if which in ("writer", "sampler") and mmap:
            return saved.part(name, mapped=getattr(buffer, which).mapped_entries)
        return saved.part(name)

    return part


def read_state(
    buffer: ReplayBuffer,
    part: Callable[..., Any],
    path: str | os.PathLike[str] | None,
    *,
    mapped: bool = False,
    check: Callable[[Content], Content] | None = None,
) -> BufferState:
    """Return the saved state of a buffer. The caller holds the lock.

    Args:
        part: a function that returns a part by its name, or a default.
        path: the directory of the checkpoint; None for a state dict.
        mapped: whether rows stay in the files of the checkpoint.
        check: a function that checks the rows before hooks change them.

    Raises:
        ValueError: the state is not that of such a storage.
        CheckpointError: the state is damaged.
    """
    head, storage = part("storage"), buffer._storage
    if path is None and not isinstance(head, Mapping):
        raise ValueError(f"expected the state of a storage, got {type(head).__name__}")
    content, rows, same = None, None, _has_identity(head)
    if same:
        _check_identity(storage.identity, head["identity"])
    elif path is None:
        rows = dict(head)
        content = storage.content_of(rows)
    else:
        try:
            content = Content.from_state(head)
        except ValueError as error:
            raise CheckpointError(f"the rows in {path} are damaged: {error}") from None
        if mapped:
            check_mappable(storage)
        content = content_after_load(storage, content if check is None else check(content))
    return BufferState(
        content,
        rows,
        part("writer"),
        part("sampler"),
        part("transforms"),
        part("generator"),
        part("prepared", []),
        mapped=mapped and not same,
        same_rows=same,
        pace=part("pace", None),
        observers=part("observers", None),
        taken=part("taken", None),
    )


def _has_identity(head: object) -> bool:
    """Return whether a saved state only identifies the rows."""
    return isinstance(head, Mapping) and "identity" in head


def _check_identity(own: Any, saved: Any) -> None:
    """Raise ValueError if a storage lacks rows that were not saved."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected the identity of a data set, got {saved!r}")
    if not equal_states(own, saved):
        found = (
            "one that was edited, or no data set"
            if own is None
            else "another data set, or other episodes of it"
        )
        raise ValueError(
            "expected the data set that the ensemble was saved with, whose rows are not "
            f"in the checkpoint; got {found}"
        )


def load_checkpoint(
    buffer: ReplayBuffer,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    mmap: bool = False,
    verify: bool | None = None,
) -> None:
    """Load a buffer that ``dumps`` saved."""
    buffer._ready()
    if mmap:
        check_mappable(buffer.storage)
    checked = verify or (verify is None and not mmap)
    with deferred, (MappedCheckpoint if mmap else Checkpoint)(path, version) as saved:
        if checked:
            saved.verify(wait=mmap)
        part = part_reader(saved, buffer, mmap=mmap)
        head = part("storage")  # before the lock is taken
        with buffer._locked() as storage:

            def check(content: Content) -> Content:
                # Files may be verified after the copy, because no reader uses that memory yet.
                if checked and not mmap and storage.checks_before_load:
                    return replace(content, check=saved.verify)
                if checked and not mmap:
                    saved.verify()
                return content

            def given(which: str, *default: Any) -> Any:
                return head if which == "storage" else part(which, *default)

            try:
                state = read_state(buffer, given, path, mapped=mmap, check=check)
            except CheckpointError:
                if checked:
                    saved.verify()  # names the damaged file
                raise
            if of_another_kind(state.sampler, buffer._sampler):
                assert state.content is not None
                sampler = saved.part("sampler") if mmap else state.sampler  # all of it is needed
                fresh = restarted(buffer._sampler, sampler, state.content)
                state = replace(state, sampler=fresh, undelivered=[])
            apply_state(buffer, state)


_STATE_NAMES = {"generator": "_rng", "prepared": "_prefetch_state"}
"""Names of the parts of a buffer in a state dict, if not the name after an underscore."""


def state_of(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return a dictionary with copies of everything that ``dumps`` saves."""
    with buffer._locked(settled=False):
        parts = saved_parts(buffer, None)
        return {
            "_batch_size": buffer._batch_size,
            "_consume_after_n_samples": uses_of(buffer._sampler),
            **{_STATE_NAMES.get(name, f"_{name}"): part for name, part in parts.items()},
        }


def load_state(buffer: ReplayBuffer, state_dict: dict[str, Any]) -> None:
    """Load a copy of a state from ``state_dict``, by the rules of ``loads``."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"expected the state of a buffer, got {type(state_dict).__name__}")
    names = ("_storage", "_sampler", "_writer", "_transforms", "_rng")
    missing = [name for name in names if name not in state_dict]
    if missing:
        raise ValueError(f"expected the entries {list(names)}, missing {missing}")

    def part(which: str, *default: Any) -> Any:
        return state_dict.get(_STATE_NAMES.get(which, f"_{which}"), *default)

    with buffer._locked():
        apply_state(buffer, read_state(buffer, part, None))


def pickled_state(buffer: ReplayBuffer) -> dict[str, Any]:
    if buffer._shared:
        buffer._ready()  # otherwise each process would make separate components
    if not buffer._initialized:
        generator = by_value(generator_state(buffer._generator))
        return {**buffer.__dict__, "_generator": generator, "_making": None}
    spawning = multiprocessing.context.get_spawning_popen() is not None
    if spawning and not buffer._shared and buffer._writer.kind != "immutable":
        raise RuntimeError(
            "a buffer that can be written to cannot be handed to a spawned process: each "
            "process would write to a separate copy, and rows would be lost; make it with "
            "shared=True, save it with dumps() and load it there, or hand over a read-only "
            "data set"
        )
    with buffer._locked(settled=False) as storage:
        rewind(buffer)
        state = dict(buffer.__dict__)
        state["_prefetcher"] = state["_making"] = None
        state.pop("_observers", None)
        # Other threads may sample while the rest is pickled. So this state is copied now.
        sampler = state["_sampler"] = copy.deepcopy(buffer._sampler, {id(storage): storage})
        sampler.owner = buffer
        state["_generator"] = by_value(generator_state(buffer._generator))
        state["_shared"] = buffer._shared and spawning  # any other copy has separate rows
        # A copy has separate counts, too. A shared buffer stores the counts with its rows.
        state["_pace"] = None if buffer._pace is None else buffer._pace.state()
    return state


def restore_pickled(buffer: ReplayBuffer, state: dict[str, Any]) -> None:
    buffer.__dict__.update(state)
    buffer._making = threading.RLock()
    buffer._generator = saved_generator(from_value(state["_generator"]))
    if not buffer._initialized:
        return
    buffer._sampler.generator = buffer._generator
    claim_parts(buffer, buffer._sampler, buffer._writer)
    buffer._writer.register_storage(buffer._storage)
    buffer._storage.attach(cast(Any, buffer))
    if buffer._shared:
        buffer._sampler.attach(buffer._storage)
    else:
        buffer._sampler.rejoin(buffer._storage)
    buffer._pace = limiter_queue(buffer, buffer._storage, shared=buffer._shared)
    if buffer._pace is not None:
        if not buffer._shared:
            buffer._pace.load_state(state["_pace"], len(buffer._storage))
        if buffer._closed:
            buffer._pace.close()
    if buffer._prefetch_depth and not buffer._closed:
        buffer._prefetcher = Prefetcher(buffer._prefetch_depth, cast(Any, buffer))
