"""Copies for other software, and stores of earlier versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.export import export_ngff04


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
