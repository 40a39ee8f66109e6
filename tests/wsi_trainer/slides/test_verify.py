"""Verification finds every flipped bit and every file that is gone, cut or new."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_plugin import Box
from wsi_trainer.cli import main
from wsi_trainer.errors import SlideError
from wsi_trainer.preprocess.verify import check_store, stores_of, verify
from wsi_trainer.slide.slide import Slide
from wsi_trainer.slide.views import Image
from wsi_trainer.store import manifest
from wsi_trainer.store.convert import Job, Settings, convert
from wsi_trainer.store.manifest import find_damage


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    shutil.copytree(store, tmp_path / "out" / "slide.zarr")
    return tmp_path / "out" / "slide.zarr"


def test_untouched_store_is_whole(copy: Path) -> None:
    assert list(find_damage(copy)) == []
    assert main(["verify", str(copy.parent)]) == 0
    assert main(["verify", str(copy)]) == 0


def test_random_damage_is_found_and_named(
    copy: Path, count: Callable[..., int], record_result: Callable[..., None]
) -> None:
    """Bits are flipped and files are deleted or cut, one at a time, weighted by file and by byte."""
    rng = np.random.default_rng(5)
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    sizes = np.array([p.stat().st_size for p in files], float)
    trials = count(ci=60, full=500)
    found = {"flip": 0, "delete": 0, "cut": 0}
    tried = dict.fromkeys(found, 0)
    for trial in range(trials):
        weights = sizes / sizes.sum() if trial % 2 else np.full(len(files), 1 / len(files))
        path = files[int(rng.choice(len(files), p=weights))]
        good = path.read_bytes()
        kind = ("flip", "delete", "cut")[int(rng.integers(3))]
        if kind == "delete":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(good[: int(rng.integers(len(good)))])
        else:
            bad = bytearray(good)
            bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
        tried[kind] += 1
        found[kind] += [d.file for d in find_damage(copy)] == [path.relative_to(copy).as_posix()]
        path.write_bytes(good)
    assert found == tried
    record_result("verify_damage", {"tried": tried, "found": found})


def test_new_files_are_named(copy: Path) -> None:
    (copy / "0" / "c" / "0" / "9").mkdir()
    (copy / "0" / "c" / "0" / "9" / "9").write_bytes(b"?")
    assert [(d.file, d.reason) for d in find_damage(copy)] == [("0/c/0/9/9", "not in the manifest")]


def test_whole_store_that_is_gone_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy.parent / "stores.csv").write_text("slide,store\nslide,slide.zarr\nother,other.zarr\n")
    assert main(["verify", str(copy.parent)]) == 1
    text = capsys.readouterr().out
    assert "other.zarr" in text
    assert "missing" in text
    assert "1 of 2 stores" in text
    assert check_store(copy.parent / "other.zarr")[0].reason.startswith("the store is missing")


def test_command_names_file_and_reason(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = copy / "1" / "c" / "0" / "0" / "1"
    shard.write_bytes(shard.read_bytes()[:-3])
    assert main(["verify", str(copy.parent), "--workers", "2"]) == 1
    text = capsys.readouterr().out
    assert "slide.zarr/1/c/0/0/1: truncated" in text


def test_folders_without_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "holds no store" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "none")]) == 2


def test_staging_is_not_a_store(copy: Path) -> None:
    shutil.copytree(copy, copy.parent / ".staging" / "half.zarr")
    assert stores_of(copy.parent) == [copy]


# -- a file that a store's manifest lists and that is absent is damage, not background (H6)


@pytest.fixture
def stored(store: Path, tmp_path: Path) -> Path:
    shutil.copytree(store, tmp_path / "slide.zarr")
    return tmp_path / "slide.zarr"


def _shards(store: Path, level: int = 0) -> list[str]:
    return [key for key in manifest.read_manifest(store)["files"] if key.startswith(f"{level}/c/")]


OPENED: dict[str, Callable[[Path], object]] = {
    "source": lambda path: Image(Slide.open(path)),
    "fit, predict, heatmap": lambda path: Image(Slide.open(path)),
    "shrunk": lambda path: Image(Slide.open(path), factor=2),
    "preprocess": Slide.open,
    "preprocess, whole": lambda path: convert(Job(path, "again"), path.parent / "out", Settings()),
}


@pytest.mark.parametrize("use", OPENED)
def test_files_of_another_store_are_refused_by_name(stored: Path, use: str) -> None:
    """A shard that took another's place, and a mask that has grown: each file is whole by itself."""
    first, *_, last = sorted(_shards(stored), key=lambda key: (stored / key).stat().st_size)
    mask = next(key for key in manifest.read_manifest(stored)["files"] if re.match(r"labels/tissue/\d+/c/", key))
    for key, reason, content in (
        (first, "grown", (stored / last).read_bytes()),
        (last, "truncated", (stored / first).read_bytes()),
        (mask, "grown", (stored / mask).read_bytes() + b"0"),
    ):
        before = (stored / key).read_bytes()
        (stored / key).write_bytes(content)
        with pytest.raises(SlideError, match=rf"slide\.zarr: damaged: {key}: {reason}.*; copy the store again"):
            OPENED[use](stored)
        (stored / key).write_bytes(before)
    OPENED[use](stored)


