"""The command `fit`: a run, its folds, or a run and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from wsi_trainer.fit.compare import Other, fit_compared
from wsi_trainer.fit.config import Config, make_parser, parse
from wsi_trainer.fit.cross_validation import fit_folds
from wsi_trainer.fit.fit import run_fit
from wsi_trainer.fit.opening import fields_of
from wsi_trainer.fit.run import Run
from wsi_trainer.models.allowed import limits_imports


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of `fit` beside a config."""

    resume: str | None = None
    """Continue from this checkpoint: last (from the beginning where there is none yet), or a path."""
    folds: int | None = None
    """Cross-validate: train once for each of so many folds."""
    folds_by: Literal["patient", "site"] = "patient"
    """What no fold divides: patients, or sites with all their patients."""
    test_on: Literal["test", "val"] = "test"
    """The split that is predicted and scored at the end."""
    compare: Other | None = None
    """Also train on features of the encoder as it was (frozen), or on slides that were shrunk (thumbnail), and say what
    the run gains and costs.
    """


@limits_imports
def fit(words: Sequence[str]) -> int:
    """Train a slide classifier end to end, then test it."""
    options = parse(fit_parser(), as_options(words))
    config, how = Config(options, Path(options.out)), fields_of(FitOptions, options)

    def one(config: Config) -> None:
        if how.folds is None:
            run_fit(config, how.resume, split=how.test_on)
        else:
            fit_folds(config, how.folds, how.folds_by, how.resume)

    if how.compare is None:
        one(config)
    else:
        fit_compared(config, how.compare, one, None if how.folds else how.test_on, how.resume)
    return 0


def fit_parser() -> ArgumentParser:
    """The options of `fit`: those of a config, and what is done with it."""
    parser = make_parser(
        "fit",
        "Train a slide classifier end to end, and test it on the held-out slides. `wsi-train fit RUN` continues a run "
        "that was stopped.",
    )
    parser.add_class_arguments(FitOptions)
    return parser


def as_options(words: Sequence[str]) -> list[str]:
    """The words with a run that goes on as `--config`, `--out` and `--resume`."""
    if not words or words[0].startswith("-"):
        return list(words)
    run = Run(Path(words[0])).existing()
    return [f"--config={run.config}", f"--out={run.path}", "--resume=last", *words[1:]]
