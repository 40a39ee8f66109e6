"""Published encoders on bags of patches: what a step on 10,000 patches takes, and real steps on a CPU.

    python -m benchmarks.encoders planned [--names uni2-h ...]
    python -m benchmarks.encoders step --work DIR [--patches 2000] [--slide FILE] [--budget 4GiB]

- ``planned``: every encoder of the registry, all of it trained with AdamW, attention pooling, 10,000 patches of its own
  size in float32, on cards of 11, 24 and 80 GiB with the rates of an H100; nothing is computed. AdamW's two moments are
  taken off the budget.
- ``step``: timm's ViT-S/16 on every tissue patch of a slide, by the trainer of `wsi-train fit`; a synthetic slide of
  about so many patches where no file is given. Gives what the step's ledger and the process held.

Writes benchmarks/results/encoders.json, a case for each, and of ``planned`` the page docs/encoders.md.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.encoders_page import write_page
from benchmarks.keep import keep_case
from lightning_plugin import BudgetError
from lightning_plugin.units import parse_bytes
from wsi_trainer.data import DataConfig, PatchConfig, SlideData
from wsi_trainer.fit.config import TrainConfig
from wsi_trainer.fit.engine import image_of, make_trainer
from wsi_trainer.fit.memory import process_peak
from wsi_trainer.fit.memory_watch import MemoryWatch
from wsi_trainer.fit.planning import plan_shape
from wsi_trainer.models import AttentionPooling, PatchEncoder, SlideClassifier
from wsi_trainer.models.encoders.registry import ENCODERS
from wsi_trainer.synthetic import SlideSpec, write_slide

PATCHES = 10_000
BUDGETS = ("11GiB", "24GiB", "80GiB")
DEVICE = "cuda:h100"
VIT = "timm:vit_small_patch16_224"
TISSUE = 0.85
"""Of the synthetic slide."""


def planned(options: argparse.Namespace) -> None:
    for name in options.names or [encoder.name for encoder in ENCODERS]:
        with torch.device("meta"):
            model = SlideClassifier(backbone=PatchEncoder(name), head=AttentionPooling)
        encoder = model.backbone
        assert isinstance(encoder, PatchEncoder)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        shape = (PATCHES, 3, encoder.size, encoder.size)
        plans = {budget: plan_of(model, shape, parse_bytes(budget) - 2 * weights) for budget in BUDGETS}
        row = {"encoder": name, "size": encoder.size, "parameters_bytes": weights, "plans": plans}
        print(row, flush=True)
        keep_case("encoders", f"planned: {name}", row)
    write_page()


def plan_of(model: SlideClassifier, shape: tuple[int, ...], budget: int) -> dict[str, Any]:
    """What a step within the budget is predicted to take, or the smallest budget that would do."""
    began = time.process_time()
    try:
        plan = plan_shape(model, shape, budget, DEVICE)
    except BudgetError as error:
        return {"budget": budget, "smallest": error.smallest}
    return {
        "budget": budget,
        "peak_bytes": plan.peak_bytes,
        "seconds": plan.seconds,
        "plain_bytes": plan.plain_bytes,
        "host_bytes": sum(s.forecast.stored_bytes for s in plan.segments if s.tier != "device"),
        "planning_seconds": round(time.process_time() - began, 1),
    }


def step(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    slide = options.slide or synthetic(work, options.patches)
    rows = [f"{name},{slide.resolve()},{name},1,{name}" for name in ("train", "val")]  # the second is never read
    (work / "manifest.csv").write_text("\n".join(["slide,path,patient,label,split", *rows]))
    patches = PatchConfig(turn=False)
    config = TrainConfig(epochs=1, budget=options.budget, accelerator="cpu", precision="32-true")
    torch.manual_seed(0)
    model = SlideClassifier(backbone=PatchEncoder(VIT), head=AttentionPooling)
    data = DataConfig(manifest=work / "manifest.csv", patches=patches, turn=False)
    watch = MemoryWatch()
    trainer = make_trainer(config, work, [watch], progress=False)
    slides = SlideData(data, model.task, 0, partial(image_of, config))
    began = time.perf_counter(), time.process_time()
    trainer.fit(model, train_dataloaders=slides.loader("train"))
    assert watch.plan is not None
    row = {
        "slide": slide.name,
        "patches": watch.image_shape[0],
        "budget": parse_bytes(options.budget),
        "step_peak_bytes": watch.step_peak_bytes,
        "plain_bytes": watch.plan.plain_bytes,
        "process_peak_bytes": process_peak(),
        "seconds": round(time.perf_counter() - began[0]),
        "processor_seconds": round(time.process_time() - began[1]),
    }
    print(row)
    keep_case("encoders", f"step: ViT-S/16, {row['patches']} patches", row)


def synthetic(work: Path, patches: int) -> Path:
    """A slide with about so many patches of tissue."""
    side = math.ceil(math.sqrt(patches * 224**2 / TISSUE) / 224) * 224
    path = work / f"slide-{side}.tif"
    if not path.is_file():
        write_slide(path, SlideSpec(side, side, seed=5, tissue=TISSUE))
    return path


PARTS = {f.__name__: f for f in (planned, step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--names", nargs="*", help="which encoders; all by default")
    parser.add_argument("--work", type=Path, help="folder for the slide")
    parser.add_argument("--patches", type=int, default=2000)
    parser.add_argument("--slide", type=Path, default=None)
    parser.add_argument("--budget", default="4GiB")
    options = parser.parse_args()
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
