"""Files that were changed by accident or on purpose: refused in one line that names the file, or read as before.

Each case copies a good file, changes one part of it by a seed, and reads it. Formats with checksums (stores, features)
may succeed only with the content from before the change. `changed_files/` holds changed files that were once read
wrongly or ended in another library's error.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from lightning_plugin import Box, Plan
from lightning_plugin.errors import PlanError
from tests.wsi_trainer.slides.dicom_files import write_slide
from wsi_trainer.data.features import FeatureSource, Written, write
from wsi_trainer.data.manifest import read_manifest
from wsi_trainer.errors import UserError
from wsi_trainer.io.untrusted import read_yaml
from wsi_trainer.regions.outlines import read_regions
from wsi_trainer.regions.target import LabelSource, Legend, open_labels
from wsi_trainer.slide import views
from wsi_trainer.slide.places import Places
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert

FOUND = Path(__file__).parent / "changed_files"


def pixels() -> np.ndarray:
    """A picture with gradients and noise."""
    y, x = np.mgrid[:200, :230]
    found = np.stack([(x * 5) % 256, (y * 3) % 256, (x * y) % 256], axis=-1).astype(np.uint8)
    found[40:90, 50:120] = np.random.default_rng(1).integers(0, 256, (50, 70, 3), np.uint8)
    return found


def make_tiff(folder: Path, compression: str | None = "zlib") -> Path:
    options: dict[str, Any] = {"photometric": "rgb", "tile": (64, 64), "resolution": (20000, 20000)}
    tifffile.imwrite(folder / "slide.tif", pixels(), compression=compression, resolutionunit=3, **options)
    return folder / "slide.tif"


def make_png(folder: Path) -> Path:
    Image.fromarray(pixels()).save(folder / "slide.png")
    return folder / "slide.png"


def make_dicom(folder: Path) -> Path:
    (folder / "slide").mkdir()
    write_slide(folder / "slide", "slide", levels=1)
    return folder / "slide"


def make_store(folder: Path) -> Path:
    slide = make_tiff(folder)
    convert(Job(slide, "slide"), folder, Settings(chunk=64, shard=128))
    return folder / "slide.zarr"


def make_features(folder: Path) -> Path:
    rows = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
    corners = np.stack([np.arange(40.0) * 8, np.zeros(40)], axis=1)
    places = Places(folder / "slide.tif", corners, side=8.0, slide=(400, 400))
    about = Written(name="s", places=places, size=8, step=8, mpp=0.5, encoder="e", weights="w", origin="o",
                    slide_hash="h")  # fmt: skip
    write(folder / "slide.h5", rows.shape, [rows], about, "trident")
    return folder / "slide.h5"


def make_text(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return make


def make_labels(folder: Path) -> Path:
    tifffile.imwrite(folder / "label.tif", pixels()[::2, ::2, 0] % 2, tile=(64, 64), compression="zlib")
    return folder / "label.tif"


def read_slide(path: Path) -> Any:
    with Slide.open(path) as reader:
        height, width = reader.info.shape
        return reader.read(0, 0, 0, min(height, 2000), min(width, 2000))


def read_source(source: Any) -> Any:
    return np.asarray(source.read(Box.whole(source.shape[2:])))


def read_image(path: Path) -> Any:
    return read_source(views.Image(Slide.open(path)))


def read_labels(path: Path) -> Any:
    legend = Legend(("ground", "drawn"), {"0": "ground", "1": "drawn"}, "ground")
    source = LabelSource.of(open_labels(path), legend, (200, 230), None, path)
    return np.asarray(source.read(Box.whole((200, 230))))


RING = [[10, 10], [60, 10], [60, 60], [10, 60], [10, 10]]
GEOJSON = {"type": "FeatureCollection", "features": [
    {"type": "Feature", "properties": {"classification": {"name": "Tumor"}},
     "geometry": {"type": "MultiPolygon", "coordinates": [[RING], [RING]]}}]}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        make: writes a good file or folder into an empty folder.
        read: the project's reader.
        checked: whether checksums cover the file, so that a success must give the content from before the change.
        among: the files of a folder that are changed.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    checked: bool = False
    among: str = "**/*"


FORMATS = {
    "tiff": Format(make_tiff, read_slide),
    "tiff, jpeg": Format(lambda folder: make_tiff(folder, "jpeg"), read_slide),
    "png": Format(make_png, read_slide),
    "dicom": Format(make_dicom, read_slide),
    "store, pixels": Format(make_store, read_image, True, "[0-9]*/c/**/*"),
    "store, metadata": Format(make_store, read_image, True, "[0-9]*/zarr.json"),
    "features": Format(make_features, lambda path: read_source(FeatureSource(path)), True),
    "label image": Format(make_labels, read_labels),
    "manifest": Format(make_text("manifest.csv", "slide,label\na.tif,0\nb.tif,1\n"), read_manifest),
    "config": Format(make_text("config.yaml", "model: {depth: 18}\ntrain: {epochs: 3, budget: 12MiB}\n"), read_yaml),
    "outlines": Format(make_text("drawn.geojson", json.dumps(GEOJSON)), read_regions),
}


def change(chance: random.Random, data: bytearray) -> bytearray:
    """Flip bits, overwrite, cut off, leave out or zero a part, or exchange a word with another one of the file."""
    at = chance.randrange(len(data))
    size = min(chance.choice((1, 2, 4, 64, 512)), len(data) - at)
    kind = chance.randrange(6)
    if kind == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[at : at + size] = chance.randbytes(size)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + size]
    elif kind == 4:
        data[at : at + size] = bytes(size)
    else:
        words = [found.span() for found in re.finditer(rb"[^\s,:;<>\"'=/{}\[\]]+", bytes(data))]
        (start, end), (low, high) = chance.choice(words), chance.choice(words)
        odd = (b"", b"nan", b"-1", b"1e999", b"9" * 5000, b"\xff\xfe", b'"', b"../../x", b"\0", bytes(data[low:high]))
        data[start:end] = chance.choice(odd)
    return data


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_refused_by_name_or_read_as_before(
    name: str, tmp_path: Path, count: Callable[..., int]
) -> None:
    form = FORMATS[name]
    (tmp_path / "good").mkdir()
    good = form.make(tmp_path / "good")
    before = form.read(good)
    refused = 0
    for seed in range(count(ci=12, full=500)):
        chance = random.Random(f"{name}:{seed}")
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        copy = shutil.copytree(good.parent, tmp_path / "changed") / good.name
        files = sorted(file for file in copy.glob(form.among) if file.is_file()) if copy.is_dir() else [copy]
        file = chance.choice(files)
        file.write_bytes(change(chance, bytearray(file.read_bytes())))
        try:
            found = form.read(copy)
        except UserError as error:
            refused += 1
            said = str(error)
            assert good.stem in said and "\n" not in said.strip(), (seed, said)
        else:
            assert not form.checked or np.array_equal(found, before), f"seed {seed}: other pixels, and no error"
    assert refused, "no change was noticed"


READ_FOUND: dict[str, Callable[[Path], Any]] = {
    "dicom": read_slide,
    "label_tiff/label.tif": read_labels,
    "label_zarr/label.zarr": read_labels,
    "plan/plan.json": lambda path: Plan.from_json(path.read_text(encoding="utf-8", errors="replace")),
}


@pytest.mark.parametrize("name", READ_FOUND)
def test_files_that_were_once_read_wrongly_are_refused(name: str) -> None:
    with pytest.raises((UserError, PlanError)) as caught:
        READ_FOUND[name](FOUND / name)
    assert "\n" not in str(caught.value).strip()
