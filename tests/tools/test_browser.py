"""The page in a browser: no error, no request, every picture there, by day and by night."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from replaykit import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from replaykit.inspection import opened
from replaykit.tools.page import DAY, write_page
from tests.browser import CHROMIUM, NO_CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a file with NaNs, images and a hostile name, and one of a prioritized buffer."""
    folder = tmp_path_factory.mktemp("pages")
    draw = np.random.default_rng(0)
    with h5py.File(folder / "demo.hdf5", "w") as file:
        for number, steps in enumerate((30, 20, 25)):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"], demo["rewards"] = draw.normal(size=(steps, 5)), draw.normal(size=steps)
            demo["dones"] = (np.arange(steps) == steps - 1).astype(int) * (number != 1)
            states = draw.normal(size=(steps + 1, 4))
            demo["obs/eef"], demo["next_obs/eef"] = states[:-1], states[1:]
            frames = draw.integers(0, 256, (steps + 1, 24, 32, 3), np.uint8)
            demo["obs/image"], demo["next_obs/image"] = frames[:-1], frames[1:]
            demo["states"] = np.where(np.arange(steps)[:, None] % 3, 1.0, np.nan) * np.ones((1, 2))
            demo["<script>document.title='owned'<|script>"] = np.arange(float(steps))
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(100), batch_size=4
    )
    from tensordict import TensorDict

    noise = torch.Generator().manual_seed(0)
    rows = {"action": torch.randn(60, 2, generator=noise),
            "next": {"reward": torch.randn(60, 1, generator=noise),
            "done": torch.arange(60).view(60, 1) % 20 == 19}}  # fmt: skip
    rb.extend(TensorDict(rows, [60]))
    rb.update_priority(torch.arange(60), torch.rand(60, generator=noise) + 0.1)
    rb.dumps(folder / "saved")
    found = {}
    for name in ("demo.hdf5", "saved"):
        with opened(folder / name) as (facts, table):
            write_page(folder / f"{name}.html", facts, table)
        found[name] = folder / f"{name}.html"
    return found


IMAGES = """Promise.all([...document.images].map(i => i.decode())).then(() =>
[...document.images].map(i => { const b = i.getBoundingClientRect(); return {
alt: i.alt, natural: [i.naturalWidth, i.naturalHeight],
clip: {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height}}}))"""


@pytest.mark.parametrize("name", ["demo.hdf5", "saved"])
def test_page_shows_every_picture(browser, pages, name):
    browser.open(pages[name], width=1100, dark=False)
    images = browser.value(IMAGES)
    titles = [image["alt"] for image in images]
    assert {"Return of each episode", "Returns", "Lengths", "Reward", "Action"} <= set(titles)
    assert ("Priority" in titles) == (name == "saved")
    assert ("data/demo_*/obs/image" in titles) == (name == "demo.hdf5")
    assert ("Where values are NaN" in titles) == (name == "demo.hdf5")
    for image in images:
        assert min(image["natural"]) > 50, image
        pixels = browser.picture(image["clip"])
        # Something is drawn: neither one colour, nor a page with a speck.
        codes = pixels.reshape(-1, 3).astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
        colours, times = np.unique(codes, return_counts=True)
        assert len(colours) > 5, image
        assert times.max() < 0.995 * times.sum(), image
        # Axes and letters can be read.
        if image["alt"] in ("Returns", "Reward"):
            spread = np.abs(pixels.astype(int) - np.median(pixels, axis=(0, 1))).max()
            assert spread > 90, image
            assert np.median(pixels) > 200


def test_page_makes_no_request_and_logs_no_error(browser, pages):
    for path in pages.values():
        browser.open(path, width=1100, dark=False)
        browser.value(IMAGES)
        time.sleep(0.2)
        browser.value("1")  # what was said until now has arrived
        urls = [
            event["params"]["request"]["url"]
            for event in browser.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        assert urls
        assert [url for url in urls if not url.startswith("data:")] == [path.as_uri()]
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        assert [event for event in browser.events if event.get("method") in wrong] == []
        assert browser.value("document.scripts.length") == 0
        assert browser.value("document.title").endswith(" - replaykit")


def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser, pages):
    for path in pages.values():
        browser.open(path, width=390, dark=False)
        browser.value(IMAGES)
        assert browser.value("document.scrollingElement.scrollWidth") <= 390
        sizes = browser.value(
            "[...document.querySelectorAll('p,td,th,li,span,h3,dd')]"
            ".map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 12
        # Wide plots scroll inside their box instead of shrinking their letters.
        wide = browser.value(
            "[...document.querySelectorAll('figure.wide img')].map(i => i.clientWidth)"
        )
        assert len(wide) == (2 if path == pages["demo.hdf5"] else 0)
        assert all(width >= 600 for width in wide)
        heights = browser.value(
            "[...document.querySelectorAll('#episodes tbody tr')].map(r => r.offsetHeight)"
        )
        assert len(heights) == 3
        assert max(heights) <= 40


def shown_colours(pixels: np.ndarray) -> set[str]:
    return {f"#{bytes(colour).hex()}" for colour in np.unique(pixels.reshape(-1, 3), axis=0)}


def test_plots_have_the_colours_of_the_page(browser, pages):
    colours = DAY
    browser.open(pages["demo.hdf5"], width=1300, dark=False)
    clips = {image["alt"]: image["clip"] for image in browser.value(IMAGES)}
    assert {colours["card"], colours["line"], colours["accent"]} <= shown_colours(
        browser.picture(clips["Reward"])
    )
    episodes = shown_colours(browser.picture(clips["Return of each episode"]))
    bar = browser.value(
        "(b => ({x: b.x, y: b.y + scrollY, width: b.width, height: b.height}))"
        "(document.querySelector('.ends').getBoundingClientRect())"
    )
    # Two episodes were terminated and one was cut off: the bar and the dots say so alike.
    ends = {colours["warm"], colours["accent"]}
    assert ends <= episodes
    assert ends <= shown_colours(browser.picture(bar))


def test_letters_of_all_plots_have_one_size(browser, pages):
    """Two actions fill half a row: over a whole one their letters would be twice as large."""
    for path in pages.values():
        browser.open(path, width=1300, dark=False)
        browser.value(IMAGES)
        scales = browser.value(
            "[...document.querySelectorAll('.plots img')].map(i => i.clientWidth / i.naturalWidth)"
        )
        assert len(scales) >= 6
        assert max(scales) / min(scales) < 1.15
