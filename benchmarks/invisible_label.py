"""Whether a label that a thumbnail cannot show is learnt at full resolution.

For each seed: training slides from one generator seed, and held-out slides from another, so that neither
patients nor textures are shared. The same model is trained with the same code on every pixel and on
thumbnails, and both are tested on the same held-out slides.

    python -m benchmarks.invisible_label --work DIR [--seeds 0 1 2] [--budget 64MiB]

writes one line of benchmarks/results/invisible_label.json for each seed and engine, and docs/results.md from
all lines. Finished runs are kept: a rerun continues.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.invisible_label_page import page
from wsi_trainer.fit.command import make_parser
from wsi_trainer.fit.environment import environment
from wsi_trainer.fit.one_run import run
from wsi_trainer.fit.run_folder import RunFolder, read_json, write_json
from wsi_trainer.metrics import Interval, Predictions, auc, paired_difference
from wsi_trainer.synthetic import generate

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "invisible_label.json"
PAGE = ROOT / "docs" / "results.md"
TRAINING_SEED, HELD_OUT_SEED = 1000, 2000


def make_slides(work: Path, seed: int, training: int, held_out: int, side: int) -> Path:
    """Slides of two generator seeds under one manifest."""
    rows: list[dict[str, str]] = []
    for name, base, count, splits in (
        ("fit", TRAINING_SEED, training, {"train": 0.8, "val": 0.2}),
        ("held-out", HELD_OUT_SEED, held_out, {"test": 1.0}),
    ):
        folder = work / name
        manifest = folder / "manifest.csv"
        if not manifest.is_file():
            generate(folder, slides=count, side=side, seed=base + seed, splits=splits)
        with manifest.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows.append(row | {"slide": f"{name}/{row['slide']}", "patient": f"{name}/{row['patient']}"})
    joint = work / "manifest.csv"
    with joint.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return joint


def config(manifest: Path, out: Path, seed: int, epochs: int, downsample: int, budget: str | None) -> dict[str, Any]:
    """The config of a run, as `wsi-train fit` reads it."""
    return {
        "out": str(out),
        "model": {
            "backbone": {
                "class_path": "wsi_trainer.models.VGG",
                "init_args": {"widths": [12, 24, 32], "convs": 1, "stem_stride": 2, "norm": "weight"},
            },
            "head": {"class_path": "wsi_trainer.models.GeneralisedMeanPooling"},
            "task": {"class_path": "wsi_trainer.models.BinaryTask"},
            "learning_rate": 0.003,
        },
        "data": {"manifest": str(manifest), "downsample": downsample},
        "train": {"epochs": epochs, "seed": seed, "budget": budget},
    }


def train(options: dict[str, Any]) -> tuple[Predictions, float]:
    """Run `wsi-train fit`, or read what an earlier run predicted; with the seconds that the run took."""
    folder = RunFolder(Path(options["out"]))
    timing = folder.path / "seconds.json"
    if not timing.is_file():
        folder.config.unlink(missing_ok=True)  # of a run that was interrupted
        began = time.perf_counter()
        parser = make_parser("fit", "Train a slide classifier.")
        run(parser, parser.parse_object(options), progress=False)
        write_json(timing, {"seconds": time.perf_counter() - began})
    return Predictions.read(folder.predictions("test")), read_json(timing)["seconds"]


def measure(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One line of the result: both models on one seed."""
    work = arguments.work / f"seed-{seed}"
    work.mkdir(parents=True, exist_ok=True)
    manifest = make_slides(work, seed, arguments.training, arguments.held_out, arguments.side)
    budget, shrink, epochs = arguments.budget, arguments.thumbnail, arguments.epochs
    engine = f"SFTStrategy(budget={budget!r})" if budget else "plain PyTorch"
    name = f"full-{budget or 'plain'}"
    full, seconds = train(config(manifest, work / name, seed, epochs, 1, budget))
    thumbnail, thumbnail_seconds = train(config(manifest, work / "thumbnail", seed, 5 * epochs, shrink, None))
    difference: Interval = paired_difference(full, thumbnail, auc)
    return {
        "seed": seed,
        "engine": engine,
        "training_slides": arguments.training,
        "held_out_slides": len(full),
        "held_out_patients": len(set(full.patients)),
        "side": arguments.side,
        "thumbnail_downsample": shrink,
        "full_auc": auc(full),
        "thumbnail_auc": auc(thumbnail),
        "difference": difference.to_dict(),
        "seconds": {"full": round(seconds, 1), "thumbnail": round(thumbnail_seconds, 1)},
        "environment": environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for slides and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--training", type=int, default=120, help="training and validation slides of a seed")
    parser.add_argument("--held-out", type=int, default=240, help="held-out slides of a seed")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--thumbnail", type=int, default=8, help="how much a thumbnail is shrunk")
    parser.add_argument("--budget", default=None, help="device memory for a step; without it plain PyTorch")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for seed in arguments.seeds:
        line = measure(arguments, seed)
        kept = read_json(RESULT).get("runs", [])
        same = [other for other in kept if (other["seed"], other["engine"]) != (line["seed"], line["engine"])]
        runs = sorted([*same, line], key=lambda run: (run["engine"], run["seed"]))
        write_json(RESULT, {"runs": runs})
        PAGE.write_text(page(runs), encoding="utf-8")
        print(
            f"seed {seed}, {line['engine']}: {line['full_auc']:.3f} against {line['thumbnail_auc']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
