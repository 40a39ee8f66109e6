"""Patches that were chosen elsewhere: the file of a slide in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from wsi_trainer.data.patches.chosen import Chosen
from wsi_trainer.data.patches.hdf5 import read_coords
from wsi_trainer.data.patches.outlines import read_outlines
from wsi_trainer.errors import UserError
from wsi_trainer.io.tables import read_table
from wsi_trainer.slide.errors import SlideError
from wsi_trainer.store.identity import plain_name


def chosen_patches(folder: Path, slide: Path) -> Chosen:
    """What the file of a slide says; an error where there is none, or more than one."""
    name = plain_name(slide)
    paths = {folder / ending.format(name): read for ending, read in READERS.items()}
    there = [path for path in paths if path.is_file()]
    if not there:
        raise SlideError(slide, f"data.patches.positions has none of {', '.join(path.name for path in paths)}")
    if len(there) > 1:
        raise SlideError(slide, f"{folder} has {' and '.join(path.name for path in there)}; leave one of them there")
    return paths[there[0]](there[0])


def read_csv(path: Path) -> Chosen:
    """The columns x and y of a table: upper left corners."""
    table = read_table(path)
    table.need("x", "y")
    points = np.empty((len(table.rows), 2))
    for number, (line, row) in enumerate(table.rows):
        try:
            points[number] = float(row["x"]), float(row["y"])
        except ValueError as error:
            raise UserError(f"{path}, line {line}: x is {row['x']!r} and y is {row['y']!r}; give numbers") from error
    return Chosen(path, points, middle=False)


READERS: dict[str, Callable[[Path], Chosen]] = {
    "{}.h5": read_coords,
    "{}_patches.h5": read_coords,
    "{}.geojson": read_outlines,
    "{}.csv": read_csv,
}
"""What reads which file, by its name."""
