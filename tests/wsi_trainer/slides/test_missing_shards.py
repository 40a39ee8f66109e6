"""A file that a store's manifest lists and that is absent is damage, not background (H6)."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.data.dataset import open_image
from wsi_trainer.errors import SlideError
from wsi_trainer.preprocess.verify import check_store, verify
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store import manifest
from wsi_trainer.store.convert import Job, convert
from wsi_trainer.store.settings import Settings
from wsi_trainer.synthetic import SlideSpec, write_slide


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    shutil.copytree(store, tmp_path / "slide.zarr")
    return tmp_path / "slide.zarr"


def _shards(store: Path, level: int = 0) -> list[str]:
    return [key for key in manifest.read_manifest(store)["files"] if key.startswith(f"{level}/c/")]


OPENED: dict[str, Callable[[Path], object]] = {
    "source": lambda path: Image(Slide.open(path)),
    "fit, predict, heatmap": open_image,
    "shrunk": lambda path: open_image(path, 2),
    "preprocess": Slide.open,
    "preprocess, whole": lambda path: convert(Job(path, "again"), path.parent / "out", Settings()),
}


@pytest.mark.parametrize("use", OPENED)
@pytest.mark.parametrize("level", [0, 1])
def test_hole_is_refused_by_name(copy: Path, use: str, level: int) -> None:
    OPENED[use](copy)
    hole = _shards(copy, level)[-1]
    (copy / hole).unlink()
    shutil.rmtree(copy.parent / "out", ignore_errors=True)
    with pytest.raises(SlideError, match=rf"slide\.zarr: damaged: {hole} is missing; copy the store again"):
        OPENED[use](copy)
    assert not (copy.parent / "out" / "again.zarr").exists()


def test_absent_shards_of_glass_are_none(store: Path) -> None:
    """The fixture has background that is not stored: opening it is not refused, and it is white."""
    with Slide.open(store) as opened:
        height, width = opened.shape
        corners = [(y, x) for y in range(0, height - 64, 64) for x in range(0, width - 64, 64)]
        empty = [(y, x) for y, x in corners if opened.empty(0, y, x, 64, 64)]
        assert empty and all((opened.read(0, y, x, 64, 64) == 255).all() for y, x in empty)


@pytest.mark.parametrize("name", ["0/zarr.json", "labels/tissue/0/zarr.json", "zarr.json", "manifest.json"])
def test_missing_metadata_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(SlideError, match=r"missing|neither"):
        Image(Slide.open(copy))


@pytest.mark.parametrize("use", OPENED)
@pytest.mark.parametrize("name", ["0/zarr.json", "1/zarr.json", "labels/tissue/0/zarr.json", "zarr.json"])
def test_changed_metadata_are_refused(copy: Path, use: str, name: str) -> None:
    """A smaller height, say, is nothing that the checksums of chunks tell."""
    (copy / name).write_text(re.sub(r"\d\d\d", "128", (copy / name).read_text(), count=1))
    with pytest.raises(SlideError, match=rf"slide\.zarr: damaged: {name}: .*; copy the store again"):
        OPENED[use](copy)


def test_labels_of_other_programs_may_be_added(copy: Path) -> None:
    shutil.copytree(copy / "labels" / "tissue", copy / "labels" / "nuclei")
    listed = json.loads((copy / "labels" / "zarr.json").read_text())
    listed["attributes"]["ome"]["labels"].append("nuclei")
    (copy / "labels" / "zarr.json").write_text(json.dumps(listed))
    Image(Slide.open(copy))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attributes": {"ome": {"multiscales": []}}}', "[" * 100_000])
def test_metadata_that_says_nothing(copy: Path, text: str) -> None:
    (copy / "zarr.json").write_text(text)
    with pytest.raises(SlideError, match="damaged"):
        Image(Slide.open(copy))


def test_shard_that_goes_while_a_store_is_open(copy: Path) -> None:
    source = Image(Slide.open(copy), threads=1)
    hole = _shards(copy)[0]
    (copy / hole).unlink()
    row, column = map(int, hole.split("/")[-2:])
    y, x = row * 256, column * 256
    with pytest.raises(SlideError, match=f"{hole} is missing"):
        source.read(Box((y, x), (y + 64, x + 64)))
    with pytest.raises(SlideError, match=f"{hole} is missing"):
        source.constant(Box((y, x), (y + 64, x + 64)))


def test_nothing_of_a_shard_is_read_to_find_holes(store: Path, monkeypatch) -> None:
    """One listing and the two files that describe the store."""
    opened: list[str] = []
    good = Path.open

    def counting(path: Path, *args: object, **kwargs: object) -> object:
        opened.append(path.name)
        return good(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counting)
    monkeypatch.setattr("os.open", lambda *args: pytest.fail("a shard is opened"))
    Slide.open(store)
    assert set(opened) <= {"zarr.json", "manifest.json"}


def test_foreign_stores_have_no_manifest(tmp_path: Path) -> None:
    import zarr

    root = zarr.open_group(tmp_path / "s.zarr", mode="w")
    root.create_array("0", data=np.zeros((3, 64, 64), "u1"), chunks=(3, 32, 32), fill_value=0)
    steps = [{"type": "scale", "scale": [1, 1, 1]}]
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    datasets = [{"path": "0", "coordinateTransformations": steps}]
    root.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    with Slide.open(tmp_path / "s.zarr") as reader:  # none of its chunks is stored, which is right
        assert (reader.read(0, 0, 0, 64, 64) == 0).all()


def test_fit_ends_before_its_first_step(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hole = _shards(copy)[0]
    (copy / hole).unlink()
    rows = [["slide", "label", "patient", "split"]]
    for number in range(6):
        slide = copy if number == 3 else copy.parent / f"{number}.tif"
        if number != 3:
            write_slide(slide, SlideSpec(200, 200, seed=number))
        rows.append([slide.name, str(number % 2), f"p{number}", ("train", "val", "test")[number // 2]])
    table = copy.parent / "manifest.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert main(["fit", "--data.manifest", str(table), "--out", str(copy.parent / "run"), "--train.epochs", "1"]) == 2
    said = capsys.readouterr().err
    assert f"slide.zarr: damaged: {hole} is missing" in said
    assert "Traceback" not in said


# -- the manifest itself


def _resealed(store: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((store / manifest.NAME).read_text())
    del content["sha256"]
    change(content["files"])
    (store / manifest.NAME).write_bytes(manifest._serialise(content))


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "/etc/passwd", "0/../../x", "..", "", "C:/x", "a\\..\\b", "0/c/../../../x"]
)
def test_manifest_stays_inside_its_store(copy: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    _resealed(copy, lambda files: files.update({key: {"size": 1, "sha256": "0" * 64}}))
    (damage,) = check_store(copy)
    assert "which is not inside the store" in damage.reason
    assert verify(copy) == 1
    assert "bytes" not in capsys.readouterr().out
    with pytest.raises(SlideError, match="not inside the store"):
        Image(Slide.open(copy))


@pytest.mark.parametrize("entry", [None, {}, {"size": "1", "sha256": ""}, {"size": 1}, [], 3])
def test_manifest_with_entries_that_say_nothing(copy: Path, entry: object) -> None:
    _resealed(copy, lambda files: files.update({"zarr.json": entry}))
    (damage,) = check_store(copy)
    assert "has no size and hash" in damage.reason


@pytest.mark.parametrize("name", ["../other.zarr", "/etc/x.zarr", "a/../../x.zarr"])
def test_the_table_of_the_folder_stays_inside_it(copy: Path, name: str) -> None:
    listed = f"slide,store\nslide,slide.zarr\n{name.removesuffix('.zarr')},{name}\n"
    (copy.parent / "stores.csv").write_text(listed)
    assert main(["verify", str(copy.parent)]) == 2


def test_names_of_damaged_files_are_no_markup(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = copy.parent / "[he][" / "x].zarr"
    odd.parent.mkdir()
    copy.rename(odd)
    (odd / _shards(odd)[0]).unlink()
    assert verify(odd) == 1
    assert "[he][/x].zarr" in capsys.readouterr().out.replace("\n", "")
