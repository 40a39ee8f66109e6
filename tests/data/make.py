"""Write the files of a `files.zip` with the version of the program that is installed.

    python tests/data/make.py FOLDER

A store of each slide, a config, a run of one epoch, a plan, a state_dict, features, and in `expected.json` the numbers
that a later version has to read from them. Each version has a folder, without slides and pictures, which is not written
again: `0.x` was written at version 0.1.0, `1.0` at the commit of the release 1.0.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import h5py
import torch
import yaml
from torch import nn

from lightning_plugin import TiledModule, make_plan
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.models import ResNet
from wsi_trainer.slide import Slide
from wsi_trainer.synthetic import SlideSpec, write_slide

SPLITS = ("train", "train", "val", "val", "test", "test")
FIT = {
    "out": "run",
    "model": {
        "backbone": {"name": "vgg", "widths": [4, 8], "convs": 1, "norm": "batch"},
        "head": {"name": "abmil", "hidden": 8},
        "task": "binary",
        "magnifications": 2,
        "share_backbone": False,
        "finetune": "all",
        "batchnorm_over": "tissue",
        "pool_over": "tissue",
        "learning_rate": 0.003,
    },
    "data": {
        "manifest": "manifest.csv",
        "stores": "stores",
        "extra_downsamples": [4],
        "flip_rotate": True,
        "stain": 0.1,
    },
    "train": {"epochs": 1, "budget": "4MiB", "accelerator": "cpu", "resamples": 50, "precision": "32-true"},
}
RESNET = {"class_path": "wsi_trainer.models.ResNet", "init_args": {"widths": [4, 8], "norm": "group"}}
EMBED = {
    "model": {"backbone": {"name": "patches", "size": 32, "network": RESNET}, "pretrained": "encoder.pt"},
    "data": {"manifest": "manifest.csv", "stores": "stores", "patches": {"size": 32, "min_tissue": 0.3}},
    "train": {"accelerator": "cpu", "precision": "32-true"},
}


def network() -> nn.Module:
    """Network of the plan; its weights are the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


def command(*words: str) -> None:
    """Run a command of wsi-train, and end with it where it fails."""
    if code := main(list(words)):
        raise SystemExit(f"wsi-train {' '.join(words)} ended with exit code {code}")


def write_all(folder: Path) -> None:
    """Write the folder's files, and `expected.json` with their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    Path("slides").mkdir(exist_ok=True)
    for number in range(1, 1 + len(SPLITS)):
        spec = SlideSpec(64 + 8 * number, 72, seed=3, slide=number, patient=number, positive=bool(number % 2))
        write_slide(Path("slides") / f"s{number}.tif", spec)
    rows = [f"s{n}.tif,{n % 2},patient-{n},{split}" for n, split in enumerate(SPLITS, 1)]
    Path("slides/manifest.csv").write_text("\n".join(["slide,label,patient,split", *rows]) + "\n")
    command("preprocess", "slides/manifest.csv", "stores", "--levels", "2")
    shutil.copy("slides/manifest.csv", "manifest.csv")
    Path("config.yaml").write_text(yaml.safe_dump(FIT, sort_keys=False))
    Path("embed.yaml").write_text(yaml.safe_dump(EMBED, sort_keys=False))
    torch.manual_seed(1)
    command("fit", "--config=config.yaml")
    torch.save(ResNet((4, 8), norm="group").state_dict(), "encoder.pt")
    command("embed", "--config=embed.yaml", "--out=features")
    net, image = network(), torch.rand(1, 3, 256, 192)
    plan = make_plan(net, tuple(image.shape), budget="1MiB", device="cpu")
    Path("plan.json").write_text(plan.to_json())
    tiled = TiledModule(net, plan=plan)
    loss = tiled(image).square().sum()
    loss.backward()
    torch.save(nn.ModuleDict({"net": tiled}).state_dict(), "weights.pt")
    run = Run.open("run")
    with h5py.File("features/s4.h5") as file:
        features = file["features"][:]
    with Slide.open("stores/s4.zarr") as slide:
        pixels = slide.read(0, 0, 0, 72, 72)
    scores = run.scores["test"]["slide"]
    expected = {
        "plan": {"peak_bytes": plan.peak_bytes, "segments": len(plan.segments), "loss": loss.item()},
        "store": {"sum": int(pixels.sum()), "shape": list(pixels.shape)},
        "features": {"shape": list(features.shape), "sum": float(features.sum())},
        "run": {
            "prediction": run.predict("stores/s4.zarr"),
            "scores": {name: scores[name]["value"] for name in ("auc", "brier")},
        },
    }
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
