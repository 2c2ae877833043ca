"""Members whose rows other processes hold, as the ensemble sees them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from replaykit.buffer.buffer_dataset import (
    DrawnRows,
    Elsewhere,
    MemberFacts,
    RemoteRequest,
    Standing,
)
from replaykit.samplers import Sampler, Transition
from replaykit.storages import Storage
from replaykit.writers import Writer

__all__ = ["KnownMember", "Member", "RemoteDraw", "as_given", "as_member", "left"]

_SEEDS = 2**62


class Member:
    """A handle of a buffer elsewhere in the place of a member.

    Its samples follow from seeds, which come from the generator of the ensemble; the buffer's own
    draws are left alone. So a draw that is not delivered has changed nothing there.

    Attributes:
        handle: what the ensemble was given.
        facts: what its samples are like, as far as is known.
    """

    consumes = passes = False
    shared = True
    _rate_limiter = None  # the handle has refused one

    def __init__(self, handle: Elsewhere, facts: MemberFacts | None = None) -> None:
        self.handle = handle
        self.facts = handle._facts_of_member() if facts is None else facts
        self.storage, self.sampler = StorageElsewhere(self), SamplerElsewhere(self)
        self.writer = WriterElsewhere(self)
        self.transform = None
        self._sample_unit = Transition()

    @property
    def _chain(self) -> Any:
        return SimpleNamespace(ordered=self.facts.ordered)

    @property
    def _priority_key(self) -> tuple[str, ...]:
        return self.facts.priority_key

    @property
    def write_count(self) -> int:
        """Rows written so far."""
        return int(self.handle.write_count)  # type: ignore[attr-defined]

    def stats(self) -> Any:
        """What the buffer says of itself."""
        return self.handle.stats()  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Any:
        return self.handle[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.handle)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return repr(self.handle)

    def asked(self, parts: int, rows: int, generator: torch.Generator | None) -> RemoteDraw:
        """Asks for the rows of some parts of a batch; does not wait."""
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(_SEEDS, (), generator=generator, device=device))
        drawn = RemoteDraw(self, [parts * rows] if self.facts.single else [rows] * parts, seed)
        drawn.ask()
        return drawn

    def _give_back(self, drawn: RemoteDraw) -> None:
        """Nothing was taken."""

    def _written(self) -> int:
        return 0  # nobody here is told of it

    def __reduce__(self) -> tuple[Any, ...]:
        if multiprocessing.context.get_spawning_popen() is not None:
            return _made, (self.handle._carried(), self.facts)
        return Member, (self.handle._handed_on(), self.facts)


def _made(carried: Any, facts: MemberFacts) -> Member:
    return Member(carried.made(), facts)


class RemoteDraw:
    """A draw of a member elsewhere: what was asked for, to be asked again with the same seed.

    Attributes:
        rows: of each draw.
        seed: what they follow from.
    """

    ran_out = False

    def __init__(self, member: Member, rows: list[int], seed: int) -> None:
        self.member, self.rows, self.seed = member, rows, seed
        self._asked: RemoteRequest | None = None

    @classmethod
    def of(cls, member: Member, record: object) -> RemoteDraw:
        """One that was saved; ValueError where it is none."""
        fields = record if isinstance(record, Mapping) else {}
        rows, seed = fields.get("rows"), fields.get("seed")
        if (
            not isinstance(rows, list)
            or any(type(count) is not int or count < 1 for count in rows)
            or type(seed) is not int
        ):
            raise ValueError(f"expected the rows and seed of a prepared draw, got {record!r}")
        return cls(member, rows, seed)

    @property
    def size(self) -> int:
        """Rows of all draws together."""
        return sum(self.rows)

    def ask(self) -> None:
        """Sends the question, unless that was done."""
        if self._asked is None:
            member = self.member
            self._asked = member.handle._ask_part(self.rows, self.seed, member.facts)

    def pieces(self, until: float | None) -> list[DrawnRows]:
        """Waits for the rows.

        Raises:
            Whatever the member raises; it is asked anew afterwards.
        """
        self.ask()
        assert self._asked is not None
        try:
            found, facts = self._asked.result(left(until))
        except BaseException:
            self._asked = None
            raise
        if facts is not None:
            self.member.facts = facts
        return list(found)

    def kept(self) -> RemoteDraw:
        """The draw alone, to be delivered later: its rows are asked for again."""
        return RemoteDraw(self.member, self.rows, self.seed)


def left(until: float | None) -> float | None:
    """Seconds until an instant of the monotonic clock."""
    return None if until is None else max(0.0, until - time.monotonic())


def as_member(given: Any) -> Any:
    """A buffer as it is, a handle in the form of a member."""
    return Member(given) if isinstance(given, Elsewhere) else given


def as_given(member: Any) -> Any:
    """What the ensemble was given."""
    return member.handle if isinstance(member, Member) else member


# -- parts --------------------------------------------------------------------------------------


def _there(what: str) -> Callable[..., NoReturn]:
    def refused(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(
            f"{what} of a member elsewhere is done by its handle, ensemble[i], or where its rows "
            "lie; here it is only described"
        )

    return refused


class StorageElsewhere(Storage):
    """What stands for the storage of a member elsewhere."""

    # No ledger, no locks of its own: nothing lies here.
    def __init__(self, member: Member) -> None:
        self._member = member
        self._locks: dict[int, Any] = {}
        self.recovery = None

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Numbers in an index."""
        return self._member.facts.width

    @property
    def max_size(self) -> int:  # type: ignore[override]
        """Rows that fit."""
        return int(self._member.stats()["capacity"])

    def get(self, index: Any) -> Any:
        """Rows of the handle, transformed."""
        return self._member[index]

    __getitem__ = get

    def __len__(self) -> int:
        return len(self._member)

    def __repr__(self) -> str:
        return f"StorageElsewhere({self._member!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageElsewhere, (self._member,)

    set = __setitem__ = clear = _there("a write")
    contains = _there("a look for rows")
    attach = _there("a buffer over the rows")
    state_dict = load_state_dict = _there("the state")


