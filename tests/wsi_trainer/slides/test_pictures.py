"""PNG, JPEG and plain TIFF with a stated resolution are slides, too."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError, UnknownResolution
from wsi_trainer.slide.formats.base import Range, ReadOptions
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.settings import Settings

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
    with pytest.raises(UnknownResolution, match="source_mpp"):
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


def test_colour_that_stands_for_transparent(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(tmp_path / "s.png", transparency=0)
    with Slide.open(tmp_path / "s.png") as reader:
        assert (reader.read(0, 0, 0, 64, 64) == 255).all()
        assert reader.info.changes


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
