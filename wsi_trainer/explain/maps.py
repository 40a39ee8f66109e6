"""Maps, label images and regions of a run as `heatmap` and `segment` wrote them, for the report and the viewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.errors import UserError
from wsi_trainer.fit.result import MAPS, SEGMENTS
from wsi_trainer.fit.run import Run
from wsi_trainer.io.arrays import load_array, open_zarr_array
from wsi_trainer.io.files import as_written, read_json
from wsi_trainer.regions.outlines import READERS
from wsi_trainer.slide.geometry import PROVENANCE, SlideTransform

MOST_PIXELS = 1 << 31
"""A side of a slide: one position of a map stands for no more."""


@dataclass(frozen=True)
class MapFile:
    """The map of a slide."""

    path: Path
    title: str
    place: SlideTransform
    """Position in level 0 of the slide of the image that the model saw."""
    stride: int
    """Pixels of that image along one position."""
    run: int = 0
    """The place of its run among those that are shown."""

    def load(self) -> NDArray[np.float32]:
        """The map, left in its file until it is looked at."""
        with as_written(self.path):
            values = load_array(self.path)
            if values.ndim != 2 or values.dtype.kind != "f" or 0 in values.shape:
                raise ValueError(f"an array of {values.dtype} and shape {values.shape} is no map")
        return values


@dataclass(frozen=True)
class LabelFile:
    """The label image of a slide: the class of each pixel, as `segment` found it."""

    path: Path
    title: str
    classes: tuple[str, ...]
    """The first is background."""
    run: int = 0
    """The place of its run among those that are shown."""

    def load(self) -> tuple[list[Any], SlideTransform | None]:
        """Its levels, each with half the positions of the one before, and its place in the slide, which 1.0 did not
        write.
        """
        about = self.path / "zarr.json"
        with as_written(about):
            attributes = read_json(about)["attributes"]
            image, place = attributes["ome"]["multiscales"][0], attributes.get(PROVENANCE, {}).get("place")
            levels = [open_zarr_array(self.path / str(level)) for level in range(len(image["datasets"]))]
            for finer, coarser in zip([levels[0], *levels], levels):
                shape = levels[0].shape if coarser is levels[0] else tuple(-(-side // 2) for side in finer.shape)
                if coarser.ndim != 2 or coarser.shape != shape or coarser.dtype.kind != "u" or 0 in shape:
                    raise ValueError(f"an array of {coarser.dtype} and shape {coarser.shape} is no level of classes")
            return levels, None if place is None else SlideTransform.of(place)


@dataclass(frozen=True)
class Maps:
    """The maps of a method for a class, on the slides of a split: a folder with heatmaps.json."""

    run: Run
    folder: Path
    facts: dict[str, Any]
    """The content of heatmaps.json."""

    @staticmethod
    def of(run: Run) -> list[Maps]:
        """All maps of a run."""
        return [Maps(run, one.folder, read_json(one.file)) for one in run.found if one.kind == "heatmap"]

    @property
    def title(self) -> str:
        return f"{self.facts.get('method', '')}, {self.facts.get('class', '')}"

    @property
    def slides(self) -> set[str]:
        """The slides that have a map."""
        with as_written(self.folder / MAPS):
            return {str(slide) for slide in dict(self.facts.get("slides", {}))}

    def pictures(self) -> dict[str, Path]:
        """The pictures by slide, of those that are there."""
        return {slide: path for slide, path, _ in self._files("picture") if path.is_file()}

    def arrays(self, run: str = "") -> dict[str, MapFile]:
        """The maps by slide.

        Args:
            run: The name of the run, where the title has to tell it from another.
        """
        title = f"{run}: {self.title}" if run else self.title
        with as_written(self.folder / MAPS):
            return {
                slide: MapFile(path, title, SlideTransform.of(entry["place"]), _pixels(entry["stride"]))
                for slide, path, entry in self._files("array")
            }

    def _files(self, kind: str) -> Iterator[tuple[str, Path, dict[str, Any]]]:
        """Slide by slide a file and its entry."""
        about = self.folder / MAPS
        with as_written(about):
            entries = [(str(slide), dict(entry)) for slide, entry in dict(self.facts.get("slides", {})).items()]
            found = [(slide, self.folder / str(entry[kind]), entry) for slide, entry in entries]
        for slide, path, entry in found:
            yield slide, inside(self.run, about, path), entry


def outlines_of(run: Run) -> dict[str, Path]:
    """The files of the regions that `segment` found, by slide, of those that are there."""
    outlines: dict[str, Path] = {}
    for folder in (one.folder for one in run.found if one.kind == "segment"):
        about = folder / SEGMENTS
        with as_written(about):
            entries = dict(read_json(about).get("slides", {})).items()
            found = {str(slide): folder / str(entry["outlines"]) for slide, entry in entries}
        outlines |= {slide: path for slide, path in found.items() if inside(run, about, path).is_file()}
    return outlines


def labels_of(run: Run, name: str = "") -> dict[str, LabelFile]:
    """The label images that `segment` wrote, by slide, of those that are there.

    Args:
        run: The run.
        name: Its name, where the title has to tell it from another.
    """
    labels: dict[str, LabelFile] = {}
    for folder in (one.folder for one in run.found if one.kind == "segment"):
        about = folder / SEGMENTS
        with as_written(about):
            content = read_json(about)
            classes = tuple(map(str, content.get("classes", ())))
            found = {str(slide): folder / str(one["labels"]) for slide, one in dict(content.get("slides", {})).items()}
        title = f"{name}: segmentation" if name else "segmentation"
        for slide, path in found.items():
            if inside(run, about, path).is_dir():
                labels[slide] = LabelFile(path, title, classes)
    return labels


@dataclass(frozen=True)
class Segmented:
    """The files of what `segment` found on a slide, of those that are there."""

    outlines: Path | None
    labels: LabelFile | None

    @staticmethod
    def of(run: Run) -> dict[str, Segmented]:
        """Find the files of a run, by slide."""
        outlines, labels = outlines_of(run), labels_of(run)
        return {slide: Segmented(outlines.get(slide), labels.get(slide)) for slide in {**outlines, **labels}}


def annotations_on(record: SlideRecord) -> Path | None:
    """The annotations that the manifest names, where they are there, and outlines and no label image."""
    path = Path(record.others.get("regions", ""))
    return path if path.suffix.lower() in READERS and path.is_file() else None


def inside(run: Run, about: Path, path: Path) -> Path:
    """The path of a file of results. One outside of the run is refused: a run may come from somebody else."""
    if not path.resolve().is_relative_to(run.writable.resolve()):
        raise UserError(f"{about} names a file outside of the run: {path}; write it again with --overwrite")
    return path


def _pixels(value: Any) -> int:
    """A number of pixels as a file says it: positions of the slide are multiplied with it, and divided by it."""
    found = int(value)
    if not 1 <= found <= MOST_PIXELS:
        raise ValueError(f"{str(value)[:40]} is no number of pixels")
    return found
