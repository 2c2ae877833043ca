"""Logged trajectories in the layout of D4RL: flat rows with ends, half of them by a good policy."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def logged(episodes: int = 60, steps: int = 10) -> TensorDict:
    """Make ``[episodes * steps]`` transitions of points that move along a line."""
    generator = torch.Generator().manual_seed(1)
    position = torch.rand(episodes, 1, generator=generator) * 2 - 1
    good = torch.arange(episodes)[:, None] % 2 == 0
    rows = []
    for step in range(steps):
        noise = torch.rand(episodes, 1, generator=generator) * 2 - 1
        action = torch.where(good, (-position * 3 + 0.2 * noise).clamp(-1, 1), noise)
        after = (position + 0.3 * action).clamp(-1, 1)
        last = torch.full((episodes, 1), step == steps - 1)
        rows.append(
            TensorDict(
                {
                    "observation": position.double(),
                    "action": action,
                    "done": torch.zeros_like(last),
                    "terminated": torch.zeros_like(last),
                    "truncated": torch.zeros_like(last),
                    ("collector", "traj_ids"): torch.arange(episodes),
                    "next": {
                        "observation": after.double(),
                        "reward": -after.abs(),
                        "done": last,
                        "truncated": last.clone(),
                        "terminated": torch.zeros_like(last),
                    },
                },
                [episodes],
            )
        )
        position = after
    return torch.stack(rows, 1).reshape(-1)
