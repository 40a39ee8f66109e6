"""`Exported`: a trained model alone in a folder, with its model card, as Hugging Face's hub keeps models.

`config.json` is the config of the run without its paths, and a config of `fit` too. `model.safetensors` has the
weights, `about.json` what is known of the training, `README.md` the same for readers. Nothing in them names a slide or
a patient.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wsi_trainer.data.cohort import Seen
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.environment import versions
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import PATHS, Loaded, keys_of
from wsi_trainer.fit.folder import RunFolder
from wsi_trainer.io.display import clean
from wsi_trainer.io.files import as_written, read_json, write_json, write_text
from wsi_trainer.metrics import Decision, Interval
from wsi_trainer.metrics.decision import MOST_PROBABLE, decisions_record
from wsi_trainer.models.hub import ABOUT, CARD, CONFIG, WEIGHTS
from wsi_trainer.models.weights import write_weights

OF_CONFIG = (*PATHS, "data.patches.positions")
"""Keys of the config that name files of whoever trained the model."""


@dataclass(frozen=True)
class Exported:
    """The folder of a model that was exported."""

    path: Path
    given: tuple[str, ...] = ()
    """Keys of the config that are changed, as words of the command line."""

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """True for a folder that holds an exported model."""
        return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def overrides(self) -> tuple[str, ...]:
        """Keys of the config that are set: it has no slides, and a config names some; it decides as it always did."""
        before = () if "decided" in self.about else (f"--train.decision={MOST_PROBABLE}",)
        return ("--data.manifest=none", *before, *self.given)

    def checkpoint(self) -> Path:
        """The file of the weights."""
        return self.path / WEIGHTS

    @cached_property
    def about(self) -> dict[str, Any]:
        """Facts of the training."""
        return read_json(self.path / ABOUT)

    @property
    def decisions(self) -> Path:
        """The file of the thresholds."""
        return self.path / ABOUT

    @property
    def decided(self) -> dict[str, Any]:
        """The thresholds at which the run decided, and by which rule."""
        return dict(self.about.get("decided", {}))

    @property
    def seen(self) -> Seen | None:
        """The resolution at which the model saw the slides of training."""
        with as_written(self.path / ABOUT):
            seen = self.about.get("seen")
            return None if seen is None else Seen(**seen)

    def record_of(self, path: Path, name: str, columns: Sequence[str] = ()) -> SlideRecord:
        """A slide without label, of which no cells are known."""
        return SlideRecord(name, path, "", name, "")


def write_exported(
    folder: Path, loaded: Loaded, origin: RunFolder | Exported, decisions: Mapping[str, Decision]
) -> None:
    """Write a model and its card into a folder; its weights come last, so that a folder with weights is whole.

    Args:
        folder: The folder, which is made where it is not there.
        loaded: The model and its settings.
        origin: Where it comes from.
        decisions: The decision of each target that has a threshold.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder")
    about = origin.about if isinstance(origin, Exported) else about_run(origin)
    about = {**about, "decided": decisions_record(loaded.train.decision, decisions)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).unlink(missing_ok=True)
    config = without_paths(keys_of(origin))
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    write_json(folder / ABOUT, about)
    write_text(folder / CARD, card_of(loaded, about, decisions))
    write_weights(folder / WEIGHTS, loaded.model.state_dict())


