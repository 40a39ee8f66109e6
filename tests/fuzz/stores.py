"""Stores: those of this package, whose chunks and manifest have checksums, and OME-Zarr and labels of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import zarr
from PIL import Image

from lightning_plugin import Box
from tests.fuzz.kinds import Target, Unjudged
from tests.fuzz.mutations import BINARY, TEXT, TIFF
from tests.fuzz.slides import pixels, read_whole
from wsi_trainer.regions.labels import LabelSource, open_labels
from wsi_trainer.regions.legend import Legend
from wsi_trainer.slides.convert import Job, convert
from wsi_trainer.slides.errors import SlideError
from wsi_trainer.slides.settings import Settings
from wsi_trainer.slides.source import SlideSource
from wsi_trainer.slides.store.manifest import find_damage


def own(folder: Path) -> Sequence[Path]:
    slide = folder / "slide.tif"
    tifffile.imwrite(slide, pixels(), photometric="rgb", tile=(64, 64), resolution=(20000, 20000), resolutionunit=3)
    convert(Job(slide, "slide"), folder, Settings(chunk=64, shard=128))
    slide.unlink()
    return [folder / "slide.zarr"]


def read_own(path: Path) -> Any:
    source = SlideSource(path)
    return np.asarray(source.read(Box.whole(source.shape[2:])))


def verified(path: Path) -> Any:
    """What `wsi-train verify` says, as an error; silence means that all bytes are as they were written."""
    damage = list(find_damage(path))
    if damage:
        raise SlideError(path, f"{damage[0].file}: {damage[0].reason}")
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def foreign(folder: Path) -> Sequence[Path]:
    found = []
    for version in (2, 3):
        path = folder / f"image{version}.zarr"
        group = zarr.open_group(path, mode="w", zarr_format=version)
        data = pixels().transpose(2, 0, 1)
        array = group.create_array("0", shape=data.shape, chunks=(3, 64, 64), dtype="u1")
        array[:] = data
        axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
        scale = [{"type": "scale", "scale": [1.0, 0.5, 0.5]}]
        said = {"multiscales": [{"version": "0.4", "axes": axes, "datasets": [
            {"path": "0", "coordinateTransformations": scale}]}]}  # fmt: skip
        group.attrs.update(said if version == 2 else {"ome": {"version": "0.5", **said}})
        found.append(path)
    return found


def tensorstore_of(path: Path, name: str) -> np.ndarray:
    import tensorstore

    driver = "zarr" if (path / name / ".zarray").is_file() else "zarr3"
    try:
        array = tensorstore.open(
            {"driver": driver, "kvstore": {"driver": "file", "path": str(path / name)}}, open=True, read=True
        ).result()
        return np.asarray(array.read().result())
    except Exception as error:
        raise Unjudged from error


def foreign_truth(path: Path) -> Any:
    """The first array as tensorstore reads it."""
    try:
        file = path / (".zattrs" if (path / ".zattrs").is_file() else "zarr.json")
        said = json.loads(file.read_bytes())
        said = said.get("attributes", said)
        first = said.get("ome", said)["multiscales"][0]
        name, axes = first["datasets"][0]["path"], "".join(axis["name"] for axis in first["axes"])
    except Exception as error:
        raise Unjudged from error
    found = tensorstore_of(path, name)
    if axes != "cyx" or found.ndim != 3 or found.dtype != np.uint8:
        raise Unjudged
    return np.broadcast_to(found, (3, *found.shape[1:])).transpose(1, 2, 0)


def labels(folder: Path) -> Sequence[Path]:
    group = zarr.open_group(folder / "label.zarr", mode="w")
    array = group.create_array("0", shape=(100, 115), chunks=(64, 64), dtype="u1")
    array[:] = pixels()[::2, ::2, 0] % 2
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": [{"path": "0"}]}]}
    return [folder / "label.zarr"]


def label_tiffs(folder: Path) -> Sequence[Path]:
    tifffile.imwrite(folder / "label.tif", pixels()[::2, ::2, 0] % 2, tile=(64, 64), compression="zlib")
    return [folder / "label.tif"]


def label_truth(path: Path) -> Any:
    try:
        said = json.loads((path / "zarr.json").read_bytes())["attributes"]
        name = said.get("ome", said)["multiscales"][0]["datasets"][0]["path"]
    except Exception as error:
        raise Unjudged from error
    return enlarged(tensorstore_of(path, name))


def label_tiff_truth(path: Path) -> Any:
    try:
        with Image.open(path, formats=("TIFF",)) as image:
            if image.mode != "L":
                raise Unjudged
            return enlarged(np.asarray(image))
    except Unjudged:
        raise
    except Exception as error:
        raise Unjudged from error


def enlarged(labels: np.ndarray) -> np.ndarray:
    """Two pixels of the slide along each side for one label."""
    if labels.shape != (100, 115):
        raise Unjudged
    return labels.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)


LEGEND = Legend(("ground", "drawn"), {"0": "ground", "1": "drawn"}, "ground")


def read_labels(path: Path) -> Any:
    source = LabelSource.of(open_labels(path), LEGEND, (200, 230), None, path)
    return np.asarray(source.read(Box.whole((200, 230))))[0, 0]


TARGETS = (
    Target("own store, pixels", own, read_own, None, BINARY, "[0-9]*/c/**/*"),
    Target("own store, verified", own, verified, None, (*BINARY, *TEXT), "**/*"),
    Target("own store, metadata", own, read_own, None, TEXT, "[0-9]*/zarr.json"),
    Target("ome-zarr", foreign, read_whole, foreign_truth, (*BINARY, *TEXT), "**/*"),
    Target("label zarr", labels, read_labels, label_truth, (*BINARY, *TEXT), "**/*"),
    Target("label tiff", label_tiffs, read_labels, label_tiff_truth, TIFF),
)
