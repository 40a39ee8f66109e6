"""Copies beside stores: as OME-NGFF 0.4 (zarr v2, one file a chunk) for readers such as QuPath's; associated images.

Label and macro images may show a patient's name, so they are saved only where a person asks for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Zstd
from PIL import Image

from wsi_trainer.errors import SlideError
from wsi_trainer.io.files import remove, save_picture, sha256_of, sync_folder
from wsi_trainer.io.untrusted import read_json
from wsi_trainer.slide.formats.base import CHANNELS, FILL, PLAIN, ReadOptions
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.manifest import NAME

_PARTIAL, _ASIDE = ".partial", ".aside"
_ORIGIN = "wsi_trainer"


def export_ngff04(store: Path, target: Path, progress: Callable[[int], None] = lambda pixels: None) -> bool:
    """Copies a store, chunk by chunk; the copy gets its name when it is complete.

    Args:
        store: A store that `preprocess` wrote.
        target: The folder of the copy. One of this very store is left alone; one of a store that was there before is
            replaced.
        progress: Called with the pixels that were copied.

    Returns:
        Whether there was anything to do.
    """
    if is_current(store, target):
        return False
    partial, aside = target.with_name(target.name + _PARTIAL), target.with_name(target.name + _ASIDE)
    remove(partial)
    target.parent.mkdir(parents=True, exist_ok=True)
    attributes = read_json(store / "zarr.json")["attributes"]
    group = zarr.open_group(partial, mode="w", zarr_format=2)
    group.attrs.update({**_old_attributes(attributes["ome"]), _ORIGIN: {"copy_of": sha256_of(store / NAME)}})
    with Slide.open(store, "store") as slide:
        for level in range(len(slide.levels)):
            _copy_level(slide, group, level, progress)
    sync_folder(partial)
    remove(aside)
    if target.exists():
        os.replace(target, aside)
    os.replace(partial, target)
    remove(aside)
    return True


def is_current(store: Path, target: Path) -> bool:
    """True if a copy is there, and is one of the store as it is now."""
    try:
        attributes = read_json(target / ".zattrs")
        return bool(attributes[_ORIGIN]["copy_of"] == sha256_of(store / NAME))
    except (OSError, ValueError, KeyError, TypeError):  # none, or one of which nothing is known
        return False


def _copy_level(slide: Slide, group: zarr.Group, level: int, progress: Callable[[int], None]) -> None:
    size, height, width = slide.block, slide.levels[level].height, slide.levels[level].width
    array = group.create_array(
        str(level), shape=(CHANNELS, height, width), chunks=(CHANNELS, size, size), dtype="u1", fill_value=FILL,
        compressors=[Zstd(level=3)], chunk_key_encoding={"name": "v2", "separator": "/"},
        config={"write_empty_chunks": False},
    )  # fmt: skip
    for y in range(0, height, size):
        rows = min(size, height - y)
        if not slide.empty(level, y, 0, rows, width):
            band = np.empty((CHANNELS, rows, width), np.uint8)
            slide.read_into(level, y, 0, band)
            array[:, y : y + rows] = band
        progress(rows * width)


def _old_attributes(ome: dict[str, Any]) -> dict[str, Any]:
    """The metadata as 0.4 has it: at the top, with the version in each multiscale."""
    multiscales = [{"version": "0.4", **multiscale} for multiscale in ome["multiscales"]]
    return {"multiscales": multiscales, "omero": {"version": "0.4", **ome["omero"]}}


def save_associated(slide: Path, folder: Path, options: ReadOptions = PLAIN) -> list[Path]:
    """Saves the associated images of a slide as `folder/NAME.png`.

    Only the pixels are saved: no text of the slide's file comes along.

    Raises:
        SlideError: One cannot be read or saved; says which.
    """
    saved = []
    with Slide.open(slide, options=options) as reader:
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
