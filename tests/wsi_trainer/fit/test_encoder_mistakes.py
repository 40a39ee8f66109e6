"""What goes wrong most often with an encoder and its patches ends with one line that says what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from tests.wsi_trainer.fit import whole_bags
from tests.wsi_trainer.fit.whole_bags import SIZE, vit
from wsi_trainer.cli import main
from wsi_trainer.models import VGG

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is absent")
SMALL = {"img_size": SIZE, "patch_size": 8, "depth": 1, "embed_dim": 8, "num_heads": 2}


def write_config(folder: Path, mpp: str = "0.5", white: bool = False) -> Path:
    """Three plain images as slides, of noise or of glass, and a config for them."""
    rows = ["slide,label,split,mpp"]
    for number, split in enumerate(("train", "train", "val")):
        noise = np.random.default_rng(number).integers(60, 200, (96, 96, 3), dtype=np.uint8)
        tifffile.imwrite(
            folder / f"s{number}.tif", np.full_like(noise, 250 + number) if white else noise, tile=(32, 32)
        )
        rows.append(f"s{number}.tif,{number % 2},{split},{mpp}")
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")
    encoder, train = vit(SIZE, SMALL), {"budget": "64MiB"}
    return whole_bags.write_config(folder, folder / "manifest.csv", encoder, patches={"min_tissue": 0}, train=train)


def message(config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a fit ends with."""
    assert main(["fit", f"--config={config}", *words]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("wsi-train: error:")
    return line


@pytest.mark.slow
def test_a_file_of_another_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(VGG((4,)).state_dict(), tmp_path / "other.pt")
    said = message(write_config(tmp_path), capsys, f"--model.pretrained={tmp_path / 'other.pt'}")
    assert "none of its" in said and "fits the network VisionTransformer; the file begins with" in said


@pytest.mark.slow
def test_a_size_that_the_encoder_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = message(write_config(tmp_path), capsys, "--model.backbone.size=48", "--data.patches.size=48")
    assert "does not take patches of 48 × 48" in said and "set model.backbone.size and data.patches.size" in said


@pytest.mark.slow
def test_a_slide_that_does_not_say_how_large_its_pixels_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = message(write_config(tmp_path, mpp=""), capsys)
    assert "s0.tif" in said and "mpp" in said and "column mpp" in said


@pytest.mark.slow
def test_a_bag_of_one_patch_is_trained_on_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(tmp_path)
    words = ["--data.patches.over=slide", "--data.patches.stride=96", "--test-on=val"]
    assert main(["fit", f"--config={config}", *words]) == 0
    assert "its bag is one patch; attention over it has nothing to choose from" in caplog.text
