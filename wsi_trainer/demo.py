"""The command `demo`: slides in, trained classifier and report out, in a few minutes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from wsi_trainer.errors import UserError
from wsi_trainer.explain.heatmaps import write_heatmaps
from wsi_trainer.explain.outputs import sentence_on_regions
from wsi_trainer.fit.callbacks import process_peak
from wsi_trainer.fit.compare import NAMES
from wsi_trainer.fit.fit import run_fit
from wsi_trainer.fit.parser import make_parser
from wsi_trainer.fit.run import Run, read_json
from wsi_trainer.io.display import format_bytes, say
from wsi_trainer.io.files import write_json
from wsi_trainer.metrics import ClassPredictions, Interval, auc, paired_difference, score_intervals
from wsi_trainer.preprocess.command import preprocess
from wsi_trainer.report import write_report
from wsi_trainer.synthetic import generate

SPLITS = {"train": 0.4, "val": 0.1, "test": 0.5}
"""As many held out as trained on: an interval from a dozen patients would say little."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The options of `wsi-train demo`."""

    out: Path
    seed: int
    slides: int
    side: int
    epochs: int
    budget: str | None
    thumbnail: int = 8
    """Factor by which a thumbnail is shrunk in each direction."""

    def __post_init__(self) -> None:
        if self.slides < 20:
            raise UserError(f"--slides is {self.slides}; the demo needs at least 20 to train and to compare two models")
        if self.side < 256:
            raise UserError(f"--side is {self.side}; the demo needs slides of at least 256 pixels")
        if self.epochs < 1:
            raise UserError(f"--epochs is {self.epochs}; it must be 1 or more")

    def made_from(self) -> dict[str, Any]:
        """The settings that decide the slides: with equal ones slides of an earlier demo are used again."""
        return {key: value for key, value in asdict(self).items() if key in ("seed", "slides", "side")}

    def run_options(self, name: str) -> dict[str, Any]:
        """The config of one of the two runs, as `wsi-train fit --config` reads it."""
        full = name == "full"
        return {
            "out": str(self.out / "runs" / name),
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
                "manifest": str(self.out / "slides" / "manifest.csv"),
                "stores": str(self.out / "zarr"),
                "downsample": 1 if full else self.thumbnail,
            },
            "train": {
                "epochs": self.epochs if full else 5 * self.epochs,
                "seed": self.seed,
                "budget": self.budget if full else None,
            },
        }


_MARK = "demo.json"


def prepare(out: Path, made_from: dict[str, Any]) -> bool:
    """Make the folder ready and say whether slides of an earlier demo with these settings are in it.

    An earlier demo's runs are removed; a folder with anything else in it is refused.
    """
    mark = out / _MARK
    if out.exists() and any(out.iterdir()) and not mark.is_file():
        raise UserError(f"{out} is not empty and not an earlier demo; choose another folder with --out")
    same = read_json(mark) == made_from
    for name in ("runs",) if same else ("runs", "slides", "zarr"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_json(mark, made_from)
    return same and (out / "slides" / "manifest.csv").is_file()


@dataclass(frozen=True)
class Summary:
    """Results of the demo."""

    full: Interval
    thumbnail: Interval
    difference: Interval
    memory: dict[str, float]
    seconds: float
    report: Path

    @staticmethod
    def of(full: Run, thumbnail: Run, seconds: float, report: Path) -> Summary:
        """Gather the numbers from the two runs."""
        first = ClassPredictions.read(full.predictions("test"))
        second = ClassPredictions.read(thumbnail.predictions("test"))
        return Summary(
            full=score_intervals(first, {"auc": auc})["auc"],
            thumbnail=score_intervals(second, {"auc": auc})["auc"],
            difference=paired_difference(first, second, auc),
            memory=read_json(full.memory),
            seconds=seconds,
            report=report,
        )

    def show(self, console: Console) -> None:
        """Print the numbers and the path of the report."""
        table = Table(title="held-out slides, AUC with 95 % interval", title_justify="left", show_header=False)
        table.add_row("full resolution", str(self.full))
        table.add_row("thumbnail", str(self.thumbnail))
        verdict = "excludes 0" if self.difference.excludes(0) else "includes 0"
        table.add_row("difference, paired", f"{self.difference}{'' if self.difference.absent else f' {verdict}'}")
        if peak := self.memory.get("step_peak_bytes"):
            table.add_row("memory of a step, measured", format_bytes(peak))
        if plain := self.memory.get("plain_bytes"):
            table.add_row("what plain PyTorch holds for backward", format_bytes(plain))
        table.add_row("memory of the process, peak", format_bytes(process_peak()))
        table.add_row("time", f"{self.seconds:.0f} s")
        console.print(table)
        say(console, f"report: {self.report.resolve()}")


def make_slides(settings: DemoSettings, console: Console) -> Path:
    """Generate the slides and return the manifest."""
    with _bar(console) as progress:
        task = progress.add_task("slides", total=settings.slides)
        return generate(
            settings.out / "slides",
            slides=settings.slides,
            shape=(settings.side, settings.side),  # of one size, so that one plan serves all steps
            seed=settings.seed,
            splits=SPLITS,
            progress=lambda slides, pixels: progress.advance(task, slides),
        )


def convert(settings: DemoSettings, manifest: Path) -> None:
    """Run `wsi-train preprocess`."""
    out = settings.out / "zarr"
    levels = settings.thumbnail.bit_length()  # down to the thumbnail
    if preprocess(str(manifest), out, background="constant", levels=levels, overwrite=True):
        raise UserError(f"slides could not be converted; the reasons are in {out / 'failures.csv'}")


def train_and_test(settings: DemoSettings, name: str) -> Run:
    """Run `wsi-train fit` with the demo's config, which is left beside the runs to be tried again."""
    parser = make_parser("fit", "Train a slide classifier.")
    options = parser.parse_object(settings.run_options(name))
    config = settings.out / "runs" / f"{name}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(parser.dump(options), encoding="utf-8")
    return run_fit(parser, options)


def write_maps(settings: DemoSettings, run: Run, console: Console) -> None:
    """Write maps of the held-out slides, and compare them with the lesions that were generated."""
    facts = write_heatmaps(run, regions=settings.out / "slides" / "lesions")
    say(console, f"{sentence_on_regions(facts)}.")


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


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
    manifest = out / "slides" / "manifest.csv" if kept else make_slides(settings, console)
    say(console, f"{slides} slides of {side} × {side} px: {manifest}")
    console.rule("[bold]2/6  preprocessing", align="left")
    convert(settings, manifest)
    console.rule("[bold]3/6  training on every pixel", align="left")
    if budget is None:
        console.print("Executed by plain PyTorch, which these slides fit; --budget 12MiB executes tile by tile.")
    full = train_and_test(settings, "full")
    console.rule("[bold]4/6  training on thumbnails, for comparison", align="left")
    thumbnail = train_and_test(settings, "thumbnail")
    console.rule("[bold]5/6  maps of what the model looked at", align="left")
    write_maps(settings, full, console)
    console.rule("[bold]6/6  report", align="left")
    report = write_report(full, thumbnail, out=out / "report.html", title="wsi-train demo", names=NAMES["thumbnail"])
    Summary.of(full, thumbnail, time.perf_counter() - began, report).show(console)
