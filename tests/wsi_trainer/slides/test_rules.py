"""Rules beside the mask: each finds what was drawn for it, and together they count every pixel once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.ndimage import binary_dilation

from tests.wsi_trainer.slides.artefacts import Artefact, blur, ink, pale, spoilt, stroke
from wsi_trainer.errors import UserError
from wsi_trainer.slide.rules import RULES, Overview, apply_rules, choose
from wsi_trainer.slide.tissue import TissueMask, find_tissue, without_dust
from wsi_trainer.synthetic import SlideSpec, SyntheticSlide

SCALE, TIMES, MPP, SIDE = 16, 4, 0.5, 1600
KINDS = {rule.name: rule for rule in RULES}


def _shrunk(pixels: np.ndarray, times: int) -> np.ndarray:
    height, width = (side // times for side in pixels.shape[:2])
    return np.rint(pixels.reshape(height, times, width, times, 3).mean((1, 3))).astype(np.uint8)


@pytest.fixture(scope="module")
def slide() -> tuple[np.ndarray, np.ndarray]:
    """The pixels of a synthetic slide, and the colour of its glass."""
    made = SyntheticSlide(SlideSpec(SIDE, SIDE, seed=5, noise=True, tissue=0.35))
    return made.render(0, 0, SIDE, SIDE), made.background


def _overview(pixels: np.ndarray) -> tuple[TissueMask, Overview]:
    small, fine = _shrunk(pixels, SCALE), _shrunk(pixels, SCALE // TIMES)

    def finer(top: int, left: int, height: int, width: int) -> np.ndarray:
        return fine[top * TIMES : (top + height) * TIMES, left * TIMES : (left + width) * TIMES]

    tissue = find_tissue(small, SCALE)
    return tissue, Overview(small, MPP * SCALE, tissue.mask, finer, TIMES)


def _truth(artefacts: Sequence[Artefact]) -> np.ndarray:
    rows, columns = (np.mgrid[: SIDE // SCALE, : SIDE // SCALE] + 0.5) * SCALE
    return np.logical_or.reduce([shapely.contains_xy(one.outline, columns, rows) for one in artefacts])


@pytest.mark.parametrize("name", KINDS)
def test_a_clean_slide_loses_next_to_nothing(slide: tuple[np.ndarray, np.ndarray], name: str) -> None:
    tissue, overview = _overview(slide[0])
    found = apply_rules((KINDS[name](),), tissue, overview)
    assert found.found[name].sum() <= 0.03 * tissue.mask.sum()


@pytest.mark.parametrize("colour", ["blue", "green", "red", "black"])
def test_pen_marks_are_found(slide: tuple[np.ndarray, np.ndarray], colour: str) -> None:
    mark = ink(stroke([(60, 200), (900, 1000), (1540, 700)], 200), colour)
    tissue, overview = _overview(spoilt(slide[0], mark))
    found = apply_rules((KINDS["pen"](),), tissue, overview).found["pen"]
    truth = _truth([mark]) & tissue.mask
    assert (found & truth).sum() > 0.7 * truth.sum()
    assert (found & binary_dilation(_truth([mark]), iterations=6)).sum() > 0.95 * found.sum()


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [6, 12])
def test_blur_is_found(slide: tuple[np.ndarray, np.ndarray], sigma: float) -> None:
    place = blur(shapely.box(500, 500, 1100, 1000), sigma)
    tissue, overview = _overview(spoilt(slide[0], place))
    found = apply_rules((KINDS["blur"](),), tissue, overview).found["blur"]
    truth = _truth([place]) & tissue.mask
    assert (found & truth).sum() > 0.75 * truth.sum()
    assert (found & binary_dilation(_truth([place]), iterations=6)).sum() > 0.85 * found.sum()


def test_pale_tissue_is_put_in(slide: tuple[np.ndarray, np.ndarray]) -> None:
    place = pale(shapely.box(500, 500, 1100, 1000), slide[1], left=0.2)
    tissue, overview = _overview(spoilt(slide[0], place))
    after = apply_rules((KINDS["pale"](),), tissue, overview)
    missed = _truth([place]) & ~tissue.mask
    assert missed.sum() > 300
    assert (after.mask & missed).sum() > 0.9 * missed.sum()
    assert not (tissue.mask & ~after.mask).any()


def test_an_edge_that_passes_for_tissue_is_taken_out() -> None:
    pixels = np.full((200, 200, 3), 243, np.uint8)
    pixels[60:140, 60:140] = (190, 110, 170)
    pixels[:, 20:24] = (150, 120, 90)
    mask = np.zeros((200, 200), bool)
    mask[57:143, 57:143] = mask[:, 17:27] = True
    found = apply_rules((KINDS["edge"](),), TissueMask(mask, 16), Overview(pixels, 8.0, mask, _none))
    assert np.array_equal(found.found["edge"], mask & (np.arange(200) < 40))
    assert found.mask.sum() == 86**2


def _none(*box: int) -> np.ndarray:
    raise AssertionError("this rule needs no finer copy")


def test_fluorescence_is_left_to_rules_that_understand_it() -> None:
    pixels = np.zeros((90, 90, 3), np.uint8)
    tissue = TissueMask(np.ones((90, 90), bool), 16)
    rules = tuple(rule() for rule in RULES)
    after = apply_rules(rules, tissue, Overview(pixels, 8.0, tissue.mask, lambda y, x, h, w: pixels[:h, :w]))
    assert set(after.found) == {"blur"}
    assert after.mask.all()


@dataclass(frozen=True)
class Said:
    """A rule that finds what it was told."""

    name: ClassVar[str] = ""
    here: Any = None

    def find(self, overview: Overview) -> np.ndarray:
        return self.here


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_pixel_is_counted_once(data: st.DataObject) -> None:
    shape = (12, 17)
    masks = arrays(np.bool_, shape)
    said = [
        type(rule.name, (Said,), {"name": rule.name, "adds": rule.adds, "on_dark": rule.on_dark})(data.draw(masks))
        for rule in RULES
        if data.draw(st.booleans())
    ]
    before = TissueMask(data.draw(masks), 16)
    pixels = np.full((*shape, 3), 240, np.uint8)
    after = apply_rules(tuple(said), before, Overview(pixels, 8.0, before.mask, _none))
    added = after.found.get("pale", np.zeros(shape, bool))
    taken = [found for name, found in after.found.items() if name != "pale"]
    assert not (added & before.mask).any()
    parts = [after.mask, *taken]
    assert np.array_equal(np.sum(parts, axis=0, dtype=int), (before.mask | added).astype(int))
    shown, shares = before.mask.copy(), after.shares()
    for name, found in after.found.items():
        assert shares[name] == pytest.approx(found.sum() / max(1, shown.sum()))
        shown = shown | found if name == "pale" else shown & ~found
    if taken and any(one.any() for one in taken):
        last = [one for one in said if one.name != "pale" and after.found[one.name].any()][-1]
        if last is said[-1]:
            assert np.array_equal(after.mask, without_dust(after.mask))


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.name)
def test_parameters_out_of_range_are_named(kind: Any) -> None:
    for parameter in fields(kind):
        with pytest.raises(UserError, match=rf"--{kind.name}\.{parameter.name} -1: expected"):
            kind(**{parameter.name: -1.0})


def test_what_is_asked_for_is_understood_or_refused() -> None:
    plain = {name: kind() for name, kind in KINDS.items()}
    assert choose("none", list(plain.values())) == ()
    assert [rule.name for rule in choose("usual", list(plain.values()))] == ["pen", "blur"]
    assert [rule.name for rule in choose("fold, pen", list(plain.values()))] == ["pen", "fold"]
    assert len(choose("all", list(plain.values()))) == len(RULES)
    with pytest.raises(UserError, match="'pencil' is no rule; there are pale, pen"):
        choose("pencil", list(plain.values()))
    with pytest.raises(UserError, match=r"--pen\.\* is given.*--rules blur,pen"):
        choose("blur", list({**plain, "pen": replace(KINDS["pen"](), grow=10.0)}.values()))  # type: ignore[type-var]
