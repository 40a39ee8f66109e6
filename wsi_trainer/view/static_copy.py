"""A copy of the page that opens without a server, as a paper's supplement needs it.

A page that is opened as a file may show pictures and run scripts, and may read nothing else. So tiles are pictures, and
numbers are scripts that say them.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from wsi_trainer.errors import UserError
from wsi_trainer.view.contents import Contents
from wsi_trainer.view.scene import TISSUE, Scene, to_json
from wsi_trainer.view.server import ASSETS, PAGE, asset
from wsi_trainer.view.tiles import LAYER_TILE, TILE, NotThere, grid_of

LONGEST = 8192
"""Pixels of the longer side of a slide in the copy."""
OUTLINED = 0.5
"""The share of the largest value that outlines are drawn at: those of the page can be chosen, these cannot."""
TOP = 9


def write_static(scene: Scene, out: Path, only: Sequence[str] = (), longest: int = LONGEST) -> int:
    """Write the copy; returns how many slides it has.

    Args:
        scene: What is shown.
        out: The folder, which must not hold anything else.
        only: The names of the slides; by default those that were predicted, or all where none were.
        longest: Most pixels along the longer side of a slide; 0 keeps all of them.
    """
    if longest < 0 or 0 < longest < TILE:
        raise UserError(f"--longest is {longest}; it must be at least {TILE}, or 0 for all pixels")
    numbers = chosen(scene.contents, only)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose another folder for --static")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was killed
    try:
        _write_all(scene, partial, numbers, longest)
        os.replace(partial, out)  # a copy is there whole or not at all, and the same command can be given again
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return len(numbers)


def _write_all(scene: Scene, partial: Path, numbers: Sequence[int], longest: int) -> None:
    for number in track(numbers, description="slides"):
        _Copy(scene, partial, number).write(longest)
    for name in ASSETS:
        _write(partial / "assets" / name, asset(name))
    overview = scene.overview()
    overview["slides"] = [overview["slides"][number] for number in numbers]
    _write(partial / "contents.js", b"window.wsiStatic = " + to_json(overview) + b";\n")
    head = b'<script src="assets/data.js">'
    _write(partial / "index.html", asset(PAGE).replace(head, b'<script src="contents.js"></script>\n' + head))


def chosen(contents: Contents, only: Sequence[str]) -> list[int]:
    """The slides of the copy, in the order of the list."""
    names = [slide.name for slide in contents.slides]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UserError(
            f"--only names {unknown[0]!r}, which is none of the {len(names)} slides; the first is {names[0]!r}"
        )
    predicted = [number for number, slide in enumerate(contents.slides) if any(slide.opinions)]
    return (
        [number for number, name in enumerate(names) if name in only] if only else predicted or list(range(len(names)))
    )


class _Copy:
    """The files of one slide."""

    def __init__(self, scene: Scene, out: Path, number: int) -> None:
        self._scene, self._out, self._number = scene, out, number
        self._folder = f"slides/{number}"

    def write(self, longest: int) -> None:
        scene, number = self._scene, self._number
        about = scene.about(number)
        about["finest"] = self._tiles(longest)
        self._say("about.json", about)
        for layer in range(len(about["layers"])):
            if "broken" not in about["layers"][layer]:
                self._layer(str(layer))
                self._say(f"layers/{layer}/outlines.json", scene.outlines(number, str(layer), OUTLINED))
                self._say(f"layers/{layer}/top.json", scene.top(number, str(layer), TOP))
        if about["regions"]:
            self._say("regions.json", scene.regions(number))
        tissue = scene.about_layer(number, TISSUE)
        self._say(f"layers/{TISSUE}/about.json", tissue)
        if "broken" not in tissue:
            self._layer(TISSUE)
        with suppress(NotThere):  # without a coarse level there is no thumbnail
            _write(self._out / self._folder / "thumbnail.jpg", scene.thumbnail(number))

    def _tiles(self, longest: int) -> int:
        """Write the pictures; returns the finest level that is there."""
        opened = self._scene.slide(self._number)
        finest = next(
            (level for level in range(opened.coarsest) if not longest or max(opened.shape(level)) <= longest),
            opened.coarsest,
        )
        for level in range(finest, opened.coarsest + 1):
            for row, column in np.ndindex(opened.grid(level)):
                path = self._out / self._folder / "tiles" / str(level) / f"{row}-{column}.jpg"
                _write(path, self._scene.tile(self._number, level, row, column))
        return finest

    def _layer(self, name: str) -> None:
        """Write the numbers of a layer; of a map also the ranks of its positions, which a server would count."""
        layer = self._scene.layer(self._number, name)
        grids = {str(level): (layer, level) for level in range(layer.levels)}
        if name != TISSUE and not layer.classes:
            grids["ranks"] = (replace(layer, values=layer.ranks()), 0)
        for folder, (numbers, level) in grids.items():
            for row, column in np.ndindex(grid_of(numbers.values.shape, LAYER_TILE * 2**level)):
                tile = numbers.tile(level, row, column).astype("<f4").tobytes()
                self._say(f"layers/{name}/{folder}/{row}-{column}.bin", base64.b64encode(tile).decode())

    def _say(self, name: str, content: Mapping[str, Any] | str) -> None:
        address = f"{self._folder}/{name}"
        said = b"wsi.data.put(" + to_json(address) + b", " + to_json(content) + b");\n"
        _write(self._out / f"{address}.js", said)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
