"""From the contents of a report to one page that needs no other file."""

from __future__ import annotations

import base64
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lightning_plugin import Plan
from wsi_trainer.explain.heatmaps import sentence_on_regions
from wsi_trainer.fit.memory import format_bytes
from wsi_trainer.fit.run_folder import RunFolder, read_json
from wsi_trainer.report import figures
from wsi_trainer.report.contents import Run, difference, slide_rows
from wsi_trainer.report.pictures import map_picture, slide_picture

NOT_THERE_YET = ("Precision-recall curves and results by site are not part of this page yet.",)
MOST_ROWS = 500
"""Rows with pictures; beyond this only the worst mistakes are listed."""


def write_report(
    folder: RunFolder,
    baseline: RunFolder | None = None,
    split: str = "test",
    out: Path | None = None,
    facts: dict[str, str] | None = None,
    names: tuple[str, str] = ("full resolution", "thumbnail"),
    title: str | None = None,
) -> Path:
    """Write the page of a run and return its path.

    Args:
        folder: The run.
        baseline: A second run on the same slides to compare with.
        split: Which slides.
        out: Where to write; by default report.html in the folder of the run.
        facts: More lines for the table of memory and time.
        names: What to call the run and the baseline.
        title: The heading; by default the name of the folder of the run.
    """
    run = Run.load(names[0], folder, split)
    other = Run.load(names[1], baseline, split) if baseline else None
    page = _environment().get_template("template.html.j2").render(_context(run, other, split, facts or {}, title))
    target = out or folder.report
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def _context(run: Run, other: Run | None, split: str, facts: dict[str, str], title: str | None) -> dict[str, Any]:
    runs = [run] if other is None else [run, other]
    rows = slide_rows(run, other)
    binary = len(run.predictions.classes) == 2
    return {
        "title": title or run.folder.path.resolve().name,
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
        "split": split,
        "runs": runs,
        "other": other,
        "difference": None if other is None else difference(run, other),
        "figures": _figures(run, runs, binary),
        "rows": rows[:MOST_ROWS],
        "row_count": len(rows),
        "picture": slide_picture,
        "map_picture": map_picture,
        "regions": sentence_on_regions(read_json(run.folder.heatmaps / "heatmaps.json")),
        "memory": _memory(run, facts),
        "plan": _plan(run.folder),
        "environment": _flat(read_json(run.folder.environment)),
        "config": run.folder.config.read_text(encoding="utf-8"),
        "absent": _absent(run, binary),
    }


def _figures(run: Run, runs: list[Run], binary: bool) -> list[tuple[str, str]]:
    pictures = []
    if binary:
        pictures.append(
            (
                "ROC, bands hold 95 % of bootstrap resamples",
                figures.roc({r.name: r.predictions for r in runs}),
            )
        )
    if any(r.curves for r in runs):
        pictures.append(("Training", figures.training({r.name: r.curves for r in runs})))
    pictures.append((f"Confusion, {run.name}", figures.confusion(run.predictions)))
    if binary:
        pictures.append((f"Calibration, {run.name}", figures.calibration(run.predictions)))
    return pictures


def _plan(folder: RunFolder) -> tuple[str, str] | None:
    """The table and the picture of the plan, where the run had one."""
    if not folder.plan.is_file():
        return None
    plan = Plan.from_json(folder.plan.read_text(encoding="utf-8"))
    with TemporaryDirectory() as scratch:
        picture = Path(scratch) / "plan.png"
        plan.draw(str(picture))
        encoded = base64.b64encode(picture.read_bytes()).decode()
    return str(plan), "data:image/png;base64," + encoded


def _memory(run: Run, facts: dict[str, str]) -> dict[str, str]:
    lines: dict[str, str] = {"engine": str(run.memory.get("engine", "not recorded"))}
    if shape := run.memory.get("image_shape"):
        lines["largest image"] = " × ".join(map(str, shape))
    if budget := run.memory.get("budget"):
        lines["budget of a step"] = str(budget)
    named = {
        "step_peak_bytes": "measured peak of a step",
        "plan_peak_bytes": "peak that the plan predicts",
        "plain_bytes": "what plain PyTorch holds for backward",
        "process_peak_bytes": "peak memory of the process",
    }
    lines |= {text: format_bytes(run.memory[key]) for key, text in named.items() if run.memory.get(key)}
    return lines | facts


def _absent(run: Run, binary: bool) -> list[str]:
    absent = list(NOT_THERE_YET)
    if not (run.folder.heatmaps / "heatmaps.json").is_file():
        absent.append("This run has no maps of what the model looked at: `wsi-train heatmap` writes them.")
    if run.memory.get("engine") == "plain PyTorch":
        absent.append(
            "This run used plain PyTorch, not tile-by-tile execution: there is no plan and no memory picture."
        )
    if not binary:
        absent.append("ROC and calibration of more than two classes are not part of this page yet.")
    return absent


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested JSON as one table."""
    lines: dict[str, str] = {}
    for key, value in content.items():
        lines |= _flat(value, f"{key}: ") if isinstance(value, dict) else {prefix + key: str(value)}
    return lines


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("wsi_trainer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
