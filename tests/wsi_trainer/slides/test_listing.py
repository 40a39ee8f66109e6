"""What a user means by a folder, a file or a pattern: every slide once; what is left out is told (S2, S3, S4, S8)."""

from __future__ import annotations

import csv
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom.uid import JPEG2000

from tests.wsi_trainer.slides import dicom_files
from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError, UserError
from wsi_trainer.preprocess.inputs import list_slides
from wsi_trainer.slide.identity import source_files
from wsi_trainer.slide.slide import Slide
from wsi_trainer.store.convert import Job, Settings, convert

FAST = ["--workers", "1", "--tissue", "none"]


def _listed(slides: Path | str, out: Path | None = None) -> tuple[dict[str, Path], list[str]]:
    notes: list[str] = []
    found = list_slides(str(slides), out, notes.append)
    return {item.job.name: item.job.slide for item in found}, notes


def _converted(out: Path) -> set[str]:
    with (out / "stores.csv").open() as file:
        return {row["store"] for row in csv.DictReader(file)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slides").mkdir()
    return tmp_path / "slides"


# -- DICOM


def test_series_and_not_folders(folder: Path, slide: Path) -> None:
    dicom_files.write_slide(folder, "a", 1)
    dicom_files.write_slide(folder, "b", 2)
    dicom_files.write_slide(folder / "one", "c", 3)
    shutil.copy(slide, folder / "s.tif")
    (folder / "notes.txt").write_text("about")
    found, notes = _listed(folder)
    assert found == {
        "a_0": folder / "a_0.dcm", "b_0": folder / "b_0.dcm", "one": folder / "one", "s": folder / "s.tif",
    }  # fmt: skip
    assert notes == [f"{folder}: 2 DICOM series, each a slide of its own"]


def test_all_of_a_mixed_folder_is_converted(folder: Path, slide: Path, tmp_path: Path) -> None:
    dicom_files.write_slide(folder / "mixed", "a", 1)
    dicom_files.write_slide(folder / "mixed", "b", 2)
    shutil.copy(slide, folder / "mixed" / "s.svs")
    out = tmp_path / "out"
    assert main(["preprocess", str(folder), str(out), *FAST]) == 0
    assert _converted(out) == {"mixed/a_0.zarr", "mixed/b_0.zarr", "mixed/s.zarr"}
    for name, seed in (("a", 1), ("b", 2)):
        alone = tmp_path / f"alone-{name}"
        dicom_files.write_slide(alone, name, seed)
        with Slide.open(alone) as expected, Slide.open(out / "mixed" / f"{name}_0.zarr") as store:
            assert np.array_equal(store.read(0, 0, 0, 200, 160), expected.read(0, 0, 0, 200, 160))


@pytest.mark.parametrize("suffix", ["", ".dcm"])
def test_one_series_is_its_folder_and_other_files_beside_it_are_listed(folder: Path, slide: Path, suffix: str) -> None:
    dicom_files.write_slide(folder / "d", "a", suffix=suffix)
    shutil.copy(slide, folder / "d" / "s.svs")
    found, notes = _listed(folder)
    assert found == {"d": folder / "d", "d/s": folder / "d" / "s.svs"}
    assert notes == []


def test_dicom_folder_as_the_argument(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dicom_files.write_slide(folder, "a")
    assert _listed(folder)[0] == {"slides": folder}
    assert main(["preprocess", str(folder), str(tmp_path / "out"), *FAST]) == 0
    assert _converted(tmp_path / "out") == {"slides.zarr"}
    monkeypatch.chdir(folder)
    assert list(_listed(".")[0]) == ["slides"]


def test_folder_with_two_slides_is_no_slide(folder: Path) -> None:
    dicom_files.write_slide(folder, "a", 1)
    dicom_files.write_slide(folder, "b", 2)
    with pytest.raises(SlideError, match="2 DICOM series, each a slide; name a file"):
        Slide.open(folder)
    with Slide.open(folder / "b_1.dcm") as reader:
        assert reader.info.shape == (200, 160)


def test_same_slide_in_two_encodings_is_told(folder: Path) -> None:
    series = dicom_files.write_slide(folder, "a", levels=1)
    pixels = np.zeros((200, 160, 3), np.uint8)
    dicom_files.write_instance(folder / "again.dcm", series, pixels, syntax=JPEG2000)
    with pytest.raises(SlideError, match=r"same slide as JPEG 2000.* and as JPEG Baseline"):
        Slide.open(folder)
    with pytest.raises(SlideError, match="same slide as"):
        Slide.open(folder / "a_0.dcm")
    dicom_files.write_instance(folder / "again.dcm", "1.2.3.4", pixels, syntax=JPEG2000)
    found, notes = _listed(folder)
    assert set(found) == {"a_0", "again"}
    assert "2 DICOM series" in notes[0]


def test_dicom_that_is_no_slide(folder: Path) -> None:
    dicom_files.write_other(folder / "ct.dcm")
    reason = "no slide but CT Image Storage"
    with pytest.raises(SlideError, match=reason):
        Slide.open(folder / "ct.dcm")
    with pytest.raises(SlideError, match="none is a slide; the first is CT Image Storage"):
        Slide.open(folder)
    dicom_files.write_slide(folder, "a")
    found, notes = _listed(folder)
    assert list(found) == ["slides"]
    assert notes == ["1 DICOM files that are no slides are left out: ct.dcm is CT Image Storage"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0UL\x04\0\xff\xff\xff\xff"])
def test_broken_dicom_is_reported_and_not_lost(folder: Path, content: bytes) -> None:
    (folder / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM" + content)
    dicom_files.write_slide(folder, "a")
    assert "broken" in _listed(folder)[0]
    with pytest.raises(SlideError, match=r"broken\.dcm"):
        Slide.open(folder / "broken.dcm")


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"BitsAllocated": 16, "BitsStored": 16, "HighBit": 15}, "a.dcm has 16 bits; expected 8"),
        ({"TotalPixelMatrixFocalPlanes": 3}, "a.dcm has 3 focal planes; expected 1"),
        ({"NumberOfOpticalPaths": 4}, "a.dcm has 4 optical paths; expected 1"),
        ({"ImageType": None}, "no file that says it is a level and how large"),
        ({"TotalPixelMatrixRows": None}, "no file that says it is a level and how large"),
        ({"TotalPixelMatrixRows": 10**6, "TotalPixelMatrixColumns": 10**6}, "declares 1000000 x 1000000 px"),
        ({"TotalPixelMatrixRows": 0, "TotalPixelMatrixColumns": 0}, "size is zero|holds nothing"),
        ({"Rows": 60000, "Columns": 60000}, "a tile of a.dcm would take 10300 MiB"),
        ({"NumberOfFrames": 99}, "cannot read rows|number of frames"),
    ],
)
def test_dicom_that_is_more_or_less_than_a_slide(folder: Path, tags: dict[str, object], reason: str) -> None:
    """Tiles for which there is no memory would end the process, and not only the reading."""
    dicom_files.write_instance(folder / "a.dcm", "1.2.3", np.zeros((200, 160, 3), np.uint8), **tags)
    for path in (folder, folder / "a.dcm"):
        with pytest.raises(SlideError, match=reason), Slide.open(path) as reader:
            reader.read(0, 0, 0, 200, 160)


