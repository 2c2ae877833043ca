"""How many windows are taken from a measure: the draws of sequences reference 2.4."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes import Windows
from replaykit.samplers.measures import Anchors, PerLane

__all__ = ["DRAWS", "iid", "integers", "stratified", "uniform", "without_replacement"]

Array = np.ndarray[Any, Any]

_CPU = torch.device("cpu")

DRAWS = ("iid", "stratified", "without_replacement", "sequential")


def uniform(count: int, generator: torch.Generator | None) -> Array:
    """Numbers of [0, 1), float64 ``[count]``, from the generator; None: torch's global one."""
    device = "cpu" if generator is None else generator.device
    drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=device)
    return np.asarray(drawn.cpu().numpy())


def integers(limit: int, count: int, generator: torch.Generator | None) -> Array:
    """Numbers of ``[0, limit)``, int64 ``[count]``, each as likely."""
    if generator is not None and generator.device != _CPU:
        drawn = torch.randint(limit, (count,), generator=generator, device=generator.device)
        return np.asarray(drawn.cpu().numpy())
    found = np.empty(count, np.int64)
    torch.from_numpy(found).random_(0, limit, generator=generator)
    return found


def iid(anchors: Anchors, count: int, generator: torch.Generator | None) -> Windows:
    """Independent draws, with replacement."""
    if anchors.uniform:
        return anchors.numbered(integers(anchors.count, count, generator))
    return anchors.at(uniform(count, generator))


def stratified(anchors: Anchors, count: int, generator: torch.Generator | None) -> Windows:
    """One draw in each of ``count`` parts of equal mass, in order.

    Of lanes that are equally likely each gets as many as the others, those left over go to
    distinct lanes chosen at random; the lanes take turns in the batch.
    """
    if isinstance(anchors, PerLane):
        return _stratified_lanes(anchors, count, generator)
    return anchors.at((np.arange(count) + uniform(count, generator)) / count)


def _stratified_lanes(anchors: PerLane, count: int, generator: torch.Generator | None) -> Windows:
    rounds, rest = divmod(count, len(anchors.lanes))
    device = "cpu" if generator is None else generator.device
    more = torch.randperm(len(anchors.lanes), generator=generator, device=device)[:rest]
    chosen = np.sort(more.cpu().numpy())
    # By number among the lanes that have windows; a lane's i-th of m draws is in its i-th part.
    turn = np.tile(np.arange(len(anchors.lanes)), rounds)
    draws = np.full(len(anchors.lanes), rounds)
    draws[chosen] += 1
    lane = np.concatenate([turn, chosen])
    part = np.arange(count) // len(anchors.lanes)
    point = (part + uniform(count, generator)) / draws[lane]
    return anchors.in_lane(anchors.lanes[lane], point)


def without_replacement(anchors: Anchors, count: int, generator: torch.Generator | None) -> Windows:
    """Successive draws from what is left: no window twice. ``count`` is at most their number.

    Repeated windows are dropped and others drawn. Where that would take long, since most of the
    mass is drawn already, every window left gets a key ``e / mass``, e standard exponential, and
    those with the lowest keys come next, in that order (Efraimidis and Spirakis, 2006: the law is
    the same). Cost: O(count), or O(windows) then.
    """
    few = 4 * count >= anchors.count
    if anchors.uniform and few:
        device = "cpu" if generator is None else generator.device
        picked = torch.randperm(anchors.count, generator=generator, device=device)[:count]
        return anchors.numbered(picked.cpu().numpy())
    drawn, tries = _none(), 0
    while len(drawn.base) < count and not few:
        need = count - len(drawn.base)
        drawn = _joined(drawn, iid(anchors, 2 * need if tries else need, generator))
        tries += 1
        few = tries >= 8
    if len(drawn.base) < count:
        everything = anchors.numbered(np.arange(anchors.count))
        key = -np.log1p(-uniform(anchors.count, generator)) / anchors.mass(everything)
        order = np.argsort(key, kind="stable")
        drawn = _joined(drawn, Windows(*(field[order] for field in everything)))
    return Windows(*(field[:count] for field in drawn))


def _none() -> Windows:
    nothing = np.zeros(0, np.int64)
    return Windows(nothing, nothing, nothing, nothing, nothing)


def _joined(drawn: Windows, more: Windows) -> Windows:
    """Both in order, each window where it came first."""
    both = Windows(*(np.concatenate(pair) for pair in zip(drawn, more, strict=True)))
    keys = np.stack([both.lane, both.base, both.rest], 1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return Windows(*(field[first] for field in both))
