"""Data sets of other keys and widths in one mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    Pad,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Windows,
)
from tests.samplers.chi_square import chi_square_p

WRIST = torch.zeros(2, 4, dtype=torch.uint8)


def arm(number: int, width: int, names: Any, wrist: bool) -> TensorDict:
    """Rows of a robot: each number is that of the robot, or the row."""
    state, action = names
    rows = TensorDict({action: torch.full((50, width), number + 1.0)}, [50])
    rows[state] = torch.arange(50)[:, None].expand(50, width + number).float()
    if wrist:
        rows["wrist"] = torch.full((50, 2, 4), number + 1, dtype=torch.uint8)
    return rows.set(("next", "done"), torch.arange(50)[:, None] % 10 == 9)


def test_a_mixture_of_other_schemas_has_common_rows_with_masks() -> None:
    ours = ("observation", "state"), "action"
    widths = {ours[0]: 9, "action": 7, "wrist": WRIST}
    given = [(3, ours, True), (7, ours, False), (6, (("robot", "q"), "actions"), False)]
    members = []
    for number, (width, names, wrist) in enumerate(given):
        windows = Windows({names[1]: range(4)})
        renamed = [*names, f"{names[1]}_is_pad"], [*ours, "action_is_pad"]
        chain = Compose(windows, RenameTransform(*renamed), Pad(widths))
        rb = ReplayBuffer(storage=LazyTensorStorage(50), transform=chain)
        rb.extend(arm(number, width, names, wrist))
        members.append(rb)
    ensemble = ReplayBufferEnsemble(
        *members, p=[0.5, 0.2, 0.3], num_buffer_sampled=64, batch_size=64,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    counts = torch.zeros(3)
    for _ in range(40):
        batch = ensemble.sample().reshape(-1)
        member = batch["index", "buffer_ids"]
        counts += torch.bincount(member, minlength=3)
        width = torch.tensor([one[0] for one in given])[member][:, None]
        state = torch.arange(9) < width + member[:, None]
        action = torch.arange(7) < width
        assert batch["observation", "state_mask"].equal(state)
        assert batch["observation", "state"].equal(
            state * batch["index", "index"].reshape(64, 1).float()
        )
        assert batch["action_mask"].equal(action)
        value = action * (member[:, None] + 1.0)
        assert batch["action"].equal(value[:, None].expand(-1, 4, -1))
        assert batch["action_is_pad"].shape == (64, 4)
        seen = (member == 0).byte()[:, None]
        assert batch["wrist"].equal(seen[..., None].expand(-1, 2, 4))
        assert batch["wrist_mask"].equal(seen.bool().expand(-1, 4))
    assert chi_square_p(counts.tolist(), [2560 * p for p in (0.5, 0.2, 0.3)]) > 1e-3


@pytest.mark.parametrize(
    ("widths", "error", "text"),
    [
        ({"x": 2}, ValueError, r"at most \[2\], got torch.float32 \[3\]"),
        ({"x": torch.zeros(4, dtype=torch.int64)}, ValueError, r"at most torch.int64 \[4\]"),
        ({"x": torch.zeros(2, 4)}, ValueError, r"at most torch.float32 \[2, 4\]"),
        ({"y": 3}, KeyError, "no key 'y'"),
        ({"one": 3}, ValueError, r"got torch.float32 \[\]"),
        ({"x": 0}, ValueError, "width"),
        ({"x": "3"}, TypeError, "an int or a tensor"),
        ({"x": torch.tensor(0)}, ValueError, "a tensor with dimensions"),
        (["x"], TypeError, "a mapping of keys"),
    ],
)
def test_rows_that_do_not_fit_are_refused(widths: Any, error: Any, text: str) -> None:
    data = TensorDict({"x": torch.zeros(2, 3), "one": torch.zeros(2)}, [2])
    with pytest.raises(error, match=text):
        Pad(widths)(data)
