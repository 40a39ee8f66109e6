"""Readers are chosen by content and return the true pixels, or the true reason why not."""

from __future__ import annotations

import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import openslide
import pytest
import tifffile
import zarr
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError, UnknownResolution
from wsi_trainer.slide.formats.base import Range, ReadOptions, level_downsample
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert


def _openslide_pixels(path: Path, height: int, width: int) -> np.ndarray:
    with openslide.OpenSlide(path) as slide:
        image = slide.read_region((0, 0), 0, (width, height))
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    "name",
    [
        "CMU-1-Small-Region.svs",
        "tiled-three-levels-no-mpp.tif",
        "yb10kx5k.zstd.tiff",
        "test3-DAPI-2-(387).ndpi",
    ],
)
def test_pixels_equal_openslide(real_slides: Path, name: str, count: Callable[..., int]) -> None:
    path = real_slides / name
    with Slide.open(path) as reader:
        height, width = (min(side, count(ci=3000, full=10**9)) for side in reader.info.shape)
        assert np.array_equal(reader.read(0, 0, 0, height, width), _openslide_pixels(path, height, width))


@pytest.mark.parametrize("name", ["XYC_JPEG.ome.tiff", "XYC_LZW.ome.tiff"])
def test_pixels_equal_tifffile_where_openslide_refuses(real_slides: Path, name: str) -> None:
    with Slide.open(real_slides / name) as reader:
        assert np.array_equal(reader.read(0, 0, 0, 512, 512), tifffile.imread(real_slides / name))


def test_dicom_equals_the_svs_it_was_made_from(real_slides: Path) -> None:
    pytest.importorskip("wsidicom", reason="extra dicom is not installed")
    series = real_slides / "CMU-1-Small-Region_dicom"
    with Slide.open(series) as dicom, Slide.open(real_slides / "CMU-1-Small-Region.svs") as svs:
        assert dicom.info.shape == svs.info.shape == (2967, 2220)
        assert np.array_equal(dicom.read(0, 100, 50, 900, 700), svs.read(0, 100, 50, 900, 700))
        assert dicom.info.mpp == pytest.approx(svs.info.mpp)


