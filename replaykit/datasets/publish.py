"""Publishing a directory: it appears complete at its path, or not at all.

A data set is built in a hidden directory beside its target, its files are made durable, the
manifest is written last, and one rename puts it in place. A new version is swapped with the old
one in one step; processes that have mapped the old one keep it. Whatever a dead process left
behind is removed by the next one that holds the lock.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from replaykit.datasets.locking import target_lock, target_lock_if_free
from replaykit.datasets.manifest import MANIFEST_NAME, Manifest
from replaykit.datasets.opened import FORCE, Published, open_directory, verify_directory
from replaykit.datasets.own_files import HELD_BACK, META, UNFINISHED_NAME, check_own
from replaykit.filesystem import (
    disk_errors,
    exchange,
    file_limit_errors,
    private_path,
    remove_tree,
    siblings,
    sync_directory,
    sync_tree,
)

__all__ = [
    "UNFINISHED_NAME",
    "ensure_published",
    "hold_back",
    "open_published",
    "publish",
    "recover",
    "remove_published",
    "verify_published",
]

_BUILDING: Final = "tmp"
_RETIRED: Final = "old"


def open_published(path: str | Path, *, identity: Mapping[str, Any] | None = None) -> Published:
    """Opens a published data set; see `open_directory` for what is checked and what it costs.

    What dead processes left beside it is removed, unless somebody is at work there.

    Args:
        path: where the data set is.
        identity: entries that the identity in the manifest must have; ``None`` stands for one
            that must not be there.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: what is there is not a complete data set, or the data set of another
            identity; names it and says what to do.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        found = _existing(target, identity)
        if found is None:
            if not siblings(target, _RETIRED):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
            with target_lock(target):
                recover(target)
            found = open_directory(target)
            _check_identity(found, identity)
        return found


def verify_published(path: str | Path) -> None:
    """Reads a published data set whole and compares every checksum.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: it is no data set, or files of it are damaged; names them.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        verify_directory(target)


def remove_published(path: str | Path) -> None:
    """Removes the data set at the path; it is gone in one step, never half there.

    What dead or interrupted processes left beside it goes too.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: there are files that are no part of a data set; names one.
    """
    target = _resolve(path)
    if not target.exists():
        raise FileNotFoundError(f"{target} does not exist")
    with file_limit_errors(target), target_lock(target):
        check_own(target)
        recover(target)
        doomed = private_path(target, _BUILDING)
        os.rename(target, doomed)
        sync_directory(target.parent)
        remove_tree(doomed)


def ensure_published(
    path: str | Path,
    build: Callable[[Path], Manifest | bytes],
    *,
    force: bool = False,
    identity: Mapping[str, Any] | None = None,
    is_current: Callable[[Manifest], bool] | None = None,
    prepare: Callable[[], object] | None = None,
    goes_on: bool = False,
) -> Published:
    """Opens the data set at a path, and builds it first where there is none.

    Processes and threads that ask for one path at once share one build: the others wait, then
    open its result.

    Args:
        path: where the data set is, or will be.
        build: fills the empty directory that it is given and returns the manifest, or its text.
            Whatever it raises is raised here, and nothing has changed.
        force: build even where there is a data set, or a damaged one; that is replaced in one step
            when the new one is complete, and kept if anything fails.
        identity: as for `open_published`.
        is_current: whether what is there is still what is asked for; if not, it is built anew
            as with ``force``.
        prepare: called before ``build``, when nothing has been made or removed for it yet.
        goes_on: whether ``build`` can go on where an interrupted one ended. It may then be given a
            directory with a file `UNFINISHED_NAME`, which an earlier one has made, and where it is
            interrupted while there is such a file, the directory stays for the next one.

    Raises:
        RuntimeError: without ``force``, there is something that is not a complete data set, or
            the data set of another identity; in any case, files that are no part of one.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        if not force:
            found = _existing(target, identity)
            if found is not None and (is_current is None or is_current(found.manifest)):
                return found
        with target_lock(target):
            unfinished = recover(target, keeps=goes_on)
            if not force:
                found = _existing(target, identity)
                if found is not None and (is_current is None or is_current(found.manifest)):
                    recover(target)
                    return found
            check_own(target)
            if prepare is not None:
                prepare()
            return publish(target, build, unfinished=unfinished, goes_on=goes_on)


