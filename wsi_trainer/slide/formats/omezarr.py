"""The metadata of an OME-Zarr image, 0.4 or 0.5, checked: other software writes it, and people edit it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.errors import SlideError, UnsupportedSlide, UserError
from wsi_trainer.io.arrays import checked_array, zarr_store
from wsi_trainer.io.untrusted import Unreadable
from wsi_trainer.slide.formats.base import (
    MICROMETRES,
    PLAIN,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    SlideInfo,
    check_bits,
    check_decoded,
    check_size,
    choose_channel,
    describe_channels,
    level_downsample,
)
from wsi_trainer.store.manifest import check_complete


@dataclass(frozen=True)
class Multiscale:
    """The image that the metadata describe.

    Attributes:
        axes: one letter each, in the order of the arrays.
        paths: of the arrays, finest first.
        mpp: micrometres per pixel, y and x.
        unreadable: what stands there instead of that.
        channels: names of the channels.
        version: of NGFF.
    """

    axes: str
    paths: tuple[str, ...]
    mpp: tuple[float, float] | None
    unreadable: str | None
    channels: tuple[str, ...]
    version: str


def image_group(path: Path, group: Any, depth: int = 0) -> Any:
    """The group of the image: the first one of a store that bioformats2raw wrote."""
    attributes = _ome(group)
    if depth == 0 and "bioformats2raw.layout" in attributes and "0" in group:
        return image_group(path, group["0"], depth + 1)
    return group


def multiscale(path: Path, group: Any) -> Multiscale:
    """The first multiscale of a group.

    Raises:
        UnsupportedSlide: There is none.
        SlideError: It is broken; says where.
    """
    attributes = _ome(group)
    found = attributes.get("multiscales")
    if not found:
        raise UnsupportedSlide(path, "a zarr group without OME-NGFF multiscales")
    first = _mapping(path, _sequence(path, found, "multiscales")[0], "multiscales[0]")
    version = str(attributes.get("version") or first.get("version", "?"))
    if not first.get("axes"):
        raise UnsupportedSlide(path, "a zarr group without OME-NGFF multiscales that name their axes")
    axes = [_mapping(path, axis, "axes") for axis in _sequence(path, first["axes"], "axes")]
    names = [axis.get("name") for axis in axes]
    letters = [name for name in names if isinstance(name, str) and len(name) == 1]
    if len(letters) < len(names) or len(set(letters)) < len(letters):
        raise SlideError(path, f"broken OME-Zarr: its axes are {names}; expected different letters")
    if {"y", "x"} - set(letters):
        raise SlideError(path, f"axes {letters}; expected y and x")
    datasets = _sequence(path, first.get("datasets"), "datasets")
    if not datasets:
        raise SlideError(path, "broken OME-Zarr: its multiscale lists no datasets")
    paths = []
    for dataset in datasets:
        name = _mapping(path, dataset, "datasets").get("path")
        if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
            raise SlideError(path, f"broken OME-Zarr: a dataset's path is {name!r}; expected a name inside the store")
        paths.append(name)
    mpp, unreadable = _size(axes, "".join(letters), first, datasets[0])
    return Multiscale("".join(letters), tuple(paths), mpp, unreadable, _channels(attributes), version)


def _ome(group: Any) -> dict[str, Any]:
    attributes = dict(group.attrs)
    inner = attributes.get("ome", attributes)
    return inner if isinstance(inner, dict) else {}


def _sequence(path: Path, value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise SlideError(path, f"broken OME-Zarr: {name} is {_short(value)}; expected a list")
    return value


def _mapping(path: Path, value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SlideError(path, f"broken OME-Zarr: {name} has {_short(value)}; expected a mapping")
    return value


def _short(value: Any) -> str:
    return repr(value)[:60]


def _channels(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    omero = attributes.get("omero")
    channels = omero.get("channels") if isinstance(omero, dict) else None
    if not isinstance(channels, list):
        return ()
    return tuple(str(channel.get("label", "")) if isinstance(channel, dict) else "" for channel in channels)


def _size(
    axes: Sequence[Mapping[str, Any]], letters: str, first: Mapping[str, Any], dataset: Mapping[str, Any]
) -> tuple[tuple[float, float] | None, str | None]:
    """Micrometres per pixel, or what stands there instead. A size that nothing says is no damage."""
    scale = [1.0] * len(axes)
    known = False
    for owner in (dataset, first):
        steps = owner.get("coordinateTransformations") or []
        for step in steps if isinstance(steps, list) else [steps]:
            if not isinstance(step, dict) or step.get("type") != "scale":
                continue
            factors: Any = step.get("scale")
            if not _is_scale(factors, len(axes)):
                return None, f"scale = {_short(factors)}"
            scale = [a * b for a, b in zip(scale, factors)]
            known = True
    units = [axes[letters.index(letter)].get("unit") for letter in "yx"]
    if not known or not all(units):
        return None, None
    sizes = [MICROMETRES.get(str(unit)) for unit in units]
    if sizes[0] is None or sizes[1] is None:
        return None, f"unit = {_short(units[0] if sizes[0] is None else units[1])}"
    y, x = scale[letters.index("y")], scale[letters.index("x")]
    return (y * sizes[0], x * sizes[1]), None


def _is_scale(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in value)
    )


def claims(path: Path, head: bytes) -> bool:
    """True if this folder is a zarr group."""
    return path.is_dir() and any((path / name).is_file() for name in ("zarr.json", ".zgroup"))


class OmeZarrReader(Reader):
    """A multiscale image of a zarr store, read with zarr-python."""

    def __init__(self, path: Path | str, options: ReadOptions = PLAIN) -> None:
        import zarr  # takes a third of a second, which other slides need not wait for

        super().__init__(path, options)
        check_complete(self._path)
        try:
            group = image_group(self._path, zarr.open_group(zarr_store(self._path), mode="r"))
            found = multiscale(self._path, group)
            self._axes = found.axes
            self._arrays = [self._array(group, name) for name in found.paths]
        except Unreadable as error:
            raise SlideError(self._path, f"broken zarr store: {error}") from error
        except (UserError, MemoryError):
            raise
        except zarr.errors.ContainsArrayError as error:
            raise SlideError(self._path, "a zarr array and not a group; OME-Zarr has its arrays in one") from error
        except Exception as error:  # zarr raises many kinds
            said = isinstance(error, ValueError | OSError | zarr.errors.BaseZarrError) and str(error)
            raise SlideError(self._path, f"broken zarr store: {said or 'its metadata cannot be read'}") from error
        shapes = [self._flat_shape(array) for array in self._arrays]
        if any(shape[0] > shapes[0][0] or shape[1] > shapes[0][1] for shape in shapes):
            raise SlideError(self._path, f"its levels have {shapes} px; expected the largest first")
        first = self._arrays[0]
        self._scale = check_bits(self._path, first.dtype, options)
        if any(array.dtype != first.dtype for array in self._arrays):
            raise SlideError(self._path, "its levels have different kinds of pixels")
        self._channel = self._chosen(first, found)
        changes = []
        if self._channel is not None:
            changes.append(f"channel {options.channel} of {self._sizes(first).get('c', 1)}")
        if self._scale is not None:
            changes.append(f"{first.dtype} {self._scale} to 8 bits")
        self.info = SlideInfo(
            levels=tuple(Level(h, w, level_downsample(shapes[0], h, w)) for h, w in shapes),
            mpp=found.mpp,
            reader=f"zarr {version('zarr')}",
            vendor=f"ome-zarr {found.version}",
            changes=tuple(changes),
            unreadable=found.unreadable,
        )

    def _array(self, group: Any, name: str) -> Any:
        if name not in group:
            raise SlideError(self._path, f"level {name!r} of the metadata is missing in the store")
        try:
            array = checked_array(self._path, group[name], f"level {name!r}")
        except Unreadable as error:
            raise SlideError(self._path, error.reason) from error
        check_decoded(self._path, f"a chunk of {array.chunks}", math.prod(array.chunks) * array.dtype.itemsize)
        return array

    def _sizes(self, array: Any) -> dict[str, int]:
        if len(array.shape) != len(self._axes):
            raise SlideError(self._path, f"an array of {len(array.shape)} dimensions has the axes {list(self._axes)}")
        return dict(zip(self._axes, array.shape, strict=True))

    def _flat_shape(self, array: Any) -> tuple[int, int]:
        sizes = self._sizes(array)
        if any(size != 1 for axis, size in sizes.items() if axis not in "cyx"):
            raise SlideError(self._path, f"axes {sizes}: a stack; expected one flat image")
        check_size(self._path, sizes["y"], sizes["x"])
        return sizes["y"], sizes["x"]

    def _chosen(self, array: Any, found: Multiscale) -> int | None:
        """The only channel to read; None reads grey or RGB."""
        count, wanted = self._sizes(array).get("c", 1), self._options.channel
        if wanted is not None:
            return choose_channel(self._path, wanted, found.channels, count)
        if count not in (1, 3):
            names = describe_channels(found.channels, count)
            raise SlideError(self._path, f"{count} channels; choose one with preprocess --channel ({names})")
        return None

    def _part(self, level: int, top: int, left: int, bottom: int, right: int) -> Pixels:
        channels = slice(None) if self._channel is None else slice(self._channel, self._channel + 1)
        cut: dict[str, slice | int] = {"y": slice(top, bottom), "x": slice(left, right), "c": channels}
        try:
            part = self._arrays[level][tuple(cut.get(axis, 0) for axis in self._axes)]
        except Exception as error:
            raise SlideError(self._path, f"level {level} cannot be decoded: {error}") from error
        if self._scale is not None:
            part = self._scale.apply(part)
        kept = [axis for axis in self._axes if axis in cut]
        if "c" in kept:
            part = np.moveaxis(part, [kept.index(axis) for axis in "yxc"], [0, 1, 2])
        else:
            part = (part if kept == ["y", "x"] else part.T)[..., None]
        return part
