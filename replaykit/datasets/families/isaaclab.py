"""The Isaac Lab family: observations before the action, states after it.

The first state is stored in a separate group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import LocalFilesReplay
from replaykit.datasets.engine.episode_finders import Finder
from replaykit.datasets.engine.fields import STEPS, Alignment, Field, Preceded
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Counters, Layout, SourceFacts, SourceWindow
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.families.robomimic import DEMONSTRATIONS, first_entries

_BEFORE: Final = "obs/actions"
_SAID: Final = {"true": True, "1": True, "false": False, "0": False}
"""The meanings of texts for ``success``."""


@dataclass(frozen=True, kw_only=True)
class IsaacLabLayout(Layout):
    """Layout of demonstrations of Isaac Lab and Isaac Lab Mimic.

    T records make T rows if the attribute ``success`` is true, and otherwise T - 1 rows. The
    observation after the last action was not recorded, so the last of T rows is marked. The files
    have no rewards.
    """

    name: str = "isaaclab"
    version: int = 2
    episodes: Finder = DEMONSTRATIONS
    alignment: Alignment = STEPS
    clock: str = "actions"
    attributes: tuple[str, ...] = ("success", "seed")
    count: str | None = "num_samples"
    about: tuple[str, tuple[str, ...]] | None = ("data", ("env_args",))
    counters: Counters = (("total", "records"),)
    fields: tuple[Field, ...] = (
        Field("obs/", "observation", ("observation",), ("next", "observation")),
        Field("actions", "action", before=("action",)),
        Field("states/", "info", ("state",), ("next", "state"), required=False, more=1),
        Field("initial_state/", "info", required=False),
    )

    def resolve(self, file: H5File, location: Location) -> Layout:
        """Refuse files of similar layouts, and put the first state before the others."""
        entries = first_entries(file, "data")
        if entries is None or "actions" not in entries:
            return self
        if "next_obs" in entries or "robot_states" in entries or entries.get("states") is False:
            raise location.error(
                f"this is no file of {self.name}, whose states are a group: is it one of robomimic "
                "or LIBERO?",
                "V04",
            )
        group = DEMONSTRATIONS.select(file.members("data"), location, self.name, is_inside=True)
        # An episode without its first state is reported when it is read, so that only it is
        # skipped.
        states: set[str] = set()
        lacking: dict[str, Location] = {}
        complete: set[str] = set()
        for episode in group.episodes:
            leaves = {leaf.path for leaf in file.leaves(episode.group)}
            mine = sorted(path for path in leaves if path.startswith("states/"))
            for path in mine:
                if _first_of(path) in leaves:
                    complete.add(path)
                else:
                    lacking.setdefault(path, location.at(group=episode.group, key=_first_of(path)))
            states.update(mine)
        for path in lacking.keys() - complete:
            text = f"the state before the first action is missing, but {path} is there"
            raise lacking[path].error(text, "V12")
        pairs = tuple((path, Preceded("states", "initial_state")) for path in sorted(states))
        return replace(self, decoders=pairs)

    def facts(
        self,
        attributes: Mapping[str, Any],
        name: str,
        records: int,
        location: Location,
        notes: RuleFindings,
    ) -> SourceFacts:
        """Return seed and success from the attributes. Success counts as termination."""
        success = _success(attributes["success"], location) if "success" in attributes else -1
        return SourceFacts(SourceFacts.seed_of(attributes.get("seed")), success, success == 1)

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        return tuple(path for path in (_BEFORE, "actions") if path in leaves)

    def examine(self, window: SourceWindow) -> None:
        """Check that observations precede their action.

        The check needs observations that contain the action of the preceding record.
        """
        if _BEFORE not in window.arrays:
            text = (
                f"without {_BEFORE} nothing confirms that observations are those before the "
                "action; recordings of real robots have them otherwise in this layout"
            )
            window.notes.add("V51", text, window.location)
            return
        seen, actions = window.arrays[_BEFORE], window.arrays["actions"]
        if seen.shape != actions.shape or np.array_equal(seen[1:], actions[:-1]):
            return
        what = "is the action of the same record" if np.array_equal(seen, actions) else "is neither"
        raise window.location.at(key=_BEFORE).error(
            f"the observed action {what}, expected that of the record before: the observations of "
            "this file are not those before the action, and this layout does not read it",
            "V51",
        )


ISAACLAB: Final = IsaacLabLayout()


def _first_of(path: str) -> str:
    """Return the path of the first state that precedes the states of a dataset."""
    return path.replace("states/", "initial_state/", 1)


def _success(said: Any, location: Location) -> int:
    """Return 1 or 0. Text is parsed, because ``bool("False")`` is True."""
    known = _SAID.get(said.strip().lower()) if isinstance(said, str) else None
    if isinstance(said, (bool, int, float)) and said in (0, 1):
        known = bool(said)
    if known is None:
        raise location.at(key="success").error(
            f"is {said!r:.40}, expected true or false: a bool, 1 or 0, or one of these as text",
            "V30",
        )
    return int(known)


class IsaacLabExperienceReplay(LocalFilesReplay[SamplerT]):
    """Transitions of demonstrations recorded by Isaac Lab, given with ``source``.

    See `IsaacLabLayout` for the layout, and BaseDatasetExperienceReplay for arguments, errors and
    methods.

    Example:
        >>> from replaykit.datasets import IsaacLabExperienceReplay
        >>> IsaacLabExperienceReplay("my-demos", 32, root="no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: files of isaaclab:my-demos cannot be fetched: ...
    """

    corpus = "isaaclab"
    layout = ISAACLAB
