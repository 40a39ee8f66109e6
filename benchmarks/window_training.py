"""Training by windows or on whole images: `python -m benchmarks.window_training NUCLEI [--variants ...]`.

Does it matter what a network was trained on, and how it is run? The same small U-Net is trained twice: on whole images,
and on the four quarters of each, as a batch. Steps, seeds, images, their order and flips are the same; so a step has
the same pixels in both, and its loss is their mean. What differs is what GroupNorm, squeeze and excitation and
attention see, and the padding along the cuts. Each network is then run on the test images both ways: by windows of a
quarter that overlap by half, blended with Gaussian weights by MONAI's function, and whole, by `lightning_plugin.infer`.
`local` has a LayerNorm over the channels of each position in place of the GroupNorm, and nothing else that sees more
than its neighbours: it is the control, which only padding can tell apart.

Scores are the Dice of nuclei, and the F1 of nuclei found, which are those that share half of their union with an
outlined one. The data are the stained images of BBBC038 (Data Science Bowl 2018, CC0) in a folder with `nuclei.csv`:
two of three are trained on, and the third is for the test. Nothing was chosen by test scores.

Writes benchmarks/results/window_training.json: a case is a variant, what it was trained on, and a seed. Cases
that are there are not run again. Prints the tables of docs/windows.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.keep import keep_case
from lightning_plugin import TiledModule, infer
from tests.conftest import RESULTS

NAME = "window_training"
#: The norm, and whether there are gates and attention.
VARIANTS = {"local": ("local", False), "group": ("group", False), "all": ("group", True)}
TRAINED = "windows", "whole"
SCORES = "dice", "f1"
SEEDS = 0, 1, 2
WIDTHS = 16, 32, 48
#: Background, inside of a nucleus, its border.
CLASSES = 3
BUDGET = "6MiB"
Labels = NDArray[np.int64]


class LocalNorm(nn.LayerNorm):
    """A LayerNorm over the channels of each position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width // 4), nn.SiLU(), nn.Linear(width // 4, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        gates: Tensor = self.layers(x.mean((2, 3)))
        return x * gates[:, :, None, None]


