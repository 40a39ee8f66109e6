"""Slides and runs in a notebook: a line and a card in HTML of each, pictures by matplotlib, tables by pandas.

Cards and tables import no torch.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.io.display import card, clean, grid, rows
from wsi_trainer.io.files import as_written
from wsi_trainer.io.frames import frame
from wsi_trainer.io.untrusted import read_yaml

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray
    from pandas import DataFrame

    from wsi_trainer.data.manifest import SlideRecord
    from wsi_trainer.fit.predictor import Attention
    from wsi_trainer.fit.run import Run
    from wsi_trainer.fit.study import Study
    from wsi_trainer.metrics import Predictions
    from wsi_trainer.slide.slide import Slide

THUMBNAIL = 240
"""Longest side of the picture on a card."""
LONGEST = 4.0
"""Longest side of a plot in inches."""
MOST_CELLS = 1024
"""Cells along a side of the grid on which attention is drawn."""
MOST_LABELS = 8
"""Different labels beyond which a card does not count each."""


class SlideCard:
    """Name, size, pixel, levels and format of a slide."""

    def __init__(self, slide: Slide) -> None:
        self.slide = slide
        info, (height, width) = slide.info, slide.shape
        pixel = slide.resolution
        levels = len(slide.levels)
        self.title = clean(Path(slide.name).name)
        self.facts = {
            "size": f"{width:,} × {height:,} px (width × height)".replace(",", "\N{NARROW NO-BREAK SPACE}"),
            "pixel": "of unknown size" if pixel is None else f"{pixel.mean:.3g} µm/px",
            "levels": f"{levels} level{'' if levels == 1 else 's'}",
            "format": f"{info.vendor}, read by {info.reader}",
        }

    @property
    def text(self) -> str:
        """The card in one line."""
        return f"Slide {self.title}: {', '.join(self.facts.values())}"

    @property
    def html(self) -> str:
        """The card with a picture of the slide."""
        try:
            picture = f'<img alt="" src="{jpeg(Image.fromarray(self.slide.thumbnail(THUMBNAIL)))}">'
        except SlideError as error:  # what is said of the slide stays true
            picture = f"<em>{escape(error.reason)}</em>"
        return card(self.title, picture + rows(self.facts))


class RunCard:
    """Task, slides, best epoch and scores of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        with as_written(run.config):
            config = dict(read_yaml(run.config) or {})
            model, train = dict(config.get("model") or {}), dict(config.get("train") or {})
        scores = run.scores
        classes: list[str] = next((one["classes"] for one in scores.values() if one.get("classes")), [])
        self.title = clean(run.name)
        task = next((str(one["task"]) for one in scores.values() if one.get("task")), "") or model.get("task")
        targets = dict(model.get("targets") or {})
        several = ", ".join(f"{clean(name)}: {_class_name(one)}" for name, one in targets.items())
        one = filter(None, (_class_name(task), f"({', '.join(map(clean, classes))})" if classes else ""))
        self.task = several or " ".join(one)
        self.network = " and ".join(filter(None, (_class_name(model.get(part)) for part in ("backbone", "head"))))
        self.splits = run.by_split
        self.best = _best_epoch(run, str(train.get("monitor") or "val_loss"))
        self.scores = {split: dict(one["slide"]) for split, one in scores.items() if one.get("slide")}

    @property
    def text(self) -> str:
        """The card in one line."""
        from wsi_trainer.metrics import Interval

        slides = ", ".join(f"{len(own)} {split}" for split, own in self.splits.items())
        parts = [self.task, f"{slides} slides" if slides else "no list of slides", self.best]
        for split, scores in self.scores.items():
            name, score = next(iter(scores.items()))
            parts.append(f"{name} {Interval.of(score)} of {split}")
        return f"Run {self.title}: {'; '.join(filter(None, parts))}"

    @property
    def html(self) -> str:
        """The card with a table of the slides and one of the scores."""
        from wsi_trainer.metrics import Interval

        facts = {
            "task": self.task,
            "network": self.network,
            "best epoch": self.best,
            "checkpoint": clean(self.run.chosen),
            "other cohorts": clean(", ".join(self.run.cohorts)) if self.run.cohort is None else "",
            "folder": clean(self.run.path),
        }
        slides = [
            [split, str(len(own)), str(len({record.patient for record in own})), _labels(own)]
            for split, own in self.splits.items()
        ]
        names = list(dict.fromkeys(name for scores in self.scores.values() for name in scores))
        scored = [
            [name, *(str(Interval.of(scores[name])) if name in scores else "" for scores in self.scores.values())]
            for name in names
        ]
        return card(
            self.title,
            rows({name: fact for name, fact in facts.items() if fact}),
            grid(["split", "slides", "patients", "labels"], slides),
            grid(["score", *self.scores], scored),
        )


