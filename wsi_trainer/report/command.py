"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from wsi_trainer.fit.run import Run, as_written, read_json
from wsi_trainer.io.display import say
from wsi_trainer.report.render import write_report


def report(
    run: Path,
    baseline: Path | None = None,
    split: Literal["val", "test"] = "test",
    out: Path | None = None,
    name: str | None = None,
    data_root: Path | None = None,
) -> None:
    """Write the HTML report of a run, a cross-validation or a comparison.

    Args:
        run: The folder of the run, or of `fit --folds` or `fit --compare`.
        baseline: The folder of a second run on the same slides, to compare with.
        split: Which slides the report is about.
        out: Where to write the page; by default report.html in the folder of the run, or of the cohort.
        name: The name of a cohort that was tested, instead of the run's own slides.
        data_root: The folder that holds the slides now, if they were moved.
    """
    comparison, lines, names = run / "comparison.json", None, None
    if comparison.is_file():
        with as_written(comparison):
            facts = read_json(comparison)
            out, lines, names = out or run / "report.html", facts["lines"], tuple(facts["runs"])
            split = split if facts["split"] not in ("val", "test") else facts["split"]
            run, baseline = run / "run", run / facts["compared with"]
    other = None if baseline is None else Run.open(baseline, cohort=name)
    page = write_report(Run.open(run, cohort=name, data_root=data_root), other, split, out, lines, names)
    say(Console(), f"report: {page}")