def test_real_series_with_label_and_overview(real_slides: Path) -> None:
    series = real_slides / "CMU-1-Small-Region_dicom"
    assert _listed(series)[0] == {series.name: series}
    assert len(source_files(series)) == 3


# -- the output folder


def test_output_below_the_slides_is_never_input(folder: Path, slide: Path) -> None:
    shutil.copy(slide, folder / "s.tif")
    for _ in range(3):
        assert main(["preprocess", str(folder), str(folder / "out"), *FAST]) == 0
        assert _converted(folder / "out") == {"s.zarr"}
    assert [path.name for path in (folder / "out").glob("**/*.zarr")] == ["s.zarr"]


def test_output_that_is_the_folder_of_slides(folder: Path, slide: Path, tmp_path: Path) -> None:
    shutil.copy(slide, folder / "s.tif")
    convert(Job(slide, "other"), tmp_path, Settings(tissue="none"))
    (tmp_path / "other.zarr").rename(folder / "other.zarr")  # somebody's store that was there before
    (folder / "other.zarr" / "manifest.json").rename(tmp_path / "m")
    for _ in range(2):
        found, notes = _listed(folder, folder)
        assert "s" in found
        assert main(["preprocess", str(folder / "s.tif"), str(folder), *FAST]) == 0
    assert set(found) == {"s", "other"}
    assert notes == [f"{folder}: 1 stores that preprocess wrote to the output folder are left out"]


