"""The DICOM slide that results refer to: its finest level, and where in the slide's coordinates a map lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom import Dataset

from wsi_trainer.slide.errors import SlideError
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
"""What results repeat of the slide, and may repeat as nothing."""


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
    """Where the pixels of an image or map lie, as highdicom's constructors take it.

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
