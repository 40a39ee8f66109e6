"""The picture of the slide benchmark: rates of reading by tile size, against decoding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLOURS = {
    "SlideSource": "tab:orange",
    "tifffile": "tab:green",
    "ours": "tab:green",
    "OpenSlide": "tab:blue",
    "zarr-python": "tab:blue",
    "tensorstore": "tab:gray",
}
_FORMATS = (
    ("TIFF", "JPEG alone", "JPEG TIFF"),
    ("zarr", "zstd alone", "zarr (zstd, chunks of 512 px)"),
    ("zarr JPEG", "JPEG chunks alone", "zarr (JPEG, chunks of 512 px)"),
)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws MB of pixels for each second of processor time, one line a reader, one panel a format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = [rate for rate in record["rates"] if rate["threads"] == 1]
    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), width_ratios=[3, 3, 3, 2], layout="constrained")
    for axes, (kind, decoder, title) in zip(panels, _FORMATS):
        names = sorted({rate["what"] for rate in rates if rate["what"].startswith(f"{kind}, ")})
        for name in names:
            points = sorted((rate["tile"], rate["per_cpu"]) for rate in rates if rate["what"] == name)
            label = name.split(", ")[1]
            axes.plot(*zip(*points), marker="o", label=label, color=_COLOURS[label])
        floor = next(rate["per_cpu"] for rate in rates if rate["what"] == decoder)
        axes.axhline(floor, color="black", linestyle="--", linewidth=1)
        axes.annotate(decoder, (2048, floor), va="bottom", ha="right", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([256, 512, 1024, 2048], ["256", "512", "1024", "2048"])
        axes.set_ylim(0, 1.3 * floor)  # room for the legend above the line
        axes.set_title(f"Reading {title}", fontsize=10)
        axes.set_xlabel("side of the tile, px")
        axes.legend(fontsize=8, ncols=2, loc="upper left")
    panels[0].set_ylabel("MB of pixels per CPU second")
    _draw_conversion(panels[3], record["rates"])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_conversion(axes: Any, rates: list[dict[str, Any]]) -> None:
    names = ("decode + encode alone", "wsi-train preprocess")
    for offset, name in zip((-0.2, 0.2), names):
        values = [next(r["per_cpu"] for r in rates if r["what"] == name and r["threads"] == t) for t in (1, 2)]
        bars = axes.bar([0 + offset, 1 + offset], values, 0.38, label=name)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks([0, 1], ["1 thread", "2 threads"])
    axes.set_title("Converting", fontsize=10)
    axes.margins(y=0.3)
    axes.legend(fontsize=8, loc="upper right")
