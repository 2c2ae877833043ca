"""Save all shards as of one instant, and load them into any number of shards."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.state import of_another_kind
from replaykit.buffer.write import store_rows
from replaykit.checkpoint import Checkpoint, save_checkpoint
from replaykit.checkpoint.checkpoint_format import MANIFEST
from replaykit.checkpoint.checkpoint_writer import exclusive
from replaykit.declared import decode_state, encode_state
from replaykit.distributed.protocol import BarrierBusy, ShardDied, ShardSilent
from replaykit.distributed.shard_config import (
    ByKey,
    ClientState,
    SavedHead,
    ShardRecipe,
    ShardsState,
    rows_of,
    scattered,
)
from replaykit.distributed.write_queue import missing_parts
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, remove_tree
from replaykit.interrupts import check, deferred, shielded
from replaykit.schema import Schema, split_leaves
from replaykit.storages import LazyTensorStorage
from replaykit.ted import format_key, unravel

if TYPE_CHECKING:
    from replaykit.distributed.sharded_client import ShardedClient

_HELD_S = 60.0
"""Maximum seconds that a save delays writes; a save that needs longer fails."""
_DRAIN_S = 5.0
"""Seconds to wait for the parts of a batch that its writer is still sending."""
_POLL_S = 0.005
_LOCK = ".shards.lock"
"""The lock file of a save or load.

The lock is needed because a save removes the files of earlier saves. The kernel releases it when
its holder dies.
"""


def save_all(client: ShardedClient, path: str | os.PathLike[str]) -> None:
    """Save all shards; see ``ShardedClient.dumps``.

    For each save, the shards write into a separate folder. When all shards have finished, replacing
    the manifest publishes the folder. Afterwards, the folders of other saves are removed.
    """
    folder = Path(path).expanduser().absolute()
    make_directory(folder)
    with deferred, exclusive(folder / _LOCK):
        _save(client, folder)


def _save(client: ShardedClient, folder: Path) -> None:
    token = uuid.uuid4().hex
    own = folder / "shards" / token
    targets = [str(own / _name(shard)) for shard in range(client.num_shards)]
    try:
        with _held(client, token) as dealt:
            facts = _all(client, "begin_save", [(token, target) for target in targets])
            pace = client._tickets.state()
            common = _common_state(client, dealt)
        _all(client, "finish_save", [(token,)] * client.num_shards)
        for target in targets:
            if not Path(target, MANIFEST).exists():
                raise CheckpointError(f"expected {MANIFEST} of a shard in {target}, found none")
        head = SavedHead(*common, token, [one.rows for one in facts], pace=pace)
        save_checkpoint(
            folder, {"sharded": encode_state(head)}, {"components": {"buffer": "sharded"}}
        )
    except BaseException:
        with shielded:
            _whatever_it_says(client, "finish_save", token)  # wait until no shard writes there
            remove_tree(own)
        raise
    for other in (folder / "shards").iterdir():
        if other.name != token:
            remove_tree(other)


class _PartlyLoaded(RuntimeError):
    """Raised when a shard has died after others had replaced their rows."""


def _once_more(load: Callable[..., None]) -> Callable[..., None]:
    """Repeat a load after the death of a shard in its last step, or the others would differ."""

    @functools.wraps(load)
    def loading(*args: Any) -> None:
        with deferred:
            try:
                load(*args)
            except _PartlyLoaded as partly:
                try:
                    with shielded:
                        load(*args)
                except Exception as error:
                    raise partly from error

    return loading


@_once_more
def load_all(client: ShardedClient, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint; see ``ShardedClient.loads``."""
    folder = Path(path).expanduser().absolute()
    with deferred, contextlib.ExitStack() as held:
        # In a read-only directory no lock is needed, since no save can run there.
        with contextlib.suppress(OSError):
            held.enter_context(exclusive(folder / _LOCK))
        _load(client, folder)


def _load(client: ShardedClient, folder: Path) -> None:
    with Checkpoint(folder) as saved:
        saved.verify()
        if "sharded" not in saved:
            raise CheckpointError(f"{folder} is the checkpoint of a buffer without shards")
        try:
            head = decode_state(SavedHead, saved.part("sharded"), str(saved.folder / MANIFEST))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    own = folder / "shards" / head.save
    sources = [str(own / _name(shard)) for shard in range(head.num_shards)]
    same = head.num_shards == client.num_shards and head.shard_key == _key(client)
    token = uuid.uuid4().hex
    with _all_or_none(client, token):
        found = _all(client, "prepare_load", [(token, sources, same)] * client.num_shards)
        rows, left_out = (sum(one[which] for one in found) for which in (0, 1))
        if rows < sum(head.rows):  # more if transforms held rows back
            raise CheckpointError(f"expected {sum(head.rows)} rows in {folder}, found {rows}")
        _commit(client, token, head, head.dealt if same else rows)
    if left_out:
        warnings.warn(
            f"{left_out} of {rows} rows do not fit into {client.num_shards} shards and were "
            "left out",
            stacklevel=5,
        )


