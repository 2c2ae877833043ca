"""The one place that imports ray, and only when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["DEFAULT_REMOTE_CLASS_CONFIG", "actor_class", "ray_module", "start_ray"]

DEFAULT_REMOTE_CLASS_CONFIG: Final[dict[str, Any]] = {"num_cpus": 1, "num_gpus": 0}
"""What an actor asks of the cluster unless told otherwise."""


def ray_module() -> Any:
    """Returns ray.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            f"remote buffers need ray ({error}); install it with: pip install 'replaykit[ray]'"
        ) from None
    return ray


def start_ray(config: Mapping[str, Any] | None = None) -> Any:
    """Returns ray with a runtime: the one that there is, or one started with these options.

    Raises:
        RuntimeError: ray is not installed.
    """
    ray = ray_module()
    if not ray.is_initialized():
        ray.init(**(config or {}))
    return ray


def actor_class(cls: type, remote_config: Mapping[str, Any] | None = None) -> Any:
    """Returns a Ray actor class made of ``cls``; ``.remote(...)`` starts an actor.

    Args:
        remote_config: options of ``ray.remote``; None: DEFAULT_REMOTE_CLASS_CONFIG.

    Raises:
        RuntimeError: ray is not installed.
    """
    ray = ray_module()
    config = DEFAULT_REMOTE_CLASS_CONFIG if remote_config is None else remote_config
    return ray.remote(**config)(cls) if config else ray.remote(cls)
