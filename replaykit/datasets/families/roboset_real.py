"""RoboSet's real-robot recordings: frames of a robot's state, cameras, and the command given there.

A trial has T frames, and no command in the last one. Nothing says how it went: there is neither
reward nor flag, so that T - 1 rows end truncated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from replaykit.datasets.engine.fields import STEPS, Alignment, Field
from replaykit.datasets.engine.finding import Finder, Groups
from replaykit.datasets.engine.h5 import open_h5
from replaykit.datasets.engine.layout import Layout

__all__ = ["ROBOSET_REAL", "RobosetRealLayout", "is_real_robot"]

_TRIALS: Final = Groups("Trial", having=("data",), noun="trial")
_COMMAND: Final = ("data/ctrl_arm", "data/ctrl_ee")


@dataclass(frozen=True, kw_only=True)
class RobosetRealLayout(Layout):
    """Trials of the teleoperation, kinesthetic and autonomous sets.

    The action is the command of the arm with that of the gripper behind. Joints, gripper and
    cameras are below ``observation``; what is derived from them, and ``solved``, below ``info``.
    In published files trials are copies of one another: the first is kept, and the report lists
    the others (rule V36); ``Policies(copies="keep")`` keeps all. Some have holes of NaN: leave
    these out with ``Policies(on_invalid="skip")``.
    """

    name: str = "roboset-real"
    version: int = 1
    episodes: Finder = _TRIALS
    alignment: Alignment = STEPS
    clock: str = "data/ctrl_arm"
    copies: Literal["keep", "drop"] = "drop"
    fields: tuple[Field, ...] = (
        Field(_COMMAND, "action", before=("action",), column=True),
        Field("data/time", "time", before=("time",), required=False),
        Field("data/user", "info", before=("info", "user"), required=False),
        Field("data/", "observation", ("observation",), ("next", "observation"), column=True),
        Field("derived/", "info", ("info",), ("next", "info"), required=False),
        Field("config/solved", "info", before=("info", "solved"), required=False),
    )


ROBOSET_REAL: Final = RobosetRealLayout()


def is_real_robot(path: Path) -> bool:
    """Whether the first trial of a file is one of a real robot; no file that can be read is none.

    Cost: opens the file, and looks at the names of one group.
    """
    try:
        with open_h5(path) as file:
            names = next((member.children for member in file.members() if member.is_group), ())
    except (OSError, ValueError):
        return False
    return "data" in names and "actions" not in names
