"""A small data set and the words that train on it."""

from pathlib import Path

import pytest

from tests.wsi_trainer.fit.whole_bags import write_stores
from tests.wsi_trainer.small import QUICK, VGG
from wsi_trainer.synthetic import generate


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve slides of 256 pixels."""
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    return generate(tmp_path_factory.mktemp("slides"), slides=16, side=256, seed=1, splits=splits, workers=1)


@pytest.fixture(scope="session")
def square_slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of one size, so that they need one plan."""
    splits = {"train": 0.5, "val": 0.25, "test": 0.25}
    folder = tmp_path_factory.mktemp("square")
    return generate(folder, slides=12, seed=2, splits=splits, workers=1, shape=(256, 256))


@pytest.fixture(scope="session")
def bag_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven small slides, as stores: bags of patches."""
    return write_stores(tmp_path_factory.mktemp("bags"))


@pytest.fixture
def words(manifest: Path, tmp_path: Path) -> list[str]:
    """The command line of a small run."""
    return [f"--out={tmp_path / 'run'}", f"--data.manifest={manifest}", *VGG, *QUICK, "--train.epochs=3"]
