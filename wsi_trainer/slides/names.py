"""What a slide is called: its file without the extension, and different from all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wsi_trainer.errors import UserError

from .readers import omezarr


def plain_name(slide: Path) -> str:
    """The name of a slide without its extension, however long that is."""
    name = slide.name if slide.name not in ("", "..") else slide.resolve().name  # "." and ".." are folders, too
    is_series = slide.is_dir() and not omezarr.claims(slide, b"")  # the name of such a folder has no extension
    return name if is_series else without_extension(name)


def without_extension(name: str) -> str:
    """The name of a file, or its path, without the extension."""
    for ending in (".ome.tiff", ".ome.tif", ".ome.zarr"):
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return name.removesuffix(Path(name).suffix)


def different_names(slides: Sequence[Path], root: Path | None) -> list[str]:
    """A different name for each slide, the same on every run; a folder's structure is kept."""
    folders = [slide.parent.relative_to(root) if root and slide != root else Path() for slide in slides]
    short = [(folder / plain_name(slide)).as_posix() for folder, slide in zip(folders, slides)]
    counts = Counter(short)
    names = [
        name if counts[name] == 1 else (folder / slide.name).as_posix()
        for name, folder, slide in zip(short, folders, slides)
    ]
    again = [name for name, count in Counter(names).items() if count > 1]
    if again:
        raise UserError(f"several slides are named {again[0]}; rename them, or convert them to several folders")
    return names
