"""The pictures of the page on trust: time per slide as their number grows, memory and time over a long training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_slides(cases: dict[str, Any], path: Path) -> None:
    """Milliseconds a slide of a run of preprocess, tenth by tenth, of few slides and of all."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for axes, key, title in (
        (panels[0], "ms", "of processors"),
        (panels[1], "ms by the clock", "by the clock, beside other work"),
    ):
        for name, colour in (("part", "tab:blue"), ("all", "tab:orange")):
            case = cases.get(f"preprocess, {name}", {})
            points = [(one["slides"], one[key]) for one in case.get("over slides", [])]
            if points:
                axes.plot(*zip(*points), marker="o", markersize=4, color=colour, label=f"{case['slides']:,} slides")
        axes.set_title(f"preprocess, ms a slide, {title}", fontsize=10)
        axes.set_xscale("log")
        axes.set_xlabel("slides that were there")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="lower left")
    finish(figure, panels, path)


def draw_steps(case: dict[str, Any], path: Path) -> None:
    """What the process holds, and milliseconds of a step, over a training."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    steps = [one["step"] for one in case["over steps"]]
    for axes, key, title in (
        (panels[0], "resident MiB", "memory of the process, MiB"),
        (panels[1], "ms", "ms of a step, of processors"),
    ):
        axes.plot(steps, [one[key] for one in case["over steps"]], marker=".", color="tab:blue")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("steps")
        axes.set_ylim(bottom=0)
    finish(figure, panels, path)


def finish(figure: Any, panels: Any, path: Path) -> None:
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
