"""The command `export`: the encoder that a run has trained, as a file of weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.one_run import instantiate, parse
from wsi_trainer.fit.parser import make_parser
from wsi_trainer.fit.reach import within_reach
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.fit.training import load_weights
from wsi_trainer.models import FrozenFeatures, PatchEncoder
from wsi_trainer.models.low_rank import merge_low_rank
from wsi_trainer.models.weights import write_weights
from wsi_trainer.terminal import say


@within_reach
def export(words: Sequence[str]) -> int:
    """Write the weights of the backbone that a run has trained."""
    parser = make_parser(
        "export",
        "Write the weights of the backbone that a run has trained, under the names of the network itself: for "
        "model.pretrained, for timm or transformers, or for your own code. What was learnt in low rank "
        "(model.trained: lora) is merged into the layers, so that the file is one of the plain network.",
    )
    parser.add_argument(
        "--file", type=Path, required=True, help="the file to write: NAME.pt for torch.load, or NAME.safetensors"
    )
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    options = parse(parser, words)
    model, _, _ = instantiate(parser, options)
    if isinstance(model.backbone, FrozenFeatures):
        raise UserError("model.backbone is FrozenFeatures: a run on features has no encoder to export")
    file: Path = options.file
    if file.exists():
        raise UserError(f"--file is {file}, which is there already; choose another name")
    load_weights(model, RunFolder(Path(options.out)).existing().checkpoint(options.checkpoint))
    merge_low_rank(model.backbone)
    network = model.backbone.network if isinstance(model.backbone, PatchEncoder) else model.backbone
    weights = network.state_dict()  # type: ignore[operator]
    write_weights(file, weights)
    say(Console(), f"{len(weights)} tensors: {file}")
    return 0
