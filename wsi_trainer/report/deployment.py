"""The page of a deployment: a cohort beside what its runs held out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.maps import Maps
from wsi_trainer.fit.deployed import Deployment
from wsi_trainer.io.display import template
from wsi_trainer.io.files import as_written, read_json, write_text
from wsi_trainer.io.tables import read_table, unescape_formula
from wsi_trainer.metrics import Interval, Predictions, kinds_of
from wsi_trainer.report import figures
from wsi_trainer.report.contents import flat, main_of
from wsi_trainer.report.pictures import map_picture, slide_picture
from wsi_trainer.report.render import titled, unbroken

MOST_ROWS = 100
"""Slides with pictures on the page."""


def write_page(deployment: Deployment, out: Path | None = None) -> Path:
    """Write the page of a deployment, by default into its folder, and return its path."""
    facts, external, internal = deployment.facts, deployment.labelled(), deployment.internal()
    rows = _rows(deployment, external)
    pictures = {row["slide"]: slide_picture(row["path"]) for row in rows[:MOST_ROWS] if row["path"] is not None}
    with as_written(deployment.path):
        page = template("wsi_trainer.report", "deployment.html.j2").render(
            facts=facts,
            title=f"{facts['name']}: deployment",
            written=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
            number=lambda value: "not defined" if value is None else f"{value:z.3f}",
            interval=Interval.of,
            titled=titled,
            unbroken=unbroken,
            main="" if external is None else next(iter(main_of(external).SCORES)),
            event="" if external is None else main_of(external).POSITIVE,
            classed=external is not None and any(part.NAMED for part in external.by_target.values()),
            error_means="" if external is None else external.error_means,
            figures=_figures(facts, external, internal),
            rows=rows,
            pictures=pictures,
            pictured=any(pictures.values()) or any(row["maps"] for row in rows[:MOST_ROWS]),
            patients=any(row["patient"] != row["slide"] for row in rows),
            limits=_limits(facts, external),
            environments=_environments(deployment),
            map_picture=map_picture,
        )
    target = out or deployment.report
    write_text(target, page)
    return target


def _figures(
    facts: Mapping[str, Any], external: Predictions | None, internal: Predictions | None
) -> list[tuple[str, str]]:
    if external is None:
        return []
    runs = {facts["name"]: external}
    if internal is not None and kinds_of(internal) == kinds_of(external):
        runs["internal"] = internal
    return list(figures.of_predictions(runs))


def _limits(facts: Mapping[str, Any], external: Predictions | None) -> list[str]:
    """Sentences on what the numbers of the page do not say."""
    if external is None:
        return ["No slide has a label: whether the predictions are right is not known."]
    lines = [f"They are of the cohort {facts['name']}, and of no further hospital."]
    if facts["labelled"] < facts["slides"]:
        lines.append(f"{facts['slides'] - facts['labelled']} of {facts['slides']} slides have no label, and no score.")
    if gone := len(facts.get("left_out", {}).get("slides", ())) + len(facts.get("unreadable", ())):
        lines.append(f"{gone} slides were left out, as of patients of training or unreadable.")
    if few := [name for name, one in facts["external"]["slide"].items() if "needed" in one["absent"]]:
        lines.append(f"There are too few patients for intervals of {', '.join(few)}.")
    if facts.get("differences"):
        lines.append("Internal and external patients are others: a difference may be of the patients or of the slides.")
    return [*lines, "A model for research, and no medical device."]


def _environments(deployment: Deployment) -> dict[str, dict[str, str]]:
    """Versions and machine of the training of the first run, and of the deployment where it kept them."""
    first = next(iter(deployment.members.values()))
    found = {"training": flat(read_json(first.environment))}
    if here := deployment.facts.get("environment"):
        found["deployment"] = flat(here)
    keys = dict.fromkeys(key for one in found.values() for key in one)
    return {name: {key.removeprefix("packages."): str(one.get(key, "")) for key in keys} for name, one in found.items()}


def _rows(deployment: Deployment, external: Predictions | None) -> list[dict[str, Any]]:
    """The slides, those that are decided wrongly first, each part by its error; those without label last."""
    first = next(iter(deployment.members.values()))
    records: dict[str, SlideRecord] = {}
    for record in reversed(first.kept()):
        records[record.patient] = record
    records |= {record.slide: record for record in first.kept()}
    maps = [one for member in deployment.members.values() for one in Maps.of(member)]
    pictures = [(one.run.path.name, one.pictures()) for one in maps]
    errors = {} if external is None else dict(zip(external.slides, external.errors().tolist(), strict=True))
    words = {} if external is None else {slide: external.words(row) for row, slide in enumerate(external.slides)}
    table = read_table(deployment.predictions_file)
    rows = []
    for _, line in table.rows:
        slide = unescape_formula(line["slide"])
        found = records.get(slide)
        numbers = {name: value for name, value in line.items() if name not in ("slide", "patient")}
        rows.append(
            {
                "slide": slide, "patient": line["patient"], "path": None if found is None else found.path,
                "numbers": numbers, "words": words.get(slide), "error": errors.get(slide),
                "maps": [(run, its[slide]) for run, its in pictures if slide in its],
            }
        )  # fmt: skip
    return sorted(
        rows,
        key=lambda row: (False, -np.inf) if row["error"] is None else (row["words"].wrong, row["error"]),
        reverse=True,
    )
