# SPDX-License-Identifier: Apache-2.0
"""All report pages: where the shapes that they draw lie, and what a browser shows of them."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

from browser import browser
from conftest import LAB, TINY, weft

PYTHON_PAGE = Path(__file__).parents[2] / "python/weft/run/page.py"
PAGES = ("plan", "bench", "train", "waits")
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
CLOSE = 0.6  # pixels; coordinates are rounded, and what is short is drawn half a pixel long


def waits_page():
    """A page of `weft run --html` and `weft stats --html`, for more ranks than a phone is wide."""
    spec = importlib.util.spec_from_file_location("page", PYTHON_PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    ranks = range(24)
    found = {
        str(rank): {
            "calls": {f"a.module.with.a.rather.long.name.Buffer.call_{n}": n**9 for n in range(9)},
            "groups": [{"rank": rank, "ranks": [*ranks], "wait_seconds": [abs(rank - n) / 9 for n in ranks]}],
        }
        for rank in ranks
    }
    return page.page(found, f"weft stats: {'a/long/path/' * 9}run.json")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Path of a page of each kind, by name; "train" only where the lab is built."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {name: folder / f"{name}.html" for name in PAGES}
    book = folder / "book.txt"
    book.write_text("In the beginning was the word, and the word was short. " * 200)
    weft("plan", "--tokens", 64, "--skew", 1, "--balance", 1, "--html", pages["plan"])
    weft("bench", "--smoke", "--ranks", 2, "--html", pages["bench"])
    if Path(LAB).exists():  # a build may leave it out
        weft("train", book, *TINY, "--ranks", 2, "--steps", 4, "--overlap", "--html", pages["train"])
    pages["waits"].write_text(waits_page())
    return pages


class Figure:
    """A picture's plot, the shapes in it that stand for values, and its lines."""

    def __init__(self, text):
        svg = ElementTree.fromstring(re.sub(' xmlns="[^"]*"', "", text))
        self.name = svg.get("aria-label")
        (axes,) = svg.findall("path[@class='axes']")
        numbers = re.fullmatch(r"M(\S+) (\S+)V(\S+)H(\S+)", axes.get("d")).groups()
        self.left, self.top, self.bottom, self.right = map(float, numbers)
        self.boxes = []
        for box in svg.findall("rect"):
            title = box.findtext("title")
            if title:
                sides = [float(box.get(side)) for side in ("x", "y", "width", "height")]
                self.boxes.append((title, *sides, box))
        self.lines = [path.get("d") for path in svg.findall("path[@class='line']")]

    def kind(self):
        box = self.boxes[0][-1] if self.boxes else None
        if self.lines:
            return "lines"
        return "heat" if box.get("class") == "heat" else "lanes" if " to " in self.boxes[0][0] else "bars"


def figures(page):
    found = [Figure(text) for text in re.findall("<svg.*?</svg>", page.read_text(), re.DOTALL)]
    assert all(figure.boxes or figure.lines for figure in found)
    return found


def value_of(title):
    number, unit = re.search(r": ([\d.e+-]+)([kMG]?)$", title).groups()
    return float(number) * UNITS[unit]


def check_bars(figure):
    """They stand on the axis, apart from each other, and are as high as their values."""
    values = [value_of(title) for title, *_ in figure.boxes]
    tallest = max(range(len(values)), key=values.__getitem__)
    scale = figure.boxes[tallest][4] / values[tallest]
    assert scale * values[tallest] > (figure.bottom - figure.top) / 2
    for value, (_, _, y, _, height, _) in zip(values, figure.boxes):
        assert y + height == pytest.approx(figure.bottom, abs=CLOSE)
        assert height == pytest.approx(scale * value, rel=0.01, abs=CLOSE)
    lefts = sorted((x, width) for _, x, _, width, _, _ in figure.boxes)
    nested = len({title.rsplit(" ", 2)[0] for title, *_ in figure.boxes}) == len(set(lefts))
    assert nested or len(set(lefts)) == len(lefts)
    for (x, width), (after, _) in zip(lefts, lefts[1:]):
        assert after == x or after >= x + width - CLOSE


def check_heat(figure):
    """The cells cover the plot, each once, and are as dark as their values."""
    (width,) = {round(box[3], 1) for box in figure.boxes}
    (height,) = {round(box[4], 1) for box in figure.boxes}
    area = (figure.right - figure.left) * (figure.bottom - figure.top)
    assert len(figure.boxes) * width * height == pytest.approx(area, rel=0.02)
    assert len({(box[1], box[2]) for box in figure.boxes}) == len(figure.boxes)
    cells = sorted((value_of(box[0]), float(box[-1].get("fill-opacity"))) for box in figure.boxes)
    assert [opacity for _, opacity in cells] == sorted(opacity for _, opacity in cells)
    assert cells[-1][1] > 0.3


def check_lanes(figure):
    """The pieces lie where their times say, on two lanes at least."""
    by_lane = defaultdict(list)
    for title, x, y, width, _, _ in figure.boxes:
        begin, end = map(float, re.search(r": (\S+) to (\S+)$", title).groups())
        by_lane[y].append((begin, end, x, width))
    assert len(by_lane) == 2
    pieces = [piece for lane in by_lane.values() for piece in lane]
    scale = (figure.right - figure.left) / max(end for _, end, _, _ in pieces)
    for begin, end, x, width in pieces:
        assert x == pytest.approx(figure.left + begin * scale, abs=CLOSE)
        assert width == pytest.approx((end - begin) * scale, abs=CLOSE)


def check_lines(figure):
    for line in figure.lines:
        points = [tuple(map(float, point.split())) for point in re.findall(r"[ML]([^ML]+)", line)]
        assert len(set(points)) > 1
        for x, y in points:
            assert figure.left - CLOSE <= x <= figure.right + CLOSE
            assert figure.top - CLOSE <= y <= figure.bottom + CLOSE


CHECKS = {"bars": check_bars, "heat": check_heat, "lanes": check_lanes, "lines": check_lines}


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("plan", ["heat", "bars", "heat"]),
        ("bench", ["bars", "bars", "lines"]),
        ("train", ["lines", "bars", "lanes", "lines", "heat", "heat"]),
    ],
)
def test_shapes_lie_inside_the_axes_and_are_as_large_as_their_values(pages, name, kinds):
    if not pages[name].exists():
        pytest.skip(f"no program that makes the page {name}")
    found = figures(pages[name])
    assert [figure.kind() for figure in found] == kinds
    for figure, kind in zip(found, kinds):
        print(name, figure.name)
        reach = 3 if kind == "lines" else 0  # a point's mark lies around it
        for title, x, y, width, height, _ in figure.boxes:
            assert figure.left - CLOSE - reach <= x, title
            assert x + width <= figure.right + CLOSE + reach, title
            assert figure.top - CLOSE - reach <= y, title
            assert y + height <= figure.bottom + CLOSE + reach, title
        CHECKS[kind](figure)


def test_a_browser_shows_the_plots_and_nothing_is_wider_than_a_phone(pages, tmp_path):
    with browser() as shown:
        for name, page in pages.items():
            for width, scheme in [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]:
                picture = tmp_path / f"{name}-{width}-{scheme}.png"
                layout = shown.look(page, width, scheme, picture)
                print(picture, layout)
                assert layout["width"] <= width
                # Lines are thin, all else is drawn in areas.
                kinds = ["heat"] if name == "waits" else [figure.kind() for figure in figures(page)]
                for kind, coloured in zip(kinds, layout["coloured"], strict=True):
                    assert coloured > (0.002 if kind == "lines" else 0.04)
