"""Pixels of each class on the training slides, and the weights made of them: against numpy and shapely."""

import csv
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import shapely
import tifffile
import torch

from tests.wsi_trainer.small import regions, rows
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import DataConfig, pixels_of
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.errors import SlideError
from wsi_trainer.fit.run import Run
from wsi_trainer.models import SegmentationTask
from wsi_trainer.regions import target
from wsi_trainer.synthetic import generate


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pixels")
    return generate(
        folder, slides=8, seed=2, workers=1, shape=(192, 230), splits={"train": 0.5, "val": 0.25, "test": 0.25}
    )


def judged(manifest: Path, split: str = "train") -> np.ndarray:
    """Pixels that are normal and lesion, of the slides of a split, by shapely."""
    found = np.zeros(2, int)
    with manifest.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["split"] == split:
                features = json.loads((manifest.parent / line["regions"]).read_text())["features"]
                area = shapely.union_all([shapely.geometry.shape(f["geometry"]).buffer(0) for f in features])
                y, x = np.mgrid[:192, :230] + 0.5
                inside = shapely.contains_xy(area, x, y).sum()
                found += [192 * 230 - inside, inside]
    return found


def test_outlines_and_label_images_are_counted_as_they_are_trained_on(manifest: Path, tmp_path: Path) -> None:
    records = [record for record in read_manifest(manifest, labelled=False) if record.split == "train"]
    task = SegmentationTask(["normal", "lesion"])
    for side in (target.SIDE, 50):  # slides in one piece, and cut into boxes
        with patch.object(target, "SIDE", side):
            assert pixels_of(records, task, DataConfig(manifest=manifest)).tolist() == judged(manifest).tolist()
    labels = np.random.default_rng(0).integers(0, 4, (192, 230), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "labels.tif", labels)
    path = tmp_path / "manifest.csv"
    path.write_text(f"slide,regions\n{records[0].path},{tmp_path / 'labels.tif'}\n")
    drawn = {"1": "fat", "2": "normal", "3": "ignore"}
    found = pixels_of(
        read_manifest(path, labelled=False),
        SegmentationTask(["normal", "fat"], drawn=drawn),
        DataConfig(manifest=path),
        progress=False,
    )
    assert found.tolist() == [np.isin(labels, (0, 2)).sum(), (labels == 1).sum()]


def test_a_slide_that_cannot_be_read_is_named_or_left_out(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.geojson").write_text("{")
    path = tmp_path / "manifest.csv"
    slides = [manifest.parent / "slides" / f"slide_000{number}.tif" for number in (0, 1)]
    path.write_text(f"slide,regions\n{slides[0]},\n{slides[1]},broken.geojson\n")
    records, task = read_manifest(path, labelled=False), SegmentationTask(["normal", "lesion"])
    with pytest.raises(SlideError, match=r"slide_0001\.tif"):
        pixels_of(records, task, DataConfig(manifest=path))
    assert pixels_of(records, task, DataConfig(manifest=path, on_error="skip")).tolist() == [192 * 230, 0]


@pytest.mark.slow
def test_a_run_weighs_by_the_pixels_of_its_training_slides(manifest: Path, tmp_path: Path) -> None:
    losses = {}
    for name in ("null", "balanced"):
        assert main(["fit", f"--out={tmp_path / name}", f"--data.manifest={manifest}", *regions(name)]) == 0
        state = torch.load(Run(tmp_path / name).checkpoint("best"), weights_only=True)["state_dict"]
        pixels = judged(manifest)
        expected = [1, 1] if name == "null" else (pixels.sum() / (2 * pixels)).tolist()
        assert state["task.weights.values"].tolist() == pytest.approx(expected)
        table = rows(next((tmp_path / name).glob("metrics/**/metrics.csv")))
        losses[name] = next(float(line["train_loss_step"]) for line in table)
    assert abs(losses["balanced"] - losses["null"]) > 1e-3
