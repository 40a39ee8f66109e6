"""What shows who a patient is stays in the slide's own file, unless someone asks for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from wsi_trainer.cli import main

NAME, BARCODE = "DOE^JANE", "BC-4711-0815"
LABEL = np.full((60, 80, 3), (13, 200, 77), np.uint8)
"""As if the name were written on it."""
MACRO = np.full((50, 120, 3), (7, 9, 201), np.uint8)


@pytest.fixture
def named_slide(tmp_path: Path) -> Path:
    """An SVS whose description, tags, label and macro image say who the patient is."""
    path = tmp_path / "slides" / "s1.svs"
    path.parent.mkdir()
    text = f"Aperio Image Library v1\r\n512x512|AppMag = 20|MPP = 0.5|Patient = {NAME}|Barcode = {BARCODE}"
    pixels = np.full((512, 512, 3), 255, np.uint8)
    pixels[100:400, 100:400] = (180, 60, 140)
    with tifffile.TiffWriter(path) as tif:
        extra = [(315, "s", 0, NAME, True), (700, "s", 0, f"<x>{BARCODE}</x>", True)]
        tif.write(pixels, tile=(256, 256), compression="jpeg", description=text, extratags=extra, metadata=None)
        tif.write(pixels[::4, ::4], description=f"{text} thumbnail", metadata=None)
        tif.write(LABEL, description=f"{text} label", subfiletype=1, metadata=None)
        tif.write(MACRO, description=f"{text} macro", subfiletype=9, metadata=None)
    return path


def written(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_nothing_of_it_is_written_or_printed(
    named_slide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert NAME.encode() in named_slide.read_bytes()
    broken = named_slide.with_name("s2.svs")
    broken.write_bytes(named_slide.read_bytes()[:60_000])  # the report of a failure says nothing either
    out = tmp_path / "out"
    command = ["preprocess", str(named_slide.parent), str(out), "--workers", "1", "--stall-minutes", "0"]
    assert main([*command, "--export-ngff", "0.4"]) in (0, 1)
    assert main(["verify", str(out)]) == 0
    files = written(out)
    assert (out / "s1.zarr" / "zarr.json") in files and (out / "stores.csv") in files
    shown = capsys.readouterr()
    for place, content in {**files, "stdout": shown.out.encode(), "stderr": shown.err.encode()}.items():
        for secret in (NAME, BARCODE, "JANE", "4711"):
            assert secret.encode() not in content, f"{secret} is in {place}"
    for place in files:
        if place.suffix in (".jpg", ".png"):
            colours = np.asarray(Image.open(place).convert("RGB")).reshape(-1, 3).astype(int)
            for image in (LABEL, MACRO):
                assert np.abs(colours - image[0, 0]).sum(1).min() > 60, f"an associated image is in {place}"


def test_images_are_copied_where_asked_for_and_without_their_text(named_slide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["preprocess", str(named_slide), str(out), "--tissue", "none"]
    assert main(command) == 0
    assert not (out / "associated").exists()
    assert main([*command, "--copy-associated", "true"]) == 0  # also where the slide was converted before
    folder = out / "associated" / "s1"
    assert np.array_equal(np.asarray(Image.open(folder / "label.png")), LABEL)
    assert np.array_equal(np.asarray(Image.open(folder / "macro.png")), MACRO)
    assert all(NAME.encode() not in content for content in written(folder).values())


def test_names_in_dicom_stay_there(real_slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pydicom = pytest.importorskip("pydicom", reason="extra dicom is not installed")
    folder = tmp_path / "slides" / "series"
    folder.mkdir(parents=True)
    for file in (real_slides / "CMU-1-Small-Region_dicom").iterdir():
        data = pydicom.dcmread(file)
        data.PatientName, data.PatientID, data.BarcodeValue = NAME, BARCODE, BARCODE
        data.save_as(folder / file.name)
    out = tmp_path / "out"
    assert main(["preprocess", str(folder.parent), str(out)]) == 0
    shown = capsys.readouterr()
    contents = [*written(out).values(), shown.out.encode(), shown.err.encode()]
    assert len(contents) > 8
    assert not any(secret in content for content in contents for secret in (b"JANE", b"4711"))
