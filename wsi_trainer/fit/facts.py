"""The memory facts of a run, for its report."""

from __future__ import annotations

import math
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from wsi_trainer.data import SlideData
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.memory import held_for_backward, process_peak
from wsi_trainer.fit.memory_watch import MemoryWatch
from wsi_trainer.models import SlideClassifier


def memory_facts(watch: MemoryWatch, model: SlideClassifier, slides: SlideData, config: TrainConfig) -> dict[str, Any]:
    """What the steps used, and what plain PyTorch holds for backward on the largest slide."""
    facts: dict[str, Any] = {"process_peak_bytes": process_peak()}
    if watch.plan is None:
        readable = (batch for batch in slides.loader("val") if "failure" not in batch)
        batch = max(readable, key=lambda batch: _pixels(batch["image"]))
        seen = apply_to_collection(
            (batch["image"], batch.get("context", []), batch.get("tissue", [])), Tensor, lambda t: t.to(model.device)
        )
        held = held_for_backward(model, *seen)
        return facts | {"engine": "plain PyTorch", "image_shape": list(batch["image"].shape), "plain_bytes": held}
    return facts | {
        "engine": "SFTStrategy, tile by tile",
        "budget": config.budget,
        "budget_bytes": watch.plan.budget,
        "image_shape": list(watch.image_shape),
        "step_peak_bytes": watch.step_peak_bytes,
        "plan_peak_bytes": watch.plan.peak_bytes,
        "plain_bytes": watch.plan.plain_bytes,
        "approximation": watch.plan.approximation,
    }


def _pixels(image: Tensor) -> int:
    return math.prod(image.shape)
