"""Maps and regions as DICOM, beside the slides that they are of (extra `dicom`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.sr.coding import Code

from wsi_trainer import __version__
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.explain.slide_map import DICOM, MapFiles, MapOptions, SlideMap
from wsi_trainer.io.display import clean
from wsi_trainer.regions.geojson import PathClass, PathObject, objects_of, rectangle
from wsi_trainer.slide.formats.dicom import is_dicom, series_of
from wsi_trainer.slide.geometry import SlideTransform

NEEDED = (
    "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID", "ImageOrientationSlide",
    "TotalPixelMatrixRows", "TotalPixelMatrixColumns", "SharedFunctionalGroupsSequence",
)  # fmt: skip
"""Without these nobody can say which slide a result is of, or where on it."""
MAY_BE_EMPTY = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate",
    "StudyTime", "ContainerIdentifier",
)  # fmt: skip
"""Attributes that results repeat of the slide; they may be empty."""


UNKNOWN_THICKNESS = 0.001
"""Millimetres, where a slide does not say it: results must, and may not say 0."""


class NotDicom(SlideError):
    """A slide that DICOM results cannot refer to."""


def finest_level(path: Path) -> Dataset:
    """The metadata of the finest level of a slide, complete enough to be referred to.

    Args:
        path: A DICOM file, or the folder of a series.

    Raises:
        NotDicom: It is something else, or lacks what results need.
    """
    if not (path.is_dir() or is_dicom(path)):
        raise NotDicom(path, "not DICOM; its results are in GeoJSON and OME-Zarr")
    series = series_of(path)
    if series is None:
        raise NotDicom(path, "no DICOM series; its results are in GeoJSON and OME-Zarr")
    found = pydicom.dcmread(series.first, stop_before_pixels=True)
    missing = [name for name in NEEDED if not found.get(name)]
    if missing:
        raise NotDicom(path, f"its DICOM file has no {', '.join(missing)}, which results refer to")
    for name in MAY_BE_EMPTY:
        if name not in found:
            setattr(found, name, "")
    if "IssuerOfTheContainerIdentifierSequence" not in found:
        found.IssuerOfTheContainerIdentifierSequence = []
    origin = (found.get("TotalPixelMatrixOriginSequence") or [Dataset()])[0]
    for axis in "XY":  # of software that knows no stage: the slide begins at 0
        name = f"{axis}OffsetInSlideCoordinateSystem"
        if origin.get(name) is None:
            setattr(origin, name, 0.0)
    found.TotalPixelMatrixOriginSequence = [origin]
    return found


def check_same(path: Path, level: Dataset, place: SlideTransform) -> None:
    """Raise `NotDicom` where the place is one in an image of another size."""
    size = (int(level.TotalPixelMatrixRows), int(level.TotalPixelMatrixColumns))
    if size != place.shape:
        raise NotDicom(path, f"its finest level has {size[0]} x {size[1]} px, and the map is of {place.shape}")


def grid_of(level: Dataset, place: SlideTransform) -> dict[str, Any]:
    """Position of an image or map in the slide, as highdicom's constructors take it.

    Args:
        level: The slide's finest level.
        place: Of the map in it.
    """
    import highdicom

    measures = level.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    spacing = [float(size) * step for size, step in zip(measures.PixelSpacing, place.scale)]
    orientation = [float(value) for value in level.ImageOrientationSlide]
    to_millimetres = highdicom.spatial.ImageToReferenceTransformer.for_image(level, for_total_pixel_matrix=True)
    centre = place.to_slide(np.array([[0.5, 0.5]]))  # of the first pixel, which is what DICOM calls its position
    position = to_millimetres(centre)[0].tolist()
    slide = highdicom.CoordinateSystemNames.SLIDE
    return {
        "pixel_measures": highdicom.PixelMeasuresSequence(
            pixel_spacing=spacing, slice_thickness=float(measures.get("SliceThickness") or UNKNOWN_THICKNESS)
        ),
        "plane_orientation": highdicom.PlaneOrientationSequence(slide, orientation),
        "plane_positions": [highdicom.PlanePositionSequence(slide, position, (1, 1))],
    }


TILE = 256
_SCHEME = "99WSITRAINER"
"""Our own codes: no standard one says what a user's class is."""
_NO_UNITS = Code("1", "UCUM", "no units")
_ABNORMAL = Code("49755003", "SCT", "Morphologically abnormal structure")


