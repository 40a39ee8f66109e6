"""The three DICOM objects of a slide's map, made by highdicom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.sr.coding import Code

from wsi_trainer import __version__
from wsi_trainer.places.geojson import PathObject
from wsi_trainer.slide.geometry import SlideTransform
from wsi_trainer.words import clean

from .slide import grid_of

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
        """Which positions of the map are above the threshold."""
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
