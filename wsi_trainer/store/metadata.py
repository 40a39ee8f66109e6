"""The zarr.json files of a store: OME-NGFF 0.5 multiscales, the tissue label, provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wsi_trainer.io.files import replace_file
from wsi_trainer.store.chunks import ZstdCodec
from wsi_trainer.store.layout import CHANNELS, FILL, PROVENANCE, Layout

NGFF = "0.5"
COLOURS = (("red", "FF0000"), ("green", "00FF00"), ("blue", "0000FF"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, the same bytes for the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The zarr.json of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def array(
    shape: Sequence[int],
    chunk: Sequence[int],
    inner: Sequence[int],
    codec: ZstdCodec,
    axes: Sequence[str],
    fill: int = FILL,
) -> dict[str, Any]:
    """The zarr.json of a sharded array of bytes."""
    sharding = {
        "chunk_shape": list(inner),
        "codecs": codec.metadata(),
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "dimension_names": list(axes),
        "storage_transformers": [],
    }


def image_array(shape: tuple[int, int], layout: Layout, codec: ZstdCodec) -> dict[str, Any]:
    """The zarr.json of one level of the image."""
    shard, chunk = (CHANNELS, layout.shard, layout.shard), (CHANNELS, layout.chunk, layout.chunk)
    return array((CHANNELS, *shape), shard, chunk, codec, "cyx")


def _transformations(
    mpp: tuple[float, float], scale: int, channels: bool, origin: tuple[float, float]
) -> list[dict[str, Any]]:
    """Scale and place of a level: the centre of its first pixel is that of the pixels it averages."""
    first = [1.0] if channels else []
    shift = [0.0] if channels else []
    steps: list[dict[str, Any]] = [{"type": "scale", "scale": [*first, mpp[0] * scale, mpp[1] * scale]}]
    half = (scale - 1) / 2
    place = [origin[0] + mpp[0] * half, origin[1] + mpp[1] * half]
    if any(place):
        steps.append({"type": "translation", "translation": [*shift, *place]})
    return steps


def multiscale(
    name: str, mpp: tuple[float, float], scales: Sequence[int], *, channels: bool, kind: str,
    origin: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:  # fmt: skip
    """One NGFF multiscale; `scales` are the downsamplings of its datasets `0`, `1`, ...

    `origin` is where in the slide the centre of its first pixel lies, in micrometres.
    """
    space = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "yx"]
    return {
        "name": name,
        "type": kind,
        "axes": [{"name": "c", "type": "channel"}, *space] if channels else space,
        "datasets": [
            {"path": str(level), "coordinateTransformations": _transformations(mpp, scale, channels, origin)}
            for level, scale in enumerate(scales)
        ],
    }


def image_attributes(
    name: str, mpp: tuple[float, float], levels: int, provenance: Mapping[str, Any],
    origin: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:  # fmt: skip
    """The attributes of the image's group."""
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    scales = [2**level for level in range(levels)]
    return {
        "ome": {
            "version": NGFF,
            "multiscales": [multiscale(name, mpp, scales, channels=True, kind="mean", origin=origin)],
            "omero": {
                "channels": [
                    {"label": label, "color": colour, "window": window, "active": True} for label, colour in COLOURS
                ],
                "rdefs": {"model": "color"},
            },
        },
        PROVENANCE: dict(provenance),
    }


def label_attributes(
    name: str, mpp: tuple[float, float], levels: int, origin: tuple[float, float] = (0.0, 0.0)
) -> dict[str, Any]:
    """The attributes of the group of a label image, which has the levels of the image."""
    scales = [2**level for level in range(levels)]
    return {
        "ome": {
            "version": NGFF,
            "multiscales": [multiscale(name, mpp, scales, channels=False, kind="any", origin=origin)],
            "image-label": {
                "version": NGFF,
                "colors": [{"label-value": 1, "rgba": [0, 160, 0, 255]}],
                "source": {"image": "../../"},
            },
        }
    }
