"""DICOM whole-slide series: with OpenSlide where it can, else with wsidicom (extra `dicom`).

OpenSlide refuses some encodings, such as JPEG that is labelled YBR_FULL; wsidicom reads them.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SlideError, UnsupportedSlide
from .closing import Closing
from .dicom_series import dicom_files, is_dicom, series_of
from .openslide import OpenSlideReader
from .protocol import Level, Pixels, SlideInfo, blank, clip_box, level_downsample

_LARGEST_READ = 64 << 20


def claims(path: Path, head: bytes) -> bool:
    """Whether this is a DICOM file or a folder with one."""
    return is_dicom(path) or (path.is_dir() and any(map(is_dicom, path.iterdir())))


def files_of(path: Path) -> list[Path]:
    """The files of the series of a DICOM file or folder."""
    series = series_of(path)
    if series is not None:
        return series.files
    return dicom_files(path) if path.is_dir() else [path]  # too broken to tell what belongs together


def DicomReader(path: Path | str) -> OpenSlideReader | WsiDicomReader:
    """Opens a series with the library that can."""
    path = Path(path)
    reason = ""
    if path.is_dir():
        try:
            series = series_of(path)
            files = files_of(path)
            largest = max(files, key=lambda file: file.stat().st_size)
            return OpenSlideReader(largest if series is None else series.first)
        except UnsupportedSlide as error:
            reason = error.reason
    try:
        import wsidicom  # noqa: F401
    except ImportError as error:
        hint = 'needs wsidicom: pip install "wsi-trainer[dicom]"'
        raise UnsupportedSlide(path, "; ".join(filter(None, (reason, hint)))) from error
    try:
        return WsiDicomReader(path)
    except SlideError as error:
        raise SlideError(path, "; ".join(filter(None, (reason, error.reason)))) from error


class WsiDicomReader(Closing):
    """A DICOM series read through wsidicom, which locks its files itself."""

    name = "dicom"

    def __init__(self, path: Path | str) -> None:
        from wsidicom import WsiDicom

        self._path = Path(path)
        try:
            with warnings.catch_warnings(action="ignore"):  # what is odd in a header is no news to the user
                self._slide: Any = WsiDicom.open(files_of(self._path))
        except Exception as error:  # wsidicom and pydicom raise many kinds
            raise SlideError(self._path, f"wsidicom: {error or type(error).__name__}") from error
        self._levels = sorted(self._slide.levels, key=lambda level: level.level)
        shapes = [(level.size.height, level.size.width) for level in self._levels]
        spacing = self._levels[0].mpp
        self.info = SlideInfo(
            levels=tuple(Level(h, w, level_downsample(shapes[0], h, w)) for h, w in shapes),
            mpp=(float(spacing.height), float(spacing.width)) if spacing else None,
            reader=f"wsidicom {version('wsidicom')}",
            vendor="dicom",
            associated=tuple(name for name in ("label", "overview") if getattr(self._slide, f"{name}s", None)),
        )

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        out = blank(height, width, self.info.background)
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        if bottom <= top or right <= left:
            return out
        band = max(256, _LARGEST_READ // (3 * (right - left)))
        for start in range(top, bottom, band):
            size = (right - left, min(start + band, bottom) - start)
            try:
                image = self._slide.read_region((left, start), self._levels[level].level, size)
            except Exception as error:
                raise SlideError(self._path, f"cannot read rows {start} to {start + size[1]}: {error}") from error
            out[start - y : start - y + size[1], left - x : right - x] = np.asarray(image.convert("RGB"))
        return out

    def associated(self, name: str) -> Pixels:
        if name not in self.info.associated:
            raise SlideError(self._path, f"no associated image {name!r}; it has {list(self.info.associated)}")
        image = getattr(self._slide, f"read_{name}")()
        return np.asarray(image.convert("RGB"))

    def close(self) -> None:
        self._slide.close()

    def __reduce__(self) -> tuple[type[WsiDicomReader], tuple[Path]]:
        return WsiDicomReader, (self._path,)
