"""Small DICOM slides, written with pydicom: one file for each level, label or overview."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import UID, CTImageStorage, JPEGBaseline8Bit, VLWholeSlideMicroscopyImageStorage, generate_uid

TILE = 64


def write_instance(
    path: Path, series: str, pixels: np.ndarray, *, kind: str = "VOLUME", storage: UID | None = None,
    syntax: UID = JPEGBaseline8Bit, mpp: float = 0.5, **tags: object,
) -> None:  # fmt: skip
    """One instance with the pixels (y, x, RGB) as JPEG tiles; a tag that is None is left out."""
    import imagecodecs

    storage = storage or VLWholeSlideMicroscopyImageStorage
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = storage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[path.name, series])
    meta.TransferSyntaxUID = syntax
    found = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    found.SOPClassUID, found.SOPInstanceUID = storage, meta.MediaStorageSOPInstanceUID
    found.SeriesInstanceUID, found.StudyInstanceUID = series, generate_uid(entropy_srcs=[series, "study"])
    found.FrameOfReferenceUID = generate_uid(entropy_srcs=[series, "frame"])
    found.Modality, found.ImageType = "SM", ["ORIGINAL", "PRIMARY", kind, "NONE"]
    height, width = pixels.shape[:2]
    padded = np.pad(pixels, ((0, -height % TILE), (0, -width % TILE), (0, 0)), mode="edge")
    tiles = [
        imagecodecs.jpeg8_encode(padded[y : y + TILE, x : x + TILE], level=95, colorspace="RGB", subsampling="422")
        for y in range(0, height, TILE)
        for x in range(0, width, TILE)
    ]
    found.Rows = found.Columns = TILE
    found.TotalPixelMatrixRows, found.TotalPixelMatrixColumns = height, width
    found.NumberOfFrames = len(tiles)
    found.SamplesPerPixel, found.PhotometricInterpretation, found.PlanarConfiguration = 3, "YBR_FULL_422", 0
    found.BitsAllocated = found.BitsStored = 8
    found.HighBit, found.PixelRepresentation = 7, 0
    found.DimensionOrganizationType = "TILED_FULL"
    found.TotalPixelMatrixFocalPlanes = found.NumberOfOpticalPaths = 1
    found.ImagedVolumeWidth, found.ImagedVolumeHeight = width * mpp / 1000, height * mpp / 1000
    found.OpticalPathSequence = Sequence([Dataset()])
    measures, groups = Dataset(), Dataset()
    measures.PixelSpacing = [mpp / 1000, mpp / 1000]
    groups.PixelMeasuresSequence = Sequence([measures])
    found.SharedFunctionalGroupsSequence = Sequence([groups])
    for name, value in tags.items():
        if value is None:
            delattr(found, name)
        else:
            setattr(found, name, value)
    found.PixelData = encapsulate(tiles)
    found["PixelData"].is_undefined_length = True
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path, enforce_file_format=True)


def write_slide(folder: Path, name: str, seed: int = 0, levels: int = 2, suffix: str = ".dcm", **tags: object) -> str:
    """A slide of several files, with these tags; its series."""
    series = str(generate_uid(entropy_srcs=[name]))
    rng = np.random.default_rng(seed)
    pixels = rng.integers(100, 255, (20, 16, 3), np.uint8).repeat(10, 0).repeat(10, 1)
    for level in range(levels):
        part = pixels[:: 2**level, :: 2**level]
        write_instance(folder / f"{name}_{level}{suffix}", series, part, mpp=0.5 * 2**level, **tags)  # type: ignore[arg-type]
    return series


def write_other(path: Path) -> None:
    """A DICOM file that is no slide."""
    write_instance(path, "1.2.3", np.zeros((8, 8, 3), np.uint8), storage=CTImageStorage)
