"""Make and open the files of a storage's rows and of their observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes import CutMarks
from replaykit.errors import CheckpointError
from replaykit.recovery.recovery_folder import Tables, check_file, give_up_rows
from replaykit.schema import Schema
from replaykit.storages.column_reads import AnyColumns
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import TAGS, CommittedState, read_cuts, read_log
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.dedup_memory import DedupJournal
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Pairs
from replaykit.storages.row_files import OVERFLOW, RowFiles, refuse_taken
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery
    from replaykit.storages.tensors import LazyTensorStorage

Array = np.ndarray[Any, Any]

ANNOUNCED, IRREGULAR, RESET, RESERVED, REMOVED, REFERRING = range(SIGN_COUNT := 6)
"""Numbers of the signs that writers set for readers without the lock.

- ``ANNOUNCED``: row id up to which a process is writing rows at the cursor.
- ``IRREGULAR``: twice the number of other overwrites of rows. It is odd during an overwrite.
- ``RESET``: number of the last state with changes that are not writes at the cursor.
- ``RESERVED``: number of overflow entries with reserved blocks.
- ``REMOVED``: number of the last state in which rows were removed and others moved.
- ``REFERRING``: number of slots whose references count; see ``ObservationTable``. It is journaled.
"""

_ALONE, _SHARED, _REFERENCES = 1, 3, 4
"""Versions of the format: of folders that one process has used, of folders whose rows processes
share or have shared, and of folders with references."""


def published_content(recovery: Recovery) -> dict[str, Any] | None:
    """Return the description of the storage in the folder; None if there is none.

    Raises:
        CheckpointError: the description is damaged.
        ValueError: the storage was made with other arguments; the error names one.
    """
    found, storage, folder = recovery.home.manifest(), recovery.storage, recovery.folder
    if found is None:
        return None
    for name, own in (("ndim", storage.ndim), ("lane_key", storage.lane_key)):
        there = found.get(name)
        there = tuple(there) if isinstance(there, list) else there
        if there != own:
            shown = [format_key(k) if isinstance(k, tuple) else k for k in (own, there)]
            raise ValueError(f"expected {name}={shown[0]}, got {shown[1]} in {folder}")
    sizes = found.get("lanes")
    if not isinstance(sizes, list) or not all(type(n) is int and n > 0 for n in sizes):
        raise CheckpointError(f"{folder} has no sizes of lanes")
    slots = storage._slots_for(torch.Size(sizes))
    if found.get("slots") != slots:
        raise ValueError(
            f"expected a max_size of {slots} time steps, got {found.get('slots')} in {folder}: "
            "use dumps and loads to change the capacity"
        )
    return found


def make_columns(
    recovery: Recovery, schema: Schema, lanes: torch.Size, pairs: Pairs | None
) -> AnyColumns:
    """Make the files of the rows, in which none is stored yet, and publish them.

    Args:
        schema: the layout of the rows.
        lanes: sizes of the dimensions after time.
        pairs: the leaves that are stored once; None if every row stores all leaves.

    Raises:
        RuntimeError: another storage or process uses the folder, or this is a forked process.
        OSError: the disk has too little room.
    """
    storage, home, folder = recovery.storage, recovery.home, recovery.folder
    home.check_process()
    stored = schema if pairs is None else pairs.stored
    plan = RowFiles.of(folder, stored, storage._slots_for(lanes), lanes)
    present = {file for file in plan.files.values() if file.exists()}
    if pairs is not None:
        present |= set((folder / OVERFLOW).rglob("*.memmap"))
    if not home.half_made:  # else the files are leftovers of this storage
        refuse_taken(folder, present, existsok=recovery.existsok, own=home.folder)
        if present:
            give_up_rows(folder, home.folder)
    with home.making():
        rows = plan.created(storage.ndim, existsok=True, mapped=recovery.mapped)
        recovery.open_rows(rows, list(plan.files.values()), fresh=True)
        columns: AnyColumns = rows
        if pairs is not None:
            journal = DedupJournal(recovery, folder / OVERFLOW, mapped=recovery.mapped)
            columns = _dedup_columns(recovery, pairs, rows, journal, there=False)
        _publish(recovery, schema, rows, pairs)
    return columns


def _dedup_columns(
    recovery: Recovery, pairs: Pairs, rows: Columns, journal: DedupJournal, *, there: bool
) -> DedupColumns:
    columns = DedupColumns(pairs, rows, journal.grow, recovery.storage.lane_key)
    references = journal.references(rows.slots * rows.lanes.numel(), there=there)
    columns.table.journal_by(journal, references)
    if recovery.sharing is not None:
        journal.reserved = recovery.sharing.signs[RESERVED:]
        journal.referring = range(REFERRING, REFERRING + 1)
        columns.table.core.share()
        columns.outdate(recovery.storage.ledger)
    return columns


def _publish(recovery: Recovery, schema: Schema, rows: Columns, pairs: Pairs | None) -> None:
    """Write the manifest. From then on the storage can be recovered."""
    storage = recovery.storage
    key = storage.lane_key
    content: dict[str, Any] = {
        "slots": rows.slots,
        "ndim": storage.ndim,
        "lanes": list(rows.lanes),
        "lane_key": None if key is None else list(key),
        "schema": schema.to_json(),
    }
    version = _SHARED if recovery.shared else _ALONE
    if pairs is not None:
        version = _REFERENCES
        content |= {"dedup_next": _dedup_columns_of(pairs), "references": Tables.REFERENCES}
    recovery.home.publish(content, version=version)
    recovery.active = True


def hand_over(recovery: Recovery, more: Sequence[int]) -> None:
    """Let processes share rows that this process has recovered alone so far.

    The caller holds the lock. This process changes nothing from then on.

    Args:
        more: numbers that follow the committed state from now on.

    Raises:
        OSError: there is no room. No state has changed then.
    """
    home, found, columns = recovery.home, recovery.home.manifest(), recovery.storage._columns
    home.drop_following()
    if found is not None:
        home.publish(found, version=_REFERENCES if "references" in found else _SHARED)
        recovery.hand_over(more)
        if isinstance(columns, DedupColumns):
            signs = home.table(Tables.SIGNS, SIGN_COUNT)
            signs[RESERVED] = columns.table.overflow_entries
            signs[REFERRING] = recovery.storage.ledger.length
    recovery.active = False


def resume(recovery: Recovery) -> None:
    """Resume with the rows that a storage of the same arguments left in the folder.

    Raises:
        ValueError: the storage was made with other arguments; the error names one.
        CheckpointError: the files are damaged, or contradict each other.
    """
    found, storage = published_content(recovery), recovery.storage
    if found is None:
        return
    with storage.lock:
        try:
            rows, numbers = open_files(recovery, found)
            if len(numbers):
                _restore(recovery, storage, rows, numbers)
            if isinstance(storage._columns, DedupColumns):
                _restore_references(recovery, storage._columns, found)
        except BaseException:
            recovery.active = False  # its present state must not be committed
            raise


def open_files(recovery: Recovery, found: Mapping[str, Any]) -> tuple[Columns, Array]:
    """Map the files of the rows and undo uncommitted changes; return rows and state.

    Raises:
        ValueError: the files were made with another ``dedup_next``.
        CheckpointError: a file is damaged or missing; the error names it.
    """
    storage, folder = recovery.storage, recovery.folder
    try:
        schema = Schema.from_json(found.get("schema"))
    except ValueError as error:
        raise CheckpointError(f"the schema of {folder} cannot be read: {error}") from None
    lanes, pairs = torch.Size(found["lanes"]), storage.pairs_for(schema)
    there, own = found.get("dedup_next"), None if pairs is None else _dedup_columns_of(pairs)
    if there != own:
        shown = [
            False if keys is None else [key[0] if len(key) == 1 else tuple(key) for key in keys]
            for keys in (own, there)
        ]
        raise ValueError(f"expected dedup_next={shown[0]}, got {shown[1]} in {folder}")
    stored = schema if pairs is None else pairs.stored
    plan = RowFiles.of(folder, stored, storage._slots_for(lanes), lanes)
    for path, file in plan.files.items():
        check_file(file, plan.nbytes(path))
    rows, files = plan.opened(storage.ndim, mapped=recovery.mapped), list(plan.files.values())
    columns: AnyColumns = rows
    if pairs is not None:
        journal = DedupJournal(recovery, folder / OVERFLOW, mapped=recovery.mapped)
        journal.open(pairs.overflow, rows.slots * lanes.numel())
        files += journal.files
    numbers = recovery.open_rows(rows, files)
    if pairs is not None:
        columns = _dedup_columns(recovery, pairs, rows, journal, there="references" in found)
    storage._columns = columns
    storage._adopt(columns)
    recovery.active = True
    return rows, numbers


def _restore_references(
    recovery: Recovery, columns: DedupColumns, found: Mapping[str, Any]
) -> None:
    """Find the entries in use; convert the tables of a folder before version 4."""
    storage, table, rows = recovery.storage, columns.table, columns.rows
    journal, cells = table.journal, rows.lanes.numel()
    assert journal is not None
    stored, streams = storage.ledger.length * cells, storage.lane_key is not None
    try:
        if "references" not in found:
            journal.convert(table.references, cells, stored, streams=streams)
        # The disk may have no blocks for entries after the last one in use.
        used = -int(table.references[:stored].min(initial=0))
        table.use_overflow(journal.table(columns.pairs.overflow, used))
        columns.reread(storage.ledger)
    except ValueError as error:
        raise CheckpointError(f"{recovery.folder} contradicts itself: {error}") from None
    if "references" not in found:
        _publish(recovery, columns.schema, rows, columns.pairs)
        journal.drop_converted()


def _restore(
    recovery: Recovery, storage: LazyTensorStorage, columns: Columns, numbers: Array
) -> None:
    """Restore the committed ledger, cuts and begins of episodes.

    Raises:
        CheckpointError: the files contradict each other.
    """
    home, own = recovery.home, storage.ledger

    def table(number: int, length: int) -> torch.Tensor | None:
        if length < 0:
            return None
        home.check_table(number, length)
        return torch.from_numpy(recovery.ledger_table(number, length))

    try:
        state = CommittedState(numbers)
        for place, counts in enumerate(state.priorities):
            home.check_table(Tables.PRIORITIES + place, counts.length)
        Ledger.check(
            {
                "slots": columns.slots,
                "cursor": state.cursor,
                "length": state.length,
                "next_position": state.next_position,
                "positions": table(Tables.POSITIONS, state.positions),
                "generations": table(Tables.GENERATIONS, state.generations),
                "by_stream": bool(state.by_stream),
            }
        )
        for first, (log, stop) in zip((Tables.TAGS, Tables.CUTS), state.places, strict=True):
            home.check_table(first + log % 2, stop)
        cuts, heads = read_cuts(home, state, None, CutMarks()), state.heads()
        marks, codes = cuts.numbers.tolist(), cuts.codes.tolist()
        episodes = {"marks": marks, "codes": codes, "heads": heads, "root_flags": True}
        EpisodeIndexes.check(episodes)
        own.follow(state, moved=True, removed=True)
        storage.indexes.restore(episodes, own, None)
        read_log(home, TAGS, storage.indexes.present_tags, state, None)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{home.folder} contradicts itself: {error}") from None
    recovery.in_state(state, restarted=True)


def _dedup_columns_of(pairs: Pairs) -> list[list[Any]]:
    """Return the root paths of the leaves that are stored once."""
    return [list(path) for path in pairs.root_of.values()]
