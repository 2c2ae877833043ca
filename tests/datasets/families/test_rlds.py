"""RLDS data sets, encoded by hand as TensorFlow Datasets writes them."""

from __future__ import annotations

import copy
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from replaykit.datasets import Policies, RldsExperienceReplay, convert, load_dataset
from replaykit.datasets.families import RLDS
from replaykit.datasets.families.rlds import Example
from tests.datasets.families.mutations import SEEDS, refusals, refused

STEPS = (6, 2, 9, 1)
CLASS = "tensorflow_datasets.core.features."


# -- an encoder of protobuf, TFRecord and CRC-32C, bit by bit -------------------------------------


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for octet in data:
        crc ^= octet
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values: Any, *, packed: bool = True) -> bytes:
    if isinstance(values, list):
        return field(1, b"".join(field(1, each) for each in values))
    if values.dtype.kind == "f":
        if packed:
            return field(2, field(1, values.astype("<f4").tobytes()))
        return field(2, b"".join(b"\x0d" + struct.pack("<f", each) for each in values.flat))
    numbers = [varint(int(each)) for each in values.flat]
    if packed:
        return field(3, field(1, b"".join(numbers)))
    return field(3, b"".join(b"\x08" + each for each in numbers))


def example(features: dict[str, Any], **options: Any) -> bytes:
    entries = [
        field(1, field(1, name.encode()) + field(2, feature(values, **options)))
        for name, values in features.items()
    ]
    return field(1, b"".join(entries))


def records(*messages: bytes) -> bytes:
    found = b""
    for message in messages:
        length = struct.pack("<Q", len(message))
        found += length + struct.pack("<I", crc32c(length))
        found += message + struct.pack("<I", crc32c(message))
    return found


# -- a data set -----------------------------------------------------------------------------------


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    said = {"dimensions": [str(size) for size in shape]} if shape else {}
    return {
        "pythonClassName": f"{CLASS}tensor_feature.Tensor",
        "tensor": {"shape": said, "dtype": dtype, "encoding": encoding},
    }


def image(*shape: int, form: str = "png") -> dict[str, Any]:
    sizes = [str(size) for size in shape]
    said = {"shape": {"dimensions": sizes}, "dtype": "uint8", "encodingFormat": form}
    return {"pythonClassName": f"{CLASS}image_feature.Image", "image": said}


def nested(**features: Any) -> dict[str, Any]:
    name = f"{CLASS}features_dict.FeaturesDict"
    return {"pythonClassName": name, "featuresDict": {"features": features}}


def listed(of: Any, length: int) -> dict[str, Any]:
    name = f"{CLASS}sequence_feature.Sequence"
    return {"pythonClassName": name, "sequence": {"feature": of, "length": str(length)}}


