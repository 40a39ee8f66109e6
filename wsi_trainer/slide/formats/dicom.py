"""DICOM slides: files are grouped by series, wherever in a folder they lie, and checked before a library reads them."""

from __future__ import annotations

import logging
import math
import struct
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from wsi_trainer.errors import SlideError, UnsupportedSlide
from wsi_trainer.slide.formats.base import (
    PLAIN,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    check_decoded,
    level_downsample,
)
from wsi_trainer.slide.formats.openslide import OpenSlideReader

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

_SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"  # VL Whole Slide Microscopy Image Storage
_DIRECTORY_CLASS = "1.2.840.10008.1.3.10"
_BESIDE = {"LABEL", "OVERVIEW", "LOCALIZER", "THUMBNAIL"}
_TAGS = (
    "SOPClassUID", "SeriesInstanceUID", "ImageType", "TotalPixelMatrixRows", "TotalPixelMatrixColumns", "Rows",
    "Columns", "SamplesPerPixel", "BitsAllocated", "TotalPixelMatrixFocalPlanes", "NumberOfOpticalPaths",
    "ExtendedOffsetTable",
)  # fmt: skip
_ELEMENT = struct.Struct("<I2s2xI")
_ITEM = struct.Struct("<II")
_ITEM_TAG = 0xE000FFFE  # as its bytes lie in the file
_UNDEFINED = 0xFFFFFFFF
_LONGEST_TABLE = 64 << 20  # bytes, for 16 million frames; the largest slides have a hundredth of that


@dataclass(frozen=True)
class Instance:
    """The header of one DICOM file.

    Attributes:
        file: where it lies.
        series: the series it belongs to.
        kind: what it stores, in words.
        is_slide: whether that is a part of a slide: a level, its label or its overview.
        is_directory: whether it only lists other files.
        shows: what it shows of a slide: VOLUME, LABEL, OVERVIEW, THUMBNAIL; nothing where the file does not say.
        level: height and width, if it is a level of a slide.
        tile: bytes of one tile, decoded.
        bits: of one sample.
        focal_planes: how many heights were focused on.
        optical_paths: how many channels were scanned apart.
        encoding: how its pixels are encoded, in words.
        misplaced: the first frame that cannot lie where the file's own table says, counted from one.
    """

    file: Path
    series: str
    kind: str
    is_slide: bool
    is_directory: bool
    shows: str
    level: tuple[int, int] | None
    tile: int
    bits: int
    focal_planes: int
    optical_paths: int
    encoding: str
    misplaced: int | None


@dataclass(frozen=True)
class Series:
    """The files of one slide, in order of their names."""

    instances: tuple[Instance, ...]

    @property
    def files(self) -> list[Path]:
        return [instance.file for instance in self.instances]

    @property
    def first(self) -> Path:
        """The file that stands for the series: its finest level."""
        levels = [instance for instance in self.instances if instance.level is not None]
        return max(levels or self.instances, key=lambda i: i.level[0] * i.level[1] if i.level else 0).file

    @property
    def problem(self) -> str | None:
        """The reason for which this cannot be read as one slide."""
        for found in self.instances:
            if found.misplaced is not None:  # OpenSlide would end the whole process
                place = f"has frame {found.misplaced} where none can be"
                return f"{found.file.name} {place}: damaged or cut off; copy it again"
        levels = [instance for instance in self.instances if instance.level is not None]
        shown = {instance.shows for instance in self.instances}
        if not levels and shown <= _BESIDE:
            return f"its series has no level of the slide itself, only {', '.join(sorted(shown))}: copy all files"
        if not levels:
            return "its series has no file that says it is a level and how large: no whole slide, or damaged or cut off"
        for found in levels:
            for name, value, expected in (("bits", found.bits, 8), ("focal planes", found.focal_planes, 1),
                                          ("optical paths", found.optical_paths, 1)):  # fmt: skip
                if value != expected:
                    return f"{found.file.name} has {value} {name}; expected {expected}"
        encodings: dict[tuple[int, int] | None, set[str]] = {}
        for instance in levels:
            encodings.setdefault(instance.level, set()).add(instance.encoding)
        twice = next((sorted(names) for names in encodings.values() if len(names) > 1), None)
        if twice:
            return f"its series holds the same slide as {' and as '.join(twice)}; move one of them to another folder"
        return None


