"""Whether the observation of a row is the one that the row before it led to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from replaykit._compat import arange
from replaykit.storages.bits import differing
from replaykit.storages.carrying import carried
from replaykit.storages.links import Chains
from replaykit.storages.pairs import Pairs
from replaykit.structure import Path
from replaykit.ted import EPISODE_KEYS, FLAG_KEYS, end_flags, format_key

__all__ = ["check_batch", "check_newest", "check_newest_of", "check_streams", "mismatch"]

_Leaves = Mapping[Path, torch.Tensor]


def mismatch(
    earlier: _Leaves, later: _Leaves, pairs: Pairs, severed: torch.Tensor | None = None
) -> tuple[Path, int] | None:
    """Returns a counterpart and the first row whose next one has another value, in one episode.

    Args:
        earlier, later: rows ``[n, *F]`` by path, each of which the other's follows in time. Where
            a flag of the earlier one is set (`end_flags`), or an id differs, an episode ends.
        severed: where one ends without a flag, bool ``[n]``.

    Cost: one pass over the leaves in pairs; flags and ids are looked at only where rows differ.
    """
    first: tuple[Path, int] | None = None
    open_rows: torch.Tensor | None = None
    for path, root in pairs.root_of.items():
        differs = differing(earlier[path], later[root])
        if not bool(differs.any()):
            continue
        if open_rows is None:
            ended = _ended(earlier, later)
            open_rows = ~(ended if severed is None else ended | severed)
        wrong = (differs & open_rows).nonzero()
        if len(wrong) and (first is None or int(wrong[0]) < first[1]):
            first = path, int(wrong[0])
    return first


def _ended(earlier: _Leaves, later: _Leaves) -> torch.Tensor:
    """Which rows are the last ones of their episode, bool ``[n]``."""
    some = next(iter(earlier.values()))
    ended = torch.zeros(len(some), dtype=torch.bool, device=some.device)
    for key in end_flags(earlier):
        ended |= earlier[key].reshape(len(ended), -1).ne(0).any(1).to(ended.device)
    for key in EPISODE_KEYS:
        if key in earlier:
            ended |= differing(earlier[key], later[key]).to(ended.device)
    return ended


def check_batch(leaves: _Leaves, batch: torch.Size, pairs: Pairs) -> None:
    """Checks the rows of a batch, leaves ``[n, *lanes, *F]``, against each other.

    Raises:
        ValueError: inside an episode, a row does not begin where the one before it led to.
    """
    if batch[0] < 2:
        return
    cells, rows = batch[1:].numel(), batch.numel()
    flat = {
        path: leaf.reshape(rows, *leaf.shape[len(batch) :])
        for path, leaf in leaves.items()
        if _matters(path, pairs)
    }
    earlier = {path: leaf[: rows - cells] for path, leaf in flat.items()}
    later = {path: leaf[cells:] for path, leaf in flat.items()}
    found = mismatch(earlier, later, pairs)
    if found is not None:
        path, element = found
        row, lane = divmod(element, cells)
        _refuse(path, pairs, f"row {row + 1}", f"row {row} has", lane, cells)


def check_newest(
    earlier: _Leaves,
    leaves: _Leaves,
    batch: torch.Size,
    pairs: Pairs,
    severed: torch.Tensor | None = None,
) -> None:
    """Checks the first row of a batch against the newest stored one, leaves ``[lanes, *F]``.

    ``severed``: lanes of which the newest row is not gone on from, bool ``[lanes]``.

    Raises:
        ValueError: as ``check_batch``.
    """
    cells = batch[1:].numel()
    later = {
        path: leaf[:1].reshape(cells, *leaf.shape[len(batch) :])
        for path, leaf in leaves.items()
        if _matters(path, pairs)
    }
    device = next(iter(earlier.values())).device
    later = {path: leaf.to(device) for path, leaf in later.items()}
    found = mismatch(earlier, later, pairs, severed)
    if found is not None:
        _refuse(found[0], pairs, "row 0", "the newest stored row has", found[1], cells)


def check_streams(leaves: _Leaves, found: Chains, pairs: Pairs) -> None:
    """Checks the rows of a batch, leaves ``[n, *F]``, each against the one before in its stream.

    Raises:
        ValueError: as ``check_batch``.
    """
    known = {path: leaf for path, leaf in leaves.items() if _matters(path, pairs)}
    places = arange(len(next(iter(known.values()))))
    wrong = mismatch(_some(known, found.rows), _some(known, found.followers), pairs)
    if wrong is not None:
        path, pair = wrong
        rows, followers = (int(places[part][pair]) for part in (found.rows, found.followers))
        _refuse(path, pairs, f"row {followers}", f"row {rows}, of the same stream, has", 0, 1)


def check_newest_of(earlier: _Leaves, leaves: _Leaves, first: torch.Tensor, pairs: Pairs) -> None:
    """Checks rows ``first``, int64 ``[m]``, of a batch against the newest stored ones of their
    streams, leaves ``[m, *F]``.

    Raises:
        ValueError: as ``check_batch``.
    """
    known = {path: leaf for path, leaf in leaves.items() if _matters(path, pairs)}
    device = next(iter(earlier.values())).device
    later = {path: leaf.to(device) for path, leaf in _some(known, first).items()}
    found = mismatch(earlier, later, pairs)
    if found is not None:
        path, place = found
        row = f"row {int(first[place])}"
        _refuse(path, pairs, row, "the newest stored row of its stream has", 0, 1)


def _matters(path: Path, pairs: Pairs) -> bool:
    return (
        path in pairs.root_of
        or path in pairs.root_of.values()
        or path in FLAG_KEYS
        or path in EPISODE_KEYS
    )


def _some(leaves: _Leaves, at: slice | torch.Tensor) -> dict[Path, torch.Tensor]:
    return {path: carried(leaf)[at].view(leaf.dtype) for path, leaf in leaves.items()}


def _refuse(path: Path, pairs: Pairs, row: str, before: str, lane: int, cells: int) -> None:
    root, where = format_key(pairs.root_of[path]), f" (lane {lane})" if cells > 1 else ""
    raise ValueError(
        f"key {root}, {row}{where}: expected the value that {before} under {format_key(path)}, "
        "since no flag under 'next' and no change of an id ends the episode there, got another "
        'one; on_mismatch="dense" stores such rows in full'
    )
