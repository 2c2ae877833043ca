"""The entries of a group of an H5 file, of which there may be a million."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

__all__ = ["entries_of", "link_problem", "links_of"]


def links_of(node: Any) -> Iterator[tuple[bytes, str | None]]:
    """Yields the names of the links of a group, and why each is not followed, if it is not.

    Soft and external links are not: an external one could name any file of this machine.
    """
    import h5py

    names, ends = bytearray(), array("q", [0])
    odd: dict[bytes, str] = {}

    def note(name: bytes, info: Any) -> None:
        # There may be a million, for each of which an object would be too much.
        names.extend(name)
        ends.append(len(names))
        if info.type != h5py.h5l.TYPE_HARD:
            odd[name] = _why(info)

    # Iterated in one go: asking for the links one by one is quadratic in their number.
    node.links.iterate(note, info=True)
    for begin, stop in pairwise(ends):
        name = bytes(names[begin:stop])
        yield name, odd.get(name)


def link_problem(node: Any, name: bytes) -> str | None:
    """Says why an entry of a group is not followed; ``None`` if it is, or if there is none."""
    import h5py

    try:
        info = node.links.get_info(name)
    except KeyError:
        return None
    return None if info.type == h5py.h5l.TYPE_HARD else _why(info)


def _why(info: Any) -> str:
    import h5py

    if info.type == h5py.h5l.TYPE_SOFT:
        return "it is a soft link, which is not followed"
    return "it is a link out of this file"


def entries_of(node: Any) -> Iterator[tuple[bytes, Any]]:
    """Yields name and opened object of each entry of a group; for a link, why it is not opened."""
    import h5py

    for name, why in links_of(node):
        yield name, h5py.h5o.open(node, name) if why is None else why
