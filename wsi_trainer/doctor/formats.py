"""Readers and codecs, each tried on a tiny file made here: written, read back and compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.doctor.check import Check, Status, attempt
from wsi_trainer.doctor.packages import DISTRIBUTION, version_of

READERS = "readers"
CODECS = "codecs"
TILE = 64
SIDE = 2 * TILE
# JPEG and JPEG 2000 are lossy; on this smooth image they stay well within this many grey levels on average.
LOSSY_TOLERANCE = 4.0
TIFF_CODECS = {"jpeg": LOSSY_TOLERANCE, "jpeg2000": LOSSY_TOLERANCE, "lzw": 0.0, "zstd": 0.0}


def check_formats(folder: Path) -> list[Check]:
    """Try every reader and every codec in this folder."""
    fix = "pip install --force-reinstall {}"
    slides = fix.format("openslide-python openslide-bin")
    checks = [
        attempt(READERS, "OpenSlide, pyramidal TIFF", lambda: openslide_tiff(folder), slides),
        dicom(folder),
    ]
    for codec, tolerance in TIFF_CODECS.items():
        trial = tiff_trial(folder, codec, tolerance)
        checks.append(attempt(CODECS, f"tifffile, {codec}", trial, fix.format("tifffile imagecodecs")))
    store = fix.format("zarr numcodecs")
    checks.append(attempt(CODECS, "zarr v3, sharded zstd + crc32c", lambda: zarr_shards(folder), store))
    return checks


def picture() -> np.ndarray:
    """A smooth colour image, so that a lossy codec changes it little."""
    ramp = np.linspace(40, 220, SIDE, dtype=np.float64)
    planes = [np.add.outer(ramp, 0 * ramp), np.add.outer(0 * ramp, ramp), np.add.outer(ramp, ramp) / 2]
    return np.stack(planes, axis=-1).astype(np.uint8)


def compare(read: np.ndarray, tolerance: float = 0.0) -> float:
    """The mean difference from the picture, or an error if it is more than the tolerance."""
    expected = picture()
    if read.shape != expected.shape:
        raise ValueError(f"read back as {read.shape}, written as {expected.shape}")
    error = float(np.abs(read.astype(int) - expected.astype(int)).mean())
    if error > tolerance:
        raise ValueError(f"pixels differ by {error:.1f} grey levels on average")
    return error


def write_tiff(path: Path, compression: str, levels: int = 1) -> None:
    """A tiled TIFF with a resolution of 0.5 µm per pixel and `levels` pyramid levels."""
    import tifffile

    options: dict[str, Any] = {
        "tile": (TILE, TILE),
        "photometric": "rgb",
        "compression": compression,
        "resolutionunit": "CENTIMETER",
    }
    with tifffile.TiffWriter(path) as writer:
        for level in range(levels):
            step = 2**level
            writer.write(
                np.ascontiguousarray(picture()[::step, ::step]),
                subfiletype=int(level > 0),
                resolution=(20000 / step, 20000 / step),
                **options,
            )


def openslide_tiff(folder: Path) -> str:
    """A pyramidal tiled JPEG TIFF, opened by OpenSlide."""
    import openslide

    path = folder / "pyramid.tiff"
    write_tiff(path, "jpeg", levels=2)
    with openslide.OpenSlide(path) as slide:
        if slide.level_count != 2:
            raise ValueError(f"{slide.level_count} levels read, 2 written")
        region = np.asarray(slide.read_region((0, 0), 0, (SIDE, SIDE)).convert("RGB"))
    compare(region, LOSSY_TOLERANCE)
    return f"OpenSlide {openslide.__library_version__}"


def tiff_trial(folder: Path, codec: str, tolerance: float) -> Callable[[], str]:
    """Write and read a tiled TIFF with this codec."""

    def trial() -> str:
        import tifffile

        path = folder / f"{codec}.tiff"
        write_tiff(path, codec)
        return described(compare(tifffile.imread(path), tolerance))

    return trial


def zarr_shards(folder: Path) -> str:
    """A sharded zarr v3 array with zstd and checksums, as `wsi-train preprocess` writes it."""
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    image = np.moveaxis(picture(), -1, 0)
    path = folder / "shards.zarr"
    array = zarr.create_array(
        str(path),
        shape=image.shape,
        dtype="uint8",
        chunks=(3, TILE, TILE),
        shards=(3, SIDE, SIDE),
        compressors=[ZstdCodec(level=3), Crc32cCodec()],
        fill_value=255,
    )
    array[:] = image
    read = np.asarray(zarr.open_array(str(path), mode="r")[:])
    return described(compare(np.moveaxis(read, 0, -1)))


def dicom(folder: Path) -> Check:
    """A DICOM file, if the extra is installed."""
    name = "DICOM"
    if version_of("wsidicom") is None:
        return Check(READERS, name, Status.ABSENT, "not installed", f"pip install '{DISTRIBUTION}[dicom]'")
    return attempt(READERS, name, lambda: dicom_image(folder), "pip install --force-reinstall wsidicom pydicom")


def dicom_image(folder: Path) -> str:
    """A tiny DICOM image, written and read by pydicom, with the slide reader imported."""
    import pydicom
    import wsidicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, VLWholeSlideMicroscopyImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = VLWholeSlideMicroscopyImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    dataset = FileDataset(str(folder / "slide.dcm"), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = (
        meta.MediaStorageSOPClassUID,
        meta.MediaStorageSOPInstanceUID,
    )
    dataset.set_pixel_data(picture(), "RGB", 8)
    dataset.save_as(folder / "slide.dcm", enforce_file_format=True)
    compare(pydicom.dcmread(folder / "slide.dcm").pixel_array)
    return f"wsidicom {wsidicom.__version__}, pydicom {pydicom.__version__}"


def described(error: float) -> str:
    """How near the image came back."""
    return "identical" if error == 0 else f"within {error:.1f} grey levels on average"
