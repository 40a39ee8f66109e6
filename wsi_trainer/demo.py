"""The command `demo`: slides in, trained classifier and report out, in a few minutes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from wsi_trainer.errors import UserError
from wsi_trainer.explain.heatmaps import write_heatmaps
from wsi_trainer.explain.outputs import sentence_on_regions
from wsi_trainer.fit.callbacks import process_peak
from wsi_trainer.fit.compare import NAMES
from wsi_trainer.fit.config import Config
from wsi_trainer.fit.fit import run_fit
from wsi_trainer.fit.run import Run
from wsi_trainer.io.display import format_bytes, say
from wsi_trainer.io.files import read_json, write_json, write_text
from wsi_trainer.metrics import ClassPredictions, auc, paired_difference, score_intervals
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.report import write_report
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.4, "val": 0.1, "test": 0.5}
"""As many held out as trained on: an interval from a dozen patients would say little."""
THUMBNAIL = 8
"""Factor by which a thumbnail is shrunk in each direction."""
LEAST = {"slides": 20, "side": 256, "epochs": 1}


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
    for (name, least), given in zip(LEAST.items(), (slides, side, epochs)):
        if given < least:
            raise UserError(f"--{name} is {given}; the demo needs at least {least}")
    began = time.perf_counter()
    console = Console()
    made_from = {"seed": seed, "slides": slides, "side": side}
    manifest = out / "slides" / "manifest.csv"
    kept = prepare(out, made_from) and manifest.is_file()
    console.rule("[bold]1/6  slides", align="left")
    if not kept:
        make_slides(out / "slides", made_from, console)
    say(console, f"{slides} slides of {side} × {side} px: {manifest}")
    console.rule("[bold]2/6  preprocessing", align="left")
    levels = THUMBNAIL.bit_length()  # down to the thumbnail
    if preprocess(str(manifest), out / "zarr", background="constant", levels=levels, overwrite=True):
        raise UserError(f"slides could not be converted; the reasons are in {out / 'zarr' / 'failures.csv'}")
    console.rule("[bold]3/6  training on every pixel", align="left")
    if budget is None:
        console.print("Executed by plain PyTorch, which these slides fit; --budget 12MiB executes tile by tile.")
    full = train_and_test(out, "full", downsample=1, epochs=epochs, seed=seed, budget=budget)
    console.rule("[bold]4/6  training on thumbnails, for comparison", align="left")
    thumbnail = train_and_test(out, "thumbnail", downsample=THUMBNAIL, epochs=5 * epochs, seed=seed, budget=None)
    console.rule("[bold]5/6  maps of what the model looked at", align="left")
    facts = write_heatmaps(full, regions=out / "slides" / "lesions")
    say(console, f"{sentence_on_regions(facts)}.")
    console.rule("[bold]6/6  report", align="left")
    report = write_report(full, thumbnail, out=out / "report.html", title="wsi-train demo", names=NAMES["thumbnail"])
    show(full, thumbnail, time.perf_counter() - began, console)
    say(console, f"report: {report.resolve()}")


def prepare(out: Path, made_from: dict[str, Any]) -> bool:
    """Make the folder ready; returns True where an earlier demo with these settings has left its slides in it.

    An earlier demo's runs are removed; a folder with anything else in it is refused.
    """
    mark = out / "demo.json"
    if out.exists() and any(out.iterdir()) and not mark.is_file():
        raise UserError(f"{out} is not empty and not an earlier demo; choose another folder with --out")
    same = read_json(mark) == made_from
    for name in ("runs",) if same else ("runs", "slides", "zarr"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_json(mark, made_from)
    return same


def make_slides(folder: Path, made_from: dict[str, int], console: Console) -> None:
    """Generate the slides and their manifest, all of one size, so that one plan serves all steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("slides", total=made_from["slides"])
        generate(
            folder,
            slides=made_from["slides"],
            shape=(made_from["side"], made_from["side"]),
            seed=made_from["seed"],
            splits=SPLITS,
            progress=lambda slides, pixels: progress.advance(task, slides),
        )


def train_and_test(out: Path, name: str, downsample: int, epochs: int, seed: int, budget: str | None) -> Run:
    """Run `wsi-train fit` with a config that is left beside the runs to be tried again."""
    config = Config.of(
        {
            "model": {
                "backbone": {
                    "class_path": "wsi_trainer.models.VGG",
                    "init_args": {"widths": [12, 24, 32], "convs": 1, "stem_stride": 2, "norm": "weight"},
                },
                "head": {"class_path": "wsi_trainer.models.GeneralisedMeanPooling"},
                "task": {"class_path": "wsi_trainer.models.BinaryTask"},
                "learning_rate": 0.003,
            },
            "data": {
                "manifest": str(out / "slides" / "manifest.csv"),
                "stores": str(out / "zarr"),
                "downsample": downsample,
            },
            "train": {"epochs": epochs, "seed": seed, "budget": budget},
        },
        out / "runs" / name,
    )
    write_text(out / "runs" / f"{name}.yaml", yaml.safe_dump({"out": str(config.out)}) + config.text)
    return run_fit(config)


def show(full: Run, thumbnail: Run, seconds: float, console: Console) -> None:
    """Print what both runs reached, and the memory and the time that it took."""
    first, second = (ClassPredictions.read(run.predictions_file("test")) for run in (full, thumbnail))
    difference = paired_difference(first, second, auc)
    verdict = "" if difference.absent else f" {'excludes' if difference.excludes(0) else 'includes'} 0"
    memory = read_json(full.memory)
    table = Table(title="held-out slides, AUC with 95 % interval", title_justify="left", show_header=False)
    table.add_row("full resolution", str(score_intervals(first, {"auc": auc})["auc"]))
    table.add_row("thumbnail", str(score_intervals(second, {"auc": auc})["auc"]))
    table.add_row("difference, paired", f"{difference}{verdict}")
    if peak := memory.get("step_peak_bytes"):
        table.add_row("memory of a step, measured", format_bytes(peak))
    if plain := memory.get("plain_bytes"):
        table.add_row("what plain PyTorch holds for backward", format_bytes(plain))
    table.add_row("memory of the process, peak", format_bytes(process_peak()))
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
