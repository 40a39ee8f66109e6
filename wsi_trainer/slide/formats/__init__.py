"""Formats of slides: a reader for each behind one base class, and the choice of it by content, not by name.

A reader that cannot read an encoding says `UnsupportedSlide`, and the next one is asked. One that knows why a slide
must not be read raises `SlideError`, which ends the search: another reader would show something else than is there.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from wsi_trainer.errors import SlideError, UnsupportedSlide
from wsi_trainer.io.untrusted import Unreadable, open_file
from wsi_trainer.slide.formats.base import PLAIN, Reader, ReadOptions, check_size
from wsi_trainer.slide.formats.dicom import check_tiles, is_dicom, problem_of
from wsi_trainer.slide.formats.openslide import check_parts

# In the order in which they are asked. A module is imported only when a slide is opened.
READERS = (
    ("store", "StoreReader"),
    ("omezarr", "OmeZarrReader"),
    ("tiff", "TiffReader"),
    ("openslide", "OpenSlideReader"),
    ("dicom", "DicomReader"),
    ("picture", "PictureReader"),
)
SLIDE_ENDINGS = (
    ".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".tif", ".tiff", ".btf", ".qptiff", ".vms", ".vmu", ".svslide", ".dcm",
    ".czi", ".zarr.zip", ".ozx",
)  # fmt: skip
"""Endings of files that are meant to be slides, also of formats that no reader knows: that is worth a report."""
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg")
"""Endings of files that may be slides, or lie beside them."""
_READ_DICOM = {"openslide", "dicom"}

# TIFFs that need more than pasting tiles (overlaps, several regions, focal planes) go to OpenSlide.
_PLAIN_TIFF = {None, "aperio", "generic-tiff"}


def open_format(path: Path | str, reader: str | None = None, options: ReadOptions = PLAIN) -> Reader:
    """Opens the file of a slide.

    Args:
        path: A file, a DICOM folder or an OME-Zarr store.
        reader: The name of a reader, to ask this one only: store, omezarr, tiff, openslide, dicom or picture.
        options: Channel and range of a slide that is more than one image of 8 bits.

    Raises:
        SlideError: It cannot be read; the message gives the reason of each reader that was asked.
    """
    path = Path(path)
    if not path.exists():
        raise SlideError(path, "does not exist")
    head = _head(path)
    if path.suffix.lower() == ".mrxs" and (missing := check_parts(path)):
        raise SlideError(path, missing)
    refusals: list[UnsupportedSlide] = []
    for name, kind in READERS:
        if reader not in (None, name):
            continue
        module = importlib.import_module(f"{__package__}.{name}")
        if reader is None and not (module.claims(path, head) and _suits(name, path)):
            continue
        if name in _READ_DICOM and (path.is_dir() or is_dicom(path)):
            problem = problem_of(path)
            if problem is not None:
                raise SlideError(path, problem)
            check_tiles(path)
        try:
            opened = _opened(getattr(module, kind), path, options, refusals)
            check_size(path, *opened.info.shape)
            return opened
        except UnsupportedSlide as error:
            refusals.append(error)
    reasons = [refusal.reason for refusal in refusals]
    raise SlideError(path, "; ".join(dict.fromkeys(reasons)) or _unknown(path, head))


def _opened(kind: Any, path: Path, options: ReadOptions, refusals: list[UnsupportedSlide]) -> Reader:
    opened: Reader = kind(path, options)
    if opened.takes_options:
        return opened
    if options.channel is not None:
        opened.close()
        raise SlideError(path, f"read with {opened.info.reader} as RGB; --channel has nothing to choose in it")
    changes = [refusal.change for refusal in refusals if refusal.change]
    if changes:  # its library converts colours
        opened.info = replace(opened.info, changes=(*opened.info.changes, changes[0]))
    return opened


def _head(path: Path) -> bytes:
    if path.is_dir():
        return b""
    try:
        with open_file(path) as file:
            return file.read(512)
    except Unreadable as error:
        raise SlideError(path, error.reason) from error
    except OSError as error:
        raise SlideError(path, f"cannot be opened: {error.strerror}") from error


def _suits(name: str, path: Path) -> bool:
    if name != "tiff":
        return True
    import openslide

    vendor: Any = openslide.OpenSlide.detect_format(str(path))
    return vendor in _PLAIN_TIFF


def _unknown(path: Path, head: bytes) -> str:
    """A guess at content that no reader knows."""
    if path.is_dir():
        return "a folder that is neither an OME-Zarr store nor a DICOM series"
    if not head:
        return "the file is empty"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive; unpack it, and give what is in it"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the file itself; fetch it with `git lfs pull`"
    if head.lstrip()[:1] == b"<":
        return "a web page or XML and not an image; the download may have failed"
    return f"not an image that any reader knows: it starts with the bytes {head[:8].hex(' ')} ({head[:8]!r})"
