"""The page of a run: from its contents to one page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jinja2 import UndefinedError
from matplotlib import colormaps
from matplotlib.colors import to_hex

from wsi_trainer.explain.outputs import sentence_on_regions
from wsi_trainer.fit.run import Run
from wsi_trainer.fit.study import Study
from wsi_trainer.io.display import format_bytes, template
from wsi_trainer.io.files import as_written, read_json, write_text
from wsi_trainer.io.untrusted import read_text
from wsi_trainer.metrics import Interval
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.report import figures
from wsi_trainer.report.checklist import checklist_of
from wsi_trainer.report.contents import (
    RunResults,
    SlideRow,
    called,
    covariates_of,
    delong_of,
    difference,
    first_of,
    limits_of,
    main_of,
    slide_rows,
)
from wsi_trainer.report.pictures import (
    map_picture,
    overlay_of,
    regions_picture,
    rules_shown,
    slide_picture,
    tissue_picture,
)

MOST_CHOICES = 20
"""Different labels beyond which there is no choice of one."""
MOST_ROWS = 500
"""Rows with pictures; beyond this only the worst mistakes are listed."""


def write_report(
    folder: Run,
    baseline: Run | None = None,
    split: str = "test",
    out: Path | None = None,
    facts: dict[str, str] | None = None,
    names: Sequence[str] | None = None,
    title: str | None = None,
    study: Study | None = None,
) -> Path:
    """Write the page of a run and return its path.

    Args:
        folder: The run.
        baseline: A second run on the same slides to compare with.
        split: Which slides.
        out: Where to write; by default report.html in the folder of the run.
        facts: More lines for the table of memory and time.
        names: What to call the run and the baseline; by default the names of their folders.
        title: The heading; by default the name of the folder of the run.
        study: The comparison that the run belongs to.
    """
    names = names or (folder.name, "" if baseline is None else baseline.name)
    run = RunResults.load(names[0], folder, split)
    second = names[1] if baseline is None or names[1] != names[0] else str(baseline.path)
    other = RunResults.load(second, baseline, split) if baseline else None
    context = _context(run, other, split, facts or {}, title, study)
    context["ablation"] = study.scores if study is not None and len(study.names) > 2 else None
    with as_written(folder.evaluation(split)):
        context |= {"checklist": checklist_of(run), "limits": limits_of(run, other, split)}
        try:
            page = template("wsi_trainer.report", "template.html.j2").render(context)
        except UndefinedError as error:  # the page shows what the file has to have
            raise ValueError(str(error)) from error
    target = out or folder.report
    write_text(target, page)
    return target


def _context(
    run: RunResults,
    other: RunResults | None,
    split: str,
    facts: dict[str, str],
    title: str | None,
    study: Study | None,
) -> dict[str, Any]:
    runs = [run] if other is None else [run, other]
    rows = slide_rows(run, other)
    maps = {called(one, run, maps.folder.name): maps.facts for one in runs for maps in one.maps}
    classes = {
        name: None for row in rows for its in row.found.values() if its.labels for name in its.labels.classes[1:]
    }
    predictions = run.predictions
    classed = any(part.NAMED for part in predictions.by_target.values())
    labels = sorted({row.words.label for row in rows}) if classed else []
    overlays = {row.slide: found for row in rows[:MOST_ROWS] if (found := overlay_of(row.path))}
    pictures = {row.slide: slide_picture(row.path) for row in rows[:MOST_ROWS]}
    return {
        "title": title or run.folder.name,
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        "where": where(run, split),
        "levels": [level for level in ("slide", "patient") if any(level in one.scores for one in runs)],
        "fold_tables": _fold_tables,
        "number": lambda value: "not defined" if value is None else f"{value:z.3f}",
        "runs": runs,
        "other": other,
        "main": next(iter(main_of(run.predictions).SCORES)),
        "event": main_of(run.predictions).POSITIVE,
        "difference": None if other is None else difference(run, other, study),
        "delong": {} if other is None else delong_of(run, other),
        "figures": figures_of(runs),
        "rows": rows[:MOST_ROWS],
        "overlays": overlays,
        "tissue_picture": tissue_picture,
        "rules": rules_shown(overlays.values()),
        "row_count": len(rows),
        "classed": classed,
        "sure": any(row.words.probability is not None for row in rows),
        "labels": labels if len(labels) <= MOST_CHOICES else [],
        "sites": sorted({row.site for row in rows} - {""}),
        "error_means": predictions.error_means,
        "tables": _tables(run),
        "interval": Interval.of,
        "titled": titled,
        "unbroken": unbroken,
        "pictures": pictures,
        "pictured": any(pictures.values()) or any(row.maps for row in rows[:MOST_ROWS]) or bool(overlays),
        "patients": any(row.patient != row.slide for row in rows),
        "map_picture": map_picture,
        "regions_picture": regions_picture,
        "maps": maps,
        "classes": [PathClass.of(name, number) for number, name in enumerate(classes, start=1)],
        "colours": ", ".join(map(to_hex, colormaps["inferno"](np.linspace(0.25, 1, 9)))),
        "regions": {method: said for method, about in maps.items() if (said := sentence_on_regions(about))},
        "covariates": covariates_of(run),
        "memory": _memory(run, facts),
        "plan": _plan(run.folder),
        "environment": _flat(read_json(first_of(run).environment)) | _of(run, split),
        "config": read_text(run.folder.config),
        "absent": [*_absent(run), *_without_picture(rows[:MOST_ROWS])],
        "outdated": [outdated for one in runs if one.study is None and (outdated := one.folder.outdated)],
    }


NAMES = {
    "auc": "AUC", "froc": "FROC", "f1": "F1", "iou": "IoU", "dice": "Dice", "brier": "Brier score", "r2": "R²",
    "pearson": "Pearson's r", "spearman": "Spearman's ρ", "c": "C", "label": "slide's", "delong": "by DeLong",
}  # fmt: skip
"""Words of the names of scores that are written otherwise."""


def titled(score: str) -> str:
    """The name of a score as a reader knows it."""
    return " ".join(NAMES.get(word, word) for word in score.split("_"))


def unbroken(interval: Interval) -> str:
    """A score with its interval, of which a narrow column breaks the line only before the bracket."""
    if np.isnan(interval.value):
        return str(interval)
    bounds = "no interval" if interval.absent else interval.bounds
    return f"{interval.value:z.3f} ({bounds.replace(' ', chr(0xA0))})"


def where(run: RunResults, split: str) -> str:
    """The slides that a page is about."""
    if run.folds is not None:
        return f"{len(run.folds['folds'])} folds, each held out from the training of its own run"
    if run.folder.cohort is not None:
        return f"the cohort {run.folder.cohort}, which the run was not trained on"
    kept = {"test": "held out from training", "val": "which chose the checkpoint", "train": "which it was trained on"}
    return f"the split {split}, {kept[split]}"


def _of(run: RunResults, split: str) -> dict[str, str]:
    """Checkpoint of the scores and keys that a command changed, where a file beside them says so."""
    of = {} if run.study is not None else run.folder.result("test", split).of
    return _flat({key: of[key] for key in ("checkpoint", "overrides") if key in of})


def _fold_tables(folds: dict[str, Any]) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """By what the scores of folds count: their mean and spread, and those of each fold."""
    found = [("slide", folds, [fold["slide"] for fold in folds["folds"]])]
    return [*found, ("patient", folds["patient"], folds["patient"]["folds"])] if "patient" in folds else found


def _tables(run: RunResults) -> list[tuple[str, Any]]:
    by_class = [key for key in run.scores if key.endswith("per_class")]
    titles = {key: f"Results by class of {key.removesuffix('_per_class')}" for key in by_class}
    titles |= {"per_class": "Results by class", "per_site": "Results by site"}
    own = [(titles[key], run.scores[key]) for key in (*by_class, "per_site") if run.scores.get(key)]
    return own if run.regions is None else [*own, *run.regions.tables()]


def figures_of(runs: list[RunResults]) -> list[tuple[str, str]]:
    """The captions and pictures of one or more runs on the same slides."""
    pictures = []
    if any(r.curves for r in runs):
        pictures.append(("Training", figures.training({r.name: r.curves for r in runs})))
    regions = {r.name: r.regions.lesions for r in runs if r.regions is not None}
    if regions and (picture := figures.lesions(regions)):
        pictures.append(("FROC, bands hold 95 % of bootstrap resamples", picture))
    return [*pictures, *figures.of_predictions({r.name: r.predictions for r in runs})]


def _plan(folder: Run) -> tuple[str, str] | None:
    """The table and the picture of the plan, where the run had one."""
    if not folder.plan.is_file():
        return None
    from lightning_plugin import Plan, PlanError  # it imports torch

    with as_written(folder.plan):
        try:
            plan = Plan.from_json(read_text(folder.plan))
        except PlanError as error:
            raise ValueError(str(error)) from error
    with as_written(folder.plan), TemporaryDirectory() as scratch:
        picture = Path(scratch) / "plan.png"
        plan.draw(str(picture))
        encoded = base64.b64encode(picture.read_bytes()).decode()
    return str(plan), "data:image/png;base64," + encoded


def _memory(run: RunResults, facts: dict[str, str]) -> dict[str, str]:
    lines: dict[str, str] = {"engine": str(run.memory.get("engine", "not recorded"))}
    if shape := run.memory.get("image_shape"):
        count, _, height, width = shape
        lines["largest image"] = f"{width} × {height} (width × height)" + (f", {count} of them" if count > 1 else "")
    if approximation := run.memory.get("approximation"):
        lines["training was an approximation"] = approximation
    if budget := run.memory.get("budget"):
        counted = run.memory.get("budget_bytes")
        lines["budget of a step"] = format_bytes(counted) if counted else str(budget)
    named = {
        "step_peak_bytes": "measured peak of a step",
        "plan_peak_bytes": "peak that the plan predicts",
        "plain_bytes": "what plain PyTorch holds for backward",
        "process_peak_bytes": "peak memory of the process",
    }
    lines |= {text: format_bytes(run.memory[key]) for key, text in named.items() if run.memory.get(key)}
    return lines | facts


def _absent(run: RunResults) -> list[str]:
    absent = []
    if any(part.OF_PIXELS for part in run.predictions.by_target.values()):
        if run.regions is None:
            absent.append("Borders and lesions of this split were not compared: `wsi-train segment` does it.")
    elif not run.maps and run.folds is None:
        absent.append("This run has no maps of what the model looked at: `wsi-train heatmap` writes them.")
    if run.memory.get("engine") == "plain PyTorch":
        absent.append(
            "This run used plain PyTorch, not tile-by-tile execution: there is no plan and no memory picture."
        )
    return absent


def _without_picture(rows: list[SlideRow]) -> list[str]:
    gone = sum(not row.path.exists() for row in rows)
    text = "slides have no picture, since their files are not there: --data-root names the folder that they moved to."
    return [f"{gone} of {len(rows)} {text}"] if gone else []


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested JSON as one table."""
    lines: dict[str, str] = {}
    for key, value in content.items():
        lines |= _flat(value, f"{key}: ") if isinstance(value, dict) else {prefix + key: str(value)}
    return lines
