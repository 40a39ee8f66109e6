"""What one step is given: a slide."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from torch import Tensor


class SlideBatch(TypedDict):
    """One slide: its pixels (uint8, or already float in 0..1), its target, and its name."""

    image: Tensor
    label: Tensor
    """As the task's `target` makes it; where each pixel has a class, the map of them, (1, 1, height, width)."""
    slide: str
    context: NotRequired[list[Tensor]]
    """The same slide at further magnifications, from fine to coarse."""
    beside: NotRequired[Tensor]
    """The target of the slide, where one is learnt beside that of each pixel."""
    tissue: NotRequired[list[Tensor]]
    """Which positions of the map count, (1, 1, h, w), for the image and for each of its context."""
    failure: NotRequired[str]
    """Why the slide could not be opened; there is no image then."""
