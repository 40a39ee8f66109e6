"""Cost of training on slides: hours, memory and disk by the plan of the largest one; of a run, or of all its folds."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from lightning_plugin import Plan
from wsi_trainer.data.datamodule import SlideData, stratified
from wsi_trainer.data.dataset import DataConfig, SlideDataset, Visit, grouped
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.data.splits import folds
from wsi_trainer.errors import SlideError
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.io.display import duration, format_bytes
from wsi_trainer.models import SlideModel

log = logging.getLogger("wsi_trainer")

Shape = tuple[int, ...]
UNLIMITED = 1 << 60
"""The budget of plain PyTorch: its step is planned to be asked what it needs."""
FORWARD_SHARE = 1 / 3
"""Share of a training step's time that forward takes: backward does about twice its work."""


def shapes_of(records: Sequence[SlideRecord], config: DataConfig) -> dict[str, Shape]:
    """Shape of each slide's image or bag; one that cannot be opened ends the command, unless it may go on."""
    shapes = {}
    dataset = SlideDataset(list(records), None, config, lambda view: torch.empty(view.shape, device="meta"))
    for number, record in enumerate(records):
        batch = dataset[Visit(number, 0)]
        if "failure" not in batch:
            shapes[record.slide] = tuple(batch["image"].shape)
        elif config.on_error == "stop":
            raise SlideError(record.slide, batch["failure"])
        else:
            log.info("slide %s is left out of the estimate: %s", record.slide, batch["failure"])
    return shapes


def count_pixels(shape: tuple[int, ...]) -> int:
    """Pixels of an image, or of all patches of a bag."""
    return math.prod(shape) // shape[1]


def estimate(
    plan: Plan,
    shapes: dict[str, dict[str, tuple[int, ...]]],
    largest: tuple[int, ...],
    budget: int | None,
    devices: int,
    checkpoint: int,
) -> dict[str, Any]:
    """The numbers: a slide's time is that of the largest, by its share of pixels."""
    pixels = {split: sum(map(count_pixels, slides.values())) for split, slides in shapes.items()}
    speed = plan.seconds / count_pixels(largest) / devices
    train, val = pixels["train"] * speed, pixels["val"] * speed * FORWARD_SHARE
    tiers = {tier: sum(s.forecast.stored_bytes for s in plan.segments if s.tier == tier) for tier in ("host", "disk")}
    return {
        "slides": {split: len(slides) for split, slides in shapes.items()},
        "pixels": pixels,
        "largest": list(largest[2:]),
        "seconds_per_epoch": train + val,
        "train_seconds": train,
        "validation_seconds": val,
        "device_bytes": plan.peak_bytes if budget else plan.plain_bytes,
        "budget": budget,
        "host_bytes": tiers["host"],
        "disk_bytes": tiers["disk"],
        "checkpoint_bytes": checkpoint,
    }


def checkpoint_bytes(model: SlideModel) -> int:
    """The best and the last checkpoint: weights, and the optimizer's two numbers for each trained one."""
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return 2 * (own + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad))


def sentence(facts: dict[str, Any]) -> str:
    """The estimate as lines for the console."""
    height, width = facts["largest"]
    what = f"is {width} × {height} (width × height)"
    if facts["patches"]:
        what = f"has {facts['patches']} patches of {width} × {height}"
    slides, gigapixels = facts["slides"], sum(facts["pixels"].values()) / 1e9
    limit = f" of {format_bytes(facts['budget'])}" if facts["budget"] else ", without a budget"
    stored = {tier: facts[f"{tier}_bytes"] for tier in ("host", "disk")}
    below = " and ".join(f"{format_bytes(count)} on {tier}" for tier, count in stored.items() if count)
    return (
        f"{slides['train']} slides to train on and {slides['val']} to validate, {gigapixels:.3g} Gpx: about "
        f"{duration(facts['seconds_per_epoch'])} an epoch by the device's typical rates\n"
        f"the largest {what}: {format_bytes(facts['device_bytes'])} on the device{limit}"
        f"{', ' + below if below else ''}; checkpoints take {format_bytes(facts['checkpoint_bytes'])}"
    )


