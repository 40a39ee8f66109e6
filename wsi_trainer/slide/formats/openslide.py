"""Everything that OpenSlide reads: NDPI, MRXS, SCN, BIF, DICOM, Philips and the rest."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import numpy as np
import openslide
import tifffile
from PIL import Image

from wsi_trainer.errors import SlideError, UnsupportedSlide
from wsi_trainer.io.untrusted import read_bytes
from wsi_trainer.slide.formats.base import (
    PLAIN,
    WHITE,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    check_decoded,
    level_downsample,
    on_background,
)
from wsi_trainer.slide.formats.tiff import MAGIC

_CACHE = 64 << 20  # bytes of decoded tiles that one open slide keeps


def claims(path: Path, head: bytes) -> bool:
    """True if OpenSlide knows the format."""
    return path.is_file() and openslide.OpenSlide.detect_format(str(path)) is not None


class OpenSlideReader(Reader):
    """A slide read through OpenSlide."""

    takes_options = False

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        super().__init__(path, options)
        try:
            self._slide = openslide.OpenSlide(str(self._path))
        except openslide.OpenSlideUnsupportedFormatError as error:
            raise UnsupportedSlide(self._path, "OpenSlide does not know this format") from error
        except openslide.OpenSlideError as error:
            # Another reader may know more; if none does, this is the true cause.
            raise UnsupportedSlide(self._path, f"OpenSlide: {_without_path(error, self._path)}") from error
        self._slide.set_cache(openslide.OpenSlideCache(_CACHE))
        self.info = self._make_info()

    def _make_info(self) -> SlideInfo:
        properties = self._slide.properties
        for level in range(self._slide.level_count):
            sides = [_number(properties.get(f"openslide.level[{level}].tile-{side}")) for side in ("height", "width")]
            check_decoded(self._path, f"a tile of level {level}", int(4 * (sides[0] or 1) * (sides[1] or 1)))
        shapes = [(height, width) for width, height in self._slide.level_dimensions]
        if properties.get("openslide.vendor") == "hamamatsu":
            check_finest(self._path, *shapes[0])
        mpp = _number(properties.get("openslide.mpp-y")), _number(properties.get("openslide.mpp-x"))
        colour = properties.get("openslide.background-color")
        bounds = [_number(properties.get(f"openslide.bounds-{key}")) for key in ("y", "x", "height", "width")]
        inside = [int(value) for value in bounds if value is not None]
        return SlideInfo(
            levels=tuple(Level(h, w, level_downsample(shapes[0], h, w)) for h, w in shapes),
            mpp=(mpp[0], mpp[1]) if mpp[0] is not None and mpp[1] is not None else None,
            power=_number(properties.get("openslide.objective-power")),
            reader=f"openslide {openslide.__library_version__}",
            vendor=properties.get("openslide.vendor", "unknown"),
            bounds=(inside[0], inside[1], inside[2], inside[3]) if len(inside) == 4 else None,
            background=_colour(colour) if colour else WHITE,
            associated=tuple(self._slide.associated_images),
        )

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        scale = self.info.levels[level].downsample
        corner = (round(left * scale), round(top * scale))
        try:
            image = self._slide.read_region(corner, level, (right - left, bottom - top))
        except openslide.OpenSlideError as error:
            raise SlideError(self._path, f"cannot read rows {top} to {bottom}: {error}") from error
        return self._opaque(image)

    def _associated(self, name: str) -> Pixels:
        return self._opaque(self._slide.associated_images[name])

    def _opaque(self, image: Image.Image) -> Pixels:
        """RGB of an RGBA image; transparent parts, which were not scanned, show the background."""
        pixels = np.asarray(image)
        return on_background(pixels[..., :3], pixels[..., 3], self.info.background)

    def close(self) -> None:
        self._slide.close()


def _colour(text: str) -> tuple[int, int, int]:
    return int(text[0:2], 16), int(text[2:4], 16), int(text[4:6], 16)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _without_path(error: Exception, path: Path) -> str:
    return str(error).replace(str(path), path.name)


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


def check_parts(path: Path) -> str | None:
    """The missing part of an MRXS slide; None if all its files are there, as far as its index says."""
    folder = path.with_suffix("")
    if not folder.is_dir():
        return f"its data folder {folder.name}/ is not beside it: copy both"
    index = folder / "Slidedat.ini"
    if not index.is_file():
        return f"{folder.name}/Slidedat.ini is missing: copy the whole folder"
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, allow_no_value=True, interpolation=None)
    try:
        parser.read_string(read_bytes(index).decode("utf-8-sig", "replace"))
    except configparser.Error as error:
        return f"{folder.name}/Slidedat.ini is damaged: {error.message.splitlines()[0]}"
    wanted = [value for key, value in _section(parser, "DATAFILE").items() if re.fullmatch(r"file_\d+", key)]
    wanted += [value for key, value in _section(parser, "HIERARCHICAL").items() if key == "indexfile"]
    missing = [name for name in wanted if not (folder / Path(name.replace("\\", "/")).name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more of its files are" if len(missing) > 1 else " is"
        return f"{folder.name}/{missing[0]}{more} missing: copy the whole folder"
    return None


def _section(parser: configparser.ConfigParser, name: str) -> dict[str, str]:
    return {key: value or "" for key, value in parser[name].items()} if parser.has_section(name) else {}