class SamplerElsewhere(Sampler):
    """What stands for the sampler of a member elsewhere."""

    kind = "elsewhere"

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    @property
    def tells(self) -> tuple[Any, ...]:
        """Keys of what its samples tell of their rows."""
        return tuple(self._member.facts.tells)

    @property
    def prioritized(self) -> bool:  # type: ignore[override]
        """Whether it takes priorities."""
        return self._member.facts.prioritized

    @property
    def dtype(self) -> torch.dtype:
        """Of ``priority_weight``."""
        return self._member.facts.weights

    def empty(self) -> None:
        """Nothing of it is here."""

    def __repr__(self) -> str:
        return f"SamplerElsewhere({self._member.facts.sampler})"

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplerElsewhere, (self._member,)

    sample = can_sample = _there("a draw")
    state_dict = load_state_dict = _there("the state")


class WriterElsewhere(Writer):
    """What stands for the writer of a member elsewhere."""

    kind = "elsewhere"

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    @property
    def write_count(self) -> int:
        """Rows written so far."""
        return self._member.write_count

    tracks_generations = True

    def __repr__(self) -> str:
        return f"WriterElsewhere({self._member!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return WriterElsewhere, (self._member,)

    add = extend = write = write_at = cut = empty = _there("a write")
    register_storage = _there("a write")
    generations_of = _there("a look for rows")
    state_dict = load_state_dict = check_state = _there("the state")


class KnownMember:
    """What members elsewhere have said of themselves for one choice."""

    def __init__(self) -> None:
        self._asked: dict[int, RemoteRequest] = {}
        self._standings: dict[int, Standing] = {}

    def ask(self, number: int, member: Member, rows: int) -> None:
        """Sends the question."""
        self._asked[number] = member.handle._ask_standing(rows)

    def wait(self, naming: Callable[[Exception, int], Exception], until: float | None) -> None:
        """Waits for all answers; an error names the member."""
        for number, asked in self._asked.items():
            try:
                self._standings[number] = asked.result(left(until))
            except Exception as error:
                raise naming(error, number) from error

    def trust(self) -> None:
        """Has all count as ready: their own errors come with the draws."""
        self._standings = {
            number: standing._replace(ready=True) for number, standing in self._standings.items()
        }

    def get(self, number: int) -> Standing | None:
        """The answer of a member; None: it was not asked."""
        return self._standings.get(number)