def without_paths(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config without the keys that name files."""
    return {
        key: without_paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in OF_CONFIG
    }


def about_run(run: RunFolder) -> dict[str, Any]:
    """Facts of the training of a run: counts, scores and versions."""
    splits: dict[str, dict[str, int]] = {}
    records = run.kept()
    for split in dict.fromkeys(record.split for record in records):
        own = [record for record in records if record.split == split]
        splits[split] = {"slides": len(own), "patients": len({record.patient for record in own})}
    scores = {
        split: {key: found[key] for key in ("slides", "patients", "slide", "patient") if key in found}
        for split, found in run.scores.items()
    }
    return {
        "checkpoint": run.chosen if run.chosen in ("best", "last") else "another",
        "seen": None if run.seen is None else run.seen.to_dict(),
        "splits": splits,
        "scores": scores,
        "trained_with": read_json(run.environment).get("packages", {}),
        "exported_with": versions(),
    }


# The model card.


def card_of(loaded: Loaded, about: Mapping[str, Any], decisions: Mapping[str, Decision]) -> str:
    """The model card: Markdown, with the header that the hub reads."""
    model = loaded.model
    lines = [
        "---",
        "library_name: wsi-trainer",
        f"pipeline_tag: {'image-segmentation' if model.task.dense else 'image-classification'}",
        "tags: [pathology, whole-slide-images, wsi-trainer]",
        "---",
        "",
        f"# {type(model.task).__name__} on whole slides",
        "",
        "Trained with [wsi-trainer](https://pypi.org/project/wsi-trainer). For research; not a medical device.",
        "",
        "```python",
        "import wsi_trainer as wt",
        "",
        'predictor = wt.Predictor.from_pretrained("THIS FOLDER, OR ITS NAME ON THE HUB")',
        'predictor.predict("slide.svs").to_dict()',
        "```",
        "",
        "| | |",
        "|---|---|",
        *(_row(*cells) for cells in _facts(loaded, about, decisions)),
        "",
        *_scores(about),
        *_versions(about),
    ]
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    """A line of a table, in which names of classes may have any letter."""
    return "| " + " | ".join(clean(cell).replace("|", "\\|") for cell in cells) + " |"


def _facts(loaded: Loaded, about: Mapping[str, Any], decisions: Mapping[str, Decision]) -> Iterator[tuple[str, object]]:
    model = loaded.model
    yield "predicts", ", ".join(model.task.names)
    yield "classes", ", ".join(model.task.classes) or "none"
    yield "network", f"{type(model.backbone).__name__}, {type(model.head).__name__}"
    for column in model.covariates.columns:
        yield "beside the slide", column
    for sentence in model.task.sentences_on(decisions):
        yield "decision", sentence
    yield from _input(loaded, about)
    for split, known in about.get("splits", {}).items():
        yield f"split {split}", f"{known['slides']} slides of {known['patients']} patients"
    yield "weights", f"the {about.get('checkpoint', 'best')} checkpoint"


def _input(loaded: Loaded, about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Facts of what the model is shown of a slide."""
    model, data, _ = loaded
    seen = None if about.get("seen") is None else Seen(**about["seen"])
    patches = data.patches
    if not model.sees_slide:
        yield "sees", "no slide, the covariates alone"
    elif patches is not None:
        places = "over tissue" if patches.over == "tissue" else "over the whole slide"
        size = "of the finest level" if patches.mpp == "own" else f"at {patches.mpp:g} µm a pixel"
        yield "sees", f"patches of {patches.size} × {patches.size} pixels {size}, {places}, {patches.step} pixels apart"
    elif getattr(model.backbone, "prepared", False):
        yield "sees", "features of patches, by `wsi-train embed` or another program: the file of each slide's features"
    else:
        factors = [data.downsample, *data.extra_downsamples]
        yield "sees", f"the whole slide, shrunk by {', '.join(map(str, factors))}"
    if seen is not None:
        yield "resolution", f"{seen}; finer slides are read at it, coarser ones refused"
        if seen.painted:
            yield "background", "painted white, by `wsi-train preprocess --background constant`"
    if not getattr(model.backbone, "prepared", False):
        mean, std = (", ".join(f"{x:.4g}" for x in values.flatten().tolist()) for values in (model.mean, model.std))
        yield "colours", f"0 to 1, minus {mean}, divided by {std}"


def _scores(about: Mapping[str, Any]) -> Iterator[str]:
    for split, found in about.get("scores", {}).items():
        yield f"## Scores on the split {split}: {found['slides']} slides of {found['patients']} patients"
        yield ""
        yield "| score | value, 95 % interval |"
        yield "|---|---|"
        for name, interval in found.get("slide", {}).items():
            yield _row(name, Interval.of(interval))
        yield ""


def _versions(about: Mapping[str, Any]) -> Iterator[str]:
    yield "## Versions"
    yield ""
    yield "| package | trained with | exported with |"
    yield "|---|---|---|"
    before, now = about.get("trained_with", {}), about.get("exported_with", {})
    for package in dict.fromkeys([*before, *now]):
        yield _row(package, before.get(package, ""), now.get(package, ""))