def is_dicom(path: Path) -> bool:
    """True if a file is DICOM, by its content."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def dicom_files(folder: Path) -> list[Path]:
    """The DICOM files of a folder."""
    return sorted(file for file in folder.iterdir() if is_dicom(file))


def read_instance(file: Path) -> Instance | None:
    """The header of a DICOM file, or None where it is too broken for that."""
    stat = file.stat()
    return _read(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1 << 16)  # a folder may hold the files of many slides, and each slide looks through all of them
def _read(file: Path, size: int, changed: int) -> Instance | None:
    import pydicom

    logging.getLogger("pydicom").setLevel(logging.ERROR)  # what is odd in a header is no news to the user
    try:
        with warnings.catch_warnings(action="ignore"), file.open("rb") as opened:
            found = pydicom.dcmread(opened, stop_before_pixels=True, specific_tags=list(_TAGS))
            offsets = _offsets(found, opened)
            misplaced = 1 if offsets is None else _misplaced(offsets, size)
        meta = found.file_meta
        storage = found.get("SOPClassUID") or meta.get("MediaStorageSOPClassUID", "")
        if not storage:
            return None  # cut off or overwritten
        is_slide = storage == _SLIDE_CLASS
        kinds = [*(found.get("ImageType") or []), "", "", ""]
        bits = int(found.get("BitsAllocated") or 8)
        size_of = (found.get("TotalPixelMatrixRows"), found.get("TotalPixelMatrixColumns"))
        is_level = is_slide and kinds[2] == "VOLUME" and all(isinstance(side, int) for side in size_of)
        return Instance(
            file=file,
            series=str(found.get("SeriesInstanceUID", "")),
            kind=str(getattr(storage, "name", "") or storage),
            is_slide=is_slide,
            is_directory=storage == _DIRECTORY_CLASS,
            shows=str(kinds[2]),
            tile=math.prod(int(found.get(name) or 1) for name in ("Rows", "Columns", "SamplesPerPixel"))
            * -(-bits // 8),
            bits=bits,
            focal_planes=int(found.get("TotalPixelMatrixFocalPlanes") or 1),
            optical_paths=int(found.get("NumberOfOpticalPaths") or 1),
            level=(int(size_of[0]), int(size_of[1])) if is_level else None,
            encoding=str(getattr(meta.get("TransferSyntaxUID", ""), "name", "")),
            misplaced=misplaced,
        )
    except Exception:  # pydicom raises whatever it stumbles over; the reader that is asked next says what it is
        return None


def _offsets(found: FileDataset, opened: BinaryIO) -> np.ndarray | None:
    """The beginnings of frames that a file declares, in bytes after its table; none where it declares none, None where
    the table is too long to be one. The file is read up to its pixels, whose element begins with a tag, two letters,
    two empty bytes and a length."""
    extended = found.get("ExtendedOffsetTable")
    if extended:
        return np.frombuffer(extended, "<u8")
    element = opened.read(_ELEMENT.size + _ITEM.size)
    if len(element) < _ELEMENT.size + _ITEM.size or _ELEMENT.unpack_from(element)[-1] != _UNDEFINED:
        return np.empty(0, "<u4")  # pixels as they are: they have no table
    tag, length = _ITEM.unpack_from(element, _ELEMENT.size)
    if tag == _ITEM_TAG and length > _LONGEST_TABLE:
        return None
    return np.frombuffer(opened.read(length) if tag == _ITEM_TAG else b"", "<u4")


def _misplaced(offsets: np.ndarray, size: int) -> int | None:
    """The first frame that does not begin after the one before it and inside the file."""
    begins = offsets.astype(float)  # large enough for sums of what a damaged table says
    wrong = np.flatnonzero((np.diff(begins, prepend=-1) <= 0) | (begins + _ITEM.size > size))
    return int(wrong[0]) + 1 if len(wrong) else None


def all_series(files: Iterable[Path]) -> list[Series]:
    """The slides among DICOM files, in order of their files."""
    groups: dict[str, list[Instance]] = {}
    for file in sorted(files):
        instance = read_instance(file)
        if instance is not None and instance.is_slide:
            groups.setdefault(instance.series, []).append(instance)
    return [Series(tuple(instances)) for instances in groups.values()]


def series_of(path: Path) -> Series | None:
    """The series that a file belongs to, or the only one of a folder; None if there is none."""
    if path.is_dir():
        found = all_series(dicom_files(path))
        return found[0] if len(found) == 1 else None
    own = read_instance(path)
    if own is None or not own.is_slide:
        return None
    return next((s for s in all_series(dicom_files(path.parent)) if path in s.files), None)


def problem_of(path: Path) -> str | None:
    """The reason for which a DICOM file or folder is not one slide; None if it is, or is too broken to tell."""
    if path.is_dir():
        files = dicom_files(path)
        found = all_series(files)
        if len(found) > 1:
            return f"a folder with {len(found)} DICOM series, each a slide; name a file of the one you mean"
        if not found:
            known = [instance for instance in map(read_instance, files) if instance is not None]
            return f"a folder of DICOM files of which none is a slide; the first is {known[0].kind}" if known else None
        return found[0].problem
    own = read_instance(path)
    if own is None:
        return None
    if not own.is_slide:
        return f"a DICOM file that is no slide but {own.kind}"
    series = series_of(path)
    return None if series is None else series.problem


def check_tiles(path: Path) -> None:
    """Refuses tiles that no memory can hold: OpenSlide ends the whole process where it gets none."""
    series = series_of(path)
    for instance in series.instances if series is not None else ():
        check_decoded(path, f"a tile of {instance.file.name}", instance.tile)


def claims(path: Path, head: bytes) -> bool:
    """True if this is a DICOM file or a folder with one."""
    return is_dicom(path) or (path.is_dir() and any(map(is_dicom, path.iterdir())))


def files_of(path: Path) -> list[Path]:
    """The files of the series of a DICOM file or folder."""
    series = series_of(path)
    if series is not None:
        return series.files
    return dicom_files(path) if path.is_dir() else [path]  # too broken to tell what belongs together


def DicomReader(path: Path | str, options: ReadOptions = PLAIN) -> OpenSlideReader | WsiDicomReader:
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


class WsiDicomReader(Reader):
    """A DICOM series read through wsidicom, which locks its files itself."""

    takes_options = False

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        from wsidicom import WsiDicom

        super().__init__(path, options)
        try:
            with warnings.catch_warnings(action="ignore"):  # what is odd in a header is no news to the user
                self._slide: Any = WsiDicom.open(files_of(self._path))
        except Exception as error:  # wsidicom and pydicom raise many kinds
            raise SlideError(self._path, f"wsidicom: {str(error) or type(error).__name__}") from error
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

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        try:
            size = (right - left, bottom - top)
            image = self._slide.read_region((left, top), self._levels[level].level, size)
        except Exception as error:
            raise SlideError(self._path, f"cannot read rows {top} to {bottom}: {error}") from error
        return np.asarray(image.convert("RGB"))

    def _associated(self, name: str) -> Pixels:
        return np.asarray(getattr(self._slide, f"read_{name}")().convert("RGB"))

    def close(self) -> None:
        self._slide.close()
