"""Readers are chosen by content and return the true pixels, or the true reason why not."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
import zarr

from wsi_trainer.errors import SlideError
from wsi_trainer.slide.formats.base import level_downsample
from wsi_trainer.slide.slide import Slide


def _openslide_pixels(path: Path, level: int = 0) -> np.ndarray:
    with openslide.OpenSlide(path) as slide:
        image = slide.read_region((0, 0), level, slide.level_dimensions[level])
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
def test_pixels_equal_openslide(real_slides: Path, name: str) -> None:
    path = real_slides / name
    with Slide.open(path) as reader:
        assert np.array_equal(reader.read(0, 0, 0, *reader.info.shape), _openslide_pixels(path))


@pytest.mark.parametrize("name", ["XYC_JPEG.ome.tiff", "XYC_LZW.ome.tiff"])
def test_pixels_equal_tifffile_where_openslide_refuses(real_slides: Path, name: str) -> None:
    with Slide.open(real_slides / name) as reader:
        assert np.array_equal(reader.read(0, 0, 0, 512, 512), tifffile.imread(real_slides / name))


def test_colours_of_jpeg_that_is_stored_as_rgb(real_slides: Path) -> None:
    with Slide.open(real_slides / "CMU-1-Small-Region.svs") as reader:
        assert type(reader._reader).__name__ == "TiffReader"
        glass = reader.read(0, 0, 0, 240, 240).mean((0, 1))
    assert np.abs(glass - [242, 240, 241]).max() < 2


def test_dicom_equals_the_svs_it_was_made_from(real_slides: Path) -> None:
    pytest.importorskip("wsidicom", reason="extra dicom is not installed")
    series = real_slides / "CMU-1-Small-Region_dicom"
    with Slide.open(series) as dicom, Slide.open(real_slides / "CMU-1-Small-Region.svs") as svs:
        assert dicom.info.shape == svs.info.shape == (2967, 2220)
        assert np.array_equal(dicom.read(0, 100, 50, 900, 700), svs.read(0, 100, 50, 900, 700))
        assert dicom.info.mpp == pytest.approx(svs.info.mpp)


def test_info_of_a_real_slide_holds_no_names(real_slides: Path) -> None:
    with Slide.open(real_slides / "CMU-1-Small-Region.svs") as reader:
        info = reader.info
    assert info.mpp == (0.499, 0.499)
    assert info.power == 20
    assert set(info.associated) == {"Thumbnail", "Label", "Macro"}
    # The description has the date, the user and the file's old name; none of it is kept.
    text = repr(info)
    assert "12/29/09" not in text
    assert "Filename" not in text
    assert info.details.keys() == {"compression", "tile"}


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


def test_truncated_file_names_the_byte(slide: Path, tmp_path: Path) -> None:
    data = slide.read_bytes()
    with tifffile.TiffFile(slide) as tif:
        last = max(tif.pages[0].dataoffsets)
    # Levels and directory come first in this file's order of reading; cut inside level 0's last tile.
    path = tmp_path / "cut.tif"
    path.write_bytes(data[: last + 10])
    with pytest.raises(SlideError) as caught, Slide.open(path) as reader:
        reader.read(0, 0, 0, *reader.info.shape)
    assert "ends early" in caught.value.reason or "broken TIFF" in caught.value.reason


def test_undecodable_tile_is_named(slide: Path, tmp_path: Path) -> None:
    data = bytearray(slide.read_bytes())
    with tifffile.TiffFile(slide) as tif:
        offset = tif.pages[0].dataoffsets[5]
    data[offset : offset + 40] = b"\0" * 40
    path = tmp_path / "bad.tif"
    path.write_bytes(data)
    with Slide.open(path) as reader, pytest.raises(SlideError, match=f"tile 5 at byte {offset}"):
        reader.read(0, 0, 0, *reader.info.shape)


@pytest.mark.parametrize("kind", ["rgb", "planar", "grey", "strips", "rgba"])
def test_kinds_of_tiff(tmp_path: Path, noise: np.ndarray, kind: str) -> None:
    path = tmp_path / f"{kind}.tif"
    expected = noise
    if kind == "planar":
        data = np.moveaxis(noise, 2, 0)
        tifffile.imwrite(path, data, tile=(128, 128), photometric="rgb", planarconfig="separate", compression="zlib")
    elif kind == "grey":
        expected = noise[..., :1].repeat(3, 2)
        tifffile.imwrite(path, noise[..., 0], tile=(128, 128), compression="lzw")
    elif kind == "strips":
        tifffile.imwrite(path, noise, rowsperstrip=33, photometric="rgb", compression="zstd")
    elif kind == "rgba":
        alpha = np.full((*noise.shape[:2], 1), 255, np.uint8)
        data = np.concatenate([noise, alpha], 2)
        tifffile.imwrite(path, data, tile=(128, 128), photometric="rgb", extrasamples=["unassalpha"])
    else:
        tifffile.imwrite(path, noise, tile=(112, 176), photometric="rgb", compression="deflate")
    with Slide.open(path, "tiff") as reader:
        assert np.array_equal(reader.read(0, 0, 0, 700, 500), expected)
        assert np.array_equal(reader.read(0, 123, 45, 300, 301), expected[123:423, 45:346])


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


def test_levels_of_odd_sizes_have_whole_downsamples() -> None:
    assert level_downsample((2050, 1301), 513, 326) == 4
    assert level_downsample((2050, 1301), 512, 325) == 4
    assert level_downsample((2050, 1301), 129, 82) == 16
    assert level_downsample((1000, 1000), 333, 300) == pytest.approx(3.168, abs=0.01)


def test_threads_read_what_one_thread_reads(slide: Path) -> None:
    with Slide.open(slide) as reader:
        boxes = [(0, y, x, 150, 170) for y in range(0, 1000, 90) for x in range(0, 800, 110)]
        alone = [reader.read(*box) for box in boxes]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda box: reader.read(*box), boxes))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together))


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