class Attention(nn.Module):
    """Each position asks all others, in four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = LocalNorm(width)
        self.ask, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        asked: Tensor = self.ask(self.norm(x))
        q, k, v = (t.unflatten(1, (4, -1)).flatten(3).transpose(2, 3) for t in asked.chunk(3, 1))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)
        return x + self.out(seen.reshape(x.shape))


def block(inputs: int, width: int, norm: str, gates: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, width):
        layers += [
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GroupNorm(4, width) if norm == "group" else LocalNorm(width),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers, *([Gate(width)] if gates else []))


class UNet(nn.Module):
    """A small U-Net of half the image's resolution."""

    def __init__(self, norm: str, gates: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTHS[0], 4, stride=2, padding=1)
        pairs = zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)
        self.down = nn.ModuleList(block(a, b, norm, gates) for a, b in pairs)
        self.middle = Attention(WIDTHS[-1]) if gates else nn.Identity()
        pairs = zip(WIDTHS[::-1], WIDTHS[-2::-1], strict=False)
        self.up = nn.ModuleList(block(a + b, b, norm, gates) for a, b in pairs)
        self.head = nn.ConvTranspose2d(WIDTHS[0], CLASSES, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for i, layers in enumerate(self.down):
            x = layers(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        x = self.middle(kept.pop())
        for layers in self.up:
            x = layers(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x)  # type: ignore[no-any-return]


def read(folder: Path) -> list[tuple[Tensor, Labels]]:
    """The stained images (1, 3, height, width) with the number of each pixel's nucleus."""
    from skimage.io import imread

    found = []
    with (folder / "nuclei.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "stained":
                path = folder / row["image"]
                pixels = torch.from_numpy(imread(path)[..., :3].copy()).permute(2, 0, 1)[None]
                labels = imread(path.with_name(f"{path.stem}_nuclei.png")).astype(np.int64)
                found.append((pixels / 127.5 - 1, labels))
    return found


def classes_of(labels: Labels) -> Tensor:
    """Border is where a neighbour of a nucleus's pixel is not of it."""
    from scipy import ndimage

    inside = ndimage.minimum_filter(labels, 3) == ndimage.maximum_filter(labels, 3)
    return torch.from_numpy(np.where(labels == 0, 0, np.where(inside, 1, 2)))


def quarters(x: Tensor) -> Tensor:
    """The four quarters of an image as a batch."""
    return torch.cat([part for half in x.chunk(2, -2) for part in half.chunk(2, -1)])


def train(variant: str, trained: str, seed: int, data: list[tuple[Tensor, Tensor]], steps: int) -> nn.Module:
    torch.manual_seed(seed)
    net = UNet(*VARIANTS[variant])
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    draw = np.random.default_rng(seed)
    order = np.concatenate([draw.permutation(len(data)) for _ in range(math.ceil(steps / len(data)))])[:steps]
    for index in order:
        x, y = data[index]
        flips = [axis for axis in (-2, -1) if draw.random() < 0.5]
        x, y = x.flip(flips), y.flip(flips)[None]
        if trained == "windows":
            x, y = quarters(x), quarters(y)
        loss = F.cross_entropy(net(x), y, torch.tensor([1.0, 1.0, 2.0]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return net.eval()


def scores(logits: Tensor, labels: Labels) -> tuple[float, float]:
    """Dice of nuclei, and F1 of nuclei that share half of their union with an outlined one."""
    from scipy import ndimage
    from skimage.segmentation import expand_labels

    classes = logits[0].argmax(0).numpy()
    mask, truth = classes > 0, labels > 0
    dice = 2 * (mask & truth).sum() / max(mask.sum() + truth.sum(), 1)
    numbers, count = ndimage.label(classes == 1)
    numbers = np.where(mask, expand_labels(numbers, 2), 0)  # borders belong to the nearest inside
    _, outlined = np.unique(labels, return_inverse=True)
    outlined = outlined.reshape(labels.shape)
    both = np.zeros((count + 1, outlined.max() + 1))
    np.add.at(both, (numbers, outlined), 1)
    union = both.sum(1, keepdims=True) + both.sum(0, keepdims=True) - both
    matched = int((2 * both > union)[1:, 1:].sum())  # more than half: no nucleus is matched twice
    return float(dice), 2 * matched / max(count + outlined.max(), 1)


def run(variant: str, trained: str, seed: int, images: list[tuple[Tensor, Labels]], steps: int) -> dict[str, Any]:
    """Train a network, and run it both ways on the test images."""
    from monai.inferers import sliding_window_inference

    began = time.process_time()
    learned = [(x, classes_of(y)) for i, (x, y) in enumerate(images) if i % 3 != 2]
    net = train(variant, trained, seed, learned, steps)
    seconds = time.process_time() - began
    tiled = TiledModule(net, budget=BUDGET)
    found: dict[str, list[float]] = {f"{score} by {way}": [] for score in SCORES for way in TRAINED}
    with torch.no_grad():
        for x, labels in images[2::3]:
            window = x.shape[2] // 2, x.shape[3] // 2
            by = {"windows": sliding_window_inference(x, window, 4, net, overlap=0.5, mode="gaussian")}
            by["whole"] = torch.zeros_like(by["windows"])
            infer(tiled, x, by["whole"])
            for way, logits in by.items():
                for score, value in zip(SCORES, scores(logits, labels), strict=True):
                    found[f"{score} by {way}"].append(round(value, 4))
    about = {"variant": variant, "trained on": trained, "seed": seed, "steps": steps, "images": len(learned)}
    weights = sum(p.numel() for p in net.parameters())
    return {**about, "weights": weights, "budget": BUDGET, "processor seconds of training": seconds, **found}


def rows() -> list[str]:
    """The table of the page: means with the standard deviation of the seeds, and the differences from windows in both.

    Their interval is of 95 %, by 10,000 draws of the test images, the same for both; seeds are averaged.
    """
    cases = json.loads((RESULTS / f"{NAME}.json").read_text())["cases"].values()
    lines = []
    for variant in VARIANTS:
        usual: dict[str, NDArray[np.float64]] = {}
        for trained in TRAINED:
            its = [c for c in cases if (c["variant"], c["trained on"]) == (variant, trained)]
            for way in TRAINED:
                cells = [variant, trained, way]
                for score in SCORES:
                    values = np.array([c[f"{score} by {way}"] for c in its])
                    differs = values.mean(0) - usual.setdefault(score, values.mean(0))
                    draws = np.random.default_rng(0).integers(0, len(differs), (10_000, len(differs)))
                    low, high = np.quantile(differs[draws].mean(1), (0.025, 0.975))
                    interval = f"{differs.mean():+.3f} ({low:+.3f} to {high:+.3f})" if differs.any() else "–"
                    cells += [f"{values.mean():.3f} ± {values.mean(1).std(ddof=1):.3f}", interval]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nuclei", type=Path, help="the folder of nuclei.csv")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=280)
    parser.add_argument("--again", action="store_true", help="run cases that are there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / f"{NAME}.json"
    images = read(options.nuclei)
    for seed in SEEDS:
        for variant in options.variants:
            for trained in TRAINED:
                case = f"{variant}, trained on {trained}, seed {seed}"
                known = json.loads(path.read_text())["cases"] if path.exists() else {}
                if case not in known or options.again:
                    found = run(variant, trained, seed, images, options.steps)
                    keep_case(NAME, case, found)
                    means = {k: round(float(np.mean(v)), 3) for k, v in found.items() if isinstance(v, list)}
                    print(case, round(found["processor seconds of training"]), means, flush=True)
    print("network | trained on | run | Dice | differs | F1 | differs", *rows(), sep="\n")


if __name__ == "__main__":
    main()
