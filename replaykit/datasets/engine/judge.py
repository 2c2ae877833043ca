"""What becomes of an episode that breaks a rule."""

from __future__ import annotations

from replaykit.datasets.engine.places import Notes, Place
from replaykit.errors import CorpusError

__all__ = ["Judge"]


class Judge:
    """Decides what becomes of an episode that breaks a rule; see `Policies.on_invalid`.

    Attributes:
        bad: why each episode is to be left out, by position.
    """

    def __init__(self, on_invalid: str, notes: Notes) -> None:
        self.bad: dict[int, str] = {}
        self.notes = notes
        self._on_invalid = on_invalid

    @property
    def skips(self) -> bool:
        """Whether bad episodes are left out."""
        return self._on_invalid == "skip"

    def condemn(self, position: int, error: CorpusError) -> None:
        """Notes that an episode cannot be rows.

        Raises:
            CorpusError: the one given, unless bad episodes are left out.
        """
        if not self.skips:
            raise error
        self.bad.setdefault(position, str(error))

    def fail(self, position: int, place: Place, what: str, rule: str) -> None:
        """Notes that values of an episode break a rule.

        Raises:
            CorpusError: if that stops the conversion.
        """
        if self._on_invalid == "keep":
            self.notes.add(rule, f"{what}, and is kept", place)
        else:
            self.condemn(position, place.error(what, rule))
