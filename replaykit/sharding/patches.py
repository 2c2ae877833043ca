"""Values for stored rows, if they are still those that were seen."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.buffer.conditional import (
    ConditionalUpdateResult,
    check_tracked,
    checked_handles,
    checked_patch,
)
from replaykit.schema import Schema
from replaykit.sharding.routed import Routed
from replaykit.ted import format_key, unravel

__all__ = ["Patched"]


class Patched(Routed):
    """``update_if_present``."""

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Writes values into rows whose place has not been written again since they were seen.

        Args:
            index: of rows, int64 ``[K]``, as a sample carries them.
            generation: their ``index_generation``, int64 ``[K]``; -1 is never live. Nor is a row
                that was seen before its shard was restarted.
            patch, version_key, version, require_newer: as for ``ReplayBuffer.update_if_present``.

        Returns:
            What became of each row, in the order of ``index``.

        Raises:
            As ``ReplayBuffer.update_if_present``; nothing has changed then. ValueError: the
            ``shard_key`` in the patch, since rows do not move. TimeoutError: a shard has not
            answered; its part may have been written.

        Rows of one shard are patched at once, those of different shards one after the other. Cost:
            one message to each shard that is meant; one more with the first patch.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, RoundRobinWriter, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(2), backend="local",
            ...     writer=lambda: RoundRobinWriter(track_generations=True),
            ... ) as rb:
            ...     _ = rb.extend(TensorDict({"x": torch.zeros(4)}, [4]))
            ...     _ = rb.add(TensorDict({"x": torch.ones(())}, []))  # displaces the row at 0
            ...     result = rb.update_if_present(
            ...         index=torch.tensor([0, 1]), generation=torch.tensor([0, 0]),
            ...         patch={"x": torch.tensor([5.0, 5.0])})
            ...     result.updated.tolist(), rb[:]["x"].tolist()
            ([False, True], [1.0, 5.0, 0.0, 0.0])
        """
        self._before_a_write()
        names, members = self._names, self._members
        check_tracked(self._settings.tracked)
        handles, given = checked_handles(1, index, generation)
        where = handles[:, 0]
        layout = self._stored_layout()
        checked = checked_patch(layout.leaf, len(where), patch, version_key, version, require_newer)
        touched = {*checked.values, checked.version_key}
        key = self._settings.shard_key
        if key is not None and unravel(key) in touched:
            raise ValueError(
                f"expected the shard_key {format_key(unravel(key))} not to be in the patch: rows "
                "stay in the shards that they went to"
            )
        meant = members.incarnations()
        shards, slots = names.shards(where), names.slots(where)
        chosen = {shard: mine for shard in meant if len(mine := (shards == shard).nonzero()[:, 0])}

        def send(shard: int, stamp: Any) -> Any:
            mine = chosen[shard]
            seen = names.unstamped(given[mine], meant[shard])
            values = {
                path: value.detach().cpu().index_select(0, mine)
                for path, value in checked.values.items()
            }
            versions = None if checked.versions is None else checked.versions[mine]
            part = checked._replace(values=values, versions=versions)
            return members.send(shard, "patch", stamp, slots[mine], seen, part, only=meant[shard])

        answers = self._writes(sorted(chosen), send, again=False)
        found = torch.zeros(1 if checked.versions is None else 2, len(where), dtype=torch.bool)
        for shard, answer in answers.items():
            found[:, chosen[shard]] = torch.as_tensor(answer[0], dtype=torch.bool)
        rejected = None if checked.versions is None else found[1]
        return ConditionalUpdateResult(found[0], rejected, batch_size=[len(where)])

    def _stored_layout(self) -> Schema:
        """What stored rows look like, which transforms may have made of those that were given.

        Raises:
            RuntimeError: nothing is stored.
        """
        members = self._members
        members.present()
        if not any(self._rows_of(shard) for shard in members.table.there()):
            members.refresh(None, 0.0)
        if not any(self._rows_of(shard) for shard in members.table.there()):
            raise RuntimeError("nothing is stored")
        if self._stored is None:
            roots = members.ask_all("layout").values()
            self._stored = next((Schema(root) for root in roots if root is not None), None)
        if self._stored is None:
            raise RuntimeError("nothing is stored")
        return self._stored
