"""A real training step of a U-Net on a whole slide with drawn lesions, and what the process took.

    python -m benchmarks.segmentation [--side 20000] [--widths 8 16 32 64] [--budget 768MiB]

The slide is synthetic, a JPEG TIFF with a scanner's noise everywhere, so that no tile of background is free; its
lesions are outlines in GeoJSON. Slide and step are made by a process each: the kernel's high-water mark of the second
has all of Python and PyTorch in it. The step is what `wsi-train fit` does: forward, loss, backward, AdamW.
Writes the side's case into benchmarks/results/segmentation.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.keep import keep_case

NAME = "segmentation"


def make_slide(folder: Path, side: int) -> None:
    """A slide with lesions, their outlines and a manifest."""
    from wsi_trainer.synthetic import SlideSpec
    from wsi_trainer.synthetic.cohort import write_slide

    spec = SlideSpec(side, side, seed=1, positive=True, noise=True, tissue=0.6)
    slide = write_slide(folder / "slide.tif", spec)
    features = [
        {
            "type": "Feature",
            "properties": {"classification": {"name": "lesion"}},
            "geometry": {"type": "Polygon", "coordinates": [site.polygon().tolist()]},
        }
        for site in slide.sites
    ]
    outlines = {"type": "FeatureCollection", "features": features}
    (folder / "slide.geojson").write_text(json.dumps(outlines), encoding="utf-8")
    rows = [[split, "slide.tif", split, "slide.geojson"] for split in ("train", "val")]  # val is not looked at
    with (folder / "manifest.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["slide", "path", "split", "regions"], *rows])


def step(folder: Path, widths: list[int], budget: str) -> dict[str, Any]:
    """One step on the slide of a folder, in this process."""
    import torch

    from tests.lightning_plugin.planner.peaks import of_status
    from wsi_trainer.data.datamodule import SlideData
    from wsi_trainer.data.dataset import DataConfig
    from wsi_trainer.fit.config import TrainConfig
    from wsi_trainer.fit.trainer import image_of, make_trainer
    from wsi_trainer.models import SegmentationTask, SlideSegmenter, UNet

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SlideSegmenter(backbone=UNet(widths), task=SegmentationTask(["normal", "lesion"]))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = TrainConfig(epochs=1, budget=budget, accelerator="cpu")
    slides = SlideData(
        DataConfig(manifest=folder / "manifest.csv", test=0),
        model.task,
        to_image=image_of(config),
    )
    trainer: Any = make_trainer(config, folder, progress=False)
    trainer.limit_val_batches = 0
    start = of_status("VmRSS")
    wall, busy = time.perf_counter(), time.process_time()
    trainer.fit(model, datamodule=slides)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    assert trainer.global_step == 1
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    plan = trainer.strategy.plan
    return {
        "widths": widths,
        "budget": budget,
        "seconds": round(wall, 1),
        "processor_seconds": round(busy, 1),
        "loss": float(trainer.callback_metrics["train_loss"]),
        "process_before_bytes": start,
        "process_peak_bytes": of_status("VmHWM"),
        "device_peak_bytes": trainer.strategy.peak_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "plain_bytes": plan.plain_bytes,
        "disk_bytes": sum(s.forecast.stored_bytes for s in plan.segments if s.tier == "disk"),
        "segments": len(plan.segments),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.segmentation", description=__doc__)
    parser.add_argument("--side", type=int, default=20_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--budget", default="768MiB")
    parser.add_argument("--stage", choices=("slide", "step"), help="only this, in the folder")
    parser.add_argument("--folder", type=Path, help="of the slide; a temporary one by default")
    options = parser.parse_args()
    if options.stage == "slide":
        make_slide(options.folder, options.side)
        return
    if options.stage == "step":
        values = step(options.folder, options.widths, options.budget)
        print(json.dumps(values), flush=True)
        keep_case(NAME, f"{options.side} x {options.side}, widths {options.widths}", values)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        command = [sys.executable, "-m", "benchmarks.segmentation", *sys.argv[1:], f"--folder={folder}"]
        for stage in ("slide", "step"):
            subprocess.run([*command, f"--stage={stage}"], check=True, env=os.environ)


if __name__ == "__main__":
    main()
