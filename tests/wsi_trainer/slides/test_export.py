"""Copies for other software, and the lossy codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.slides.convert import Job, convert
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.export import export_ngff04
from wsi_trainer.slides.readers import open_reader
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.source import SlideSource
from wsi_trainer.slides.store.codec import CorruptChunk, JpegCodec, codec_of
from wsi_trainer.slides.store.manifest import find_damage

JPEG = Settings(chunk=64, shard=256, codec="jpeg")


def test_ngff_04_copy_is_valid_and_has_the_same_pixels(store: Path, tmp_path: Path) -> None:
    assert export_ngff04(store, tmp_path / "s.zarr")
    for level in range(3):
        old = zarr.open_array(tmp_path / "s.zarr" / str(level), mode="r")
        assert old.metadata.zarr_format == 2
        assert np.array_equal(old[:], zarr.open_array(store / str(level), mode="r")[:])
    chunks = list((tmp_path / "s.zarr" / "0").rglob("*"))
    assert len(chunks) < 17 * 13  # absent chunks stay absent
    with open_reader(tmp_path / "s.zarr") as reader:
        assert reader.info.vendor == "ome-zarr 0.4"
        assert reader.info.mpp == pytest.approx((0.5, 0.5))
    assert not export_ngff04(store, tmp_path / "s.zarr")


def test_ngff_04_copy_passes_the_validator(store: Path, tmp_path: Path) -> None:
    models = pytest.importorskip("ome_zarr_models", reason="extra validate is not installed")
    export_ngff04(store, tmp_path / "s.zarr")
    image = models.open_ome_zarr(zarr.open_group(tmp_path / "s.zarr", mode="r"))
    assert type(image).__module__.startswith("ome_zarr_models.v04")


def test_interrupted_export_has_no_name(store: Path, tmp_path: Path) -> None:
    def interrupt(pixels: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_ngff04(store, tmp_path / "s.zarr", interrupt)
    assert not (tmp_path / "s.zarr").exists()
    assert export_ngff04(store, tmp_path / "s.zarr")


def test_export_from_the_command_line(slide: Path, tmp_path: Path) -> None:
    assert main(["preprocess", str(slide), str(tmp_path), "--export_ngff", "0.4"]) == 0
    assert (tmp_path / "ngff-0.4" / "slide.zarr" / ".zattrs").exists()
    assert main(["verify", str(tmp_path)]) == 0


def test_jpeg_store_is_small_close_and_checked(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path / "jpeg", JPEG)
    convert(Job(slide, "s"), tmp_path / "zstd", replace(JPEG, codec="zstd"))

    def size(root: Path) -> int:
        return sum(p.stat().st_size for p in (root / "s.zarr" / "0" / "c").rglob("*") if p.is_file())

    assert size(tmp_path / "jpeg") < 0.4 * size(tmp_path / "zstd")
    lossy, exact = SlideSource(tmp_path / "jpeg" / "s.zarr"), SlideSource(tmp_path / "zstd" / "s.zarr")
    whole = Box.whole(exact.shape[2:])
    difference = (lossy.read(whole).float() - exact.read(whole).float()).abs()
    assert difference.mean() < 1.5
    assert torch.equal(lossy.read(Box((0, 0), (64, 64))), lossy.read(whole)[..., :64, :64])
    assert list(find_damage(tmp_path / "jpeg" / "s.zarr")) == []
    shard = tmp_path / "jpeg" / "s.zarr" / "0" / "c" / "0" / "1" / "1"
    data = bytearray(shard.read_bytes())
    data[300] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SlideError, match="checksum"):
        SlideSource(tmp_path / "jpeg" / "s.zarr").read(whole)


def test_interrupted_jpeg_conversion_is_the_same_in_the_end(slide: Path, tmp_path: Path) -> None:
    """Coarser levels come from the original pixels, never from stored lossy ones."""
    convert(Job(slide, "s"), tmp_path / "whole", JPEG)

    class Stop(Exception):
        pass

    for after in (1, 5, 11, 18):
        calls = 0

        def stop(done: int, total: int, after: int = after) -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise Stop

        with pytest.raises(Stop):
            convert(Job(slide, "s"), tmp_path / str(after), JPEG, progress=stop)
        convert(Job(slide, "s"), tmp_path / str(after), JPEG)
        for path in (tmp_path / "whole" / "s.zarr").rglob("*"):
            other = tmp_path / str(after) / "s.zarr" / path.relative_to(tmp_path / "whole" / "s.zarr")
            assert other.exists()
            assert path.is_dir() or other.read_bytes() == path.read_bytes()


def test_codecs_are_known_by_their_metadata() -> None:
    assert codec_of(JpegCodec(85).metadata()) == JpegCodec(85)
    foreign = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3, "checksum": True}}]
    with pytest.raises(ValueError, match="unknown codecs"):
        codec_of(foreign)
    with pytest.raises(CorruptChunk):
        JpegCodec().decode(b"\0\0\0\0nonsense", np.empty((3, 8, 8), np.uint8))