TEXT = {"pythonClassName": f"{CLASS}text_feature.Text", "text": {}}
SAID = nested(
    steps=listed(
        nested(
            observation=nested(
                state=tensor("float32", 3),
                image=image(5, 4, 3),
                unsized=image(-1, -1, 3),
                bits=tensor("uint16", 2, 2, encoding="zlib"),
                raw=tensor("float64", 2, encoding="bytes"),
                ids=listed(tensor("int32"), 4),
                words=TEXT,
                ragged=listed(tensor("float32"), -1),
            ),
            action=nested(world=tensor("float32", 2), open=tensor("bool")),
            reward=tensor("float32"),
            discount=tensor("float32"),
            big=tensor("uint64"),
            language=tensor("string"),
            is_first=tensor("bool"),
            is_last=tensor("bool"),
            is_terminal=tensor("bool"),
        ),
        -1,
    ),
    episode_metadata=nested(file_path=TEXT),
)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def episode(steps: int, random: np.random.Generator, number: int) -> tuple[dict[str, Any], Any]:
    """Return the features as TensorFlow Datasets encodes them, and the values by key."""
    last = np.arange(steps) == steps - 1
    pixels = random.integers(0, 256, (2, steps, 5, 4, 3), dtype=np.uint8)
    bits = random.integers(0, 2**16, (steps, 2, 2), dtype=np.uint16)
    raw, ids = random.random((steps, 2)), random.integers(-5, 5, (steps, 4)).astype(np.int32)
    state = random.standard_normal((steps, 3)).astype(np.float32)
    world = random.standard_normal((steps, 2)).astype(np.float32)
    grip, reward = random.random(steps) < 0.5, random.standard_normal(steps).astype(np.float32)
    big = random.integers(2**63, 2**64, steps, dtype=np.uint64)
    words = [f"word {at % 3}" for at in range(steps)]
    values = {
        ("observation", "state"): state,
        ("observation", "image"): pixels[0],
        ("observation", "unsized"): pixels[1],
        ("observation", "bits"): bits,
        ("observation", "raw"): raw,
        ("observation", "ids"): ids,
        ("observation", "words"): words,
        ("action", "world"): world,
        ("action", "open"): grip,
        ("next", "reward"): reward[:, None],
        ("next", "discount"): np.ones((steps, 1), np.float32),
        ("big",): big,
        ("language",): [f"task {number}"] * steps,
    }
    features = {
        "steps/observation/state": state,
        "steps/observation/image": [png(each) for each in pixels[0]],
        "steps/observation/unsized": [png(each) for each in pixels[1]],
        "steps/observation/bits": [zlib.compress(each.tobytes()) for each in bits],
        "steps/observation/raw": [each.tobytes() for each in raw],
        "steps/observation/ids/ragged_flat_values": ids,
        "steps/observation/ids/ragged_row_lengths_0": np.full(steps, 4),
        "steps/observation/words": [each.encode() for each in words],
        "steps/observation/ragged/ragged_flat_values": np.zeros(0, np.float32),
        "steps/observation/ragged/ragged_row_lengths_0": np.zeros(steps, int),
        "steps/action/world": world,
        "steps/action/open": grip.astype(int),
        "steps/reward": reward,
        "steps/discount": np.ones(steps, np.float32),
        "steps/big": big.view(np.int64),
        "steps/language": [f"task {number}".encode()] * steps,
        "steps/is_first": (np.arange(steps) == 0).astype(int),
        "steps/is_last": last.astype(int),
        "steps/is_terminal": (last & (number % 2 == 0)).astype(int),
        "episode_metadata/file_path": [b"/a/b"],
    }
    return features, values


