"""Slides: TIFF in several encodings, DICOM, PNG and JPEG, and real files where they are at hand."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pydicom
import tifffile
from PIL import Image

from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import BINARY, TIFF
from tests.wsi_trainer.slides.dicom_files import write_slide as write_dicom
from wsi_trainer.slides.readers import open_reader

REAL = Path(os.environ.get("FUZZ_SLIDES") or Path(__file__).resolve().parents[3] / "shared" / "data" / "slides")
"""Real slides; `make fuzz` with FUZZ_SLIDES=FOLDER takes others."""
SIDE = 160
"""Pixels along a side that are compared."""


def pixels(height: int = 200, width: int = 230) -> np.ndarray:
    """A picture with edges and noise."""
    y, x = np.mgrid[:height, :width]
    found = np.stack([(x * 5) % 256, (y * 3) % 256, (x * y) % 256], axis=-1).astype(np.uint8)
    found[40:90, 50:120] = np.random.default_rng(1).integers(0, 256, (50, 70, 3), np.uint8)
    return found


def read(path: Path) -> Any:
    """Size, and pixels of the finest and the coarsest level."""
    with open_reader(path) as reader:
        info = reader.info
        parts = []
        for level in sorted({0, len(info.levels) - 1}):
            one = info.levels[level]
            parts.append(reader.read(level, 0, 0, min(one.height, SIDE), min(one.width, SIDE)))
            parts.append(reader.read(level, max(0, one.height - SIDE), max(0, one.width - SIDE), 64, 64))
        return info.shape, parts


def read_size(path: Path) -> Any:
    """Size alone, where nobody else decodes the pixels; they are decoded all the same."""
    return read(path)[0]


def tiffs(folder: Path) -> Sequence[Path]:
    made = []
    base = {"photometric": "rgb", "tile": (64, 64), "resolution": (20000, 20000), "resolutionunit": 3}
    for name, options in {
        "plain": {}, "deflate": {"compression": "zlib"}, "lzw": {"compression": "lzw", "predictor": True},
        "jpeg": {"compression": "jpeg"}, "zstd": {"compression": "zstd"}, "webp": {"compression": "webp"},
        "big": {"bigtiff": True, "compression": "zlib"}, "apart": {"planarconfig": "separate", "compression": "zlib"},
    }.items():  # fmt: skip
        data = pixels().transpose(2, 0, 1) if name == "apart" else pixels()
        path = folder / f"{name}.tif"
        with tifffile.TiffWriter(path, bigtiff=bool(options.pop("bigtiff", False))) as writer:
            writer.write(data, subifds=1 if name == "zstd" else 0, **base, **options)
            if name == "zstd":
                writer.write(data[::2, ::2], subfiletype=1, **base, **options)
        made.append(path)
    strips = folder / "strips.tif"
    tifffile.imwrite(strips, pixels(), photometric="rgb", rowsperstrip=16, compression="zlib")
    ome = folder / "ome.ome.tif"
    tifffile.imwrite(ome, pixels(), tile=(64, 64), photometric="rgb", ome=True,
                     metadata={"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5})  # fmt: skip
    return [*made, strips, ome]


def tiff_truth(path: Path) -> Any:
    """Each tile decoded from the file's own directory; a page whose directory does not add up is nobody's word."""
    try:
        with tifffile.TiffFile(io.BytesIO(path.read_bytes())) as tif:
            page = tif.series[0].levels[0].pages[0]
            if page.tags.get(274) is not None and page.tags[274].value != 1:
                raise Unjudged
            return (page.imagelength, page.imagewidth)
    except Unjudged:
        raise
    except Exception as error:
        raise Unjudged from error


def lossless(folder: Path) -> Sequence[Path]:
    """Tiles with a checksum of their own: zlib's and zstd's find what was changed in them."""
    path = folder / "zlib.tif"
    tifffile.imwrite(path, pixels(), photometric="rgb", tile=(64, 64), compression="zlib")
    return [path]


def lossless_truth(path: Path) -> Any:
    """The pixels as zlib and PIL's reader of TIFF have them."""
    try:
        with Image.open(path, formats=("TIFF",)) as image:
            found = np.asarray(image.convert("RGB")) if image.mode in ("RGB", "L") else None
            if found is None or image.getexif().get(274, 1) != 1:
                raise Unjudged
    except Unjudged:
        raise
    except Exception as error:
        raise Unjudged from error
    return found


