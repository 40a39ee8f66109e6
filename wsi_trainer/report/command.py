"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import say
from wsi_trainer.io.files import as_written
from wsi_trainer.report.checklist import checklist_of, write_checklist
from wsi_trainer.report.contents import RunResults
from wsi_trainer.report.deployment import write_page
from wsi_trainer.report.render import write_report


def report(
    run: Path,
    baseline: Path | None = None,
    split: Literal["val", "test"] = "test",
    out: Path | None = None,
    name: str | None = None,
    checkpoint: str = "best",
    data_root: Path | None = None,
    checklist: Path | None = None,
) -> None:
    """Write the HTML report of a run, a cross-validation, a comparison or a deployment.

    Args:
        run: The folder of the run, or of `fit --folds`, `fit --compare` or `deploy`.
        baseline: The folder of a second run on the same slides, to compare with, or a checkpoint of this or another
            run.
        split: Which slides the report is about.
        out: Where to write the page; by default report.html in the folder of the run, or of the cohort.
        name: The name of a cohort that was tested, instead of the run's own slides.
        checkpoint: The checkpoint whose results the report is about: best, last, or a path.
        data_root: The folder that holds the slides now, if they were moved.
        checklist: A CSV file that is written too: the items of TRIPOD+AI, and what the run knows of each.
    """
    if (deployment := Deployment.at(run, data_root)) is not None:
        deployment.refuse(
            baseline=baseline, split=split != "test", name=name, checkpoint=checkpoint != "best", checklist=checklist
        )
        say(Console(), f"report: {write_page(deployment, out)}")
        return
    study, lines, names = Study.at(run), None, None
    if study is not None and study.kind == "comparison":
        with as_written(study.results):
            lines, names = dict(study.scores["lines"]), (study.names[0], study.names[1])
        out, split = out or run / "report.html", "val" if study.split == "val" else "test"
        run, baseline = [one.path for one in study.runs.values()][:2]
    other = None if baseline is None else Run.at(baseline, name)
    opened = Run.open(run, checkpoint, name, data_root)
    title = None if study is None else study.path.resolve().name
    page = write_report(opened, other, split, out, lines, names, title, study)
    say(Console(), f"report: {page}")
    if checklist is not None:
        write_checklist(checklist, checklist_of(RunResults.load("", opened, split)))
        say(Console(), f"checklist: {checklist}")
