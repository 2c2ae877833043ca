"""Zarr arrays of diffusion policy and UMI, written by zarr and compared with the written values."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaykit.datasets import Policies, ZarrExperienceReplay, convert, load_dataset
from replaykit.datasets.families import ZARR
from replaykit.errors import CorpusError
from replaykit.inspection import validate
from tests.datasets.families.mutations import SEEDS, refusals, refused

zarr = pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")
numcodecs = pytest.importorskip("numcodecs")

ENDS = np.array([7, 8, 20])


def write(path: Path, *, form: int = 2, seed: int = 0, **more: Any) -> dict[str, Any]:
    """Write a set as diffusion policy does, and return its arrays by name."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "action": random.standard_normal((20, 2)).astype(np.float32),
        "state": random.standard_normal((20, 5)),
        "img": random.integers(0, 256, (20, 6, 8, 3), dtype=np.uint8),
        "n_contacts": random.integers(0, 9, 20),
        "robot/pose": random.standard_normal((20, 2, 2)).astype(np.float16),
    }
    is_zip = path.suffix == ".zip"
    store = zarr.storage.ZipStore(path, mode="w") if is_zip else zarr.storage.LocalStore(path)
    group = zarr.create_group(store, zarr_format=form)
    for name, values in arrays.items():
        options = {"chunks": (1 if name == "img" else 6, *values.shape[1:]), **more.get(name, {})}
        array = group.create_array(
            f"data/{name}", shape=values.shape, dtype=values.dtype,
            config={"write_empty_chunks": True}, **options,
        )  # fmt: skip
        array[:] = values
    group.create_array("meta/episode_ends", shape=ENDS.shape, dtype=ENDS.dtype)[:] = ENDS
    if is_zip:
        store.close()
    return arrays


def check(data: Any, arrays: dict[str, Any], kept: Any = slice(None)) -> None:
    rows = data[:]
    for name, values in arrays.items():
        found = rows[key_of(name)].numpy()
        assert found.dtype == values.dtype
        assert np.array_equal(found, values[kept]), name


def key_of(name: str) -> tuple[str, ...]:
    return ("action",) if name == "action" else ("observation", *name.split("/"))


@pytest.mark.parametrize("name", ["a.zarr", "a.zarr.zip"])
@pytest.mark.parametrize("form", [2, 3])
def test_every_item_is_the_written_one(form, name, tmp_path):
    arrays = write(tmp_path / name, form=form)
    data = convert(tmp_path / name, ZARR, tmp_path / "data")
    check(data, arrays)
    assert data.episode_table["length"].tolist() == [7, 1, 12]
    assert data[:]["next", "truncated"].flatten().nonzero().flatten().tolist() == [6, 7, 19]
    assert not data[:]["next", "terminated"].any()
    assert convert(tmp_path / name, ZARR, tmp_path / "data").published.path == data.published.path


def test_images_of_umi_are_decoded(tmp_path):
    codecs = pytest.importorskip("imagecodecs.numcodecs")
    codecs.register_codecs("imagecodecs_jpegxl", force=True, verbose=False)
    codec = codecs.Jpegxl(lossless=True)
    path = tmp_path / "cup.zarr.zip"
    arrays = write(path, img={"compressors": codec})
    with zarr.storage.ZipStore(path, mode="r") as store:
        assert zarr.open_group(store, mode="r")["data/img"].metadata.compressor == codec
    check(convert(path, ZARR, tmp_path / "data"), arrays)


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_blocks_and_shards_do_not_matter(block, tmp_path, monkeypatch):
    from replaykit.datasets.engine.conversion import ConvertOptions

    monkeypatch.setattr(ConvertOptions, "block_bytes", block, raising=False)
    options = {"chunks": (2, 6, 8, 3), "shards": (6, 6, 8, 3)}
    arrays = write(tmp_path / "a", form=3, img=options)
    check(convert(tmp_path / "a", ZARR, tmp_path / "data"), arrays)


