"""Explicit before manifest before plausible metadata; never a guess."""

from __future__ import annotations

import pytest

from wsi_trainer.slide.errors import SlideError, UnknownResolution
from wsi_trainer.slide.formats.base import Level, SlideInfo
from wsi_trainer.slide.geometry import resolve, shrink_factor


def _info(mpp: tuple[float, float] | None) -> SlideInfo:
    return SlideInfo((Level(100, 100),), mpp, "test", "test")


def test_order_of_sources() -> None:
    info = _info((0.5, 0.5))
    assert resolve("s", info, 0.25, 0.3).origin == "explicit"
    assert resolve("s", info, 0.25, 0.3).mean == 0.25
    assert resolve("s", info, None, 0.3).origin == "manifest"
    assert resolve("s", info).origin == "metadata"
    assert resolve("s", info).mean == 0.5


@pytest.mark.parametrize("mpp", [None, (352.86, 352.86), (0.001, 0.001), (0.5, 300.0)])
def test_unknown_or_implausible_is_an_error_that_names_slide_and_way_out(mpp) -> None:
    with pytest.raises(UnknownResolution, match=r"a slide\.svs: .*--source_mpp"):
        resolve("a slide.svs", _info(mpp))
    assert resolve("a slide.svs", _info(mpp), manifest=0.25).mean == 0.25


def test_implausible_number_of_the_user_is_refused_too() -> None:
    with pytest.raises(UnknownResolution, match="mpp 72"):
        resolve("s", _info(None), explicit=72.0)


def test_shrinking_only() -> None:
    own = resolve("s", _info((0.499, 0.499)))
    assert shrink_factor("s", own, 0.5) == 1.0  # within the tolerance
    assert shrink_factor("s", own, 1.0) == pytest.approx(2.004, abs=0.001)
    with pytest.raises(SlideError, match="invent pixels"):
        shrink_factor("s", own, 0.25)