def publish(
    target: Path,
    build: Callable[[Path], Manifest | bytes],
    *,
    unfinished: Path | None = None,
    goes_on: bool = False,
) -> Published:
    """Builds beside the target, then puts the result in its place. The caller holds the lock.

    Args:
        target: where the result will be.
        build: fills a directory.
        unfinished: a directory to go on with, if there is one.
        goes_on: as for `ensure_published`.

    Returns:
        The result, opened.

    Raises:
        OSError: there is no room; names the file and what it needs.
        RuntimeError: sizes, shapes or counts of the files are not those of the manifest (rule V61).
    """
    with _private_directory(target, unfinished, goes_on) as directory:
        manifest = build(directory)
        (directory / HELD_BACK).rename(directory / META)
        sync_tree(directory)
        # From here on it is a data set, or nothing.
        (directory / UNFINISHED_NAME).unlink(missing_ok=True)
        text = manifest if isinstance(manifest, bytes) else manifest.dump()
        path = directory / MANIFEST_NAME
        with disk_errors(path, len(text)), path.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        made = _opened(directory, target)
        _put(directory, target)
    return replace(made, path=target)


def _opened(directory: Path, target: Path) -> Published:
    """Opens what is about to appear, which checks the sizes, shapes and counts of its manifest."""
    try:
        return open_directory(directory)
    except RuntimeError as error:
        text = f"{target} was not made: what was written is not what its manifest says [V61]"
        raise RuntimeError(text) from error


def hold_back(directory: Path) -> None:
    """Hides the root description of the columns, so that a half-built table does not load."""
    (directory / META).rename(directory / HELD_BACK)


def _resolve(path: str | Path) -> Path:
    """Follows links: a data set behind a link is replaced where it lies, not the link."""
    return Path(os.path.realpath(path))


def _existing(target: Path, identity: Mapping[str, Any] | None) -> Published | None:
    try:
        found = open_directory(target)
    except FileNotFoundError:
        return None
    _check_identity(found, identity)
    if siblings(target, _RETIRED) or siblings(target, _BUILDING):
        # A replacement that was killed leaves as much as the data set takes, and there may never
        # be another one to clear it away. Whoever is alive holds the lock.
        with target_lock_if_free(target) as is_held:
            if is_held:
                recover(target)
    return found


def _check_identity(found: Published, identity: Mapping[str, Any] | None) -> None:
    for name, wanted in (identity or {}).items():
        there = found.manifest.identity.get(name)
        if there != wanted:
            raise RuntimeError(
                f"{found.path} holds a data set whose {name} is {there!r}, but {wanted!r} was "
                f"asked for; choose another place, or replace it with {FORCE}"
            )


@contextmanager
def _private_directory(
    target: Path, unfinished: Path | None, keeps_unfinished: bool
) -> Iterator[Path]:
    directory = private_path(target, _BUILDING) if unfinished is None else unfinished
    if unfinished is None:
        directory.mkdir()
    try:
        yield directory
    except BaseException as error:
        # What was interrupted can go on; what failed would fail again.
        is_interrupted = not isinstance(error, Exception)
        if not (keeps_unfinished and is_interrupted and _is_unfinished(directory)):
            remove_tree(directory)
        raise
    else:
        # After a swap the old version.
        remove_tree(directory)


def _is_unfinished(directory: Path) -> bool:
    return (directory / UNFINISHED_NAME).is_file()


def _put(directory: Path, target: Path) -> None:
    """Moves a complete directory to the target, which may hold a data set."""
    check_own(target)
    parent = target.parent
    if not os.path.lexists(target):
        os.rename(directory, target)
        sync_directory(parent)
        return
    if exchange(directory, target):
        sync_directory(parent)
        return
    # Two steps. Dying in between leaves the old version retired, and `recover` restores it.
    retired = private_path(target, _RETIRED)
    os.rename(target, retired)
    try:
        os.rename(directory, target)
    except BaseException:
        os.rename(retired, target)
        raise
    sync_directory(parent)
    remove_tree(retired)


def recover(target: Path, *, keeps: bool = False) -> Path | None:
    """Removes what dead processes left, restoring a version that was about to be replaced.

    The caller holds the lock, so nobody alive is building for this target.

    Args:
        target: where the data set is, or will be.
        keeps: leave one directory whose making can go on, if there is one, and return it.
    """
    retired = siblings(target, _RETIRED)
    if retired and not os.path.lexists(target):
        os.rename(retired.pop(), target)
        sync_directory(target.parent)
    left = siblings(target, _BUILDING)
    kept = next((path for path in left if keeps and _is_unfinished(path)), None)
    for path in (*retired, *left):
        if path != kept:
            remove_tree(path)
    return kept
