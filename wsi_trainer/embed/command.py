"""The command `embed`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from wsi_trainer.data import DataConfig, check_files
from wsi_trainer.embed.layouts import Layout
from wsi_trainer.embed.slides import Embedder
from wsi_trainer.errors import UserError
from wsi_trainer.explain.heatmaps import device_of
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.events import at_work
from wsi_trainer.fit.parser import check_bags, instantiate, limits_imports, make_parser, parse
from wsi_trainer.fit.trainer import precision_of
from wsi_trainer.foreign.arrays import import_h5py
from wsi_trainer.models import SlideClassifier
from wsi_trainer.models.checkpoint import load_weights
from wsi_trainer.models.low_rank import merge_low_rank
from wsi_trainer.terminal import say

BATCH = 64
"""Patches that are encoded at a time."""


@limits_imports
def embed(words: Sequence[str]) -> int:
    """Write the features of the patches of slides."""
    parser = make_parser(
        "embed",
        "Write the features of each slide's patches (data.patches) by an encoder that is not trained (model.backbone "
        "PatchEncoder, with its weights as model.pretrained), one HDF5 file for each slide of the manifest, in the "
        "folder --out. Files that are there are kept; a slide that was cut short goes on where it was.",
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="patches that are encoded at a time")
    parser.add_argument(
        "--layout",
        type=Layout,
        default="trident",
        help="whose files: trident, which CLAM and MIL-Lab read too, or stamp",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=None,
        help="a checkpoint of a run with this config, instead of model.pretrained: features of the encoder it trained",
    )
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    if model.pretrained is None and options.checkpoint is None:
        raise UserError(
            "embed needs model.pretrained, or --checkpoint: features of an encoder with random weights say nothing"
        )
    with at_work(Path(options.out)):
        write_features(model, data, config, Path(options.out), options.layout, options.batch, options.checkpoint)
    return 0


def write_features(
    model: SlideClassifier,
    data: DataConfig,
    config: TrainConfig,
    out: Path,
    layout: Layout = "trident",
    batch: int = BATCH,
    checkpoint: Path | None = None,
) -> None:
    """Write the features of all slides of the manifest.

    Args:
        model: Its backbone is the encoder, which takes its weights from `pretrained`.
        data: Which slides, and which patches of them.
        config: Where, and in which precision.
        out: The folder; files that are there are kept.
        layout: Whose files.
        batch: Patches that are encoded at a time.
        checkpoint: Weights of a run, instead of `pretrained`.
    """
    if data.patches is None:
        raise UserError("embed needs data.patches: which patches of a slide are encoded")
    check_bags(model, data)
    if batch < 1:
        raise UserError(f"--batch is {batch}; it must be 1 or more")
    import_h5py(out)
    console = Console()
    if checkpoint is not None:
        load_weights(model, checkpoint)
        merge_low_rank(model.backbone)
    else:
        for line in str(model.load_pretrained()).splitlines():
            say(console, line)
    records = data.records(labelled=False)
    check_files(records)
    out.mkdir(parents=True, exist_ok=True)
    precision = precision_of(config)
    model.to(device_of(config), torch.float64 if precision.startswith("64") else torch.float32)
    half, skip = precision.startswith("bf16"), data.on_error == "skip"
    embedder = Embedder(model, data.patches, out, layout, batch, half, skip)
    for slide, count in embedder.embed(records):
        if count:
            say(console, f"{slide}: {count} patches")
    say(console, f"features of {len(records) - len(embedder.skipped)} slides, {embedder.kept} of them kept: {out}")
    for slide, reason in embedder.skipped.items():
        say(console, f"left out: {slide}: {reason}")