@dataclass(frozen=True)
class Results:
    """A slide's map and regions, and what to say of them."""

    level: Dataset
    """The slide's finest level."""
    target: str
    method: str

    def parametric_map(self, values: NDArray[np.float32], place: SlideTransform) -> Any:
        """The map's values as they are, in 32 bits."""
        import highdicom

        low, high = float(values.min()), float(values.max())
        mapping = highdicom.pm.RealWorldValueMapping(
            lut_label="value", lut_explanation=f"{self.method} for {self.target}"[:64], unit=_NO_UNITS,
            value_range=(low, max(high, float(np.nextafter(np.float32(low), np.float32(np.inf))))),
            slope=1.0, intercept=0.0,
        )  # fmt: skip
        window = highdicom.VOILUTTransformation(
            window_center=(low + high) / 2,
            window_width=max(high - low, float(np.finfo(np.float32).tiny)),
            voi_lut_function="LINEAR_EXACT",
        )
        return highdicom.pm.ParametricMap(
            [self.level], values, **self._common(1), contains_recognizable_visual_features=False,
            real_world_value_mappings=[mapping], voi_lut_transformations=[window], tile_pixel_array=True,
            tile_size=(TILE, TILE), content_label="MAP",
            **grid_of(self.level, place),
        )  # fmt: skip

    def segmentation(self, mask: NDArray[np.bool_], place: SlideTransform) -> Any:
        """The positions of the map above the threshold."""
        import highdicom

        segment = highdicom.seg.SegmentDescription(
            segment_number=1, segment_label=_text(self.target), segmented_property_category=_ABNORMAL,
            segmented_property_type=self._code(self.target), algorithm_type="AUTOMATIC",
            algorithm_identification=self._algorithm(),
        )  # fmt: skip
        return highdicom.seg.Segmentation(
            [self.level], mask.astype(np.uint8), "BINARY", [segment], **self._common(2), tile_pixel_array=True,
            tile_size=(TILE, TILE), omit_empty_frames=False,
            content_label="REGIONS", **grid_of(self.level, place),
        )  # fmt: skip

    def annotations(self, outlined: Sequence[PathObject], top: Sequence[PathObject], place: SlideTransform) -> Any:
        """Outlines as polygons without their holes, and top regions as rectangles, in pixels of the finest level.

        Returns None where there are none.
        """
        import highdicom

        kinds = {"POLYGON": ("regions", outlined), "RECTANGLE": ("top", top)}
        known = [(f"{self.target}: {label}", kind, found) for kind, (label, found) in kinds.items() if found]
        groups = [self._group(number, *one, place) for number, one in enumerate(known, start=1)]
        if not groups:
            return None
        return highdicom.ann.MicroscopyBulkSimpleAnnotations(
            [self.level], "2D", groups, **self._common(3), content_label="REGIONS"
        )

    def _group(self, number: int, label: str, kind: str, regions: Sequence[PathObject], place: SlideTransform) -> Any:
        import highdicom

        names = list(dict.fromkeys(name for region in regions for name in region.measurements))
        values = {name: [region.measurements.get(name, np.nan) for region in regions] for name in names}
        return highdicom.ann.AnnotationGroup(
            number=number, uid=highdicom.UID(), label=label[:64], annotated_property_category=_ABNORMAL,
            annotated_property_type=self._code(self.target), graphic_type=kind,
            graphic_data=[_open(place.to_slide(region.rings[0])) for region in regions], algorithm_type="AUTOMATIC",
            algorithm_identification=self._algorithm(),
            measurements=[
                highdicom.ann.Measurements(self._code(name), np.array(found, np.float64), _NO_UNITS)
                for name, found in values.items()
            ],
        )  # fmt: skip

    def _common(self, number: int) -> dict[str, Any]:
        import highdicom

        return {
            "series_instance_uid": highdicom.UID(),
            "series_number": 1000 + number,
            "sop_instance_uid": highdicom.UID(),
            "instance_number": 1,
            "manufacturer": "wsi-trainer",
            "manufacturer_model_name": "wsi-trainer",
            "software_versions": __version__,
            "device_serial_number": "none",
            "content_description": f"{self.method} for {self.target}"[:64],
        }

    def _algorithm(self) -> Any:
        import highdicom

        family = Code("113076", "DCM", "Segmentation")
        return highdicom.AlgorithmIdentificationSequence(f"wsi-trainer {self.method}", family, __version__)

    def _code(self, name: str) -> Code:
        """A name as a code of ours: letters and digits of it, and the name itself as the meaning."""
        value = "".join(letter for letter in name if letter.isascii() and letter.isalnum())[:16]
        return Code(value or "target", _SCHEME, _text(name))


def _open(ring: NDArray[np.float64]) -> NDArray[np.float64]:
    """A ring without its last point, where that repeats the first: DICOM closes polygons itself."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


def _text(name: str) -> str:
    """A name as a value of DICOM: a backslash would make two values of it, and only 64 letters fit."""
    return clean(name).replace("\\", "/")[:64]


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
