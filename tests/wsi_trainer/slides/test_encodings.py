"""Every way in which a TIFF stores one image of 8 bits: equal to the reference, or refused for its true reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile

from wsi_trainer.errors import SlideError
from wsi_trainer.slide.slide import Slide

RGB = np.random.default_rng(6).integers(0, 256, (300, 410, 3), np.uint8)
SMOOTH = np.indices((300, 410)).sum(0).astype(np.uint8)[..., None] + np.array([0, 60, 120], np.uint8)
TILE = {"tile": (64, 96)}

# What tifffile, which decodes a whole file at once, makes of the same file.
AS_TIFFFILE: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "RGB": (RGB, {"photometric": "rgb", **TILE}),
    "RGB, big-endian": (RGB, {"photometric": "rgb", "byteorder": ">", **TILE}),
    "RGB, BigTIFF": (RGB, {"photometric": "rgb", "bigtiff": True, **TILE}),
    "RGB, tiles of 16": (RGB, {"photometric": "rgb", "tile": (16, 16)}),
    "RGB, one large tile": (RGB, {"photometric": "rgb", "tile": (512, 512)}),
    "RGB, strips": (RGB, {"photometric": "rgb", "rowsperstrip": 7}),
    "RGB, one strip": (RGB, {"photometric": "rgb", "rowsperstrip": 300}),
    "RGB, LZW": (RGB, {"photometric": "rgb", "compression": "lzw", "predictor": True, **TILE}),
    "RGB, deflate": (RGB, {"photometric": "rgb", "compression": "zlib", "predictor": True, **TILE}),
    "RGB, zstd": (RGB, {"photometric": "rgb", "compression": "zstd", **TILE}),
    "RGB, packed": (RGB, {"photometric": "rgb", "compression": "packbits", **TILE}),
    "RGB, planar": (np.moveaxis(RGB, 2, 0), {"photometric": "rgb", "planarconfig": "separate", **TILE}),
    "grey": (RGB[..., 0], {"photometric": "minisblack", **TILE}),
    "grey, strips": (RGB[..., 0], {"photometric": "minisblack", "compression": "lzw"}),
    "JPEG 444": (SMOOTH, {"photometric": "rgb", "compression": "jpeg", "subsampling": (1, 1), **TILE}),
    "JPEG 420": (SMOOTH, {"photometric": "rgb", "compression": "jpeg", "subsampling": (2, 2), **TILE}),
    "JPEG, strips": (SMOOTH, {"photometric": "rgb", "compression": "jpeg", "rowsperstrip": 64}),
    "JPEG, grey": (SMOOTH[..., 0], {"photometric": "minisblack", "compression": "jpeg", **TILE}),
    "JPEG XL": (RGB, {"photometric": "rgb", "compression": "jpegxl", "compressionargs": {"lossless": True}, **TILE}),
}
# What OpenSlide reads: colours that are not RGB.
AS_OPENSLIDE: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "white is zero": (RGB[..., 0], {"photometric": "miniswhite", **TILE}),
    "palette": (
        RGB[..., 0],
        {"photometric": "palette", "colormap": (np.arange(768, dtype=np.uint16) * 85).reshape(3, 256), **TILE},
    ),
    "CMYK": (np.dstack([RGB, RGB[..., :1]]), {"photometric": "separated", **TILE}),
    "Lab": (RGB, {"photometric": "cielab", **TILE}),
}
REFUSED: dict[str, tuple[np.ndarray, dict[str, Any], str]] = {
    "float": (RGB[..., 0].astype("f4"), {"photometric": "minisblack", **TILE}, "float32"),
    "two colours": (RGB[..., 0] > 99, TILE, "1 bits"),
    "LERC": (RGB, {"photometric": "rgb", "compression": "lerc", **TILE}, "compression LERC is not read"),
    "LZMA": (RGB, {"photometric": "rgb", "compression": "lzma", **TILE}, "compression LZMA is not read"),
    "JPEG XR": (RGB, {"photometric": "rgb", "compression": "jpegxr", **TILE}, "compression JPEGXR.* is not read"),
    "palette, strips": (
        RGB[..., 0],
        {"photometric": "palette", "colormap": np.zeros((3, 256), "u2")},
        "stored as PALETTE; expected RGB",
    ),
    "CMYK with transparency": (
        np.dstack([RGB, RGB[..., :2]]),
        {"photometric": "separated", "extrasamples": ["unassalpha"], **TILE},
        "5 samples a pixel, stored as SEPARATED",
    ),
    "RGB and two more": (
        np.dstack([RGB, RGB[..., :2]]),
        {"photometric": "rgb", "extrasamples": ["unspecified"] * 2, **TILE},
        "5 samples a pixel, stored as RGB",
    ),
    "complex": (RGB[..., 0].astype("c8"), {"photometric": "minisblack", **TILE}, "complex64; expected 8 bits"),
}


def _three(pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim == 3 and pixels.shape[0] == 3:
        pixels = np.moveaxis(pixels, 0, 2)
    return pixels if pixels.ndim == 3 else pixels[..., None].repeat(3, 2)


@pytest.mark.parametrize("kind", AS_TIFFFILE)
def test_equal_to_tifffile(tmp_path: Path, kind: str) -> None:
    data, options = AS_TIFFFILE[kind]
    tifffile.imwrite(tmp_path / "s.tif", data, **options)
    expected = _three(tifffile.imread(tmp_path / "s.tif"))
    with Slide.open(tmp_path / "s.tif") as reader:
        assert np.array_equal(reader.read(0, 0, 0, 300, 410), expected)
        assert np.array_equal(reader.read(0, 50, 90, 130, 200), expected[50:180, 90:290])
        planes = np.zeros((3, 130, 200), np.uint8)
        reader.read_into(0, 50, 90, planes)
        assert np.array_equal(planes, expected[50:180, 90:290].transpose(2, 0, 1))
        assert reader.info.changes == ()


@pytest.mark.parametrize("kind", AS_OPENSLIDE)
def test_equal_to_openslide(tmp_path: Path, kind: str) -> None:
    data, options = AS_OPENSLIDE[kind]
    tifffile.imwrite(tmp_path / "s.tif", data, **options)
    with openslide.OpenSlide(tmp_path / "s.tif") as slide:
        expected = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))
    with Slide.open(tmp_path / "s.tif") as reader:
        assert np.array_equal(reader.read(0, 0, 0, 300, 410), expected)
        assert reader.info.changes != ()


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(tmp_path: Path, kind: str) -> None:
    data, options, reason = REFUSED[kind]
    tifffile.imwrite(tmp_path / "s.tif", data, **options)
    with pytest.raises(SlideError, match=reason):
        Slide.open(tmp_path / "s.tif")


def test_levels_in_subdirectories(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "s.tif") as writer:
        writer.write(RGB, subifds=2, photometric="rgb", **TILE)
        for step in (2, 4):
            writer.write(RGB[::step, ::step], subfiletype=1, photometric="rgb", **TILE)
    with Slide.open(tmp_path / "s.tif") as reader:
        assert [level.downsample for level in reader.info.levels] == [1, 2, 4]
        assert np.array_equal(reader.read(2, 0, 0, 75, 103), RGB[::4, ::4])
        assert reader.info.notes == ()
