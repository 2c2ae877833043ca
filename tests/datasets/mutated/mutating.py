"""Files changed at random: their bytes, their length, and what is in them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.datasets.mutated.corpora import leaves


def flip(path: Path, draw: random.Random) -> None:
    """Some bytes become others."""
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 8, 64])):
        at = draw.randrange(len(content))
        content[at] = draw.choice(
            [draw.randrange(256), content[at] ^ (1 << draw.randrange(8)), 255]
        )
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """The file ends early, or its end is zeros, or something stands behind it."""
    size = path.stat().st_size
    kept = draw.choice([0, 1, 8, 100, draw.randrange(size), draw.randrange(size), size - 1])
    if draw.random() < 0.7:
        os.truncate(path, kept)
    elif draw.random() < 0.5:
        os.truncate(path, kept)
        os.truncate(path, size)
    else:
        with path.open("ab") as file:
            file.write(draw.randbytes(draw.randrange(1, 5000)))


def drop(path: Path, draw: random.Random) -> None:
    """A dataset, a group or an attribute is gone, or another name leads to it."""
    with h5py.File(path, "a") as file:
        names = [name for name, _ in leaves(file)]
        name = draw.choice(names)
        how = draw.randrange(8)
        if how < 3:
            del file[name]
        elif how == 3:
            del file[name.rpartition("/")[0] or name]
        elif how == 4:
            above = file[name.rpartition("/")[0] or "/"]
            for attribute in list(above.attrs):
                del above.attrs[attribute]
        elif how == 5:
            file.move(name, draw.choice([f"{name}_", f"{name}/x", "x"]))
        elif how == 6:
            del file[name]
            kind: Any = draw.choice([h5py.SoftLink, lambda p: h5py.ExternalLink("other.h5", p)])
            file[name] = kind(f"/{draw.choice(names)}")
        else:
            top = draw.choice(list(file))
            file.move(top, draw.choice([f"{top}1", f"{top}-0", "Trial", "a/b"]))


def put(file: h5py.File, name: str, values: Any, **options: Any) -> None:
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, data=values, **options).attrs.update(attributes)


def reshape(path: Path, draw: random.Random) -> None:
    """A dataset has another shape: shorter, longer, other axes, no row, no axis."""
    with h5py.File(path, "a") as file:
        name = draw.choice([name for name, _ in leaves(file)])
        values = np.asarray(file[name][()])
        changes: list[Callable[[], Any]] = [
            lambda: values[:-1],
            lambda: values[1:],
            lambda: values[:1],
            lambda: values[:0],
            lambda: np.concatenate([values, values[-1:]]),
            lambda: np.concatenate([values, values]),
            lambda: values[..., None],
            lambda: values[None],
            lambda: values.reshape(len(values), -1),
            lambda: values.reshape(-1),
            lambda: values.T,
            lambda: values.reshape(-1)[0],
            lambda: values.reshape(len(values), -1)[:, :1],
            lambda: values.reshape(len(values), -1)[:, :0],
            lambda: h5py.Empty(values.dtype),
        ]
        put(file, name, draw.choice(changes)())


def retype(path: Path, draw: random.Random) -> None:
    """A dataset, in one episode or in all, has values of another type or another storage."""
    with h5py.File(path, "a") as file:
        name = draw.choice([name for name, _ in leaves(file)])
        last = name.rpartition("/")[2]
        alike = [other for other, _ in leaves(file) if other.rpartition("/")[2] == last]
        kind = draw.choice(
            ["f4", "f8", "f2", "i1", "i4", "u1", "u2", ">f8", ">i8", "?", "c8", "S4", "text",
             "vlen", "record", "chunked", "gzip", "enum"]
        )  # fmt: skip
        for one in alike if draw.random() < 0.5 else [name]:
            values = np.asarray(file[one][()])
            options: dict[str, Any] = {}
            if kind == "text":
                values = values.astype("S8").astype(object)
                options["dtype"] = h5py.string_dtype()
            elif kind == "vlen":
                stored = np.empty(values.shape[:1], object)
                for at, row in enumerate(values):
                    stored[at] = np.atleast_1d(row).reshape(-1)
                values, options["dtype"] = stored, h5py.vlen_dtype(values.dtype)
            elif kind == "record":
                values = np.zeros(values.shape, [("a", "f4"), ("b", "i4")])
            elif kind == "enum":
                options["dtype"] = h5py.enum_dtype({"a": 0, "b": 1}, basetype="u1")
                values = (np.nan_to_num(values.astype("f8")) > 0).astype("u1")
            elif kind in ("chunked", "gzip"):
                options = {"chunks": True, "compression": "gzip" if kind == "gzip" else None}
            else:
                with np.errstate(all="ignore"):
                    values = values.astype(kind)
            put(file, one, values, **options)


def change(path: Path, draw: random.Random) -> None:
    """A value is none, or too large, or a flag that was not set."""
    with h5py.File(path, "a") as file:
        node = draw.choice([node for _, node in leaves(file)])
        values = node[()]
        if values.size:
            with np.errstate(all="ignore"):
                value = np.array(draw.choice([np.nan, np.inf, -1, 1, 1e300])).astype(values.dtype)
            values.reshape(-1)[draw.randrange(values.size)] = value
            node[...] = values


def redescribe(path: Path, draw: random.Random) -> None:
    """The JSON file beside lacks an entry, says something else, or is none; for others `flip`."""
    beside = [other for other in path.parent.iterdir() if other.suffix == ".json"]
    if not beside:
        flip(path, draw)
        return
    text = beside[0].read_text()
    said: Any = json.loads(text)
    how = draw.randrange(4)
    if how == 0:
        text = text[: draw.randrange(len(text))]
    elif how == 1:
        text = text.replace(draw.choice('{}[]:"1234567'), draw.choice(["", "0", "x", "null"]), 1)
    else:
        node = said
        while draw.random() < 0.6:
            inner = [v for v in (node.values() if isinstance(node, dict) else node) if v]
            inner = [v for v in inner if isinstance(v, (dict, list))]
            if not inner:
                break
            node = draw.choice(inner)
        key: Any = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if how == 2:
            del node[key]
        else:
            node[key] = draw.choice([None, -1, 10**30, "x", [], {}, True, 1.5, "{", "[1]"])
        text = json.dumps(said)
    beside[0].write_text(text)


MUTATIONS = (*[flip] * 3, cut, *[drop] * 2, *[reshape] * 2, *[retype] * 2, change, redescribe)


def mutate(good: Path, folder: Path, seed: int) -> tuple[Path, str]:
    """Copies a file with what lies beside it, and changes it; returns it and what was done."""
    draw = random.Random(seed)
    for source in good.parent.iterdir():
        shutil.copy(source, folder / source.name)
    path = folder / good.name
    mutation = draw.choice(MUTATIONS)
    # The libraries that change a file may refuse a change of their own making; then it is another.
    while True:
        try:
            mutation(path, draw)
            return path, mutation.__name__
        except (ValueError, TypeError, OSError, KeyError, RuntimeError, IndexError):
            shutil.copy(good, path)
