"""A layout of one's own, as tests of the engine take it."""

from __future__ import annotations

from replaykit.datasets import FINAL_STATE, Field, Groups, Layout

__all__ = ["arm_layout"]


def arm_layout(name: str, *more: Field) -> Layout:
    """Runs of joints, one more than there are torques, with scores; and whatever else there is."""
    return Layout(
        name=name,
        version=1,
        episodes=Groups("run", having=("torque",)),
        alignment=FINAL_STATE,
        clock="torque",
        fields=(
            Field("joints", "observation", ("observation",), ("next", "observation")),
            Field("torque", "action", before=("action",)),
            Field("score", "reward", after=("next", "reward"), column=True),
            *more,
        ),
    )
