"""Slides that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.synthetic import SlideSpec, write_slide

SMALL = Settings(chunk=64, shard=256)
"""Small shards, so that a small slide has many."""


@pytest.fixture(scope="session")
def real_slides(shared_data: Path) -> Path:
    return shared_data / "slides"


@pytest.fixture(scope="session")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic slide of 1037 x 803 px, JPEG, two coarser levels."""
    path = tmp_path_factory.mktemp("slides") / "slide.tif"
    write_slide(path, SlideSpec(1037, 803, seed=4, tissue=0.3))
    return path


@pytest.fixture(scope="session")
def store(slide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slide converted with small shards and constant background."""
    out = tmp_path_factory.mktemp("stores")
    convert(Job(slide, "slide"), out, Settings(chunk=64, shard=256, background="constant"))
    return out / "slide.zarr"


@pytest.fixture
def noise() -> np.ndarray:
    """Random pixels, which lossless storage must keep."""
    return np.random.default_rng(0).integers(0, 256, (700, 500, 3), np.uint8)
