"""The corpus families by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replaykit import registry
from replaykit.buffer.components import SamplerT
from replaykit.datasets.dataset import BaseDatasetExperienceReplay
from replaykit.datasets.engine.policies import meant, nearest
from replaykit.datasets.sources import DownloadPlan

_REGISTERED: dict[str, str | Callable[..., Any]] = {}
"""Functions that make data sets, or their import names, by prefix. Only users add entries."""


@functools.cache
def families() -> Mapping[str, type[BaseDatasetExperienceReplay[Any]]]:
    """Return the corpus classes by family name."""
    classes = (registry.load(entry) for entry in registry.of_kind("family"))
    return {each.corpus: each for each in classes}


def register_dataset(
    prefix: str, dataset: str | Callable[..., Any], *, replace: bool = False
) -> None:
    """Let ``load_dataset`` construct other data sets, by names ``prefix:id``.

    The function is called as ``dataset(id, batch_size=..., **kwargs)``, with the arguments that
    ``load_dataset`` got.

    Args:
        prefix: a text without ":". Case and outer spaces do not matter.
        dataset: a function or class, or its import name ``"module:attribute"``, which is imported
            at the first use.
        replace: replace a registered prefix, or a family of this package.

    Raises:
        TypeError: ``dataset`` is neither a function nor a text.
        ValueError: the prefix is empty or has a ":", or the text is not an import name.
        KeyError: the prefix is in use, and ``replace`` is False.

    Example:
        >>> from replaykit.datasets import load_dataset, register_dataset
        >>> class Toy:
        ...     def __init__(self, dataset_id, **kwargs):
        ...         self.dataset_id, self.options = dataset_id, kwargs
        >>> register_dataset("toy", Toy, replace=True)
        >>> load_dataset("toy:example").dataset_id, load_dataset("toy:a", 32).options
        ('example', {'batch_size': 32})
    """
    key = _prefix(prefix)
    if not key or ":" in key:
        raise ValueError(f"expected a prefix that is not empty and has no ':', got {prefix!r}")
    if isinstance(dataset, str):
        if not all(dataset.partition(":")):
            raise ValueError(f"expected the import name module:attribute, got {dataset!r}")
    elif not callable(dataset):
        raise TypeError(f"expected a function or an import name, got {type(dataset).__name__}")
    if not replace and (key in _REGISTERED or key in families()):
        raise KeyError(f"the prefix {key!r} is in use; pass replace=True to replace it")
    _REGISTERED[key] = dataset


def _prefix(name: str) -> str:
    return name.lower().strip()


def load_dataset(
    name: str,
    batch_size: int | None = None,
    *,
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> BaseDatasetExperienceReplay[SamplerT]:
    """Construct a data set from its name, ``family:id``.

    Args:
        name: a name such as ``"robomimic:lift/ph/low_dim"``.
        batch_size, sampler, kwargs: the arguments of the family's class, such as ``policies`` and
            ``workers``. Those that are None are left out for names of `register_dataset`.

    Raises:
        ValueError: the family is unknown, or the class refuses an argument.

    Example:
        >>> from replaykit.datasets import load_dataset
        >>> load_dataset("atari:pong", 32)
        Traceback (most recent call last):
        ValueError: expected name as family:id with one of the families ['aloha', 'd4rl', ...
    """
    prefix, _, dataset_id = name.partition(":")
    given = _REGISTERED.get(_prefix(prefix))
    if given is not None:
        if isinstance(given, str):
            module, _, attribute = given.partition(":")
            given = getattr(importlib.import_module(module), attribute)
        options = {"batch_size": batch_size, "sampler": sampler}
        options = {key: value for key, value in options.items() if value is not None}
        return given(dataset_id, **options, **kwargs)
    family, dataset_id = _family(name)
    return family(dataset_id, batch_size, sampler=sampler, **kwargs)  # type: ignore[arg-type]


def plan(name: str, *, root: str | Path | None = None) -> DownloadPlan:
    """Return the files, sizes and target of a download, without fetching files.

    Args:
        name: ``family:id``.
        root: as for the class of the family.

    Raises:
        ValueError: the family or the id is unknown.
        FileNotFoundError: the files of this data set cannot be fetched, or do not exist.
        PermissionError, DownloadError: the server refuses or fails to list the files.

    Cost: one listing of the repository, or one request for each web file of unknown size.

    Example:
        >>> from replaykit.datasets import plan
        >>> found = plan("d4rl:hopper-medium-v2", root="data")
        >>> [(file.name, file.size) for file in found.files], str(found.target)
        ([('hopper_medium-v2.hdf5', 152756557)], 'data/hopper-medium-v2')
    """
    family, dataset_id = _family(name)
    return family.plan(dataset_id, root=root)


def _family(name: str) -> tuple[type[BaseDatasetExperienceReplay[Any]], str]:
    family, colon, dataset_id = name.partition(":")
    known = families()
    if not colon or family not in known:
        raise ValueError(
            f"expected name as family:id with one of the families {sorted(known)}, got "
            f"{name!r}{_meant(name)}"
        )
    return known[family], dataset_id


def _meant(name: str) -> str:
    """Return a hint with names similar to one whose family is missing or unknown."""
    family, colon, dataset_id = name.partition(":")
    if not colon:
        dataset_id = family
    else:
        near = nearest(family, families())
        if near:
            return meant(name, [f"{each}:{dataset_id}" for each in near])
    return meant(
        dataset_id,
        [f"{each}:{id_}" for each, kind in families().items() for id_ in kind.available_datasets],
    )