def test_groups_of_actions_and_observations_are_keys(tmp_path):
    write(tmp_path / "a")
    data, values = zarr.open_group(tmp_path / "a", mode="a")["data"], np.arange(20.0)
    for name in ("observation/action", "observation/deep/a", "move/arm"):
        data.create_array(name, data=values)
    rows = convert(tmp_path / "a", ZARR, tmp_path / "data")[:]
    for key in (("action",), ("deep", "a"), ("move", "arm")):
        assert rows[("observation", *key)].tolist() == values.tolist()
    assert rows["action"].shape == (20, 2)
    data.create_array("observation/state", data=values)
    with pytest.raises(CorpusError, match=r"two arrays have the key .*state.*\[V10\]"):
        convert(tmp_path / "a", ZARR, tmp_path / "other")


def test_several_hierarchies_become_one_set(tmp_path):
    one, two = (write(tmp_path / name, seed=at) for at, name in enumerate(("a.zip", "b/c.zarr")))
    data = convert(tmp_path, ZARR, tmp_path.with_name(f"{tmp_path.name}-data"))
    check(data, {name: np.concatenate([one[name], two[name]]) for name in one})
    assert data.episode_table["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert data.episode_table["episode"].tolist() == [0, 1, 2] * 2


def test_the_family_opens_like_others(tmp_path, fetched):
    arrays = write(tmp_path / "a.zarr")
    kwargs = {"source": tmp_path / "a.zarr", "root": tmp_path / "root"}
    check(load_dataset("zarr:me/pusht", 4, **kwargs), arrays)
    part = ZarrExperienceReplay("me/pusht", 4, episodes=[2], **kwargs)
    check(part, arrays, slice(8, 20))
    assert part.sample()["observation", "img"].shape == (4, 6, 8, 3)
    (tmp_path / "repo").mkdir()
    arrays = write(tmp_path / "repo/push.zarr.zip")
    check(fetched("zarr:me/push", "me/push", tmp_path / "repo"), arrays)


def test_texts_are_left_out_and_flags_end_episodes(tmp_path):
    arrays = write(tmp_path / "a")
    group = zarr.open_group(tmp_path / "a", mode="a")
    group.create_array("data/words", shape=(20,), dtype="U4", chunks=(20,))[:] = "ab"
    flags = np.arange(20) == 7
    group.create_array("data/terminated", shape=(20,), dtype=bool, chunks=(20,))[:] = flags
    with pytest.warns(UserWarning, match="left out"):
        data = convert(tmp_path / "a", ZARR, tmp_path / "data")
    check(data, arrays)
    assert data.published.manifest.report["left_out"][0]["key"] == "words"
    assert data.episode_table["terminated"].tolist() == [False, True, False]
    assert data.episode_table["truncated"].tolist() == [True, False, True]


def described(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def state(**changes: Any) -> Any:
    """Return a fault of the description of an array."""
    return lambda folder: described(folder / "data/state/.zarray", **changes)


def ends(**changes: Any) -> Any:
    return lambda folder: described(folder / "meta/episode_ends/.zarray", **changes)


WRONG = {
    "missing chunk": (
        lambda p: (p / "data/img/9.0.0.0").unlink(),
        "img: the chunks of 1 ro",
        "V76",
    ),
    "missing ends": (lambda p: (p / "meta/episode_ends/0").unlink(), "a chunk is missing", "V76"),
    "cut chunk": (lambda p: (p / "data/state/1.0").write_bytes(b"\x02\x01"), "data/state", "V03"),
    "no ends": (lambda p: shutil.rmtree(p / "meta"), "has an array meta/episode_ends", "V04"),
    "pickle": (state(dtype="|O", filters=[{"id": "pickle"}]), "codec 'pickle'.*run code", "V03"),
    "unknown codec": (state(compressor={"id": "mine"}), "state: is stored by the codec 'm", "V03"),
    "no JSON": (lambda p: (p / "data/state/.zarray").write_text("{"), "data/state", "V03"),
    "no arrays": (lambda p: shutil.rmtree(p / "data"), "data: has no array of numbers", "V12"),
    "huge ends": (ends(shape=[10**12], chunks=[1]), "ends: 999999999999 chunks are missing", "V76"),
    "no chunk size": (state(chunks=[0, 5]), "data/state: the chunks of", "V76"),
    "chunk beyond the shape": (
        lambda p: (p / "data/state/1.0").rename(p / "data/state/1.7"),
        "state: the chunks of 1 rows",
        "V76",
    ),
    "fewer rows": (state(shape=[19, 5]), "has 19 rows, but the episodes end at row 20", "V11"),
    "huge": (
        state(shape=[20, 10**14], chunks=[6, 10**14]),
        "data/state: a chunk has 4,800,000,000,000,000 bytes",
        "V03",
    ),
    "huge chunk of ends": (ends(shape=[10**12], chunks=[10**12]), "8,000,000,000,000 byt", "V03"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_files_are_refused_by_name(fault, tmp_path):
    write(tmp_path / "a", state={"compressors": numcodecs.Zstd(checksum=True)})
    refused(tmp_path / "a", tmp_path / "a", ZARR, *WRONG[fault])


def test_a_wrong_shape_does_not_look_like_a_full_disk(tmp_path, monkeypatch):
    """The array of 1.6 MB is too large for the disk, but the stored one is smaller."""
    write(tmp_path / "a")
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="1,000 bytes are free"):
        convert(tmp_path / "a", ZARR, tmp_path / "data")
    usage = usage._replace(free=1_000_000)
    convert(tmp_path / "a", ZARR, tmp_path / "data")
    state(shape=[20, 10**4], chunks=[6, 10**4])(tmp_path / "a")
    with pytest.raises(CorpusError, match=r"data/state.*\[V03\]"):
        convert(tmp_path / "a", ZARR, tmp_path / "other")


@pytest.mark.parametrize("where", ["start", "end"])
@pytest.mark.parametrize("name", ["a.zarr", "a.zarr.zip"])
def test_missing_chunks_of_shards_are_found(name, where, tmp_path):
    shards = zarr.codecs.ShardingCodec(chunk_shape=(2, 3), index_location=where)
    values = np.ones((20, 4), np.float32)
    values[[4, 5, 18, 19]] = 0
    is_zip = name.endswith(".zip")
    for full in (True, False):
        path = tmp_path / f"{full}-{name}"
        store = zarr.storage.ZipStore(path, mode="w") if is_zip else zarr.storage.LocalStore(path)
        group = zarr.create_group(store, zarr_format=3)
        group.create_array("meta/episode_ends", data=ENDS)
        array = group.create_array(
            "data/state", shape=values.shape, dtype="f4", chunks=(6, 6), compressors=None,
            serializer=shards, config={"write_empty_chunks": full},
        )  # fmt: skip
        array[:] = values
        store.close()
        if full:
            check(convert(path, ZARR, tmp_path / "full"), {"state": values})
            continue
        with pytest.raises(CorpusError, match=r"episode_0/data/state: the chunks of 2 rows.*V76"):
            convert(path, ZARR, tmp_path / "data")
        policies = Policies(on_invalid="skip")
        with pytest.warns(UserWarning, match="V76"):
            data = convert(path, ZARR, tmp_path / "data", policies=policies)
        assert data.episode_table["length"].tolist() == [1]


def test_a_chunk_that_a_zip_file_has_twice_hides_none(tmp_path):
    write(tmp_path / "a", state={"chunks": (6, 3)})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for path in sorted((tmp_path / "a").rglob("*")):
            if path.is_file() and path.name != "1.1":
                name = str(path.relative_to(tmp_path / "a"))
                file.write(path, name)
                if path.name == "1.0" and "state" in name:
                    with pytest.warns(UserWarning, match="Duplicate"):
                        file.write(path, name)
    with pytest.raises(CorpusError, match=r"state: the chunks of 1 rows.*\[V76\]"):
        convert(tmp_path / "a.zip", ZARR, tmp_path / "data")


def test_big_endian_and_empty_values_are_read(tmp_path):
    write(tmp_path / "a")
    big, none = np.arange(40, dtype=">f4").reshape(20, 2), np.zeros((20, 0))
    data = zarr.open_group(tmp_path / "a", mode="a")["data"]
    data.create_array("big", data=big), data.create_array("none", data=none)
    rows = convert(tmp_path / "a", ZARR, tmp_path / "data")[:]["observation"]
    assert rows["big"].tolist() == big.tolist()
    assert rows["none"].shape == (20, 0)


@pytest.mark.parametrize("values", [[7, 6, 20], [-1, 8, 20], [7.0, 8.0, 20.0], [[7], [8], [20]]])
def test_ends_that_go_back_are_refused(values, tmp_path):
    write(tmp_path / "a")
    group = zarr.open_group(tmp_path / "a", mode="a")
    group.create_array("meta/episode_ends", data=np.array(values), overwrite=True)
    with pytest.raises(CorpusError, match=r"meta/episode_ends|episode \d ends.*\[V(32|10)\]"):
        convert(tmp_path / "a", ZARR, tmp_path / "data")


def test_consolidated_metadata_cannot_hide_a_codec(tmp_path):
    arrays = write(tmp_path / "a")
    zarr.consolidate_metadata(tmp_path / "a", zarr_format=2)
    file = tmp_path / "a/.zmetadata"
    said = json.loads(file.read_text())
    said["metadata"]["data/state/.zarray"]["filters"] = [{"id": "pickle"}]
    file.write_text(json.dumps(said))
    check(convert(tmp_path / "a", ZARR, tmp_path / "data"), arrays)


def test_bad_episodes_can_be_left_out(tmp_path):
    arrays = write(tmp_path / "a", state={"compressors": numcodecs.Zstd(checksum=True)})
    (tmp_path / "a/data/img/7.0.0.0").unlink()
    (tmp_path / "a/data/state/3.0").write_bytes(b"no")
    with pytest.warns(UserWarning, match="skipped|left out"):
        data = convert(tmp_path / "a", ZARR, tmp_path / "d", policies=Policies(on_invalid="skip"))
    check(data, arrays, slice(7))
    (tmp_path / "a/data/state/3.0").unlink()
    policies = Policies(on_invalid="keep", exclude=[("observation", "state")])
    with pytest.warns(UserWarning, match="V76"):
        data = convert(tmp_path / "a", ZARR, tmp_path / "e", policies=policies)
    assert (data[7]["observation", "img"] == 0).all()
    del arrays["state"], arrays["img"]
    check(data, arrays)


def test_validate_checks_sound_episodes_next_to_a_damaged_chunk(tmp_path):
    write(tmp_path / "a")
    group = zarr.open_group(tmp_path / "a", mode="r+", use_consolidated=False)
    group["data/action"][2, 0] = np.nan
    (tmp_path / "a/data/action/3.0").write_bytes(b"no")
    found = [each.text for each in validate(tmp_path / "a") if not each.ok]
    assert ["V20" in text for text in found] == [False, True], found


@SEEDS
@pytest.mark.parametrize("name", ["a.zarr.zip", "a.zarr", "shards"])
def test_damaged_bytes_give_an_error_or_the_right_values(name, seed, tmp_path):
    """Members of a ZIP file have checksums, and so have shards. Others are not damaged."""
    options: dict[str, Any] = {}
    if name == "shards":
        codec = zarr.codecs.ZstdCodec(checksum=True)
        options = {"form": 3, "state": {"chunks": (2, 5), "shards": (6, 5), "compressors": codec}}
        options["img"] = {"chunks": (20, 6, 8, 3)}
    arrays = write(tmp_path / name, **options)

    def right(data: Any, _: str) -> None:
        keys = data.published.columns
        check(data, {name: arrays[name] for name in arrays if key_of(name) in keys})

    names = (".z*", "zarr.json", "data/state/c/*/*")
    found = refusals(tmp_path / name, ZARR, tmp_path, right, names=names, seed=seed)
    assert found > 20
