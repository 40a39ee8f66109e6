"""Metadata of OME-NGFF 0.5 and 0.6, and the tissue mask as a label image beside the levels of the image.

NGFF wants a label to have the image's levels. Its finer levels repeat the mask's pixels, which costs next to nothing on
disk; chunks without tissue are absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wsi_trainer.io.files import replace_file, write_json
from wsi_trainer.slide.formats.base import CHANNELS, FILL
from wsi_trainer.slide.geometry import PROVENANCE, SlideTransform
from wsi_trainer.slide.tissue import LABEL, TissueMask, any_of
from wsi_trainer.store.chunks import Layout, ZstdCodec, encode_shard

NGFF = "0.5"
COLOURS = (("red", "FF0000"), ("green", "00FF00"), ("blue", "0000FF"))


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


def multiscale(
    name: str, place: SlideTransform, levels: int = 1, *, channels: bool = False, kind: str | None = None
) -> dict[str, Any]:
    """Metadata that NGFF 0.4 and 0.5 have alike of an image, in the coordinates of the original slide.

    Args:
        name: Of the image.
        place: Its place in the slide. Without micrometres the unit of the axes is one of the slide's pixels.
        levels: The image itself, and coarser ones, each with half the pixels along each side.
        channels: True where axis c comes before y and x.
        kind: Method by which a coarser level is made of the one below.
    """
    unit = {} if place.mpp is None else {"unit": "micrometer"}
    space = [{"name": axis, "type": "space", **unit} for axis in "yx"]
    datasets = []
    for level in range(levels):
        its = place.coarser(2**level)
        steps: list[dict[str, Any]] = [{"type": "scale", "scale": [*([1.0] if channels else []), *its.pixel()]}]
        if any(its.first()):
            steps.append({"type": "translation", "translation": [*([0.0] if channels else []), *its.first()]})
        datasets.append({"path": str(level), "coordinateTransformations": steps})
    return {
        "name": name,
        **({} if kind is None else {"type": kind}),
        "axes": [{"name": "c", "type": "channel"}, *space] if channels else space,
        "datasets": datasets,
    }


def with_systems(image: Mapping[str, Any], place: SlideTransform) -> dict[str, Any]:
    """The metadata of `multiscale` as NGFF 0.6 has them: coordinate systems by name, between which transforms lead.

    Beside the micrometres (`physical`), which count from the centre of the slide's first pixel, `slide` has the pixels
    of level 0 of the original slide from the corner of the first, as OpenSlide and GeoJSON count them.

    Args:
        image: What 0.4 and 0.5 have of it.
        place: Its place in the slide.
    """
    axes, channel = image["axes"], [1.0] * (len(image["axes"]) - 2)
    pixels = [{key: one[key] for key in one if key != "unit"} for one in axes]
    systems = [{"name": "physical", "axes": axes}, {"name": "slide", "axes": pixels}]
    to_slide = [
        {"type": "scale", "scale": [*channel, *(1 / unit for unit in place.unit)]},
        {"type": "translation", "translation": [*(0.0 for _ in channel), 0.5, 0.5]},
    ]
    between = {"input": {"name": "physical"}, "output": {"name": "slide"}}
    datasets = []
    for one in image["datasets"]:
        steps = one["coordinateTransformations"]
        whole = steps[0] if len(steps) == 1 else {"type": "sequence", "transformations": steps}
        ends = {"input": {"path": one["path"]}, "output": {"name": "physical"}}
        datasets.append({**one, "coordinateTransformations": [{**whole, **ends}]})
    return {
        **{key: value for key, value in image.items() if key != "axes"},
        "coordinateSystems": systems,
        "datasets": datasets,
        "coordinateTransformations": [{"type": "sequence", **between, "transformations": to_slide}],
    }


def image_attributes(name: str, place: SlideTransform, levels: int, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the image's group."""
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    return {
        "ome": {
            "version": NGFF,
            "multiscales": [multiscale(name, place, levels, channels=True, kind="mean")],
            "omero": {
                "channels": [
                    {"label": label, "color": colour, "window": window, "active": True} for label, colour in COLOURS
                ],
                "rdefs": {"model": "color"},
            },
        },
        PROVENANCE: dict(provenance),
    }


def write_label(
    folder: Path, mask: TissueMask, place: SlideTransform, shapes: list[tuple[int, int]], layout: Layout
) -> None:
    """Writes the group `labels` with the label `tissue`, which has the levels of the image."""
    write_json(folder / "zarr.json", group({"ome": {"version": NGFF, "labels": [LABEL]}}))
    label = {
        "version": NGFF,
        "multiscales": [multiscale(LABEL, place, len(shapes), kind="any")],
        "image-label": {
            "version": NGFF,
            "colors": [{"label-value": 1, "rgba": [0, 160, 0, 255]}],
            "source": {"image": "../../"},
        },
    }
    write_json(folder / LABEL / "zarr.json", group({"ome": label}))
    codec = ZstdCodec()
    for level, shape in enumerate(shapes):
        at = folder / LABEL / str(level)
        side = layout.shard
        metadata = array(shape, (side, side), (layout.chunk, layout.chunk), codec, "yx", fill=0)
        write_json(at / "zarr.json", metadata)
        scaled = at_level(mask, level)
        rows, columns = layout.grid(*shape)
        for row in range(rows):
            for column in range(columns):
                y, x = row * side, column * side
                box = (y, x, min(side, shape[0] - y), min(side, shape[1] - x))
                if not scaled.any_in(*box):
                    continue
                parts = encode_shard(scaled.cover(*box).astype(np.uint8)[None], layout, codec, fill=0)
                if parts:
                    (at / "c" / str(row)).mkdir(parents=True, exist_ok=True)
                    replace_file(at / "c" / str(row) / str(column), *parts)


def at_level(mask: TissueMask, level: int) -> TissueMask:
    """The mask as seen from a level: a pixel there is tissue if any of what it covers is."""
    times = 2**level
    if times <= mask.scale:
        return TissueMask(mask.mask, mask.scale // times)
    return TissueMask(any_of(mask.mask, times // mask.scale), 1)