def write(folder: Path, *, shards: int = 2, packed: bool = True) -> list[dict[Any, Any]]:
    """Write a data set with two splits, and return the values of its episodes."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(2)
    made = [episode(steps, random, number) for number, steps in enumerate(STEPS)]
    messages = [example(features, packed=packed) for features, _ in made]
    parts = [messages[0:2], messages[2:3]] if shards == 2 else [messages[:3]]
    for number, part in enumerate(parts):
        name = f"arm-train.tfrecord-{number:05d}-of-{len(parts):05d}"
        (folder / name).write_bytes(records(*part))
    (folder / "arm-val.tfrecord-00000-of-00001").write_bytes(records(messages[3]))
    (folder / "features.json").write_text(json.dumps(SAID))
    lengths = [str(len(part)) for part in parts]
    splits = [{"name": "train", "shardLengths": lengths}, {"name": "val", "shardLengths": ["1"]}]
    (folder / "dataset_info.json").write_text(json.dumps({"name": "arm", "splits": splits}))
    return [values for _, values in made]


def check(data: Any, episodes: list[dict[Any, Any]], texts: dict[str, list[str]]) -> None:
    rows = data[:]
    for key in episodes[0]:
        for root, part in (((), slice(None, -1)), (("next",), slice(1, None))):
            if root and key[0] != "observation":
                continue
            found = rows[(*root, *key)].numpy()
            if isinstance(episodes[0][key], list):
                wanted = [text for values in episodes for text in values[key][part]]
                assert [texts["/".join(key)][number] for number in found] == wanted
                continue
            wanted = np.concatenate([values[key][part] for values in episodes])
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), key
            assert np.array_equal(found, wanted), key


def converted(folder: Path, target: Path, **keywords: Any) -> Any:
    with pytest.warns(UserWarning, match="left out"):
        return convert(folder, RLDS, target, **keywords)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_item_is_the_encoded_one(shards, packed, tmp_path):
    episodes = write(tmp_path / "arm/1.0.0", shards=shards, packed=packed)
    data = converted(tmp_path / "arm/1.0.0", tmp_path / "data")
    report = data.published.manifest.report
    check(data, episodes[:3], report["about"]["texts"])
    assert data.episode_table["length"].tolist() == [5, 1, 8]
    assert data.episode_table["terminated"].tolist() == [True, False, True]
    assert data.episode_table["truncated"].tolist() == [False, True, False]
    assert report["splits"] == {"train": [0, 1, 2], "val": []}
    assert {each["key"] for each in report["left_out"]} == {
        "episode_metadata", "observation/ragged",
    }  # fmt: skip
    assert [each["name"] for each in report["skipped"]] == ["record_0"]  # it has one step


def test_the_family_opens_like_others(tmp_path, fetched):
    episodes = write(tmp_path / "arm")
    kwargs = {"source": tmp_path / "arm", "root": tmp_path / "root"}
    with pytest.warns(UserWarning, match="left out"):
        data = load_dataset("rlds:me/arm", 4, **kwargs)
    check(data, episodes[:3], data.texts)
    part = RldsExperienceReplay("me/arm", 4, split="train", **kwargs)
    assert part.sample()["observation", "image"].shape == (4, 5, 4, 3)
    data = fetched("rlds:me/arm", "me/arm", tmp_path / "arm")
    check(data, episodes[:3], data.texts)


# -- wrong files ----------------------------------------------------------------------------------


def changed(**features: Any) -> Any:
    """Return a fault: the first shard has other features in its first record."""

    def change(folder: Path) -> None:
        random = np.random.default_rng(2)
        made = [episode(steps, random, number)[0] for number, steps in enumerate(STEPS[:2])]
        for name, value in features.items():
            path = f"steps/{name.replace('__', '/')}"
            if value is None:
                del made[0][path]
            else:
                made[0][path] = value
        shard(folder).write_bytes(records(*map(example, made)))

    return change


def said(folder: Path, **observation: Any) -> None:
    features = copy.deepcopy(SAID)
    steps = features["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]
    steps["features"]["observation"]["featuresDict"]["features"].update(observation)
    (folder / "features.json").write_text(json.dumps(features))


def shard(folder: Path) -> Path:
    return folder / "arm-train.tfrecord-00000-of-00002"


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


FLAGS = ("is_first", "is_last", "is_terminal")
IDS = "observation__ids__ragged_"
WRONG = {
    "data": (lambda d: flipped(shard(d), 500), "data of record 0 has a wrong checksum", "V77"),
    "length": (lambda d: flipped(shard(d), 3), "length of record 0 has a wrong checksum", "V77"),
    "cut": (
        lambda d: shard(d).write_bytes(shard(d).read_bytes()[:-2]),
        "ends inside record 1",
        "V77",
    ),
    "no message": (lambda d: shard(d).write_bytes(records(b"\x0a\xff", b"")), "ends inside", "V78"),
    "no shard": (lambda d: shard(d).unlink(), "1 of 2 shards of the split train", "V15"),
    "fewer": (
        lambda d: shard(d).write_bytes(records(example({"a": np.ones(1)}))),
        "has 1 records, dataset_info.json states 2",
        "V15",
    ),
    "no features": (lambda d: (d / "features.json").unlink(), "0 files named features.json", "V04"),
    "no steps": (lambda d: (d / "features.json").write_text(json.dumps(nested())), "steps", "V04"),
    "missing": (changed(observation__state=None), "lacks 'steps/observation/st", "V78"),
    "short": (changed(action__world=np.ones(11, "f4")), "has 11 numbers, expected 6 x 2", "V78"),
    "bytes": (changed(reward=[b"a"] * 6), "reward: has bytes", "V78"),
    "floats": (changed(action__open=np.full(6, 0.5, "f4")), "has numbers that are not bool", "V78"),
    "integers": (changed(reward=np.arange(6)), "reward: .* not float32", "V78"),
    "range": (
        changed(**{f"{IDS}flat_values": np.full(24, 2**40)}),
        "ids: has numbers that are not int32",
        "V78",
    ),
    "lists": (
        changed(**{f"{IDS}row_lengths_0": np.zeros(0, int)}),
        "ids: has lists of other lengths than 4",
        "V78",
    ),
    "huge": (lambda d: said(d, state=tensor("float32", 10**12)), r"shape \[1000000000000\]", "V78"),
    "image": (changed(observation__image=[b"a"] * 6), "image that can be decoded", "V03"),
    "other size": (
        changed(observation__image=[png(np.zeros((9, 9, 3), np.uint8))] * 6),
        r"\[9, 9, 3\]",
        "V10",
    ),
    "bomb": (
        changed(observation__bits=[zlib.compress(bytes(1 << 20))] * 6),
        "step 0 has 9 bytes, expected 8",
        "V78",
    ),
    "empty flags": (
        changed(**{name: np.zeros(0, int) for name in FLAGS}),
        r"record_0: features have different numbers of steps: .*'steps/is_first': 0.*: 6}",
        "V78",
    ),
    "one flag": (
        changed(**{name: np.ones(1, int) for name in FLAGS}),
        "record_0: features have different numbers of steps",
        "V78",
    ),
    "data of a record without rows": (
        lambda d: flipped(d / "arm-val.tfrecord-00000-of-00001", -5),
        "data of record 0 has a wrong checksum",
        "V77",
    ),
    "early end": (changed(is_terminal=np.arange(6) < 2), "is_terminal is set at", "V31"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_files_are_refused_by_name(fault, tmp_path):
    change, says, rule = WRONG[fault]
    write(tmp_path / "arm")
    if fault != "no shard":
        refused(tmp_path / "arm", tmp_path / "arm", RLDS, change, says, rule)
        return
    change(tmp_path / "arm")  # a part of a download is a data set, with a warning
    with pytest.warns(UserWarning, match=f"{says}.*{rule}"):
        assert len(convert(tmp_path / "arm", RLDS, tmp_path / "data").episodes) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "O", "V8", "M8[s]"])
def test_dtypes_that_are_no_numbers_are_left_out(dtype, tmp_path):
    write(tmp_path / "arm")
    said(tmp_path / "arm", state=tensor(dtype, 3), raw=tensor("float64", -3, encoding="bytes"))
    data = converted(tmp_path / "arm", tmp_path / "data")
    left_out = {each["key"] for each in data.published.manifest.report["left_out"]}
    assert {"observation/state", "observation/raw"} < left_out


def test_an_entry_of_another_wire_type_is_an_error():
    message = field(1, field(1, field(1, b"a") + field(2, field(2, b"\x08" + varint(2**40)))))
    with pytest.raises(ValueError, match="wrong type 0"):
        Example(memoryview(message)).floats("a")


def test_bad_episodes_can_be_left_out(tmp_path):
    episodes = write(tmp_path / "arm")
    flipped(shard(tmp_path / "arm"), 500)
    policies = Policies(on_invalid="skip")
    data = converted(tmp_path / "arm", tmp_path / "data", policies=policies)
    check(data, episodes[1:3], data.published.manifest.report["about"]["texts"])
    assert data.episode_table["episode"].tolist() == [1, 0]


@SEEDS
def test_damaged_bytes_give_an_error_or_the_right_values(seed, tmp_path):
    episodes = write(tmp_path / "arm")

    def right(data: Any, name: str) -> None:
        keys, report = data.published.columns, data.published.manifest.report
        lengths = data.episode_table["length"].tolist()
        made = [episodes[at] for at, steps in enumerate(STEPS) if steps - 1 in lengths]
        # A missing shard, and another shard in its place, are reported.
        said = [*report["duplicates"], *report["skipped"][1:], *report["warnings"]]
        assert len(data) == 14 or said
        if report["duplicates"]:
            return
        kept = [{k: v for k, v in values.items() if k in keys} for values in made]
        check(data, kept, report["about"]["texts"])

    assert refusals(tmp_path / "arm", RLDS, tmp_path, right, seed=seed) > 30
