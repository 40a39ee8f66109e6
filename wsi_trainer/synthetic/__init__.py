"""Slides that are worth training on, made from a seed: their label cannot be seen at low magnification."""

from .cohort import DEFAULT_SPLITS, Member, generate, make_cohort, slide_shape, write_slide
from .hospital import hospital
from .slide import SlideSpec, SyntheticSlide

__all__ = [
    "DEFAULT_SPLITS",
    "Member",
    "SlideSpec",
    "SyntheticSlide",
    "generate",
    "hospital",
    "make_cohort",
    "slide_shape",
    "write_slide",
]