@contextlib.contextmanager
def _all_or_none(client: ShardedClient, token: str) -> Iterator[None]:
    """If the block fails, make all shards drop the rows that they have prepared."""
    try:
        yield
    except BaseException:
        with shielded:
            _whatever_it_says(client, "drop_load", token)
        raise


def _commit(client: ShardedClient, token: str, head: ClientState, dealt: int) -> None:
    """Replace the rows of all shards by the prepared rows."""
    members = client._members
    with _held(client, token), shielded:  # Ctrl-C waits until all shards have changed
        _all(client, "has_load", [(token,)] * client.num_shards)  # or nothing has changed
        schema = None if head.layout is None else Schema.from_json(head.layout)
        members.agreed = members.supervisor.replace(schema)  # first: successors ask for it
        try:
            _all(client, "commit_load", [(token, members.agreed.loads)] * client.num_shards)
        except RuntimeError as error:
            raise _PartlyLoaded(f"{error}; the other shards have loaded; load again") from error
        client._tickets.load(head.pace)
        client._router.dealt = dealt
        client._drop_ahead()
        if head.generator is not None and client.generator is not None:
            client.generator.set_state(head.generator.clone())
        client._stored = None


def state_of(client: ShardedClient) -> dict[str, Any]:
    """Return all shards as a dictionary; see ``ShardedClient.state_dict``."""
    token = uuid.uuid4().hex
    with deferred, _held(client, token) as dealt:
        shards = _all(client, "state", [(token,)] * client.num_shards)
        client._members.refresh(None, 0.0)
        pace = client._tickets.state()
        common = _common_state(client, dealt)
    return encode_state(ShardsState(*common, shards, pace=pace))


def _common_state(client: ShardedClient, dealt: int) -> tuple[int, str | None, int, Any, Any]:
    """Return the fields of a `ClientState`, without the counts of the rate limiter."""
    schema = client._members.agree().schema
    return (
        client.num_shards,
        _key(client),
        dealt,
        client._generator_state(),
        None if schema is None else schema.to_json(),
    )


@_once_more
def load_state(client: ShardedClient, state: Any) -> None:
    """Load a dictionary; see ``ShardedClient.load_state_dict``."""
    found = decode_state(ShardsState, state, "the state of a sharded buffer")
    for name, own in (("num_shards", client.num_shards), ("shard_key", _key(client))):
        if state[name] != own:
            raise ValueError(
                f"expected the state of a buffer with {name}={own}, got {state[name]}; dumps() and "
                "loads() convert between them"
            )
    token = uuid.uuid4().hex
    with deferred, _all_or_none(client, token):
        _all(client, "prepare_state", [(token, shard) for shard in found.shards])
        _commit(client, token, found, found.dealt)


def _name(shard: int) -> str:
    return f"{shard:05d}"


def _key(client: ShardedClient) -> str | None:
    key = client._settings.shard_key
    return None if key is None else format_key(unravel(key))


