"""Verification finds every flipped bit and every file that is gone, cut or new."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wsi_trainer.cli import main
from wsi_trainer.preprocess.verify import check_store, stores_of
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


def test_every_bit_of_the_manifest_counts(copy: Path) -> None:
    path = copy / "manifest.json"
    good = path.read_bytes()
    rng = np.random.default_rng(6)
    for at in rng.integers(0, len(good) * 8, 400):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << (at % 8)
        path.write_bytes(bad)
        assert [damage.file for damage in find_damage(copy)] == ["manifest.json"]


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


def test_links_in_a_circle_are_followed_once(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(store, out / "sub" / "s.zarr")
    (out / "sub" / "up").symlink_to(out)
    assert stores_of(out) == [out / "sub" / "s.zarr"]
    assert main(["verify", str(out)]) == 0
