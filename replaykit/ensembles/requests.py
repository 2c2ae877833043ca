"""What members are asked for, so that each gives the rows of its part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from replaykit.registry import entry_of
from replaykit.samplers import Sampler, SampleUnit, Transition

__all__ = ["filled", "requests"]

T = TypeVar("T")


def requests(sampler: Sampler, unit: SampleUnit | None, times: int, rows: int) -> list[int]:
    """Returns how many rows to ask a member for, one entry a draw.

    All at once where it draws single rows, whatever their number. What draws windows, or is one's
    own, is asked for the rows of one part of the batch at a time: the length of windows may depend
    on it.
    """
    entry = entry_of(type(sampler))
    single = entry is not None and entry.single_rows and (unit is None or type(unit) is Transition)
    if single and not getattr(sampler, "drop_last", False):
        return [times * rows]
    return [rows] * times


def filled(
    wanted: int, draw: Callable[[int], tuple[T, int, bool]], sampler: Sampler | None
) -> list[T]:
    """Returns draws that have the wanted number of rows together.

    A draw may be short where it ends a pass over the member; the next pass then gives the rest.

    Args:
        draw: draws that many rows; returns the draw, how many it has, whether it ended a pass.
        sampler: of the member, where it is one.

    Raises:
        ValueError: a draw that is short for another reason, or whose rest is no whole slices.
    """
    draws: list[T] = []
    left = wanted
    while left:
        drawn, rows, ended = draw(left)
        draws.append(drawn)
        left -= rows
        if left > 0 and not (ended and rows):
            raise ValueError(
                f"expected {wanted} rows, got {wanted - left}: windows of different lengths do not "
                "fill a part of a batch; use strict ones, or pad_output=True"
            )
        if left > 0 and _by_number(sampler):
            raise ValueError(
                f"expected {wanted} rows, got {wanted - left} at the end of a pass, and with "
                "num_slices= the rest is no whole slices; use slice_len="
            )
        if left < 0:
            raise ValueError(f"expected {wanted} rows, got {wanted - left}")
    return draws


def _by_number(sampler: Sampler | None) -> bool:
    slicing = getattr(sampler, "_slicing", None)
    return slicing is not None and slicing.size.num_slices is not None
