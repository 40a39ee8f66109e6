"""Borders and lesions against judges that look at the whole slide, pixel by pixel, and share no code."""

import numpy as np
import scipy.ndimage
import shapely
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_plugin import Box, TileSource
from wsi_trainer.metrics import MISSED
from wsi_trainer.regions.shapes import joined, pieces
from wsi_trainer.regions.target import IGNORED, blocks_of
from wsi_trainer.segment.scores import border_pixels, detections, drawn_lesions, highest, marked, near_joined

CLASSES = 3


class Drawn(TileSource):
    """An array as what was drawn, which refuses to be read as a whole."""

    dtype = torch.uint8

    def __init__(self, values: np.ndarray, most: int) -> None:
        self.shape = (1, 1, *values.shape)
        self.values, self.most = values, most

    def read(self, box: Box) -> Tensor:
        assert max(box.extent) <= self.most
        return torch.from_numpy(self.values[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]].copy())[None, None]

    def constant(self, box: Box) -> Tensor | None:
        part = self.values[box.lo[0] : box.hi[0], box.lo[1] : box.hi[1]]
        return torch.from_numpy(part[:1, 0].copy()) if (part == part[0, 0]).all() else None


@st.composite
def two_maps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Found and drawn classes: blobs and single pixels, some of them ignored."""
    shape = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    found, drawn = (
        scipy.ndimage.uniform_filter(random.random((CLASSES, *shape)), (0, width, width)).argmax(0).astype(np.uint8)
        for width in (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    )
    drawn[random.random(shape) < draw(st.sampled_from([0, 0, 0.02, 0.3]))] = IGNORED
    return found, drawn


def judged_border(values: np.ndarray, place: int) -> list[tuple[int, int]]:
    """Pixel by pixel, each neighbour by itself."""
    height, width = values.shape
    return [
        (y, x)
        for y in range(height)
        for x in range(width)
        if values[y, x] == place
        and any(
            0 <= y + dy < height and 0 <= x + dx < width and values[y + dy, x + dx] not in (place, IGNORED)
            for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))
        )
    ]


@given(
    two_maps(), st.integers(3, 45), st.sampled_from([(1.0, 1.0), (0.5, 0.25), (0.3, 0.7)]),
    st.sampled_from([0.0, 0.5, 1.0, 1.7, 6.3, 90.0]),
)  # fmt: skip
def test_borders_near_each_other(
    maps: tuple[np.ndarray, np.ndarray], side: int, pixel: tuple[float, float], tolerance: float
) -> None:
    found, drawn = maps
    halo = int(tolerance / min(pixel)) + 3
    counted = border_pixels(found, Drawn(drawn, side + 2 * halo), CLASSES, pixel, tolerance, side)
    said = np.where(drawn == IGNORED, IGNORED, found)
    for place in range(CLASSES):
        mine, other = judged_border(said, place), judged_border(drawn, place)

        def near(own: list[tuple[int, int]], of: list[tuple[int, int]]) -> int:
            away = [[((y - v) * pixel[0]) ** 2 + ((x - u) * pixel[1]) ** 2 for v, u in of] for y, x in own]
            return sum(min(row, default=np.inf) <= tolerance**2 * (1 + 1e-8) for row in away)

        expected = [near(mine, other), len(mine), near(other, mine), len(other)]
        assert counted[:, place].tolist() == expected


@given(two_maps(), st.integers(3, 45), st.integers(0, 6), st.integers(0, 10**6))
def test_lesions_and_false_positives(maps: tuple[np.ndarray, np.ndarray], side: int, smallest: int, seed: int) -> None:
    found, drawn = maps
    # Few values, so that many pixels are as probable as each other.
    probability = np.random.default_rng(seed).integers(1, 6, found.shape).astype(np.float32) / 8
    truth = Drawn(drawn, side)
    lesions = drawn_lesions(truth, CLASSES, side)
    for place in range(1, CLASSES):
        parts: list[shapely.Polygon] = []
        points = [np.empty((0, 3))]
        for box in blocks_of(*found.shape, side):
            part = (slice(box.lo[0], box.hi[0]), slice(box.lo[1], box.hi[1]))
            parts += pieces(found[part] == place, box.lo)
            points.append(highest(found[part] == place, probability[part], box))
        marks = marked(lesions[place - 1], detections(joined(parts, smallest), np.concatenate(points)), truth)
        # The judge numbers the pieces of the whole slide, and looks at their pixels row by row.
        numbered, count = scipy.ndimage.label(drawn == place)
        hits = dict.fromkeys(range(1, count + 1), MISSED)
        false = []
        regions, many = scipy.ndimage.label(found == place)
        for region in range(1, many + 1):
            pixels = [(-probability[y, x], y, x) for y, x in np.argwhere(regions == region)]
            if len(pixels) < smallest:
                continue
            best, y, x = min(pixels)
            if numbered[y, x]:
                hits[numbered[y, x]] = max(hits[numbered[y, x]], -best)
            elif drawn[y, x] != IGNORED:
                false.append(-best)
        assert sorted(marks.lesions.tolist()) == sorted(hits.values())
        assert sorted(marks.false.tolist()) == sorted(false)


def test_lesions_near_each_other_are_one_as_camelyon16_joins_them() -> None:
    """Against its recipe on pixels: what lies within half the distance, holes filled, numbered."""
    drawn = np.zeros((260, 700), np.uint8)
    drawn[20:40, 20:60] = 1
    drawn[20:40, 120:160] = 1  # 60 µm to the right of the first
    drawn[20:40, 250:280] = 1  # 90 µm from the second
    drawn[70:90, 20:60] = 1  # 60 µm below the first
    y, x = np.ogrid[:260, :700]
    away = np.hypot(2.0 * (y - 150), x - 500.0)
    drawn[(away < 130) & (away > 110)] = 1  # a ring, and a lesion in it that is far from its inner border
    drawn[148:152, 496:504] = 1
    pixel, distance = (2.0, 1.0), 75.0
    truth = Drawn(drawn, 64)
    lesions = near_joined(drawn_lesions(truth, 2, 64)[0], pixel, distance)
    far = scipy.ndimage.distance_transform_edt(drawn == 0, sampling=pixel)
    numbered, count = scipy.ndimage.label(
        scipy.ndimage.binary_fill_holes(far < distance / 2), structure=np.ones((3, 3))
    )
    assert len(lesions) == count == 3
    inside = np.zeros(drawn.shape, int)
    rows, columns = np.mgrid[:260, :700] + 0.5
    for number, lesion in enumerate(lesions, start=1):
        inside[shapely.contains_xy(lesion, columns, rows)] = number
    clear = np.abs(far - distance / 2) > 3  # the recipe measures between centres of pixels
    assert np.array_equal((inside > 0)[clear], (numbered > 0)[clear])
    assert len(set(zip(inside[clear].tolist(), numbered[clear].tolist()))) == count + 1  # each is one of the others
    # A detection beside a lesion is in it; in none it is false.
    found = np.array([[90.5, 30.5, 0.9], [600.5, 20.5, 0.4]])
    marks = marked(lesions, found, truth)
    assert sorted(marks.lesions.tolist()) == [MISSED, MISSED, 0.9] and marks.false.tolist() == [0.4]
    assert len(marked(drawn_lesions(truth, 2, 64)[0], found, truth).false) == 2
