"""The contents that a disk may have after a loss of power, and a search for wrong ones.

A sync of a file makes its bytes and its length durable. A sync of a directory makes its names
durable. All else that happened before the cut is pending: it may be on the disk or not.

- Each sector of a file has one of its versions since the last sync, independent of other sectors.
- The length of a file is one of its lengths since the last sync.
- A change of names is on the disk as a whole or not at all, after earlier changes of the same name.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.disk_events import (
    SECTOR,
    Begun,
    Done,
    Entries,
    Event,
    Recorder,
    Sized,
    Synced,
    Wrote,
)

__all__ = ["STYLES", "Cut", "Disk", "Tree", "choose", "search", "write_tree"]


Tree = dict[str, bytes | None]
"""The bytes of each file by its path; None for a directory."""

_RANDOM = ("in order", "any")
STYLES = ("nothing", "all", "names", "bytes", "no renames", *_RANDOM, *_RANDOM, *_RANDOM)
"""Which pending changes are on the disk.

``names`` has all names and lengths and no bytes, ``bytes`` has all bytes and no names. ``in order``
has the first changes of names, ``any`` has some of them; both have some sectors.
"""


@dataclass
class _File:
    size: int = 0
    sizes: list[int] = field(default_factory=list)
    sectors: dict[int, bytes] = field(default_factory=dict)
    pending: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def sync(self) -> None:
        self.size = self.sizes[-1] if self.sizes else self.size
        self.sectors.update({at: versions[-1] for at, versions in self.pending.items()})
        self.sizes.clear()
        self.pending.clear()

    def content(self, style: str, draw: random.Random) -> bytes:
        sizes, sectors = [self.size, *self.sizes], dict(self.sectors)
        size = sizes[-1]
        if style == "nothing":
            size = self.size
        elif style == "some":
            size = draw.choice(sizes)
            how = draw.choice(("last", "old or last", "each"))
            for at, versions in self.pending.items():
                choices = [sectors.get(at, bytes(SECTOR)), *versions]
                some = {"last": choices[-1:], "old or last": [choices[0], choices[-1]]}
                sectors[at] = draw.choice(some.get(how, choices))
        elif style == "all":
            sectors.update({at: versions[-1] for at, versions in self.pending.items()})
        found = bytearray(-(-size // SECTOR) * SECTOR)
        for at, value in sectors.items():
            if at * SECTOR < size:
                found[at * SECTOR : (at + 1) * SECTOR] = value
        return bytes(found[:size])


class Disk:
    """The durable contents of a disk, and the pending changes."""

    def __init__(self, directories: set[int]) -> None:
        self._directories = directories
        self._files: dict[int, _File] = defaultdict(_File)
        self._entries: dict[int, dict[str, int]] = {}
        self._pending: list[Entries] = []

    def apply(self, event: Event) -> None:
        """Apply the next event of the program."""
        if isinstance(event, Wrote):
            for at, value in event.sectors.items():
                self._files[event.node].pending[at].append(value)
        elif isinstance(event, Sized):
            self._files[event.node].sizes.append(event.size)
        elif isinstance(event, Entries):
            self._pending.append(event)
        elif isinstance(event, Synced) and event.node not in self._directories:
            self._files[event.node].sync()
        elif isinstance(event, Synced):
            self._sync_names(event.node)

    def _sync_names(self, directory: int) -> None:
        """Make the names in a directory durable, with the earlier changes that they need."""
        needed: set[tuple[int, str]] = set()
        taken, left = [], []
        for change in reversed(self._pending):
            keys = _keys(change)
            if keys & needed or any(node == directory for node, _ in keys):
                needed |= keys
                taken.append(change)
            else:
                left.append(change)
        self._pending = left[::-1]
        for change in reversed(taken):
            _make(change, self._entries)

    def tree(self, style: str, draw: random.Random) -> Tree:
        """Return one of the contents that the disk may have; see ``STYLES``."""
        entries = {node: dict(names) for node, names in self._entries.items()}
        blocked: set[tuple[int, str]] = set()
        likely = draw.random()
        stop = draw.randint(0, len(self._pending)) if style == "in order" else len(self._pending)
        for at, change in enumerate(self._pending):
            lost = (
                style in ("nothing", "bytes")
                or (style == "no renames" and len(change.changes) > 1)
                or (style == "any" and draw.random() > likely)
                or at >= stop
            )
            if lost or _keys(change) & blocked:
                blocked |= _keys(change)
            else:
                _make(change, entries)
        of_files = {"nothing": "nothing", "names": "lengths", "in order": "some", "any": "some"}
        tree: Tree = {}
        self._render(0, "", entries, of_files.get(style, "all"), draw, tree)
        return tree

    def _render(
        self,
        node: int,
        path: str,
        entries: dict[int, dict[str, int]],
        style: str,
        draw: random.Random,
        tree: Tree,
    ) -> None:
        for name, inner in sorted(entries.get(node, {}).items()):
            if inner in self._directories:
                tree[f"{path}{name}"] = None
                self._render(inner, f"{path}{name}/", entries, style, draw, tree)
            else:
                tree[f"{path}{name}"] = self._files[inner].content(style, draw)


def _keys(change: Entries) -> set[tuple[int, str]]:
    return {(node, name) for node, name, _ in change.changes}


def _make(change: Entries, entries: dict[int, dict[str, int]]) -> None:
    for node, name, new in change.changes:
        if new is None:
            entries.setdefault(node, {}).pop(name, None)
        else:
            entries.setdefault(node, {})[name] = new


def write_tree(tree: Tree, folder: Path) -> None:
    """Write the files of a disk into a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