def _class_name(named: Any) -> str:
    """The name of a class that a config names by its import path, or in short."""
    found = named.get("class_path", named.get("name", "")) if isinstance(named, Mapping) else named
    return clean(str(found or "").rpartition(".")[2])


def _labels(records: Sequence[SlideRecord]) -> str:
    counts = Counter(record.label for record in records if record.label)
    return "" if len(counts) > MOST_LABELS else ", ".join(f"{count} × {clean(name)}" for name, count in counts.items())


def _best_epoch(run: Run, monitor: str) -> str:
    """The best value of what chose the checkpoint; empty before the first epoch has ended."""
    from wsi_trainer.metrics import is_lower_better

    values = np.asarray(run.curves.get(monitor, ()), dtype=float)
    if not np.isfinite(values).any():
        return ""
    lower = is_lower_better(monitor.removeprefix("val_"))
    best = int(np.nanargmin(values) if lower else np.nanargmax(values))
    return f"{clean(monitor)} {values[best]:.3g} in epoch {best + 1} of {len(values)}"


def study_card(study: Study) -> str:
    """A card of a study: its kind, its split, its scores."""
    columns = _scores_of(study)
    cells = [[cell if isinstance(cell, str) else _number(cell) for cell in line] for line in zip(*columns.values())]
    facts = {"kind": study.kind, "split": study.split or "", "folder": clean(study.path)}
    facts["runs"] = clean(", ".join(study.names))
    return card(clean(study.path.resolve().name), rows(facts), grid(list(columns), cells))


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:z.3f}"


