"""The base class of all corpus classes, and their catalogue."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import numpy as np

from replaykit import registry
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.components import SamplerT
from replaykit.datasets.converting import (
    Files,
    check_outside,
    digest_of,
    known_digest,
    local_sources,
)
from replaykit.datasets.dataset_passes import SPLIT_FORM, ensure_split
from replaykit.datasets.engine.conversion import (
    FLAT_FORM,
    ConvertOptions,
    ensure_dataset,
    full_identity,
)
from replaykit.datasets.engine.layout import Layout, rules_digest
from replaykit.datasets.engine.policies import Policies, meant, nearest
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.published_buffer import (
    CorpusExperienceReplay,
    Episodes,
    MappedStorage,
    chosen_episodes,
)
from replaykit.datasets.publishing import Published, open_published, remove_published
from replaykit.datasets.sources import DownloadPlan, Remote, Sources, room_needed_at
from replaykit.filesystem import free_bytes
from replaykit.keywords import checked_keywords, refuse_unknown
from replaykit.writers import ImmutableDatasetWriter, Writer


class BaseDatasetExperienceReplay(CorpusExperienceReplay[SamplerT]):
    """A ReplayBuffer over a published corpus.

    A subclass declares its data sets and layout in ``available_datasets``, ``corpus`` and
    ``layout``. It declares the location of the files in ``remote``, or overrides ``sources`` for
    files from another origin.

    Args:
        dataset_id: one of ``available_datasets``. With ``source``, any names joined by "/".
        batch_size: default number of rows of a sample.
        root: folder of the converted data sets; by default ``~/.cache/replaykit/<corpus>``.
        download: ``True`` fetches and converts the data set if it is absent. ``False`` never uses
            the network. ``"force"`` fetches and converts again, and replaces the old copy only at
            the end.
        sampler: chooses the rows of a batch; by default ``RandomSampler()``.
        writer: the writer; by default ``ImmutableDatasetWriter()``.
        collate_fn, pin_memory, prefetch, transform: as for ReplayBuffer.
        split_trajs: make one row per episode, padded with zeros to the longest episode. The keys
            ``mask`` and ``traj_ids`` are added.
        split: the part of the episodes to serve. It can be a name that the corpus defines, such as
            robomimic's ``"train"``, or a range of positions, such as ``"0:100"``. Or it is a range
            of percentages, such as ``"0%:80%"``, of all episodes in a random order. The seed of
            that order may follow, as in ``"0%:80%@7"``.
        episodes: the episodes to serve: positions in ``episode_table``, a slice of it, or a
            function that maps the table to bool ``[E]``. With ``split``, only episodes that both
            arguments choose are served.
        source: files to convert instead of the files of the corpus: paths, folders or URLs, as for
            `convert`.
        policies: the treatment of unusual keys, dtypes and episodes.
        layout: the layout of the files, if it is not the layout of the family, such as
            ``D4RLLayout(unreliable_ends=True)``.
        workers: number of processes. Each process converts one file after another.
        env_kwargs: other keywords of ReplayBuffer, such as ``generator``.

    Raises:
        ValueError: the id or the value of ``download`` is unknown, or ``workers`` is below 1. Or
            ``split`` or ``episodes`` names unknown episodes, or chooses no episode. Or the policies
            name a key or dtype that no file has.
        TypeError: a keyword is unknown, or ``policies`` or ``layout`` has a wrong type.
        FileNotFoundError: the data set does not exist, and ``download`` is False.
        RuntimeError: the folder holds something that is not a complete data set, or a data set made
            with other policies or another layout.
        CorpusError, DownloadError, OSError: the conversion or the download failed, as in `convert`.
            The message names the file.

    Rows can be edited in place. Edits are visible in this process only, and never reach the disk.

    Example:
        >>> from replaykit import BaseDatasetExperienceReplay
        >>> class Mine(BaseDatasetExperienceReplay):
        ...     available_datasets = ["a"]
        ...     corpus = "mine"
        ...     layout = None
        ...     def sources(self): ...
        >>> Mine("b", batch_size=4)
        Traceback (most recent call last):
        ValueError: expected one of the data sets ['a'], got 'b'
    """

    available_datasets: ClassVar[list[str]] = []
    any_id: ClassVar[bool] = False
    """True if the class also accepts ids that are not in ``available_datasets``."""
    corpus: ClassVar[str]
    """Name of the corpus and of its cache folder."""
    layout: ClassVar[Any]
    """The layout of the source files of the corpus; a `Layout`."""
    license: ClassVar[str | None] = None
    """Licence of the fetched data, in the notation of Hubs; None if licences differ."""

    @checked_keywords
    def __init__(
        self,
        dataset_id: str,
        batch_size: int,
        *,
        root: str | Path | None = None,
        download: bool | str = True,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        split: str | None = None,
        episodes: Episodes | None = None,
        source: Files | None = None,
        policies: Policies | None = None,
        layout: Layout | TableLayout | None = None,
        workers: int = 1,
        **env_kwargs: Any,
    ) -> None:
        self._check_id(dataset_id, is_own=source is not None)
        _check_keywords(type(self), env_kwargs)
        for name, given, kinds in (
            ("policies", policies, (Policies,)),
            ("layout", layout, (Layout, TableLayout)),
        ):
            if not isinstance(given, (*kinds, NoneType)):
                raise TypeError(
                    f"expected {name} as {kinds[0].__name__} or None, got {given!r:.80}"
                )
        self._options = ConvertOptions(policies=policies or Policies(), workers=workers)
        self.dataset_id = dataset_id
        self.source = source
        self._rules: Layout | TableLayout = self.layout if layout is None else layout
        self.root = _default_root(self.corpus) if root is None else Path(root)
        self.split_trajs = split_trajs
        self.download = _download(download)
        self._own: Sources | None = None
        self._choice = (split, episodes)
        # The storage is passed as a function. So all other arguments are checked before a
        # download.
        ReplayBuffer.__init__(
            self,
            storage=self._open,
            sampler=sampler,
            writer=ImmutableDatasetWriter() if writer is None else writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            batch_size=batch_size,
            **env_kwargs,
        )
        self._decode_frames()

    @classmethod
    def _check_id(cls, dataset_id: str, *, is_own: bool = False) -> None:
        """Refuse unknown ids. Local files may have any id."""
        if dataset_id in cls.available_datasets:
            return
        if not cls.any_id and not is_own:
            near = cls._meant(dataset_id)
            raise ValueError(
                f"expected one of the data sets {cls.available_datasets}, got {dataset_id!r}{near}"
            )
        parts = dataset_id.split("/") if isinstance(dataset_id, str) else [""]
        if any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise ValueError(f"expected names with '/' between them as an id, got {dataset_id!r}")

    @classmethod
    def _meant(cls, dataset_id: str) -> str:
        """Return a hint with the listed ids that are similar to an unknown one."""
        known = cls.available_datasets
        if dataset_id in known or not isinstance(dataset_id, str):
            return ""
        return meant(dataset_id, known)

    @classmethod
    @contextmanager
    def _suggesting(cls, dataset_id: str) -> Iterator[None]:
        """Add the nearest listed ids to a FileNotFoundError of the block."""
        try:
            yield
        except FileNotFoundError as error:
            near = cls._meant(dataset_id)
            if not near or error.errno is not None:
                raise
            raise FileNotFoundError(f"{error}{near}") from error

    @classmethod
    def remote(cls, dataset_id: str) -> Remote | None:
        """Return the location of a data set's files; None if there is none."""
        return None

    @classmethod
    def plan(cls, dataset_id: str, *, root: str | Path | None = None) -> DownloadPlan:
        """Return the files, sizes and target of a download, without fetching files.

        Args:
            dataset_id: one of ``available_datasets``.
            root: as for the class.

        Raises:
            ValueError: an unknown id.
            FileNotFoundError: the files of this data set cannot be fetched, or do not exist.
            PermissionError, DownloadError: the server refuses or fails to list the files.
        """
        cls._check_id(dataset_id)
        with cls._suggesting(dataset_id):
            origin, files, cache = cls._require_remote(dataset_id).listing()
        target = (_default_root(cls.corpus) if root is None else Path(root)) / dataset_id
        name, room = f"{cls.corpus}:{dataset_id}", free_bytes(cache)
        return DownloadPlan(name, origin, files, cache, room, target, target.exists())

    @classmethod
    def _require_remote(cls, dataset_id: str) -> Remote:
        remote = cls.remote(dataset_id)
        if remote is None:
            raise FileNotFoundError(
                f"files of {cls.corpus}:{dataset_id} cannot be fetched: none are hosted under this "
                "id; pass local files with source=, or convert them with the command "
                "replaykit convert"
            )
        return remote

    def sources(self) -> Sources:
        """Return the source files of the data set, fetched and verified."""
        with self._suggesting(self.dataset_id):
            return self._require_remote(self.dataset_id).sources(self._room())

    def _sources(self) -> Sources:
        if self.source is None:
            found = self.sources()
            return replace(found, origin={**found.origin, "license": self.license})
        if self._own is None:
            self._own = local_sources(
                self.source,
                natural=self._rules.natural_files,
                suffixes=self._rules.suffixes,
                threads=self._options.workers,
                checked=isinstance(self._rules, Layout)
                and self._options.policies.on_invalid != "skip",
                target=self._room(),
            )
        return self._own

    def _room(self) -> Path | None:
        """Return the directory whose free space is checked for the columns before a download."""
        return room_needed_at(
            self.data_path_root,
            may_shrink=self._options.policies.may_shrink,
            force=self.download == "force",
        )

    # -- paths --------------------------------------------------------------------------------

    @property
    def data_path_root(self) -> Path:
        """Folder of the flat data set: ``<root>/<dataset_id>``."""
        return self.root / self.dataset_id

    @property
    def data_path(self) -> Path:
        """Folder of the opened data set: flat, or ``<root>/<dataset_id>_split``."""
        if not self.split_trajs:
            return self.data_path_root
        return self.data_path_root.with_name(self.data_path_root.name + "_split")

    def delete(self) -> None:
        """Remove ``data_path`` from disk. Opened rows stay readable in this process.

        Raises:
            FileNotFoundError: the folder does not exist.
            RuntimeError: the folder holds files that are not part of a data set. The message names
                one of these files.
        """
        remove_published(self.data_path)

    # -- opening ------------------------------------------------------------------------------

    def _open(self) -> MappedStorage:
        if not self.split_trajs:
            return self._map(self._flat())
        force = self.download == "force"
        if not force and self.data_path.exists() and not self.data_path_root.exists():
            identity = {**full_identity(self._rules, self._identity()), **SPLIT_FORM}
            return self._map(open_published(self.data_path, identity=identity))
        self._flat()
        return self._map(
            ensure_split(
                self.data_path_root, self.data_path, force=force, identity=self._identity()
            )
        )

    def _map(self, published: Published) -> MappedStorage:
        return MappedStorage(published, chosen_episodes(published, *self._choice))

    def _identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"corpus": self.corpus, "dataset_id": self.dataset_id}
        # Defaults of the family are None, because data sets of older versions lack these entries.
        policies = self._options.policies
        found["policies"] = None if policies == Policies() else policies.to_json()
        found["rules"] = None if self._rules == self.layout else rules_digest(self._rules)
        found["source"] = None
        if self.source is not None:
            # Local files are identified by their content. They are read only if their name, size
            # or modification time has changed.
            known = known_digest(self.source, self._rules, self.data_path_root)
            found["source"] = known or digest_of(self._sources(), self._rules)
        return found

    def _flat(self) -> Published:
        # Ids without files are refused before the lock of a conversion is created.
        is_remote = type(self).sources == BaseDatasetExperienceReplay.sources
        if is_remote and self.source is None and not self.data_path_root.exists():
            with self._suggesting(self.dataset_id):
                self._require_remote(self.dataset_id)
        if self.download is False:
            return self._require(self.data_path_root)
        if self.source is not None:
            check_outside(self.data_path_root, self.source)
        return ensure_dataset(
            self.data_path_root,
            get_sources=self._sources,
            layout=self._rules,
            force=self.download == "force",
            identity=self._identity(),
            options=self._options,
        )

    def _require(self, path: Path) -> Published:
        identity = {**full_identity(self._rules, self._identity()), **FLAT_FORM}
        try:
            return open_published(path, identity=identity)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the data set {self.dataset_id!r} is not in {path}; construct it once with "
                f"download=True{self._meant(self.dataset_id)}"
            ) from None


class LocalFilesReplay(BaseDatasetExperienceReplay[SamplerT]):
    """A corpus that is hosted only in part, or not at all.

    Any id may name local files of the user.
    """

    any_id = True

    def _identity(self) -> dict[str, Any]:
        # An id that is not hosted names only the user's files. Without source=, the id opens the
        # data set that was converted from these files before.
        found = super()._identity()
        if self.source is None and self.remote(self.dataset_id) is None:
            del found["source"]
        return found


def _default_root(corpus: str) -> Path:
    return Path.home() / ".cache" / "replaykit" / corpus


def _download(given: Any) -> bool | str:
    """Return a valid ``download``. The type counts: 0 equals False, but is refused."""
    if isinstance(given, (bool, np.bool_)):
        return bool(given)
    if isinstance(given, str) and given == "force":
        return given
    raise ValueError(f'expected download as True, False or "force", got {given!r}')


def _check_keywords(cls: type, given: dict[str, Any]) -> None:
    known = {
        *inspect.signature(ReplayBuffer.__init__).parameters,
        *inspect.signature(BaseDatasetExperienceReplay.__init__).parameters,
    }
    refuse_unknown(cls, given, known - {"self", "storage", "env_kwargs"})


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
