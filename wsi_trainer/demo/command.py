"""The command `demo`: slides in, trained classifier and report out."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from wsi_trainer.demo import stages
from wsi_trainer.demo.settings import DemoSettings
from wsi_trainer.demo.summary import Summary
from wsi_trainer.demo.workplace import prepare
from wsi_trainer.report import write_report
from wsi_trainer.terminal import say


def demo(
    out: Path = Path("demo-run"),
    seed: int = 0,
    slides: int = 100,
    side: int = 1024,
    epochs: int = 3,
    budget: str | None = "12MiB",
) -> None:
    """Make slides, train on them at full resolution and as thumbnails, and report the difference.

    Args:
        out: The folder for slides, runs and report.
        seed: Decides the slides and the training.
        slides: How many slides to make.
        side: Height and width of a slide in pixels.
        epochs: Times that the full-resolution model sees each slide.
        budget: Device memory for a training step; null trains with plain PyTorch.
    """
    began = time.perf_counter()
    console = Console()
    settings = DemoSettings(out=out, seed=seed, slides=slides, side=side, epochs=epochs, budget=budget)
    kept = prepare(out, settings.made_from())
    console.rule("[bold]1/6  slides", align="left")
    manifest = out / "slides" / "manifest.csv" if kept else stages.make_slides(settings, console)
    say(console, f"{slides} slides of {side} × {side} px: {manifest}")
    console.rule("[bold]2/6  preprocessing", align="left")
    stages.convert(settings, manifest)
    console.rule("[bold]3/6  training on every pixel", align="left")
    if budget is None:
        console.print("Executed by plain PyTorch, which these slides fit; --budget 12MiB executes tile by tile.")
    full = stages.train_and_test(settings, "full")
    console.rule("[bold]4/6  training on thumbnails, for comparison", align="left")
    thumbnail = stages.train_and_test(settings, "thumbnail")
    console.rule("[bold]5/6  maps of what the model looked at", align="left")
    stages.write_maps(settings, full, console)
    console.rule("[bold]6/6  report", align="left")
    report = write_report(full, thumbnail, out=out / "report.html", title="wsi-train demo")
    Summary.of(full, thumbnail, time.perf_counter() - began, report).show(console)
