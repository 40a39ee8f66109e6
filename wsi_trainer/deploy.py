"""The command `deploy`: runs on the slides of another hospital, beside what they held out, with a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from wsi_trainer.cli.parsing import Parser, spell_out_flags
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import OF_RUN, parse
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.deployment import DeployOptions, run_deployment
from wsi_trainer.fit.opening import fields_of, parted
from wsi_trainer.io.display import say
from wsi_trainer.metrics import Interval
from wsi_trainer.models.allowed import TRUST, limits_imports
from wsi_trainer.report.deployment import write_page

ABOUT = (
    "Predict the slides of a cohort that none of the runs was trained on, score those that have labels, and write a "
    "page with the cohort beside what the runs held out: differences with intervals, calibration, the operating point, "
    "subgroups, and in what the slides are unlike those of training. Nothing is written into the runs."
)
NOTE = (
    "RUN is the folder of a run, or that of `fit --folds`, whose folds are deployed as an ensemble: the mean of what "
    "they predict. COHORT is a manifest with the columns of the labels, as far as there are any, a folder of slides, "
    "or, of runs on features, a folder of those. Keys of the runs' config that say how fast and where, and where "
    "slides are read from, may be given too: --train.budget 8GiB, --data.stores FOLDER, --data.features FOLDER, "
    f"--train.decision youden (on the validation slides). {TRUST}"
)


@limits_imports
def deploy(words: Sequence[str]) -> int:
    """Predict and score another hospital's slides by one run, several, or the folds of a study."""
    own, overrides = parted(words)
    for word in overrides:
        key = word.partition("=")[0].removeprefix("--")
        if key.startswith("model.") or key in OF_RUN:
            raise UserError(f"{key} is part of what a run is, and it keeps that; leave it out")
    parser = deploy_parser()
    options = parse(parser, spell_out_flags(parser, own))
    if len(options.folders) < 2:
        raise UserError("deploy takes one run or more and then the cohort: wsi-train deploy RUN... COHORT --name NAME")
    *runs, cohort = options.folders
    deployment = run_deployment(
        [Path(run) for run in runs],
        cohort,
        fields_of(DeployOptions, options),
        options.checkpoint,
        options.data_root,
        overrides,
    )
    show(deployment)
    say(Console(), f"report: {write_page(deployment)}")
    return 0


def deploy_parser() -> Parser:
    """The words of `deploy`."""
    parser = Parser(
        prog="wsi-train deploy",
        usage="wsi-train deploy RUN [RUN ...] COHORT [OPTIONS]",
        description=ABOUT,
        epilog=NOTE,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folders", nargs="+", type=str, metavar="RUN", help="runs, or a study of folds, and last the cohort"
    )
    parser.add_argument("--checkpoint", type=str, default="best", help="best, last, or a path")
    parser.add_argument(
        "--data_root", type=Path, default=None, help="where relative paths of the cohort's manifest start"
    )
    parser.add_class_arguments(DeployOptions)
    return parser


def show(deployment: Deployment) -> None:
    """Print what is unlike, and the scores of both sides."""
    facts, console = deployment.facts, Console()
    say(console, f"{facts['slides']} slides of {facts['patients']} patients, {facts['labelled']} of them with labels")
    for one in facts.get("shift", []):
        if one["unlike"]:
            say(console, f"unlike the training cohort: {one['name']}: {one['cohort']}, there {one['training']}")
    for line in facts["decisions"]:
        say(console, line)
    external, internal = facts.get("external", {}), facts.get("internal", {})
    for name, own in external.get("slide", {}).items():
        other: dict[str, Any] | None = internal.get("slide", {}).get(name)
        beside = "" if other is None else f"; internal {Interval.of(other)}"
        say(console, f"  {name} {Interval.of(own)}{beside}")
    say(console, f"predictions: {deployment.predictions_file}")
