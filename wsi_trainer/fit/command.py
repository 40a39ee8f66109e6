"""The commands `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import Namespace
from rich.console import Console

from wsi_trainer.fit import training
from wsi_trainer.fit.compare import Other, fit_compared
from wsi_trainer.fit.cross_validation import fit_folds
from wsi_trainer.fit.one_run import ending_at_once, instantiate, naming_workers, parse, run, show
from wsi_trainer.fit.parser import make_parser as make_parser  # the other commands import it from here
from wsi_trainer.fit.reach import within_reach
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.terminal import say


@within_reach
def fit(words: Sequence[str]) -> int:
    """Train a slide classifier end to end, then test it."""
    parser = make_parser("fit", "Train a slide classifier end to end, and test it on the held-out slides.")
    parser.add_argument(
        "--ckpt_path",
        "--resume",
        type=str,
        default=None,
        help="continue from this checkpoint: last (from the beginning where there is none yet), or a path",
    )
    parser.add_argument("--folds", type=int, default=None, help="cross-validate: train once for each of so many folds")
    parser.add_argument(
        "--folds_by",
        type=Literal["patient", "site"],
        default="patient",
        help="what no fold divides: patients, or sites with all their patients",
    )
    parser.add_argument(
        "--test_on",
        type=Literal["test", "val"],
        default="test",
        help="the split that is predicted and scored at the end",
    )
    parser.add_argument(
        "--compare",
        type=Other,
        default=None,
        help="also train on features of the encoder as it was (frozen), or on slides that were shrunk (thumbnail), and "
        "say what the run gains and costs",
    )
    options = parse(parser, words)
    resume, folds, by, split, other = (
        options.pop(key) for key in ("ckpt_path", "folds", "folds_by", "test_on", "compare")
    )

    def one(options: Namespace) -> None:
        if folds is None:
            run(parser, options, resume, split=split)
        else:
            fit_folds(parser, options, folds, by, resume)

    if other is None:
        one(options)
    else:
        fit_compared(parser, options, other, one, None if folds else split, resume)
    return 0


@within_reach
def validate(words: Sequence[str]) -> int:
    """Score a checkpoint on the validation slides."""
    return _evaluate("validate", "val", words)


@within_reach
def test(words: Sequence[str]) -> int:
    """Score a checkpoint on the held-out slides."""
    return _evaluate("test", "test", words)


@within_reach
def predict(words: Sequence[str]) -> int:
    """Write the probabilities of slides that need no label."""
    parser = make_parser("predict", "Write the probability of each class for each slide of a manifest.")
    parser.add_argument("--slides", type=Path, required=True, help="a manifest; its column label may be missing")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    folder = RunFolder(Path(options.out)).existing()
    with ending_at_once(), naming_workers():
        written = training.predict_slides(model, data, config, folder, options.slides, options.checkpoint)
    say(Console(), f"predictions: {written}")
    return 0


def _evaluate(name: str, split: str, words: Sequence[str]) -> int:
    parser = make_parser(name, f"Predict the slides of the split {split} with a checkpoint of the run, and score them.")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    folder = RunFolder(Path(options.out)).existing()
    with ending_at_once(), naming_workers():
        scores = training.test(model, data, config, folder, split, options.checkpoint)
    show(scores)
    return 0
