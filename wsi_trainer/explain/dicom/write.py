"""A slide's results as DICOM files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from wsi_trainer.errors import UserError
from wsi_trainer.explain.options import MapOptions
from wsi_trainer.explain.outlines import objects_of
from wsi_trainer.explain.slide_map import DICOM, MapFiles, SlideMap
from wsi_trainer.places.geojson import PathClass, PathObject, rectangle
from wsi_trainer.slide.geometry import SlideTransform

from .objects import Results
from .slide import NotDicom, check_same, finest_level


def need_highdicom() -> None:
    """Raise an error that says how to install it, before anything is computed."""
    if importlib.util.find_spec("highdicom") is None:
        raise UserError('--dicom needs highdicom: pip install "wsi-trainer[dicom]"')


def results_as_dicom(
    one: SlideMap, files: MapFiles, original: Path | None, target: PathClass, options: MapOptions
) -> dict[str, Any]:
    """Write what there is of a slide; returns what heatmaps.json says of it.

    Args:
        one: The slide's map.
        files: What was written of it.
        original: The slide's own file; None where it is not known.
        target: What the map speaks for.
        options: How maps are made.
    """
    try:
        if original is None:
            raise NotDicom(one.record.path, "a store, whose original is not in the folder --originals")
        level = finest_level(original)
        check_same(original, level, one.place)
    except NotDicom as error:
        return {"dicom": {}, "no_dicom": error.reason}
    results = Results(level, target.name, options.method)
    grid = one.place.coarser(one.stride)
    values = files.values
    best = values.max(initial=0.0)
    made = {
        "map": results.parametric_map(values, grid),
        "segmentation": results.segmentation((values >= options.threshold * best) & (values > 0), grid),
        "annotations": results.annotations(
            objects_of(files.outlines, target), _in_image(files.entry["top"], one.place), one.place
        ),
    }
    folder = one.folder / DICOM / one.name
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for kind, found in made.items():
        path = folder / f"{kind}.dcm"
        if found is not None:
            found.save_as(path)
            names[kind] = path.relative_to(one.folder).as_posix()
    return {"dicom": names}


def _in_image(top: list[dict[str, Any]], place: SlideTransform) -> list[PathObject]:
    """The top regions, whose places heatmaps.json says in the slide, in the image."""
    regions = []
    for one in top:
        corners = [(one["x"], one["y"]), (one["x"] + one["width"], one["y"] + one["height"])]
        (left, upper), (right, lower) = place.to_image(corners).tolist()
        regions.append(PathObject(rectangle(left, upper, right, lower), {"largest value": one["value"]}))
    return regions
