"""``update_if_present`` over shards: as of one big buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import RoundRobinWriter
from tests.distributed.test_components import Halved

ROWS = 12


def tracked() -> RoundRobinWriter:
    return RoundRobinWriter(track_generations=True)


def rows(first: int, count: int) -> TensorDict:
    x = torch.arange(first, first + count)
    deep = {"y": torch.zeros(count, 2)}
    return TensorDict({"x": x, "v": torch.full((count,), 10), "deep": deep}, [count])


def both(sharded: Any, single: Any, shards: int) -> tuple[Any, Any]:
    """Shards and one buffer of which each full round is the same rows under the same indices."""
    pair = (
        sharded(shards, ROWS // shards, writer=tracked),
        single(None, capacity=ROWS, writer=tracked()),
    )
    for buffer in pair:
        buffer.extend(rows(0, ROWS + 5))
    return pair


@pytest.mark.parametrize("shards", [1, 3])
def test_patches_match_a_single_buffer(sharded: Any, single: Any, shards: int) -> None:
    """Rows live, stale and never stored, the same several times, versions or none."""
    rb, one = both(sharded, single, shards)
    random = torch.Generator().manual_seed(shards)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    seen = set()
    for step in range(60):
        count = int(draw(0, 15))
        patch = {("deep", "y"): torch.rand(count, 2, generator=random)}
        if step % 2:
            patch["x"] = draw(100, 1000, count)
        given: dict[str, Any] = {"index": draw(-1, ROWS + 2, count)}
        given["generation"] = draw(-1, 3, count)
        if step % 3:
            version = draw(8, 14, count) if step % 3 == 1 else int(draw(8, 14))
            given.update(version_key="v", version=version, require_newer=step % 4 == 0)
        found, expected = (b.update_if_present(patch=patch, **given) for b in (rb, one))
        assert torch.equal(found.updated, expected.updated)
        assert (found.version_rejected is None) is (expected.version_rejected is None)
        seen.add("updated" if found.updated_count else "none")
        if found.version_rejected is not None:
            assert torch.equal(found.version_rejected, expected.version_rejected)
            seen.add("rejected" if found.version_rejected_count else "accepted")
        assert (rb[:] == one[:]).all()
        if step % 10 == 9:
            for buffer in (rb, one):
                buffer.extend(rows(step, 3))
    assert seen == {"updated", "none", "rejected", "accepted"}


def test_refused_patch_changes_nothing(sharded: Any) -> None:
    rb = sharded(2, writer=tracked, shard_key="x")
    where = {"index": torch.tensor([0, 1]), "generation": torch.tensor([0, 0])}
    with pytest.raises(RuntimeError, match="nothing is stored"):
        rb.update_if_present(patch={"v": torch.tensor([1, 1])}, **where)
    rb.extend(rows(0, 6))
    before = rb[:].clone()
    for error, match, change in [
        (KeyError, "no column 'z'", {"patch": {"z": torch.zeros(2)}}),
        (ValueError, "expected int64", {"patch": {"v": torch.zeros(2)}}),
        (ValueError, "expected int64", {"patch": {"v": torch.tensor([1])}}),
        (ValueError, "shard_key 'x'", {"patch": {"x": torch.tensor([1, 1])}}),
        (ValueError, "shard_key 'x'", {"version_key": "x", "version": 100}),
        (ValueError, "together", {"version_key": "v"}),
        (ValueError, "2 generations, got", {"generation": torch.tensor([0])}),
        (TypeError, "mapping", {"patch": 3}),
    ]:
        asked = {"patch": {("deep", "y"): torch.ones(2, 2)}, **where, **change}
        with pytest.raises(error, match=match):
            rb.update_if_present(**asked)
    assert (rb[:] == before).all()
    with pytest.raises(RuntimeError, match="track_generations=True"):
        sharded(2).update_if_present(patch={}, **where)


def test_rows_of_a_shard_that_was_restarted_are_stale(sharded: Any, tmp_path: Any) -> None:
    """It has them again, from its checkpoint; who has seen them before cannot know that."""
    rb = sharded(2, writer=tracked, checkpoint_dir=tmp_path, checkpoint_interval=0, on_loss=print)
    rb.extend(rows(0, 6))
    _, info = rb.sample(50, return_info=True)
    rb._members.shards[0].kill()
    asked = {"index": info["index"], "patch": {"v": torch.full((50,), 11)}}
    for _ in range(2):  # noticed by the patch itself, and after the restart
        found = rb.update_if_present(generation=info["index_generation"], **asked)
        assert torch.equal(found.updated, info["index"] % 2 == 1)
        rb._members.wait_for([0], float("inf"))
    _, info = rb.sample(50, return_info=True)
    asked["index"] = info["index"]
    assert rb.update_if_present(generation=info["index_generation"], **asked).updated.all()
    assert sorted(rb[:]["x"].tolist()) == list(range(6))


def test_stored_rows_may_look_other_than_those_that_were_given(sharded: Any) -> None:
    """As transforms have made them."""
    rb, other = (sharded(2, writer=tracked, transform_factory=t) for t in (Halved, None))
    for buffer in (rb, other):
        buffer.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    given = {"index": torch.arange(4), "generation": torch.zeros(4).long()}
    patch = {"half": torch.full((4,), 7.0)}
    assert rb.update_if_present(patch=patch, **given).updated.all()
    assert rb[:]["half"].tolist() == [7.0] * 4
    with pytest.raises(KeyError, match="no column 'half'"):
        other.update_if_present(patch=patch, **given)
