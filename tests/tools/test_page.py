"""The page as text: what it shows, that it asks for nothing, and that files write no markup."""

from __future__ import annotations

import base64
import io
import re
import time
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import h5py
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from replaykit import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from replaykit.inspection import opened
from replaykit.tools.page import histogram, lines, make_page, small_histograms, write_page


class Page(HTMLParser):
    """Headings, texts of table cells, pictures, and whatever names an address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: dict[str, str] = {}
        self.titles: list[str] = []
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "action", "srcset", "data", "poster"):
                self.addresses.append(value)
            assert not name.startswith("on")
        if tag == "img":
            given = dict(attributes)
            self.images[given["alt"]] = given["src"]

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.words.append(data)
        if "h3" in self._open:
            self.titles.append(data)
        if "td" in self._open:
            self.cells.append(data)


def page_of(path, **options):
    with opened(path, **options) as (facts, table):
        return Page(make_page(facts, table))


def test_page_of_a_data_set_shows_plots_images_and_keys(tmp_path, write_robomimic):
    page = page_of(write_robomimic(tmp_path / "a.hdf5", (9, 7), camera=True))
    assert {"Return of each episode", "Returns", "Length of each episode", "Lengths", "Reward",
            "Action"} <= set(page.titles)  # fmt: skip
    assert "data/demo_*/obs/camera_image" in page.images
    assert "data/demo_*/next_obs/camera_image" not in page.images  # the same frames again
    assert "No NaN was found in 4 keys of floating point." in page.words
    assert "data/demo_*/actions" in page.cells
    assert "script" not in page.tags


def test_pictures_are_part_of_the_page_and_show_the_frames(tmp_path, write_robomimic):
    path = write_robomimic(tmp_path / "a.hdf5", (9,), camera=True)
    page = page_of(path)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    for url in page.images.values():
        content = base64.b64decode(url.partition(",")[2])
        if url.startswith("data:image/svg+xml"):
            # Names of name spaces are no addresses that are asked for.
            text = re.sub(r'xmlns(:\w+)?="[^"]*"', "", content.decode())
            assert "http" not in re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
            assert 'href="http' not in text
    url = page.images["data/demo_*/obs/camera_image"]
    strip = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    with h5py.File(path) as file:
        frames = file["data/demo_0/obs/camera_image"][...]
    assert strip.shape[0] == 112
    width = round(16 * 112 / 12)
    for place, frame in enumerate(frames[[0, 1, 2, 3, 5, 6, 7, 8]]):
        shown = strip[:, place * (width + 3) : place * (width + 3) + width]
        large = np.asarray(Image.fromarray(frame).resize((width, 112), Image.Resampling.NEAREST))
        assert np.abs(shown.astype(int) - large).mean() < 40  # JPEG of noise
        others = np.asarray(
            Image.fromarray(frames[4]).resize((width, 112), Image.Resampling.NEAREST)
        )
        assert np.abs(shown.astype(int) - others).mean() > 60


def test_many_warnings_are_folded_and_few_are_open(tmp_path, write_d4rl):
    with opened(write_d4rl(tmp_path / "a.hdf5")) as (facts, table):
        for count, is_open in ((1, True), (3, True), (4, False), (44, False)):
            said = replace(facts, warnings=tuple(f"warning {i}" for i in range(count)))
            text = make_page(said, table)
            assert (" open><summary>" in text) == is_open
            assert f"{count} warning" in text
            assert "<li>warning 0</li>" in text
        assert "<details" not in make_page(replace(facts, warnings=()), table)


def axes_of(draw):
    figure = Figure()
    draw(figure)
    return figure.axes[0]


@pytest.mark.parametrize(
    "actions", [np.zeros(20), np.arange(20) % 3, np.full(20, 1e-12), np.full(20, np.nan)]
)
def test_constants_and_discrete_actions_fit_their_plot(actions):
    """A bar for each value, and nothing between them."""
    for draw in (
        partial(histogram, actions, "action"),
        partial(small_histograms, actions[:, None], ["[0]"]),
    ):
        axes = axes_of(draw)
        values, times = np.unique(actions[np.isfinite(actions)], return_counts=True)
        assert [bar.get_height() for bar in axes.patches] == times.tolist()
        if len(values) == 1:
            (label,) = axes.get_xticklabels()
            assert label.get_text() == f"{values[0]:.6g}, always"
        else:
            middles = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
            assert middles == values.tolist()


@pytest.mark.parametrize("returns", [[-8.5, -0.5, 7.9], [0.25, 0.5], [1.5, 1.5001, 90.0]])
def test_few_values_are_no_solid_block(returns):
    (shape,) = axes_of(partial(histogram, np.array(returns), "return")).patches
    counts = shape.get_data().values
    assert counts.sum() == len(returns)
    assert (counts > 0).mean() < 0.2


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        (range(4), [0, 1, 2, 3]),
        ([0, 2, 3], [0, 2, 3]),
        ([0, 10, 20], [0, 10, 20]),
        (range(7), [0, 2, 4, 6]),
    ],
)
def test_few_numbers_have_a_tick_each(values, ticks):
    """Of more than four, small plots have room for a part."""
    column = np.array(values).repeat(5)
    wide = partial(histogram, column, "action")
    small = partial(small_histograms, column[:, None], ["action"])
    assert axes_of(wide).get_xticks().tolist() == list(values)
    assert axes_of(small).get_xticks().tolist() == ticks
    returns = partial(
        lines, np.arange(2), np.array([3.0, 4.0]), "return", ["terminated", "truncated"]
    )
    assert axes_of(returns).get_xticks().tolist() == [0, 1]


def test_single_episode_is_written_in_the_singular(tmp_path, write_d4rl):
    with opened(write_d4rl(tmp_path / "a.hdf5", 10, (9,))) as (facts, table):
        text = make_page(facts, table)
    assert "<b>1</b><span>episode</span>" in text
    assert "1 episodes" not in text


def test_names_of_a_file_are_text(tmp_path):
    name = "<script>alert(1)</script>"
    with h5py.File(tmp_path / "a&b<i>.h5", "w") as file:
        file["observations"], file["actions"] = np.eye(4), np.zeros((4, 1))
        file["rewards"], file["terminals"] = np.ones(4), np.arange(4) == 3
        file[f"infos/{name.replace('/', '|')}"] = np.arange(4.0)
        file["infos/\"quoted' & $math_{x}$ \u202e"] = np.full(4, np.nan)
    with opened(tmp_path / "a&b<i>.h5") as (facts, table):
        text = make_page(facts, table)
    assert "<script" not in text
    assert "<i>" not in text.replace('<i class="dot"', "")
    page = Page(text)
    assert "infos/<script>alert(1)<|script>" in page.cells
    assert "a&b<i>.h5" in page.words
    assert "Where values are NaN" in page.titles


def test_priorities_are_shown_where_there_are_any(tmp_path, transitions):
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(50), batch_size=4
    )
    rb.extend(transitions(20, pixels=torch.zeros(20, 3, 16, 16, dtype=torch.uint8)))
    rb.update_priority(torch.arange(20), torch.linspace(0.1, 2, 20))
    rb.dumps(tmp_path / "saved")
    page = page_of(tmp_path / "saved")
    assert "Priority" in page.titles
    assert "pixels" in page.images


def test_page_names_the_number_of_sampled_rows(tmp_path, monkeypatch, write_d4rl):
    path = write_d4rl(tmp_path / "a.hdf5", 3000, (1499,))
    monkeypatch.setattr("replaykit.tools.page._MOST_BYTES", 4096)
    page = page_of(path, most_bytes=4096)
    words = " ".join(page.words)
    assert "1,024 of 3,000 rows, taken evenly" in words
    assert re.search(r"statistics of \d+ rows, taken evenly", words)


def test_page_without_episodes_lists_the_keys(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"] = np.arange(3)
        file["empty"] = np.zeros((0, 2))
    page = page_of(tmp_path / "x.h5")
    assert not page.images
    assert "a" in page.cells


def test_many_episodes_and_keys_make_a_page_that_can_be_read(tmp_path):
    """Time and size are bounded: they do not grow with rows and episodes."""
    rows = 15_000
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["observations"] = np.zeros((rows, 4), np.float32)
        file["next_observations"] = np.zeros((rows, 4), np.float32)
        file["actions"] = np.random.default_rng(0).normal(size=(rows, 40)).astype(np.float32)
        file["rewards"], file["terminals"] = np.ones(rows), np.arange(rows) % 5 == 4
        file["infos/holes"] = np.where(np.arange(rows) % 7, 1.0, np.nan)
    began = time.process_time()
    with opened(tmp_path / "a.hdf5", most_bytes=1 << 20) as (facts, table):
        assert len(facts.episodes) == 3_000
        text = make_page(facts, table)
    assert len(text) < 3_000_000
    assert time.process_time() - began < 60
    page = Page(text)
    assert any("24 of 40 numbers" in words for words in page.words)
    assert any("2,000 of 3,000 episodes, taken evenly" in words for words in page.words)
    assert any("60 of 3,000 episodes, taken evenly" in words for words in page.words)


def test_the_page_is_written_whole_or_not_at_all(tmp_path, corpus):
    target = tmp_path / "page.html"
    target.write_text("before")
    with opened(corpus) as (facts, table):
        with pytest.raises(OSError, match="page cannot be written"):
            write_page(tmp_path / "absent" / "page.html", facts, table)
        write_page(target, facts, table)
        first = target.read_bytes()
        write_page(target, facts, table)
    assert target.read_bytes() == first  # the same facts, the same page
    assert first.startswith(b"<!doctype html>")
    assert not list(tmp_path.glob(".page*"))


def test_a_page_replaces_no_other_file(tmp_path, corpus):
    manifest = corpus / "manifest.json"
    before = manifest.read_bytes()
    with opened(corpus) as (facts, table), pytest.raises(FileExistsError, match=r"ends in \.html"):
        write_page(manifest, facts, table)
    assert manifest.read_bytes() == before
