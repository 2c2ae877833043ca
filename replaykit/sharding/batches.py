"""The shares of shards, put together into the batch that one buffer would have given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import is_tensordict
from replaykit.buffer.merging import merged, shaped
from replaykit.ensembles.batches import check_alike
from replaykit.samplers import Sampler
from replaykit.samplers.markers import SEQUENCE_ID
from replaykit.samplers.priority_law import importance_weights
from replaykit.sharding.facts import Part
from replaykit.sharding.naming import Names
from replaykit.structure import build, flatten

__all__ = ["Share", "batch_of", "finished", "rows_of"]

Array = np.ndarray[Any, Any]


class Share:
    """What one shard gave for a batch.

    Args:
        shard, incarnation: who gave it.
        numbers: which draws of the batch these are, int64 ``[draws]``.
        mass: by which the shard was drawn.
        part: its answer.
    """

    def __init__(
        self, shard: int, incarnation: int, numbers: Array, mass: float, part: Part
    ) -> None:
        self.shard, self.incarnation = shard, incarnation
        self.numbers, self.mass, self.part = torch.from_numpy(numbers), mass, part

    @property
    def likelier(self) -> float:
        """How much likelier its rows were than with a table of the instant of the draw."""
        found = self.part.facts.mass
        return self.mass / found if found else 1.0

    def draw_of_row(self) -> torch.Tensor:
        """The draw of the batch that each row belongs to, int64 ``[rows]``."""
        window = self.part.info.get(SEQUENCE_ID)
        return self.numbers if window is None else self.numbers[window]


def batch_of(
    shares: list[Share], names: Names, sampler: Sampler, least: float
) -> tuple[Any, dict[Any, Any]]:
    """Returns rows in the order of the draws, and what is known of them.

    Args:
        least: the smallest probability of a stored row, in the unit of ``v`` times ``likelier``.
    """
    draws = torch.cat([share.draw_of_row() for share in shares])
    first = torch.argsort(draws, stable=True)
    order = torch.empty_like(first)
    order[first] = torch.arange(len(draws))
    into = list(order.split([len(share.draw_of_row()) for share in shares]))
    info = _info(shares, names, into, len(draws))
    if shares[0].part.values is not None:
        weight = _weights(shares, sampler, least)
        info["priority_weight"] = weight[draws[first]]
    return rows_of([share.part.data for share in shares], into), info


def _info(shares: list[Share], names: Names, into: list[torch.Tensor], rows: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key in shares[0].part.info:
        if key == "priority_weight":
            continue
        values = []
        for share in shares:
            value = share.part.info[key]
            if key in ("index", "anchor_index"):
                value = names.join(share.shard, value)
            elif key in ("index_generation", "anchor_generation"):
                value = names.stamped(value, share.incarnation)
            elif key == SEQUENCE_ID:
                value = share.draw_of_row()
            values.append(value)
        found[key] = _placed(values, into, rows)
    return found


def _weights(shares: list[Share], sampler: Any, least: float) -> torch.Tensor:
    """``priority_weight`` of each draw ``[draws]``: of the probability that it really had."""
    count = sum(len(share.numbers) for share in shares)
    value = torch.empty(count, dtype=torch.float64)
    for share in shares:
        assert share.part.values is not None
        value[share.numbers] = share.part.values * share.likelier
    if sampler.weight_norm == "batch":
        least = float(value.min())
    return importance_weights(value, least, sampler.beta, sampler.dtype)


def rows_of(pieces: list[Any], into: list[torch.Tensor]) -> Any:
    """Returns containers as one, row j of piece s at place ``into[s][j]``.

    Raises:
        SchemaError: they differ in keys, shapes or dtypes. RuntimeError: transforms have changed
            the number of rows.

    Cost: one copy of the bytes, a few Python steps a leaf and piece.
    """
    taken = [flatten(piece, 1) for piece in pieces]
    root, first = taken[0]
    count = sum(len(places) for places in into)
    for shard, (other, leaves) in enumerate(taken):
        if other != root:
            check_alike((0, root), (shard, other))
        if any(leaf.shape[0] != len(into[shard]) for leaf in leaves.values()):
            raise RuntimeError(
                f"a transform made other than {len(into[shard])} rows of as many that were drawn"
            )
    joined = {path: _placed([leaves[path] for _, leaves in taken], into, count) for path in first}
    said = {piece.device for piece in pieces if is_tensordict(piece)}
    return build(root, joined, torch.Size([count]), said.pop() if len(said) == 1 else None)


def _placed(values: list[torch.Tensor], into: list[torch.Tensor], rows: int) -> torch.Tensor:
    first = values[0]
    out = first.new_empty((rows, *first.shape[1:]))
    for value, places in zip(values, into, strict=True):
        out.index_copy_(0, places, value)
    return out


def finished(data: Any, info: dict[Any, Any], sampler: Sampler, *, merge: bool) -> Any:
    """A batch in the shape in which the sampler delivers; ``merge``: with what is known of it."""
    if merge:
        data = merged(data, info, 0)
    shape = sampler.shape_of(info["index"].shape[0])
    if shape is not None and is_tensordict(data):
        data = shaped(data, info["index"].shape[0], shape)
    return data
