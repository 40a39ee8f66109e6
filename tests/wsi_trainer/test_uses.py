"""The application as its users use it: every format, every kind of input, every command, each twice.

Descriptors and threads are counted before and after, results of the second time compared with those of the first, and
the files of the run with themselves: no later command may change what an earlier one has written.
"""

from __future__ import annotations

import csv
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.wsi_trainer.slides.dicom_files import write_instance
from wsi_trainer.cli import main
from wsi_trainer.fit.run import Run
from wsi_trainer.metrics import read_predictions
from wsi_trainer.synthetic import SlideSpec, write_slide

SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test")
SIDES = ((190, 230), (200, 210), (180, 240), (210, 200))
MPP = 0.5


def pixels(folder: Path, number: int) -> np.ndarray:
    """A slide of tissue and background, of its own size."""
    height, width = SIDES[number % len(SIDES)]
    path = folder / f"pixels{number}.tif"
    write_slide(path, SlideSpec(height, width, seed=2, slide=number, patient=number, positive=bool(number % 2)))
    found = tifffile.imread(path)
    path.unlink()
    return np.asarray(found)


def write_tiff(folder: Path, name: str, data: np.ndarray) -> Path:
    path = folder / f"{name}.tif"
    resolution = (1e4 / MPP, 1e4 / MPP)
    tifffile.imwrite(path, data, photometric="rgb", tile=(64, 64), resolution=resolution, resolutionunit=3)
    return path


def write_svs(folder: Path, name: str, data: np.ndarray) -> Path:
    path = folder / f"{name}.svs"
    text = f"Aperio Image Library v1\r\n{data.shape[1]}x{data.shape[0]}|AppMag = 20|MPP = {MPP}"
    tifffile.imwrite(path, data, photometric="rgb", tile=(64, 64), compression="jpeg", description=text, metadata=None)
    return path


def write_png(folder: Path, name: str, data: np.ndarray) -> Path:
    Image.fromarray(data).save(folder / f"{name}.png")
    return folder / f"{name}.png"


def write_dicom(folder: Path, name: str, data: np.ndarray) -> Path:
    (folder / name).mkdir()
    write_instance(folder / name / "level0.dcm", f"1.2.826.0.1.{int(name[1:]) + 1}", data, mpp=MPP)
    return folder / name


WRITERS: dict[str, Callable[[Path, str, np.ndarray], Path]] = {
    "store": write_tiff, "tiff": write_tiff, "svs": write_svs, "png": write_png, "dicom": write_dicom,
}  # fmt: skip
INPUTS: dict[str, list[str]] = {
    "image": ["--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[4,8]", "--model.backbone.convs=1"],
    "shrunk": ["--model.backbone=wsi_trainer.models.VGG", "--model.backbone.widths=[4,8]", "--data.downsample=2"],
    "bag": [
        "--model.backbone=wsi_trainer.models.PatchEncoder", "--model.backbone.size=32",
        "--model.backbone.network=wsi_trainer.models.ResNet", "--model.head=wsi_trainer.models.AttentionPooling",
        "--data.patches.size=32", f"--data.patches.mpp={MPP}", "--data.patches.stride=32",
    ],
}  # fmt: skip
#: What is tried in each run of the tests; all of the table with --full. Of stores there is a cohort's life below.
SAMPLE = (("dicom", "bag"),)
CASES = [
    pytest.param(form, kind, id=f"{form}-{kind}", marks=() if (form, kind) in SAMPLE else pytest.mark.full)
    for form in WRITERS
    for kind in INPUTS
]


def write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["slide", "label", "patient", "split", "mpp"])
        table.writeheader()
        table.writerows(rows)
    return path


@dataclass(frozen=True)
class Cohort:
    """Slides and their table.

    Attributes:
        folder: where the slides are.
        table: the user's table, of which one slide in six is written later.
        stores: words that name the folder of stores, if slides were converted.
    """

    folder: Path
    table: Path
    stores: list[str]


def cohort(folder: Path, form: str, first: int = 0, count: int = len(SPLITS), split: bool = True) -> Cohort:
    """Slides of a format, numbered from `first`."""
    folder.mkdir()
    rows = []
    for number in range(first, first + count):
        path = WRITERS[form](folder, f"s{number:02}", pixels(folder, number))
        its = SPLITS[number % len(SPLITS)] if split else ""
        rows.append({"slide": path.name, "label": str(number % 2), "patient": f"p{number}", "split": its,
                     "mpp": str(MPP) if form == "png" else ""})  # fmt: skip
    table = write_table(folder / "slides.csv", rows)
    if form != "store":
        return Cohort(folder, table, [])
    assert main(["preprocess", str(table), str(folder / "out"), "--workers=1"]) == 0
    return Cohort(folder, table, [f"--data.stores={folder / 'out'}"])


def descriptors(folder: Path) -> list[str]:
    """The open files below a folder."""
    numbers = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [str(link.readlink()) for link in numbers if link.is_symlink() and folder in link.readlink().parents]


