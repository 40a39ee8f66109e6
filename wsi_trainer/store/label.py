"""The tissue mask as an OME label image, level for level beside the image.

NGFF wants a label to have the image's levels. Its finer levels repeat the mask's pixels, which costs next to
nothing on disk; chunks without tissue are absent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wsi_trainer.io.files import replace_file
from wsi_trainer.slide.tissue import LABEL, Mask, TissueMask
from wsi_trainer.store.chunks import ZstdCodec, encode_shard
from wsi_trainer.store.layout import Layout
from wsi_trainer.store.metadata import NGFF, array, group, label_attributes, write_json


def write_label(
    folder: Path, mask: TissueMask, mpp: tuple[float, float], shapes: list[tuple[int, int]], layout: Layout,
    origin: tuple[float, float] = (0.0, 0.0),
) -> None:  # fmt: skip
    """Writes the group `labels` with the label `tissue`."""
    write_json(folder / "zarr.json", group({"ome": {"version": NGFF, "labels": [LABEL]}}))
    write_json(folder / LABEL / "zarr.json", group(label_attributes(LABEL, mpp, len(shapes), origin)))
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
    return TissueMask(_any_of(mask.mask, times // mask.scale), 1)


def _any_of(mask: Mask, times: int) -> Mask:
    rows, columns = (np.arange(0, size, times) for size in mask.shape)
    return np.asarray(np.logical_or.reduceat(np.logical_or.reduceat(mask, rows, axis=0), columns, axis=1))
