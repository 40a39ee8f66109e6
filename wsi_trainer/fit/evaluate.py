"""The commands `test`, `validate`, `predict` and `export`: a trained run on slides, and its encoder as a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wsi_trainer.errors import UserError
from wsi_trainer.fit.opening import open_run, run_parser
from wsi_trainer.fit.scoring import (
    decisions_of,
    labelled_slides,
    predict_slides,
    records_of,
    show,
    test_split,
)
from wsi_trainer.io.display import say
from wsi_trainer.models.allowed import limits_imports
from wsi_trainer.models.weights import SAFETENSORS, encoder_of, write_weights

log = logging.getLogger("wsi_trainer")

# The commands.


@limits_imports
def test(words: Sequence[str]) -> int:
    """Score a checkpoint on the held-out slides, or on all slides of another cohort."""
    parser = run_parser(
        "test",
        "Predict the slides that the run held out, and score them. With --cohort, all labelled slides of another "
        "manifest, in a folder of their own in the run: RUN/cohorts/NAME.",
    )
    parser.add_argument(
        "--cohort", type=Path, default=None, help="a manifest of other slides, with the columns of the run's labels"
    )
    parser.add_argument("--name", type=str, default=None, help="the cohort's name; by default that of its file")
    run, options = open_run(parser, words)
    run.result("test").keep(options.overwrite)
    slides = None if options.cohort is None else labelled_slides(run, options.cohort, options.data_root)
    show(test_split(run, "test", overwrite=options.overwrite, slides=slides), run)
    return 0


@limits_imports
def validate(words: Sequence[str]) -> int:
    """Score a checkpoint on the validation slides."""
    parser = run_parser("validate", "Predict the slides that chose the checkpoint, and score them.")
    run, options = open_run(parser, words)
    run.result("test", "val").keep(options.overwrite)
    show(test_split(run, "val", overwrite=options.overwrite), run)
    return 0


@limits_imports
def predict(words: Sequence[str]) -> int:
    """Write the predictions of slides that need no label."""
    parser = run_parser(
        "predict", "Write what the run predicts of slides that need no label, in RUN/cohorts/NAME/predictions.csv."
    )
    parser.add_argument("slides", type=str, help="a slide, a store, a folder, or a manifest whose label may be missing")
    parser.add_argument("--name", type=str, default=None, help="their name; by default that of the file or folder")
    cohort, options = open_run(parser, words)
    result = cohort.result("predict")
    result.keep(options.overwrite)
    _ = cohort.loaded  # what its config names is refused before slides are looked for
    predict_slides(cohort, records_of(cohort, options.slides, options.data_root), options.overwrite)
    say(Console(), f"predictions: {result.file}")
    return 0


@limits_imports
def export(words: Sequence[str]) -> int:
    """Write a trained model alone, with its model card, or the weights of its backbone."""
    parser = run_parser(
        "export",
        "Write the model of a run into a folder of its own (--out), with its settings and a model card: for "
        "Predictor.from_pretrained, without the run, its slides and its patients' names. Or write the weights of the "
        "backbone (--file), under the names of the network itself: for model.pretrained, for timm or transformers, or "
        "for your own code. What was learnt in low rank (model.finetune: lora) is merged into the layers there: the "
        "file is one of the plain network.",
        writes=False,
    )
    parser.add_argument("--out", type=Path, default=None, help="the folder to write: the whole model")
    parser.add_argument(
        "--file",
        type=Path,
        default=None,
        help="the file to write, of the backbone alone: NAME.pt for torch.load, or NAME.safetensors",
    )
    run, options = open_run(parser, words)
    if (options.out is None) == (options.file is None):
        raise UserError(
            "export writes the whole model, --out FOLDER, or its backbone, --file NAME.pt; give one of the two"
        )
    option, target = ("--out", options.out) if options.file is None else ("--file", options.file)
    if options.file is not None and target.suffix not in (".pt", ".pth", SAFETENSORS):
        raise UserError(f"--file is {target}; give a name that ends in .pt or .safetensors")
    if target.exists():
        raise UserError(f"{option} is {target}, which is there already; choose another name")
    if options.file is None:
        decisions_of(run)  # chosen now, where they were not yet
        run.predictor.save_pretrained(target)
        say(Console(), f"the model and its card: {target}")
        return 0
    weights = encoder_of(run.loaded.model.backbone).state_dict()
    write_weights(target, weights)
    say(Console(), f"{len(weights)} tensors: {target}")
    return 0
