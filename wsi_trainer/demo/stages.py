"""The stages of the demo, each a function that leaves its result in the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wsi_trainer.demo.settings import SPLITS, DemoSettings
from wsi_trainer.errors import UserError
from wsi_trainer.explain.heatmaps import write_heatmaps
from wsi_trainer.explain.outputs import sentence_on_regions
from wsi_trainer.fit.fit import run_fit
from wsi_trainer.fit.parser import make_parser
from wsi_trainer.fit.run import Run
from wsi_trainer.slides.preprocess import preprocess
from wsi_trainer.synthetic import generate
from wsi_trainer.terminal import say


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
