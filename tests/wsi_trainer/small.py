"""Words of the command line for small runs, and tables that commands have written."""

from __future__ import annotations

import csv
from pathlib import Path

VGG = ["--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[4,8]", "--model.backbone.convs=1"]
UNET = ["--model.backbone=wsi_trainer.models.UNet", "--model.backbone.widths=[4,8]"]
REGIONS = "{{class_path: SegmentationTask, init_args: {{classes: [normal, lesion], class_weights: {}}}}}"
QUICK = ["--train.epochs=1", "--train.accelerator=cpu", "--train.budget=null", "--train.resamples=20"]


def regions(class_weights: str = "null") -> list[str]:
    """A run on drawn regions, judged by their Dice."""
    return [*UNET, f"--model.task={REGIONS.format(class_weights)}", *QUICK, "--train.monitor=val_dice"]


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
