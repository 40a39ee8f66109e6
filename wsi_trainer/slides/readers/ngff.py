"""The metadata of an OME-Zarr image, 0.4 or 0.5, checked: other software writes it, and people edit it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SlideError, UnsupportedSlide

_MICROMETRES = {
    "meter": 1e6, "decimeter": 1e5, "centimeter": 1e4, "millimeter": 1e3, "micrometer": 1.0, "nanometer": 1e-3,
    "angstrom": 1e-4, "inch": 25400.0, "foot": 304800.0, "yard": 914400.0,
}  # fmt: skip


@dataclass(frozen=True)
class Multiscale:
    """What the metadata says of an image.

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
    sizes = [_MICROMETRES.get(str(unit)) for unit in units]
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
