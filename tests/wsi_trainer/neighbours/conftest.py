"""A run on patches of small slides, and the features that `embed` writes by its encoder."""

from pathlib import Path

import pytest

from tests.wsi_trainer.fit.whole_bags import resnet, write_config, write_stores
from wsi_trainer.cli import main


@pytest.fixture(scope="package")
def on_patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of slides, of the run in `run` and of its features in `features`."""
    folder = write_stores(tmp_path_factory.mktemp("neighbours"))
    patches = {"min_tissue": 0.3}
    config = write_config(folder, folder / "manifest.csv", resnet(4, 8), patches=patches, head="abmil")
    assert main(["fit", f"--config={config}", "--train.budget=null"]) == 0
    words = [f"--config={folder / 'run' / 'config.yaml'}", f"--out={folder / 'features'}"]
    assert main(["embed", *words, f"--checkpoint={folder / 'run' / 'checkpoints' / 'best.ckpt'}"]) == 0
    return folder