def test_store_in_the_output_folder_by_name_or_pattern(slide: Path, tmp_path: Path) -> None:
    convert(Job(slide, "s"), tmp_path, Settings(tissue="none"))
    with pytest.raises(UserError, match="is in the output folder"):
        _listed(tmp_path / "s.zarr", tmp_path)
    with pytest.raises(UserError, match="no slide there"):
        _listed(f"{tmp_path}/*.zarr", tmp_path)


# -- links, pipes and what is no slide


def test_cycles_of_links_end(folder: Path, slide: Path) -> None:
    shutil.copy(slide, folder / "s.tif")
    (folder / "up").symlink_to(folder.parent)
    (folder / "here").symlink_to(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to(folder)
    assert _listed(folder)[0] == {"s": folder / "s.tif"}


def test_a_pipe_named_like_a_slide_holds_up_no_run(
    folder: Path, slide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(slide, folder / "s.tif")
    os.mkfifo(folder / "a.svs")
    assert main(["preprocess", str(folder), str(tmp_path / "out"), *FAST]) == 0
    assert "a.svs: left out, it is a pipe" in capsys.readouterr().out
    assert main(["preprocess", str(folder / "a.svs"), str(tmp_path / "out"), *FAST]) == 1
    assert "is a named pipe and not a file" in " ".join(capsys.readouterr().out.split())
    (folder / "list.csv").write_text("slide\na.svs\ns.tif\n")
    assert main(["preprocess", str(folder / "list.csv"), str(tmp_path / "out"), *FAST]) == 1


def test_hidden_slides_and_archives_are_not_passed_over_in_silence(
    folder: Path, slide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s.tif", ".s.tif", "._s.svs"):
        shutil.copy(slide, folder / name)
    with zipfile.ZipFile(folder / "z.ozx", "w") as archive:
        archive.writestr("zarr.json", "{}")
    assert main(["preprocess", str(folder), str(tmp_path / "out"), *FAST]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 hidden files are left out, such as ._s.svs" in printed
    assert "a zip archive; unpack it" in printed


def test_pictures_are_slides_where_there_is_nothing_else(folder: Path, slide: Path) -> None:
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (64, 48)).save(folder / name)
    assert list(_listed(folder)[0]) == ["a", "b"]
    shutil.copy(slide, folder / "s.tif")
    found, notes = _listed(folder)
    assert list(found) == ["s"]
    assert "2 pictures beside the slides are left out" in notes[0]
    assert list(_listed(f"{folder}/*.png")[0]) == ["a"]


def test_dangling_link_is_reported(folder: Path) -> None:
    (folder / "s.svs").symlink_to(folder / "gone.svs")
    assert list(_listed(folder)[0]) == ["s"]
    with pytest.raises(SlideError, match="does not exist"):
        Slide.open(folder / "s.svs")


def test_folder_that_may_not_be_read(folder: Path, slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(slide, folder / "s.tif")
    (folder / "secret").mkdir()
    good = Path.iterdir

    def guarded(path: Path) -> object:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return good(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    with pytest.raises(UserError, match="secret cannot be searched for slides: Permission denied"):
        _listed(folder)


def test_label_alone_is_no_slide(folder: Path) -> None:
    dicom_files.write_instance(folder / "label.dcm", "1.2.3", np.zeros((64, 64, 3), np.uint8), kind="LABEL")
    with pytest.raises(SlideError, match="no level of the slide itself, only LABEL"):
        Slide.open(folder)
