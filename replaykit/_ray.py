"""The one place that imports ray, and only when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DEFAULT_REMOTE_CLASS_CONFIG", "Carried", "actor_class", "ray_module", "start_ray"]

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


@dataclass(frozen=True)
class Carried:
    """An object with handles of actors, on its way to a process that Ray has not started.

    Attributes:
        pickled: the object.
        address, namespace: of the Ray that it belongs to.
    """

    pickled: bytes
    address: str
    namespace: str

    @classmethod
    def of(cls, value: object) -> Carried:
        """Takes an object of a process that Ray runs in."""
        ray = ray_module()
        context = ray.get_runtime_context()
        return cls(ray.cloudpickle.dumps(value), context.gcs_address, context.namespace)

    def made(self) -> Any:
        """Returns the object, in a process that is connected with that Ray from now on."""
        ray = ray_module()
        if not ray.is_initialized():
            ray.init(
                address=self.address,
                namespace=self.namespace,
                log_to_driver=False,
                configure_logging=False,
            )
        return ray.cloudpickle.loads(self.pickled)


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
