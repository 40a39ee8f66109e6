"""The memory facts of a run, for its report."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from wsi_trainer.data import SlideData, dense, open_image
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.memory import held_for_backward, process_peak
from wsi_trainer.fit.run_folder import RunFolder
from wsi_trainer.models import SlideClassifier


def memory_facts(
    trainer: pl.Trainer, model: SlideClassifier, slides: SlideData, config: TrainConfig, folder: RunFolder
) -> dict[str, Any]:
    """What the steps used, and what plain PyTorch needs for the largest slide."""
    facts: dict[str, Any] = {"engine": "plain PyTorch", "process_peak_bytes": process_peak()}
    if config.budget is None:
        image = max(
            (dense(open_image(r.path, slides.config.downsample)) for r in slides.of("val")), key=_pixels
        )
        facts["image_shape"] = list(image.shape)
        facts["plain_bytes"] = held_for_backward(model, image.to(model.device))
    return facts


def _pixels(image: Any) -> int:
    return int(image.shape[-1] * image.shape[-2])
