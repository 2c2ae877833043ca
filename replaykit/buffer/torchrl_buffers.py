"""Make buffers from TorchRL's checkpoints."""

from __future__ import annotations

import os
import warnings
from typing import Any, cast

import torch

from replaykit.buffer.replay_buffer import ReplayBuffer
from replaykit.buffer.state import BufferState, apply_state, generator_state, saved_sampler
from replaykit.checkpoint.torchrl_files import TorchRLCheckpoint, TorchRLPriorities, open_torchrl
from replaykit.declared import encode_state
from replaykit.samplers import PrioritizedSampler, Sampler
from replaykit.samplers.priority_rules import SavedPriorities
from replaykit.schema import Schema, split_leaves
from replaykit.storages import LazyMemmapStorage, LazyTensorStorage, Storage
from replaykit.storages.content import Content, Group


def read_torchrl(
    path: str | os.PathLike[str],
    *,
    storage: Storage | None = None,
    sampler: Sampler | None = None,
    scratch_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ReplayBuffer:
    """Make a buffer from a checkpoint of TorchRL's ``ReplayBuffer.dumps(path)``.

    The function reads checkpoints of TorchRL 0.3 and later. The storage must be memory-mapped or a
    tensor storage, with a round-robin writer. The sampler must be a RandomSampler, a
    PrioritizedSampler or a sampler of slices. Only JSON and raw values are read. No pickle is
    opened, and no code from the files runs. The directory is not changed, and not used afterwards.

    The buffer takes from the files every stored row in its slot, capacity, cursor, write count and
    batch size. It also takes the state of a generator on the CPU, and ``alpha``, ``beta``, ``eps``
    and the priorities of a PrioritizedSampler.

    The episode index is computed from the columns. TorchRL saves powers of the priorities, from
    which the raw priorities are computed. The probabilities equal those of TorchRL up to the
    precision of the saved powers. With ``alpha=0`` all powers are 1, so each row gets the largest
    priority. TorchRL's TensorDictReplayBuffer stores a column ``index``. This column is not read,
    because every sample has a separate ``index``.

    Generations, prefetched batches (``prefetch.pkl``) and the rest of a pass (of
    SamplerWithoutReplacement and others) are not read. Nor is the state of transforms
    (``transform.t``), which causes a UserWarning.

    Args:
        path: the directory.
        storage: the storage for the rows, of any kind and capacity. Its rows are replaced. A
            smaller storage keeps the newest rows. None for a LazyTensorStorage of the same
            capacity.
        sampler: the sampler. A sampler with priorities takes the saved priorities; others start
            over. None for a PrioritizedSampler with the saved exponents, or a RandomSampler.
        scratch_dir: folder for a LazyMemmapStorage of the same capacity, instead of ``storage``.
        options: further arguments of ReplayBuffer. ``batch_size`` and ``generator`` override the
            saved values.

    Raises:
        FileNotFoundError: there is no checkpoint of TorchRL.
        CheckpointError: a file is missing, is a link, or contradicts another file in size or
            content. The error names it.
        ValueError: the checkpoint has parts that cannot be read; the error names them. These parts
            are nested tensors, tensorclasses, lists, and all other entries that are not plain
            tensors. Also other writers, and other samplers if ``sampler`` is not given.
        TypeError: both ``storage`` and ``scratch_dir`` are given.

    TorchRL's directories have no checksums and are overwritten in place. After an interrupted save,
    only files of a wrong size are detected.

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
            f"{saved.other_sampler}, which is not read; give sampler=, which then starts over"
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
    """Return the state that a buffer of this package would have saved."""
    rows = split_leaves(saved.rows, saved.ndim)
    group = Group(Schema(rows.root), tuple(rows.leaves.values()))
    elements = saved.length * saved.lanes.numel()
    sampler = buffer.sampler
    state = saved_sampler(sampler)
    if sampler.prioritized and "_priorities" in state:
        found = saved.priorities or TorchRLPriorities(
            state["_alpha"], state["_beta"], state["_eps"], 1.0, torch.ones(elements), single=True
        )
        state |= encode_state(
            SavedPriorities(found.alpha, found.beta, found.eps, found.max_priority, 0, found.raw)
        )
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
        undelivered=[],
    )
