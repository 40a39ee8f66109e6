"""Pictures and arrays that appear whole or not at all.

Pillow and NumPy write into a file past Python. Pillow takes no notice of how much was written, so that on a disk that
is about to be full a picture would be cut short and nobody told; NumPy does, and does not say why. So both are made in
memory and written like every other file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_trainer.store.files import replace_file


def save_picture(picture: Image.Image, path: Path, kind: str, **options: Any) -> None:
    """Writes a picture under its name once it is complete; the options are Pillow's for this kind of file."""
    made = io.BytesIO()
    picture.save(made, kind, **options)
    _replace(path, made)


def save_array(values: NDArray[Any], path: Path) -> None:
    """Writes an array as NumPy's format has it, under its name once it is complete."""
    made = io.BytesIO()
    np.save(made, values, allow_pickle=False)
    _replace(path, made)


def _replace(path: Path, made: io.BytesIO) -> None:
    # One process draws a file, so that what is left of it after a kill is written over by the next.
    replace_file(path, made.getbuffer(), partial=path.with_name(f"{path.name}.part"))
