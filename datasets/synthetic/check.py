"""Shows at which magnification the label can be seen: ``python datasets/synthetic/check.py DATASET``.

Patches of lesions and of decoys (the same places on negative slides) are cut from the slides; a small network
is trained to tell them apart at several downsamplings, on the training patients, and tested on the others.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
import openslide
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.metrics import roc_auc_score
from torch import nn

PATCH = 96


def _patches(slide: openslide.OpenSlide, centres: np.ndarray) -> list[np.ndarray]:
    corners = (centres - PATCH // 2).round().astype(int)
    return [np.asarray(slide.read_region((x, y), 0, (PATCH, PATCH)))[..., :3] for x, y in corners]


def _centres(root: Path, row: dict[str, str]) -> np.ndarray:
    """Where the slide has lesions or, if it is negative, where it would have them."""
    folder = "lesions" if row["label"] == "1" else "decoys"
    regions = json.loads((root / folder / (Path(row["slide"]).stem + ".geojson")).read_text())
    return np.array([np.mean(region["geometry"]["coordinates"][0][:-1], 0) for region in regions["features"]])


def collect(root: Path, per_slide: int = 12) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Patches and labels of each split; lesions from positive slides, decoys from negative ones."""
    rng = np.random.default_rng(0)
    found: dict[str, tuple[list[np.ndarray], list[int]]] = {"train": ([], []), "test": ([], [])}
    rows = list(csv.DictReader((root / "manifest.csv").open()))
    for row in track(rows, "cutting patches"):
        images, labels = found["train" if row["split"] == "train" else "test"]
        with openslide.OpenSlide(root / row["slide"]) as slide:
            middle = _centres(root, row)
            jitter = rng.uniform(-20, 20, (per_slide, 2))
            images += _patches(slide, middle[rng.integers(len(middle), size=per_slide)] + jitter)
        labels += [int(row["label"])] * per_slide
    return {split: (np.stack(images), np.array(labels)) for split, (images, labels) in found.items()}


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 12, 1), (12, 24, 2), (24, 24, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 1))


def _tensor(images: np.ndarray, factor: int) -> torch.Tensor:
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    return nn.functional.avg_pool2d(x, factor) - 0.7


def auc(patches: dict[str, tuple[np.ndarray, np.ndarray]], factor: int, seed: int, epochs: int = 5) -> float:
    """The test AUC of a small network trained on patches that were downsampled by ``factor``."""
    torch.manual_seed(seed)
    net = _network()
    x, y = _tensor(patches["train"][0], factor), torch.from_numpy(patches["train"][1]).float()
    epochs = epochs if factor == 1 else 6 * epochs  # small images are cheap: no excuse of too short a training
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(x[batch])[:, 0], y[batch]).backward()
            optimizer.step()
    net.eval()
    with torch.inference_mode():
        scores = net(_tensor(patches["test"][0], factor))[:, 0]
    return float(roc_auc_score(patches["test"][1], scores.numpy()))


def main() -> None:
    """Prints mean and spread of both kinds of patches and the AUC, for each downsampling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, metavar="DATASET")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    patches = collect(options.root)
    table = Table("downsampling", "lesion mean", "decoy mean", "lesion s.d.", "decoy s.d.", "AUC (seeds)")
    every = np.concatenate([patches["train"][0], patches["test"][0]])
    labels = np.concatenate([patches["train"][1], patches["test"][1]])
    for factor in (1, 2, 4, 8, 16):
        x = _tensor(every, factor) * 255 + 0.7 * 255
        spread = x.std((1, 2, 3))
        aucs = " ".join(f"{auc(patches, factor, seed):.2f}" for seed in range(options.seeds))
        cells = [
            f"{float(v):.2f}"
            for v in (
                x[labels == 1].mean(),
                x[labels == 0].mean(),
                spread[labels == 1].mean(),
                spread[labels == 0].mean(),
            )
        ]
        table.add_row(str(factor), *cells, aucs)
    Console().print(f"{len(patches['train'][1])} training and {len(patches['test'][1])} test patches", table)


if __name__ == "__main__":
    main()