def test_content_decides_and_not_the_name(slide: Path, tmp_path: Path) -> None:
    shutil.copy(slide, tmp_path / "slide.ndpi")
    with Slide.open(tmp_path / "slide.ndpi") as reader:
        assert type(reader._reader).__name__ == "TiffReader"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"II*\0\x08\0\0\0" + b"\xff" * 8, "broken TIFF"),
        (b"\x89PNG\r\n\x1a\n", "broken picture"),
        (b"\x89PN\r\n\x1a\n", "89 50 4e 0d"),
    ],
)
def test_reason_for_what_is_no_slide(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "slide.svs"
    path.write_bytes(content)
    with pytest.raises(SlideError, match=r"slide\.svs") as caught:
        Slide.open(path)
    assert reason in caught.value.reason


def test_missing_slide_and_foreign_folder(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="does not exist"):
        Slide.open(tmp_path / "none.svs")
    with pytest.raises(SlideError, match="neither an OME-Zarr store nor a DICOM series"):
        Slide.open(tmp_path)


def test_undecodable_tile_is_named(slide: Path, tmp_path: Path) -> None:
    data = bytearray(slide.read_bytes())
    with tifffile.TiffFile(slide) as tif:
        offset = tif.pages[0].dataoffsets[5]
    data[offset : offset + 40] = b"\0" * 40
    path = tmp_path / "bad.tif"
    path.write_bytes(data)
    with Slide.open(path) as reader, pytest.raises(SlideError, match=f"tile 5 at byte {offset}"):
        reader.read(0, 0, 0, *reader.info.shape)


def test_missing_tiles_and_the_outside_are_background(slide: Path) -> None:
    with Slide.open(slide) as reader:
        height, width = reader.info.shape
        whole = reader.read(0, 0, 0, height, width)
        around = reader.read(0, -30, -20, height + 70, width + 60)
        assert np.array_equal(around[30 : 30 + height, 20 : 20 + width], whole)
        around[30 : 30 + height, 20 : 20 + width] = 255
        assert (around == 255).all()
        assert (reader.read(0, height, 0, 10, 10) == 255).all()


def test_sparse_tiles_are_background(tmp_path: Path, noise: np.ndarray) -> None:
    def tiles():
        for number in range(6 * 4):
            yield None if number == 5 else noise[:128, :128]

    path = tmp_path / "sparse.tif"
    tifffile.imwrite(path, tiles(), shape=(700, 500, 3), dtype=np.uint8, tile=(128, 128), photometric="rgb")
    with Slide.open(path, "tiff") as reader:
        assert (reader.read(0, 128, 128, 128, 128) == 255).all()
        assert np.array_equal(reader.read(0, 0, 0, 128, 128), noise[:128, :128])


def test_ngff_04_of_other_software(tmp_path: Path, noise: np.ndarray) -> None:
    """A version 0.4 store (zarr v2) with five axes and the extra group that bioformats2raw puts around it."""
    root = zarr.open_group(tmp_path / "s.zarr", mode="w", zarr_format=2)
    root.attrs["bioformats2raw.layout"] = 3
    image = root.create_group("0")
    data = np.moveaxis(noise, 2, 0)[None, :, None]
    image.create_array("0", data=data, chunks=(1, 1, 1, 256, 256))
    half = data[..., ::2, ::2]
    image.create_array("1", data=half, chunks=(1, 1, 1, 256, 256))
    units = {"z": "micrometer", "y": "micrometer", "x": "millimeter"}
    axes = [{"name": n, "type": "space" if n in "zyx" else "channel", "unit": units.get(n)} for n in "tczyx"]
    scales = [[1, 1, 1, 0.25, 0.00025], [1, 1, 1, 0.5, 0.0005]]
    datasets = [
        {"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": s}]} for i, s in enumerate(scales)
    ]
    image.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    with Slide.open(tmp_path / "s.zarr") as reader:
        assert reader.info.vendor == "ome-zarr 0.4"
        assert reader.info.mpp == pytest.approx((0.25, 0.25))
        assert [level.downsample for level in reader.info.levels] == [1, 2]
        assert np.array_equal(reader.read(0, 10, 20, 300, 400), noise[10:310, 20:420])
        assert np.array_equal(reader.read(1, 0, 0, 350, 250), noise[::2, ::2])


# -- pNG, JPEG and plain TIFF with a stated resolution are slides, too


RNG = np.random.default_rng(3)
PIXELS = RNG.integers(0, 256, (700, 500, 3), np.uint8)


