"""The ensemble of buffers: all of its faces in one class."""

from __future__ import annotations

from replaykit.buffer.generic import DataT
from replaykit.ensembles.priorities import EnsemblePriorities
from replaykit.ensembles.reading import EnsembleReading
from replaykit.ensembles.saving import EnsembleSaving
from replaykit.keywords import named_after

__all__ = ["ReplayBufferEnsemble"]


@named_after
class ReplayBufferEnsemble(
    EnsembleReading[DataT], EnsemblePriorities[DataT], EnsembleSaving[DataT]
):
    """Several buffers sampled as one: data sets, online buffers, ensembles, in any mixture.

    A batch of B rows has K parts of ``B // K`` rows, each of one member, and batch size
    ``[K, B // K]``; with ``num_buffer_sampled=B`` every row is of a member of its own. Members are
    used as they are: each draws by its sampler, in its storage, through its transforms, and goes on
    being written to and sampled by itself, as ``ensemble[i]``.

    Args:
        rbs: the buffers; of those in other processes a RayReplayBuffer, a ShardedReplayBuffer, or a
            ``client()`` of one. Or, instead of them, all of the next three.
        storages, samplers, writers: the parts of buffers that are made of them.
        transform: of the batch, after those of the members; not one that reads the rows around.
        batch_size: default number of rows of a batch.
        collate_fn: makes a batch of the samples of the parts, a list of K; by default tensors are
            stacked, and what is in the samples has to be the same.
        collate_fns: one function a member, or None, in the place of its own ``collate_fn``.
        p: relative weights of the members; ``"size"``: by the rows that each holds at the draw;
            None: equal ones. ``ensemble.sampler.p`` may be set at any time, and by a scheduler:
            ``LinearScheduler(ensemble, "p", [0.5, 0.5], num_steps)``.
        sample_from_all: every member has one part, in their order.
        num_buffer_sampled: K; by default the number of members.
        counts: "multinomial": the member of each part is drawn independently, with replacement;
            "exact": each member has ``K * p`` parts, rounded at random where that is no whole
            number.
        unready: what becomes of a member that can be chosen and cannot give its rows. "raise": its
            error, whoever would be chosen. "skip": it is left out as if its weight were 0.
        keys: what to take of the samples of members that have more in them; None: everything.
        device: where samples of members are moved to; None: they have to be on one.
        generator: chooses members, and has them draw; None: members are chosen by torch's global
            generator, and draw by their own. Those elsewhere draw by seeds from it.
        shared: processes that get the ensemble write and sample the same rows; members have to be
            shared, or data sets.
        priority_key: where learners put priorities, for all members; None: where each looks.
        pin_memory, prefetch, transform_factory, delayed_init, contiguous, compilable: as for
            ReplayBuffer; members' own batches made ahead are not used.

    Raises:
        RuntimeError: buffers and parts of them; weights with ``sample_from_all``.
        TypeError: neither, or arguments of another kind. ValueError: values that cannot be; a
            buffer with a rate limiter, or one elsewhere whose sampler has passes.

    Samples carry ``("index", "index")``, ``("index", "buffer_ids")`` and, where a member is an
    ensemble, ``("index", "inner_ids")``: the member's member, and so on. Beside it is what
    samplers tell, the same in every batch: what one member tells and another does not is 1 in
    ``priority_weight``, True in masks; a row by itself is its own anchor, and a sequence of one.
    Windows are numbered anew in each part.

    A member that draws without replacement begins another pass where one ends. Iteration ends with
    the batch in which the last of the members that can be chosen has ended one; if any draws with
    replacement, never.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> demonstrations, online = (
        ...     ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        >>> _ = demonstrations.extend(TensorDict({"x": torch.zeros(100)}, [100]))
        >>> mixture = ReplayBufferEnsemble(
        ...     demonstrations, online, p=[1, 3], num_buffer_sampled=8, counts="exact",
        ...     unready="skip", batch_size=32)
        >>> mixture.sample()["x"].mean()
        tensor(0.)
        >>> _ = online.extend(TensorDict({"x": torch.ones(4)}, [4]))
        >>> mixture.sample()["x"].mean()
        tensor(0.7500)
    """
