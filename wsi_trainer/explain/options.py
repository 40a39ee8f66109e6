"""What is mapped, and what is written of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wsi_trainer.errors import UserError
from wsi_trainer.explain.attribution import METHODS, Method

NGFF: Mapping[str, tuple[str, ...]] = {"both": ("0.5", "0.4"), "0.5": ("0.5",), "0.4": ("0.4",)}
"""What is written for each choice of `ngff`."""


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
    tiles: int = 20000
    """At most how many tiles with measurements the GeoJSON of tiles has, for QuPath's measurement maps; where a map has
    more positions with tissue, a tile is several of them. 0 for none.
    """
    ngff: Literal["both", "0.5", "0.4"] = "both"
    """Versions of OME-Zarr that the layer is written in: QuPath reads 0.4, newer software 0.5."""
    dicom: bool = False
    """Also write a Parametric Map, a Segmentation and bulk annotations for slides that are DICOM (needs highdicom: the
    extra dicom). They carry the patient's data that the slide's own files have.
    """
    originals: Path | None = None
    """Folder of the slides from which stores were made, where training used stores: DICOM results refer to these, and
    the QuPath script opens them.
    """

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(f"--method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if not 0 < self.threshold < 1:
            raise UserError(f"--threshold is {self.threshold}; it must be above 0 and below 1")
        if self.ngff not in NGFF:
            raise UserError(f"--ngff is {self.ngff!r}; it must be one of {', '.join(NGFF)}")
        for name, least in (("steps", 1), ("top", 0), ("size", 1), ("tiles", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be {least} or more")
