"""Ten minutes of benchmarks, all with --full, or some by name. Each says with --help how to run a part of it."""

from __future__ import annotations

import argparse
import runpy
import sys

from rich.console import Console
from rich.table import Table

#: What each measures, in the order of how long it takes: minutes first, hours last.
ALL = {
    "score": "time and memory of six networks in a quarter of plain PyTorch's memory, as two figures",
    "planner_speed": "processor seconds of planning",
    "recipes": "planning for slides of many sizes",
    "host": "Python's share of small steps",
    "small_tiles": "what tiny tiles cost beside their arithmetic",
    "background": "a step on slides that are mostly background, against one of tissue",
    "sparse": "inference on a slide of 100,000 x 80,000 pixels by its share of tissue",
    "peers": "published and common ways beside ours: time, the process's memory, exactness",
    "slides": "converting and reading slides",
    "view": "the viewer: the first tile of a large slide, and a thousand pans and zooms",
    "segmentation": "a training step of a U-Net on a slide of 20,000 x 20,000 pixels",
    "policies": "published techniques beside ours",
    "whole_slide": "a training step on a slide of up to 50,000 x 50,000 pixels, from its store",
    "largest_image": "the largest image under a limit",
    "against_plain": "steps under a budget against plain PyTorch",
}

#: What is run where no name is given: some ten minutes, and with what arguments.
TEN_MINUTES: dict[str, list[str]] = {
    "planner_speed": [],
    "small_tiles": [],
    "peers": ["--set", "quick", "--repetitions", "1", "--again", "all"],
}
#: Arguments with --full, where a benchmark has more than it does by itself.
FULL: dict[str, list[str]] = {"peers": ["--set", "full", "--repetitions", "5"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; those of ten minutes, if none is named")
    parser.add_argument("--full", action="store_true", help="all, as far as they go: many hours")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    options = parser.parse_args()
    for name in options.names:
        if name not in ALL:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(ALL)}")
    table = Table("benchmark", "measures", "in ten minutes")
    for name, about in ALL.items():
        table.add_row(name, about, "yes" if name in TEN_MINUTES else "")
    Console().print(table)
    if options.list:
        return
    for name in options.names or (ALL if options.full else TEN_MINUTES):
        Console().rule(name)
        some = {} if options.names else TEN_MINUTES
        sys.argv = [name, *(FULL if options.full else some).get(name, [])]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
