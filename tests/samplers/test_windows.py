"""Which windows episodes have, and what a batch says of their rows, against a scan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samplers.building import sliced

FORMS = st.one_of(
    st.fixed_dictionaries(
        {
            "pad": st.sampled_from(["none", "left", "right", "both"]),
            "short": st.sampled_from(["exclude", "whole", "law"]),
            "align": st.sampled_from(["left", "right"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "span": st.tuples(*[st.sampled_from([False, True, 0, 1, 2])] * 2),
            "strict_length": st.booleans(),
        }
    ),
    st.just({"strict_length": False, "pad_output": True}),
)


def scan(lengths: list[int], form: dict[str, Any], length: int) -> list[tuple[int | None, ...]]:
    """Rows of every window, by number; None at padding."""
    pad, short = form.get("pad"), form.get("short")
    left, right = (length - 1 if s is True else int(s) for s in form.get("span", (0, 0)))
    if pad is not None:
        left = length - 1 if pad in ("left", "both") else 0
        right = length - 1 if pad in ("right", "both") else 0
    windows, first = [], 0
    for n in lengths:
        if pad is None:
            whole, lawful = not form["strict_length"] and n < length, n >= length
        else:
            whole = short == "whole" and n <= length
            lawful = not whole and (short == "law" or n >= length)
        spans = []
        if whole:
            spans = [(0, n)]
        elif lawful:
            spans = [(max(s, 0), min(s + length, n)) for s in range(-left, n - length + right + 1)]
        for low, high in spans:
            real: tuple[int | None, ...] = tuple(range(first + low, first + high))
            filled = pad is not None or form.get("pad_output")
            padding: tuple[int | None, ...] = (None,) * (length - len(real)) if filled else ()
            windows.append(padding + real if form.get("align") == "right" else real + padding)
        first += n
    return windows


@pytest.mark.pitfall("BD11", "BD19")
@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    form=FORMS,
    length=st.integers(3, 5),
)
def test_windows_are_those_of_a_scan(lengths: list[int], form: dict[str, Any], length: int) -> None:
    """BD11, BD19: all of them, once, with the places of padding, and marked at their last row."""
    wanted = scan(lengths, form, length)
    rb = sliced(lengths, slice_len=length, draw="without_replacement", **form)
    assert rb.can_sample(length) is bool(wanted)
    if not wanted:
        return
    batch = rb.sample(length * len(wanted))
    mask = batch.get(("collector", "mask"), batch["index"] >= 0)
    found: list[list[int | None]] = [[] for _ in wanted]
    rows: list[list[int]] = [[] for _ in wanted]
    for window, row, real in zip(
        batch["sequence_id"].tolist(), batch["index"].tolist(), mask.tolist(), strict=True
    ):
        found[window].append(row if real else None)
        rows[window].append(row)
    assert Counter(map(tuple, found)) == Counter(wanted)
    for window, own in zip(found, rows, strict=True):  # padding lies where the nearest row does
        real = [row for row in window if row is not None]
        assert own == [
            row if row is not None else real[0] if place < window.index(real[0]) else real[-1]
            for place, row in enumerate(window)
        ]
    assert batch["next", "done"][mask].sum() == len(wanted)
    assert not batch["next", "done"][~mask].any()
