"""The only module that imports ray. The import happens at first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_REMOTE_CLASS_CONFIG: Final[dict[str, Any]] = {"num_cpus": 1, "num_gpus": 0}
"""The default resources of an actor."""


def ray_module() -> Any:
    """Return the module ray.

    Raises:
        RuntimeError: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            f"remote buffers need ray ({error}); install it with: pip install 'replaykit[ray]'"
        ) from None
    return ray


def start_ray(config: Mapping[str, Any] | None = None) -> Any:
    """Return ray with the running runtime, or with a new one with these options.

    Raises:
        RuntimeError: ray is not installed.
    """
    ray = ray_module()
    if not ray.is_initialized():
        ray.init(**(config or {}))
    return ray


@dataclass(frozen=True)
class Carried:
    """A pickled object with actor handles, for a process not started by Ray.

    Attributes:
        pickled: the bytes of the object.
        address, namespace: address and namespace of the object's Ray cluster.
    """

    pickled: bytes
    address: str
    namespace: str

    @classmethod
    def of(cls, value: object) -> Carried:
        """Pickle an object in a process that is connected to Ray."""
        ray = ray_module()
        context = ray.get_runtime_context()
        return cls(ray.cloudpickle.dumps(value), context.gcs_address, context.namespace)

    def made(self) -> Any:
        """Return the object, after connecting this process to its cluster if needed."""
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
    """Return a Ray actor class of ``cls``; its ``.remote(...)`` starts an actor.

    Args:
        remote_config: options of ``ray.remote``; None: DEFAULT_REMOTE_CLASS_CONFIG.

    Raises:
        RuntimeError: ray is not installed.
    """
    ray = ray_module()
    config = DEFAULT_REMOTE_CLASS_CONFIG if remote_config is None else remote_config
    return ray.remote(**config)(cls) if config else ray.remote(cls)
