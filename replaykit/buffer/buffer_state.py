"""Save, check and load the state that determines the next batches of a buffer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, cast

import torch

from replaykit.buffer.component_checks import check_mapped_rows
from replaykit.buffer.drawing import Drawing, put_back
from replaykit.pace import LimiterQueue
from replaykit.samplers import Sampler
from replaykit.storages import LazyTensorStorage, Storage
from replaykit.storages.content import Content
from replaykit.storages.save_hooks import warn_left_out
from replaykit.writers.writer import ledger_of

__all__ = [
    "BufferState",
    "CheckedState",
    "UndeliveredDraw",
    "apply_state",
    "check_rows",
    "check_state",
    "finish_taking",
    "generator_state",
    "load_rows",
    "parts_taken",
    "saved_generator",
    "undelivered_draws",
]


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


class UndeliveredDraw(NamedTuple):
    """A prefetched draw in a checkpoint of an earlier release, which saved these draws.

    Attributes:
        anchors: the index that the sampler drew.
        ran_out: whether the draw ended a pass.
    """

    anchors: torch.Tensor
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


def apply_state(buffer: Drawing, state: BufferState) -> None:
    """Load a saved state into a buffer, or change nothing. The caller holds the lock.

    Raises:
        ValueError: a part belongs to another kind of component than the buffer has, or contradicts
            another part.
    """
    checked = check_state(buffer, state, stacklevel=6)
    with parts_taken(buffer, checked):
        load_rows(buffer, checked)
    finish_taking(buffer, checked)


def check_state(buffer: Drawing, state: BufferState, *, stacklevel: int) -> CheckedState:
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
    target, rows = _target_of_rows(buffer, state, stacklevel)
    check_rows(undelivered, state)
    writer_state = state.writer
    if state.content is not None:
        # Dropped rows show where kept episodes begin, so the writer reads them before they are
        # lost.
        writer_state = writer.state_of_subset(state.content, writer_state, rows)
    return CheckedState(state, sampler_state, writer_state, generator, undelivered, target, rows)


@contextlib.contextmanager
def parts_taken(buffer: Drawing, checked: CheckedState) -> Iterator[None]:
    """Load the states of transforms and sampler; on an error, restore the old states.

    An error inside the context also restores them. Both loads may run user code. The caller holds
    the lock.
    """
    sampler = buffer._sampler
    chain_before = copy.deepcopy(buffer._chain.state_dict())
    sampler_before = copy.deepcopy(sampler.state_dict())
    try:
        buffer._chain.load_state_dict(copy.deepcopy(checked.state.transforms))
        sampler.load_state_dict(checked.sampler)
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            buffer._chain.load_state_dict(chain_before)
        with contextlib.suppress(Exception):
            sampler.load_state_dict(sampler_before)
        raise


def load_rows(buffer: Drawing, checked: CheckedState) -> None:
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


def finish_taking(
    buffer: Drawing, checked: CheckedState, *, more: Sequence[UndeliveredDraw] = ()
) -> None:
    """Load the rest of a state, which cannot fail. The caller holds the lock.

    Args:
        more: draws that an ensemble made with this buffer and did not deliver.
    """
    storage, sampler, rows = buffer._storage, buffer._sampler, checked.rows
    buffer._drop_draws()
    buffer._pass_ended, buffer._restarted = False, True
    buffer._writer.restore(checked.writer, rows)
    _load_generator(buffer, checked.generator)
    draws = [*checked.undelivered, *more]
    if draws:
        put_back(draws, sampler, storage)
    if rows is not None:
        sampler.moved(rows, storage)
    if buffer._pace is not None:
        buffer._pace.load_state(checked.state.pace, buffer._size())


def _check_stored(sampler: Sampler, saved: Any, content: Content | None) -> None:
    """Raise ValueError if a sampler's state is for another number of rows."""
    known = sampler.stored_in(saved)
    if known is None or content is None:
        return
    stored = content.rows * content.lanes.numel()
    if known != stored:
        raise ValueError(f"expected {stored} rows in the sampler's state, got {known}")


def _target_of_rows(
    buffer: Drawing, state: BufferState, stacklevel: int
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


def saved_generator(saved: Mapping[str, Any] | None) -> torch.Generator | None:
    """Return a generator in the saved state; None if no state was saved."""
    if saved is None:
        return None
    if not isinstance(saved, Mapping):
        raise ValueError(f"expected the state of a generator, got {saved!r}")
    try:
        generator = torch.Generator(torch.device(saved["device"]))
        # Copied, because torch reads from the start of the tensor's storage, not of the tensor.
        generator.set_state(saved["state"].cpu().clone())
    except (KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"expected the state of a generator, got {error}") from None
    return generator


def _load_generator(buffer: Drawing, saved: torch.Generator | None) -> None:
    """Set the user's generator to the saved state.

    A buffer without a generator gets a new generator. The same holds if its generator is on another
    device. If no generator was saved, that of the buffer stays unchanged.
    """
    if saved is None:
        return
    current = buffer._generator
    if current is not None and current.device == saved.device:
        current.set_state(saved.get_state())
    else:
        buffer._generator = buffer._sampler.generator = saved


def undelivered_draws(saved: object) -> list[UndeliveredDraw]:
    """Return the prefetched draws of a checkpoint; ValueError if they are invalid."""
    if not isinstance(saved, list):
        raise ValueError(f"expected a list of prepared draws, got {saved!r}")
    found = []
    for record in saved:
        fields = record if isinstance(record, Mapping) else {}
        anchors, ran_out = fields.get("anchors"), fields.get("ran_out")
        if not _is_index(anchors) or not isinstance(ran_out, bool):
            raise ValueError(f"expected a prepared draw, got {record!r}")
        found.append(UndeliveredDraw(anchors.clone(), ran_out))
    return found


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


def _is_index(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim in (1, 2)
