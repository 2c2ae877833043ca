"""Draws in proportion to how surprising records were."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.samplers.base import as_drawn, require_rows
from replaykit.samplers.priority_law import importance_weights
from replaykit.samplers.with_priorities import WithPriorities
from replaykit.storages import Storage

__all__ = ["PrioritizedSampler"]


class PrioritizedSampler(WithPriorities):
    """Draws record i with probability ``v_i / sum v``, where ``v_i = (p_i + eps) ** alpha``.

    ``p_i`` is the raw priority that ``update_priority`` or the written data gave; new records have
    ``default_priority``. Draws are independent, with replacement. Each comes with
    ``priority_weight``, ``(v_i / min v) ** -beta``, at most 1, by which a learner multiplies its
    loss to undo the preference (Schaul et al. 2016, "Prioritized Experience Replay", section 3.4:
    their ``(N P(i)) ** -beta`` over its maximum is the same number).

    Args:
        max_capacity: None: whatever the storage has. Else at least its ``max_size``.
        alpha: how much priorities count; 0: not at all. Required.
        beta: how much of the preference the weights undo; 1: all of it. Required.
        eps: added to every priority, so that 0 can still be drawn.
        dtype: of priorities and of ``priority_weight``, ``torch.float32`` or ``torch.float64``;
            sums are float64 either way.
        reduction: how several numbers under a priority key become one: "max", "min", "mean",
            "median", "sum".
        max_priority_within_buffer: ``default_priority`` is the largest priority of the records
            stored now (1 where none is), not the largest ever set (at least 1).
        device: where priorities lie; None: with the storage.
        weight_norm: "global": weights are relative to the least likely stored record that can be
            drawn; "batch": to the least likely one of the batch, which spares a tree.
        stratified: one draw from each of B equal parts of the sum. Each record comes up as often
            in the mean and with less variance; a batch is in rising order of the index.
        replacement: ``True``; no other form exists.

    Attributes:
        dropped_updates: how many entries of ``update_priority`` were left out because their record
            had been overwritten since it was sampled.

    Raises:
        TypeError: alpha or beta missing, or not a number; ``replacement=False``.
        ValueError: alpha, beta or eps negative, NaN or infinite; an unknown ``reduction`` or
            ``weight_norm``; when a buffer takes the sampler: ``max_capacity`` below the storage's.
        NotImplementedError: another dtype.

    Cost: O(B log N) for a draw and an update of B, no Python step per record. With "global" and
    float32 about 15 bytes a record, 10 with "batch". Sampling on cuda waits for the device only if
    eps is 0; an update does once if the index or the priorities lie there.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100),
        ...                   sampler=PrioritizedSampler(alpha=0.7, beta=0.9))
        >>> index = rb.extend(torch.arange(4))
        >>> rb.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> _, info = rb.sample(1000, return_info=True)
        >>> sorted({f"{weight:.3f}" for weight in info["priority_weight"].tolist()})
        ['0.418', '0.501', '0.646', '1.000']
    """

    kind = "prioritized"

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws by priority; returns the index and ``priority_weight`` ``[B]`` in ``dtype``.

        Raises:
            RuntimeError: nothing is stored, or every priority is 0 and eps too.
        """
        with storage.lock:
            require_rows(storage)
            table = self._following(storage)
            if table.law.may_be_zero and not table.drawable:
                raise RuntimeError(
                    f"every stored priority is zero with alpha={self.alpha} and eps={self.eps}, "
                    "so that nothing can be drawn; give the sampler a larger eps, or some records "
                    "a priority above zero"
                )
            self._ran_out = False  # there is no pass; a flag that was set is over
            ledger = storage.ledger if storage.ndim == 1 else None
            drawn = table.draw_weighted(
                batch_size, self.generator, self.stratified, self._beta, ledger
            )
            if drawn is None:
                flat, value = table.draw(batch_size, self.generator, self.stratified)
                smallest = table.smallest() if self.weight_norm == "global" else value.amin()
                weight = importance_weights(value, smallest, self._beta, self.dtype)
                generation = None
            else:
                flat, weight, generation = drawn
        info = {"priority_weight": weight}
        if generation is not None:
            info["index_generation"] = generation
        home = storage.device
        if home == flat.device:
            return flat if ledger is not None else as_drawn(flat, storage), info
        return as_drawn(flat, storage), {key: value.to(home) for key, value in info.items()}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        with storage.lock:
            return len(storage) > 0 and self._following(storage).drawable

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )
