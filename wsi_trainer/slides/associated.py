"""Label and macro images, which are saved only where a person asks for them: they may show the patient's name."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

from wsi_trainer.drawn import save_picture

from .errors import SlideError
from .readers import open_reader
from .readers.options import PLAIN, ReadOptions

FOLDER = "associated"


def save_associated(slide: Path, folder: Path, options: ReadOptions = PLAIN) -> list[Path]:
    """Saves the associated images of a slide as `folder/NAME.png`.

    Only the pixels are saved: no text of the slide's file comes along.

    Raises:
        SlideError: One cannot be read or saved; says which.
    """
    saved = []
    with open_reader(slide, options=options) as reader:
        for name in reader.info.associated:
            path = folder / f"{re.sub(r'[^0-9A-Za-z]+', '-', name).strip('-').lower() or 'image'}.png"
            try:
                pixels = reader.associated(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                save_picture(Image.fromarray(pixels), path, "PNG")
            except SlideError:
                raise
            except Exception as error:  # each library raises its own kinds
                raise SlideError(slide, f"the associated image {name!r} cannot be copied: {error}") from error
            saved.append(path)
    return saved