def jpeg(picture: Image.Image) -> str:
    """A picture as an address that needs no file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# Pictures.


def plot(slide: Slide, axes: Axes | None, tissue: bool, attention: Attention | None, side: int) -> Axes:
    """Draw a slide on axes in pixels of level 0 of the original slide, with a scale bar.

    Args:
        slide: The slide.
        axes: Where to draw; by default a new figure.
        tissue: Whether to outline the tissue.
        attention: Weights to draw.
        side: Longest side of the picture in pixels.
    """
    from matplotlib import pyplot

    height, width = slide.shape
    if axes is None:
        inch = LONGEST / max(height, width)
        _, axes = pyplot.subplots(figsize=(max(1.5, inch * width), max(1.5, inch * height)), layout="constrained")
    (left, top), (right, bottom) = slide.transform.to_slide([(0, 0), (width, height)]).tolist()
    picture = slide.thumbnail(side)
    axes.imshow(picture if attention is None else _grey(picture), extent=(left, right, bottom, top))
    if attention is not None:
        _draw_attention(axes, attention)
        axes.set_xlim(left, right)
        axes.set_ylim(bottom, top)
    if tissue:
        mask = slide.tissue()
        x, y = (np.arange(count) * mask.scale + mask.scale / 2 for count in mask.mask.shape[::-1])
        places = slide.transform.to_slide(np.stack(np.meshgrid(x, y), axis=-1))
        axes.contour(places[..., 0], places[..., 1], mask.mask.astype(float), levels=[0.5], colors="#0a8a3a")
        axes.set_xlim(left, right)
        axes.set_ylim(bottom, top)
    if slide.transform.mpp is not None:
        length = _nice(slide.transform.mpp[1] * (right - left) / 4)
        end = left + 0.04 * (right - left) + length / slide.transform.mpp[1]
        y = bottom - 0.05 * (bottom - top)
        axes.plot([left + 0.04 * (right - left), end], [y, y], color="black", linewidth=3, solid_capstyle="butt")
        said = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
        axes.annotate(
            said, ((left + 0.04 * (right - left) + end) / 2, y), (0, 4), textcoords="offset points", ha="center"
        )
    axes.set_title(clean(Path(slide.name).name))
    axes.set_axis_off()
    return axes


def _grey(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(picture).convert("L").convert("RGB"))


def _draw_attention(axes: Axes, attention: Attention) -> None:
    """Draw the ranks of weights, which differ little from each other, as heat maps of attention do."""
    from matplotlib import colormaps

    from wsi_trainer.explain.outputs import percentiles

    means, (x, y, cell) = on_grid(attention)
    strength = percentiles(np.nan_to_num(means))
    colours = colormaps["inferno"](0.25 + 0.75 * strength)
    colours[..., 3] = np.sqrt(strength) * np.isfinite(means)
    rows, columns = means.shape
    axes.imshow(colours, extent=(x, x + columns * cell, y + rows * cell, y), interpolation="nearest")


def on_grid(attention: Attention) -> tuple[NDArray[np.float64], tuple[float, float, float]]:
    """The mean weight in each cell of a grid, NaN where there is no position, and x, y and side of its first cell.

    A cell is a position, or as many as it takes to have no more than `MOST_CELLS` along a side.
    """
    places = attention.places
    side = places.spacing if places.side is None else places.side
    corners = places.points - side / 2 if places.middle else places.points
    first = corners.min(axis=0)
    cell = max(side, float(np.ptp(corners, axis=0).max()) / (MOST_CELLS - 1))
    column, row = np.floor((corners + side / 2 - first) / cell).astype(int).T
    total, count = np.zeros((2, row.max() + 1, column.max() + 1))
    np.add.at(total, (row, column), attention.weights)
    np.add.at(count, (row, column), 1)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return mean, (float(first[0]), float(first[1]), cell)


def _nice(length: float) -> float:
    """The largest of 1, 2, 5, 10, 20, ... that is no longer."""
    power = 10.0 ** math.floor(math.log10(length))
    return max(step * power for step in (1, 2, 5) if step * power <= length)


# Tables.


def slides_of(records: Sequence[SlideRecord]) -> DataFrame:
    """A row for each slide, with the columns of `splits.csv`."""
    names = ("slide", "path", "label", "patient", "split", "site")
    columns: dict[str, list[Any]] = {name: [str(getattr(record, name)) for record in records] for name in names}
    others = dict.fromkeys(name for record in records for name in record.others)
    return frame(columns | {name: [record.others.get(name, "") for record in records] for name in others})


def weights_of(attention: Attention) -> DataFrame:
    """A row for each position: x and y, the side of its square, its weight."""
    places = attention.places
    x, y = places.points.T.tolist()
    return frame({"x": x, "y": y, "side": [places.side] * len(x), "weight": attention.weights.tolist()})


def compared(first: Predictions, second: Predictions, names: tuple[str, str]) -> DataFrame:
    """A row for each score of two models on the slides, or patients, that both have predicted, and their difference."""
    from wsi_trainer.metrics import comparison, kinds_of, scores_by_target

    if kinds_of(first) != kinds_of(second):
        raise UserError(f"{names[1]} predicts something else than {names[0]}; compare runs of one task")
    second = second.like(first)
    targets = first.by_target
    several = scores_by_target({name: part.SCORES for name, part in targets.items()})
    found = comparison(first, second, several if len(targets) > 1 else first.SCORES)["scores"]
    columns = _compared(found, names)
    return frame({**columns, "patients": [one["difference"]["patients"] for one in found.values()]}, index="score")


def _compared(scores: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of a table of two runs: the scores of each, and their differences."""
    columns: dict[str, list[Any]] = {"score": list(scores)}
    columns |= {name: [one["values"][place] for one in scores.values()] for place, name in enumerate(names)}
    ends = {"difference": "value", "low": "low", "high": "high"}
    for place, other in enumerate(names[1:]):
        apart = [one.get("differences", [one["difference"]])[place] for one in scores.values()]
        of = "" if len(names) == 2 else f", less {other}"
        columns |= {f"{name}{of}": [one[end] for one in apart] for name, end in ends.items()}
    return columns


def study_of(study: Study) -> DataFrame:
    """A row for each score of a study."""
    if not (columns := _scores_of(study)):
        raise UserError(f"{study.path} has no {study.results.name} yet: its runs are not finished")
    return frame(columns, index="score")


def _scores_of(study: Study) -> dict[str, list[Any]]:
    """The columns of the table of a study; none before its runs are finished."""
    facts = study.scores
    if not facts:
        return {}
    with as_written(study.results):
        if study.kind == "comparison":
            return _compared(facts["scores"], study.names)
        pooled = facts["pooled"]
        columns = {name: fold["slide"] for name, fold in zip(study.names, facts["folds"], strict=True)}
        columns |= {"mean": facts["mean"], "sd": facts["sd"]}
        found = {name: [one[score] for score in pooled] for name, one in columns.items()}
        ends = {"pooled": "value", "low": "low", "high": "high"}
        found |= {name: [one[end] for one in pooled.values()] for name, end in ends.items()}
        return {"score": list(pooled), **found}


def encoders() -> DataFrame:
    """The published encoders of patches that a config may name: a row for each."""
    from wsi_trainer.models.encoders import ENCODERS

    names = ("name", "width", "size", "mpp", "licence", "source")
    return frame({name: [getattr(encoder, name) for encoder in ENCODERS] for name in names}, index="name")
