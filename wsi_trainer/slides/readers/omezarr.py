"""OME-Zarr 0.4 and 0.5 stores, also those that other software wrote."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SlideError, UnsupportedSlide
from .closing import Closing
from .protocol import Level, Pixels, SlideInfo, blank, clip_box, level_downsample

_MICROMETRES = {"meter": 1e6, "centimeter": 1e4, "millimeter": 1e3, "micrometer": 1.0, "nanometer": 1e-3}


def claims(path: Path, head: bytes) -> bool:
    """Whether this folder is a zarr group."""
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


class OmeZarrReader(Closing):
    """A multiscale image of a zarr store, read with zarr-python."""

    name = "omezarr"

    def __init__(self, path: Path | str) -> None:
        import zarr  # takes a third of a second, which other slides need not wait for

        self._path = Path(path)
        try:
            group = zarr.open_group(self._path, mode="r")
            image, multiscale, ngff = _multiscale(group)
        except SlideError:
            raise
        except Exception as error:  # zarr raises many kinds
            raise SlideError(self._path, f"broken zarr store: {error}") from error
        if multiscale is None:
            raise UnsupportedSlide(self._path, "a zarr group without OME-NGFF multiscales")
        self._axes = "".join(axis["name"] for axis in multiscale["axes"])
        self._arrays = [self._array(image, dataset["path"]) for dataset in multiscale["datasets"]]
        shapes = [self._flat_shape(array) for array in self._arrays]
        self.info = SlideInfo(
            levels=tuple(Level(h, w, level_downsample(shapes[0], h, w)) for h, w in shapes),
            mpp=_resolution(multiscale, self._axes),
            reader=f"zarr {version('zarr')}",
            vendor=f"ome-zarr {ngff}",
        )

    def _array(self, group: Any, name: str) -> Any:
        if name not in group:
            raise SlideError(self._path, f"level {name!r} of the metadata is missing in the store")
        array = group[name]
        if array.dtype != np.uint8:
            raise UnsupportedSlide(self._path, f"pixels are {array.dtype}; expected 8 bits a channel")
        return array

    def _flat_shape(self, array: Any) -> tuple[int, int]:
        sizes = dict(zip(self._axes, array.shape, strict=True))
        if {"y", "x"} - sizes.keys() or sizes.get("c", 1) not in (1, 3):
            raise UnsupportedSlide(self._path, f"axes {sizes}; expected y and x and one or three channels")
        if any(size != 1 for axis, size in sizes.items() if axis not in "cyx"):
            raise UnsupportedSlide(self._path, f"axes {sizes}: a stack; expected one flat image")
        return sizes["y"], sizes["x"]

    def read(self, level: int, y: int, x: int, height: int, width: int) -> Pixels:
        out = blank(height, width, self.info.background)
        top, left, bottom, right = clip_box(y, x, height, width, self.info.levels[level])
        if bottom <= top or right <= left:
            return out
        cut: dict[str, slice | int] = {"y": slice(top, bottom), "x": slice(left, right), "c": slice(None)}
        try:
            part = self._arrays[level][tuple(cut.get(axis, 0) for axis in self._axes)]
        except Exception as error:
            raise SlideError(self._path, f"level {level} cannot be decoded: {error}") from error
        kept = [axis for axis in self._axes if axis in cut]
        if "c" in kept:
            part = np.moveaxis(part, [kept.index(axis) for axis in "yxc"], [0, 1, 2])
        else:
            part = (part if kept == ["y", "x"] else part.T)[..., None]
        out[top - y : bottom - y, left - x : right - x] = part
        return out

    def associated(self, name: str) -> Pixels:
        raise SlideError(self._path, f"no associated image {name!r}; stores of slides keep none")

    def close(self) -> None:
        """Nothing is held open."""

    def __reduce__(self) -> tuple[type[OmeZarrReader], tuple[Path]]:
        return OmeZarrReader, (self._path,)


def _multiscale(group: Any) -> tuple[Any, dict[str, Any] | None, str]:
    """The group of the image, its first multiscale and the NGFF version."""
    attributes: Any = dict(group.attrs)
    attributes = attributes.get("ome", attributes)
    if "bioformats2raw.layout" in attributes and "0" in group:
        return _multiscale(group["0"])
    if not attributes.get("multiscales"):
        return group, None, ""
    first = attributes["multiscales"][0]
    ngff = str(attributes.get("version") or first.get("version", "?"))
    if not first.get("axes"):
        return group, None, ngff
    return group, first, ngff


def _resolution(multiscale: dict[str, Any], axes: str) -> tuple[float, float] | None:
    units = {axis["name"]: axis.get("unit") for axis in multiscale["axes"]}
    scale = [1.0] * len(axes)
    steps = [
        *multiscale.get("coordinateTransformations", []),
        *multiscale["datasets"][0]["coordinateTransformations"],
    ]
    for step in steps:
        if step["type"] == "scale":
            scale = [a * b for a, b in zip(scale, step["scale"], strict=True)]
    sizes = []
    for axis in "yx":
        factor = _MICROMETRES.get(units.get(axis) or "")
        if factor is None:
            return None
        sizes.append(scale[axes.index(axis)] * factor)
    return sizes[0], sizes[1]
