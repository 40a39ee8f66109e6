"""The words of commands that open a run: its folder, its checkpoint, and keys of its config that are changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TypeVar

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from wsi_trainer.cli.parsing import Parser
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import OF_RUN, parse
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.scoring import name_of
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import say
from wsi_trainer.models.allowed import TRUST

T = TypeVar("T")


def run_parser(name: str, description: str, writes: bool = True) -> ArgumentParser:
    """The parser of a command that opens a run, and may write a result into it."""
    note = (
        "Keys of the run's config that say how fast and where, such as --train.budget 8GiB or --data.workers 4, may be "
        f"given too. {TRUST}"
    )
    parser = Parser(
        prog=f"wsi-train {name}", description=description, epilog=note, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="the folder of the run, --out of `wsi-train fit`")
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    if writes:
        parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument(
        "--data_root", type=Path, default=None, help="the folder that holds the slides now, if they were moved"
    )
    return parser


def open_run(parser: ArgumentParser, words: Sequence[str]) -> tuple[Run, Namespace]:
    """The run that the words of a command name, and the other options."""
    own, overrides = parted(words)
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--")
        if key.startswith("model.") or key in OF_RUN:
            raise UserError(
                f"{key} is part of what the run is, and it keeps that; leave it out. Other slides are tested with "
                "--cohort MANIFEST.csv --name NAME, and --data-root says where slides were moved"
            )
    options = parse(parser, own)
    if (study := Study.at(options.run)) is not None:
        raise study.refuse()
    slides = options.get("cohort") or options.get("slides")
    if slides is None:
        run = Run.open(options.run, options.checkpoint, options.get("name"), options.data_root, overrides)
    else:
        run = Run.open(options.run, options.checkpoint, None, options.data_root, overrides)
        run = run.of_cohort(options.name or name_of(Path(slides)))
    if before := [word for word in run.overrides if word not in overrides]:
        say(Console(), f"read as by the command before: {' '.join(before)}")
    return run, options


def fields_of(kind: type[T], options: Namespace) -> T:
    """The options of a command that are fields of a dataclass."""
    return kind(**{name: options[name] for name in signature(kind).parameters})


def parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and those that change keys of the config, each as `--KEY=VALUE`."""
    own: list[str] = []
    keys: list[str] = []
    left = iter(words)
    for word in left:
        if not re.match(r"--(model|data|train)\.", word):
            own.append(word)
        else:
            keys.append(word if "=" in word else f"{word}={next(left, '')}")
    return own, keys
