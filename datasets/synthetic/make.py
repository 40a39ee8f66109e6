"""Makes a synthetic data set: ``python datasets/synthetic/make.py OUT --slides 40 --side 2048 --seed 0``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from wsi_trainer.synthetic import generate


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition("x" if "x" in text else "-")
    return int(low), int(high)


def _side(text: str) -> int | tuple[int, int]:
    return _pair(text) if "-" in text else int(text)


def _splits(text: str) -> dict[str, float]:
    pairs = (part.split("=") for part in text.split(","))
    return {name: float(share) for name, share in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for manifest.csv, slides/ and lesions/")
    parser.add_argument("--slides", type=int, default=40, help="number of slides, half of them positive")
    parser.add_argument("--side", type=_side, default=2048, help="longest side in px, or a range: 1500-2500")
    parser.add_argument("--shape", type=_pair, help="height and width of every slide instead: 80000x100000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="scanner noise everywhere, also on glass")
    parser.add_argument("--splits", type=_splits, default="train=0.6,val=0.2,test=0.2")
    parser.add_argument("--mpp", type=float, default=0.5, help="micrometres per pixel")
    parser.add_argument("--tissue", type=float, default=0.4, help="share of a slide that is tissue, about")
    parser.add_argument("--contrast", type=float, default=0.34, help="chromatin of lesion nuclei; smaller is harder")
    parser.add_argument("--quality", type=int, default=88, help="JPEG quality")
    parser.add_argument("--workers", type=int, help="threads (default: one for each core)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Parses the arguments and makes the data set."""
    options = vars(_parser().parse_args(argv))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[mpx]:.0f} Mpx"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    pixels = 0
    with Progress(*columns) as bar:
        task = bar.add_task("slides", total=options["slides"], mpx=0)

        def progress(slides: int, added: int) -> None:
            nonlocal pixels
            pixels += added
            bar.update(task, advance=slides, mpx=pixels / 1e6)

        try:
            manifest = generate(progress=progress, **options)
        except ValueError as error:
            print(f"make.py: {error}", file=sys.stderr)
            return 2
    print(manifest)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
