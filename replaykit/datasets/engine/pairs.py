"""States and their successors in two groups of an episode: what one has the other should have."""

from __future__ import annotations

from collections.abc import Sequence

from replaykit.datasets.engine.fields import Field
from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.policies import Policies

__all__ = ["require_pairs"]


def require_pairs(
    fields: Sequence[Field],
    leaves: Sequence[PlannedLeaf],
    policies: Policies,
    notes: Notes,
    place: Place,
) -> None:
    """Checks that no state of a group lacks its successor, and no successor its state (rule V12).

    It would be a key that rows start from and never arrive at. Where missing keys are dropped or
    padded, the other one stays and is reported.

    Args:
        fields: of the layout.
        leaves: that become columns.
        policies: say which keys are wanted, and what missing ones are.
        notes: takes the finding.
        place: the first episode.

    Raises:
        CorpusError: one is missing.
    """
    groups = [entry for entry in fields if entry.is_group]
    paths = [leaf.path for leaf in leaves]
    for state in groups:
        for successor in groups:
            if state.before is None or successor.describes != "successor":
                continue
            if successor.after != ("next", *state.before):
                continue
            ours, theirs = _names(state, paths), _names(successor, paths)
            for name in sorted(ours ^ theirs):
                has, lacks = (state, successor) if name in ours else (successor, state)
                above = state.before if lacks is state else successor.after
                if above is None or not policies.keeps((*above, *name.split("/"))):
                    continue
                at = place.at(key=f"{lacks.name}{name}")
                text = f"the key is missing, but {has.name}{name} is there"
                if policies.missing not in ("drop", "pad"):
                    raise at.error(text, "V12")
                notes.add("V12", text, at, name=f"{has.name}{name}")


def _names(entry: Field, paths: Sequence[str]) -> set[str]:
    return {path.removeprefix(entry.name) for path in paths if path.startswith(entry.name)}
