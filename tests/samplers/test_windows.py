"""Which windows an episode has, and which rows these have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit import LazyTensorStorage, ReplayBuffer
from replaykit.episodes import WINDOWS, EpisodeIndex
from replaykit.samplers.window_forms import ALIGNS, PADS, SHORTS, Window, WindowForm


def _index(rows: Any) -> EpisodeIndex:
    rb = ReplayBuffer(storage=LazyTensorStorage(len(rows)))
    rb.extend(rows)
    return rb.storage.episodes


def _all_windows(index: EpisodeIndex, window: Window) -> list[list[int | None]]:
    """Rows of every window, by number; None at padding."""
    count = int(index.totals(window.law, WINDOWS).sum())
    found = index.find(window.law, WINDOWS, np.arange(count))
    layout = window.lay_out(index, window.cut(found))
    windows: list[list[int | None]] = [[] for _ in range(count)]
    mask = np.ones(len(layout.element), bool) if layout.mask is None else layout.mask
    for number, element, real in zip(layout.window, layout.element, mask, strict=True):
        windows[number].append(int(element) if real else None)
    return windows


def _model(lengths: list[int], form: WindowForm, length: int) -> list[list[int | None]]:
    """What the reference says, scanned."""
    left, right = (length - 1 if s is True else int(s) for s in form.span)
    if form.pad is not None:
        left = length - 1 if form.pad in ("left", "both") else 0
        right = length - 1 if form.pad in ("right", "both") else 0
    windows, first = [], 0
    for n in lengths:
        if form.pad is None:
            whole, lawful = not form.strict and n < length, n >= length
        else:
            whole = form.short == "whole" and n <= length
            lawful = not whole and (form.short == "law" or n >= length)
        spans = []
        if whole:
            spans = [(0, n)]
        elif lawful:
            spans = [(max(s, 0), min(s + length, n)) for s in range(-left, n - length + right + 1)]
        for low, high in spans:
            real: list[int | None] = list(range(first + low, first + high))
            padding: list[int | None] = [None] * (length - len(real)) if form.filled else []
            windows.append(padding + real if form.align == "right" else real + padding)
        first += n
    return windows


_FORMS = st.one_of(
    st.builds(
        WindowForm,
        pad=st.sampled_from(PADS),
        short=st.sampled_from(SHORTS),
        align=st.sampled_from(ALIGNS),
    ),
    st.builds(
        WindowForm,
        span=st.tuples(*[st.sampled_from([False, True, 0, 1, 2])] * 2),
        strict=st.booleans(),
    ),
    st.builds(WindowForm, strict=st.just(False), repeat=st.just(True)),
)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    form=_FORMS,
    length=st.integers(3, 5),
)
def test_windows_are_those_of_a_scan(
    lengths: list[int], form: WindowForm, length: int, rows: Callable[..., Any]
) -> None:
    windows = _all_windows(_index(rows(lengths)), form.of(length))
    assert windows == _model(lengths, form, length)


@pytest.mark.parametrize("align", ALIGNS)
def test_padding_has_the_place_of_the_nearest_real_row(
    align: str, rows: Callable[..., Any]
) -> None:
    index = _index(rows([2]))
    window = WindowForm(pad="right", short="whole", align=align).of(4)
    layout = window.lay_out(index, window.cut(index.find(window.law, WINDOWS, np.array([0]))))
    expected = [0, 1, 1, 1] if align == "left" else [0, 0, 0, 1]
    assert layout.element.tolist() == expected


def test_windows_that_begin_at_given_rows(rows: Callable[..., Any]) -> None:
    index = _index(rows([5]))
    window = WindowForm(span=(False, True)).of(3)
    first, lane = np.array([0, 3, 4]), np.zeros(3, np.int64)
    layout = window.lay_out(index, window.cut_from(first, np.full(3, 4), lane))
    assert layout.element.tolist() == [0, 1, 2, 3, 4, 4]
    assert layout.window.tolist() == [0, 0, 0, 1, 1, 2]


def test_a_span_as_wide_as_the_window_is_refused() -> None:
    assert WindowForm(span=(3, 0)).of(4).left == 3
    with pytest.raises(ValueError, match="span below the 4 rows"):
        WindowForm(span=(0, 4)).of(4)
