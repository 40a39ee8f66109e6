"""The page docs/results.md, from the lines that benchmarks/invisible_label.py measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PAGE = """# Results

## A label that a thumbnail cannot show

Synthetic slides whose label is a difference in nuclear texture: visible at full resolution, averaged
away in a thumbnail. For each seed the same network is trained by the same code on every pixel and on
thumbnails ({downsample} times smaller in each direction), and both are tested on the same held-out
slides. Those come from another generator seed, so that no patient and no texture is shared. The
thumbnail model sees each slide five times as often. Intervals are 95 %, by bootstrap over patients,
paired for the difference.

| seed | executed by | training slides | held-out slides (patients) | side \
| AUC, full resolution | AUC, thumbnail | difference (95 % interval) | seconds |
|---|---|---|---|---|---|---|---|---|
{rows}

Measured with torch {torch}, Python {python}, {threads} thread(s) of a machine with {processors} cores.
The engine is exact, so plain PyTorch and `SFTStrategy` train the same network; the table says which ran.

This page is written by `python -m benchmarks.invisible_label` from
`benchmarks/results/invisible_label.json`.
"""


def page(runs: Sequence[dict[str, Any]]) -> str:
    """The page for these runs."""
    environment = runs[0]["environment"]
    return _PAGE.format(
        downsample=runs[0]["thumbnail_downsample"],
        rows="\n".join(map(_row, runs)),
        torch=environment["packages"]["torch"],
        **{key: environment[key] for key in ("python", "threads", "processors")},
    )


def _row(run: dict[str, Any]) -> str:
    difference = run["difference"]
    cells = (
        run["seed"],
        run["engine"],
        run["training_slides"],
        f"{run['held_out_slides']} ({run['held_out_patients']})",
        f"{run['side']} px",
        f"{run['full_auc']:.3f}",
        f"{run['thumbnail_auc']:.3f}",
        f"{difference['value']:.3f} ({difference['low']:.3f} to {difference['high']:.3f})",
        f"{run['seconds']['full']:.0f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"
