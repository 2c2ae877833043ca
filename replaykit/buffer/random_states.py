"""The state of whatever a buffer draws from: its generator, or torch's global one."""

from __future__ import annotations

import torch

from replaykit.buffer.prefetch import Origin

__all__ = ["random_state", "set_random_state", "unchanged_since"]


def random_state(generator: torch.Generator | None) -> torch.Tensor:
    """The state of a generator; None: of torch's global one."""
    return torch.get_rng_state() if generator is None else generator.get_state()


def unchanged_since(generator: torch.Generator | None, origin: Origin) -> bool:
    """Whether nobody has drawn from the generator after the draw."""
    after = origin.random_after
    return after is not None and torch.equal(random_state(generator), after)


def set_random_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Sets the state of a generator; None: of torch's global one."""
    if state is None:
        return
    if generator is None:
        torch.set_rng_state(state)
    else:
        generator.set_state(state)
