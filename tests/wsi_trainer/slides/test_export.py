"""Copies for other software, and stores of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from wsi_trainer.cli import main
from wsi_trainer.data.dataset import open_image
from wsi_trainer.errors import UserError
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.chunks import CorruptChunk, ZstdCodec, codec_of
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.export import export_ngff04
from wsi_trainer.store.manifest import read_manifest, write_manifest
from wsi_trainer.store.settings import Settings
from wsi_trainer.view.contents import of_slides
from wsi_trainer.view.scene import Scene


def test_ngff_04_copy_is_valid_and_has_the_same_pixels(store: Path, tmp_path: Path) -> None:
    assert export_ngff04(store, tmp_path / "s.zarr")
    for level in range(3):
        old = zarr.open_array(tmp_path / "s.zarr" / str(level), mode="r")
        assert old.metadata.zarr_format == 2
        assert np.array_equal(old[:], zarr.open_array(store / str(level), mode="r")[:])
    chunks = list((tmp_path / "s.zarr" / "0").rglob("*"))
    assert len(chunks) < 17 * 13  # absent chunks stay absent
    with Slide.open(tmp_path / "s.zarr") as reader:
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
    assert main(["preprocess", str(slide), str(tmp_path), "--export-ngff", "0.4"]) == 0
    assert (tmp_path / "ngff-0.4" / "slide.zarr" / ".zattrs").exists()
    assert main(["verify", str(tmp_path)]) == 0


def test_stores_of_jpeg_chunks_are_refused_with_the_way_out(slide: Path, tmp_path: Path) -> None:
    """Earlier versions wrote them, with a codec that no other reader has."""
    convert(Job(slide, "s"), tmp_path / "old", Settings(chunk=64, shard=256, tissue="none"))
    store = tmp_path / "old" / "s.zarr"
    chunks = [{"name": "transpose", "configuration": {"order": [1, 2, 0]}},
              {"name": "jpeg", "configuration": {"quality": 90}}, {"name": "crc32c"}]  # fmt: skip
    for path in store.glob("*/zarr.json"):
        array = json.loads(path.read_text())
        array["codecs"][0]["configuration"]["codecs"] = chunks
        path.write_text(json.dumps(array))
    manifest = read_manifest(store)
    write_manifest(store, {**manifest["settings"], "header": {**manifest["settings"]["header"], "codec": "jpeg"}}, {})
    for opened in (open_image, Slide.open, lambda path: Scene(of_slides(path)).about(0)):
        with pytest.raises(UserError, match="--codec jpeg, which is no longer read; convert the slide again"):
            opened(store)


def test_codecs_are_known_by_their_metadata() -> None:
    assert codec_of(ZstdCodec(5).metadata()) == ZstdCodec(5)
    foreign = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3, "checksum": True}}]
    with pytest.raises(ValueError, match="unknown codecs"):
        codec_of(foreign)
    with pytest.raises(CorruptChunk):
        ZstdCodec().decode(np.frombuffer(b"\0\0\0\0nonsense", np.uint8), np.empty((3, 8, 8), np.uint8))