@pytest.mark.parametrize("kind", ["png", "jpg", "tif"])
def test_converted_with_a_stated_resolution(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "slides" / f"s.{kind}"
    path.parent.mkdir()
    if kind == "tif":
        tifffile.imwrite(path, PIXELS, photometric="rgb")
    else:
        Image.fromarray(PIXELS).save(path)
    expected = np.asarray(Image.open(path).convert("RGB"))
    with pytest.raises(UnknownResolution, match="--source-mpp"):
        convert(Job(path, "s"), tmp_path, Settings(tissue="none"))
    options = ["--source-mpp", "0.5", "--tissue", "none", "--workers", "1"]
    assert main(["preprocess", str(path.parent), str(tmp_path / "out"), *options]) == 0
    with Slide.open(tmp_path / "out" / "s.zarr") as reader:
        assert np.array_equal(reader.read(0, 0, 0, 700, 500), expected)
        assert reader.info.mpp == (0.5, 0.5)


def test_boxes_of_a_picture(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "s.png")
    with Slide.open(tmp_path / "s.png") as reader:
        around = pickle.loads(pickle.dumps(reader)).read(0, -10, -20, 740, 560)
        assert np.array_equal(around[10:710, 20:520], PIXELS)
        assert (around[:10] == 255).all()
        assert (around[:, 520:] == 255).all()
        with pytest.raises(IndexError):
            reader.read(1, 0, 0, 1, 1)


MODES = {
    "1": Image.fromarray(PIXELS[..., 0]).convert("1"),
    "L": Image.fromarray(PIXELS[..., 0]),
    "P": Image.fromarray(PIXELS).convert("P"),
    "LA": Image.fromarray(PIXELS[..., :2].copy(), "LA"),
    "RGBA": Image.fromarray(np.concatenate([PIXELS, PIXELS[..., :1]], 2)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_png(tmp_path: Path, mode: str) -> None:
    image = MODES[mode]
    image.save(tmp_path / "s.png")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    with Slide.open(tmp_path / "s.png") as reader:
        found = reader.read(0, 0, 0, 700, 500)
        assert np.abs(found.astype(int) - np.asarray(white.convert("RGB"))).max() <= 1  # Pillow blends in integers
        assert bool(reader.info.changes) is (mode in ("LA", "RGBA"))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bits_are_never_cut(tmp_path: Path, channels: int) -> None:
    data = RNG.integers(0, 65536, (64, 80, channels), np.uint16)
    if channels == 4:
        data[..., 3] = 65535
    (tmp_path / "s.png").write_bytes(imagecodecs.png_encode(data.squeeze()))
    with pytest.raises(SlideError, match="uint16"):
        Slide.open(tmp_path / "s.png")
    with Slide.open(tmp_path / "s.png", options=ReadOptions(to_8bit=Range(0, 65535))) as reader:
        expected = np.rint(np.broadcast_to(data[..., :3], (64, 80, 3)) / 257).astype(np.uint8)
        assert np.array_equal(reader.read(0, 0, 0, 64, 80), expected)


@pytest.mark.parametrize("kind", ["cmyk", "animation", "cut", "header"])
def test_pictures_that_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.png"
    image = Image.fromarray(PIXELS)
    if kind == "cmyk":
        image.convert("CMYK").save(path, "JPEG")
        reason = "colours are stored as CMYK"
    elif kind == "animation":
        image.save(path, save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_180)])
        reason = "an animation"
    else:
        image.save(path)
        path.write_bytes(path.read_bytes()[: 5000 if kind == "cut" else 20])
        reason = "cannot be decoded" if kind == "cut" else "header is damaged or cut off"
    with pytest.raises(SlideError, match=reason), Slide.open(path) as reader:
        reader.read(0, 0, 0, 700, 500)


def test_rows_that_are_missing_are_not_filled_up(tmp_path: Path) -> None:
    """A header of 2000 rows over the data of 700, with a good checksum: Pillow would add black ones."""
    path = tmp_path / "s.png"
    Image.fromarray(PIXELS).save(path)
    data = bytearray(path.read_bytes())
    struct.pack_into(">I", data, 20, 2000)
    struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    path.write_bytes(data)
    with Slide.open(path) as reader, pytest.raises(SlideError, match="cannot be decoded"):
        reader.read(0, 0, 0, 10, 10)


def test_resolution_of_a_picture_is_not_believed(tmp_path: Path) -> None:
    """Cameras write 72 or 300 dpi of a screen or a page into every file."""
    Image.fromarray(PIXELS).save(tmp_path / "s.png", dpi=(50800, 50800))
    with Slide.open(tmp_path / "s.png") as reader:
        assert reader.info.mpp is None


# -- every way in which a TIFF stores one image of 8 bits: equal to the reference, or refused for its true reason


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


def test_levels_of_odd_sizes_have_whole_downsamples() -> None:
    assert level_downsample((2050, 1301), 513, 326) == 4
    assert level_downsample((2050, 1301), 512, 325) == 4
    assert level_downsample((2050, 1301), 129, 82) == 16
    assert level_downsample((1000, 1000), 333, 300) == pytest.approx(3.168, abs=0.01)
