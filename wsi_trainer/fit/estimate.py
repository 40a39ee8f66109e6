"""What a run is going to cost, said before it starts: time, memory and disk, from the plan and the manifest."""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from rich.console import Console

from lightning_plugin import Plan, SFTDDPStrategy, SFTStrategy
from wsi_trainer.data import SlideData, SlideRecord, open_bag, open_image
from wsi_trainer.data.tissue import mask_of
from wsi_trainer.errors import UserError
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.memory import format_bytes
from wsi_trainer.fit.planning import plan_shape
from wsi_trainer.fit.run_folder import RunFolder, write_json
from wsi_trainer.models import SlideClassifier
from wsi_trainer.terminal import say

log = logging.getLogger("wsi_trainer")

UNLIMITED = 1 << 60
"""The budget of plain PyTorch: its step is planned to be asked what it needs."""
FORWARD_SHARE = 1 / 3
"""Of a training step's time: backward does about twice the work of forward."""


class Estimate(Callback):
    """Plans the largest slide's step when training starts, prints what follows from it, and writes estimate.json."""

    def __init__(self, slides: SlideData, config: TrainConfig, folder: RunFolder) -> None:
        self.slides, self.config, self.folder = slides, config, folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, SlideClassifier)
        if not trainer.is_global_zero or trainer.fit_loop.restarted_mid_epoch or trainer.current_epoch > 0:
            return
        sizes = {split: self._sizes(self.slides.of(split)) for split in ("train", "val", "test")}
        del sizes["test"]  # it was only to be seen whether they can be opened: better now than at the end
        if not sizes["train"]:
            return
        strategy: Any = trainer.strategy
        budget = strategy.settings.options.budget if isinstance(strategy, (SFTStrategy, SFTDDPStrategy)) else None
        largest = max(sizes["train"].values(), key=lambda size: size[0] * size[1])
        if min(largest) < pl_module.stride:
            raise UserError(
                f"the largest training slide has {largest[0]} × {largest[1]} pixels at data.downsample "
                f"{self.slides.config.downsample}, and the backbone needs {pl_module.stride} for one position"
            )
        data = self.slides.config
        factors = [factor / data.downsample for factor in data.context]
        say(Console(), "planning a step on the largest slide, to say what the run costs")
        device = pl_module.device.type
        patches = None if data.patches is None else (largest[0] // largest[1], largest[1])
        shape = (1, 3, *largest) if patches is None else (patches[0], 3, patches[1], patches[1])
        plan = plan_shape(pl_module, shape, budget or UNLIMITED, device, factors)
        facts = estimate(plan, sizes, largest, budget, self.config.devices, checkpoint_bytes(pl_module))
        if patches is not None:
            facts["patches"] = list(patches)
        write_json(self.folder.estimate, facts)
        for line in sentence(facts).splitlines():
            say(Console(), line)

    def _sizes(self, records: list[SlideRecord]) -> dict[str, tuple[int, int]]:
        """Height and width of each slide that can be opened; one that cannot ends the run here, unless it may go on.

        Those of a bag are its patches', one below the other.
        """
        sizes, config = {}, self.slides.config
        for record in records:
            try:
                if config.patches is not None:
                    bags = [open_bag(p.path, config.patches, mask_of, p.mpp) for p in record.parts or (record,)]
                    sizes[record.slide] = (sum(bag.shape[0] for bag in bags) * bags[0].size, bags[0].size)
                    continue
                image = open_image(record.path, config.downsample, record.mpp)
            except (UserError, OSError) as error:
                if config.on_error == "stop":
                    raise
                log.info("slide %s is left out of the estimate: %s", record.slide, error)
                continue
            sizes[record.slide] = (image.shape[2], image.shape[3])
            image.close()
        return sizes


def estimate(
    plan: Plan,
    sizes: dict[str, dict[str, tuple[int, int]]],
    largest: tuple[int, int],
    budget: int | None,
    devices: int,
    checkpoint: int,
) -> dict[str, Any]:
    """The numbers: a slide's time is that of the largest, by its share of pixels."""
    pixels = {split: sum(h * w for h, w in slides.values()) for split, slides in sizes.items()}
    speed = plan.seconds / (largest[0] * largest[1]) / devices
    train, val = pixels["train"] * speed, pixels["val"] * speed * FORWARD_SHARE
    tiers = {tier: sum(s.forecast.stored_bytes for s in plan.segments if s.tier == tier) for tier in ("host", "disk")}
    return {
        "slides": {split: len(slides) for split, slides in sizes.items()},
        "pixels": pixels,
        "largest": list(largest),
        "seconds_per_epoch": train + val,
        "train_seconds": train,
        "validation_seconds": val,
        "device_bytes": plan.peak_bytes if budget else plan.plain_bytes,
        "budget": budget,
        "host_bytes": tiers["host"],
        "disk_bytes": tiers["disk"],
        "checkpoint_bytes": checkpoint,
    }


def checkpoint_bytes(model: SlideClassifier) -> int:
    """The best and the last checkpoint: weights, and the optimizer's two numbers for each trained one."""
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return 2 * (own + 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad))


def sentence(facts: dict[str, Any]) -> str:
    """The estimate as lines for the console."""
    what = "is {} × {}".format(*facts["largest"])
    if "patches" in facts:
        what = "has {0} patches of {1} × {1}".format(*facts["patches"])
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


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "a second"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
