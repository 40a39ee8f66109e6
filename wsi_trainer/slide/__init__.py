"""The slide: opened once, read in any format, in one set of coordinates.

slide.py       `Slide`: an open file, upright and perhaps cropped; `ScaledImage`: at a coarser resolution, box by box
formats/       a reader for each format; stores of this package are one
views.py       `Image` and `Bag`: what the engine reads
augment.py     `Augmented`: either of them, turned, shifted and stained
tissue.py      tissue masks; rules.py: pen marks, blur and the like, which are taken out of them
geometry.py    coordinates and the size of a pixel
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsi_trainer.slide.slide import Slide

__all__ = ["Slide"]


def __getattr__(name: str) -> Any:
    """`Slide` on demand: what it is made of imports parts of this package."""
    if name != "Slide":
        raise AttributeError(name)
    from wsi_trainer.slide import slide

    return slide.Slide
