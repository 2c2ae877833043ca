"""Represent members whose rows are in other processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from replaykit.buffer.buffer_dataset import (
    BufferHandle,
    DrawnRows,
    MemberFacts,
    Readiness,
    RemoteRequest,
)
from replaykit.samplers import Sampler, Transition
from replaykit.storages import Storage
from replaykit.writers import Writer

__all__ = ["KnownMember", "Member", "RemoteDraw", "as_given", "as_member", "left"]

_SEEDS = 2**62


class Member:
    """A wrapper of a remote buffer's handle, as a member of an ensemble.

    Its samples are drawn with seeds from the generator of the ensemble. This does not affect the
    buffer's own draws. An undelivered draw has therefore changed nothing in the buffer.

    Attributes:
        handle: the handle that the ensemble received.
        facts: the latest known properties of the buffer's samples.
    """

    consumes = passes = False
    shared = True
    _rate_limiter = None  # the handle refuses rate limiters

    def __init__(self, handle: BufferHandle, facts: MemberFacts | None = None) -> None:
        self.handle = handle
        self.facts = handle._facts_of_member() if facts is None else facts
        self.storage, self.sampler = RemoteStorage(self), RemoteSampler(self)
        self.writer = RemoteWriter(self)
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
        """Number of rows written so far."""
        return int(self.handle.write_count)  # type: ignore[attr-defined]

    def stats(self) -> Any:
        """Return the stats of the buffer."""
        return self.handle.stats()  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Any:
        return self.handle[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.handle)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return repr(self.handle)

    def asked(self, parts: int, rows: int, generator: torch.Generator | None) -> RemoteDraw:
        """Request the rows of some parts of a batch, without waiting."""
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(_SEEDS, (), generator=generator, device=device))
        drawn = RemoteDraw(self, [parts * rows] if self.facts.single else [rows] * parts, seed)
        drawn.ask()
        return drawn

    def _give_back(self, drawn: RemoteDraw) -> None:
        """Do nothing, because draws change nothing in the buffer."""

    def _written(self) -> int:
        return 0  # this process does not follow its writes

    def __reduce__(self) -> tuple[Any, ...]:
        if multiprocessing.context.get_spawning_popen() is not None:
            return _made, (self.handle._carried(), self.facts)
        return Member, (self.handle._handed_on(), self.facts)


def _made(carried: Any, facts: MemberFacts) -> Member:
    return Member(carried.made(), facts)


class RemoteDraw:
    """A draw of a remote member. The request can be repeated with the same seed.

    Attributes:
        rows: number of rows of each draw.
        seed: the seed of the draws.
    """

    ran_out = False

    def __init__(self, member: Member, rows: list[int], seed: int) -> None:
        self.member, self.rows, self.seed = member, rows, seed
        self._asked: RemoteRequest | None = None

    @property
    def draw(self) -> RemoteDraw:
        """The draw itself, which also holds the request."""
        return self

    @property
    def size(self) -> int:
        """Number of rows of all draws together."""
        return sum(self.rows)

    def ask(self) -> None:
        """Send the request, unless it was sent."""
        if self._asked is None:
            member = self.member
            self._asked = member.handle._ask_part(self.rows, self.seed, member.facts)

    def pieces(self, until: float | None) -> list[DrawnRows]:
        """Wait for the rows.

        Raises:
            Any error of the member. A later call sends the request again.
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


def left(until: float | None) -> float | None:
    """Return the seconds until a time on the monotonic clock."""
    return None if until is None else max(0.0, until - time.monotonic())


def as_member(given: Any) -> Any:
    """Return a buffer unchanged, or a handle in the form of a member."""
    return Member(given) if isinstance(given, BufferHandle) else given


def as_given(member: Any) -> Any:
    """Return the buffer or handle that the ensemble received."""
    return member.handle if isinstance(member, Member) else member


# -- parts --------------------------------------------------------------------------------------


def _there(what: str) -> Callable[..., NoReturn]:
    def refused(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise RuntimeError(
            f"{what} of a remote member is only possible through its handle, ensemble[i], or in "
            "the process that holds its rows"
        )

    return refused


class RemoteStorage(Storage):
    """The storage of a remote member in the ensemble."""

    # It has no ledger and no locks, because it holds no rows.
    def __init__(self, member: Member) -> None:
        self._member = member
        self._locks: dict[int, Any] = {}
        self.recovery = None

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of coordinates in an index."""
        return self._member.facts.width

    @property
    def max_size(self) -> int:  # type: ignore[override]
        """Capacity in rows."""
        return int(self._member.stats()["capacity"])

    def get(self, index: Any) -> Any:
        """Read transformed rows through the handle."""
        return self._member[index]

    __getitem__ = get

    def __len__(self) -> int:
        return len(self._member)

    def __repr__(self) -> str:
        return f"RemoteStorage({self._member!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStorage, (self._member,)

    set = __setitem__ = clear = _there("a write")
    contains = _there("a search for rows")
    attach = _there("a buffer over the rows")
    state_dict = load_state_dict = _there("the state")


class RemoteSampler(Sampler):
    """The sampler of a remote member in the ensemble."""

    kind = "elsewhere"

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """Info keys that all samples of the member have."""
        return tuple(self._member.facts.info_keys)

    @property
    def prioritized(self) -> bool:  # type: ignore[override]
        """True if the member accepts priorities."""
        return self._member.facts.prioritized

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of ``priority_weight``."""
        return self._member.facts.weights

    def empty(self) -> None:
        """Do nothing, because the sampler's state is remote."""

    def __repr__(self) -> str:
        return f"RemoteSampler({self._member.facts.sampler})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteSampler, (self._member,)

    sample = can_sample = _there("a draw")
    state_dict = load_state_dict = _there("the state")


class RemoteWriter(Writer):
    """The writer of a remote member in the ensemble."""

    kind = "elsewhere"

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    @property
    def write_count(self) -> int:
        """Number of rows written so far."""
        return self._member.write_count

    tracks_generations = True

    def __repr__(self) -> str:
        return f"RemoteWriter({self._member!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteWriter, (self._member,)

    add = extend = write = write_at = cut = empty = _there("a write")
    register_storage = _there("a write")
    generations_of = _there("a search for rows")
    state_dict = load_state_dict = check_state = _there("the state")


class KnownMember:
    """The answers of remote members for one choice."""

    def __init__(self) -> None:
        self._asked: dict[int, RemoteRequest] = {}
        self._readiness: dict[int, Readiness] = {}

    def ask(self, number: int, member: Member, rows: int) -> None:
        """Request the readiness of a member for ``rows`` rows."""
        self._asked[number] = member.handle._ask_readiness(rows)

    def wait(self, naming: Callable[[Exception, int], Exception], until: float | None) -> None:
        """Wait for all answers; an error names the member."""
        for number, asked in self._asked.items():
            try:
                self._readiness[number] = asked.result(left(until))
            except Exception as error:
                raise naming(error, number) from error

    def trust(self) -> None:
        """Treat all members as ready. The draw of a member that is not ready then raises."""
        self._readiness = {
            number: readiness._replace(ready=True) for number, readiness in self._readiness.items()
        }

    def get(self, number: int) -> Readiness | None:
        """Return the answer of a member; None without a request."""
        return self._readiness.get(number)
