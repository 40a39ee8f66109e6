"""What is mapped, and what is written of it."""

from __future__ import annotations

from dataclasses import dataclass

from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import METHODS, Method


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """The options of `wsi-train heatmap`."""

    method: Method = "activation"
    """activation: gradient × activation of the features before the head; attention: the weights of an attention head;
    gradient: gradient × (pixel − glass), summed over each position; integrated: integrated gradients from glass.
    """
    target: str | None = None
    """The class that the maps speak for; by default the positive or highest one of two or of an order, else the
    first.
    """
    steps: int = 16
    """Steps from glass to the slide, of integrated gradients; each is a forward and a backward pass."""
    threshold: float = 0.5
    """Where outlines are drawn in the GeoJSON file, as a share of the slide's largest value."""
    top: int = 3
    """How many regions with the largest values are cropped as PNG; 0 for none."""
    size: int = 512
    """Side of a cropped region, in pixels of the slide as the model sees it."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if not 0 < self.threshold < 1:
            raise UserError(f"--threshold is {self.threshold}; it must be above 0 and below 1")
        for name, least in (("steps", 1), ("top", 0), ("size", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be {least} or more")
