"""Buffers out of TorchRL's checkpoints."""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

import torch

from replaykit.buffer.buffer_state import BufferState, apply_state, generator_state, saved_sampler
from replaykit.buffer.replay_buffer import ReplayBuffer
from replaykit.checkpoint.torchrl_files import TorchRLCheckpoint, TorchRLPriorities, open_torchrl
from replaykit.samplers import PrioritizedSampler, Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.schema import Schema, take_apart
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from replaykit.storages.content import Content, Group

__all__ = ["read_torchrl"]


def read_torchrl(
    path: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    sampler: Sampler | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ReplayBuffer:
    """Makes a buffer of what ``ReplayBuffer.dumps(path)`` of TorchRL saved.

    Reads checkpoints of its memory-mapped and tensor storages with a RandomSampler, a
    PrioritizedSampler or samplers of slices, and a round-robin writer, as TorchRL has written them
    since 0.3. JSON and raw values only: no pickle is opened and no code runs, whatever the files
    say. The directory is not changed, and not used afterwards.

    What is read: every stored row in its slot, capacity, cursor, write count, batch size, the
    state of a generator on the CPU, and of a PrioritizedSampler ``alpha``, ``beta``, ``eps`` and
    the priorities.

    What is rebuilt: the episode index, from the columns. Raw priorities, from the powers that
    TorchRL saves: probabilities are the same to the precision of these numbers; with ``alpha=0``,
    where all powers are 1, all priorities are the largest. A column ``index``, which TorchRL's
    TensorDictReplayBuffer stores, is left out: every sample brings its own.

    What is not read: generations, batches drawn ahead (``prefetch.pkl``), the state of transforms
    (``transform.t``; a UserWarning), and which rows a pass of SamplerWithoutReplacement and others
    has left.

    Args:
        path: the directory.
        storage: where the rows go, of any kind and capacity; smaller ones keep the newest rows.
            What it holds is replaced. None: a LazyTensorStorage of the same capacity.
        sampler: None: PrioritizedSampler with the saved exponents, or RandomSampler. One with
            priorities takes over what was saved; others begin anew.
        scratch_dir: folder for a LazyMemmapStorage of the same capacity, in the place of
            ``storage``.
        options: further arguments of ReplayBuffer; ``batch_size`` and ``generator`` go before what
            was saved.

    Raises:
        FileNotFoundError: no checkpoint of TorchRL's. CheckpointError: a file is missing, has
            another size than the others say, is a link, or contradicts the others; names it.
        ValueError: what is not read, by name: entries that are no tensors, nested tensors,
            tensorclasses, lists, other writers, other samplers without ``sampler``.
        TypeError: both ``storage`` and ``scratch_dir``.

    TorchRL's directories have no checksums and are overwritten in place: of a save that was killed
    this finds only files that have another size than they should.

    Cost: one pass over the stored rows.

    Example:
        >>> from replaykit import read_torchrl
        >>> rb = read_torchrl("tests/checkpoint/fixtures/torchrl_prioritized")
        >>> rb.storage.max_size, len(rb), rb.write_count, rb.sampler.alpha
        (10, 10, 13, 0.7)
        >>> rb[3]["next", "reward"].item()
        3.0
    """
    if storage is not None and scratch_dir is not None:
        raise TypeError("expected storage or scratch_dir, got both")
    ndim = None if storage is None else storage.ndim
    saved = open_torchrl(path, ndim)
    if saved.other_sampler is not None and sampler is None:
        raise ValueError(
            f"expected the state of a RandomSampler or PrioritizedSampler, got "
            f"{saved.other_sampler}, which is not read; give sampler=, which then begins anew"
        )
    if saved.transforms:
        warnings.warn(
            f"the state of transforms in {os.fspath(path)}/transform.t is a pickle and is not "
            "read; give transform= with the state that they need",
            UserWarning,
            stacklevel=2,
        )
    if storage is None:
        capacity = saved.slots * saved.lanes.numel()
        storage = (
            LazyTensorStorage(capacity, ndim=saved.ndim)
            if scratch_dir is None
            else LazyMemmapStorage(capacity, ndim=saved.ndim, scratch_dir=scratch_dir)
        )
    found = saved.priorities
    if sampler is None and found is not None:
        dtype = torch.float32 if found.single else torch.float64
        sampler = PrioritizedSampler(alpha=found.alpha, beta=found.beta, eps=found.eps, dtype=dtype)
    options.setdefault("batch_size", saved.batch_size)
    if saved.generator is not None and options.get("generator") is None:
        options["generator"] = _generator(saved.generator)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, **options)
    with buffer._locked():
        apply_state(cast(Any, buffer), _state(buffer, saved))
    return buffer


def _generator(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    try:
        generator.set_state(state)
    except RuntimeError as error:
        raise ValueError(f"expected the state of a generator in rng_state, got {error}") from None
    return generator


def _state(buffer: ReplayBuffer, saved: TorchRLCheckpoint) -> BufferState:
    """What a buffer of ours would have saved."""
    rows = take_apart(saved.rows, saved.ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    elements = saved.length * saved.lanes.numel()
    sampler = buffer.sampler
    state = saved_sampler(sampler)
    if sampler.prioritized and "_priorities" in state:
        found = saved.priorities or TorchRLPriorities(
            state["_alpha"], state["_beta"], state["_eps"], 1.0, torch.ones(elements), single=True
        )
        state |= SavedPriorities(
            found.alpha, found.beta, found.eps, found.max_priority, 0, found.raw
        ).to_state()
    return BufferState(
        content=Content(saved.length, saved.lanes, (group,)),
        storage=None,
        writer={
            "_kind": "round_robin",
            "_write_count": saved.written * saved.lanes.numel(),
            "_cursor": saved.cursor,
            "_ledger": {
                "slots": saved.slots,
                "length": saved.length,
                "cursor": saved.cursor,
                "next_position": saved.written,
                "positions": None,
                "generations": None,
            },
            "_episodes": None,
        },
        sampler=state,
        transforms=buffer._chain.state_dict(),
        generator=generator_state(buffer._generator),
        prepared=[],
    )