def divided(model: SlideModel, data: DataConfig, seed: int, count: int | None) -> list[list[SlideRecord]]:
    """The slides, or patients, with their splits, of a run or of each fold, as `fit` divides them."""
    task = model.task
    if count is None:
        return [SlideData(data, task, seed).cases]
    records = data.records(columns=task.columns, filled=not task.may_be_empty)
    return [
        grouped(data, fold, task)
        for fold in folds(stratified(task, records), count, seed=seed, validation=data.validation)
    ]


def study_cost(
    runs: Sequence[Sequence[SlideRecord]],
    shapes: dict[str, Shape],
    plan: Plan,
    plain: Plan,
    model: SlideModel,
    config: TrainConfig,
) -> list[str]:
    """Lines on what all runs cost, beside features of the same encoder that is not trained, and what makes it less.

    Args:
        runs: The slides of each run with their splits.
        shapes: Of the slides.
        plan: Of a step on the largest.
        plain: The same without a budget.
        model: Its checkpoints count.
        config: Says how often each slide is seen.
    """
    largest = max(shapes.values(), key=count_pixels)
    checkpoint, seconds, steps = checkpoint_bytes(model), 0.0, 0
    for run in runs:
        own = {
            split: {case.slide: shapes[case.slide] for case in run if case.split == split and case.slide in shapes}
            for split in ("train", "val", "test")
        }
        facts = estimate(plan, own, largest, None, config.devices, checkpoint)
        seconds += config.epochs * facts["seconds_per_epoch"]
        seconds += facts["pixels"]["test"] * plan.seconds / count_pixels(largest) / config.devices * FORWARD_SHARE
        steps += config.epochs * math.ceil(len(own["train"]) / config.accumulate / config.devices)
    pixels = sum(map(count_pixels, shapes.values()))
    frozen = pixels * plain.seconds / count_pixels(largest) * FORWARD_SHARE
    stored = sum(s.forecast.stored_bytes for s in plan.segments if s.tier == "disk")
    disk = f"{format_bytes(len(runs) * checkpoint)} of checkpoints"
    disk += f", {format_bytes(stored)} of maps during a step" if stored else ""
    count = "" if len(runs) == 1 else f" × {len(runs)} folds"
    lines = [
        f"{len(shapes)} slides, {pixels / 1e9:.3g} Gpx × {config.epochs} epochs{count}, by the device's typical rates:",
        f"  time    {duration(seconds)}, {duration(seconds / len(runs))} a run, {steps} steps of the optimizer",
        f"  disk    {disk}",
        f"  frozen  {duration(frozen)} once, for features of the encoder as it is, in place of all epochs and runs",
        "what to change first:",
    ]
    less = _less(len(runs), seconds, plan, plain, config)
    return lines + [f"  {duration(left):>8} with {what}" for left, what in sorted(less)]


def _less(runs: int, seconds: float, plan: Plan, plain: Plan, config: TrainConfig) -> list[tuple[float, str]]:
    """Changes, and the time that is left with each."""
    found = [(seconds / 4, "pixels twice as large: data.downsample, or data.patches.mpp")]
    if config.epochs > 1:
        found.append((seconds * (config.epochs // 2) / config.epochs, f"train.epochs {config.epochs // 2}"))
    if runs > 3:
        found.append((seconds * 3 / runs, "--folds 3"))
    if plain.seconds < 0.95 * plan.seconds:
        budget = format_bytes(plain.peak_bytes)
        found.append((seconds * plain.seconds / plan.seconds, f"a budget of {budget}, within which nothing is tiled"))
    return [*found, (seconds / 2, f"train.devices {2 * config.devices}, at best")]
