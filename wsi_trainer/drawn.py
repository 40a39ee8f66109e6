"""Pictures that appear whole or not at all.

Pillow writes into a file past Python and takes no notice of how much was written: on a disk that is about to be full a
picture would be cut short, and nobody told. So it is made in memory and written like every other file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from wsi_trainer.slides.store.files import replace_file


def save_picture(picture: Image.Image, path: Path, kind: str, **options: Any) -> None:
    """Writes a picture under its name once it is safe on the disk; the options are Pillow's for this kind of file."""
    made = io.BytesIO()
    picture.save(made, kind, **options)
    replace_file(path, made.getvalue())
