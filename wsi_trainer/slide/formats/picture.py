"""PNG and JPEG, as cameras on microscopes save them: decoded whole, once, within the limit of memory."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from wsi_trainer.errors import SlideError
from wsi_trainer.slide.formats.base import (
    PLAIN,
    WHITE,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    check_bits,
    check_decoded,
    check_size,
    on_background,
    to_bytes,
)

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
# What is converted without changing a value; all else (CMYK, YCCK, ...) has colours that would have to be guessed.
_MODES = {"1": "L", "L": "L", "P": "RGBA", "LA": "RGBA", "RGB": "RGB", "RGBA": "RGBA"}
_ORIENTATION = 0x0112  # of Exif
_opening = threading.Lock()


def claims(path: Path, head: bytes) -> bool:
    """True if the first bytes are those of a PNG or a JPEG; the index file of an MRXS slide begins like one."""
    return path.is_file() and head.startswith((_PNG, _JPEG)) and path.suffix.lower() != ".mrxs"


class PictureReader(Reader):
    """A PNG or a JPEG. Its file says nothing that can be trusted of how large a pixel is.

    Attributes:
        orientation: how the picture is turned, as Exif counts it; it is read as it is stored.
    """

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        super().__init__(path, options)
        self._lock = threading.Lock()
        self._pixels: Pixels | None = None
        with self._opened() as image:
            kind, self._mode = str(image.format), image.mode
            width, height = image.size
            depth = _png_depth(self._path) if kind == "PNG" else 8
            check_size(self._path, height, width)
            check_decoded(self._path, f"a {kind} of {width} x {height} px", height * width * 4 * max(1, depth // 8))
            # Where a PNG has its Exif behind the pixels, nothing of this reads it, and it is left as it is stored.
            turned = image.getexif().get(_ORIENTATION, 1) if kind == "JPEG" or "exif" in image.info else 1
            self.orientation = turned if isinstance(turned, int) and 1 <= turned <= 8 else 1
            has_alpha = "A" in self._mode or "transparency" in image.info
            if getattr(image, "n_frames", 1) > 1 and kind == "PNG":
                raise SlideError(self._path, "an animation of several pictures; expected one")
        self._scale = check_bits(self._path, np.dtype("uint16" if depth == 16 else "uint8"), options)
        if self._scale is None and self._mode not in _MODES:
            raise SlideError(self._path, f"colours are stored as {self._mode}; save it as RGB")
        if options.channel is not None:
            raise SlideError(self._path, "a picture; --channel has nothing to choose in it")
        changes = [f"uint16 {self._scale} to 8 bits"] if self._scale is not None else []
        if has_alpha:
            changes.append("transparent parts in the background's colour")
        self.info = SlideInfo(
            levels=(Level(height, width),),
            mpp=None,
            reader=f"pillow {PIL.__version__}",
            vendor=kind.lower(),
            details={"compression": kind},
            changes=tuple(changes),
        )

    def _opened(self) -> Image.Image:
        """The picture, of which only the header is read; its size is checked here, so Pillow need not."""
        with _opening, warnings.catch_warnings():
            largest, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                return Image.open(self._path, formats=("PNG", "JPEG"))
            except Exception as error:  # Pillow raises many kinds on what is damaged
                raise SlideError(self._path, f"broken picture: {_reason(error)}") from error
            finally:
                Image.MAX_IMAGE_PIXELS = largest

    def _decoded(self) -> Pixels:
        with self._lock:
            if self._pixels is None:
                try:
                    values = self._values()
                except Exception as error:  # each library raises its own kinds on what is damaged
                    raise SlideError(self._path, f"cannot be decoded: {_reason(error)}") from error
                if self._scale is not None:
                    has_alpha = values.ndim == 3 and values.shape[2] in (2, 4)
                    values = to_bytes(values, self._scale, has_alpha=has_alpha)
                self._pixels = _three(values)
            return self._pixels

    def _values(self) -> NDArray[Any]:
        if self.info.vendor == "png":  # Pillow cuts 16 bits to 8, and fills up rows that are missing
            return np.asarray(imagecodecs.png_decode(self._path.read_bytes()))
        with self._opened() as image:
            return np.asarray(image.convert(_MODES[image.mode]))

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        return self._decoded()[top:bottom, left:right]

    def close(self) -> None:
        self._pixels = None


def _three(pixels: NDArray[Any]) -> Pixels:
    """RGB of grey, of grey and RGB with transparency, and of RGB."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[2] in (2, 4):
        pixels = on_background(pixels[..., :-1], pixels[..., -1], WHITE)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _png_depth(path: Path) -> int:
    """Bits of a sample: Pillow cuts 16 to 8 without a word."""
    with path.open("rb") as file:
        return file.read(25)[24]


def _reason(error: Exception) -> str:
    known = ("cannot identify", "Truncated File Read")
    return "its header is damaged or cut off" if not str(error) or str(error).startswith(known) else str(error)