def read_whole(path: Path) -> Any:
    with open_reader(path) as reader:
        height, width = reader.info.shape
        return reader.read(0, 0, 0, min(height, 2000), min(width, 2000))


def dicoms(folder: Path) -> Sequence[Path]:
    write_dicom(folder, "slide", levels=1)
    return [folder]


def dicom_truth(path: Path) -> Any:
    """Size as pydicom has it."""
    sizes = []
    try:
        for file in sorted(path.iterdir()):
            found = pydicom.dcmread(file, stop_before_pixels=True)
            sizes.append((int(found.TotalPixelMatrixRows), int(found.TotalPixelMatrixColumns)))
    except Exception as error:
        raise Unjudged from error
    return max(sizes)


def pngs(folder: Path) -> Sequence[Path]:
    Image.fromarray(pixels()).save(folder / "picture.png")
    Image.fromarray(pixels()[..., 0]).save(folder / "grey.png")
    return [folder / "picture.png", folder / "grey.png"]


def png_truth(path: Path) -> Any:
    """The rows by hand, of the two kinds that are made here; a wrong checksum of a part is nobody's word."""
    data, at, header, packed = path.read_bytes(), 8, None, b""
    while at + 12 <= len(data):
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        part = data[at + 8 : at + 8 + size]
        if zlib.crc32(name + part) != int.from_bytes(data[at + 8 + size : at + 12 + size], "big"):
            raise Unjudged
        header, packed = (part if name == b"IHDR" else header), packed + (part if name == b"IDAT" else b"")
        at += 12 + size
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:
        raise Unjudged from error


def jpegs(folder: Path) -> Sequence[Path]:
    Image.fromarray(pixels()).save(folder / "picture.jpg", quality=90)
    return [folder / "picture.jpg"]


def jpeg_truth(path: Path) -> Any:
    """The pixels as libjpeg-turbo alone has them."""
    try:
        return np.asarray(imagecodecs.jpeg8_decode(path.read_bytes()).shape[:2])
    except Exception as error:
        raise Unjudged from error


def read_shape(path: Path) -> Any:
    return np.asarray(read_whole(path).shape[:2])


def real(folder: Path) -> Sequence[Path]:
    found = []
    for path in sorted(REAL.glob("*.*")) if REAL.is_dir() else []:
        if path.is_file() and path.suffix != ".ndpi" and path.stat().st_size < 4 << 20 and path.name != "broken.svs":
            (folder / path.name).write_bytes(path.read_bytes())
            found.append(folder / path.name)
    return found


def ndpis(folder: Path) -> Sequence[Path]:
    found = []
    for path in sorted(REAL.glob("*.ndpi")) if REAL.is_dir() else []:
        (folder / path.name).write_bytes(path.read_bytes())
        found.append(folder / path.name)
    return found


TARGETS = (
    Target("tiff", tiffs, read_size, tiff_truth, TIFF),
    Target("tiff, pixels", lossless, read_whole, lossless_truth, TIFF),
    Target("dicom", dicoms, read_size, dicom_truth, BINARY),
    Target("png", pngs, read_whole, png_truth, BINARY),
    Target("jpeg", jpegs, read_shape, jpeg_truth, BINARY),
    Target("real slides", real, read_size, tiff_truth, TIFF),
    Target("real ndpi", ndpis, read_size, tiff_truth, TIFF),
)
