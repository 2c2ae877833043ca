"""Neighbours of written rows, against a model that looks at one element after the other."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaykit.storages.indexing import neighbours


@st.composite
def _writes(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    cells, slots = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    total = cells * slots
    if draw(st.booleans()):  # time slots one after the other, round the ring
        first, count = draw(st.integers(0, slots - 1)), draw(st.integers(1, slots))
        elements = [(first * cells + i) % total for i in range(count * cells)]
    else:
        elements = draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True))
    return elements, cells, total, draw(st.integers(0, slots)) * cells


@given(_writes(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_neighbours_match_model(write: tuple[list[int], int, int, int], at_cursor: bool) -> None:
    elements, cells, total, stored = write
    found = neighbours(torch.tensor(elements), cells, total, stored, at_cursor=at_cursor)
    places = torch.arange(len(elements))
    inside = {}
    for rows, followers in found.inside:
        pairs = zip(places[rows].tolist(), places[followers].tolist(), strict=True)
        inside.update(pairs)
    where = {element: place for place, element in enumerate(elements)}
    expected = {
        p: where[(e + cells) % total] for e, p in where.items() if (e + cells) % total in where
    }
    run = elements == [(elements[0] + i) % total for i in range(len(elements))]
    run &= len(elements) <= total - cells or len(elements) == total
    newest = range(len(elements) - cells, len(elements)) if run and at_cursor else range(0)
    assert inside == {p: q for p, q in expected.items() if p not in newest}
    outside = [
        p
        for p, e in enumerate(elements)
        if (e + cells) % total not in where and (e + cells) % total < stored and p not in newest
    ]
    assert found.outside.tolist() == outside
    before = {
        (e - cells) % total: p
        for e, p in where.items()
        if (e - cells) % total not in where and (e - cells) % total < stored
    }
    after = places[found.after_before].tolist()
    assert dict(zip(found.before.tolist(), after, strict=True)) == before
