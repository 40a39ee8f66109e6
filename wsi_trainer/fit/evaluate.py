"""From a trained model to predictions and scores with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch import Tensor

from wsi_trainer.data import SlideData, SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.metrics import SCORES, Predictions, Score, summarise
from wsi_trainer.models import SlideClassifier
from wsi_trainer.models.tasks.base import Owners


def predict(trainer: pl.Trainer, model: SlideClassifier, data: SlideData, split: str) -> Predictions:
    """The model's predictions of all slides of a split that can be read."""
    records = data.of(split)
    if not records:
        raise UserError(f"no slide is in the split {split}; the splits of this run are in its splits.csv")
    said = read_predictions(trainer.predict(model, dataloaders=data.loader(split)))
    kept = [record for record in records if record.slide in said]
    if not kept:
        raise UserError(f"none of the {len(records)} slides of the split {split} can be read; see failures.csv")
    targets = np.concatenate([data.targets[record.slide].double().numpy() for record in kept])
    return model.task.predictions(owners_of(kept), targets, np.stack([said[record.slide] for record in kept]))


def read_predictions(outputs: Any) -> dict[str, np.ndarray]:
    """What `predict_step` returned, by slide, without the slides that could not be read."""
    pairs: list[tuple[str, Tensor | None]] = list(outputs or ())
    return {slide: said[0].double().numpy() for slide, said in pairs if said is not None}


def owners_of(records: Sequence[SlideRecord]) -> Owners:
    """Slides, patients and sites of the records."""
    sites = tuple(record.site for record in records) if any(record.site for record in records) else ()
    return Owners(tuple(r.slide for r in records), tuple(r.patient for r in records), sites)


def evaluate(
    predictions: Predictions, resamples: int = 1000, seed: int = 0, scores: dict[str, Score] | None = None
) -> dict[str, Any]:
    """All scores with their intervals, as `wsi_trainer.metrics.summarise` returns them."""
    return summarise(predictions, SCORES if scores is None else scores, resamples, seed)
