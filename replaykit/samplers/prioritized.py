"""Draws in proportion to how surprising records were."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.episodes import WINDOWS
from replaykit.keywords import named_after
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.base import as_drawn, require_rows
from replaykit.samplers.eligible import SINGLE, index_for, refuse_nothing
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.with_priorities import WithPriorities
from replaykit.storages import Storage

__all__ = ["PrioritizedSampler"]


@named_after
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
    prompt = True

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws by priority; returns the index and ``priority_weight`` ``[B]`` in ``dtype``.

        Raises:
            RuntimeError: nothing is stored, or every priority is 0 and eps too. NotEnoughData, a
                kind of it: no row has around it what the buffer's transforms need.
        """
        with storage.lock:
            require_rows(storage)
            if self.needs:
                table, sums = self._among_eligible(storage)
            else:
                table, sums = self._following(storage), None
                if table.law.may_be_zero and not table.drawable:
                    raise self._all_zero("stored priority")
            self._ran_out = False  # there is no pass; a flag that was set is over
            flat, weight, generation = self._drawn(storage, batch_size, table, sums)
        info = {"priority_weight": weight}
        if generation is not None:
            info["index_generation"] = generation
        home = storage.device
        if home == flat.device:
            return flat if storage.ndim == 1 else as_drawn(flat, storage), info
        return as_drawn(flat, storage), {key: value.to(home) for key, value in info.items()}

    def _among_eligible(self, storage: Storage) -> tuple[PriorityTable, SumSegmentTree]:
        """The table, and a tree of the rows that have around them what the transforms need."""
        index, law = index_for(storage), SINGLE.needing(self.needs)
        table, sums = self._eligible(storage, index, law)
        # On a device it takes a wait to know a sum; what is stored is known here.
        if table.device.type == "cpu" and sums.total > 0:
            return table, sums
        if not index.totals(law, WINDOWS).any():
            refuse_nothing(index, self.needs)
        if table.law.may_be_zero and not sums.total > 0:
            raise self._all_zero("priority of a row that the transforms allow to be drawn")
        return table, sums

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        with storage.lock:
            if not len(storage):
                return False
            if not self.needs:
                return self._following(storage).drawable
            try:
                self._among_eligible(storage)
            except RuntimeError:
                return False
            return True

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, "
            f"reduction={self.reduction!r})"
        )
