"""Check the members and parts of an ensemble, and hold its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch

from replaykit.buffer import ReplayBuffer
from replaykit.buffer.buffer_dataset import BufferHandle
from replaykit.buffer.components import DataT, as_chain
from replaykit.buffer.draw import queue_of
from replaykit.buffer.prefetch import Prefetcher
from replaykit.ensembles.ensemble_sampler import SamplerEnsemble, naming_member
from replaykit.ensembles.ensemble_storage import StorageEnsemble, WriterEnsemble, refuse_writing
from replaykit.ensembles.remote_members import Member, as_given, as_member
from replaykit.keywords import checked_keywords
from replaykit.transfer import device_named
from replaykit.transforms import Compose

__all__ = ["EnsembleCore"]


class EnsembleCore(ReplayBuffer[DataT, StorageEnsemble, SamplerEnsemble, WriterEnsemble]):
    """The members of an ensemble. The ensemble does not copy their components.

    The lock of the StorageEnsemble guards the ensemble's own state: the choice of members, the
    generator and kept draws. The lock of each member guards that member. A thread takes the
    ensemble's lock before a member's lock. It holds several members' locks only to save or load,
    and takes them in a fixed order.
    """

    _storage: StorageEnsemble
    _sampler: SamplerEnsemble
    _writer: WriterEnsemble

    @checked_keywords
    def __init__(
        self,
        *rbs: ReplayBuffer[DataT] | BufferHandle,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any] | None] | None = None,
        p: Any = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        counts: str | None = None,
        unready: str = "raise",
        keys: Sequence[Any] | None = None,
        device: torch.device | str | int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        priority_key: Any = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform_factory: Callable[[], Any] | None = None,
        delayed_init: bool | None = None,
        contiguous: bool = False,
        compilable: bool = False,
    ) -> None:
        parts = {"storages": storages, "samplers": samplers, "writers": writers}
        given = [name for name, part in parts.items() if part is not None]
        if rbs and given:
            raise RuntimeError(
                f"expected either buffers or storages, samplers and writers, got {given} too"
            )
        if not rbs and len(given) < len(parts):
            raise TypeError(
                "expected buffers, or storages=, samplers= and writers=, got "
                f"{given or 'none of them'}"
            )
        if samplers is not None and (p, sample_from_all, num_buffer_sampled, counts, unready) != (
            None,
            False,
            None,
            None,
            "raise",
        ):
            raise TypeError(
                "expected p=, sample_from_all=, num_buffer_sampled=, counts= and unready= of the "
                "SamplerEnsemble if one is given"
            )
        members = _checked_members(rbs or _made_of(parts, collate_fns, priority_key))
        for number, member in enumerate(members):
            if member._rate_limiter is not None:
                raise ValueError(
                    f"expected member {number} without a rate limiter, which does not see draws of "
                    f"an ensemble, got {member._rate_limiter!r}"
                )
            if prefetch and _uses_up(member):
                raise ValueError(
                    f"expected member {number} without a ConsumingSampler if prefetch={prefetch}: "
                    "batches that are not delivered would use its rows up"
                )
        self._members = members
        self._collate_fns = _checked_collates(collate_fns, members)
        self._keys = None if keys is None else _checked_keys(keys)
        self._device = None if device is None else device_named(device)
        self._priority_name = priority_key
        if shared:
            _check_shared(members)
        if rbs:
            storages = StorageEnsemble(*(member.storage for member in members))
            samplers = SamplerEnsemble(
                *(member.sampler for member in members),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
                counts=counts,
                unready=unready,
            )
            writers = WriterEnsemble(*(member.writer for member in members))
        for part in (storages, samplers, writers):
            assert part is not None
            part.attach_members(members)
        super().__init__(
            storage=storages,
            sampler=samplers,
            writer=writers,
            transform=transform,
            transform_factory=transform_factory,
            batch_size=batch_size,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            generator=generator,
            delayed_init=delayed_init,
            contiguous=contiguous,
            shared=shared,
            compilable=compilable,
        )

    def _initialize(self) -> None:
        storages, samplers, writers, transform, factory = self._makers
        chain = as_chain(transform if factory is None else factory())
        self._storage = cast(StorageEnsemble, storages)
        self._sampler = cast(SamplerEnsemble, samplers)
        self._writer = cast(WriterEnsemble, writers)
        self._set_transforms(chain)
        if self._prefetch_depth:
            self._prefetcher = Prefetcher(self._prefetch_depth, cast(Any, self))
        self._makers = (None, None, None, None, None)
        self._initialized = True

    def _set_transforms(self, chain: Compose) -> None:
        if chain.spans_rows:
            raise ValueError(
                "expected transforms of batches, got one that reads the rows around those of a "
                "batch, holds rows back or follows writes; give it to the members"
            )
        super()._set_transforms(chain)

    # -- description ----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Any, ...]:
        """The buffers that the ensemble draws from; handles for remote ones."""
        return tuple(map(as_given, self._members))

    @property
    def storage(self) -> StorageEnsemble:
        """The storages of the members."""
        self._ready()
        return self._storage

    @property
    def sampler(self) -> SamplerEnsemble:
        """The samplers of the members, with the weights that choose among them."""
        self._ready()
        return self._sampler

    @property
    def writer(self) -> WriterEnsemble:
        """The writers of the members."""
        self._ready()
        return self._writer

    @property
    def write_count(self) -> int:
        """Number of rows written through all members, summed over all lanes."""
        return sum(member.write_count for member in self._members)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def stats(self) -> dict[str, Any]:
        """Return size, write count, capacity and utilization of all members together.

        The result also has the number of prefetched batches and the number of members. The method
        changes nothing. Cost: O(members).

        Example:
            >>> import torch
            >>> from replaykit import ReplayBuffer, ReplayBufferEnsemble, LazyTensorStorage
            >>> one, other = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2))
            >>> _ = one.extend(torch.zeros(5))
            >>> stats = ReplayBufferEnsemble(one, other).stats()
            >>> stats["size"], stats["utilization"], stats["num_buffers"]
            (5, 0.25, 2)
        """
        each = [member.stats() for member in self._members]
        size, capacity = (sum(one[name] for one in each) for name in ("size", "capacity"))
        queue = queue_of(self) if self._initialized else None
        return {
            "size": size,
            "write_count": sum(one["write_count"] for one in each),
            "prefetch_queue_size": 0 if queue is None else len(queue),
            "initialized": self._initialized,
            "capacity": capacity,
            "utilization": size / capacity if capacity else 0.0,
            "num_buffers": len(each),
        }

    def __repr__(self) -> str:
        if not self._initialized:
            return f"{type(self).__name__}(not initialized)"
        parts = [f"{member!r}" for member in self._members]
        parts += [
            f"p={self._sampler.p}",
            f"batch_size={self._batch_size}",
            f"transform={self._chain!r}",
        ]
        inside = ",\n".join("    " + part.replace("\n", "\n    ") for part in parts)
        return f"{type(self).__name__}(\n{inside})"

    # -- refused: for members only --------------------------------------------------------------

    @property  # type: ignore[misc]
    def dim_extend(self) -> int:
        """Always raises NotImplementedError."""
        refuse_writing("dim_extend")

    @property
    def episodes(self) -> NoReturn:
        """Always raises NotImplementedError; use the episodes of a member."""
        refuse_writing("episodes")

    def _only_of_members(name: str) -> Any:  # type: ignore[misc]
        def refused(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
            refuse_writing(name)

        refused.__qualname__ = f"EnsembleCore.{name}"
        refused.__name__, refused.__doc__ = name, "Always raises NotImplementedError."
        return refused

    add = _only_of_members("add")
    extend = _only_of_members("extend")
    flush = _only_of_members("flush")
    empty = _only_of_members("empty")
    cut = _only_of_members("cut")
    mark_update = _only_of_members("mark_update")
    update_if_present = _only_of_members("update_if_present")
    set_ = _only_of_members("set_")
    set_at_ = _only_of_members("set_at_")
    update_ = _only_of_members("update_")
    read_all_in_order = _only_of_members("read_all_in_order")
    write_all = _only_of_members("write_all")
    __setitem__ = _only_of_members("__setitem__")
    set_storage = _only_of_members("set_storage")
    set_sampler = _only_of_members("set_sampler")
    set_writer = _only_of_members("set_writer")
    share = _only_of_members("share")
    register_save_hook = _only_of_members("register_save_hook")
    register_load_hook = _only_of_members("register_load_hook")


def _uses_up(buffer: Any) -> bool:
    if isinstance(buffer, EnsembleCore):
        return any(_uses_up(member) for member in buffer._members)
    return bool(buffer.sampler.consumes)


def _checked_members(given: Sequence[Any]) -> tuple[Any, ...]:
    """Return the members, with handles in the form of members.

    Raises:
        TypeError, ValueError: a buffer cannot be a member; the error names it.
    """
    for number, member in enumerate(given):
        if not isinstance(member, (ReplayBuffer, BufferHandle)):
            raise TypeError(
                f"expected member {number} as a ReplayBuffer, got {type(member).__name__}; for a "
                "remote buffer give a RayReplayBuffer, a ShardedReplayBuffer, or a client() of one"
            )
    found = []
    for number, member in enumerate(given):
        try:
            found.append(as_member(member))
        except Exception as error:
            raise naming_member(error, number) from error
    return tuple(found)


def _made_of(
    parts: dict[str, Any], collate_fns: Sequence[Any] | None, priority_key: Any
) -> tuple[ReplayBuffer, ...]:
    """Return buffers made from the members of three ensembles.

    Raises:
        TypeError: an ensemble is of another kind.
        ValueError: the ensembles have different numbers of members.
    """
    kinds = {"storages": StorageEnsemble, "samplers": SamplerEnsemble, "writers": WriterEnsemble}
    for name, kind in kinds.items():
        if not isinstance(parts[name], kind):
            raise TypeError(
                f"expected {name} as a {kind.__name__}, got {type(parts[name]).__name__}"
            )
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"expected as many storages as samplers and writers, got {counts}")
    storages = parts["storages"]
    key = {} if priority_key is None else {"priority_key": priority_key}
    return tuple(
        ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=chain, **key)
        for storage, sampler, writer, chain in zip(
            storages.storages,
            parts["samplers"].samplers,
            parts["writers"].writers,
            storages.transforms,
            strict=True,
        )
    )


def _checked_collates(given: Sequence[Any] | None, members: Sequence[Any]) -> list[Any]:
    count = len(members)
    if given is None:
        return [None] * count
    found = list(given)
    if len(found) != count or not all(one is None or callable(one) for one in found):
        raise TypeError(f"expected collate_fns as {count} functions, one a member, got {given!r}")
    for number, (one, member) in enumerate(zip(found, members, strict=True)):
        if one is not None and isinstance(member, Member):
            raise ValueError(
                f"expected None in collate_fns for member {number}, whose rows are collated in "
                "another process: give its buffer the collate_fn"
            )
    return found


def _checked_keys(keys: Sequence[Any]) -> list[Any]:
    if isinstance(keys, str) or not keys:
        raise TypeError(f"expected keys= as a list of keys, got {keys!r}")
    return list(keys)


def _check_shared(members: Sequence[Any]) -> None:
    for number, member in enumerate(members):
        if not member.shared and member.writer.kind != "immutable":
            raise ValueError(
                f"expected members with shared=True, or data sets, in an ensemble with "
                f"shared=True; member {number} is neither"
            )