def threads() -> list[str]:
    """The threads that run, but for those that zarr keeps for its readers."""
    return [one.name for one in threading.enumerate() if not one.name.startswith(("zarr", "asyncio"))]


def hashes(folder: Path) -> dict[str, str]:
    """The files of a run by their contents, without logs that every command adds to."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("log.txt", "status.json", ".lock") and "tensorboard" not in path.parts
    }


def scores(run: Run, split: str = "test") -> dict[str, list[float]]:
    found = read_predictions(run.predictions_file(split))
    return dict(zip(found.slides, np.round(np.asarray(found.probabilities), 6).tolist(), strict=True))


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_every_command_twice(form: str, kind: str, tmp_path: Path) -> None:
    slides = cohort(tmp_path / "slides", form)
    run, folder = Run(tmp_path / "run"), str(tmp_path / "run")
    words = [f"--out={folder}", f"--data.manifest={slides.table}", *slides.stores, *INPUTS[kind],
             "--train.accelerator=cpu", "--train.budget=null", "--train.resamples=50"]  # fmt: skip
    assert main(["fit", *words, "--train.epochs=1"]) == 0
    before = threads()
    assert main(["fit", *words, "--train.epochs=2", "--resume=last"]) == 0
    first, trained = scores(run), hashes(run.path)
    assert len(first) == SPLITS.count("test")
    one = str(slides.folder / next(csv.DictReader(slides.table.open()))["slide"])
    for again in ([], ["--overwrite"]):
        assert main(["test", folder, "--overwrite"]) == 0
        assert main(["validate", folder, *again]) == 0
        assert main(["predict", folder, one, "--name=one", *again]) == 0
        assert main(["heatmap", folder, *again]) == 0
        assert main(["report", folder]) == 0
        assert main(["view", folder, f"--static={tmp_path / f'page{len(again)}'}"]) == 0
    assert scores(run) == first
    assert {name: one for name, one in hashes(run.path).items() if name in trained and "evaluation" not in name} == {
        name: one for name, one in trained.items() if "evaluation" not in name
    }
    maps = [path.stem for path in run.maps("activation").glob("*.png") if "-top-" not in path.stem]
    assert len(maps) == SPLITS.count("test") and not any("%" in name for name in maps)
    assert main(["validate", folder]) == 2  # it was written before, and is not replaced unasked
    assert not descriptors(tmp_path), "files were left open"
    assert len(threads()) <= len(before) + 1, threads()


@pytest.mark.slow
def test_a_cohort_over_its_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slides are added, a label is corrected, another hospital's slides come: what was held out stays held out."""
    slides = cohort(tmp_path / "slides", "store", split=False, count=14)
    run, folder = Run(tmp_path / "run"), str(tmp_path / "run")
    words = [f"--out={folder}", f"--data.manifest={slides.table}", *slides.stores, *INPUTS["image"],
             "--train.accelerator=cpu", "--train.budget=null", "--train.resamples=50"]  # fmt: skip
    assert main(["fit", *words, "--train.epochs=1"]) == 0
    held_out, kept = set(scores(run)), run.splits.read_bytes()
    with slides.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    more = cohort(tmp_path / "more", "tiff", first=14, count=4, split=False)
    for path in more.folder.glob("*.tif"):
        path.rename(slides.folder / path.name)
    with more.table.open(newline="") as file:
        rows += list(csv.DictReader(file))
    rows[0]["label"] = "1" if rows[0]["label"] == "0" else "0"
    write_table(slides.table, rows)
    assert main(["preprocess", str(slides.table), str(slides.folder / "out"), "--workers=1"]) == 0
    capsys.readouterr()
    assert main(["test", folder, "--overwrite"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 slides new in the manifest" in said and "1 slide with another label" in said
    assert main(["fit", *words, "--train.epochs=2", "--resume=last"]) == 0
    assert set(scores(run)) == held_out and run.splits.read_bytes() == kept

    trained = hashes(run.path)
    external = cohort(tmp_path / "external", "tiff", first=30, count=5, split=False)
    test = ["test", folder, f"--cohort={external.table}", "--name=external-1", "--overwrite"]
    capsys.readouterr()
    assert main(test) == 2  # the run was trained on stores, and these slides have none
    assert "data.stores" in capsys.readouterr().err
    for _ in range(2):
        assert main([*test, "--data.stores=null"]) == 0
    other = Run.open(run.path, cohort="external-1")
    assert set(scores(other)) == {f"s{number}.tif" for number in range(30, 35)}
    assert main(["predict", folder, str(external.table), "--name=test", "--data.stores=null"]) == 0
    assert {name: one for name, one in hashes(run.path).items() if name in trained} == trained
    for command in (["heatmap", folder, "--name=external-1"], ["report", folder], ["view", folder, "--static=page"]):
        words = [word.replace("page", str(tmp_path / "page")) for word in command]
        assert main(words) == 0, words
    assert any("external-1" in str(path) for path in (run.path / "cohorts").rglob("*.png"))
    assert set(scores(run)) == held_out
