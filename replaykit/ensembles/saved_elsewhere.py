"""Members elsewhere in a checkpoint: each writes and reads a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replaykit.checkpoint import Checkpoint, checkpoint_versions
from replaykit.checkpoint.manifests import MANIFEST
from replaykit.ensembles.core import EnsembleCore
from replaykit.ensembles.elsewhere import Member
from replaykit.ensembles.pairs import naming_member
from replaykit.errors import CheckpointError
from replaykit.filesystem import make_directory, remove_tree

__all__ = [
    "ELSEWHERE",
    "checked_elsewhere",
    "folders_elsewhere",
    "load_elsewhere",
    "saved_elsewhere",
    "states_elsewhere",
    "take_elsewhere",
]

ELSEWHERE = "elsewhere"
"""The part that says where members elsewhere have saved themselves, and the folder of it all."""

_LOCK = ".elsewhere.lock"
"""Who saves holds it: what a save removes is then nobody else's. The kernel lets go of it when its
holder dies."""

_TOKEN = re.compile("[0-9a-f]{32}")


def far_of(ensemble: EnsembleCore, path: str = "") -> Iterator[tuple[str, Member]]:
    """Yields the members elsewhere, also those of members, by names as those here have."""
    for number, member in enumerate(ensemble._members):
        name = f"{path}members/{number}"
        if isinstance(member, EnsembleCore):
            yield from far_of(member, f"{name}/")
        elif isinstance(member, Member):
            yield name, member


# -- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def saved_elsewhere(
    ensemble: EnsembleCore, path: str | os.PathLike[str]
) -> Iterator[dict[str, Any] | None]:
    """Has members elsewhere save themselves, all at a time, into a folder of this save alone.

    Nothing names it before the manifest does that is written inside; what no manifest names is
    removed afterwards. Gives what the manifest has to say; None where there are no such members.
    """
    far = dict(far_of(ensemble))
    if not far:
        yield None
        return
    from filelock import FileLock  # which loads asyncio, for whoever imports the package

    folder = Path(path).expanduser().absolute()
    make_directory(folder)
    with FileLock(folder / _LOCK):
        token = uuid.uuid4().hex
        own = folder / ELSEWHERE / token
        try:
            make_directory(own)
            _all(far, lambda name, member: member.handle._ask_call("dumps", str(own / name)))
            for name in far:
                if not (own / name / MANIFEST).exists():
                    raise CheckpointError(
                        f"{name}: expected its {MANIFEST} in {own / name}, found none: a member "
                        "elsewhere has to see the same file system"
                    )
            yield {"save": token, "members": sorted(far)}
        finally:
            with contextlib.suppress(CheckpointError):  # then nobody knows what is named
                named = _named(folder)
                for other in (folder / ELSEWHERE).iterdir():
                    if other.name not in named:
                        remove_tree(other)


def _all(far: Mapping[str, Member], ask: Callable[[str, Member], Any]) -> dict[str, Any]:
    """Asks all, and waits for all, whatever the others say; then raises the first error."""
    asked, answers = {}, {}
    failed: list[tuple[str, Exception]] = []
    for name, member in far.items():
        try:
            asked[name] = ask(name, member)
        except Exception as error:
            failed.append((name, error))
    for name, one in asked.items():
        try:
            answers[name] = one.result()
        except Exception as error:
            failed.append((name, error))
    if failed:
        name, first = failed[0]
        raise naming_member(first, name) from first
    return answers


def _named(folder: Path) -> set[str]:
    """The folders of members elsewhere that a checkpoint names."""
    found: set[str] = set()
    try:
        versions = checkpoint_versions(folder)
    except FileNotFoundError:
        return found
    for version in versions:
        with Checkpoint(folder, version) as saved:
            if ELSEWHERE in saved:
                found.add(_checked(saved.part(ELSEWHERE), folder)["save"])
    return found


def _checked(part: Any, path: Any) -> dict[str, Any]:
    if (
        not isinstance(part, dict)
        or not isinstance(part.get("members"), list)
        or not isinstance(part.get("save"), str)
        or not _TOKEN.fullmatch(part["save"])
    ):
        raise CheckpointError(f"what {path} says of members elsewhere is damaged: {part!r}")
    return part


def folders_elsewhere(
    ensemble: EnsembleCore, saved: Checkpoint, path: str | os.PathLike[str], *, mmap: bool
) -> dict[str, tuple[Member, Path]]:
    """Where members elsewhere have saved themselves, by name.

    Raises:
        ValueError: those that were saved are others than those of the ensemble; ``mmap`` with
            members elsewhere.
    """
    far = dict(far_of(ensemble))
    if mmap and far:
        raise ValueError(
            f"expected mmap=False with members elsewhere, which are loaded into memory: {[*far]}"
        )
    part = {"save": "", "members": []}
    if ELSEWHERE in saved:
        part = _checked(saved.part(ELSEWHERE), path)
    if part["members"] != sorted(far):
        raise ValueError(
            f"expected the checkpoint of an ensemble with the members {sorted(far)} elsewhere, got "
            f"{part['members']} in {path}"
        )
    own = Path(path).expanduser().absolute() / ELSEWHERE / str(part["save"])
    return {name: (member, own / name) for name, member in far.items()}


def load_elsewhere(far: Mapping[str, tuple[Member, Path]], *, verify: bool) -> None:
    """Has members elsewhere read what they have saved, after all files have been looked at."""
    for name, (_, folder) in far.items():
        manifests = sorted(folder.rglob(MANIFEST))
        if not manifests:
            raise CheckpointError(f"{name}: expected {MANIFEST} in {folder}, found none")
        for manifest in manifests:
            with Checkpoint(manifest.parent) as saved:
                if verify:
                    saved.verify()
    _one_by_one({name: (member, "loads", str(folder)) for name, (member, folder) in far.items()})


def _one_by_one(calls: Mapping[str, tuple[Member, str, Any]]) -> None:
    done: list[str] = []
    for name, (member, method, argument) in calls.items():
        try:
            member.handle._ask_call(method, argument).result()
        except Exception as error:
            also = f"{name} ({', '.join(done)} had theirs already)" if done else name
            raise naming_member(error, also) from error
        done.append(name)


# -- dictionaries ---------------------------------------------------------------------------------


def states_elsewhere(ensemble: EnsembleCore) -> dict[str, Any]:
    """Copies of all that members elsewhere hold, by name."""
    far = dict(far_of(ensemble))
    return _all(far, lambda name, member: member.handle._ask_call("state_dict"))


def checked_elsewhere(ensemble: EnsembleCore, state: Any) -> dict[str, tuple[Member, Any]]:
    """What each member elsewhere is to take over; ValueError where they are others."""
    far = dict(far_of(ensemble))
    found = state.get("_elsewhere", {}) if isinstance(state, Mapping) else {}
    if not isinstance(found, Mapping) or set(found) != set(far):
        raise ValueError(
            f"expected the state of an ensemble with the members {sorted(far)} elsewhere, got "
            f"{sorted(found) if isinstance(found, Mapping) else found!r}"
        )
    return {name: (member, found[name]) for name, member in far.items()}


def take_elsewhere(far: Mapping[str, tuple[Member, Any]]) -> None:
    """Has members elsewhere take over their states."""
    _one_by_one({name: (member, "load_state_dict", state) for name, (member, state) in far.items()})
