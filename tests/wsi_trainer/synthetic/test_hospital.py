"""A synthetic hospital is unlike another in what it is told, and its scanner's files are read as such."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import openslide
import pytest

from wsi_trainer import Slide
from wsi_trainer.synthetic import hospital


@pytest.fixture(scope="module")
def south(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("south")
    return hospital(
        folder, "south", slides=10, side=300, seed=2, positive=0.3, stain=(0.75, 1.4), scanner="aperio", finer=2
    )


def rows_of(manifest: Path) -> list[dict[str, str]]:
    with manifest.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_records_are_those_of_patients(south: Path) -> None:
    rows, patients = rows_of(south), defaultdict(set)
    assert sum(row["label"] == "1" for row in rows) == 3 and {row["site"] for row in rows} == {"south"}
    for row in rows:
        assert row["slide"].startswith("slides/south_") and row["patient"].startswith("south_")
        assert 0 < float(row["time"]) <= 60 and row["event"] in ("0", "1")
        patients[row["patient"]].add((row["label"], row["age"], row["sex"], row["time"], row["event"]))
    assert len(patients) < len(rows) and all(len(records) == 1 for records in patients.values())


def test_a_finer_scan_of_aperio_has_the_pixels_of_a_coarser_one(south: Path, tmp_path: Path) -> None:
    coarse = hospital(tmp_path, "south", slides=10, side=300, seed=2, positive=0.3, stain=(0.75, 1.4))
    row, same = rows_of(south)[0], rows_of(coarse)[0]
    path = south.parent / row["slide"]
    with openslide.OpenSlide(path) as slide, Slide.open(path) as own, Slide.open(tmp_path / same["slide"]) as other:
        assert slide.properties["openslide.vendor"] == own.info.vendor == "aperio"
        assert own.info.mpp == (0.25, 0.25) and other.info.mpp == (0.5, 0.5) and "thumbnail" in slide.associated_images
        assert [(level.width, level.height) for level in own.info.levels] == list(slide.level_dimensions)
        fine = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")).astype(float)
        shrunk = fine.reshape(fine.shape[0] // 2, 2, fine.shape[1] // 2, 2, 3).mean((1, 3))
        level = other.info.levels[0]
        with openslide.OpenSlide(tmp_path / same["slide"]) as there:
            plain = np.asarray(there.read_region((0, 0), 0, there.dimensions).convert("RGB")).astype(float)
    assert shrunk.shape == plain.shape == (level.height, level.width, 3) and np.abs(shrunk - plain).mean() < 4  # JPEG
    outlines = [
        np.array(feature["geometry"]["coordinates"][0])
        for folder in (south.parent, tmp_path)
        for feature in json.loads((folder / "lesions" / f"{Path(row['slide']).stem}.geojson").read_text())["features"]
    ]
    half = len(outlines) // 2
    assert all(np.allclose(a, 2 * b, atol=0.02) for a, b in zip(outlines[:half], outlines[half:], strict=True))


def test_a_hospital_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scanner='leica'"):
        hospital(tmp_path, "x", scanner="leica")
    with pytest.raises(ValueError, match="positive=0"):
        hospital(tmp_path, "x", positive=0.0)
