"""Images: bytes in the storage, floats in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit import ImageScale, pad_collate
from tests.support.refusals import refuses

RANGES = [(-1.0, 1.0), (0.0, 1.0), (-0.5, 0.5), (0, 255), (-3, 17)]
EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)


def images() -> TensorDict:
    return TensorDict({"observation": EVERY_BYTE}, [4])


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        *((*ends, dtype) for ends in RANGES for dtype in (torch.float32, torch.float64)),
        *((*ends, dtype) for ends in RANGES[:3] for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_the_inverse_gives_every_byte_back(low: float, high: float, dtype: torch.dtype) -> None:
    """S16: asked for are 1e-4 of 255; bytes come back as bytes."""
    scale = ImageScale(low, high)
    floats = scale(images())
    assert (floats["observation"].min(), floats["observation"].max()) == (low, high)
    back = scale.inv(floats.to(dtype))
    assert back["observation"].dtype is torch.uint8
    assert torch.equal(back["observation"], EVERY_BYTE)
    assert floats["observation"].dtype is torch.float32


def test_only_named_keys_are_scaled() -> None:
    data = TensorDict({"observation": {"pixels": EVERY_BYTE, "x": torch.zeros(4)}}, [4])
    data["mask_image"] = EVERY_BYTE
    out = ImageScale(0, 1, keys=[("observation", "pixels")])(data)
    assert out["observation", "pixels"].max() == 1
    assert out["observation", "x"] is data["observation", "x"]
    assert out["mask_image"] is EVERY_BYTE


def test_padding_keeps_its_values() -> None:
    rows = [TensorDict({"observation": EVERY_BYTE[:n] + 1}, [n]) for n in (1, 3)]
    out = ImageScale()(pad_collate(rows))["observation"]
    assert out.dtype is torch.float32
    assert not out[0, 1:].any()
    assert out[1, 2, 0, 0] == torch.tensor(129.0) / 255 * 2 - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_other_dtypes_than_uint8_are_refused_on_read(dtype: torch.dtype) -> None:
    """S16."""
    with pytest.raises(TypeError, match=f"key 'observation': expected uint8, got {dtype}"):
        ImageScale()(TensorDict({"observation": torch.zeros(2).to(dtype)}, [2]))


@pytest.mark.parametrize("way", ["forward", "inv"])
def test_a_nested_observation_needs_keys(way: str) -> None:
    """S16."""
    data = TensorDict({"observation": {"pixels": EVERY_BYTE}}, [4])
    with pytest.raises(ValueError, match=r"'observation': .*TensorDict; pass the keys .* keys="):
        getattr(ImageScale(), way)(data)
    refuses(KeyError, "no key 'zoo'", getattr(ImageScale(keys=["zoo"]), way), data)
    with pytest.raises(KeyError, match="no key 'observation'"):
        getattr(ImageScale(), way)(TensorDict({"x": torch.zeros(4)}, [4]))


@pytest.mark.parametrize("value", [-1.01, 1.01, float("nan"), float("inf")])
def test_floats_outside_the_range_are_not_written(value: float) -> None:
    data = TensorDict({"observation": torch.tensor([0.0, value])}, [2])
    refuses(ValueError, "'observation': expected values from -1 to 1, got", ImageScale().inv, data)
    data["observation"] = torch.zeros(2).long()
    refuses(TypeError, "expected uint8 or floats, got torch", ImageScale().inv, data)


def test_bytes_are_stored_whichever_form_is_written(storage_kind: Any) -> None:
    scale = ImageScale()
    row = TensorDict({"observation": EVERY_BYTE[0]}, [])
    rb = storage_kind.buffer(8, row, transform=scale)
    rb.extend(images())
    rb.extend(scale(images()))
    stored = torch.stack([rb.storage[i]["observation"].cpu() for i in range(8)])
    assert torch.equal(stored, torch.cat([EVERY_BYTE, EVERY_BYTE]))
    scaled = scale(images().to(storage_kind.device))["observation"]  # devices round differently
    assert torch.equal(rb[:]["observation"][4:].cpu(), scaled.cpu())


@pytest.mark.parametrize("threads", [1, 2])
def test_images_are_scaled_as_numpy_scales_them(threads: int, fingerprint: Any) -> None:
    """Of any size and strides, with any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.randint(0, 256, (37, 3, 64, 128), dtype=torch.uint8)
        for image in (data, data.movedim(1, 3), data[:, :, ::2], data[:, 0, 0]):
            after = {"observation": image.flip(0), "x": torch.zeros(37)}
            batch = TensorDict({"observation": image, "next": after}, [37])
            shown = fingerprint(batch)
            scaled = ImageScale(-0.5, 2.0)(batch)
            for key in ("observation", ("next", "observation")):
                numbers = batch[key].numpy().astype(np.float32) / np.float32(255)
                numbers = numbers * np.float32(2.5) + np.float32(-0.5)
                assert (scaled[key].numpy() == numbers).all()
                assert scaled[key].dtype is torch.float32
            assert scaled["next", "x"] is batch["next", "x"]
            assert fingerprint(batch) == shown
    finally:
        torch.set_num_threads(before)
