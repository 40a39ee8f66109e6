"""One run of training, from options to scores; what the commands, cross-validation and the demo share."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from wsi_trainer import __version__
from wsi_trainer.cli.arguments import refuse_empty
from wsi_trainer.cli.messages import about_refusal, explain
from wsi_trainer.data import DataConfig
from wsi_trainer.disks import naming_disks
from wsi_trainer.errors import UserError
from wsi_trainer.fit import training
from wsi_trainer.fit.bundle import offering
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.event_callback import Events
from wsi_trainer.fit.events import recorded
from wsi_trainer.fit.going_on import alone_in, changed
from wsi_trainer.fit.parser import CLASSES
from wsi_trainer.fit.ranks import is_first
from wsi_trainer.fit.reach import about, check_backbone, denied
from wsi_trainer.fit.run_folder import RunFolder, write_text
from wsi_trainer.foreign import yaml_of
from wsi_trainer.metrics import Interval
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
        raise UserError(about_begun(folder))
    folder.path.mkdir(parents=True, exist_ok=True)
    with alone_in(folder) if first else nullcontext():
        return alone(parser, options, folder, resume, progress, split)


def alone(
    parser: ArgumentParser, options: Namespace, folder: RunFolder, resume: str | None, progress: bool, split: str
) -> RunFolder:
    """Train and test where no other process does."""
    first = is_first()
    if first and folder.begun and resume is None:  # by another, which has ended meanwhile
        raise UserError(about_begun(folder))
    model, data, config = instantiate(parser, options)
    if first:
        said = parser.dump(options)
        if resume is not None and folder.config.is_file() and folder.begun:
            for line in changed(folder.config, yaml_of(said, folder.config)):
                say(Console(), line)
        write_text(folder.config, said)
    with (
        offering(folder.path) if first else nullcontext(),
        recorded(folder.events, __version__, resume) if first else nullcontext() as events,
        ending_at_once(MOMENT if SERVICES & set(config.loggers) else GRACE),
        naming_disks(folder.path),
        naming_workers(),
    ):
        if not training.train(model, data, config, folder, resume, progress, [Events(events)] if events else []):
            return folder
        scores = training.test(model, data, config, folder, split, progress=progress)
    show(scores)
    return folder


def about_begun(folder: RunFolder) -> str:
    """That a folder is taken."""
    return f"{folder.path} holds a run already; choose another --out, or continue with --ckpt_path last"


@contextmanager
def ending_at_once(grace: float = GRACE) -> Iterator[None]:
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


def show(scores: dict[str, Any]) -> None:
    """Print the scores of a split."""
    console = Console()
    say(console, f"{scores['slides']} slides of {scores['patients']} patients in the split {scores['split']}:")
    for name, interval in scores["slide"].items():
        say(console, f"  {name:23} {Interval(**interval)}")
