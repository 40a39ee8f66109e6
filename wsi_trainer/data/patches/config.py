"""What the patches of a bag are: the keys under `data.patches` in a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wsi_trainer.errors import UserError
from wsi_trainer.slide.geometry import is_plausible


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Square patches of each slide, which are one bag to the network: every one of them is read in each step."""

    size: int = 224
    """Pixels along a side of a patch, as the encoder takes it."""
    mpp: float | Literal["own"] = 0.5
    """Micrometres per pixel of a patch; 0.5 is what is called 20x. A store's own level of it is taken as it is,
    else a finer one is filtered down; own takes the finest level as it is.
    """
    stride: int | None = None
    """Pixels from one patch to the next: less than `size` lets them overlap, more leaves gaps; null puts them side by
    side.
    """
    over: Literal["tissue", "slide"] = "tissue"
    """Which places of the grid are taken: those with tissue, or all."""
    min_tissue: float = 0.25
    """Least share of a patch that is tissue, from 0 (any of it) to 1 (all of it), where `over` is tissue."""
    positions: Path | None = None
    """Folder with the patches of each slide, to take these instead of a grid: SLIDE.h5 or SLIDE_patches.h5 (`coords` of
    CLAM or TRIDENT), SLIDE.geojson (squares, or points in the middle of patches) or SLIDE.csv (columns x and y, the
    upper left corner), in pixels of level 0 of the slide.
    """
    turn: bool = True
    """Show each patch in one of its eight orientations in training, beside what `data.turn` does to all of a slide."""
    shift: int = 0
    """Take each patch up to this many pixels aside in training."""
    stain: float = 0.0
    """Change the amount of each stain of each patch by up to this share in training, such as 0.05."""
    tint: float = 0.0
    """Shift each colour of each patch by up to this optical density in training, such as 0.02."""

    def __post_init__(self) -> None:
        for name, least in (("size", 1), ("stride", 1), ("shift", 0), ("stain", 0), ("tint", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < float("inf"):
                raise UserError(f"data.patches.{name} is {value}; it must be {least} or more")
        if self.mpp != "own" and not is_plausible(self.mpp):
            raise UserError(
                f"data.patches.mpp is {self.mpp}; it is micrometres per pixel, such as 0.5, and not a magnification"
            )
        if not 0 <= self.min_tissue <= 1:
            raise UserError(f"data.patches.min_tissue is {self.min_tissue}; it is a share, from 0 to 1")
        if self.positions is not None and not self.positions.is_dir():
            raise UserError(f"data.patches.positions is {self.positions}; there is no such folder")
        if self.positions is not None and self.stride is not None:
            raise UserError("data.patches.positions says where patches are; leave out data.patches.stride")

    @property
    def resolution(self) -> float | None:
        """Micrometres per pixel; None is that of the finest level."""
        return None if self.mpp == "own" else self.mpp

    @property
    def step(self) -> int:
        """Pixels from one patch of the grid to the next."""
        return self.size if self.stride is None else self.stride
