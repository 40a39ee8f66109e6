"""DICOM results are read back by pydicom and highdicom, and lie where the slide's own tags say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset

from tests.wsi_trainer.slides import dicom_files
from wsi_trainer.data.manifest import SlideRecord
from wsi_trainer.explain.dicom import results_as_dicom
from wsi_trainer.explain.slide_map import MapFiles, MapOptions, SlideMap
from wsi_trainer.regions.geojson import PathClass
from wsi_trainer.regions.shapes import Outline
from wsi_trainer.slide.geometry import SlideTransform

highdicom = pytest.importorskip("highdicom", reason="extra dicom is not installed")

TARGET = PathClass.of("tumour", 1)
TAGS = {
    "as most scanners": {"ImageOrientationSlide": [0.0, -1.0, 0.0, -1.0, 0.0, 0.0], "at": (20.5, 61.25)},
    "lying the other way": {"ImageOrientationSlide": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], "at": (0.0, 0.0)},
}


def dicom_slide(folder: Path, at: tuple[float, float], **tags: object) -> Path:
    """A slide of 200 x 160 px of 0.5 µm."""
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem = at
    pixels = np.full((200, 160, 3), 230, np.uint8)
    dicom_files.write_instance(
        folder / "0.dcm", "1.2.3.4", pixels, TotalPixelMatrixOriginSequence=[origin], PatientID="p1", **tags
    )
    return folder


def written(
    folder: Path, original: Path | None, place: SlideTransform, **options: object
) -> tuple[dict, np.ndarray, MapFiles]:
    """The results of a random map."""
    stride = 8
    size = tuple(int((side - start) // step) for side, start, step in zip((200, 160), place.origin, place.scale))
    shape = tuple(-(-side // stride) for side in size)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    one = SlideMap(folder, SlideRecord("s", Path("s.zarr"), "", "", ""), size, place, stride, "s")  # type: ignore[arg-type]
    rings = [[(3.0, 4.0), (20.25, 4.5), (9.0, 30.0), (3.0, 4.0)], [(5.0, 5.0), (6.0, 5.0), (6.0, 6.0), (5.0, 5.0)]]
    top = [{"x": 10, "y": 20, "width": 30, "height": 40, "value": 3.5}]
    files = MapFiles({"top": top}, values, [Outline(rings, 2.5, 0.125, (0.0, 0.0))])
    made = results_as_dicom(one, files, original, TARGET, MapOptions(threshold=0.25, **options))  # type: ignore[arg-type]
    return made, values, files


def in_slide(level: pydicom.Dataset, result: pydicom.Dataset, column: float, row: float) -> np.ndarray:
    """The pixel of the slide that lies where a pixel of the result does, both by the formula of DICOM's plane.

    PS3.3, C.7.6.2.1.1: a pixel's centre is the origin, a column of the orientation times spacing times index for each
    direction. The first three numbers of the orientation say where columns grow.
    """

    def plane(found: pydicom.Dataset) -> tuple[np.ndarray, np.ndarray]:
        orientation = np.array([float(value) for value in found.ImageOrientationSlide])
        spacing = [float(v) for v in found.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing]
        axes = np.stack([orientation[:3] * spacing[1], orientation[3:] * spacing[0]], axis=1)[:2]
        origin = found.TotalPixelMatrixOriginSequence[0]
        names = ("XOffsetInSlideCoordinateSystem", "YOffsetInSlideCoordinateSystem")
        return axes, np.array([float(getattr(origin, name)) for name in names])

    (axes, start), (own, first) = plane(result), plane(level)
    return np.linalg.solve(own, start + axes @ [column, row] - first)


@pytest.mark.slow
@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize(
    "place",
    [
        SlideTransform((200, 160)),
        SlideTransform((200, 160), (24.0, 16.0), (2.0, 2.0)),
        SlideTransform((200, 160), (3.0, 7.0), (1.37, 1.21)),
    ],
)
def test_maps_masks_and_outlines_come_back(tmp_path: Path, tags: str, place: SlideTransform) -> None:
    slide = dicom_slide(tmp_path / "slide", **TAGS[tags])  # type: ignore[arg-type]
    made, values, _ = written(tmp_path, slide, place)
    paths = {kind: tmp_path / name for kind, name in made["dicom"].items()}
    assert set(paths) == {"map", "segmentation", "annotations"}
    found = highdicom.imread(paths["map"])
    np.testing.assert_array_equal(found.get_total_pixel_matrix().astype(np.float32), values)
    mask = highdicom.seg.segread(paths["segmentation"]).get_total_pixel_matrix(combine_segments=True)
    np.testing.assert_array_equal(mask > 0, values >= 0.25 * values.max())
    level = pydicom.dcmread(slide / "0.dcm", stop_before_pixels=True)
    rows, columns = values.shape
    for kind in ("map", "segmentation"):
        result = pydicom.dcmread(paths[kind])
        assert result.FrameOfReferenceUID == level.FrameOfReferenceUID and result.PatientID == "p1"
        assert (result.TotalPixelMatrixRows, result.TotalPixelMatrixColumns) == (rows, columns)
        for column, row in ((0, 0), (columns - 1, rows - 1), (5, 2)):
            centre = place.to_slide([[(column + 0.5) * 8, (row + 0.5) * 8]])[0]
            np.testing.assert_allclose(in_slide(level, result, column, row) + 0.5, centre, atol=1e-3)
    outlined, top = highdicom.ann.annread(paths["annotations"]).get_annotation_groups()
    expected = place.to_slide([(3.0, 4.0), (20.25, 4.5), (9.0, 30.0)])
    np.testing.assert_allclose(outlined.get_graphic_data("2D")[0], expected)
    np.testing.assert_allclose(top.get_graphic_data("2D")[0], [(10, 20), (40, 20), (40, 60), (10, 60)])
    assert [float(v[0, 0]) for v in (outlined.get_measurements()[1], top.get_measurements()[1])] == [2.5, 3.5]


def test_what_is_no_dicom_slide_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "x.tif").write_bytes(b"II*\0")
    place = SlideTransform((200, 160))
    assert "not DICOM" in written(tmp_path, tmp_path / "x.tif", place)[0]["no_dicom"]
    assert "--originals" in written(tmp_path, None, place)[0]["no_dicom"]
    slide = dicom_slide(tmp_path / "slide", (0.0, 0.0))
    assert "no ImageOrientationSlide" in written(tmp_path, slide, place)[0]["no_dicom"]
    other = dicom_slide(tmp_path / "other", **TAGS["as most scanners"])  # type: ignore[arg-type]
    assert "the map is of" in written(tmp_path, other, SlideTransform((100, 160)))[0]["no_dicom"]
    assert not (tmp_path / "dicom").exists()


def test_a_real_slide(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "slides" / "CMU-1-Small-Region_dicom"
    place = SlideTransform((2967, 2220), (120.0, 64.0), (2.0043, 2.0043), (0.499, 0.499))
    made, values, _ = written(tmp_path, folder, place)
    result = highdicom.imread(tmp_path / made["dicom"]["map"])
    np.testing.assert_array_equal(result.get_total_pixel_matrix().astype(np.float32), values)
