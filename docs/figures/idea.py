"""Draws docs/assets/idea.png from a synthetic slide: `python docs/figures/idea.py`."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from wsi_trainer.synthetic import SlideSpec, SyntheticSlide

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parents[1] / "assets" / "idea.png"
TILES = 8
TILE = 256
HALO = 48
CHOSEN = (3, 3)
INK, FORWARD, BACKWARD, BACKGROUND = "#222222", "#1f5fa8", "#b8442f", "#8a8f98"


def main() -> None:
    """Draw the three panels side by side."""
    side = TILES * TILE
    slide = SyntheticSlide(SlideSpec(side, side, seed=4, positive=True))
    image = slide.render(0, 0, side, side)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=(1, 1, 1.75), layout="constrained")
    tiles(axes[0], slide, image)
    halo(axes[1], image)
    segments(axes[2])
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=110)


def tiles(axis: Axes, slide: SyntheticSlide, image: np.ndarray) -> None:
    """The slide under its tile grid; tiles of background are shaded."""
    axis.imshow(image[::4, ::4], extent=(0, TILES, TILES, 0))
    for row in range(TILES):
        for column in range(TILES):
            background = slide.is_background(row * TILE, column * TILE, TILE, TILE)
            style = {"facecolor": BACKGROUND, "alpha": 0.35} if background else {"facecolor": "none"}
            axis.add_patch(Rectangle((column, row), 1, 1, **style))
            axis.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor="white", linewidth=0.8))
    row, column = CHOSEN
    axis.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=FORWARD, linewidth=2.5))
    finish(
        axis,
        "a slide is read tile by tile",
        "grey: tiles of background; those that are\nidentical are computed once",
    )


def halo(axis: Axes, image: np.ndarray) -> None:
    """One tile with the halo it needs."""
    top, left = (index * TILE - HALO for index in CHOSEN)
    whole = TILE + 2 * HALO
    axis.imshow(image[top : top + whole, left : left + whole])
    axis.add_patch(Rectangle((HALO, HALO), TILE, TILE, fill=False, edgecolor=FORWARD, linewidth=2.5))
    finish(axis, "a tile and its halo", "each position is owned by one tile,\nso nothing is counted twice")


def finish(axis: Axes, title: str, below: str) -> None:
    """Heading and caption of a panel with an image."""
    axis.set_title(title, fontsize=12, color=INK)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel(below, fontsize=10.5, color=INK)


def segments(axis: Axes) -> None:
    """The network as segments, forward and back."""
    axis.set(xlim=(0, 10.1), ylim=(0, 6))
    axis.set_box_aspect(1 / 1.75)
    axis.axis("off")
    axis.set_title("the network is cut into segments; only what lies between them is kept", fontsize=12, color=INK)
    box(axis, 0.2, "segment", "tile by tile", FORWARD)
    box(axis, 3.8, "segment", "tile by tile", FORWARD)
    box(axis, 7.8, "head, loss", "as usual", INK)
    for left, right, label in ((2.4, 3.8, "boundary"), (6.0, 7.8, "sums kept:\npools, statistics")):
        arrow(axis, (left, 4.1), (right, 4.1), FORWARD)
        arrow(axis, (right, 3.3), (left, 3.3), BACKWARD)
        axis.text((left + right) / 2, 4.75, label, ha="center", va="bottom", fontsize=9.5, color=FORWARD)
        axis.text((left + right) / 2, 2.75, "gradients", ha="center", va="top", fontsize=9.5, color=BACKWARD)
    notes = (
        (FORWARD, "forward: every tile once; activations inside a segment are dropped"),
        (BACKWARD, "backward: recompute a tile, then its gradient; add up the gradients of all tiles"),
        (INK, "the sums are those of plain PyTorch, so output and gradients are too"),
    )
    for row, (colour, text) in enumerate(notes):
        axis.text(0.2, 1.45 - 0.55 * row, text, fontsize=10.5, color=colour)


def box(axis: Axes, left: float, title: str, below: str, colour: str) -> None:
    """A box with a title and a line under it."""
    patch = FancyBboxPatch((left, 2.6), 2.2, 2.2, boxstyle="round,pad=0,rounding_size=0.15")
    patch.set(facecolor="white", edgecolor=colour, linewidth=1.8)
    axis.add_patch(patch)
    axis.text(left + 1.1, 3.95, title, ha="center", va="center", fontsize=12, color=colour)
    axis.text(left + 1.1, 3.35, below, ha="center", va="center", fontsize=10, color=colour)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """An arrow from start to end."""
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=colour, linewidth=1.8))


if __name__ == "__main__":
    main()
