"""The commands `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from wsi_trainer.cli.arguments import refuse_empty
from wsi_trainer.cli.messages import about_refusal, explain
from wsi_trainer.data import DataConfig
from wsi_trainer.disks import naming_disks
from wsi_trainer.errors import UserError
from wsi_trainer.fit import training
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.parser import CLASSES
from wsi_trainer.fit.parser import make_parser as make_parser  # the other commands import it from here
from wsi_trainer.fit.ranks import is_first
from wsi_trainer.fit.reach import about, check_backbone, denied, within_reach
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.models import SlideClassifier
from wsi_trainer.stopping import GRACE, Stopped, ends_at_once
from wsi_trainer.terminal import say

SERVICES = {"wandb", "mlflow"}
MOMENT = 3.0
"""Seconds for loggers that are services to send what they have when a signal ends a run."""


def parse(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """The options, not yet instantiated; what the parser refuses becomes one clear line."""
    refuse_empty(words)
    try:
        return parser.parse_args(list(words))
    except (ArgumentError, UnicodeDecodeError) as error:
        if path := denied(error):
            key = next((key for key in CLASSES if f'"{key}' in str(error)), "the config")
            raise UserError(about(key, path)) from error
        raise explain(parser, error, list(words)) from error


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
    options = parse(parser, words)
    resume, folds, by, split = (options.pop(key) for key in ("ckpt_path", "folds", "folds_by", "test_on"))
    if folds is None:
        run(parser, options, resume, split=split)
        return 0
    from wsi_trainer.fit.cross_validation import fit_folds  # it runs this command for each fold

    fit_folds(parser, options, folds, by, resume)
    return 0


def run(
    parser: ArgumentParser,
    options: Namespace,
    resume: str | None = None,
    progress: bool = True,
    split: str = "test",
) -> RunFolder:
    """Train with these options, and test on a split."""
    folder = RunFolder(Path(options.out))
    first = is_first()  # with several devices the others run this command too, and write nothing
    if first and folder.begun and resume is None:
        raise UserError(f"{folder.path} holds a run already; choose another --out, or continue with --ckpt_path last")
    folder.path.mkdir(parents=True, exist_ok=True)
    model, data, config = instantiate(parser, options)
    if first:
        folder.config.write_text(parser.dump(options), encoding="utf-8")
    with (
        ending_at_once(MOMENT if SERVICES & set(config.loggers) else GRACE),
        naming_disks(folder.path),
        naming_workers(),
    ):
        training.train(model, data, config, folder, resume, progress)
        scores = training.test(model, data, config, folder, split, progress=progress)
    show(scores)
    return folder


@contextmanager
def ending_at_once(grace: float) -> Iterator[None]:
    """Signals end a run soon; Lightning alone would finish the step, and end as if all were well."""
    with ends_at_once(grace):
        try:
            yield
        except SystemExit as stop:
            if isinstance(stop.__context__, Stopped):
                raise stop.__context__ from None
            raise


@contextmanager
def naming_workers() -> Iterator[None]:
    """A process that opens slides ahead and ends is said in words of the config."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            "a process that opens slides ahead (data.workers) has ended: it was killed, or memory is short; "
            "try data.workers 0"
        ) from error


def instantiate(parser: ArgumentParser, options: Namespace) -> tuple[SlideClassifier, DataConfig, TrainConfig]:
    """The model with its seeded initial weights, and the configs."""
    check_backbone(options.model.backbone)
    training.seed_everything(options.train.seed)
    try:
        objects = parser.instantiate(options)
    except (ValueError, TypeError) as error:  # how classes refuse arguments, those of this package and any other
        raise UserError(about_refusal(error)) from error
    return objects.model, objects.data, objects.train


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
    written = training.predict_slides(model, data, config, folder, options.slides, options.checkpoint)
    say(Console(), f"predictions: {written}")
    return 0


def _evaluate(name: str, split: str, words: Sequence[str]) -> int:
    parser = make_parser(name, f"Predict the slides of the split {split} with a checkpoint of the run, and score them.")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    options = parse(parser, words)
    model, data, config = instantiate(parser, options)
    folder = RunFolder(Path(options.out)).existing()
    show(training.test(model, data, config, folder, split, options.checkpoint))
    return 0


def show(scores: dict[str, Any]) -> None:
    """Print the scores of a split."""
    console = Console()
    say(console, f"{scores['slides']} slides of {scores['patients']} patients in the split {scores['split']}:")
    for name, interval in scores["slide"].items():
        say(console, f"  {name:18} {interval['value']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})")
