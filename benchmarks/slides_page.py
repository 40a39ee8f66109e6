"""The page of how fast slides are read and converted, from the record.

    python -m benchmarks.slides_page

writes docs/speed-of-slides.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_HEAD = """# Speed of reading and converting slides

<!-- Written by `python -m benchmarks.slides_page`; edit benchmarks/slides_page.py instead. -->

Megabytes of pixels for each second of processor time, of a synthetic slide of {side:,} px a side: its JPEG TIFF (4:2:0)
and its stores (chunks of 512 px, as zstd and as JPEG with colour at full resolution). All ways take turns; a rate is
the median of {rounds} rounds, and a ratio the median of those within a round. What is read lies on whole tiles of the
file, so that nothing is decoded that is not asked for. Load of the machine: {load}.

![Rates by side of the tile, and of conversion.](figures/slides-reading.png)

## Tiles of 1024 px for training

The codecs alone decode from memory to memory that is there. libjpeg-turbo is faster into memory that is not aligned to
a vector, which is how `SlideSource` calls it; "new memory" is the same codec called in the plain way.

| reads | threads | MB / CPU s | of the codec alone |
| --- | --- | --- | --- |
"""
_CONVERTING = """
## Converting

The floor decodes every tile of the slide and encodes every chunk of all levels, from memory to memory. Not among it:
files, planes, halving for the pyramid, hashes, and waiting for the disk.

| | threads | MB / CPU s | cost over the floor |
| --- | --- | --- | --- |
"""


def page(record: dict[str, Any]) -> str:
    """The page of a record of `benchmarks.slides`."""
    rates = record["rates"]
    loads = ", ".join(f"{value} while {part}" for part, value in record["load"].items())
    lines = [_HEAD.format(side=record["side"], load=loads, rounds=record["rounds"])]
    for one in rates:
        if one["tile"] in (0, 1024):
            lines.append(f"{_row(one)} {one['of_floor']:.2f} |\n")
    lines.append(_CONVERTING)
    for one in rates:
        if one["what"] in ("decode + encode alone", "wsi-train preprocess"):
            lines.append(f"{_row(one)} {1 / one['of_floor']:.2f} |\n")
    return "".join(lines)


def _row(one: dict[str, Any]) -> str:
    return f"| {one['what']} | {one['threads']} | {one['per_cpu']:.0f} |"


def main() -> None:
    """Writes the page."""
    record = json.loads((ROOT / "benchmarks" / "results" / "slides.json").read_text())
    (ROOT / "docs" / "speed-of-slides.md").write_text(page(record))


if __name__ == "__main__":
    main()