class Cut(NamedTuple):
    """A content that the disk may have after a cut.

    Attributes:
        where: the last event before the cut, and the style.
        tree: the content.
        steps: the steps whose state may be found: the last completed step and, if the workload was
            in a step, that step. 0 is the state before the first step.
    """

    where: str
    tree: Tree
    steps: tuple[int, ...]


def choose(recorder: Recorder, most: int, *, seed: int = 0) -> list[Cut]:
    """Return different contents after any event, at most ``most`` of them.

    Contents are made for twice as many cuts, since some are equal. If there are too few events,
    each has more than one content of the random styles.
    """
    draw, events = random.Random(seed), recorder.events
    places = [(at, style) for at in range(recorder.start, len(events)) for style in STYLES]
    while len(places) < 2 * most:
        places.append((draw.randrange(recorder.start, len(events)), draw.choice(_RANDOM)))
    some = defaultdict(list)
    for at, style in draw.sample(places, 2 * most):
        some[at].append(style)
    found = list(_cuts(recorder, some, draw))
    return [found[at] for at in sorted(draw.sample(range(len(found)), min(len(found), most)))]


def search(
    recorder: Recorder,
    folder: Path,
    check: Callable[[Path, tuple[int, ...]], Any],
    *,
    most: int,
    seed: int = 0,
) -> Iterator[str]:
    """Check what the disk may hold after a cut at any event, and yield a line for each fault.

    Args:
        folder: a new folder, below which the contents are written.
        check: opens a folder, and raises if its state is that of none of the given steps.
        recorder, most, seed: as for `choose`.
    """
    folder.mkdir()
    for number, cut in enumerate(choose(recorder, most, seed=seed)):
        target = folder / str(number)
        write_tree(cut.tree, target)
        try:
            check(target, cut.steps)
        except Exception as error:
            yield f"{cut.where}, steps {cut.steps}: {type(error).__name__}: {error}"
        shutil.rmtree(target)


def _cuts(
    recorder: Recorder, styles: Mapping[int, Sequence[str]], draw: random.Random
) -> Iterator[Cut]:
    """Yield the different contents of the disk, with some styles after some of the events."""
    disk, seen = Disk(recorder.directories), set()
    done = begun = 0
    for at, event in enumerate(recorder.events):
        disk.apply(event)
        if isinstance(event, Begun):
            begun = event.step
        elif isinstance(event, Done):
            done = event.step
        steps = (done,) if begun <= done else (done, begun)
        for style in styles.get(at, ()):
            tree = disk.tree(style, draw)
            digest = _digest(tree, steps)
            if digest not in seen:
                seen.add(digest)
                yield Cut(f"event {at} ({type(event).__name__}), {style!r}", tree, steps)


def _digest(tree: Tree, steps: tuple[int, ...]) -> bytes:
    digest = hashlib.blake2b(repr(steps).encode())
    for name, content in tree.items():
        digest.update(f"{name} {content is None}".encode())
        digest.update(content or b"")
    return digest.digest()
