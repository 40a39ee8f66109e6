"""Slides that are worth training on, made from a seed: their label cannot be seen at low magnification."""

from .cohort import DEFAULT_SPLITS, Member, make_cohort
from .generate import generate, slide_shape, write_slide
from .slide import SyntheticSlide
from .spec import SlideSpec

__all__ = [
    "DEFAULT_SPLITS",
    "Member",
    "SlideSpec",
    "SyntheticSlide",
    "generate",
    "make_cohort",
    "slide_shape",
    "write_slide",
]