def _all(client: ShardedClient, verb: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Send a message to all shards in parallel; return the answers in shard order.

    Raises:
        RuntimeError: a shard has died.
        ShardSilent: a shard does not answer any more.
        Errors of shards are raised after all have answered.
    """
    members = client._members
    members.wait_for_all()
    sent = [members.send(shard, verb, *each) for shard, each in enumerate(arguments)]
    answers: list[Any] = []
    failed: Exception | None = None
    for shard, reply in enumerate(sent):
        try:
            answers.append(_patiently(client, shard, reply))
        except ShardDied:
            outcome = "" if verb == "commit_load" else "; nothing has been published"
            failed = RuntimeError(f"shard {shard} died while all were saved or loaded{outcome}")
        except Exception as error:
            failed = error
    if failed is not None:
        raise failed
    return answers


def _whatever_it_says(client: ShardedClient, verb: str, *args: Any) -> None:
    """Send a message to every live shard and wait for the answers; ignore errors."""
    members = client._members
    for shard, sent in [(shard, members.send(shard, verb, *args)) for shard in members.there()]:
        with contextlib.suppress(Exception):
            _patiently(client, shard, sent)


def _patiently(client: ShardedClient, shard: int, sent: Any) -> Any:
    """Wait while a shard works on files, as long as it answers other messages.

    Raises:
        ShardSilent: the shard does not answer other messages.
        Other errors are the same as those of ``ShardMembers.receive``.
    """
    members = client._members
    while True:
        try:
            return members.receive(shard, sent)
        except ShardSilent:
            members.receive(shard, members.send(shard, "stats", only=sent[0]))


@contextlib.contextmanager
def _held(client: ShardedClient, token: str) -> Iterator[int]:
    """Freeze all shards between the same two writes; yield the number of dealt rows.

    The dealt rows are the rows that the router has assigned to shards. The first shard is asked
    before the others, so that one of two concurrent saves succeeds.
    """
    members = client._members
    count = client.num_shards
    until = time.monotonic() + members.timeout
    try:
        while True:
            try:
                first = members.receive(0, members.send(0, "freeze", token, _HELD_S))
                break
            except BarrierBusy:
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL_S)
                check()
            except ShardDied:
                members.wait_for([0], until)
        sent = [members.send(shard, "freeze", token, _HELD_S) for shard in range(1, count)]
        found = {0: first}
        try:
            for shard, reply in enumerate(sent, 1):
                found[shard] = members.receive(shard, reply)
            _drain(client, token, missing_parts(found))
        except ShardDied as died:
            raise RuntimeError(
                f"shard {died.shard} died during a save or load of all shards; try again later"
            ) from None
        yield client._router.dealt
    finally:
        with shielded:
            members.ask_all("thaw", token)


def _drain(client: ShardedClient, token: str, missing: dict[int, set[tuple[str, int]]]) -> None:
    """Wait until every batch of which some part was written is complete."""
    members = client._members
    for shard, writes in missing.items():
        members.receive(shard, members.send(shard, "let_through", token, writes))
    until = time.monotonic() + _DRAIN_S
    left = dict(missing)
    while left:
        for shard, writes in missing.items():
            if shard in left and members.receive(shard, members.send(shard, "has_all", writes)):
                del left[shard]
        if not left:
            return
        if time.monotonic() >= until:
            break
        time.sleep(_POLL_S)
    gone = set().union(*left.values())
    members.ask_all("forget", gone)
    # If a shard was restarted, it has lost parts, and a loss reports them. Otherwise a writer has
    # died.
    if any(not members.shards[shard].incarnation for shard in left):
        warnings.warn(
            f"{len(gone)} batches are incomplete, since their writers are gone; their stored rows "
            "are saved",
            stacklevel=2,
        )


# -- in another number of shards ------------------------------------------------------------------

_BLOCK_ROWS = 8192


class _Source(NamedTuple):
    """The open checkpoint of a shard, whose rows stay in the files if possible.

    Attributes:
        order: slots of the rows, from the oldest to the newest.
    """

    buffer: ReplayBuffer
    order: torch.Tensor


def load_share(
    buffer: ReplayBuffer, recipe: ShardRecipe, shard: int, sources: list[str]
) -> tuple[int, int]:
    """Fill a new buffer with the rows and priorities that now belong to a shard.

    Without a shard key, rows are assigned to shards in turn, in the order of the first assignment.
    With a shard key, the saved shards are read one after the other, each in write order. Therefore
    the rows of a stream keep their order. Streams are cut at each change from one saved shard to
    another.

    Returns:
        The count of rows that belong to the shard, and the count of these rows that did not fit. If
        rows do not fit, the oldest rows are dropped.

    Raises:
        CheckpointError: a saved shard is damaged. Each saved shard is verified by one of the
            loading shards.

    Cost: one pass over the rows of the shard, and one over the key column of all rows. Memory: a
    block of 8192 rows, in addition to the new buffer.
    """
    with contextlib.ExitStack() as open_files:
        opened = []
        for number, path in enumerate(sources):
            opened.append(_open(recipe, path, number % recipe.num_shards == shard))
            open_files.callback(opened[-1].buffer.shutdown)
        count = 0
        if recipe.shard_key is None:
            for block in _dealt(opened, recipe.num_shards, shard):
                count += len(block)
                _copy(buffer, opened, block)
        else:
            key = ByKey(recipe.num_shards, recipe.shard_key)
            for one in opened:
                for slots, ended in _with_key(one, key, shard):
                    count += len(slots)
                    if len(slots):
                        _store(buffer, *_read(one, slots))
                    if ended is not None:
                        _sever(buffer, ended)
        for one in opened:
            _default_value(buffer, one.buffer)
    return count, max(0, count - buffer.storage.max_size)


def check_sampler(buffer: ReplayBuffer, path: str) -> None:
    """Raise ValueError if a shard was saved with a sampler of another kind.

    A single buffer would continue with a new sampler state, but all shards must have the same kind
    of sampler.
    """
    with Checkpoint(path) as saved:
        state = saved.part("sampler", mapped=("_priorities",))
        if of_another_kind(state, buffer.sampler):
            raise ValueError(
                f"expected the state of a {buffer.sampler.kind!r} sampler, got {state['_kind']!r}"
            )


def _open(recipe: ShardRecipe, path: str, verify: bool) -> _Source:
    with Checkpoint(path) as saved:
        capacity = saved.manifest["max_size"]
    like: Any = recipe.storage()
    dedup, lane_key = like.dedup_next, like.lane_key
    storage = LazyTensorStorage(capacity, dedup_next=dedup, lane_key=lane_key)
    buffer = recipe.assemble(storage)
    check_sampler(buffer, path)
    in_files = not dedup and lane_key is None
    buffer.loads(path, mmap=in_files, verify=verify or not in_files)
    buffer.flush()  # store held-back rows at the end of their stream
    order = storage.ledger.write_order() if len(storage) else torch.empty(0, dtype=torch.int64)
    return _Source(buffer, order)


def _dealt(opened: list[_Source], num_shards: int, shard: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield blocks of the rows that are assigned to a shard in turn.

    A block is int64 ``[K, 2]``, with the source and slot of each row. Rows are sorted by their row
    id in the saved shard, then by shard. This is the order in which they were first assigned.
    """
    rows = np.array([len(one.order) for one in opened])
    until = np.array([one.buffer.storage.ledger.next_position for one in opened])
    oldest = until - rows
    for first in range(int(oldest.min()), int(until.max()), _BLOCK_ROWS):
        position = np.arange(first, min(first + _BLOCK_ROWS, int(until.max())))[:, None]
        before = np.clip(position - oldest, 0, rows).sum(1, keepdims=True)
        there = (position >= oldest) & (position < until)
        number = before + np.cumsum(there, 1) - 1
        at, source = np.nonzero(there & (number % num_shards == shard))
        slots = np.empty(len(at), np.int64)
        for which, one in enumerate(opened):
            chosen = source == which
            slots[chosen] = one.order.numpy()[position[at[chosen], 0] - oldest[which]]
        if len(at):
            yield np.stack([source, slots], 1)


def _with_key(one: _Source, key: ByKey, shard: int) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield blocks of slots in write order, and the streams to cut after each block.

    The slots hold the rows of the loading shard. The streams end after the block although no column
    shows it. They are given by their keys, as True for all streams, or as None for no stream. The
    row at such a cut may belong to another shard. The last row of each stream ends it, since the
    load of the saved shard has cut all streams.
    """
    storage: Any = one.buffer.storage
    for first in range(0, len(one.order), _BLOCK_ROWS):
        slots = one.order[first : first + _BLOCK_ROWS]
        columns = split_leaves(storage.get(slice(0, len(storage))), 1).leaves
        column = columns[key.key].index_select(0, slots)
        mine = torch.from_numpy(key.route({key.key: column}, len(slots), []) == shard)
        positions = storage.ledger.positions(slots).numpy()
        start = 0
        for last in np.flatnonzero(np.isin(positions, storage.indexes.marks.numbers)).tolist():
            streams: Any = True
            if storage.lane_key is not None:
                streams = columns[unravel(storage.lane_key)][slots[last : last + 1]]
            yield slots[start : last + 1][mine[start : last + 1]], streams
            start = last + 1
        yield slots[start:][mine[start:]], None


def _sever(buffer: ReplayBuffer, streams: Any) -> None:
    """Cut all streams, or the given streams if they have rows."""
    if len(buffer):
        with contextlib.suppress(IndexError):
            buffer.cut(None if streams is True else streams)


def _copy(buffer: ReplayBuffer, opened: list[_Source], block: np.ndarray[Any, Any]) -> None:
    """Store a block of rows from several sources, in the order of the block."""
    pieces, into = [], []
    for which, one in enumerate(opened):
        mine = np.flatnonzero(block[:, 0] == which)
        if len(mine):
            pieces.append(_read(one, torch.from_numpy(block[mine, 1])))
            into.append(torch.from_numpy(mine))
    raw = [priorities for _, priorities in pieces if priorities is not None]
    _store(
        buffer,
        rows_of([rows for rows, _ in pieces], into),
        scattered(raw, into, len(block)) if raw else None,
    )


def _read(one: _Source, slots: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """Return rows as they are stored, and their raw priorities or None."""
    storage, sampler = one.buffer.storage, one.buffer.sampler
    raw = None
    if sampler.prioritized:
        raw = sampler._table.follow(storage).raw[slots].clone()  # type: ignore[attr-defined]
    return storage.get(slots), raw


def _store(buffer: ReplayBuffer, data: Any, raw: torch.Tensor | None) -> None:
    slots = store_rows(buffer, data, update_priority=False)
    if raw is not None:
        buffer.update_priority(slots, raw)


def _default_value(buffer: ReplayBuffer, source: ReplayBuffer) -> None:
    mine: Any = buffer.sampler
    theirs: Any = source.sampler
    if mine.prioritized:
        mine._table.most = max(mine._table.most, theirs._table.most)
