"""Whether training the encoder too finds a label that its frozen features do not hold.

A small encoder is trained to tell coarse textures apart, whatever fine grain lies over them: it learns to look past the
grain. Then slides are classified with weights of this encoder, by `wsi-train fit --compare frozen` and, on the same
features, with other heads: once where the label is the grain, once where it is one of the textures that the
encoder knows, which is the control. See `benchmarks.grain` for the pictures.

    python -m benchmarks.frozen_or_trained --work DIR [--seeds 0 1 2]

writes a case for each label and seed to benchmarks/results/frozen_or_trained.json, and the page
docs/frozen-or-trained.md. Runs that are finished are kept: a rerun continues.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.frozen_or_trained_page import write_page
from benchmarks.grain import COARSE, SIDE, Kind, Label, patches, write_slides
from benchmarks.keep import keep_case
from wsi_trainer.fit.command import make_parser
from wsi_trainer.fit.compare import fit_compared
from wsi_trainer.fit.one_run import run
from wsi_trainer.fit.run_folder import RunFolder, read_json
from wsi_trainer.metrics import Predictions, auc, paired_difference
from wsi_trainer.models import VGG, PatchEncoder, SlideClassifier

SPLITS = {"train": 120, "val": 40, "test": 120}
HEADS = (
    "AttentionPooling", "AveragePooling", "MaxPooling", "GeneralisedMeanPooling", "MeanMLP", "DualStreamPooling",
    "TransformerPooling",
)  # fmt: skip
FIRST = HEADS[0]
"""The head of the run that trains the encoder."""
NETWORK: dict[str, Any] = {"widths": [12, 24, 32], "convs": 1, "stem_stride": 2, "norm": "weight"}
PACKAGE = "wsi_trainer.models"


def trained_encoder(path: Path, seed: int, steps: int = 1000, batch: int = 64) -> float:
    """Weights of an encoder that tells the coarse textures apart; which share of new patches it gets right."""
    torch.manual_seed(seed)
    rng = np.random.default_rng((seed, 2))
    encoder = PatchEncoder(VGG(**NETWORK), SIDE)
    colours = SlideClassifier(backbone=encoder)
    classes = nn.Linear(encoder.out_channels, len(COARSE))
    learnt = [*encoder.parameters(), *classes.parameters()]
    optimizer = torch.optim.AdamW(learnt, 3e-3)
    right = []
    for step in range(steps + 10):
        coarse = rng.integers(0, len(COARSE), batch)
        shown = torch.from_numpy(patches(rng, coarse, rng.integers(0, 2, batch)))
        said = classes(encoder(colours.normalise(shown))[0, :, :, 0].t())
        if step >= steps:
            right.append(float((said.argmax(1).numpy() == coarse).mean()))
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(said, torch.from_numpy(coarse)).backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
    torch.save(encoder.network.state_dict(), path)
    return float(np.mean(right))


def config(work: Path, manifest: Path, seed: int, epochs: int) -> dict[str, Any]:
    """The config of the run that trains the encoder too."""
    network = {"class_path": f"{PACKAGE}.VGG", "init_args": NETWORK}
    return {
        "out": str(work / "compared"),
        "model": {
            "backbone": {"class_path": f"{PACKAGE}.PatchEncoder", "init_args": {"network": network, "size": SIDE}},
            "head": {"class_path": f"{PACKAGE}.{FIRST}"},
            "pretrained": str(work.parent / "encoder.pt"),
            "learning_rate": 0.003,
        },
        "data": {
            "manifest": str(manifest),
            "turn": False,
            "patches": {"size": SIDE, "mpp": "own", "over": "slide", "turn": False},
        },
        "train": {"epochs": epochs, "seed": seed, "budget": None, "accelerator": "cpu", "loggers": ["csv"]},
    }


def on_features(options: dict[str, Any], work: Path, head: str) -> RunFolder:
    """A run with another head on the same features."""
    folder = RunFolder(work / "heads" / head)
    if folder.evaluation("test").is_file():
        return folder
    width = NETWORK["widths"][-1]  # type: ignore[index]
    mine = {
        "out": str(folder.path),
        "model": {
            "backbone": {"class_path": f"{PACKAGE}.FrozenFeatures", "init_args": {"width": width}},
            "head": {"class_path": f"{PACKAGE}.{head}"},
            "learning_rate": 0.003,
        },
        "data": {"manifest": options["data"]["manifest"], "features": str(work / "compared" / "features")},
        "train": options["train"],
    }
    parser = make_parser("fit", "Train a head.")
    return run(parser, parser.parse_object(mine), resume="last", progress=False)


def measure(work: Path, label: Label, seed: int, epochs: int, heads: list[str]) -> dict[str, Any]:
    """One case: the run that trains the encoder against each head on frozen features."""
    own = work / label
    manifest = write_slides(own / "slides", Kind(label), seed, SPLITS)
    options = config(own, manifest, seed, epochs)
    parser = make_parser("fit", "Train both.")

    def one(each: Any) -> None:
        run(parser, each, resume="last", progress=False)

    fit_compared(parser, parser.parse_object(options), "frozen", one, "test", "last")
    compared = own / "compared"
    trained = Predictions.read(RunFolder(compared / "run").predictions("test"))
    rows = {}
    for head in dict.fromkeys((FIRST, *heads)):
        folder = RunFolder(compared / "frozen") if head == FIRST else on_features(options, own, head)
        frozen = Predictions.read(folder.predictions("test"))
        gain = paired_difference(trained, frozen, auc).to_dict()
        rows[head] = {"auc": auc(frozen), "difference": gain}
        print(label, seed, head, f"{auc(trained):.3f} against {auc(frozen):.3f}", flush=True)
    costs = read_json(compared / "comparison.json")["costs"]
    return {
        "label": label,
        "seed": seed,
        "slides": SPLITS,
        "epochs": epochs,
        "trained_auc": auc(trained),
        "frozen": rows,
        "processor_seconds": [round(cost["processor_seconds"], 1) for cost in costs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for slides and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--labels", nargs="+", default=["grain", "texture"])
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS, help="heads on features")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        work = arguments.work / f"seed{seed}"
        work.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        knows = trained_encoder(work / "encoder.pt", seed)  # the same each time
        print(f"seed {seed}: the encoder knows {knows:.3f} of the textures, {time.process_time() - began:.0f} s")
        for label in arguments.labels:
            found = measure(work, label, seed, arguments.epochs, arguments.heads)
            keep_case("frozen_or_trained", f"{label}, seed {seed}", {"encoder_accuracy": knows, **found})
    write_page()


if __name__ == "__main__":
    main()
