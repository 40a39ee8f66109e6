"""NDPI: whether the finest level that OpenSlide shows is the finest that a file has.

OpenSlide leaves out pages that are marked as out of focus; where a damaged mark makes it leave out the finest level,
what it says of magnification and pixel size is of a level that it does not show.
"""

from __future__ import annotations

from pathlib import Path

import tifffile

from ..errors import SlideError
from .tiff import MAGIC


def check_finest(path: Path, height: int, width: int) -> None:
    """Refuses an NDPI with a page larger than the level that is taken for the finest."""
    with path.open("rb") as file:
        if file.read(4) not in MAGIC:
            return  # a VMS or VMU, which is a text that names other files
        file.seek(0)
        try:
            with tifffile.TiffFile(file, name="slide", is_ndpi=True) as tif:
                sizes = [page.shape[:2] for page in tif.pages]
            rows, columns = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
            hidden = rows * columns > height * width  # also here: a damaged size may be a text
        except Exception as error:  # a damaged directory makes tifffile raise whatever it stumbles over
            raise SlideError(path, "broken NDPI: its directory holds values that cannot be; copy it again") from error
    if hidden:
        raise SlideError(
            path, f"its finest level, {columns} x {rows} px, is marked as out of focus, and OpenSlide shows one of "
            f"{width} x {height} px instead: damaged; copy it again"
        )  # fmt: skip