@pytest.mark.parametrize("use", OPENED)
@pytest.mark.parametrize("level", [0, 1])
def test_hole_is_refused_by_name(stored: Path, use: str, level: int) -> None:
    OPENED[use](stored)
    hole = _shards(stored, level)[-1]
    (stored / hole).unlink()
    shutil.rmtree(stored.parent / "out", ignore_errors=True)
    with pytest.raises(SlideError, match=rf"slide\.zarr: damaged: {hole} is missing; copy the store again"):
        OPENED[use](stored)
    assert not (stored.parent / "out" / "again.zarr").exists()


def test_absent_shards_of_glass_are_none(store: Path) -> None:
    """The fixture has background that is not stored: opening it is not refused, and it is white."""
    with Slide.open(store) as opened:
        height, width = opened.shape
        corners = [(y, x) for y in range(0, height - 64, 64) for x in range(0, width - 64, 64)]
        empty = [(y, x) for y, x in corners if opened.empty(0, y, x, 64, 64)]
        assert empty and all((opened.read(0, y, x, 64, 64) == 255).all() for y, x in empty)


@pytest.mark.parametrize("use", OPENED)
@pytest.mark.parametrize("name", ["0/zarr.json", "1/zarr.json", "labels/tissue/0/zarr.json", "zarr.json"])
def test_changed_metadata_are_refused(stored: Path, use: str, name: str) -> None:
    """A smaller height, say, is nothing that the checksums of chunks tell."""
    (stored / name).write_text(re.sub(r"\d\d\d", "128", (stored / name).read_text(), count=1))
    with pytest.raises(SlideError, match=rf"slide\.zarr: damaged: {name}: .*; copy the store again"):
        OPENED[use](stored)


def test_labels_of_other_programs_may_be_added(stored: Path) -> None:
    shutil.copytree(stored / "labels" / "tissue", stored / "labels" / "nuclei")
    listed = json.loads((stored / "labels" / "zarr.json").read_text())
    listed["attributes"]["ome"]["labels"].append("nuclei")
    (stored / "labels" / "zarr.json").write_text(json.dumps(listed))
    Image(Slide.open(stored))


def test_shard_that_goes_while_a_store_is_open(stored: Path) -> None:
    source = Image(Slide.open(stored), threads=1)
    hole = _shards(stored)[0]
    (stored / hole).unlink()
    row, column = map(int, hole.split("/")[-2:])
    y, x = row * 256, column * 256
    with pytest.raises(SlideError, match=f"{hole} is missing"):
        source.read(Box((y, x), (y + 64, x + 64)))
    with pytest.raises(SlideError, match=f"{hole} is missing"):
        source.constant(Box((y, x), (y + 64, x + 64)))


# -- the manifest itself


def _resealed(store: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((store / manifest.NAME).read_text())
    del content["sha256"]
    change(content["files"])
    (store / manifest.NAME).write_bytes(manifest._serialise(content))


@pytest.mark.parametrize(
    "key", ["../../etc/passwd", "/etc/passwd", "0/../../x", "..", "", "C:/x", "a\\..\\b", "0/c/../../../x"]
)
def test_manifest_stays_inside_its_store(stored: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    _resealed(stored, lambda files: files.update({key: {"size": 1, "sha256": "0" * 64}}))
    (damage,) = check_store(stored)
    assert "which is not inside the store" in damage.reason
    assert verify(stored) == 1
    assert "bytes" not in capsys.readouterr().out
    with pytest.raises(SlideError, match="not inside the store"):
        Image(Slide.open(stored))


@pytest.mark.parametrize("name", ["../other.zarr", "/etc/x.zarr", "a/../../x.zarr"])
def test_the_table_of_the_folder_stays_inside_it(stored: Path, name: str) -> None:
    listed = f"slide,store\nslide,slide.zarr\n{name.removesuffix('.zarr')},{name}\n"
    (stored.parent / "stores.csv").write_text(listed)
    assert main(["verify", str(stored.parent)]) == 2


def test_every_bit_of_the_manifest_counts(copy: Path) -> None:
    path = copy / "manifest.json"
    good = path.read_bytes()
    rng = np.random.default_rng(6)
    for at in rng.integers(0, len(good) * 8, 400):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << (at % 8)
        path.write_bytes(bad)
        assert [damage.file for damage in find_damage(copy)] == ["manifest.json"]
