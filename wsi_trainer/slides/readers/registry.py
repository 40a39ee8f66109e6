"""Which reader opens a slide: decided by its content, not by its name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..errors import SlideError, UnsupportedSlide
from .protocol import Reader

# In the order in which they are asked. A module is imported only when a slide is opened.
READERS = (
    ("omezarr", "OmeZarrReader"),
    ("tiff", "TiffReader"),
    ("openslide", "OpenSlideReader"),
    ("dicom", "DicomReader"),
)

# TIFFs that need more than pasting tiles (overlaps, several regions, focal planes) go to OpenSlide.
_PLAIN_TIFF = {None, "aperio", "generic-tiff"}


def open_reader(path: Path | str, reader: str | None = None) -> Reader:
    """Opens a slide.

    Args:
        path: A file, a DICOM folder or an OME-Zarr store.
        reader: The name of a reader, to ask this one only: omezarr, tiff, openslide or dicom.

    Raises:
        SlideError: It cannot be read; the message gives the reason of each reader that was asked.
    """
    path = Path(path)
    if not path.exists():
        raise SlideError(path, "does not exist")
    head = _head(path)
    reasons = []
    for name, kind in READERS:
        if reader not in (None, name):
            continue
        module = importlib.import_module(f"{__package__}.{name}")
        if reader is None and not (module.claims(path, head) and _suits(name, path)):
            continue
        try:
            opened: Reader = getattr(module, kind)(path)
            return opened
        except UnsupportedSlide as error:
            reasons.append(error.reason)
    raise SlideError(path, "; ".join(dict.fromkeys(reasons)) or _unknown(path, head))


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise SlideError(path, f"cannot be opened: {error.strerror}") from error


def _suits(name: str, path: Path) -> bool:
    if name != "tiff":
        return True
    import openslide

    vendor: Any = openslide.OpenSlide.detect_format(str(path))
    return vendor in _PLAIN_TIFF


def _unknown(path: Path, head: bytes) -> str:
    """What the content looks like, where no reader knows it."""
    if path.is_dir():
        return "a folder that is neither an OME-Zarr store nor a DICOM series"
    if not head:
        return "the file is empty"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the file itself; fetch it with `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return "a web page or XML and not an image; the download may have failed"
    return f"not an image that any reader knows: it starts with the bytes {head[:8].hex(' ')} ({head[:8]!r})"
